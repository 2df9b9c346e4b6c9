//! A guest's tables: create, map, unmap, query, destroy. Each call that changes them has completed
//! all invalidation when it returns, also what earlier calls left owed.

use crate::abi::{
    SLAT_FORMAT_ACCESSED_DIRTY, SLAT_FORMAT_FORCED_WRITE_BACK, SLAT_FORMAT_HARDWARE_DIRTY,
    SLAT_FORMAT_MEMORY_TYPES, SLAT_FORMAT_SPLIT_EXECUTE,
};
use crate::abi::{
    range, size, slat_attributes, slat_format, slat_format_kind, slat_geometry, slat_platform,
    slat_result, slat_status, slat_translation, slat_unmapped_run,
};
use crate::handle::{self, Any, EnteredSpace, of_each, slat_space};
use crate::machine::Machine;
use core::ffi::c_void;
use slat::{AddressSpace, Format, Gpa, Hpa, UnmappedRun, Vmid};

/// Fills `format` with the features that most CPUs with this format have. `kind` is one of the
/// values of `enum slat_format_kind`. A CPU's registers say what it really has
/// (`slat_arm64_format`).
///
/// Returns `SLAT_STATUS_ARGUMENT` if the enumeration lacks `kind`, and then leaves `format` as it
/// is.
///
/// # Safety
/// `format` is null or may be written.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_default_format(kind: u32, format: *mut slat_format) -> slat_status {
    let flags = match kind {
        0..=4 => SLAT_FORMAT_SPLIT_EXECUTE,
        5 | 6 => SLAT_FORMAT_ACCESSED_DIRTY | SLAT_FORMAT_FORCED_WRITE_BACK,
        7..=13 => 0,
        _ => return slat_status::Argument,
    };
    // SAFETY: null or valid for a write, by the caller's promise.
    unsafe { store(format, slat_format { kind, flags, output_bits: 0 }) }
}

/// Writes a result to the caller's memory.
///
/// # Safety
/// `place` is null, or, if it is aligned, may be written.
pub(crate) unsafe fn store<T>(place: *mut T, value: T) -> slat_status {
    if place.is_null() {
        return slat_status::NullPointer;
    }
    if !place.is_aligned() {
        return slat_status::Argument;
    }
    // SAFETY: not null, aligned, and the caller's to write.
    unsafe { place.write(value) };
    slat_status::Ok
}

/// Reads an argument.
///
/// # Safety
/// `place` is null, or, if it is aligned, points to a value.
pub(crate) unsafe fn load<T: Copy>(place: *const T) -> Result<T, slat_status> {
    if place.is_null() {
        return Err(slat_status::NullPointer);
    }
    if !place.is_aligned() {
        return Err(slat_status::Argument);
    }
    // SAFETY: not null, aligned, and a value by the caller's promise.
    Ok(unsafe { place.read() })
}

fn make<F: Format>(
    format: F,
    (vmid, address_bits): (Vmid, u32),
    machine: &'static Machine,
) -> Result<Any, slat_status>
where
    Any: From<AddressSpace<'static, F, Machine>>,
{
    Ok(AddressSpace::new(format, vmid, address_bits, machine)?.into())
}

/// Returns the bits of host addresses: as many as entries hold, or fewer if the CPU has fewer.
const fn narrowed(of: &slat_format, widest: u32) -> u32 {
    match of.output_bits {
        0 => widest,
        bits if bits < widest => bits,
        _ => widest,
    }
}

#[cfg(feature = "arm64-4k")]
pub(crate) fn arm64<const SHIFT: u32, const DS: bool>(
    of: &slat_format,
) -> slat::format::arm64::Arm64<SHIFT, DS> {
    let widest = slat::format::arm64::Arm64::default();
    slat::format::arm64::Arm64 {
        forced_write_back: of.flags & SLAT_FORMAT_FORCED_WRITE_BACK != 0,
        hardware_dirty: of.flags & SLAT_FORMAT_HARDWARE_DIRTY != 0,
        split_execute: of.flags & SLAT_FORMAT_SPLIT_EXECUTE != 0,
        output_bits: narrowed(of, widest.output_bits),
        ..widest
    }
}

