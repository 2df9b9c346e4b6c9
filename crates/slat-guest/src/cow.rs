//! Memory that guests share until one of them writes: for forks of a running guest.
//!
//! # Protocol
//! The state of a page is one word: no frame, or a frame, which is the guest's *own* or shared, or
//! *busy* while a fault gives the page a frame, or a fork shares it. A frame has a count of the
//! words that have it. A fault that writes a shared page copies the frame, unless no other word has
//! it by then.
//!
//! *Invariants*:
//! - A frame that two words have is own in neither, and no guest writes it: a fork write-protects
//!   the parent ([`Worker::freeze_writes`]) before it shares, and no fault asks the backing while
//!   it shares. The VMM may ask meanwhile: so a word is busy while a fork shares its frame, and the
//!   answer comes before that or after it. The VMM does not rely on it ([`Cow::fork`]).
//! - A fault has unmapped all leaves of a page, and completed the TLB invalidation, before it asks
//!   to write the page ([`Backing::page`]). So a frame has no writer while it is copied, and the
//!   old frame has no reader of this guest when its count goes down.
//! - If no frame is free, the word stays as it was, and the answer is *not yet*. The fault records
//!   that it found none, and then checks once more whether it still needs one. A thread that frees
//!   a frame, or leaves it to one guest, does so first, and then reads that record (`agreed`). So
//!   the fault goes on, or the thread reports the frame ([`Frames::freed`]).

use crate::backing::{Backing, Hva, HvaRange, NoPage, Page};
use crate::host::Host;
use crate::sync::{AtomicU64, Lock, Ordering, agreed};
use crate::worker::Worker;
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::fmt;
use core::ops::DerefMut;
use slat::{Access, Format, Gpa, GpaRange, Hpa, Memory, PageSize};

/// The memory of guests that share it, in numbered frames of one page each.
///
/// If a method panics, the panic passes through the call that a VMM made, and each page is as it
/// was: a later fault tries again. If [`Frames::freed`] panics because another method does, the
/// program ends.
pub trait Frames {
    /// Returns the host physical address of a frame.
    fn hpa(&self, frame: u32) -> Hpa;

    /// Copies the content of `from`, which no guest writes, to `to`.
    fn copy(&self, from: u32, to: u32);

    /// Fills a frame with zeroes.
    fn zero(&self, frame: u32);

    /// Reports that a frame is free again, or that a page is no longer shared, after a fault had
    /// found no frame. A VMM whose vCPUs sleep until they are woken calls
    /// [`Guest::arrived`](crate::Guest::arrived) for the memory of each guest that shares; if its
    /// vCPUs just try again it does nothing. The thread that freed the frame calls it, which may be
    /// inside a fault: it must not wait for faults.
    fn freed(&self) {}

    /// Lets other threads run while the caller waits for one that copies a page: the VMM's
    /// [`Host::wait`].
    fn wait(&self) {
        core::hint::spin_loop();
    }
}

/// The frames that guests share.
#[derive(Debug)]
pub struct SharedFrames<M> {
    memory: M,
    page: PageSize,
    /// The number of words that have each frame.
    counts: Box<[AtomicU64]>,
    free: Lock<Vec<u32>>,
    /// Set if a fault found no free frame and no thread has reported a frame since.
    short: AtomicU64,
}

impl<M: Frames> SharedFrames<M> {
    /// Makes `frames` frames of size `page`, numbered from 0.
    pub fn new(memory: M, page: PageSize, frames: u32) -> Self {
        let counts = (0..frames).map(|_| AtomicU64::new(0)).collect();
        let (free, short) = (Lock::new((0..frames).rev().collect()), AtomicU64::new(0));
        Self { memory, page, counts, free, short }
    }

    /// Returns the number of free frames.
    pub fn free(&self) -> u32 {
        self.list().len() as u32
    }

