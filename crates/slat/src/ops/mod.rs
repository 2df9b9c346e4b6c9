//! The operations on tables. Each operation's rules are implemented in its module only.

mod age;
#[cfg(feature = "baselines")]
mod baselines;
mod collapse;
mod dirty;
mod discard;
mod map;
mod owner;
mod pages;
mod prune;
mod query;
mod replace;
mod replace_table;
mod reserve;
mod rights;
mod rules;
mod split;
mod unfold;
mod unloaded;
mod unmap;
mod unmap_batch;
mod vacate;

#[cfg(feature = "baselines")]
pub use self::{
    baselines::*,
    split::{BatchedSplit, SplitWalk},
};
pub use age::{AgeBitmaps, AgeCounts, AgeOptions, TableBits};
pub use map::MapError;
pub(crate) use map::{agrees, maintenance};
pub use owner::OwnerError;
pub use pages::Pages;
pub use query::{Dump, Leaf, Leaves};
pub use replace::ReplaceError;
pub use reserve::Reservation;
pub use rights::Relax;
pub(crate) use rights::leaf_bits;
pub(crate) use rules::{Exactly, Rule, SoftwareBitsRule};
pub use split::SplitError;
pub use unmap::UnmapError;
pub use unmap_batch::{UnmapBatch, UnmapEntry, UnmappedRun};

use crate::addr::{GpaRange, PageSize, RangeError};
use crate::format::{AttributeError, Format, Kind, TOKEN_BITS};
use crate::platform::Platform;
use crate::tables::{Found, Tables};
use core::fmt;

/// Reason why the leaves of a range were not changed, or not all of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ChangeError {
    /// The range of guest addresses is not one that these tables can have.
    Range(RangeError),
    /// The range ends inside a block.
    CutsBlock {
        /// The size of the block.
        size: PageSize,
    },
    /// A bitmap has too few bits for the range.
    Bitmap {
        /// Words that the range needs.
        needed: usize,
        /// Words given.
        given: usize,
    },
    /// The format, as configured, has no leaf with these rights, or software bits.
    Attributes(AttributeError),
    /// The format, as configured, does not record which pages were used.
    NotRecorded,
    /// Another thread held an entry for too long.
    Contended,
}

impl fmt::Display for ChangeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Range(error) => error.fmt(f),
            Self::CutsBlock { size } => {
                write!(f, "the range cuts through a {size} block; split it first, or cover it")
            }
            Self::Bitmap { needed, given } => {
                write!(f, "the bitmap has {given} words; the range needs {needed}")
            }
            Self::Attributes(error) => error.fmt(f),
            Self::NotRecorded => f.write_str(
                "nothing records what the guest uses: hardware does not mark it, nor fault",
            ),
            Self::Contended => {
                f.write_str("another thread is changing the entry; continue from this address")
            }
        }
    }
}

impl core::error::Error for ChangeError {}

/// The owner of an address where nothing is mapped: a word of [`Owner::BITS`] bits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Owner(u64);

impl Owner {
    /// Number of bits of a word.
    pub const BITS: u32 = TOKEN_BITS;

    /// Returns the owner with this word; `None` if the word has more than [`Owner::BITS`] bits.
    pub const fn new(word: u64) -> Option<Self> {
        if word >> Self::BITS == 0 { Some(Self(word)) } else { None }
    }

    /// Returns the word.
    pub const fn word(self) -> u64 {
        self.0
    }

    /// Returns the owner in an entry of [`Kind::Owned`].
    #[inline(always)]
    pub(crate) fn of<F: Format>(raw: u64) -> Self {
        Self(F::owner(raw))
    }
}

/// Returns the owner in an entry that translates nothing.
#[inline(always)]
fn owner<F: Format>(kind: Kind, raw: u64) -> Option<Owner> {
    (kind == Kind::Owned).then(|| Owner::of::<F>(raw))
}

/// Reason to refuse any change of the leaves of a range.
pub(crate) enum Refusal {
    Range(RangeError),
    CutsBlock { size: PageSize },
}

impl From<Refusal> for ChangeError {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Range(error) => Self::Range(error),
            Refusal::CutsBlock { size } => Self::CutsBlock { size },
        }
    }
}

impl<F: Format, P: Platform> Tables<'_, F, P> {
    /// Returns the size of a block that an end of `range` cuts, if it is `refused`: operations that
    /// cannot split refuse it before they change anything.
    fn cut_block(&self, range: &GpaRange, refused: impl Fn(&Found) -> bool) -> Option<PageSize> {
        let (start, end) = (range.start().0, range.end().0);
        for edge in [start, end] {
            // An edge that is a multiple of the largest leaf cuts nothing.
            if edge & (F::size(F::LARGEST_LEAF).bytes() - 1) == 0 {
                continue;
            }
            // The walk waits for a table that is being unlinked, and finds a block in its place.
            let found = self.lookup_at_once(edge);
            let Found { raw, level, .. } = found;
            if level == 0 && (start ^ (end - 1)) >> F::shift(1) == 0 {
                // The whole range is in one table of pages.
                return None;
            }
            let leaf = matches!(F::kind(raw, level), Kind::Leaf | Kind::Sealed);
            if leaf && edge & (F::size(level).bytes() - 1) != 0 && refused(&found) {
                return Some(F::size(level));
            }
        }
        None
    }

    /// As [`Tables::check_change`], but for a range of one page leaves the cut block to the walk: a
    /// page cannot be half done, and the walk finds that block itself.
    #[inline(always)]
    fn check_change_of_many(&self, range: &GpaRange) -> Result<(), Refusal> {
        if range.size() == 1 << F::PAGE_SHIFT {
            return self.check(range).map_err(Refusal::Range);
        }
        self.check_change(range)
    }

    /// Refuses a bitmap that is too short for the pages of `range`.
    fn check_bitmap(&self, range: &GpaRange, given: usize) -> Result<(), ChangeError> {
        let needed = (range.size() >> F::PAGE_SHIFT).div_ceil(64) as usize;
        if given < needed { Err(ChangeError::Bitmap { needed, given }) } else { Ok(()) }
    }

    /// Refuses a range that is invalid, or that cuts a block, before any leaf is changed.
    #[inline(always)]
    fn check_change(&self, range: &GpaRange) -> Result<(), Refusal> {
        self.check_change_where(range, |_| true)
    }

    /// As [`Tables::check_change`], for blocks that are `refused` only.
    #[inline(always)]
    fn check_change_where(
        &self,
        range: &GpaRange,
        refused: impl Fn(&Found) -> bool,
    ) -> Result<(), Refusal> {
        self.check(range).map_err(Refusal::Range)?;
        match self.cut_block(range, refused) {
            Some(size) => Err(Refusal::CutsBlock { size }),
            None => Ok(()),
        }
    }
}
