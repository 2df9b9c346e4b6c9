//! Tables that no CPU has loaded: plain stores have the same results as atomic changes.

use crate::common::hardware::Hardware;
use crate::common::hardware::arm::Arm;
use crate::common::stage::{CLEAN, G, K, M, RAM, range, relax};
use crate::common::world::{VMID, cache, size};
use crate::common::{Event, TestPlatform};
use proptest::prelude::*;
use slat::{Access, Attributes, BreakBeforeMake, Hpa, PageSize, Tables, UnloadedTables};

/// A range and what to map there: the place, the number of pages, the largest leaf, the kind of
/// memory.
#[derive(Clone, Copy, Debug)]
struct Step {
    start: u64,
    pages: u64,
    largest: usize,
    kind: usize,
    frames: usize,
}

fn step() -> impl Strategy<Value = Step> {
    let start = prop_oneof![0..6u64, 510..516u64, 1020..1026u64, Just(0)];
    let pages = prop_oneof![1..4u64, 500..1100u64, Just(512)];
    (start, pages, 0..3usize, 0..7usize, prop_oneof![Just(12), 0..3usize]).prop_map(
        |(start, pages, largest, kind, frames)| Step { start, pages, largest, kind, frames },
    )
}

fn same<H: Hardware>(format: H::Format, steps: &[Step]) {
    let platform = TestPlatform::new(BreakBeforeMake::Always);
    let mut live = Tables::new(format, VMID, 40, &platform).unwrap();
    let mut unloaded = UnloadedTables::new(format, VMID, 40, &platform).unwrap();
    for step in steps {
        let (mut one, mut two) = (Vec::new(), Vec::new());
        let mut one = cache::<H>(&platform, &mut one, step.frames);
        let mut two = cache::<H>(&platform, &mut two, step.frames);
        let page = 1 << H::PAGE;
        let at = range(step.start * page, step.pages * page);
        let largest = size(H::sizes()[step.largest % H::SIZES as usize]);
        let attributes = [RAM, CLEAN, Attributes { write: false, ..RAM }][step.kind % 3];
        let mut guard = live.enter_mut();
        if step.kind < 3 {
            let hpa = Hpa(4 * G + at.start().0);
            let found = unloaded.map(at, hpa, attributes, largest, &mut two);
            assert_eq!(found, guard.map(at, hpa, attributes, largest, &mut one));
        } else if step.kind == 5 {
            let mut taken = Vec::new();
            let done = unloaded.unmap(at, |removed| taken.push(removed));
            let mut places = [const { slat::UnmapEntry::EMPTY }; 64];
            let mut batch = guard.unmap_batch(&mut places);
            let expected = guard.unmap(at, &mut batch);
            assert_eq!(done.map_err(|stopped| stopped.at), expected.map_err(|stopped| stopped.at));
            assert_eq!(taken, batch.complete().collect::<Vec<_>>());
            drop(batch);
            guard.invalidate();
        } else if step.kind == 6 {
            let done = unloaded.discard(at).map_err(|stopped| stopped.at);
            let mut places = [slat::UnmapEntry::EMPTY];
            let mut batch = guard.unmap_batch(&mut places).forgetting();
            let expected = guard.unmap(at, &mut batch).map(drop);
            assert_eq!(done, expected.map_err(|stopped| stopped.at));
            batch.complete().for_each(drop);
            drop(batch);
            guard.invalidate();
        } else {
            assert_eq!(unloaded.write_protect(at), guard.write_protect(at));
            guard.invalidate();
            // No CPU can hold stale entries.
            assert_eq!((unloaded.enter_mut().pending_invalidation(), one.len()), (None, two.len()));
        }
        assert_eq!(one.len(), two.len(), "frames taken");
        drop(guard);
        assert!(platform.take_invalidations().len() <= 2, "only that of live tables");
    }
    let live_hardware = H::of(&live);
    let tables = unloaded.activate();
    assert_eq!(platform.take_events(), [Event::Publish], "walkers see what was stored");
    let (found, expected) = (H::of(&tables).tree(&platform), live_hardware.tree(&platform));
    assert_eq!(found.runs, expected.runs);
    let shape = |tree: &crate::common::hardware::Tree| {
        let mut all: Vec<_> = tree.shape().into_values().collect();
        all.sort_unstable();
        all
    };
    assert_eq!(shape(&found), shape(&expected));
    crate::common::destroy(tables);
    crate::common::destroy(live);
    assert_eq!(platform.live(), 0);
}

