//! A fault that asks the host for a page, against a host that takes that page away.

use crate::guest::*;
use crate::hardware::WalkedFormat;
use crate::machine::*;
use core::ops::Range;
use loom::sync::{Arc, Mutex};
use loom::thread::spawn;
use slat::format::tiny::{Tiny, TinyEpt};
use slat::{Gpa, Hpa, MapError, PageSize};

const OLD: u64 = MEMORY;
const NEW: u64 = 2 * MEMORY;

/// The memory that the host has for the guest.
type Backing = Arc<Mutex<u64>>;

/// Reserves, asks the backing, and commits. Returns whether it mapped something.
fn fault<F: WalkedFormat>(
    guest: On<F>,
    gpa: u64,
    size: u64,
    cache: &mut Cache<F>,
    host: &Backing,
) -> bool {
    let mut inside = guest.inside();
    let size = PageSize::from_bytes(size).unwrap();
    let Ok(pte) = inside.guard.reserve(Gpa(gpa), size, cache) else { return false };
    let start = pte.range().start().0;
    let memory = *host.lock().unwrap();
    pte.commit(Hpa(memory + start), RAM).expect("a good address").is_some()
}

/// Takes the old memory away, for good.
fn change<F: WalkedFormat>(guest: On<F>, at: Range<u64>, host: &Backing) {
    *host.lock().unwrap() = NEW;
    let mut at = Some(at);
    // It repeats this until it is done, as others hold entries for a bounded time.
    for _ in 0..4 {
        let Some(rest) = at.take() else { break };
        at = unmapped(guest, rest);
    }
    if at.is_none() {
        guest.world.ledger.lose(OLD..OLD + BIG);
    }
}

/// Unmaps all that is mapped there; returns the range that is left to do.
fn unmapped<F: WalkedFormat>(guest: On<F>, at: Range<u64>) -> Option<Range<u64>> {
    let mut storage = [const { slat::UnmapEntry::EMPTY }; 4];
    let mut batch = slat::UnmapBatch::new(guest.tables(), &mut storage);
    let result = guest.inside().guard.unmap(range(&at), &mut batch);
    batch.complete().for_each(drop);
    result.err().map(|stopped| stopped.at.0..at.end)
}

/// After the host has finished, nothing translates to the old memory.
fn finished<F: WalkedFormat>(guest: On<F>) {
    if guest.world.ledger.has_lost() {
        for gpa in pages(&(0..BLOCK)) {
            let found = guest.inside().guard.translate(Gpa(gpa)).expect("a marker was left");
            assert!(found.is_none_or(|leaf| leaf.hpa.0 == NEW + gpa), "{found:?}");
        }
    }
    let retired = guest.pages() - 1 - guest.linked();
    guest.end(retired);
}

fn both(name: &str, bound: Option<usize>, size: u64, tables: usize, unmap: Range<u64>) {
    fn model<F: WalkedFormat>(size: u64, tables: usize, unmap: Range<u64>) {
        let guest = On::<F>::new(14, NEVER);
        let host = Backing::new(Mutex::new(OLD));
        let (mut cache, asks) = (guest.cache(tables), host.clone());
        let faults = spawn(move || fault(guest, 0, size, &mut cache, &asks));
        change(guest, unmap, &host);
        let _ = faults.join().unwrap();
        finished(guest);
    }
    let range = unmap.clone();
    run(&std::format!("{name}, Arm"), bound, move || model::<Tiny>(size, tables, range.clone()));
    run(&std::format!("{name}, Intel"), bound, move || {
        model::<TinyEpt>(size, tables, unmap.clone());
    });
}

#[test]
fn a_page_the_host_took_is_not_mapped_by_an_earlier_fault() {
    both("fault of a page || host takes the page", None, PAGE, 1, 0..PAGE);
}

#[test]
fn nor_when_the_table_around_the_reservation_is_retired() {
    both("fault of a page || host takes all", None, PAGE, 1, 0..BLOCK);
}

#[test]
fn nor_is_a_block() {
    both("fault of a block || host takes all", None, BLOCK, 0, 0..BLOCK);
}

#[test]
fn a_block_that_the_host_took_a_page_of_is_not_mapped() {
    both("fault of a block || host takes a page of it", None, BLOCK, 0, 0..PAGE);
}

