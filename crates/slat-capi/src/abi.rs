//! Values of the interface, as C has them and as the engine has them.

use core::ffi::c_void;
use slat::format::{AttributeError, Software};
use slat::{
    Access, Attributes, ChangeError, Execute, Gpa, GpaRange, Hpa, Interruption, MapError, Memory,
    NewError, PageSize, RangeError, Rights, SpaceError, SplitError, Translation, UnmapError,
    UnmappedRun,
};

/// The outcome of a call. Each function names the values that it may return other than
/// `SLAT_STATUS_OK`, `SLAT_STATUS_NULL_POINTER`, `SLAT_STATUS_HANDLE`, `SLAT_STATUS_BUSY`, and
/// `SLAT_STATUS_ARGUMENT` for a pointer that is not aligned.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum slat_status {
    /// All was done.
    Ok = 0,
    /// A pointer that must not be null is null; nothing was done.
    NullPointer,
    /// No live handle at this address: `slat_create` did not make one there, or it was destroyed.
    /// For `slat_create`: the storage holds a live handle already. Nothing was done.
    Handle,
    /// Another thread, or a function that called back from a call in progress, uses the handle;
    /// nothing was done.
    Busy,
    /// A number that its enumeration lacks, an unknown flag, a pointer that is not aligned, or a
    /// size that is not a power of two; nothing was done.
    Argument,
    /// The library was built without this format.
    Format,
    /// The format cannot translate guest addresses of that many bits.
    AddressBits,
    /// The range is empty, not aligned to pages, or ends beyond the guest's addresses; nothing was
    /// done.
    Range,
    /// The host address is not aligned to pages, or has more bits than an entry can hold; nothing
    /// was done.
    HostAddress,
    /// The format has no leaf of that size; nothing was done.
    LeafSize,
    /// The format, as configured, has no leaf with these rights, state or memory type; nothing was
    /// done.
    Attributes,
    /// Something else is mapped there; nothing was done.
    Occupied,
    /// The range ends inside a block: split it first. Nothing was done.
    CutsBlock,
    /// The platform has no more frames. The function says what was done.
    OutOfFrames,
    /// The bitmap has fewer bits than the range has pages; nothing was done.
    Bitmap,
    /// The format, as configured, does not record what the guest uses; nothing was done.
    NotRecorded,
    /// Nothing is mapped there.
    NotMapped,
    /// The shootdown belongs to another space; nothing was done.
    Foreign,
    /// A register of the CPU cannot hold the value, or the CPU lacks a feature that the format was
    /// configured for.
    Unsupported,
    /// Another user of the engine, not through this interface, holds an entry. What precedes the
    /// address is done.
    Contended,
}

/// The progress of an operation.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct slat_result {
    /// Whether all was done, or why not.
    pub status: slat_status,
    /// The guest address where it stopped. Everything before it is done, unless the status says
    /// that nothing was done. 0 if all was done.
    pub at: u64,
    /// How much was done, in bytes of guest memory or in pages, as the function says.
    pub done: u64,
}

impl slat_result {
    pub(crate) const fn refused(status: slat_status) -> Self {
        Self { status, at: 0, done: 0 }
    }

    pub(crate) fn of<E: Into<slat_status>>(result: Result<u64, Interruption<E>>) -> Self {
        match result {
            Ok(done) => Self { status: slat_status::Ok, at: 0, done },
            Err(Interruption { at, reason }) => Self { status: reason.into(), at: at.0, done: 0 },
        }
    }
}

/// The obligation to invalidate what operations left stale in TLBs. Until the caller has passed it
/// to `slat_complete`, a vCPU may go on using the old rights. A later one of the same space
/// includes the earlier ones. If the caller loses it, it stays among what the space owes, and the
/// next call that completes covers it.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct slat_shootdown {
    /// The space; 0 if nothing is owed. Only the library uses it.
    pub space: u64,
    /// The number of the last operation that it includes. Only the library uses it.
    pub ticket: u64,
}

impl slat_shootdown {
    pub(crate) const NOTHING: Self = Self { space: 0, ticket: 0 };
}

/// The result of an operation, and the invalidation that the caller has to complete, whatever the
/// status.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct slat_owing {
    /// The progress of the operation.
    pub result: slat_result,
    /// To be passed to `slat_complete`.
    pub owed: slat_shootdown,
}

