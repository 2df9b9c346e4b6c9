//! A thread holds writes while memory is copied or shared, and a vCPU writes.

use crate::fixture::*;
use slat::{Access, BreakBeforeMake, Gpa, GpaRange};
use slat_guest::{Hva, HvaRange, MemoryKind};

/// A vCPU writes page 0 while writes to it are held. `logged`: the vCPU has read the page before,
/// and the software bit of its leaf allows writes.
fn write_and_hold(logged: bool) {
    let (world, ram) = (World::new(BreakBeforeMake::Never), Ram::new(PAGE));
    let guest = guest(world, ram, config());
    let mut holds = worker(guest);
    holds.set_memslot(memslot(logged)).unwrap();
    let mut writes = vcpu(guest);
    if logged {
        writes.fault(Gpa(0), Access::Read);
        assert!(!writable(&mut holds, 0));
    }
    let thread = faulting(writes, 0, Access::Write);
    let held = holds.freeze_writes(HvaRange { start: Hva(HOST), bytes: 2 * BLOCK });
    assert!(!writable(&mut holds, 0), "when it returns nobody writes");
    let vcpu = thread.join().unwrap();
    assert!(!writable(&mut holds, 0), "nor until it is dropped");
    drop(held);
    let mut vcpu = vcpu.get();
    for _ in 0..2 {
        vcpu.fault(Gpa(0), Access::Write);
    }
    assert!(writable(&mut holds, 0), "it is asked anew");
}

#[test]
fn while_writes_are_held_no_fault_makes_a_page_writable() {
    bounded("write fault || writes held", 4, || write_and_hold(false));
    bounded("write fault on a page to relax || writes held", 3, || write_and_hold(true));
}

/// Writes are held while a thread makes the page private and writes it.
fn hold_and_conversion() {
    let (world, ram) = (World::new(BreakBeforeMake::Never), Ram::new(PAGE));
    let guest = guest(world, ram, config());
    let mut holds = worker(guest);
    holds.set_memslot(hidden()).unwrap();
    let writes = SendCell(vcpu(guest));
    let thread = spawn(move || {
        let mut vcpu = writes.get();
        let page = GpaRange::new(Gpa(0), PAGE).unwrap();
        vcpu.worker().convert(page, MemoryKind::Private, |_| {}).unwrap();
        vcpu.fault(Gpa(0), Access::Write);
        SendCell(vcpu)
    });
    drop(holds.freeze_writes(HvaRange { start: Hva(HOST), bytes: PAGE }));
    let mut vcpu = thread.join().unwrap().get();
    vcpu.fault(Gpa(0), Access::Write);
    assert!(writable(&mut holds, 0));
    assert_eq!(world.assigned.get(), PAGE, "the machine was told of the page once");
}

#[test]
fn a_page_that_becomes_private_keeps_its_rights_under_a_hold() {
    bounded("writes held || conversion, write fault", 3, hold_and_conversion);
}
