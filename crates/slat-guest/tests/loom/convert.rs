//! A fault while a thread converts its page.

use crate::fixture::*;
use slat::{Access, BreakBeforeMake, Gpa, GpaRange};
use slat_guest::MemoryKind;

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