/// One of a page fault and a block fault wins, or both map pages.
fn two_faults<F: WalkedFormat>(host_acts: bool) {
    let guest = On::<F>::new(14, NEVER);
    let host = Backing::new(Mutex::new(OLD));
    let (mut page, mut block) = (guest.cache(1), guest.cache(0));
    let (ask, asks) = (host.clone(), host.clone());
    let small = spawn(move || (fault(guest, PAGE, PAGE, &mut page, &ask), page));
    if host_acts {
        let large = spawn(move || (fault(guest, 0, BLOCK, &mut block, &asks), block));
        change(guest, 0..BLOCK, &host);
        drop(large.join().unwrap());
        drop(small.join().unwrap());
    } else {
        let large = fault(guest, 0, BLOCK, &mut block, &asks);
        let (small, page) = small.join().unwrap();
        // Both may have lost: a table was linked between the block's reservation and its commit,
        // and another thread's entry was in the way of the page.
        let found = guest.at(PAGE).map(|leaf| leaf.size.bytes());
        assert_eq!(found.is_some(), small || large);
        drop((page, block));
    }
    finished(guest);
}

#[test]
fn a_page_fault_and_a_block_fault_leave_one_translation() {
    explore("page fault || block fault, Arm", || two_faults::<Tiny>(false));
    explore("page fault || block fault, Intel", || two_faults::<TinyEpt>(false));
}

#[test]
fn neither_of_two_faults_in_a_range_maps_memory_the_host_took() {
    bounded("page fault || block fault || host, Arm", 2, || two_faults::<Tiny>(true));
    bounded("page fault || block fault || host, Intel", 2, || two_faults::<TinyEpt>(true));
}

#[test]
fn a_reservation_is_void_after_another_threads_link_or_map() {
    explore("fault of a block || map of a page", || {
        let guest = Guest::new(14, NEVER);
        let host = Backing::new(Mutex::new(OLD));
        let (mut mine, mut others) = (guest.cache(0), guest.cache(1));
        let maps = spawn(move || (guest.map(0..PAGE, RAM, PAGE, &mut others), others));
        let mapped = fault(guest, 0, BLOCK, &mut mine, &host);
        let (rest, others) = maps.join().unwrap();
        match rest {
            None => assert!(!mapped || guest.leaf(0).0 == BLOCK),
            // The block came first: it contains a page of the same memory.
            Some(rest) => assert!(mapped || rest.reason == MapError::Contended, "{rest:?}"),
        }
        drop((mine, others));
        guest.end(0);
    });
}

/// Reserves, commits, and counts how often `tell` says that this will succeed.
fn told<F: WalkedFormat>(guest: On<F>, size: u64, cache: &mut Cache<F>, count: &Mutex<u64>) {
    let mut inside = guest.inside();
    let size = PageSize::from_bytes(size).unwrap();
    let Ok(pte) = inside.guard.reserve(Gpa(0), size, cache) else { return };
    let tell = || {
        *count.lock().unwrap() += 1;
        Ok::<(), ()>(())
    };
    let done = pte.commit_told(Hpa(OLD), RAM, tell);
    let _ = done.expect("nobody refuses").expect("a good address");
}

/// Of faults on one page, or on a page and its block, `tell` reports each leaf that is mapped,
/// once, and nothing else; also during an unmap.
fn tells<F: WalkedFormat>(sizes: [u64; 2], unmaps: bool) {
    let guest = On::<F>::new(14, NEVER);
    let count = Arc::new(Mutex::new(0));
    let threads = sizes.map(|size| {
        let (mut cache, count) = (guest.cache(1), count.clone());
        spawn(move || {
            told(guest, size, &mut cache, &count);
            cache
        })
    });
    let mut removed = 0;
    if unmaps {
        let mut storage = [const { slat::UnmapEntry::EMPTY }; 4];
        let mut batch = slat::UnmapBatch::new(guest.tables(), &mut storage);
        let _contended = guest.inside().guard.unmap(range(&(0..PAGE)), &mut batch);
        removed = batch.complete().count() as u64;
    }
    threads.into_iter().for_each(|thread| drop(thread.join().unwrap()));
    let there = u64::from(guest.at(0).is_some());
    assert_eq!(*count.lock().unwrap(), there + removed);
    let retired = guest.pages() - 1 - guest.linked();
    guest.end(retired);
}

#[test]
fn faults_on_one_page_are_reported_exactly_when_they_map() {
    let pages = [PAGE, PAGE];
    explore("told fault || told fault, Arm", move || tells::<Tiny>(pages, false));
    explore("told fault || told fault, Intel", move || tells::<TinyEpt>(pages, false));
    bounded("told fault || told fault || unmap, Arm", 2, move || tells::<Tiny>(pages, true));
    bounded("told fault || told fault || unmap, Intel", 2, move || tells::<TinyEpt>(pages, true));
}

#[test]
fn each_fault_on_a_block_or_its_page_is_reported_if_it_maps() {
    let both = [PAGE, BLOCK];
    explore("told page || told block, Arm", move || tells::<Tiny>(both, false));
    explore("told page || told block, Intel", move || tells::<TinyEpt>(both, false));
}
