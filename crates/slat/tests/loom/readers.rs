//! Readers: unlinked tables are given back when no walker can be in them. (`pairs` has every
//! operation together with one that unmaps and reclaims.)

use crate::guest::*;
use crate::machine::*;
use loom::thread::spawn;
use slat::{Gpa, Reader};

/// Unmaps the only page, and reclaims its table.
fn retire(guest: Guest) -> usize {
    let result = guest.unmap(0..BLOCK);
    let removed = guest.unmap_rest(result);
    assert_eq!(bytes(&removed), PAGE);
    guest.tables().reclaim()
}

#[test]
fn a_walker_that_refreshes_finds_no_freed_table() {
    bounded("refresh || unmap, reclaim twice", 3, || {
        let guest = Guest::new(14, NEVER).mapped(0..PAGE, RAM, PAGE);
        let mut reader = guest.reader();
        let walker = spawn(move || {
            let mut inside = guest.enter(&mut reader);
            inside.look(0);
            inside.guard.refresh();
            inside.look(0);
        });
        let mut freed = retire(guest);
        freed += guest.tables().reclaim();
        walker.join().unwrap();
        guest.end(1 - freed);
    });
}

#[test]
fn what_a_walker_keeps_is_freed_once_it_has_left() {
    bounded("look twice || unmap, reclaim twice", 3, || {
        let guest = Guest::new(14, NEVER).mapped(0..PAGE, RAM, PAGE);
        let mut reader = guest.reader();
        let walker = spawn(move || {
            guest.enter(&mut reader).look(0);
            guest.enter(&mut reader).look(0);
        });
        let mut freed = retire(guest);
        freed += guest.tables().reclaim();
        walker.join().unwrap();
        guest.end(1 - freed);
    });
}

#[test]
fn a_walker_from_another_guest_finds_no_freed_table() {
    bounded("leave another guest, look || unmap, reclaim", 3, || {
        let guest = Guest::new(14, NEVER).mapped(0..PAGE, RAM, PAGE);
        let another = guest.another();
        let mut reader = guest.reader();
        let walker = spawn(move || {
            drop(another.enter(&mut reader));
            guest.enter(&mut reader).look(0);
        });
        let mut freed = retire(guest);
        freed += guest.tables().reclaim();
        walker.join().unwrap();
        another.destroy();
        guest.end(1 - freed);
    });
}

#[test]
fn a_walker_that_stays_keeps_the_table() {
    explore("inside || unmap, reclaim", || {
        let guest = Guest::new(14, NEVER).mapped(0..PAGE, RAM, PAGE);
        let mut reader = guest.reader();
        // The walker has seen the table.
        let mut inside = guest.enter(&mut reader);
        assert!(inside.look(0).flatten().is_some());
        let other = spawn(move || retire(guest));
        inside.look(0);
        assert_eq!(other.join().unwrap(), 0, "a walker was inside from the beginning");
        drop(inside);
        drop(reader);
        guest.end(1);
    });
}

#[test]
fn a_thread_that_takes_over_a_seat_is_seen_like_its_last_owner() {
    bounded("leave || register, look || unmap, reclaim", 3, || {
        let guest = Guest::new(14, NEVER).mapped(0..PAGE, RAM, PAGE);
        let keep = [guest.reader(), guest.reader()];
        let reader = guest.reader();
        let leaves = spawn(move || drop(reader));
        let registers = spawn(move || {
            // All other reader slots are taken, so it has to be that one.
            if let Ok(mut reader) = Reader::register(guest.world) {
                guest.enter(&mut reader).look(0);
            }
        });
        let freed = retire(guest);
        leaves.join().unwrap();
        registers.join().unwrap();
        drop(keep);
        guest.end(1 - freed);
    });
}

#[test]
fn two_threads_that_reclaim_free_each_table_once() {
    bounded("unmap, reclaim || unmap, reclaim, two tables", 2, || {
        let guest = Guest::new(14, NEVER).mapped(0..PAGE, RAM, PAGE);
        let guest = guest.mapped(BLOCK..BLOCK + PAGE, RAM, PAGE);
        let mut readers = [guest.reader(), guest.reader()].into_iter();
        let mut enter = move || readers.next().unwrap();
        let (mut here, mut there) = (enter(), enter());
        let work = move |reader: &mut Reader<'static, World>, start: u64| {
            let mut inside = guest.enter(reader);
            let (removed, rest) = inside.unmap(start..start + BLOCK);
            assert!(rest.is_none() && bytes(&removed) == PAGE);
            drop(inside);
            guest.tables().reclaim()
        };
        let other = spawn(move || work(&mut there, BLOCK));
        let freed = work(&mut here, 0) + other.join().unwrap();
        drop(here);
        guest.end(2 - freed);
    });
}

#[test]
fn a_table_that_is_reused_at_once_is_not_taken_for_the_old_one() {
    bounded("look || unmap, reclaim, map again", 3, || {
        let guest = Guest::new(14, NEVER).mapped(0..PAGE, RAM, PAGE);
        let mut reader = guest.reader();
        let walker = spawn(move || {
            let mut inside = guest.enter(&mut reader);
            for saw in [inside.look(0), inside.look(PAGE)] {
                assert!(saw.flatten().is_none_or(|hpa| hpa.0 & !(PAGE - 1) >= MEMORY));
            }
        });
        let freed = retire(guest);
        let guest = guest.mapped(PAGE..BLOCK, RAM, PAGE);
        walker.join().unwrap();
        assert!(guest.inside().guard.translate(Gpa(0)).unwrap().is_none());
        guest.end(1 - freed);
    });
}

#[test]
fn a_table_unlinked_during_a_reclaim_waits_for_its_threads() {
    bounded("reclaim || unmap || look", 2, || {
        let guest = Guest::new(14, NEVER).mapped(0..PAGE, RAM, PAGE);
        let guest = guest.mapped(BLOCK..BLOCK + PAGE, RAM, PAGE);
        guest.unmap(0..BLOCK);
        let mut reader = guest.reader();
        let walker = spawn(move || guest.enter(&mut reader).look(BLOCK));
        let reclaims = spawn(move || guest.tables().reclaim());
        let (removed, rest) = guest.unmap(BLOCK..BIG);
        walker.join().unwrap();
        let freed = reclaims.join().unwrap();
        assert!(rest.is_none() && bytes(&removed) == PAGE);
        guest.end(2 - freed);
    });
}
