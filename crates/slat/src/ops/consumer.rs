//! Consumers of dirty state: each finds the pages written since its last look.
//!
//! # Protocol
//! A leaf has one dirty bit. A consumer has a *mark* in each leaf, one of the software bits: the
//! page was written, others have taken that, and this consumer has not. An exchange that clears the
//! dirty bit, for a consumer or not, also sets the marks of all other consumers (`Take::taken`). A
//! consumer takes leaves that are dirty or have its mark; it clears both.
//!
//! *Invariant*: a page that has neither the dirty bit nor a consumer's mark was not written since
//! an invalidation completed that began after this consumer last took it. Hardware writes without
//! marking only through a TLB entry that is older than the clear of the dirty bit; that clear left
//! the mark, so the consumer found it and took it. Taking a mark owes an invalidation, as clearing
//! the dirty bit does: the invalidation of the thread that cleared it may still be under way.
//!
//! Marks are state, as accessed and dirty are: a split copies them, a collapse merges them, a
//! replaced leaf keeps them, and leaves that differ in nothing else agree. A group has none but
//! those that it was mapped with, the same in all members: harvest and clean unfold it first.

use crate::format::{Attributes, Format, Software};
use crate::guard::Guard;
use crate::platform::Platform;
use crate::tables::Tables;
use core::fmt;

use super::ChangeError;

/// A consumer of dirty state, such as a dirty log or a pager, with its own view of the pages
/// written since it last looked.
///
/// [`Tables::add_consumer`] makes one. [`Guard::harvest_for`] and [`Guard::clean_for`] take written
/// pages for it, and from no other consumer: *a page that a consumer's harvest does not report was
/// not written since that consumer's last harvest or clean of it that has completed*, regardless of
/// other consumers. One thread at a time takes a page for one consumer; any number of consumers
/// take it at once.
///
/// [`Guard::harvest`] and [`Guard::clean`], which name no consumer, take nothing from any consumer,
/// and do not see pages that one has taken.
///
/// The consumer's mark, one of the leaf's software bits, is set when the page was written, and
/// another harvest or clean has taken that. [`Attributes::software`] shows it of a leaf that stands
/// or was taken out, and a leaf that is mapped with it is dirty for this consumer alone: so a page
/// that leaves and comes back stays dirty for the consumers that have not taken it yet.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Consumer {
    mark: Software,
}

impl Consumer {
    /// The consumer's software bit in a leaf.
    pub const fn mark(self) -> Software {
        self.mark
    }

    /// Returns whether a leaf with these attributes was written and this consumer has not taken it:
    /// of a leaf that [`UnmapBatch`](crate::UnmapBatch) hands out, whether the page was written
    /// since this consumer's last harvest or clean of it that has completed.
    pub const fn is_dirty(self, attributes: &Attributes) -> bool {
        attributes.dirty || attributes.software.contains(self.mark)
    }
}

/// Reason why tables did not get another consumer of dirty state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ConsumerError {
    /// A mark is one bit.
    OneBit {
        /// The bits that were given.
        given: Software,
    },
    /// The format has no such software bit, or too few of them.
    NoSuchBit {
        /// The bits that were given.
        given: Software,
        /// Number of software bits of the format ([`Format::SOFTWARE_BITS`]).
        bits: u8,
    },
    /// Another consumer of these tables has this mark.
    Taken {
        /// The bits that were given.
        given: Software,
    },
}

impl fmt::Display for ConsumerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OneBit { given } => {
                write!(f, "a consumer of dirty state has one software bit, not {:#b}", given.bits())
            }
            Self::NoSuchBit { given, bits } => write!(
                f,
                "leaves of this format have {bits} software bits, from number 0 on, and a consumer \
                 of dirty state takes one of them; {:#b} was named",
                given.bits()
            ),
            Self::Taken { given } => {
                write!(
                    f,
                    "another consumer of dirty state has the software bit {:#b}",
                    given.bits()
                )
            }
        }
    }
}

impl core::error::Error for ConsumerError {}

