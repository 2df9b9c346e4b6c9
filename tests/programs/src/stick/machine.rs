//! The machine as the firmware leaves it: memory, which is mapped at its own address, and what is
//! printed, kept for the file.

use super::firmware;
use core::fmt::{self, Write};
use core::sync::atomic::{AtomicU64, Ordering};
use uefi::boot::{self, AllocateType, MemoryType};

const ALIGN: u64 = 2 << 20;

/// Memory that hardware and this program share, aligned to 2 MiB.
pub struct Memory<const BYTES: usize>(AtomicU64);

impl<const BYTES: usize> Memory<BYTES> {
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Its address. The first call takes it from the firmware, which serves the first CPU only.
    pub fn hpa(&self) -> u64 {
        let at = self.0.load(Ordering::Relaxed);
        if at != 0 {
            return at;
        }
        // A page needs no more than the firmware's own alignment.
        let align = if BYTES == 4096 { 4096 } else { ALIGN };
        let pages = (BYTES as u64 + align - 4096).div_ceil(4096) as usize;
        let found = boot::allocate_pages(AllocateType::AnyPages, MemoryType::LOADER_DATA, pages);
        let at = (found.expect("memory").as_ptr().addr() as u64).next_multiple_of(align);
        self.0.store(at, Ordering::Relaxed);
        self.clear();
        at
    }

    #[cfg(target_arch = "x86_64")]
    pub fn read(&self, at: u64) -> u64 {
        assert!(at.is_multiple_of(8) && at < BYTES as u64);
        // SAFETY: aligned and inside; hardware may change it at any time.
        unsafe { ((self.hpa() + at) as *const u64).read_volatile() }
    }

    /// Fills it with zeroes.
    pub fn clear(&self) {
        (0..BYTES as u64).step_by(8).for_each(|at| self.write(at, 0));
    }

    pub fn write(&self, at: u64, value: u64) {
        assert!(at.is_multiple_of(8) && at < BYTES as u64);
        // SAFETY: aligned and inside, and no reference to it exists.
        unsafe { ((self.hpa() + at) as *mut u64).write_volatile(value) }
    }
}

/// What the file gets, and on the first CPU the screen.
pub struct Serial;

impl Write for Serial {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        firmware::print(text);
        Ok(())
    }
}
