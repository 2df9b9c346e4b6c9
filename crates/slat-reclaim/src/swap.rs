//! Interface of swap, which stores pages that are not in memory.

use core::fmt;
use core::ops::Range;

/// Storage for pages: a file, a device, or memory of another host.
///
/// Rules: 1. The pager calls it from any number of threads, but writes no slot while another thread
/// reads or writes that slot. 2. If a method unwinds, so does the pager's operation that called it;
/// the pages that it was about to move stay where they were, and the slots that it was to forget
/// are forgotten or overwritten later.
pub trait Swap: Sync {
    /// Returns the number of pages that it has room for.
    fn slots(&self) -> u32;

    /// Returns the size of its pages in bytes, which must be that of the pool's
    /// [`Layout`](crate::Layout).
    fn page(&self) -> u64;

    /// Stores `page` in `slot`.
    ///
    /// # Errors
    /// The page is not stored; the content of the slot is unspecified.
    fn write(&self, slot: u32, page: &[u8]) -> Result<(), SwapError>;

    /// Reads the page that was last written to `slot` into `page`.
    ///
    /// # Errors
    /// The page could not be read; the slot still has it.
    fn read(&self, slot: u32, page: &mut [u8]) -> Result<(), SwapError>;

    /// Forgets the content of these slots: it must not be readable afterwards, and its room may be
    /// freed. The pager neither reads nor writes the slots during the call, and writes them before
    /// it reads them again. The provided method does nothing.
    ///
    /// # Errors
    /// Some of the slots may still hold their content. The pager treats them as free all the same.
    fn forget(&self, slots: Range<u32>) -> Result<(), SwapError> {
        _ = slots;
        Ok(())
    }
}

impl<S: Swap> Swap for &S {
    fn slots(&self) -> u32 {
        (**self).slots()
    }

    fn page(&self) -> u64 {
        (**self).page()
    }

    fn write(&self, slot: u32, page: &[u8]) -> Result<(), SwapError> {
        (**self).write(slot, page)
    }

    fn read(&self, slot: u32, page: &mut [u8]) -> Result<(), SwapError> {
        (**self).read(slot, page)
    }

    fn forget(&self, slots: Range<u32>) -> Result<(), SwapError> {
        (**self).forget(slots)
    }
}

/// Error of swap: a page could not be written, read or forgotten.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum SwapError {
    /// No slot is free, or the disk is full.
    Full,
    /// Swap ended before the end of the page.
    Short {
        /// Bytes of the page that were transferred.
        bytes: u32,
    },
    /// The system's error with this number.
    System {
        /// `errno`.
        errno: i32,
    },
}

impl fmt::Display for SwapError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => f.write_str(
                "swap is full; make room on its disk, give it more slots, or the guests more \
                 memory",
            ),
            Self::Short { bytes } => write!(f, "swap ended after {bytes} bytes of a page"),
            #[cfg(feature = "std")]
            Self::System { errno } => {
                write!(f, "swap: {}", std::io::Error::from_raw_os_error(*errno))
            }
            #[cfg(not(feature = "std"))]
            Self::System { errno } => write!(f, "swap: error {errno}"),
        }
    }
}

impl core::error::Error for SwapError {}
