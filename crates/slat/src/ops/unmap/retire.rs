//! Tables that an unmap finds empty: it retires their entries, and unlinks them.

use super::Unmap;
use crate::addr::Hpa;
use crate::format::Format;
use crate::platform::Platform;
use crate::table::Pte;
use crate::tables::Link;
use crate::walk::links;

/// Returns whether a table at `level` is empty. Most that are not show it at one end.
pub(in crate::ops) fn vacant<F: Format>(ptes: &[Pte], level: u8) -> bool {
    let vacant = |pte: &Pte| F::kind(pte.load(), level).is_vacant();
    ends_are_vacant::<F>(ptes, level) && ptes.iter().all(vacant)
}

#[inline(always)]
pub(super) fn ends_are_vacant<F: Format>(ptes: &[Pte], level: u8) -> bool {
    let vacant = |pte: &Pte| F::kind(pte.load(), level).is_vacant();
    vacant(&ptes[0]) && vacant(&ptes[ptes.len() - 1])
}

impl<F: Format, P: Platform> Unmap<'_, '_, '_, '_, F, P> {
    /// Empties the entry at `level` that links `table`, whose entries are retired; it covers
    /// `start` on.
    pub(super) fn unlink(
        &mut self,
        pte: &Pte,
        table: u64,
        level: u8,
        start: u64,
        children: &[Pte],
    ) {
        self.sums.counts.entries_written += 1;
        let empty = self.token();
        let unlinked = pte.update(|raw| links::<F>(raw, level, table).then_some(empty));
        debug_assert!(unlinked.is_ok(), "a retired table was unlinked by somebody else");
        self.batch.unlinked.add(F::table_address(table), &children[0]);
        self.batch.owed.table(start, start + (1 << F::shift(level)));
    }

    /// Retires empty tables around the ends of the part of the range that was done.
    pub(in crate::ops) fn retire_ends(&mut self, reached: u64) {
        if self.start < reached {
            let last = reached - 1;
            self.retire_around(self.start);
            // Most short ranges lie in one table.
            if (self.start ^ last) >> F::shift(1) != 0 {
                self.retire_around(last);
            }
        }
    }

    /// As [`Unmap::retire_from`], if the lowest table may be empty, which is rare.
    #[inline(always)]
    fn retire_around(&mut self, gpa: u64) {
        let (ptes, level) = self.tables.descend(gpa, 0, |_, _| ());
        if ends_are_vacant::<F>(ptes, level) {
            self.retire_from(gpa);
        }
    }

    /// Retires the lowest table around `gpa` if it is empty, and then those above it, below the
    /// root.
    #[cold]
    #[inline(never)]
    pub(super) fn retire_from(&mut self, gpa: u64) {
        let tables = self.tables;
        // Indexed by the level of the linked tables.
        let mut above = [None; 4];
        let (mut ptes, mut level) =
            tables.descend(gpa, 0, |level, link| above[level as usize - 1] = Some(link));
        while let Some(Some(Link { table, pte, raw })) = above.get(level as usize).copied() {
            if !(vacant::<F>(ptes, level) && self.retire(level, ptes)) {
                return;
            }
            let start = gpa & !((1 << F::shift(level + 1)) - 1);
            self.unlink(pte, raw, level + 1, start, ptes);
            (ptes, level) = (table, level + 1);
        }
    }

    /// Retires the entries of a table if all are empty. Otherwise, entries that were empty stay
    /// empty, with a new token, so that changes of other threads are not hidden.
    pub(super) fn retire(&mut self, level: u8, ptes: &[Pte]) -> bool {
        let retired = F::retired(Hpa(0));
        let full = ptes.iter().position(|pte| {
            pte.update(|raw| F::kind(raw, level).is_vacant().then_some(retired)).is_err()
        });
        if let Some(full) = full.filter(|&full| full != 0) {
            let empty = self.token();
            ptes[..full].iter().for_each(|pte| pte.release(retired, empty));
        }
        self.sums.counts.entries_written += if full.is_none() { ptes.len() as u64 } else { 0 };
        full.is_none()
    }
}
