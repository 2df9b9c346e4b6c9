//! The operations, each the one place for its rule.

mod map;
mod protect;
mod split;
mod unmap;

pub use map::MapError;
pub use protect::ProtectError;
pub use split::{Batched, Bounded, EveryEntry, SplitError, SplitWalk};
pub use unmap::{Removed, UnmapError};

use crate::addr::{GpaRange, PageSize};
use crate::format::{Format, Kind};
use crate::platform::Platform;
use crate::tables::Tables;

impl<F: Format, P: Platform> Tables<'_, F, P> {
    /// The block that an end of `range` cuts through, if any: operations that cannot split refuse
    /// it before they change anything.
    fn cut_block(&self, range: &GpaRange) -> Option<PageSize> {
        let (start, end) = (range.start().0, range.end().0);
        [start, end].into_iter().find_map(|edge| {
            // An edge that is a multiple of the largest leaf cuts nothing.
            if edge & (F::size(F::LARGEST_LEAF).bytes() - 1) == 0 {
                return None;
            }
            let (raw, level) = self.lookup(edge);
            let cuts =
                F::kind(raw, level) == Kind::Leaf && edge & (F::size(level).bytes() - 1) != 0;
            cuts.then(|| F::size(level))
        })
    }
}
