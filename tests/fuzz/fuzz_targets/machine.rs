//! Memory that is counted, and a CPU without a TLB.

use slat::*;
use std::alloc::{Layout, alloc, dealloc};
use std::cell::Cell;
use std::ptr::NonNull;

pub struct Machine {
    bbm: BreakBeforeMake,
    grace: Grace<[Seat; 2]>,
    live: Cell<usize>,
}

impl Machine {
    pub fn new(bbm: BreakBeforeMake) -> Self {
        Self { bbm, grace: Grace::new([const { Seat::new() }; 2]), live: Cell::new(0) }
    }

    pub fn live(&self) -> usize {
        self.live.get()
    }

    /// Does an access of the guest to `gpa`; returns the leaf that it used, `None` if it faults.
    pub fn access<F: Format>(
        &self,
        tables: &Tables<'_, F, Self>,
        gpa: u64,
        write: bool,
    ) -> Option<GpaRange> {
        use slat::format::Kind;
        let geometry = tables.geometry();
        let (mut table, mut level, mut ptes) =
            (tables.root(), geometry.root_level, geometry.root_entries);
        let mut path = Vec::new();
        let mut writes = true;
        loop {
            let index = (gpa >> F::shift(level)) as usize & (ptes - 1);
            // SAFETY: the table is linked, and has that many entries.
            let pte = unsafe { self.entries(table).add(index).as_ref() };
            let raw = pte.load();
            match F::kind(raw, level) {
                Kind::Table => {
                    path.push(pte);
                    writes &= raw & F::TABLE_WRITE == F::TABLE_WRITE;
                    (table, level, ptes) = (F::table_address(raw), level - 1, 1 << F::INDEX_BITS);
                }
                Kind::Leaf => {
                    let attributes = tables.format().decode(raw, level);
                    if write && !(writes && attributes.write) {
                        return None;
                    }
                    let mut used = raw | F::ACCESSED;
                    if write {
                        used = tables.format().relaxed(raw, Access::Write);
                    }
                    pte.exchange(raw, used).unwrap();
                    for pte in path {
                        let raw = pte.load();
                        pte.exchange(raw, raw | F::TABLE_ACCESSED).unwrap();
                    }
                    let size = 1 << F::shift(level);
                    return Some(GpaRange::new(Gpa(gpa / size * size), size).unwrap());
                }
                _ => return None,
            }
        }
    }
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes, bytes).unwrap()
}

// SAFETY: frames are memory of that size and alignment, at their own address, which nothing else
// uses until `free`; there is no TLB; the grace is a field.
unsafe impl Platform for Machine {
    fn allocate(&self, bytes: usize) -> Option<Frame> {
        self.live.set(self.live.get() + 1);
        // SAFETY: the size is not zero; the content is set before anything reads it.
        unsafe {
            let memory = alloc(layout(bytes));
            memory.write_bytes(0xa5, bytes);
            Frame::from_hpa(Hpa(memory as u64))
        }
    }

    unsafe fn free(&self, frame: Frame, bytes: usize) {
        self.live.set(self.live.get() - 1);
        // SAFETY: by the caller's contract `allocate` returned it for the same bytes.
        unsafe { dealloc(frame.hpa().0 as *mut u8, layout(bytes)) }
    }

    fn entries(&self, table: Hpa) -> NonNull<Pte> {
        NonNull::new(table.0 as *mut Pte).unwrap()
    }

    fn publish(&self) {}

    fn invalidate(&self, _: &Invalidation) {}

    fn break_before_make(&self) -> BreakBeforeMake {
        self.bbm
    }

    fn grace(&self) -> &Grace {
        &self.grace
    }
}
