//! Other ways to split, with which the laboratory compares [`Guard::split`].
//!
//! They are the engine's code with other constants, so that a baseline is slower only by the way
//! it splits.

use super::split::way::sealed::Way;
use super::split::{SplitError, SplitWalk};
use crate::addr::{GpaRange, Levels, PageSize};
use crate::build::{Builder, Plan};
use crate::cache::TableCache;
use crate::format::{Format, Kind};
use crate::guard::Guard;
use crate::platform::Platform;
use crate::table::{self, Frame};
use crate::tables::Interruption;
use crate::walk::{Budget, Entry, Flow, Visitor, WalkCounts, walk};
use core::hint::black_box;

/// Builds tables entry by entry, and breaks one block at a time. The parameters say whether it also
/// reads the last level, the tables that it has just linked, and a flag at each entry.
#[derive(Clone, Copy, Debug)]
pub struct PerEntry<const LAST_LEVEL: bool, const INTO_NEW: bool, const FLAG: bool>;

/// Reads every entry of the range, also in new tables, as Linux's `stage2_split_walker` does up to
/// 7.3.
pub type EveryEntry = PerEntry<true, true, false>;
/// The same without the last level: the walk of "Optimize S2 page splitting" (May 2026).
pub type BoundedWalk = PerEntry<false, true, false>;
/// And without the tables that it has just linked: the first form of the same discussion.
pub type ChildlessWalk = PerEntry<false, false, false>;
/// The same, but a flag decides at each entry what to skip, as in a walker that is compiled once
/// for all its users: this measures the cost of the flag.
pub type FlaggedWalk = PerEntry<false, false, true>;

impl<const LAST_LEVEL: bool, const INTO_NEW: bool, const FLAG: bool> SplitWalk
    for PerEntry<LAST_LEVEL, INTO_NEW, FLAG>
{
    const LAST_LEVEL: bool = LAST_LEVEL;
    const INTO_NEW: bool = INTO_NEW;
    const MERGED: usize = 1;
}

#[expect(private_interfaces, reason = "nobody else can name it")]
impl<const LAST_LEVEL: bool, const INTO_NEW: bool, const FLAG: bool> Way
    for PerEntry<LAST_LEVEL, INTO_NEW, FLAG>
{
    /// The flag is in memory whose content the compiler cannot know.
    #[inline(always)]
    fn wants(level: u8) -> bool {
        !FLAG || *black_box(&0u8) >> level & 1 == 0
    }

    /// Fills by a walk over a cleared table, as Linux does when it builds the replacement of a
    /// block.
    fn fill<F: Format, P: Platform>(
        builder: &mut Builder<'_, '_, F, P>,
        frame: &mut Frame,
        level: u8,
        base: u64,
        plan: &Plan,
    ) {
        clear(builder, frame, level);
        let end = base + (1 << F::shift(level + 1));
        let hpa = frame.hpa();
        let platform = builder.platform;
        // SAFETY: `frame` is a whole table, and is borrowed exclusively while the walk goes on.
        let ptes = unsafe { table::entries(platform, hpa, F::entries(level)) };
        let mut visitor = EachEntry { builder, plan };
        // No other thread can hold an entry, and the visitor never stops.
        let _ =
            walk::<F, P, _>(platform, ptes, level, (base, end), &mut visitor, &mut Budget::new());
    }
}

fn clear<F: Format, P: Platform>(
    builder: &mut Builder<'_, '_, F, P>,
    frame: &mut Frame,
    level: u8,
) {
    let ptes = frame.entries_mut::<F>(builder.platform, level);
    builder.counts.tables_built += 1;
    builder.platform.fill(ptes, 0, 0);
}

impl<F: Format, P: Platform> Guard<'_, '_, F, P> {
    /// As [`Guard::split_together`], by another way of walking; at most [`SplitWalk::MERGED`]
    /// blocks are broken at a time.
    ///
    /// # Errors
    /// Those of [`Guard::split`].
    #[inline(always)]
    pub fn split_by<W: SplitWalk>(
        &mut self,
        range: GpaRange,
        to: PageSize,
        cache: &mut TableCache<'_, F, P>,
        together: usize,
    ) -> Result<u64, Interruption<SplitError>> {
        self.split_as::<W>(range, to, cache, together)
    }
}

struct EachEntry<'v, 'b, 'c, F: Format, P: Platform> {
    builder: &'v mut Builder<'b, 'c, F, P>,
    plan: &'v Plan,
}

impl<'t, F: Format, P: Platform> Visitor<'t, F> for EachEntry<'_, '_, '_, F, P> {
    const LEVELS: Levels = Levels::ALL;

    #[inline(always)]
    fn visit(&mut self, level: u8, _: Kind, entry: Entry<'t>, tally: &mut WalkCounts) -> Flow {
        let base = entry.base::<F>(level);
        let (raw, flow) = match self.plan.pte::<F>(level, base) {
            Some(raw) => (raw, Flow::Next),
            None => match self.builder.table(base, self.plan) {
                Some(mut frame) => {
                    clear(self.builder, &mut frame, level - 1);
                    (F::table(frame.into_hpa(), level), Flow::Again)
                }
                None => (self.plan.outside::<F>(level, base), Flow::Next),
            },
        };
        entry.pte.init(raw);
        tally.change(&entry);
        flow
    }

    #[inline]
    fn settle(&mut self, _level: u8, tally: WalkCounts) {
        self.builder.counts.entries_read += tally.read;
        self.builder.counts.entries_written += tally.changed;
    }
}
