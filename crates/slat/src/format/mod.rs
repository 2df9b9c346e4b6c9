//! Formats of page-table entries: one file for each, which only encodes and decodes bits.

#[cfg(feature = "arm64")]
pub mod arm64;
#[cfg(feature = "ept")]
pub mod ept;
mod geometry;
mod guest_root;
#[cfg(any(feature = "ept", feature = "npt"))]
mod long_mode;
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
pub use guest_root::GuestRoot;
pub use software::Software;

use crate::addr::{Hpa, LeafSizeError, PageSize};
use core::fmt;

/// The bits of one architecture's second-stage page-table entries (*entries*).
///
/// A value carries what its user configured (see [`arm64::Arm64`]). Everything that a walk depends
/// on is a constant, so that the compiler specialises the loops.
///
/// Levels count upwards from 0, the level of pages. Leaves stand at the levels `0..=LARGEST_LEAF`,
/// without gaps.
///
/// [`Format::MARK`] in an entry keeps other threads from changing it, for a bounded time. A valid
/// leaf with the mark is *sealed*. An entry that is invalid to hardware and has the mark is
/// *frozen*, or *retired* together with its table. So a run of entries without that bit holds no
/// marker.
///
/// # Safety
/// The walk dereferences what a format calls a table. Implementations promise:
/// 1. [`Format::kind`] of 0 is [`Kind::Empty`]; of [`Format::table`] at a level above 0
///    [`Kind::Table`]; of [`Format::leaf`] up to `LARGEST_LEAF` [`Kind::Leaf`], or with `MARK`
///    [`Kind::Sealed`]; of [`Format::frozen`] [`Kind::Frozen`]; of [`Format::retired`]
///    [`Kind::Retired`]; of [`Format::reserved`] [`Kind::Reserved`]; of [`Format::owned`]
///    [`Kind::Owned`]. No entry at level 0 is a table. Kind and address of a leaf do not depend on
///    its bits of `STATUS` and `SOFTWARE`; those of a table do not depend on its bits of
///    `TABLE_ACCESSED` and `AGEING`. Methods that make a leaf from a leaf keep kind and address.
///    [`Format::all_tables`] agrees with `kind`, and so does [`Format::all_pages`] for entries
///    without `MARK`. Different tokens make different reservations, and [`Format::owner`] returns
///    the word that [`Format::owned`] was given.
/// 2. [`Format::table_address`] returns the address that [`Format::table`], [`Format::frozen`] or
///    [`Format::retired`] was given.
/// 3. [`Format::geometry`] returns a root with a power of two of entries, at the levels from
///    [`Format::LOWEST_ROOT`] to 4, which covers at least `address_bits`.
/// 4. [`Format::TABLE_BYTES`], a power of two, holds the entries of a table below the root at any
///    level; a page holds the entries of a table at the root's level.
/// 5. When a host address grows by a page, and not to a multiple of `CARRY`, the value of
///    [`Format::leaf`] at level 0 grows by as much as it does from address 0 to the first page.
///    `CARRY` is 0, or a power of two that is larger than a page.
/// 6. [`Format::group`] is a power of two, and no larger than the number of entries of a table.
///    Kind and address of a leaf do not depend on `CONTIGUOUS`, and [`Format::attribute_bits`]
///    leaves it out.
pub unsafe trait Format: Copy + Send + Sync + 'static {
    /// Name of the format, as its manual has it.
    const NAME: &'static str;
    /// Base-2 logarithm of the page size in bytes.
    const PAGE_SHIFT: u32;
    /// Base-2 logarithm of the number of entries of a table below the root.
    const INDEX_BITS: u32;
    /// Base-2 logarithm of the number of entries of a table of pages, where that is smaller.
    const LAST_INDEX_BITS: u32 = Self::INDEX_BITS;
    /// Size and alignment, in bytes, of a table below the root. They are the same at all levels, so
    /// that one cache serves all.
    const TABLE_BYTES: usize = 1 << Self::PAGE_SHIFT;
    /// The lowest level at which a root may be. Arm also has roots of pages, which would save
    /// nothing.
    const LOWEST_ROOT: u8 = 1;
    /// The highest level at which a leaf may stand.
    const LARGEST_LEAF: u8;
    /// The bits of a leaf that the engine leaves to its user, by their number in [`Software`]: at
    /// least two, and 0 after the last. The engine may use the same bits in a table.
    const SOFTWARE: [u64; Software::MOST];
    /// Number of bits in [`Format::SOFTWARE`].
    const SOFTWARE_BITS: u8 = software::count(Self::SOFTWARE);
    /// Bits that hardware may set in a valid leaf (accessed, dirty), or that remember them.
    const STATUS: u64;
    /// Bit that keeps other threads from changing the entry that has it.
    const MARK: u64;
    /// Bit of a leaf that was used.
    const ACCESSED: u64;
    /// A leaf without any of these bits cannot be written by the guest.
    const WRITE: u64;
    /// A leaf without any of these bits was not written.
    const DIRTY: u64;
    /// Bit that hardware sets in a table when it walks through it; 0 where it does not.
    const TABLE_ACCESSED: u64;
    /// Bit of a table whose leaves an ageing thread still has to age.
    const AGEING: u64;
    /// Whether an entry that was emptied may be filled again only after an invalidation, because a
    /// CPU must not hold two translations of one address (Arm: break-before-make, at every level of
    /// FEAT_BBM; Power).
    const REFILL_BREAKS: bool;
    /// Whether a CPU may keep an entry in its TLB after it faulted there for lack of a right. If
    /// so, that CPU invalidates the entry once the right was given, before it runs the guest again
    /// ([`LocalFlush`](crate::LocalFlush)). It is true on Arm, where a permission fault invalidates
    /// nothing (DDI 0487, "TLB maintenance requirements"), and on RISC-V, where a fault orders
    /// nothing. It is false on x86, where the fault invalidates what translated the address (SDM
    /// 3C, "Operations that Invalidate Cached Mappings"; APM 2, 5.5), and on Power, where the CPU
    /// fetches the entry again before it faults (3.1B, 6.10.1.2).
    const KEEPS_FAULTING: bool;
    /// Number of bytes at whose multiples an address field of a page's entry ends: there the entry
    /// does not grow as the address does. 0 where there is no such end.
    const CARRY: u64 = 0;
    /// Bit of each leaf of a *group*, which a TLB may hold as one leaf: [`Format::group`] aligned
    /// neighbours that map adjacent memory and agree in all but accessed and dirty state. 0 where
    /// the format has no such bit.
    const CONTIGUOUS: u64 = 0;

    /// Returns where a walk starts, for guest addresses of `address_bits` bits.
    ///
    /// # Errors
    /// [`GeometryError`] names the sizes that are allowed.
    fn geometry(&self, address_bits: u32) -> Result<Geometry, GeometryError>;

    /// Returns the number of bits of a host physical address that an entry can hold.
    fn output_bits(&self) -> u32;

    /// Decodes `raw`, an entry of a table at `level`.
    fn kind(raw: u64, level: u8) -> Kind;

    /// Returns whether all entries of a run at `level` link tables, so that a walk that wants
    /// nothing below steps over the run. `common` has the bits that all entries have, `any` those
    /// that at least one has.
    fn all_tables(common: u64, any: u64, level: u8) -> bool;

    /// Returns whether all entries of a run at level 0, without a marker, are pages. `common` has
    /// the bits that all entries have.
    fn all_pages(common: u64) -> bool;

    /// Encodes attributes: returns the bits of a leaf, without address and level.
    ///
    /// # Errors
    /// [`AttributeError`] if the format, as configured, cannot express them.
    fn encode(&self, attributes: Attributes) -> Result<u64, AttributeError>;

    /// Returns the strictest memory type for devices that the format, as configured, has:
    /// [`Memory::DeviceStrict`] or [`Memory::Device`]; or [`Memory::Normal`] where leaves have no
    /// type and the physical address decides (RISC-V without Svpbmt, by its physical memory
    /// attributes). In the last case [`Platform::maintain`](crate::Platform::maintain) is called
    /// for the leaf as for memory.
    fn device(&self) -> Memory {
        let fits = |memory| self.encode(Attributes { memory, ..Attributes::RAM }).is_ok();
        let types = [Memory::DeviceStrict, Memory::Device];
        types.into_iter().find(|&memory| fits(memory)).unwrap_or(Memory::Normal)
    }

    /// Decodes the attributes of a leaf at `level`.
    fn decode(&self, raw: u64, level: u8) -> Attributes;

    /// Returns a leaf at `level` from attribute bits and an address aligned to its size.
    fn leaf(attribute_bits: u64, level: u8, hpa: Hpa) -> u64;

    /// Returns the attribute bits of a leaf at `level`, which a split copies to the smaller leaves.
    fn attribute_bits(raw: u64, level: u8) -> u64;

    /// Returns the address that the leaf `raw` at `level` maps.
    fn leaf_address(raw: u64, level: u8) -> Hpa;

    /// Returns the leaf `raw` moved up by `bytes`. Where an address field ends in between
    /// ([`Format::CARRY`]), the result may be another entry: callers compare it with the entry that
    /// they find, and check the address.
    #[inline(always)]
    fn further(raw: u64, bytes: u64) -> u64 {
        raw.wrapping_add(bytes)
    }

    /// Returns an entry, at `level`, that points to the table at `hpa`.
    fn table(hpa: Hpa, level: u8) -> u64;

    /// Returns the address of the table that `raw` points to. `raw` is of [`Kind::Table`],
    /// [`Kind::Frozen`] or [`Kind::Retired`].
    fn table_address(raw: u64) -> Hpa;

    /// Returns a frozen marker that carries the table address `hpa`, or 0 for none.
    fn frozen(hpa: Hpa) -> u64;

    /// Returns a marker for an entry of a table that was unlinked; it carries the table address
    /// `hpa`, or 0 for none.
    fn retired(hpa: Hpa) -> u64;

    /// Returns an empty entry that carries `token`, of [`TOKEN_BITS`] bits, which names the
    /// operation that emptied or reserved it. It is invalid to hardware, and any thread may change
    /// it.
    fn reserved(token: u64) -> u64;

    /// Returns an empty entry that carries `word`, of [`TOKEN_BITS`] bits, for its owner. It is
    /// invalid to hardware.
    fn owned(word: u64) -> u64;

    /// Returns the word of an owned entry.
    fn owner(raw: u64) -> u64;

    /// Returns the leaf without the right to write; bits of it remember the dirty state. Returns
    /// `raw` itself if it had no such right.
    fn write_protected(raw: u64) -> u64;

    /// Returns the leaf without the right to execute.
    fn execute_protected(raw: u64) -> u64;

    /// Returns the leaf with the right to read, or without it; `raw` itself on formats whose leaves
    /// are always readable.
    fn readable(raw: u64, read: bool) -> u64;

    /// Returns the leaf as a fault for `access` leaves it: accessed; for a write also writable and
    /// dirty, for a fetch also executable ([`Execute::with`]).
    fn relaxed(&self, raw: u64, access: Access) -> u64;

    /// Returns whether the use of a leaf that is not accessed leaves a trace: hardware marks the
    /// leaf, or the use faults.
    #[inline(always)]
    fn records_accessed(&self) -> bool {
        true
    }

    /// Returns whether [`Format::MARK`] may stand in an entry that is valid to hardware. It may not
    /// where a device that takes the bit for another walks the tables. Then no leaf is collapsed,
    /// and no table write-protected.
    #[inline(always)]
    fn marks_valid(&self) -> bool {
        true
    }

    /// Returns whether accesses of a guest that switches its caches off are cached all the same
    /// (x86; Arm with FEAT_S2FWB in use). Elsewhere the hypervisor has to maintain the caches for
    /// them.
    #[inline(always)]
    fn forces_caches(&self) -> bool {
        true
    }

    /// Returns the leaf without its dirty state, if hardware marks the next write or the write
    /// faults. A leaf whose next write would go unmarked stays dirty.
    fn cleaned(&self, raw: u64) -> u64;

    /// Returns the manual's number of `level`, wherever the root stands; for dumps.
    fn level_name(level: u8) -> i8;

    /// Returns the number of leaves at `level` that make a group; 1 where none do.
    fn group(_level: u8) -> usize {
        1
    }

    /// Returns the base-2 logarithm of the number of bytes that an entry at `level` covers.
    #[inline(always)]
    fn shift(level: u8) -> u32 {
        entry_shift::<Self>(level)
    }

    /// Returns the number of entries of a table at `level`, below the root.
    #[inline(always)]
    fn entries(level: u8) -> usize {
        1 << if level == 0 { Self::LAST_INDEX_BITS } else { Self::INDEX_BITS }
    }

    /// Returns the size of a leaf at `level`.
    #[inline(always)]
    fn size(level: u8) -> PageSize {
        PageSize::from_shift(Self::shift(level))
    }

    /// Returns the level of leaves of `size`.
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

