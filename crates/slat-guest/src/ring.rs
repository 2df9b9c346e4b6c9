//! Dirty rings: each vCPU records the pages that it wrote, in order.
//!
//! # Protocol
//! The states of an entry are empty, dirty, harvested, and empty again, as with Linux's
//! `struct kvm_dirty_gfn`.
//! 1. Only the vCPU fills entries.
//! 2. The harvester marks entries as harvested, in order.
//! 3. A reset takes the harvested entries, in order, write-protects their pages, completes the TLB
//!    invalidation, and only then empties the entries.
//!
//! *Invariant*: if the guest may write a page of a memslot that logs, an entry that is not empty
//! has the page, or the bitmap has it, or the fault is about to record it: a fault fills the entry
//! after the leaf has become writable, and a reset empties it after the leaf has become read-only.
//! Copy a page after the reset of its entry.
//!
//! A ring counts as full while it still has room for the entries that a vCPU may fill before it
//! checks.

use crate::memslots::spec::MemslotId;
use crate::sync::{AtomicU64, Ordering};
use alloc::boxed::Box;
use core::ops::Range;

/// The states of an entry, in the low bits of its first word.
const EMPTY: u64 = 0;
const DIRTY: u64 = 1;
const HARVESTED: u64 = 2;

/// A page that a vCPU wrote.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct DirtyPage {
    /// The memslot.
    pub memslot: MemslotId,
    /// The page's number in the memslot.
    pub page: u64,
}

#[derive(Debug)]
pub(crate) struct Ring {
    /// Each entry has a word with state and memslot, and a word with the page.
    entries: Box<[(AtomicU64, AtomicU64)]>,
    /// The number of the next entry to be filled; only the vCPU advances it.
    dirty: AtomicU64,
    /// The number of the next entry to be harvested.
    harvest: AtomicU64,
    /// The number of the next entry to be emptied.
    reset: AtomicU64,
}

impl Ring {
    #[cfg(not(loom))]
    pub const MIN: u32 = 128;
    #[cfg(loom)]
    pub const MIN: u32 = 2;
    pub const MAX: u32 = 65536;
    /// Entries that are kept back; a fault fills one.
    #[cfg(not(loom))]
    const SPARE: u64 = 64;
    #[cfg(loom)]
    const SPARE: u64 = 0;

    pub fn new(entries: u32) -> Self {
        let entry = |_| (AtomicU64::new(EMPTY), AtomicU64::new(0));
        Self {
            entries: (0..entries).map(entry).collect(),
            dirty: AtomicU64::new(0),
            harvest: AtomicU64::new(0),
            reset: AtomicU64::new(0),
        }
    }

    fn entry(&self, index: u64) -> &(AtomicU64, AtomicU64) {
        &self.entries[index as usize & (self.entries.len() - 1)]
    }

    /// Returns whether the vCPU has to wait for a reset.
    pub fn is_full(&self) -> bool {
        let used = self.dirty.load(Ordering::Relaxed) - self.reset.load(Ordering::Acquire);
        used + Self::SPARE >= self.entries.len() as u64
    }

    /// Fills an entry; returns whether there was room. Only the vCPU calls it.
    pub fn push(&self, memslot: MemslotId, page: u64) -> bool {
        let index = self.dirty.load(Ordering::Relaxed);
        let (state, number) = self.entry(index);
        if index - self.reset.load(Ordering::Acquire) >= self.entries.len() as u64 {
            return false;
        }
        number.store(page, Ordering::Relaxed);
        state.store(DIRTY | u64::from(memslot.0) << 32, Ordering::Release);
        self.dirty.store(index + 1, Ordering::Release);
        true
    }

    /// Fills `pages` with the next pages that were written, as many as fit; returns how many. A
    /// reset empties only entries that this has harvested.
    pub fn harvest(&self, pages: &mut [DirtyPage]) -> usize {
        let mut index = self.harvest.load(Ordering::Relaxed);
        let mut count = 0;
        for place in pages {
            let (state, number) = self.entry(index);
            let raw = state.load(Ordering::Acquire);
            if raw & 3 != DIRTY || index >= self.dirty.load(Ordering::Acquire) {
                break;
            }
            let memslot = MemslotId((raw >> 32) as u16);
            *place = DirtyPage { memslot, page: number.load(Ordering::Relaxed) };
            state.store(raw & !3 | HARVESTED, Ordering::Release);
            (index, count) = (index + 1, count + 1);
        }
        self.harvest.store(index, Ordering::Release);
        count
    }

    /// Returns the numbers of the entries that were harvested and are not empty yet.
    pub fn harvested(&self) -> Range<u64> {
        self.reset.load(Ordering::Relaxed)..self.harvest.load(Ordering::Acquire)
    }

    pub fn page(&self, index: u64) -> DirtyPage {
        let (state, number) = self.entry(index);
        let memslot = MemslotId((state.load(Ordering::Acquire) >> 32) as u16);
        DirtyPage { memslot, page: number.load(Ordering::Relaxed) }
    }

    /// Empties entries whose pages are write-protected and invalidated.
    pub fn empty(&self, entries: Range<u64>) {
        for index in entries.clone() {
            self.entry(index).0.store(EMPTY, Ordering::Relaxed);
        }
        self.reset.store(entries.end, Ordering::Release);
    }
}
