//! Power ISA partition-scoped radix trees: pages of 4k or of 64k, blocks of 2m and 1g, guest
//! addresses of 52 bits.
//!
//! Bits as in the Power ISA, Book III, "Radix Tree Translation": 3.0B 5.7.10, 3.1 6.7.10, with the
//! figures of the page directory entry (.1) and the page table entry (.2); "In-Memory Tables" for
//! the partition table entry; "Reference and Change Recording" (3.0B 5.7.12). The manual counts
//! bits from the highest; here a bit has the number that is its power of two. The architecture
//! could describe many trees. POWER9 and POWER10 walk one for each page size (User's Manuals,
//! "Supported Radix Tree Configurations"), which this format makes: 13 bits of index in the root,
//! then 9, 9, and 9 or 5.
//!
//! # Byte order
//!
//! Entries are big-endian on every host. A raw value here is a word *as it lies in memory*. The
//! compiler swaps the constants; the code swaps addresses when it puts them in or takes them out.
//! Swapping at each load and store would add a parameter to the code that all formats share, and
//! would swap both values of an exchange each time it is tried.
//!
//! # What the platform does
//!
//! - **Reference and change.** An entry means the same where hardware sets R and C (which it does
//!   atomically) and where software has to set them. In the second case the CPU raises a hypervisor
//!   data or instruction storage interrupt with bit 45 of HDSISR, or of HSRR1 ([`fault`]), which
//!   [`Guard::relax`](crate::Guard::relax) handles, with a write if the access was a store. No
//!   write goes unmarked on either CPU, so no configuration is needed, and a writable leaf may be
//!   clean.
//! - **`publish`** is `ptesync`. More rights, R and C need no invalidation, because a core reads
//!   the entry again before it faults (3.1B 6.10.1.2). POWER9's nest MMU does not; a guest whose
//!   accelerators use these tables needs the invalidation that `relax` leaves out.
//! - **`invalidate`** executes what [`tlbie`] returns, with the guest's LPID. Where tables were
//!   unlinked, it also invalidates walk caches (RIC=2): they hold links to tables, which an
//!   invalidation by address alone leaves there. The platform handles errata of POWER9 that need a
//!   second `tlbie`.
//! - **Every change of size, address or attribute needs break-before-make**:
//!   [`BreakBeforeMake::Always`](crate::BreakBeforeMake::Always).
//! - **`allocate`** returns 4 KiB for a table at every level and for either page size, and 64 KiB
//!   for the root. A host with pages of 64k divides its pages.
//! - **Caches.** An access whose attributes, in the guest's own tables, conflict with those here
//!   raises an interrupt, so no guest bypasses the caches. `maintain` of instructions is the CPU's
//!   `dcbst` and `icbi`.
//!
//! No emulated machine has walked these tables so far.

pub mod fault;
pub mod tlbie;

use super::{
    Access, AttributeError, Attributes, Execute, Format, Geometry, GeometryError, GuestRoot, Kind,
    Memory, Software, TOKEN_BITS, software,
};
use crate::addr::Hpa;
use core::fmt;

/// Partition-scoped radix tree with pages of `1 << PAGE_SHIFT` bytes, 12 or 16.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Power<const PAGE_SHIFT: u32> {
    /// Number of bits of a real address that the CPU implements, at most 57 (POWER9: 51).
    pub output_bits: u32,
}

/// Partition-scoped radix tree with pages of 4k.
pub type PowerK4 = Power<12>;
/// Partition-scoped radix tree with pages of 64k.
pub type PowerK64 = Power<16>;

impl<const PAGE_SHIFT: u32> Default for Power<PAGE_SHIFT> {
    /// Real addresses as wide as an entry can hold.
    fn default() -> Self {
        Self { output_bits: MAX_OUTPUT_BITS }
    }
}

/// Returns a word of the manual's as it lies in memory.
const fn be(word: u64) -> u64 {
    word.to_be()
}

