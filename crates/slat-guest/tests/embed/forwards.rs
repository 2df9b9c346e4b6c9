//! What a guest with reader slots of its own asks of its host reaches the machine.

use slat::{
    BreakBeforeMake, Frame, Gpa, GpaRange, Hpa, Invalidation, Maintenance, Platform, Pte, Readers,
    Vmid,
};
use slat_guest::*;
use std::cell::RefCell;
use std::mem::take;
use std::num::NonZeroUsize;
use std::ptr::NonNull;

/// A machine that does nothing but note the calls.
#[derive(Default)]
struct CallRecorder(RefCell<Vec<&'static str>>);

impl CallRecorder {
    fn note(&self, call: &'static str) {
        self.0.borrow_mut().push(call);
    }
}

// SAFETY: by the numbers of `Platform`'s contract. 1, 2, 3, 5, 6: `allocate` never returns a frame,
// so that there are no tables. 4: no thread can ask for the reader slots, since none is made.
unsafe impl Platform for CallRecorder {
    fn allocate(&self, _: usize) -> Option<Frame> {
        self.note("allocate");
        None
    }

    unsafe fn free(&self, _: Frame, _: usize) {
        self.note("free");
    }

    fn entries(&self, _: Hpa) -> NonNull<Pte> {
        self.note("memslots");
        NonNull::dangling()
    }

    fn publish(&self) {
        self.note("publish");
    }

    fn invalidate(&self, _: &Invalidation) {
        self.note("invalidate");
    }

    fn invalidate_local(&self, _: &Invalidation) {
        self.note("invalidate_local");
    }

    fn break_before_make(&self) -> BreakBeforeMake {
        self.note("break_before_make");
        BreakBeforeMake::Never
    }

    fn readers(&self) -> &Readers {
        unreachable!("the guest has its own")
    }

    fn thread(&self) -> Option<NonZeroUsize> {
        self.note("thread");
        None
    }

    fn maintain(&self, _: Hpa, _: u64, _: Maintenance) {
        self.note("maintain");
    }

    fn fill(&self, _: &mut [Pte], _: u64, _: u64) {
        self.note("fill");
    }
}

impl Events for CallRecorder {
    fn event(&self, _: Vmid, _: Event) {
        self.note("events");
    }
}

impl PrivateHooks for CallRecorder {
    fn removed(&self, _: PrivateLeaves) {
        self.note("private_hooks");
    }
}

impl DeviceTables for CallRecorder {
    fn unmapped(&self, _: GpaRange) {
        self.note("device_tables");
    }
}

impl Host for CallRecorder {
    fn now(&self) -> u64 {
        self.note("now");
        0
    }

    fn invalidate_instructions(&self) {
        self.note("invalidate_instructions");
    }

    fn events(&self) -> impl Events {
        self
    }

    fn between_pieces(&self) {
        self.note("between_pieces");
    }

    fn private_hooks(&self) -> &dyn PrivateHooks {
        self
    }

    fn device_tables(&self) -> &dyn DeviceTables {
        self
    }

    fn wake(&self, _: Vmid, _: u16) {
        self.note("wake");
    }

    fn wait(&self) {
        self.note("wait");
    }
}

#[test]
fn a_host_with_its_own_seats_forwards_each_call_to_its_machine() {
    let machine = CallRecorder::default();
    let host = OwnReaders::<_, 1>::new(&machine);
    let passes = |call: &'static str| assert_eq!(take(&mut *machine.0.borrow_mut()), [call]);
    let everything = Invalidation { vmid: Vmid(1), range: None, leaf: None, tables: false };
    assert!(host.allocate(4096).is_none());
    passes("allocate");
    // SAFETY: the machine does nothing with the frame.
    unsafe { host.free(Frame::from_hpa(Hpa(0x1000)).unwrap(), 4096) };
    passes("free");
    host.entries(Hpa(0));
    passes("memslots");
    host.publish();
    passes("publish");
    host.invalidate(&everything);
    passes("invalidate");
    host.invalidate_local(&everything);
    passes("invalidate_local");
    host.break_before_make();
    passes("break_before_make");
    assert_eq!(host.thread(), None);
    passes("thread");
    host.maintain(Hpa(0), 4096, Maintenance::Data);
    passes("maintain");
    host.fill(&mut [], 0, 0);
    passes("fill");
    host.now();
    passes("now");
    host.invalidate_instructions();
    passes("invalidate_instructions");
    host.events().event(Vmid(1), Event::Piece { range: page() });
    passes("events");
    host.between_pieces();
    passes("between_pieces");
    host.private_hooks().removed(PrivateLeaves { gpa: Gpa(0), hpa: Hpa(0), bytes: 4096 });
    passes("private_hooks");
    host.device_tables().unmapped(page());
    passes("device_tables");
    host.wake(Vmid(1), 0);
    passes("wake");
    host.wait();
    passes("wait");
}

fn page() -> GpaRange {
    GpaRange::new(Gpa(0), 4096).unwrap()
}
