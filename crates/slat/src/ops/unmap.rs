//! Unmap: empties a range, hands out its leaves, and retires the tables that it covered.
//!
//! # Protocol
//! A leaf is taken out by one compare-and-swap whose old value is kept for the caller. Where the
//! CPU must not hold two translations of an address, the entry keeps the unmap's token, and a fill
//! of it before the unmap's invalidation has completed invalidates first
//! (`Tables::break_before_fill`).
//!
//! A table of pages that the range covers whole is retired as it is emptied: the exchange that
//! takes a leaf out leaves the entry retired, which keeps other software out, and an empty entry
//! becomes retired as well ([`Marks`]). Where the unmap cannot go on in the table, at an entry that
//! has an owner or that another thread holds, or for lack of room, it first empties those that it
//! has retired. So it never waits while it has some.
//!
//! A higher table that the range covers, or a table around an end of the range that is found empty
//! afterwards, is retired once it is empty: every entry goes from empty to retired, which fails if
//! anything was mapped there meanwhile.
//!
//! Once all entries of a table are retired, its parent's entry is emptied, and the table waits in
//! the batch for their invalidation. Between the first marker and the last nothing is allocated
//! or called.
//!
//! An entry of a retired table stays so until the table is given back; so the thread that retired
//! all of them, the first one first, owns the link in the parent's entry: others may change bits of
//! it, but not the address.

mod error;
mod retire;

use super::unfold::Group;
use super::unmap_batch::{UnmapBatch, UnmappedRun};
use crate::addr::{Gpa, GpaRange, Hpa, Levels, PageSize};
use crate::format::{Format, Kind, RUN};
use crate::guard::{Guard, GuardState};
use crate::platform::Platform;
use crate::table::{Pte, folded, pte};
use crate::tables::{Interruption, Tables};
use crate::walk::{Entry, Flow, Visitor, WalkCounts, visit_each};
pub use error::UnmapError;
use retire::ends_are_vacant;
pub(super) use retire::vacant;

impl<F: Format, P: Platform> Guard<'_, '_, F, P> {
    /// Unmaps `range` into `batch`; returns the bytes that were mapped. Reservations in the
    /// range are void.
    ///
    /// The batch has what is owed, not the guard. A table goes with the call that covers it
    /// whole, or that empties it; reservations in it are void as well.
    ///
    /// # Errors
    /// Nothing is done on [`UnmapError::Range`], [`UnmapError::ForeignBatch`], and on
    /// [`UnmapError::CutsBlock`] unless the block appeared meanwhile. [`UnmapError::Full`] and
    /// [`UnmapError::Contended`] leave everything unmapped that precedes the address where it
    /// stopped.
    #[inline]
    pub fn unmap(
        &mut self,
        range: GpaRange,
        batch: &mut UnmapBatch<'_, '_, F, P>,
    ) -> Result<u64, Interruption<UnmapError>> {
        let tables = self.tables;
        if !core::ptr::eq(batch.tables, tables) {
            return Self::stopped(range.start(), UnmapError::ForeignBatch);
        }
        if let Err(reason) = tables.check_change_of_many(&range) {
            return Self::stopped(range.start(), reason.into());
        }
        if !core::mem::replace(&mut batch.counted, true) {
            tables.pending.removals.begin();
        }
        if range.size() == 1 << F::PAGE_SHIFT
            && let Some(bytes) = self.unmap_page(&range, batch)
        {
            return Ok(bytes);
        }
        self.unmap_walk(&range, batch)
    }