const V: u64 = be(1 << 63);
/// Marks a leaf, which is a page table entry; without it the entry is a page directory entry.
const L: u64 = be(1 << 62);
/// Four bits of a page table entry are software's (manual: 2 and 52:54). This one is in no field of
/// a page directory entry, so markers have it together with an address.
const MARK: u64 = be(1 << 61);
const SW_USER: [u64; Software::MOST] = software::masks([be(1 << 11), be(1 << 10), be(1 << 9)]);
/// The real page number, bits 7:51 of the manual's.
const RPN: u64 = be((1 << 57) - (1 << 12));
/// The next level's base, bits 4:55 of the manual's.
const NLB: u64 = be((1 << 60) - (1 << 8));
const R: u64 = be(1 << 8);
const C: u64 = be(1 << 7);
const ATT: u64 = be(0b11 << 4);
/// EAA. Its highest bit, privileged, has no effect in partition-scoped entries. The right to write
/// includes the right to read; both bits are set where both rights are given.
const READ: u64 = be(0b0100);
const WRITE: u64 = be(0b0010);
const EXECUTE: u64 = be(0b0001);
/// These bits tell markers, reservations and owners apart in an entry with V clear, of which
/// hardware ignores the rest. Neither is a right to write, R or C, so that walks over such entries
/// stay fast.
const RETIRED: u64 = be(1 << 4);
const RESERVED: u64 = be(1 << 5);
/// Keeps tokens clear of all bits that walks read in a leaf.
const TOKEN_SHIFT: u32 = 12;

/// The bits that a split copies to smaller leaves: all but V, L, address and the engine's mark.
const INHERITED: u64 = R | C | ATT | READ | WRITE | EXECUTE | software::all(SW_USER);

/// Normal memory. Strong access order, which 3.1 removed, is equally cacheable, and is not used.
const NORMAL: u64 = be(0b00 << 4);
/// Caching inhibited and guarded: no instruction is fetched from it, even if EAA allows it.
const NON_IDEMPOTENT: u64 = be(0b10 << 4);
/// Caching inhibited.
const TOLERANT: u64 = be(0b11 << 4);

const MAX_BITS: u32 = 52;
const MAX_OUTPUT_BITS: u32 = 57;
const ROOT_LEVEL: u8 = 3;
const ROOT_BITS: u32 = 13;
const ROOT_BYTES: u64 = 8 << ROOT_BITS;

const fn bit(on: bool, bit: u64) -> u64 {
    if on { bit } else { 0 }
}

/// Returns the address fields of an entry.
#[inline(always)]
const fn place(hpa: Hpa) -> u64 {
    be(hpa.0)
}

impl<const PAGE_SHIFT: u32> Power<PAGE_SHIFT> {
    /// Returns the first doubleword of the guest's partition table entry: tables at `root`.
    ///
    /// It has HR; RTS for addresses of 52 bits, also if the guest's are narrower; RPDB; RPDS. The
    /// value is as in a register: in memory it is big-endian ([`u64::to_be_bytes`]). The second
    /// doubleword describes the guest's own tables.
    ///
    /// # Errors
    /// [`RootError`] if RPDB cannot hold the root.
    pub const fn partition_entry(root: Hpa) -> Result<u64, RootError> {
        if root.0 & (ROOT_BYTES - 1) != 0 || root.0 >> 60 != 0 {
            return Err(RootError { root });
        }
        // RTS lies in two parts, bits 1:2 and 56:58 of the manual's.
        let rts = (MAX_BITS - 31) as u64;
        Ok(1 << 63 | rts >> 3 << 61 | root.0 | (rts & 0b111) << 5 | ROOT_BITS as u64)
    }

    /// Returns the NLS field of an entry at `level`: the index bits of the table that it links.
    const fn next_level_size(level: u8) -> u64 {
        be(if level == 1 { Self::LAST_INDEX_BITS } else { Self::INDEX_BITS } as u64)
    }
}

impl<const PAGE_SHIFT: u32> GuestRoot<Power<PAGE_SHIFT>> {
    /// Returns the first doubleword of the partition table entry whose number is the VMID, which
    /// LPIDR holds while the guest runs ([`Power::partition_entry`]; Book III, "In-Memory Tables").
    ///
    /// # Errors
    /// [`RootError`] if the entry cannot hold the root.
    pub const fn partition_entry(&self) -> Result<u64, RootError> {
        Power::<PAGE_SHIFT>::partition_entry(self.root)
    }
}

/// A root that a partition table entry cannot hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RootError {
    /// Address of the root.
    pub root: Hpa,
}

impl fmt::Display for RootError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the root {} is not a multiple of {ROOT_BYTES:#x} below 2^60", self.root)
    }
}

impl core::error::Error for RootError {}

