//! What a descriptor means: one file a format, bits only, no algorithm.

#[cfg(feature = "arm64")]
pub mod arm64;
#[cfg(feature = "ept")]
pub mod ept;
mod geometry;
#[cfg(feature = "npt")]
pub mod npt;
#[cfg(feature = "power")]
pub mod power;
#[cfg(feature = "riscv")]
pub mod riscv;
mod software;
#[cfg(any(test, loom, shuttle))]
pub mod tiny;

pub use geometry::{Geometry, GeometryError};
pub use software::Software;

use crate::addr::{Hpa, LeafSizeError, PageSize};
use core::fmt;

/// The bits of one architecture's second-stage descriptors.
///
/// A value carries what its user configured (see [`arm64::Arm64`]); everything that the walk
/// depends on is a constant, so that loops are specialised by the compiler.
///
/// Levels count upwards from 0, the level of pages. Leaves stand at levels
/// `0..=LARGEST_LEAF`, without gaps.
///
/// [`Format::MARK`] in a slot keeps other software out, and is bounded in time. In a leaf that
/// stays valid it makes it *sealed*; in a table, its write protection is being pushed down; in a
/// slot that is invalid to hardware it makes it *frozen*, or *retired* with the table around it. So
/// a run of slots without that bit holds no marker.
///
/// # Safety
/// The walk dereferences what a format calls a table. Implementations promise:
/// 1. [`Format::kind`] of 0 is [`Kind::Empty`], of [`Format::table`] at a level above 0
///    [`Kind::Table`], of [`Format::leaf`] up to `LARGEST_LEAF` [`Kind::Leaf`], with `MARK`
///    [`Kind::Sealed`], of [`Format::frozen`] [`Kind::Frozen`], of [`Format::retired`]
///    [`Kind::Retired`], of [`Format::reserved`] [`Kind::Reserved`], of [`Format::owned`]
///    [`Kind::Owned`]; no slot at level 0 is a table. In a leaf, bits of `STATUS` and `SOFTWARE`,
///    and in a table those of `TABLE_ACCESSED`, `TABLE_WRITE`, `AGEING`, `RENEWED` and `MARK`,
///    change nothing about kind and address; nor do the methods that make a leaf from a leaf.
///    [`Format::all_tables`] agrees with `kind`; tokens that differ make reservations that differ,
///    and [`Format::owner`] gives back the word of [`Format::owned`].
/// 2. [`Format::table_address`] gives back the address that [`Format::table`],
///    [`Format::frozen`] and [`Format::retired`] were given.
/// 3. [`Format::geometry`] gives a root of a power of two of slots, at level 4 at most, which
///    covers `address_bits` at least.
/// 4. [`Format::TABLE_BYTES`], a power of two, holds the slots of a table below the root at any
///    level; a page holds those of the root's level.
/// 5. Where a host address goes up by a page, and not to a multiple of `CARRY`, what
///    [`Format::leaf`] makes of it at level 0 goes up by as much as from address 0 to the first
///    page. `CARRY` is 0 or a power of two, of more bytes than a page.
/// 6. [`Format::group`] is a power of two, of no more slots than a table has. In a leaf
///    `CONTIGUOUS` changes nothing about kind and address, and [`Format::attribute_bits`] leaves it
///    out.
pub unsafe trait Format: Copy + Send + Sync + 'static {
    /// Name of the format, as its manual's readers know it.
    const NAME: &'static str;
    /// Base-2 logarithm of the page size in bytes.
    const PAGE_SHIFT: u32;
    /// Base-2 logarithm of the slots of a table below the root.
    const INDEX_BITS: u32;
    /// The same of a table of pages, where those are smaller.
    const LAST_INDEX_BITS: u32 = Self::INDEX_BITS;
    /// Bytes, and alignment, of the frame of a table below the root: the same at all levels, so
    /// that one cache serves them.
    const TABLE_BYTES: usize = 1 << Self::PAGE_SHIFT;
    /// The highest level at which a leaf may stand.
    const LARGEST_LEAF: u8;
    /// The bits of a leaf that are the engine's user's, by their number in [`Software`]: two at
    /// least, and 0 behind the last. In a table they may be the engine's.
    const SOFTWARE: [u64; Software::MOST];
    /// How many of them the format has: those of a lower number.
    const SOFTWARE_BITS: u8 = software::count(Self::SOFTWARE);
    /// Bits that hardware may set in a live leaf (accessed, dirty), or that remember them.
    const STATUS: u64;
    /// Keeps other software out of the slot that holds it.
    const MARK: u64;
    /// Beside [`Format::MARK`] in a table: the subtree was write-protected again meanwhile.
    const RENEWED: u64;
    /// Set in a leaf that was used.
    const ACCESSED: u64;
    /// A leaf without any of these bits cannot be written by the guest.
    const WRITE: u64;
    /// A leaf without any of these bits was not written.
    const DIRTY: u64;
    /// Set by hardware in a table that it walked through; 0 where it does not.
    const TABLE_ACCESSED: u64;
    /// Kept in a table that is to be aged below, by whoever ages.
    const AGEING: u64;
    /// A CPU must not hold two translations of one address: a slot that was emptied is filled again
    /// only after an invalidation (Arm: break-before-make, at every level of FEAT_BBM; Power).
    const REFILL_BREAKS: bool;
    /// A fault for lack of a right leaves in the CPU what it faulted at: after a right was given,
    /// that CPU has to forget the entry before it runs the guest again
    /// ([`Granted`](crate::Granted)). Arm, where a permission fault invalidates nothing (DDI 0487,
    /// "TLB maintenance requirements"), and RISC-V, where a fault orders nothing. Not x86, where it
    /// invalidates what translated the address (SDM 3C, "Operations that Invalidate Cached
    /// Mappings"; APM 2, 5.5), nor Power, where the entry is fetched again before the fault (3.1B,
    /// 6.10.1.2).
    const KEEPS_FAULTING: bool;
    /// A table without it takes the right to write from everything below; 0 where tables have no
    /// rights.
    const TABLE_WRITE: u64;
    /// A field of a page's descriptor ends at multiples of so many bytes: there it does not go up
    /// as the address does. 0 where there is no such end.
    const CARRY: u64 = 0;
    /// Set in each leaf of a *group*: aligned neighbours, [`Format::group`] of them, that continue
    /// each other and agree in all but accessed and dirty state, which a TLB may hold as one leaf.
    /// 0 where there is no such bit.
    const CONTIGUOUS: u64 = 0;

    /// Where a walk starts, for guest addresses of `address_bits`.
    ///
    /// # Errors
    /// [`GeometryError`] names the sizes that are allowed.
    fn geometry(&self, address_bits: u32) -> Result<Geometry, GeometryError>;

    /// Bits of a host physical address that a descriptor can hold.
    fn output_bits(&self) -> u32;

    /// What hardware makes of `raw` in a table at `level`.
    fn kind(raw: u64, level: u8) -> Kind;

    /// Whether all slots of a run at `level` link tables, from the bits that they have in `common`
    /// and those that `any` of them has: a walk that wants nothing below steps over such a run.
    fn all_tables(common: u64, any: u64, level: u8) -> bool;

    /// Whether all slots of a run without a marker are pages, from the bits that they have in
    /// common.
    fn all_pages(common: u64) -> bool;

    /// Attribute bits of a leaf, without address and level.
    ///
    /// # Errors
    /// [`AttributeError`] where the format, as configured, cannot express them.
    fn encode(&self, attributes: Attributes) -> Result<u64, AttributeError>;

    /// The strictest memory type for devices that the format, as configured, has:
    /// [`Memory::DeviceStrict`], [`Memory::Device`], or [`Memory::Normal`] where leaves have no
    /// type and the physical address says what is a device (RISC-V without Svpbmt, by its physical
    /// memory attributes). Such a leaf [`Platform::maintain`](crate::Platform::maintain) is told of
    /// as of memory.
    fn device(&self) -> Memory {
        let fits = |memory| self.encode(Attributes { memory, ..Attributes::RAM }).is_ok();
        let types = [Memory::DeviceStrict, Memory::Device];
        types.into_iter().find(|&memory| fits(memory)).unwrap_or(Memory::Normal)
    }

    /// The attributes of a leaf at `level`.
    fn decode(&self, raw: u64, level: u8) -> Attributes;

    /// A leaf at `level` from attribute bits and an address aligned to its size: of the next page
    /// it is larger by the same number everywhere.
    fn leaf(attribute_bits: u64, level: u8, hpa: Hpa) -> u64;

    /// The attribute bits of a leaf at `level`: what its children inherit when it is split.
    fn attribute_bits(raw: u64, level: u8) -> u64;

    /// Where the leaf `raw` at `level` points.
    fn leaf_address(raw: u64, level: u8) -> Hpa;

    /// What the leaf `raw` becomes when it points `bytes` further. It may be another descriptor
    /// where a field ends in between: who asks compares, and looks at the address.
    #[inline(always)]
    fn further(raw: u64, bytes: u64) -> u64 {
        raw.wrapping_add(bytes)
    }

    /// A descriptor, at `level`, of the table at `hpa`.
    fn table(hpa: Hpa, level: u8) -> u64;

    /// The table that `raw` (of [`Kind::Table`], [`Kind::Frozen`] or [`Kind::Retired`]) points to.
    fn table_address(raw: u64) -> Hpa;

    /// A frozen marker that carries `hpa` (0: none).
    fn frozen(hpa: Hpa) -> u64;

    /// A slot of a table that was unlinked: a marker that carries `hpa` (0: none).
    fn retired(hpa: Hpa) -> u64;

    /// An empty slot with the `token`, of [`TOKEN_BITS`] bits, of who emptied or reserved it:
    /// invalid to hardware, open to all software.
    fn reserved(token: u64) -> u64;

    /// An empty slot with the `word`, of [`TOKEN_BITS`] bits, of its owner: invalid to hardware.
    fn owned(word: u64) -> u64;

    /// The word of an owned slot.
    fn owner(raw: u64) -> u64;

    /// The leaf without the right to write, its dirty state remembered; `raw` itself if it had
    /// none.
    fn write_protected(raw: u64) -> u64;

    /// The leaf without the right to execute.
    fn execute_protected(raw: u64) -> u64;

    /// The leaf with the right to read, or without it; `raw` itself on formats that have no leaf
    /// without.
    fn readable(raw: u64, read: bool) -> u64;

    /// The leaf fit for `access`, as a fault makes it: accessed; for a write also writable and
    /// dirty, for a fetch executable ([`Execute::with`]).
    fn relaxed(&self, raw: u64, access: Access) -> u64;

    /// Whether the use of a leaf that is not accessed leaves a trace: hardware marks it, or the use
    /// faults.
    #[inline(always)]
    fn records_accessed(&self) -> bool {
        true
    }

    /// Whether [`Format::MARK`] may stand in an entry that is valid to hardware: not where a device
    /// walks the tables that takes the bit for another. Then nothing is collapsed, and no table
    /// write-protected.
    #[inline(always)]
    fn marks_valid(&self) -> bool {
        true
    }

    /// Whether a guest that switches its caches off uses them all the same (x86; Arm with
    /// FEAT_S2FWB in use): else what it does past them has to be seen to.
    #[inline(always)]
    fn forces_caches(&self) -> bool {
        true
    }

    /// The leaf not dirty any more, hardware marking the next write; a leaf whose writes nobody
    /// marks stays dirty.
    fn cleaned(&self, raw: u64) -> u64;

    /// The format's own name of `level` when the root stands at any level, for dumps.
    fn level_name(level: u8) -> i8;

    /// How many leaves at `level` make a group; 1 where none do.
    fn group(_level: u8) -> usize {
        1
    }

    /// Base-2 logarithm of the bytes that a slot at `level` covers.
    #[inline(always)]
    fn shift(level: u8) -> u32 {
        slot_shift::<Self>(level)
    }

    /// Slots of a table at `level`, below the root.
    #[inline(always)]
    fn slots(level: u8) -> usize {
        1 << if level == 0 { Self::LAST_INDEX_BITS } else { Self::INDEX_BITS }
    }

    /// The size of a leaf at `level`.
    #[inline(always)]
    fn size(level: u8) -> PageSize {
        PageSize::from_shift(Self::shift(level))
    }

    /// The level of leaves of `size`.
    ///
    /// # Errors
    /// [`LeafSizeError`] names the sizes that the format has.
    #[inline]
    fn level_of(size: PageSize) -> Result<u8, LeafSizeError> {
        let found = (0..=Self::LARGEST_LEAF).find(|&level| Self::size(level) == size);
        found.ok_or(LeafSizeError {
            size,
            smallest: Self::size(0),
            largest: Self::size(Self::LARGEST_LEAF),
        })
    }
}

