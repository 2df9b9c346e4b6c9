//! Dirty state that hardware sets: harvested into a bitmap, or cleaned.
//!
//! A clean leaf keeps the right to write; hardware marks the next write. But a TLB may hold the
//! leaf as writable and dirty, and then marks nothing: a page is clean, and its dirty bit reliable,
//! only once the invalidation after the change has completed. So a harvest completes it before it
//! returns.

use super::consumer::{Consumer, Take};
use super::pages::{or_bits, set_bits};
use super::rules::Rule;
use super::{ChangeError, Pages};
use crate::addr::{GpaRange, Levels};
use crate::format::{Format, Kind, RUN, software_bits};
use crate::guard::{Guard, GuardState};
use crate::platform::Platform;
use crate::pte::Atomically;
use crate::table::{Pte, folded};
use crate::tables::{Stopped, Tables};
use crate::walk::{Budget, Entry, Flow, Visitor, WalkCounts, change_pages, change_run};

/// Takes dirty state. `NAMED`: for a consumer, so leaves with its mark as well.
#[derive(Clone, Copy)]
struct Clean<F, const NAMED: bool>(Take<F>);
impl<F: Format, const NAMED: bool> Rule<F> for Clean<F, NAMED> {
    const QUIET: u64 = takes::<F, NAMED>();

    #[inline(always)]
    fn change(&self, raw: u64) -> u64 {
        self.0.taken(raw)
    }
}

/// Returns the bits in which there may be dirty state to take. Marks are known only at run time.
const fn takes<F: Format, const NAMED: bool>() -> u64 {
    F::DIRTY | if NAMED { software_bits::<F>() } else { 0 }
}

impl<F: Format, P: Platform> Guard<'_, '_, F, P> {
    /// Moves the dirty state of `range` into `bitmap`: bit 0 is the first page of the range. Bits
    /// are added, none is removed; a block is dirty as a whole. A group is unfolded, and all of it
    /// dirty if any of it was, this once. Returns the pages that are dirty and were not in the
    /// bitmap.
    ///
    /// A leaf that the guest may write without hardware marking it stays dirty, and is reported
    /// each time. When this returns, pages that are not in the bitmap were not written since the
    /// last harvest, and every later write will be in the next one: the invalidation is executed
    /// inside, with all that the guard owes. One thread at a time harvests or cleans a page, for
    /// itself or for one [`Consumer`].
    ///
    /// # Errors
    /// Nothing is done on [`ChangeError::Range`], [`ChangeError::Bitmap`], and on
    /// [`ChangeError::CutsBlock`] unless the block appeared meanwhile. [`ChangeError::Contended`]
    /// leaves everything harvested that precedes the address where it stopped. The pages that were
    /// harvested are in the bitmap in every case.
    pub fn harvest(
        &mut self,
        range: GpaRange,
        bitmap: &mut [u64],
    ) -> Result<u64, Stopped<ChangeError>> {
        self.harvest_by::<false>(self.take(), range, bitmap)
    }

    /// As [`Guard::harvest`], for `consumer`: reports the pages written since its last harvest or
    /// clean that has completed, including those that others have taken meanwhile.
    ///
    /// # Errors
    /// Nothing is done on [`ChangeError::ForeignConsumer`]; otherwise those of [`Guard::harvest`].
    pub fn harvest_for(
        &mut self,
        consumer: Consumer,
        range: GpaRange,
        bitmap: &mut [u64],
    ) -> Result<u64, Stopped<ChangeError>> {
        match self.take_for(consumer) {
            Ok(take) => self.harvest_by::<true>(take, range, bitmap),
            Err(reason) => Self::stopped(range.start(), reason),
        }
    }

    fn harvest_by<const NAMED: bool>(
        &mut self,
        take: Take<F>,
        range: GpaRange,
        bitmap: &mut [u64],
    ) -> Result<u64, Stopped<ChangeError>> {
        let tables = self.tables;
        let refusal = tables.check_bitmap(&range, bitmap.len());
        if let Err(reason) = refusal.and(tables.check_change(&range).map_err(ChangeError::from)) {
            return Self::stopped(range.start(), reason);
        }
        self.begin_clean();
        let mut visitor = Harvest::<'_, '_, F, P, NAMED> {
            tables,
            take,
            start: range.start().0,
            bitmap,
            pages: 0,
            sums: &mut self.sums,
            reason: ChangeError::Contended,
        };
        let mut budget = Budget::of(self.limit);
        let result = tables.walk_within(range.start().0, range.end().0, &mut visitor, &mut budget);
        let Harvest { pages, reason, .. } = visitor;
        let paused = self.keep(budget);
        self.sums.counts.invalidations += u64::from(!self.sums.owed.is_nothing());
        // Completes earlier cleans as well: a page that is not reported must be clean.
        self.invalidate();
        match result {
            Ok(()) => Ok(pages),
            Err(at) => Self::ended(at, paused, reason),
        }
    }

    /// Clears the dirty state of `range`, for a caller that has it already; returns the bytes that
    /// changed.
    ///
    /// The pages are clean only after [`Guard::invalidate`]; copy them after it. A leaf that the
    /// guest may write without hardware marking it stays dirty.
    ///
    /// # Errors
    /// Those of [`Guard::write_protect`].
    pub fn clean(&mut self, range: GpaRange) -> Result<u64, Stopped<ChangeError>> {
        let take = self.take();
        self.begin_clean();
        self.rewrite::<Atomically, _>(range, Clean::<_, false>(take))
    }

