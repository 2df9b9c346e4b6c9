//! Table pages that a caller allocates before an operation, so that the operation cannot run out
//! half way through a step.

use crate::format::Format;
use crate::platform::{Platform, same};
use crate::table::Frame;
#[cfg(any(feature = "alloc", all(feature = "std", any(unix, windows))))]
use alloc::boxed::Box;
use core::fmt;
use core::marker::PhantomData;
use core::ptr::NonNull;

/// A borrowed closure. A reference to a trait object would make the cache invariant in its
/// lifetime, so that two caches with different lives would no longer be of one type.
struct Source<'a> {
    call: unsafe fn(NonNull<()>) -> Option<Frame>,
    state: NonNull<()>,
    borrow: PhantomData<&'a mut ()>,
}

// SAFETY: the closure may be called on any thread (`new`), and a shared reference calls nothing.
unsafe impl Send for Source<'_> {}
// SAFETY: as above.
unsafe impl Sync for Source<'_> {}

impl<'a> Source<'a> {
    fn new<S: FnMut() -> Option<Frame> + Send>(source: &'a mut S) -> Self {
        /// # Safety
        /// `state` is a closure `S` that nothing else uses.
        unsafe fn call<S: FnMut() -> Option<Frame>>(state: NonNull<()>) -> Option<Frame> {
            // SAFETY: the caller's contract.
            unsafe { state.cast::<S>().as_mut()() }
        }
        Self { call: call::<S>, state: NonNull::from(source).cast(), borrow: PhantomData }
    }
}

/// Table pages that an operation may take; its caller fills the cache beforehand.
///
/// The caller provides the storage ([`TableCache::new`]), as the engine allocates nothing. With the
/// feature `alloc`, [`TableCache::with_capacity`] and [`TableCache::filled`] make a cache that owns
/// it. Pages that are left over
/// stay in the cache, and go back to the platform when it is dropped.
pub struct TableCache<'a, F: Format, P: Platform> {
    platform: &'a P,
    storage: &'a mut [Option<Frame>],
    len: usize,
    /// The number of tables that are kept at the end of the storage.
    kept: usize,
    /// Asked for a page when the cache has none.
    source: Option<Source<'a>>,
    /// Gives the storage back, if the cache owns it.
    release: Option<unsafe fn(*mut [Option<Frame>])>,
    format: PhantomData<F>,
}

impl<'a, F: Format, P: Platform> TableCache<'a, F, P> {
    /// Makes an empty cache over the caller's storage, whose content is overwritten.
    pub fn new(platform: &'a P, storage: &'a mut [Option<Frame>]) -> Self {
        let format = PhantomData;
        Self { platform, storage, len: 0, kept: 0, source: None, release: None, format }
    }

    /// Makes an empty cache that asks `source` for a page whenever an operation needs one and the
    /// cache has none: for a hypervisor that has a cache of its own, which it fills before it takes
    /// locks. If the source has none, the operation ends as with an empty cache. The storage holds
    /// tables that a split has filled and not linked yet, and pages that were not linked after all.
    ///
    /// # Safety
    /// The source returns frames as [`Platform::allocate`] of this platform does for
    /// `F::TABLE_BYTES`, and all of their bytes are 0. [`Platform::free`] may be called for them.
    pub unsafe fn asking<S: FnMut() -> Option<Frame> + Send>(
        platform: &'a P,
        storage: &'a mut [Option<Frame>],
        source: &'a mut S,
    ) -> Self {
        let mut this = Self::new(platform, storage);
        this.source = Some(Source::new(source));
        this
    }

    /// Allocates table pages until the cache has `pages` of them, or the storage is full.
    ///
    /// # Errors
    /// [`OutOfFrames`] if the platform has no more; it says how many the cache has, and they stay
    /// in it.
    pub fn fill(&mut self, pages: usize) -> Result<(), OutOfFrames> {
        let (before, wanted) = (self.len, pages.min(self.storage.len()));
        while self.len < wanted {
            match self.platform.allocate(F::TABLE_BYTES) {
                Some(frame) => self.put(frame),
                None => break,
            }
        }
        // Pages are taken from the end. Reversed, they are taken in the order in which they were
        // allocated, most often ascending, which suits the CPU's prefetchers.
        self.storage[before..self.len].reverse();
        if self.len < wanted { Err(OutOfFrames { wanted, available: self.len }) } else { Ok(()) }
    }

    /// Returns the number of table pages in the cache.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the cache has no page.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns whether the pages come from `platform`.
    pub(crate) fn serves(&self, platform: &P) -> bool {
        same(self.platform, platform)
    }

    #[inline]
    pub(crate) fn take(&mut self) -> Option<Frame> {
        if self.len == 0 { self.ask() } else { self.pop() }
    }

    #[inline]
    fn pop(&mut self) -> Option<Frame> {
        self.len = self.len.checked_sub(1)?;
        self.storage[self.len].take()
    }

