//! The platform that the engine asks for, and what faults are.

use super::machine::Memory;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use slat::{BreakBeforeMake, Frame, Hpa, Invalidation, Platform, Pte, ReaderSlot, Readers};

const PAGE: usize = 4096;
const FRAMES: usize = 160;
pub static TABLES: Memory<{ FRAMES * PAGE }> = Memory::new();

/// What a fault's cause has to say.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// Nothing is mapped.
    Nothing,
    /// A leaf lacks the right.
    Right,
    /// The walk of the guest's own tables, which counts as a write, lacks it.
    Walk,
}

/// A fault made on purpose, as a format might have it: in each entry of a walk, leaf or table, bits
/// are set and others clear while the guest runs.
#[derive(Clone, Copy)]
pub struct Fault {
    pub what: &'static str,
    pub in_leaf: bool,
    pub set: u64,
    pub clear: u64,
}

/// In a [`Fault`]: the lowest bit of the leaf's address.
pub const LOWEST_ADDRESS: u64 = 1 << 12;

/// The platform: takes table pages from a piece of memory that is large enough, and uses none
/// twice. An invalidation is a flush at the next entry of the guest: INVEPT, or TLB control in
/// VMRUN, because INVLPGA takes no guest physical address (15.16).
pub struct Machine {
    used: AtomicUsize,
    stale: AtomicBool,
    readers: Readers<[ReaderSlot; 2]>,
}

impl Machine {
    /// The platform. No other is in use.
    pub fn new() -> Self {
        TABLES.clear();
        let readers = Readers::new([const { ReaderSlot::new() }; 2]);
        Self { used: AtomicUsize::new(0), stale: AtomicBool::new(false), readers }
    }

    /// Returns whether the next entry has to flush.
    pub fn take_stale(&self) -> bool {
        self.stale.swap(false, Ordering::Relaxed)
    }

    /// Makes the next entry flush.
    pub fn set_stale(&self) {
        self.stale.store(true, Ordering::Relaxed);
    }

    /// Returns the entries that hardware reads for `gpa`, from the root down, with their addresses,
    /// computed only from the manuals' figures.
    pub fn entries(&self, root: u64, levels: usize, gpa: u64) -> impl Iterator<Item = (u64, u64)> {
        let mut table = Some(root);
        [48, 39, 30, 21, 12].into_iter().skip(5 - levels).map_while(move |shift| {
            let at = table? + 8 * (gpa >> shift & 511);
            let entry = TABLES.read(at - TABLES.hpa());
            let last = shift == 12 || entry & 1 << 7 != 0 || entry & 1 == 0;
            table = (!last).then_some(entry & 0xf_ffff_ffff_f000);
            Some((at, entry))
        })
    }
}

// SAFETY: each frame is a page of `TABLES` of its own, at its own address, and stays. A flush at
// the next entry drops all cached translations, and the guest does not run on the only CPU before
// that. `readers` is a field.
unsafe impl Platform for Machine {
    fn allocate(&self, bytes: usize) -> Option<Frame> {
        let frame = self.used.fetch_add(1, Ordering::Relaxed);
        if bytes != PAGE || frame >= FRAMES {
            return None;
        }
        // SAFETY: a page, aligned, and not handed out before.
        unsafe { Frame::from_hpa(Hpa(TABLES.hpa() + (frame * PAGE) as u64)) }
    }

    unsafe fn free(&self, _: Frame, _: usize) {}

    fn entries(&self, table: Hpa) -> NonNull<Pte> {
        NonNull::new(table.0 as *mut Pte).expect("a frame is not at address 0")
    }

    /// Stores are seen in order.
    fn publish(&self) {}

    fn invalidate(&self, _: &Invalidation) {
        self.set_stale();
    }

    fn break_before_make(&self) -> BreakBeforeMake {
        BreakBeforeMake::Never
    }

    fn readers(&self) -> &Readers {
        &self.readers
    }
}
