//! The pool that guests share: frames, swap, and the last error of swap.

use crate::frames::Frames;
use crate::page::NUMBERS;
use crate::slots::Slots;
use crate::swap::{Swap, SwapError};
use alloc::vec::Vec;
use core::fmt;
use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use slat::{Hpa, PageSize};
use spin::{Mutex, MutexGuard};

/// Memory that frames are in.
///
/// Rules: 1. The caller owns the page, or accepts that the guest writes it meanwhile; so
/// implementations access it word by word, or in another way that allows concurrent writes. 2.
/// Methods must not unwind, as with [`Swap`].
pub trait Ram: Sync {
    /// Copies the page at `hpa` to `page`.
    fn read(&self, hpa: Hpa, page: &mut [u8]);
    /// Copies `page` to the page at `hpa`.
    fn write(&self, hpa: Hpa, page: &[u8]);
}

impl<M: Ram> Ram for &M {
    fn read(&self, hpa: Hpa, page: &mut [u8]) {
        (**self).read(hpa, page);
    }

    fn write(&self, hpa: Hpa, page: &[u8]) {
        (**self).write(hpa, page);
    }
}

/// Place and size of the frames of a pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Layout {
    /// Address of the first frame, a multiple of the block size.
    pub base: Hpa,
    /// Bytes of all of them.
    pub bytes: u64,
    /// Page size of the guests' tables.
    pub page: PageSize,
    /// Size of huge pages: that of the next larger leaf of the tables.
    pub block: PageSize,
}

/// Error in the making of a pool, or of a guest's memory on it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum PoolError {
    /// The memory does not begin at a multiple of the block size, or is not a whole number of
    /// pages.
    Unaligned {
        /// Size of which it has to be a multiple.
        size: PageSize,
    },
    /// The frames end beyond the last 64-bit address.
    Beyond {
        /// Address of the first frame.
        base: Hpa,
        /// Bytes of all of them.
        bytes: u64,
    },
    /// More than 2^28 - 1 pages of memory, of swap, or of a guest.
    TooMany {
        /// Pages asked for.
        pages: u64,
    },
    /// The pages of swap are not of the pool's page size.
    Swap {
        /// Size of a page of swap, in bytes.
        page: u64,
    },
    /// A block is not larger than a page, or is more than 2^20 pages.
    Block {
        /// Size of a block.
        block: PageSize,
    },
    /// The guests together would keep more pages than the pool has
    /// ([`Config::protected`](crate::Config::protected)).
    Protected {
        /// Pages that this guest was to keep.
        asked: u32,
        /// Pages that no other guest keeps.
        left: u32,
    },
}

impl fmt::Display for PoolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unaligned { size } => {
                write!(f, "memory that is paged begins and ends at multiples of {size}")
            }
            Self::Beyond { base, bytes } => {
                write!(f, "{bytes} bytes from {base} on end beyond the last address")
            }
            Self::TooMany { pages } => {
                write!(f, "{pages} pages; at most {} can be numbered", NUMBERS - 1)
            }
            Self::Swap { page } => {
                write!(f, "swap keeps pages of {page} bytes; make it for the pool's pages")
            }
            Self::Block { block } => {
                write!(f, "blocks of {block}; take the next larger leaf than a page")
            }
            Self::Protected { asked, left } => write!(
                f,
                "{asked} pages were to be kept in memory, and others leave {left} of them; keep \
                 fewer, or give the pool more"
            ),
        }
    }
}

impl core::error::Error for PoolError {}

/// Frames and swap that guests share: a bound on the memory of all its guests together.
#[derive(Debug)]
pub struct Pool<M, S> {
    pub(crate) ram: M,
    pub(crate) swap: S,
    pub(crate) layout: Layout,
    pub(crate) frames: Frames,
    pub(crate) slots: Slots,
    /// Pages that all guests together keep: no more than the pool has.
    protected: AtomicU32,
    /// The last error of swap: no page is sent there until [`Pool::resume`] is called, or, after a
    /// lack of room, slots are given back.
    trouble: Mutex<Option<SwapError>>,
    /// Whether that error is a lack of room. Changes only under the lock on `trouble`.
    full: AtomicBool,
    /// Held by the thread that has swap forget stale slots.
    wiper: Mutex<()>,
}

