//! Unmap and the retirement of tables, against all other operations.

use crate::guest::*;
use crate::hardware::Use;
use crate::machine::*;
use loom::thread::spawn;
use slat::UnmappedRun;

/// Returns whether `gpa` is mapped now; it must be so in exactly one of the accounts.
fn one_account(guest: Guest, gpa: u64, removed: &[UnmappedRun]) -> bool {
    let stands = guest.at(gpa).is_some();
    let gone = removed.iter().any(|leaf| leaf.gpa.0 == gpa);
    assert!(stands != gone, "{gpa:#x}: stands {stands}, removed {gone}");
    stands
}

fn retired(guest: Guest, before: usize) -> usize {
    // A live table is linked from the root; all others of the tree are retired.
    before - guest.linked()
}

#[test]
fn a_page_mapped_beside_an_unmap_stands_or_is_handed_out() {
    explore("map || unmap, sibling page, retire", || {
        let guest = Guest::new(14, NEVER).mapped(0..PAGE, RAM, PAGE);
        let mut cache = guest.cache(1);
        let unmap = spawn(move || guest.unmap(0..BLOCK));
        let rest = guest.map(PAGE..BLOCK, RAM, PAGE, &mut cache);
        let removed = guest.unmap_rest_unless(unmap.join().unwrap(), PAGE..BLOCK);
        guest.map_rest(rest, RAM, PAGE, &mut cache);
        assert!(removed.iter().any(|leaf| leaf.gpa.0 == 0), "the first page was unmapped");
        assert!(guest.at(0).is_none());
        one_account(guest, PAGE, &removed);
        bytes(&removed);
        let tables = 2 - cache.len();
        drop(cache);
        guest.end(retired(guest, tables));
    });
}

#[test]
fn a_page_mapped_into_a_table_being_retired_is_not_lost() {
    bounded("map || unmap, empty table, retire", 5, || {
        let guest = Guest::new(14, NEVER).with_empty_table(0);
        let mut cache = guest.cache(1);
        let unmap = spawn(move || guest.unmap(0..BLOCK));
        let rest = guest.map(0..PAGE, RAM, PAGE, &mut cache);
        let removed = guest.unmap_rest_unless(unmap.join().unwrap(), 0..PAGE);
        guest.map_rest(rest, RAM, PAGE, &mut cache);
        one_account(guest, 0, &removed);
        let tables = 2 - cache.len();
        drop(cache);
        guest.end(retired(guest, tables));
    });
}

#[test]
fn a_page_mapped_while_two_levels_retire_is_not_lost() {
    bounded("map || unmap, three levels, retire", 4, || {
        let guest = Guest::new(15, NEVER).mapped(0..PAGE, RAM, PAGE);
        let mut cache = guest.cache(2);
        let unmap = spawn(move || guest.unmap(0..BIG));
        let rest = guest.map(PAGE..BLOCK, RAM, PAGE, &mut cache);
        let removed = guest.unmap_rest_unless(unmap.join().unwrap(), PAGE..BLOCK);
        guest.map_rest(rest, RAM, PAGE, &mut cache);
        assert!(guest.at(0).is_none());
        one_account(guest, PAGE, &removed);
        let tables = 4 - cache.len();
        drop(cache);
        guest.end(retired(guest, tables));
    });
}

#[test]
fn two_unmaps_hand_out_each_leaf_once_and_retire_one_table() {
    let both = |mapped: u64| {
        let guest = Guest::new(14, NEVER).mapped(0..mapped, RAM, PAGE);
        let other = spawn(move || guest.unmap(0..BLOCK));
        let here = guest.unmap(0..BLOCK);
        let other = other.join().unwrap();
        let mut removed = guest.unmap_rest(here);
        removed.extend(guest.unmap_rest(other));
        assert_eq!(bytes(&removed), mapped);
        assert_eq!((guest.at(0), guest.at(PAGE)), (None, None));
        guest.end(1);
    };
    // Threads that wait for each other's markers make very many orders: all of them would take
    // minutes.
    bounded("unmap || unmap, one page", 3, move || both(PAGE));
    bounded("unmap || unmap, two pages", 2, move || both(BLOCK));
}

#[test]
fn two_unmaps_of_neighbouring_tables_retire_both() {
    bounded("unmap || unmap, two tables on one list", 4, || {
        let guest = Guest::new(14, NEVER).mapped(0..PAGE, RAM, PAGE);
        let guest = guest.mapped(BLOCK..BLOCK + PAGE, RAM, PAGE);
        let other = spawn(move || guest.unmap(BLOCK..BIG));
        let (removed, rest) = guest.unmap(0..BLOCK);
        let (others, rests) = other.join().unwrap();
        assert!(rest.is_none() && rests.is_none());
        assert_eq!((bytes(&removed), bytes(&others)), (PAGE, PAGE));
        guest.end(2);
    });
}

