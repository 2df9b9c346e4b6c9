//! The platform: tables in the machine's memory, invalidations by the unit's queue.

use crate::qemu::Qemu;
use crate::unit::{GUEST, Unit};
use slat::{
    BreakBeforeMake, Frame, Gpa, GpaRange, Hpa, Invalidation, Platform, Pte, ReaderSlot, Readers,
};
use std::cell::{Cell, RefCell};
use std::ptr::NonNull;
use std::rc::Rc;

/// Memory for tables, from the begin of the machine's on.
const FIRST: u64 = 0x20_0000;
const END: u64 = 0x100_0000;

/// What is wrong with invalidations, on purpose.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// Nothing.
    None,
    /// None is executed.
    NoInvalidation,
    /// They name another guest.
    OtherGuest,
    /// They name the first page of the range alone.
    FirstPage,
    /// They leave out the last page of the range.
    LastPage,
    /// They name as many pages behind the range.
    NextPages,
    /// Each is executed when the next one is due.
    Late,
}

impl Fault {
    /// All that are wrong.
    pub const ALL: [Self; 6] = [
        Self::NoInvalidation,
        Self::OtherGuest,
        Self::FirstPage,
        Self::LastPage,
        Self::NextPages,
        Self::Late,
    ];
}

/// The machine, its tables, and its unit.
pub struct Machine<U> {
    qemu: Rc<Qemu>,
    pub unit: U,
    pub fault: Cell<Fault>,
    /// The invalidation before, for [`Fault::Late`].
    late: Cell<Option<Invalidation>>,
    next: Cell<u64>,
    end: u64,
    free: RefCell<Vec<Hpa>>,
    readers: Readers<[ReaderSlot; 1]>,
}

impl<U: Unit> Machine<U> {
    /// The machine, whose unit is off.
    pub fn new(qemu: Rc<Qemu>) -> Self {
        let begin = U::board().memory;
        Self {
            unit: U::new(Rc::clone(&qemu)),
            qemu,
            fault: Cell::new(Fault::None),
            late: Cell::new(None),
            next: Cell::new(begin + FIRST),
            end: begin + END,
            free: RefCell::default(),
            readers: Readers::new([const { ReaderSlot::new() }; 1]),
        }
    }
}

// SAFETY: a frame is memory of the shared mapping, which `qemu` keeps for as long as `self` lives;
// it is handed out once until it is given back. `invalidate` returns when the unit has written that
// all is invalidated; what a test leaves out on purpose concerns the emulated device alone, which
// accesses no memory of this process but that mapping. `readers` is a field.
unsafe impl<U: Unit> Platform for Machine<U> {
    fn allocate(&self, bytes: usize) -> Option<Frame> {
        let page = (bytes == 4096).then(|| self.free.borrow_mut().pop()).flatten();
        let frame = page.or_else(|| {
            let at = self.next.get().next_multiple_of(bytes as u64);
            self.next.set(at + bytes as u64);
            (self.next.get() <= self.end).then_some(Hpa(at))
        })?;
        for word in 0..bytes as u64 / 8 {
            self.qemu.put(frame.0 + word * 8, 0);
        }
        // SAFETY: memory of the machine, aligned to its size, that nobody else has.
        unsafe { Frame::from_hpa(frame) }
    }

    unsafe fn free(&self, frame: Frame, bytes: usize) {
        // A root is not asked for again.
        if bytes == 4096 {
            self.free.borrow_mut().push(frame.hpa());
        }
    }

    fn entries(&self, table: Hpa) -> NonNull<Pte> {
        NonNull::new(self.qemu.word(table).cast()).expect("a mapping is not at address 0")
    }

    /// The unit walks the same memory, and keeps no entry that is not present.
    fn publish(&self) {}

    fn invalidate(&self, what: &Invalidation) {
        let guest = if self.fault.get() == Fault::OtherGuest { GUEST + 1 } else { GUEST };
        let page = 4096;
        let wrong = |range: GpaRange| {
            let (start, size) = (range.start().0, range.size());
            let (start, size) = match self.fault.get() {
                Fault::FirstPage => (start, page),
                Fault::LastPage => (start, size - page),
                Fault::NextPages => (start + size, size),
                _ => (start, size),
            };
            (size > 0).then(|| GpaRange::new(Gpa(start), size).ok()).flatten()
        };
        let what = match (self.fault.get(), what.range) {
            (Fault::NoInvalidation, _) => None,
            (Fault::Late, _) => self.late.replace(Some(*what)),
            (_, None) => Some(*what),
            (_, Some(range)) => {
                wrong(range).map(|range| Invalidation { range: Some(range), ..*what })
            }
        };
        if let Some(what) = what {
            self.unit.invalidate(&what, guest);
        }
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
