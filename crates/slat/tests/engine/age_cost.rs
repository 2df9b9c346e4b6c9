//! What ageing scans cost and leave in tables, and what they find where another thread changes a
//! table, or scans, at the same moment.

use crate::common::hardware::Hardware;
use crate::common::hardware::ept::Ept;
use crate::common::hardware::grouped::GroupedArm;
use crate::common::stage::{CLEAN, EXACT, K, M, RAM, age, ept, holding, on_stage, range};
use crate::common::world::{GuardOf, TablesOf};
use crate::interleavings::{Call, HookedPlatform, with_cache};
use slat::format::arm64::Arm64K4;
use slat::format::ept::Ept1G;
use slat::{
    AgeBitmaps, AgeCounts, AgeOptions, BreakBeforeMake, Format, GpaRange, Hpa, PageSize, Reader,
    Tables, Vmid,
};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex};

type Intel = Ept<true>;

const PAGE: PageSize = PageSize::SIZE_4K;
const MARK: u64 = Ept1G::TABLE_ACCESSED;
const NOTE: u64 = Ept1G::AGEING;

/// Returns how many pages of a range a scan says are young, and have no answer; and how many
/// entries it reads and writes, and how many invalidations it executes.
fn scan<H: Hardware>(
    guard: &mut GuardOf<'_, '_, H>,
    at: GpaRange,
    how: AgeOptions,
) -> ((u64, u64), [u64; 3]) {
    let before = guard.counts();
    let (AgeCounts { young, unanswered }, _) = age(guard, at, how);
    let after = guard.counts();
    let cost = [
        after.entries_read - before.entries_read,
        after.entries_written - before.entries_written,
        after.invalidations - before.invalidations,
    ];
    ((young, unanswered), cost)
}

#[test]
fn an_exact_scan_of_a_page_reads_its_tables_then_its_path() {
    on_stage::<Intel>((ept(), 40, 8), |_, guard, cache| {
        let page = range(4 * K, 4 * K);
        guard.map(page, Hpa(0), RAM, PAGE, cache).unwrap();
        // Three links, none of which the page covers; then those, and the page.
        assert_eq!(scan::<Intel>(guard, page, EXACT), ((1, 0), [3 + 4, 1, 0]));
        assert_eq!(scan::<Intel>(guard, page, EXACT), ((0, 0), [3 + 4, 0, 0]));
    });
}

#[test]
fn the_invalidation_of_an_exact_scan_is_counted() {
    on_stage::<Intel>((ept(), 40, 8), |_, guard, cache| {
        guard.map(range(0, 4 * K), Hpa(0), RAM, PAGE, cache).unwrap();
        for invalidations in [1, 0] {
            let (_, cost) = scan::<Intel>(guard, range(0, 4 * M), EXACT);
            assert_eq!(cost[2], invalidations);
        }
    });
}

#[test]
fn an_exact_scan_that_meets_another_clears_leaves_and_no_table() {
    let platform = HookedPlatform::new(BreakBeforeMake::Never);
    let guest = Tables::new(ept(), Vmid(1), 40, platform).unwrap();
    let guest: &'static Tables<'static, Ept1G, HookedPlatform> = Box::leak(Box::new(guest));
    let scan = move || {
        let mut reader = Reader::register(platform).unwrap();
        let mut guard = guest.enter(&mut reader).unwrap();
        let (mut young, mut unanswered) = ([0; 16], [0; 16]);
        let mut ages = AgeBitmaps { young: &mut young, unanswered: &mut unanswered };
        let aged = guard.age(range(0, 4 * M), &mut ages, EXACT).unwrap();
        (aged.young, guard.counts().entries_written, guard.counts().invalidations)
    };
    let mut reader = Reader::register(platform).unwrap();
    let mut guard = guest.enter(&mut reader).unwrap();
    for page in [range(0, 4 * K), range(2 * M, 4 * K)] {
        with_cache(platform, 8, |cache| guard.map(page, Hpa(0), RAM, PAGE, cache).unwrap());
    }
    let found = Arc::new(Mutex::new(Vec::new()));
    let inner = found.clone();
    let first = AtomicU64::new(1);
    platform.at_each_call(move |call| {
        if call == Call::Invalidate && first.swap(0, SeqCst) == 1 {
            let scanned = scan();
            inner.lock().unwrap().push(scanned);
        }
    });
    // It clears two leaves, and the outer scan the marks of two tables.
    assert_eq!(scan(), (0, 2, 1));
    platform.at_each_call(|_| ());
    assert_eq!(*found.lock().unwrap(), [(2, 2, 0)]);
}

#[test]
fn a_scan_of_all_leaves_marks_no_table_above_a_held_leaf() {
    on_stage::<Intel>((ept(), 40, 8), |tables, guard, cache| {
        guard.map(range(0, 4 * K), Hpa(0), RAM, PAGE, cache).unwrap();
        let (hardware, platform) = (Intel::of(tables), guard.platform());
        let links = hardware.links(platform, 0);
        links.iter().for_each(|link| _ = link.fetch_and(!MARK, SeqCst));
        let (found, _) = holding(
            (hardware, platform),
            [0],
            |raw| raw | Intel::MARK,
            || scan::<Intel>(guard, range(0, 4 * M), AgeOptions::LEAVES),
        );
        assert_eq!(found, (0, 1));
        assert!(links.iter().all(|link| link.load(SeqCst) & MARK == 0));
    });
}

