//! What the kernel tells of the pages of a mapping: `/proc/self/pagemap` (pagemap.rst,
//! soft-dirty.rst) and `mincore`.

use crate::memory::HostMemory;
use crate::{Backing, Error};
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

/// Bits of an entry: the page is present, and the number of its frame (pagemap.rst).
pub(crate) const PRESENT: u64 = 1 << 63;
pub(crate) const FRAME: u64 = (1 << 55) - 1;
const SOFT_DIRTY: u64 = 1 << 55;

/// The argument of `PAGEMAP_SCAN`.
#[repr(C)]
#[derive(Default)]
struct Scan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: u64 = 0xc060_6610;
/// Protect the pages that match, and refuse ranges that are not registered for `WP_ASYNC`.
const PROTECT_MATCHING: u64 = 1 | 2;
const WRITTEN: u64 = 1 << 1;
/// Regions that one scan returns at most.
const REGIONS: usize = 512;

/// Calls `each` with the pages, from the start of the memory, that were written since they were
/// write-protected, and protects them again. The memory is registered for `WP_ASYNC`.
///
/// # Errors
/// [`Error::Os`]: `ENOTTY` before Linux 6.7.
pub(crate) fn take_written(
    memory: &HostMemory,
    mut each: impl FnMut(Range<u64>),
) -> Result<(), Error> {
    let call = "PAGEMAP_SCAN";
    let map = File::open("/proc/self/pagemap").map_err(Error::os("open of pagemap"))?;
    let page = Backing::Small.page_size();
    let (start, end) = (memory.host_address(), memory.host_address() + memory.len());
    let mut regions = vec![[0u64; 3]; REGIONS];
    let mut at = start;
    while at < end {
        let mut scan = Scan {
            size: size_of::<Scan>() as u64,
            flags: PROTECT_MATCHING,
            start: at,
            end,
            // Given to the kernel as a number, which writes there.
            vec: regions.as_mut_ptr().expose_provenance() as u64,
            vec_len: REGIONS as u64,
            category_mask: WRITTEN,
            return_mask: WRITTEN,
            ..Scan::default()
        };
        // SAFETY: the structure is the request's, and the kernel writes at most `vec_len` regions
        // of three words to `regions`, which has as many.
        let found = unsafe { libc::ioctl(map.as_raw_fd(), PAGEMAP_SCAN as _, &raw mut scan) };
        if found < 0 {
            return Err(Error::os(call)(std::io::Error::last_os_error()));
        }
        for [from, to, _] in &regions[..(found as usize).min(REGIONS)] {
            each((from - start) / page..(to - start) / page);
        }
        // A scan that ends where it began would go on forever.
        if scan.walk_end <= at {
            return Err(Error::os(call)(rustix::io::Errno::IO));
        }
        at = scan.walk_end;
    }
    Ok(())
}

/// Clears the soft-dirty bits of this process.
///
/// # Errors
/// [`Error::NoSoftDirty`] if the kernel has none; [`Error::Os`].
pub(crate) fn clear_soft_dirty() -> Result<(), Error> {
    std::fs::write("/proc/self/clear_refs", "4").map_err(Error::os("write of clear_refs"))
}

/// Returns an error if the kernel has no soft-dirty bits.
pub(crate) fn check_soft_dirty() -> Result<(), Error> {
    let memory = HostMemory::new(Backing::Small.page_size(), Backing::Small)?;
    memory.write(0, 1);
    // Without the configuration the bit is never set, and the clear is accepted all the same.
    let before = clear_soft_dirty().map(|()| soft_dirty(&memory).len());
    memory.write(0, 2);
    match (before, soft_dirty(&memory).len()) {
        (Ok(0), 1) => Ok(()),
        _ => Err(Error::NoSoftDirty),
    }
}

/// Returns the pages that were written since the bits were cleared.
pub(crate) fn soft_dirty(memory: &HostMemory) -> Vec<u64> {
    let mut pages = Vec::new();
    let _ = entries(memory, |page, entry| pages.extend((entry & SOFT_DIRTY != 0).then_some(page)));
    pages
}

/// Returns the pages that are in memory.
///
/// # Errors
/// [`Error::Os`].
pub(crate) fn in_core(memory: &HostMemory) -> Result<Vec<u64>, Error> {
    let mut pages = vec![0u8; (memory.len() / Backing::Small.page_size()) as usize];
    let start = std::ptr::without_provenance_mut(memory.host_address() as usize);
    // SAFETY: the range is the memory's mapping, which the call neither reads nor writes, and the
    // vector has a byte for each of its pages.
    match unsafe { libc::mincore(start, memory.len() as usize, pages.as_mut_ptr()) } {
        0 => {
            Ok((0..).zip(&pages).filter(|(_, in_core)| **in_core & 1 != 0).map(|it| it.0).collect())
        }
        _ => Err(Error::os("mincore")(std::io::Error::last_os_error())),
    }
}

/// Returns how many pages of a memory are mapped, where procfs tells.
pub(crate) fn present(memory: &HostMemory) -> Option<u64> {
    let mut pages = 0;
    entries(memory, |_, entry| pages += u64::from(entry & PRESENT != 0)).ok()?;
    Some(pages)
}

/// Calls `each` with the number and the entry of each page.
///
/// # Errors
/// [`Error::Os`].
pub(crate) fn entries(memory: &HostMemory, mut each: impl FnMut(u64, u64)) -> Result<(), Error> {
    let page = rustix::param::page_size() as u64;
    let map = File::open("/proc/self/pagemap").map_err(Error::os("open of pagemap"))?;
    let (first, pages) = (memory.host_address() / page, memory.len() / page);
    let mut bytes = vec![0; 8 << 10];
    let mut at = 0;
    while at < pages {
        let count = (pages - at).min(1 << 10);
        let part = &mut bytes[..count as usize * 8];
        map.read_exact_at(part, (first + at) * 8).map_err(Error::os("read of pagemap"))?;
        for (place, entry) in (at..).zip(part.as_chunks::<8>().0) {
            each(place, u64::from_ne_bytes(*entry));
        }
        at += count;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Backing;

    #[test]
    fn pages_that_were_touched_are_present() {
        let memory = HostMemory::new(8 << 20, Backing::Small).unwrap();
        (0..100).for_each(|page| memory.write(page * 2 * 4096, 1).unwrap());
        assert_eq!(present(&memory), Some(100));
    }
}
