//! Dirty rings: each vCPU names the pages that it wrote, in order, in memory that it shares with
//! whoever harvests.
//!
//! # Protocol
//! An entry is empty, dirty, harvested, empty again, as in Linux's `struct kvm_dirty_gfn`. The vCPU
//! fills entries and nobody else does; the harvester marks them as harvested, in order; a reset
//! takes those that are, in order, protects their pages, to completion, and only then empties them.
//!
//! *Invariant*: a page of a slot that logs and that the guest may write is in an entry that is not
//! empty, in the bitmap, or about to be: the entry is filled after the leaf has become writable, and
//! emptied after it has stopped being so. Copy a page after the reset that covers it.
//!
//! A ring counts as full while there is room for what a vCPU may yet fill before it looks.

use crate::backing::Backing;
use crate::guest::Worker;
use crate::host::Host;
use crate::log::{Clear, Cleared, LogError};
use crate::slots::SlotId;
use crate::sync::{AtomicU64, Ordering};
use alloc::boxed::Box;
use slat::{Format, Gpa, Shootdown};

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

    fn harvest(&self, pages: &mut [DirtyPage]) -> usize {
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
}

/// Neighbouring pages of one slot: a word of a bitmap.
#[derive(Clone, Copy)]
struct Batch {
    slot: SlotId,
    start: u64,
    bits: u64,
}

impl Batch {
    fn of(page: DirtyPage) -> Self {
        Self { slot: page.slot, start: page.page, bits: 1 }
    }

    /// Adds a page within 64 of the others, before or behind them.
    fn add(&mut self, page: DirtyPage) -> bool {
        let DirtyPage { slot, page } = page;
        if slot != self.slot {
            return false;
        }
        if page >= self.start {
            let bit = page - self.start;
            if bit < 64 {
                self.bits |= 1 << bit;
            }
            return bit < 64;
        }
        let shift = self.start - page;
        let fits = shift <= u64::from(self.bits.leading_zeros());
        if fits {
            (self.start, self.bits) = (page, self.bits << shift | 1);
        }
        fits
    }
}

impl<'w, 'p, F: Format, H: Host, B: Backing> Worker<'w, 'p, F, H, B> {
    /// Takes the pages that vCPU `vcpu` wrote, in order, as many as `pages` has room for; returns how
    /// many. They are the caller's to copy after [`Worker::reset_rings`]. One thread at a time
    /// harvests a ring; the ring of a vCPU that the guest does not have is empty.
    pub fn harvest_ring(&mut self, vcpu: u16, pages: &mut [DirtyPage]) -> usize {
        self.guest.rings.get(vcpu as usize).map_or(0, |ring| ring.harvest(pages))
    }

    /// Protects all pages that were harvested, of all rings, and empties their entries; returns how
    /// many. When this returns, every later write to them is in a ring again.
    ///
    /// # Errors
    /// [`LogError::Contended`], and what else a clear may come to: the entries of that ring, and of
    /// those behind it, are as they were, to be reset another time.
    pub fn reset_rings(&mut self) -> Result<u64, LogError> {
        let guest = self.guest;
        let _turn = guest.resetting.lock();
        let mut total = 0;
        for ring in &guest.rings {
            let first = ring.reset.load(Ordering::Relaxed);
            let end = ring.harvest.load(Ordering::Acquire);
            let mut batch: Option<Batch> = None;
            // One invalidation for all of the ring's pages.
            let mut owed = None;
            for index in first..end {
                let (state, number) = ring.entry(index);
                let slot = SlotId((state.load(Ordering::Acquire) >> 32) as u16);
                let page = DirtyPage { slot, page: number.load(Ordering::Relaxed) };
                if batch.as_mut().is_none_or(|batch| !batch.add(page)) {
                    batch.map_or(Ok(()), |batch| self.protect_batch(&batch, &mut owed))?;
                    batch = Some(Batch::of(page));
                }
            }
            batch.map_or(Ok(()), |batch| self.protect_batch(&batch, &mut owed))?;
            if let Some(shootdown) = owed {
                shootdown.complete();
            }
            for index in first..end {
                ring.entry(index).0.store(EMPTY, Ordering::Relaxed);
            }
            ring.reset.store(end, Ordering::Release);
            guest.counters.ring_resets.add(end - first);
            total += end - first;
        }
        Ok(total)
    }

    /// Takes the right to write from the pages of a batch. What that owes in the tables that all
    /// share joins `owed`; views of their own are done.
    fn protect_batch(
        &mut self,
        batch: &Batch,
        owed: &mut Option<Shootdown<'w, 'p, F, H>>,
    ) -> Result<(), LogError> {
        let guest = self.guest;
        let slot = self.look(|view| view.named(batch.slot).map(|slot| slot.spec));
        // A slot that was deleted meanwhile has no writable page.
        let Some(spec) = slot else { return Ok(()) };
        let start = Gpa(spec.gpa.0 + (batch.start << F::PAGE_SHIFT));
        // Pages beyond its end are those of a slot that had its name before.
        let bits = match (spec.bytes >> F::PAGE_SHIFT).saturating_sub(batch.start) {
            0 => return Ok(()),
            pages if pages < 64 => batch.bits & ((1 << pages) - 1),
            _ => batch.bits,
        };
        for tables in guest.spaces() {
            self.inside(tables, |guard, cache| {
                let mut cleared = Cleared::default();
                // Rings go with protection: no mark is cleaned.
                let mut clear = Clear { guest, guard, cache, cleared: &mut cleared, kept: None };
                let result = clear.pages(start, &[bits]).map_err(|(_, error)| error);
                if core::ptr::eq(tables, &*guest.tables) {
                    let own = tables.shootdown(guard).expect("a guard of these tables");
                    match owed {
                        None => *owed = Some(own),
                        Some(all) => all.merge(own),
                    }
                }
                result
            })?;
        }
        Ok(())
    }
}
