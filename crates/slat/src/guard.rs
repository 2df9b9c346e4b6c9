//! A thread inside the tables: operations are its methods.

use crate::addr::{Gpa, GpaRange, RangeError};
use crate::counts::Counts;
use crate::format::{Format, Geometry};
use crate::grace::Inside;
use crate::ops::{Early, Place, Removals};
use crate::platform::Platform;
use crate::shootdown::Vmid;
use crate::shootdown::{Invalidation, Owed, Shootdown};
use crate::sizes::Sizes;
use crate::tables::{Halted, Tables};
use crate::walk::{Budget, Tally};
use core::fmt;

/// A thread inside the tables of a guest.
///
/// While it is there, no table that it may meet is given back. Operations are methods of the guard;
/// any number of threads work on one guest at once, each through its own. What they leave stale
/// gathers in the guard, as the hull of all of it, until [`Guard::complete`]; or until
/// [`Tables::shootdown`] takes it, to be merged with that of others. A guard that is dropped with
/// rights or dirty state taken completes; one that has only split hands what it owes to the guest,
/// and the next that completes covers it, as splits alone change no translation.
///
/// Where a CPU invalidates by address (Arm without FEAT_TLBIRANGE, Power), a hull of distant pages
/// costs an invalidation of the whole guest: complete between them.
///
/// A guard that is kept for long keeps unlinked tables: [`Guard::refresh`] lets them go.
#[derive(Debug)]
pub struct Guard<'t, 'p, F: Format, P: Platform> {
    pub(crate) tables: &'t Tables<'p, F, P>,
    inside: Option<Inside<'t>>,
    /// Whether CPUs may have the tables loaded: else nothing is ever owed.
    live: bool,
    /// What is left of [`Guard::limit`].
    pub(crate) budget: Budget,
    pub(crate) sums: Sums,
}

/// What operations did since their guard was made, and what they owe: behind one pointer, for a
/// [`Reservation`] and for visitors, which add to it where it is: what an operation did takes no
/// stack.
///
/// [`Reservation`]: crate::Reservation
#[derive(Debug)]
pub(crate) struct Sums {
    pub counts: Counts,
    pub sizes: Sizes,
    pub owed: Owed,
}

impl Sums {
    /// Adds what a walk did to the slots of one table; `stale` if translations changed.
    #[inline]
    pub fn settle<F: Format>(&mut self, level: u8, tally: &Tally, stale: bool) {
        self.counts.slots_read += tally.read;
        if tally.changed != 0 {
            self.counts.slots_written += tally.changed;
            self.counts.bytes_changed += tally.changed << F::shift(level);
            if stale {
                self.owed.leaves(tally.start, tally.end, F::size(level));
                self.owed.take();
            }
        }
    }
}

impl<'t, 'p, F: Format, P: Platform> Guard<'t, 'p, F, P> {
    #[inline(always)]
    pub(crate) fn new(
        tables: &'t Tables<'p, F, P>,
        inside: Option<Inside<'t>>,
        live: bool,
    ) -> Self {
        let budget = Budget::unbounded();
        let sums = Sums { counts: Counts::NONE, sizes: Sizes::NONE, owed: Owed::NOTHING };
        Self { tables, inside, live, budget, sums }
    }

    /// The value to leave in entries that one call reserves or empties: no other call ever leaves
    /// the same.
    #[inline]
    pub(crate) fn token(&self) -> u64 {
        match &self.inside {
            Some(inside) => F::reserved(inside.token(self.tables.platform.grace())),
            None => self.tables.tokens.next::<F>(),
        }
    }

