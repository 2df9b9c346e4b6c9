//! Arm stage 2, VMSAv8-64: 4K, 16K and 64K granules, 48-bit addresses; 52-bit addresses with
//! FEAT_LPA2 for 4K and 16K, with FEAT_LPA for 64K.
//!
//! Bits as in the Arm Architecture Reference Manual (DDI 0487), D8.3 "Translation table
//! descriptor formats": D8.3.1 for tables and blocks, D8.3.2 for stage-2 attributes; memory types
//! in D8.6.5 and, with FEAT_S2FWB, D8.6.6.
//!
//! The hypervisor must not enable features that give bits another meaning: page-based hardware
//! attributes (VTCR_EL2.HWU59 to HWU62, FEAT_HPDS2) and stage-2 permission overlays (FEAT_S2POE),
//! which read bits 62:59 of a leaf; AssuredOnly (bit 58, FEAT_THE); 128-bit descriptors and
//! permission indirection. [`id::IdRegisters::vtcr`] leaves them disabled.

pub mod fault;
pub mod id;
pub mod smmu;
pub mod tlbi;

use super::{
    Access, AttributeError, Attributes, Execute, Format, Geometry, GeometryError, Kind, Memory,
    Software, TOKEN_BITS, software,
};
use crate::addr::Hpa;

/// Stage 2 with the 4 KiB granule: pages of 4k, blocks of 2m and 1g.
pub type Arm64K4 = Arm64<12>;
/// Stage 2 with the 16 KiB granule: pages of 16k, blocks of 32m.
pub type Arm64K16 = Arm64<14>;
/// Stage 2 with the 64 KiB granule: pages of 64k, blocks of 512m.
pub type Arm64K64 = Arm64<16>;
/// Stage 2 with the 4 KiB granule and FEAT_LPA2: 52-bit addresses. The blocks of 512g are not used.
pub type Arm64Lpa2K4 = Arm64<12, true>;
/// Stage 2 with the 16 KiB granule and FEAT_LPA2: 52-bit addresses, blocks of 64g too.
pub type Arm64Lpa2K16 = Arm64<14, true>;
/// Stage 2 with the 64 KiB granule and FEAT_LPA: 52-bit addresses. The blocks of 4t are not used.
pub type Arm64LpaK64 = Arm64<16, true>;

/// Arm stage 2 with a granule of `2^PAGE_SHIFT` bytes, as the user of the tables configured it.
///
/// `WIDE` selects addresses of 52 bits. With the 4K and 16K granules it is VTCR_EL2.DS, of
/// FEAT_LPA2: bits 9:8 of a descriptor are bits 51:50 of its address, and no longer the
/// shareability of a leaf. With 64K it is FEAT_LPA, where VTCR_EL2.PS says 52 bits: bits 15:12 of a
/// descriptor, otherwise 0, are bits 51:48 of its address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Arm64<const PAGE_SHIFT: u32, const WIDE: bool = false> {
    /// HCR_EL2.FWB: stage 2 forces the memory type (FEAT_S2FWB), with another encoding of it.
    pub forced_write_back: bool,
    /// VTCR_EL2.HD: hardware marks the first write to a writable-clean leaf (FEAT_HAFDBS).
    pub hardware_dirty: bool,
    /// FEAT_XNX: separate execute rights for EL1 and EL0.
    pub split_execute: bool,
    /// Shareability of normal memory: in each leaf, or with VTCR_EL2.DS in VTCR_EL2.SH0 for all.
    pub shareability: Shareability,
    /// Number of bits of a physical address that the CPU implements (ID_AA64MMFR0_EL1.PARange), at
    /// most 48, or 52 if `WIDE`. Neither guest nor host addresses may be wider.
    pub output_bits: u32,
}

/// The SH field of a leaf, `SH[1:0]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shareability {
    /// One PE only.
    Non = 0b00,
    /// All PEs, and devices of the outer domain.
    Outer = 0b10,
    /// All PEs of the guest; hypervisors use it for RAM.
    Inner = 0b11,
}

impl<const PAGE_SHIFT: u32, const WIDE: bool> Default for Arm64<PAGE_SHIFT, WIDE> {
    /// The features of most Armv8.2 CPUs: no FWB, hardware dirty state off, separate execute
    /// rights, and addresses as wide as descriptors can hold. [`id::IdRegisters::format`] reads the
    /// features of a CPU from its ID registers.
    fn default() -> Self {
        Self {
            forced_write_back: false,
            hardware_dirty: false,
            split_execute: true,
            shareability: Shareability::Inner,
            output_bits: Self::MAX_BITS,
        }
    }
}

