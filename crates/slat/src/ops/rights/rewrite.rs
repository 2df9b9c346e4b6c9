//! The walk that changes leaves by a rule.

use super::gives_nothing;
use crate::addr::{GpaRange, Levels, PageSize};
use crate::format::{Format, Kind, RUN};
use crate::guard::GuardState;
use crate::ops::rules::Rule;
use crate::platform::Platform;
use crate::pte::Change;
use crate::table::{Pte, folded};
use crate::tables::Tables;
use crate::walk::{Entry, Flow, Visitor, WalkCounts, change_pages, visit_each};
use core::marker::PhantomData;

pub(super) struct Rewrite<'t, 'g, F: Format, P: Platform, R, C> {
    pub(super) tables: &'t Tables<'t, F, P>,
    pub(super) rule: R,
    pub(super) range: GpaRange,
    pub(super) sums: &'g mut GuardState,
    /// The size of a block that the range cuts, where the walk stopped.
    pub(super) cut: Option<PageSize>,
    pub(super) change: PhantomData<C>,
}

impl<F: Format, P: Platform, R: Rule<F>, C: Change> Rewrite<'_, '_, F, P, R, C> {
    /// Returns the new value of a member of a group, whose state is that of the group. Alone, a
    /// member can only become accessed, as its own fault demands. Otherwise the group stays as it
    /// is, or changes in place if hardware ignores the bits, or is unfolded first: `Aside`.
    #[cold]
    fn member(&mut self, level: u8, entry: &Entry<'_>) -> Result<u64, Flow> {
        // Without one its table was replaced, and the walk leaves it.
        let group = self.tables.group(entry.start, level).ok_or(Flow::Aside)?;
        let state = group.state().ok_or(Flow::Wait)?;
        // A rule may ask for the address, which is the member's own.
        let state = entry.raw | state & F::STATUS;
        let changed = self.rule.change(state);
        if gives_nothing::<F>(state, changed) {
            return Ok(entry.raw | changed & self.rule.change(entry.raw) & F::ACCESSED);
        }
        if level > 0 && (R::WHOLE && !entry.whole::<F>(level) || R::PAGES) {
            // The caller refuses it.
            return Ok(changed);
        }
        let inside = group.inside(self.range.start().0, self.range.end().0);
        if !R::SEEN && inside && self.tables.format.marks_valid() {
            group.rewrite(|raw| self.rule.change(raw))?;
            self.sums.counts.entries_written += 2 * group.ptes.len() as u64;
            self.sums.counts.bytes_changed += group.bytes();
            return Err(Flow::Again);
        }
        if C::ALONE {
            group.unfold_alone();
            return Err(Flow::Again);
        }
        Err(Flow::Aside)
    }
}

impl<'t, F: Format, P: Platform, R: Rule<F>, C: Change> Visitor<'t, F>
    for Rewrite<'t, '_, F, P, R, C>
{
    const LEVELS: Levels = Levels::ALL;
    const QUIET: Option<u64> = Some(R::QUIET | F::CONTIGUOUS);
    const TOUCHES: bool = R::TOUCHES;

    #[inline(always)]
    fn visit(&mut self, level: u8, kind: Kind, entry: Entry<'t>, tally: &mut WalkCounts) -> Flow {
        if kind != Kind::Leaf {
            return Flow::Next;
        }
        let changed = if folded::<F>(entry.raw) {
            match self.member(level, &entry.apart()) {
                Ok(changed) => changed,
                Err(flow) => return flow,
            }
        } else {
            self.rule.change(entry.raw)
        };
        // A leaf that has the right already is not refused, whichever part of it the range covers.
        let given = !R::STALE && gives_nothing::<F>(entry.raw, changed);
        let cuts =
            R::WHOLE && !entry.whole::<F>(level) && !given || R::PAGES && changed != entry.raw;
        if level > 0 && cuts {
            self.cut = Some(F::size(level));
            return Flow::Stop;
        }
        if changed == entry.raw {
            return Flow::Next;
        }
        if R::EXECUTES {
            self.tables.make_coherent(level, entry.raw, changed);
        }
        if C::exchange(entry.pte, entry.raw, changed).is_err() {
            return Flow::Again;
        }
        tally.change(&entry);
        Flow::Next
    }

    /// As `visit`, with one account of all pages.
    #[inline(always)]
    fn visit_run(
        &mut self,
        run: &'t [Pte; RUN],
        raws: &[u64; RUN],
        at: u64,
        tally: &mut WalkCounts,
    ) -> usize {
        // A copy, which the exchanges cannot change: it is not loaded again after each.
        let rule = self.rule;
        let change = |raw| Some(rule.change(raw));
        if !R::EXECUTES
            && let Some((done, _)) = change_pages::<F, C>(run, raws, at, tally, change)
        {
            return done;
        }
        visit_each::<F, Self>(self, run, raws, at, tally)
    }

    #[cfg(not(any(loom, shuttle)))]
    #[inline(always)]
    fn rewrite_run(&mut self, run: &'t [Pte; RUN], tally: &mut WalkCounts) -> bool {
        if !(C::ALONE && R::SURE) {
            return false;
        }
        // SAFETY: `C` says that no other thread, and no hardware, reaches the entries.
        let done = unsafe {
            crate::table::rewrite_run(run, |raws| {
                let common = raws.iter().fold(!0, |common, raw| common & raw);
                let any = raws.iter().fold(0, |any, raw| any | raw);
                let sure = common & R::QUIET != 0
                    && any & (F::MARK | F::CONTIGUOUS) == 0
                    && F::all_pages(common);
                sure.then(|| {
                    let mut changed = raws;
                    changed.iter_mut().for_each(|raw| *raw = self.rule.change(*raw));
                    changed
                })
            })
        };
        tally.changed += if done { RUN as u64 } else { 0 };
        done
    }

    #[inline(always)]
    fn aside(&mut self, level: u8, gpa: u64) -> Flow {
        self.tables.unfold(gpa, level, self.sums)
    }

    #[inline]
    fn settle(&mut self, level: u8, tally: WalkCounts) {
        self.sums.settle::<F>(level, &tally, R::STALE);
    }
}
