//! Accounts of private memory, which the job `private` compares with what the guest did.

use super::memory::PAGE;
use alloc::boxed::Box;
use core::sync::atomic::{AtomicU64, Ordering};
use slat::{GpaRange, Hpa};
use slat_guest::{Denial, MemoryKind, PrivateHooks, PrivateLeaves};
use slat_hypervisor::granules::Granules;
use slat_hypervisor::layout::{DEVICE_TREE, GUEST_RAM, away};

/// Of this many conversions, the machine refuses one as busy.
const BUSY_EVERY: u64 = 16;
/// Bytes of the guest's memory that cannot be converted, from its device tree on.
const FIRM: u64 = 2 << 20;

/// Results that the guest reads after a conversion, other than 0. `private.rs` of the program in
/// `tests/programs/src/jobs` has the same.
pub mod answer {
    pub const BUSY: u64 = 1;
    pub const FIRM: u64 = 2;
    pub const NOT_PRIVATE: u64 = 3;
    pub const PINNED: u64 = 4;
    pub const OTHER: u64 = 5;
}

/// The accounts that a machine which protects private memory would keep.
#[derive(Debug)]
pub struct Keeper {
    /// Start of private memory.
    start: u64,
    bytes: u64,
    pub pages: Granules<Box<[AtomicU64]>>,
    asked: AtomicU64,
    /// Conversions that were allowed, to shared and to private.
    pub allowed: [AtomicU64; 2],
    /// Conversions that were refused, as busy and as firm.
    pub refused: [AtomicU64; 2],
    pub splits: AtomicU64,
}

impl Keeper {
    /// Creates the accounts of a guest with `bytes` of memory.
    pub fn new(bytes: u64) -> Self {
        let words = (bytes / PAGE).div_ceil(64);
        let zero = || AtomicU64::new(0);
        Self {
            start: away(bytes),
            bytes,
            pages: Granules::new((0..words).map(|_| zero()).collect()),
            asked: zero(),
            allowed: [zero(), zero()],
            refused: [zero(), zero()],
            splits: zero(),
        }
    }

    /// Returns whether an address is in private memory.
    pub fn keeps(&self, memory: Hpa) -> bool {
        memory.0 >= self.start && memory.0 - self.start < self.bytes
    }

    /// Returns the first page and the number of pages of leaves, or `None` if their offset in
    /// private memory is not that in the guest's memory.
    fn numbers(&self, leaves: &PrivateLeaves) -> Option<(u64, u64)> {
        let offset = leaves.gpa.0.checked_sub(GUEST_RAM)?;
        (leaves.hpa.0 == self.start + offset).then_some((offset / PAGE, leaves.bytes / PAGE))
    }
}

impl PrivateHooks for Keeper {
    fn convert(&self, range: GpaRange, to: MemoryKind) -> Result<(), Denial> {
        let firm = GUEST_RAM + DEVICE_TREE..GUEST_RAM + DEVICE_TREE + FIRM;
        let code = if range.start().0 < firm.end && firm.start < range.end().0 {
            answer::FIRM
        } else if (self.asked.fetch_add(1, Ordering::Relaxed) + 1).is_multiple_of(BUSY_EVERY) {
            answer::BUSY
        } else {
            self.allowed[usize::from(to == MemoryKind::Private)].fetch_add(1, Ordering::Relaxed);
            return Ok(());
        };
        self.refused[code as usize - 1].fetch_add(1, Ordering::Relaxed);
        Err(Denial(code))
    }

    fn map(&self, leaf: PrivateLeaves) -> Result<(), Denial> {
        match self.numbers(&leaf) {
            Some((first, pages)) => self.pages.give(first, pages),
            None => self.pages.is_wrong(),
        }
        Ok(())
    }

    fn split(&self, _block: PrivateLeaves) -> Result<(), Denial> {
        self.splits.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn removed(&self, leaves: PrivateLeaves) {
        match self.numbers(&leaves) {
            Some((first, pages)) => self.pages.take(first, pages),
            None => self.pages.is_wrong(),
        }
    }
}
