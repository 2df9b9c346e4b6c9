//! Groups: aligned neighbours that a TLB may hold as one leaf ([`Format::CONTIGUOUS`]).
//!
//! A group is one leaf: no member changes alone. The bits that hardware sets in one of them, and
//! ageing clears in all of them, are the state of the group. Software bits, which hardware ignores,
//! change in all members in place; any other change unfolds the group first, so that its members
//! are leaves of their own, each with the group's state.
//!
//! # Protocol
//! 1. The members are held in ascending order (`Group::hold`). *Invariant*: the thread that holds
//!    the first member holds the group. No other software changes a member then, but to set or
//!    clear its accessed state; so that thread gets the other members. Later threads wait at the
//!    first member: so no two threads can each hold what the other needs. A held member is frozen;
//!    or, where the CPU lets a leaf change its size without a break, sealed and without the bit.
//! 2. The invalidation of the whole group completes: no CPU holds it as one any more.
//! 3. Each member becomes a leaf of its own, with what hardware had set in any of them until then.
//!
//! An unmap of a whole group freezes it as well, and empties it without an invalidation of its own:
//! an entry that was emptied next to valid members could be filled again while a CPU takes the old
//! group from one of those. For the same reason a group is filled from frozen entries: entries that
//! were found empty are the group's until the last member stands.
//!
//! To change software bits, a thread holds the group as well, with all members sealed, and releases
//! the first one last.
//!
//! At most one group is broken at a time, with all its entries, until one invalidation has
//! completed, as with one block. Between the first marker and the last release nothing is
//! allocated, and nothing is called except that invalidation and, for a reservation, the closure of
//! its caller ([`Reservation::commit_told`](super::Reservation::commit_told)).

use super::ChangeError;
use crate::addr::{GpaRange, Hpa, Levels};
use crate::counts::OpCounts;
use crate::format::{Format, Kind};
use crate::guard::{Guard, GuardState};
use crate::invalidation::PendingFlush;
use crate::platform::Platform;
use crate::table::{Pte, folded};
use crate::tables::{Interruption, Tables};
use crate::walk::{Entry, Flow, Visitor, WalkCounts};
use core::marker::PhantomData;

/// The entries of a group.
#[derive(Debug)]
pub(crate) struct Group<'t, F> {
    pub ptes: &'t [Pte],
    level: u8,
    /// The addresses that it covers.
    pub start: u64,
    pub end: u64,
    format: PhantomData<F>,
}

impl<'t, F: Format> Group<'t, F> {
    /// Returns the group around `gpa` in a table at `level`; `None` if the table is too small.
    pub fn within(ptes: &'t [Pte], level: u8, gpa: u64) -> Option<Self> {
        let (count, shift) = (F::group(level), F::shift(level));
        let bytes = (count as u64) << shift;
        let start = gpa & !(bytes - 1);
        let first = (start >> shift) as usize & (ptes.len() - 1);
        let ptes = ptes.get(first..first + count)?;
        Some(Self::of(ptes, level, start))
    }

    /// Makes the group of these entries of a table at `level`, which covers addresses from `start`
    /// on.
    #[inline]
    pub fn of(ptes: &'t [Pte], level: u8, start: u64) -> Self {
        let end = start + ((ptes.len() as u64) << F::shift(level));
        Self { ptes, level, start, end, format: PhantomData }
    }

    pub const fn level(&self) -> u8 {
        self.level
    }

    pub fn bytes(&self) -> u64 {
        self.end - self.start
    }

    /// Returns whether `start..end` covers all of it.
    pub fn inside(&self, start: u64, end: u64) -> bool {
        start <= self.start && self.end <= end
    }

    fn member(&self, raw: u64) -> bool {
        F::kind(raw, self.level) == Kind::Leaf && folded::<F>(raw)
    }

    /// Returns the first member, with the state of all; `None` if another thread is changing the
    /// group, or has changed it.
    pub fn state(&self) -> Option<u64> {
        let mut all = self.ptes[0].load();
        for pte in self.ptes {
            let raw = pte.load();
            let leaf = matches!(F::kind(raw, self.level), Kind::Leaf | Kind::Sealed);
            if !leaf || !folded::<F>(raw) {
                return None;
            }
            all |= raw & F::STATUS;
        }
        Some(all & !F::MARK)
    }

    /// Holds the group: replaces each member by the result of `interim`; returns the first member,
    /// with the state of all, or, as an error, what the walk is to do.
    fn hold(&self, interim: impl Fn(u64) -> u64) -> Result<u64, Flow> {
        let held = |pte: &Pte| pte.update(|raw| self.member(raw).then(|| interim(raw)));
        let mut all = held(&self.ptes[0]).map_err(|raw| match F::kind(raw, self.level) {
            Kind::Frozen | Kind::Sealed => Flow::Wait,
            _ => Flow::Again,
        })?;
        for pte in &self.ptes[1..] {
            let raw = held(pte);
            debug_assert!(raw.is_ok(), "a member was changed beside who holds the first");
            all |= raw.unwrap_or(0) & F::STATUS;
        }
        Ok(all)
    }

