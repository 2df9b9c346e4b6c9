//! Operations that end early and go on: a limit on the entries that they read.

use crate::common::TestPlatform;
use crate::common::hardware::Hardware;
use crate::common::hardware::arm::Arm;
use crate::common::hardware::ept::Ept;
use crate::common::stage::{CLEAN, K, M, RAM, on_stage, range, refused, says};
use crate::common::world::{CacheOf, GuardOf};
use slat::format::arm64::Arm64K4;
use slat::{
    Attributes, BreakBeforeMake, ChangeError, Gpa, GpaRange, Hpa, MapError, Owner, OwnerError,
    PageSize, Pages, ReplaceError, Rights, SplitError, Stopped, TableCache, Tables, UnmapError,
    Vmid,
};
use std::fmt::Debug;

const PAGE: PageSize = PageSize::SIZE_4K;
const BLOCK: PageSize = PageSize::SIZE_2M;
/// Ten tables of pages, linked by two tables.
const BYTES: u64 = 20 * M;
const START: u64 = (1 << 30) - BYTES / 2;

/// Calls `op` until it ends, with a limit each time; returns how often it was paused.
fn until_done<H: Hardware, R, E: Debug + PartialEq>(
    guard: &mut GuardOf<'_, '_, H>,
    paused: &E,
    mut op: impl FnMut(&mut GuardOf<'_, '_, H>, GpaRange) -> Result<R, Stopped<E>>,
) -> usize {
    let (mut left, end, mut pauses) = (range(START, BYTES), START + BYTES, 0);
    loop {
        guard.limit(700);
        let before = guard.counts().entries_read;
        let result = op(guard, left);
        let read = guard.counts().entries_read - before;
        // It reads at most one table more, and those on the way to it.
        assert!(read < 700 + 512 + 64, "{read} entries");
        let Err(Stopped { at, reason }) = result else { return pauses };
        assert_eq!(&reason, paused);
        assert!(left.start() < at && at.0 < end, "no progress at {at}");
        left = range(at.0, end - at.0);
        pauses += 1;
    }
}