/// An invalidation of TLBs and walk caches.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct slat_invalidation {
    /// The first guest address; if `bytes` is 0, all of the guest.
    pub start: u64,
    /// The number of bytes from there on; 0 for all of the guest.
    pub bytes: u64,
    /// The size of every changed leaf, in bytes, if all have one size (Arm: a hint of a level);
    /// else 0.
    pub leaf: u64,
    /// The guest's VMID or ASID, or the number that tags its EPT root.
    pub vmid: u16,
    /// Tables were unlinked: invalidate walk caches, too, and not last levels only.
    pub tables: bool,
}

/// The caches to make coherent before the guest sees memory.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum slat_maintenance {
    /// Data, cleaned and invalidated to the point of coherency (Arm: `dc civac`).
    Data = 0,
    /// Data, and instructions: the guest may fetch what the host has written (Arm: `ic` as well).
    Instructions,
}

/// Which changes of a live entry's size the CPUs allow without a break.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum slat_break_before_make {
    /// Every change breaks: Arm's FEAT_BBM levels 0 and 1, Power.
    Always = 0,
    /// FEAT_BBM level 2, where the hypervisor handles the TLB conflict abort.
    ConflictHandled,
    /// FEAT_BBM level 3, x86, RISC-V.
    Never,
}

/// The machine under the tables: functions of the hypervisor, each of which gets `context` first.
///
/// The library copies the structure. Its user promises, for as long as a space made from it lives:
///
/// 1. `allocate` returns the physical address of memory of that size, aligned to it, that no other
///    code uses until it is passed to `free`, and that entries of the format can hold; 0 if there
///    is none.
/// 2. `phys_to_virt` of an address inside such a frame points to that memory, readable and writable
///    until the frame is freed, the same at every call, and is not null.
/// 3. `invalidate` returns only when no CPU can use a translation, or a walk-cache entry, that it
///    names: on every CPU that may hold entries of the guest; `invalidate_local`, only when the
///    calling CPU cannot.
/// 4. No function unwinds, by an exception or `longjmp`.
/// 5. Each thread that calls the library may call the functions. None of them calls the library
///    with the same space, which would return `SLAT_STATUS_BUSY`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct slat_platform {
    /// Passed to each of the functions; may be null.
    pub context: *mut c_void,
    /// Allocates a frame for a table or a root: `bytes` bytes, a power of two of at least 4 KiB,
    /// aligned to its size, with any content. Returns 0 if there is none.
    pub allocate: Option<unsafe extern "C" fn(context: *mut c_void, bytes: usize) -> u64>,
    /// Takes back a frame of `bytes` bytes, which neither software nor hardware reaches any more.
    pub free: Option<unsafe extern "C" fn(context: *mut c_void, frame: u64, bytes: usize)>,
    /// Returns the address at which the hypervisor reaches a frame.
    pub phys_to_virt: Option<unsafe extern "C" fn(context: *mut c_void, frame: u64) -> *mut c_void>,
    /// Makes earlier stores to tables visible to the walkers of all CPUs (Arm: `dsb ishst`).
    pub publish: Option<unsafe extern "C" fn(context: *mut c_void)>,
    /// Makes earlier stores to tables visible, invalidates, and waits for completion on every CPU
    /// that may hold entries of the guest. `what` is valid during the call.
    pub invalidate:
        Option<unsafe extern "C" fn(context: *mut c_void, what: *const slat_invalidation)>,
    /// The same for the calling CPU alone, which faulted and goes on with the rights of
    /// `slat_relax`. Null for `invalidate`, which then reaches every CPU at each such fault. Not
    /// called for x86 and Power.
    pub invalidate_local:
        Option<unsafe extern "C" fn(context: *mut c_void, what: *const slat_invalidation)>,
    /// Makes `bytes` bytes of memory at a host address coherent. Null where the machine needs no
    /// maintenance (x86, RISC-V, Power; Arm with FEAT_S2FWB and CTR_EL0.DIC).
    pub maintain: Option<
        unsafe extern "C" fn(context: *mut c_void, memory: u64, bytes: u64, what: slat_maintenance),
    >,
    /// One of `enum slat_break_before_make`: that of the CPU that allows least.
    pub break_before_make: u32,
}

