//! The dirty log: which pages the guest has written since they were last cleared.
//!
//! # Invariant
//! With [`Logging::Protect`]: a page of a memslot that logs and that the guest may write is dirty
//! in the log, or the fault that made it writable is about to set its bit, which it does *after*
//! that. A clear takes the bit first, then the right to write, and completes the invalidation
//! before it returns. So whichever of fault and clear comes last at the leaf, no writable page is
//! left without its bit; and a write whose bit a clear did not see is in a copy that is made after
//! the clear.
//!
//! With [`Logging::Hardware`]: a page whose leaf is not marked dirty was not written since the log
//! was last read; blocks are not writable. A read moves the marks into the bitmap, where they stay
//! until they are cleared: a migration that fails loses none.
//!
//! In the last round of a migration the log is read after the last fault has returned, while the
//! vCPUs stand still.

mod begin;
mod buffers;
mod clear;
mod read;
mod reset;

pub use buffers::{PML_ENTRIES, hdbss_addresses, pml_addresses};
pub use clear::Cleared;

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
    /// The memslot's log is beginning, in pieces ([`Worker::begin_memslot`]), and not complete yet.
    Beginning {
        /// The memslot.
        id: MemslotId,
    },
    /// The bitmap is too short.
    Bitmap {
        /// Words needed.
        needed: usize,
        /// Words given.
        given: usize,
    },
    /// The pages to be cleared do not begin and end at a multiple of 64, or at the end of the
    /// memslot.
    Unaligned,
    /// The pages reach beyond the memslot.
    Beyond {
        /// Pages of the memslot.
        pages: u64,
    },
    /// Another thread held an entry for too long. Everything before it is done; nothing is lost.
    Contended {
        /// The first page that is not done.
        at: Gpa,
    },
    /// The tables refuse to change a leaf; waiting does not help. Nothing is lost.
    Change {
        /// The first page that is not done.
        at: Gpa,
        /// Why.
        why: ChangeError,
    },
    /// The tables refuse to split a leaf.
    Split {
        /// The first page that is not done.
        at: Gpa,
        /// Why.
        why: SplitError,
    },
}

impl LogError {
    fn changing(at: Gpa, why: ChangeError) -> Self {
        match why {
            ChangeError::Contended => Self::Contended { at },
            why => Self::Change { at, why },
        }
    }

    fn splitting(at: Gpa, why: SplitError) -> Self {
        match why {
            SplitError::Contended => Self::Contended { at },
            why => Self::Split { at, why },
        }
    }
}

impl LogError {
    /// The error with which Linux's ioctls answer the same mistake.
    pub const fn errno(&self) -> &'static str {
        match self {
            Self::Missing { .. } => "ENOENT",
            Self::Contended { .. } | Self::Beginning { .. } => "EAGAIN",
            Self::Bitmap { .. } => "EFAULT",
            Self::Unaligned | Self::Beyond { .. } => "EINVAL",
            // Linux has no such error: it sleeps until it has the lock, and then cannot fail.
            Self::Change { .. } | Self::Split { .. } => "EIO",
        }
    }
}

impl fmt::Display for LogError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing { id } => write!(f, "slot {} is not there, or does not log", id.0),
            Self::Beginning { id } => {
                write!(f, "slot {} begins to log: run that to its end first", id.0)
            }
            Self::Bitmap { needed, given } => {
                write!(f, "the bitmap has {given} words; the slot takes {needed}")
            }
            Self::Unaligned => f.write_str(
                "the first page and the number of pages are multiples of 64, or end with the slot",
            ),
            Self::Beyond { pages } => write!(f, "the slot has {pages} pages"),
            Self::Contended { at } => {
                write!(f, "the entry of {at} is held by somebody else; go on from there")
            }
            Self::Change { at, why } => write!(f, "the leaf at {at} cannot be changed: {why}"),
            Self::Split { at, why } => write!(f, "the leaf at {at} cannot be split: {why}"),
        }
    }
}

impl core::error::Error for LogError {}

impl<F: Format, H: Host, B: Backing> Worker<'_, F, H, B> {
    /// Marks `range` in the log as written, because the host itself wrote it. What is not in a
    /// memslot that logs is left out.
    pub fn mark_written(&mut self, range: GpaRange) {
        self.look(|view| {
            for (slot, part) in view.parts(&range) {
                if let Some(log) = &slot.log {
                    log.mark::<F>(&slot.spec, part.start().0, part.size());
                }
            }
        });
    }
}
