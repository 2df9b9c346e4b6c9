//! Anonymous memory, page by page.

use anyhow::ensure;
use std::io;
use std::ptr;
use std::sync::atomic::AtomicU64;

/// What the hypervisor counts in, also where the guest's kernel has larger pages.
pub const PAGE: usize = 4096;

/// Memory that its owner uses by volatile accesses, or threads by atomic ones.
#[derive(Debug)]
pub struct Memory {
    base: *mut u8,
    pages: usize,
}

// SAFETY: the mapping is no thread's own; what threads do to it by reference is atomic, or reads
// beside nobody who writes.
unsafe impl Sync for Memory {}

impl Memory {
    /// Maps this many MiB, which hold zeroes and are not there before they are touched.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn new(mib: usize) -> anyhow::Result<Self> {
        Self::with(mib, libc::PROT_READ | libc::PROT_WRITE)
    }

    /// As [`Self::new`], for code.
    ///
    /// # Errors
    /// The kernel refuses.
    #[cfg(target_arch = "aarch64")]
    pub fn executable(mib: usize) -> anyhow::Result<Self> {
        Self::with(mib, libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC)
    }

    fn with(mib: usize, protection: libc::c_int) -> anyhow::Result<Self> {
        let bytes = mib << 20;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let base = unsafe { libc::mmap(ptr::null_mut(), bytes, protection, flags, -1, 0) };
        ensure!(base != libc::MAP_FAILED, "cannot map {mib} MiB: {}", io::Error::last_os_error());
        Ok(Self { base: base.cast(), pages: bytes / PAGE })
    }

    /// How many pages there are.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// What a page begins with.
    pub fn load(&self, page: usize) -> u64 {
        // SAFETY: the page is mapped, aligned, and written through `&mut self` only.
        unsafe { self.page(page).cast::<u64>().read_volatile() }
    }

    /// Writes what a page begins with.
    pub fn store(&mut self, page: usize, value: u64) {
        // SAFETY: the page is mapped, aligned, and this is the only reference.
        unsafe { self.page(page).cast::<u64>().write_volatile(value) }
    }

    /// A word of a page, for threads that share the memory.
    pub fn word(&self, page: usize, word: usize) -> &AtomicU64 {
        assert!(word < PAGE / size_of::<u64>(), "word {word} of a page");
        // SAFETY: the page is mapped as long as `self` is, and aligned. Who uses words of a memory
        // uses them alone.
        unsafe { AtomicU64::from_ptr(self.page(page).cast::<u64>().add(word)) }
    }

    /// Where a page is.
    pub fn page(&self, page: usize) -> *mut u8 {
        assert!(page < self.pages, "page {page} of {}", self.pages);
        // SAFETY: inside the mapping, as was just checked.
        unsafe { self.base.add(page * PAGE) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping is this object's, and nothing refers to it any more.
        unsafe { libc::munmap(self.base.cast(), self.pages * PAGE) };
    }
}
