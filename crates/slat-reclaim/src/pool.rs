//! The pool that guests share: frames, swap, and the last error of swap.

use crate::frames::Frames;
use crate::page::NUMBERS;
use crate::slots::{Owner, RUN, Slots};
use crate::swap::{Swap, SwapError};
use alloc::vec::Vec;
use core::fmt;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use slat::{Hpa, PageSize};
use spin::Mutex;

/// Memory that frames are in.
///
/// Rules: 1. The caller owns the page, or accepts that the guest writes it meanwhile; so
/// implementations access it word by word, or in another way that allows concurrent writes. 2. If a
/// method unwinds, the pager's operation ends as with [`Swap`].
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
        let (trouble, full) = (Mutex::new(None), AtomicBool::new(false));
        Ok(Self { ram, swap, layout, frames, slots, trouble, full, protected: AtomicU32::new(0) })
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

    /// Gives `slot` of `owner` back. Its content is forgotten or overwritten later.
    pub(crate) fn give_slot(&self, slot: u32, owner: Owner) {
        self.slots.give(slot, owner);
        self.room_was_made();
    }

    /// Gives `slot` back, to which `owner` has written no whole page since it took it.
    pub(crate) fn return_unwritten(&self, slot: u32, owner: Owner) {
        if self.slots.return_unwritten(slot, owner) {
            let mut withheld = self.withheld(owner);
            withheld.slots.push(slot);
            // This makes no room: the slot was free before.
            withheld.wipe_runs(|result| {
                if let Err(error) = result {
                    self.stop(error, self.slots.gives());
                }
            });
        }
    }

    /// Withheld slots of `owner`, none yet.
    pub(crate) const fn withheld(&self, owner: Owner) -> WithheldSlots<'_, M, S> {
        WithheldSlots { pool: self, owner, slots: Vec::new() }
    }

    /// Has swap forget what is in slots that no page has, and is content of `owner`, though it may
    /// have been there when this began: in stale slots; and in slots that threads of `owner` wipe,
    /// or have taken and not written yet, for which this waits by `wait`. The caller has claimed no
    /// page and withholds no slot, which those threads may wait for.
    ///
    /// Where another guest's page is about to be written over the old content, that thread
    /// overwrites it or has swap forget it, and this does not wait.
    pub(crate) fn forget_leftovers(&self, owner: Owner, wait: impl Fn()) {
        let mut slots = self.slots.in_flight(owner);
        loop {
            // Behind the look at slots in flight: what was given back unwritten is stale now.
            self.wipe_stale(owner);
            if slots.is_empty() {
                return;
            }
            self.slots.still_in_flight(owner, &mut slots);
            if !slots.is_empty() {
                wait();
            }
        }
    }

    /// Has swap forget the slots of `owner` that are stale when this begins.
    pub(crate) fn wipe_stale(&self, owner: Owner) {
        let mut left = self.slots.stale(owner);
        let mut withheld = self.withheld(owner);
        while left > 0 {
            let some = left.min(RUN);
            left -= some;
            self.slots.withhold_stale(owner, some, &mut withheld.slots);
            withheld.wipe();
        }
    }

    pub(crate) const fn hpa(&self, frame: u32) -> Hpa {
        Hpa(self.layout.base.0 + ((frame as u64) << self.layout.page.shift()))
    }
}

/// Slots that are handed out to no page until swap has forgotten their content. If swap unwinds,
/// they are stale.
pub(crate) struct WithheldSlots<'p, M: Ram, S: Swap> {
    pool: &'p Pool<M, S>,
    owner: Owner,
    slots: Vec<u32>,
}

impl<M: Ram, S: Swap> WithheldSlots<'_, M, S> {
    /// Withholds `slot`, which a page had. Wipes all once there are [`RUN`] of them.
    pub fn add(&mut self, slot: u32) {
        self.pool.slots.withhold(slot, self.owner);
        self.slots.push(slot);
        if self.slots.len() == RUN as usize {
            self.wipe();
        }
    }

    /// Has swap forget the content of the slots, and gives them back.
    pub fn wipe(&mut self) {
        let pool = self.pool;
        self.wipe_runs(|result| {
            pool.slots.made_room();
            match result {
                Ok(()) => pool.room_was_made(),
                Err(error) => pool.stop(error, pool.slots.gives()),
            }
        });
    }

    fn wipe_runs(&mut self, wiped: impl Fn(Result<(), SwapError>)) {
        self.slots.sort_unstable();
        while let Some(&last) = self.slots.last() {
            let before = self.slots.windows(2).rev().take_while(|pair| pair[0] + 1 == pair[1]);
            let len = (before.count() + 1).min(RUN as usize);
            let run = last + 1 - len as u32..last + 1;
            let result = self.pool.swap.forget(run.clone());
            self.slots.truncate(self.slots.len() - len);
            self.pool.slots.wiped(run, self.owner, result.is_ok());
            wiped(result);
        }
    }
}

impl<M: Ram, S: Swap> Drop for WithheldSlots<'_, M, S> {
    fn drop(&mut self) {
        for slot in self.slots.drain(..) {
            self.pool.slots.wiped(slot..slot + 1, self.owner, false);
        }
    }
}
