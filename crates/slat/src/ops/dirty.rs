//! Dirty state that hardware sets: harvested into a bitmap, or cleaned.
//!
//! A clean leaf keeps the right to write; hardware marks the next write. But a TLB may hold the
//! leaf as writable and dirty, and then marks nothing: a page is clean, and its dirty bit worth
//! anything, only once the invalidation after the change has completed. So a harvest completes it
//! before it returns.

use super::pages::{or_bits, set_bits};
use super::rules::Rule;
use super::{Atomically, ChangeError, Pages, folded};
use crate::addr::{Gpa, GpaRange, Levels};
use crate::format::{Format, Kind, RUN};
use crate::guard::{Done, Guard};
use crate::platform::Platform;
use crate::table::Slot;
use crate::tables::{Halted, Tables};
use crate::walk::{Entry, Flow, Tally, Visitor, change_run};

struct Clean<F>(F);
impl<F: Format> Rule<F> for Clean<F> {
    const QUIET: u64 = F::DIRTY;

    #[inline(always)]
    fn change(&self, raw: u64) -> u64 {
        self.0.cleaned(raw)
    }
}

impl<F: Format, P: Platform> Guard<'_, '_, F, P> {
    /// Moves the dirty state of `range` into `bitmap`: bit 0 is the first page of the range. Bits
    /// are added, none is removed; a block is dirty as a whole. A group is unfolded, and all of it
    /// dirty if any of it was, this once. Returns the pages that are dirty and were not in the
    /// bitmap.
    ///
    /// A leaf that the guest may write without hardware marking it stays dirty, and is reported
    /// each time. When this returns, what the bitmap does not name was not written since the last
    /// harvest, and every later write will be in the next: the invalidation is executed inside,
    /// with all that the guard owes. One thread at a time harvests or cleans a page.
    ///
    /// # Errors
    /// Nothing is done on [`ChangeError::Range`], [`ChangeError::Bitmap`], and on
    /// [`ChangeError::CutsBlock`] unless the block appeared meanwhile. [`ChangeError::Contended`]
    /// leaves everything harvested that precedes the address where it stopped. What was
    /// harvested is in the bitmap in every case.
    pub fn harvest(
        &mut self,
        range: GpaRange,
        bitmap: &mut [u64],
    ) -> Result<u64, Halted<ChangeError>> {
        let tables = self.tables;
        let refusal = tables.check_bitmap(&range, bitmap.len());
        if let Err(why) = refusal.and(tables.check_change(&range).map_err(ChangeError::from)) {
            return Self::halted(range.start(), why);
        }
        self.begin_clean();
        let mut visitor = Harvest {
            tables,
            start: range.start().0,
            bitmap,
            pages: 0,
            done: Done::NOTHING,
            why: ChangeError::Contended,
        };
        let mut budget = self.budget;
        let result = tables.walk_within(range.start().0, range.end().0, &mut visitor, &mut budget);
        let Harvest { pages, mut done, why, .. } = visitor;
        let why = self.spend(budget, why);
        let stale = !done.owed.is_nothing() || !self.owed.is_nothing();
        done.counts.invalidations += u64::from(stale);
        done.into(self);
        // Also what was cleaned before: a page that is not reported has to be one.
        self.complete();
        match result {
            Ok(()) => Ok(pages),
            Err(Gpa(at)) => Self::halted(Gpa(at), why),
        }
    }

    /// Clears the dirty state of `range`, for a caller who has it already; returns the bytes that
    /// changed.
    ///
    /// The pages are clean only after [`Guard::complete`]; copy them after it. A leaf that the
    /// guest may write without hardware marking it stays dirty.
    ///
    /// # Errors
    /// Those of [`Guard::write_protect`].
    pub fn clean(&mut self, range: GpaRange) -> Result<u64, Halted<ChangeError>> {
        let format = self.tables.format;
        self.begin_clean();
        self.rewrite::<Atomically, _>(range, Clean(format))
    }

    /// [`Guard::clean`] of exactly the pages that a bitmap names.
    ///
    /// # Errors
    /// Those of [`Guard::clean`], at the first run of pages concerned: the runs before it are done.
    pub fn clean_pages(&mut self, pages: &Pages<'_>) -> Result<u64, Halted<ChangeError>> {
        pages.each::<F>(|range| self.clean(range))
    }
}

struct Harvest<'t, 'b, F: Format, P: Platform> {
    tables: &'t Tables<'t, F, P>,
    start: u64,
    bitmap: &'b mut [u64],
    pages: u64,
    done: Done,
    why: ChangeError,
}

impl<'t, F: Format, P: Platform> Visitor<'t, F> for Harvest<'_, '_, F, P> {
    const LEVELS: Levels = Levels::ALL;
    const QUIET: Option<u64> = Some(F::DIRTY | F::CONTIGUOUS);

    #[inline(always)]
    fn visit(&mut self, level: u8, kind: Kind, entry: Entry<'t>, tally: &mut Tally) -> Flow {
        // Who harvests wants pages: a group would be dirty as a whole each time.
        if kind == Kind::Leaf && folded::<F>(entry.raw) {
            return self.tables.unfold(entry.start, level, &mut self.done.counts);
        }
        if kind != Kind::Leaf || entry.raw & F::DIRTY == 0 {
            return Flow::Next;
        }
        if level > 0 && !entry.whole::<F>(level) {
            self.why = ChangeError::CutsBlock { size: F::size(level) };
            return Flow::Stop;
        }
        let cleaned = self.tables.format.cleaned(entry.raw);
        if cleaned != entry.raw {
            if entry.slot.exchange(entry.raw, cleaned).is_err() {
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
        run: &'t [Slot; RUN],
        raws: &[u64; RUN],
        at: u64,
        tally: &mut Tally,
    ) -> usize {
        let (passed, mask) = change_run::<F>(run, raws, at, tally, |raw| {
            (raw & F::DIRTY != 0).then(|| self.tables.format.cleaned(raw))
        });
        let first = ((at - self.start) >> F::PAGE_SHIFT) as usize;
        self.pages += or_bits(self.bitmap, first, mask);
        passed
    }

    #[inline]
    fn settle(&mut self, level: u8, tally: Tally) {
        self.done.settle::<F>(level, &tally, true);
    }
}
