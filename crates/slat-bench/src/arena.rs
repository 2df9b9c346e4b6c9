//! Warm memory for tables, and the platform on which benchmarks run the engine.
//!
//! Invalidations and barriers are counted and not executed, so that only the cost of software is
//! measured. Table memory is mapped and touched before the measurement, and backed by huge pages if
//! the host has them.

use crate::fill::Stores;
use crate::lines;
use anyhow::Context;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use slat::{BreakBeforeMake, Frame, Hpa, Invalidation, Platform, Pte, ReaderSlot, Readers};
use std::cell::Cell;
use std::hint::black_box;
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};

/// Address of table memory in the made-up physical address space.
const BASE: u64 = 4 << 30;

/// Alignment of the mapping: a huge page, so that THP can back all of it.
const ALIGNMENT: usize = 2 << 20;

/// Bytes that a thread takes from the arena at a time, so that the addresses of its frames ascend
/// even if other threads take frames.
const PORTION: usize = 256 << 10;

/// The most threads that hold a portion, and as much memory that they gave back, when the work is
/// done.
const THREADS: usize = 8;

thread_local! {
    /// The rest of the thread's portion: the epoch of arena and reset, its start and its end.
    static OWN: Cell<(u64, usize, usize)> = const { Cell::new((0, 0, 0)) };
    /// Frames that the thread gave back last: the epoch of arena and reset; the address of the last
    /// frame, whose first word has the address of the one before, or 0 for none; their number.
    static BACK: Cell<(u64, u64, usize)> = const { Cell::new((0, 0, 0)) };
}

/// Number of frames that a thread keeps after it gave them back, before other threads may have
/// them: a portion of the largest frames.
const KEPT: usize = PORTION / (64 << 10);

/// Number that tells portions of one arena, and of one reset of it, from all others.
static EPOCH: AtomicU64 = AtomicU64::new(1);

/// Table memory, handed out from its start.
pub struct Arena {
    map: NonNull<u8>,
    map_bytes: usize,
    start: NonNull<u8>,
    /// What [`Hpa`] 0 would be: an address of a table is one addition, as in a direct map.
    origin: *mut u8,
    bytes: usize,
    used: AtomicUsize,
    epoch: u64,
    free: Mutex<Vec<Hpa>>,
    any_free: AtomicBool,
    page: usize,
    break_before_make: BreakBeforeMake,
    stores: Stores,
    invalidations: AtomicU64,
    readers: Readers<[ReaderSlot; 4]>,
}

// SAFETY: the memory is handed out in disjoint parts, each to one caller; all other fields are
// `Sync` themselves, or do not change while the arena is borrowed.
unsafe impl Sync for Arena {}

