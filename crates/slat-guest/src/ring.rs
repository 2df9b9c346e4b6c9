//! Dirty rings: each vCPU names the pages that it wrote, in order, in memory that it shares with
//! whoever harvests.
//!
//! # Protocol
//! An entry is empty, dirty, harvested, empty again, as in Linux's `struct kvm_dirty_gfn`. The vCPU
//! fills entries and nobody else does; the harvester marks them as harvested, in order; a reset
//! takes those that are, in order, protects their pages, to completion, and only then empties them.
//!
//! *Invariant*: a page of a slot that logs and that the guest may write is in an entry that is not
//! empty, in the bitmap, or about to be: the entry is filled after the leaf has become writable,
//! and emptied after it has stopped being so. Copy a page after the reset that covers it.
//!
//! A ring counts as full while there is room for what a vCPU may yet fill before it looks.

use crate::slots::spec::SlotId;
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
    /// Its slot.
    pub slot: SlotId,
    /// Its number in the slot.
    pub page: u64,
}

#[derive(Debug)]
pub(crate) struct Ring {
    /// State and slot; page.
    entries: Box<[(AtomicU64, AtomicU64)]>,
    /// The next to be filled: the vCPU's.
    dirty: AtomicU64,
    /// The next to be harvested.
    harvest: AtomicU64,
    /// The next to be emptied.
    reset: AtomicU64,
}

impl Ring {
    #[cfg(not(loom))]
    pub const MIN: u32 = 128;
    #[cfg(loom)]
    pub const MIN: u32 = 2;
    pub const MAX: u32 = 65536;
    /// Entries kept back: a fault fills one.
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

    /// Whether the vCPU has to wait for a reset.
    pub fn is_full(&self) -> bool {
        let used = self.dirty.load(Ordering::Relaxed) - self.reset.load(Ordering::Acquire);
        used + Self::SPARE >= self.entries.len() as u64
    }

    /// By the vCPU alone; whether there was room.
    pub fn push(&self, slot: SlotId, page: u64) -> bool {
        let index = self.dirty.load(Ordering::Relaxed);
        let (state, number) = self.entry(index);
        if index - self.reset.load(Ordering::Acquire) >= self.entries.len() as u64 {
            return false;
        }
        number.store(page, Ordering::Relaxed);
        state.store(DIRTY | u64::from(slot.0) << 32, Ordering::Release);
        self.dirty.store(index + 1, Ordering::Release);
        true
    }

    /// Names the pages that were written next, as many as there is room for; returns how many.
    pub fn harvest(&self, pages: &mut [DirtyPage]) -> usize {
        let mut index = self.harvest.load(Ordering::Relaxed);
        let mut count = 0;
        for place in pages {
            let (state, number) = self.entry(index);
            let raw = state.load(Ordering::Acquire);
            if raw & 3 != DIRTY || index >= self.dirty.load(Ordering::Acquire) {
                break;
            }
            let slot = SlotId((raw >> 32) as u16);
            *place = DirtyPage { slot, page: number.load(Ordering::Relaxed) };
            state.store(raw & !3 | HARVESTED, Ordering::Release);
            (index, count) = (index + 1, count + 1);
        }
        self.harvest.store(index, Ordering::Release);
        count
    }

    /// The entries that were harvested, and are not empty yet.
    pub fn harvested(&self) -> Range<u64> {
        self.reset.load(Ordering::Relaxed)..self.harvest.load(Ordering::Acquire)
    }

    pub fn page(&self, index: u64) -> DirtyPage {
        let (state, number) = self.entry(index);
        let slot = SlotId((state.load(Ordering::Acquire) >> 32) as u16);
        DirtyPage { slot, page: number.load(Ordering::Relaxed) }
    }

    /// Empties entries whose pages are protected, to completion.
    pub fn empty(&self, entries: Range<u64>) {
        for index in entries.clone() {
            self.entry(index).0.store(EMPTY, Ordering::Relaxed);
        }
        self.reset.store(entries.end, Ordering::Release);
    }
}
