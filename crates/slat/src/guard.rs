//! A thread inside the tables: operations are its methods.

use crate::addr::{Gpa, GpaRange, RangeError};
use crate::counts::OpCounts;
use crate::format::{Format, Geometry};
use crate::invalidation::{Invalidation, PendingFlush, Vmid};
use crate::leaf_delta::LeafDelta;
use crate::platform::Platform;
use crate::reader::Reader;
use crate::readers::Inside;
use crate::shootdown::Shootdown;
use crate::tables::{Interruption, Start, Tables};
use crate::walk::WalkCounts;
use core::fmt;

/// A thread inside the tables of a guest.
///
/// While the guard lives, no table that the thread may meet is given back. Operations are methods
/// of the guard, and any number of threads work on one guest at once, each through its own guard.
/// The guard gathers the invalidation that its operations owe, as one range that covers all of it,
/// until [`Guard::invalidate`] executes it, or [`Tables::shootdown`] takes it to merge it with
/// other threads'. A guard that owes the invalidation of rights or dirty state that it took
/// completes it when it is dropped. A guard that has only split hands what it owes to the guest,
/// and the next thread that completes covers it, as splits alone change no translation.
///
/// Where a CPU invalidates address by address (Arm without FEAT_TLBIRANGE, Power), a range around
/// distant pages costs an invalidation of the whole guest: complete between such pages.
///
/// A call waits for entries that other threads hold, but in all of it for at most 4,096 pauses of
/// the CPU, some 100 microseconds: then it ends as *contended*, with everything before an address
/// done. A call that gets a bitmap waits for so long for each of its runs of pages.
/// [`Guard::translate`] does not wait for a leaf, and [`Guard::age`] for nothing. A caller whose
/// call was contended should let the thread run that holds the entry.
///
/// A guard that lives long keeps unlinked tables allocated; [`Guard::refresh`] lets them go.
///
/// ```
/// # use slat::*;
/// /// Begins a dirty log of `ram`: when this returns, no write goes unnoticed.
/// fn log<'p, F: Format, P: Platform>(
///     tables: &Tables<'p, F, P>,
///     reader: &mut Reader<'p, P>,
///     ram: GpaRange,
/// ) -> Result<(), Interruption<ChangeError>> {
///     let mut guard = tables.enter(reader).expect("a reader of the same platform");
///     guard.write_protect(ram)?;
///     guard.invalidate();
///     Ok(())
/// }
///
/// /// A write fault, on the CPU that faulted.
/// fn fault<F: Format, P: Platform>(
///     guard: &mut Guard<'_, '_, F, P>,
///     page: GpaRange,
/// ) -> Result<(), Interruption<ChangeError>> {
///     guard.relax(page, Access::Write)?.flush_local();
///     Ok(())
/// }
/// ```
#[derive(Debug)]
pub struct Guard<'t, 'p, F: Format, P: Platform> {
    pub(crate) tables: &'t Tables<'p, F, P>,
    pub(crate) start: Start<'t, P>,
    inside: Option<Inside<'t>>,
    /// 1 if CPUs may have the tables loaded; if 0, no invalidation is ever owed. A word, as all the
    /// fields are: a guard with padding is copied as a block, once or twice each time that a thread
    /// enters.
    live: usize,
    pub(crate) sums: GuardState,
}

/// Counts of the operations since their guard was made, and the invalidation that they owe. It is
/// behind one pointer, so that a [`Reservation`] and visitors add to it in place, and an operation
/// needs no stack for it.
///
/// [`Reservation`]: crate::Reservation
#[derive(Debug)]
pub(crate) struct GuardState {
    pub counts: OpCounts,
    pub sizes: LeafDelta,
    pub owed: PendingFlush,
}

