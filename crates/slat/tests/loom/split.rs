//! Split against all other operations, with and without break-before-make.

use crate::guest::*;
use crate::hardware::Use;
use crate::machine::*;
use loom::thread::spawn;
use slat::{Access, Attributes, BreakBeforeMake, Execute, Software, UnmapError};

pub fn both_ways(name: &str, model: impl Fn(BreakBeforeMake) + Send + Sync + Copy + 'static) {
    explore(&std::format!("{name}, break never"), move || model(NEVER));
    explore(&std::format!("{name}, break always"), move || model(ALWAYS));
}

#[test]
fn a_block_both_split_and_unmapped_is_handed_out_once() {
    both_ways("split || unmap", |bbm| {
        let guest = Guest::new(14, bbm).mapped(0..BLOCK, RAM, BLOCK);
        let mut cache = guest.cache(1);
        let splits = spawn(move || (guest.split(0..BLOCK, PAGE, &mut cache).1, cache));
        let result = guest.unmap(0..BLOCK);
        let (rest, mut cache) = splits.join().unwrap();
        let removed = guest.unmap_rest(result);
        guest.split_rest(rest, PAGE, &mut cache);
        assert_eq!((guest.at(0), guest.at(PAGE)), (None, None));
        assert_eq!(bytes(&removed), BLOCK);
        let retired = 1 - cache.len();
        drop(cache);
        guest.end(retired);
    });
}

#[test]
fn a_block_both_split_and_write_protected_is_nowhere_writable() {
    both_ways("split || write_protect", |bbm| {
        let guest = Guest::new(14, bbm).mapped(0..BLOCK, RAM, BLOCK);
        let mut cache = guest.cache(1);
        let splits = spawn(move || (guest.split(0..BLOCK, PAGE, &mut cache).1, cache));
        let rest = guest.protect(0..BLOCK);
        let (split, mut cache) = splits.join().unwrap();
        guest.protect_rest(rest);
        guest.split_rest(split, PAGE, &mut cache);
        for gpa in [0, PAGE] {
            let (size, state) = guest.leaf(gpa);
            assert_eq!((size, state.write, state.dirty), (PAGE, false, true));
        }
        assert_eq!(cache.len(), 0);
        drop(cache);
        guest.end(0);
    });
}

#[test]
fn two_splits_of_one_block_link_one_table() {
    both_ways("split || split", |bbm| {
        let guest = Guest::new(14, bbm).mapped(0..BLOCK, RAM, BLOCK);
        let (mut here, mut there) = (guest.cache(1), guest.cache(1));
        let other = spawn(move || (guest.split(0..BLOCK, PAGE, &mut there).1, there));
        let rest = guest.split(0..BLOCK, PAGE, &mut here).1;
        let (other, mut there) = other.join().unwrap();
        guest.split_rest(rest, PAGE, &mut here);
        guest.split_rest(other, PAGE, &mut there);
        assert_eq!((guest.leaf(0), guest.leaf(PAGE)), ((PAGE, RAM), (PAGE, RAM)));
        assert_eq!(here.len() + there.len(), 1, "the loser keeps its page");
        drop((here, there));
        guest.end(0);
    });
}

#[test]
fn a_split_loses_no_accessed_or_dirty_state() {
    both_ways("split || hardware write", |bbm| {
        let guest = Guest::new(14, bbm).running().mapped(0..BLOCK, CLEAN, BLOCK);
        let mut cache = guest.cache(1);
        let vcpu = spawn(move || (guest.write(PAGE), guest.write(0)));
        let rest = guest.split(0..BLOCK, PAGE, &mut cache).1;
        let wrote = vcpu.join().unwrap();
        guest.split_rest(rest, PAGE, &mut cache);
        for (gpa, wrote) in [(PAGE, wrote.0), (0, wrote.1)] {
            let (size, state) = guest.leaf(gpa);
            assert_eq!(size, PAGE);
            assert!(!wrote || state.dirty && state.accessed, "a write was forgotten");
        }
        assert!(bbm == ALWAYS || wrote == (true, true), "a fault without a break");
        drop(cache);
        guest.end(0);
    });
}

