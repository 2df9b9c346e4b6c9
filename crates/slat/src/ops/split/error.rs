//! Reasons why a split or a collapse ends early.

use crate::addr::{LeafSizeError, RangeError};
use crate::ops::ChangeError;
use core::fmt;

/// Reason why a range was not split, or not all of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum SplitError {
    /// The range of guest addresses is not one that these tables can have.
    Range(RangeError),
    /// The format has no leaf of that size.
    LeafSize(LeafSizeError),
    /// The cache was filled from another platform.
    ForeignCache,
    /// The cache ran out of table pages.
    CacheEmpty,
    /// Another thread held an entry for too long.
    Contended,
    /// A device walks the tables, and takes the engine's mark for another bit: leaves cannot be
    /// held while they are put together ([`Format::marks_valid`](crate::Format::marks_valid)).
    /// Collapse only.
    Shared,
}

impl fmt::Display for SplitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Range(error) => error.fmt(f),
            Self::LeafSize(error) => error.fmt(f),
            Self::ForeignCache => f.write_str("the cache's table pages are another platform's"),
            Self::CacheEmpty => {
                f.write_str("the table cache is empty; refill it and continue from this address")
            }
            Self::Contended => ChangeError::Contended.fmt(f),
            Self::Shared => {
                f.write_str("a device walks these tables: none of them can become a block")
            }
        }
    }
}

impl core::error::Error for SplitError {}