/// [`Format::shift`], for functions that are `const`.
pub(crate) const fn entry_shift<F: Format>(level: u8) -> u32 {
    let even = F::PAGE_SHIFT + F::INDEX_BITS * level as u32;
    // Below an entry at a higher level there is a table of pages, which may have fewer entries.
    if level == 0 { even } else { even - (F::INDEX_BITS - F::LAST_INDEX_BITS) }
}

/// Number of entries that a walk reads together.
pub const RUN: usize = 8;

/// Number of bits of a token, or of an owner's word, in an empty entry.
pub const TOKEN_BITS: u32 = 48;

/// The access of a guest that faulted, which [`Guard::relax`](crate::Guard::relax) handles.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Access {
    /// A read: the leaf becomes accessed.
    Read,
    /// A write: the leaf becomes accessed, writable and dirty.
    Write,
    /// An instruction fetch at a privilege level that the fault does not report. The leaf becomes
    /// accessed, and executable at all levels if it was so at none. A leaf that one level may
    /// execute keeps its right: it is not known whether the other level asked for it.
    Execute,
    /// An instruction fetch of a user program: user programs get the right. Where the format, as
    /// configured, does not tell the levels apart, all levels get it.
    ExecuteUser,
    /// An instruction fetch of the guest's kernel; otherwise as [`Access::ExecuteUser`].
    ExecuteKernel,
}

