//! Devices' tables that follow the guest's, while vCPUs and the host change them.

use crate::fixture::*;
use slat::{Access, BreakBeforeMake, Gpa};
use slat_guest::{Config, Hva, HvaRange};

/// Asserts that devices have what the guest has: they were told in the order of the changes.
fn follow(world: &World, worker: &mut TheWorker) {
    for page in 0..4 {
        let (told, leaf) = (world.told(page), at(worker, page as u64 * PAGE));
        assert_eq!(told.map(|(hpa, _)| hpa), leaf.map(|leaf| leaf.hpa.0), "page {page}");
        let writable = leaf.is_some_and(|leaf| leaf.attributes.write);
        assert!(!writable || told.is_some_and(|(_, write)| write), "page {page}");
    }
}

fn with_devices(ram: &'static Ram) -> (&'static World, &'static TheGuest, TheWorker) {
    let world = World::new(BreakBeforeMake::Never);
    let page = slat::PageSize::from_bytes(PAGE).unwrap();
    let guest = guest(world, ram, Config { devices: true, largest: page, ..config() });
    let mut worker = worker(guest);
    worker.set_memslot(memslot(false)).unwrap();
    (world, guest, worker)
}

fn page() -> HvaRange {
    HvaRange { start: Hva(HOST), bytes: PAGE }
}

/// The host moves page 0 while a vCPU faults on it. `before`: it is mapped.
fn fault_and_host(before: bool) {
    let ram = Ram::new(PAGE);
    let (world, guest, mut takes) = with_devices(ram);
    let mut faults = vcpu(guest);
    if before {
        faults.fault(Gpa(0), Access::Write);
    }
    let thread = faulting(faults, 0, Access::Write);
    let invalidation = takes.invalidate(page(), |_| {
        assert_eq!(world.told(0), None, "the page is given back before");
    });
    *ram.at.lock().unwrap() = NEW;
    drop(invalidation);
    drop(thread.join().unwrap());
    follow(world, &mut takes);
}

/// A fault makes page 0 writable in place while the host empties its leaf.
fn grant_and_host() {
    let (world, guest, mut takes) = with_devices(Ram::that_grants());
    let mut faults = vcpu(guest);
    faults.fault(Gpa(0), Access::Read);
    let thread = faulting(faults, 0, Access::Write);
    drop(takes.invalidate(page(), |_| {}));
    drop(thread.join().unwrap());
    follow(world, &mut takes);
}

/// Writes to page 0 are held while a vCPU asks to write it.
fn fault_and_hold() {
    let (world, guest, mut holds) = with_devices(Ram::new(PAGE));
    let mut faults = vcpu(guest);
    faults.fault(Gpa(0), Access::Write);
    let thread = faulting(faults, 0, Access::Write);
    let held = holds.freeze_writes(page());
    let write = |told: Option<(u64, bool)>| told.is_some_and(|(_, write)| write);
    assert!(!write(world.told(0)), "a device writes what is held");
    let vcpu = thread.join().unwrap();
    assert!(!write(world.told(0)), "a device writes what is held");
    drop(held);
    vcpu.get().fault(Gpa(0), Access::Write);
    follow(world, &mut holds);
}

#[test]
fn devices_have_the_leaves_that_the_guest_has() {
    bounded("fault, devices follow || invalidation", 2, || fault_and_host(false));
    bounded("fault on a page that devices have || invalidation", 2, || {
        fault_and_host(true);
    });
    bounded("page made writable in place, devices follow || invalidation", 3, grant_and_host);
    bounded("write fault, devices follow || writes held", 3, fault_and_hold);
}