/// The bits of [`Format::SOFTWARE`], all of them.
pub(crate) const fn software_bits<F: Format>() -> u64 {
    software::all(F::SOFTWARE)
}

/// [`Format::shift`], for functions that are `const`.
pub(crate) const fn slot_shift<F: Format>(level: u8) -> u32 {
    let even = F::PAGE_SHIFT + F::INDEX_BITS * level as u32;
    // All tables above level 0 lie above one of pages.
    if level == 0 { even } else { even - (F::INDEX_BITS - F::LAST_INDEX_BITS) }
}

/// [`Format::all_tables`] of the slots of a run.
#[cfg(test)]
fn links_tables<F: Format>(run: &[u64; RUN], level: u8) -> bool {
    let common = run.iter().fold(!0, |common, raw| common & raw);
    let any = run.iter().fold(0, |any, raw| any | raw);
    F::all_tables(common, any, level)
}

/// Slots that a walk looks at together.
pub const RUN: usize = 8;

/// Bits of a token, or of an owner's word, in an empty slot.
pub const TOKEN_BITS: u32 = 48;

/// How the guest uses memory, in the fault that [`Guard::relax`](crate::Guard::relax) answers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Access {
    /// It reads: the leaf becomes accessed.
    Read,
    /// It writes: the leaf becomes accessed, writable and dirty.
    Write,
    /// It executes, at a level that the fault does not tell: the leaf becomes accessed, and
    /// executable at all levels if it was so at none. A leaf that one level may execute keeps its
    /// right as it is: the other level is not known to have asked.
    Execute,
    /// A user program executes: user programs get the right. Where the format, as configured, does
    /// not tell the levels apart, all levels get it.
    ExecuteUser,
    /// The guest's kernel executes, as [`Access::ExecuteUser`].
    ExecuteKernel,
}

