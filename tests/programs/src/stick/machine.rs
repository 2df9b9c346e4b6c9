//! The machine as the firmware leaves it: what a CPU can do, memory, which is mapped at its own
//! address, and what is printed, kept for the file.

#[path = "../memory.rs"]
mod memory;

use super::firmware;
use core::fmt::{self, Write};
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
pub use memory::Memory;
use uefi::boot::{self, AllocateType, MemoryType};

const ALIGN: u64 = 2 << 20;

/// Memory that the firmware lends, which serves the first CPU only.
pub struct Place<const BYTES: usize>(AtomicU64);

impl<const BYTES: usize> Place<BYTES> {
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Its address. The first call takes it from the firmware.
    pub fn hpa(&self) -> u64 {
        let at = self.0.load(Ordering::Relaxed);
        if at != 0 {
            return at;
        }
        // A page needs no more than the firmware's own alignment.
        let align = if BYTES == 4096 { 4096 } else { ALIGN };
        let pages = (BYTES as u64 + align - 4096).div_ceil(4096) as usize;
        let found = boot::allocate_pages(AllocateType::AnyPages, MemoryType::LOADER_DATA, pages);
        let found = found.expect("memory").as_ptr();
        // SAFETY: the firmware has handed out so much.
        unsafe { found.write_bytes(0, pages * 4096) };
        let at = (found.addr() as u64).next_multiple_of(align);
        self.0.store(at, Ordering::Relaxed);
        at
    }
}

/// What a CPU can do.
pub struct Parts {
    /// Checks the claims on the CPU that calls it, and sets [`RIGHT`].
    pub claims: fn(),
    /// Checks the cases of two CPUs; returns whether all were right.
    pub second: fn() -> bool,
    /// Prints times of the engine's operations.
    pub times: fn(),
}

/// Whether the claims of the last CPU were right.
pub static RIGHT: AtomicBool = AtomicBool::new(false);

/// What the file gets, and on the first CPU the screen.
pub struct Serial;

impl Write for Serial {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        firmware::print(text);
        Ok(())
    }
}
