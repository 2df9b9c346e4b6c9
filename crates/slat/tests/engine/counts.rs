//! Exact costs: each entry that is read or written counts, wherever a walk finds it.

use crate::common::hardware::Hardware;
use crate::common::hardware::ept::Ept;
use crate::common::stage::{G, K, M, RAM, on_stage, range, relax};
use crate::common::world::GuardOf;
use slat::{Access, AgeBitmaps, AgeOptions, Gpa, GpaRange, Hpa, PageSize, TableBits, UnmapEntry};

const PAGE: PageSize = PageSize::SIZE_4K;
const BLOCK: PageSize = PageSize::SIZE_2M;

/// Returns how many entries an operation in a guard has read and written.
fn cost<H: Hardware, R>(
    guard: &mut GuardOf<'_, '_, H>,
    operation: impl FnOnce(&mut GuardOf<'_, '_, H>) -> R,
) -> (u64, u64) {
    let before = guard.counts();
    operation(guard);
    let after = guard.counts();
    (after.entries_read - before.entries_read, after.entries_written - before.entries_written)
}

fn each_entry_on_the_way_and_each_in_the_range_is_read_once<H: Hardware>() {
    on_stage::<H>((H::usual(), 39, 8), |_, guard, cache| {
        // Levels above the pages.
        let up = u64::from(guard.geometry().root_level);
        let page = |number: u64| range(number * 4 * K, 4 * K);
        let map = |at: GpaRange, size| {
            move |guard: &mut GuardOf<'_, '_, H>, cache: &mut _| {
                guard.map(at, Hpa(at.start().0), RAM, size, cache).unwrap()
            }
        };
        // The empty entry of the root is checked first, met by the walk, and filled outside the
        // walk, as the table has tables below it. Tables are built, not read.
        let first = cost::<H, _>(guard, |guard| map(range(0, 8 * K), PAGE)(guard, cache));
        assert_eq!(first, (3, 1 + 512 * up));
        // A page whose table exists: one entry for each level.
        let fault = cost::<H, _>(guard, |guard| map(page(2), PAGE)(guard, cache));
        assert_eq!(fault, (up + 1, 1));
        // The same again: the page is mapped, and the fault path does not count what it leaves
        // to the walk.
        let again = cost::<H, _>(guard, |guard| map(page(2), PAGE)(guard, cache));
        assert_eq!(again, (up + 1, 0));
        // The way to the table and 29 pages, twice.
        let more = cost::<H, _>(guard, |guard| map(range(0, 116 * K), PAGE)(guard, cache));
        assert_eq!(more, (2 * (up + 29), 26));
        let block = cost::<H, _>(guard, |guard| map(range(2 * M, 2 * M), BLOCK)(guard, cache));
        assert_eq!(block, (2 * up, 1));
        // Rights of one page, of some pages, of none that has a right to lose; runs of eight
        // and the rest.
        assert_eq!(cost::<H, _>(guard, |guard| guard.write_protect(page(3))), (up + 1, 1));
        let pages = range(4 * K, 80 * K);
        assert_eq!(cost::<H, _>(guard, |guard| guard.write_protect(pages)), (up + 20, 19));
        assert_eq!(cost::<H, _>(guard, |guard| guard.write_protect(pages)), (up + 20, 0));
        // The way, both entries, and all entries of the table.
        let all = range(0, 4 * M);
        let relaxed = cost::<H, _>(guard, |guard| relax(guard, all, Access::Write));
        assert_eq!(relaxed, (up + 1 + 512, 20));
        let mut bits = [0; 16];
        let harvest = cost::<H, _>(guard, |guard| guard.harvest(all, &mut bits));
        assert_eq!(harvest, (up + 1 + 512, 30));
        let (mut young, mut unanswered) = ([0; 16], [0; 16]);
        let mut ages = AgeBitmaps { young: &mut young, unanswered: &mut unanswered };
        let how = AgeOptions { clear: true, table_bits: TableBits::Ignored, flush_tlb: false };
        let aged = cost::<H, _>(guard, |guard| guard.age(all, &mut ages, how));
        assert_eq!(aged, (up + 1 + 512, 30));
        // To find that all is split takes one load for each level. A block costs its table and
        // its entry, which is broken and then linked.
        let split = cost::<H, _>(guard, |guard| guard.split(page(5), PAGE, cache));
        assert_eq!(split, (up, 0));
        let split = cost::<H, _>(guard, |guard| guard.split(all, PAGE, cache));
        assert_eq!(split, (up + 1, 512 + 2));
        let by_entry = |guard: &mut GuardOf<'_, '_, H>, cache: &mut _| {
            guard.split_by::<slat::EveryEntry>(range(6 * M, 2 * M), PAGE, cache, 1).unwrap()
        };
        let block = range(6 * M, 2 * M);
        guard.map(block, Hpa(6 * M), RAM, BLOCK, cache).unwrap();
        // The way, the block, and the entries of its new table; then the walk reads it again,
        // and enters it.
        let split = cost::<H, _>(guard, |guard| by_entry(guard, cache));
        assert_eq!(split, (up + 512 + 1 + 512, 512 + 2));
        // The way and the table's link; its children are checked, then sealed and retired.
        let collapse = cost::<H, _>(guard, |guard| guard.collapse(block, BLOCK));
        assert_eq!(collapse, (up + 512, 2 * 512 + 2));
        // A fault reads one entry for each level, and writes the entry that it reserves and
        // commits.
        let fault = cost::<H, _>(guard, |guard| {
            let reserved = guard.reserve(Gpa(116 * K), PAGE, cache).unwrap();
            assert_eq!(reserved.commit(Hpa(116 * K), RAM), Ok(Some(4 * K)));
        });
        assert_eq!(fault, (up + 1, 2));
        let fault = cost::<H, _>(guard, |guard| {
            let reserved = guard.reserve(Gpa(G), PAGE, cache).unwrap();
            assert_eq!(reserved.commit(Hpa(G), RAM), Ok(Some(4 * K)));
        });
        // Two links, which are found empty and read again.
        assert_eq!(fault, (up + 3, 4));
        let mut places = [const { UnmapEntry::EMPTY }; 8];
        let mut batch = guard.unmap_batch(&mut places);
        let before = guard.counts();
        assert_eq!(guard.unmap(range(0, 2 * M), &mut batch), Ok(120 * K));
        let after = guard.counts();
        let written = after.entries_written - before.entries_written;
        let taken = (after.entries_read - before.entries_read, written);
        // Each entry of the table is retired, those of 30 leaves as they are taken; its link.
        assert_eq!(taken, (up + 512, 512 + 1));
        assert_eq!(batch.complete().map(|run| run.bytes).sum::<u64>(), 120 * K);
    });
}
on!(each_entry_on_the_way_and_each_in_the_range_is_read_once);

