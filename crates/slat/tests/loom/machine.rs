//! The machine under both explorers: frames that know whether they are in use, a TLB that drops
//! only what was invalidated, and the accounts of what CPUs did.

#[allow(unused_imports, reason = "loom's are the models'")]
pub use crate::explorer::*;
use crate::hardware::Tlb;
use crate::ledger::Ledger;
use core::cell::{Cell, RefCell};
use core::ptr::NonNull;
use slat::*;
use std::boxed::Box;
use std::vec::Vec;

pub const PAGE: u64 = 0x1000;
pub const BLOCK: u64 = 0x2000;
pub const BIG: u64 = 0x4000;
/// All guest addresses: three levels of two entries.
pub const ALL: u64 = 0x8000;

pub const RAM: Attributes = Attributes::RAM;
/// Writable, not yet written, not yet accessed: everything that hardware can set is clear.
pub const CLEAN: Attributes = Attributes { dirty: false, accessed: false, ..RAM };

/// A descriptor that no walker may follow.
const POISON: u64 = 0xdead_0000_0000 | 0b11;

struct Page {
    ptes: Box<[Pte; 2]>,
    live: bool,
}

/// Frames, and the entries that CPUs hold of them.
pub struct World {
    bbm: BreakBeforeMake,
    readers: Readers<[ReaderSlot; SLOTS]>,
    pages: RefCell<Vec<Page>>,
    /// Whether frames that were given back are handed out again, the last one first: an address
    /// that comes back must not be mistaken for the old table. Otherwise they stay poisoned.
    reuse: bool,
    free: RefCell<Vec<u64>>,
    pub bus: Bus,
    /// Whether a CPU runs. If none does, an invalidation neither waits nor orders anything, as
    /// locks hide missing orderings.
    pub running: Cell<bool>,
    /// The VMID that the CPU uses for the guest.
    pub loaded: Cell<Vmid>,
    pub tlb: RefCell<Tlb>,
    pub ledger: Ledger,
}

impl World {
    pub fn new(bbm: BreakBeforeMake, reuse: bool) -> Self {
        Self {
            bbm,
            readers: Readers::new(core::array::from_fn(|_| ReaderSlot::new())),
            pages: RefCell::default(),
            reuse,
            free: RefCell::default(),
            bus: Bus::default(),
            running: Cell::new(false),
            loaded: Cell::new(Vmid(0)),
            tlb: RefCell::default(),
            ledger: Ledger::default(),
        }
    }

    /// Frames that were not given back.
    pub fn live(&self) -> usize {
        self.pages.borrow().iter().filter(|page| page.live).count()
    }

    fn index(hpa: Hpa) -> usize {
        (hpa.0 / PAGE) as usize - 1
    }
}

// SAFETY: entries are boxed, never moved, and not given back to the allocator before the world
// ends; a frame is handed out again only after it was given back; the readers are a field.
unsafe impl Platform for World {
    fn allocate(&self, _bytes: usize) -> Option<Frame> {
        let mut pages = self.pages.borrow_mut();
        let hpa = self.free.borrow_mut().pop().unwrap_or_else(|| {
            let ptes = Box::new([Pte::new(POISON), Pte::new(POISON)]);
            pages.push(Page { ptes, live: false });
            pages.len() as u64 * PAGE
        });
        pages[Self::index(Hpa(hpa))].live = true;
        // SAFETY: a frame that no other code uses, of two entries, as all tables of these formats
        // have.
        unsafe { Frame::from_hpa(Hpa(hpa)) }
    }

    unsafe fn free(&self, frame: Frame, _bytes: usize) {
        let hpa = frame.hpa();
        assert!(!self.tlb.borrow().holds_table(hpa), "a walk cache holds a table given back");
        let page = &mut self.pages.borrow_mut()[Self::index(hpa)];
        assert!(page.live, "{hpa} was given back twice");
        page.live = false;
        // Loom fails the model if any access to these entries is not ordered before this one.
        page.ptes.iter_mut().for_each(|pte| pte.set(POISON));
        if self.reuse {
            self.free.borrow_mut().push(hpa.0);
        }
    }

    fn entries(&self, table: Hpa) -> NonNull<Pte> {
        let pages = self.pages.borrow();
        assert!((PAGE..=pages.len() as u64 * PAGE).contains(&table.0), "{table} is no table");
        let page = &pages[Self::index(table)];
        assert!(page.live, "{table} is used after it was given back");
        NonNull::from(&page.ptes[0])
    }

    fn publish(&self) {}

    fn invalidate(&self, what: &Invalidation) {
        let _alone = self.bus.alone(self.running.get());
        self.tlb.borrow_mut().invalidate(what);
    }

    fn break_before_make(&self) -> BreakBeforeMake {
        self.bbm
    }

    fn readers(&self) -> &Readers {
        &self.readers
    }
}
