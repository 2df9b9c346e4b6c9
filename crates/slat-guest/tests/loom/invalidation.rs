//! A fault while the host invalidates its page.

use crate::fixture::*;
use loom::sync::atomic::Ordering;
use slat::{Access, BreakBeforeMake, Gpa, PageSize};
use slat_guest::{Config, Hva, HvaRange, Vcpu};

/// The host invalidates `bytes` from `HOST` on, moves all of its memory, and ends the invalidation.
fn take(worker: TheWorker, ram: &'static Ram, bytes: u64) {
    take_from(worker, ram, 0, bytes);
}

/// As `take`, from `first` on.
fn take_from(mut worker: TheWorker, ram: &'static Ram, first: u64, bytes: u64) {
    let range = HvaRange { start: Hva(HOST + first), bytes };
    let invalidation = worker.invalidate(range, |_| {});
    let found = at(&mut worker, first);
    assert!(found.is_none(), "reachable after the invalidation: {found:?}");
    *ram.at.lock().unwrap() = NEW;
    let found = at(&mut worker, first);
    assert!(found.is_none(), "mapped before the invalidation has ended: {found:?}");
    drop(invalidation);
}

/// `before`: a page is already mapped, so the table exists.
fn fault_and_host(block: u64, bytes: u64, before: bool) {
    fault_and_host_at(block, 0, bytes, before);
}

/// The host invalidates memory from `first` on while the guest uses the first page.
fn fault_and_host_at(block: u64, first: u64, bytes: u64, before: bool) {
    let (world, ram) = (World::new(BreakBeforeMake::Never), Ram::new(block));
    let guest = guest(world, ram, config());
    let mut setup = worker(guest);
    setup.set_memslot(memslot(false)).unwrap();
    let mut faults = vcpu(guest);
    if before {
        faults.fault(Gpa(0), Access::Write);
    }
    let thread = faulting(faults, 0, Access::Write);
    take_from(setup, ram, first, bytes);
    let mut vcpu = thread.join().unwrap().get();
    let found = at(vcpu.worker(), first);
    assert!(found.is_none_or(|leaf| leaf.hpa.0 == NEW + first), "{found:?}");
}

#[test]
fn a_page_the_host_takes_is_not_mapped_by_an_earlier_fault() {
    bounded("fault of a page || invalidation", 5, || fault_and_host(PAGE, PAGE, false));
    bounded("fault on a page that is there || invalidation", 5, || {
        fault_and_host(PAGE, PAGE, true);
    });
}

#[test]
fn nor_is_a_block_of_which_the_host_takes_a_page() {
    bounded("fault of a block || invalidation of a page", 5, || {
        fault_and_host(BLOCK, PAGE, false);
    });
    bounded("fault of a block || invalidation of its last page", 5, || {
        fault_and_host_at(BLOCK, PAGE, PAGE, false);
    });
    bounded("fault of a block || invalidation of all", 5, || fault_and_host(BLOCK, BLOCK, false));
}

#[test]
fn nor_by_either_of_two_faults_that_share_a_reservation() {
    bounded("fault || fault of the same page || invalidation", 2, || {
        let (world, ram) = (World::new(BreakBeforeMake::Never), Ram::new(PAGE));
        let page = PageSize::from_bytes(PAGE).unwrap();
        let guest = guest(world, ram, Config { largest: page, vcpus: 2, ..config() });
        let mut setup = worker(guest);
        setup.set_memslot(memslot(false)).unwrap();
        let threads = [0, 1].map(|id| {
            let faults = SendCell(Vcpu::new(guest, id).unwrap());
            spawn(move || {
                let mut vcpu = faults.get();
                vcpu.fault(Gpa(0), Access::Write);
                SendCell(vcpu)
            })
        });
        take(setup, ram, PAGE);
        for thread in threads {
            let mut vcpu = thread.join().unwrap().get();
            let found = at(vcpu.worker(), 0);
            assert!(found.is_none_or(|leaf| leaf.hpa.0 == NEW), "{found:?}");
        }
    });
}

/// The backing stops to hand out memory, and the guest evicts it: no thread waits for another.
fn fault_and_eviction(block: u64, before: bool) {
    let (world, ram) = (World::new(BreakBeforeMake::Never), Ram::that_goes(block));
    let guest = guest(world, ram, config());
    let mut setup = worker(guest);
    setup.set_memslot(memslot(false)).unwrap();
    let mut faults = vcpu(guest);
    if before {
        faults.fault(Gpa(0), Access::Read);
    }
    let thread = faulting(faults, 0, Access::Write);
    ram.gone.as_ref().unwrap().store(1, Ordering::Release);
    setup.evict(&[HvaRange { start: Hva(HOST), bytes: PAGE }], |_| {});
    let found = at(&mut setup, 0);
    assert!(found.is_none(), "reachable after the eviction: {found:?}");
    let mut vcpu = thread.join().unwrap().get();
    let found = at(vcpu.worker(), 0);
    assert!(found.is_none(), "mapped after the eviction: {found:?}");
}

#[test]
fn a_page_the_backing_hands_out_no_more_is_evicted_for_good() {
    bounded("fault of a page || eviction", 5, || fault_and_eviction(PAGE, false));
    bounded("fault on a page that is there || eviction", 5, || fault_and_eviction(PAGE, true));
    bounded("fault of a block || eviction of a page", 5, || fault_and_eviction(BLOCK, false));
}

#[test]
fn more_invalidations_than_places_forbid_all() {
    bounded("fault || two invalidations", 5, || {
        let (world, ram) = (World::new(BreakBeforeMake::Never), Ram::new(PAGE));
        let page = PageSize::from_bytes(PAGE).unwrap();
        let guest = guest(world, ram, Config { largest: page, ..config() });
        let mut setup = worker(guest);
        setup.set_memslot(memslot(false)).unwrap();
        let other = HvaRange { start: Hva(HOST + PAGE), bytes: PAGE };
        let first = setup.invalidate(other, |_| {});
        let faults = SendCell(vcpu(guest));
        let thread = spawn(move || {
            let mut vcpu = faults.get();
            vcpu.fault(Gpa(0), Access::Write);
            SendCell(vcpu)
        });
        take(worker(guest), ram, PAGE);
        drop(first);
        let mut vcpu = thread.join().unwrap().get();
        let found = at(vcpu.worker(), 0);
        assert!(found.is_none_or(|leaf| leaf.hpa.0 == NEW), "{found:?}");
    });
}

#[test]
fn a_page_that_the_host_takes_is_not_left_in_a_view() {
    bounded("fault in a view || invalidation", 4, || {
        let (world, ram) = (World::new(BreakBeforeMake::Never), Ram::new(PAGE));
        let guest = uncached(world, ram);
        let mut setup = worker(guest);
        setup.set_memslot(memslot(false)).unwrap();
        let faults = SendCell(vcpu(guest));
        let thread = spawn(move || {
            let mut vcpu = faults.get();
            vcpu.fault(Gpa(0), Access::Write);
            SendCell(vcpu)
        });
        take(setup, ram, PAGE);
        let mut vcpu = thread.join().unwrap().get();
        let found = vcpu.translate(Gpa(0));
        assert!(found.is_none_or(|leaf| leaf.hpa.0 == NEW), "{found:?}");
    });
}