    /// Returns the leaf of member `number` outside a group, if the first member is `first`.
    fn alone(&self, first: u64, number: usize) -> u64 {
        let hpa = F::leaf_address(first, self.level).0 + ((number as u64) << F::shift(self.level));
        F::leaf(F::attribute_bits(first, self.level), self.level, Hpa(hpa))
    }

    /// Takes a group out: freezes it, then leaves `empty` in its entries. Returns the first member,
    /// with the state of all. If that does not fit, the group is put back.
    pub fn take(&self, empty: u64, fits: impl FnOnce(u64) -> bool) -> Result<u64, Flow> {
        let frozen = F::frozen(Hpa(0));
        let first = self.hold(|_| frozen)?;
        if !fits(first) {
            self.put(first);
            return Err(Flow::Again);
        }
        self.ptes.iter().for_each(|pte| pte.release(frozen, empty));
        Ok(first)
    }

    /// Changes bits that hardware ignores in all members, in place.
    pub fn rewrite(&self, change: impl Fn(u64) -> u64) -> Result<(), Flow> {
        self.hold(|raw| raw | F::MARK)?;
        for pte in self.ptes.iter().rev() {
            let _ = pte.update(|raw| Some(change(raw & !F::MARK)));
        }
        Ok(())
    }

    /// Fills the entries, which this thread has frozen, with the group that `first` begins.
    fn put(&self, first: u64) {
        // The first member last: a thread that finds it may hold the group.
        for (number, pte) in self.ptes.iter().enumerate().rev() {
            pte.release(F::frozen(Hpa(0)), self.alone(first, number) | F::CONTIGUOUS);
        }
    }

    /// Unfolds a group that no other thread, and no hardware, can reach.
    pub fn unfold_alone(&self) {
        if let Some(first) = self.state() {
            for (number, pte) in self.ptes.iter().enumerate() {
                pte.init(self.alone(first, number));
            }
        }
    }

    fn vacant(&self, raw: u64) -> bool {
        F::kind(raw, self.level).is_vacant()
    }

    /// Returns whether all of its entries are empty.
    pub fn is_vacant(&self) -> bool {
        self.ptes.iter().all(|pte| self.vacant(pte.load()))
    }
}

impl<F: Format, P: Platform> Tables<'_, F, P> {
    /// Returns the group around `gpa` at `level`; `None` if a table on the way is gone.
    #[cold]
    pub(crate) fn group(&self, gpa: u64, level: u8) -> Option<Group<'_, F>> {
        let (ptes, at) = self.descend(gpa, level, |_, _| {});
        if at != level {
            return None;
        }
        Group::within(ptes, level, gpa)
    }

    /// Unfolds the group of the leaf at `gpa`, if it still is one. Returns what the walk is to do
    /// with the entry.
    #[cold]
    #[inline(never)]
    pub(crate) fn unfold(&self, gpa: u64, level: u8, sums: &mut GuardState) -> Flow {
        match self.unfolded(gpa, level, sums) {
            Ok(_) => Flow::Again,
            Err(flow) => flow,
        }
    }

    /// Returns the bytes of the group, if it was unfolded here.
    fn unfolded(&self, gpa: u64, level: u8, sums: &mut GuardState) -> Result<u64, Flow> {
        let group = self.group(gpa, level).ok_or(Flow::Again)?;
        let breaks = self.platform.break_before_make().breaks_size_change();
        let frozen = F::frozen(Hpa(0));
        let interim = |raw: u64| if breaks { frozen } else { raw & !F::CONTIGUOUS | F::MARK };
        let first = group.hold(interim)?;
        let mut stale = PendingFlush::NOTHING;
        stale.leaves(group.start, group.end, F::size(level));
        if let Some(what) = self.invalidation(&stale) {
            self.platform.invalidate(&what);
        }
        if breaks {
            for (number, pte) in group.ptes.iter().enumerate() {
                pte.release(frozen, group.alone(first, number));
            }
            sums.counts.broken += group.ptes.len() as u64;
        } else {
            // Until the invalidation had completed, hardware could mark any member for all.
            let status = group.ptes.iter().fold(first, |all, pte| all | pte.load()) & F::STATUS;
            for pte in group.ptes {
                let _ = pte.update(|raw| Some((raw | status) & !F::MARK));
            }
        }
        self.platform.publish();
        sums.counts.entries_written += 2 * group.ptes.len() as u64;
        sums.counts.invalidations += 1;
        sums.sizes.unfold(level, group.ptes.len());
        Ok(group.bytes())
    }

    /// Fills a group of empty entries with `first`, given without the bit, and the leaves that
    /// continue it. Does nothing, and returns `Again`, if they are not all empty any more, or, for
    /// reserved entries, if one of them has changed.
    pub(super) fn fill_group(
        &self,
        group: &Group<'_, F>,
        token: Option<u64>,
        first: u64,
        counts: &mut OpCounts,
    ) -> Result<(), Flow> {
        let emptied = self.freeze_group(group, token)?;
        if token.is_none() && emptied {
            self.break_before_fill_group(group, counts);
        }
        self.fill_frozen_group(group, first, counts);
        Ok(())
    }

    /// Freezes a group of empty entries, or of those that have the token; returns whether one of
    /// them had been emptied before. If one of them is something else, returns `Again`, and no
    /// entry is frozen.
    pub(super) fn freeze_group(
        &self,
        group: &Group<'_, F>,
        token: Option<u64>,
    ) -> Result<bool, Flow> {
        let frozen = F::frozen(Hpa(0));
        let fits = |raw| token.map_or(group.vacant(raw), |token| raw == token);
        let mut emptied = false;
        for (number, pte) in group.ptes.iter().enumerate() {
            match pte.update(|raw| fits(raw).then_some(frozen)) {
                Ok(raw) => emptied |= raw != 0,
                Err(_) => {
                    // A reserved entry gets its token back. An empty entry gets a new token, so
                    // that changes by other threads are not hidden.
                    let empty = token.unwrap_or_else(|| self.tokens.next::<F>());
                    group.ptes[..number].iter().for_each(|pte| pte.release(frozen, empty));
                    return Err(Flow::Again);
                }
            }
        }
        Ok(emptied)
    }

    /// Fills a group that the caller has frozen.
    pub(super) fn fill_frozen_group(
        &self,
        group: &Group<'_, F>,
        first: u64,
        counts: &mut OpCounts,
    ) {
        group.put(first);
        counts.entries_written += 2 * group.ptes.len() as u64;
    }

    /// As [`Tables::break_before_fill`], for all entries at once, some of which other threads have
    /// emptied: their removals were counted before this thread got the entries.
    fn break_before_fill_group(&self, group: &Group<'_, F>, counts: &mut OpCounts) {
        if self.refill_breaks() && self.pending.removals.count() != 0 {
            self.invalidate_entries(group.start, group.end);
            counts.invalidations += 1;
        }
    }

    /// Reserves the entries of the group around `gpa` by one new token, if all of them are empty.
    #[cold]
    pub(super) fn reserve_group(
        &self,
        gpa: u64,
        level: u8,
        counts: &mut OpCounts,
    ) -> Option<(Group<'_, F>, u64)> {
        if F::CONTIGUOUS == 0 || F::group(level) == 1 {
            return None;
        }
        let group = self.group(gpa, level).filter(Group::is_vacant)?;
        let token = self.tokens.next::<F>();
        let mut emptied = false;
        for pte in group.ptes {
            counts.entries_written += 1;
            emptied |= pte.update(|raw| group.vacant(raw).then_some(token)).ok()? != 0;
        }
        if emptied {
            self.break_before_fill_group(&group, counts);
        }
        Some((group, token))
    }
}