impl Access {
    /// Returns whether it is an instruction fetch, at any privilege level.
    pub const fn is_fetch(self) -> bool {
        matches!(self, Self::Execute | Self::ExecuteUser | Self::ExecuteKernel)
    }
}

/// A set of accesses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Accesses(u8);

impl Accesses {
    const ALL: [Access; 5] =
        [Access::Read, Access::Write, Access::Execute, Access::ExecuteUser, Access::ExecuteKernel];

    /// No access.
    pub const NONE: Self = Self(0);

    /// Returns the set with `access` as well.
    #[must_use]
    pub const fn with(self, access: Access) -> Self {
        Self(self.0 | 1 << access as u8)
    }

    /// Returns whether `access` is one of them.
    pub const fn has(self, access: Access) -> bool {
        self.0 & 1 << access as u8 != 0
    }

    /// Returns the accesses.
    pub fn iter(self) -> impl Iterator<Item = Access> {
        Self::ALL.into_iter().filter(move |access| self.has(*access))
    }
}

impl From<Access> for Accesses {
    fn from(access: Access) -> Self {
        Self::NONE.with(access)
    }
}

/// Content of an entry of a table (an entry).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Nothing.
    Empty,
    /// Nothing. A fault has reserved the entry, or an unmap has emptied it.
    Reserved,
    /// Nothing, and nothing may be mapped here; the entry carries the word of its owner.
    Owned,
    /// A marker: a thread is changing the entry, and hardware finds it invalid.
    Frozen,
    /// A marker: the table that has this entry was unlinked.
    Retired,
    /// A page or block.
    Leaf,
    /// A page or block that hardware goes on using while a thread is changing it.
    Sealed,
    /// The address of a table one level below.
    Table,
}