#[cfg(feature = "ept")]
fn ept<const HUGE_1G: bool>(of: &slat_format) -> slat::format::ept::Ept<HUGE_1G> {
    let widest = slat::format::ept::Ept::<HUGE_1G>::default();
    slat::format::ept::Ept {
        accessed_dirty: of.flags & SLAT_FORMAT_ACCESSED_DIRTY != 0,
        split_execute: of.flags & SLAT_FORMAT_SPLIT_EXECUTE != 0,
        forced_write_back: of.flags & SLAT_FORMAT_FORCED_WRITE_BACK != 0,
        output_bits: narrowed(of, widest.output_bits),
        ..widest
    }
}

#[cfg(feature = "npt")]
fn npt<const HUGE_1G: bool>(of: &slat_format) -> slat::format::npt::Npt<HUGE_1G> {
    let widest = slat::format::npt::Npt::<HUGE_1G>::default();
    slat::format::npt::Npt { output_bits: narrowed(of, widest.output_bits), ..widest }
}

#[cfg(feature = "power")]
fn power<const SHIFT: u32>(of: &slat_format) -> slat::format::power::Power<SHIFT> {
    let widest = slat::format::power::Power::<SHIFT>::default();
    slat::format::power::Power { output_bits: narrowed(of, widest.output_bits) }
}

#[cfg(feature = "riscv")]
fn riscv(of: &slat_format, widest: slat::format::riscv::Mode) -> slat::format::riscv::RiscV {
    let as_wide = slat::format::riscv::RiscV::default();
    slat::format::riscv::RiscV {
        widest,
        memory_types: of.flags & SLAT_FORMAT_MEMORY_TYPES != 0,
        output_bits: narrowed(of, as_wide.output_bits),
    }
}

/// Makes empty tables of one of the engine's formats.
fn create(
    of: &slat_format,
    guest: (Vmid, u32),
    machine: &'static Machine,
) -> Result<Any, slat_status> {
    #[cfg(feature = "riscv")]
    use slat::format::riscv::Mode;
    use slat_format_kind as kind;
    let all = SLAT_FORMAT_FORCED_WRITE_BACK
        | SLAT_FORMAT_HARDWARE_DIRTY
        | SLAT_FORMAT_SPLIT_EXECUTE
        | SLAT_FORMAT_ACCESSED_DIRTY
        | SLAT_FORMAT_MEMORY_TYPES;
    if of.flags & !all != 0 || of.kind > kind::RiscvSv57x4 as u32 {
        return Err(slat_status::Argument);
    }
    macro_rules! of_kind {
        ($($feature:literal: $kind:ident => $format:expr;)*) => {$(
            #[cfg(feature = $feature)]
            if of.kind == kind::$kind as u32 {
                return make($format, guest, machine);
            }
        )*};
    }
    of_kind! {
        "arm64-4k": Arm64K4 => arm64::<12, false>(of);
        "arm64": Arm64K16 => arm64::<14, false>(of);
        "arm64": Arm64K64 => arm64::<16, false>(of);
        "arm64": Arm64Lpa2K4 => arm64::<12, true>(of);
        "arm64": Arm64Lpa2K16 => arm64::<14, true>(of);
        "ept": Ept1g => ept::<true>(of);
        "ept": Ept2m => ept::<false>(of);
        "npt": Npt1g => npt::<true>(of);
        "npt": Npt2m => npt::<false>(of);
        "power": PowerK4 => power::<12>(of);
        "power": PowerK64 => power::<16>(of);
        "riscv": RiscvSv39x4 => riscv(of, Mode::Sv39x4);
        "riscv": RiscvSv48x4 => riscv(of, Mode::Sv48x4);
        "riscv": RiscvSv57x4 => riscv(of, Mode::Sv57x4);
    }
    Err(slat_status::Format)
}