impl GuardState {
    /// Adds what a walk did to the entries of one table. `stale` says that translations changed.
    #[inline]
    pub fn settle<F: Format>(&mut self, level: u8, tally: &WalkCounts, stale: bool) {
        self.counts.entries_read += tally.read;
        if tally.changed != 0 {
            self.counts.entries_written += tally.changed;
            self.counts.bytes_changed += tally.changed << F::shift(level);
            if stale {
                self.owed.leaves(tally.start, tally.end, F::size(level));
                self.owed.set_revoked();
            }
        }
    }
}

impl<'p, F: Format, P: Platform> Tables<'p, F, P> {
    /// Enters the tables, and returns a guard, whose methods are the operations.
    ///
    /// # Errors
    /// [`WrongPlatform`] if the reader registered with another platform.
    #[inline]
    pub fn enter<'t>(
        &'t self,
        reader: &'t mut Reader<'p, P>,
    ) -> Result<Guard<'t, 'p, F, P>, WrongPlatform> {
        if !reader.serves(self.platform) {
            return Err(WrongPlatform);
        }
        Ok(Guard::new(self, Some(reader.enter(self.reader_vmid)), true))
    }

    /// Enters the tables without a reader slot: the exclusive borrow keeps all other threads out.
    pub fn enter_mut(&mut self) -> Guard<'_, 'p, F, P> {
        Guard::new(self, None, true)
    }

    /// Enters the tables without a reader slot, for callers that keep unlinked tables allocated by
    /// other means, such as their own read-copy-update.
    ///
    /// # Safety
    /// No thread calls [`Tables::reclaim`] while the guard lives.
    pub unsafe fn enter_unchecked(&self) -> Guard<'_, 'p, F, P> {
        Guard::new(self, None, true)
    }

    /// Takes the invalidation that `guard` owes, to merge it with other threads' or to complete it
    /// later.
    ///
    /// # Errors
    /// [`WrongTables`] if the guard belongs to other tables.
    pub fn shootdown<'t>(
        &'t self,
        guard: &mut Guard<'_, 'p, F, P>,
    ) -> Result<Shootdown<'t, 'p, F, P>, WrongTables> {
        if !core::ptr::eq(guard.tables, self) {
            return Err(WrongTables);
        }
        Ok(Shootdown::new(self, core::mem::replace(&mut guard.sums.owed, PendingFlush::NOTHING)))
    }
}

impl<'t, 'p, F: Format, P: Platform> Guard<'t, 'p, F, P> {
    #[inline(always)]
    pub(crate) fn new(
        tables: &'t Tables<'p, F, P>,
        inside: Option<Inside<'t>>,
        live: bool,
    ) -> Self {
        let sums = GuardState {
            counts: OpCounts::NONE,
            sizes: LeafDelta::NONE,
            owed: PendingFlush::NOTHING,
        };
        Self { tables, start: tables.start(), inside, live: live.into(), sums }
    }

    /// Returns the value to leave in entries that one call reserves or empties. No other call
    /// leaves the same value.
    #[inline]
    pub(crate) fn token(&self) -> u64 {
        match &self.inside {
            Some(inside) => F::reserved(inside.token(self.tables.platform.readers())),
            None => self.tables.tokens.next::<F>(),
        }
    }

