//! Look-ups and walks between whose steps another thread works: it comes in where the platform is
//! asked for the entries of a table.

use crate::common::stage::{G, K, M, RAM, range};
use crate::interleavings::{Call, HookedPlatform, with_cache};
use slat::format::arm64::Arm64K4;
use slat::format::power::PowerK64;
use slat::{
    BreakBeforeMake, Contention, Format, Gpa, GpaRange, Guard, Hpa, Owner, PageSize, Pages, Reader,
    Tables, UnmapBatch, UnmapEntry, UnmappedRun, Vmid,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

const PAGE: PageSize = PageSize::SIZE_4K;
const BLOCK: PageSize = PageSize::SIZE_2M;
const OWNER: Option<Owner> = Owner::new(1);
/// More than the tables that one look-up, or one step of a walk, passes.
const CALLS: usize = 16;

type Guest<F> = &'static Tables<'static, F, HookedPlatform>;

fn guest<F: Format>(format: F) -> Guest<F> {
    let platform = HookedPlatform::new(BreakBeforeMake::Never);
    Box::leak(Box::new(Tables::new(format, Vmid(1), 40, platform).unwrap()))
}

fn arm() -> Guest<Arm64K4> {
    guest(Arm64K4::default())
}

fn inside<F: Format, R>(
    guest: Guest<F>,
    run: impl FnOnce(&mut Guard<'_, 'static, F, HookedPlatform>) -> R,
) -> R {
    let mut reader = Reader::register(guest.platform()).unwrap();
    run(&mut guest.enter(&mut reader).unwrap())
}

fn map<F: Format>(guest: Guest<F>, at: GpaRange, memory: u64, leaves: PageSize) {
    let mapped = inside(guest, |guard| {
        with_cache(guest.platform(), 4, |cache| guard.map(at, Hpa(memory), RAM, leaves, cache))
    });
    assert_eq!(mapped, Ok(at.size()));
}

fn map_groups(guest: Guest<Arm64K4>, at: GpaRange, memory: u64) {
    let mapped = inside(guest, |guard| {
        with_cache(guest.platform(), 4, |cache| {
            guard.map_contiguous(at, Hpa(memory), RAM, PAGE, cache)
        })
    });
    assert_eq!(mapped, Ok(at.size()));
}

fn unmap<F: Format>(guest: Guest<F>, at: GpaRange) -> Vec<UnmappedRun> {
    let mut places = [const { UnmapEntry::EMPTY }; 4];
    let mut batch = UnmapBatch::new(guest, &mut places);
    inside(guest, |guard| guard.unmap(at, &mut batch)).unwrap();
    batch.complete().collect()
}

/// Has another thread do `act` at the calls for a table that `when` chooses by their number, while
/// `run` runs. Returns the result, and how many such calls `run` made.
fn meanwhile<R>(
    platform: &HookedPlatform,
    when: impl Fn(usize) -> bool + Send + Sync + 'static,
    act: impl Fn() + Send + Sync + 'static,
    run: impl FnOnce() -> R,
) -> (R, usize) {
    let calls = Arc::new(AtomicUsize::new(0));
    let (counted, acts) = (calls.clone(), AtomicBool::new(false));
    platform.at_each_call(move |call| {
        if call != Call::Entries || acts.load(SeqCst) || !when(counted.fetch_add(1, SeqCst)) {
            return;
        }
        acts.store(true, SeqCst);
        act();
        acts.store(false, SeqCst);
    });
    let result = run();
    platform.at_each_call(|_| ());
    (result, calls.load(SeqCst))
}

#[test]
fn a_lookup_whose_table_goes_restarts_and_finds_the_new_leaf() {
    for number in 0..CALLS {
        let guest = arm();
        map(guest, range(0, 4 * K), 4 * G, PAGE);
        // It keeps the table above.
        map(guest, range(4 * M, 4 * K), 0, PAGE);
        let replace = move || {
            assert_eq!(unmap(guest, range(0, 4 * K)).len(), 1);
            map(guest, range(0, 4 * K), 8 * G, PAGE);
        };
        let look = || inside(guest, |guard| guard.translate(Gpa(0)));
        let (found, calls) = meanwhile(guest.platform(), move |call| call == number, replace, look);
        let hpa = if number < calls { 8 * G } else { 4 * G };
        assert_eq!(found.unwrap().unwrap().hpa, Hpa(hpa), "call {number}");
        assert!(calls < CALLS, "it does not wait");
        let take = move || assert_eq!(unmap(guest, range(0, 4 * K)).len(), 1);
        let look = || inside(guest, |guard| guard.descriptor(Gpa(0)));
        let (found, calls) = meanwhile(guest.platform(), move |call| call == number, take, look);
        let size = if number < calls { BLOCK } else { PAGE };
        assert_eq!(found.map(|(_, size)| size), Some(size), "call {number}");
    }
}

/// Tables of pages have few entries in this format, so that they are soon emptied.
#[test]
fn a_look_up_gives_up_where_its_table_goes_again_and_again() {
    let page = PageSize::from_bytes(64 * K).unwrap();
    let guest = guest(PowerK64 { output_bits: 48 });
    map(guest, range(0, 64 * K), 4 * G, page);
    // It keeps the tables above.
    map(guest, range(2 * M, 64 * K), 0, page);
    let up = usize::from(inside(guest, |guard| guard.geometry().root_level));
    // The call for the table of pages, more often than a look-up tries.
    let when = move |call| call % up == up - 1 && call < 5000 * up;
    let replace = move || {
        assert_eq!(unmap(guest, range(0, 64 * K)).len(), 1);
        map(guest, range(0, 64 * K), 4 * G, page);
    };
    let look = || inside(guest, |guard| guard.translate(Gpa(0)));
    let (found, _) = meanwhile(guest.platform(), when, replace, look);
    assert_eq!(found, Err(Contention { at: Gpa(0) }));
}

#[test]
fn a_walk_whose_table_goes_begins_anew_at_that_table() {
    for number in 0..CALLS {
        let guest = arm();
        map(guest, range(0, 6 * M), 0, PAGE);
        let take = move || drop(unmap(guest, range(4 * M, 2 * M)));
        let protect = || {
            inside(guest, |guard| {
                guard.write_protect(range(0, 6 * M)).unwrap();
                guard.counts().entries_read
            })
        };
        let (read, _) = meanwhile(guest.platform(), move |call| call == number, take, protect);
        assert!((2 * 512..3 * 512 + 32).contains(&read), "call {number}: {read} entries");
    }
}

#[test]
fn a_restarted_unmap_writes_nothing_into_a_removed_table() {
    for number in 0..CALLS {
        let guest = arm();
        map(guest, range(0, 4 * M), 0, PAGE);
        // It keeps the table above.
        map(guest, range(8 * M, 4 * K), 0, PAGE);
        let take = move || drop(unmap(guest, range(0, 2 * M)));
        let mine = || unmap(guest, range(0, 4 * M));
        meanwhile(guest.platform(), move |call| call == number, take, mine);
        map(guest, range(0, 4 * K), 4 * G, PAGE);
        map(guest, range(2 * M, 4 * K), 4 * G, PAGE);
    }
}

/// The unmap begins anew as another thread retires its table. With an owner in the table at first,
/// it retires the new one's entries.
#[test]
fn a_page_mapped_elsewhere_where_an_unmap_took_a_group_stays() {
    for owned in [false, true] {
        let mut stayed = 0;
        for number in 0..CALLS {
            let guest = arm();
            let set = move |from, to| {
                let page = range(0, 4 * K);
                inside(guest, |guard| {
                    with_cache(guest.platform(), 4, |cache| guard.set_owner(page, from, to, cache))
                })
                .unwrap();
            };
            if owned {
                set(None, OWNER);
            }
            map_groups(guest, range(64 * K, 128 * K), G);
            // It keeps the table above.
            map(guest, range(4 * M, 4 * K), 0, PAGE);
            let replace = move || {
                if owned {
                    set(OWNER, None);
                }
                unmap(guest, range(0, 2 * M));
                map(guest, range(64 * K, 4 * K), 2 * G, PAGE);
            };
            let take = || unmap(guest, range(0, if owned { 2 * M } else { M }));
            let (removed, _) =
                meanwhile(guest.platform(), move |call| call == number, replace, take);
            let at: Vec<_> = removed.iter().filter(|run| run.gpa == Gpa(64 * K)).collect();
            assert!(at.len() <= 1, "call {number}: {at:?}");
            let there = inside(guest, |guard| guard.translate(Gpa(64 * K))).unwrap();
            stayed += usize::from(there.is_some() && at.iter().any(|run| run.hpa == Hpa(G)));
        }
        assert!(stayed > 0, "it is mapped after the group was taken out");
    }
}

#[test]
fn a_group_unfolded_during_a_lookup_is_not_taken_for_whole() {
    for number in 0..CALLS {
        let guest = arm();
        map_groups(guest, range(0, 64 * K), G);
        let replace = move || {
            assert_eq!(unmap(guest, range(0, 4 * K)).len(), 1);
            map(guest, range(0, 4 * K), 8 * G, PAGE);
        };
        let look = || inside(guest, |guard| guard.translate(Gpa(20 * K)));
        let (found, _) = meanwhile(guest.platform(), move |call| call == number, replace, look);
        // Or the look-up says that it is being changed.
        if let Ok(found) = found {
            let hpa = found.unwrap().hpa;
            assert_eq!(hpa, Hpa(G + 20 * K), "call {number}: another page got other memory");
        }
    }
}

#[test]
fn a_block_that_appears_is_protected_if_all_of_it_is_named() {
    let mut blocks = 0;
    for number in 0..CALLS {
        let guest = arm();
        let block = range(2 * M, 2 * M);
        map(guest, block, 8 * G, PAGE);
        inside(guest, |guard| guard.write_protect(block)).unwrap();
        let collapse = move || assert!(inside(guest, |guard| guard.collapse(block, BLOCK)).is_ok());
        // The first page of the block is the last of a word, and the others fill words.
        let mut bits = [u64::MAX; 9];
        (bits[0], bits[8]) = (1 << 63, u64::MAX >> 1);
        let named = Pages { start: Gpa(2 * M - 63 * 4 * K), bits: &bits };
        let protect = || inside(guest, |guard| guard.write_protect_pages(&named));
        let (done, calls) =
            meanwhile(guest.platform(), move |call| call == number, collapse, protect);
        assert_eq!(done, Ok(0), "call {number}");
        blocks += usize::from(number < calls);
    }
    assert!(blocks > 2, "a block appeared meanwhile");
}
