//! Owed invalidations: gathered, merged, dropped.

use crate::common::hardware::Hardware;
use crate::common::hardware::arm::Arm;
use crate::common::stage::{K, M, RAM, arm, range, relax};
use crate::common::world::{ALL, TablesOf, VMID, cache};
use crate::common::{Event, TestPlatform, destroy, unmap};
use slat::{
    Access, BreakBeforeMake, Gpa, GpaRange, Hpa, Invalidation, PageSize, Tables, UnmapEntry, Vmid,
};

/// A guest with eight blocks, followed by eight pages.
pub fn guest<H: Hardware>(
    platform: &TestPlatform,
    format: H::Format,
    vmid: Vmid,
) -> TablesOf<'_, H> {
    let mut tables = Tables::new(format, vmid, 40, platform).unwrap();
    let mut storage = Vec::new();
    let mut cache = cache::<H>(platform, &mut storage, 4);
    let mut guard = tables.enter_mut();
    let (block, page) = (PageSize::SIZE_2M, PageSize::SIZE_4K);
    assert_eq!(guard.map(range(0, 16 * M), Hpa(0), RAM, block, &mut cache), Ok(16 * M));
    let pages = range(16 * M, 32 * K);
    assert_eq!(guard.map(pages, Hpa(16 * M), RAM, page, &mut cache), Ok(32 * K));
    drop(guard);
    drop(cache);
    platform.take_events();
    tables
}

fn one(vmid: Vmid, start: u64, bytes: u64, leaf: Option<PageSize>) -> Invalidation {
    Invalidation { vmid, range: Some(range(start, bytes)), leaf, tables: false }
}

fn what_a_guard_owes_is_the_hull_of_all_that_it_did<H: Hardware>() {
    for bbm in crate::common::stage::BBM {
        let platform = TestPlatform::new(bbm);
        let tables = guest::<H>(&platform, H::usual(), VMID);
        let mut reader = platform.register();
        let mut guard = tables.enter(&mut reader).unwrap();
        let hint = |size| (bbm == BreakBeforeMake::Always).then_some(size);
        assert_eq!(guard.write_protect(range(2 * M, 2 * M)), Ok(2 * M));
        let small = one(VMID, 2 * M, 2 * M, hint(PageSize::SIZE_2M));
        assert_eq!(guard.pending_invalidation(), Some(small));
        // A call that changes nothing owes nothing more.
        assert_eq!(guard.write_protect(range(0, 4 * M)), Ok(2 * M));
        assert_eq!(guard.write_protect(range(0, 4 * M)), Ok(0));
        assert_eq!(
            guard.pending_invalidation(),
            Some(one(VMID, 0, 4 * M, hint(PageSize::SIZE_2M)))
        );
        // A page in addition to blocks: there is no hint, and the range covers all.
        let page = range(16 * M + 4 * K, 4 * K);
        assert_eq!(guard.execute_protect(page), Ok(4 * K));
        let all = one(VMID, 0, 16 * M + 8 * K, None);
        assert_eq!(guard.pending_invalidation(), Some(all));
        let counts = guard.counts();
        assert_eq!(relax(&mut guard, page, Access::Execute), Ok(4 * K));
        assert_eq!(guard.pending_invalidation(), Some(all), "who gives rights owes nothing");
        guard.invalidate();
        let events = platform.take_events();
        assert_eq!(events.last(), Some(&Event::Invalidate(all)));
        // The page became executable, so it was made coherent before.
        let maintained = |event: &&Event| matches!(event, Event::Maintain { bytes: 0x1000, .. });
        assert_eq!(events.iter().filter(maintained).count(), 1, "{events:?}");
        let others = events.iter().filter(|event| **event != Event::Publish);
        assert_eq!(others.count(), 2, "{events:?}");
        assert_eq!(guard.counts().entries_written, counts.entries_written + 1);
        guard.invalidate();
        drop(guard);
        assert_eq!((tables.reclaim(), platform.take_events()), (0, vec![]));
        destroy(tables);
    }
}
on!(what_a_guard_owes_is_the_hull_of_all_that_it_did; npt);