fn inactive_tables_change_exactly_as_live_ones<H: Hardware>() {
    let config = crate::properties::config();
    let config = ProptestConfig { cases: 64, source_file: Some(file!()), ..config };
    proptest!(config, |(steps in prop::collection::vec(step(), 1..8))| {
        same::<H>(H::usual(), &steps);
    });
}
on!(
    inactive_tables_change_exactly_as_live_ones;
    arm_16k, npt, riscv, radix_4k, radix_64k, ept_2m
);

fn leaves_contiguous_in_memory_alone_are_handed_out_apart<H: Hardware>() {
    let format = H::usual();
    let platform = TestPlatform::new(BreakBeforeMake::Always);
    let mut live = Tables::new(format, VMID, 40, &platform).unwrap();
    let mut unloaded = UnloadedTables::new(format, VMID, 40, &platform).unwrap();
    let page = 1 << H::PAGE;
    let mut guard = live.enter_mut();
    // There are holes in the guest but none in memory; two ranges that continue each other in
    // both; one that does so in the guest only.
    for (gpa, hpa) in [(0, 0), (2, 1), (5, 7), (6, 8), (8, 9), (9, 30)] {
        let (mut one, mut two) = (Vec::new(), Vec::new());
        let mut one = cache::<H>(&platform, &mut one, 4);
        let mut two = cache::<H>(&platform, &mut two, 4);
        let (at, hpa) = (range(gpa * page, page), Hpa(4 * G + hpa * page));
        let leaf = size(H::sizes()[0]);
        assert_eq!(guard.map(at, hpa, RAM, leaf, &mut one), Ok(page));
        assert_eq!(unloaded.map(at, hpa, RAM, leaf, &mut two), Ok(page));
    }
    for whole in [false, true] {
        // Unmaps part of the table, and all of it.
        let at = if whole { range(0, 512 * page * 512) } else { range(0, 3 * page) };
        let mut taken = Vec::new();
        let bytes = unloaded.unmap(at, |removed| taken.push(removed)).unwrap();
        let found = crate::common::unmap(&mut guard, at);
        assert_eq!(taken, found);
        let runs: Vec<_> = taken.iter().map(|r| (r.gpa.0 / page, r.bytes / page)).collect();
        let expected = if whole { vec![(5, 2), (8, 1), (9, 1)] } else { vec![(0, 1), (2, 1)] };
        assert_eq!(
            (runs, bytes),
            (expected.clone(), expected.iter().map(|r| r.1).sum::<u64>() * page)
        );
    }
    guard.invalidate();
    drop(guard);
    crate::common::destroy(live);
    unloaded.destroy();
    assert_eq!(platform.live(), 0);
}
on!(leaves_contiguous_in_memory_alone_are_handed_out_apart; arm_16k, npt);

fn pages_of_inactive_tables_are_protected_in_runs_and_singly<H: Hardware>() {
    for before in [4 * K, 8 * K] {
        let platform = TestPlatform::new(BreakBeforeMake::Always);
        let mut unloaded = UnloadedTables::new(H::usual(), VMID, 40, &platform).unwrap();
        let mut storage = Vec::new();
        let mut frames = cache::<H>(&platform, &mut storage, 4);
        let (pages, page) = (range(0, 160 * K), size(4 * K));
        assert_eq!(unloaded.map(pages, Hpa(G), RAM, page, &mut frames), Ok(160 * K));
        // Pages of the second run are protected before; a run is whole, and an end is none.
        assert_eq!(unloaded.write_protect(range(48 * K, before)), Ok(before));
        assert_eq!(unloaded.write_protect(range(0, 140 * K)), Ok(140 * K - before));
        let leaves: Vec<_> = unloaded.enter_mut().leaves(pages).unwrap().flatten().collect();
        assert_eq!(leaves.len(), 40);
        assert!(leaves.iter().all(|leaf| leaf.attributes.write == (leaf.gpa.0 >= 140 * K)));
        drop(frames);
        unloaded.destroy();
    }
}
on!(pages_of_inactive_tables_are_protected_in_runs_and_singly);

