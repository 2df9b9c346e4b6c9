//! Memory that guests share until one of them writes: for forks of a running guest.
//!
//! # Protocol
//! The state of a page is one word: no frame, or a frame, which is the guest's *own* or shared;
//! *busy* while a fault gives it a frame. A frame has a count of the words that name it. A fault
//! that writes a shared page copies the frame, unless no other word names it by then.
//!
//! *Invariants*:
//! - A frame that two words name is own in neither, and nobody writes it: a fork protects the
//!   parent ([`Worker::hold_writes`]) before it shares, and no fault asks the backing while it
//!   shares.
//! - A fault has emptied all leaves of a page, to completion, before it asks to write it
//!   ([`Backing::page`]): what is copied has no writer, and the old frame no reader of this guest's,
//!   when the count goes down.
//! - Where frames are short the word is as it was, and the fault is answered *not yet*. The fault
//!   notes that it found none before it looks once more whether it still needs one; a thread that
//!   gives a frame back, or leaves it to one guest, does so before it looks for that note. The two
//!   are crosswise (`agreed`): the fault goes on, or the thread reports the frame
//!   ([`Frames::freed`]).

use crate::backing::{Backing, Hva, HvaRange, NoPage, Page};
use crate::host::Host;
use crate::sync::{AtomicU64, Lock, Ordering, agreed};
use crate::worker::Worker;
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::fmt;
use slat::{Access, Format, Gpa, GpaRange, Hpa, Memory, PageSize};

/// Memory for the guests that share it, in numbered frames of one page each.
pub trait Frames {
    /// The host physical address of a frame.
    fn hpa(&self, frame: u32) -> Hpa;

    /// Copies the content of `from`, which nobody writes, to `to`.
    fn copy(&self, from: u32, to: u32);

    /// Fills a frame with zeroes.
    fn zero(&self, frame: u32);

    /// Reports that there is a frame again, or that a page is shared no more, after a fault had
    /// found no frame. A VMM whose vCPUs sleep until they are told calls
    /// [`Guest::arrived`](crate::Guest::arrived) for the memory of each guest that shares; vCPUs
    /// that just try again need nothing. The thread that gave the frame back calls it, also inside
    /// a fault: it must not wait for faults.
    fn freed(&self) {}
}

/// The frames that guests share.
#[derive(Debug)]
pub struct SharedFrames<M> {
    memory: M,
    page: PageSize,
    /// The number of words that name each frame.
    counts: Box<[AtomicU64]>,
    free: Lock<Vec<u32>>,
    /// Set if a fault found no free frame, and this was not reported since.
    short: AtomicU64,
}

impl<M: Frames> SharedFrames<M> {
    /// Makes `frames` frames of `page` each, numbered from 0.
    pub fn new(memory: M, page: PageSize, frames: u32) -> Self {
        let counts = (0..frames).map(|_| AtomicU64::new(0)).collect();
        let (free, short) = (Lock::new((0..frames).rev().collect()), AtomicU64::new(0));
        Self { memory, page, counts, free, short }
    }

    /// The number of free frames.
    pub fn free(&self) -> u32 {
        self.free.lock().len() as u32
    }

    /// The memory that has the frames.
    pub const fn memory(&self) -> &M {
        &self.memory
    }

    /// Takes a free frame. If there is none, the thread that gives the next one back finds `short`
    /// set.
    fn take(&self) -> Option<u32> {
        let mut free = self.free.lock();
        let Some(frame) = free.pop() else {
            self.short.store(1, Ordering::Release);
            return None;
        };
        self.counts[frame as usize].store(1, Ordering::Relaxed);
        Some(frame)
    }

    fn give(&self, frame: u32) {
        if self.counts[frame as usize].fetch_sub(1, Ordering::AcqRel) == 1 {
            self.free.lock().push(frame);
        }
        agreed();
        if self.short.load(Ordering::Acquire) != 0 && self.short.swap(0, Ordering::AcqRel) != 0 {
            self.memory.freed();
        }
    }

