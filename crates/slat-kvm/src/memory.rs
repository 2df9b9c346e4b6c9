//! Memory of the host that becomes memory of a guest.

use crate::{Error, hugetlb, meminfo};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use slat_procfs::Files;
use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

const SIZE_2M: u64 = 2 << 20;
const SIZE_1G: u64 = 1 << 30;

/// The pages that hold the guest's memory in the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Backing {
    /// The host's base pages, with transparent huge pages refused (`MADV_NOHUGEPAGE`).
    Small,
    /// 2 MiB pages where the kernel finds them (`MADV_HUGEPAGE`).
    Thp,
    /// 2 MiB pages of the kernel's pool.
    Hugetlb2M,
    /// 1 GiB pages of the kernel's pool.
    Hugetlb1G,
    /// Shared memory without a name.
    Shmem,
    /// A memfd, mapped shared.
    Memfd,
    /// The same, of 2 MiB pages of the kernel's pool.
    MemfdHugetlb2M,
}

impl Backing {
    /// All there are.
    pub const ALL: [Backing; 7] = [
        Backing::Small,
        Backing::Thp,
        Backing::Hugetlb2M,
        Backing::Hugetlb1G,
        Backing::Shmem,
        Backing::Memfd,
        Backing::MemfdHugetlb2M,
    ];

    /// Bytes of one page.
    pub fn page_size(self) -> u64 {
        match self {
            Backing::Small | Backing::Shmem | Backing::Memfd => rustix::param::page_size() as u64,
            Backing::Thp | Backing::Hugetlb2M | Backing::MemfdHugetlb2M => SIZE_2M,
            Backing::Hugetlb1G => SIZE_1G,
        }
    }

    /// Name for reports and command lines: `4k`, `2m`, `hugetlb-2m`, ...
    pub fn name(self) -> &'static str {
        match self {
            Backing::Small => "4k",
            Backing::Thp => "2m",
            Backing::Hugetlb2M => "hugetlb-2m",
            Backing::Hugetlb1G => "hugetlb-1g",
            Backing::Shmem => "shmem",
            Backing::Memfd => "memfd",
            Backing::MemfdHugetlb2M => "memfd-hugetlb-2m",
        }
    }

    /// Whether the pages come from a pool of the kernel and not from free memory.
    pub(crate) fn is_hugetlb(self) -> bool {
        matches!(self, Backing::Hugetlb2M | Backing::Hugetlb1G | Backing::MemfdHugetlb2M)
    }

    /// Checks that `bytes` of it can be had.
    ///
    /// # Errors
    /// [`Error::NoHugePages`], [`Error::NoTransparentHugePages`] or [`Error::NotEnoughMemory`].
    pub fn check(self, bytes: u64) -> Result<(), Error> {
        if self.is_hugetlb() {
            hugetlb::check(self.page_size(), bytes.div_ceil(self.page_size()))?;
            // The pages themselves are taken from MemAvailable already; the tables are not.
            return meminfo::check(bytes / 64);
        }
        if self == Backing::Thp {
            let enabled = Files::here().choice("sys/kernel/mm/transparent_hugepage/enabled");
            if !matches!(enabled.as_deref(), Some("madvise" | "always")) {
                return Err(Error::NoTransparentHugePages);
            }
        }
        meminfo::check(bytes)
    }
}

impl fmt::Display for Backing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// `4k`, `2m`, `1g`: a power of two with the largest unit that divides it.
pub(crate) fn size_name(bytes: u64) -> String {
    match bytes {
        b if b >= SIZE_1G && b % SIZE_1G == 0 => format!("{}g", b >> 30),
        b if b >= 1 << 20 && b % (1 << 20) == 0 => format!("{}m", b >> 20),
        b => format!("{}k", b >> 10),
    }
}

/// A mapping of its own, unmapped when dropped.
///
/// A guest may write to it at any time, so all access to it is by atomic loads and stores
/// of single words.
#[derive(Debug)]
pub struct HostMemory {
    /// Start of the mapping, which is aligned to the backing's page size.
    start: NonNull<c_void>,
    len: usize,
}