const VALID: u64 = 1 << 0;
/// Set in tables, and in pages at level 0.
const TABLE_OR_PAGE: u64 = 1 << 1;
const MEM_ATTR_SHIFT: u32 = 2;
const MEM_ATTR: u64 = 0b1111 << MEM_ATTR_SHIFT;
const S2AP_READ: u64 = 1 << 6;
const S2AP_WRITE: u64 = 1 << 7;
const SH_SHIFT: u32 = 8;
const AF: u64 = 1 << 10;
const DBM: u64 = 1 << 51;
const XN_SHIFT: u32 = 53;
const XN: u64 = 0b11 << XN_SHIFT;
/// Hardware ignores bits 58:55 of a leaf, and 62:59 where VTCR_EL2 (and an SMMU's STE) has HWU59 to
/// HWU62 clear. Bit 57 remembers a written leaf that lost the right to write, bit 58 is the marker,
/// and the engine's user has the others: Linux's KVM uses 55 and 56 for nested guests. Bit 63 stays
/// clear: it is AMEC with FEAT_MEC. In a Realm's tables hardware reads bit 55 as NS, so this format
/// is not for them.
const SW_USER: [u64; Software::MOST] =
    software::masks([1 << 55, 1 << 56, 1 << 59, 1 << 60, 1 << 61, 1 << 62]);
const SW_DIRTY: u64 = 1 << 57;
const MARK: u64 = 1 << 58;
/// `OA[47:12]`; the lower bits of it are zero for larger granules and blocks.
const ADDRESS: u64 = (1 << 48) - (1 << 12);
/// Contiguous: the leaf is one of a group that a TLB may hold as one (D8.7, "The Contiguous bit").
const CONTIGUOUS: u64 = 1 << 52;
/// These bits tell markers, reservations and owners apart in an entry that is invalid to hardware
/// (bit 0 clear). A marker also holds a table's address, a reservation its token in the same place.
const RETIRED: u64 = 1 << 2;
const RESERVED: u64 = 1 << 1;
const TOKEN_SHIFT: u32 = 8;

/// The bits that a split copies to smaller leaves: all but address, type, nT (bit 16, inside the
/// address field of a block) and the contiguous bit (52), because a split breaks up the run of
/// neighbours that it promises. Without DS also the shareability.
const INHERITED: u64 =
    MEM_ATTR | S2AP_READ | S2AP_WRITE | AF | DBM | XN | SW_DIRTY | software::all(SW_USER);

/// Returns `MemAttr[3:0]` without FEAT_S2FWB, and with it.
const fn mem_attr(memory: Memory) -> (u64, u64) {
    match memory {
        Memory::Normal => (0b1111, 0b0110),
        Memory::NonCacheable => (0b0101, 0b0101),
        Memory::Device => (0b0001, 0b0001),
        Memory::DeviceStrict => (0b0000, 0b0000),
    }
}

/// Indexed by FEAT_S2FWB, then by MemAttr: a load is faster than comparisons.
const MEMORY: [[Memory; 16]; 2] = {
    let mut types = [[Memory::DeviceStrict; 16]; 2];
    let mut forced = 0;
    while forced < 2 {
        types[forced][0b0101] = Memory::NonCacheable;
        types[forced][0b0001] = Memory::Device;
        forced += 1;
    }
    types[0][0b1111] = Memory::Normal;
    types[1][0b0110] = Memory::Normal;
    types
};

/// `XN[1:0]`, bits 54:53.
const fn xn(execute: Execute) -> u64 {
    match execute {
        Execute::All => 0b00,
        Execute::User => 0b01,
        Execute::None => 0b10,
        Execute::Kernel => 0b11,
    }
}

const fn execute(raw: u64) -> Execute {
    match raw >> XN_SHIFT & 0b11 {
        0b00 => Execute::All,
        0b01 => Execute::User,
        0b10 => Execute::None,
        _ => Execute::Kernel,
    }
}

