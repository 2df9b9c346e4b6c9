//! Maps a range of an owner's tables.

use super::SpaceError;
use super::walk::{Step, Visit};
use crate::addr::{Gpa, Hpa};
use crate::build::Plan;
use crate::format::{Format, Kind};
use crate::ops::{MapError, Owner, agrees};
use crate::platform::{Maintenance, Platform};
use crate::table::Pte;
use crate::tables::{Interruption, Tables};
use crate::walk::Entry;

/// Fills the empty entries of a range, or only looks whether that can be done.
pub(super) struct Fill<'t, 'p, F: Format, P: Platform> {
    pub tables: &'t Tables<'p, F, P>,
    pub plan: Plan,
    pub maintenance: Option<Maintenance>,
    pub fills: bool,
}

impl<'t, F: Format, P: Platform> Visit<'t, F> for Fill<'t, '_, F, P> {
    #[inline(always)]
    fn entry(
        &mut self,
        level: u8,
        kind: Kind,
        entry: Entry<'t>,
    ) -> Result<Step, Interruption<SpaceError>> {
        let refusal = match kind {
            Kind::Empty | Kind::Reserved => None,
            Kind::Leaf => match agrees::<F>(&self.plan, F::STATUS, level, &entry) {
                Ok(()) => return Ok(Step::Next),
                Err(reason) => Some(SpaceError::Map(reason)),
            },
            Kind::Owned => {
                let owner = Owner::of::<F>(entry.raw);
                Some(SpaceError::Map(MapError::Owned { owner }))
            }
            _ => Some(SpaceError::Contended),
        };
        if let Some(reason) = refusal {
            return Err(Interruption { at: Gpa(entry.start), reason });
        }
        if !self.fills {
            return Ok(Step::Next);
        }
        let fits = level == 0
            || level <= self.plan.largest
                && entry.whole::<F>(level)
                && self.plan.aligned::<F>(level);
        if !fits {
            return self.link(level, &entry);
        }
        self.maintain(&entry);
        self.tables.break_before_fill(entry.raw, level, entry.base::<F>(level));
        entry.pte.release(entry.raw, self.leaf(level, entry.start));
        Ok(Step::Next)
    }

    #[inline(always)]
    fn enter(&mut self, _level: u8, link: &'t Pte, raw: u64, _children: &'t [Pte]) {
        if self.fills && raw & F::TABLE_ACCESSED != F::TABLE_ACCESSED {
            // A scan by tables finds the pages that are mapped below.
            let _ = link.update(|raw| Some(raw | F::TABLE_ACCESSED));
        }
    }
}

impl<F: Format, P: Platform> Fill<'_, '_, F, P> {
    fn leaf(&self, level: u8, gpa: u64) -> u64 {
        F::leaf(self.plan.bits, level, Hpa(gpa.wrapping_add(self.plan.delta)))
    }

    fn maintain(&self, entry: &Entry<'_>) {
        if let Some(what) = self.maintenance {
            let hpa = Hpa(entry.start.wrapping_add(self.plan.delta));
            self.tables.platform.maintain(hpa, entry.end - entry.start, what);
        }
    }

    /// Links a table: an empty one, which the walk then enters, or one that has the pages already.
    fn link(&self, level: u8, entry: &Entry<'_>) -> Result<Step, Interruption<SpaceError>> {
        let platform = self.tables.platform;
        let Some(mut frame) = platform.allocate(F::TABLE_BYTES) else {
            return Err(Interruption { at: Gpa(entry.start), reason: SpaceError::OutOfFrames });
        };
        let base = entry.base::<F>(level);
        let (step, ptes) = match level {
            1 => {
                self.maintain(entry);
                let ptes = frame.entries_mut::<F>(platform, 0);
                let index = |at: u64| ((at - base) >> F::PAGE_SHIFT) as usize;
                let (first, last) = (index(entry.start), index(entry.end));
                let mut gpa = entry.start;
                for pte in &mut ptes[first..last] {
                    pte.set(self.leaf(0, gpa));
                    gpa += 1 << F::PAGE_SHIFT;
                }
                let (before, rest) = ptes.split_at_mut(first);
                (Step::Next, [before, &mut rest[last - first..]])
            }
            _ => (Step::Again, [frame.entries_mut::<F>(platform, level - 1), &mut []]),
        };
        for empty in ptes {
            platform.fill(empty, 0, 0);
        }
        self.tables.break_before_fill(entry.raw, level, base);
        entry.pte.release(entry.raw, F::table(frame.into_hpa(), level));
        Ok(step)
    }
}
