//! The backing replaces a page for a write while another vCPU reads the same memory elsewhere.

use crate::fixture::*;
use slat::{Access, BreakBeforeMake, Gpa};
use slat_guest::{Hva, MemoryKind, MemslotId, MemslotSpec, PrivateAt};

/// Two memslots have the same memory; a vCPU writes page 0 of the first while another reads that of
/// the second. `before`: the page is already mapped in the second.
fn write_and_read(before: bool) {
    let (world, ram) = (World::new(BreakBeforeMake::Never), Ram::that_is_shared());
    let guest = guest(world, ram, config());
    let mut setup = worker(guest);
    for (id, gpa) in [(0, 0), (1, BLOCK)] {
        setup.set_memslot(MemslotSpec::new(MemslotId(id), Gpa(gpa), BLOCK, Hva(HOST))).unwrap();
    }
    let mut writes = vcpu(guest);
    if before {
        writes.fault(Gpa(BLOCK), Access::Read);
    }
    let writes = SendCell(writes);
    let thread = spawn(move || {
        let mut vcpu = writes.get();
        vcpu.fault(Gpa(0), Access::Write);
        let new = at(vcpu.worker(), 0).is_some_and(|leaf| leaf.hpa.0 == NEW);
        let elsewhere = at(vcpu.worker(), BLOCK).map(|leaf| leaf.hpa.0);
        assert!(!new || elsewhere.is_none_or(|hpa| hpa == NEW), "the other misses the write");
        SendCell(vcpu)
    });
    setup.prefault(slat::GpaRange::new(Gpa(BLOCK), PAGE).unwrap(), Access::Read, || false);
    drop(thread.join().unwrap());
    let (first, second) = (at(&mut setup, 0), at(&mut setup, BLOCK));
    if first.is_some_and(|leaf| leaf.hpa.0 == NEW) {
        assert!(second.is_none_or(|leaf| leaf.hpa.0 == NEW), "{second:?}");
    }
}

#[test]
fn what_a_write_replaced_is_not_left_in_another_slot() {
    bounded("write of a shared page || read by another memslot", 2, || write_and_read(false));
    bounded("write of a shared page that is mapped || read by another memslot", 2, || {
        write_and_read(true);
    });
}

/// A vCPU whose view is its own writes page 0 while another reads it by the guest's tables.
fn write_in_a_view_and_read(before: bool) {
    let (world, ram) = (World::new(BreakBeforeMake::Never), Ram::that_is_shared());
    let guest = uncached(world, ram);
    let mut setup = worker(guest);
    setup.set_memslot(memslot(false)).unwrap();
    let page = slat::GpaRange::new(Gpa(0), PAGE).unwrap();
    if before {
        setup.prefault(page, Access::Read, || false);
    }
    let writes = SendCell(vcpu(guest));
    let thread = spawn(move || {
        let mut vcpu = writes.get();
        vcpu.fault(Gpa(0), Access::Write);
        let new = vcpu.translate(Gpa(0)).is_some_and(|leaf| leaf.hpa.0 == NEW);
        let elsewhere = at(vcpu.worker(), 0).map(|leaf| leaf.hpa.0);
        assert!(!new || elsewhere.is_none_or(|hpa| hpa == NEW), "the other misses the write");
        SendCell(vcpu)
    });
    setup.prefault(page, Access::Read, || false);
    let mut vcpu = thread.join().unwrap().get();
    let elsewhere = at(&mut setup, 0);
    if vcpu.translate(Gpa(0)).is_some_and(|leaf| leaf.hpa.0 == NEW) {
        assert!(elsewhere.is_none_or(|leaf| leaf.hpa.0 == NEW), "{elsewhere:?}");
    }
}

#[test]
fn a_page_replaced_by_a_write_in_a_view_leaves_shared_tables() {
    bounded("write of a shared page in a view || read", 2, || write_in_a_view_and_read(false));
    bounded("write of a shared page in a view || read where it is mapped", 2, || {
        write_in_a_view_and_read(true);
    });
}