/// Makes empty tables for guest physical addresses of `address_bits` bits, with the VMID `vmid`.
///
/// Returns `SLAT_STATUS_HANDLE` if `space` is live already; `SLAT_STATUS_ARGUMENT` for a number
/// that its enumeration lacks; `SLAT_STATUS_FORMAT`, `SLAT_STATUS_ADDRESS_BITS`, and
/// `SLAT_STATUS_OUT_OF_FRAMES` if the platform has no frame for the root. Nothing is made then.
///
/// # Safety
/// `space` points to a `struct slat_space` that is zero, or that only this library wrote to, and
/// that stays where it is while it is live. `platform` keeps the promises of `struct slat_platform`
/// until `slat_destroy` has returned. The library reads `platform` and `format` only during the
/// call.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_create(
    space: *mut slat_space,
    platform: *const slat_platform,
    format: *const slat_format,
    vmid: u16,
    address_bits: u32,
) -> slat_status {
    // SAFETY: the caller's promises are the callees'.
    let machine = unsafe { load(platform).and_then(|platform| Machine::new(&platform)) };
    // SAFETY: as above.
    let made = machine.and_then(|machine| unsafe {
        let format = load(format)?;
        handle::create(space, machine, |machine| {
            create(&format, (Vmid(vmid), address_bits), machine)
        })
    });
    made.err().unwrap_or(slat_status::Ok)
}

/// Gives back every table. The handle is dead afterwards. The memory that was mapped stays the
/// caller's.
///
/// # Safety
/// No CPU has the root loaded, nor loads it later. `space` is null, zero, or was passed to
/// `slat_create`.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_destroy(space: *mut slat_space) -> slat_status {
    // SAFETY: the caller's promises are the callees'.
    match unsafe { EnteredSpace::new(space) } {
        Ok(entered) => {
            // SAFETY: as above.
            unsafe { entered.destroy() };
            slat_status::Ok
        }
        Err(reason) => reason,
    }
}

/// Returns the result of a call that was refused or that ended.
fn result(of: Result<slat_result, slat_status>) -> slat_result {
    of.unwrap_or_else(slat_result::refused)
}

/// Maps `bytes` bytes of guest memory from `gpa` on to the memory at `hpa`, by leaves of at most
/// `largest` bytes, as large as alignment allows. Leaves that map the same memory with the same
/// attributes already stay.
///
/// Returns `bytes`. Errors: `SLAT_STATUS_ARGUMENT`, `RANGE`, `HOST_ADDRESS`, `LEAF_SIZE`,
/// `ATTRIBUTES`, `OCCUPIED`: nothing is done; `OUT_OF_FRAMES`: what precedes `at` is done.
///
/// # Safety
/// `space` is null, zero, or was passed to `slat_create`. The guest may use the memory.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_map(
    space: *mut slat_space,
    gpa: u64,
    bytes: u64,
    hpa: u64,
    attributes: slat_attributes,
    largest: u64,
) -> slat_result {
    // SAFETY: the caller's promise is the callee's.
    let entered = unsafe { EnteredSpace::new(space) };
    result(entered.and_then(|mut entered| {
        let (range, size) = (range(gpa, bytes)?, size(largest)?);
        let attributes = attributes.decoded()?;
        let done = entered.space_mut().map(range, Hpa(hpa), attributes, size);
        Ok(slat_result::of(done.map(|()| bytes)))
    }))
}

/// Sets the rights of all that is mapped in a range to exactly those of `rights`; only `SLAT_READ`,
/// `SLAT_WRITE` and `execute` count. Splits a block that the range cuts. No CPU uses the old rights
/// when this returns.
///
/// Returns the bytes that changed. Errors: `SLAT_STATUS_ARGUMENT`, `RANGE`, `ATTRIBUTES`, and
/// `OUT_OF_FRAMES` where a block cannot be split: no rights are changed.
///
/// # Safety
/// `space` is null, zero, or was passed to `slat_create`.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_protect(
    space: *mut slat_space,
    gpa: u64,
    bytes: u64,
    rights: slat_attributes,
) -> slat_result {
    // SAFETY: the caller's promise is the callee's.
    let entered = unsafe { EnteredSpace::new(space) };
    result(entered.and_then(|mut entered| {
        let (range, rights) = (range(gpa, bytes)?, rights.rights()?);
        Ok(slat_result::of(entered.space_mut().protect(range, rights)))
    }))
}

