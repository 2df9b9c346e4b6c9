//! A host of ordinary memory, and the page table that axvm has today, for tests and examples.

// Each test and example uses a part.
#![allow(dead_code)]

pub mod today;

use ax_memory_addr::{PhysAddr, VirtAddr};
use axaddrspace::AddrSpace;
use slat::{
    AddressSpace, BreakBeforeMake, Format, Frame, Hpa, Invalidation, Platform, Pte, ReaderSlot,
    Readers, Vmid,
};
use slat_axvm::{GuestMemory, NestedPageTable};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeSet;
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

pub const K: usize = 1 << 10;
pub const M: usize = 1 << 20;
pub const G: usize = 1 << 30;

/// Pages from the allocator, whose physical address is their virtual one, for tables and guests.
#[derive(Debug)]
pub struct Host {
    readers: Readers<[ReaderSlot; 4]>,
    break_before_make: BreakBeforeMake,
    invalidations: Mutex<Vec<Invalidation>>,
    /// Table pages in use, and the most that there may be.
    tables: AtomicUsize,
    most_tables: AtomicUsize,
    /// Guest pages in use, and the most that there may be.
    pages: Mutex<BTreeSet<usize>>,
    most_pages: AtomicUsize,
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes, bytes).unwrap()
}

/// Allocates `bytes` zero bytes, aligned to their size.
fn zeroes(bytes: usize) -> usize {
    // SAFETY: all callers ask for a page at least.
    let memory = unsafe { alloc_zeroed(layout(bytes)) };
    assert!(!memory.is_null());
    memory.expose_provenance()
}

impl Host {
    pub fn new(break_before_make: BreakBeforeMake) -> Self {
        Self {
            readers: Readers::new([const { ReaderSlot::new() }; 4]),
            break_before_make,
            invalidations: Mutex::default(),
            tables: AtomicUsize::new(0),
            most_tables: AtomicUsize::new(usize::MAX),
            pages: Mutex::default(),
            most_pages: AtomicUsize::new(usize::MAX),
        }
    }

    /// Returns the number of invalidations since the last call.
    pub fn invalidations(&self) -> Vec<Invalidation> {
        std::mem::take(&mut self.invalidations.lock().unwrap())
    }

    /// Returns the number of table pages in use; a root of several pages counts as one.
    pub fn tables(&self) -> usize {
        self.tables.load(Ordering::Relaxed)
    }

    pub fn limit_tables(&self, most: usize) {
        self.most_tables.store(most, Ordering::Relaxed);
    }

    /// Returns the number of guest pages in use.
    pub fn pages(&self) -> usize {
        self.pages.lock().unwrap().len()
    }

    pub fn limit_pages(&self, most: usize) {
        self.most_pages.store(most, Ordering::Relaxed);
    }
}

// SAFETY:
// 1. `allocate` returns memory from the allocator, of that size and alignment.
// 2. A frame's address is that of its memory, whose provenance is exposed; it stays until `free`.
// 3. No CPU loads these tables.
// 4. `readers` and `break_before_make` are fields that do not change.
// 5. `fill` is the engine's own.
// 6. Nothing panics while the lock is held, so it is never poisoned.
unsafe impl Platform for Host {
    fn allocate(&self, bytes: usize) -> Option<Frame> {
        let most = self.most_tables.load(Ordering::Relaxed);
        let one_more = |tables| (tables < most).then_some(tables + 1);
        self.tables.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).ok()?;
        // SAFETY: only the frame uses the memory, which is below 2^47, as all memory of a program
        // is.
        unsafe { Frame::from_hpa(Hpa(zeroes(bytes) as u64)) }
    }

    unsafe fn free(&self, frame: Frame, bytes: usize) {
        self.tables.fetch_sub(1, Ordering::Relaxed);
        let memory = std::ptr::with_exposed_provenance_mut(frame.hpa().0 as usize);
        // SAFETY: `allocate` got it from the allocator with the same layout, and no code reaches
        // it.
        unsafe { dealloc(memory, layout(bytes)) }
    }

    fn entries(&self, table: Hpa) -> NonNull<Pte> {
        NonNull::new(std::ptr::with_exposed_provenance_mut(table.0 as usize)).unwrap()
    }

    fn publish(&self) {}

    fn invalidate(&self, what: &Invalidation) {
        self.invalidations.lock().unwrap().push(*what);
    }

    fn break_before_make(&self) -> BreakBeforeMake {
        self.break_before_make
    }

    fn readers(&self) -> &Readers {
        &self.readers
    }
}

impl GuestMemory for Host {
    fn allocate(&self) -> Option<PhysAddr> {
        let mut pages = self.pages.lock().unwrap();
        if pages.len() >= self.most_pages.load(Ordering::Relaxed) {
            return None;
        }
        let page = zeroes(4 * K);
        pages.insert(page);
        Some(PhysAddr::from(page))
    }

    fn free(&self, page: PhysAddr) {
        assert!(self.pages.lock().unwrap().remove(&page.as_usize()), "freed twice, or never out");
        let memory = std::ptr::with_exposed_provenance_mut(page.as_usize());
        // SAFETY: `allocate` got it from the allocator with this layout, and it was still in use.
        unsafe { dealloc(memory, layout(4 * K)) }
    }

    fn address(&self, address: PhysAddr) -> VirtAddr {
        VirtAddr::from(address.as_usize())
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // No guest uses any more what axaddrspace leaks, as in `remap`.
        for page in std::mem::take(self.pages.get_mut().unwrap()) {
            let memory = std::ptr::with_exposed_provenance_mut(page);
            // SAFETY: `allocate` got it from the allocator with this layout; no guest is left.
            unsafe { dealloc(memory, layout(4 * K)) }
        }
    }
}

/// A page table for axaddrspace on the engine.
pub type Table<'p, F> = NestedPageTable<'p, F, Host, &'p Host>;

/// An empty page table for guest addresses of `bits` bits, which is freed with its last user.
pub fn table<F: Format>(format: F, bits: u32, host: &Host) -> Table<'_, F> {
    let space = AddressSpace::new(format, Vmid(1), bits, host).unwrap();
    // SAFETY: no CPU loads tables here.
    unsafe { NestedPageTable::new(space, host).freed_when_dropped() }
}

/// An empty address space of `size` bytes from `base`.
pub fn space<F: Format>(
    format: F,
    bits: u32,
    host: &Host,
    (base, size): (usize, usize),
) -> AddrSpace<Table<'_, F>> {
    AddrSpace::new_empty(table(format, bits, host), base.into(), size).unwrap()
}