fn a_limited_operation_stops_at_an_address_and_goes_on_from_there_to_the_same_end<H: Hardware>() {
    on_stage::<H>((H::usual(), 40, 64), |tables, guard, cache: &mut CacheOf<'_, H>| {
        let all = range(START, BYTES);
        let mapped = |guard: &GuardOf<'_, '_, H>| -> Vec<_> {
            guard.leaves(all).unwrap().map(|leaf| leaf.unwrap()).collect()
        };
        let read = Attributes { write: false, ..CLEAN };
        let host = |of: GpaRange| Hpa(of.start().0);

        let map = |guard: &mut GuardOf<'_, '_, H>, of, cache: &mut CacheOf<'_, H>| {
            guard.map(of, host(of), RAM, BLOCK, cache)
        };
        // Blocks take few entries, but tables that are built count as well.
        assert!(until_done::<H, _, _>(guard, &MapError::Paused, |g, of| map(g, of, cache)) < 3);
        assert_eq!(mapped(guard).len(), 10);
        guard.limit(u64::MAX);
        // The same again, of pages that are mapped: all of them are read.
        guard.split(all, PAGE, cache).unwrap();
        let pauses = until_done::<H, _, _>(guard, &MapError::Paused, |g, of| {
            g.map(of, host(of), RAM, PAGE, cache)
        });
        assert!(pauses > 2, "{pauses}");

        let change = &ChangeError::Paused;
        let pauses = until_done::<H, _, _>(guard, change, |g, of| g.write_protect(of));
        assert!(pauses > 2, "{pauses}");
        assert!(mapped(guard).iter().all(|leaf| !leaf.attributes.write));
        until_done::<H, _, _>(guard, change, |g, of| g.protect(of, Rights::ALL));
        assert!(mapped(guard).iter().all(|leaf| leaf.attributes.write));
        until_done::<H, _, _>(guard, change, |g, of| g.execute_protect(of));
        until_done::<H, _, _>(guard, change, |g, of| g.clean(of));
        let mut bitmap = [0; (BYTES >> 18) as usize];
        until_done::<H, _, _>(guard, change, |g, of| g.harvest(of, &mut bitmap));
        until_done::<H, _, _>(guard, change, |g, of| g.write_protect_subtrees(of));
        until_done::<H, _, _>(guard, change, |g, of| g.protect(of, Rights::READ));
        let mut flushed = 0;
        let pauses = until_done::<H, _, _>(guard, change, |g, of| {
            let result = g.clean_caches(of);
            let end = result.as_ref().map_or_else(|stopped| stopped.at, |_| of.end());
            flushed += end.0 - of.start().0;
            result
        });
        assert!(pauses > 2 && flushed == BYTES, "{pauses} {flushed:#x}");
        let there = |far: u64| move |of: GpaRange| Hpa(of.start().0 + far);
        let pauses = until_done::<H, _, _>(guard, &ReplaceError::Paused, |g, of| {
            g.replace(of, host(of), there(1 << 31)(of), read)
        });
        assert!(pauses > 2, "{pauses}");
        assert!(mapped(guard).iter().all(|leaf| leaf.hpa.0 == leaf.gpa.0 + (1 << 31)));

        until_done::<H, _, _>(guard, &SplitError::Paused, |g, of| g.collapse(of, BLOCK));
        assert_eq!(mapped(guard).len(), 10, "all of them are blocks");
        until_done::<H, _, _>(guard, &SplitError::Paused, |g, of| g.split(of, PAGE, cache));
        assert_eq!(mapped(guard).len() as u64, BYTES / (4 * K));

        let mut gone = 0;
        let pauses = until_done::<H, _, _>(guard, &UnmapError::Paused, |g, of| {
            let mut storage = [const { slat::UnmapEntry::EMPTY }; 4];
            let mut batch = g.unmap_batch(&mut storage);
            let result = g.unmap(of, &mut batch);
            gone += batch.complete().map(|run| run.bytes).sum::<u64>();
            result
        });
        assert!(pauses > 2 && gone == BYTES, "{pauses} {gone:#x}");
        assert!(mapped(guard).is_empty());

        let owner = Owner::new(7);
        // Pages are mapped one by one, so that tables hold them.
        guard.limit(u64::MAX);
        for gpa in (START..START + BYTES).step_by(4 << 10) {
            guard.set_owner(range(gpa, 4 * K), None, owner, cache).unwrap();
        }
        let pauses = until_done::<H, _, _>(guard, &OwnerError::Paused, |g, of| {
            g.set_owner(of, owner, None, cache)
        });
        assert!(pauses > 2, "{pauses}");
        assert_eq!(guard.owner(Gpa(START)), Ok(None));
        let mut pruned = 0;
        until_done::<H, _, _>(guard, change, |g, of| {
            g.prune(of).inspect(|tables| pruned += tables)
        });
        guard.invalidate();
        tables.reclaim();
        guard.refresh();
        tables.reclaim();
        assert_eq!(guard.prune(all), Ok(0));
    });
}
on!(a_limited_operation_stops_at_an_address_and_goes_on_from_there_to_the_same_end);

/// Blocks of a GiB are split outside the walk, which may pause after each of them.
fn a_split_is_paused_behind_each_block_that_takes_long<H: Hardware>() {
    const G: u64 = 1 << 30;
    on_stage::<H>((H::usual(), 40, 8), |_, guard, cache: &mut CacheOf<'_, H>| {
        let (start, end) = (510 * G, 514 * G);
        let all = range(start, end - start);
        guard.map(all, Hpa(0), RAM, PageSize::SIZE_1G, cache).unwrap();
        let mut at = start;
        for paused in [511 * G, 512 * G, 513 * G] {
            guard.limit(1);
            let left = range(at, end - at);
            let found = guard.split(left, BLOCK, cache).unwrap_err();
            assert_eq!(found, Stopped { at: Gpa(paused), reason: SplitError::Paused });
            at = paused;
            cache.fill(2).unwrap();
        }
        guard.limit(1);
        guard.split(range(at, end - at), BLOCK, cache).unwrap();
        assert_eq!(guard.leaves(all).unwrap().count() as u64, (end - start) / (2 * M));
    });
}
on!(a_split_is_paused_behind_each_block_that_takes_long);

#[test]
fn a_collapse_that_is_paused_behind_a_block_has_made_it() {
    const G: u64 = 1 << 30;
    on_stage::<Ept<true>>((Default::default(), 40, 8), |_, guard, cache| {
        let all = range(0, 2 * G);
        guard.map(all, Hpa(0), RAM, BLOCK, cache).unwrap();
        guard.limit(1);
        refused(guard.collapse(all, PageSize::SIZE_1G), G, SplitError::Paused);
        let size = |at| guard.translate(Gpa(at)).unwrap().unwrap().size;
        assert_eq!([0, G].map(size), [PageSize::SIZE_1G, BLOCK]);
    });
}

