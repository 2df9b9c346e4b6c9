//! Host memory that backs a guest's memory.

use crate::error::size_name;
use crate::procfs::Files;
use crate::{Error, hugetlb, meminfo};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use std::ffi::c_void;
use std::fmt;
use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::NonNull;
use std::slice;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Kinds of host memory that can back a guest's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Backing {
    /// Anonymous memory in base pages, with transparent huge pages disabled (`MADV_NOHUGEPAGE`).
    Small,
    /// Anonymous memory, in transparent huge pages where the kernel provides them
    /// (`MADV_HUGEPAGE`): of 2 MiB if base pages are of 4 KiB.
    Thp,
    /// Anonymous memory of a hugetlb pool, in pages of so many bytes.
    Hugetlb(u64),
    /// Anonymous shared memory.
    Shmem,
    /// A memfd, mapped shared.
    Memfd,
    /// A memfd of a hugetlb pool, in pages of so many bytes, mapped shared.
    MemfdHugetlb(u64),
}

impl Backing {
    /// All kinds, those of pools in pages of 2 MiB and of 1 GiB.
    pub const ALL: [Backing; 7] = [
        Backing::Small,
        Backing::Thp,
        Backing::Hugetlb(2 << 20),
        Backing::Hugetlb(1 << 30),
        Backing::Shmem,
        Backing::Memfd,
        Backing::MemfdHugetlb(2 << 20),
    ];

    /// Returns the size of a page, in bytes.
    pub fn page_size(self) -> u64 {
        match self {
            Backing::Small | Backing::Shmem | Backing::Memfd => rustix::param::page_size() as u64,
            Backing::Thp => transparent_huge_page(),
            Backing::Hugetlb(size) | Backing::MemfdHugetlb(size) => size,
        }
    }

    /// Returns the name for reports, with the size of a page on this host: `4k`, `2m`,
    /// `hugetlb-2m`, ...
    pub fn name(self) -> String {
        let size = size_name(self.page_size());
        match self {
            Backing::Small | Backing::Thp => size,
            Backing::Hugetlb(_) => format!("hugetlb-{size}"),
            Backing::Shmem => "shmem".to_owned(),
            Backing::Memfd => "memfd".to_owned(),
            Backing::MemfdHugetlb(_) => format!("memfd-hugetlb-{size}"),
        }
    }

    /// Returns whether the pages come from the hugetlb pool and not from free memory.
    pub(crate) fn is_hugetlb(self) -> bool {
        matches!(self, Backing::Hugetlb(_) | Backing::MemfdHugetlb(_))
    }

    /// Checks that the host has `bytes` bytes of this memory available.
    ///
    /// # Errors
    /// [`Error::NoHugePages`], [`Error::NoTransparentHugePages`], [`Error::NotEnoughMemory`] or
    /// [`Error::MemoryUntold`].
    pub fn check(self, bytes: u64) -> Result<(), Error> {
        self.check_with(bytes, 0)
    }

    /// Checks the same, and that `more` bytes of ordinary memory are available beside it.
    pub(crate) fn check_with(self, bytes: u64, more: u64) -> Result<(), Error> {
        if self.is_hugetlb() {
            hugetlb::check(self.page_size(), bytes.div_ceil(self.page_size()))?;
            // MemAvailable no longer counts the pages of the pool, but KVM's tables come from it.
            return meminfo::check((bytes / 64).saturating_add(more));
        }
        if self == Backing::Thp {
            let enabled = Files::here().choice("sys/kernel/mm/transparent_hugepage/enabled");
            if !matches!(enabled.as_deref(), Some("madvise" | "always")) {
                return Err(Error::NoTransparentHugePages);
            }
        }
        meminfo::check(bytes.saturating_add(more))
    }
}

impl fmt::Display for Backing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.name())
    }
}

/// Returns the size of a transparent huge page on this host.
fn transparent_huge_page() -> u64 {
    static SIZE: OnceLock<u64> = OnceLock::new();
    *SIZE.get_or_init(|| huge_page_of(Files::here(), rustix::param::page_size() as u64))
}

/// Returns the size of a transparent huge page of a host: what one table of base pages of `page`
/// bytes maps, which a kernel without them does not tell.
fn huge_page_of(files: Files<'_>, page: u64) -> u64 {
    files.transparent_huge_page().unwrap_or(page * (page / 8))
}

