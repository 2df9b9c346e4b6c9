//! Guests, workers and vCPUs that own what they use.

use crate::machine::*;
use slat::{Access, Gpa, PageSize};
use slat_guest::*;
use std::sync::Arc;
use std::sync::mpsc::channel;

fn config() -> Config {
    Config::new(4, PageSize::SIZE_2M)
}

fn ram() -> OnePiece {
    OnePiece(PageSize::SIZE_4K)
}

const fn is_sent<T: Send + 'static>() {}
const fn is_shared<T: Send + Sync + 'static>() {}
const _: () = {
    is_shared::<CountingGuest>();
    is_sent::<SharedVcpu<slat::format::ept::Ept1G, CountingMachine, OnePiece>>();
    is_sent::<SharedWorker<slat::format::ept::Ept1G, CountingMachine, OnePiece>>();
};

/// The guest is dropped, with every frame, by the last handle, worker or vCPU; then the machine is.
#[test]
fn the_last_handle_that_is_dropped_gives_back_every_frame() {
    for last in 0..4 {
        let machine = CountingMachine::new();
        let guest = shared(&machine, 1, ram(), config());
        let mut vcpu = guest.vcpu(0).unwrap();
        let mut worker = guest.worker().unwrap();
        worker.with(|worker| worker.set_memslot(memslot(8 * M2))).unwrap();
        for table in 0..4 {
            let gpa = Gpa(BASE + table * M2);
            let outcome = vcpu.with(|vcpu| vcpu.fault(gpa, Access::Write));
            assert_eq!(outcome, Outcome::Mapped(PageSize::SIZE_4K));
        }
        assert!(machine.frames() > 4);
        let weak = Arc::downgrade(&machine);
        let mut parts: Vec<Box<dyn Send>> =
            vec![Box::new(guest), Box::new(vcpu), Box::new(worker), Box::new(machine)];
        parts.rotate_left(last);
        while let Some(part) = parts.pop() {
            assert!(weak.upgrade().is_some(), "the machine stays for who stands on it");
            std::thread::spawn(move || drop(part)).join().unwrap();
        }
        assert!(weak.upgrade().is_none(), "{last}");
    }
}

#[test]
fn frames_are_back_when_the_last_part_of_a_guest_has_gone() {
    let machine = CountingMachine::new();
    let guest = shared(&machine, 1, ram(), config());
    let mut vcpu = guest.vcpu(0).unwrap();
    vcpu.with(|vcpu| vcpu.worker().set_memslot(memslot(M2))).unwrap();
    vcpu.with(|vcpu| vcpu.fault(Gpa(BASE), Access::Write));
    let other = guest.clone();
    drop(guest);
    drop(other);
    assert!(machine.frames() > 1, "more than the root");
    drop(vcpu);
    assert_eq!(machine.frames(), 0);
}

#[test]
fn a_vcpu_is_run_by_one_thread_at_a_time() {
    let machine = CountingMachine::new();
    let guest = shared(&machine, 1, ram(), config());
    let vcpu = guest.vcpu(2).unwrap();
    assert_eq!(guest.vcpu(2).unwrap_err(), VcpuError::Taken);
    assert_eq!(guest.vcpu(4).unwrap_err(), VcpuError::NoSuchVcpu { vcpus: 4 });
    drop(vcpu);
    drop(guest.vcpu(2).unwrap());
    assert!(format!("{guest:?}").contains("vmid"));
}

/// A closure may replace a part by another of its own guest. If the old part is dropped, or leaked,
/// the memory that it borrows exists until the handle is dropped.
#[test]
fn a_part_that_is_replaced_within_its_lifetime_stays_sound() {
    let machine = CountingMachine::new();
    let guest = shared(&machine, 1, ram(), config());
    let mut worker = guest.worker().unwrap();
    worker.with(|worker| {
        let new = Worker::new(worker.guest()).unwrap();
        drop(core::mem::replace(worker, new));
    });
    worker.with(|worker| worker.set_memslot(memslot(M2))).unwrap();
    drop(guest);
    drop(worker);
    assert_eq!(machine.frames(), 0);
}

#[test]
fn a_closure_that_panics_leaves_the_part_as_it_is() {
    let machine = CountingMachine::new();
    let guest = shared(&machine, 1, ram(), config());
    let mut worker = guest.worker().unwrap();
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        worker.with(|_| std::panic::resume_unwind(Box::new(7)))
    }));
    assert!(panic.is_err());
    worker.with(|worker| worker.set_memslot(memslot(M2))).unwrap();
}

/// Guests begin and end while others run, each with threads that outlive the function that made
/// them.
#[test]
fn guests_start_and_end_while_others_run_on_owning_threads() {
    let machine = CountingMachine::new();
    let (told, tells) = channel();
    let lanes: Vec<_> = (0..4u16)
        .map(|lane| {
            let (machine, told) = (Arc::clone(&machine), told.clone());
            std::thread::spawn(move || {
                let mut before: Vec<std::thread::JoinHandle<()>> = Vec::new();
                for round in 0..25u64 {
                    let guest = shared(&machine, 100 + lane, ram(), config());
                    let mut worker = guest.worker().unwrap();
                    worker.with(|worker| worker.set_memslot(memslot(4 * M2))).unwrap();
                    let run = |id: u16| {
                        let (mut vcpu, told) = (guest.vcpu(id).unwrap(), told.clone());
                        std::thread::spawn(move || {
                            let mapped = (0..64).filter(|page| {
                                let gpa = Gpa(BASE + (page * 33 + round + u64::from(id)) * K4);
                                let outcome = vcpu.with(|vcpu| vcpu.fault(gpa, Access::Write));
                                matches!(outcome, Outcome::Mapped(_))
                            });
                            told.send(mapped.count()).unwrap();
                        })
                    };
                    let threads = (0..3).map(run).collect();
                    let host = HvaRange { start: Hva(HOST), bytes: M2 };
                    worker.with(|worker| drop(worker.invalidate(host, |_| {})));
                    // The handles are dropped before the threads of the guest's vCPUs end; threads
                    // of the previous round have a reader slot each until they end.
                    drop((worker, guest));
                    let before = core::mem::replace(&mut before, threads);
                    before.into_iter().for_each(|thread| thread.join().unwrap());
                }
                before.into_iter().for_each(|thread| thread.join().unwrap());
            })
        })
        .collect();
    drop(told);
    lanes.into_iter().for_each(|lane| lane.join().unwrap());
    assert_eq!(tells.into_iter().filter(|&mapped| mapped > 0).count(), 4 * 25 * 3);
    assert_eq!(machine.frames(), 0);
}
