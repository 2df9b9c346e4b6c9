//! Changes the rights, or the software bits, of a range of an owner's tables.

use super::SpaceError;
use super::walk::{Step, Visit};
use crate::addr::Gpa;
use crate::format::{Format, Kind};
use crate::invalidation::PendingFlush;
use crate::ops::Rule;
use crate::platform::Platform;
use crate::table::folded;
use crate::tables::{Interruption, Tables};
use crate::walk::Entry;

/// Rewrites each leaf of a range by a rule.
pub(super) struct Rewrite<'t, 'p, F: Format, P: Platform, R> {
    pub tables: &'t Tables<'p, F, P>,
    pub rule: R,
    pub owed: PendingFlush,
    /// Bytes that changed.
    pub changed: u64,
}

impl<'t, F: Format, P: Platform, R: Rule<F>> Visit<'t, F> for Rewrite<'t, '_, F, P, R> {
    #[inline(always)]
    fn entry(
        &mut self,
        level: u8,
        kind: Kind,
        entry: Entry<'t>,
    ) -> Result<Step, Interruption<SpaceError>> {
        match kind {
            Kind::Leaf => {}
            Kind::Empty | Kind::Reserved | Kind::Owned => return Ok(Step::Next),
            _ => return Err(Interruption { at: Gpa(entry.start), reason: SpaceError::Contended }),
        }
        let mut raw = entry.raw;
        loop {
            let new = self.rule.change(raw);
            if new == raw {
                return Ok(Step::Next);
            }
            if folded::<F>(raw) {
                self.tables.unfold_at(entry.start, level)?;
                return Ok(Step::Again);
            }
            if R::EXECUTES {
                self.tables.make_coherent(level, raw, new);
            }
            match entry.pte.exchange(raw, new) {
                Ok(()) => break,
                Err(found) => raw = found,
            }
        }
        let size = F::size(level);
        self.changed += size.bytes();
        if R::STALE {
            let base = entry.base::<F>(level);
            self.owed.leaves(base, base + size.bytes(), size);
        }
        Ok(Step::Next)
    }
}