/// A format of tables.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum slat_format_kind {
    /// Arm stage 2, 4 KiB granule: leaves of 4k, 2m, 1g.
    Arm64K4 = 0,
    /// Arm stage 2, 16 KiB granule: 16k, 32m.
    Arm64K16,
    /// Arm stage 2, 64 KiB granule: 64k, 512m.
    Arm64K64,
    /// Arm stage 2, 4 KiB granule with FEAT_LPA2: 52-bit addresses.
    Arm64Lpa2K4,
    /// Arm stage 2, 16 KiB granule with FEAT_LPA2: 52-bit addresses, and leaves of 64g.
    Arm64Lpa2K16,
    /// Intel EPT: 4k, 2m, 1g.
    Ept1g,
    /// Intel EPT of CPUs without 1g blocks.
    Ept2m,
    /// AMD nested paging: 4k, 2m, 1g.
    Npt1g,
    /// AMD nested paging without 1g blocks.
    Npt2m,
    /// Power radix, partition-scoped: 4k, 2m, 1g.
    PowerK4,
    /// Power radix, partition-scoped: 64k, 2m, 1g.
    PowerK64,
    /// RISC-V's G-stage of a CPU whose widest mode is Sv39x4: 4k, 2m, 1g.
    RiscvSv39x4,
    /// The same, Sv48x4.
    RiscvSv48x4,
    /// The same, Sv57x4.
    RiscvSv57x4,
}

/// Arm: HCR_EL2.FWB, stage 2 forces the memory type. EPT: normal memory ignores the guest's PAT.
pub const SLAT_FORMAT_FORCED_WRITE_BACK: u32 = 1 << 0;
/// Arm: VTCR_EL2.HD, hardware marks the first write to a clean leaf.
pub const SLAT_FORMAT_HARDWARE_DIRTY: u32 = 1 << 1;
/// Arm: FEAT_XNX; EPT: mode-based execute control. Rights to execute differ by level.
pub const SLAT_FORMAT_SPLIT_EXECUTE: u32 = 1 << 2;
/// EPT: bit 6 of the EPT pointer, hardware sets accessed and dirty bits.
pub const SLAT_FORMAT_ACCESSED_DIRTY: u32 = 1 << 3;
/// RISC-V: Svpbmt, leaves have a memory type.
pub const SLAT_FORMAT_MEMORY_TYPES: u32 = 1 << 4;

/// A format as a CPU implements it. `slat_default_format` fills it.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct slat_format {
    /// One of `enum slat_format_kind`.
    pub kind: u32,
    /// `SLAT_FORMAT_...`; flags of other formats have no effect.
    pub flags: u32,
    /// Bits of a host physical address that the CPU implements; 0 for as many as an entry can hold.
    pub output_bits: u32,
}

/// Memory type of a leaf.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum slat_memory {
    /// Write-back cacheable.
    Normal = 0,
    /// Normal, not cacheable.
    NonCacheable,
    /// A device, with early acknowledgement of writes.
    Device,
    /// A device, without early acknowledgement of writes.
    DeviceStrict,
}

/// Which levels of the guest may execute from a leaf.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum slat_execute {
    /// No level.
    None = 0,
    /// The guest's kernel and user programs.
    All,
    /// User programs only.
    User,
    /// The guest's kernel only.
    Kernel,
}

/// The kind of guest access in the fault that `slat_relax` answers.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum slat_access {
    /// A read.
    Read = 0,
    /// A write.
    Write,
    /// A fetch; the fault does not tell the level.
    Execute,
    /// A fetch by a user program.
    ExecuteUser,
    /// A fetch by the guest's kernel.
    ExecuteKernel,
}

/// The guest may read.
pub const SLAT_READ: u32 = 1 << 0;
/// The guest may write. Without `SLAT_DIRTY`, hardware marks the first write.
pub const SLAT_WRITE: u32 = 1 << 1;
/// The leaf was used. Where hardware does not set this, a use of a leaf without it faults.
pub const SLAT_ACCESSED: u32 = 1 << 2;
/// The leaf was written, or may have been.
pub const SLAT_DIRTY: u32 = 1 << 3;
/// The first software bit, which the hypervisor may use.
pub const SLAT_SOFTWARE_A: u32 = 1 << 4;
/// The second software bit.
pub const SLAT_SOFTWARE_B: u32 = 1 << 5;
/// Memory that the guest may read and write, as a fault maps it: accessed and dirty.
pub const SLAT_RAM: u32 = 15;

