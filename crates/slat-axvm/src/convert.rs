//! Conversions between the types of axaddrspace and those of the engine.

use ax_memory_addr::PhysAddr;
use axaddrspace::{AddrSpaceError, AddrSpaceResult, MappingFlags};
use axvm_types::GuestPhysAddr;
use slat::format::AttributeError;
use slat::{
    Attributes, Execute, Format, Gpa, GpaRange, Hpa, Interruption, MapError, Memory, PageSize,
    SpaceError,
};

/// Checks `size` bytes from `start` against tables for addresses of `bits` bits.
pub fn range(start: GuestPhysAddr, size: usize, bits: u32) -> AddrSpaceResult<GpaRange> {
    let address = start.as_usize();
    aligned("guest physical address", address, PageSize::SIZE_4K)?;
    aligned("mapping size", size, PageSize::SIZE_4K)?;
    let Some(end) = address.checked_add(size) else {
        return Err(AddrSpaceError::AddressOverflow { start: address, size });
    };
    let (space_start, space_end) = (0.into(), (1_usize << bits).into());
    if end > 1 << bits {
        return Err(AddrSpaceError::OutOfRange { start, size, space_start, space_end });
    }
    GpaRange::new(Gpa(address as u64), size as u64).map_err(|_| AddrSpaceError::InvalidMapping)
}

/// Checks a host address for leaves of `size`.
pub fn host(address: PhysAddr, size: PageSize) -> AddrSpaceResult<Hpa> {
    aligned("host physical address", address.as_usize(), size)?;
    Ok(Hpa(address.as_usize() as u64))
}

/// Refuses a value that is not a multiple of a leaf size.
pub fn aligned(subject: &'static str, value: usize, size: PageSize) -> AddrSpaceResult {
    let alignment = size.bytes() as usize;
    match value.is_multiple_of(alignment) {
        true => Ok(()),
        false => Err(AddrSpaceError::Unaligned { subject, value, alignment }),
    }
}

/// Returns the engine's leaf size for a page size, if the format has it.
pub fn leaf_size<F: Format>(size: axaddrspace::PageSize) -> AddrSpaceResult<PageSize> {
    let size = PageSize::from_bytes(usize::from(size) as u64);
    let has = |size: &PageSize| F::level_of(*size).is_ok();
    size.filter(has).ok_or(AddrSpaceError::InvalidMapping)
}

/// Returns axaddrspace's page size for a leaf. It has none for a group of leaves, which counts as
/// the leaves in it.
pub const fn page_size(size: PageSize) -> axaddrspace::PageSize {
    match size.shift() {
        30.. => axaddrspace::PageSize::Size1G,
        21.. => axaddrspace::PageSize::Size2M,
        _ => axaddrspace::PageSize::Size4K,
    }
}

/// Returns the attributes of leaves with `flags`: normal memory where leaves have no memory type.
pub fn attributes<F: Format>(format: &F, flags: MappingFlags) -> AddrSpaceResult<Attributes> {
    let has = |flag| flags.contains(flag);
    let write = has(MappingFlags::WRITE);
    let (read, execute) = (write || has(MappingFlags::READ), has(MappingFlags::EXECUTE));
    let execute = if execute { Execute::All } else { Execute::None };
    let memory = match (has(MappingFlags::DEVICE), has(MappingFlags::UNCACHED)) {
        (true, _) => Memory::Device,
        (_, true) => Memory::NonCacheable,
        _ => Memory::Normal,
    };
    let typed = Attributes { read, write, execute, memory, dirty: write, ..Attributes::RAM };
    let untyped = Attributes { memory: Memory::Normal, ..typed };
    let expressed = match format.encode(typed) {
        Err(AttributeError::MemoryType) => format.encode(untyped).map(|_| untyped),
        encoded => encoded.map(|_| typed),
    };
    // In most formats a leaf without rights is not a leaf.
    let usable = read || execute != Execute::None;
    expressed.ok().filter(|_| usable).ok_or(AddrSpaceError::InvalidMapping)
}

/// Returns the flags of a leaf.
pub fn flags(of: Attributes) -> MappingFlags {
    let mut flags = MappingFlags::empty();
    flags.set(MappingFlags::READ, of.read);
    flags.set(MappingFlags::WRITE, of.write);
    flags.set(MappingFlags::EXECUTE, of.execute != Execute::None);
    flags.set(MappingFlags::DEVICE, matches!(of.memory, Memory::Device | Memory::DeviceStrict));
    flags.set(MappingFlags::UNCACHED, of.memory == Memory::NonCacheable);
    flags
}

/// Converts the reason for which the engine refused.
pub const fn refused(stopped: Interruption<SpaceError>) -> AddrSpaceError {
    match stopped.reason {
        SpaceError::Map(MapError::Occupied { .. }) => AddrSpaceError::MappingConflict,
        SpaceError::OutOfFrames => AddrSpaceError::MappingState,
        _ => AddrSpaceError::InvalidMapping,
    }
}