/// Unmaps a range, and splits a block that the range cuts. Calls `removed` for each run of adjacent
/// leaves with the same attributes that was mapped, once no CPU can reach it. `removed` must not
/// call this library with the same space.
///
/// Returns the bytes that were mapped. Errors: `SLAT_STATUS_RANGE`, and `OUT_OF_FRAMES` where a
/// block cannot be split: nothing is unmapped.
///
/// # Safety
/// `space` is null, zero, or was passed to `slat_create`. `removed` may be called with `context`,
/// and does not unwind.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_unmap(
    space: *mut slat_space,
    gpa: u64,
    bytes: u64,
    removed: Option<unsafe extern "C" fn(context: *mut c_void, run: *const slat_unmapped_run)>,
    context: *mut c_void,
) -> slat_result {
    // SAFETY: the caller's promise is the callee's.
    let entered = unsafe { EnteredSpace::new(space) };
    result(entered.and_then(|mut entered| {
        let removed = removed.ok_or(slat_status::NullPointer)?;
        let each = |run: UnmappedRun| {
            let run = slat_unmapped_run::from(run);
            // SAFETY: the caller's function, called as it is declared; `run` lives until it
            // returns.
            unsafe { removed(context, &raw const run) };
        };
        Ok(slat_result::of(entered.space_mut().unmap(range(gpa, bytes)?, each)))
    }))
}

/// Unmaps the leaf that translates `gpa`, and writes it to `removed`. No CPU reaches its memory
/// when this returns.
///
/// Returns the bytes of the leaf. Errors: `SLAT_STATUS_NOT_MAPPED`: nothing is mapped there, or the
/// address is beyond the guest's addresses.
///
/// # Safety
/// `space` is null, zero, or was passed to `slat_create`; `removed` is null or may be written.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_unmap_leaf(
    space: *mut slat_space,
    gpa: u64,
    removed: *mut slat_unmapped_run,
) -> slat_result {
    // SAFETY: the caller's promise is the callee's.
    let entered = unsafe { EnteredSpace::new(space) };
    result(entered.and_then(|mut entered| {
        // Checks `removed` before anything is done, so that the unmapped leaf is not lost.
        // SAFETY: null, or the caller's to write.
        let there = unsafe { store(removed, slat_unmapped_run::NOTHING) };
        if there != slat_status::Ok {
            return Err(there);
        }
        match entered.space_mut().unmap_leaf(Gpa(gpa)) {
            Ok(None) => Err(slat_status::NotMapped),
            Ok(Some(leaf)) => {
                // SAFETY: not null, as it was written to before.
                let stored = unsafe { store(removed, leaf.into()) };
                Ok(slat_result { status: stored, at: 0, done: leaf.bytes })
            }
            Err(stopped) => Ok(slat_result::of(Err(stopped))),
        }
    }))
}

/// Translates `gpa`, and writes the result to `translation`.
///
/// Returns `SLAT_STATUS_NOT_MAPPED` if nothing is mapped there, and `SLAT_STATUS_CONTENDED` if
/// another CPU's call holds the entry for long; it then writes nothing.
///
/// # Safety
/// `space` is null, zero, or was passed to `slat_create`; `translation` is null or may be written.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_query(
    space: *mut slat_space,
    gpa: u64,
    translation: *mut slat_translation,
) -> slat_status {
    // SAFETY: the caller's promise is the callee's.
    match unsafe { EnteredSpace::new(space) } {
        Ok(entered) => match entered.space().translate(Gpa(gpa)) {
            // SAFETY: null, or the caller's to write.
            Ok(Some(found)) => unsafe { store(translation, found.into()) },
            Ok(None) => slat_status::NotMapped,
            Err(_) => slat_status::Contended,
        },
        Err(reason) => reason,
    }
}