    fn list(&self) -> impl DerefMut<Target = Vec<u32>> + '_ {
        self.free.lock_patiently(|| self.memory.wait())
    }

    /// Returns the memory that has the frames.
    pub const fn memory(&self) -> &M {
        &self.memory
    }

    /// Takes a free frame. If there is none, the thread that frees the next one finds `short` set.
    fn take(&self) -> Option<u32> {
        let mut free = self.list();
        let Some(frame) = free.pop() else {
            self.short.store(1, Ordering::Release);
            return None;
        };
        self.counts[frame as usize].store(1, Ordering::Relaxed);
        Some(frame)
    }

    fn give(&self, frame: u32) {
        self.put(frame);
        self.report();
    }

    fn put(&self, frame: u32) {
        if self.counts[frame as usize].fetch_sub(1, Ordering::AcqRel) == 1 {
            self.list().push(frame);
        }
    }

    /// Reports frames that this thread has freed, or left to one guest, if a fault found none.
    fn report(&self) {
        agreed();
        if self.short.load(Ordering::Acquire) != 0 && self.short.swap(0, Ordering::AcqRel) != 0 {
            self.memory.freed();
        }
    }

    /// Returns whether only one word has the frame.
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

/// One guest's memory: it reads as zero until it is written, and other guests may share some of it.
///
/// If no frame is free the answer to a fault is *not yet*
/// ([`Retry::Absent`](crate::Retry::Absent)), and nothing has changed: the vCPU can go on when
/// another guest frees a frame ([`Frames::freed`]). The VMM makes sure that one will; twice the
/// pages of a guest are enough for it and one fork.
///
/// A guest whose vCPUs may have tables of their own
/// ([`CachePolicy::Exact`](crate::CachePolicy::Exact) on a format that does not force the guest to
/// use its caches) cannot be forked.
///
/// Dropping it frees its frames. It is dropped with its guest, after the guest's tables.
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
    /// The memory does not begin and end at page boundaries, or goes beyond 64 bits.
    Unaligned {
        /// The page size.
        page: PageSize,
    },
    /// vCPUs have tables of their own.
    Views,
    /// Devices access the guest's memory, or have some of it pinned: their writes cannot be held.
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

    /// Returns the number of pages that were copied because the guest wrote them.
    pub fn copied(&self) -> u64 {
        self.copied.load(Ordering::Relaxed)
    }

    /// Returns the number of pages that have a frame, and the number of those whose frame is
    /// shared.
    pub fn pages(&self) -> (u64, u64) {
        let (mut all, mut shared) = (0, 0);
        for word in self.words.iter().map(|word| word.load(Ordering::Acquire)) {
            all += u64::from(word > BUSY);
            shared += u64::from(word > BUSY && word & OWN == 0);
        }
        (all, shared)
    }

    /// Makes a copy of the memory as of one moment, for another guest, while the guest of `worker`
    /// runs on: the two share all frames until one of them writes.
    ///
    /// `worker` is of the guest whose backing this is, and which has all memslots that have any of
    /// it. The VMM itself writes no page meanwhile, and asks for each page again
    /// ([`Backing::page`]) before it writes the page after this, also if it asked meanwhile. The
    /// guest's writes wait while this goes over its leaves and pages; its reads do not.
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
        let held = worker.freeze_writes(self.range);
        // Another thread may have pinned pages and made them writable since the first check. It did
        // so before the writes were held, so this check sees its pin.
        if worker.is_pinned(all) {
            return Err(ForkError::Devices);
        }
        for (word, childs) in self.words.iter().zip(&child.words) {
            self.share(word, childs);
        }
        drop(held);
        Ok(child)
    }

    /// Gives the frame of `word`, if it has one, to the word of a child too. It is own in neither.
    fn share(&self, word: &AtomicU64, childs: &AtomicU64) {
        loop {
            let now = self.settled(word);
            if now == NOWHERE {
                return;
            }
            if let Some(mut claim) = Claim::begin(word, now) {
                claim.to = now & !OWN;
                self.shared.counts[frame_of(now) as usize].fetch_add(1, Ordering::AcqRel);
                // No other thread has the child yet.
                childs.store(claim.to, Ordering::Relaxed);
                return;
            }
        }
    }

    /// Returns the word once no other thread is giving its page a frame, or sharing it: at most the
    /// copy of a page later.
    fn settled(&self, word: &AtomicU64) -> u64 {
        loop {
            match word.load(Ordering::SeqCst) {
                BUSY => self.shared.memory.wait(),
                now => return now,
            }
        }
    }

    /// Returns the frame of a page, if it has one: for readers of the memory of a stopped guest.
    pub fn frame(&self, host: Hva) -> Option<u32> {
        let offset = host.0.checked_sub(self.range.start.0)?;
        let word = self.words.get((offset >> self.shared.page.shift()) as usize)?;
        Some(self.settled(word)).filter(|&word| word != NOWHERE).map(frame_of)
    }

    /// Gives the claimed word `now` a frame for reading, or for writing; `None` if no frame is
    /// free. Also returns the frame that the word had, if it has another now.
    fn place(&self, now: u64, write: bool) -> Option<(u64, Option<u32>)> {
        let shared = self.shared;
        if now == NOWHERE {
            let new = New { shared, frame: shared.take()? };
            shared.memory.zero(new.frame);
            return Some((new.own(), None));
        }
        let frame = frame_of(now);
        // If no other word has it now, none gets it: only a fork of this memory can share it again.
        if !write || shared.is_alone(frame) {
            return Some((now | if write { OWN } else { 0 }, None));
        }
        let Some(own) = shared.take() else {
            agreed();
            // The other guest may have taken the last free frame for its own copy, and left this
            // one.
            return shared.is_alone(frame).then_some((now | OWN, None));
        };
        let new = New { shared, frame: own };
        shared.memory.copy(frame, own);
        self.copied.fetch_add(1, Ordering::Relaxed);
        Some((new.own(), Some(frame)))
    }

    /// Gives the page of `place`, whose word is `now`, a frame; returns the new word. `Ok(None)`:
    /// another thread has changed the word.
    fn settle(&self, place: &AtomicU64, now: u64, write: bool) -> Result<Option<u64>, NoPage> {
        let Some(mut claim) = Claim::begin(place, now) else { return Ok(None) };
        let placed = self.place(now, write);
        claim.to = placed.map_or(now, |(new, _)| new);
        drop(claim);
        let (new, old) = placed.ok_or(NoPage::Absent)?;
        // Last, as it may call the VMM: the word has no part in the frame any more.
        if let Some(old) = old {
            self.shared.give(old);
        }
        Ok(Some(new))
    }
}

