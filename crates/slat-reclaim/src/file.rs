//! Swap in an unnamed file, which the system removes when the process ends.

use crate::swap::{Swap, SwapError};
use slat::PageSize;
use std::fs::{File, Permissions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// Swap in an unnamed file of a directory. The file is made without a name if the file system can
/// do that (`O_TMPFILE`), otherwise it is unlinked at once. It grows as it is written, and only its
/// owner may access it (mode 0600). [`Swap::forget`] punches holes, which frees the room in the
/// file system; on a file system without holes it writes zeroes.
///
/// Through the page cache, a write returns before the disk has the page: the host gets the guest's
/// memory back only later, and an error of the disk comes too late to be returned.
/// [`SwapFile::direct`] bypasses the cache.
#[derive(Debug)]
pub struct SwapFile {
    file: File,
    slots: u32,
    page: PageSize,
    /// Set once the file system has refused to punch a hole.
    no_holes: AtomicBool,
}

impl SwapFile {
    /// Makes a file in `directory` with room for `slots` pages, accessed through the host's page
    /// cache: for a file system in memory, or if the cache is wanted.
    ///
    /// # Errors
    /// The system's error, such as a missing directory, or no right to write to it.
    pub fn new(directory: &Path, slots: u32, page: PageSize) -> io::Result<Self> {
        let file = tempfile::tempfile_in(directory)?;
        file.set_permissions(Permissions::from_mode(0o600))?;
        Ok(Self { file, slots, page, no_holes: AtomicBool::new(false) })
    }

    /// Makes a file in `directory` with room for `slots` pages, accessed without the page cache
    /// (`O_DIRECT`): once a page has left, its write has succeeded, and the host has its memory
    /// back.
    ///
    /// # Errors
    /// Those of [`SwapFile::new`]; `EINVAL` if the file system does not support `O_DIRECT`.
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

    /// Punches a hole; returns false if the file system cannot.
    #[cfg(target_os = "linux")]
    fn punch(&self, slots: &Range<u32>) -> io::Result<bool> {
        use rustix::fs::{FallocateFlags, fallocate};
        use rustix::io::{Errno, retry_on_intr};
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let (start, end) = (self.at(slots.start), self.at(slots.end));
        match retry_on_intr(|| fallocate(&self.file, hole, start, end - start)) {
            Ok(()) => Ok(true),
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    #[cfg(not(target_os = "linux"))]
    fn punch(&self, _: &Range<u32>) -> io::Result<bool> {
        Ok(false)
    }

    /// Overwrites these slots with zeroes, up to the end of the file.
    fn overwrite(&self, slots: Range<u32>) -> io::Result<()> {
        let end = self.file.metadata()?.len();
        let mut buffer = crate::buffer::Buffer::default();
        let zeroes = buffer.page(self.page.bytes());
        zeroes.fill(0);
        slots
            .take_while(|&slot| self.at(slot) < end)
            .try_for_each(|slot| self.file.write_all_at(zeroes, self.at(slot)))
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
        self.file.write_all_at(page, self.at(slot)).map_err(|reason| error(&reason))
    }

    fn read(&self, slot: u32, page: &mut [u8]) -> Result<(), SwapError> {
        let mut done = 0;
        while done < page.len() {
            match self.file.read_at(&mut page[done..], self.at(slot) + done as u64) {
                Ok(0) => return Err(SwapError::Short { bytes: done as u32 }),
                Ok(bytes) => done += bytes,
                Err(reason) if reason.kind() == io::ErrorKind::Interrupted => {}
                Err(reason) => return Err(error(&reason)),
            }
        }
        Ok(())
    }

    fn forget(&self, slots: Range<u32>) -> Result<(), SwapError> {
        let forget = || {
            if !self.no_holes.load(Ordering::Relaxed) {
                if self.punch(&slots)? {
                    return Ok(());
                }
                self.no_holes.store(true, Ordering::Relaxed);
            }
            self.overwrite(slots.clone())
        };
        forget().map_err(|reason| error(&reason))
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
    fn a_direct_swap_file_keeps_pages_or_reports_it_cannot() {
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
        let no_holes = AtomicBool::new(false);
        let swap = SwapFile { file: full, slots: 1, page: PageSize::SIZE_4K, no_holes };
        assert_eq!(swap.write(0, &[0; 4096]), Err(SwapError::Full));
    }

    #[test]
    fn a_directory_that_is_not_there_is_an_error() {
        assert!(SwapFile::new(Path::new("/nonexistent"), 1, PageSize::SIZE_4K).is_err());
    }

    /// With holes and without, with the page cache and without: forgotten slots are not in the
    /// file, all others are.
    #[test]
    #[cfg(target_os = "linux")]
    fn what_is_forgotten_is_gone_and_its_neighbours_are_kept() {
        use std::os::unix::fs::MetadataExt;
        let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let direct = SwapFile::direct(directory.path(), 64, PageSize::SIZE_4K);
        let swaps = [SwapFile::new(directory.path(), 64, PageSize::SIZE_4K).ok(), direct.ok()];
        for (swap, no_holes) in
            swaps.iter().flatten().flat_map(|swap| [(swap, false), (swap, true)])
        {
            let mut buffer = crate::buffer::Buffer::default();
            let page = buffer.page(4096);
            page.fill(7);
            (0..40).for_each(|slot| swap.write(slot, page).unwrap());
            let before = swap.file.metadata().unwrap();
            swap.no_holes.fetch_or(no_holes, Ordering::Relaxed);
            // The second range goes beyond the end of the file.
            swap.forget(8..24).unwrap();
            swap.forget(32..64).unwrap();
            for slot in 0..40 {
                swap.read(slot, page).unwrap();
                let kept = !(8..24).contains(&slot) && slot < 32;
                assert!(page.iter().all(|byte| *byte == if kept { 7 } else { 0 }), "{slot}");
            }
            let after = swap.file.metadata().unwrap();
            assert_eq!(after.len(), 40 * 4096, "its size");
            assert_eq!(after.mode() & 0o777, 0o600);
            let holes = !swap.no_holes.load(Ordering::Relaxed);
            assert!(!holes || after.blocks() < before.blocks(), "room that was given back");
        }
    }
}
