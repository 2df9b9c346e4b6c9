//! The dirty log: which pages the guest has written since they were last cleared.
//!
//! # Invariant
//! With [`Logging::Protect`]: a page of a slot that logs and that the guest may write is dirty in
//! the log, or is about to be: by the fault that made it writable, which sets the bit *after* that.
//! A clear takes the bit first, then the right to write, and completes the invalidation before it
//! returns. So whichever of the two comes last at the leaf, no writable page is left without its
//! bit; and a write that a clear did not see in the bit is seen by a copy that is made after the
//! clear.
//!
//! With [`Logging::Hardware`]: a page whose leaf is not marked dirty was not written since the log
//! was last read; blocks are not writable. What is read moves into the bitmap, and stays there
//! until it is cleared: a migration that fails has lost nothing.
//!
//! The last round of a migration reads the log after the last fault has returned: vCPUs stand
//! still.

mod begin;
mod buffers;
mod clear;
mod read;
mod reset;

pub use buffers::{PML_ENTRIES, hdbss_addresses, pml_addresses};
pub use clear::Cleared;

use crate::backing::Backing;
use crate::host::Host;
use crate::slots::spec::SlotId;
use crate::worker::Worker;
use core::fmt;
use slat::{ChangeError, Format, Gpa, GpaRange, SplitError};

/// Why a log was not read or cleared, or not all of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum LogError {
    /// There is no such slot, or it does not log.
    Missing {
        /// The slot.
        id: SlotId,
    },
    /// The slot's log is beginning, in pieces ([`Worker::begin_slot`]), and not whole yet.
    Beginning {
        /// The slot.
        id: SlotId,
    },
    /// The bitmap is too short.
    Bitmap {
        /// Words that it takes.
        needed: usize,
        /// Words given.
        given: usize,
    },
    /// The pages to be cleared do not begin and end at a multiple of 64, or the end of the slot.
    Unaligned,
    /// They reach beyond the slot.
    Beyond {
        /// Pages of the slot.
        pages: u64,
    },
    /// Somebody held an entry for too long. Everything before it is done; nothing is lost.
    Contended {
        /// The first page that is not done.
        at: Gpa,
    },
    /// The tables refuse to change a leaf; to wait does not help. Nothing is lost.
    Change {
        /// The first page that is not done.
        at: Gpa,
        /// Why.
        why: ChangeError,
    },
    /// They refuse to split one.
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
    /// The error of Linux's ioctls for the same mistake.
    pub const fn errno(&self) -> &'static str {
        match self {
            Self::Missing { .. } => "ENOENT",
            Self::Contended { .. } | Self::Beginning { .. } => "EAGAIN",
            Self::Bitmap { .. } => "EFAULT",
            Self::Unaligned | Self::Beyond { .. } => "EINVAL",
            // Linux has nothing of the kind: it sleeps until it has the lock, and then cannot fail.
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
    /// Says that the host itself wrote `range` of the guest's memory, so that the log has it too;
    /// what is not in a slot that logs is left out.
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
