//! Warm memory for tables, and the platform that a benchmark runs the engine on.
//!
//! Invalidations and barriers are counted, not executed: what is measured is the software's own
//! cost. Table memory is mapped, touched and backed by huge pages where the host gives them before
//! anything is timed.

use anyhow::Context;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use slat::{BreakBeforeMake, Frame, Grace, Hpa, Invalidation, Platform, Seat, Slot};
use std::cell::Cell;
use std::ptr::NonNull;

/// Where table memory stands in the made-up physical address space.
const BASE: u64 = 4 << 30;

/// Alignment of the mapping: that of a huge page, so that THP can back all of it.
const ALIGNMENT: usize = 2 << 20;

/// A run of table memory, handed out from its start.
pub struct Arena {
    map: NonNull<u8>,
    map_bytes: usize,
    start: NonNull<u8>,
    bytes: usize,
    used: Cell<usize>,
    free: Cell<Vec<Hpa>>,
    free_bytes: usize,
    break_before_make: BreakBeforeMake,
    invalidations: Cell<u64>,
    grace: Grace<[Seat; 4]>,
}

impl Arena {
    /// At least `bytes` of table memory, touched.
    ///
    /// # Errors
    /// The host refuses the mapping.
    pub fn new(bytes: usize, page: usize, bbm: BreakBeforeMake) -> anyhow::Result<Self> {
        let bytes = bytes.next_multiple_of(ALIGNMENT);
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
            bytes,
            used: Cell::new(0),
            free: Cell::default(),
            free_bytes: page,
            break_before_make: bbm,
            invalidations: Cell::new(0),
            grace: Grace::new([const { Seat::new() }; 4]),
        };
        // SAFETY: the range lies inside the mapping; advice changes no content. A host without
        // THP refuses it, and small pages serve as well.
        let _ = unsafe { rustix::mm::madvise(start.as_ptr().cast(), bytes, Advice::LinuxHugepage) };
        // SAFETY: the mapping is writable, ours, and of that length.
        unsafe { start.write_bytes(1, bytes) };
        Ok(arena)
    }

    /// Takes back everything; nothing that borrowed the arena is left.
    pub fn reset(&mut self) {
        self.used.set(0);
        self.free.take();
        self.invalidations.set(0);
    }

    /// Invalidations asked for since the last reset.
    pub fn invalidations(&self) -> u64 {
        self.invalidations.get()
    }

    /// The first `bytes` of the memory as words, while no table stands in it.
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
//    to its size (the start is aligned to 2 MiB, no frame is larger), and reuses only frames that
//    were given back; `reset` needs an exclusive borrow.
// 2. `slots` adds the frame's offset to one base: the same pointer each time, inside the mapping.
// 3. No CPU loads these tables, so none can use a translation.
// 4. `grace` is a field.
unsafe impl Platform for Arena {
    fn allocate(&self, bytes: usize) -> Option<Frame> {
        let mut free = self.free.take();
        let reused = if bytes == self.free_bytes { free.pop() } else { None };
        self.free.set(free);
        let hpa = match reused {
            Some(hpa) => hpa,
            None => {
                let offset = self.used.get().next_multiple_of(bytes);
                let end = offset.checked_add(bytes).filter(|&end| end <= self.bytes)?;
                self.used.set(end);
                Hpa(BASE + offset as u64)
            }
        };
        // SAFETY: inside the arena, aligned, and owned by nobody else: either new, or given back.
        unsafe { Frame::from_hpa(hpa) }
    }

    /// Frames of the page size are reused; a root, of which there is one, is not.
    unsafe fn free(&self, frame: Frame, bytes: usize) {
        if bytes == self.free_bytes {
            let mut free = self.free.take();
            free.push(frame.hpa());
            self.free.set(free);
        }
    }

    #[inline(always)]
    fn slots(&self, table: Hpa) -> NonNull<Slot> {
        let offset = (table.0 - BASE) as usize;
        // SAFETY: the engine asks for frames that `allocate` returned: inside the mapping.
        unsafe { self.start.add(offset).cast() }
    }

    fn publish(&self) {}

    fn invalidate(&self, _what: &Invalidation) {
        self.invalidations.set(self.invalidations.get() + 1);
    }

    fn break_before_make(&self) -> BreakBeforeMake {
        self.break_before_make
    }

    fn grace(&self) -> &Grace {
        &self.grace
    }
}