#[test]
fn a_split_to_execute_loses_no_accessed_or_dirty_state() {
    both_ways("split_to_execute || hardware write", |bbm| {
        let data = Attributes { execute: Execute::None, software: Software::A, ..CLEAN };
        let guest = Guest::new(14, bbm).running().mapped(0..BLOCK, data, BLOCK);
        let mut cache = guest.cache(1);
        let vcpu = spawn(move || guest.write(PAGE));
        let mut inside = guest.inside();
        let page = range(&(0..PAGE));
        let split = inside.guard.split_to_execute(page, &mut cache, Access::Execute, Software::A);
        let split = split.map(|local| local.not_needed_here()).is_ok();
        inside.guard.invalidate();
        drop(inside);
        let wrote = vcpu.join().unwrap();
        let (size, state) = guest.leaf(PAGE);
        assert_eq!(size, if split { PAGE } else { BLOCK });
        assert!(!wrote || state.dirty && state.accessed, "a write was forgotten");
        drop(cache);
        guest.end(0);
    });
}

#[test]
fn a_block_written_while_its_replacement_waits_is_rebuilt() {
    explore("split of two || hardware write, break always", || {
        let guest = Guest::new(14, ALWAYS).running().mapped(0..BIG, CLEAN, BLOCK);
        let mut cache = guest.cache(2);
        let vcpu = spawn(move || (guest.write(BLOCK), guest.write(0)));
        let rest = guest.split(0..BIG, PAGE, &mut cache).1;
        let wrote = vcpu.join().unwrap();
        guest.split_rest(rest, PAGE, &mut cache);
        for (gpa, wrote) in [(BLOCK, wrote.0), (0, wrote.1)] {
            let (size, state) = guest.leaf(gpa);
            assert_eq!(size, PAGE);
            assert!(!wrote || state.dirty && state.accessed, "a write was forgotten");
        }
        drop(cache);
        guest.end(0);
    });
}

#[test]
fn a_split_that_stops_has_split_what_precedes() {
    explore("split of two, dry || split, break always", || {
        // With CPUs to wait for, a block stands broken long enough for the other thread to give up.
        let guest = Guest::new(15, ALWAYS).running().mapped(0..2 * BIG, RAM, BIG);
        // There are enough for the first block, and for the upper table of the second.
        let (mut here, mut there) = (guest.cache(4), guest.cache(1));
        let other = spawn(move || (guest.split(0..BIG, BLOCK, &mut there).1, there));
        let (done, rest) = guest.split(0..2 * BIG, PAGE, &mut here);
        let (_, mut there) = other.join().unwrap();
        for gpa in done.step_by(PAGE as usize) {
            assert_eq!(guest.leaf(gpa).0, PAGE, "{gpa:#x} was said to be split");
        }
        assert!(rest.is_some(), "five tables are wanted");
        guest.split_rest(rest, PAGE, &mut guest.cache(6));
        // Nothing is left to split.
        assert!(guest.split(0..2 * BIG, PAGE, &mut there).1.is_none());
        drop((here, there));
        guest.end(0);
    });
}

#[test]
fn a_map_during_a_split_of_the_same_memory_agrees_with_it() {
    both_ways("split || map", |bbm| {
        let guest = Guest::new(14, bbm).mapped(0..BLOCK, RAM, BLOCK);
        let (mut here, mut there) = (guest.cache(1), guest.cache(1));
        let other = spawn(move || (guest.split(0..BLOCK, PAGE, &mut there).1, there));
        let rest = guest.map(0..PAGE, RAM, PAGE, &mut here);
        let (other, mut there) = other.join().unwrap();
        guest.map_rest(rest, RAM, PAGE, &mut here);
        guest.split_rest(other, PAGE, &mut there);
        assert_eq!((guest.leaf(0), guest.leaf(PAGE)), ((PAGE, RAM), (PAGE, RAM)));
        assert_eq!(here.len(), 1, "nothing was to be built");
        drop((here, there));
        guest.end(0);
    });
}