impl<M: Ram, S: Swap> Pool<M, S> {
    /// Changes the account of a guest that kept `before` pages and is to keep `pages`.
    pub(crate) fn protect(&self, before: u32, pages: u32) -> Result<(), PoolError> {
        let total = self.frames.total();
        let mut left = 0;
        let change = |all: u32| {
            left = total.saturating_sub(all - before);
            (pages <= left).then(|| all - before + pages)
        };
        let done = self.protected.fetch_update(Ordering::Relaxed, Ordering::Relaxed, change);
        done.map(drop).map_err(|_| PoolError::Protected { asked: pages, left })
    }

    /// Makes a pool of the frames in `layout` and all slots of `swap`.
    ///
    /// # Errors
    /// [`PoolError`].
    pub fn new(ram: M, layout: Layout, swap: S) -> Result<Self, PoolError> {
        let Layout { base, bytes, page, block } = layout;
        let order = block.shift().wrapping_sub(page.shift());
        if !(1..=20).contains(&order) {
            return Err(PoolError::Block { block });
        }
        if !base.0.is_multiple_of(block.bytes()) {
            return Err(PoolError::Unaligned { size: block });
        }
        if !bytes.is_multiple_of(page.bytes()) {
            return Err(PoolError::Unaligned { size: page });
        }
        if base.0.checked_add(bytes).is_none() {
            return Err(PoolError::Beyond { base, bytes });
        }
        if swap.page() != page.bytes() {
            return Err(PoolError::Swap { page: swap.page() });
        }
        let pages = (bytes >> page.shift()).max(swap.slots().into());
        if pages >= NUMBERS {
            return Err(PoolError::TooMany { pages });
        }
        let frames = Frames::new((bytes >> page.shift()) as u32, order);
        let slots = Slots::new(swap.slots());
        let (trouble, full, wiper) = (Mutex::new(None), AtomicBool::new(false), Mutex::new(()));
        Ok(Self {
            ram,
            swap,
            layout,
            frames,
            slots,
            trouble,
            full,
            wiper,
            protected: AtomicU32::new(0),
        })
    }

    /// Returns the number of frames, which bounds the pages in memory of all guests together.
    pub const fn total(&self) -> u32 {
        self.frames.total()
    }

    /// Returns the number of free frames.
    pub fn free(&self) -> u32 {
        self.frames.free()
    }

    /// Returns the number of slots of swap that hold a page.
    pub fn swapped(&self) -> u32 {
        self.slots.used()
    }

    /// Returns the error for which no pages are sent to swap, until [`Pool::resume`] is called. A
    /// full disk ([`SwapError::Full`] of [`Swap::write`]) counts only until slots are given back.
    pub fn trouble(&self) -> Option<SwapError> {
        *self.trouble.lock()
    }

    /// Allows pages to be sent to swap again, for instance once the disk has room.
    pub fn resume(&self) {
        let mut trouble = self.trouble.lock();
        *trouble = None;
        self.full.store(false, Ordering::Relaxed);
    }

    /// Records that swap failed; `gives` is [`Slots::gives`] from before the call to swap. If swap
    /// had no room, and slots were given back since, this clears the error. A lack of room does not
    /// replace an error of the device, which stays until [`Pool::resume`].
    ///
    /// Either this sees that slots were given back, or [`Pool::room_was_made`] sees `full`: this
    /// takes the lock of the slots after it writes `full`, and a thread that gives slots back takes
    /// it before it reads `full`.
    pub(crate) fn stop(&self, error: SwapError, gives: u64) {
        {
            let mut trouble = self.trouble.lock();
            let full = error == SwapError::Full;
            if full && trouble.is_some_and(|before| before != SwapError::Full) {
                return;
            }
            *trouble = Some(error);
            self.full.store(full, Ordering::Relaxed);
        }
        if self.slots.gives() != gives {
            self.room_was_made();
        }
    }

