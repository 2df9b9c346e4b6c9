//! Arm's stage-2 walk, from the manual (DDI 0487). Levels are Arm's (3 is the level of pages), and
//! bits are numbers.

use super::{Config, Hardware, Root, TestPlatform};
use slat::format::AttributeError;
use slat::format::arm64::{Arm64, Shareability};
use slat::{Attributes, Execute, Format, Memory, Tables};

/// The configuration by VTCR_EL2 and VTTBR_EL2, with a granule of `2^G` bytes. `WIDE` is for 52
/// bits: VTCR_EL2.DS (FEAT_LPA2), or with 64K a VTCR_EL2.PS of 52 bits (FEAT_LPA).
#[derive(Clone, Copy, Debug)]
pub struct Arm<const G: u32, const WIDE: bool = false> {
    /// 64 - T0SZ.
    pub address_bits: u32,
    /// From SL0.
    pub start_level: u32,
    /// BADDR.
    pub root: u64,
    /// HCR_EL2.FWB.
    pub forced_write_back: bool,
    /// VTCR_EL2.HD, and FEAT_XNX.
    pub hardware_dirty: bool,
    pub split_execute: bool,
    /// VTCR_EL2.SH0, for leaves with DS.
    pub sh0: u64,
}

/// A leaf's fields under their names in D8.3.1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Leaf {
    pub oa: u64,
    pub mem_attr: u64,
    pub s2ap: u64,
    /// 0 where the leaf has no such field, as with DS.
    pub sh: u64,
    pub af: bool,
    pub dbm: bool,
    pub contiguous: bool,
    pub xn: u64,
    /// Bits 58:55.
    pub software: u64,
    /// Bits 62:59, which hardware ignores where VTCR_EL2.HWU59 to HWU62 are 0.
    pub ignored: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Descriptor {
    Invalid,
    Table(u64),
    Leaf(Leaf),
}

/// The ignored bits that the engine does not use.
pub const USERS: [u32; 6] = [55, 56, 59, 60, 61, 62];

fn bits(raw: u64, high: u32, low: u32) -> u64 {
    raw >> low & ((1 << (high - low + 1)) - 1)
}

impl<const G: u32, const WIDE: bool> Arm<G, WIDE> {
    const DS: bool = WIDE && G < 16;
    const LPA: bool = WIDE && G == 16;

    /// Returns the bits that an entry of `level` covers.
    pub fn level_shift(level: u32) -> u32 {
        G + (G - 3) * (3 - level)
    }

    /// Returns the entries of the concatenated root. `AArch64.S2InconsistentSL` of the manual's
    /// pseudocode: the root resolves at least one bit, and at most one stride and four bits of
    /// concatenation. `AArch64.S2MinTxSZ`: T0SZ is at least 16, with DS or FEAT_LPA 12.
    pub fn root_entries(&self) -> usize {
        assert!(self.address_bits <= Self::OUTPUT, "T0SZ is too small: always faults");
        let (stride, below) = (G - 3, Self::level_shift(self.start_level));
        assert!(self.address_bits > below, "T0SZ leaves nothing to the start level: always faults");
        assert!(self.address_bits - below <= stride + 4, "more than 16 concatenated tables");
        1 << (self.address_bits - below)
    }

