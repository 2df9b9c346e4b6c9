//! A fault while a thread converts its page.

use crate::fixture::*;
use slat::{Access, BreakBeforeMake, Gpa, GpaRange};
use slat_guest::{ExecuteHuge, MemoryKind};

/// A thread converts page 0 to `to` while a vCPU faults on it, in blocks of `block`. `before`: the
/// page is already mapped.
fn fault_and_conversion(block: u64, to: MemoryKind, before: bool) {
    let (world, ram) = (World::new(BreakBeforeMake::Never), Ram::new(block));
    let guest = guest(world, ram, config());
    let mut setup = worker(guest);
    setup.set_memslot(hidden()).unwrap();
    let all = GpaRange::new(Gpa(0), BLOCK).unwrap();
    if to == MemoryKind::Shared {
        setup.convert(all, MemoryKind::Private, |_| {}).unwrap();
    }
    let mut faults = vcpu(guest);
    if before {
        faults.fault(Gpa(0), Access::Write);
    }
    let thread = faulting(faults, 0, Access::Write);
    let page = GpaRange::new(Gpa(0), PAGE).unwrap();
    setup.convert(page, to, |_| {}).unwrap();
    let hpa = if to == MemoryKind::Shared { OLD } else { PRIVATE };
    let right = |worker: &mut TheWorker| {
        let found = at(worker, 0);
        assert!(found.is_none_or(|leaf| leaf.hpa.0 == hpa), "{to:?}: {found:?}");
        assert!(found.is_none_or(|leaf| leaf.size.bytes() == PAGE), "{to:?}: {found:?}");
        found.is_some()
    };
    right(&mut setup);
    let mut vcpu = thread.join().unwrap().get();
    let first = right(vcpu.worker());
    // The machine has been told of exactly the pages that are mapped.
    let second = at(vcpu.worker(), PAGE).is_some();
    let private = match to {
        MemoryKind::Shared => u64::from(second),
        MemoryKind::Private => u64::from(first),
    };
    assert_eq!(world.assigned.get(), private * PAGE);
}

#[test]
fn no_fault_maps_a_page_as_what_it_was_before() {
    for (kind, to) in [("private", MemoryKind::Private), ("shared", MemoryKind::Shared)] {
        bounded(&format!("fault of a page || conversion to {kind}"), 4, move || {
            fault_and_conversion(PAGE, to, false);
        });
        bounded(&format!("fault on a page that is there || conversion to {kind}"), 4, move || {
            fault_and_conversion(PAGE, to, true);
        });
        bounded(&format!("fault of a block || conversion of its page to {kind}"), 4, move || {
            fault_and_conversion(BLOCK, to, false);
        });
    }
}

/// A vCPU fetches from page 0 of a private block, which may not be executed any more, while a
/// thread converts `page` of the block.
fn fetch_and_conversion(page: u64) {
    let (world, ram) = (World::new(BreakBeforeMake::Never), Ram::new(BLOCK));
    let guest = guest(world, ram, config());
    let mut setup = worker(guest);
    setup.set_memslot(hidden()).unwrap();
    let block = GpaRange::new(Gpa(0), BLOCK).unwrap();
    setup.convert(block, MemoryKind::Private, |_| {}).unwrap();
    let mut fetches = vcpu(guest);
    fetches.fault(Gpa(0), Access::Execute);
    setup.set_execute_huge(ExecuteHuge::Split).unwrap();
    let thread = faulting(fetches, 0, Access::Execute);
    setup.convert(GpaRange::new(Gpa(page), PAGE).unwrap(), MemoryKind::Shared, |_| {}).unwrap();
    let mut vcpu = thread.join().unwrap().get();
    let other = BLOCK - PAGE - page;
    let private = at(vcpu.worker(), other).expect("the page that stays private stays mapped");
    assert_eq!((private.hpa.0, private.size.bytes()), (PRIVATE + other, PAGE));
    let shared = at(vcpu.worker(), page);
    assert!(shared.is_none_or(|leaf| leaf.hpa.0 == OLD + page), "{shared:?}");
    // The machine was asked once, and knows exactly what is mapped.
    assert_eq!((world.split.get(), world.assigned.get()), (1, PAGE));
}

#[test]
fn a_private_block_is_split_once_for_a_fetch_and_a_conversion() {
    for page in [0, PAGE] {
        let name = format!("fetch from a private block || conversion of page {}", page / PAGE);
        bounded(&name, 4, move || fetch_and_conversion(page));
    }
}