impl<F: Format, P: Platform> Tables<'_, F, P> {
    /// Adds a consumer of dirty state, for as long as the tables live, whose mark is the software
    /// bit `mark`. The bit is the engine's from then on: operations that change or ask for software
    /// bits refuse it ([`ChangeError::Consumers`]). Leaves that have it already are dirty for the
    /// consumer, as all leaves are that are dirty now.
    ///
    /// The exclusive borrow keeps other threads out, as a clean that is under way would not know of
    /// the mark. Invalidations of earlier cleans that have not completed are done first.
    ///
    /// # Errors
    /// [`ConsumerError::OneBit`] if `mark` is not exactly one bit, [`ConsumerError::NoSuchBit`] if
    /// the format has no such software bit, [`ConsumerError::Taken`] if another consumer of these
    /// tables has it: nothing is done.
    pub fn add_consumer(&mut self, mark: Software) -> Result<Consumer, ConsumerError> {
        let given = mark;
        let bits = F::SOFTWARE_BITS;
        if mark.bits().count_ones() != 1 {
            return Err(ConsumerError::OneBit { given });
        }
        let raw = mark.encode(F::SOFTWARE);
        let raw = raw.map_err(|_| ConsumerError::NoSuchBit { given, bits })?;
        if self.marks & raw != 0 {
            return Err(ConsumerError::Taken { given });
        }
        // A page that was cleaned without the mark may still be written unseen.
        if self.pending.cleans.count() != 0 {
            self.complete_all();
        }
        self.marks |= raw;
        Ok(Consumer { mark })
    }

    /// Returns the marks of all consumers of dirty state.
    pub fn consumers(&self) -> Software {
        Software::decode(self.marks, F::SOFTWARE)
    }

    /// Returns the bits of a leaf that are state: accessed, dirty, and the marks of consumers.
    #[inline(always)]
    pub(crate) fn state(&self) -> u64 {
        F::STATUS | self.marks
    }
}

/// The way in which dirty state is taken from a leaf.
#[derive(Clone, Copy)]
pub(super) struct Take<F> {
    format: F,
    /// The mark of the consumer that it is taken for; 0 for none.
    pub(super) mine: u64,
    /// The marks of all others.
    others: u64,
}

impl<F: Format> Take<F> {
    /// Returns the leaf after its dirty state was taken; `raw` itself if there is nothing to take,
    /// or if it stays dirty.
    #[inline(always)]
    pub(super) fn taken(&self, raw: u64) -> u64 {
        let cleaned = self.format.cleaned(raw);
        let clears = raw & F::DIRTY != 0 && cleaned & F::DIRTY == 0;
        cleaned & !self.mine | if clears { self.others } else { 0 }
    }
}

impl<F: Format, P: Platform> Guard<'_, '_, F, P> {
    /// Takes dirty state for no consumer: it stays for all consumers, by their marks.
    #[inline(always)]
    pub(super) fn take(&self) -> Take<F> {
        Take { format: self.tables.format, mine: 0, others: self.tables.marks }
    }

    pub(super) fn take_for(&self, consumer: Consumer) -> Result<Take<F>, ChangeError> {
        let marks = self.tables.marks;
        match consumer.mark.encode(F::SOFTWARE) {
            Ok(mine) if mine & marks != 0 => {
                Ok(Take { mine, others: marks & !mine, ..self.take() })
            }
            _ => Err(ChangeError::ForeignConsumer),
        }
    }
}

#[cfg(all(test, feature = "arm64", not(any(loom, shuttle))))]
mod tests {
    use super::*;
    use crate::format::arm64::Arm64K4;

    const MINE: u64 = 1 << 55;
    const THEIRS: u64 = 1 << 56 | 1 << 59;

    fn take(hardware_dirty: bool) -> Take<Arm64K4> {
        let format = Arm64K4 { hardware_dirty, ..Default::default() };
        Take { format, mine: MINE, others: THEIRS }
    }

    fn leaf(format: &Arm64K4, write: bool, dirty: bool) -> u64 {
        format.encode(Attributes { write, dirty, ..Attributes::RAM }).unwrap()
    }

    #[test]
    fn a_consumer_that_clears_the_dirty_bit_sets_the_marks_of_others_and_takes_its_own() {
        let take = take(true);
        for write in [false, true] {
            let (dirty, clean) =
                (leaf(&take.format, write, true), leaf(&take.format, write, false));
            assert_eq!(take.taken(dirty), clean | THEIRS);
            assert_eq!(take.taken(dirty | MINE), clean | THEIRS);
        }
    }

    #[test]
    fn a_consumer_that_takes_only_its_mark_changes_no_other_mark() {
        let take = take(true);
        let clean = leaf(&take.format, true, false);
        for theirs in [0, 1 << 56, 1 << 59, THEIRS] {
            assert_eq!(take.taken(clean | theirs), clean | theirs);
            assert_eq!(take.taken(clean | MINE | theirs), clean | theirs);
        }
    }

    #[test]
    fn a_leaf_whose_writes_nothing_marks_stays_dirty_for_all() {
        let take = take(false);
        let dirty = leaf(&take.format, true, true);
        assert_eq!(take.taken(dirty), dirty);
        assert_eq!(take.taken(dirty | MINE), dirty);
    }
}
