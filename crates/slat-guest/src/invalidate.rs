//! Invalidation from the host's side: memory that the host is about to take back, or to change.
//!
//! # Protocol
//! An invalidation begins, empties leaves and reservations, and ends when the host is done. A fault
//! reserves its slot, then looks whether an invalidation of that memory is under way, then asks the
//! backing, then commits.
//!
//! *Invariant*: no page is committed that the backing named before an invalidation of it ended.
//! - The fault reserves before the invalidation's walk comes by: the walk empties the reservation, and
//!   the commit fails, whatever size the reservation has, and also where a table took its place.
//! - It reserves after that: reserving and looking, beginning and walking, are crosswise (`agreed`),
//!   so the fault sees the invalidation, and lets the guest try again; or the invalidation has ended,
//!   and the backing, asked only now, answers as the host left it.

use crate::backing::{Backing, Hva, HvaRange};
use crate::config::Logging;
use crate::guest::{Guest, Worker};
use crate::host::Host;
use crate::sync::{AtomicU64, Ordering, agreed};
use slat::{
    Format, Gpa, GpaRange, Halted, Maintenance, Memory, Place, Removals, Removed, Tables,
    UnmapError,
};

/// A place that nobody has.
const FREE: u64 = u64::MAX;
/// A place whose bounds are not known yet: it covers everything.
const TAKEN: u64 = u64::MAX - 1;
/// Invalidations whose bounds are known; more at a time count as covering everything.
#[cfg(not(loom))]
const PLACES: usize = 16;
#[cfg(loom)]
const PLACES: usize = 1;

/// Those under way.
#[derive(Debug)]
pub(crate) struct Invalidations {
    active: AtomicU64,
    /// Of those, how many have no place.
    unplaced: AtomicU64,
    places: [(AtomicU64, AtomicU64); PLACES],
}

impl Invalidations {
    pub fn new() -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            active: zero(),
            unplaced: zero(),
            places: core::array::from_fn(|_| (AtomicU64::new(FREE), zero())),
        }
    }

    fn begin(&self, range: &HvaRange) -> Option<usize> {
        let place = self.places.iter().position(|(start, _)| {
            start.compare_exchange(FREE, TAKEN, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        });
        match place {
            Some(place) => {
                let (start, end) = &self.places[place];
                end.store(range.end().0, Ordering::Release);
                start.store(range.start.0.min(TAKEN), Ordering::Release);
            }
            None => _ = self.unplaced.fetch_add(1, Ordering::AcqRel),
        }
        self.active.fetch_add(1, Ordering::SeqCst);
        agreed();
        place
    }

    fn end(&self, place: Option<usize>) {
        self.active.fetch_sub(1, Ordering::AcqRel);
        match place {
            Some(place) => self.places[place].0.store(FREE, Ordering::Release),
            None => _ = self.unplaced.fetch_sub(1, Ordering::AcqRel),
        }
    }

    /// Whether one may be under way in `range`. A caller who reserved a slot before sees all that do
    /// not see the reservation.
    ///
    /// Bounds that belong to two, one after the other, in the same place: then the second began after
    /// this looked, and will find the reservation.
    pub fn cover(&self, range: &HvaRange) -> bool {
        agreed();
        if self.active.load(Ordering::SeqCst) == 0 {
            return false;
        }
        self.unplaced.load(Ordering::Acquire) != 0
            || self.places.iter().any(|(start, end)| match start.load(Ordering::Acquire) {
                FREE => false,
                TAKEN => true,
                start => start < range.end().0 && range.start.0 < end.load(Ordering::Acquire),
            })
    }
}

/// An invalidation that is under way: faults on the memory wait, by asking the guest to try again.
/// Dropped, it ends.
#[must_use = "dropped, the invalidation ends: the backing must have changed by then"]
#[derive(Debug)]
pub struct Invalidation<'i> {
    invalidations: &'i Invalidations,
    place: Option<usize>,
}

impl Drop for Invalidation<'_> {
    fn drop(&mut self) {
        self.invalidations.end(self.place);
    }
}

/// Neighbouring pages that the guest cannot reach any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Taken {
    /// Where the guest had them.
    pub gpa: Gpa,
    /// Where the host has them.
    pub host: HvaRange,
    /// The guest wrote them, or may have.
    pub dirty: bool,
    /// It used them.
    pub accessed: bool,
}

