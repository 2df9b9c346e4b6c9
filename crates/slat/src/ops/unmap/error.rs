//! The errors of an unmap.

use crate::addr::{PageSize, RangeError};
use crate::ops::{ChangeError, Refusal};
use core::fmt;

/// Reason why a range was not unmapped, or not all of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum UnmapError {
    /// The range of guest addresses is not one that these tables can have.
    Range(RangeError),
    /// The range ends inside a block.
    CutsBlock {
        /// The size of the block.
        size: PageSize,
    },
    /// The batch has no room for another leaf.
    Full,
    /// The batch belongs to other tables.
    ForeignBatch,
    /// Another thread held an entry for too long.
    Contended,
}

impl fmt::Display for UnmapError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Range(error) => error.fmt(f),
            Self::CutsBlock { size } => ChangeError::CutsBlock { size: *size }.fmt(f),
            Self::Full => f.write_str("no room for more; complete the batch and go on from there"),
            Self::ForeignBatch => f.write_str("the batch is of other tables"),
            Self::Contended => ChangeError::Contended.fmt(f),
        }
    }
}

impl core::error::Error for UnmapError {}

impl From<Refusal> for UnmapError {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Range(error) => Self::Range(error),
            Refusal::CutsBlock { size } => Self::CutsBlock { size },
        }
    }
}
