//! Many guests, many vCPUs, many memslots.

use crate::machine::*;
use slat::format::ept::Ept1G;
use slat::{Access, Gpa, PageSize, Vmid};
use slat_guest::*;
use std::sync::Arc;

fn ram() -> OnePiece {
    OnePiece(PageSize::SIZE_4K)
}

#[test]
fn a_thousand_guests_live_in_one_process() {
    const GUESTS: u16 = 1000;
    let machine = CountingMachine::new();
    let new = |vmid| {
        // For a vCPU and a worker.
        let machine = Arc::new(OwnReaders::<_, 2>::new(machine.clone()));
        let config = Config::new(1, PageSize::SIZE_2M);
        SharedGuest::new(Ept1G::default(), Vmid(vmid), 39, machine, ram(), config).unwrap()
    };
    let guests: Vec<_> = (0..GUESTS).map(new).collect();
    let mut vcpus: Vec<_> = guests.iter().map(|guest| guest.vcpu(0).unwrap()).collect();
    for vcpu in &mut vcpus {
        vcpu.with(|vcpu| {
            vcpu.worker().set_memslot(memslot(M2)).unwrap();
            assert!(matches!(vcpu.fault(Gpa(BASE), Access::Write), Outcome::Mapped(_)));
        });
    }
    // A guest at work does not change the other guests.
    let pages = |guest: &SharedGuest<_, _, OnePiece>| guest.get().stats().mapped.bytes();
    let before: Vec<_> = guests.iter().map(pages).collect();
    vcpus[500].with(|vcpu| vcpu.worker().set_memslot(memslot(0)).unwrap());
    let changed = guests.iter().zip(before).filter(|(guest, before)| pages(guest) != *before);
    assert_eq!(changed.count(), 1);
    assert!(machine.frames() >= 4 * u64::from(GUESTS) - 4);
    // They are dropped in another order than they were made, each guest before some vCPU.
    let (mut guests, mut vcpus) = (guests, vcpus);
    while let Some(guest) = guests.pop() {
        drop(guest);
        drop(vcpus.swap_remove(guests.len() / 2));
    }
    assert_eq!(machine.frames(), 0);
}