impl<F: Format, P: Platform> Guard<'_, '_, F, P> {
    /// Unfolds every group that overlaps `range` ([`Guard::map_contiguous`]); returns the bytes of
    /// those that were unfolded here. Translation, rights and memory type stay as they are; each
    /// leaf has the group's accessed and dirty state. Each group costs an invalidation, executed
    /// inside, and where the CPU demands a break its leaves fault until that has completed.
    ///
    /// No operation folds leaves that are mapped: afterwards the range has no groups, unless
    /// another thread maps some meanwhile.
    ///
    /// # Errors
    /// Nothing is done on [`ChangeError::Range`]. [`ChangeError::Contended`] leaves everything
    /// unfolded that precedes the address where it stopped.
    pub fn unfold(&mut self, range: GpaRange) -> Result<u64, Interruption<ChangeError>> {
        let tables = self.tables;
        if let Err(error) = tables.check(&range) {
            return Self::stopped(range.start(), ChangeError::Range(error));
        }
        if F::CONTIGUOUS == 0 {
            return Ok(0);
        }
        let before = self.sums.counts.bytes_changed;
        let mut visitor = Unfold { tables, sums: &mut self.sums };
        let result = tables.walk(range.start().0, range.end().0, &mut visitor);
        let bytes = self.sums.counts.bytes_changed - before;
        match result {
            Ok(()) => Ok(bytes),
            Err(at) => Self::stopped(at, ChangeError::Contended),
        }
    }
}

struct Unfold<'t, 'g, F: Format, P: Platform> {
    tables: &'t Tables<'t, F, P>,
    sums: &'g mut GuardState,
}

impl<'t, F: Format, P: Platform> Visitor<'t, F> for Unfold<'_, '_, F, P> {
    const LEVELS: Levels = Levels::ALL;
    const QUIET: Option<u64> = Some(F::CONTIGUOUS);

    #[inline(always)]
    fn visit(&mut self, level: u8, kind: Kind, entry: Entry<'t>, _: &mut WalkCounts) -> Flow {
        if kind != Kind::Leaf || !folded::<F>(entry.raw) {
            return Flow::Next;
        }
        match self.tables.unfolded(entry.start, level, self.sums) {
            Ok(bytes) => {
                self.sums.counts.bytes_changed += bytes;
                Flow::Next
            }
            Err(flow) => flow,
        }
    }

    #[inline]
    fn settle(&mut self, _level: u8, tally: WalkCounts) {
        self.sums.counts.entries_read += tally.read;
    }
}
