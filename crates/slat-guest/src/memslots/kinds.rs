//! The kinds of a memslot's pages, and which pages are being converted.
//!
//! # Protocol
//! A thread that converts pages
//! 1. marks the pages as changing;
//! 2. empties their leaves and reservations;
//! 3. waits until all threads that were inside the guest's tables have left;
//! 4. changes the pages' kind;
//! 5. removes the mark.
//!
//! One thread at a time converts, under the lock for changes of memslots. A fault reserves its
//! entry, then reads the pages' kind, then asks the backing, then commits.
//!
//! *Invariant*: the kind of a leaf is the kind of its pages, as [`Kinds::of`] returns it before the
//! kind changes; all of its pages are of one kind.
//! - A fault that reserves before step 2 walks over the entry loses its reservation, and its commit
//!   fails. A fault that reserves after that sees that the pages are changing (`agreed`), and maps
//!   nothing.
//! - No thread that saw the old kind is inside the tables when the kind changes. So a thread that
//!   reads the kind inside the tables (invalidations by the host, ageing, splits, collapses) leaves
//!   before the change, and works only on leaves of that kind.
//! - A thread that enters while the kind changes sees that the pages are changing: it reads that
//!   mark first.

use crate::bits::{Bits, each_word};
use crate::memslots::spec::MemslotSpec;
use crate::private::MemoryKind;
use core::marker::PhantomData;
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

    /// Returns the kind of all pages of `range`; `None` if they differ, or are changing.
    pub fn of<F: Format>(&self, spec: &MemslotSpec, range: &GpaRange) -> Option<MemoryKind> {
        let (mut changing, mut private, mut shared) = (0, 0, 0);
        let (start, bytes) = (range.start().0, range.size());
        // The order matters: see the invariant.
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

    /// Returns the first page from `from` on, before `end`, that is of `kind`; `end` if there is
    /// none.
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

    /// Marks the pages as changing until the result is dropped.
    pub fn changing<F: Format>(
        &self,
        spec: &MemslotSpec,
        range: &GpaRange,
    ) -> KindConversion<'_, F> {
        let mark = |word, mask| self.changing.add(word, mask);
        each_word::<F>(spec, range.start().0, range.size(), mark);
        KindConversion { kinds: self, spec: *spec, range: *range, format: PhantomData }
    }

    /// Sets the kind of the pages.
    pub fn set<F: Format>(&self, spec: &MemslotSpec, range: &GpaRange, kind: MemoryKind) {
        each_word::<F>(spec, range.start().0, range.size(), |word, mask| match kind {
            MemoryKind::Private => self.private.add(word, mask),
            MemoryKind::Shared => _ = self.private.swap_out(word, mask),
        });
    }
}

/// Pages that are being converted. Dropped, also by a panic, it removes their mark.
pub(crate) struct KindConversion<'k, F: Format> {
    kinds: &'k Kinds,
    spec: MemslotSpec,
    range: GpaRange,
    format: PhantomData<F>,
}

impl<F: Format> Drop for KindConversion<'_, F> {
    fn drop(&mut self) {
        let (start, bytes) = (self.range.start().0, self.range.size());
        each_word::<F>(&self.spec, start, bytes, |word, mask| {
            self.kinds.changing.swap_out(word, mask);
        });
    }
}