/// Rights, state and memory type of a leaf, the same for all architectures.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct slat_attributes {
    /// `SLAT_READ` to `SLAT_SOFTWARE_B`.
    pub flags: u32,
    /// One of `enum slat_execute`.
    pub execute: u32,
    /// One of `enum slat_memory`.
    pub memory: u32,
}

/// The result of translating a guest address.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct slat_translation {
    /// The host address of the byte at that guest address.
    pub hpa: u64,
    /// The size of the leaf, in bytes.
    pub leaf: u64,
    /// The leaf's rights, state and memory type.
    pub attributes: slat_attributes,
}

/// Adjacent leaves of one size, with the same attributes, that were unmapped.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct slat_unmapped_run {
    /// The first guest address.
    pub gpa: u64,
    /// The memory behind them, which no CPU reaches any more.
    pub hpa: u64,
    /// The size of all leaves together, in bytes.
    pub bytes: u64,
    /// The size of each leaf, in bytes.
    pub leaf: u64,
    /// Rights and memory type, and the state at the moment of unmapping.
    pub attributes: slat_attributes,
}

/// The root of the tables, where hardware starts its walks.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct slat_geometry {
    /// The host address of the root.
    pub root: u64,
    /// The number of entries of the root, of 8 bytes each.
    pub root_entries: u64,
    /// The level of the root's entries; pages are at level 0.
    pub root_level: u32,
    /// Bits of a guest physical address.
    pub address_bits: u32,
}

/// Makes a range of guest addresses.
pub(crate) fn range(start: u64, bytes: u64) -> Result<GpaRange, slat_status> {
    GpaRange::new(Gpa(start), bytes).map_err(slat_status::from)
}

pub(crate) fn size(bytes: u64) -> Result<PageSize, slat_status> {
    PageSize::from_bytes(bytes).ok_or(slat_status::Argument)
}

impl slat_attributes {
    const FLAGS: u32 = SLAT_RAM | SLAT_SOFTWARE_A | SLAT_SOFTWARE_B;

    pub(crate) fn decoded(self) -> Result<Attributes, slat_status> {
        let has = |flag| self.flags & flag != 0;
        if self.flags & !Self::FLAGS != 0 {
            return Err(slat_status::Argument);
        }
        Ok(Attributes {
            read: has(SLAT_READ),
            write: has(SLAT_WRITE),
            execute: execute(self.execute)?,
            memory: match self.memory {
                0 => Memory::Normal,
                1 => Memory::NonCacheable,
                2 => Memory::Device,
                3 => Memory::DeviceStrict,
                _ => return Err(slat_status::Argument),
            },
            accessed: has(SLAT_ACCESSED),
            dirty: has(SLAT_DIRTY),
            software: Software::new(has(SLAT_SOFTWARE_A), has(SLAT_SOFTWARE_B)),
        })
    }

    /// Decodes the rights; ignores everything except `SLAT_READ`, `SLAT_WRITE` and the right to
    /// execute.
    pub(crate) fn rights(self) -> Result<Rights, slat_status> {
        let Attributes { read, write, execute, .. } = self.decoded()?;
        Ok(Rights { read, write, execute })
    }
}

fn execute(number: u32) -> Result<Execute, slat_status> {
    Ok(match number {
        0 => Execute::None,
        1 => Execute::All,
        2 => Execute::User,
        3 => Execute::Kernel,
        _ => return Err(slat_status::Argument),
    })
}

pub(crate) fn access(number: u32) -> Result<Access, slat_status> {
    Ok(match number {
        0 => Access::Read,
        1 => Access::Write,
        2 => Access::Execute,
        3 => Access::ExecuteUser,
        4 => Access::ExecuteKernel,
        _ => return Err(slat_status::Argument),
    })
}

