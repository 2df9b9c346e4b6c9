//! The limits of the walks of a call, and how a walk ended.

use super::PATIENCE;
use crate::sync::relax;

/// The number of entries that walks may still read before they end early, and the number of turns
/// that those of one call have waited.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Budget {
    left: u64,
    /// The turns that they have waited: 0 at first, as a guard is made by few stores.
    waited: u32,
    /// Whether the last walk ended early because nothing was left.
    pub spent: bool,
}

impl Budget {
    pub const fn unbounded() -> Self {
        Self::of(u64::MAX)
    }

    pub const fn of(ptes: u64) -> Self {
        Self { left: ptes, waited: 0, spent: false }
    }

    /// Returns a budget without a limit for a walk that does not wait.
    pub const fn impatient() -> Self {
        Self { waited: PATIENCE - 1, ..Self::unbounded() }
    }

    /// Returns the number of entries that further calls may read.
    #[inline(always)]
    pub const fn left(&self) -> u64 {
        self.left
    }

    /// Returns a budget of half of the entries.
    #[inline(always)]
    pub const fn half(self) -> Self {
        if self.is_bounded() { Self { left: self.left / 2, ..self } } else { self }
    }

    /// Counts what a walk with [`Budget::half`] of this one used.
    #[inline(always)]
    pub fn used(&mut self, half: Self) {
        self.count(self.half().left - half.left);
        self.waited = half.waited;
    }

    /// Waits for one turn; returns false if the call, whose visitor has waited for `others`, has
    /// waited for long enough.
    #[cold]
    #[inline(never)]
    pub fn wait(&mut self, others: u32) -> bool {
        self.waited = PATIENCE.min(self.waited + 1);
        let waits = self.waited + others < PATIENCE;
        if waits {
            relax();
        }
        waits
    }

    /// Returns whether a caller set it: no walk reads as many entries as an unbounded budget has.
    #[inline(always)]
    pub const fn is_bounded(&self) -> bool {
        self.left < u64::MAX / 2
    }

    /// Counts `ptes` read in a table that is not finished.
    #[inline(always)]
    pub fn count(&mut self, ptes: u64) {
        self.left = self.left.saturating_sub(ptes);
    }

    /// Counts the entries that were read in a part of a table, after it; returns its `end` if the
    /// budget is spent there.
    #[inline(always)]
    pub(super) fn end(&mut self, result: End, ptes: u64, end: u64) -> End {
        if !result.is_done() {
            self.count(ptes);
        } else if self.spend(ptes) {
            return End::stopped(end);
        }
        result
    }

    /// Counts `ptes` read; returns whether nothing is left.
    #[inline(always)]
    pub(super) fn spend(&mut self, ptes: u64) -> bool {
        self.count(ptes);
        self.spent = self.left == 0;
        self.spent
    }
}

/// How a walk of the tree ended. It is two words, so that it is passed in registers.
#[derive(Clone, Copy)]
pub(crate) struct End {
    /// The address where it ended, if early.
    pub(super) at: u64,
    pub(super) reason: u8,
}

impl End {
    /// The whole range is done.
    pub(super) const DONE: Self = Self { at: 0, reason: 0 };
    /// The visitor stopped the walk, another thread held an entry for too long, or the budget is
    /// spent.
    pub(super) const STOPPED: u8 = 1;
    /// The table was retired; `at` is the first address that it covered.
    pub(super) const RETIRED: u8 = 2;
    /// The climb goes on in the table below, up to `at`.
    pub(super) const BELOW: u8 = 3;
    /// The visitor has asked for a call of `aside` at `at`. The level of the entry is added to
    /// this.
    pub(super) const ASIDE: u8 = 4;

    #[inline(always)]
    pub(super) const fn stopped(at: u64) -> Self {
        Self { at, reason: Self::STOPPED }
    }

    #[inline(always)]
    pub(super) const fn is_done(self) -> bool {
        self.reason == 0
    }
}
