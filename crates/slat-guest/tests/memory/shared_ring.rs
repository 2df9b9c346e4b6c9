//! Dirty rings in memory that is shared with another process, which may do anything there.

use crate::fixture::*;
use slat::{Access, Gpa, PageSize};
use slat_guest::*;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};

const ENTRIES: usize = 128;

fn memory() -> Vec<DirtyGfn> {
    (0..ENTRIES).map(|_| DirtyGfn::default()).collect()
}

fn ringed() -> Config {
    Config { ring: Some(ENTRIES as u32), vcpus: 1, ..config() }
}

/// The other process, by KVM's protocol: returns dirty entries, in order, from `next` on.
fn harvest(ring: &[DirtyGfn], next: &mut usize) -> Vec<(u32, u64)> {
    let mut pages = Vec::new();
    loop {
        let entry = &ring[*next % ENTRIES];
        if entry.flags.load(Ordering::Acquire) & 1 == 0 {
            return pages;
        }
        pages.push((entry.memslot.load(Ordering::Relaxed), entry.offset.load(Ordering::Relaxed)));
        entry.flags.store(2, Ordering::Release);
        *next += 1;
    }
}

/// Makes a guest whose ring is in `$memory`, with its vCPU.
macro_rules! with_ring {
    ($memory:ident => $machine:ident, $guest:ident, $vcpu:ident) => {
        let $machine = Intel::machine(1);
        give_all::<Intel>(&$machine);
        let ram = Ram::new();
        ram.populate(HOST, 2 * M2, PageSize::SIZE_2M);
        let $guest = guest::<Intel>(&$machine, &ram, ringed()).share_rings(&[&$memory]).unwrap();
        let mut storage = storage();
        let mut $vcpu = Vcpu::new(&$guest, 0, &mut storage).unwrap();
        $machine.cpu(0).load(VMID, $vcpu.root());
        $vcpu.worker().set_memslot(logged(2 * M2)).unwrap();
    };
}

#[test]
fn entries_have_linuxs_layout() {
    assert_eq!((size_of::<DirtyGfn>(), align_of::<DirtyGfn>()), (16, 8));
    assert_eq!(core::mem::offset_of!(DirtyGfn, flags), 0);
    assert_eq!(core::mem::offset_of!(DirtyGfn, memslot), 4);
    assert_eq!(core::mem::offset_of!(DirtyGfn, offset), 8);
}

#[test]
fn another_process_harvests_by_kvms_protocol() {
    let ring = memory();
    with_ring!(ring => machine, guest, vcpu);
    let mut next = 0;
    for round in 0..5 {
        let pages: Vec<u64> = (0..40).map(|page| page * 7 + round).collect();
        for page in &pages {
            attempt::<Intel>(&machine, &mut vcpu, BASE + page * K4, Access::Write).unwrap();
        }
        let harvested = harvest(&ring, &mut next);
        assert_eq!(harvested, pages.iter().map(|page| (0, *page)).collect::<Vec<_>>());
        // Until the reset they are not dirty again, and entries that were not harvested are not
        // reset.
        assert!(harvest(&ring, &mut next).is_empty());
        attempt::<Intel>(&machine, &mut vcpu, BASE + 1000 * K4, Access::Write).unwrap();
        assert_eq!(vcpu.worker().reset_rings(), Ok(40));
        assert_eq!(harvest(&ring, &mut next), [(0, 1000)]);
        assert_eq!(vcpu.worker().reset_rings(), Ok(1));
        assert!(ring.iter().all(|entry| entry.flags.load(Ordering::Relaxed) == 0));
    }
    assert!(machine.finish().is_empty());
}

#[test]
fn a_side_that_never_harvests_fills_its_ring_and_this_side_can() {
    let ring = memory();
    with_ring!(ring => machine, guest, vcpu);
    let mut page = 0;
    let full = loop {
        // The other process clears the mark, and does not set the harvested bit.
        ring.iter().for_each(|entry| entry.flags.store(0xffff_fffc, Ordering::Relaxed));
        assert_eq!(vcpu.worker().reset_rings(), Ok(0));
        match attempt::<Intel>(&machine, &mut vcpu, BASE + page * K4, Access::Write) {
            Ok(_) => page += 1,
            Err(outcome) => break outcome,
        }
    };
    assert_eq!((full, page), (Outcome::RingFull, 64));
    let mut pages = [DirtyPage { memslot: MemslotId(9), page: 0 }; ENTRIES];
    assert_eq!(vcpu.worker().harvest_ring(0, &mut pages), 64);
    assert!((0..64).all(|page| pages[page as usize].page == page));
    assert_eq!(vcpu.worker().reset_rings(), Ok(64));
    attempt::<Intel>(&machine, &mut vcpu, BASE, Access::Write).unwrap();
    assert!(machine.finish().is_empty());
}