impl From<Attributes> for slat_attributes {
    fn from(of: Attributes) -> Self {
        let flags = [
            (of.read, SLAT_READ),
            (of.write, SLAT_WRITE),
            (of.accessed, SLAT_ACCESSED),
            (of.dirty, SLAT_DIRTY),
            (of.software.contains(Software::A), SLAT_SOFTWARE_A),
            (of.software.contains(Software::B), SLAT_SOFTWARE_B),
        ];
        let execute = match of.execute {
            Execute::None => slat_execute::None,
            Execute::All => slat_execute::All,
            Execute::User => slat_execute::User,
            Execute::Kernel => slat_execute::Kernel,
        };
        let memory = match of.memory {
            Memory::Normal => slat_memory::Normal,
            Memory::NonCacheable => slat_memory::NonCacheable,
            Memory::Device => slat_memory::Device,
            Memory::DeviceStrict => slat_memory::DeviceStrict,
        };
        Self {
            flags: flags.iter().fold(0, |all, (on, flag)| if *on { all | flag } else { all }),
            execute: execute as u32,
            memory: memory as u32,
        }
    }
}

impl From<Translation> for slat_translation {
    fn from(of: Translation) -> Self {
        let Hpa(hpa) = of.hpa;
        Self { hpa, leaf: of.size.bytes(), attributes: of.attributes.into() }
    }
}

impl slat_unmapped_run {
    pub(crate) const NOTHING: Self = Self {
        gpa: 0,
        hpa: 0,
        bytes: 0,
        leaf: 0,
        attributes: slat_attributes { flags: 0, execute: 0, memory: 0 },
    };
}

impl From<UnmappedRun> for slat_unmapped_run {
    fn from(of: UnmappedRun) -> Self {
        Self {
            gpa: of.gpa.0,
            hpa: of.hpa.0,
            bytes: of.bytes,
            leaf: of.size.bytes(),
            attributes: of.attributes.into(),
        }
    }
}

impl From<RangeError> for slat_status {
    fn from(_: RangeError) -> Self {
        Self::Range
    }
}

impl From<AttributeError> for slat_status {
    fn from(_: AttributeError) -> Self {
        Self::Attributes
    }
}

impl From<NewError> for slat_status {
    fn from(reason: NewError) -> Self {
        match reason {
            NewError::OutOfFrames { .. } => Self::OutOfFrames,
            _ => Self::AddressBits,
        }
    }
}

// The engine's errors are `non_exhaustive`: a new one that this file does not know becomes
// `Argument`.

impl From<MapError> for slat_status {
    fn from(reason: MapError) -> Self {
        match reason {
            MapError::Range(_) => Self::Range,
            MapError::HostAddress { .. } => Self::HostAddress,
            MapError::LeafSize(_) => Self::LeafSize,
            MapError::Attributes(_) => Self::Attributes,
            MapError::Occupied { .. } => Self::Occupied,
            MapError::CacheEmpty => Self::OutOfFrames,
            MapError::Contended => Self::Contended,
            _ => Self::Argument,
        }
    }
}

impl From<ChangeError> for slat_status {
    fn from(reason: ChangeError) -> Self {
        match reason {
            ChangeError::Range(_) => Self::Range,
            ChangeError::CutsBlock { .. } => Self::CutsBlock,
            ChangeError::Bitmap { .. } => Self::Bitmap,
            ChangeError::Attributes(_) => Self::Attributes,
            ChangeError::NotRecorded => Self::NotRecorded,
            ChangeError::Contended => Self::Contended,
            _ => Self::Argument,
        }
    }
}

impl From<UnmapError> for slat_status {
    fn from(reason: UnmapError) -> Self {
        match reason {
            UnmapError::Range(_) => Self::Range,
            UnmapError::CutsBlock { .. } => Self::CutsBlock,
            UnmapError::Contended => Self::Contended,
            _ => Self::Argument,
        }
    }
}

impl From<SplitError> for slat_status {
    fn from(reason: SplitError) -> Self {
        match reason {
            SplitError::Range(_) => Self::Range,
            SplitError::LeafSize(_) => Self::LeafSize,
            SplitError::CacheEmpty => Self::OutOfFrames,
            SplitError::Contended => Self::Contended,
            _ => Self::Argument,
        }
    }
}

impl From<SpaceError> for slat_status {
    fn from(reason: SpaceError) -> Self {
        match reason {
            SpaceError::Map(reason) => reason.into(),
            SpaceError::Change(reason) => reason.into(),
            SpaceError::Unmap(reason) => reason.into(),
            SpaceError::Contended => Self::Contended,
            SpaceError::OutOfFrames => Self::OutOfFrames,
            _ => Self::Argument,
        }
    }
}