impl Access {
    /// Whether it is an instruction fetch, of whichever level.
    pub const fn is_fetch(self) -> bool {
        matches!(self, Self::Execute | Self::ExecuteUser | Self::ExecuteKernel)
    }
}

/// What a slot holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Nothing.
    Empty,
    /// Nothing; a fault has reserved it, or an unmap has emptied it.
    Reserved,
    /// Nothing, and nothing is to be mapped: the word of an owner.
    Owned,
    /// A marker: software is changing the slot, hardware finds it invalid.
    Frozen,
    /// A marker: the table around the slot was unlinked.
    Retired,
    /// A page or block.
    Leaf,
    /// A page or block that hardware goes on using while software is changing it.
    Sealed,
    /// The address of a table one level below.
    Table,
}

impl Kind {
    /// Whether a leaf or a table may take the slot.
    #[inline(always)]
    pub const fn is_vacant(self) -> bool {
        matches!(self, Self::Empty | Self::Reserved)
    }
}

/// Rights, memory type and state of a leaf, in no architecture's words.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Attributes {
    /// The guest may read.
    pub read: bool,
    /// The guest may write. With `dirty` unset, the first write is to be marked by hardware.
    pub write: bool,
    /// Who may execute.
    pub execute: Execute,
    /// Memory type.
    pub memory: Memory,
    /// The leaf was used. A leaf without it faults on use where hardware does not set it.
    pub accessed: bool,
    /// The leaf was written, or may have been.
    pub dirty: bool,
    /// For the engine's user; never read by hardware.
    pub software: Software,
}