#[test]
fn translate_during_a_split_sees_the_page_or_has_to_try_again() {
    both_ways("split || translate", |bbm| {
        let guest = Guest::new(15, bbm).mapped(0..BIG, RAM, BIG);
        let mut cache = guest.cache(3);
        let looks = spawn(move || guest.look(PAGE));
        let rest = guest.split(0..BIG, PAGE, &mut cache).1;
        let saw = looks.join().unwrap();
        assert!(rest.is_none());
        match saw {
            Some(hpa) => assert_eq!(hpa.expect("the page vanished").0, MEMORY + PAGE),
            None => assert_eq!(bbm, ALWAYS, "contended without a break"),
        }
        drop(cache);
        guest.end(0);
    });
}

#[test]
fn a_page_unmapped_from_a_split_is_gone_after_its_shootdown() {
    both_ways("split || unmap page || hardware, lazy TLB", |bbm| {
        let guest = Guest::new(14, bbm).running().mapped(0..BLOCK, RAM, BLOCK);
        let mut cache = guest.cache(1);
        // A CPU may hold the block. The split's own shootdown may come late.
        guest.access(0, true, Use::Always);
        let splits = spawn(move || (guest.split(0..BLOCK, PAGE, &mut cache).1, cache));
        let (removed, rest) = guest.unmap(0..PAGE);
        // The model fails an access that reaches freed memory.
        guest.access(0, true, Use::Always);
        let (split, mut cache) = splits.join().unwrap();
        guest.split_rest(split, PAGE, &mut cache);
        match rest {
            None => assert_eq!(bytes(&removed), PAGE),
            Some(rest) => assert!(
                matches!(rest.reason, UnmapError::Contended | UnmapError::CutsBlock { .. })
                    && removed.is_empty()
            ),
        }
        assert_eq!(guest.at(0).is_none(), removed.len() == 1);
        guest.leaf(PAGE);
        drop(cache);
        guest.end(0);
    });
}

#[test]
fn a_page_protected_in_a_split_is_unwritten_after_shootdown() {
    both_ways("split || write_protect page || hardware, lazy TLB", |bbm| {
        let guest = Guest::new(14, bbm).running().mapped(0..BLOCK, RAM, BLOCK);
        let mut cache = guest.cache(1);
        guest.access(0, true, Use::Always);
        let splits = spawn(move || (guest.split(0..BLOCK, PAGE, &mut cache).1, cache));
        let rest = guest.protect(0..PAGE);
        guest.access(0, true, Use::Always);
        let (split, mut cache) = splits.join().unwrap();
        guest.split_rest(split, PAGE, &mut cache);
        assert_eq!(guest.leaf(0).1.write, rest.is_some());
        assert!(guest.leaf(PAGE).1.write);
        drop(cache);
        guest.end(0);
    });
}

#[test]
fn hardware_never_holds_two_sizes_of_a_block_under_its_break() {
    explore("split || hardware, TLB conflict, break always", || {
        let guest = Guest::new(14, ALWAYS).running().mapped(0..BLOCK, RAM, BLOCK);
        let mut cache = guest.cache(1);
        // The model fails an access if the TLB has two sizes.
        let vcpu = spawn(move || {
            guest.access(0, true, Use::Never);
            guest.access(PAGE, true, Use::Never)
        });
        let rest = guest.split(0..BLOCK, PAGE, &mut cache).1;
        vcpu.join().unwrap();
        guest.split_rest(rest, PAGE, &mut cache);
        drop(cache);
        guest.end(0);
    });
}