#[test]
fn a_retired_table_is_taken_once_whoever_unlinked_it() {
    bounded("unmap, take retired || unmap, take retired", 3, || {
        let guest = Guest::new(14, NEVER).mapped(0..PAGE, RAM, PAGE);
        let guest = guest.mapped(BLOCK..BLOCK + PAGE, RAM, PAGE);
        let other = spawn(move || {
            let (_, rest) = guest.unmap(BLOCK..BIG);
            assert!(rest.is_none());
            guest.tables().take_retired()
        });
        let (_, rest) = guest.unmap(0..BLOCK);
        assert!(rest.is_none());
        let here = guest.tables().take_retired();
        let there = other.join().unwrap();
        let left = guest.tables().take_retired();
        // SAFETY: they are of this platform, and all threads were joined.
        let freed = [here, there, left].map(|taken| unsafe { taken.free(guest.world) });
        assert_eq!(freed.iter().sum::<usize>(), 2, "{freed:?}");
        guest.end(0);
    });
}

#[test]
fn two_unmaps_of_one_page_each_hand_it_out_between_them_once() {
    // As above.
    bounded("unmap || unmap, page and block", 2, || {
        let guest = Guest::new(15, NEVER).mapped(0..PAGE, RAM, PAGE);
        let other = spawn(move || guest.unmap(0..BIG));
        let here = guest.unmap(0..BLOCK);
        let other = other.join().unwrap();
        let mut removed = guest.unmap_rest(here);
        removed.extend(guest.unmap_rest(other));
        assert_eq!(bytes(&removed), PAGE);
        let (_, rest) = guest.unmap(0..BIG);
        assert!(rest.is_none());
        guest.end(2);
    });
}

#[test]
fn a_hardware_write_is_in_the_attributes_unmap_hands_out() {
    explore("unmap || hardware write", || {
        let guest = Guest::new(14, ALWAYS).running().mapped(0..PAGE, CLEAN, PAGE);
        let vcpu = spawn(move || guest.write(0));
        let result = guest.unmap(0..BLOCK);
        let removed = guest.unmap_rest(result);
        let wrote = vcpu.join().unwrap();
        let state = removed[0].attributes;
        assert_eq!((state.accessed, state.dirty), (wrote, wrote));
        guest.end(1);
    });
}

/// The second page continues the first one's run, as long as nobody has marked it.
#[test]
fn a_write_to_a_page_that_continues_a_run_is_handed_out() {
    explore("unmap of two pages || hardware write to the second", || {
        let guest = Guest::new(14, ALWAYS).running().mapped(0..BLOCK, CLEAN, PAGE);
        let vcpu = spawn(move || guest.write(PAGE));
        let result = guest.unmap(0..BLOCK);
        let removed = guest.unmap_rest(result);
        let wrote = vcpu.join().unwrap();
        assert_eq!(removed.iter().any(|run| run.attributes.dirty), wrote);
        guest.end(1);
    });
}

/// The log copies the page after its clean; the pager drops a page that was handed out as not
/// dirty.
#[test]
fn a_write_during_a_clean_is_copied_or_handed_out_as_dirty() {
    bounded("unmap || clean || hardware, through the TLB", 3, || {
        let guest = Guest::new(14, ALWAYS).running().mapped(0..PAGE, RAM, PAGE);
        // The TLB holds the page as writable and dirty: later writes mark nothing.
        guest.access(0, true, Use::Always);
        let log = spawn(move || guest.clean(0..PAGE));
        let vcpu = spawn(move || guest.access(0, true, Use::Always).is_some());
        let result = guest.unmap(0..BLOCK);
        let removed = guest.unmap_rest(result);
        let (copied, _) = (log.join().unwrap(), vcpu.join().unwrap());
        let last = guest.world.ledger.last_write(0);
        assert!(removed[0].attributes.dirty || last < copied, "a write is lost");
        guest.end(1);
    });
}

#[test]
fn no_cpu_reaches_an_unmapped_page_or_table_after_shootdown() {
    explore("unmap || hardware, lazy TLB and walk cache", || {
        let guest = Guest::new(14, ALWAYS).running().mapped(0..BLOCK, CLEAN, PAGE);
        guest.access(0, true, Use::Always);
        // The walk cache leads to the second page. The model fails an access that reaches freed
        // memory.
        let vcpu = spawn(move || {
            let first = guest.access(0, true, Use::Always);
            (first.is_some(), guest.access(PAGE, true, Use::Always).is_some())
        });
        let result = guest.unmap(0..BLOCK);
        let removed = guest.unmap_rest(result);
        let (_, second) = vcpu.join().unwrap();
        assert!(removed[0].attributes.dirty);
        assert_eq!(removed[1].attributes.dirty, second);
        // A stale walk-cache entry would lead to the frozen entries, and fault.
        guest.world.ledger.regain(0..u64::MAX);
        let guest = guest.mapped(0..PAGE, RAM, PAGE);
        assert!(guest.access(0, true, Use::Always).is_some());
        guest.end(1);
    });
}

