//! Ageing of one page, which takes no walk where its table is there, and of the one leaf around an
//! address.

use crate::common::hardware::Hardware;
use crate::common::hardware::grouped::GroupedArm;
use crate::common::stage::{self, CLEAN, K, M, RAM, arm, holding, on_stage, range, refused};
use crate::common::world::{GuardOf, TablesOf};
use slat::{AgeCounts, AgeOptions, ChangeError, Gpa, GpaRange, Hpa, PageSize, RangeError};

const PAGE: PageSize = PageSize::SIZE_4K;
const BLOCK: PageSize = PageSize::SIZE_2M;
const TEST: AgeOptions = AgeOptions { clear: false, ..AgeOptions::LEAVES };

/// Returns what a scan of a range of at most 64 pages finds, and what it reads, writes and changes.
fn age<H: Hardware>(
    guard: &mut GuardOf<'_, '_, H>,
    at: GpaRange,
    how: AgeOptions,
) -> (u64, u64, [u64; 3]) {
    let before = guard.counts();
    let (aged, [young, unanswered]) = stage::age(guard, at, how);
    let after = guard.counts();
    let count = |bits: u64| u64::from(bits.count_ones());
    assert_eq!(aged, AgeCounts { young: count(young), unanswered: count(unanswered) });
    let cost = [
        after.entries_read - before.entries_read,
        after.entries_written - before.entries_written,
        after.bytes_changed - before.bytes_changed,
    ];
    (young, unanswered, cost)
}

/// Returns what is found of the leaf around an address, and the same counts.
fn leaf<H: Hardware>(
    guard: &mut GuardOf<'_, '_, H>,
    gpa: u64,
    clear: bool,
) -> (Option<(GpaRange, bool)>, [u64; 3]) {
    let before = guard.counts();
    let found = guard.age_leaf(Gpa(gpa), clear).unwrap();
    let after = guard.counts();
    let cost = [
        after.entries_read - before.entries_read,
        after.entries_written - before.entries_written,
        after.bytes_changed - before.bytes_changed,
    ];
    (found, cost)
}

/// Sets the bit with which the engine keeps other software out of an entry, calls `work`, and
/// removes it.
fn held<H: Hardware>(
    tables: &TablesOf<'_, H>,
    guard: &mut GuardOf<'_, '_, H>,
    gpa: u64,
    work: impl FnOnce(&mut GuardOf<'_, '_, H>),
) {
    let of = (H::of(tables), guard.platform());
    holding(of, [gpa], |raw| raw | H::MARK, || work(guard));
}

fn a_page_is_aged_without_its_neighbours_and_counts_its_way<H: Hardware>() {
    on_stage::<H>((H::usual(), 39, 8), |tables, guard, cache| {
        let way = u64::from(guard.geometry().root_level) + 1;
        let page = |number: u64| range(number * 4 * K, 4 * K);
        for (number, attributes) in [(1, RAM), (2, CLEAN), (3, RAM)] {
            guard.map(page(number), Hpa(number * 4 * K), attributes, PAGE, cache).unwrap();
        }
        assert_eq!(age::<H>(guard, page(1), TEST), (1, 0, [way, 0, 0]));
        assert_eq!(age::<H>(guard, page(1), AgeOptions::LEAVES), (1, 0, [way, 1, 4 * K]));
        assert_eq!(age::<H>(guard, page(1), AgeOptions::LEAVES), (0, 0, [way, 0, 0]));
        assert_eq!(age::<H>(guard, page(2), AgeOptions::LEAVES), (0, 0, [way, 0, 0]));
        // Its neighbours are as they were.
        assert_eq!(age::<H>(guard, range(0, 32 * K), TEST).0, 0b1000);
        // No leaf, in a table and without one.
        assert_eq!(age::<H>(guard, page(0), AgeOptions::LEAVES).0, 0);
        assert_eq!(age::<H>(guard, range(8 * M, 4 * K), AgeOptions::LEAVES).0, 0);
        // A block that the page cuts is tested only.
        guard.map(range(4 * M, 2 * M), Hpa(4 * M), RAM, BLOCK, cache).unwrap();
        let cut = range(4 * M + 8 * K, 4 * K);
        assert_eq!(age::<H>(guard, cut, AgeOptions::LEAVES), (1, 0, [way - 1, 0, 0]));
        assert_eq!(age::<H>(guard, cut, AgeOptions::LEAVES).0, 1);
        held::<H>(tables, guard, 12 * K, |guard| {
            let (young, unanswered, cost) = age::<H>(guard, page(3), AgeOptions::LEAVES);
            assert_eq!((young, unanswered, cost[1]), (0, 1, 0));
        });
    });
}
on!(a_page_is_aged_without_its_neighbours_and_counts_its_way);