/// Where a field of the descriptor overflows, the step between consecutive pages is another.
#[test]
fn memory_is_handed_out_as_mapped_across_multiples_of_2_to_50() {
    type Lpa2 = Arm<12, true>;
    let format = slat::format::arm64::Arm64 { hardware_dirty: true, ..Default::default() };
    for multiple in 1..4 {
        for (before, size) in [(1, 0), (3, 0), (511, 0), (2, 1)] {
            let platform = TestPlatform::new(BreakBeforeMake::Never);
            let mut unloaded = UnloadedTables::new(format, VMID, 40, &platform).unwrap();
            let mut live = Tables::new(format, VMID, 40, &platform).unwrap();
            let leaf = if size == 0 { 4 * K } else { 2 * M };
            let hpa = (multiple << 50) - before * leaf;
            let all = range(8 * M, 8 * M);
            for unmapped in [range(8 * M, 8 * M), range(8 * M, 4 * M)] {
                let (mut one, mut two) = (Vec::new(), Vec::new());
                let mut one = cache::<Lpa2>(&platform, &mut one, 8);
                let mut two = cache::<Lpa2>(&platform, &mut two, 8);
                let largest = slat::PageSize::from_bytes(leaf).unwrap();
                assert!(unloaded.map(all, Hpa(hpa), RAM, largest, &mut one).is_ok());
                let mut guard = live.enter_mut();
                assert!(guard.map(all, Hpa(hpa), RAM, largest, &mut two).is_ok());
                let mut found = [Vec::new(), crate::common::unmap(&mut guard, unmapped)];
                let done = unloaded.unmap(unmapped, |removed| found[0].push(removed));
                assert_eq!(done, Ok(unmapped.size()));
                // The unmap may use as many runs as it likes: it hands out each byte once, in
                // order.
                for runs in &found {
                    let mut at = unmapped.start().0;
                    for run in runs {
                        assert_eq!((run.gpa.0, run.hpa.0), (at, hpa + (at - 8 * M)));
                        at += run.bytes;
                    }
                    assert_eq!(at, unmapped.end().0);
                }
            }
            live.enter_mut().invalidate();
            crate::common::destroy(live);
            unloaded.destroy();
        }
    }
}

fn tables_that_become_inactive_are_changed_and_loaded_again<H: Hardware>() {
    let platform = TestPlatform::new(BreakBeforeMake::Always);
    let mut world =
        crate::common::world::World::<H>::new(&platform, BreakBeforeMake::Always, H::usual(), 40);
    let what =
        crate::common::world::Mapping { hpa: G, attributes: RAM, largest: PageSize::SIZE_2M };
    assert_eq!(world.map(range(0, 4 * M), what, 4), None);
    platform.observe();
    let crate::common::world::World { tables, .. } = world;
    platform.machine.borrow_mut().as_mut().unwrap().unload();
    // SAFETY: the machine has just unloaded the root.
    let mut unloaded = unsafe { tables.deactivate() };
    platform.take_events();
    assert_eq!(unloaded.write_protect(range(0, 2 * M)), Ok(2 * M));
    let mut storage = Vec::new();
    let mut frames = cache::<H>(&platform, &mut storage, 4);
    // All operations are available, and none owes anything.
    let mut guard = unloaded.enter_mut();
    let page = PageSize::SIZE_4K;
    assert_eq!(guard.split(range(0, 4 * K), page, &mut frames), Ok(2 * M));
    assert_eq!(relax(&mut guard, range(0, 4 * K), Access::Write), Ok(4 * K));
    assert_eq!(crate::common::unmap(&mut guard, range(2 * M, 2 * M)).len(), 1);
    assert_eq!(guard.write_protect(range(0, 2 * M)), Ok(4 * K));
    assert_eq!(guard.pending_invalidation(), None);
    drop(guard);
    let moved = range(2 * M, 2 * M);
    let done = unloaded.map(moved, Hpa(8 * G), RAM, PageSize::SIZE_2M, &mut frames);
    assert_eq!(done, Ok(2 * M));
    drop(frames);
    let tables = unloaded.activate();
    let tree = H::of(&tables).tree(&platform);
    let found: Vec<_> = tree.runs.iter().map(|run| (run.start, run.size, run.leaf.oa)).collect();
    assert_eq!(found, [(0, 4 * K, G), (2 * M, 2 * M, 8 * G)]);
    crate::common::destroy(tables);
    assert_eq!(platform.live(), 0);
}
on!(tables_that_become_inactive_are_changed_and_loaded_again; npt);

