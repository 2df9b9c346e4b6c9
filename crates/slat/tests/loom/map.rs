//! Map against map, and against threads that only look.

use crate::guest::*;
use crate::hardware::Use;
use crate::machine::*;
use loom::thread::spawn;
use slat::MapError;

#[test]
fn two_maps_of_one_page_agree_and_link_one_table() {
    explore("map || map, same page", || {
        let guest = Guest::new(14, NEVER);
        let mut here = guest.cache(1);
        let mut there = guest.cache(1);
        let other = spawn(move || (guest.map(0..PAGE, RAM, PAGE, &mut there), there));
        let rest = guest.map(0..PAGE, RAM, PAGE, &mut here);
        let (other, mut there) = other.join().unwrap();
        guest.map_rest(rest, RAM, PAGE, &mut here);
        guest.map_rest(other, RAM, PAGE, &mut there);
        assert_eq!(guest.leaf(0), (PAGE, RAM));
        assert_eq!(here.len() + there.len(), 1, "the loser keeps its page");
        drop((here, there));
        assert_eq!(guest.pages(), 2, "root and one table");
        guest.end(0);
    });
}

#[test]
fn one_of_two_maps_of_different_memory_wins_and_one_fails() {
    explore("map || map, same page, other memory", || {
        let guest = Guest::new(14, NEVER);
        let mut here = guest.cache(1);
        let mut there = guest.cache(1);
        let other =
            spawn(move || guest.inside().map_to(2 * MEMORY, 0..PAGE, RAM, PAGE, &mut there));
        let rests = [guest.map(0..PAGE, RAM, PAGE, &mut here), other.join().unwrap()];
        let hpa = guest.inside().guard.translate(slat::Gpa(0)).unwrap().expect("one of them").hpa;
        for (rest, memory) in rests.into_iter().zip([MEMORY, 2 * MEMORY]) {
            match rest {
                None => assert_eq!(hpa.0, memory),
                Some(Rest { reason: MapError::Occupied { hpa: found, .. }, .. }) => {
                    assert!(found == hpa && hpa.0 != memory);
                }
                Some(Rest { reason, .. }) => assert_eq!(reason, MapError::Contended),
            }
        }
        drop(here);
        assert_eq!(guest.pages(), 2);
        guest.end(0);
    });
}

#[test]
fn maps_of_neighbours_under_a_missing_table_share_one_table() {
    explore("map || map, siblings", || {
        let guest = Guest::new(14, NEVER);
        let mut here = guest.cache(1);
        let mut there = guest.cache(1);
        let other = spawn(move || (guest.map(PAGE..BLOCK, RAM, PAGE, &mut there), there));
        let rest = guest.map(0..PAGE, RAM, PAGE, &mut here);
        let (other, mut there) = other.join().unwrap();
        guest.map_rest(rest, RAM, PAGE, &mut here);
        guest.map_rest(other, RAM, PAGE, &mut there);
        assert_eq!((guest.leaf(0), guest.leaf(PAGE)), ((PAGE, RAM), (PAGE, RAM)));
        assert_eq!(here.len() + there.len(), 1, "the loser keeps its page");
        drop((here, there));
        guest.end(0);
    });
}

#[test]
fn maps_of_neighbours_under_two_missing_tables_share_both() {
    explore("map || map, siblings, three levels", || {
        let guest = Guest::new(15, NEVER);
        let mut here = guest.cache(2);
        let mut there = guest.cache(2);
        let other = spawn(move || (guest.map(BLOCK..BLOCK + PAGE, RAM, PAGE, &mut there), there));
        let rest = guest.map(0..PAGE, RAM, PAGE, &mut here);
        let (other, mut there) = other.join().unwrap();
        guest.map_rest(rest, RAM, PAGE, &mut here);
        guest.map_rest(other, RAM, PAGE, &mut there);
        assert_eq!((guest.leaf(0), guest.leaf(BLOCK)), ((PAGE, RAM), (PAGE, RAM)));
        assert_eq!(here.len() + there.len(), 1, "one table above, one each below");
        drop((here, there));
        guest.end(0);
    });
}

#[test]
fn a_page_and_its_block_never_translate_one_page_twice() {
    explore("map || map, page and block", || {
        let guest = Guest::new(14, NEVER);
        let (mut here, mut there) = (guest.cache(1), guest.cache(1));
        let other = spawn(move || (guest.map(0..BLOCK, RAM, BLOCK, &mut there), there));
        let rest = guest.map(0..PAGE, RAM, PAGE, &mut here);
        let (other, mut there) = other.join().unwrap();
        guest.map_rest(rest, RAM, PAGE, &mut here);
        guest.map_rest(other, RAM, BLOCK, &mut there);
        assert_eq!(guest.leaf(0).0, guest.leaf(PAGE).0, "a block, or two pages");
        drop((here, there));
        guest.end(0);
    });
}

#[test]
fn a_map_that_appears_is_seen_whole_by_software_and_hardware() {
    explore("map || translate || hardware", || {
        let guest = Guest::new(14, ALWAYS).running();
        let mut cache = guest.cache(1);
        let looks = spawn(move || guest.look(PAGE).expect("nothing was frozen"));
        let touches = spawn(move || guest.access(PAGE, true, Use::Never));
        assert!(guest.map(0..BLOCK, CLEAN, PAGE, &mut cache).is_none());
        let (saw, touched) = (looks.join().unwrap(), touches.join().unwrap());
        for hpa in saw.into_iter().chain(touched) {
            assert_eq!(hpa.0, MEMORY + PAGE);
        }
        let state = guest.leaf(PAGE).1;
        assert_eq!((state.accessed, state.dirty), (touched.is_some(), touched.is_some()));
        drop(cache);
        guest.end(0);
    });
}

#[test]
fn a_map_that_stops_for_a_marker_has_mapped_what_precedes() {
    explore("map || split (break), beside the block", || {
        // With CPUs to wait for, the block stands broken long enough to give up.
        let guest = Guest::new(14, ALWAYS).running().mapped(BLOCK..BIG, RAM, BLOCK);
        let (mut here, mut there) = (guest.cache(1), guest.cache(1));
        let other = spawn(move || (guest.split(BLOCK..BIG, PAGE, &mut there).1, there));
        let rest = guest.map(0..BIG, RAM, BLOCK, &mut here);
        let done = rest.as_ref().map_or(BIG, |rest| rest.range.start);
        for gpa in (0..done).step_by(PAGE as usize) {
            // The block may stand broken, but the entry that was empty is filled.
            assert!(gpa >= BLOCK || guest.at(gpa).is_some(), "{gpa:#x} was said to be mapped");
        }
        let (other, mut there) = other.join().unwrap();
        guest.split_rest(other, PAGE, &mut there);
        guest.map_rest(rest, RAM, BLOCK, &mut here);
        assert_eq!((guest.leaf(0).0, guest.leaf(BLOCK).0), (BLOCK, PAGE));
        drop((here, there));
        guest.end(0);
    });
}
