//! Table pages from the global allocator.

use crate::addr::Hpa;
use crate::invalidation::{BreakBeforeMake, Invalidation};
use crate::platform::Platform;
use crate::readers::{ReaderSlot, Readers};
use crate::table::{Frame, Pte};
use alloc::alloc::{alloc_zeroed, dealloc};
use core::alloc::Layout;
use core::fmt;
use core::mem;
use core::ptr::{self, NonNull};

/// The number of threads that may be readers at the same time.
const READERS: usize = 64;

/// A [`Platform`] whose table pages come from the global allocator.
///
/// [`AllocPlatform::new`] is for tables that no CPU walks: tests, simulators, user-space machines.
/// The address of a frame is then the address of its memory. [`AllocPlatform::for_cpus`] is for a
/// kernel whose allocator's memory is mapped to consecutive virtual addresses, and which needs no
/// cache maintenance of guest memory ([`Platform::maintain`]). 64 threads may be
/// [readers](crate::Reader) at once.
///
/// ```
/// use slat::format::riscv::RiscV;
/// use slat::*;
///
/// let host = AllocPlatform::with(|what| println!("a kernel would execute HFENCE.GVMA: {what:?}"));
/// let mut space = AddressSpace::new(RiscV::default(), Vmid(1), 41, &host)?;
/// space.map(GpaRange::new(Gpa(0), 0x4000)?, Hpa(8 << 30), Attributes::RAM, PageSize::SIZE_4K)?;
/// space.unmap(GpaRange::new(Gpa(0), 0x1000)?, |gone| assert_eq!(gone.hpa, Hpa(8 << 30)))?;
/// // SAFETY: no CPU has the root loaded.
/// unsafe { space.destroy() };
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct AllocPlatform<I = fn(&Invalidation)> {
    readers: Readers<[ReaderSlot; READERS]>,
    /// The virtual address of a frame's memory is the frame's address plus this.
    offset: u64,
    break_before_make: BreakBeforeMake,
    publish: fn(),
    invalidate: I,
}

impl AllocPlatform {
    /// Makes a platform for tables that no CPU walks.
    pub const fn new() -> Self {
        Self::with(|_| {})
    }
}

impl Default for AllocPlatform {
    fn default() -> Self {
        Self::new()
    }
}

impl<I: Fn(&Invalidation)> AllocPlatform<I> {
    /// Makes a platform for tables that no CPU walks; it calls `invalidate` with each invalidation,
    /// to show or to count it. A panic of `invalidate` aborts the program.
    pub const fn with(invalidate: I) -> Self {
        Self::from_parts(0, BreakBeforeMake::Never, || {}, invalidate)
    }

    /// Makes a platform for tables that CPUs walk. A frame's address is the virtual address of its
    /// memory minus `offset`. `publish` and `invalidate` are [`Platform::publish`] and
    /// [`Platform::invalidate`]; a panic of either aborts the program.
    ///
    /// # Safety
    /// 1. The host physical address of the global allocator's memory is its virtual address minus
    ///    `offset`, and the mapping is as [`Platform`]'s contract requires it, by 2.
    /// 2. `invalidate` and `break_before_make` keep that contract, by 3 and 4.
    pub const unsafe fn for_cpus(
        offset: u64,
        break_before_make: BreakBeforeMake,
        publish: fn(),
        invalidate: I,
    ) -> Self {
        Self::from_parts(offset, break_before_make, publish, invalidate)
    }

    const fn from_parts(
        offset: u64,
        break_before_make: BreakBeforeMake,
        publish: fn(),
        invalidate: I,
    ) -> Self {
        let readers = Readers::new([const { ReaderSlot::new() }; READERS]);
        Self { readers, offset, break_before_make, publish, invalidate }
    }
}

impl<I> AllocPlatform<I> {
    /// Returns a pointer to the memory of the frame at `hpa`.
    fn memory(&self, hpa: Hpa) -> *mut u8 {
        ptr::with_exposed_provenance_mut(hpa.0.wrapping_add(self.offset) as usize)
    }
}

/// Ends the program if it is dropped by a panic: a second panic aborts.
struct NoUnwind;

impl Drop for NoUnwind {
    fn drop(&mut self) {
        panic!("a platform may not panic: its caller holds markers, or owes an invalidation");
    }
}

fn without_unwinding(call: impl FnOnce()) {
    let bomb = NoUnwind;
    call();
    mem::forget(bomb);
}