fn a_dropped_shootdown_is_covered_by_the_next_that_completes<H: Hardware>() {
    let platform = TestPlatform::new(BreakBeforeMake::Always);
    let tables = guest::<H>(&platform, H::usual(), VMID);
    let (mut first, mut second) = (platform.register(), platform.register());
    let mut guard = tables.enter(&mut first).unwrap();
    assert_eq!(guard.write_protect(range(0, 2 * M)), Ok(2 * M));
    drop(tables.shootdown(&mut guard).unwrap());
    drop(guard);
    assert_eq!(platform.take_events(), []);
    // A thread that owes nothing covers it, once.
    let mut guard = tables.enter(&mut second).unwrap();
    guard.invalidate();
    guard.invalidate();
    assert_eq!(platform.take_events(), [Event::Invalidate(ALL)]);
    // A thread that owes something executes one invalidation, not two.
    let mut dropped = tables.enter(&mut first).unwrap();
    assert_eq!(dropped.write_protect(range(2 * M, 2 * M)), Ok(2 * M));
    drop(tables.shootdown(&mut dropped).unwrap());
    drop(dropped);
    assert_eq!(guard.write_protect(range(4 * M, 2 * M)), Ok(2 * M));
    guard.invalidate();
    assert_eq!(platform.take_events(), [Event::Invalidate(ALL)]);
    // A guard that has completed, or changed nothing, leaves nothing behind.
    drop(guard);
    tables.enter(&mut first).unwrap().invalidate();
    assert_eq!(platform.take_events(), []);
    // A harvest covers what was dropped as well, as it says which pages are clean.
    let mut dropped = tables.enter(&mut first).unwrap();
    assert_eq!(dropped.clean(range(6 * M, 2 * M)), Ok(2 * M));
    drop(tables.shootdown(&mut dropped).unwrap());
    drop(dropped);
    let mut guard = tables.enter(&mut second).unwrap();
    assert_eq!(guard.harvest(range(6 * M, 2 * M), &mut [0; 8]), Ok(0));
    assert_eq!(platform.take_events(), [Event::Invalidate(ALL)]);
    drop(guard);
    destroy(tables);
}
on!(a_dropped_shootdown_is_covered_by_the_next_that_completes; npt);

fn dropped_removals_are_covered_by_the_next_that_completes<H: Hardware>() {
    let platform = TestPlatform::new(BreakBeforeMake::Never);
    let tables = guest::<H>(&platform, H::usual(), VMID);
    let mut reader = platform.register();
    let mut guard = tables.enter(&mut reader).unwrap();
    let mut storage = [const { UnmapEntry::EMPTY }; 2];
    let mut batch = guard.unmap_batch(&mut storage);
    assert_eq!(guard.unmap(range(0, 2 * M), &mut batch), Ok(2 * M));
    assert_eq!(guard.pending_invalidation(), None, "what is owed is in the batch");
    guard.invalidate();
    assert_eq!(platform.take_events(), []);
    drop(batch);
    guard.invalidate();
    assert_eq!(platform.take_events(), [Event::Invalidate(ALL)]);
    // Batches also cover what others dropped, before they hand anything out.
    let mut other = platform.register();
    let mut dropped = tables.enter(&mut other).unwrap();
    assert_eq!(dropped.write_protect(range(8 * M, 2 * M)), Ok(2 * M));
    drop(tables.shootdown(&mut dropped).unwrap());
    drop(dropped);
    let removed = unmap(&mut guard, range(2 * M, 2 * M));
    assert_eq!((removed.len(), removed[0].hpa), (1, Hpa(2 * M)));
    assert_eq!(platform.take_events(), [Event::Invalidate(ALL)]);
    // Empty removals leave nothing behind.
    let mut batch = guard.unmap_batch(&mut storage);
    assert_eq!(guard.unmap(range(0, 4 * M), &mut batch), Ok(0));
    drop(batch);
    guard.invalidate();
    assert_eq!(platform.take_events(), []);
    drop(guard);
    destroy(tables);
}
on!(dropped_removals_are_covered_by_the_next_that_completes; npt);

