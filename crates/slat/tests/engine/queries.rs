//! Operations that change no entry: what they find, in which pieces, and what they find where
//! another thread changes the tables at the same moment.

use crate::common::Event;
use crate::common::hardware::Hardware;
use crate::common::hardware::arm::Arm;
use crate::common::stage::{K, M, RAM, on_stage, on_stage_uncounted, range};
use crate::common::world::{GuardOf, TablesOf};
use slat::format::arm64::Arm64K4;
use slat::{
    Attributes, BreakBeforeMake, Format, Gpa, GpaRange, Hpa, Maintenance, Memory, PageSize,
};
use std::sync::atomic::Ordering::SeqCst;

const PAGE: PageSize = PageSize::SIZE_4K;
const BLOCK: PageSize = PageSize::SIZE_2M;

/// Flushes memory; returns its bytes, and the pieces in which they were made coherent.
fn flushed(guard: &mut GuardOf<'_, '_, Arm<12>>, at: GpaRange) -> (u64, Vec<(u64, u64)>) {
    guard.platform().take_events();
    let bytes = guard.clean_caches(at).unwrap();
    let events = guard.platform().take_events();
    let piece = |event: &Event| match *event {
        Event::Maintain { hpa, bytes, what: Maintenance::Data } => (hpa, bytes),
        other => panic!("{other:?}"),
    };
    (bytes, events.iter().map(piece).collect())
}

#[test]
fn eight_contiguous_host_pages_are_made_coherent_as_one_piece() {
    on_stage::<Arm<12>>((Arm64K4::default(), 40, 8), |_, guard, cache| {
        let pages = range(0, 64 * K);
        guard.map(pages, Hpa(M), RAM, PAGE, cache).unwrap();
        let pieces = vec![(M, 32 * K), (M + 32 * K, 32 * K)];
        assert_eq!(flushed(guard, pages), (64 * K, pieces));

        // Those that do not are made coherent one by one.
        let pages: Vec<_> = (0..8).map(|n| (2 * M + n * 4 * K, 4 * M - n * 4 * K)).collect();
        for &(gpa, hpa) in &pages {
            guard.map(range(gpa, 4 * K), Hpa(hpa), RAM, PAGE, cache).unwrap();
        }
        let pieces = pages.iter().map(|&(_, hpa)| (hpa, 4 * K)).collect();
        assert_eq!(flushed(guard, range(2 * M, 32 * K)), (32 * K, pieces));

        // One of them is not cached.
        let device = Attributes { memory: Memory::NonCacheable, ..RAM };
        for n in 0..8 {
            let (at, what) = (4 * M + n * 4 * K, if n == 3 { device } else { RAM });
            guard.map(range(at, 4 * K), Hpa(at), what, PAGE, cache).unwrap();
        }
        let cached = (0..8).filter(|n| *n != 3).map(|n| (4 * M + n * 4 * K, 4 * K)).collect();
        assert_eq!(flushed(guard, range(4 * M, 32 * K)), (28 * K, cached));
    });
}

#[test]
fn of_a_block_the_part_in_the_range_is_made_coherent() {
    on_stage::<Arm<12>>((Arm64K4::default(), 40, 8), |_, guard, cache| {
        guard.map(range(2 * M, 2 * M), Hpa(8 * M), RAM, BLOCK, cache).unwrap();
        let part = (512 * K, vec![(9 * M, 512 * K)]);
        assert_eq!(flushed(guard, range(3 * M, 512 * K)), part);
    });
}

#[test]
fn the_leaves_of_a_part_of_a_table_are_those_of_the_range() {
    on_stage::<Arm<12>>((Arm64K4::default(), 40, 8), |_, guard, cache| {
        guard.map(range(0, 64 * K), Hpa(M), RAM, PAGE, cache).unwrap();
        for (first, pages) in [(0, 2), (1, 4), (2, 5), (7, 3)] {
            let at = range(first * 4 * K, pages * 4 * K);
            let found: Vec<_> = guard
                .leaves(at)
                .unwrap()
                .map(|leaf| leaf.map(|leaf| (leaf.gpa.0, leaf.hpa.0 - M)).unwrap())
                .collect();
            let expected: Vec<_> = (first..first + pages).map(|n| (n * 4 * K, n * 4 * K)).collect();
            assert_eq!(found, expected);
        }
    });
}

