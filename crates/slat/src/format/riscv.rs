//! RISC-V G-stage: Sv39x4, Sv48x4 and Sv57x4, pages of 4k, blocks of 2m and 1g.
//!
//! Bits as in the RISC-V Instruction Set Manual, volume II: "Sv39: Page-Based 39-bit Virtual-Memory
//! System" (page-table entries), "Hypervisor Extension", sections "Hypervisor Guest Address
//! Translation and Protection (hgatp) Register" and "Guest Physical Address Translation", and
//! "Svpbmt". Blocks of 512g and 256t, which Sv48x4 and Sv57x4 have, are not used.
//!
//! # What the platform does
//!
//! - **Accessed and dirty.** An entry means the same with Svadu (menvcfg.ADUE) and without. With it
//!   hardware sets A and D. Without it, a use with A clear, or a write with D clear, is a
//!   guest-page fault, which [`Guard::relax`](crate::Guard::relax) handles. No write goes unmarked,
//!   so no configuration is needed, and a writable leaf may be clean on either CPU.
//! - **`publish`** is `fence w, w`, and more where hardware may cache invalid entries: without
//!   Svvptc a hart may go on faulting at an address that is mapped by now. The hart that faulted
//!   executes HFENCE.GVMA before its guest goes on, also where the fault found nothing to change
//!   because another hart had mapped the page, or given the right. A fault does not invalidate what
//!   a hart has cached.
//! - **`invalidate`** executes what [`hfence`] returns, on every hart that may hold entries of the
//!   VMID.
//! - **No break-before-make.** Where entries of two sizes match an address, the hart uses either,
//!   "but the behavior is otherwise well-defined" ("Supervisor Memory-Management Fence
//!   Instruction"): [`BreakBeforeMake::Never`](crate::BreakBeforeMake::Never).
//! - **sstatus.MXR** of the hypervisor stays clear: it would make execute-only leaves readable.

pub mod fault;
pub mod hfence;
pub mod iommu;

use super::{
    Access, AttributeError, Attributes, Execute, Format, Geometry, GeometryError, GuestRoot, Kind,
    Memory, Software, TOKEN_BITS, software,
};
use crate::addr::Hpa;
use crate::invalidation::Vmid;
use core::fmt;

/// The MODE field of hgatp: number of levels, and width of guest addresses.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Mode {
    /// Three levels, 41 bits.
    Sv39x4 = 8,
    /// Four levels, 50 bits.
    Sv48x4 = 9,
    /// Five levels, 59 bits.
    Sv57x4 = 10,
}

impl Mode {
    const ALL: [Self; 3] = [Self::Sv39x4, Self::Sv48x4, Self::Sv57x4];

    /// Returns the number of bits of a guest physical address: two more than Sv39, Sv48 or Sv57
    /// has.
    pub const fn address_bits(self) -> u32 {
        RiscV::PAGE_SHIFT + RiscV::INDEX_BITS * (self.root_level() as u32 + 1) + ROOT_EXTRA_BITS
    }

    const fn root_level(self) -> u8 {
        self as u8 - Self::Sv39x4 as u8 + 2
    }
}

/// RISC-V's G-stage, as the user of the tables configured it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RiscV {
    /// The widest mode that hgatp of this CPU can hold. Tables use the narrowest mode that their
    /// addresses fit into: a CPU that has a mode also has the narrower ones.
    pub widest: Mode,
    /// Svpbmt (menvcfg.PBMTE): leaves have a memory type. Without it the physical address alone
    /// decides, and everything, including devices, is mapped as [`Memory::Normal`].
    pub memory_types: bool,
    /// Number of bits of a physical address that the CPU implements, at most 56.
    pub output_bits: u32,
}

impl Default for RiscV {
    /// Sv48x4 without Svpbmt, and physical addresses as wide as an entry can hold.
    fn default() -> Self {
        Self { widest: Mode::Sv48x4, memory_types: false, output_bits: MAX_OUTPUT_BITS }
    }
}