fn an_unmapped_ranges_memory_is_free_though_another_removed_it<H: Hardware>() {
    let platform = TestPlatform::new(BreakBeforeMake::Always);
    let tables = guest::<H>(&platform, H::usual(), VMID);
    let (mut first, mut second) = (platform.register(), platform.register());
    let mut guard = tables.enter(&mut first).unwrap();
    let mut other = tables.enter(&mut second).unwrap();
    let (mut one_storage, mut two) = ([UnmapEntry::EMPTY; 1], [UnmapEntry::EMPTY; 1]);
    let mut taken = guard.unmap_batch(&mut one_storage);
    assert_eq!(guard.unmap(range(0, 2 * M), &mut taken), Ok(2 * M));
    // It has not been invalidated: a thread that finds it unmapped invalidates for that, too.
    let mut none = other.unmap_batch(&mut two);
    assert_eq!(other.unmap(range(0, 2 * M), &mut none), Ok(0));
    assert_eq!(none.complete().count(), 0);
    assert_eq!(platform.take_events(), [Event::Invalidate(ALL)]);
    assert_eq!(taken.complete().count(), 1);
    let own = one(VMID, 0, 2 * M, Some(PageSize::SIZE_2M));
    assert_eq!(platform.take_events(), [Event::Invalidate(own)]);
    // When no other thread is unmapping, there is nothing to invalidate.
    assert_eq!(other.unmap(range(0, 2 * M), &mut none), Ok(0));
    assert_eq!(none.complete().count(), 0);
    assert_eq!(platform.take_events(), []);
    drop((taken, none));
    drop((guard, other));
    destroy(tables);
}
on!(an_unmapped_ranges_memory_is_free_though_another_removed_it);

fn removals_of_several_calls_share_a_place_if_contiguous<H: Hardware>() {
    let platform = TestPlatform::new(BreakBeforeMake::Never);
    let tables = guest::<H>(&platform, H::usual(), VMID);
    let mut reader = platform.register();
    let mut guard = tables.enter(&mut reader).unwrap();
    let mut storage = [UnmapEntry::EMPTY; 1];
    let mut batch = guard.unmap_batch(&mut storage);
    for at in [0, 2 * M, 4 * M] {
        assert_eq!(guard.unmap(range(at, 2 * M), &mut batch), Ok(2 * M));
    }
    let stopped = guard.unmap(range(8 * M, 2 * M), &mut batch).unwrap_err();
    assert_eq!(stopped.at, Gpa(8 * M));
    let removed: Vec<_> = batch.complete().collect();
    assert_eq!((removed.len(), removed[0].bytes), (1, 6 * M));
    assert_eq!(platform.take_events(), [Event::Invalidate(one(VMID, 0, 6 * M, None))]);
    drop((batch, guard));
    destroy(tables);
}
on!(removals_of_several_calls_share_a_place_if_contiguous);

