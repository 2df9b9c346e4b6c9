//! Anonymous memory that is used page by page.

use anyhow::ensure;
use std::io;
use std::ptr;
use std::sync::atomic::AtomicU64;

/// Size of a page in bytes, also where the guest's kernel has larger pages. The control page counts
/// in this unit.
pub const PAGE: usize = 4096;

/// Anonymous memory. A single owner uses it by volatile accesses, or several threads by atomic
/// ones.
#[derive(Debug)]
pub struct Memory {
    base: *mut u8,
    pages: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread. Accesses through a shared reference
// are atomic, or are reads while nothing writes.
unsafe impl Sync for Memory {}

impl Memory {
    /// Maps this many MiB of zeroes. The kernel allocates a page when it is first touched.
    ///
    /// # Errors
    /// Returns an error if the kernel refuses.
    pub fn new(mib: usize) -> anyhow::Result<Self> {
        Self::with(mib, libc::PROT_READ | libc::PROT_WRITE)
    }

    /// As [`Self::new`], with the right to execute.
    ///
    /// # Errors
    /// Returns an error if the kernel refuses.
    #[cfg(target_arch = "aarch64")]
    pub fn executable(mib: usize) -> anyhow::Result<Self> {
        Self::with(mib, libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC)
    }

    fn with(mib: usize, protection: libc::c_int) -> anyhow::Result<Self> {
        let bytes = mib << 20;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: this is a new mapping, at an address that the kernel chooses.
        let base = unsafe { libc::mmap(ptr::null_mut(), bytes, protection, flags, -1, 0) };
        ensure!(base != libc::MAP_FAILED, "cannot map {mib} MiB: {}", io::Error::last_os_error());
        Ok(Self { base: base.cast(), pages: bytes / PAGE })
    }

    /// Returns the number of pages.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Reads the first word of a page.
    pub fn load(&self, page: usize) -> u64 {
        // SAFETY: the page is mapped, aligned, and written through `&mut self` only.
        unsafe { self.page(page).cast::<u64>().read_volatile() }
    }

    /// Writes the first word of a page.
    pub fn store(&mut self, page: usize, value: u64) {
        // SAFETY: the page is mapped, aligned, and this is the only reference.
        unsafe { self.page(page).cast::<u64>().write_volatile(value) }
    }

    /// Returns a word of a page, for threads that share the memory.
    pub fn word(&self, page: usize, word: usize) -> &AtomicU64 {
        assert!(word < PAGE / size_of::<u64>(), "word {word} of a page");
        // SAFETY: the page is aligned, and mapped as long as `self` lives. A job that uses `word`
        // uses no other accesses to this memory meanwhile.
        unsafe { AtomicU64::from_ptr(self.page(page).cast::<u64>().add(word)) }
    }

    /// Returns the address of a page.
    pub fn page(&self, page: usize) -> *mut u8 {
        assert!(page < self.pages, "page {page} of {}", self.pages);
        // SAFETY: inside the mapping, as was just checked.
        unsafe { self.base.add(page * PAGE) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: this object owns the mapping, and nothing refers to it any more.
        unsafe { libc::munmap(self.base.cast(), self.pages * PAGE) };
    }
}