impl Arena {
    /// Maps and touches at least `bytes` of table memory.
    ///
    /// # Errors
    /// The host refuses the mapping.
    pub fn new(bytes: usize, page: usize, bbm: BreakBeforeMake) -> anyhow::Result<Self> {
        let bytes = (bytes + 2 * THREADS * PORTION).next_multiple_of(ALIGNMENT);
        let map_bytes = bytes + ALIGNMENT;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new private mapping at an address of the kernel's choice aliases nothing.
        let map = unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), map_bytes, prot, MapFlags::PRIVATE)
        };
        let map = map.with_context(|| format!("cannot map {map_bytes} bytes for tables"))?;
        let map = NonNull::new(map.cast::<u8>()).context("the mapping stands at address 0")?;
        let skip = map.align_offset(ALIGNMENT);
        // SAFETY: `skip` is below ALIGNMENT, and the mapping has ALIGNMENT bytes more than needed.
        let start = unsafe { map.add(skip) };
        let arena = Self {
            map,
            map_bytes,
            start,
            origin: start.as_ptr().wrapping_sub(BASE as usize),
            bytes,
            used: AtomicUsize::new(0),
            epoch: EPOCH.fetch_add(1, Relaxed),
            free: Mutex::default(),
            any_free: AtomicBool::new(false),
            page,
            break_before_make: bbm,
            stores: Stores::Plain,
            invalidations: AtomicU64::new(0),
            readers: Readers::new([const { ReaderSlot::new() }; 4]),
        };
        // SAFETY: the range lies inside the mapping; advice changes no content. A host without
        // THP refuses it, and small pages serve as well.
        let _ = unsafe { rustix::mm::madvise(start.as_ptr().cast(), bytes, Advice::LinuxHugepage) };
        // SAFETY: the mapping is writable, ours, and of that length.
        unsafe { start.write_bytes(1, bytes) };
        Ok(arena)
    }

    /// Takes back all memory; the exclusive borrow excludes tables in it.
    pub fn reset(&mut self) {
        *self.used.get_mut() = 0;
        self.epoch = EPOCH.fetch_add(1, Relaxed);
        *self.any_free.get_mut() = false;
        self.free.get_mut().unwrap_or_else(|poison| poison.into_inner()).clear();
        *self.invalidations.get_mut() = 0;
    }

    /// Begins a sample: resets the arena, and sets the machine's properties.
    pub fn begin(&mut self, bbm: BreakBeforeMake, stores: Stores) -> &Self {
        self.reset();
        self.set_break_before_make(bbm);
        self.set_stores(stores);
        self
    }

    /// Sets what the CPU requires when a live entry changes its size.
    pub fn set_break_before_make(&mut self, bbm: BreakBeforeMake) {
        self.break_before_make = bbm;
    }

    /// Sets the kind of stores that fill tables from now on.
    pub fn set_stores(&mut self, stores: Stores) {
        self.stores = stores;
    }

    /// Returns the number of invalidations since the last reset.
    #[inline]
    pub fn invalidations(&self) -> u64 {
        self.invalidations.load(Relaxed)
    }

    /// Reads the first `bytes` of the memory, so that all entrants find the caches in the same
    /// state.
    pub fn warm(&self, bytes: usize) {
        let bytes = bytes.min(self.bytes);
        // SAFETY: the memory is mapped and initialised; its words are shared as atomics.
        let words = unsafe {
            std::slice::from_raw_parts(self.start.as_ptr().cast::<AtomicU64>(), bytes / 8)
        };
        // One word of each cache line.
        black_box(words.iter().step_by(8).fold(0, |sum, word| sum ^ word.load(Relaxed)));
    }

    /// Flushes the first `bytes` of the memory from the CPU's caches.
    pub fn cool(&self, bytes: usize) {
        let bytes = bytes.min(self.bytes);
        // SAFETY: the memory is mapped, and stays so while the arena does.
        unsafe { lines::flush(self.start.as_ptr(), bytes, lines::line_bytes()) };
    }

    /// Takes the next `bytes` bytes that are not handed out, for one frame or a portion of frames.
    #[inline]
    fn take(&self, bytes: usize, alignment: usize) -> Option<usize> {
        let next = |used: usize| {
            let end = used.next_multiple_of(alignment).checked_add(bytes)?;
            (end <= self.bytes).then_some(end)
        };
        let used = self.used.fetch_update(Relaxed, Relaxed, next).ok()?;
        Some(used.next_multiple_of(alignment))
    }

    /// Takes a page from the thread's own portion.
    #[inline]
    fn take_page(&self) -> Option<usize> {
        let (epoch, mut at, mut end) = OWN.get();
        if epoch != self.epoch || at == end {
            at = self.take(PORTION, self.page)?;
            end = at + PORTION;
        }
        OWN.set((self.epoch, at + self.page, end));
        Some(at)
    }

    /// Keeps a frame for the thread, after sharing the frames that it keeps if they are too many.
    #[inline]
    fn give_back(&self, frame: Hpa) {
        let (epoch, mut last, mut kept) = BACK.get();
        if epoch != self.epoch {
            (last, kept) = (0, 0);
        }
        if kept == KEPT {
            self.share(last);
            (last, kept) = (0, 0);
        }
        self.link(frame).store(last, Relaxed);
        BACK.set((self.epoch, frame.0, kept + 1));
    }

    /// Takes the frame that the thread gave back last.
    #[inline]
    fn take_back(&self) -> Option<Hpa> {
        let (epoch, last, kept) = BACK.get();
        if epoch != self.epoch || last == 0 {
            return None;
        }
        BACK.set((epoch, self.link(Hpa(last)).load(Relaxed), kept - 1));
        Some(Hpa(last))
    }

    #[cold]
    fn share(&self, mut last: u64) {
        let mut free = self.free.lock().unwrap_or_else(|poison| poison.into_inner());
        while last != 0 {
            free.push(Hpa(last));
            last = self.link(Hpa(last)).load(Relaxed);
        }
        self.any_free.store(true, Relaxed);
    }

    /// Returns the first word of a frame that is not in use.
    #[inline]
    fn link(&self, frame: Hpa) -> &AtomicU64 {
        // SAFETY: the frame belongs to the arena, so it is inside its mapping, aligned and
        // initialised; the word is atomic, as the next user of the frame also sees it.
        unsafe { self.entries(frame).cast().as_ref() }
    }

    #[inline]
    fn reuse(&self) -> Option<Hpa> {
        if let Some(own) = self.take_back() {
            return Some(own);
        }
        if !self.any_free.load(Relaxed) {
            return None;
        }
        let mut free = self.free.lock().unwrap_or_else(|poison| poison.into_inner());
        let page = free.pop();
        self.any_free.store(!free.is_empty(), Relaxed);
        page
    }

    /// Returns the first `bytes` of the memory as words, while no table is in it.
    pub fn words(&mut self, bytes: usize) -> &mut [u64] {
        let bytes = bytes.min(self.bytes);
        // SAFETY: the memory is mapped, aligned, initialised by `new`, and `&mut self` excludes
        // every table that could stand in it.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().cast(), bytes / 8) }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, of that length, and nothing borrows it any more.
        let _ = unsafe { rustix::mm::munmap(self.map.as_ptr().cast(), self.map_bytes) };
    }
}

