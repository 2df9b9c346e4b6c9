//! The table of pages in which an owner's call worked last: the next page of it needs no walk.
//!
//! *Invariant*: the table that a cursor names is linked where the cursor says, and the tables above
//! it are marked accessed, as they must be above accessed leaves. The owner sets the cursor in a
//! call that excludes all other threads. Code that can unlink the table or clear such a mark clears
//! the cursor before it begins, or in the same call: a guard, a user of the tables, and the owner's
//! own calls that unlink tables.

use crate::addr::Hpa;
use crate::format::Format;
use crate::platform::Platform;
use crate::sync::{AtomicU64, Ordering};
use crate::table::{self, Pte};

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
}