/// How many kinds of neighbouring leaves are unmapped for one invalidation.
const BATCH: usize = 64;

impl<'w, 'p, F: Format, H: Host, B: Backing> Worker<'w, 'p, F, H, B> {
    /// Takes the memory at `host` from the guest; `taken` learns of what was mapped there, once the
    /// guest cannot reach it. Blocks that the range touches are taken whole.
    ///
    /// When this returns the host may take the memory back, or change it. Until the value is dropped
    /// no fault maps any of it. It may be called with locks that [`Backing::page`] takes.
    pub fn invalidate(&mut self, host: HvaRange, mut taken: impl FnMut(Taken)) -> Invalidation<'w> {
        let guest = self.guest;
        let invalidations = &guest.invalidations;
        let invalidation = Invalidation { invalidations, place: invalidations.begin(&host) };
        for tables in guest.spaces() {
            let slots = self.look(|view| {
                let parts = view.slots.iter();
                parts
                    .filter_map(|slot| slot.spec.guest_of(&host).map(|range| (slot.clone(), range)))
                    .collect::<alloc::vec::Vec<_>>()
            });
            for (slot, range) in slots {
                let bytes = self.unmap(tables, range, |removed| {
                    let dirty = removed.attributes.dirty;
                    // Written since the last harvest: the leaf was what knew.
                    if let Some(log) = slot.log.as_ref().filter(|_| dirty)
                        && guest.config.logging == Logging::Hardware
                    {
                        log.mark::<F>(&slot.spec, removed.gpa.0, removed.bytes);
                    }
                    let host = HvaRange {
                        start: Hva(slot.spec.host.0.wrapping_add(removed.gpa.0 - slot.spec.gpa.0)),
                        bytes: removed.bytes,
                    };
                    let accessed = removed.attributes.accessed;
                    taken(Taken { gpa: removed.gpa, host, dirty, accessed });
                });
                guest.counters.invalidated_bytes.add(bytes);
            }
        }
        invalidation
    }

    /// Unmaps `range`, and blocks that it cuts through; hands out what was there once nobody can
    /// reach it, and it was maintained: a vCPU may have written it past the caches.
    pub(crate) fn unmap(
        &mut self,
        tables: &'w Tables<'p, F, H>,
        range: GpaRange,
        mut removed: impl FnMut(Removed),
    ) -> u64 {
        let guest = self.guest;
        self.remove(tables, range, |leaves| {
            if guest.caches.matters() && leaves.attributes.memory == Memory::Normal {
                tables.platform().maintain(leaves.hpa, leaves.bytes, Maintenance::Data);
                guest.counters.flushed_bytes.add(leaves.bytes);
            }
            removed(leaves);
        })
    }

    /// [`Worker::unmap`] of what is maintained already. Waits for whoever holds an entry: nobody does
    /// for long.
    pub(crate) fn remove(
        &mut self,
        tables: &'w Tables<'p, F, H>,
        range: GpaRange,
        mut removed: impl FnMut(Removed),
    ) -> u64 {
        let host = self.guest.tables.platform();
        let (mut start, mut end, mut bytes) = (range.start().0, range.end().0, 0);
        while start < end {
            let rest = GpaRange::new(Gpa(start), end - start).expect("not empty");
            let mut storage = [const { Place::EMPTY }; BATCH];
            let guard = tables.enter(&mut self.member);
            let mut guard = guard.expect("the worker joined this platform");
            let mut removals = Removals::new(tables, &mut storage);
            let result = guard.unmap(rest, &mut removals);
            bytes +=
                removals.complete().map(|leaves| (removed(leaves), leaves.bytes).1).sum::<u64>();
            self.guest.counters.engine(guard.counts(), 0);
            match result {
                Ok(_) => break,
                Err(Halted { why: UnmapError::CutsBlock { size }, .. }) => {
                    start &= !(size.bytes() - 1);
                    end = end.next_multiple_of(size.bytes());
                }
                Err(Halted { at, why: UnmapError::Full }) => start = at.0,
                Err(Halted { at, .. }) => {
                    start = at.0;
                    host.wait();
                }
            }
        }
        bytes
    }
}

impl<F: Format, H: Host, B: Backing> Guest<'_, F, H, B> {
    /// Whether the host is taking back memory at `host`.
    pub(crate) fn being_invalidated(&self, host: &HvaRange) -> bool {
        self.invalidations.cover(host)
    }
}
