//! Arm's stage 2, VMSAv8-64, from the Architecture Reference Manual (DDI 0487): D8.2 for the walk,
//! D8.3 for descriptors, D8.4 for rights, D8.5 for hardware updates, D8.16 for TLBs and
//! break-before-make. Levels are Arm's: level 3 is that of pages.

use super::{Arch, Descriptor, Fault, Leaf, Rights, Sizes};
use slat::BreakBeforeMake;

/// An Arm CPU, with its VTCR_EL2 and HCR_EL2.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Arm {
    /// Base-2 logarithm of the granule: 12, 14 or 16.
    pub granule: u32,
    /// 64 - T0SZ.
    pub address_bits: u32,
    /// From SL0.
    pub start_level: i8,
    /// VTCR_EL2.HA: hardware sets the access flag.
    pub hardware_accessed: bool,
    /// VTCR_EL2.HD: hardware marks writes to leaves with DBM.
    pub hardware_dirty: bool,
    /// VTCR_EL2.DS (FEAT_LPA2), for the granules 4K and 16K: 52-bit addresses, and blocks of 512g
    /// or 64g.
    pub lpa2: bool,
    /// FEAT_LPA, for the granule 64K: 52-bit addresses, and blocks of 4t.
    pub lpa: bool,
    /// HCR_EL2.FWB (FEAT_S2FWB).
    pub forced_write_back: bool,
    /// CTR_EL0.DIC: the instruction cache is coherent.
    pub coherent_instructions: bool,
    /// FEAT_TTL: the operand of an invalidation may name a level.
    pub ttl: bool,
    /// FEAT_TLBIRANGE: an invalidation may cover a range.
    pub range_instructions: bool,
    /// ID_AA64MMFR2_EL1.BBM: 0, 1 or 2; 3 is level 2 without conflict aborts.
    pub bbm: u8,
    /// An erratum: a DSB after a TLBI does not wait for other CPUs' stores.
    pub late_stores: bool,
    /// The platform repeats a TLBI and its DSB.
    pub repeats_tlbi: bool,
}

impl Arm {
    /// Creates a CPU that marks accessed and dirty in hardware, and has FEAT_TTL and FEAT_BBM level
    /// 0, but none of the other features.
    ///
    /// A walk starts at the level nearest to the pages from which 16 concatenated tables cover all
    /// addresses.
    pub const fn new(granule: u32, address_bits: u32) -> Self {
        let stride = granule - 3;
        let mut start_level = 2;
        while granule + stride * (3 - start_level) + stride + 4 < address_bits {
            start_level -= 1;
        }
        Self {
            granule,
            address_bits,
            start_level: start_level as i8,
            hardware_accessed: true,
            hardware_dirty: true,
            lpa2: false,
            lpa: false,
            forced_write_back: false,
            coherent_instructions: false,
            ttl: true,
            range_instructions: false,
            bbm: 0,
            late_stores: false,
            repeats_tlbi: false,
        }
    }

    /// Returns the same CPU with FEAT_LPA2 in use.
    pub const fn with_lpa2(self) -> Self {
        Self { lpa2: true, ..self }
    }

    /// Returns the same CPU with FEAT_LPA in use.
    pub const fn with_lpa(self) -> Self {
        Self { lpa: true, ..self }
    }

    /// Returns the first bit above the lower part of an address.
    const fn address_top(&self) -> u32 {
        if self.lpa2 { 50 } else { 48 }
    }

    /// Returns the level of the largest blocks.
    pub(crate) const fn largest_block(&self) -> i8 {
        match (self.granule, self.lpa2 || self.lpa) {
            (12, true) => 0,
            (12, false) | (14 | 16, true) => 1,
            _ => 2,
        }
    }

    /// Returns the output address: `OA[47:shift]`; with DS `OA[49:shift]`, and `OA[51:50]` in bits
    /// 9:8; with FEAT_LPA `OA[51:48]` in bits 15:12.
    const fn output(&self, raw: u64, shift: u32) -> u64 {
        let low = bits(raw, self.address_top() - 1, shift) << shift;
        let high = if self.lpa { bits(raw, 15, 12) << 48 } else { 0 };
        low | high | if self.lpa2 { bits(raw, 9, 8) << 50 } else { 0 }
    }

    /// Returns the bits from 12 up to `below`, which are 0 in an aligned address.
    const fn unaligned(&self, raw: u64, below: u32) -> u64 {
        let high = if self.lpa { 0b1111 << 12 } else { 0 };
        bits(raw & !high, below - 1, 0) >> 12
    }

    /// Returns the TG field of range invalidations and of TTL.
    pub(crate) const fn tg(&self) -> u64 {
        match self.granule {
            12 => 0b01,
            14 => 0b10,
            _ => 0b11,
        }
    }
}