/// A mapping of host memory, which is unmapped when it is dropped.
///
/// A guest may write to it at any time, so this process accesses it only by atomic loads and stores
/// of single words.
#[derive(Debug)]
pub struct HostMemory {
    /// Start of the mapping, which is aligned to the backing's page size.
    start: NonNull<c_void>,
    len: usize,
}

impl HostMemory {
    /// Maps `bytes` bytes of memory, aligned to the backing's page size and not yet populated.
    ///
    /// # Errors
    /// [`Error::Invalid`] if `bytes` is 0 or no multiple of the page size, or does not fit the
    /// address space; [`Error::Os`] if the kernel refuses.
    pub fn new(bytes: u64, backing: Backing) -> Result<Self, Error> {
        let page_size = backing.page_size();
        if !page_size.is_power_of_two() {
            return Err(Error::invalid("page size", page_size, "must be a power of two"));
        }
        if bytes == 0 || !bytes.is_multiple_of(page_size) {
            let rule = format!("must be a multiple of the page size, {}", size_name(page_size));
            return Err(Error::invalid("memory", bytes, rule));
        }
        let too_big = |_| Error::invalid("memory", bytes, "must fit the address space");
        let len = usize::try_from(bytes).map_err(too_big)?;
        let align = page_size as usize;
        // The kernel aligns hugetlb mappings to their page size, and other mappings only to base
        // pages.
        let spare = if backing.is_hugetlb() { 0 } else { align };
        let flags = match backing {
            Backing::Hugetlb(_) => {
                MapFlags::HUGETLB | MapFlags::from_bits_retain(in_flags(page_size))
            }
            Backing::Small | Backing::Thp | Backing::Shmem | Backing::Memfd => MapFlags::NORESERVE,
            // `memfd_create` takes these properties for a memfd.
            Backing::MemfdHugetlb(_) => MapFlags::empty(),
        };
        let total = len
            .checked_add(spare)
            .ok_or_else(|| Error::invalid("memory", bytes, "must fit the address space"))?;
        let mapped = map(total, backing, flags)?;
        let head = if spare == 0 { 0 } else { mapped.addr().wrapping_neg() % align };
        let tail = spare - head;
        let start = mapped.wrapping_byte_add(head);
        for (piece, len) in [(mapped, head), (start.wrapping_byte_add(len), tail)] {
            if len != 0 {
                // SAFETY: the piece lies in the new mapping, outside of the part that is kept, and
                // no pointer to it has left this function. If the call fails, the piece stays
                // mapped and unused.
                let _ = unsafe { munmap(piece, len) };
            }
        }
        let start = NonNull::new(start)
            .ok_or_else(|| Error::os("mmap of guest memory")(rustix::io::Errno::FAULT))?;
        let memory = Self { start, len };
        let advice = match backing {
            Backing::Small => Some(Advice::LinuxNoHugepage),
            Backing::Thp => Some(Advice::LinuxHugepage),
            _ => None,
        };
        if let Some(advice) = advice {
            // SAFETY: the range is this mapping, and neither advice changes its contents.
            match unsafe { madvise(memory.start.as_ptr(), memory.len, advice) } {
                // A kernel without transparent huge pages does not know this advice, and provides
                // base pages anyway.
                Err(rustix::io::Errno::INVAL) if backing == Backing::Small => {}
                other => other.map_err(Error::os("madvise of guest memory"))?,
            }
        }
        Ok(memory)
    }