    /// Whether only one word names the frame.
    fn is_alone(&self, frame: u32) -> bool {
        self.counts[frame as usize].load(Ordering::Acquire) == 1
    }
}

const NOWHERE: u64 = 0;
const BUSY: u64 = 1;
const OWN: u64 = 2;

const fn word(frame: u32, own: bool) -> u64 {
    ((frame as u64 + 1) << 2) | if own { OWN } else { 0 }
}

const fn frame_of(word: u64) -> u32 {
    ((word >> 2) - 1) as u32
}

/// One guest's memory: zeroes until it is written, some of it shared with other guests.
///
/// Where no frame is free a fault is answered *not yet* ([`Retry::NotYet`](crate::Retry::NotYet)),
/// and nothing has changed: it goes on when another guest gives a frame back ([`Frames::freed`]).
/// The VMM, which knows all the guests, sees to it that one will: twice the pages of a guest are
/// enough for it and one fork.
///
/// A guest whose vCPUs may have tables of their own
/// ([`CachePolicy::Exact`](crate::CachePolicy::Exact) where the format does not force the guest to
/// use its caches) is not forked.
///
/// Dropping it gives its frames back. It is dropped with its guest, whose tables go first.
#[derive(Debug)]
pub struct Cow<'s, M: Frames> {
    shared: &'s SharedFrames<M>,
    range: HvaRange,
    words: Box<[AtomicU64]>,
    copied: AtomicU64,
}

/// Why a guest was not forked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ForkError {
    /// The memory does not begin and end at pages, or goes beyond 64 bits.
    Unaligned {
        /// The page size.
        page: PageSize,
    },
    /// vCPUs have tables of their own.
    Views,
    /// Devices reach the guest's memory, or have some of it pinned: their writes cannot be held.
    Devices,
    /// There is no memory for one word for each page.
    OutOfMemory,
}

impl fmt::Display for ForkError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unaligned { page } => write!(f, "the memory is not in pages of {page}"),
            Self::Views => f.write_str("vCPUs have tables of their own while their caches are off"),
            Self::Devices => f.write_str("devices may write the memory while it is shared"),
            Self::OutOfMemory => f.write_str("no memory for a word a page"),
        }
    }
}

impl core::error::Error for ForkError {}

impl<'s, M: Frames> Cow<'s, M> {
    /// Makes memory at `range` that reads as zero.
    ///
    /// # Errors
    /// [`ForkError::Unaligned`], [`ForkError::OutOfMemory`].
    pub fn new(shared: &'s SharedFrames<M>, range: HvaRange) -> Result<Self, ForkError> {
        let page = shared.page;
        let unaligned = (range.start.0 | range.bytes) & (page.bytes() - 1) != 0;
        if unaligned || range.start.0.checked_add(range.bytes).is_none() {
            return Err(ForkError::Unaligned { page });
        }
        let pages = (range.bytes >> page.shift()) as usize;
        let mut words = Vec::new();
        words.try_reserve_exact(pages).map_err(|_| ForkError::OutOfMemory)?;
        words.extend((0..pages).map(|_| AtomicU64::new(NOWHERE)));
        Ok(Self { shared, range, words: words.into_boxed_slice(), copied: AtomicU64::new(0) })
    }

    /// Pages that were copied because the guest wrote them.
    pub fn copied(&self) -> u64 {
        self.copied.load(Ordering::Relaxed)
    }

    /// The number of pages that have a frame, and the number of those whose frame is shared.
    pub fn pages(&self) -> (u64, u64) {
        let (mut all, mut shared) = (0, 0);
        for word in self.words.iter().map(|word| word.load(Ordering::Acquire)) {
            all += u64::from(word > BUSY);
            shared += u64::from(word > BUSY && word & OWN == 0);
        }
        (all, shared)
    }

