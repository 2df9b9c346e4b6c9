//! Unmap of runs of pages, which share an account where they continue each other, and what unmaps
//! and prunes count.

use crate::common::hardware::Hardware;
use crate::common::hardware::grouped::GroupedArm;
use crate::common::stage::{CLEAN, K, M, RAM, arm, on_stage, range};
use crate::common::world::{CacheOf, GuardOf};
use slat::{Attributes, Gpa, GpaRange, Hpa, OpCounts, PageSize, UnmapEntry};
use std::sync::atomic::Ordering::SeqCst;

const PAGE: PageSize = PageSize::SIZE_4K;
const HOST: u64 = 256 * M;

fn pages(first: u64, count: u64) -> GpaRange {
    range(first * 4 * K, count * 4 * K)
}

/// Maps a page that keeps the tables above the one of the tests.
fn keep<H: Hardware>(guard: &mut GuardOf<'_, '_, H>, cache: &mut CacheOf<'_, H>) {
    assert_eq!(guard.map(range(64 * M, 4 * K), Hpa(0), RAM, PAGE, cache), Ok(4 * K));
}

/// Maps runs of eight pages that continue each other or not, and a page apart.
fn map_runs<H: Hardware>(guard: &mut GuardOf<'_, '_, H>, cache: &mut CacheOf<'_, H>) {
    let runs = [
        (0, 0, RAM),
        (8, 8, RAM),
        // Other attributes.
        (16, 16, CLEAN),
        // Other memory.
        (24, 124, CLEAN),
        (32, 132, CLEAN),
        // Other addresses of the guest.
        (48, 140, CLEAN),
    ];
    let mut map = |first, count, memory: u64, attributes| {
        let (at, hpa) = (pages(first, count), Hpa(HOST + memory * 4 * K));
        assert_eq!(guard.map(at, hpa, attributes, PAGE, cache), Ok(at.size()));
    };
    runs.into_iter().for_each(|(first, memory, attributes)| map(first, 8, memory, attributes));
    map(300, 1, 300, RAM);
}

/// Unmaps a range; returns the first page, the number of pages, the first page of memory and the
/// attributes of each run, and what it counted.
fn unmap<H: Hardware>(
    guard: &mut GuardOf<'_, '_, H>,
    at: GpaRange,
) -> (Vec<(u64, u64, u64, Attributes)>, OpCounts) {
    let before = guard.counts();
    let mut places = [const { UnmapEntry::EMPTY }; 8];
    let mut batch = guard.unmap_batch(&mut places);
    let bytes = guard.unmap(at, &mut batch).unwrap();
    let after = guard.counts();
    let runs = batch.complete().map(|run| {
        assert_eq!(run.size, PAGE);
        let page = |bytes: u64| bytes / (4 * K);
        (page(run.gpa.0), page(run.bytes), page(run.hpa.0 - HOST), run.attributes)
    });
    let runs: Vec<_> = runs.collect();
    assert_eq!(bytes, runs.iter().map(|run| run.1 * 4 * K).sum::<u64>());
    let counts = OpCounts {
        entries_read: after.entries_read - before.entries_read,
        entries_written: after.entries_written - before.entries_written,
        bytes_changed: after.bytes_changed - before.bytes_changed,
        ..OpCounts::NONE
    };
    (runs, counts)
}

fn runs_are_handed_out_as_one_only_where_contiguous<H: Hardware>() {
    let all = [(0, 16, 0, RAM), (16, 8, 16, CLEAN), (24, 16, 124, CLEAN), (48, 8, 140, CLEAN)];
    on_stage::<H>((H::usual(), 39, 8), |_, guard, cache| {
        let up = u64::from(guard.geometry().root_level);
        keep::<H>(guard, cache);
        map_runs::<H>(guard, cache);
        let (removed, counts) = unmap::<H>(guard, pages(0, 100));
        assert_eq!(removed, all);
        assert_eq!((counts.entries_written, counts.bytes_changed), (48, 48 * 4 * K));
        // The table stays, as it has another page.
        let (removed, counts) = unmap::<H>(guard, pages(300, 1));
        assert_eq!(removed, [(300, 1, 300, RAM)]);
        let table = 512 + 1;
        assert_eq!((counts.entries_read, counts.entries_written), (up + 1, 1 + table));
        // The whole table.
        map_runs::<H>(guard, cache);
        let (removed, counts) = unmap::<H>(guard, range(0, 2 * M));
        assert_eq!(removed[..4], all);
        assert_eq!(removed[4..], [(300, 1, 300, RAM)]);
        assert_eq!((counts.entries_written, counts.bytes_changed), (table, 49 * 4 * K));
    });
}
on!(runs_are_handed_out_as_one_only_where_contiguous);

#[test]
fn a_group_in_a_retired_table_is_unmapped_as_single_entries() {
    on_stage::<GroupedArm<12>>((arm(), 39, 8), |_, guard, cache| {
        keep::<GroupedArm<12>>(guard, cache);
        let group = pages(16, 16);
        assert_eq!(guard.map_contiguous(group, Hpa(HOST), RAM, PAGE, cache), Ok(group.size()));
        let before = guard.counts().entries_written;
        let mut places = [const { UnmapEntry::EMPTY }; 2];
        let mut batch = guard.unmap_batch(&mut places);
        assert_eq!(guard.unmap(range(0, 2 * M), &mut batch), Ok(group.size()));
        let removed: Vec<_> = batch.complete().map(|run| (run.gpa, run.bytes)).collect();
        assert_eq!(removed, [(Gpa(64 * K), 64 * K)]);
        // Its members are frozen and emptied; then all entries, and the table's link.
        assert_eq!(guard.counts().entries_written - before, 2 * 16 + 512 + 1);
    });
}

fn a_prune_counts_its_reads_and_one_invalidation_for_a_table<H: Hardware>() {
    on_stage::<H>((H::usual(), 39, 8), |tables, guard, cache| {
        map_runs::<H>(guard, cache);
        // A fault that gave up has built a table.
        drop(guard.reserve(Gpa(2 * M), PAGE, cache).unwrap());
        let before = guard.counts();
        assert_eq!(guard.prune(range(0, 2 * M)), Ok(0));
        assert_eq!(guard.counts().invalidations, before.invalidations);
        assert!(guard.counts().entries_read > before.entries_read);
        assert_eq!(guard.prune(range(0, 4 * M)), Ok(1));
        let after = guard.counts();
        assert_eq!(after.invalidations, before.invalidations + 1);
        assert_eq!(after.entries_written, before.entries_written + 512 + 1);
        assert_eq!(tables.reclaim(), 0, "the guard may still be in it");
    });
}
on!(a_prune_counts_its_reads_and_one_invalidation_for_a_table);

fn a_prune_leaves_the_entries_of_a_non_empty_table_unchanged<H: Hardware>() {
    on_stage::<H>((H::usual(), 40, 8), |tables, guard, cache| {
        let page = range(8 * K, 4 * K);
        guard.map(page, Hpa(0), RAM, PAGE, cache).unwrap();
        let memory = guard.platform();
        let raws = || [0, 4 * K, 8 * K].map(|at| H::of(tables).pte(memory, at).0.load(SeqCst));
        let before = raws();
        assert_eq!(guard.prune(range(0, 4 * M)), Ok(0));
        assert_eq!(raws(), before);
    });
}
on!(a_prune_leaves_the_entries_of_a_non_empty_table_unchanged);
