//! A guest waits only for itself: if its backing takes long, it delays no other guest.

use crate::machine::*;
use slat::format::ept::Ept1G;
use slat::{Access, Gpa, GpaRange, Hpa, Memory, PageSize, Vmid};
use slat_guest::*;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Reports that it was asked, then waits until it may answer.
struct Slow {
    gate: Option<(SyncSender<()>, Mutex<Receiver<()>>)>,
}

impl Backing for Slow {
    fn page(&self, host: Hva, _: Access) -> Result<Page, NoPage> {
        if let Some((asked, may_answer)) = &self.gate {
            asked.send(()).unwrap();
            may_answer.lock().unwrap().recv().unwrap();
        }
        let (hpa, block) = (Hpa(host.0 & ((1 << 40) - 1)), PageSize::SIZE_4K);
        Ok(Page { hpa, block, write: true, execute: true, memory: Memory::Normal })
    }
}

/// Does everything that waits for faults, frees tables, or takes a reader slot.
fn everything<H: Host + 'static, B: Backing + 'static>(guest: &SharedGuest<Ept1G, H, B>) {
    let mut vcpu = guest.vcpu(0).unwrap();
    let mut worker = guest.worker().unwrap();
    let pages = |log_dirty| MemslotSpec { log_dirty, ..memslot(M2) };
    worker.with(|worker| {
        worker.set_memslot(pages(false)).unwrap();
        worker.set_memslot(MemslotSpec { gpa: Gpa(BASE + G1), ..pages(false) }).unwrap();
        worker.set_memslot(pages(false)).unwrap();
    });
    assert!(matches!(vcpu.with(|vcpu| vcpu.fault(Gpa(BASE), Access::Write)), Outcome::Mapped(_)));
    worker.with(|worker| {
        worker.set_memslot(pages(true)).unwrap();
        assert_eq!(worker.read_log(MemslotId(0), &mut [0; 8]), Ok(0));
        assert_eq!(worker.take_log(MemslotId(0), &mut [0; 8]), Ok(0));
        worker.set_memslot(pages(false)).unwrap();
        drop(worker.invalidate(HvaRange { start: Hva(HOST), bytes: M2 }, |_| {}));
        worker.set_memslot(MemslotSpec { bytes: 0, ..memslot(M2) }).unwrap();
        worker.collapse(GpaRange::new(Gpa(BASE), M2).unwrap(), PageSize::SIZE_2M);
    });
    drop((vcpu, worker));
    // A thread inside another guest's tables does not delay the release of unlinked tables.
    guest.get().reclaim();
}

/// A fault of one guest waits for its backing; meanwhile another thread runs `other` on another
/// guest.
fn beside<H: Host + Send + Sync + 'static>(
    machines: [Arc<H>; 2],
    vmids: [u16; 2],
    logging: Logging,
    other: impl FnOnce(&SharedGuest<Ept1G, H, Slow>) + Send + 'static,
) {
    let (asked, was_asked) = sync_channel(1);
    let (answer, may_answer) = sync_channel(1);
    // Pages, so that the backing is asked once.
    let config = Config { logging, ..Config::new(1, PageSize::SIZE_4K) };
    let gates = [Some((asked, Mutex::new(may_answer))), None];
    let mut guests = machines.into_iter().zip(vmids).zip(gates).map(|((machine, vmid), gate)| {
        let (format, slow) = (Ept1G::default(), Slow { gate });
        SharedGuest::new(format, Vmid(vmid), 39, machine, slow, config).unwrap()
    });
    let (slow, fast) = (guests.next().unwrap(), guests.next().unwrap());
    let mut vcpu = slow.vcpu(0).unwrap();
    vcpu.with(|vcpu| vcpu.worker().set_memslot(memslot(M2))).unwrap();
    let fault = std::thread::spawn(move || vcpu.with(|vcpu| vcpu.fault(Gpa(BASE), Access::Write)));
    was_asked.recv().unwrap();
    let (done, is_done) = sync_channel(1);
    let change = std::thread::spawn(move || {
        other(&fast);
        // The other guest also ends meanwhile.
        drop(fast);
        done.send(()).unwrap();
    });
    let in_time = is_done.recv_timeout(Duration::from_secs(20));
    answer.send(()).unwrap();
    change.join().unwrap();
    assert!(matches!(fault.join().unwrap(), Outcome::Mapped(_)));
    assert_eq!(in_time, Ok(()), "one guest waited for another's fault");
}

