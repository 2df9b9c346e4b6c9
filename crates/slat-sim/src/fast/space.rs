//! The machine's host physical addresses: offsets into one mapping of real memory.
//!
//! ```text
//! 0x0        nothing: 0 is no frame
//! 0x1000     tables
//!            unused, up to a multiple of 1 GiB
//! memory     guest memory, a multiple of 2 MiB
//! ```
//! The mapping is aligned to 2 MiB: an address that is aligned for a block of that size is aligned
//! for a huge page of the host.

use rustix::mm::{Advice, MapFlags, ProtFlags};
use slat::Pte;
use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

const FIRST_FRAME: u64 = 0x1000;
const HUGE: u64 = 2 << 20;
const GIB: u64 = 1 << 30;
/// The end of the addresses, which every architecture can reach.
const LIMIT: u64 = 1 << 46;

#[derive(Debug)]
pub(super) struct Space {
    map: NonNull<u8>,
    map_bytes: usize,
    base: NonNull<u8>,
    tables_end: u64,
    memory: Range<u64>,
}

// SAFETY: the value owns the mapping until it is dropped. Its words are shared as atomics, or,
// where the engine owns a frame exclusively, by the rules of `Platform`.
unsafe impl Send for Space {}
// SAFETY: as above; no other field changes.
unsafe impl Sync for Space {}

impl Space {
    pub fn new(memory_bytes: u64, table_bytes: u64) -> io::Result<Self> {
        let sizes = || {
            let tables_end =
                FIRST_FRAME.checked_add(table_bytes)?.checked_next_multiple_of(FIRST_FRAME)?;
            let memory = tables_end.checked_next_multiple_of(GIB)?;
            let end = memory.checked_add(memory_bytes.checked_next_multiple_of(HUGE)?)?;
            (end <= LIMIT).then_some((tables_end, memory..end))
        };
        let (tables_end, memory) = sizes().ok_or(io::ErrorKind::InvalidInput)?;
        let map_bytes = (memory.end + HUGE) as usize;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new private mapping at an address of the kernel's choice aliases nothing.
        let map =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), map_bytes, prot, flags)? };
        let map = NonNull::new(map.cast::<u8>()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        // SAFETY: the offset is less than HUGE, by which the mapping is larger than the part in
        // use.
        let base = unsafe { map.add(map.align_offset(HUGE as usize)) };
        Ok(Self { map, map_bytes, base, tables_end, memory })
    }

    /// Returns the pointer to host address 0.
    #[inline(always)]
    pub const fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub const fn tables(&self) -> Range<u64> {
        FIRST_FRAME..self.tables_end
    }

    pub const fn memory(&self) -> &Range<u64> {
        &self.memory
    }

    /// Returns an entry of a table, for a walker; `None` if it is not in the memory for tables.
    pub fn pte(&self, table: u64, index: usize) -> Option<&Pte> {
        let at = table.checked_add(index as u64 * 8)?;
        if at < FIRST_FRAME || at >= self.tables_end || at % 8 != 0 {
            return None;
        }
        // SAFETY: an aligned word inside the table region, which is mapped as long as `self` lives
        // and is initialised (the kernel gave zeros). Entries are atomics. What a walker reaches is
        // linked, so no thread owns it exclusively.
        Some(unsafe { self.base.add(at as usize).cast::<Pte>().as_ref() })
    }

    /// Returns a word of guest memory.
    ///
    /// # Safety
    /// `hpa` is a multiple of 8 inside guest memory.
    #[inline(always)]
    pub unsafe fn word(&self, hpa: u64) -> &AtomicU64 {
        // SAFETY: inside the mapping and aligned, by the contract; initialised, as the kernel gave
        // zeros. Guest memory is only accessed as atomics.
        unsafe { self.base.add(hpa as usize).cast::<AtomicU64>().as_ref() }
    }

    /// Returns `bytes` of guest memory from `hpa` on, as words.
    ///
    /// # Panics
    /// If the range is not whole words of guest memory.
    pub fn words(&self, hpa: u64, bytes: u64) -> &[AtomicU64] {
        assert!(
            (hpa | bytes).is_multiple_of(8),
            "{bytes:#x} bytes at {hpa:#x} are not whole words"
        );
        self.check(hpa, bytes);
        // SAFETY: inside guest memory and aligned, as was asserted; else as in `word`.
        unsafe {
            let first = self.base.add(hpa as usize).cast::<AtomicU64>();
            std::slice::from_raw_parts(first.as_ptr(), (bytes / 8) as usize)
        }
    }

    fn check(&self, hpa: u64, bytes: u64) {
        let inside = hpa >= self.memory.start
            && hpa.checked_add(bytes).is_some_and(|end| end <= self.memory.end);
        assert!(inside, "{bytes:#x} bytes at {hpa:#x} are not guest memory {:#x?}", self.memory);
    }

    /// Advises the host about guest memory.
    ///
    /// # Panics
    /// If the range is not whole pages of guest memory.
    pub fn advise(&self, hpa: u64, bytes: u64, advice: Advice) -> io::Result<()> {
        assert!((hpa | bytes).is_multiple_of(0x1000), "advice is about whole pages");
        self.check(hpa, bytes);
        // SAFETY: inside guest memory, which is only referred to as atomics. Advice that changes
        // its content acts like stores of zeros by another thread.
        unsafe {
            let at = self.base.add(hpa as usize).as_ptr();
            Ok(rustix::mm::madvise(at.cast(), bytes as usize, advice)?)
        }
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        // SAFETY: the mapping is the value's own, of that length, and nothing borrows it any more.
        let _ = unsafe { rustix::mm::munmap(self.map.as_ptr().cast(), self.map_bytes) };
    }
}