    /// Slots were given back: clears the error if it was a lack of room.
    fn room_was_made(&self) {
        if self.full.load(Ordering::Relaxed) {
            let mut trouble = self.trouble.lock();
            if *trouble == Some(SwapError::Full) {
                *trouble = None;
                self.full.store(false, Ordering::Relaxed);
            }
        }
    }

    /// Gives `slot` back. Its content is forgotten or overwritten later.
    pub(crate) fn give_slot(&self, slot: u32) {
        self.slots.give(slot);
        self.room_was_made();
    }

    /// Has swap forget the content of these withheld slots, and gives them back.
    pub(crate) fn wipe(&self, withheld: &mut Vec<u32>) {
        withheld.sort_unstable();
        let follows = |before: &u32, slot: &u32| before + 1 == *slot;
        withheld.chunk_by(follows).for_each(|run| self.wipe_run(run[0]..run[0] + run.len() as u32));
        withheld.clear();
    }

    fn wipe_run(&self, slots: Range<u32>) {
        let result = self.swap.forget(slots.clone());
        self.slots.wiped(slots, result.is_ok());
        match result {
            Ok(()) => self.room_was_made(),
            Err(error) => self.stop(error, self.slots.gives()),
        }
    }

    /// Has swap forget what is in slots that no page has, though it may have been there when this
    /// began: in stale slots, and in slots that were handed out and not written yet. This waits by
    /// `wait` for threads that wipe stale slots, or are about to write to such a slot; the caller
    /// has claimed no page and withholds no slot, which these may wait for.
    ///
    /// A slot that was stale may be taken before the wipe reaches it, and returned unwritten behind
    /// it. So this ends once no such slot has old content; or, if swap cannot forget some, after a
    /// wipe before and after which none was unwritten, and during which none was returned.
    pub(crate) fn forget_leftovers(&self, wait: impl Fn()) {
        let mut slots = self.slots.leftovers();
        let mut before = self.slots.still_left(&mut slots);
        loop {
            self.wipe_stale(&wait);
            let now = self.slots.still_left(&mut slots);
            if slots.is_empty() || !before.0 && now == before {
                return;
            }
            before = now;
            wait();
        }
    }

    fn wipe_stale(&self, wait: &impl Fn()) {
        loop {
            match self.wiper() {
                Some(wiper) => return wiper.wipe(),
                None => wait(),
            }
        }
    }

    /// Takes the right to wipe stale slots; `None` if another thread has it.
    pub(crate) fn wiper(&self) -> Option<Wiper<'_, M, S>> {
        self.wiper.try_lock().map(|held| Wiper { pool: self, _held: held })
    }

    pub(crate) const fn hpa(&self, frame: u32) -> Hpa {
        Hpa(self.layout.base.0 + ((frame as u64) << self.layout.page.shift()))
    }
}

/// The right to have swap forget the content of stale slots, which one thread has at a time.
pub(crate) struct Wiper<'p, M, S> {
    pool: &'p Pool<M, S>,
    _held: MutexGuard<'p, ()>,
}

impl<M: Ram, S: Swap> Wiper<'_, M, S> {
    /// Wipes all stale slots. Each slot that was stale when this began is then forgotten, was
    /// handed out meanwhile, or could not be forgotten ([`Pool::trouble`]).
    pub fn wipe(self) {
        let mut from = 0;
        while let Some(run) = self.pool.slots.withhold_stale(from) {
            from = run.end;
            self.pool.wipe_run(run);
        }
    }
}