#[test]
fn a_discard_unfolds_groups_cut_by_its_ends_and_keeps_the_rest() {
    let platform = TestPlatform::new(BreakBeforeMake::Always);
    let format = slat::format::arm64::Arm64K4::default();
    let mut unloaded = UnloadedTables::new(format, VMID, 40, &platform).unwrap();
    let mut storage = Vec::new();
    let mut tables = cache::<Arm<12>>(&platform, &mut storage, 4);
    let page = 4 << 10;
    let (all, leaf) = (range(0, 64 * page), PageSize::SIZE_4K);
    unloaded.map_contiguous(all, Hpa(4 * G), RAM, leaf, &mut tables).unwrap();
    drop(tables);
    unloaded.discard(range(8 * page, 36 * page)).unwrap();
    let found = |at: u64, unloaded: &mut UnloadedTables<'_, _, _>| {
        unloaded
            .enter_mut()
            .translate(slat::Gpa(at * page))
            .unwrap()
            .map(|it| (it.hpa.0, it.size.bytes()))
    };
    for at in 0..64 {
        let stays = |bytes| Some((4 * G + at * page, bytes));
        let expected = match at {
            8..44 => None,
            0..8 | 44..48 => stays(page),
            _ => stays(16 * page),
        };
        assert_eq!(found(at, &mut unloaded), expected, "page {at}");
    }
    unloaded.discard(range(0, 64 * page)).unwrap();
    unloaded.destroy();
    assert_eq!(platform.live(), 0);
}

/// Groups that are filled in a table that exists already, wherever they and the range begin.
#[test]
fn a_group_that_is_mapped_into_a_table_that_exists_is_one_leaf() {
    let format = slat::format::arm64::Arm64K4::default();
    let page = 4 << 10;
    for before in 0..9 {
        let platform = TestPlatform::new(BreakBeforeMake::Always);
        let mut unloaded = UnloadedTables::new(format, VMID, 40, &platform).unwrap();
        let mut storage = Vec::new();
        let mut tables = cache::<Arm<12>>(&platform, &mut storage, 4);
        let mut map = |from: u64, pages: u64, unloaded: &mut UnloadedTables<'_, _, _>| {
            let (range, leaf) = (range(from * page, pages * page), PageSize::SIZE_4K);
            let to = Hpa(4 * G + from * page);
            unloaded.map_contiguous(range, to, RAM, leaf, &mut tables)
        };
        assert_eq!(map(0, 1, &mut unloaded), Ok(page));
        let pages = before + 32 + 3;
        assert_eq!(map(32 - before, pages, &mut unloaded), Ok(pages * page), "{before}");
        let guard = unloaded.enter_mut();
        for at in 32 - before..67 {
            let found = guard.translate(slat::Gpa(at * page)).unwrap().unwrap();
            let size = if (32..64).contains(&at) { 16 * page } else { page };
            assert_eq!((found.hpa.0, found.size.bytes()), (4 * G + at * page, size), "{at}");
        }
        drop((guard, tables));
        unloaded.destroy();
        assert_eq!(platform.live(), 0);
    }
}
