//! A swap file that has no name: whatever happens to the process, nothing is left of it.

use crate::swap::{Swap, SwapError};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Swap in a file of a directory, without a name from the beginning where the file system can
/// (`O_TMPFILE`), else unlinked at once. It grows as it is written.
#[derive(Debug)]
pub struct SwapFile {
    file: File,
    slots: u32,
    page: u32,
}

impl SwapFile {
    /// Room for `slots` pages of `page` bytes in a file of `directory`.
    ///
    /// # Errors
    /// The system's: no such directory, no right to write there.
    pub fn new(directory: &Path, slots: u32, page: u32) -> io::Result<Self> {
        Ok(Self { file: tempfile::tempfile_in(directory)?, slots, page })
    }

    fn at(&self, slot: u32) -> u64 {
        u64::from(slot) * u64::from(self.page)
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
        let swap = SwapFile::new(directory.path(), 4, 4096).unwrap();
        swap.write(3, &[7; 4096]).unwrap();
        swap.write(0, &[9; 4096]).unwrap();
        let mut page = [0; 4096];
        swap.read(3, &mut page).unwrap();
        assert_eq!(page, [7; 4096]);
        assert_eq!(directory.path().read_dir().unwrap().count(), 0);
    }

    #[test]
    fn a_file_that_is_too_short_says_after_how_many_bytes() {
        let directory = tempfile::tempdir().unwrap();
        let swap = SwapFile::new(directory.path(), 4, 4096).unwrap();
        swap.write(0, &[7; 4096]).unwrap();
        swap.file.set_len(4096 + 100).unwrap();
        assert_eq!(swap.read(1, &mut [0; 4096]), Err(SwapError::Short { bytes: 100 }));
        assert_eq!(swap.read(2, &mut [0; 4096]), Err(SwapError::Short { bytes: 0 }));
    }

    #[test]
    fn a_full_disk_is_called_so() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let swap = SwapFile { file: full, slots: 1, page: 4096 };
        assert_eq!(swap.write(0, &[0; 4096]), Err(SwapError::Full));
    }

    #[test]
    fn a_directory_that_is_not_there_is_an_error() {
        assert!(SwapFile::new(Path::new("/nonexistent"), 1, 4096).is_err());
    }
}
