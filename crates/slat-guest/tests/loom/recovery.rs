//! Recovery of huge pages while a log begins, or a vCPU executes.

use crate::fixture::*;
use slat::{Access, BreakBeforeMake, Gpa, GpaRange, Reader};
use slat_guest::MemslotId;

/// Two executable pages of one block, which the next turn of recovery tries.
fn split() -> (&'static TheGuest, &'static Ram, TheWorker, TheVcpu) {
    let (world, ram) = (World::new(BreakBeforeMake::Never), Ram::new(BLOCK));
    let guest = recovered(world, ram);
    let (mut worker, mut vcpu) = (worker(guest), vcpu(guest));
    worker.set_memslot(memslot(false)).unwrap();
    for gpa in [0, PAGE] {
        vcpu.fault(Gpa(gpa), Access::Execute);
    }
    worker.recover_huge_pages();
    (guest, ram, worker, vcpu)
}

fn recover_and_log() {
    let (guest, ram, recovers, mut vcpu) = split();
    // A write fault of page 1 would give its right back.
    {
        let mut reader = Reader::register(guest.tables().platform()).unwrap();
        let mut guard = guest.tables().enter(&mut reader).unwrap();
        guard.write_protect(GpaRange::new(Gpa(PAGE), PAGE).unwrap()).unwrap();
    }
    let mut logs = worker(guest);
    let recovers = SendCell(recovers);
    let thread = spawn(move || {
        let mut worker = recovers.get();
        worker.recover_huge_pages();
        SendCell(worker)
    });
    logs.set_memslot(memslot(true)).unwrap();
    let unprotected = [0, PAGE].map(|gpa| writable(&mut logs, gpa));
    assert_eq!(unprotected, [false; 2], "a write would not be logged");
    drop(thread.join().unwrap());
    let unprotected = [0, PAGE].map(|gpa| writable(&mut logs, gpa));
    assert_eq!(unprotected, [false; 2], "a write is not logged");
    assert!(write(&mut vcpu, ram, PAGE, 1));
    let mut log = [0];
    logs.read_log(MemslotId(0), &mut log).unwrap();
    assert_eq!(log, [2]);
}

fn recover_and_execute() {
    let (_, _, recovers, vcpu) = split();
    let thread = faulting(vcpu, PAGE, Access::Execute);
    let mut worker = recovers;
    let recovered = worker.recover_huge_pages();
    drop(thread.join().unwrap());
    let leaf = at(&mut worker, 0).expect("it stays mapped");
    let execute = leaf.attributes.execute != slat::Execute::None;
    assert!(leaf.size.bytes() == PAGE || !execute, "a huge page may be executed: {leaf:?}");
    assert!(recovered.bytes + recovered.left != 0, "recovery forgets no table");
}

#[test]
fn recovery_gives_back_no_right_to_write_that_a_log_takes() {
    bounded("recovery || a log begins", 2, recover_and_log);
}

#[test]
fn recovery_makes_no_executable_block() {
    bounded("recovery || fetch", 3, recover_and_execute);
}