/// Where a CPU must not hold two translations, an emptied entry is filled again only after an
/// invalidation, as long as the unmap's own has not completed.
fn an_emptied_entry_is_invalidated_before_it_is_filled_again<H: Hardware>(
    cases: &[(BreakBeforeMake, bool)],
) {
    for &(bbm, breaks) in cases {
        let platform = TestPlatform::new(bbm);
        let tables = guest::<H>(&platform, H::usual(), VMID);
        let mut storage = Vec::new();
        let mut cache = cache::<H>(&platform, &mut storage, 4);
        let mut reader = platform.register();
        let mut guard = tables.enter(&mut reader).unwrap();
        let block = PageSize::SIZE_2M;
        let executed = || platform.take_invalidations();
        // Walks find what replaced a block or a table only after walk caches were invalidated, too.
        let refill = |at| Invalidation { tables: true, ..one(VMID, at, 2 * M, None) };
        let leaf = (bbm == BreakBeforeMake::Always).then_some(PageSize::SIZE_2M);
        let removal = one(VMID, 0, 4 * M, leaf);
        let mut places = [const { UnmapEntry::EMPTY }; 4];
        let mut batch = guard.unmap_batch(&mut places);
        assert_eq!(guard.unmap(range(0, 4 * M), &mut batch), Ok(4 * M));
        assert_eq!(guard.map(range(0, 2 * M), Hpa(64 * M), RAM, block, &mut cache), Ok(2 * M));
        let first = if breaks { vec![refill(0)] } else { vec![] };
        assert_eq!(executed(), first);
        // A fault invalidates when it reserves, or when it fills.
        let reservation = guard.reserve(Gpa(2 * M), block, &mut cache).unwrap();
        assert_eq!(reservation.commit(Hpa(66 * M), RAM), Ok(Some(2 * M)));
        let second = if breaks { vec![refill(2 * M)] } else { vec![] };
        assert_eq!(executed(), second);
        assert_eq!(guard.counts().invalidations, if breaks { 2 } else { 0 });
        // An entry that was never filled was not emptied.
        assert_eq!(guard.map(range(32 * M, 2 * M), Hpa(0), RAM, block, &mut cache), Ok(2 * M));
        let reservation = guard.reserve(Gpa(34 * M), block, &mut cache).unwrap();
        assert_eq!(reservation.commit(Hpa(66 * M), RAM), Ok(Some(2 * M)));
        assert_eq!(executed(), []);
        assert_eq!(batch.complete().count(), 1);
        assert_eq!(executed(), [removal]);
        // Once the unmap has completed, nothing more is invalidated.
        drop(batch);
        assert_eq!(unmap(&mut guard, range(0, 4 * M)).len(), 1);
        executed();
        assert_eq!(guard.map(range(0, 4 * M), Hpa(0), RAM, block, &mut cache), Ok(4 * M));
        assert_eq!(executed(), []);
        // A page, as a fault maps it: its table exists.
        let page = range(16 * M + 8 * K, 4 * K);
        let mut batch = guard.unmap_batch(&mut places);
        assert_eq!(guard.unmap(page, &mut batch), Ok(4 * K));
        let small = PageSize::SIZE_4K;
        assert_eq!(guard.map(page, Hpa(64 * M), RAM, small, &mut cache), Ok(4 * K));
        let third = Invalidation { range: Some(page), ..refill(0) };
        assert_eq!(executed(), if breaks { vec![third] } else { vec![] });
        drop(batch);
        // Pages of a part of a table; then of a table in which the unmap could not go on.
        let mut fills = |pages: GpaRange, in_part: GpaRange, room: usize| {
            let mut batch = guard.unmap_batch(&mut places[..room]);
            let done = guard.unmap(pages, &mut batch);
            assert_eq!(done.is_ok(), pages == in_part);
            let mapped = guard.map(in_part, Hpa(64 * M), RAM, small, &mut cache);
            assert_eq!(mapped, Ok(in_part.size()));
            assert_eq!(!executed().is_empty(), breaks);
        };
        let part = range(16 * M, 16 * K);
        fills(part, part, 4);
        fills(range(16 * M, 2 * M), part, 1);
        // A table where a block was, for a fault.
        let mut batch = guard.unmap_batch(&mut places);
        assert_eq!(guard.unmap(range(6 * M, 2 * M), &mut batch), Ok(2 * M));
        let reservation = guard.reserve(Gpa(6 * M), small, &mut cache).unwrap();
        assert_eq!(reservation.commit(Hpa(70 * M), RAM), Ok(Some(4 * K)));
        assert_eq!(executed(), if breaks { vec![refill(6 * M)] } else { vec![] });
        drop(batch);
        // A block where a table was unlinked.
        let mut batch = guard.unmap_batch(&mut places);
        assert_eq!(guard.unmap(range(16 * M, 2 * M), &mut batch), Ok(32 * K));
        assert_eq!(guard.map(range(16 * M, 2 * M), Hpa(0), RAM, block, &mut cache), Ok(2 * M));
        assert_eq!(executed(), if breaks { vec![refill(16 * M)] } else { vec![] });
        drop(batch);
        drop((guard, cache));
        destroy(tables);
    }
}
on!(
    an_emptied_entry_is_invalidated_before_it_is_filled_again:
    arm_4k(&[(BreakBeforeMake::Never, true)]), ept(&TWO_SIZES);
    npt(&TWO_SIZES), radix_4k(&[(BreakBeforeMake::Never, true)])
);
/// On x86, only a CPU that must not hold two sizes.
const TWO_SIZES: [(BreakBeforeMake, bool); 2] =
    [(BreakBeforeMake::Never, false), (BreakBeforeMake::Always, true)];