/// A write replaces shared memory of one memslot while a vCPU faults on the private page that
/// another memslot has in place of that memory.
fn write_and_private_fault() {
    let (world, ram) = (World::new(BreakBeforeMake::Never), Ram::that_is_shared());
    let guest = guest(world, ram, config());
    let mut setup = worker(guest);
    let memslot = |id, gpa| MemslotSpec::new(MemslotId(id), Gpa(gpa), BLOCK, Hva(HOST));
    setup.set_memslot(memslot(0, 0)).unwrap();
    let private = Some(PrivateAt(0));
    setup.set_memslot(MemslotSpec { private, ..memslot(1, BLOCK) }).unwrap();
    let page = slat::GpaRange::new(Gpa(BLOCK), PAGE).unwrap();
    setup.convert(page, MemoryKind::Private, |_| {}).unwrap();
    let thread = faulting(vcpu(guest), BLOCK, Access::Write);
    setup.prefault(slat::GpaRange::new(Gpa(0), PAGE).unwrap(), Access::Write, || false);
    drop(thread.join().unwrap());
    // The machine knows the private page exactly as long as it is mapped.
    let mapped = at(&mut setup, BLOCK);
    assert!(mapped.is_none_or(|leaf| leaf.hpa.0 == PRIVATE), "{mapped:?}");
    assert_eq!(world.assigned.get(), PAGE * u64::from(mapped.is_some()));
}

#[test]
fn a_write_that_replaces_shared_memory_keeps_private_pages() {
    bounded("write of a shared page || fault of a private page", 3, write_and_private_fault);
}

/// A vCPU writes page 0 while another thread inserts a memslot that has the same memory, and a
/// third reads the page there as soon as it can.
fn write_and_alias_that_is_inserted() {
    let (world, ram) = (World::new(BreakBeforeMake::Never), Ram::that_is_shared());
    let guest = guest(world, ram, config());
    let alias = |id, gpa| MemslotSpec::new(MemslotId(id), Gpa(gpa), BLOCK, Hva(HOST));
    let mut setup = worker(guest);
    setup.set_memslot(alias(0, 0)).unwrap();
    let (writes, reads) = (SendCell(vcpu(guest)), SendCell(worker(guest)));
    let page = |gpa| slat::GpaRange::new(Gpa(gpa), PAGE).unwrap();
    let write = spawn(move || {
        let mut vcpu = writes.get();
        vcpu.fault(Gpa(0), Access::Write);
        SendCell(vcpu)
    });
    let read = spawn(move || {
        let mut worker = reads.get();
        worker.prefault(page(BLOCK), Access::Read, || false);
        SendCell(worker)
    });
    setup.set_memslot(alias(1, BLOCK)).unwrap();
    drop((write.join().unwrap(), read.join().unwrap()));
    let (first, second) = (at(&mut setup, 0), at(&mut setup, BLOCK));
    if first.is_some_and(|leaf| leaf.hpa.0 == NEW) {
        assert!(second.is_none_or(|leaf| leaf.hpa.0 == NEW), "{second:?}");
    }
}

#[test]
fn a_page_replaced_by_a_write_leaves_a_memslot_being_inserted() {
    let name = "write of a shared page || insertion of an alias || read by it";
    bounded(name, 2, write_and_alias_that_is_inserted);
}

/// A thread writes page 0 in the guest's tables while a vCPU switches its caches off, or on, and
/// then reads the page.
fn write_and_switch(on: bool) {
    let (world, ram) = (World::new(BreakBeforeMake::Never), Ram::that_is_shared());
    let guest = uncached(world, ram);
    let mut setup = worker(guest);
    setup.set_memslot(memslot(false)).unwrap();
    let mut switches = vcpu(guest);
    switches.set_caches(!on);
    if on {
        switches.fault(Gpa(0), Access::Read);
    }
    let switches = SendCell(switches);
    let thread = spawn(move || {
        let mut vcpu = switches.get();
        vcpu.set_caches(on);
        vcpu.fault(Gpa(0), Access::Read);
        SendCell(vcpu)
    });
    let page = slat::GpaRange::new(Gpa(0), PAGE).unwrap();
    setup.prefault(page, Access::Write, || false);
    let mut vcpu = thread.join().unwrap().get();
    if at(&mut setup, 0).is_some_and(|leaf| leaf.hpa.0 == NEW) {
        let read = vcpu.translate(Gpa(0));
        assert!(read.is_none_or(|leaf| leaf.hpa.0 == NEW), "{read:?}");
    }
}

#[test]
fn a_page_replaced_by_a_write_leaves_starting_and_ending_views() {
    bounded("write of a shared page || caches off, then read", 2, || write_and_switch(false));
    // The vCPU empties a view and waits for the write: 8,432 executions with one preemption, and
    // more than four minutes with two.
    bounded("write of a shared page || caches on, then read", 1, || write_and_switch(true));
}
