//! How long the walks of a call wait, and how a walk ended.

use super::PATIENCE;
use crate::sync::relax;

/// The number of turns that the walks of one call have waited.
#[derive(Debug)]
pub(crate) struct Budget {
    waited: u32,
}

impl Budget {
    pub const fn new() -> Self {
        Self { waited: 0 }
    }

    /// Returns the budget of a walk that does not wait.
    pub const fn impatient() -> Self {
        Self { waited: PATIENCE - 1 }
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
    /// The visitor stopped the walk, or another thread held an entry for too long.
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