    /// Maps `bytes` bytes of a file.
    ///
    /// # Errors
    /// [`Error::Os`] if the kernel refuses.
    pub(crate) fn of_file(file: impl AsFd, bytes: u64, flags: MapFlags) -> Result<Self, Error> {
        let call = "mmap of guest memory";
        let len = usize::try_from(bytes).map_err(|_| Error::os(call)(Errno::NOMEM))?;
        let (any, access) = (std::ptr::null_mut(), ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: the kernel chooses the address of the new mapping, so it replaces no other. The
        // mapping keeps the file alive. The callers' files are a memfd and a file without a name,
        // so that nobody else truncates them.
        let mapped = unsafe { mmap(any, len, access, flags, file, 0) }.map_err(Error::os(call))?;
        let start = NonNull::new(mapped).ok_or_else(|| Error::os(call)(Errno::FAULT))?;
        Ok(Self { start, len })
    }

    /// Makes a memfd, mapped twice: a guest's memory, and the mapping by which it is filled.
    ///
    /// # Errors
    /// [`Error::Os`] if the kernel refuses.
    pub(crate) fn twice(bytes: u64, huge_page: Option<u64>) -> Result<[Self; 2], Error> {
        let huge = huge_page.map_or(MemfdFlags::empty(), |size| {
            MemfdFlags::HUGETLB | MemfdFlags::from_bits_retain(in_flags(size))
        });
        let file =
            memfd_create(c"slat", MemfdFlags::CLOEXEC | huge).map_err(Error::os("memfd_create"))?;
        ftruncate(&file, bytes).map_err(Error::os("ftruncate of a memfd"))?;
        let map = || Self::of_file(&file, bytes, MapFlags::SHARED);
        Ok([map()?, map()?])
    }

    /// Reads a range of the file into the same range of the memory.
    ///
    /// # Errors
    /// [`Error::Os`] if the file is too short or the kernel refuses; [`Error::Invalid`] if the
    /// range exceeds the memory.
    pub(crate) fn fill(&self, file: &File, range: Range<u64>) -> Result<(), Error> {
        if range.end > self.len() {
            return Err(Error::invalid("range", range.end, "exceeds the memory"));
        }
        let mut at = range.start;
        while at < range.end {
            let (to, len) = (self.start.as_ptr().wrapping_byte_add(at as usize), range.end - at);
            // SAFETY: the bytes lie in the mapping, which `self` keeps. The kernel writes them; no
            // reference to them exists but to atomic words.
            let read = unsafe { libc::pread(file.as_raw_fd(), to, len as usize, at as i64) };
            match read {
                0 => return Err(Error::os("pread of the guest's memory")(Errno::NODATA)),
                1.. => at += read as u64,
                _ => {
                    let answer = std::io::Error::last_os_error();
                    return Err(Error::os("pread of the guest's memory")(answer));
                }
            }
        }
        Ok(())
    }

    /// Allocates all of the memory, and maps it in this process for writing.
    ///
    /// # Errors
    /// [`Error::Os`] if the kernel refuses, or knows no `MADV_POPULATE_WRITE` (Linux 5.14).
    pub(crate) fn allocate(&self) -> Result<(), Error> {
        // SAFETY: this is the whole mapping, and the advice does not change its contents.
        unsafe {
            madvise(self.start.as_ptr().cast(), self.len() as usize, Advice::LinuxPopulateWrite)
        }
        .map_err(Error::os("madvise of MADV_POPULATE_WRITE"))
    }

    /// Maps the pages of a range for reading, ahead of any access.
    ///
    /// # Errors
    /// [`Error::Os`] if the kernel refuses, or knows no `MADV_POPULATE_READ` (Linux 5.14).
    pub(crate) fn populate(&self, range: Range<u64>) -> Result<(), Error> {
        let len = range.end.min(self.len()).saturating_sub(range.start) as usize;
        let at = self.start.as_ptr().wrapping_byte_add(range.start as usize);
        // SAFETY: the range lies in this mapping, and the advice does not change its contents.
        unsafe { madvise(at, len, Advice::LinuxPopulateRead) }
            .map_err(Error::os("madvise of MADV_POPULATE_READ"))
    }

    /// Takes the pages of a range away: to swap, or to the file that they are of.
    ///
    /// # Errors
    /// [`Error::Os`] if the kernel refuses, or knows no `MADV_PAGEOUT` (Linux 5.4).
    pub(crate) fn page_out(&self, range: Range<u64>) -> Result<(), Error> {
        self.take_away(range, Advice::LinuxPageOut)
    }

    /// Drops the contents of the pages of a range. Anonymous pages are empty afterwards.
    ///
    /// # Errors
    /// [`Error::Os`] if the kernel refuses.
    pub(crate) fn discard(&self, range: Range<u64>) -> Result<(), Error> {
        self.take_away(range, Advice::LinuxDontNeed)
    }

    fn take_away(&self, range: Range<u64>, advice: Advice) -> Result<(), Error> {
        let len = range.end.min(self.len()).saturating_sub(range.start) as usize;
        let at = self.start.as_ptr().wrapping_byte_add(range.start as usize);
        // SAFETY: the range lies in this mapping. Its contents may go: they are only read as
        // atomic words, which are valid with any value.
        unsafe { madvise(at, len, advice) }.map_err(Error::os("madvise of guest memory"))
    }

    /// Lets the kernel merge pages with others of the same contents.
    ///
    /// # Errors
    /// [`Error::NoMerging`] if it cannot.
    pub(crate) fn allow_merging(&self) -> Result<(), Error> {
        // SAFETY: the range is this mapping, and the advice does not change its contents.
        unsafe { madvise(self.start.as_ptr(), self.len, Advice::LinuxMergeable) }
            .map_err(|answer| Error::NoMerging { why: format!("MADV_MERGEABLE: {answer}") })
    }

    /// Returns the addresses of the mapping in this process.
    pub(crate) fn addresses(&self) -> Range<u64> {
        self.host_address()..self.host_address() + self.len()
    }

    /// Returns the size, in bytes.
    pub fn len(&self) -> u64 {
        self.len as u64
    }

    /// Returns false: there is no empty mapping.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the address of the mapping in this process.
    pub fn host_address(&self) -> u64 {
        self.start.as_ptr().addr() as u64
    }

    /// Reads the word at `offset`. Returns `None` if it lies outside of the memory or is not
    /// aligned.
    pub fn read(&self, offset: u64) -> Option<u64> {
        let word = self.word(offset)?;
        Some(word.load(Ordering::Relaxed))
    }

    /// Writes the word at `offset`. Returns `None` if it lies outside of the memory or is not
    /// aligned.
    pub fn write(&self, offset: u64, value: u64) -> Option<()> {
        self.word(offset)?.store(value, Ordering::Relaxed);
        Some(())
    }

    /// Returns the word at `offset`, or `None` if it lies outside of the memory or is not aligned.
    pub(crate) fn word(&self, offset: u64) -> Option<&AtomicU64> {
        self.words(offset, 8)?.first()
    }

    /// Returns the words of `bytes` bytes from `offset`, or `None` if they are not all in the
    /// memory or not aligned.
    pub(crate) fn words(&self, offset: u64, bytes: u64) -> Option<&[AtomicU64]> {
        let end = offset.checked_add(bytes)?;
        if !(offset | bytes).is_multiple_of(8) || end > self.len() {
            return None;
        }
        let first = self.start.as_ptr().wrapping_byte_add(offset as usize).cast();
        // SAFETY:
        // - aligned: the mapping starts on a page, and `offset` is a multiple of 8;
        // - valid for the result's lifetime: the bytes lie in the mapping, which `self` keeps; the
        //   mapping is one allocation, initialised, and no larger than `isize::MAX`;
        // - accessed only atomically: no other code in this process dereferences the pointer. A
        //   guest's writes are made by the CPU, which makes an aligned 64-bit store atomic.
        Some(unsafe { slice::from_raw_parts(first, bytes as usize / 8) })
    }

    /// Returns the bytes that the kernel holds in transparent huge pages now, or `None` if the
    /// kernel does not report it.
    ///
    /// The kernel need not follow `MADV_HUGEPAGE`, and a measurement depends on whether it did.
    pub fn transparent_huge_bytes(&self) -> Option<u64> {
        let start = self.host_address();
        Files::here().anon_huge_pages(start..start + self.len())
    }
}

// SAFETY: the mapping belongs to no thread, and all access to it is atomic.
unsafe impl Send for HostMemory {}
// SAFETY: as for `Send`; `&self` gives atomic access only.
unsafe impl Sync for HostMemory {}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping, and references into it do not outlive the borrows of
        // `self` by which they were made.
        let _ = unsafe { munmap(self.start.as_ptr(), self.len) };
    }
}

