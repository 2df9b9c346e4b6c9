//! Errors of calls that did not do all that they were asked for.

use crate::addr::Gpa;
use crate::format::GeometryError;
use core::fmt;

/// An operation that stopped before the end of its range.
///
/// Everything before `at` is done, unless the operation's `# Errors` say that nothing is. The guard
/// has counted what was done. From `at` on no translation, right or state has changed; but a table
/// without leaves may have been linked, and a split beside other threads, or beside a guest that
/// used a block meanwhile, may have split blocks further on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Interruption<E> {
    /// The address where it stopped.
    pub at: Gpa,
    /// The reason.
    pub reason: E,
}

impl<E: fmt::Display> fmt::Display for Interruption<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stopped at {}: {}", self.at, self.reason)
    }
}

impl<E: fmt::Debug + fmt::Display> core::error::Error for Interruption<E> {}

/// Reason why tables could not be made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum NewError {
    /// The format cannot translate addresses of that width.
    Geometry(GeometryError),
    /// The platform has no frame for the root.
    OutOfFrames {
        /// Bytes, and alignment, of the root.
        bytes: usize,
    },
}

impl fmt::Display for NewError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Geometry(error) => error.fmt(f),
            Self::OutOfFrames { bytes } => {
                write!(
                    f,
                    "the platform has no {bytes} contiguous, aligned bytes for the root table"
                )
            }
        }
    }
}

impl core::error::Error for NewError {}

/// Another thread held the entry of that address for too long; the caller can try again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Contention {
    /// The address.
    pub at: Gpa,
}

impl fmt::Display for Contention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the entry of {} is being changed; try again", self.at)
    }
}

impl core::error::Error for Contention {}
