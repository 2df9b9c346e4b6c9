//! Work that has begun and whose invalidation has not completed: removals, cleans of dirty state,
//! and guards and shootdowns that were dropped while they owed an invalidation.
//!
//! A thread counts itself before its first exchange, and is counted no more after its invalidation
//! has completed.
//!
//! *Invariant*: a thread that finds an entry as such an exchange left it, and then finds the count
//! 0, knows that the invalidation has completed. Dropped work stays counted until an invalidation
//! of all of the guest, which began after the drop, has completed.

use crate::invalidation::PendingFlush;
use crate::sync::{AtomicU64, Ordering};

/// The work that is left for later invalidations, on a cache line apart from what every walk reads.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct PendingWork {
    /// Guards, shootdowns and batches that were dropped while they owed something.
    dropped: DropCounts,
    pub removals: Underway,
    /// Cleans of dirty state.
    pub cleans: Underway,
}

impl PendingWork {
    pub fn new() -> Self {
        Self { dropped: DropCounts::new(), removals: Underway::new(), cleans: Underway::new() }
    }

    /// Returns whether completed invalidations of all of the guest cover all that was dropped.
    #[inline]
    pub fn is_covered(&self) -> bool {
        self.dropped.is_covered()
    }

    /// Returns whether no work is under way, and none was dropped that is not covered.
    #[inline]
    pub fn is_none(&self) -> bool {
        self.is_covered() && self.removals.count() | self.cleans.count() == 0
    }

    /// Counts what was owed by a dropped value.
    #[inline]
    pub fn defer(&self, owed: PendingFlush) {
        match owed.is_revoked() {
            true => self.cleans.dropped.add(owed.cleans()),
            // No right or dirty state was taken, so nothing was cleaned.
            false => self.cleans.end(owed.cleans()),
        }
        if !owed.is_nothing() {
            self.dropped.add(1);
        }
    }

    /// Counts removals that were dropped.
    pub fn drop_removals(&self) {
        self.removals.dropped.add(1);
        self.dropped.add(1);
    }

    /// Calls `invalidate`, which completes an invalidation of all of the guest, and counts what was
    /// dropped before as covered.
    pub fn cover(&self, invalidate: impl FnOnce()) {
        let Self { dropped, removals, cleans } = self;
        let before = (dropped.count(), removals.dropped.count(), cleans.dropped.count());
        invalidate();
        dropped.cover(before.0);
        removals.end(removals.dropped.cover(before.1));
        cleans.end(cleans.dropped.cover(before.2));
    }

    /// Forgets everything: no thread is in the tables, and all of the guest was invalidated.
    pub fn clear(&self) {
        self.dropped.cover(self.dropped.count());
        self.removals.clear();
        self.cleans.clear();
    }
}

/// The number of dropped values, and how many of them a completed invalidation of all of the guest
/// covers.
///
/// *Invariant*: a value that is counted as covered was dropped before such an invalidation began,
/// and that has completed. Both counts only grow.
#[derive(Debug)]
struct DropCounts {
    count: AtomicU64,
    covered: AtomicU64,
}

impl DropCounts {
    fn new() -> Self {
        Self { count: AtomicU64::new(0), covered: AtomicU64::new(0) }
    }

    #[inline]
    fn add(&self, count: u64) {
        if count != 0 {
            self.count.fetch_add(count, Ordering::AcqRel);
        }
    }

    /// Returns the count so far. It is read before an invalidation of all of the guest begins.
    #[inline]
    fn count(&self) -> u64 {
        self.count.load(Ordering::Acquire)
    }

    #[inline]
    fn is_covered(&self) -> bool {
        self.count() == self.covered.load(Ordering::Acquire)
    }

    /// Counts `count` dropped values as covered, after an invalidation of all of the guest that
    /// began after those drops has completed. Returns how many of them no other invalidation had
    /// covered.
    fn cover(&self, count: u64) -> u64 {
        let mut was = self.covered.load(Ordering::Acquire);
        while was < count {
            let raised =
                self.covered.compare_exchange(was, count, Ordering::AcqRel, Ordering::Acquire);
            match raised {
                Ok(_) => break,
                Err(found) => was = found,
            }
        }
        count.saturating_sub(was)
    }
}

/// Work of one kind that has begun, and whose invalidation has not completed.
#[derive(Debug)]
pub(crate) struct Underway {
    now: AtomicU64,
    dropped: DropCounts,
}

impl Underway {
    fn new() -> Self {
        Self { now: AtomicU64::new(0), dropped: DropCounts::new() }
    }

    /// Returns how many are under way.
    #[inline(always)]
    pub fn count(&self) -> u64 {
        self.now.load(Ordering::Acquire)
    }

    #[inline]
    pub fn begin(&self) {
        self.now.fetch_add(1, Ordering::AcqRel);
    }

    /// Ends `count` of them, whose invalidation has completed.
    #[inline]
    pub fn end(&self, count: u64) {
        if count != 0 {
            self.now.fetch_add(count.wrapping_neg(), Ordering::AcqRel);
        }
    }

    fn clear(&self) {
        self.dropped.cover(self.dropped.count());
        self.now.swap(0, Ordering::AcqRel);
    }
}