/// Deactivation invalidates everything, including invalidations that were dropped or forgotten: all
/// that is owed afterwards is new.
fn obligations_dropped_before_deactivation_are_owed_no_more<H: Hardware>() {
    let platform = TestPlatform::new(BreakBeforeMake::Always);
    let tables = guest::<H>(&platform, H::usual(), VMID);
    let mut storage = [const { UnmapEntry::EMPTY }; 2];
    {
        let mut reader = platform.register();
        let mut guard = tables.enter(&mut reader).unwrap();
        assert_eq!(guard.write_protect(range(8 * M, 2 * M)), Ok(2 * M));
        drop(tables.shootdown(&mut guard).unwrap());
        let mut batch = guard.unmap_batch(&mut storage);
        assert_eq!(guard.unmap(range(0, 2 * M), &mut batch), Ok(2 * M));
        drop(batch);
        let mut more = [const { UnmapEntry::EMPTY }; 2];
        let mut forgotten = guard.unmap_batch(&mut more);
        assert_eq!(guard.unmap(range(2 * M, 2 * M), &mut forgotten), Ok(2 * M));
        std::mem::forget(forgotten);
    }
    // SAFETY: no test of this file gives the root to a machine.
    let mut unloaded = unsafe { tables.deactivate() };
    assert_eq!(platform.take_events(), [Event::Invalidate(ALL)]);
    // Operations on unloaded tables owe nothing.
    let mut guard = unloaded.enter_mut();
    assert_eq!(guard.write_protect(range(10 * M, 2 * M)), Ok(2 * M));
    assert_eq!(guard.pending_invalidation(), None);
    guard.invalidate();
    assert_eq!(guard.write_protect(range(12 * M, 2 * M)), Ok(2 * M));
    drop(guard);
    assert_eq!(platform.take_events(), []);
    let tables = unloaded.activate();
    assert_eq!(platform.take_events(), [Event::Publish]);
    let mut reader = platform.register();
    let mut guard = tables.enter(&mut reader).unwrap();
    guard.invalidate();
    assert_eq!(platform.take_events(), [], "it was covered");
    // Entries that were emptied before are filled without an invalidation.
    let mut frames = Vec::new();
    let mut frames = cache::<H>(&platform, &mut frames, 4);
    let block = PageSize::SIZE_2M;
    assert_eq!(guard.map(range(0, 4 * M), Hpa(0), RAM, block, &mut frames), Ok(4 * M));
    let executed = |events: Vec<Event>| {
        let quiet = |event: &Event| !matches!(event, Event::Invalidate(_));
        events.into_iter().filter(|event| !quiet(event)).collect::<Vec<_>>()
    };
    assert_eq!(executed(platform.take_events()), []);
    // The count of removals under way starts again: only the invalidation of these is executed,
    // or that of what was dropped.
    for dropped in [false, true] {
        let mut batch = guard.unmap_batch(&mut storage);
        assert_eq!(guard.unmap(range(0, 2 * M), &mut batch), Ok(2 * M));
        let expected = if dropped {
            drop(batch);
            guard.invalidate();
            ALL
        } else {
            assert_eq!(batch.complete().count(), 1);
            one(VMID, 0, 2 * M, Some(block))
        };
        assert_eq!(executed(platform.take_events()), [Event::Invalidate(expected)]);
        assert_eq!(guard.map(range(0, 2 * M), Hpa(0), RAM, block, &mut frames), Ok(2 * M));
        assert_eq!(executed(platform.take_events()), [], "no removal is under way");
    }
    drop((guard, frames));
    destroy(tables);
}
on!(obligations_dropped_before_deactivation_are_owed_no_more);

#[test]
fn shootdowns_of_one_guest_merge_and_other_guests_complete() {
    let platform = TestPlatform::new(BreakBeforeMake::Always);
    let tables = guest::<Arm<12>>(&platform, arm(), VMID);
    let other = guest::<Arm<12>>(&platform, arm(), Vmid(9));
    let mut readers = [(); 3].map(|()| platform.register());
    let [one_of, two_of, three_of] = &mut readers;
    let mut first = tables.enter(one_of).unwrap();
    let mut second = tables.enter(two_of).unwrap();
    let mut third = other.enter(three_of).unwrap();
    for (guard, at) in [(&mut first, 0), (&mut second, 12 * M), (&mut third, 4 * M)] {
        assert_eq!(guard.write_protect(range(at, 2 * M)), Ok(2 * M));
    }
    let mut merged = tables.shootdown(&mut first).unwrap();
    assert_eq!(first.pending_invalidation(), None);
    merged.merge(tables.shootdown(&mut second).unwrap());
    let hull = one(VMID, 0, 14 * M, Some(PageSize::SIZE_2M));
    assert_eq!(merged.pending_invalidation(), Some(hull));
    assert_eq!(platform.take_events(), []);
    merged.merge(other.shootdown(&mut third).unwrap());
    let foreign = one(Vmid(9), 4 * M, 2 * M, Some(PageSize::SIZE_2M));
    assert_eq!(platform.take_events(), [Event::Invalidate(foreign)]);
    merged.complete();
    assert_eq!(platform.take_events(), [Event::Invalidate(hull)]);
    // A shootdown that is dropped joins what the guest owes.
    assert_eq!(first.write_protect(range(4 * M, 2 * M)), Ok(2 * M));
    drop(tables.shootdown(&mut first).unwrap());
    second.invalidate();
    assert_eq!(platform.take_events(), [Event::Invalidate(ALL)]);
    drop((first, second, third));
    destroy(tables);
    destroy(other);
    assert_eq!(platform.live(), 0);
}
