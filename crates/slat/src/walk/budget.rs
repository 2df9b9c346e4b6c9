//! How far a walk may go, and how it ended.

/// Slots that walks may still read before they end early.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Budget {
    left: u64,
    /// The last walk ended early, as nothing was left.
    pub spent: bool,
}

impl Budget {
    pub const fn unbounded() -> Self {
        Self::of(u64::MAX)
    }

    pub const fn of(slots: u64) -> Self {
        Self { left: slots, spent: false }
    }

    /// Whether somebody set it: no walk is as long as what none begins with.
    #[inline(always)]
    pub const fn is_bounded(&self) -> bool {
        self.left < u64::MAX / 2
    }

    /// Counts so many slots of a table that is not done with.
    #[inline(always)]
    pub(super) fn count(&mut self, slots: u64) {
        self.left = self.left.saturating_sub(slots);
    }

    /// After a part of a table, of which so many slots were read: at its `end`, if all is well.
    #[inline(always)]
    pub(super) fn end(&mut self, result: End, slots: u64, end: u64) -> End {
        if !result.is_done() {
            self.count(slots);
        } else if self.spend(slots) {
            return End::stopped(end);
        }
        result
    }

    /// Whether nothing is left after so many slots.
    #[inline(always)]
    pub(super) fn spend(&mut self, slots: u64) -> bool {
        self.count(slots);
        self.spent = self.left == 0;
        self.spent
    }
}

/// How a walk of one tree ended. Two words, which travel in registers.
#[derive(Clone, Copy)]
pub(crate) struct End {
    /// Where, if it ended early.
    pub(super) at: u64,
    pub(super) why: u8,
}

impl End {
    /// All of it is done with.
    pub(super) const DONE: Self = Self { at: 0, why: 0 };
    /// The visitor stopped it, somebody else held a slot for too long, or the budget is spent.
    pub(super) const STOPPED: u8 = 1;
    /// The table that it was in was retired; `at` is where it began.
    pub(super) const RETIRED: u8 = 2;
    /// A climb goes on below, to `at`.
    pub(super) const BELOW: u8 = 3;
    /// The visitor is asked to do something at `at`: this and the level of the slot there.
    pub(super) const ASIDE: u8 = 4;

    #[inline(always)]
    pub(super) const fn stopped(at: u64) -> Self {
        Self { at, why: Self::STOPPED }
    }

    #[inline(always)]
    pub(super) const fn is_done(self) -> bool {
        self.why == 0
    }
}