/// Returns a size of huge pages as `mmap` and `memfd_create` take it: its logarithm, in the upper
/// bits of the flags (`MAP_HUGE_SHIFT`).
fn in_flags(page_size: u64) -> u32 {
    page_size.trailing_zeros() << libc::MAP_HUGE_SHIFT
}

/// Makes the mapping. On an error, no mapping is left.
fn map(bytes: usize, backing: Backing, flags: MapFlags) -> Result<*mut c_void, Error> {
    let (any, access) = (std::ptr::null_mut(), ProtFlags::READ | ProtFlags::WRITE);
    let huge = match backing {
        Backing::Memfd => MemfdFlags::empty(),
        Backing::MemfdHugetlb(size) => {
            MemfdFlags::HUGETLB | MemfdFlags::from_bits_retain(in_flags(size))
        }
        _ => {
            let shared =
                if backing == Backing::Shmem { MapFlags::SHARED } else { MapFlags::PRIVATE };
            // SAFETY: the kernel chooses the address of the new mapping, so it replaces no other.
            return unsafe { mmap_anonymous(any, bytes, access, shared | flags) }
                .map_err(Error::os("mmap of guest memory"));
        }
    };
    let file =
        memfd_create(c"slat", MemfdFlags::CLOEXEC | huge).map_err(Error::os("memfd_create"))?;
    ftruncate(&file, bytes as u64).map_err(Error::os("ftruncate of a memfd"))?;
    // SAFETY: as above. The mapping keeps the file alive, and no other code has its descriptor and
    // could truncate it.
    unsafe { mmap(any, bytes, access, MapFlags::SHARED | flags, &file, 0) }
        .map_err(Error::os("mmap of guest memory"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vcpu_threads::HostFaults;

    #[test]
    fn memory_is_aligned_readable_and_bounded() {
        for backing in [Backing::Small, Backing::Thp, Backing::Shmem, Backing::Memfd] {
            let memory = HostMemory::new(4 << 20, backing).unwrap();
            assert_eq!(memory.host_address() % backing.page_size(), 0);
            let last = memory.len() - 8;
            assert_eq!(memory.write(last, 7), Some(()));
            assert_eq!(memory.read(last), Some(7));
            assert_eq!(memory.read(0), Some(0));
            for outside in [1, last + 1, memory.len(), u64::MAX, u64::MAX - 7] {
                assert_eq!(memory.read(outside), None, "{outside:#x}");
            }
            assert_eq!(memory.words(8, memory.len() - 8).map(<[_]>::len), Some((4 << 17) - 1));
            for (offset, bytes) in [(8, memory.len()), (4, 8), (8, 4), (8, u64::MAX)] {
                assert!(memory.words(offset, bytes).is_none(), "{offset:#x}, {bytes:#x}");
            }
        }
    }

    #[test]
    fn huge_pages_have_the_hosts_size_or_that_of_one_table() {
        let root = std::env::temp_dir().join(format!("slat-huge-page-{}", std::process::id()));
        let folder = root.join("sys/kernel/mm/transparent_hugepage");
        std::fs::create_dir_all(&folder).unwrap();
        for (page, told) in [(4 << 10, 2 << 20), (16 << 10, 32 << 20), (64 << 10, 512 << 20)] {
            assert_eq!(huge_page_of(Files(&root), page), told);
        }
        std::fs::write(folder.join("hpage_pmd_size"), "1048576\n").unwrap();
        assert_eq!(huge_page_of(Files(&root), 4 << 10), 1 << 20);
        std::fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn writes_to_allocated_memory_do_not_fault_in_the_host() {
        for backing in [Backing::Small, Backing::Shmem, Backing::Memfd] {
            let memory = HostMemory::new(4 << 20, backing).unwrap();
            let pages = (0..memory.len()).step_by(rustix::param::page_size());
            memory.allocate().unwrap();
            let faults = || HostFaults::now().expect("procfs counts faults").minor;
            let before = faults();
            assert!(pages.clone().all(|page| memory.read(page) == Some(0)), "{backing}");
            assert!(pages.clone().all(|page| memory.write(page, 7).is_some()));
            // Some are the test's own.
            let count = faults() - before;
            assert!(count < pages.count() as u64 / 4, "{backing}: {count} faults");
        }
    }

    #[test]
    fn a_mapping_that_is_no_multiple_of_its_pages_is_refused() {
        assert!(matches!(HostMemory::new(3 << 20, Backing::Thp), Err(Error::Invalid { .. })));
        assert!(matches!(HostMemory::new(0, Backing::Small), Err(Error::Invalid { .. })));
        let odd = HostMemory::new(3 << 20, Backing::Hugetlb(3 << 20));
        assert!(matches!(odd, Err(Error::Invalid { .. })));
    }

    #[test]
    fn a_size_of_huge_pages_is_in_the_flags_as_the_kernel_has_it() {
        assert_eq!(in_flags(2 << 20), MapFlags::HUGE_2MB.bits());
        assert_eq!(in_flags(1 << 30), MapFlags::HUGE_1GB.bits());
        assert_eq!(in_flags(512 << 20), MemfdFlags::HUGE_512MB.bits());
        assert_eq!(Backing::MemfdHugetlb(32 << 20).name(), "memfd-hugetlb-32m");
    }
}