#[test]
fn a_walk_may_cut_more_blocks_aside_than_it_has_patience() {
    const BLOCKS: u64 = 4100;
    let platform = TestPlatform::new(BreakBeforeMake::Never);
    let tables = Tables::new(Arm64K4::default(), Vmid(1), 43, &platform).unwrap();
    let mut storage: Vec<_> = (0..BLOCKS).map(|_| None).collect();
    let mut cache = TableCache::new(&platform, &mut storage);
    cache.fill(BLOCKS as usize).unwrap();
    let all = range(0, BLOCKS << 30);
    // SAFETY: no test gave the root to a machine.
    let mut unloaded = unsafe { tables.deactivate() };
    assert_eq!(unloaded.map(all, Hpa(0), RAM, BLOCK, &mut cache), Ok(BLOCKS << 30));
    drop(cache);
    unloaded.destroy();
}

#[test]
fn an_operation_on_one_page_takes_nothing_of_a_limit() {
    let format = Arm64K4 { hardware_dirty: true, ..Default::default() };
    on_stage::<Arm<12>>((format, 40, 8), |_, guard, cache| {
        let pages = range(0, 4 * M);
        guard.map(pages, Hpa(0), RAM, PAGE, cache).unwrap();
        // Enough for one of the two tables, and for one entry.
        guard.limit(513);
        assert_eq!(guard.harvest(range(4 * M - 4 * K, 4 * K), &mut [0]), Ok(1));
        assert_eq!(guard.write_protect(pages), Ok(4 * M));
    });
}

#[test]
fn one_page_is_never_paused_and_what_is_in_the_way_is_found_when_it_is_reached() {
    on_stage::<Arm<12>>((Arm64K4::default(), 40, 16), |_, guard, cache| {
        let page = range(0, 4 * K);
        guard.limit(0);
        guard.map(page, Hpa(0), RAM, PAGE, cache).unwrap();
        guard.write_protect(page).unwrap();
        guard.invalidate();
        // A conflict in the third table, which a limit keeps from being seen in the first call.
        guard.map(range(4 * M, 4 * K), Hpa(1 << 31), RAM, PAGE, cache).unwrap();
        guard.map(range(2 * M, 4 * K), Hpa(2 * M), RAM, PAGE, cache).unwrap();
        let most = range(2 * M, 4 * M);
        let said = refused(guard.map(most, Hpa(2 * M), RAM, PAGE, cache), 4 * M, MapError::Paused);
        says(&said, &["limit", "go on"]);
        let stopped = guard.map(range(4 * M, 2 * M), Hpa(4 * M), RAM, PAGE, cache).unwrap_err();
        assert!(matches!(stopped.reason, MapError::Occupied { .. }));
        guard.limit(u64::MAX);
        let stopped = guard.map(most, Hpa(2 * M), RAM, PAGE, cache).unwrap_err();
        assert!(matches!(stopped.reason, MapError::Occupied { .. }));
    });
}

#[test]
fn a_limit_pauses_what_is_done_to_the_pages_that_a_bitmap_names() {
    type Call = fn(&mut GuardOf<'_, '_, Arm<12>>, &Pages<'_>) -> Result<u64, Stopped<ChangeError>>;
    let calls: [Call; 2] =
        [|guard, pages| guard.write_protect_pages(pages), |guard, pages| guard.clean_pages(pages)];
    // Runs of two pages, and of one, which a walk does not count.
    for (call, each) in calls.into_iter().zip([0b11, 0b1]) {
        let format = Arm64K4 { hardware_dirty: true, ..Default::default() };
        on_stage::<Arm<12>>((format, 40, 16), |_, guard, cache| {
            let attributes = Attributes { dirty: true, ..RAM };
            guard.map(range(0, 20 * M), Hpa(0), attributes, PAGE, cache).unwrap();
            let mut bits = [0; 80];
            (0..10).for_each(|table| bits[8 * table] = each);
            let (mut from, mut bytes, mut pauses) = (0, 0, 0);
            loop {
                guard.limit(1);
                let start = Gpa(from as u64 * 64 * 4 * K);
                match call(guard, &Pages { start, bits: &bits[from..] }) {
                    Ok(more) => break bytes += more,
                    Err(Stopped { at, reason }) => {
                        assert_eq!(reason, ChangeError::Paused);
                        // It has done the one table before.
                        assert_eq!(at, Gpa((from as u64 + 8) * 64 * 4 * K));
                        from += 8;
                        pauses += 1;
                    }
                }
            }
            assert_eq!((pauses, bytes), (9, u64::from(each.count_ones()) * 4 * K));
        });
    }
}