fn tables_that_a_walk_steps_over_count_as_their_entries<H: Hardware>() {
    on_stage::<H>((H::usual(), 39, 24), |_, guard, cache| {
        let up = u64::from(guard.geometry().root_level);
        for table in 0..20 {
            let page = range(table * 2 * M, 4 * K);
            assert_eq!(guard.map(page, Hpa(0), RAM, PAGE, cache), Ok(4 * K));
        }
        // The way to the table of tables, and its entries; there is nothing to split.
        let all = range(0, 40 * M);
        let split = cost::<H, _>(guard, |guard| guard.split(all, PAGE, cache));
        assert_eq!(split, (up - 1 + 20, 0));
    });
}
on!(tables_that_a_walk_steps_over_count_as_their_entries);

#[test]
fn an_internal_invalidation_counts_whichever_operation_owed_it() {
    on_stage::<Ept<true>>((Default::default(), 40, 8), |_, guard, cache| {
        assert_eq!(guard.map(range(0, 8 * K), Hpa(0), RAM, PAGE, cache), Ok(8 * K));
        // A harvest completes what its guard owed before; one that finds nothing completes nothing.
        let (first, second) = (range(0, 4 * K), range(4 * K, 4 * K));
        assert_eq!(guard.write_protect(first), Ok(4 * K));
        assert_eq!(guard.harvest(second, &mut [0]), Ok(1));
        assert_eq!(guard.counts().invalidations, 1);
        assert_eq!(guard.harvest(second, &mut [0]), Ok(0));
        assert_eq!(guard.counts().invalidations, 1);
        assert_eq!(relax(guard, first, Access::Write), Ok(4 * K));
        assert_eq!(guard.write_protect(first), Ok(4 * K));
        assert_eq!(guard.harvest(second, &mut [0]), Ok(0));
        assert_eq!((guard.counts().invalidations, guard.pending_invalidation()), (2, None));
    });
}
