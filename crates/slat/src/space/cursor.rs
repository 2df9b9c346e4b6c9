//! Where an owner mapped a page last: the next page of the same table needs no walk.
//!
//! *Invariant*: the table that a cursor names is linked where the cursor says, and the tables above
//! it are marked accessed, as they must be above leaves that are. The owner sets it in a call that
//! excludes everybody else. Whoever can unlink a table or clear such a mark afterwards makes the
//! cursor forget before he begins: a guard, who has the tables, and the owner's own calls but
//! `map`, which only adds tables.

use crate::addr::{Gpa, Hpa};
use crate::format::Format;
use crate::platform::Platform;
use crate::sync::{AtomicU64, Ordering};
use crate::table::{self, Slot};
use crate::tables::Tables;

/// A table of pages, or none.
#[derive(Debug)]
pub(super) struct Cursor {
    /// The number of the block that the table stands for.
    block: AtomicU64,
    table: Hpa,
}

/// No block has this number.
const NOWHERE: u64 = u64::MAX;

impl Cursor {
    pub fn new() -> Self {
        Self { block: AtomicU64::new(NOWHERE), table: Hpa(0) }
    }

    /// Names no table from now on. The owner sees it, as he comes after the caller's borrow.
    #[inline]
    pub fn forget(&self) {
        // Threads that enter in turns write nothing to a line that all of them read.
        if self.block.load(Ordering::Relaxed) != NOWHERE {
            self.block.store(NOWHERE, Ordering::Relaxed);
        }
    }

    /// Names the table of the page at `gpa`, if there is one and the tables above are accessed.
    pub fn set<F: Format, P: Platform>(&mut self, tables: &Tables<'_, F, P>, gpa: Gpa) {
        self.forget();
        let (mut lowest, mut accessed) = (None, true);
        let (_, level) = tables.descend(gpa.0, 0, |_, link| {
            lowest = Some(F::table_address(link.raw));
            accessed &= link.raw & F::TABLE_ACCESSED == F::TABLE_ACCESSED;
        });
        // Of a block that reaches beyond the guest's addresses, a part is none.
        let whole = tables.geometry().address_bits >= F::shift(1);
        if let Some(table) = lowest
            && level == 0
            && accessed
            && whole
        {
            *self = Self { block: AtomicU64::new(gpa.0 >> F::shift(1)), table };
        }
    }

    /// The slots of the table that `gpa` lies in, if the cursor names it.
    #[inline(always)]
    pub fn slots<'c, F: Format, P: Platform>(
        &'c mut self,
        platform: &'c P,
        gpa: Gpa,
    ) -> Option<&'c [Slot]> {
        if self.block.load(Ordering::Relaxed) != gpa.0 >> F::shift(1) {
            return None;
        }
        // SAFETY: the table is linked, so it is allocated, with the slots of its level, and stays
        // so while the owner, who alone gives tables back, is borrowed (the invariant above).
        Some(unsafe { table::slots(platform, self.table, F::slots(0)) })
    }
}