/// A word that is busy. Dropped, also by a panic, it gets its new value.
struct Claim<'c> {
    place: &'c AtomicU64,
    to: u64,
}

impl<'c> Claim<'c> {
    /// Makes a word busy; `None` if it is not `now` any more.
    fn begin(place: &'c AtomicU64, now: u64) -> Option<Self> {
        place.compare_exchange(now, BUSY, Ordering::SeqCst, Ordering::SeqCst).ok()?;
        Some(Self { place, to: now })
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.place.store(self.to, Ordering::SeqCst);
    }
}

/// A frame that is being filled. Dropped, by a panic, it is free again.
struct New<'s, M: Frames> {
    shared: &'s SharedFrames<M>,
    frame: u32,
}

impl<M: Frames> New<'_, M> {
    /// Returns the word of a page that has the frame for its own.
    fn own(self) -> u64 {
        let word = word(self.frame, true);
        core::mem::forget(self);
        word
    }
}

impl<M: Frames> Drop for New<'_, M> {
    fn drop(&mut self) {
        self.shared.give(self.frame);
    }
}

impl<M: Frames> Backing for Cow<'_, M> {
    fn page(&self, host: Hva, access: Access) -> Result<Page, NoPage> {
        let offset = host.0.checked_sub(self.range.start.0).ok_or(NoPage::Never)?;
        let place = self.words.get((offset >> self.shared.page.shift()) as usize);
        let place = place.ok_or(NoPage::Never)?;
        let write = access == Access::Write;
        let now = loop {
            let now = self.settled(place);
            if now != NOWHERE && (now & OWN != 0 || !write) {
                break now;
            }
            if let Some(new) = self.settle(place, now, write)? {
                break new;
            }
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
        let mut any = false;
        for now in self.words.iter().map(|word| word.load(Ordering::Acquire)) {
            if now > BUSY {
                self.shared.put(frame_of(now));
                any = true;
            }
        }
        if any {
            self.shared.report();
        }
    }
}