impl Kind {
    /// Returns whether a leaf or a table may be written to the entry.
    #[inline(always)]
    pub const fn is_vacant(self) -> bool {
        matches!(self, Self::Empty | Self::Reserved)
    }
}

/// Rights, memory type and state of a leaf, independent of the architecture.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Attributes {
    /// The guest may read.
    pub read: bool,
    /// The guest may write. If `dirty` is unset, hardware has to mark the first write.
    pub write: bool,
    /// Privilege levels that may execute.
    pub execute: Execute,
    /// Memory type.
    pub memory: Memory,
    /// The leaf was used. If it is unset, a use faults where hardware does not set it.
    pub accessed: bool,
    /// The leaf was written, or may have been.
    pub dirty: bool,
    /// Bits for the engine's user; hardware ignores them.
    pub software: Software,
}

impl Attributes {
    /// Normal memory that the guest may read, write and execute, as a fault maps it: accessed,
    /// dirty. Memory whose writes hardware marks for a log is mapped with `dirty: false`.
    pub const RAM: Self = Self {
        read: true,
        write: true,
        execute: Execute::All,
        memory: Memory::Normal,
        accessed: true,
        dirty: true,
        software: Software::NONE,
    };

    /// A device's registers, which the guest may read and write but not execute. The memory type is
    /// that of [`Format::device`]; the leaf is accessed and dirty. Every format can express it, so
    /// one caller maps a device on each.
    pub fn device<F: Format>(format: &F) -> Self {
        Self { execute: Execute::None, memory: format.device(), ..Self::RAM }
    }
}

