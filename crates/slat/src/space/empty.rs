//! Unmaps a range of an owner's tables.

use super::SpaceError;
use super::walk::{Step, Visit};
use crate::addr::{Gpa, Hpa};
use crate::format::{Format, Kind};
use crate::invalidation::PendingFlush;
use crate::ops::UnmappedRun;
use crate::platform::Platform;
use crate::retired::Chain;
use crate::table::{Pte, folded};
use crate::tables::{Interruption, Tables};
use crate::walk::Entry;

/// Empties the entries of a range. Leaves and tables that it took out are given away only behind an
/// invalidation, in [`Empty::hand_out`].
pub(super) struct Empty<'a, 't, 'p, F: Format, P: Platform> {
    pub tables: &'t Tables<'p, F, P>,
    /// Runs of leaves that were taken out since the last invalidation.
    pub runs: &'a mut [Option<UnmappedRun>],
    pub len: usize,
    /// The attributes of the leaf that was taken out last.
    pub bits: u64,
    /// Is given the runs. Without it nothing is kept.
    pub removed: Option<&'a mut dyn FnMut(UnmappedRun)>,
    pub unlinked: Chain<F>,
    pub owed: PendingFlush,
    /// Whether a clean that was dropped may have taken the dirty state of what CPUs still write.
    pub written: bool,
    /// Bytes that were mapped.
    pub bytes: u64,
}

impl<'t, F: Format, P: Platform> Visit<'t, F> for Empty<'_, 't, '_, F, P> {
    #[inline(always)]
    fn entry(
        &mut self,
        level: u8,
        kind: Kind,
        entry: Entry<'t>,
    ) -> Result<Step, Interruption<SpaceError>> {
        match kind {
            Kind::Leaf if entry.whole::<F>(level) => {}
            Kind::Empty | Kind::Reserved | Kind::Owned => return Ok(Step::Next),
            _ => return Err(Interruption { at: Gpa(entry.start), reason: SpaceError::Contended }),
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
            self.keep(Gpa(entry.start), raw, level);
        }
        self.owed.leaves(entry.start, entry.end, size);
        Ok(Step::Next)
    }

    #[inline(always)]
    fn leave(&mut self, level: u8, ptes: &'t [Pte], start: u64, end: u64) -> bool {
        // What lies next to the range mostly decides.
        let index = |at: u64| (at >> F::shift(level)) as usize & (ptes.len() - 1);
        let base = (end - 1) & !((1 << F::shift(level + 1)) - 1);
        let before = index(start.max(base)).wrapping_sub(1);
        let beside = [ptes.get(before), ptes.get(index(end - 1) + 1)];
        beside.into_iter().flatten().all(|pte| vacant::<F>(pte, level))
            && self.unlink(end - 1, level, ptes)
    }
}

fn vacant<F: Format>(pte: &Pte, level: u8) -> bool {
    F::kind(pte.load(), level).is_vacant()
}

impl<'t, F: Format, P: Platform> Empty<'_, 't, '_, F, P> {
    /// Unlinks the table at `level` that covers `at`, and those above it, that are empty. Returns
    /// whether there was one.
    #[inline(never)]
    fn unlink(&mut self, at: u64, mut level: u8, mut ptes: &'t [Pte]) -> bool {
        let lowest = level;
        while level < self.tables.geometry().root_level
            && ptes.iter().all(|pte| vacant::<F>(pte, level))
        {
            let (link, above) = self.tables.descend_to(at, level + 1);
            let table = F::table_address(link.swap(0));
            ptes[0].swap(F::retired(Hpa(0)));
            self.unlinked.add(table, &ptes[0]);
            (ptes, level) = (above, level + 1);
            let base = at & !((1 << F::shift(level)) - 1);
            self.owed.table(base, base + (1 << F::shift(level)));
        }
        level > lowest
    }

    /// Adds a leaf to the runs.
    #[inline(always)]
    fn keep(&mut self, gpa: Gpa, raw: u64, level: u8) {
        let (hpa, size, bits) =
            (F::leaf_address(raw, level), F::size(level), F::attribute_bits(raw, level));
        if let Some(last) = self.len.checked_sub(1)
            && let Some(last) = &mut self.runs[last]
            && last.gpa.0 + last.bytes == gpa.0
            && last.hpa.0 + last.bytes == hpa.0
            && (last.size, self.bits) == (size, bits)
        {
            last.bytes += size.bytes();
            return;
        }
        if self.len == self.runs.len() {
            // The new leaf is not handed out yet, nor covered.
            self.hand_out();
        }
        let mut attributes = self.tables.format.decode(raw, level);
        attributes.dirty |= self.written;
        self.runs[self.len] = Some(UnmappedRun { gpa, bytes: size.bytes(), size, hpa, attributes });
        (self.len, self.bits) = (self.len + 1, bits);
    }

    /// Invalidates, and hands out what was taken out before.
    pub fn hand_out(&mut self) {
        let owed = core::mem::replace(&mut self.owed, PendingFlush::NOTHING);
        // Entries found empty may have been emptied by removals that were forgotten.
        if self.tables.pending.removals.count() == 0 {
            self.tables.complete_alone(&owed);
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
