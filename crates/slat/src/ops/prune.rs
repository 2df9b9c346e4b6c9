//! Prune: gives back tables that are empty, such as those that faults built and gave up. An unmap
//! does the same for the tables that it covers or empties, and this is its code.

use super::ChangeError;
use super::unmap::{Unmap, vacant};
use super::unmap_batch::UnmapBatch;
use crate::addr::{GpaRange, Levels};
use crate::format::Format;
use crate::guard::Guard;
use crate::platform::Platform;
use crate::table::Pte;
use crate::tables::Interruption;
use crate::walk::{Entry, Visitor, WalkCounts};

impl<F: Format, P: Platform> Guard<'_, '_, F, P> {
    /// Retires the tables that overlap `range` and hold neither a leaf nor an owner, such as those
    /// that faults built and gave up; [`Tables::reclaim`](crate::Tables::reclaim) then gives them
    /// back. Reservations in them are void. Returns how many, unless it ends early; if there is
    /// one, an invalidation is executed inside.
    ///
    /// An unmap does the same for the tables that it covers or empties.
    ///
    /// # Errors
    /// Nothing is done on [`ChangeError::Range`]. [`ChangeError::Contended`] leaves everything done
    /// that precedes the address where it stopped.
    pub fn prune(&mut self, range: GpaRange) -> Result<usize, Interruption<ChangeError>> {
        let tables = self.tables;
        if let Err(error) = tables.check(&range) {
            return Self::stopped(range.start(), ChangeError::Range(error));
        }
        let mut batch = UnmapBatch::new(tables, &mut []);
        batch.counted = true;
        tables.pending.removals.begin();
        let (start, end) = (range.start().0, range.end().0);
        let mut visitor = Prune(Unmap::of(tables, &mut batch, &range, 0, &mut self.sums));
        let result = tables.walk(start, end, &mut visitor);
        visitor.0.retire_ends(result.map_or_else(|at| at.0, |()| end));
        let retired = batch.unlinked.len();
        if retired != 0 {
            self.sums.counts.invalidations += 1;
            batch.complete().for_each(drop);
        }
        match result {
            Ok(()) => Ok(retired),
            Err(at) => Self::stopped(at, ChangeError::Contended),
        }
    }
}

/// Visits only tables, and retires those that are empty.
struct Prune<'r, 's, 't, 'm, F: Format, P: Platform>(Unmap<'r, 's, 't, 'm, F, P>);

impl<'t, F: Format, P: Platform> Visitor<'t, F> for Prune<'_, '_, '_, 't, F, P> {
    const LEVELS: Levels = Levels::above(0);
    const TABLES: bool = true;

    #[inline(always)]
    fn leave(&mut self, level: u8, entry: Entry<'t>, children: &'t [Pte]) {
        if entry.whole::<F>(level) && vacant::<F>(children, level - 1) {
            self.0.leave(level, entry, children);
        }
    }

    #[inline]
    fn settle(&mut self, level: u8, tally: WalkCounts) {
        Visitor::<F>::settle(&mut self.0, level, tally);
    }
}
