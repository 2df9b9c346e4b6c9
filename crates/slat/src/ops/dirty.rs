//! Dirty state that hardware sets: harvested into a bitmap, or cleaned.
//!
//! A clean leaf keeps the right to write; hardware marks the next write. But a TLB may hold the
//! leaf as writable and dirty, and then marks nothing: a page is clean, and its dirty bit reliable,
//! only once the invalidation after the change has completed. So a harvest completes it before it
//! returns.

use super::pages::{or_bits, set_bits};
use super::rules::Rule;
use super::{ChangeError, Pages};
use crate::addr::{GpaRange, Levels};
use crate::format::{Format, Kind, RUN};
use crate::guard::{Guard, GuardState};
use crate::platform::Platform;
use crate::pte::Atomically;
use crate::table::{Pte, folded};
use crate::tables::{Interruption, Tables};
use crate::walk::{Entry, Flow, Visitor, WalkCounts, change_pages, change_run};

/// Takes dirty state.
#[derive(Clone, Copy)]
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
    /// each time. When this returns, pages that are not in the bitmap were not written since the
    /// last harvest, and every later write will be in the next one: the invalidation is executed
    /// inside, with all that the guard owes. One thread at a time harvests or cleans a page.
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
    ) -> Result<u64, Interruption<ChangeError>> {
        let tables = self.tables;
        let refusal = tables.check_bitmap(&range, bitmap.len());
        if let Err(reason) = refusal.and(tables.check_change(&range).map_err(ChangeError::from)) {
            return Self::stopped(range.start(), reason);
        }
        self.begin_clean();
        let mut visitor = Harvest {
            tables,
            clean: Clean(tables.format),
            start: range.start().0,
            bitmap,
            pages: 0,
            sums: &mut self.sums,
            reason: ChangeError::Contended,
        };
        let result = tables.walk(range.start().0, range.end().0, &mut visitor);
        let Harvest { pages, reason, .. } = visitor;
        self.sums.counts.invalidations += u64::from(!self.sums.owed.is_nothing());
        // Completes earlier cleans as well: a page that is not reported must be clean.
        self.invalidate();
        match result {
            Ok(()) => Ok(pages),
            Err(at) => Self::stopped(at, reason),
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
    pub fn clean(&mut self, range: GpaRange) -> Result<u64, Interruption<ChangeError>> {
        self.begin_clean();
        self.rewrite::<Atomically, _>(range, Clean(self.tables.format))
    }

    /// [`Guard::clean`] of exactly the pages that a bitmap names.
    ///
    /// # Errors
    /// Those of [`Guard::clean`], at the address where it stopped: the pages before it are done.
    pub fn clean_pages(&mut self, pages: &Pages<'_>) -> Result<u64, Interruption<ChangeError>> {
        if pages.runs().next().is_some() {
            self.begin_clean();
        }
        self.rewrite_pages(pages, Clean(self.tables.format))
    }
}

struct Harvest<'t, 'b, F: Format, P: Platform> {
    tables: &'t Tables<'t, F, P>,
    clean: Clean<F>,
    start: u64,
    bitmap: &'b mut [u64],
    pages: u64,
    sums: &'b mut GuardState,
    reason: ChangeError,
}

impl<'t, F: Format, P: Platform> Visitor<'t, F> for Harvest<'_, '_, F, P> {
    const LEVELS: Levels = Levels::ALL;
    const QUIET: Option<u64> = Some(F::DIRTY | F::CONTIGUOUS);

    #[inline(always)]
    fn visit(&mut self, level: u8, kind: Kind, entry: Entry<'t>, tally: &mut WalkCounts) -> Flow {
        // A harvest reports pages: a group would be dirty as a whole each time.
        if kind == Kind::Leaf && folded::<F>(entry.raw) {
            return Flow::Aside;
        }
        if kind != Kind::Leaf || entry.raw & F::DIRTY == 0 {
            return Flow::Next;
        }
        if level > 0 && !entry.whole::<F>(level) {
            self.reason = ChangeError::CutsBlock { size: F::size(level) };
            return Flow::Stop;
        }
        let taken = self.clean.change(entry.raw);
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
        let taken = |raw| (raw & F::DIRTY != 0).then(|| self.clean.change(raw));
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