const fn bits(raw: u64, high: u32, low: u32) -> u64 {
    raw >> low & ((1 << (high - low + 1)) - 1)
}

impl Arch for Arm {
    fn address_bits(&self) -> u32 {
        self.address_bits
    }

    fn root_level(&self) -> i8 {
        self.start_level
    }

    fn below(&self, level: i8) -> i8 {
        level + 1
    }

    fn shift(&self, level: i8) -> u32 {
        self.granule + (self.granule - 3) * (3 - level) as u32
    }

    fn entries(&self, level: i8) -> usize {
        if level == self.start_level {
            1 << (self.address_bits - self.shift(level))
        } else {
            1 << (self.granule - 3)
        }
    }

    /// D8.3.1, without D128. A RES0 bit that is set counts as reserved.
    fn decode(&self, raw: u64, level: i8) -> Descriptor {
        if bits(raw, 0, 0) == 0 {
            return Descriptor::Invalid;
        }
        if bits(raw, 1, 1) == 1 && level < 3 {
            if bits(raw, 50, self.address_top()) != 0 {
                return Descriptor::Reserved("RES0 above the address of a table");
            }
            if bits(raw, 63, 59) != 0 {
                return Descriptor::Reserved("RES0 in the upper attributes of a stage-2 table");
            }
            if self.unaligned(raw, self.granule) != 0 {
                return Descriptor::Reserved("RES0 below the address of a table");
            }
            let table = self.output(raw, self.granule);
            return Descriptor::Table { table, rights: Rights::ALL };
        }
        if bits(raw, 1, 1) == 0 && (level == 3 || level < self.largest_block()) {
            return Descriptor::Reserved("no block at this level");
        }
        let shift = self.shift(level);
        // Bit 16 of a block is nT.
        if self.unaligned(raw & !(u64::from(level < 3) << 16), shift) != 0 {
            return Descriptor::Reserved("RES0 below the address of a leaf");
        }
        if bits(raw, 50, self.address_top()) != 0 || bits(raw, 11, 11) != 0 {
            return Descriptor::Reserved("RES0 in a leaf");
        }
        let (s2ap, dbm) = (bits(raw, 7, 6), bits(raw, 51, 51) == 1);
        let writable = s2ap & 0b10 != 0;
        Descriptor::Leaf(Leaf {
            hpa: self.output(raw, shift),
            rights: Rights {
                read: s2ap & 0b01 != 0,
                write: writable || dbm && self.hardware_dirty,
                // XN[1:0] of 0b00 and 0b11 let EL1 execute.
                execute: matches!(bits(raw, 54, 53), 0b00 | 0b11),
            },
            memory: bits(raw, 5, 2) as u8,
            // With DS, VTCR_EL2.SH0 applies to every leaf.
            shareability: if self.lpa2 { 0 } else { bits(raw, 9, 8) as u8 },
            accessed: bits(raw, 10, 10) == 1,
            dirty: writable,
        })
    }

    /// D8.7, "The Contiguous bit": for pages, and for the blocks of the next levels up.
    fn group(&self, shift: u32) -> u32 {
        let above = (shift - self.granule) / (self.granule - 3);
        match (self.granule, above) {
            (12, 0 | 1) => 4,
            (14, 0) => 7,
            (14, 1) | (16, 0 | 1) => 5,
            _ => 0,
        }
    }

    fn grouped(&self, raw: u64) -> bool {
        bits(raw, 52, 52) == 1
    }

    /// D8.5: links to tables are not marked (FEAT_HAFT is off).
    fn mark(&self, raw: u64, level: i8, write: bool) -> Result<u64, Fault> {
        let Descriptor::Leaf(leaf) = self.decode(raw, level) else { return Ok(raw) };
        if !leaf.accessed && !self.hardware_accessed {
            return Err(Fault::Accessed);
        }
        Ok(raw | 1 << 10 | if write { 1 << 7 } else { 0 })
    }

    fn late(&self) -> bool {
        true
    }

    fn breaks(&self) -> bool {
        true
    }

    fn sizes(&self) -> Sizes {
        match self.bbm {
            0 | 1 => Sizes::Forbidden,
            2 => Sizes::MayAbort,
            _ => Sizes::Allowed,
        }
    }

    fn fault_forgets(&self) -> bool {
        false
    }

    fn late_stores(&self) -> bool {
        self.late_stores
    }

    /// D8.6: without FWB, the weaker attribute of both stages; with it, MemAttr 0b0110 forces
    /// Write-Back.
    fn bypasses(&self, memory: u8, uncached: bool) -> bool {
        if self.forced_write_back { memory != 0b0110 } else { memory != 0b1111 || uncached }
    }

    fn stale_fetch(&self) -> bool {
        !self.coherent_instructions
    }