    /// Makes a copy of the memory as it is at one moment, for another guest, while the guest of
    /// `worker` runs on: the two share all frames until one of them writes.
    ///
    /// `worker` is of the guest whose backing this is, with all memslots that show any of it. The
    /// guest's writes wait while this goes over its leaves and pages; its reads go on.
    ///
    /// # Errors
    /// [`ForkError`]; the guest's memory is as it was.
    pub fn fork<F: Format, H: Host, B: Backing>(
        &self,
        worker: &mut Worker<'_, F, H, B>,
    ) -> Result<Self, ForkError> {
        if !worker.guest().views.is_empty() {
            return Err(ForkError::Views);
        }
        let all = 1 << worker.guest().tables.geometry().address_bits;
        let all = GpaRange::new(Gpa(0), all).expect("a guest has an address");
        if worker.guest().config.devices || worker.is_pinned(all) {
            return Err(ForkError::Devices);
        }
        let child = Self::new(self.shared, self.range)?;
        let held = worker.hold_writes(self.range);
        // Another thread may have pinned pages and made them writable since the first look: it did
        // so before the writes were held, so its pin is seen here.
        if worker.is_pinned(all) {
            return Err(ForkError::Devices);
        }
        for (word, childs) in self.words.iter().zip(&child.words) {
            let now = word.load(Ordering::SeqCst) & !OWN;
            if now > BUSY {
                self.shared.counts[frame_of(now) as usize].fetch_add(1, Ordering::AcqRel);
                word.store(now, Ordering::SeqCst);
                childs.store(now, Ordering::SeqCst);
            }
        }
        drop(held);
        Ok(child)
    }

    /// The frame of a page, if it has one: for readers of a guest's memory that stands still.
    pub fn frame(&self, host: Hva) -> Option<u32> {
        let offset = host.0.checked_sub(self.range.start.0)?;
        let word = self.words.get((offset >> self.shared.page.shift()) as usize)?;
        Some(word.load(Ordering::Acquire)).filter(|&word| word > BUSY).map(frame_of)
    }

    /// Gives the claimed word `now` a frame that may be read, or written; `None`: frames are short.
    fn place(&self, now: u64, write: bool) -> Option<u64> {
        let shared = self.shared;
        if now == NOWHERE {
            let frame = shared.take()?;
            shared.memory.zero(frame);
            return Some(word(frame, true));
        }
        let frame = frame_of(now);
        // No other word names it now: only a fork of this memory can share it again.
        if !write || shared.is_alone(frame) {
            return Some(now | if write { OWN } else { 0 });
        }
        let Some(own) = shared.take() else {
            agreed();
            // The other guest has taken the last free frame for its own copy, and left this one.
            return shared.is_alone(frame).then_some(now | OWN);
        };
        shared.memory.copy(frame, own);
        shared.give(frame);
        self.copied.fetch_add(1, Ordering::Relaxed);
        Some(word(own, true))
    }
}

impl<M: Frames> Backing for Cow<'_, M> {
    fn page(&self, host: Hva, access: Access) -> Result<Page, NoPage> {
        let offset = host.0.checked_sub(self.range.start.0).ok_or(NoPage::Never)?;
        let place = self.words.get((offset >> self.shared.page.shift()) as usize);
        let place = place.ok_or(NoPage::Never)?;
        let write = access == Access::Write;
        let now = loop {
            let now = place.load(Ordering::SeqCst);
            if now == BUSY {
                // The wait takes as long as the copy of a page.
                core::hint::spin_loop();
                continue;
            }
            if now != NOWHERE && (now & OWN != 0 || !write) {
                break now;
            }
            let claim = place.compare_exchange(now, BUSY, Ordering::SeqCst, Ordering::SeqCst);
            if claim.is_err() {
                continue;
            }
            let new = self.place(now, write);
            place.store(new.unwrap_or(now), Ordering::SeqCst);
            break new.ok_or(NoPage::NotYet)?;
        };
        Ok(Page {
            hpa: self.shared.memory.hpa(frame_of(now)),
            block: self.shared.page,
            write: now & OWN != 0,
            execute: true,
            memory: Memory::Normal,
        })
    }
}

impl<M: Frames> Drop for Cow<'_, M> {
    fn drop(&mut self) {
        for word in &self.words {
            let now = word.load(Ordering::Acquire);
            if now > BUSY {
                self.shared.give(frame_of(now));
            }
        }
    }
}