    /// Unmaps the leaf of a page whose table is there, without a walk; returns the bytes that were
    /// mapped. Leaves all other cases, and a lack of room, to the walk. Not inlined: its frame and
    /// the walk's do not add.
    #[inline(never)]
    fn unmap_page(
        &mut self,
        range: &GpaRange,
        batch: &mut UnmapBatch<'_, '_, F, P>,
    ) -> Option<u64> {
        let tables = self.tables;
        let (start, end) = (range.start().0, range.end().0);
        let (ptes, level) = tables.descend(start, 0, |_, _| ());
        if level > 0 {
            return None;
        }
        let pte = pte::<F>(ptes, start, 0);
        let raw = pte.load();
        if F::kind(raw, 0) != Kind::Leaf || folded::<F>(raw) {
            return None;
        }
        let mut removed = UnmappedRun {
            gpa: range.start(),
            bytes: end - start,
            size: F::size(0),
            hpa: F::leaf_address(raw, 0),
            attributes: tables.format.decode(raw, 0),
        };
        let continues = batch.continued(&removed).is_some();
        if !continues && batch.is_full() {
            return None;
        }
        let empty = if tables.refill_breaks() { self.token() } else { 0 };
        pte.exchange(raw, empty).ok()?;
        let doubtful = tables.may_be_dirty(raw);
        match (continues, doubtful) {
            (false, false) => batch.put(removed),
            (false, true) => {
                removed.attributes.dirty = true;
                batch.push(removed);
            }
            (true, _) => {
                batch.extend(&Entry { pte, raw, start, end }, F::size(0));
                if doubtful {
                    batch.dirty_last();
                }
            }
        }
        self.sums.sizes.add(0, -1);
        self.sums.counts.entries_read += u64::from(tables.geometry().root_level) + 1;
        self.sums.counts.entries_written += 1;
        self.sums.counts.bytes_changed += end - start;
        if ends_are_vacant::<F>(ptes, 0) {
            self.retire_around(range, batch);
        }
        Some(end - start)
    }

    /// Retires the table of the page that was unmapped, if that left it empty.
    #[cold]
    #[inline(never)]
    fn retire_around(&mut self, range: &GpaRange, batch: &mut UnmapBatch<'_, '_, F, P>) {
        let mut visitor = Unmap::of(self.tables, batch, range, 0, &mut self.sums);
        visitor.retire_from(range.start().0);
    }

    #[inline(never)]
    fn unmap_walk(
        &mut self,
        range: &GpaRange,
        batch: &mut UnmapBatch<'_, '_, F, P>,
    ) -> Result<u64, Interruption<UnmapError>> {
        let tables = self.tables;
        let empty = if tables.refill_breaks() { self.token() } else { 0 };
        let before = self.sums.counts.bytes_changed;
        let mut visitor = Unmap::of(tables, batch, range, empty, &mut self.sums);
        let (start, end) = (visitor.start, visitor.end);
        let result = tables.walk(start, end, &mut visitor);
        visitor.unmark();
        visitor.retire_ends(result.err().map_or(visitor.end, |at| at.0));
        let reason = visitor.reason.into();
        let bytes = self.sums.counts.bytes_changed - before;
        match result {
            Ok(()) => Ok(bytes),
            Err(at) => Self::stopped(at, reason),
        }
    }
}

pub(super) struct Unmap<'r, 's, 't, 'm, F: Format, P: Platform> {
    tables: &'r Tables<'r, F, P>,
    batch: &'r mut UnmapBatch<'s, 't, F, P>,
    start: u64,
    end: u64,
    /// The end of the last group that was taken out; leaves below it were mapped later.
    taken: u64,
    /// The value left in an entry that was emptied, unless it is retired.
    empty: u64,
    marks: Option<Marks<'m>>,
    /// The descriptor of a leaf that would continue the last one; its address and level; 0 is none.
    next: (u64, u64),
    sums: &'r mut GuardState,
    reason: Stop,
}

/// Why the walk stopped.
#[derive(Clone, Copy)]
enum Stop {
    Contended,
    Full,
    Cuts(PageSize),
}

impl From<Stop> for UnmapError {
    fn from(reason: Stop) -> Self {
        match reason {
            Stop::Contended => Self::Contended,
            Stop::Full => Self::Full,
            Stop::Cuts(size) => Self::CutsBlock { size },
        }
    }
}