fn the_leaf_around_an_address_is_aged_whole_and_counts_its_way<H: Hardware>() {
    on_stage::<H>((H::usual(), 39, 8), |tables, guard, cache| {
        let way = u64::from(guard.geometry().root_level) + 1;
        guard.map(range(4 * K, 4 * K), Hpa(4 * K), RAM, PAGE, cache).unwrap();
        guard.map(range(8 * K, 4 * K), Hpa(8 * K), CLEAN, PAGE, cache).unwrap();
        guard.map(range(4 * M, 2 * M), Hpa(4 * M), RAM, BLOCK, cache).unwrap();
        let page = range(4 * K, 4 * K);
        assert_eq!(leaf::<H>(guard, 4 * K + 8, false), (Some((page, true)), [way, 0, 0]));
        assert_eq!(leaf::<H>(guard, 8 * K - 1, true), (Some((page, true)), [way, 1, 4 * K]));
        assert_eq!(leaf::<H>(guard, 4 * K, true), (Some((page, false)), [way, 0, 0]));
        let clean = range(8 * K, 4 * K);
        assert_eq!(leaf::<H>(guard, 8 * K, true), (Some((clean, false)), [way, 0, 0]));
        // All of a block becomes old.
        let block = range(4 * M, 2 * M);
        let at = 5 * M + 4 * K + 1;
        assert_eq!(leaf::<H>(guard, at, false), (Some((block, true)), [way - 1, 0, 0]));
        assert_eq!(leaf::<H>(guard, at, true), (Some((block, true)), [way - 1, 1, 2 * M]));
        assert_eq!(leaf::<H>(guard, at, true), (Some((block, false)), [way - 1, 0, 0]));
        // No leaf, in a table and without one.
        assert_eq!(leaf::<H>(guard, 12 * K, true).0, None);
        assert_eq!(leaf::<H>(guard, 8 * M, true).0, None);
        held::<H>(tables, guard, 8 * K, |guard| {
            refused(guard.age_leaf(Gpa(8 * K + 1), true), 8 * K + 1, ChangeError::Contended);
        });
        let last = (1 << 39) - 1;
        assert_eq!(leaf::<H>(guard, last, true).0, None);
        let reason = RangeError::BeyondAddressSize { end: Gpa(last + 1 + 4 * K), bits: 39 };
        refused(guard.age_leaf(Gpa(last + 5), true), last + 5, ChangeError::Range(reason));
    });
}
on!(the_leaf_around_an_address_is_aged_whole_and_counts_its_way);

#[test]
fn a_group_is_aged_whole_through_any_of_its_addresses() {
    on_stage::<GroupedArm<12>>((arm(), 39, 8), |_, guard, cache| {
        let group = range(64 * K, 64 * K);
        assert_eq!(guard.map_contiguous(group, Hpa(0), RAM, PAGE, cache), Ok(64 * K));
        for (clear, young, written) in [(false, true, 0), (true, true, 16), (true, false, 0)] {
            let (found, cost) = leaf::<GroupedArm<12>>(guard, 100 * K, clear);
            assert_eq!(found, Some((group, young)));
            assert_eq!(cost[1..], [written, written * 4 * K]);
        }
        // A page of a group that has no young member is old.
        assert_eq!(age::<GroupedArm<12>>(guard, range(100 * K, 4 * K), AgeOptions::LEAVES).0, 0);
    });
}
