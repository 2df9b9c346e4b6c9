//! Discard: drops tables that a range covers whole, with all leaves below, without reading them.
//! For tables of one owner, which hardware may walk meanwhile.
//!
//! # Protocol
//! The caller has exclusive access to the tables, so that only hardware walks them meanwhile. A
//! entry that links a table, all of which is in the range, becomes frozen, with the table's address
//! in it: hardware finds it invalid. One invalidation, walk caches included, covers all of them.
//! Then no walker can be in the tables. They are given back, for which entries are read only down
//! to the level above pages, and the frozen entries are emptied. Between the first marker and the
//! last release, only the platform is called, which does not unwind.
//!
//! Removals that were dropped, or forgotten, may have left tokens in the tables, which make a later
//! fill of the entry invalidate first (`Tables::break_before_fill`); they go with the tables. So
//! while any are under way, all of the guest is invalidated.

use crate::addr::GpaRange;
use crate::build::dismantle;
use crate::format::{Format, Kind};
use crate::invalidation::PendingFlush;
use crate::platform::Platform;
use crate::table::{self, Frame, Pte};
use crate::tables::Tables;

impl<F: Format, P: Platform> Tables<'_, F, P> {
    /// Unmaps all that lies in tables that `range`, which cuts no block, covers whole, and gives
    /// the tables back; leaves outside such tables stay. Does nothing where addresses have owners,
    /// as an owner keeps its entry.
    pub(crate) fn drop_tables(&mut self, range: &GpaRange) {
        if self.owners.are_known() {
            return;
        }
        let (start, end) = (range.start().0, range.end().0);
        let mut hull = PendingFlush::NOTHING;
        let level = self.geometry().root_level;
        self.each_whole(self.root_entries(), level, (start, end), &mut |pte, level, base| {
            let link = |raw| (F::kind(raw, level) == Kind::Table).then(|| frozen::<F>(raw));
            if pte.update(link).is_ok() {
                hull.table(base, base + (1 << F::shift(level)));
            }
        });
        if hull.is_nothing() {
            return;
        }
        if self.pending.removals.count() == 0 {
            self.complete(hull);
        } else {
            self.complete_all();
        }
        self.each_whole(self.root_entries(), level, (start, end), &mut |pte, level, _| {
            let raw = pte.load();
            if F::kind(raw, level) == Kind::Frozen {
                self.free_below(raw, level - 1);
                pte.release(raw, 0);
            }
        });
    }

    /// Shows `each` the topmost entries above pages that a range covers whole, with their level and
    /// first address. Where an end of the range cuts a table, or a frozen one, it goes down, and
    /// shows the entry afterwards if nothing is left below it.
    fn each_whole(
        &self,
        ptes: &[Pte],
        level: u8,
        (start, end): (u64, u64),
        each: &mut impl FnMut(&Pte, u8, u64),
    ) {
        if level == 0 {
            return;
        }
        let (shift, mask) = (F::shift(level), ptes.len() as u64 - 1);
        for number in start >> shift..=(end - 1) >> shift {
            let pte = &ptes[(number & mask) as usize];
            let base = number << shift;
            let (from, to) = (start.max(base), end.min(base + (1 << shift)));
            if to - from == 1 << shift {
                each(pte, level, base);
                continue;
            }
            let raw = pte.load();
            if level == 1 || !matches!(F::kind(raw, level), Kind::Table | Kind::Frozen) {
                continue;
            }
            let hpa = F::table_address(raw);
            // SAFETY: a table has that many entries. It is linked, or was until this call froze the
            // entry: it is given back below, after its last use.
            let children = unsafe { table::entries(self.platform, hpa, F::entries(level - 1)) };
            self.each_whole(children, level - 1, (from, to), each);
            let left = |pte: &Pte| {
                let kind = F::kind(pte.load(), level - 1);
                !kind.is_vacant() && kind != Kind::Frozen
            };
            if !children.iter().any(left) {
                each(pte, level, base);
            }
        }
    }

    /// Gives back the table at `level` that the frozen entry `raw` names, and all below it.
    fn free_below(&self, raw: u64, level: u8) {
        let (platform, hpa) = (self.platform, F::table_address(raw));
        // SAFETY: the caller has the tables alone, and hardware has forgotten what the entry linked
        // (`drop_tables`, whose borrow is exclusive), so no walker is in the table or below. Tables
        // below the root came from caches, which allocate `TABLE_BYTES`, and nothing links this one
        // any more.
        unsafe {
            let ptes = table::entries(platform, hpa, F::entries(level));
            let free = &mut |frame| platform.free(frame, F::TABLE_BYTES);
            dismantle::<F, P>(platform, ptes, level, free);
            if let Some(frame) = Frame::from_hpa(hpa) {
                free(frame);
            }
        }
    }
}

/// The marker in place of a link.
fn frozen<F: Format>(raw: u64) -> u64 {
    F::frozen(F::table_address(raw))
}