    fn leaf_level(&self, shift: u32) -> Option<i8> {
        (self.largest_block()..=3).find(|&level| self.shift(level) == shift)
    }

    fn break_before_make(&self) -> BreakBeforeMake {
        match self.bbm {
            0 | 1 => BreakBeforeMake::Always,
            2 => BreakBeforeMake::ConflictHandled,
            _ => BreakBeforeMake::Never,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_and_sizes_are_the_manuals() {
        let start = |granule, bits| {
            let cpu = Arm::new(granule, bits);
            (cpu.start_level, cpu.entries(cpu.start_level))
        };
        assert_eq!(start(12, 34), (2, 16 << 9));
        assert_eq!(start(12, 40), (1, 2 << 9));
        assert_eq!(start(12, 48), (0, 1 << 9));
        assert_eq!(start(14, 40), (2, 16 << 11));
        assert_eq!(start(16, 40), (2, 2048));
    }

    #[test]
    fn reserved_encodings_are_reported() {
        let reserved = |granule, raw, level| {
            matches!(Arm::new(granule, 40).decode(raw, level), Descriptor::Reserved(_))
        };
        assert!(reserved(12, 0b01, 3) && reserved(12, 0b01, 0) && reserved(14, 0b01, 1));
        assert!(reserved(12, 0b01 | 1 << 12, 2), "an unaligned block");
        assert!(reserved(16, 0b11 | 1 << 12, 2), "an unaligned table");
        assert!(!reserved(12, 0b01 | 1 << 16, 2), "nT");
        assert_eq!(Arm::new(12, 40).decode(!1, 3), Descriptor::Invalid);
    }

    #[test]
    fn with_lpa2_bits_9_and_8_are_an_addresss_highest() {
        let cpu = Arm::new(12, 52).with_lpa2();
        assert_eq!((cpu.start_level, cpu.entries(0)), (0, 16 << 9));
        let raw = 0b11 | 0b10 << 8 | 1 << 49 | 0x5000;
        let address = 1 << 51 | 1 << 49 | 0x5000;
        assert_eq!(cpu.decode(raw, 2), Descriptor::Table { table: address, rights: Rights::ALL });
        let Descriptor::Leaf(leaf) = cpu.decode(raw, 3) else { panic!("a page") };
        assert_eq!((leaf.hpa, leaf.shareability), (address, 0));
        assert!(matches!(cpu.decode(raw | 1 << 50, 3), Descriptor::Reserved(_)));
        assert!(matches!(cpu.decode(0b01, 0), Descriptor::Leaf(_)), "a block of 512g");
        assert!(matches!(Arm::new(14, 52).with_lpa2().decode(0b01, 1), Descriptor::Leaf(_)), "64g");
        assert!(matches!(Arm::new(12, 48).decode(raw, 3), Descriptor::Reserved(_)), "48 bits");
    }

    #[test]
    fn with_lpa_bits_15_to_12_are_an_addresss_highest() {
        let cpu = Arm::new(16, 52).with_lpa();
        assert_eq!((cpu.start_level, cpu.entries(1)), (1, 1 << 10));
        let raw = 0b11 | 0b11 << 8 | 0xa << 12 | 0x5_0000;
        let address = 0xa << 48 | 0x5_0000;
        assert_eq!(cpu.decode(raw, 2), Descriptor::Table { table: address, rights: Rights::ALL });
        let Descriptor::Leaf(leaf) = cpu.decode(raw, 3) else { panic!("a page") };
        assert_eq!((leaf.hpa, leaf.shareability), (address, 0b11));
        let Descriptor::Leaf(block) = cpu.decode(0b01 | 1 << 12, 2) else { panic!("a block") };
        assert_eq!(block.hpa, 1 << 48);
        assert!(matches!(cpu.decode(0b01, 1), Descriptor::Leaf(_)), "a block of 4t");
        assert!(matches!(Arm::new(16, 48).decode(raw, 3), Descriptor::Reserved(_)), "48 bits");
    }

    #[test]
    fn a_leaf_with_dbm_is_writable_and_clean() {
        let cpu = Arm::new(12, 40);
        let raw = 0b11 | 0b1111 << 2 | 1 << 6 | 1 << 51;
        let Descriptor::Leaf(leaf) = cpu.decode(raw, 3) else { panic!("a page") };
        assert!(leaf.rights.write && !leaf.dirty && !leaf.accessed);
        assert_eq!(cpu.mark(raw, 3, true), Ok(raw | 1 << 10 | 1 << 7));
        let old = Arm { hardware_accessed: false, hardware_dirty: false, ..cpu };
        assert_eq!(old.mark(raw, 3, false), Err(Fault::Accessed));
        assert!(matches!(old.decode(raw, 3), Descriptor::Leaf(leaf) if !leaf.rights.write));
    }
}
