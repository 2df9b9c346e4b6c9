//! The dirty log: which pages the guest has written since they were last cleared.
//!
//! # Invariant
//! With [`Logging::Protect`]: a page of a slot that logs and that the guest may write is dirty in the
//! log, or is about to be: by the fault that made it writable, which sets the bit *after* that.
//! A clear takes the bit first, then the right to write, and completes the invalidation before it
//! returns. So whichever of the two comes last at the leaf, no writable page is left without its bit;
//! and a write that a clear did not see in the bit is seen by a copy that is made after the clear.
//!
//! With [`Logging::Hardware`]: a page whose leaf is not marked dirty was not written since the log was
//! last read; blocks are not writable. What is read moves into the bitmap, and stays there until it is
//! cleared: a migration that fails has lost nothing.
//!
//! The last round of a migration reads the log after the last fault has returned: vCPUs stand still.

/// How often a call tries an entry that somebody holds, before it says so.
const PATIENCE: u32 = 1000;

mod change;
mod clear;
mod read;

pub(crate) use clear::Clear;
pub use clear::Cleared;

use crate::slots::{SlotId, SlotSpec};
use crate::sync::{AtomicU64, Ordering};
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::fmt;
use slat::{Format, Gpa, PageSize};

/// Why a log was not read or cleared, or not all of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum LogError {
    /// There is no such slot, or it does not log.
    Missing {
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
}

impl LogError {
    /// The error of Linux's ioctls for the same mistake.
    pub const fn errno(&self) -> &'static str {
        match self {
            Self::Missing { .. } => "ENOENT",
            Self::Contended { .. } => "EAGAIN",
            Self::Bitmap { .. } => "EFAULT",
            Self::Unaligned | Self::Beyond { .. } => "EINVAL",
        }
    }
}

impl fmt::Display for LogError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing { id } => write!(f, "slot {} is not there, or does not log", id.0),
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
        }
    }
}

impl core::error::Error for LogError {}

/// The log of one slot: a bit a page.
#[derive(Debug)]
pub(crate) struct Log {
    words: Box<[AtomicU64]>,
}

impl Log {
    /// A log of `pages`, all dirty or none; `None` if memory is short.
    pub fn new(pages: u64, dirty: bool) -> Option<Self> {
        let len = pages.div_ceil(64) as usize;
        let mut words = Vec::new();
        words.try_reserve_exact(len).ok()?;
        let all = if dirty { u64::MAX } else { 0 };
        words.extend((0..len).map(|word| {
            let rest = pages - 64 * word as u64;
            AtomicU64::new(if rest >= 64 { all } else { all & ((1 << rest) - 1) })
        }));
        Some(Self { words: words.into_boxed_slice() })
    }

    pub fn words(&self) -> &[AtomicU64] {
        &self.words
    }

    /// Says that the pages in `gpa..gpa + bytes` were written.
    pub fn mark<F: Format>(&self, slot: &SlotSpec, gpa: u64, bytes: u64) {
        debug_assert!(
            gpa >= slot.gpa.0 && gpa + bytes <= slot.gpa.0 + slot.bytes,
            "beyond the slot"
        );
        let first = (gpa - slot.gpa.0) >> F::PAGE_SHIFT;
        let end = (gpa + bytes - slot.gpa.0).div_ceil(1 << F::PAGE_SHIFT);
        let mut page = first;
        while page < end {
            let (word, bit) = ((page / 64) as usize, page % 64);
            let count = (64 - bit).min(end - page);
            let mask = (u64::MAX >> (64 - count)) << bit;
            self.add(word, mask);
            page += count;
        }
    }

    /// Adds bits.
    pub fn add(&self, word: usize, mask: u64) {
        if mask != 0 {
            self.words[word].fetch_or(mask, Ordering::AcqRel);
        }
    }

    /// Takes those bits of `mask` that are there.
    pub fn take(&self, word: usize, mask: u64) -> u64 {
        if mask == 0 || self.words[word].load(Ordering::Acquire) & mask == 0 {
            return 0;
        }
        self.words[word].fetch_and(!mask, Ordering::AcqRel) & mask
    }
}

/// Pages of a slot.
pub(crate) fn pages(slot: &SlotSpec, page: PageSize) -> u64 {
    slot.bytes >> page.shift()
}
