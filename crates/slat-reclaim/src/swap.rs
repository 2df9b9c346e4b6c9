//! The interface of swap, where pages are while they are not in memory.

use core::fmt;
use core::ops::Range;

/// A place for pages: a file, a device, memory of another host.
///
/// Any number of threads call it; a slot is not written while it is read or written. Methods do not
/// unwind: the page that is moved would be lost to its guest.
pub trait Swap: Sync {
    /// The number of pages that it has room for.
    fn slots(&self) -> u32;

    /// Bytes of its pages: those of the [`Layout`](crate::Layout) of the pool.
    fn page(&self) -> u64;

    /// Keeps `page` as `slot`.
    ///
    /// # Errors
    /// It is not kept; what the slot holds is unspecified.
    fn write(&self, slot: u32, page: &[u8]) -> Result<(), SwapError>;

    /// Gives back what was written last as `slot`.
    ///
    /// # Errors
    /// The slot still has it.
    fn read(&self, slot: u32, page: &mut [u8]) -> Result<(), SwapError>;

    /// Forgets the content of these slots: nobody is to read it any more, and its room may be given
    /// back. They are not read or written meanwhile, and not read before they are written again.
    /// The provided method does nothing.
    ///
    /// # Errors
    /// Some of them may hold what they held. They are free all the same.
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

/// Why a page could not be kept, or not be had back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum SwapError {
    /// All slots are taken, or the disk is full.
    Full,
    /// It ended before the page did.
    Short {
        /// Bytes that came.
        bytes: u32,
    },
    /// The system's error of that number.
    System {
        /// `errno`.
        errno: i32,
    },
}

impl fmt::Display for SwapError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => f.write_str(
                "swap is full; make room on its disk, give it more slots, or the guests more memory",
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
