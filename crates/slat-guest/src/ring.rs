//! Dirty rings: each vCPU records the pages that it wrote, in order, in memory that it shares with
//! the harvester.
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
//! # In shared memory
//! With [`Guest::share_rings`](crate::Guest::share_rings) the entries are also in memory that
//! another process can write ([`DirtyGfn`]). This side reads only one thing from that memory:
//! whether an entry that is there, in order, is harvested. The page of each entry is kept on this
//! side; the other side's memslots, offsets and other flags are not read. So the other side cannot
//! make a reset protect another page, or leave one out. If it does not mark its entries as
//! harvested, the ring stays full; [`Worker::harvest_ring`](crate::Worker::harvest_ring) still
//! harvests it.
//!
//! A ring counts as full while it still has room for the entries that a vCPU may fill before it
//! checks.

use crate::memslots::spec::MemslotId;
use crate::sync::{AtomicU64, Ordering};
use alloc::boxed::Box;
use core::ops::Range;
use core::sync::atomic::AtomicU32;

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

/// An entry of a ring in shared memory: Linux's `struct kvm_dirty_gfn`.
///
/// The other process loads `flags` (acquire), harvests an entry whose bit 0 is set, in order, and
/// stores 2 (release). After [`Worker::reset_rings`](crate::Worker::reset_rings) `flags` is 0, and
/// the page may be copied.
#[derive(Debug, Default)]
#[repr(C)]
pub struct DirtyGfn {
    /// Bit 0: dirty; bit 1: harvested.
    pub flags: AtomicU32,
    /// The memslot's name.
    pub memslot: AtomicU32,
    /// The page's number in the memslot.
    pub offset: core::sync::atomic::AtomicU64,
}

#[derive(Debug)]
pub(crate) struct Ring<'p> {
    /// Each entry has a word with state and memslot, and a word with the page.
    entries: Box<[(AtomicU64, AtomicU64)]>,
    /// The same entries where another process harvests. It may write anything there at any time.
    shared: &'p [DirtyGfn],
    /// The number of the next entry to be filled; only the vCPU advances it.
    dirty: AtomicU64,
    /// The number of the next entry to be harvested.
    harvest: AtomicU64,
    /// The number of the next entry to be emptied.
    reset: AtomicU64,
}

impl<'p> Ring<'p> {
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
            shared: &[],
            dirty: AtomicU64::new(0),
            harvest: AtomicU64::new(0),
            reset: AtomicU64::new(0),
        }
    }

    /// Shares the entries in `memory`; returns whether it has the ring's size.
    pub fn share(&mut self, memory: &'p [DirtyGfn]) -> bool {
        let fits = memory.len() == self.entries.len();
        if fits {
            memory.iter().for_each(|entry| entry.flags.store(EMPTY as u32, Ordering::Relaxed));
            self.shared = memory;
        }
        fits
    }

    pub fn is_shared(&self) -> bool {
        !self.shared.is_empty()
    }

    fn shared(&self, index: u64) -> Option<&DirtyGfn> {
        self.shared.get(index as usize & self.entries.len().wrapping_sub(1))
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
        if let Some(shared) = self.shared(index) {
            shared.memslot.store(memslot.0.into(), Ordering::Relaxed);
            shared.offset.store(page, Ordering::Relaxed);
            shared.flags.store(DIRTY as u32, Ordering::Release);
        }
        self.dirty.store(index + 1, Ordering::Release);
        true
    }

    /// Fills `pages` with the next pages that were written, as many as fit; returns how many. No
    /// thread empties entries of a shared ring meanwhile; one that is not shared it empties only
    /// where this has harvested.
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
            if let Some(shared) = self.shared(index) {
                shared.flags.store(HARVESTED as u32, Ordering::Release);
            }
            (index, count) = (index + 1, count + 1);
        }
        self.harvest.store(index, Ordering::Release);
        count
    }

    /// Returns the numbers of the entries that were harvested and are not empty yet.
    pub fn harvested(&self) -> Range<u64> {
        let start = self.reset.load(Ordering::Relaxed);
        let mut end = self.harvest.load(Ordering::Acquire);
        let dirty = self.dirty.load(Ordering::Acquire);
        let is_harvested = |index| {
            let flags = self.shared(index).map(|entry| entry.flags.load(Ordering::Acquire));
            flags.is_some_and(|flags| u64::from(flags) & HARVESTED != 0)
        };
        while end < dirty && is_harvested(end) {
            end += 1;
        }
        start..end
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
            if let Some(shared) = self.shared(index) {
                shared.flags.store(EMPTY as u32, Ordering::Release);
            }
        }
        // Also moves this side's harvest beyond the entries that the other side harvested.
        self.harvest.fetch_max(entries.end, Ordering::AcqRel);
        self.reset.store(entries.end, Ordering::Release);
    }
}
