//! The dirty log: which pages the guest has written since they were last cleared.
//!
//! # Invariant
//! With [`Logging::Protect`]: if the guest may write a page of a memslot that logs, the page is
//! dirty in the log, or the fault that made it writable is about to set its bit.
//! 1. A fault first makes the leaf writable, and then sets the bit.
//! 2. A clear first takes the bit, then the right to write, and completes the TLB invalidation
//!    before it returns.
//!
//! So whichever of fault and clear is the last to change the leaf, no page stays writable without
//! its bit. If a clear did not see the bit of a write, a copy made after the clear has the write.
//!
//! With [`Logging::Hardware`]: a page whose leaf is not marked dirty was not written since the log
//! was last read; blocks are not writable. A read moves the marks into the bitmap, where they stay
//! until they are cleared, so that a migration that fails loses none.
//!
//! In the last round of a migration the log is read after the last fault has returned, while the
//! vCPUs are stopped.

mod begin;
mod buffers;
mod clear;
mod read;
mod reset;

pub use buffers::{PML_ENTRIES, hdbss_addresses, pml_addresses};
pub use clear::ClearCounts;

use crate::backing::Backing;
use crate::host::Host;
use crate::memslots::spec::MemslotId;
use crate::worker::Worker;
use core::fmt;
use slat::{ChangeError, Format, Gpa, GpaRange, SplitError};

/// Why a log was not read or cleared, or only in part.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum LogError {
    /// There is no such memslot, or it does not log.
    Missing {
        /// The memslot.
        id: MemslotId,
    },
    /// [`Worker::set_memslot`] is beginning the memslot's log.
    Beginning {
        /// The memslot.
        id: MemslotId,
    },
    /// The bitmap is too short.
    Bitmap {
        /// The number of words needed.
        needed: usize,
        /// The number of words given.
        given: usize,
    },
    /// The pages to be cleared do not begin at a multiple of 64, or end neither at one nor at the
    /// end of the memslot.
    Unaligned,
    /// The pages reach beyond the memslot.
    Beyond {
        /// The number of pages of the memslot.
        pages: u64,
    },
    /// Another thread held an entry for too long. Everything before its table is done; no mark is
    /// lost.
    Contended {
        /// The address at which the operation stopped.
        at: Gpa,
    },
    /// The tables refuse to change a leaf; waiting does not help. No mark is lost.
    Change {
        /// The address at which the operation stopped.
        at: Gpa,
        /// The reason.
        reason: ChangeError,
    },
    /// The tables refuse to split a leaf.
    Split {
        /// The address at which the operation stopped.
        at: Gpa,
        /// The reason.
        reason: SplitError,
    },
}

impl LogError {
    fn changing(at: Gpa, reason: ChangeError) -> Self {
        match reason {
            ChangeError::Contended => Self::Contended { at },
            reason => Self::Change { at, reason },
        }
    }

    fn splitting(at: Gpa, reason: SplitError) -> Self {
        match reason {
            SplitError::Contended => Self::Contended { at },
            reason => Self::Split { at, reason },
        }
    }
}

impl LogError {
    /// Returns the name of the error that Linux's ioctls return for the same mistake.
    pub const fn errno(&self) -> &'static str {
        match self {
            Self::Missing { .. } => "ENOENT",
            Self::Contended { .. } | Self::Beginning { .. } => "EAGAIN",
            Self::Bitmap { .. } => "EFAULT",
            Self::Unaligned | Self::Beyond { .. } => "EINVAL",
            // Linux has no such error: it waits for the lock, and then cannot fail.
            Self::Change { .. } | Self::Split { .. } => "EIO",
        }
    }
}

impl fmt::Display for LogError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing { id } => write!(f, "memslot {} is not there, or does not log", id.0),
            Self::Beginning { id } => {
                write!(f, "memslot {} begins to log: read it after that", id.0)
            }
            Self::Bitmap { needed, given } => {
                write!(f, "the bitmap has {given} words; the memslot takes {needed}")
            }
            Self::Unaligned => f.write_str(
                "first page and number of pages are multiples of 64, or end with the memslot",
            ),
            Self::Beyond { pages } => write!(f, "the memslot has {pages} pages"),
            Self::Contended { at } => {
                write!(f, "another thread holds the entry of {at}; continue from there")
            }
            Self::Change { at, reason } => {
                write!(f, "the leaf at {at} cannot be changed: {reason}")
            }
            Self::Split { at, reason } => write!(f, "the leaf at {at} cannot be split: {reason}"),
        }
    }
}

impl core::error::Error for LogError {}

impl<F: Format, H: Host, B: Backing> Worker<'_, F, H, B> {
    /// Marks `range` in the log as written, because the host itself wrote it. Parts of the range
    /// that are not in a memslot that logs are ignored.
    pub fn mark_written(&mut self, range: GpaRange) {
        self.look(|view| {
            for (memslot, part) in view.parts(&range) {
                if let Some(log) = &memslot.log {
                    log.mark::<F>(&memslot.spec, part.start().0, part.size());
                }
            }
        });
    }
}
