//! Invalidations that are under way. Faults see them, and they see faults' reservations.
//!
//! # Protocol
//! An invalidation begins, empties leaves and reservations, and ends when the host has finished. A
//! fault reserves its entry, then looks for invalidations of that memory, then asks the backing,
//! then commits.
//!
//! *Invariant*: no fault commits a page that the backing returned before an invalidation of it
//! ended.
//! - If the fault reserves before the invalidation walks over the entry, the walk empties the
//!   reservation, and the commit fails. This holds for reservations of any size, and if a table has
//!   replaced the entry.
//! - If it reserves after that, the two order their accesses crosswise (`agreed`): the fault
//!   reserves and then looks; the invalidation begins and then walks. So the fault sees the
//!   invalidation, and the guest retries; or the invalidation has ended, and the backing, which the
//!   fault asks after that, answers as the host left it.

use crate::backing::HvaRange;
use crate::sync::{AtomicU64, Ordering, agreed};

/// The start of a free place.
const FREE: u64 = u64::MAX;
/// The start of a place that is being filled: until its bounds are written it covers everything.
const TAKEN: u64 = u64::MAX - 1;
/// The number of invalidations whose bounds are kept. Further ones count as covering everything.
#[cfg(not(loom))]
const PLACES: usize = 16;
#[cfg(loom)]
const PLACES: usize = 1;

/// The invalidations that are under way.
#[derive(Debug)]
pub(crate) struct Invalidations {
    active: AtomicU64,
    /// The number of active invalidations that have no place.
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

    /// Begins an invalidation: faults on the memory are retried until the result is dropped. An
    /// empty range delays no fault.
    pub fn begin(&self, range: &HvaRange) -> InvalidationInProgress<'_> {
        if range.bytes == 0 {
            return InvalidationInProgress { invalidations: None, place: None };
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
        InvalidationInProgress { invalidations: Some(self), place }
    }

    fn end(&self, place: Option<usize>) {
        self.active.fetch_sub(1, Ordering::AcqRel);
        match place {
            Some(place) => self.places[place].0.store(FREE, Ordering::Release),
            None => _ = self.unplaced.fetch_sub(1, Ordering::AcqRel),
        }
    }

    /// Returns whether an invalidation may be under way in `range`. A caller that has reserved an
    /// entry before sees every invalidation that does not see the reservation.
    ///
    /// The two bounds that this reads may be of two invalidations that had the place one after the
    /// other. Then the second began after this looked, and finds the reservation.
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

/// An invalidation by the host that is under way (Linux: `mmu_invalidate_in_progress`): the guest
/// retries faults on the memory, those of the thread that holds it as well. Dropping it ends the
/// invalidation. ([`slat::Invalidation`] is a TLB invalidation.)
#[must_use = "dropped, the invalidation ends: the backing must have changed by then"]
#[derive(Debug)]
pub struct InvalidationInProgress<'i> {
    /// `None` if the range is empty.
    invalidations: Option<&'i Invalidations>,
    place: Option<usize>,
}

impl Drop for InvalidationInProgress<'_> {
    fn drop(&mut self) {
        if let Some(invalidations) = self.invalidations {
            invalidations.end(self.place);
        }
    }
}
