//! Ways of splitting: the engine's own, and those that the laboratory compares with it.

use crate::build::{Builder, Plan};
use crate::format::Format;
use crate::platform::Platform;
use crate::table::Frame;

/// A way in which a split walks and builds. All ways share one code; the laboratory's baselines
/// skip less.
pub trait SplitWalk: sealed::Way {
    /// Reads entries that can hold nothing to split: those at the target size and below.
    const LAST_LEVEL: bool = false;
    /// Descends into the tables that it has just linked.
    const INTO_NEW: bool = false;
    /// Blocks that may be broken at once and share one invalidation.
    const MERGED: usize = MOST_MERGED;
}

/// The engine's own way: fills tables by runs, does not enter new tables, and breaks up to
/// [`SplitWalk::MERGED`] blocks for one invalidation.
#[derive(Clone, Copy, Debug)]
pub struct BatchedSplit;

impl SplitWalk for BatchedSplit {}
impl sealed::Way for BatchedSplit {}

pub(crate) mod sealed {
    use super::{Builder, Format, Frame, Plan, Platform};

    /// The part of a way of walking that only the engine uses.
    #[allow(private_interfaces, reason = "nobody else can name it")]
    pub trait Way {
        /// Returns whether an entry at `level` is wanted, of those that the walk shows.
        #[inline(always)]
        fn wants(_level: u8) -> bool {
            true
        }

        /// Fills a table of those that replace a block, as [`Builder::fill`].
        #[inline(always)]
        fn fill<F: Format, P: Platform>(
            builder: &mut Builder<'_, '_, F, P>,
            frame: &mut Frame,
            level: u8,
            base: u64,
            plan: &Plan,
        ) {
            builder.fill(frame, level, base, plan);
        }
    }
}

/// Bounds how long a block stands broken: one invalidation, and a store for each block that waits
/// with it. 64 would take 8 invalidations a GiB in place of 26, and 3 KiB of stack, which a
/// hypervisor may not have in a fault.
pub(in crate::ops) const MOST_MERGED: usize = 20;