impl<const PAGE_SHIFT: u32, const WIDE: bool> Arm64<PAGE_SHIFT, WIDE> {
    /// Whether tables use VTCR_EL2.DS.
    const DS: bool = WIDE && PAGE_SHIFT != 16;
    /// T0SZ is at most 39 without FEAT_TTST, which is 25-bit addresses. The start level is at least
    /// that of the smallest block, and resolves at least one bit (`AArch64.S2InconsistentSL`), or
    /// every access faults: 26 bits with the 16K granule, 30 with 64K.
    const MIN_BITS: u32 =
        if Self::PAGE_SHIFT == 12 { 25 } else { Self::PAGE_SHIFT + Self::INDEX_BITS + 1 };
    const MAX_BITS: u32 = if WIDE { 52 } else { 48 };
    /// Base-2 logarithm of the most tables that may be concatenated at the root.
    const CONCATENATED: u32 = 4;
    const INHERITED: u64 = INHERITED | if Self::DS { 0 } else { 0b11 << SH_SHIFT };
    /// The upper bits of a wide address are in a separate field, below the granule: with DS
    /// `OA[51:50]` from bit 8, with 64K `OA[51:48]` from bit 12.
    const HIGH_FROM: u32 = if Self::DS { 50 } else { 48 };
    const HIGH_SHIFT: u32 = if Self::DS { 8 } else { 12 };
    const HIGH: u64 = (1 << (52 - Self::HIGH_FROM + Self::HIGH_SHIFT)) - (1 << Self::HIGH_SHIFT);
    const LOW: u64 = (1 << Self::HIGH_FROM) - (1 << PAGE_SHIFT);

    /// Returns an address as descriptors and markers hold it.
    #[inline(always)]
    const fn place(hpa: Hpa) -> u64 {
        if !WIDE {
            return hpa.0;
        }
        let high = hpa.0 >> Self::HIGH_FROM << Self::HIGH_SHIFT;
        hpa.0 & ((1 << Self::HIGH_FROM) - 1) | high
    }

    #[inline(always)]
    const fn address(raw: u64) -> u64 {
        if !WIDE {
            return raw & ADDRESS;
        }
        raw & Self::LOW | (raw & Self::HIGH) << (Self::HIGH_FROM - Self::HIGH_SHIFT)
    }
}

