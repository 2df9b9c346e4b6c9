//! Invalidations that must be executed, or handed on.

use crate::format::Format;
use crate::invalidation::{Invalidation, PendingFlush};
use crate::platform::Platform;
use crate::readers::{Inside, LeaveGuard};
use crate::tables::Tables;

impl PendingFlush {
    /// Hands this, the invalidation that a dropped guard owes, to the guest, then leaves. It is
    /// passed word by word: a pointer to it would keep every guard in memory, which costs a lookup
    /// a fifth of its time.
    #[inline(always)]
    pub fn release<F: Format, P: Platform>(
        &self,
        guest: &Tables<'_, F, P>,
        inside: Option<Inside<'_>>,
    ) {
        #[cold]
        #[inline(never)]
        fn words<F: Format, P: Platform>(
            guest: &Tables<'_, F, P>,
            (start, end): (u64, u64),
            (sizes, state): (u64, u64),
            inside: Option<Inside<'_>>,
        ) {
            let _left = LeaveGuard(inside);
            guest.release(PendingFlush { start, end, sizes, state });
        }
        words(guest, (self.start, self.end), (self.sizes, self.state), inside);
    }
}

/// Stale translations that operations left behind: an obligation to invalidate them.
///
/// Merged, one invalidation covers several operations, also of several threads. Until
/// [`Shootdown::complete`] has returned, a vCPU may go on using what was removed or restricted. A
/// dropped shootdown joins what the guest owes: the next thread that completes covers it.
#[must_use = "until the shootdown completes, vCPUs may use the old translations"]
#[derive(Debug)]
pub struct Shootdown<'t, 'p, F: Format, P: Platform> {
    tables: &'t Tables<'p, F, P>,
    owed: PendingFlush,
}

impl<'t, 'p, F: Format, P: Platform> Shootdown<'t, 'p, F, P> {
    pub(crate) const fn new(tables: &'t Tables<'p, F, P>, owed: PendingFlush) -> Self {
        Self { tables, owed }
    }

    /// Returns the invalidation that is owed; `None` if nothing stale was left behind.
    pub fn pending_invalidation(&self) -> Option<Invalidation> {
        self.tables.invalidation(&self.owed)
    }

    /// Merges another into one invalidation of a range that covers both. If the other belongs to
    /// another guest, it is completed at once instead.
    pub fn merge(&mut self, mut other: Self) {
        if core::ptr::eq(self.tables, other.tables) {
            self.owed.merge(core::mem::replace(&mut other.owed, PendingFlush::NOTHING));
        } else {
            other.complete();
        }
    }

    /// Executes the invalidation, and those that dropped values left behind; returns once they have
    /// completed on all CPUs.
    pub fn complete(mut self) {
        self.tables.complete(core::mem::replace(&mut self.owed, PendingFlush::NOTHING));
    }
}

impl<F: Format, P: Platform> Drop for Shootdown<'_, '_, F, P> {
    fn drop(&mut self) {
        self.tables.pending.defer(self.owed);
    }
}