    /// The machine under the tables.
    pub const fn platform(&self) -> &'p P {
        self.tables.platform()
    }

    /// The format, as configured.
    pub const fn format(&self) -> &F {
        self.tables.format()
    }

    /// Where hardware starts its walks.
    pub const fn geometry(&self) -> Geometry {
        self.tables.geometry()
    }

    /// What CPUs know the guest by.
    pub fn vmid(&self) -> Vmid {
        self.tables.vmid()
    }

    /// Nothing removed yet, in the caller's storage: as [`Removals::new`].
    pub fn removals<'s>(&self, storage: &'s mut [Place]) -> Removals<'s, 't, F, P> {
        Removals::new(self.tables, storage)
    }

    /// Lets go of all tables seen so far, at the cost of a store: as leaving and entering again.
    #[inline]
    pub fn refresh(&mut self) {
        if let Some(inside) = &mut self.inside {
            inside.refresh(self.tables.platform.grace(), self.tables.seat());
        }
    }

    /// Bounds how long operations go on: when they have looked at so many slots since, they end
    /// as *paused*, with everything before an address done, and the caller goes on from there when
    /// he likes. For a hypervisor that is not to keep its CPU to itself.
    ///
    /// An operation ends behind the table in which that happens, or behind a block above it for
    /// which it builds tables of tables: so it reads one table more at most, and each call gets at
    /// least one done; tables that it builds for one block are not counted. Operations on one page,
    /// and those that answer by bitmap and end nowhere ([`Guard::age`]), are not bounded; nor is
    /// looking. What refuses a range looks at its ends alone, but [`Guard::map`] and
    /// [`Guard::set_owner`] look at all of it first: with a limit they look at what they then do,
    /// and what is in the way further on is found later. A collapse to blocks of blocks that was
    /// paused inside one is to be done once more, of all of the range.
    pub fn limit(&mut self, slots: u64) {
        self.budget = Budget::of(slots);
    }

    /// Keeps what is left after a walk; whether it ended early because nothing is.
    #[inline]
    pub(crate) fn keep(&mut self, budget: Budget) -> bool {
        self.budget = budget;
        core::mem::take(&mut self.budget.spent)
    }

    /// An early end, for want of budget or else as said.
    #[cold]
    pub(crate) fn ended<T, E: Early>(at: Gpa, paused: bool, why: E) -> Result<T, Halted<E>> {
        Self::halted(at, if paused { E::PAUSED } else { why })
    }

    /// Exact costs of what the guard's operations did since it was made.
    pub const fn counts(&self) -> Counts {
        self.sums.counts
    }

    /// Leaves that came to be and went by the guard's operations since it was made.
    #[inline]
    pub const fn sizes(&self) -> &Sizes {
        &self.sums.sizes
    }

    /// The invalidation that the guard's operations owe; `None` if they left nothing stale.
    pub fn owed(&self) -> Option<Invalidation> {
        if self.live { self.tables.invalidation(&self.sums.owed) } else { None }
    }

    /// Owes the invalidation of leaves in `range`, whether or not anything was changed here: what
    /// was found done may have been done by another thread, whose invalidation has not completed.
    ///
    /// # Errors
    /// [`RangeError`]; nothing is owed.
    pub fn owe(&mut self, range: GpaRange) -> Result<(), RangeError> {
        self.tables.check(&range)?;
        self.sums.owed.any(range.start().0, range.end().0);
        self.sums.owed.take();
        Ok(())
    }

    /// Executes what is owed, and what others dropped, and returns once it has completed on all
    /// CPUs.
    #[inline]
    pub fn complete(&mut self) {
        let owed = core::mem::replace(&mut self.sums.owed, Owed::NOTHING);
        if self.live {
            self.tables.complete(owed);
        }
    }

    /// Takes what is owed, to be merged with that of other threads or completed later.
    pub fn shootdown(&mut self) -> Shootdown<'t, 'p, F, P> {
        Shootdown::new(self.tables, core::mem::replace(&mut self.sums.owed, Owed::NOTHING))
    }

    /// Before dirty state is cleared: until that is invalidated, an unmap takes a page that is not
    /// dirty for one that may be (`Pending::cleans`).
    pub(crate) fn begin_clean(&mut self) {
        if self.live && self.sums.owed.cleans() == 0 {
            self.tables.pending.cleans.begin();
            self.sums.owed.clean();
        }
    }

    /// A refusal before anything was done, or an early end.
    #[cold]
    pub(crate) fn halted<T, E>(at: Gpa, why: E) -> Result<T, Halted<E>> {
        Err(Halted { at, why })
    }
}

impl<F: Format, P: Platform> Drop for Guard<'_, '_, F, P> {
    #[inline(always)]
    fn drop(&mut self) {
        if self.live && !self.sums.owed.is_untouched() {
            self.sums.owed.let_go(self.tables);
        }
    }
}

/// A member of another platform's grace, or table pages of another platform.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Foreign;

impl fmt::Display for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("it belongs to another platform than these tables; join theirs")
    }
}

impl core::error::Error for Foreign {}
