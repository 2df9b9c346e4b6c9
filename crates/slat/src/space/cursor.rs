//! The table in which an owner mapped a page last: the next page of that table needs no walk.
//!
//! *Invariant*: the table that a cursor names is linked where the cursor says, and the tables above
//! it are marked accessed, as they must be above accessed leaves. The owner sets the cursor in a
//! call that excludes all other threads. Code that can unlink a table or clear such a mark
//! afterwards clears the cursor before it begins. That is a guard, a user of the tables, and each
//! of the owner's own calls except `map`, which only adds tables.

use crate::addr::{Gpa, Hpa};
use crate::format::Format;
use crate::platform::Platform;
use crate::sync::{AtomicU64, Ordering};
use crate::table::{self, Pte};
use crate::tables::Tables;

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
    pub fn new() -> Self {
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

    /// Sets the cursor to the table of the page at `gpa`, if there is one, and the tables above are
    /// accessed.
    pub fn set<F: Format, P: Platform>(&mut self, tables: &Tables<'_, F, P>, gpa: Gpa) {
        self.forget();
        let (mut lowest, mut accessed) = (None, true);
        let (_, level) = tables.descend(gpa.0, 0, |_, link| {
            lowest = Some(F::table_address(link.raw));
            accessed &= link.raw & F::TABLE_ACCESSED == F::TABLE_ACCESSED;
        });
        // A guest smaller than one table of pages has only part of one, and gets no cursor.
        let whole = tables.geometry().address_bits >= F::shift(1);
        if let Some(table) = lowest
            && level == 0
            && accessed
            && whole
        {
            *self = Self { block: AtomicU64::new(gpa.0 >> F::shift(1)), table };
        }
    }

    /// Returns the entries of the table that `gpa` lies in, if the cursor names it.
    #[inline(always)]
    pub fn entries<'c, F: Format, P: Platform>(
        &'c mut self,
        platform: &'c P,
        gpa: Gpa,
    ) -> Option<&'c [Pte]> {
        if self.block.load(Ordering::Relaxed) != gpa.0 >> F::shift(1) {
            return None;
        }
        // SAFETY: the table is linked (the invariant above), so it is allocated, with the entries
        // of its level. It stays so while the owner, which alone gives tables back, is borrowed.
        Some(unsafe { table::entries(platform, self.table, F::entries(0)) })
    }
}