    /// [`Guard::clean`] of exactly the pages that a bitmap names.
    ///
    /// # Errors
    /// Those of [`Guard::clean`], at the address where it stopped: the pages before it are done.
    pub fn clean_pages(&mut self, pages: &Pages<'_>) -> Result<u64, Stopped<ChangeError>> {
        let take = self.take();
        if pages.runs().next().is_some() {
            self.begin_clean();
        }
        self.rewrite_pages(pages, Clean::<_, false>(take))
    }

    /// As [`Guard::clean`], for `consumer`: pages that others have not taken stay dirty for them.
    /// The pages are clean for the consumer only after [`Guard::invalidate`], also those that
    /// others had taken: their invalidation may be under way.
    ///
    /// # Errors
    /// Nothing is done on [`ChangeError::ForeignConsumer`]; otherwise those of [`Guard::clean`].
    pub fn clean_for(
        &mut self,
        consumer: Consumer,
        range: GpaRange,
    ) -> Result<u64, Stopped<ChangeError>> {
        let take =
            self.take_for(consumer).map_err(|reason| Stopped { at: range.start(), reason })?;
        self.begin_clean();
        self.rewrite::<Atomically, _>(range, Clean::<_, true>(take))
    }

    /// [`Guard::clean_for`] of exactly the pages that a bitmap names.
    ///
    /// # Errors
    /// Those of [`Guard::clean_for`], at the address where it stopped: the pages before it are
    /// done.
    pub fn clean_pages_for(
        &mut self,
        consumer: Consumer,
        pages: &Pages<'_>,
    ) -> Result<u64, Stopped<ChangeError>> {
        // If no page is named, the consumer is not checked.
        if pages.runs().next().is_none() {
            return Ok(0);
        }
        let take = self.take_for(consumer).map_err(|reason| Stopped { at: pages.start, reason })?;
        self.begin_clean();
        self.rewrite_pages(pages, Clean::<_, true>(take))
    }
}

struct Harvest<'t, 'b, F: Format, P: Platform, const NAMED: bool> {
    tables: &'t Tables<'t, F, P>,
    take: Take<F>,
    start: u64,
    bitmap: &'b mut [u64],
    pages: u64,
    sums: &'b mut GuardState,
    reason: ChangeError,
}

impl<'t, F: Format, P: Platform, const NAMED: bool> Visitor<'t, F>
    for Harvest<'_, '_, F, P, NAMED>
{
    const LEVELS: Levels = Levels::ALL;
    const QUIET: Option<u64> = Some(takes::<F, NAMED>() | F::CONTIGUOUS);

    #[inline(always)]
    fn visit(&mut self, level: u8, kind: Kind, entry: Entry<'t>, tally: &mut WalkCounts) -> Flow {
        // A harvest reports pages: a group would be dirty as a whole each time.
        if kind == Kind::Leaf && folded::<F>(entry.raw) {
            return Flow::Aside;
        }
        if kind != Kind::Leaf || !self.finds(entry.raw) {
            return Flow::Next;
        }
        if level > 0 && !entry.whole::<F>(level) {
            self.reason = ChangeError::CutsBlock { size: F::size(level) };
            return Flow::Stop;
        }
        let taken = self.take.taken(entry.raw);
        if taken != entry.raw {
            if entry.pte.exchange(entry.raw, taken).is_err() {
                return Flow::Again;
            }
            tally.change(&entry);
        }
        let page = |at: u64| ((at - self.start) >> F::PAGE_SHIFT) as usize;
        let (first, end) = (page(entry.start), page(entry.end));
        self.pages += set_bits(self.bitmap, first, end - first);
        Flow::Next
    }

    /// As `visit`, with one update of the bitmap.
    #[inline(always)]
    fn visit_run(
        &mut self,
        run: &'t [Pte; RUN],
        raws: &[u64; RUN],
        at: u64,
        tally: &mut WalkCounts,
    ) -> usize {
        let taken = |raw| self.finds(raw).then(|| self.take.taken(raw));
        let (passed, mask) = match change_pages::<F, Atomically>(run, raws, at, tally, taken) {
            Some(done) => done,
            None => change_run::<F>(run, at, tally, taken),
        };
        let first = ((at - self.start) >> F::PAGE_SHIFT) as usize;
        self.pages += or_bits(self.bitmap, first, mask);
        passed
    }

    #[inline(always)]
    fn aside(&mut self, level: u8, gpa: u64) -> Flow {
        self.tables.unfold(gpa, level, self.sums)
    }

    #[inline]
    fn settle(&mut self, level: u8, tally: WalkCounts) {
        self.sums.settle::<F>(level, &tally, true);
    }
}

impl<F: Format, P: Platform, const NAMED: bool> Harvest<'_, '_, F, P, NAMED> {
    /// Returns whether the leaf was written and is not taken yet.
    #[inline(always)]
    const fn finds(&self, raw: u64) -> bool {
        raw & (F::DIRTY | if NAMED { self.take.mine } else { 0 }) != 0
    }
}