const WAYS: [Logging; 2] = [Logging::Protect, Logging::Hardware];

#[test]
fn a_fault_that_waits_for_its_backing_holds_up_no_other_guest() {
    for logging in WAYS {
        let machine = CountingMachine::new();
        beside([machine.clone(), machine], [1, 2], logging, everything);
    }
}

/// Each guest has reader slots of its own: guests with one VMID are told apart, and no other guest
/// takes them.
#[test]
fn with_seats_of_its_own_a_guest_shares_neither_them_nor_vmids() {
    for logging in WAYS {
        let machine = CountingMachine::new();
        // Enough reader slots for a reader and the vCPU of one guest, and for a vCPU and a worker
        // of the other.
        let machines = [(); 2].map(|()| Arc::new(OwnReaders::<_, 2>::new(machine.clone())));
        let slow = machines[0].clone();
        let _all_but_one = slat::Reader::register(&*slow).unwrap();
        beside(machines, [1, 1], logging, everything);
        assert_eq!(slow.machine().frames(), 0);
    }
}

#[test]
fn a_guest_with_all_seats_taken_is_refused_more_but_others_not() {
    let machine = CountingMachine::new();
    let config = Config::new(2, PageSize::SIZE_4K);
    let guests = [(); 2].map(|()| {
        let machine = Arc::new(OwnReaders::<_, 2>::new(machine.clone()));
        let ram = OnePiece(PageSize::SIZE_4K);
        SharedGuest::new(Ept1G::default(), Vmid(1), 39, machine, ram, config).unwrap()
    });
    let [one, two] = [0, 1].map(|id| guests[0].vcpu(id).unwrap());
    assert_eq!(guests[0].worker().unwrap_err(), slat::TooManyReaders { slots: 2 });
    let workers = [(); 2].map(|()| guests[1].worker().unwrap());
    drop((one, two));
    guests[0].worker().unwrap();
    drop(workers);
}

/// Pages of which none ever arrives, or that come at once.
struct Late(bool);

impl Backing for Late {
    fn page(&self, host: Hva, access: Access) -> Result<Page, NoPage> {
        if self.0 { Err(NoPage::Absent) } else { OnePiece(PageSize::SIZE_4K).page(host, access) }
    }
}

/// Runs a small guest; returns all that it has cost. `crowded`: beside a guest with many memslots
/// and pages, vCPUs that wait for as many pages as they can, and an invalidation that nobody ends.
fn cost(crowded: bool) -> String {
    let machine = CountingMachine::new();
    let config = Config::new(1, PageSize::SIZE_2M);
    let crowd = crowded.then(|| shared(&machine, 1, Late(false), config));
    let waits = crowded.then(|| shared(&machine, 2, Late(true), config));
    let spec = |id, bytes| {
        let at = u64::from(id) * 4 * M2;
        MemslotSpec::new(MemslotId(id), Gpa(at), bytes, Hva(HOST + at))
    };
    let mut parts = Vec::new();
    for guest in crowd.iter().chain(&waits) {
        let mut vcpu = guest.vcpu(0).unwrap();
        vcpu.with(|vcpu| {
            for id in 0..500 {
                vcpu.worker().set_memslot(spec(id, M2)).unwrap();
                vcpu.fault(spec(id, M2).gpa, Access::Write);
            }
        });
        parts.push(vcpu);
    }
    let never_ends = crowd.as_ref().map(|guest| {
        let host = HvaRange { start: Hva(HOST), bytes: 1000 * 4 * M2 };
        let mut worker = guest.worker().unwrap();
        worker.with(|worker| core::mem::forget(worker.invalidate(host, |_| {})));
        worker
    });
    let before = machine.frames();
    let guest = shared(&machine, 3, OnePiece(PageSize::SIZE_4K), config);
    everything(&guest);
    let frames = machine.frames() - before;
    assert!(frames <= 3, "the root, and the tables above the memslot's");
    let waits = machine.waits.swap(0, SeqCst);
    let cost = format!("{:?}, {frames} frames, {waits} waits", guest.get().stats());
    drop((never_ends, parts));
    cost
}

#[test]
fn what_a_guest_pays_is_no_function_of_another_guest() {
    assert_eq!(cost(true), cost(false));
}