// SAFETY:
// 1. `allocate` hands out disjoint runs of a mapping that lives as long as the arena, each aligned
//    to its size (the start is aligned to 2 MiB, and no frame is larger), and reuses only frames
//    that were given back. `reset` needs an exclusive borrow. It changes the epoch, which ends all
//    portions and all frames that threads keep.
// 2. `ptes` adds the frame's offset to one base: the same pointer each time, inside the mapping.
// 3. No CPU loads these tables, so none can use a translation.
// 4. `readers` is a field.
unsafe impl Platform for Arena {
    #[inline]
    fn allocate(&self, bytes: usize) -> Option<Frame> {
        let page = bytes == self.page;
        let hpa = match if page { self.reuse() } else { None } {
            Some(hpa) => hpa,
            None => {
                let offset = if page { self.take_page() } else { self.take(bytes, bytes) }?;
                Hpa(BASE + offset as u64)
            }
        };
        // SAFETY: inside the arena, aligned, and with no other owner: either new, or given back.
        unsafe { Frame::from_hpa(hpa) }
    }

    /// Reuses frames of the page size only; there is one root, which is not reused.
    #[inline]
    unsafe fn free(&self, frame: Frame, bytes: usize) {
        if bytes == self.page {
            self.give_back(frame.hpa());
        }
    }

    #[inline(always)]
    fn entries(&self, table: Hpa) -> NonNull<Pte> {
        let at = self.origin.wrapping_add(table.0 as usize);
        // SAFETY: the engine passes frames that `allocate` returned, so `at` is inside the mapping.
        unsafe { NonNull::new_unchecked(at.cast()) }
    }

    #[inline]
    fn publish(&self) {
        self.stores.fence();
    }

    #[inline]
    fn invalidate(&self, _what: &Invalidation) {
        self.invalidations.fetch_add(1, Relaxed);
    }

    #[inline]
    fn break_before_make(&self) -> BreakBeforeMake {
        self.break_before_make
    }

    #[inline]
    fn readers(&self) -> &Readers {
        &self.readers
    }

    #[inline]
    fn fill(&self, ptes: &mut [Pte], first: u64, step: u64) {
        self.stores.fill(Pte::words(ptes), first, step);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_begins_with_no_table_and_no_invalidation() {
        let mut arena = Arena::new(1 << 20, 4096, BreakBeforeMake::Always).unwrap();
        let first = arena.take_page();
        arena.invalidations.store(3, Relaxed);
        let again = arena.begin(BreakBeforeMake::Never, Stores::Streaming);
        assert_eq!(again.invalidations(), 0);
        assert_eq!(again.break_before_make, BreakBeforeMake::Never);
        assert_eq!(again.stores, Stores::Streaming);
        assert_eq!(again.take_page(), first, "the memory is handed out from its start again");
    }
}
