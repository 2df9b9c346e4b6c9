//! Swap for a guest's pages: memory of this process, or a file.

use super::settings::SwapPlace;
use anyhow::Context;
use slat::PageSize;
use slat_reclaim::{Swap, SwapError, SwapFile};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

pub enum LabSwap {
    /// Uses no system call, so that the policy is measured, and not the system's files.
    Memory {
        words: Box<[AtomicU64]>,
        page: PageSize,
    },
    File(SwapFile),
}

impl LabSwap {
    /// Makes swap for `slots` pages. A file bypasses the page cache, if its file system can do so.
    ///
    /// # Errors
    /// The path is no directory, or cannot be written to.
    pub fn new(place: &SwapPlace, slots: u32, page: PageSize) -> anyhow::Result<Self> {
        let directory = match place {
            SwapPlace::Memory => {
                let words = u64::from(slots) * page.bytes() / 8;
                let words = (0..words).map(|_| AtomicU64::new(0)).collect();
                return Ok(Self::Memory { words, page });
            }
            SwapPlace::Directory(directory) => directory,
        };
        let swap = SwapFile::direct(directory, slots, page)
            .or_else(|_| SwapFile::new(directory, slots, page));
        let named = || format!("no swap file in {}; name another --swap", directory.display());
        Ok(Self::File(swap.with_context(named)?))
    }

    fn words(words: &[AtomicU64], page: PageSize, slot: u32) -> &[AtomicU64] {
        let len = page.bytes() as usize / 8;
        &words[slot as usize * len..][..len]
    }
}

impl Swap for LabSwap {
    fn slots(&self) -> u32 {
        match self {
            Self::Memory { words, page } => (words.len() as u64 * 8 / page.bytes()) as u32,
            Self::File(file) => file.slots(),
        }
    }

    fn page(&self) -> u64 {
        match self {
            Self::Memory { page, .. } => page.bytes(),
            Self::File(file) => file.page(),
        }
    }

    fn write(&self, slot: u32, content: &[u8]) -> Result<(), SwapError> {
        match self {
            Self::Memory { words, page } => {
                let words = Self::words(words, *page, slot).iter();
                for (word, bytes) in words.zip(content.as_chunks().0) {
                    word.store(u64::from_ne_bytes(*bytes), Relaxed);
                }
                Ok(())
            }
            Self::File(file) => file.write(slot, content),
        }
    }

    fn read(&self, slot: u32, content: &mut [u8]) -> Result<(), SwapError> {
        match self {
            Self::Memory { words, page } => {
                let words = Self::words(words, *page, slot).iter();
                for (word, bytes) in words.zip(content.as_chunks_mut().0) {
                    *bytes = word.load(Relaxed).to_ne_bytes();
                }
                Ok(())
            }
            Self::File(file) => file.read(slot, content),
        }
    }

    fn forget(&self, slots: Range<u32>) -> Result<(), SwapError> {
        match self {
            // Only this process uses the memory, so nothing is to be released.
            Self::Memory { .. } => Ok(()),
            Self::File(file) => file.forget(slots),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn either_gives_back_what_it_was_given() {
        let directory = tempfile::tempdir().unwrap();
        for place in [SwapPlace::Memory, SwapPlace::Directory(directory.path().to_owned())] {
            let swap = LabSwap::new(&place, 3, PageSize::SIZE_4K).unwrap();
            assert_eq!((swap.slots(), swap.page()), (3, 4096));
            // A disk needs an aligned buffer.
            let mut room = vec![0; 8192];
            let start = room.as_ptr().align_offset(4096);
            let content = &mut room[start..start + 4096];
            for (slot, byte) in [(2, 7), (0, 9)] {
                content.fill(byte);
                swap.write(slot, content).unwrap();
            }
            content.fill(0);
            swap.read(2, content).unwrap();
            assert_eq!(content, [7; 4096]);
        }
        let nowhere = SwapPlace::Directory("/nonexistent".into());
        assert!(LabSwap::new(&nowhere, 3, PageSize::SIZE_4K).is_err());
    }
}
