//! A thread pins pages while another changes them in place.

use crate::fixture::*;
use slat::{Access, BreakBeforeMake, Gpa, GpaRange, PageSize};

/// A block's two pages, mapped one by one by a log, which has ended.
fn pages() -> (&'static TheGuest, TheWorker) {
    let (world, ram) = (World::new(BreakBeforeMake::Never), Ram::new(BLOCK));
    let guest = guest(world, ram, config());
    let mut worker = worker(guest);
    worker.set_memslot(memslot(true)).unwrap();
    let mut vcpu = vcpu(guest);
    for gpa in [0, PAGE] {
        vcpu.fault(Gpa(gpa), Access::Write);
    }
    // The end of the log would put the block together.
    let pin = worker.pin(GpaRange::new(Gpa(0), BLOCK).unwrap()).unwrap();
    worker.set_memslot(memslot(false)).unwrap();
    drop(pin);
    (guest, worker)
}

fn size(worker: &mut TheWorker) -> u64 {
    at(worker, 0).expect("it stays mapped").size.bytes()
}

#[test]
fn no_collapse_goes_on_once_its_pages_are_pinned() {
    bounded("pin || collapse", 3, || {
        let (guest, collapses) = pages();
        let mut pins = worker(guest);
        assert_eq!(size(&mut pins), PAGE);
        let collapses = SendCell(collapses);
        let thread = spawn(move || {
            let mut worker = collapses.get();
            let all = GpaRange::new(Gpa(0), BLOCK).unwrap();
            worker.collapse(all, PageSize::from_bytes(BLOCK).unwrap());
        });
        let pin = pins.pin(GpaRange::new(Gpa(PAGE), PAGE).unwrap()).unwrap();
        let pinned = size(&mut pins);
        thread.join().unwrap();
        assert_eq!(size(&mut pins), pinned, "the table was collapsed after it was pinned");
        drop(pin);
    });
}
