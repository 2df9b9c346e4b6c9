//! The part of a walk at level 2 and above.

use super::{Budget, End, Entry, Met, Visitor, WalkCounts, one, touch};
use crate::format::Format;
use crate::platform::Platform;
use crate::sync::agreed;
use crate::table::{self, Pte};

/// The position of a walk in the tables at level 2 and above, one table at a time. Each of them
/// covers at least a GiB. The state of these levels is here, so that none of it is on the stack
/// while the tables below are walked.
pub(super) struct Climb {
    /// The level of the table where the walk begins.
    pub(super) top: u8,
    /// The level of the table that the walk is in.
    pub(super) level: u8,
    /// The range from `start` to `at` is done. Behind `at`, at most the part that the table below
    /// covers is done.
    pub(super) start: u64,
    pub(super) at: u64,
    pub(super) end: u64,
    /// The values of the entries that link the tables on the way, by their level less two; 0 for
    /// levels below which the walk is not.
    pub(super) raws: [u64; 3],
}

impl Climb {
    /// Returns the table at `level`, below the top, that the walk is in.
    #[inline(always)]
    pub(super) fn linked<'t, F: Format, P: Platform>(
        &self,
        platform: &'t P,
        level: u8,
    ) -> &'t [Pte] {
        let table = F::table_address(self.raws[level as usize - 1]);
        // SAFETY: as in `one`.
        unsafe { table::entries(platform, table, F::entries(level)) }
    }

    /// Goes on to the next table at level 1, or to the end of the walk. `ptes` are those of the
    /// top table, and `below` is the outcome of the last table at level 1.
    #[inline(never)]
    pub(super) fn on<'t, F: Format, P: Platform, V: Visitor<'t, F>>(
        &mut self,
        platform: &'t P,
        ptes: &'t [Pte],
        mut below: End,
        visitor: &mut V,
        budget: &mut Budget,
    ) -> End {
        loop {
            let level = self.level;
            let table = if level == self.top { ptes } else { self.linked::<F, P>(platform, level) };
            let bytes = (table.len() as u64) << F::shift(level);
            let end = self.end.min((self.at & !(bytes - 1)) + bytes);
            let result = match level {
                2 => self.part::<F, P, V, 2>(platform, table, end, below, visitor, budget),
                3 => self.part::<F, P, V, 3>(platform, table, end, below, visitor, budget),
                _ => self.part::<F, P, V, 4>(platform, table, end, below, visitor, budget),
            };
            if result.reason == End::BELOW {
                if level == 2 {
                    return result;
                }
                self.level -= 1;
            } else if level == self.top {
                return result;
            } else {
                self.level += 1;
                below = result;
            }
        }
    }

    /// Goes on in a table, up to `end` or to a table that the walk descends into. `below` is the
    /// outcome of the table that the current entry links, if the walk comes back up from there.
    #[inline(always)]
    fn part<'t, F: Format, P: Platform, V: Visitor<'t, F>, const LEVEL: u8>(
        &mut self,
        platform: &'t P,
        table: &'t [Pte],
        end: u64,
        below: End,
        visitor: &mut V,
        budget: &mut Budget,
    ) -> End {
        let shift = F::shift(LEVEL);
        let mut tally = WalkCounts::NONE;
        let mut result = End::DONE;
        let mut at = self.at;
        while at < end {
            let pte = table::pte::<F>(table, at, LEVEL);
            let next = (((at >> shift) + 1) << shift).min(end);
            let mut raw = core::mem::take(&mut self.raws[LEVEL as usize - 2]);
            let mut came = Some(below).filter(|_| raw != 0);
            if came.is_none() {
                match one::<F, P, V, LEVEL, false>(
                    platform, pte, at, next, visitor, &mut tally, budget,
                ) {
                    Met::Done(done) => result = done,
                    Met::Table { raw: link, .. } => {
                        raw = link;
                        if V::LEVELS.any_below(LEVEL) {
                            self.raws[LEVEL as usize - 2] = raw;
                            self.at = at;
                            visitor.settle(LEVEL, tally);
                            return End { at: next, reason: End::BELOW };
                        }
                        came = Some(End::DONE);
                    }
                }
            }
            if let Some(below) = came {
                // SAFETY: as in `one`.
                let children = unsafe {
                    table::entries(platform, F::table_address(raw), F::entries(LEVEL - 1))
                };
                let entry = Entry { pte, raw, start: at, end: next };
                result = left::<F, V>(LEVEL, self.start, entry, children, below, visitor);
            }
            if !result.is_done() {
                break;
            }
            at = next;
        }
        visitor.settle(LEVEL, tally);
        result
    }
}

/// Finishes a table that has the entries `children`, after all below it; `result` is its outcome.
#[inline(always)]
pub(super) fn left<'t, F: Format, V: Visitor<'t, F>>(
    level: u8,
    start: u64,
    entry: Entry<'t>,
    children: &'t [Pte],
    result: End,
    visitor: &mut V,
) -> End {
    if V::TOUCHES && F::TABLE_ACCESSED != 0 {
        agreed();
        touch::<F>(entry.pte, level, entry.raw);
    }
    if result.is_done() {
        // Covers all that the walk has done, also before it began anew.
        let start = start.max(entry.base::<F>(level));
        visitor.leave(level, Entry { start, ..entry }, children);
    }
    result
}
