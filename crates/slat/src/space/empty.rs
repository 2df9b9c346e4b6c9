//! Unmaps a range of an owner's tables.

use super::SpaceError;
use super::walk::{Step, Visit};
use crate::addr::{Gpa, Hpa};
use crate::format::{Format, Kind};
use crate::ops::{Removed, folded};
use crate::platform::Platform;
use crate::retired::Chain;
use crate::shootdown::Owed;
use crate::table::Pte;
use crate::tables::{Halted, Tables};
use crate::walk::Entry;

/// Empties the entries of a range. Leaves and tables that it took out are given away only behind an
/// invalidation, in [`Empty::hand_out`].
pub(super) struct Empty<'a, 't, 'p, F: Format, P: Platform> {
    pub tables: &'t Tables<'p, F, P>,
    /// Runs of leaves that were taken out since the last invalidation.
    pub runs: &'a mut [Option<Removed>],
    pub len: usize,
    /// Is given the runs. Without it nothing is kept.
    pub removed: Option<&'a mut dyn FnMut(Removed)>,
    pub unlinked: Chain<F>,
    pub owed: Owed,
    /// Bytes that were mapped.
    pub bytes: u64,
}

impl<'t, F: Format, P: Platform> Visit<'t, F> for Empty<'_, 't, '_, F, P> {
    fn entry(
        &mut self,
        level: u8,
        kind: Kind,
        entry: Entry<'t>,
    ) -> Result<Step, Halted<SpaceError>> {
        match kind {
            Kind::Leaf if entry.whole::<F>(level) => {}
            Kind::Empty | Kind::Reserved | Kind::Owned => return Ok(Step::Next),
            _ => return Err(Halted { at: Gpa(entry.start), why: SpaceError::Contended }),
        }
        if folded::<F>(entry.raw) {
            self.tables.unfold_at(entry.start, level)?;
            return Ok(Step::Again);
        }
        // Hardware may have marked it since it was loaded.
        let raw = entry.pte.swap(0);
        let size = F::size(level);
        self.bytes += size.bytes();
        if self.removed.is_some() {
            let mut attributes = self.tables.format.decode(raw, level);
            // A clean that was dropped may have taken the dirty state of what CPUs still write.
            attributes.dirty |= self.tables.pending.cleans.count() != 0;
            let (gpa, hpa) = (Gpa(entry.start), F::leaf_address(raw, level));
            self.keep(Removed { gpa, bytes: size.bytes(), size, hpa, attributes });
        }
        self.owed.leaves(entry.start, entry.end, size);
        Ok(Step::Next)
    }

    fn leave(&mut self, level: u8, entry: &Entry<'t>, children: &'t [Pte]) {
        let vacant = |pte: &Pte| F::kind(pte.load(), level - 1).is_vacant();
        let index = |at: u64| (at >> F::shift(level - 1)) as usize & (children.len() - 1);
        // What lies next to the range mostly decides.
        let (before, behind) = (index(entry.start).wrapping_sub(1), index(entry.end - 1) + 1);
        let beside = [before, behind].into_iter().filter_map(|index| children.get(index));
        if !beside.chain(children).all(vacant) {
            return;
        }
        let table = F::table_address(entry.pte.swap(0));
        children[0].swap(F::retired(Hpa(0)));
        self.unlinked.add(table, &children[0]);
        let base = entry.base::<F>(level);
        self.owed.table(base, base + (1 << F::shift(level)));
    }
}

impl<F: Format, P: Platform> Empty<'_, '_, '_, F, P> {
    fn keep(&mut self, new: Removed) {
        if let Some(last) = self.len.checked_sub(1)
            && let Some(last) = &mut self.runs[last]
            && last.continues(&new)
        {
            last.bytes += new.bytes;
            return;
        }
        if self.len == self.runs.len() {
            // The new leaf is not handed out yet, nor covered.
            self.hand_out();
        }
        self.runs[self.len] = Some(new);
        self.len += 1;
    }

    /// Invalidates, and hands out what was taken out before.
    pub fn hand_out(&mut self) {
        let owed = core::mem::replace(&mut self.owed, Owed::NOTHING);
        // Entries found empty may have been emptied by removals that were forgotten.
        if self.tables.pending.removals.count() == 0 {
            self.tables.complete(owed);
        } else {
            self.tables.complete_all();
        }
        self.tables.retired.invalidated(self.tables.platform, &self.unlinked.take());
        let len = core::mem::replace(&mut self.len, 0);
        for run in &mut self.runs[..len] {
            if let (Some(run), Some(removed)) = (run.take(), &mut self.removed) {
                removed(run);
            }
        }
    }
}
