//! A guest's memory in a file, from which it is restored.

use crate::arch::{MEMORY_GPA, RETURNS};
use crate::guest::Guest;
use crate::memory::HostMemory;
use crate::work::advance;
use crate::{Error, pagemap, size_name};
use rustix::fs::{Advice, fadvise};
use rustix::mm::MapFlags;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Words of a page that a write of the guest replaces: its step, its address, and returns.
const STAMP: u64 = 3;

/// Whether the file's pages are in the page cache when a restore begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum Cache {
    /// All in the page cache.
    Warm,
    /// None of them.
    Cold,
}

/// A file with the memory of a guest. It has no name any more, and goes with this value.
#[derive(Debug)]
pub struct Image {
    file: File,
    bytes: u64,
    page_size: u64,
}

impl Image {
    /// Writes the memory of a guest that wrote each of its pages once to a file in `folder`.
    ///
    /// # Errors
    /// [`Error::Os`] if the folder takes no file of that size.
    pub fn new(folder: &Path, bytes: u64) -> Result<Self, Error> {
        let call = "write of the guest's memory to a file";
        static MADE: AtomicU64 = AtomicU64::new(0);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let path = folder.join(format!("slat-memory-{}-{number}", std::process::id()));
        let file = File::options().read(true).write(true).create_new(true).open(&path);
        let file = file.map_err(Error::os(call))?;
        std::fs::remove_file(&path).map_err(Error::os(call))?;
        let image = Self { file, bytes, page_size: rustix::param::page_size() as u64 };
        let mut out = BufWriter::with_capacity(1 << 20, &image.file);
        for page in 0..bytes / image.page_size {
            for place in 0..image.page_size / 8 {
                let word = image.word(page, place).to_le_bytes();
                out.write_all(&word).map_err(Error::os(call))?;
            }
        }
        out.flush().map_err(Error::os(call))?;
        drop(out);
        // Only pages that are written back can leave the cache.
        image.file.sync_all().map_err(Error::os(call))?;
        Ok(image)
    }

    /// Returns the file.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Returns a word of a page: the guest's stamp, and behind it numbers that differ by page.
    fn word(&self, page: u64, place: u64) -> u64 {
        match place {
            // Steps of vCPUs have numbers from 2^40 on.
            0 => page + 1,
            1 => MEMORY_GPA + page * self.page_size,
            2 => RETURNS,
            _ => advance(page << 16 | place),
        }
    }

    /// Brings the file's pages into the page cache, or out of it.
    ///
    /// # Errors
    /// [`Error::NoColdCache`] if they stay in the cache, as those of a tmpfs do; [`Error::Os`].
    pub fn set_cache(&self, cache: Cache) -> Result<(), Error> {
        match cache {
            Cache::Warm => {
                let mut bytes = vec![0; 1 << 20];
                let mut at = 0;
                while at < self.bytes {
                    let read = self.file.read_at(&mut bytes, at);
                    match read.map_err(Error::os("read of the guest's memory"))? {
                        0 => break,
                        read => at += read as u64,
                    }
                }
                Ok(())
            }
            Cache::Cold => {
                fadvise(&self.file, 0, None, Advice::DontNeed)
                    .map_err(Error::os("posix_fadvise"))?;
                let cached = self.cached()?;
                // A page that something else uses at this moment may stay.
                if cached > self.bytes / 100 {
                    return Err(Error::NoColdCache { cached: size_name(cached) });
                }
                Ok(())
            }
        }
    }

    /// Returns how many bytes of the file are in the page cache.
    fn cached(&self) -> Result<u64, Error> {
        let mapped = self.map_shared()?;
        Ok(pagemap::in_core(&mapped)?.len() as u64 * self.page_size)
    }

    /// Compares each word of the guest's memory with the file, and with the stamps of the pages
    /// that the guest wrote since: `last` has the number of the last step that wrote each page, or
    /// 0. With `may_be_empty`, a page may hold nothing but the guest's stamp, or nothing.
    ///
    /// # Errors
    /// [`Error::WrongStamp`], [`Error::Stopped`].
    pub(crate) fn compare(
        &self,
        guest: &Guest,
        last: &[u64],
        may_be_empty: bool,
        stop: &AtomicBool,
    ) -> Result<(), Error> {
        for (page, &step) in (0u64..).zip(last) {
            if page.is_multiple_of(1024) && stop.load(Ordering::Relaxed) {
                return Err(Error::Stopped);
            }
            if step != 0 {
                guest.check_stamp(page, step)?;
            }
            let first = if step == 0 { 0 } else { STAMP };
            let word = |place| guest.memory().read(page * self.page_size + place * 8).unwrap_or(0);
            let empty = may_be_empty && word(STAMP) == 0;
            for place in first..self.page_size / 8 {
                let found = word(place);
                let expected = if empty { 0 } else { self.word(page, place) };
                if found != expected {
                    return Err(Error::WrongStamp { page, found, expected });
                }
            }
        }
        Ok(())
    }

    /// Maps the file, which the guest's writes then change.
    pub(crate) fn map_shared(&self) -> Result<HostMemory, Error> {
        HostMemory::of_file(&self.file, self.bytes, MapFlags::SHARED)
    }

    /// Maps the file privately, as the memory of a guest.
    pub(crate) fn map_private(&self) -> Result<HostMemory, Error> {
        HostMemory::of_file(&self.file, self.bytes, MapFlags::PRIVATE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_leaves_the_cache_and_comes_back_where_a_disk_has_it() {
        let folder = tempfile::tempdir().unwrap();
        let image = Image::new(folder.path(), 1 << 20).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "it has no name");
        image.set_cache(Cache::Warm).unwrap();
        assert_eq!(image.cached().unwrap(), 1 << 20);
        match image.set_cache(Cache::Cold) {
            Ok(()) => assert!(image.cached().unwrap() <= (1 << 20) / 100),
            Err(error) => assert!(matches!(error, Error::NoColdCache { .. }), "{error}"),
        }
        let memory = image.map_private().unwrap();
        assert_eq!(memory.read(4096 + 8), Some(MEMORY_GPA + 4096));
    }
}
