//! The platform: tables in the machine's memory, invalidations by the unit's queue.

use crate::intel::Intel;
use crate::qemu::Qemu;
use slat::{BreakBeforeMake, Frame, Hpa, Invalidation, Platform, Pte, ReaderSlot, Readers};
use std::cell::{Cell, RefCell};
use std::ptr::NonNull;

/// Memory for tables.
const FIRST: u64 = 0x20_0000;
const END: u64 = 0x100_0000;

/// The machine, its tables, and its unit.
pub struct Machine<'q> {
    qemu: &'q Qemu,
    pub unit: Intel<'q>,
    next: Cell<u64>,
    free: RefCell<Vec<Hpa>>,
    readers: Readers<[ReaderSlot; 1]>,
}

impl<'q> Machine<'q> {
    /// The machine, whose unit is off.
    pub fn new(qemu: &'q Qemu) -> Self {
        let readers = Readers::new([const { ReaderSlot::new() }; 1]);
        let unit = Intel::new(qemu);
        Self { qemu, unit, next: Cell::new(FIRST), free: RefCell::default(), readers }
    }
}

// SAFETY: a frame is a page of the shared mapping, which `qemu` keeps for as long as `self` lives;
// it is handed out once until it is given back. `invalidate` returns when the unit has written that
// all is invalidated; what a test leaves out on purpose concerns the emulated device alone, which
// accesses no memory of this process but that mapping. `readers` is a field.
unsafe impl Platform for Machine<'_> {
    fn allocate(&self, bytes: usize) -> Option<Frame> {
        assert_eq!(bytes, 4096, "EPT's tables are pages");
        let frame = self.free.borrow_mut().pop().or_else(|| {
            let at = self.next.get();
            self.next.set(at + 4096);
            (at < END).then_some(Hpa(at))
        })?;
        for word in 0..512 {
            self.qemu.put(frame.0 + word * 8, 0);
        }
        // SAFETY: a page of the machine, aligned, that nobody else has.
        unsafe { Frame::from_hpa(frame) }
    }

    unsafe fn free(&self, frame: Frame, _bytes: usize) {
        self.free.borrow_mut().push(frame.hpa());
    }

    fn entries(&self, table: Hpa) -> NonNull<Pte> {
        NonNull::new(self.qemu.word(table).cast()).expect("a mapping is not at address 0")
    }

    /// The unit walks the same memory, and keeps no entry that is not present (no caching mode).
    fn publish(&self) {}

    fn invalidate(&self, what: &Invalidation) {
        self.unit.invalidate(what);
    }

    /// A device that uses memory meanwhile would be refused, so blocks would have to be split in
    /// one step; the device of these tests waits.
    fn break_before_make(&self) -> BreakBeforeMake {
        BreakBeforeMake::Always
    }

    fn readers(&self) -> &Readers {
        &self.readers
    }
}
