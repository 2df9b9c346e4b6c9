//! Work that has begun and whose invalidation has not completed: removals, and cleans of dirty
//! state.
//!
//! A thread counts itself before its first exchange, and takes itself off after its invalidation
//! has completed. *Invariant*: a thread that finds a slot as that exchange left it, and then finds
//! the count 0, knows that the invalidation has completed. What is dropped stays counted until an
//! invalidation of all of the guest, which began after the drop, has completed.

use crate::sync::{AtomicU64, Ordering};

#[derive(Debug)]
pub(crate) struct Underway {
    now: AtomicU64,
    /// How many were dropped, and how many of those are covered by completed invalidations.
    dropped: AtomicU64,
    covered: AtomicU64,
}

impl Underway {
    pub fn new() -> Self {
        let zero = || AtomicU64::new(0);
        Self { now: zero(), dropped: zero(), covered: zero() }
    }

    /// How many are under way.
    #[inline(always)]
    pub fn count(&self) -> u64 {
        self.now.load(Ordering::Acquire)
    }

    pub fn begin(&self) {
        self.now.fetch_add(1, Ordering::AcqRel);
    }

    /// The invalidation of `count` of them has completed.
    pub fn end(&self, count: u64) {
        if count != 0 {
            self.now.fetch_add(count.wrapping_neg(), Ordering::AcqRel);
        }
    }

    /// Keeps in mind that `count` of them were dropped.
    pub fn drop(&self, count: u64) {
        if count != 0 {
            self.dropped.fetch_add(count, Ordering::AcqRel);
        }
    }

    /// How many were dropped so far: read before an invalidation of all of the guest begins.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Acquire)
    }

    /// An invalidation of all of the guest has completed, before which so many had been dropped.
    pub fn cover(&self, dropped: u64) {
        self.end(dropped.saturating_sub(raise(&self.covered, dropped)));
    }

    /// Nothing is under way any more: nobody is in the tables, and all was invalidated.
    pub fn clear(&self) {
        raise(&self.covered, self.dropped());
        self.now.swap(0, Ordering::AcqRel);
    }
}

/// Sets a count that only grows to `to` at least; returns what it was.
pub(crate) fn raise(count: &AtomicU64, to: u64) -> u64 {
    let mut was = count.load(Ordering::Acquire);
    while was < to {
        match count.compare_exchange(was, to, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => break,
            Err(found) => was = found,
        }
    }
    was
}
