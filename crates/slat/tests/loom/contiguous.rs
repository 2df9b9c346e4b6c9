//! Groups of two pages, which a CPU may hold as one entry: unfolded, unmapped and filled while
//! other threads and that CPU run. `pairs.rs` has operations on a whole group; here they are on
//! parts of one.

use crate::guest::*;
use crate::hardware::Use;
use crate::machine::*;
use loom::thread::spawn;
use slat::{BreakBeforeMake, MapError, Software};

fn on_both(name: &str, bound: Option<usize>, model: fn(BreakBeforeMake)) {
    run(name, bound, move || model(NEVER));
    run(&std::format!("{name}, break"), bound, move || model(ALWAYS));
}

/// A CPU that uses the entries that it holds; none that it may use is wrong, or was unmapped.
fn reaches(guest: Guest, gpa: u64, write: bool) -> bool {
    let reached = guest.access(gpa, write, Use::Always);
    assert!(reached.is_none_or(|hpa| hpa.0 == MEMORY + gpa));
    reached.is_some()
}

#[test]
fn a_group_unfolded_by_two_threads_has_whole_pages_after() {
    on_both("protect of a page || protect of the other, group", None, |bbm| {
        let guest = Guest::new(14, bbm).folded(0..BLOCK, RAM, PAGE);
        let other = spawn(move || guest.protect(PAGE..BLOCK));
        let mine = guest.protect(0..PAGE);
        let rest = other.join().unwrap();
        guest.protect_rest(mine);
        guest.protect_rest(rest);
        for page in [0, PAGE] {
            let (size, attributes) = guest.leaf(page);
            assert_eq!((size, attributes.write, attributes.dirty), (PAGE, false, true));
        }
        guest.settle();
        guest.end(0);
    });
}

#[test]
fn a_write_through_a_group_is_in_its_page_after_the_unfold() {
    on_both("protect of a page || hardware writes both, group", Some(4), |bbm| {
        let guest = Guest::new(14, bbm).running().folded(0..BLOCK, CLEAN, PAGE);
        let cpu = spawn(move || (reaches(guest, PAGE, true), reaches(guest, 0, true)));
        let rest = guest.protect(0..PAGE);
        cpu.join().unwrap();
        assert!(!reaches(guest, 0, true) || rest.is_some(), "written, and protected");
        guest.protect_rest(rest);
        assert!(!reaches(guest, 0, true));
        assert!(reaches(guest, PAGE, true));
        assert!(!guest.leaf(0).1.write && guest.leaf(PAGE).1.write);
        guest.settle();
        guest.end(0);
    });
}

#[test]
fn a_page_of_a_group_that_is_unmapped_is_reached_no_more() {
    on_both("unmap of a page || hardware writes the other, group", Some(4), |bbm| {
        let guest = Guest::new(14, bbm).running().folded(0..BLOCK, CLEAN, PAGE);
        let cpu = spawn(move || reaches(guest, PAGE, true));
        let removed = guest.unmap_rest(guest.unmap(0..PAGE));
        cpu.join().unwrap();
        // With any entry that it holds: `access` fails an access to unmapped memory.
        reaches(guest, PAGE, true);
        assert!(!reaches(guest, 0, false));
        assert_eq!(bytes(&removed), PAGE);
        assert_eq!(guest.leaf(PAGE).0, PAGE);
        guest.settle();
        guest.end(0);
    });
}

#[test]
fn an_unmapped_entry_of_a_group_is_not_filled_before_the_rest() {
    on_both("unmap of a group || map to other memory, hardware", Some(1), |bbm| {
        let guest = Guest::new(14, bbm).running().folded(0..BLOCK, RAM, PAGE);
        let mut cache = guest.cache(1);
        let other = spawn(move || {
            // Where the first page was already unmapped: to other memory.
            let other = MEMORY + 2 * BLOCK;
            let _ = guest.inside().map_to(other, 0..PAGE, RAM, PAGE, &mut cache);
            // `access` fails if the TLB has two addresses of one page.
            guest.access(PAGE, false, Use::Never);
            guest.access(0, false, Use::Never);
        });
        let mut inside = guest.inside();
        let mut storage = [const { slat::UnmapEntry::EMPTY }; 2];
        let mut batch = inside.guard.unmap_batch(&mut storage);
        let _ = inside.guard.unmap(range(&(0..BLOCK)), &mut batch);
        other.join().unwrap();
        batch.complete().for_each(drop);
        drop(batch);
        drop(inside);
        let retired = guest.pages() - 1 - guest.linked();
        guest.world.running.set(false);
        assert_eq!(guest.tables().reclaim(), retired);
    });
}