/// Writes the page-table entry at which a walk for `gpa` ends, as it is in memory, to `raw`, and
/// the bytes of guest addresses that the entry covers to `bytes`. For tests.
///
/// Returns `SLAT_STATUS_RANGE` for an address beyond the guest's addresses.
///
/// # Safety
/// `space` is null, zero, or was passed to `slat_create`; `raw` and `bytes` are null or may be
/// written.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_descriptor(
    space: *mut slat_space,
    gpa: u64,
    raw: *mut u64,
    bytes: *mut u64,
) -> slat_status {
    // SAFETY: the caller's promise is the callee's.
    let entered = match unsafe { EnteredSpace::new(space) } {
        Ok(entered) => entered,
        Err(reason) => return reason,
    };
    let found = of_each!(entered.space(), space => space.enter().descriptor(Gpa(gpa)));
    let Some((descriptor, size)) = found else { return slat_status::Range };
    // SAFETY: null, or the caller's to write.
    match unsafe { store(raw, descriptor) } {
        // SAFETY: as above.
        slat_status::Ok => unsafe { store(bytes, size.bytes()) },
        reason => reason,
    }
}

/// Writes the root of the tables, where hardware starts its walks, to `geometry`.
///
/// # Safety
/// `space` is null, zero, or was passed to `slat_create`; `geometry` is null or may be written.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_root(
    space: *mut slat_space,
    geometry: *mut slat_geometry,
) -> slat_status {
    // SAFETY: the caller's promise is the callee's.
    let entered = match unsafe { EnteredSpace::new(space) } {
        Ok(entered) => entered,
        Err(reason) => return reason,
    };
    let (space, of) = (entered.space(), entered.space().geometry());
    let found = slat_geometry {
        root: space.root().0,
        root_entries: of.root_entries as u64,
        root_level: of.root_level.into(),
        address_bits: of.address_bits,
    };
    // SAFETY: null, or the caller's to write.
    unsafe { store(geometry, found) }
}

/// Writes the value of the register that makes a CPU use the tables to `value`: the EPT pointer,
/// VMCB's N_CR3, hgatp, or the first doubleword of Power's partition table entry.
///
/// Returns `SLAT_STATUS_UNSUPPORTED` where that cannot hold the root or the VMID; and on Arm, whose
/// registers depend on the CPU: `slat_arm64_registers`.
///
/// # Safety
/// `space` is null, zero, or was passed to `slat_create`; `value` is null or may be written.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_root_register(
    space: *mut slat_space,
    value: *mut u64,
) -> slat_status {
    // SAFETY: the caller's promise is the callee's.
    let entered = match unsafe { EnteredSpace::new(space) } {
        Ok(entered) => entered,
        Err(reason) => return reason,
    };
    let register: Option<u64> = match entered.space() {
        #[cfg(feature = "ept")]
        Any::Ept1G(space) => Some(space.guest_root().eptp()),
        #[cfg(feature = "ept")]
        Any::Ept2M(space) => Some(space.guest_root().eptp()),
        #[cfg(feature = "npt")]
        Any::Npt1G(space) => Some(space.guest_root().ncr3()),
        #[cfg(feature = "npt")]
        Any::Npt2M(space) => Some(space.guest_root().ncr3()),
        #[cfg(feature = "power")]
        Any::PowerK4(space) => space.guest_root().partition_entry().ok(),
        #[cfg(feature = "power")]
        Any::PowerK64(space) => space.guest_root().partition_entry().ok(),
        #[cfg(feature = "riscv")]
        Any::RiscV(space) => space.guest_root().hgatp().ok(),
        _ => None,
    };
    match register {
        // SAFETY: null, or the caller's to write.
        Some(register) => unsafe { store(value, register) },
        None => slat_status::Unsupported,
    }
}