/// A table of pages that the range covers whole, whose entries are retired one after the other.
///
/// *Invariant*: the first `retired` entries are retired, by this unmap, and no other thread retires
/// one of the table: all begin with the first entry, and give up where it is not theirs to retire.
struct Marks<'t> {
    table: &'t [Pte],
    retired: u32,
    /// Those that had no leaf.
    vacant: u32,
}

impl<'t, F: Format, P: Platform> Visitor<'t, F> for Unmap<'_, '_, '_, 't, F, P> {
    const LEVELS: Levels = Levels::ALL;

    #[inline(always)]
    fn visit(&mut self, level: u8, kind: Kind, entry: Entry<'t>, tally: &mut WalkCounts) -> Flow {
        if F::CONTIGUOUS != 0 && entry.start < self.taken {
            return self.behind(kind, entry.pte, entry.raw);
        }
        if kind != Kind::Leaf {
            return self.vacate(kind, entry.pte, entry.raw);
        }
        if level > 0 && !entry.whole::<F>(level) {
            self.reason = Stop::Cuts(F::size(level));
            return Flow::Stop;
        }
        if folded::<F>(entry.raw) {
            return self.group(level, entry.start);
        }
        let left = self.left();
        // The next leaf of a run, the most frequent case, differs from the last one only in its
        // address.
        if (entry.raw, entry.start | u64::from(level)) == self.next
            && self.batch.follows(F::leaf_address(entry.raw, level))
        {
            if entry.pte.exchange(entry.raw, left).is_err() {
                return Flow::Again;
            }
            self.mark(1);
            tally.change(&entry);
            self.batch.extend(&entry, F::size(level));
            if self.tables.may_be_dirty(entry.raw) {
                self.batch.dirty_last();
            }
            let further = F::further(entry.raw, F::size(level).bytes());
            self.next = (further, entry.end | u64::from(level));
            return Flow::Next;
        }
        let mut removed = UnmappedRun {
            gpa: Gpa(entry.start),
            bytes: entry.end - entry.start,
            size: F::size(level),
            hpa: F::leaf_address(entry.raw, level),
            attributes: self.tables.format.decode(entry.raw, level),
        };
        let continues = self.batch.continued(&removed).is_some();
        if !continues && self.batch.is_full() {
            self.reason = Stop::Full;
            return Flow::Stop;
        }
        if entry.pte.exchange(entry.raw, left).is_err() {
            return Flow::Again;
        }
        self.mark(1);
        tally.change(&entry);
        if self.tables.may_be_dirty(entry.raw) {
            removed.attributes.dirty = true;
            if continues {
                self.batch.dirty_last();
            }
        }
        self.batch.push(removed);
        let bytes = F::size(level).bytes();
        self.next = (F::further(entry.raw, bytes), entry.end | u64::from(level));
        Flow::Next
    }

    /// As `visit`, with one account of all pages where they continue the last leaf.
    #[inline(always)]
    fn visit_run(
        &mut self,
        run: &'t [Pte; RUN],
        raws: &[u64; RUN],
        at: u64,
        tally: &mut WalkCounts,
    ) -> usize {
        if !self.continues(raws, at) {
            return visit_each::<F, Self>(self, run, raws, at, tally);
        }
        let left = self.left();
        // By index, because `zip` is a call if crates are not optimised together.
        let taken = (0..RUN).take_while(|&index| run[index].exchange(raws[index], left).is_ok());
        let taken = taken.count();
        if taken > 0 {
            let bytes = (taken as u64) << F::PAGE_SHIFT;
            let all = Entry { pte: &run[0], raw: raws[0], start: at, end: at + bytes };
            self.mark(taken as u32);
            tally.change(&all);
            tally.changed += taken as u64 - 1;
            self.batch.extend(&all, F::size(0));
            // A clean that has completed since a page was taken out has seen its last write.
            if self.tables.may_be_dirty(raws[0]) {
                self.batch.dirty_last();
            }
            self.next = (F::further(raws[0], bytes), all.end);
        }
        taken
    }