// SAFETY: by the numbers of the contract.
// 1. The allocator returns memory of the layout's size and alignment, which is its caller's alone
//    until `free`.
// 2. `entries` is the inverse of the address in `allocate`. The memory is zeroed, so initialised,
//    and stays until `free`. For CPUs, `for_cpus` has its caller's promise about the mapping.
// 3. No CPU walks the tables, or `for_cpus` has its caller's promise.
// 4. Both are fields.
// 5. `fill` is the trait's own.
// 6. `without_unwinding` keeps panics of the two functions in. The allocator does not unwind.
unsafe impl<I: Fn(&Invalidation)> Platform for AllocPlatform<I> {
    fn allocate(&self, bytes: usize) -> Option<Frame> {
        let layout = Layout::from_size_align(bytes, bytes).ok()?;
        // SAFETY: the size is not 0, as it is a valid alignment.
        let memory = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        let address = memory.as_ptr().expose_provenance() as u64;
        // SAFETY: only the frame uses the memory.
        unsafe { Frame::from_hpa(Hpa(address.wrapping_sub(self.offset))) }
    }

    unsafe fn free(&self, frame: Frame, bytes: usize) {
        if let Ok(layout) = Layout::from_size_align(bytes, bytes) {
            // SAFETY: the caller promises that `allocate` returned the frame for these bytes, so
            // the memory was allocated with this layout, and that nothing reaches it any more.
            unsafe { dealloc(self.memory(frame.hpa()), layout) };
        }
    }

    #[inline(always)]
    fn entries(&self, table: Hpa) -> NonNull<Pte> {
        // No frame is at the null pointer.
        NonNull::new(self.memory(table).cast()).unwrap_or(NonNull::dangling())
    }

    fn publish(&self) {
        without_unwinding(self.publish);
    }

    fn invalidate(&self, what: &Invalidation) {
        without_unwinding(|| (self.invalidate)(what));
    }

    fn break_before_make(&self) -> BreakBeforeMake {
        self.break_before_make
    }

    fn readers(&self) -> &Readers {
        &self.readers
    }
}

impl<I> fmt::Debug for AllocPlatform<I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { offset, break_before_make, .. } = self;
        f.debug_struct("AllocPlatform")
            .field("offset", offset)
            .field("break_before_make", break_before_make)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::TableCache;
    use crate::format::tiny::Tiny;
    use std::cell::Cell;

    #[test]
    fn frames_are_aligned_and_zeroed_at_any_offset() {
        let offset = 0xffff_8000_0000_0000;
        // SAFETY: no CPU walks tables of this test.
        let host = unsafe {
            AllocPlatform::for_cpus(offset, BreakBeforeMake::Always, || {}, |_: &Invalidation| {})
        };
        for bytes in [0x1000, 0x4000, 0x1_0000] {
            let frame = host.allocate(bytes).unwrap();
            let entries = host.entries(frame.hpa());
            assert_eq!(entries.as_ptr() as u64, frame.hpa().0.wrapping_add(offset));
            assert_eq!(entries.as_ptr() as usize % bytes, 0);
            // SAFETY: the frame has that many entries, and nothing else uses it.
            let entries = unsafe { core::slice::from_raw_parts(entries.as_ptr(), bytes / 8) };
            assert!(entries.iter().all(|pte| pte.load() == 0));
            // SAFETY: `allocate` returned it for these bytes; nothing reaches it any more.
            unsafe { host.free(frame, bytes) };
        }
        assert_eq!(host.break_before_make(), BreakBeforeMake::Always);
        assert!(host.allocate(0).is_none() && host.allocate(0x1800).is_none());
    }

    #[test]
    fn invalidations_and_publications_reach_their_functions() {
        let seen = Cell::new(None);
        let host = AllocPlatform::with(|what| seen.set(Some(*what)));
        let what = Invalidation { vmid: crate::Vmid(7), range: None, leaf: None, tables: true };
        host.publish();
        host.invalidate(&what);
        assert_eq!(seen.get(), Some(what));
    }

    #[test]
    fn a_filled_cache_owns_storage_for_the_pages_asked_for() {
        let host = AllocPlatform::new();
        let mut cache = TableCache::<Tiny, _>::filled(&host, 3).unwrap();
        assert_eq!(cache.len(), 3);
        let frame = cache.take().unwrap();
        assert_eq!(cache.len(), 2);
        cache.put(frame);
        assert!(TableCache::<Tiny, _>::filled(&host, 0).unwrap().is_empty());
    }
}
