//! The table of pages in which an owner's call worked last: the next page of it needs no walk.
//!
//! *Invariant*: the table that a cursor names is linked where the cursor says, and the tables above
//! it are marked accessed, as they must be above accessed leaves. The owner sets the cursor in a
//! call that excludes all other threads. Code that can unlink the table or clear such a mark clears
//! the cursor before it begins, or in the same call: a guard, a user of the tables, and the owner's
//! own calls that unlink tables. So does code that leaves work to later invalidations: when the
//! cursor was set, none was left ([`PendingWork::is_none`]).

use crate::addr::{Gpa, GpaRange, Hpa};
use crate::build::Plan;
use crate::format::{Format, Kind};
use crate::invalidation::PendingFlush;
use crate::ops::UnmappedRun;
use crate::platform::{Maintenance, Platform};
use crate::sync::{AtomicU64, Ordering};
use crate::table::{self, Pte, folded, pte};
use crate::tables::Tables;
#[cfg(doc)]
use crate::underway::PendingWork;

/// A table of pages, or no table.
#[derive(Debug)]
pub(super) struct Cursor {
    /// The guest addresses of the table, as a number in units of what one such table covers.
    block: AtomicU64,
    table: Hpa,
}

/// The number that no block has.
const NOWHERE: u64 = u64::MAX;

impl Cursor {
    pub fn nowhere() -> Self {
        Self { block: AtomicU64::new(NOWHERE), table: Hpa(0) }
    }

    /// Clears the cursor. The owner's next call sees that, as it follows the caller's borrow.
    #[inline]
    pub fn forget(&self) {
        // Threads that enter in turns do not write to a cache line that all of them read.
        if self.block.load(Ordering::Relaxed) != NOWHERE {
            self.block.store(NOWHERE, Ordering::Relaxed);
        }
    }

    /// Sets the cursor to the table of the page at `at`.
    #[inline(always)]
    pub fn set<F: Format>(&mut self, at: u64, table: Hpa) {
        self.block.store(at >> F::shift(1), Ordering::Relaxed);
        self.table = table;
    }

    /// Returns whether the table covers `start..end`.
    #[inline(always)]
    pub fn covers<F: Format>(&self, (start, end): (u64, u64)) -> bool {
        let block = self.block.load(Ordering::Relaxed);
        block == start >> F::shift(1) && block == (end - 1) >> F::shift(1)
    }

    /// Returns the entries of the table.
    ///
    /// # Safety
    /// The cursor names a table, of these tables, and no thread gives tables back while the entries
    /// are in use.
    #[inline(always)]
    pub unsafe fn entries<'t, F: Format, P: Platform>(&self, platform: &'t P) -> &'t [Pte] {
        // SAFETY: the table is linked (the invariant above), so it is allocated, with the entries
        // of its level. It stays so by the caller's promise.
        unsafe { table::entries(platform, self.table, F::entries(0)) }
    }

    /// Returns the entries of the table if `start..end` is one of its pages.
    #[inline(always)]
    fn of_page<'t, F: Format, P: Platform>(
        &self,
        tables: &'t Tables<'_, F, P>,
        (start, end): (u64, u64),
    ) -> Option<&'t [Pte]> {
        let covered = end - start == 1 << F::PAGE_SHIFT && self.covers::<F>((start, end));
        // SAFETY: it covers a page, so it names a table; a borrow of these tables keeps it.
        covered.then(|| unsafe { self.entries::<F, P>(tables.platform) })
    }

    /// Maps the page that is all of a plan, if its entry is in the table and was never used.
    /// Returns whether it did.
    #[inline(always)]
    pub fn map_page<F: Format, P: Platform>(
        &self,
        tables: &Tables<'_, F, P>,
        plan: &Plan,
        maintenance: Option<Maintenance>,
    ) -> bool {
        let Some(ptes) = self.of_page(tables, (plan.start, plan.end)) else { return false };
        let pte = pte::<F>(ptes, plan.start, 0);
        let raw = pte.load();
        if F::kind(raw, 0) != Kind::Empty {
            return false;
        }
        let hpa = Hpa(plan.start.wrapping_add(plan.delta));
        if let Some(what) = maintenance {
            tables.platform.maintain(hpa, F::size(0).bytes(), what);
        }
        pte.release(raw, F::leaf(plan.bits, 0, hpa));
        tables.platform.publish();
        true
    }

    /// Unmaps the page that is all of `range`, if a leaf in the table maps it, and returns it once
    /// no CPU can reach it. Leaves to the walk what may be the table's last leaf: the table goes.
    #[inline(always)]
    pub fn unmap_page<F: Format, P: Platform>(
        &self,
        tables: &Tables<'_, F, P>,
        range: &GpaRange,
    ) -> Option<UnmappedRun> {
        let (start, end) = (range.start().0, range.end().0);
        let ptes = self.of_page(tables, (start, end))?;
        let leaf = |gpa| {
            let raw = pte::<F>(ptes, gpa, 0).load();
            F::kind(raw, 0) == Kind::Leaf && !folded::<F>(raw)
        };
        let aligned = start & (F::size(0).bytes() - 1) == 0;
        // The first entry and the last count as neighbours, too.
        if !aligned || !leaf(start) || !leaf(end) && !leaf(start.wrapping_sub(1)) {
            return None;
        }
        let pte = pte::<F>(ptes, start, 0);
        // Hardware may have marked it since it was loaded.
        let raw = pte.swap(0);
        let mut owed = PendingFlush::NOTHING;
        owed.leaves(start, end, F::size(0));
        tables.invalidate_alone(&owed);
        Some(UnmappedRun {
            gpa: Gpa(start),
            bytes: F::size(0).bytes(),
            size: F::size(0),
            hpa: F::leaf_address(raw, 0),
            attributes: tables.format.decode(raw, 0),
        })
    }
}