/// Rights of the guest to a leaf.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Rights {
    /// The guest may read.
    pub read: bool,
    /// The guest may write.
    pub write: bool,
    /// Privilege levels that may execute.
    pub execute: Execute,
}

impl Rights {
    /// All rights.
    pub const ALL: Self = Self { read: true, write: true, execute: Execute::All };
    /// The right to read alone.
    pub const READ: Self = Self { read: true, write: false, execute: Execute::None };
}

/// Privilege levels that may execute from a leaf.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Execute {
    /// None.
    None,
    /// The guest's kernel and user programs.
    All,
    /// User programs only.
    User,
    /// The guest's kernel only.
    Kernel,
}

impl Execute {
    /// Returns the right after a fault for `access`: the present one and what the access asks for,
    /// no more.
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

    /// Returns whether the right suffices for `access`.
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
    /// Device memory with early acknowledgement of writes.
    Device,
    /// Device memory without early acknowledgement.
    DeviceStrict,
}

/// Attributes that the format, as configured, cannot express.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum AttributeError {
    /// A writable leaf that is not dirty, where hardware does not mark writes.
    CleanNeedsHardwareDirty,
    /// The right to execute for the kernel or user programs alone, where the CPU cannot tell them
    /// apart.
    ExecuteNeedsSplitRights,
    /// A leaf without the right to read, or with the right to write and not to read, where hardware
    /// or markers of the format need the right to read.
    NeedsRead,
    /// A memory type that the entries do not have.
    MemoryType,
    /// A software bit that the format lacks.
    SoftwareBits {
        /// The bits asked for.
        given: Software,
        /// Number of bits that the format has ([`Format::SOFTWARE_BITS`]).
        bits: u8,
    },
}

impl fmt::Display for AttributeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reason = match self {
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
                "this format has no such leaf without the right to read; give it, or unmap what \
                 the guest may not read"
            }
            Self::MemoryType => {
                "descriptors of this CPU lack that memory type; map as another, or as normal \
                 memory, where the CPU knows by the physical address"
            }
        };
        f.write_str(reason)
    }
}

impl core::error::Error for AttributeError {}
