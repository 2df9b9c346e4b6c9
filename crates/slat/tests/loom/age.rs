//! Ageing by the accessed bits of tables, on Intel, at three levels. (`pairs` has the pairs of
//! operations.)

use crate::guest::*;
use crate::hardware::{Use, WalkedFormat};
use crate::machine::*;
use loom::thread::spawn;
use slat::{AgeOptions, TableBits};

const TEST: AgeOptions =
    AgeOptions { clear: false, table_bits: TableBits::Exact, flush_tlb: false };

#[test]
fn a_page_beside_a_table_unmapped_during_a_scan_is_not_lost() {
    bounded("age (exact) || unmap of the neighbour, three levels", 2, || {
        let guest = X86::new(15, NEVER).mapped(0..PAGE, RAM, PAGE);
        let guest = guest.mapped(BLOCK..BLOCK + PAGE, RAM, PAGE);
        let unmaps = spawn(move || guest.unmap(0..BLOCK));
        guest.age(0..2 * BIG, EXACT);
        guest.unmap_rest(unmaps.join().unwrap());
        // The page is young in this scan, or in the one that settles.
        guest.settle();
        let retired = guest.pages() - 1 - guest.linked();
        guest.end(retired);
    });
}

#[test]
fn a_page_beside_a_table_collapsed_during_a_scan_is_not_lost() {
    bounded("age (exact) || collapse of the neighbour, three levels", 2, || {
        let guest = X86::new(15, NEVER).mapped(0..BLOCK, RAM, PAGE);
        let guest = guest.mapped(BLOCK..BLOCK + PAGE, RAM, PAGE);
        let collapses = spawn(move || guest.collapse(0..BLOCK, BLOCK));
        guest.age(0..2 * BIG, EXACT);
        let _ = collapses.join().unwrap();
        guest.settle();
        let retired = guest.pages() - 1 - guest.linked();
        guest.end(retired);
    });
}

#[test]
fn a_test_scan_finds_pages_an_exact_scan_has_not_reported_yet() {
    explore("age (exact) || age (test)", || {
        let guest = X86::new(14, NEVER).mapped(0..PAGE, RAM, PAGE);
        let scans = spawn(move || guest.age(0..BIG, EXACT).0);
        let (young, _) = guest.age(0..BIG, TEST);
        // It is old once the scan has cleared it, not before.
        assert!(young == [0] || !guest.leaf(0).1.accessed, "it is marked, and said to be old");
        assert_eq!(scans.join().unwrap(), [0]);
        guest.settle();
        guest.end(0);
    });
}

#[test]
fn two_scans_of_a_page_in_use_find_it_young_each() {
    explore("age (exact) twice || hardware", || {
        let guest = X86::new(14, NEVER).running().mapped(0..BLOCK, CLEAN, PAGE);
        guest.access(0, false, Use::Always);
        let vcpu = spawn(move || guest.access(PAGE, false, Use::Always).map(drop));
        guest.age(0..BIG, EXACT);
        guest.access(0, false, Use::Always);
        let (young, unanswered) = guest.age(0..BIG, EXACT);
        vcpu.join().unwrap();
        assert!(young.contains(&0), "used since the first scan has ended");
        assert_eq!(unanswered, []);
        guest.settle();
        guest.end(0);
    });
}

#[test]
fn a_page_mapped_during_an_exact_scan_is_young_then_or_next() {
    explore("age (exact) || map of one page, accessed", || {
        // The table exists, and is marked: the map looks at the mark only.
        let guest = X86::new(14, NEVER).mapped(PAGE..BLOCK, RAM, PAGE);
        let mut cache = guest.cache(0);
        let maps = spawn(move || guest.map(0..PAGE, RAM, PAGE, &mut cache));
        guest.age(0..BIG, EXACT);
        assert!(maps.join().unwrap().is_none());
        guest.settle();
        guest.end(0);
    });
}

/// The guest, which has read its leaf of `size`, writes to it during `age`.
fn a_write_while_its_leaf_ages<F: WalkedFormat>(name: &'static str, size: u64, age: fn(On<F>)) {
    explore(name, move || {
        let guest = On::<F>::new(14, NEVER).running().mapped(0..size, CLEAN, size);
        guest.access(0, false, Use::Never);
        let vcpu = spawn(move || assert!(guest.write(0)));
        age(guest);
        vcpu.join().unwrap();
        guest.settle();
        guest.end(0);
    });
}

#[test]
fn a_write_while_its_page_alone_ages_is_not_lost() {
    let page = |guest: X86| drop(guest.age(0..PAGE, AgeOptions::LEAVES));
    a_write_while_its_leaf_ages("age (one page) || hardware, Intel", PAGE, page);
    let page = |guest: Guest| drop(guest.age(0..PAGE, AgeOptions::LEAVES));
    a_write_while_its_leaf_ages("age (one page) || hardware, Arm", PAGE, page);
}

#[test]
fn a_write_while_a_page_or_a_block_ages_as_a_leaf_is_not_lost() {
    let leaf = |guest: X86| assert_ne!(guest.age_leaf(0), Some(false), "it was read");
    a_write_while_its_leaf_ages("age_leaf (page) || hardware, Intel", PAGE, leaf);
    a_write_while_its_leaf_ages("age_leaf (block) || hardware, Intel", BLOCK, leaf);
    let leaf = |guest: Guest| assert_ne!(guest.age_leaf(0), Some(false), "it was read");
    a_write_while_its_leaf_ages("age_leaf (page) || hardware, Arm", PAGE, leaf);
    a_write_while_its_leaf_ages("age_leaf (block) || hardware, Arm", BLOCK, leaf);
}