const V: u64 = 1 << 0;
const R: u64 = 1 << 1;
const W: u64 = 1 << 2;
const X: u64 = 1 << 3;
/// G-stage leaves are checked as for user mode: without this bit every access faults.
const U: u64 = 1 << 4;
/// The G bit. Of the bits of a valid entry, hardware ignores only this one and RSW: at this stage
/// it "should be cleared by software for forward compatibility, and must be ignored by hardware".
/// It is set only while an operation works on the entry.
const MARK: u64 = 1 << 5;
const A: u64 = 1 << 6;
const D: u64 = 1 << 7;
/// RSW.
const SW_USER: [u64; Software::MOST] = software::masks([1 << 8, 1 << 9]);
/// The physical page number, bits 53:10: an entry has an address two bits lower than memory does.
const PPN_SHIFT: u32 = 10;
const ADDRESS_SHIFT: u32 = RiscV::PAGE_SHIFT - PPN_SHIFT;
const PPN: u64 = (1 << 54) - (1 << PPN_SHIFT);
const MEMORY_SHIFT: u32 = 61;
const MEMORY: u64 = 0b11 << MEMORY_SHIFT;
/// These bits tell markers, reservations and owners apart in an entry with V clear, of which
/// hardware ignores the rest. Neither is a right to write, so that walks over such entries stay
/// fast.
const RETIRED: u64 = R;
const RESERVED: u64 = X;
const TOKEN_SHIFT: u32 = PPN_SHIFT;

/// The bits that a split copies to smaller leaves: all but V, address, the engine's mark, and N
/// (bit 63, Svnapot), because a split breaks up the run of neighbours that N promises.
const INHERITED: u64 = R | W | X | U | A | D | software::all(SW_USER) | MEMORY;

/// Values of PBMT: the memory's own attributes; non-cacheable main memory; I/O.
const PMA: u64 = 0;
const NC: u64 = 1;
const IO: u64 = 2;

const MAX_OUTPUT_BITS: u32 = 56;
/// Base-2 logarithm of how many times more entries the root has than a table. It is aligned to its
/// size.
const ROOT_EXTRA_BITS: u32 = 2;
const VMID_BITS: u32 = 14;

const fn bit(on: bool, bit: u64) -> u64 {
    if on { bit } else { 0 }
}

/// Returns R, W and X of a leaf, as they hold for the guest.
const fn rights(raw: u64) -> u64 {
    if raw & U != 0 { raw & (R | W | X) } else { 0 }
}

/// Returns the leaf with these rights. With R, W and X all clear it would be a link to a table, so
/// a leaf without any right keeps X and loses U.
const fn with_rights(raw: u64, rights: u64) -> u64 {
    raw & !(R | W | X | U) | if rights == 0 { X } else { rights | U }
}

impl RiscV {
    /// Returns the value of hgatp: tables at `root`, of this `geometry`, for the guest `vmid`.
    ///
    /// A CPU may implement fewer than 14 bits of a VMID: those that read back as written.
    ///
    /// # Errors
    /// [`HgatpError`] if a field cannot hold its value.
    pub fn hgatp(geometry: &Geometry, root: Hpa, vmid: Vmid) -> Result<u64, HgatpError> {
        let level = geometry.root_level;
        let Some(mode) = Mode::ALL.into_iter().find(|mode| mode.root_level() == level) else {
            return Err(HgatpError::Level { level });
        };
        if root.0 & (ROOT_BYTES - 1) != 0 || root.0 >> MAX_OUTPUT_BITS != 0 {
            return Err(HgatpError::Root { root });
        }
        if vmid.0 >> VMID_BITS != 0 {
            return Err(HgatpError::Vmid { vmid });
        }
        Ok((mode as u64) << 60 | u64::from(vmid.0) << 44 | root.0 >> RiscV::PAGE_SHIFT)
    }
}

impl GuestRoot<RiscV> {
    /// Returns the value of hgatp ([`RiscV::hgatp`]).
    ///
    /// # Errors
    /// [`HgatpError`] if a field cannot hold its value.
    pub fn hgatp(&self) -> Result<u64, HgatpError> {
        RiscV::hgatp(&self.geometry, self.root, self.vmid)
    }
}

const ROOT_BYTES: u64 = 8 << (RiscV::INDEX_BITS + ROOT_EXTRA_BITS);

/// A field of hgatp cannot hold its value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HgatpError {
    /// No mode has its root at that level.
    Level {
        /// The level of the root's entries.
        level: u8,
    },
    /// The root's address is not one that the register can hold.
    Root {
        /// Address of the root.
        root: Hpa,
    },
    /// The VMID has more than 14 bits.
    Vmid {
        /// The VMID.
        vmid: Vmid,
    },
}