impl Attributes {
    /// Normal memory that the guest may read, write and execute, as a fault maps it: accessed,
    /// dirty.
    pub const RAM: Self = Self {
        read: true,
        write: true,
        execute: Execute::All,
        memory: Memory::Normal,
        accessed: true,
        dirty: true,
        software: Software::NONE,
    };

    /// A device's registers, which the guest may read and write: of the type that
    /// [`Format::device`] says, accessed and dirty, not executable. Every format can express them,
    /// so that one caller maps a device on each.
    pub fn device<F: Format>(format: &F) -> Self {
        Self { execute: Execute::None, memory: format.device(), ..Self::RAM }
    }
}

/// What the guest may do with a leaf.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Rights {
    /// It may read.
    pub read: bool,
    /// It may write.
    pub write: bool,
    /// Who may execute.
    pub execute: Execute,
}

impl Rights {
    /// All.
    pub const ALL: Self = Self { read: true, write: true, execute: Execute::All };
    /// Reading alone.
    pub const READ: Self = Self { read: true, write: false, execute: Execute::None };
}

/// Who may execute from a leaf.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Execute {
    /// Nobody.
    None,
    /// The guest's kernel and user programs.
    All,
    /// User programs only.
    User,
    /// The guest's kernel only.
    Kernel,
}