#[test]
fn sixty_four_vcpus_fault_at_once_during_logs_and_host_changes() {
    const VCPUS: u16 = 64;
    const BYTES: u64 = 16 * M2;
    let machine = CountingMachine::new();
    let config = Config { ring: Some(1024), ..Config::new(VCPUS, PageSize::SIZE_4K) };
    let guest = shared(&machine, 1, ram(), config);
    let mut worker = guest.worker().unwrap();
    worker.with(|worker| worker.set_memslot(memslot(BYTES))).unwrap();
    let threads: Vec<_> = (0..VCPUS)
        .map(|id| {
            let mut vcpu = guest.vcpu(id).unwrap();
            std::thread::spawn(move || {
                // In each table some pages that all vCPUs use, and some of the vCPU's own.
                let own = |table: u64| table * M2 + (64 + u64::from(id) * 4) * K4;
                let shared = |table: u64| table * M2 + u64::from(id) % 8 * K4;
                for gpa in (0..BYTES / M2).flat_map(|table| [own(table), shared(table)]) {
                    loop {
                        match vcpu.with(|vcpu| vcpu.fault(Gpa(BASE + gpa), Access::Write)) {
                            Outcome::Retry(_) => std::thread::yield_now(),
                            Outcome::Refused(reason) => panic!("{reason:?}"),
                            _ => break,
                        }
                    }
                }
            })
        })
        .collect();
    for log_dirty in [true, false, true] {
        worker.with(|worker| {
            worker.set_memslot(MemslotSpec { log_dirty, ..memslot(BYTES) }).unwrap();
            let host = HvaRange { start: Hva(HOST + 3 * M2), bytes: M2 };
            drop(worker.invalidate(host, |_| {}));
        });
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    let stats = guest.get().stats();
    assert_eq!(stats.vcpus.len(), usize::from(VCPUS));
    assert!(stats.vcpus.iter().all(|vcpu| vcpu.stall().count >= 2 * (BYTES / M2)));
    worker.with(|worker| {
        // The pages that each vCPU used are mapped, except those that were invalidated.
        let pages = worker.leaves_by_size()[0].1;
        let most = (BYTES / M2) * (64 + 8);
        assert!(pages <= most && pages >= most - 72, "{pages} of {most}");
        worker.set_memslot(memslot(0)).unwrap();
    });
    drop((worker, guest));
    assert_eq!(machine.frames(), 0);
}

/// The number of memslots that KVM on x86 gives a guest.
const SLOTS: u16 = 32_764;

fn one_of(number: u16) -> MemslotSpec {
    // Neither guest nor host addresses are neighbours.
    let at = u64::from(number) * 4 * K4;
    let (gpa, host) = (Gpa(BASE + at), Hva(HOST + at));
    MemslotSpec { id: MemslotId(number), gpa, host, ..memslot(2 * K4) }
}

#[test]
fn a_guest_has_as_many_slots_as_kvm_gives_one() {
    let machine = CountingMachine::new();
    let guest = shared(&machine, 1, ram(), Config::new(1, PageSize::SIZE_2M));
    let mut vcpu = guest.vcpu(0).unwrap();
    vcpu.with(|vcpu| {
        // In an order that is neither ascending nor descending.
        for number in (0..SLOTS).map(|number| (u32::from(number) * 5 % 32_764) as u16) {
            assert_eq!(vcpu.worker().set_memslot(one_of(number)), Ok(MemslotChange::Inserted));
        }
        let memslots = vcpu.worker().memslots();
        assert!(memslots.iter().copied().eq((0..SLOTS).map(one_of)));
        for number in (0..SLOTS).step_by(1234) {
            let spec = one_of(number);
            let mapped = vcpu.fault(Gpa(spec.gpa.0 + K4), Access::Write);
            assert_eq!(mapped, Outcome::Mapped(PageSize::SIZE_4K));
            assert_eq!(vcpu.fault(Gpa(spec.gpa.0 + 2 * K4), Access::Write), Outcome::Mmio);
            let worker = vcpu.worker();
            let host = HvaRange { start: spec.host, bytes: 5 * K4 };
            let next = (number + 1 < SLOTS).then(|| one_of(number + 1).range_of_a_page());
            let own = slat::GpaRange::new(spec.gpa, 2 * K4).unwrap();
            let ranges: Vec<_> = [Some(own), next].into_iter().flatten().collect();
            assert_eq!(worker.guest_ranges(host), ranges);
            let over =
                MemslotSpec { id: MemslotId(SLOTS), gpa: Gpa(spec.gpa.0 + K4), ..memslot(K4) };
            assert_eq!(worker.set_memslot(over), Err(MemslotError::Overlaps { id: spec.id }));
            let mut taken = Vec::new();
            drop(worker.invalidate(host, |page| taken.push(page.gpa)));
            assert_eq!(taken, [Gpa(spec.gpa.0 + K4)]);
        }
        for number in (0..SLOTS).step_by(3) {
            let gone = MemslotSpec { bytes: 0, ..one_of(number) };
            assert_eq!(vcpu.worker().set_memslot(gone), Ok(MemslotChange::Deleted));
        }
        let left = vcpu.worker().memslots();
        assert!(left.iter().copied().eq((0..SLOTS).filter(|number| number % 3 != 0).map(one_of)));
        for spec in left {
            vcpu.worker().set_memslot(MemslotSpec { bytes: 0, ..spec }).unwrap();
        }
        assert_eq!(vcpu.worker().memslots(), []);
    });
    drop((vcpu, guest));
    assert_eq!(machine.frames(), 0);
}

trait FirstPage {
    fn range_of_a_page(&self) -> slat::GpaRange;
}

impl FirstPage for MemslotSpec {
    fn range_of_a_page(&self) -> slat::GpaRange {
        slat::GpaRange::new(self.gpa, K4).unwrap()
    }
}

/// All memslots with the same host memory are found, wherever they are among the others.
#[test]
fn memory_that_many_slots_have_is_taken_from_each() {
    let machine = CountingMachine::new();
    let guest = shared(&machine, 1, ram(), Config::new(1, PageSize::SIZE_4K));
    let mut vcpu = guest.vcpu(0).unwrap();
    vcpu.with(|vcpu| {
        for number in 0..200u16 {
            // Each begins one page behind the previous one, and all reach the same end.
            let at = u64::from(number);
            let spec = MemslotSpec {
                id: MemslotId(number),
                gpa: Gpa(BASE + at * G1 / 4),
                host: Hva(HOST + at * K4),
                ..memslot((256 - at) * K4)
            };
            vcpu.worker().set_memslot(spec).unwrap();
            let shared = Gpa(spec.gpa.0 + (220 - at) * K4);
            assert!(matches!(vcpu.fault(shared, Access::Read), Outcome::Mapped(_)));
        }
        let host = HvaRange { start: Hva(HOST + 220 * K4), bytes: K4 };
        assert_eq!(vcpu.worker().guest_ranges(host).len(), 200);
        let mut taken = 0;
        drop(vcpu.worker().invalidate(host, |page| taken += page.host.bytes / K4));
        assert_eq!(taken, 200);
        let host = HvaRange { start: Hva(HOST + 3 * K4), bytes: K4 };
        assert_eq!(vcpu.worker().guest_ranges(host).len(), 4, "those that begin by then");
    });
}
