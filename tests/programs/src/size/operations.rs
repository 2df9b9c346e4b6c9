//! One function an operation.

use core::ptr::NonNull;
use slat::*;

#[cfg(feature = "arm64")]
type F = slat::format::arm64::Arm64K4;
#[cfg(all(feature = "ept", not(feature = "arm64")))]
type F = slat::format::ept::Ept1G;
#[cfg(all(feature = "npt", not(any(feature = "arm64", feature = "ept"))))]
type F = slat::format::npt::Npt1G;
#[cfg(all(feature = "power", not(any(feature = "arm64", feature = "ept", feature = "npt"))))]
type F = slat::format::power::PowerK64;
#[cfg(not(any(feature = "arm64", feature = "ept", feature = "npt", feature = "power")))]
type F = slat::format::riscv::RiscV;

/// A machine of which nothing counts as the engine's text.
#[derive(Debug)]
pub struct Machine {
    readers: Readers<[ReaderSlot; 8]>,
}

// SAFETY: declarations only: the archive is read, never linked into a program.
unsafe extern "Rust" {
    safe fn machine_allocate(bytes: usize) -> Option<Frame>;
    safe fn machine_free(frame: Frame, bytes: usize);
    safe fn machine_publish();
    safe fn machine_invalidate(what: &Invalidation);
    safe fn machine_panic() -> !;
}

// SAFETY: never run. A machine that is would map frames one to one, as `ptes` says.
unsafe impl Platform for Machine {
    fn allocate(&self, bytes: usize) -> Option<Frame> {
        machine_allocate(bytes)
    }

    unsafe fn free(&self, frame: Frame, bytes: usize) {
        machine_free(frame, bytes);
    }

    fn entries(&self, table: Hpa) -> NonNull<Pte> {
        // SAFETY: the engine asks for frames only, and no frame is at address 0.
        unsafe { NonNull::new_unchecked(table.0 as *mut Pte) }
    }

    fn publish(&self) {
        machine_publish();
    }

    fn invalidate(&self, what: &Invalidation) {
        machine_invalidate(what);
    }

    fn break_before_make(&self) -> BreakBeforeMake {
        if F::REFILL_BREAKS { BreakBeforeMake::Always } else { BreakBeforeMake::Never }
    }

    fn readers(&self) -> &Readers {
        &self.readers
    }
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    machine_panic()
}

type On<'t> = Guard<'t, 'static, F, Machine>;
type Space = AddressSpace<'static, F, Machine>;
type Cache<'a> = TableCache<'a, F, Machine>;
type Change = Result<u64, Interruption<ChangeError>>;

macro_rules! operations {
    ($($name:ident($($argument:ident: $type:ty),*) -> $result:ty { $body:expr })*) => {$(
        #[unsafe(no_mangle)]
        pub fn $name($($argument: $type),*) -> $result {
            $body
        }
    )*};
}