// SAFETY:
// 1. Leaves and tables have V. Markers, reservations and owners do not, whatever their address,
//    token or word: these lie at bits 59:12 of the word, from where `owner` takes it. L tells leaf
//    from table, and no table is at level 0. Without V, bit 61 is in markers only, and bit 4 tells
//    the two kinds of marker apart; bit 5 is in reservations, and owners have bits 4 and 5. `kind`
//    reads no bit of `STATUS` and `SOFTWARE`, and none of these is a bit of
//    an address; the other bits named of tables are 0. Methods that make a leaf from a leaf change
//    only bits of EAA, R and C. `all_tables` requires V in all entries, and L in none. All of this
//    holds in either byte order, because constants, addresses and tokens are swapped alike.
// 2. Frames are aligned to 4 KiB and lie below 2^57: `NLB` holds all of their bits, and no other
//    bit of a marker or of a table.
// 3. The root has 2^13 entries at level 3, which covers 39 + 13 bits.
// 4. Tables have 2^9 entries, or 2^5: at most 4 KiB, which is `TABLE_BYTES`. A page has at least 4
//    KiB, for the 2^9 entries of a table at the root's level.
// 5. Attributes use no bit of an address. On a big-endian host a leaf has the address unchanged,
//    and `CARRY` is 0. On a little-endian host its bytes are swapped, so it grows by a constant
//    only within one byte: for 4k pages the byte that ends at bit 16, for 64k pages the byte that
//    ends at bit 24. `CARRY` is there.
// 6. There are no groups: `group` is 1, and `CONTIGUOUS` is 0, which is no bit.
unsafe impl<const PAGE_SHIFT: u32> Format for Power<PAGE_SHIFT> {
    const NAME: &'static str = match PAGE_SHIFT {
        12 => "Power radix, 4K pages",
        16 => "Power radix, 64K pages",
        _ => panic!("pages have 4K or 64K"),
    };
    const PAGE_SHIFT: u32 = PAGE_SHIFT;
    const INDEX_BITS: u32 = 9;
    const LAST_INDEX_BITS: u32 = 21 - PAGE_SHIFT;
    const TABLE_BYTES: usize = 8 << Self::INDEX_BITS;
    const LARGEST_LEAF: u8 = 2;
    const SOFTWARE: [u64; Software::MOST] = SW_USER;
    const STATUS: u64 = R | C;
    const MARK: u64 = MARK;
    const ACCESSED: u64 = R;
    const WRITE: u64 = WRITE;
    const DIRTY: u64 = C;
    const TABLE_ACCESSED: u64 = 0;
    const AGEING: u64 = 0;
    const REFILL_BREAKS: bool = true;
    const KEEPS_FAULTING: bool = false;
    const CARRY: u64 = match PAGE_SHIFT {
        _ if cfg!(target_endian = "big") => 0,
        12 => 1 << 16,
        _ => 1 << 24,
    };

    /// All widths have one root: a narrower guest leaves entries of it empty.
    fn geometry(&self, address_bits: u32) -> Result<Geometry, GeometryError> {
        let (min, max) = (PAGE_SHIFT, MAX_BITS);
        if !(min..=max).contains(&address_bits) {
            return Err(GeometryError { address_bits, min, max, format: Self::NAME });
        }
        Ok(Geometry { address_bits, root_level: ROOT_LEVEL, root_entries: 1 << ROOT_BITS })
    }

    #[inline(always)]
    fn output_bits(&self) -> u32 {
        self.output_bits.min(MAX_OUTPUT_BITS)
    }

    #[inline(always)]
    fn kind(raw: u64, level: u8) -> Kind {
        if raw & V != 0 {
            let leaf = raw & L != 0;
            return match level {
                1.. if !leaf => Kind::Table,
                // No such page, and no table below pages: a walk does not enter it.
                _ if !leaf || level > Self::LARGEST_LEAF => Kind::Frozen,
                _ if raw & MARK != 0 => Kind::Sealed,
                _ => Kind::Leaf,
            };
        }
        match raw & (MARK | RETIRED | RESERVED) {
            0 | RETIRED => Kind::Empty,
            RESERVED => Kind::Reserved,
            bits if bits == RETIRED | RESERVED => Kind::Owned,
            bits if bits & (MARK | RETIRED) == MARK | RETIRED => Kind::Retired,
            _ => Kind::Frozen,
        }
    }

    #[inline(always)]
    fn all_tables(common: u64, any: u64, level: u8) -> bool {
        level > 0 && common & V != 0 && any & L == 0
    }

    #[inline(always)]
    fn all_pages(common: u64) -> bool {
        common & (V | L) == V | L
    }

    #[inline(always)]
    fn encode(&self, a: Attributes) -> Result<u64, AttributeError> {
        if a.write && !a.read {
            return Err(AttributeError::NeedsRead);
        }
        let execute = match a.execute {
            Execute::None => 0,
            Execute::All => EXECUTE,
            // The privileged bit is ignored in these entries.
            Execute::User | Execute::Kernel => return Err(AttributeError::ExecuteNeedsSplitRights),
        };
        let memory = match a.memory {
            Memory::Normal => NORMAL,
            Memory::NonCacheable => TOLERANT,
            Memory::Device => NON_IDEMPOTENT,
            // No attribute prevents early acknowledgement of stores: software uses barriers for
            // that.
            Memory::DeviceStrict => return Err(AttributeError::MemoryType),
        };
        Ok(bit(a.read, READ)
            | bit(a.write, WRITE)
            | execute
            | memory
            | bit(a.accessed, R)
            | bit(a.dirty, C)
            | a.software.encode(SW_USER)?)
    }

    /// Leaves that others made may have the right to write alone, and strong access order.
    #[inline(always)]
    fn decode(&self, raw: u64, _level: u8) -> Attributes {
        Attributes {
            read: raw & (READ | WRITE) != 0,
            write: raw & WRITE != 0,
            execute: if raw & EXECUTE != 0 { Execute::All } else { Execute::None },
            memory: match raw & ATT {
                NON_IDEMPOTENT => Memory::Device,
                TOLERANT => Memory::NonCacheable,
                _ => Memory::Normal,
            },
            accessed: raw & R != 0,
            dirty: raw & C != 0,
            software: Software::decode(raw, SW_USER),
        }
    }

    #[inline(always)]
    fn leaf(attribute_bits: u64, _level: u8, hpa: Hpa) -> u64 {
        attribute_bits | place(hpa) | V | L
    }

    #[inline(always)]
    fn attribute_bits(raw: u64, _level: u8) -> u64 {
        raw & INHERITED
    }

    #[inline(always)]
    fn leaf_address(raw: u64, level: u8) -> Hpa {
        Hpa(u64::from_be(raw & RPN) & !((1 << Self::shift(level)) - 1))
    }

    #[inline(always)]
    fn further(raw: u64, bytes: u64) -> u64 {
        be(u64::from_be(raw).wrapping_add(bytes))
    }

    #[inline(always)]
    fn table(hpa: Hpa, level: u8) -> u64 {
        place(hpa) | Self::next_level_size(level) | V
    }

    #[inline(always)]
    fn table_address(raw: u64) -> Hpa {
        Hpa(u64::from_be(raw & NLB))
    }

    #[inline(always)]
    fn frozen(hpa: Hpa) -> u64 {
        place(hpa) | MARK
    }

    #[inline(always)]
    fn retired(hpa: Hpa) -> u64 {
        place(hpa) | MARK | RETIRED
    }

    #[inline(always)]
    fn reserved(token: u64) -> u64 {
        be(token << TOKEN_SHIFT) | RESERVED
    }

    #[inline(always)]
    fn owned(word: u64) -> u64 {
        Self::reserved(word) | RETIRED
    }

    #[inline(always)]
    fn owner(raw: u64) -> u64 {
        be(raw) >> TOKEN_SHIFT & ((1 << TOKEN_BITS) - 1)
    }

    /// C stays, to remember the write.
    #[inline(always)]
    fn write_protected(raw: u64) -> u64 {
        raw & !WRITE
    }

    #[inline(always)]
    fn readable(raw: u64, read: bool) -> u64 {
        if read { raw | READ } else { raw & !READ }
    }

    #[inline(always)]
    fn execute_protected(raw: u64) -> u64 {
        raw & !EXECUTE
    }

    /// A write makes the leaf readable too: hardware has no other writable leaf.
    #[inline(always)]
    fn relaxed(&self, raw: u64, access: Access) -> u64 {
        match access {
            Access::Read => raw | R,
            Access::Write => raw | READ | WRITE | R | C,
            _ => raw | EXECUTE | R,
        }
    }

    /// Hardware marks the next write, or it faults.
    #[inline(always)]
    fn cleaned(&self, raw: u64) -> u64 {
        raw & !C
    }

    /// The processors' manuals count from the root, which is 1.
    fn level_name(level: u8) -> i8 {
        4 - level as i8
    }
}
