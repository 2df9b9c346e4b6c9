//! The kinds of a memslot's pages, and which pages are being converted.
//!
//! # Protocol
//! A conversion marks the pages as changing, empties their leaves and reservations, waits until all
//! threads that were inside the guest's tables have left, changes the pages' kind, and removes the
//! mark. One thread at a time converts, under the lock under which memslots change. A fault
//! reserves its entry, then looks at the pages' kind, then asks the backing, then commits.
//!
//! *Invariant*: a leaf is of the kind of its pages, as [`Kinds::of`] has it before the kind is
//! changed; all of its pages are of one kind.
//! - A fault that reserves before the conversion's walk comes by loses its reservation, and its
//!   commit fails. One that reserves after it sees pages that change (`agreed`), and maps nothing.
//! - No thread that saw the old kind is inside the tables when the kind changes. So a thread that
//!   looks at the kind inside the tables (invalidations from the host's side, ageing, splits,
//!   collapses) has left when it changes, and works on leaves of that kind alone.
//! - A thread that enters while the kind is changed sees the pages change: it looks at that mark
//!   first.

use crate::bits::{Bits, each_word};
use crate::memslots::spec::MemslotSpec;
use crate::private::MemoryKind;
use slat::{Format, GpaRange};

/// The kinds of a memslot's pages.
#[derive(Debug)]
pub(crate) struct Kinds {
    private: Bits,
    changing: Bits,
}

impl Kinds {
    /// Makes all pages shared; `None` if memory is short.
    pub fn new(pages: u64) -> Option<Self> {
        Some(Self { private: Bits::new(pages, false)?, changing: Bits::new(pages, false)? })
    }

    /// The kind of all pages of `range`; `None` if they differ, or are changing.
    pub fn of<F: Format>(&self, spec: &MemslotSpec, range: &GpaRange) -> Option<MemoryKind> {
        let (mut changing, mut private, mut shared) = (0, 0, 0);
        let (start, bytes) = (range.start().0, range.size());
        // In this order: see the invariant.
        each_word::<F>(spec, start, bytes, |word, mask| changing |= self.changing.get(word, mask));
        each_word::<F>(spec, start, bytes, |word, mask| {
            let bits = self.private.get(word, mask);
            private |= bits;
            shared |= bits ^ mask;
        });
        match (changing, private, shared) {
            (0, 0, _) => Some(MemoryKind::Shared),
            (0, _, 0) => Some(MemoryKind::Private),
            _ => None,
        }
    }

    /// The first page from `from` on, before `end`, that is of `kind`; `end` if none is.
    pub fn find(&self, from: u64, end: u64, kind: MemoryKind) -> u64 {
        let mut page = from;
        while page < end {
            let bits = self.private.get((page / 64) as usize, u64::MAX);
            let bits = if kind == MemoryKind::Private { bits } else { !bits };
            match bits >> (page % 64) {
                0 => page = (page / 64 + 1) * 64,
                rest => return (page + u64::from(rest.trailing_zeros())).min(end),
            }
        }
        end
    }

    /// Marks the pages as changing, or removes the mark.
    pub fn change<F: Format>(&self, spec: &MemslotSpec, range: &GpaRange, changing: bool) {
        each_word::<F>(spec, range.start().0, range.size(), |word, mask| match changing {
            true => self.changing.add(word, mask),
            false => _ = self.changing.take(word, mask),
        });
    }

    /// Sets the kind of the pages.
    pub fn set<F: Format>(&self, spec: &MemslotSpec, range: &GpaRange, kind: MemoryKind) {
        each_word::<F>(spec, range.start().0, range.size(), |word, mask| match kind {
            MemoryKind::Private => self.private.add(word, mask),
            MemoryKind::Shared => _ = self.private.take(word, mask),
        });
    }
}