#[test]
fn an_exact_scan_enters_a_table_noted_by_an_unfinished_scan() {
    on_stage::<Intel>((ept(), 40, 8), |tables, guard, cache| {
        guard.map(range(0, 4 * K), Hpa(0), RAM, PAGE, cache).unwrap();
        let links = Intel::of(tables).links(guard.platform(), 0);
        let link = links.last().unwrap();
        link.fetch_and(!MARK, SeqCst);
        link.fetch_or(NOTE, SeqCst);
        assert_eq!(scan::<Intel>(guard, range(0, 2 * M), EXACT).0, (1, 0));
        assert_eq!(link.load(SeqCst) & (MARK | NOTE), 0);
    });
}

#[test]
fn a_group_with_young_members_is_young_and_cleared_only_whole() {
    type Arm = GroupedArm<12>;
    let format = Arm64K4 { hardware_dirty: true, ..Default::default() };
    on_stage::<Arm>((format, 39, 8), |tables, guard, cache| {
        let group = range(64 * K, 64 * K);
        assert_eq!(guard.map_contiguous(group, Hpa(0), CLEAN, PAGE, cache), Ok(64 * K));
        scan::<Arm>(guard, group, AgeOptions::LEAVES);
        // As many as a walk loads at once.
        for page in 0..8 {
            let member = Arm::of(tables).pte(guard.platform(), 64 * K + page * 4 * K).0;
            member.fetch_or(Arm64K4::ACCESSED, SeqCst);
        }
        for half in [range(64 * K, 32 * K), range(96 * K, 32 * K)] {
            let (found, [_, written, _]) = scan::<Arm>(guard, half, AgeOptions::LEAVES);
            assert_eq!((found, written), ((8, 0), 0));
        }
        let (found, [_, written, _]) = scan::<Arm>(guard, group, AgeOptions::LEAVES);
        assert_eq!((found, written), ((16, 0), 8));
        assert_eq!(scan::<Arm>(guard, group, AgeOptions::LEAVES).0, (0, 0));
    });
}

#[test]
fn a_group_of_which_a_member_is_held_has_no_answer() {
    type Arm = GroupedArm<12>;
    let format = Arm64K4 { hardware_dirty: true, ..Default::default() };
    on_stage::<Arm>((format, 39, 8), |tables, guard, cache| {
        let group = range(64 * K, 64 * K);
        assert_eq!(guard.map_contiguous(group, Hpa(0), CLEAN, PAGE, cache), Ok(64 * K));
        let of = (Arm::of(tables), guard.platform());
        holding(
            of,
            [124 * K],
            |raw| raw | Arm::MARK,
            || {
                assert_eq!(scan::<Arm>(guard, group, AgeOptions::LEAVES).0, (0, 16));
            },
        );
        assert_eq!(scan::<Arm>(guard, group, AgeOptions::LEAVES).0, (0, 0));
    });
}

/// Maps the pages from 2 MiB to 4 MiB, and scans them. Whenever the engine enters their table,
/// another thread changes something: `change` gets how often that was, the link of the table, and
/// its entries. Returns what `scan` does, and the link that it leaves; then both are as they were.
fn meanwhile(
    (tables, guard): (&TablesOf<'_, Intel>, &mut GuardOf<'_, '_, Intel>),
    change: impl Fn(u64, &AtomicU64, &[AtomicU64]) + 'static,
    at: GpaRange,
    how: AgeOptions,
) -> ((u64, u64), [u64; 3], u64) {
    let platform = guard.platform();
    let tree = Intel::of(tables).tree(platform);
    let (upper, pages) = (tree.table(0, 2).unwrap().0, tree.table(2 * M, 1).unwrap().0);
    let link = &platform.table(upper, 512)[1];
    let linked = link.load(SeqCst);
    let raws: Vec<_> = platform.table(pages, 512).iter().map(|pte| pte.load(SeqCst)).collect();
    let mut times = 0;
    platform.entered(Some(Box::new(move |platform, table| {
        if table == pages {
            times += 1;
            change(times, &platform.table(upper, 512)[1], platform.table(pages, 512));
        }
    })));
    let (found, cost) = scan::<Intel>(guard, at, how);
    platform.entered(None);
    let left = link.swap(linked, SeqCst);
    for (pte, raw) in platform.table(pages, 512).iter().zip(raws) {
        pte.store(raw, SeqCst);
    }
    (found, cost, left)
}

/// So often does a walk try to change an entry that another thread changes each time.
const TRIES: u64 = 1 << 12;

#[test]
fn an_exact_scan_reads_all_leaves_of_a_table_that_changes() {
    on_stage::<Intel>((ept(), 40, 8), |tables, guard, cache| {
        let all = range(2 * M, 2 * M);
        guard.map(all, Hpa(0), RAM, PAGE, cache).unwrap();
        let changes = |times, link: &AtomicU64, _: &[AtomicU64]| {
            if times < TRIES + 1000 {
                link.fetch_xor(NOTE, SeqCst);
            }
        };
        let (found, ..) = meanwhile((tables, guard), changes, all, EXACT);
        assert_eq!(found, (512, 0));
    });
}

#[test]
fn a_tables_note_is_not_taken_from_a_block_that_replaces_it() {
    on_stage::<Intel>((ept(), 40, 8), |tables, guard, cache| {
        let all = range(2 * M, 2 * M);
        guard.map(all, Hpa(0), RAM, PAGE, cache).unwrap();
        // In a block it is a bit of the user's.
        let block = Ept1G::leaf(guard.format().encode(RAM).unwrap(), 1, Hpa(0)) | NOTE;
        let changes = move |times, link: &AtomicU64, _: &[AtomicU64]| {
            // First the table is noted, then its leaves are read.
            if times == 2 {
                link.store(block, SeqCst);
            }
        };
        let (_, _, left) = meanwhile((tables, guard), changes, all, EXACT);
        assert_eq!(left, block);
    });
}