// SAFETY:
// 1. Zero is empty. Bits 1:0 are 0b11 in a table and, at level 0, in a page, which is therefore
//    never a table; 0b01 in a block. Bit 0 is clear in markers, reservations and owners, which bits
//    58, 2 and 1 tell apart; a token or word lies at bits 55:8, from where `owner` takes it. `kind`
//    reads no bit of `STATUS`, `SOFTWARE` or an address, and an address has
//    none of these bits; the other bits named of tables are 0. Methods that make a leaf from a leaf
//    change only AF, `S2AP`, DBM, XN and `SW_DIRTY`. `all_tables` requires 0b11 in all entries.
// 2. Frames are aligned to the granule and lie below 2^48, or 2^52 if `WIDE`: `ADDRESS`, or `LOW`
//    and `HIGH`, hold all of their bits, and no other bit of a marker or of a table.
// 3. The root has `2^bits` entries for the bits above its level's. It is at level 3 at most, where
//    16 concatenated tables of any granule cover at least 52 bits, the largest width.
// 4. A granule of `2^PAGE_SHIFT` bytes holds `2^(PAGE_SHIFT - 3)` entries, at any level.
// 5. Attributes use no bit of an address. If `WIDE`, the bits of an address below `HIGH_FROM` are
//    in their own place, and those above it change only at multiples of `CARRY`, 2^48 or 2^50. If
//    not, a leaf has the address unchanged, and `CARRY` is 0.
// 6. A group is 1, 16, 32 or 128, and a table has at least 512 entries. `kind` does not read bit
//    52, and neither an address nor `INHERITED` has it.
unsafe impl<const PAGE_SHIFT: u32, const WIDE: bool> Format for Arm64<PAGE_SHIFT, WIDE> {
    const NAME: &'static str = match (PAGE_SHIFT, WIDE) {
        (12, false) => "arm64 stage 2, 4K granule",
        (14, false) => "arm64 stage 2, 16K granule",
        (16, false) => "arm64 stage 2, 64K granule",
        (12, true) => "arm64 stage 2, 4K granule, FEAT_LPA2",
        (14, true) => "arm64 stage 2, 16K granule, FEAT_LPA2",
        (16, true) => "arm64 stage 2, 64K granule, FEAT_LPA",
        _ => panic!("the granule is 4K, 16K or 64K"),
    };
    const PAGE_SHIFT: u32 = PAGE_SHIFT;
    const INDEX_BITS: u32 = PAGE_SHIFT - 3;
    const LARGEST_LEAF: u8 = if PAGE_SHIFT == 12 || Self::DS { 2 } else { 1 };
    const SOFTWARE: [u64; Software::MOST] = SW_USER;
    const STATUS: u64 = AF | S2AP_WRITE | SW_DIRTY;
    const MARK: u64 = MARK;
    const ACCESSED: u64 = AF;
    const WRITE: u64 = S2AP_WRITE | DBM;
    const DIRTY: u64 = S2AP_WRITE | SW_DIRTY;
    /// FEAT_HAFT is not used.
    const TABLE_ACCESSED: u64 = 0;
    const AGEING: u64 = 0;
    const REFILL_BREAKS: bool = true;
    const KEEPS_FAULTING: bool = true;
    const CARRY: u64 = if WIDE { 1 << Self::HIGH_FROM } else { 0 };
    const CONTIGUOUS: u64 = CONTIGUOUS;

    /// Chooses the lowest start level that concatenation allows, so that a walk takes the fewest
    /// loads.
    fn geometry(&self, address_bits: u32) -> Result<Geometry, GeometryError> {
        let (min, max) = (Self::MIN_BITS, self.output_bits());
        if !(min..=max).contains(&address_bits) {
            return Err(GeometryError { address_bits, min, max, format: Self::NAME });
        }
        // Arm has a root of pages for 16K and 64K (for 4K with FEAT_TTST), which would save nothing
        // here.
        let mut root_level = 1;
        while address_bits > Self::shift(root_level) + Self::INDEX_BITS + Self::CONCATENATED {
            root_level += 1;
        }
        let bits = address_bits.saturating_sub(Self::shift(root_level));
        Ok(Geometry { address_bits, root_level, root_entries: 1 << bits })
    }

    #[inline(always)]
    fn output_bits(&self) -> u32 {
        self.output_bits.min(Self::MAX_BITS)
    }

    #[inline(always)]
    fn kind(raw: u64, level: u8) -> Kind {
        const PAGE: u64 = VALID | TABLE_OR_PAGE;
        let leaf = if raw & MARK == 0 { Kind::Leaf } else { Kind::Sealed };
        // The match finds tables first, with a short constant: every walk comes through here.
        match (raw & PAGE, level) {
            (PAGE, 0) => return leaf,
            (PAGE, _) => return Kind::Table,
            (VALID, 1..) if level <= Self::LARGEST_LEAF => return leaf,
            _ => {}
        }
        match (raw & (PAGE | MARK), level) {
            _ if raw == 0 => Kind::Empty,
            (RESERVED, _) if raw & RETIRED != 0 => Kind::Owned,
            (RESERVED, _) => Kind::Reserved,
            _ if raw & RETIRED != 0 => Kind::Retired,
            _ => Kind::Frozen,
        }
    }

    #[inline(always)]
    fn all_tables(common: u64, _any: u64, level: u8) -> bool {
        level > 0 && common & 0b11 == VALID | TABLE_OR_PAGE
    }

    #[inline(always)]
    fn all_pages(common: u64) -> bool {
        common & 0b11 == VALID | TABLE_OR_PAGE
    }

    #[inline(always)]
    fn encode(&self, a: Attributes) -> Result<u64, AttributeError> {
        if a.write && !a.dirty && !self.hardware_dirty {
            return Err(AttributeError::CleanNeedsHardwareDirty);
        }
        if matches!(a.execute, Execute::User | Execute::Kernel) && !self.split_execute {
            return Err(AttributeError::ExecuteNeedsSplitRights);
        }
        let (normal, forced) = mem_attr(a.memory);
        let memory = if self.forced_write_back { forced } else { normal };
        let execute = xn(a.execute);
        let bit = |on: bool, bit: u64| if on { bit } else { 0 };
        Ok(memory << MEM_ATTR_SHIFT
            | bit(a.read, S2AP_READ)
            | bit(a.write && a.dirty, S2AP_WRITE)
            | bit(a.write && self.hardware_dirty, DBM)
            | bit(!a.write && a.dirty, SW_DIRTY)
            | if Self::DS { 0 } else { (self.shareability as u64) << SH_SHIFT }
            | bit(a.accessed, AF)
            | execute << XN_SHIFT
            | a.software.encode(SW_USER)?)
    }

    #[inline(always)]
    fn decode(&self, raw: u64, _level: u8) -> Attributes {
        Attributes {
            read: raw & S2AP_READ != 0,
            write: raw & (S2AP_WRITE | DBM) != 0,
            execute: execute(raw),
            memory: MEMORY[usize::from(self.forced_write_back)]
                [(raw >> MEM_ATTR_SHIFT & 0b1111) as usize],
            accessed: raw & AF != 0,
            dirty: raw & (S2AP_WRITE | SW_DIRTY) != 0,
            software: Software::decode(raw, SW_USER),
        }
    }

    #[inline(always)]
    fn leaf(attribute_bits: u64, level: u8, hpa: Hpa) -> u64 {
        attribute_bits | Self::place(hpa) | VALID | if level == 0 { TABLE_OR_PAGE } else { 0 }
    }

    #[inline(always)]
    fn attribute_bits(raw: u64, _level: u8) -> u64 {
        raw & Self::INHERITED
    }

    #[inline(always)]
    fn leaf_address(raw: u64, level: u8) -> Hpa {
        Hpa(Self::address(raw) & !((1 << Self::shift(level)) - 1))
    }

    #[inline(always)]
    fn table(hpa: Hpa, _level: u8) -> u64 {
        Self::place(hpa) | VALID | TABLE_OR_PAGE
    }

    #[inline(always)]
    fn table_address(raw: u64) -> Hpa {
        Hpa(Self::address(raw))
    }

    #[inline(always)]
    fn frozen(hpa: Hpa) -> u64 {
        Self::place(hpa) | MARK
    }

    #[inline(always)]
    fn retired(hpa: Hpa) -> u64 {
        Self::place(hpa) | MARK | RETIRED
    }

    #[inline(always)]
    fn reserved(token: u64) -> u64 {
        token << TOKEN_SHIFT | RESERVED
    }

    #[inline(always)]
    fn owned(word: u64) -> u64 {
        Self::reserved(word) | RETIRED
    }

    #[inline(always)]
    fn owner(raw: u64) -> u64 {
        raw >> TOKEN_SHIFT & ((1 << TOKEN_BITS) - 1)
    }

    /// Clears `S2AP[1]` and DBM, since hardware would make a leaf with DBM writable again. A leaf
    /// that was writable counts as written.
    #[inline(always)]
    fn write_protected(raw: u64) -> u64 {
        let remembered =
            (raw & S2AP_WRITE) << (SW_DIRTY.trailing_zeros() - S2AP_WRITE.trailing_zeros());
        raw & !(S2AP_WRITE | DBM) | remembered
    }

    #[inline(always)]
    fn readable(raw: u64, read: bool) -> u64 {
        if read { raw | S2AP_READ } else { raw & !S2AP_READ }
    }

    #[inline(always)]
    fn execute_protected(raw: u64) -> u64 {
        raw & !XN | 0b10 << XN_SHIFT
    }

    /// A writable leaf counts as written, so `SW_DIRTY` is not needed.
    #[inline(always)]
    fn relaxed(&self, raw: u64, access: Access) -> u64 {
        let dbm = if self.hardware_dirty { DBM } else { 0 };
        match access {
            Access::Read => raw | AF,
            Access::Write => (raw | AF | S2AP_WRITE | dbm) & !SW_DIRTY,
            // Without FEAT_XNX one right applies to all levels.
            _ if !self.split_execute => (raw | AF) & !XN,
            _ => (raw | AF) & !XN | xn(execute(raw).with(access)) << XN_SHIFT,
        }
    }

    #[inline(always)]
    fn forces_caches(&self) -> bool {
        self.forced_write_back
    }

    /// Without DBM hardware does not mark the next write: the method clears only `SW_DIRTY`.
    #[inline(always)]
    fn cleaned(&self, raw: u64) -> u64 {
        if raw & DBM != 0 { raw & !(S2AP_WRITE | SW_DIRTY) } else { raw & !SW_DIRTY }
    }

    fn level_name(level: u8) -> i8 {
        3 - level as i8
    }

    /// Pages, and the blocks one level above: groups are 64k and 32m with the 4K granule, 2m and 1g
    /// with 16K, 2m and 16g with 64K. Larger blocks have groups too, which are not used.
    fn group(level: u8) -> usize {
        match (PAGE_SHIFT, level) {
            (12, 0 | 1) => 16,
            (14, 0) => 128,
            (14, 1) | (16, 0 | 1) => 32,
            _ => 1,
        }
    }
}