operations! {
    op_new(format: F, bits: u32, machine: &'static Machine)
        -> Result<Tables<'static, F, Machine>, NewError> {
        Tables::new(format, Vmid(1), bits, machine)
    }
    op_enter(tables: &'static Tables<'static, F, Machine>,
             reader: &'static mut Reader<'static, Machine>)
        -> Result<On<'static>, WrongPlatform> {
        tables.enter(reader)
    }
    op_map(guard: &mut On<'_>, at: GpaRange, hpa: Hpa,
           how: Attributes, size: PageSize, cache: &mut Cache<'static>)
        -> Result<u64, Interruption<MapError>> {
        guard.map(at, hpa, how, size, cache)
    }
    op_reserve_commit(guard: &mut On<'_>, gpa: Gpa, hpa: Hpa,
                      how: Attributes, size: PageSize, cache: &mut Cache<'static>)
        -> Option<u64> {
        guard.reserve(gpa, size, cache).ok()?.commit(hpa, how).ok()?
    }
    op_unmap(guard: &mut On<'_>, at: GpaRange, batch: &mut UnmapBatch<'_, '_, F, Machine>)
        -> Result<u64, Interruption<UnmapError>> {
        guard.unmap(at, batch)
    }
    op_write_protect(guard: &mut On<'_>, at: GpaRange) -> Change {
        guard.write_protect(at)
    }
    op_protect(guard: &mut On<'_>, at: GpaRange, rights: Rights) -> Change {
        guard.protect(at, rights)
    }
    op_set_software(guard: &mut On<'_>, at: GpaRange, set: Software, clear: Software) -> Change {
        guard.set_software(at, set, clear)
    }
    op_execute_protect(guard: &mut On<'_>, at: GpaRange) -> Change {
        guard.execute_protect(at)
    }
    op_relax(guard: &mut On<'_>, at: GpaRange, access: Access) -> Change {
        guard.relax(at, access).map(slat::LocalFlush::not_needed_here)
    }
    op_relax_only_if(guard: &mut On<'_>, at: GpaRange, access: Access, software: Software)
        -> Change {
        guard.relax(at, Relax::new(access).only_if(software)).map(slat::LocalFlush::not_needed_here)
    }
    op_relax_unmarked(guard: &mut On<'_>, at: GpaRange, software: Software) -> Change {
        guard
            .relax(at, Relax::new(Access::Write).only_if(software).unmarked())
            .map(slat::LocalFlush::not_needed_here)
    }
    op_relax_unmarked_fetch(guard: &mut On<'_>, at: GpaRange, software: Software) -> Change {
        guard
            .relax(at, Relax::new(Access::Execute).only_if(software).unmarked())
            .map(slat::LocalFlush::not_needed_here)
    }
    op_split(guard: &mut On<'_>, at: GpaRange, size: PageSize, cache: &mut Cache<'static>)
        -> Result<u64, Interruption<SplitError>> {
        guard.split(at, size, cache)
    }
    op_replace(guard: &mut On<'_>, at: GpaRange, from: Hpa, to: Hpa, how: Attributes)
        -> Result<u64, Interruption<ReplaceError>> {
        guard.replace(at, from, to, how)
    }
    op_set_owner(guard: &mut On<'_>, at: GpaRange, from: Option<Owner>,
                 to: Option<Owner>, cache: &mut Cache<'static>)
        -> Result<u64, Interruption<OwnerError>> {
        guard.set_owner(at, from, to, cache)
    }
    op_prune(guard: &mut On<'_>, at: GpaRange) -> Result<usize, Interruption<ChangeError>> {
        guard.prune(at)
    }
    op_replace_table(guard: &mut On<'_>, gpa: Gpa, size: PageSize, hpa: Hpa, leaf: Attributes)
        -> Result<Option<u64>, Interruption<MapError>> {
        guard.replace_table(gpa, size, hpa, leaf)
    }
    op_collapse(guard: &mut On<'_>, at: GpaRange, size: PageSize)
        -> Result<u64, Interruption<SplitError>> {
        guard.collapse(at, size)
    }
    op_age(guard: &mut On<'_>, at: GpaRange, ages: &mut AgeBitmaps<'_>, how: AgeOptions)
        -> Result<AgeCounts, Interruption<ChangeError>> {
        guard.age(at, ages, how)
    }
    op_harvest(guard: &mut On<'_>, at: GpaRange, bitmap: &mut [u64]) -> Change {
        guard.harvest(at, bitmap)
    }
    op_clean(guard: &mut On<'_>, at: GpaRange) -> Change {
        guard.clean(at)
    }
    op_translate(guard: &On<'_>, gpa: Gpa) -> Result<Option<Translation>, Contention> {
        guard.translate(gpa)
    }
    op_flush(guard: &mut On<'_>, at: GpaRange) -> Change {
        guard.clean_caches(at)
    }
    op_complete(guard: &mut On<'_>) -> () {
        guard.invalidate()
    }
    op_space_map(space: &mut Space, at: GpaRange, hpa: Hpa, how: Attributes, size: PageSize)
        -> Result<(), Interruption<SpaceError>> {
        space.map(at, hpa, how, size)
    }
    op_space_unmap(space: &mut Space, at: GpaRange) -> Result<u64, Interruption<SpaceError>> {
        space.unmap(at, |_| {})
    }
    op_space_protect(space: &mut Space, at: GpaRange, rights: Rights)
        -> Result<u64, Interruption<SpaceError>> {
        space.protect(at, rights)
    }
    op_space_query(space: &Space, gpa: Gpa) -> Option<Translation> {
        space.query(gpa)
    }
    op_reclaim(tables: &Tables<'static, F, Machine>) -> usize {
        tables.reclaim()
    }
    op_destroy(tables: UnloadedTables<'static, F, Machine>) -> () {
        tables.destroy()
    }
}