    /// D8.3.1. Reserved bits must be zero; the engine sets no nT, and no ignored bits except 62:55,
    /// which it uses. With DS, bits 49 and 48 are address bits, and bits 9:8 are address bits
    /// 51:50, in tables and leaves; with FEAT_LPA bits 15:12 are address bits 51:48.
    pub fn fields(raw: u64, level: u32) -> Descriptor {
        if raw & 1 == 0 {
            return Descriptor::Invalid;
        }
        let shift = if raw & 2 == 0 { Self::level_shift(level) } else { G };
        if raw & 2 != 0 && level < 3 {
            if Self::DS {
                assert_eq!(bits(raw, 63, 50), 0, "upper bits of the table descriptor {raw:#x}");
                assert_eq!(bits(raw, G - 1, 10), 0, "lower bits of the table {raw:#x}");
                assert_eq!(bits(raw, 7, 2), 0, "ignored bits of the table {raw:#x}");
                return Descriptor::Table(bits(raw, 49, G) << G | bits(raw, 9, 8) << 50);
            }
            assert_eq!(bits(raw, 63, 48), 0, "upper bits of the table descriptor {raw:#x}");
            if Self::LPA {
                assert_eq!(bits(raw, 11, 2), 0, "lower bits of the table {raw:#x}");
                return Descriptor::Table(bits(raw, 47, 16) << 16 | bits(raw, 15, 12) << 48);
            }
            assert_eq!(bits(raw, G - 1, 2), 0, "lower bits of the table {raw:#x}");
            return Descriptor::Table(raw & !3);
        }
        assert!(raw & 2 != 0 || level < 3, "0b01 is reserved at level 3: {raw:#x}");
        // With DS, 512 GiB and 64 GiB. (With FEAT_LPA 4 TiB, which the engine does not use.)
        let largest = if G == 12 { 1 } else { 2 } - u32::from(Self::DS);
        assert!(level >= largest, "no block at level {level} of this granule: {raw:#x}");
        assert_eq!(bits(raw, 11, 11), 0, "FnXS of {raw:#x}");
        let high = if Self::LPA { 0xf000 } else { 0 };
        let below = raw & ((1 << shift) - 1) & !high;
        assert_eq!(below >> 12, 0, "RES0, nT or an unaligned address in {raw:#x}");
        let top = if Self::DS { 49 } else { 47 };
        assert_eq!(bits(raw, 50, top + 1), 0, "RES0 of {raw:#x}");
        assert_eq!(bits(raw, 63, 63), 0, "bit 63 of {raw:#x}, which FEAT_MEC reads");
        Descriptor::Leaf(Leaf {
            oa: bits(raw, top, shift) << shift
                | if Self::DS { bits(raw, 9, 8) << 50 } else { 0 }
                | if Self::LPA { bits(raw, 15, 12) << 48 } else { 0 },
            mem_attr: bits(raw, 5, 2),
            s2ap: bits(raw, 7, 6),
            sh: if Self::DS { 0 } else { bits(raw, 9, 8) },
            af: bits(raw, 10, 10) == 1,
            dbm: bits(raw, 51, 51) == 1,
            contiguous: bits(raw, 52, 52) == 1,
            xn: bits(raw, 54, 53),
            software: bits(raw, 58, 55),
            ignored: bits(raw, 62, 59),
        })
    }

    /// The same as every format's leaf.
    pub fn leaf(&self, leaf: &Leaf) -> super::Leaf {
        super::Leaf {
            oa: leaf.oa,
            memory: leaf.mem_attr | if Self::DS { self.sh0 } else { leaf.sh } << 4,
            own: self.attributes(leaf),
            marks: leaf.dbm,
            reached: true,
        }
    }

    /// Returns the leaf in the engine's terms, by D8.6.5 (D8.6.6 with FWB), and D8.4 for rights.
    pub fn attributes(&self, leaf: &Leaf) -> Attributes {
        let memory = match (leaf.mem_attr, self.forced_write_back) {
            (0b1111, false) | (0b0110, true) => Memory::Normal,
            (0b0101, _) => Memory::NonCacheable,
            (0b0001, _) => Memory::Device,
            (0b0000, _) => Memory::DeviceStrict,
            (other, fwb) => panic!("MemAttr {other:#b} with FWB={fwb}"),
        };
        assert!(self.hardware_dirty || !leaf.dbm, "DBM without HD would not be writable");
        assert!(leaf.software & 0b0100 == 0 || !leaf.dbm && leaf.s2ap < 2, "written, twice over");
        Attributes {
            read: leaf.s2ap & 0b01 != 0,
            write: leaf.s2ap & 0b10 != 0 || leaf.dbm,
            execute: [Execute::All, Execute::User, Execute::None, Execute::Kernel]
                [leaf.xn as usize],
            memory,
            accessed: leaf.af,
            dirty: leaf.s2ap & 0b10 != 0 || leaf.software & 0b0100 != 0,
            software: super::software(leaf.software << 55 | leaf.ignored << 59, &USERS),
        }
    }
}