impl Execute {
    /// The right after a fault for `access`: what there is, and what the access asks for, no more.
    #[inline(always)]
    #[must_use]
    pub const fn with(self, access: Access) -> Self {
        match (self, access) {
            (Self::None, Access::Execute)
            | (Self::Kernel, Access::ExecuteUser)
            | (Self::User, Access::ExecuteKernel) => Self::All,
            (Self::None, Access::ExecuteUser) => Self::User,
            (Self::None, Access::ExecuteKernel) => Self::Kernel,
            _ => self,
        }
    }

    /// Whether nothing is missing for `access`.
    pub fn permits(self, access: Access) -> bool {
        self.with(access) == self
    }
}

/// Memory type of a leaf.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Memory {
    /// Write-back cacheable.
    Normal,
    /// Normal, not cacheable.
    NonCacheable,
    /// A device; early acknowledgement of writes.
    Device,
    /// A device; no early acknowledgement.
    DeviceStrict,
}

/// Attributes that the format, as configured, cannot express.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum AttributeError {
    /// A writable leaf that is not dirty, where hardware does not mark writes.
    CleanNeedsHardwareDirty,
    /// Execution for the kernel or user programs alone, where the CPU cannot tell them apart.
    ExecuteNeedsSplitRights,
    /// A leaf that cannot be read, or one that can be written and not read, on a format whose
    /// hardware or markers need that right.
    NeedsRead,
    /// A memory type that the descriptors do not have.
    MemoryType,
    /// A software bit that the format lacks.
    SoftwareBits {
        /// What was asked for.
        given: Software,
        /// How many bits the format has ([`Format::SOFTWARE_BITS`]).
        bits: u8,
    },
}

impl fmt::Display for AttributeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let why = match self {
            Self::SoftwareBits { given, bits } => {
                return write!(
                    f,
                    "leaves of this format have {bits} software bits, from number 0 on; {:#b} was \
                     asked for",
                    given.bits()
                );
            }
            Self::CleanNeedsHardwareDirty => {
                "a writable leaf that is not dirty needs hardware that marks writes; map it dirty, \
                 or without the right to write"
            }
            Self::ExecuteNeedsSplitRights => {
                "this CPU cannot tell kernel from user execution; allow it to all or to nobody"
            }
            Self::NeedsRead => {
                "this format has no such leaf without the right to read; give it, or unmap what the \
                 guest may not read"
            }
            Self::MemoryType => {
                "descriptors of this CPU lack that memory type; map as another, or as normal memory, \
                 where the CPU knows by the physical address"
            }
        };
        f.write_str(why)
    }
}

impl core::error::Error for AttributeError {}