    /// Entries that were emptied before may have been filled since: a new token, so that they do
    /// not look the same once emptied again.
    #[inline(always)]
    fn again(&mut self) {
        self.unmark();
        self.empty = self.token();
    }

    /// Other threads need not wait for as long as one holds an entry, which may be an invalidation.
    #[inline(always)]
    fn held(&mut self, _: u8, _: &Entry<'t>) -> Flow {
        self.unmark();
        Flow::Wait
    }

    #[inline(always)]
    fn enter(&mut self, level: u8, entry: &Entry<'t>, children: &'t [Pte]) -> Option<Flow> {
        if level == 1 && entry.whole::<F>(level) {
            self.marks = Some(Marks { table: children, retired: 0, vacant: 0 });
        }
        None
    }

    #[inline(always)]
    fn leave(&mut self, level: u8, entry: Entry<'t>, children: &'t [Pte]) {
        if level == 1
            && let Some(marks) = self.marks.take()
        {
            self.sums.counts.entries_written += u64::from(marks.vacant);
            self.unlink(entry.pte, entry.raw, level, entry.start, children);
        } else if entry.whole::<F>(level) && self.retire(level - 1, children) {
            self.unlink(entry.pte, entry.raw, level, entry.start, children);
        }
    }

    #[inline(always)]
    fn aside(&mut self, level: u8, gpa: u64) -> Flow {
        self.unmark();
        self.tables.unfold(gpa, level, self.sums)
    }

    #[inline]
    fn settle(&mut self, level: u8, tally: WalkCounts) {
        self.sums.settle::<F>(level, &tally, false);
        self.sums.sizes.add(level, -(tally.changed as i64));
    }
}