#[test]
fn entries_that_are_not_there_are_not_harvested() {
    let ring = memory();
    with_ring!(ring => machine, guest, vcpu);
    let all = || ring.iter().for_each(|entry| entry.flags.store(u32::MAX, Ordering::Relaxed));
    all();
    assert_eq!(vcpu.worker().reset_rings(), Ok(0));
    for round in 0..60 {
        for page in 0..3 {
            attempt::<Intel>(&machine, &mut vcpu, BASE + page * K4, Access::Write).unwrap();
        }
        all();
        assert_eq!(vcpu.worker().reset_rings(), Ok(3), "round {round}");
    }
    assert!(machine.finish().is_empty());
}

#[test]
fn a_hostile_user_of_the_ring_loses_no_page_and_stops_no_vcpu() {
    for seed in crate::seed::seeds(4) {
        hostile(seed);
    }
}

fn hostile(seed: u64) {
    let ring = memory();
    with_ring!(ring => machine, guest, vcpu);
    let done = AtomicBool::new(false);
    std::thread::scope(|threads| {
        let (ring, done) = (&ring, &done);
        threads.spawn(move || {
            let mut rng = fastrand::Rng::with_seed(seed);
            while !done.load(Ordering::Relaxed) {
                let entry = &ring[rng.usize(..ENTRIES)];
                entry.flags.store(rng.u32(..), Ordering::Relaxed);
                entry.memslot.store(rng.u32(..), Ordering::Relaxed);
                entry.offset.store(rng.u64(..), Ordering::Relaxed);
            }
        });
        let _done = Raised(done);
        let mut rng = fastrand::Rng::with_seed(seed);
        for _ in 0..400 {
            let page = rng.u64(..200);
            match attempt::<Intel>(&machine, &mut vcpu, BASE + page * K4, Access::Write) {
                Ok(_) | Err(Outcome::RingFull) => {}
                Err(outcome) => panic!("{outcome:?}"),
            }
            if rng.u8(..8) == 0 {
                vcpu.worker().reset_rings().unwrap();
            }
        }
    });
    // Writable pages are still in the ring, or in the bitmap; no others are writable.
    let mut writable = BTreeSet::new();
    for page in 0..1024 {
        let leaf = vcpu.worker().translate(Gpa(BASE + page * K4)).unwrap();
        if leaf.is_some_and(|leaf| leaf.attributes.write) {
            writable.insert(page);
        }
    }
    let mut bits = [0; 16];
    vcpu.worker().take_log(MemslotId(0), &mut bits).unwrap();
    let in_bitmap = |page: &u64| bits[*page as usize / 64] >> (page % 64) & 1 == 1;
    let mut named: BTreeSet<_> = (0..1024).filter(in_bitmap).collect();
    let mut pages = [DirtyPage { memslot: MemslotId(9), page: 0 }; ENTRIES];
    let found = vcpu.worker().harvest_ring(0, &mut pages);
    named.extend(pages[..found].iter().map(|page| page.page));
    assert!(writable.is_subset(&named), "seed {seed}: {writable:?}, {named:?}");
    vcpu.worker().reset_rings().unwrap();
    for page in &writable {
        let leaf = vcpu.worker().translate(Gpa(BASE + page * K4)).unwrap().unwrap();
        assert!(!leaf.attributes.write, "seed {seed}: page {page}");
    }
    assert!(machine.finish().is_empty());
}

#[test]
fn memory_of_another_size_is_refused() {
    let machine = Intel::machine(1);
    let short: Vec<_> = (0..64).map(|_| DirtyGfn::default()).collect();
    let refused = guest::<Intel>(&machine, &Ram::new(), ringed()).share_rings(&[&short]);
    let reason = GuestError::SharedRing { vcpu: 0, entries: 64 };
    assert_eq!(refused.map(drop).unwrap_err(), reason);
    let none = guest::<Intel>(&machine, &Ram::new(), ringed()).share_rings(&[]);
    let reason = GuestError::SharedRing { vcpu: 0, entries: 0 };
    assert_eq!(none.map(drop).unwrap_err(), reason);
}