impl fmt::Display for HgatpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Level { level } => {
                write!(f, "no mode of hgatp has its root at level {level}; 2 to 4 are possible")
            }
            Self::Root { root } => write!(
                f,
                "the root {root} is not a multiple of {ROOT_BYTES:#x} below 2^{MAX_OUTPUT_BITS}"
            ),
            Self::Vmid { vmid } => {
                write!(f, "the VMID {:#x} has more than {VMID_BITS} bits", vmid.0)
            }
        }
    }
}

impl core::error::Error for HgatpError {}

// SAFETY:
// 1. Leaves have V, and at least one of R and X: `encode` refuses W without R, `readable` removes W
//    together with R, and `with_rights` leaves X where no right is left. Tables have V and none of
//    R, W and X. Markers, reservations and owners do not have V, whatever their address, token or
//    word: these lie at bits 57:10, from where `owner` takes a word. No table is at level 0.
//    Without V, bit 5 is in markers only, and bit 1 tells the two kinds of marker apart; bit 3 is
//    in reservations, and owners have bits 1 and 3. `kind` reads no bit of `STATUS` and `SOFTWARE`,
//    and none of these is a bit of an address; the other bits named of
//    tables are 0. Methods that make a leaf from a leaf change only R, W, X, U, A and D.
//    `all_tables` requires V in all entries, and R, W and X in none.
// 2. Frames are aligned to 4 KiB and lie below 2^56: shifted, `PPN` holds all of their bits, and no
//    other bit of a marker or of a table.
// 3. The root has 2^11 entries at level 2, 3 or 4, for 41, 50 or 59 bits.
// 4. A page of 4 KiB holds 512 entries, at any level.
// 5. A leaf has the whole address shifted, in bits that no attribute uses; `CARRY` is 0.
// 6. There are no groups: `group` is 1, and `CONTIGUOUS` is 0, which is no bit.
unsafe impl Format for RiscV {
    const NAME: &'static str = "RISC-V G-stage";
    const PAGE_SHIFT: u32 = 12;
    const INDEX_BITS: u32 = 9;
    const LARGEST_LEAF: u8 = 2;
    const SOFTWARE: [u64; Software::MOST] = SW_USER;
    const STATUS: u64 = A | D;
    const MARK: u64 = MARK;
    const ACCESSED: u64 = A;
    const WRITE: u64 = W;
    const DIRTY: u64 = D;
    /// A, D and U of a table "are reserved for future standard use", so they stay clear.
    const TABLE_ACCESSED: u64 = 0;
    const AGEING: u64 = 0;
    const REFILL_BREAKS: bool = false;
    const KEEPS_FAULTING: bool = true;

    /// Chooses the narrowest mode. A narrower guest leaves entries of the root empty. Guest
    /// addresses may be wider than the CPU's physical addresses.
    fn geometry(&self, address_bits: u32) -> Result<Geometry, GeometryError> {
        let (min, max) = (Self::PAGE_SHIFT, self.widest.address_bits());
        let fits = |mode: &Mode| (min..=mode.address_bits()).contains(&address_bits);
        match Mode::ALL.into_iter().find(|mode| *mode <= self.widest && fits(mode)) {
            Some(mode) => Ok(Geometry {
                address_bits,
                root_level: mode.root_level(),
                root_entries: 1 << (Self::INDEX_BITS + ROOT_EXTRA_BITS),
            }),
            None => Err(GeometryError { address_bits, min, max, format: Self::NAME }),
        }
    }

    #[inline(always)]
    fn output_bits(&self) -> u32 {
        self.output_bits.min(MAX_OUTPUT_BITS)
    }

