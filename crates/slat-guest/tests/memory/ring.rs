//! Dirty rings.

use crate::fixture::*;
use crate::{on_all, with_guest};
use slat::{Access, Gpa, PageSize};
use slat_guest::*;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};

const NONE: DirtyPage = DirtyPage { memslot: MemslotId(u16::MAX), page: u64::MAX };

fn ringed() -> Config {
    Config { ring: Some(128), ..config() }
}

on_all! {
    fn a_ring_names_the_pages_in_the_order_of_their_first_writes<C: Case>() {
        with_guest!(C, ringed(), logged(4 * M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        let written = [700, 3, 2047, 4];
        for page in [700, 3, 700, 2047, 4, 3] {
            attempt::<C>(&machine, &mut vcpu, BASE + page * K4, Access::Write).unwrap();
        }
        let mut pages = [NONE; 3];
        let of = |page| DirtyPage { memslot: MemslotId(0), page };
        assert_eq!(vcpu.worker().harvest_ring(0, &mut pages), 3);
        assert_eq!(pages, [of(700), of(3), of(2047)]);
        assert_eq!(vcpu.worker().harvest_ring(0, &mut pages), 1);
        assert_eq!(pages[0], of(4));
        assert_eq!(vcpu.worker().reset_rings().unwrap(), 4);
        for page in written {
            attempt::<C>(&machine, &mut vcpu, BASE + page * K4, Access::Write).unwrap();
        }
        assert_eq!(vcpu.worker().harvest_ring(0, &mut pages), 3, "each is logged again");
        assert!(machine.finish().is_empty());
    }

    fn what_was_not_harvested_is_not_reset<C: Case>() {
        with_guest!(C, ringed(), logged(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
        for page in [1, 2, 3] {
            attempt::<C>(&machine, &mut vcpu, BASE + page * K4, Access::Write).unwrap();
        }
        assert_eq!(vcpu.worker().reset_rings().unwrap(), 0);
        let mut pages = [NONE; 8];
        assert_eq!(vcpu.worker().harvest_ring(0, &mut pages[..2]), 2);
        assert_eq!(vcpu.worker().reset_rings().unwrap(), 2);
        assert_eq!(vcpu.worker().harvest_ring(0, &mut pages), 1);
        assert_eq!(pages[0].page, 3);
        assert_eq!(vcpu.worker().harvest_ring(1, &mut pages), 0);
        assert_eq!(vcpu.worker().harvest_ring(9, &mut pages), 0, "no such vCPU");
    }

    fn a_full_ring_stops_its_vcpu_until_it_was_reset<C: Case>() {
        with_guest!(C, ringed(), logged(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
        let mut page = 0;
        let full = loop {
            let done = attempt::<C>(&machine, &mut vcpu, BASE + page * K4, Access::Write);
            if let Err(outcome) = done {
                break outcome;
            }
            page += 1;
        };
        assert_eq!((full, page), (Outcome::RingFull, 64));
        attempt::<C>(&machine, &mut vcpu, BASE + page * K4, Access::Read).unwrap();
        let mut pages = [NONE; 128];
        assert_eq!(vcpu.worker().harvest_ring(0, &mut pages), 64);
        assert_eq!(vcpu.worker().reset_rings().unwrap(), 64);
        attempt::<C>(&machine, &mut vcpu, BASE + page * K4, Access::Write).unwrap();
        assert!(machine.finish().is_empty());
    }

    fn pages_of_a_slot_that_was_deleted_are_passed_over<C: Case>() {
        with_guest!(C, ringed(), logged(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
        attempt::<C>(&machine, &mut vcpu, BASE, Access::Write).unwrap();
        let mut pages = [NONE; 8];
        vcpu.worker().harvest_ring(0, &mut pages);
        vcpu.worker().set_memslot(MemslotSpec { bytes: 0, ..memslot(M2) }).unwrap();
        assert_eq!(vcpu.worker().reset_rings().unwrap(), 1);
    }

    /// The pages that are to be reset lie in what was the end of the memslot before it became
    /// smaller.
    fn a_reset_protects_what_was_harvested_and_no_neighbour<C: Case>() {
        with_guest!(C, ringed(), logged(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
        let write = |vcpu: &mut TheVcpu<'_, C>, pages: &[u64]| {
            for page in pages {
                attempt::<C>(&machine, vcpu, BASE + page * K4, Access::Write).unwrap();
            }
        };
        let writable = |vcpu: &mut TheVcpu<'_, C>, page: u64| {
            let leaf = vcpu.worker().translate(Gpa(BASE + page * K4)).unwrap();
            leaf.is_some_and(|leaf| leaf.attributes.write)
        };
        write(&mut vcpu, &[100, 110, 130]);
        let mut pages = [NONE; 8];
        assert_eq!(vcpu.worker().harvest_ring(0, &mut pages), 3);
        vcpu.worker().set_memslot(MemslotSpec { bytes: 0, ..memslot(M2) }).unwrap();
        vcpu.worker().set_memslot(logged(128 * K4)).unwrap();
        let (id, gpa, host) = (MemslotId(1), Gpa(BASE + 128 * K4), Hva(HOST + 128 * K4));
        vcpu.worker().set_memslot(MemslotSpec { id, gpa, host, ..logged(128 * K4) }).unwrap();
        write(&mut vcpu, &[100, 110, 105, 130, 64]);
        assert_eq!(vcpu.worker().reset_rings(), Ok(3));
        let left = [64, 100, 105, 110, 130].map(|page| writable(&mut vcpu, page));
        assert_eq!(left, [true, false, true, false, true]);
        assert_eq!(vcpu.worker().harvest_ring(0, &mut pages), 5);
        // The last 64 pages of the memslot, and its neighbour.
        assert_eq!(vcpu.worker().reset_rings(), Ok(5));
        assert!([64, 100, 105, 110, 130].iter().all(|&page| !writable(&mut vcpu, page)));
        assert!(machine.finish().is_empty());
    }
}

/// One thread harvests, and both reset, while a vCPU writes.
fn harvested_beside_a_second_reset<C: Case>() {
    let seed = crate::seed::seed();
    with_guest!(C, ringed(), logged(4 * M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
    let (done, mut random) = (AtomicBool::new(false), fastrand::Rng::with_seed(seed));
    let mut written = BTreeSet::new();
    let harvested = std::thread::scope(|scope| {
        let (guest, done) = (&guest, &done);
        let harvests = scope.spawn(move || {
            let mut worker = Worker::new(guest).unwrap();
            let mut harvested = BTreeSet::new();
            loop {
                let last = done.load(Ordering::SeqCst);
                let mut pages = [NONE; 40];
                let count = worker.harvest_ring(0, &mut pages);
                harvested.extend(pages[..count].iter().map(|page| page.page));
                worker.reset_rings().unwrap();
                if last && count == 0 {
                    return harvested;
                }
            }
        });
        scope.spawn(move || {
            let mut worker = Worker::new(guest).unwrap();
            while !done.load(Ordering::SeqCst) {
                worker.reset_rings().unwrap();
                std::thread::yield_now();
            }
        });
        let raised = EndFlag(done);
        for _ in 0..1000 {
            let page = random.u64(..2048);
            let gpa = BASE + page * K4;
            machine.here(0);
            // A ring that is full is emptied soon.
            while machine.cpu(0).access(gpa, slat_sim::Access::Write).is_err() {
                vcpu.fault(Gpa(gpa), Access::Write);
                std::thread::yield_now();
            }
            written.insert(page);
        }
        drop(raised);
        harvests.join().unwrap()
    });
    assert_eq!(harvested, written, "seed {seed}");
    assert!(machine.finish().is_empty());
}

#[test]
fn a_harvest_beside_a_second_reset_loses_no_ring_entry() {
    harvested_beside_a_second_reset::<Intel>();
    harvested_beside_a_second_reset::<ArmPlain>();
}