    /// Takes a page whose entries are 0, for a table at `level`.
    pub(crate) fn take_empty(&mut self, level: u8) -> Option<Frame> {
        if self.len == 0 {
            return self.ask();
        }
        let mut frame = self.pop()?;
        self.platform.fill(frame.entries_mut::<F>(self.platform, level), 0, 0);
        Some(frame)
    }

    /// Asks the source for a page, if there is a place where a split could keep its table.
    #[cold]
    fn ask(&mut self) -> Option<Frame> {
        let source = self.source.as_mut().filter(|_| self.kept < self.storage.len())?;
        // SAFETY: the source that `call` was made for lives as long as the cache, and is borrowed
        // by it alone.
        unsafe { (source.call)(source.state) }
    }

    /// Keeps a table that is not linked yet, under a number of the caller's, counted from 0. It
    /// goes into the last places of the storage, which are free since the table was taken from the
    /// cache. The caller uses the numbers in order, so pages in the cache never reach such a place.
    /// It removes all kept tables before the operation ends, the highest number first.
    #[inline]
    pub(crate) fn keep(&mut self, number: usize, table: Frame) {
        let place = self.storage.len() - 1 - number;
        debug_assert!(place >= self.len, "a page of another cache's is kept");
        self.storage[place] = Some(table);
        self.kept = number + 1;
    }

    /// Notes that the caller has taken all kept tables out of their places.
    #[inline]
    pub(crate) const fn none_kept(&mut self) {
        self.kept = 0;
    }

    /// Returns the places of the first `count` kept tables, from number 0 on.
    #[inline]
    pub(crate) fn kept(&mut self, count: usize) -> impl Iterator<Item = &mut Option<Frame>> {
        let first = self.storage.len() - count;
        self.storage[first..].iter_mut().rev()
    }

    /// Removes a kept table from its place.
    pub(crate) fn release(&mut self, number: usize) -> Option<Frame> {
        let place = self.storage.len() - 1 - number;
        self.kept = number;
        self.storage[place].take()
    }

    /// Adds a page to the cache, or gives it back to the platform where the storage is full.
    #[inline]
    pub(crate) fn put(&mut self, frame: Frame) {
        let places = self.storage.len() - self.kept;
        match self.storage[..places].get_mut(self.len) {
            Some(place) => {
                *place = Some(frame);
                self.len += 1;
            }
            // SAFETY: `fill` allocated the frame as a page, or the source returned it as one, or
            // the engine took it from a cache of this platform (`serves`). A table goes into a
            // cache only if it was never linked.
            None => unsafe { self.platform.free(frame, F::TABLE_BYTES) },
        }
    }
}

#[cfg(any(feature = "alloc", all(feature = "std", any(unix, windows))))]
impl<'a, F: Format, P: Platform> TableCache<'a, F, P> {
    /// Makes an empty cache that owns its storage, for up to `pages` table pages.
    pub fn with_capacity(platform: &'a P, pages: usize) -> Self {
        /// Gives the storage back.
        ///
        /// # Safety
        /// `storage` was leaked by `with_capacity`, and is not used any more.
        unsafe fn release(storage: *mut [Option<Frame>]) {
            // SAFETY: the caller's promise.
            drop(unsafe { Box::from_raw(storage) });
        }
        let storage: Box<[Option<Frame>]> = (0..pages).map(|_| None).collect();
        let mut cache = Self::new(platform, Box::leak(storage));
        cache.release = Some(release);
        cache
    }

    /// Makes a cache that owns its storage, with `pages` table pages in it.
    ///
    /// # Errors
    /// [`OutOfFrames`] if the platform has fewer.
    pub fn filled(platform: &'a P, pages: usize) -> Result<Self, OutOfFrames> {
        let mut cache = Self::with_capacity(platform, pages);
        cache.fill(pages)?;
        Ok(cache)
    }
}

impl<F: Format, P: Platform> fmt::Debug for TableCache<'_, F, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let asks = self.source.is_some();
        f.debug_struct("TableCache").field("len", &self.len).field("asks", &asks).finish()
    }
}

impl<F: Format, P: Platform> Drop for TableCache<'_, F, P> {
    fn drop(&mut self) {
        while let Some(frame) = self.pop() {
            // SAFETY: as in `put`.
            unsafe { self.platform.free(frame, F::TABLE_BYTES) };
        }
        if let Some(release) = self.release {
            // SAFETY: only the cache that owns the storage has the function; this is its end.
            unsafe { release(self.storage) };
        }
    }
}

/// The platform had no more frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OutOfFrames {
    /// The number of pages asked for.
    pub wanted: usize,
    /// The number of pages in the cache.
    pub available: usize,
}

impl fmt::Display for OutOfFrames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the platform has no more table pages: {} of {} at hand",
            self.available, self.wanted
        )
    }
}

impl core::error::Error for OutOfFrames {}