    #[inline(always)]
    fn kind(raw: u64, level: u8) -> Kind {
        if raw & V != 0 {
            let leaf = raw & (R | W | X) != 0;
            return match level {
                1.. if !leaf => Kind::Table,
                // Hardware would translate a larger block; a walk of the engine does not enter it.
                1.. if level > Self::LARGEST_LEAF => Kind::Frozen,
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
        level > 0 && common & V != 0 && any & (R | W | X) == 0
    }

    #[inline(always)]
    fn all_pages(common: u64) -> bool {
        common & V != 0
    }

    #[inline(always)]
    fn encode(&self, a: Attributes) -> Result<u64, AttributeError> {
        // W without R "is reserved for future standard use".
        if a.write && !a.read {
            return Err(AttributeError::NeedsRead);
        }
        let execute = match a.execute {
            Execute::None => 0,
            Execute::All => X,
            // X applies to VS-mode and VU-mode alike.
            Execute::User | Execute::Kernel => return Err(AttributeError::ExecuteNeedsSplitRights),
        };
        // No type of Svpbmt prevents early acknowledgement of writes.
        let memory = match a.memory {
            Memory::Normal => PMA,
            Memory::NonCacheable if self.memory_types => NC,
            Memory::Device if self.memory_types => IO,
            _ => return Err(AttributeError::MemoryType),
        };
        Ok(with_rights(0, bit(a.read, R) | bit(a.write, W) | execute)
            | memory << MEMORY_SHIFT
            | bit(a.accessed, A)
            | bit(a.dirty, D)
            | a.software.encode(SW_USER)?)
    }

    #[inline(always)]
    fn decode(&self, raw: u64, _level: u8) -> Attributes {
        let rights = rights(raw);
        Attributes {
            read: rights & R != 0,
            write: rights & W != 0,
            execute: if rights & X != 0 { Execute::All } else { Execute::None },
            memory: match (raw & MEMORY) >> MEMORY_SHIFT {
                PMA => Memory::Normal,
                NC => Memory::NonCacheable,
                _ => Memory::Device,
            },
            accessed: raw & A != 0,
            dirty: raw & D != 0,
            software: Software::decode(raw, SW_USER),
        }
    }

    #[inline(always)]
    fn leaf(attribute_bits: u64, _level: u8, hpa: Hpa) -> u64 {
        attribute_bits | hpa.0 >> ADDRESS_SHIFT | V
    }

    #[inline(always)]
    fn attribute_bits(raw: u64, _level: u8) -> u64 {
        raw & INHERITED
    }

    #[inline(always)]
    fn leaf_address(raw: u64, level: u8) -> Hpa {
        Hpa((raw & PPN) << ADDRESS_SHIFT & !((1 << Self::shift(level)) - 1))
    }

    #[inline(always)]
    fn further(raw: u64, bytes: u64) -> u64 {
        raw.wrapping_add(bytes >> ADDRESS_SHIFT)
    }

    #[inline(always)]
    fn table(hpa: Hpa, _level: u8) -> u64 {
        hpa.0 >> ADDRESS_SHIFT | V
    }

    #[inline(always)]
    fn table_address(raw: u64) -> Hpa {
        Hpa((raw & PPN) << ADDRESS_SHIFT)
    }

    #[inline(always)]
    fn frozen(hpa: Hpa) -> u64 {
        hpa.0 >> ADDRESS_SHIFT | MARK
    }

    #[inline(always)]
    fn retired(hpa: Hpa) -> u64 {
        hpa.0 >> ADDRESS_SHIFT | MARK | RETIRED
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

    /// D stays, to remember the write. A writable leaf is readable, so a right is left.
    #[inline(always)]
    fn write_protected(raw: u64) -> u64 {
        raw & !W
    }

    /// A leaf without the right to read loses the right to write too: W without R is reserved.
    #[inline(always)]
    fn readable(raw: u64, read: bool) -> u64 {
        with_rights(raw, if read { rights(raw) | R } else { rights(raw) & X })
    }

    #[inline(always)]
    fn execute_protected(raw: u64) -> u64 {
        with_rights(raw, rights(raw) & !X)
    }

    /// A write makes the leaf readable too: hardware has no other writable leaf.
    #[inline(always)]
    fn relaxed(&self, raw: u64, access: Access) -> u64 {
        match access {
            Access::Read => raw | A,
            Access::Write => with_rights(raw, rights(raw) | R | W) | A | D,
            _ => with_rights(raw, rights(raw) | X) | A,
        }
    }

    /// Hardware marks the next write, or it faults.
    #[inline(always)]
    fn cleaned(&self, raw: u64) -> u64 {
        raw & !D
    }

    /// The manual counts levels as the engine does.
    fn level_name(level: u8) -> i8 {
        level as i8
    }
}