impl HostMemory {
    /// Maps `bytes` of memory, aligned to the backing's page size and not yet populated.
    ///
    /// # Errors
    /// [`Error::Os`] if the kernel refuses.
    pub fn new(bytes: u64, backing: Backing) -> Result<Self, Error> {
        let page_size = backing.page_size();
        if bytes == 0 || !bytes.is_multiple_of(page_size) {
            let rule = format!("must be a multiple of the page size, {}", size_name(page_size));
            return Err(Error::invalid("memory", bytes, rule));
        }
        let too_big = |_| Error::invalid("memory", bytes, "must fit the address space");
        let len = usize::try_from(bytes).map_err(too_big)?;
        let align = page_size as usize;
        // The kernel aligns hugetlb mappings by itself, and other mappings only to base pages.
        let spare = if backing.is_hugetlb() { 0 } else { align };
        let flags = match backing {
            Backing::Hugetlb2M => MapFlags::HUGETLB | MapFlags::HUGE_2MB,
            Backing::Hugetlb1G => MapFlags::HUGETLB | MapFlags::HUGE_1GB,
            Backing::Small | Backing::Thp | Backing::Shmem | Backing::Memfd => MapFlags::NORESERVE,
            // What a memfd has is said as it is made.
            Backing::MemfdHugetlb2M => MapFlags::empty(),
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
                // SAFETY: the piece lies in the mapping just made, outside of what is kept, and
                // nobody has seen a pointer to it. Failing would leave it mapped, unused.
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
                // A kernel without transparent huge pages does not know the advice; base pages
                // are then what it gives anyway.
                Err(rustix::io::Errno::INVAL) if backing == Backing::Small => {}
                other => other.map_err(Error::os("madvise of guest memory"))?,
            }
        }
        Ok(memory)
    }

    /// Bytes.
    pub fn len(&self) -> u64 {
        self.len as u64
    }

    /// Never: an empty mapping cannot be made.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address in this process.
    pub fn host_address(&self) -> u64 {
        self.start.as_ptr().addr() as u64
    }

    /// Reads the word at `offset`, if there is one and it is aligned.
    pub fn read(&self, offset: u64) -> Option<u64> {
        let word = self.word(offset)?;
        Some(word.load(Ordering::Relaxed))
    }

    /// Writes the word at `offset`, if there is one and it is aligned.
    pub fn write(&self, offset: u64, value: u64) -> Option<()> {
        self.word(offset)?.store(value, Ordering::Relaxed);
        Some(())
    }

    /// The word at `offset`, if there is one and it is aligned.
    pub(crate) fn word(&self, offset: u64) -> Option<&AtomicU64> {
        let end = offset.checked_add(8)?;
        if !offset.is_multiple_of(8) || end > self.len() {
            return None;
        }
        let word = self.start.as_ptr().wrapping_byte_add(offset as usize).cast();
        // SAFETY:
        // - aligned: the mapping starts on a page, and `offset` is a multiple of 8;
        // - valid for the result's lifetime: the 8 bytes lie in the mapping, which `self` keeps;
        // - only atomic accesses: the pointer is never dereferenced elsewhere in this process.
        //   A guest's writes are made by the CPU, to which an aligned 64-bit store is atomic.
        Some(unsafe { AtomicU64::from_ptr(word) })
    }

    /// Bytes of it that the kernel holds in transparent huge pages now, if it says so.
    ///
    /// `MADV_HUGEPAGE` is a wish. What came of it decides what is measured.
    pub fn transparent_huge_bytes(&self) -> Option<u64> {
        let start = self.host_address();
        Files::here().anon_huge_pages(start..start + self.len())
    }
}

// SAFETY: the mapping belongs to no thread, and all access to it is atomic.
unsafe impl Send for HostMemory {}
// SAFETY: as for `Send`; `&self` gives nothing but atomic access.
unsafe impl Sync for HostMemory {}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and references into it do not outlive its
        // methods.
        let _ = unsafe { munmap(self.start.as_ptr(), self.len) };
    }
}

/// Makes the mapping. Failing, it has made none.
fn map(bytes: usize, backing: Backing, flags: MapFlags) -> Result<*mut c_void, Error> {
    let (any, access) = (std::ptr::null_mut(), ProtFlags::READ | ProtFlags::WRITE);
    let huge = match backing {
        Backing::Memfd => MemfdFlags::empty(),
        Backing::MemfdHugetlb2M => MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB,
        _ => {
            let shared =
                if backing == Backing::Shmem { MapFlags::SHARED } else { MapFlags::PRIVATE };
            // SAFETY: a new mapping at an address of the kernel's choice touches no existing
            // memory.
            return unsafe { mmap_anonymous(any, bytes, access, shared | flags) }
                .map_err(Error::os("mmap of guest memory"));
        }
    };
    let file =
        memfd_create(c"slat", MemfdFlags::CLOEXEC | huge).map_err(Error::os("memfd_create"))?;
    ftruncate(&file, bytes as u64).map_err(Error::os("ftruncate of a memfd"))?;
    // SAFETY: as above. The mapping keeps the file, which nobody else has and nobody cuts short.
    unsafe { mmap(any, bytes, access, MapFlags::SHARED | flags, &file, 0) }
        .map_err(Error::os("mmap of guest memory"))
}

#[cfg(test)]
mod tests {
    use super::*;

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
        }
    }

    #[test]
    fn a_mapping_that_is_no_multiple_of_its_pages_is_refused() {
        assert!(matches!(HostMemory::new(3 << 20, Backing::Thp), Err(Error::Invalid { .. })));
        assert!(matches!(HostMemory::new(0, Backing::Small), Err(Error::Invalid { .. })));
    }

    #[test]
    fn sizes_are_named_as_people_do() {
        assert_eq!(size_name(4096), "4k");
        assert_eq!(size_name(2 << 20), "2m");
        assert_eq!(size_name(1 << 30), "1g");
        assert_eq!(size_name(3 << 29), "1536m");
    }
}
