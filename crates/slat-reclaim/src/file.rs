//! A swap file that has no name: whatever happens to the process, nothing is left of it.

use crate::swap::{Swap, SwapError};
use slat::PageSize;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Swap in a file of a directory, without a name from the beginning where the file system can
/// (`O_TMPFILE`), else unlinked at once. It grows as it is written.
///
/// Through the page cache a write ends before the disk has it: memory is taken from the guest, but the host has it
/// only later, and an error of the disk's comes when nobody waits for it any more. [`SwapFile::direct`] goes past
/// the cache.
#[derive(Debug)]
pub struct SwapFile {
    file: File,
    slots: u32,
    page: PageSize,
}

impl SwapFile {
    /// Room for `slots` pages in a file of `directory`, through the host's page cache: for a file system in
    /// memory, or where the cache is wanted.
    ///
    /// # Errors
    /// The system's: no such directory, no right to write there.
    pub fn new(directory: &Path, slots: u32, page: PageSize) -> io::Result<Self> {
        Ok(Self { file: tempfile::tempfile_in(directory)?, slots, page })
    }

    /// The same past the page cache (`O_DIRECT`): once a page is away, its memory is the host's, and its write has
    /// succeeded.
    ///
    /// # Errors
    /// Those of [`SwapFile::new`]; `EINVAL` where the file system has no such access.
    #[cfg(target_os = "linux")]
    pub fn direct(directory: &Path, slots: u32, page: PageSize) -> io::Result<Self> {
        let swap = Self::new(directory, slots, page)?;
        let flags = rustix::fs::fcntl_getfl(&swap.file)?;
        rustix::fs::fcntl_setfl(&swap.file, flags | rustix::fs::OFlags::DIRECT)?;
        Ok(swap)
    }

    const fn at(&self, slot: u32) -> u64 {
        (slot as u64) << self.page.shift()
    }
}

fn error(error: &io::Error) -> SwapError {
    match (error.kind(), error.raw_os_error()) {
        (io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded, _) => SwapError::Full,
        (io::ErrorKind::WriteZero, _) => SwapError::Short { bytes: 0 },
        (_, errno) => SwapError::System { errno: errno.unwrap_or(0) },
    }
}

impl Swap for SwapFile {
    fn slots(&self) -> u32 {
        self.slots
    }

    fn page(&self) -> u64 {
        self.page.bytes()
    }

    fn write(&self, slot: u32, page: &[u8]) -> Result<(), SwapError> {
        self.file.write_all_at(page, self.at(slot)).map_err(|why| error(&why))
    }

    fn read(&self, slot: u32, page: &mut [u8]) -> Result<(), SwapError> {
        let mut done = 0;
        while done < page.len() {
            match self.file.read_at(&mut page[done..], self.at(slot) + done as u64) {
                Ok(0) => return Err(SwapError::Short { bytes: done as u32 }),
                Ok(bytes) => done += bytes,
                Err(why) if why.kind() == io::ErrorKind::Interrupted => {}
                Err(why) => return Err(error(&why)),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_comes_back_and_the_directory_stays_empty() {
        let directory = tempfile::tempdir().unwrap();
        let swap = SwapFile::new(directory.path(), 4, PageSize::SIZE_4K).unwrap();
        keeps(&swap);
        assert_eq!(directory.path().read_dir().unwrap().count(), 0);
    }

    fn keeps(swap: &SwapFile) {
        let mut buffer = crate::buffer::Buffer::default();
        for (slot, content) in [(3, 7), (0, 9)] {
            buffer.page(4096).fill(content);
            swap.write(slot, buffer.page(4096)).unwrap();
        }
        buffer.page(4096).fill(0);
        swap.read(3, buffer.page(4096)).unwrap();
        assert_eq!(buffer.page(4096), [7; 4096]);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_file_past_the_page_cache_keeps_pages_too_or_says_that_it_cannot_be() {
        let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        match SwapFile::direct(directory.path(), 4, PageSize::SIZE_4K) {
            Ok(swap) => keeps(&swap),
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{error}"),
        }
    }

    #[test]
    fn a_file_that_is_too_short_says_after_how_many_bytes() {
        let directory = tempfile::tempdir().unwrap();
        let swap = SwapFile::new(directory.path(), 4, PageSize::SIZE_4K).unwrap();
        swap.write(0, &[7; 4096]).unwrap();
        swap.file.set_len(4096 + 100).unwrap();
        assert_eq!(swap.read(1, &mut [0; 4096]), Err(SwapError::Short { bytes: 100 }));
        assert_eq!(swap.read(2, &mut [0; 4096]), Err(SwapError::Short { bytes: 0 }));
    }

    #[test]
    fn a_full_disk_is_called_so() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let swap = SwapFile { file: full, slots: 1, page: PageSize::SIZE_4K };
        assert_eq!(swap.write(0, &[0; 4096]), Err(SwapError::Full));
    }

    #[test]
    fn a_directory_that_is_not_there_is_an_error() {
        assert!(SwapFile::new(Path::new("/nonexistent"), 1, PageSize::SIZE_4K).is_err());
    }
}
