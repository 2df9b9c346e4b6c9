//! What guests share: frames, swap, and what went wrong with it.

use crate::frames::{Frames, Slots};
use crate::page::NUMBERS;
use crate::swap::{Swap, SwapError};
use core::fmt;
use slat::{Hpa, PageSize};
use spin::Mutex;

/// The memory that frames are in.
///
/// Who calls owns the page, or accepts that the guest writes it meanwhile: implementations access it word
/// by word, or as the machine's memory allows. Methods do not unwind, as those of [`Swap`] do not.
pub trait Ram: Sync {
    /// Copies a page out.
    fn read(&self, hpa: Hpa, page: &mut [u8]);
    /// Copies a page in.
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

/// Where frames are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Layout {
    /// The first, a multiple of the block size.
    pub base: Hpa,
    /// Bytes of all of them.
    pub bytes: u64,
    /// The page size of the guests' tables.
    pub page: PageSize,
    /// The size of huge pages: the next leaf of the tables.
    pub block: PageSize,
}

/// Why there is no pool, or no guest on it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum PoolError {
    /// The frames do not begin at a multiple of the block size, or are no whole pages.
    Unaligned {
        /// What they are to be a multiple of.
        size: PageSize,
    },
    /// More than 2^28 - 1 pages of memory, of swap, or of a guest.
    TooMany {
        /// Pages asked for.
        pages: u64,
    },
    /// Swap's pages are of another size.
    Swap {
        /// Bytes of them.
        page: u64,
    },
    /// A block is not larger than a page, or more than 2^20 pages.
    Block {
        /// The block.
        block: PageSize,
    },
}

impl fmt::Display for PoolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unaligned { size } => {
                write!(f, "memory that is paged begins and ends at multiples of {size}")
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
        }
    }
}

impl core::error::Error for PoolError {}

/// Frames and swap of all guests: what they have together is the limit of all together.
#[derive(Debug)]
pub struct Pool<M, S> {
    pub(crate) ram: M,
    pub(crate) swap: S,
    pub(crate) layout: Layout,
    pub(crate) frames: Frames,
    pub(crate) slots: Slots,
    /// The last error of swap: nothing is sent there until somebody has looked.
    trouble: Mutex<Option<SwapError>>,
}

impl<M: Ram, S: Swap> Pool<M, S> {
    /// A pool of the frames in `layout`, and of all of `swap`.
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
        if swap.page() != page.bytes() {
            return Err(PoolError::Swap { page: swap.page() });
        }
        let pages = (bytes >> page.shift()).max(swap.slots().into());
        if pages >= NUMBERS {
            return Err(PoolError::TooMany { pages });
        }
        let frames = Frames::new((bytes >> page.shift()) as u32, order);
        let slots = Slots::new(swap.slots());
        Ok(Self { ram, swap, layout, frames, slots, trouble: Mutex::new(None) })
    }

    /// Pages of all guests together.
    pub const fn total(&self) -> u32 {
        self.frames.total()
    }

    /// Pages that no guest has.
    pub fn free(&self) -> u32 {
        self.frames.free()
    }

    /// Pages that are in swap.
    pub fn swapped(&self) -> u32 {
        self.slots.used()
    }

    /// Why nothing is sent to swap, if something went wrong there: until [`Pool::resume`].
    pub fn trouble(&self) -> Option<SwapError> {
        *self.trouble.lock()
    }

    /// Sends pages to swap again: the disk has room, say.
    pub fn resume(&self) {
        *self.trouble.lock() = None;
    }

    pub(crate) fn stop(&self, error: SwapError) {
        *self.trouble.lock() = Some(error);
    }

    pub(crate) const fn hpa(&self, frame: u32) -> Hpa {
        Hpa(self.layout.base.0 + ((frame as u64) << self.layout.page.shift()))
    }
}
