//! Table pages at hand: the fallible part of an operation, done before it.

use crate::format::Format;
use crate::platform::{Platform, same};
use crate::table::Frame;

/// Table pages that an operation may take, filled by its caller beforehand.
///
/// The storage is the caller's: the engine allocates nothing. Pages that are left over stay in
/// the cache, and go back to the platform when it is dropped.
#[derive(Debug)]
pub struct TableCache<'a, F: Format, P: Platform> {
    platform: &'a P,
    storage: &'a mut [Option<Frame>],
    len: usize,
    format: core::marker::PhantomData<F>,
}

impl<'a, F: Format, P: Platform> TableCache<'a, F, P> {
    /// An empty cache over the caller's storage, whose content is overwritten.
    pub fn new(platform: &'a P, storage: &'a mut [Option<Frame>]) -> Self {
        Self { platform, storage, len: 0, format: core::marker::PhantomData }
    }

    /// Allocates until `pages` are at hand, or the storage is full.
    ///
    /// # Errors
    /// [`OutOfFrames`] says how many are at hand if the platform has no more; they are kept.
    pub fn fill(&mut self, pages: usize) -> Result<(), OutOfFrames> {
        let (before, wanted) = (self.len, pages.min(self.storage.len()));
        while self.len < wanted {
            match self.platform.allocate(F::TABLE_BYTES) {
                Some(frame) => self.put(frame),
                None => break,
            }
        }
        // They are taken from the end, in the order in which they came: ascending, most often,
        // which is what the CPU's prefetchers like.
        self.storage[before..self.len].reverse();
        if self.len < wanted { Err(OutOfFrames { wanted, at_hand: self.len }) } else { Ok(()) }
    }

    /// Table pages at hand.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no page is at hand.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the pages come from `platform`.
    pub(crate) fn serves(&self, platform: &P) -> bool {
        same(self.platform, platform)
    }

    #[inline]
    pub(crate) fn take(&mut self) -> Option<Frame> {
        self.len = self.len.checked_sub(1)?;
        self.storage[self.len].take()
    }

    /// Keeps a table that is not linked yet, by a number of the caller's, counted from 0: where the
    /// storage is free of pages since the table was one of them. Lower numbers are in use, or were
    /// linked: so the pages at hand never reach a place. Kept tables are let go of before the
    /// operation ends, the highest number first.
    #[inline]
    pub(crate) fn keep(&mut self, number: usize, table: Frame) {
        let place = self.storage.len() - 1 - number;
        debug_assert!(place >= self.len, "a page of another cache's is kept");
        self.storage[place] = Some(table);
    }

    /// The tables from 0 on that are kept, or were, so many of them.
    #[inline]
    pub(crate) fn kept(&mut self, count: usize) -> impl Iterator<Item = &mut Option<Frame>> {
        let first = self.storage.len() - count;
        self.storage[first..].iter_mut().rev()
    }

    /// Lets go of a kept table.
    pub(crate) fn let_go(&mut self, number: usize) -> Option<Frame> {
        let place = self.storage.len() - 1 - number;
        self.storage[place].take()
    }

    /// Keeps a page, or gives it back where the storage is full.
    #[inline]
    pub(crate) fn put(&mut self, frame: Frame) {
        match self.storage.get_mut(self.len) {
            Some(place) => {
                *place = Some(frame);
                self.len += 1;
            }
            // SAFETY: `fill` allocated the frame, or the engine took it from such a cache
            // (`serves`), as a page; a table goes into a cache only if it was never linked.
            None => unsafe { self.platform.free(frame, F::TABLE_BYTES) },
        }
    }
}

impl<F: Format, P: Platform> Drop for TableCache<'_, F, P> {
    fn drop(&mut self) {
        while let Some(frame) = self.take() {
            // SAFETY: as in `put`.
            unsafe { self.platform.free(frame, F::TABLE_BYTES) };
        }
    }
}

/// The platform had no more frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OutOfFrames {
    /// Pages asked for.
    pub wanted: usize,
    /// Pages at hand.
    pub at_hand: usize,
}

impl core::fmt::Display for OutOfFrames {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(
            f,
            "the platform has no more table pages: {} of {} at hand",
            self.at_hand, self.wanted
        )
    }
}

impl core::error::Error for OutOfFrames {}