    /// Returns the platform that the tables use.
    pub const fn platform(&self) -> &'p P {
        self.tables.platform()
    }

    /// Returns the format, as configured.
    pub const fn format(&self) -> &F {
        self.tables.format()
    }

    /// Returns the level at which hardware starts its walks, and the size of the root.
    pub const fn geometry(&self) -> Geometry {
        self.tables.geometry()
    }

    /// Returns the guest's present VMID.
    pub fn vmid(&self) -> Vmid {
        self.tables.vmid()
    }

    /// Lets go of all tables seen so far, as leaving and entering again would; it costs one store.
    #[inline]
    pub fn refresh(&mut self) {
        if let Some(inside) = &mut self.inside {
            inside.refresh(self.tables.platform.readers());
        }
    }

    /// Returns the exact costs of the guard's operations since it was made.
    pub const fn counts(&self) -> OpCounts {
        self.sums.counts
    }

    /// Returns the leaves that the guard's operations added and removed since it was made.
    #[inline]
    pub const fn leaf_delta(&self) -> &LeafDelta {
        &self.sums.sizes
    }

    /// Returns the invalidation that the guard's operations owe; `None` if they left nothing stale.
    pub fn pending_invalidation(&self) -> Option<Invalidation> {
        if self.live != 0 { self.tables.invalidation(&self.sums.owed) } else { None }
    }

    /// Adds the invalidation of leaves in `range` to what the guard owes, even if it changed
    /// nothing there: another thread may have made the change, and its invalidation may not have
    /// completed.
    ///
    /// # Errors
    /// [`RangeError`]; nothing is owed.
    pub fn defer_invalidation(&mut self, range: GpaRange) -> Result<(), RangeError> {
        self.tables.check(&range)?;
        self.sums.owed.any(range.start().0, range.end().0);
        self.sums.owed.set_revoked();
        Ok(())
    }

    /// Executes the invalidation that is owed, and those that dropped values left behind; returns
    /// once they have completed on all CPUs.
    #[inline]
    pub fn invalidate(&mut self) {
        let owed = core::mem::replace(&mut self.sums.owed, PendingFlush::NOTHING);
        if self.live != 0 {
            self.tables.complete(owed);
        }
    }

    /// Gives up the invalidation that is owed, and returns it: for a caller that invalidates later,
    /// by its own means, what several calls took. A [`Shootdown`] that is dropped instead costs an
    /// invalidation of all of the guest.
    ///
    /// # Safety
    /// The caller invalidates that, or more, on all CPUs before it relies on anything that this
    /// guard took. The guard has cleared no dirty state.
    pub unsafe fn hand_over(&mut self) -> Option<Invalidation> {
        debug_assert_eq!(self.sums.owed.cleans(), 0, "a guard that cleared dirty state completes");
        let owed = core::mem::replace(&mut self.sums.owed, PendingFlush::NOTHING);
        if self.live != 0 { self.tables.invalidation(&owed) } else { None }
    }

    /// Takes the invalidation that is owed, to merge it with other threads' or to complete it
    /// later.
    pub fn shootdown(&mut self) -> Shootdown<'t, 'p, F, P> {
        Shootdown::new(self.tables, core::mem::replace(&mut self.sums.owed, PendingFlush::NOTHING))
    }

    /// Counts this guard before it clears dirty state. Until the invalidation of that has
    /// completed, an unmap reports a page without the dirty bit as possibly dirty
    /// (`PendingWork::cleans`).
    pub(crate) fn begin_clean(&mut self) {
        if self.live != 0 && self.sums.owed.cleans() == 0 {
            self.tables.pending.cleans.begin();
            self.sums.owed.clean();
        }
    }

    /// Ends an operation that was refused before it changed anything, or that stopped early.
    #[cold]
    pub(crate) fn stopped<T, E>(at: Gpa, reason: E) -> Result<T, Interruption<E>> {
        Err(Interruption { at, reason })
    }
}

impl<F: Format, P: Platform> Drop for Guard<'_, '_, F, P> {
    #[inline(always)]
    fn drop(&mut self) {
        let inside = self.inside.take();
        if self.live != 0 && !self.sums.owed.is_untouched() {
            self.sums.owed.release(self.tables, inside);
        } else if let Some(inside) = inside {
            inside.leave();
        }
    }
}

/// A reader of another platform.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WrongPlatform;

impl fmt::Display for WrongPlatform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the reader is of another platform; register with the platform of these tables")
    }
}

impl core::error::Error for WrongPlatform {}

/// A guard in other tables, or work on other tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WrongTables;

impl fmt::Display for WrongTables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("it belongs to other tables; use one of these tables")
    }
}

impl core::error::Error for WrongTables {}
