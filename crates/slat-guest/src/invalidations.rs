//! Invalidations that are under way: faults see them, and they see faults' reservations.
//!
//! # Protocol
//! An invalidation begins, empties leaves and reservations, and ends when the host is done. A fault
//! reserves its entry, then looks whether an invalidation of that memory is under way, then asks
//! the backing, then commits.
//!
//! *Invariant*: no page is committed that the backing returned before an invalidation of it ended.
//! - The fault reserves before the invalidation's walk comes by: the walk empties the reservation,
//!   and the commit fails, whatever size the reservation has, and also where a table took its
//!   place.
//! - It reserves after that: reserving and looking, beginning and walking, are crosswise
//!   (`agreed`). So the fault sees the invalidation, and lets the guest try again; or the
//!   invalidation has ended, and the backing, asked only now, answers as the host left it.

use crate::backing::HvaRange;
use crate::sync::{AtomicU64, Ordering, agreed};

/// The start of a place that is free.
const FREE: u64 = u64::MAX;
/// The start of a place whose bounds are not known yet: it covers everything.
const TAKEN: u64 = u64::MAX - 1;
/// The number of invalidations whose bounds are known; further ones count as covering everything.
#[cfg(not(loom))]
const PLACES: usize = 16;
#[cfg(loom)]
const PLACES: usize = 1;

/// The invalidations that are under way.
#[derive(Debug)]
pub(crate) struct Invalidations {
    active: AtomicU64,
    /// How many of the active ones have no place.
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

    /// Begins an invalidation: faults on the memory wait until the result is dropped. A range of no
    /// bytes holds up no fault.
    pub fn begin(&self, range: &HvaRange) -> Invalidation<'_> {
        if range.bytes == 0 {
            return Invalidation { invalidations: None, place: None };
        }
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
        self.active.fetch_add(1, Ordering::AcqRel);
        agreed();
        Invalidation { invalidations: Some(self), place }
    }

    fn end(&self, place: Option<usize>) {
        self.active.fetch_sub(1, Ordering::AcqRel);
        match place {
            Some(place) => self.places[place].0.store(FREE, Ordering::Release),
            None => _ = self.unplaced.fetch_sub(1, Ordering::AcqRel),
        }
    }

    /// Whether an invalidation may be under way in `range`. A caller that has reserved an entry
    /// before sees every one that does not see the reservation.
    ///
    /// The two bounds read here may belong to two invalidations, one after the other in the same
    /// place: the second began after this looked, and will find the reservation.
    #[inline(always)]
    pub fn cover(&self, range: &HvaRange) -> bool {
        agreed();
        self.active.load(Ordering::Acquire) != 0 && self.any_covers(range)
    }

    #[cold]
    fn any_covers(&self, range: &HvaRange) -> bool {
        self.unplaced.load(Ordering::Acquire) != 0
            || self.places.iter().any(|(start, end)| match start.load(Ordering::Acquire) {
                FREE => false,
                TAKEN => true,
                start => start < range.end().0 && range.start.0 < end.load(Ordering::Acquire),
            })
    }
}

/// An invalidation that is under way: faults on the memory have the guest try again. Dropping it
/// ends the invalidation.
#[must_use = "dropped, the invalidation ends: the backing must have changed by then"]
#[derive(Debug)]
pub struct Invalidation<'i> {
    /// `None`: it is of no memory.
    invalidations: Option<&'i Invalidations>,
    place: Option<usize>,
}

impl Drop for Invalidation<'_> {
    fn drop(&mut self) {
        if let Some(invalidations) = self.invalidations {
            invalidations.end(self.place);
        }
    }
}