#[test]
fn a_fold_fills_an_empty_group_or_its_pages_are_mapped_singly() {
    on_both("fold || map of a page", None, |bbm| {
        let guest = Guest::new(14, bbm).with_empty_table(PAGE);
        let (mut cache, mut others) = (guest.cache(1), guest.cache(1));
        let other = spawn(move || (guest.map(PAGE..BLOCK, RAM, PAGE, &mut others), others));
        let rest = guest.fold(0..BLOCK, RAM, PAGE, &mut cache);
        let (mapped, mut others) = other.join().unwrap();
        let contended =
            |rest: &Rest<MapError>| assert_eq!(rest.reason, MapError::Contended, "{rest:?}");
        rest.iter().for_each(contended);
        mapped.iter().for_each(contended);
        guest.map_rest(rest, RAM, PAGE, &mut cache);
        guest.map_rest(mapped, RAM, PAGE, &mut others);
        let sizes = [guest.leaf(0).0, guest.leaf(PAGE).0];
        assert!(sizes == [PAGE; 2] || sizes == [BLOCK; 2], "a group in part: {sizes:x?}");
        drop((cache, others));
        guest.settle();
        guest.end(0);
    });
}

#[test]
fn two_threads_that_fold_one_group_fold_it_once() {
    on_both("fold || fold", None, |bbm| {
        let guest = Guest::new(14, bbm).with_empty_table(PAGE);
        let (mut cache, mut others) = (guest.cache(1), guest.cache(1));
        let other = spawn(move || (guest.fold(0..BLOCK, RAM, PAGE, &mut others), others));
        let rest = guest.fold(0..BLOCK, RAM, PAGE, &mut cache);
        let (mapped, mut others) = other.join().unwrap();
        guest.map_rest(rest, RAM, PAGE, &mut cache);
        guest.map_rest(mapped, RAM, PAGE, &mut others);
        let sizes = [guest.leaf(0).0, guest.leaf(PAGE).0];
        assert!(sizes == [PAGE; 2] || sizes == [BLOCK; 2], "a group in part: {sizes:x?}");
        drop((cache, others));
        guest.settle();
        guest.end(0);
    });
}

#[test]
fn a_fold_into_a_table_being_unmapped_stands_or_is_handed_out() {
    on_both("fold || unmap, retire", Some(4), |bbm| {
        let guest = Guest::new(14, bbm).with_empty_table(PAGE);
        let mut cache = guest.cache(1);
        let other = spawn(move || (guest.fold(0..BLOCK, RAM, PAGE, &mut cache), cache));
        let unmapped = guest.unmap(0..BLOCK);
        let (rest, mut cache) = other.join().unwrap();
        let removed = guest.unmap_rest_unless(unmapped, 0..BLOCK);
        guest.map_rest(rest, RAM, PAGE, &mut cache);
        for page in [0, PAGE] {
            let gone = removed.iter().any(|leaf| leaf.gpa.0 == page);
            assert!(gone || guest.at(page).is_some(), "{page:#x} was lost");
        }
        drop(cache);
        let retired = guest.pages() - 1 - guest.linked();
        guest.end(retired);
    });
}

#[test]
fn a_group_that_is_aged_while_it_is_unfolded_loses_no_use() {
    on_both("age || protect of a page, group", Some(3), |bbm| {
        let guest = Guest::new(14, bbm).running().folded(0..BLOCK, CLEAN, PAGE);
        // The mark is in one member, for both pages.
        guest.access(0, false, Use::Always);
        guest.access(PAGE, false, Use::Always);
        let ages = spawn(move || drop(guest.age(0..BLOCK, EXACT)));
        let rest = guest.protect(0..PAGE);
        ages.join().unwrap();
        guest.protect_rest(rest);
        guest.settle();
        guest.end(0);
    });
}

#[test]
fn a_group_whose_software_bits_change_in_place_loses_no_write() {
    on_both("mark || hardware, group", None, |bbm| {
        let guest = Guest::new(14, bbm).running().folded(0..BLOCK, CLEAN, PAGE);
        let vcpu = spawn(move || guest.access(PAGE, true, Use::Always).map(drop));
        assert!(guest.mark(0..BLOCK).is_none());
        vcpu.join().unwrap();
        for page in [0, PAGE] {
            let (size, leaf) = guest.leaf(page);
            assert!(size == BLOCK && leaf.software.contains(Software::B), "a group in part");
        }
        guest.settle();
        guest.end(0);
    });
}

#[test]
fn software_bits_set_during_an_unfold_are_in_each_page() {
    on_both("mark || protect of a page, group", Some(3), |bbm| {
        let guest = Guest::new(14, bbm).folded(0..BLOCK, RAM, PAGE);
        let marks = spawn(move || guest.mark(0..BLOCK));
        let rest = guest.protect(0..PAGE);
        let marked = marks.join().unwrap();
        guest.protect_rest(rest);
        if let Some(rest) = marked {
            assert!(guest.mark(rest.range).is_none());
        }
        for page in [0, PAGE] {
            let (size, leaf) = guest.leaf(page);
            assert!(size == PAGE && leaf.software.contains(Software::B), "{page:#x}");
        }
        assert!(!guest.leaf(0).1.write && guest.leaf(PAGE).1.write);
        guest.settle();
        guest.end(0);
    });
}