/// Maps the pages of a block's size from 0 on, and calls `looks`. Meanwhile another thread makes
/// them a block: when a walk has come for the `nth` time to the table of pages, or to the table
/// above it.
fn becomes_block<R>(
    (tables, guard): (&TablesOf<'_, Arm<12>>, &GuardOf<'_, '_, Arm<12>>),
    (above, nth): (bool, u32),
    looks: impl FnOnce() -> R,
) -> R {
    let platform = guard.platform();
    let tree = Arm::<12>::of(tables).tree(platform);
    let [upper, pages] = [2, 1].map(|height| tree.table(0, height).unwrap().0);
    let link = platform.table(upper, 512)[0].load(SeqCst);
    let raws: Vec<_> = platform.table(pages, 512).iter().map(|pte| pte.load(SeqCst)).collect();
    let block = Arm64K4::leaf(guard.format().encode(RAM).unwrap(), 1, Hpa(0));
    let mut times = 0;
    platform.entered(Some(Box::new(move |platform, table| {
        if table != if above { upper } else { pages } {
            return;
        }
        times += 1;
        if times == nth {
            platform.table(upper, 512)[0].store(block, SeqCst);
            for pte in platform.table(pages, 512) {
                pte.store(Arm64K4::retired(Hpa(0)), SeqCst);
            }
        }
    })));
    let found = looks();
    platform.entered(None);
    assert_eq!(platform.table(upper, 512)[0].swap(link, SeqCst), block);
    for (pte, raw) in platform.table(pages, 512).iter().zip(raws) {
        pte.store(raw, SeqCst);
    }
    found
}

#[test]
fn an_address_whose_table_collapses_is_found_in_the_block() {
    on_stage::<Arm<12>>((Arm64K4::default(), 40, 8), |tables, guard, cache| {
        guard.map(range(0, 2 * M), Hpa(0), RAM, PAGE, cache).unwrap();
        let at = Gpa(12 * K + 5);
        let found = becomes_block((tables, &*guard), (false, 1), || guard.translate(at));
        let found = found.unwrap().unwrap();
        assert_eq!((found.hpa, found.size, found.attributes), (Hpa(at.0), BLOCK, RAM));
    });
}

#[test]
fn the_rest_of_pages_that_collapse_is_found_in_the_block() {
    on_stage::<Arm<12>>((Arm64K4::default(), 40, 8), |tables, guard, cache| {
        let block = range(0, 2 * M);
        guard.map(block, Hpa(0), RAM, PAGE, cache).unwrap();
        // The first page is looked up; then the iterator goes down once more, to stay in its table.
        let found: Vec<_> = becomes_block((tables, &*guard), (true, 2), || {
            guard.leaves(block).unwrap().map(Result::unwrap).collect()
        });
        let each = |page: u64| slat::Leaf {
            gpa: Gpa(page * 4 * K),
            hpa: Hpa(page * 4 * K),
            size: PAGE,
            attributes: RAM,
        };
        assert_eq!(found, (0..512).map(each).collect::<Vec<_>>());
    });
}

/// Leaves that appear around the address that the iterator has reached: a block in place of a
/// table, and a group in place of pages.
fn leaves_are_in_ascending_order_and_each_address_is_in_one<H: Hardware>() {
    let stage = (H::usual(), 40, 8);
    on_stage_uncounted::<H>(BreakBeforeMake::Never, stage, |tables, guard, cache| {
        let mut reader = guard.platform().register();
        let mut other = tables.enter(&mut reader).unwrap();
        let all = range(2 * M, 4 * M);
        guard.map(all, Hpa(0), RAM, PAGE, cache).unwrap();
        let mut leaves = guard.leaves(all).unwrap();
        let mut items: Vec<_> = leaves.by_ref().take(10).map(Result::unwrap).collect();
        other.collapse(all, BLOCK).unwrap();
        items.extend(leaves.map(Result::unwrap));
        assert_eq!(items.iter().map(|leaf| leaf.size.bytes()).sum::<u64>(), 4 * M);
        let mut at = 2 * M;
        for leaf in items {
            assert_eq!((leaf.gpa, leaf.hpa, leaf.attributes), (Gpa(at), Hpa(at - 2 * M), RAM));
            at += leaf.size.bytes();
        }
        let last = guard.leaves(all).unwrap().last().unwrap().unwrap();
        assert_eq!((last.gpa, last.size), (Gpa(4 * M), BLOCK));
        // A range that begins inside a block shows all of the block.
        let first = guard.leaves(range(3 * M, 4 * K)).unwrap().next().unwrap().unwrap();
        assert_eq!((first.gpa, first.size), (Gpa(2 * M), BLOCK));
    });
}
on!(leaves_are_in_ascending_order_and_each_address_is_in_one);
