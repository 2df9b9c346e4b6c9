//! The operations, each the one place for its rule.

mod map;
mod rights;
mod split;
mod unmap;

pub use map::MapError;
pub use rights::Access;
pub use split::{Batched, Bounded, EveryEntry, SplitError, SplitWalk};
pub use unmap::Removed;

use crate::addr::{GpaRange, PageSize, RangeError};
use crate::format::{Format, Kind};
use crate::platform::Platform;
use crate::tables::Tables;
use core::fmt;

/// Why the leaves of a range were not changed or removed, or not all of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ChangeError {
    /// The range of guest addresses is not one that these tables can have.
    Range(RangeError),
    /// The range ends inside a block.
    CutsBlock {
        /// The size of the block.
        size: PageSize,
    },
    /// Somebody else held an entry for too long.
    Contended,
}

impl fmt::Display for ChangeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Range(error) => error.fmt(f),
            Self::CutsBlock { size } => {
                write!(f, "the range cuts through a {size} block; split it first, or cover it")
            }
            Self::Contended => {
                f.write_str("an entry is being changed by somebody else; go on from there")
            }
        }
    }
}

impl core::error::Error for ChangeError {}

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