impl<const G: u32, const WIDE: bool> Hardware for Arm<G, WIDE> {
    type Format = Arm64<G, WIDE>;
    const PAGE: u32 = G;
    const STRIDE: u32 = G - 3;
    const OUTPUT: u32 = if WIDE { 52 } else { 48 };
    const PARTED: u32 = if Self::LPA {
        48
    } else if Self::DS {
        50
    } else {
        0
    };
    /// Of the sizes with DS, the engine leaves out 512 GiB.
    const SIZES: u32 = if G == 12 || Self::DS { 3 } else { 2 };
    /// Without FEAT_HAFT, and stage 2 has no hierarchical permissions.
    const TABLES_COUNT: bool = false;
    const MARK: u64 = 1 << 58;
    const SOFTWARE_BITS: u8 = 6;
    /// D8.16.1.
    const REFILL_BREAKS: bool = true;

    fn of(tables: &Tables<'_, Arm64<G, WIDE>, TestPlatform>) -> Self {
        assert_eq!(Arm64::<G, WIDE>::PAGE_SHIFT, G);
        let (geometry, format) = (tables.geometry(), tables.format());
        let regime = Self {
            address_bits: geometry.address_bits,
            start_level: 3 - u32::from(geometry.root_level),
            root: tables.root().0,
            forced_write_back: format.forced_write_back,
            hardware_dirty: format.hardware_dirty,
            split_execute: format.split_execute,
            sh0: format.shareability as u64,
        };
        assert_eq!(regime.root_entries(), geometry.root_entries, "what software says of the root");
        assert_eq!(regime.root % (8 * regime.root_entries() as u64).max(64), 0, "VTTBR_EL2.BADDR");
        regime
    }

    fn format(config: &Config) -> Arm64<G, WIDE> {
        Arm64 {
            forced_write_back: config.forced_write_back,
            hardware_dirty: config.hardware_marks,
            split_execute: config.split_execute,
            shareability: Shareability::Inner,
            output_bits: Self::OUTPUT,
        }
    }

    fn usual() -> Arm64<G, WIDE> {
        Arm64 { hardware_dirty: true, ..Default::default() }
    }

    fn address_bits(&self) -> u32 {
        self.address_bits
    }

    fn root(&self) -> Root {
        let height = 3 - self.start_level;
        Root { table: self.root, ptes: self.root_entries(), height }
    }

    fn decode(&self, raw: u64, height: u32) -> super::Descriptor {
        match Self::fields(raw, 3 - height) {
            Descriptor::Invalid => super::Descriptor::Invalid,
            Descriptor::Table(table) => super::Descriptor::Table { table, accessed: true },
            Descriptor::Leaf(leaf) => {
                assert!(!leaf.contiguous, "Contiguous of {raw:#x}, for which nobody asked");
                super::Descriptor::Leaf(self.leaf(&leaf))
            }
        }
    }

    fn marked(raw: u64, _height: u32) -> bool {
        raw & Self::MARK != 0
    }

    /// With VTCR_EL2.HA and HD set (D8.5): AF is set; a write through a leaf with DBM sets S2AP[1].
    fn used(&self, raw: u64, write: bool) -> u64 {
        raw | 1 << 10 | if write { 1 << 7 } else { 0 }
    }

    fn passed(&self, raw: u64) -> u64 {
        raw
    }

    fn records_accessed(&self) -> bool {
        true
    }

    fn refuses(&self, a: Attributes) -> Vec<AttributeError> {
        let split = matches!(a.execute, Execute::User | Execute::Kernel);
        let all = [
            (a.write && !a.dirty && !self.hardware_dirty, AttributeError::CleanNeedsHardwareDirty),
            (split && !self.split_execute, AttributeError::ExecuteNeedsSplitRights),
        ];
        let all = all.into_iter().filter_map(|(refused, reason)| refused.then_some(reason));
        all.chain(Self::lacks(a.software)).collect()
    }
}