#[test]
fn reclaim_invalidates_what_an_unmap_still_owes() {
    explore("unmap without shootdown, reclaim || hardware", || {
        let guest = Guest::new(14, ALWAYS).running().mapped(0..PAGE, CLEAN, PAGE);
        let vcpu = spawn(move || guest.access(0, false, Use::Always));
        let mut storage = [const { slat::UnmapEntry::EMPTY }; 2];
        let mut batch = slat::UnmapBatch::new(guest.tables(), &mut storage);
        let result = guest.inside().guard.unmap(range(&(0..BLOCK)), &mut batch);
        drop(batch);
        vcpu.join().unwrap();
        let retired = usize::from(result.is_ok() || guest.linked() == 0);
        guest.end(retired);
    });
}

#[test]
fn translate_during_unmap_returns_the_old_address_or_nothing() {
    explore("translate || unmap, retire", || {
        let guest = Guest::new(14, NEVER).mapped(0..PAGE, RAM, PAGE);
        let looks = spawn(move || (guest.look(0), guest.look(0)));
        let result = guest.unmap(0..BLOCK);
        let removed = guest.unmap_rest(result);
        let (first, second) = looks.join().unwrap();
        assert_eq!(bytes(&removed), PAGE);
        for hpa in [first, second].into_iter().flatten().flatten() {
            assert_eq!(hpa.0, MEMORY);
        }
        assert!(first != Some(None) || second.flatten().is_none(), "it came back");
        guest.end(1);
    });
}

#[test]
fn a_translate_beside_a_retirement_returns_the_old_or_nothing() {
    bounded("translate || unmap, three levels, retire", 4, || {
        let guest = Guest::new(15, NEVER).mapped(0..PAGE, RAM, PAGE);
        let looks = spawn(move || guest.look(0));
        let result = guest.unmap(0..BIG);
        let removed = guest.unmap_rest(result);
        let saw = looks.join().unwrap();
        assert_eq!(bytes(&removed), PAGE);
        assert!(saw.flatten().is_none_or(|hpa| hpa.0 == MEMORY));
        guest.end(2);
    });
}

#[test]
fn no_cpu_holds_two_memories_of_a_page_mapped_again() {
    let model = |complete: bool| {
        let guest = Guest::new(14, NEVER).running().mapped(0..PAGE, RAM, PAGE);
        guest.access(0, true, Use::Always);
        let mut cache = guest.cache(1);
        let unmaps = spawn(move || {
            let mut storage = [const { slat::UnmapEntry::EMPTY }; 2];
            let mut batch = slat::UnmapBatch::new(guest.tables(), &mut storage);
            let result = guest.inside().guard.unmap(range(&(0..PAGE)), &mut batch);
            if complete {
                batch.complete().for_each(drop);
            }
            result.is_ok()
        });
        let rest = guest.inside().map_to(2 * MEMORY, 0..PAGE, RAM, PAGE, &mut cache);
        // A CPU that walks, with entries in its TLB: `access` fails if the TLB has two addresses of
        // it.
        guest.access(0, true, Use::Never);
        let unmapped = unmaps.join().unwrap();
        assert!(rest.is_some() || unmapped);
        let tables = 2 - cache.len();
        drop(cache);
        guest.end(retired(guest, tables));
    };
    explore("unmap || map to other memory, lazy TLB", move || model(true));
    explore("unmap, dropped || map to other memory, lazy TLB", move || model(false));
}

#[test]
fn a_dropped_obligation_is_covered_when_the_next_returns() {
    explore("unmap, dropped || complete || complete, lazy TLB", || {
        let guest = Guest::new(14, ALWAYS).running().mapped(0..PAGE, RAM, PAGE);
        guest.access(0, true, Use::Always);
        let mut storage = [const { slat::UnmapEntry::EMPTY }; 2];
        let mut batch = slat::UnmapBatch::new(guest.tables(), &mut storage);
        assert!(guest.inside().guard.unmap(range(&(0..PAGE)), &mut batch).is_ok());
        drop(batch);
        let complete = move || {
            guest.inside().guard.invalidate();
            // It was dropped before: either of the two may rely on it.
            assert!(guest.access(0, false, Use::Always).is_none());
        };
        let other = spawn(complete);
        complete();
        other.join().unwrap();
        guest.end(1);
    });
}