impl<'r, 's, 't, F: Format, P: Platform> Unmap<'r, 's, 't, '_, F, P> {
    /// Makes the visitor for `range`, which leaves `empty` in entries that it empties.
    #[inline(always)]
    pub(super) fn of(
        tables: &'r Tables<'r, F, P>,
        batch: &'r mut UnmapBatch<'s, 't, F, P>,
        range: &GpaRange,
        empty: u64,
        sums: &'r mut GuardState,
    ) -> Self {
        let (start, end) = (range.start().0, range.end().0);
        let reason = Stop::Contended;
        let (marks, taken, next) = (None, 0, (0, 0));
        Self { tables, batch, start, end, taken, empty, marks, next, sums, reason }
    }

    /// Returns whether a run of pages from `at` on continues the last leaf.
    #[inline(always)]
    fn continues(&self, raws: &[u64; RUN], at: u64) -> bool {
        let page = 1 << F::PAGE_SHIFT;
        let first = F::leaf_address(raws[0], 0);
        let follows = |index| raws[index] == F::further(raws[0], index as u64 * page);
        (raws[0], at) == self.next
            && (F::CONTIGUOUS == 0 || at >= self.taken)
            && (0..RUN).all(follows)
            // Descriptors increase as their addresses do, unless a field overflows.
            && F::leaf_address(raws[RUN - 1], 0).0 == first.0 + (RUN as u64 - 1) * page
            && self.batch.follows(first)
    }

    /// Returns the value that is left in an entry.
    #[inline(always)]
    fn left(&self) -> u64 {
        if self.marks.is_some() { F::retired(Hpa(0)) } else { self.empty }
    }

    /// Notes that the next entries are retired, where entries are.
    #[inline(always)]
    fn mark(&mut self, entries: u32) {
        if let Some(marks) = &mut self.marks {
            marks.retired += entries;
        }
    }

    /// Empties the entries that are retired of a table that cannot be retired now.
    #[inline(always)]
    fn unmark(&mut self) {
        if let Some(marks) = self.marks.take() {
            self.release(&marks);
        }
    }

    #[cold]
    #[inline(never)]
    fn release(&self, marks: &Marks<'_>) {
        let retired = F::retired(Hpa(0));
        marks.table[..marks.retired as usize]
            .iter()
            .for_each(|pte| pte.release(retired, self.empty));
    }

    /// Makes a reservation void, also one that the range covers only in part, and retires an entry
    /// without a leaf where the entries of its table are.
    #[inline(always)]
    fn vacate(&mut self, kind: Kind, pte: &Pte, raw: u64) -> Flow {
        let marks = self.marks.is_some();
        if marks && !kind.is_vacant() {
            self.unmark();
        } else if marks || kind == Kind::Reserved {
            if pte.exchange(raw, self.left()).is_err() {
                return Flow::Again;
            }
            if let Some(marks) = &mut self.marks {
                (marks.retired, marks.vacant) = (marks.retired + 1, marks.vacant + 1);
            }
        }
        Flow::Next
    }

    /// Handles an entry of a group that was taken out: it is empty, unless it was mapped since.
    #[cold]
    #[inline(never)]
    fn behind(&mut self, kind: Kind, pte: &Pte, raw: u64) -> Flow {
        if self.marks.is_none() {
            return Flow::Next;
        }
        if kind.is_vacant() {
            return self.vacate(kind, pte, raw);
        }
        // The walk may have loaded it before.
        if pte.load() != raw {
            return Flow::Again;
        }
        self.unmark();
        Flow::Next
    }

    /// Takes out a group that the range covers whole; has any other group unfolded, at a point
    /// where no table that the range covers is left half done.
    #[cold]
    #[inline(never)]
    fn group(&mut self, level: u8, gpa: u64) -> Flow {
        let tables = self.tables;
        // Its table was replaced: the walk leaves it.
        let Some(group) = tables.group(gpa, level) else { return Flow::Aside };
        let full = self.batch.is_full();
        if full {
            let Some(first) = group.state() else { return Flow::Wait };
            if !self.continued(&group, first, gpa) {
                self.reason = Stop::Full;
                return Flow::Stop;
            }
        }
        if !group.inside(self.start, self.end) {
            return Flow::Aside;
        }
        // What hardware marks meanwhile may make it another run.
        let empty = self.empty;
        let fits = |first| !full || self.continued(&group, first, group.start);
        let first = match group.take(empty, fits) {
            Ok(first) => first,
            Err(flow) => {
                tables.platform.publish();
                return flow;
            }
        };
        self.sums.counts.entries_written += 2 * group.ptes.len() as u64;
        self.sums.counts.bytes_changed += group.bytes();
        self.sums.sizes.add_members(level, -(group.ptes.len() as i64));
        self.taken = group.end;
        self.push(&group, first);
        // Where entries are retired, its own are not yet.
        Flow::Again
    }

    /// Returns whether the part from `start` on of a group continues the last run.
    #[inline(always)]
    fn continued(&mut self, group: &Group<'_, F>, first: u64, start: u64) -> bool {
        self.batch.continued(&self.removed(group, first, start)).is_some()
    }

    #[inline(always)]
    fn push(&mut self, group: &Group<'_, F>, first: u64) {
        let mut removed = self.removed(group, first, group.start);
        removed.attributes.dirty |= self.tables.may_be_dirty(first);
        self.batch.push(removed);
    }

    /// Returns the part from `start` on of a group whose first member, with all state, is `first`.
    #[inline(always)]
    fn removed(&self, group: &Group<'_, F>, first: u64, start: u64) -> UnmappedRun {
        let level = group.level();
        UnmappedRun {
            gpa: Gpa(start),
            bytes: group.end - start,
            size: F::size(level),
            hpa: Hpa(F::leaf_address(first, level).0 + (start - group.start)),
            attributes: self.tables.format.decode(first, level),
        }
    }

    /// Returns the value for entries that are emptied now.
    fn token(&self) -> u64 {
        if self.tables.refill_breaks() { self.tables.tokens.next::<F>() } else { 0 }
    }
}
