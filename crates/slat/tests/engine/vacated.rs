//! Unmaps and discards of tables that no CPU has: which leaves are handed out as one run, which
//! owners stay, which groups stay whole, and which tables are met.

use crate::common::TestPlatform;
use crate::common::hardware::Hardware;
use crate::common::hardware::arm::Arm;
use crate::common::hardware::ept::Ept;
use crate::common::hardware::power::Core;
use crate::common::stage::{G, K, M, RAM, arm, ept, range};
use crate::common::world::{CacheOf, cache};
use slat::format::ept::Ept1G;
use slat::format::power::PowerK64;
use slat::{
    Attributes, BreakBeforeMake, Gpa, GpaRange, Hpa, Owner, PageSize, Software, UnloadedTables,
    Vmid,
};
use std::cell::RefCell;
use std::rc::Rc;

const PAGE: PageSize = PageSize::SIZE_4K;
const BLOCK: PageSize = PageSize::SIZE_2M;
const ONE: Option<Owner> = Owner::new(1);

type InactiveOf<'p, H> = UnloadedTables<'p, <H as Hardware>::Format, TestPlatform>;

/// Empty tables, and a cache of 16 frames; checks that no frame is missing.
fn on_unloaded<H: Hardware>(
    (format, bits): (H::Format, u32),
    body: impl FnOnce(&TestPlatform, &mut InactiveOf<'_, H>, &mut CacheOf<'_, H>),
) {
    let platform = TestPlatform::new(BreakBeforeMake::Always);
    let mut unloaded = UnloadedTables::new(format, Vmid(1), bits, &platform).unwrap();
    let mut storage = Vec::new();
    let mut frames = cache::<H>(&platform, &mut storage, 16);
    body(&platform, &mut unloaded, &mut frames);
    drop(frames);
    unloaded.destroy();
    assert_eq!(platform.live(), 0);
}

/// Unmaps a range; returns the first address, the bytes and the memory of each run.
fn unmap<H: Hardware>(unloaded: &mut InactiveOf<'_, H>, at: GpaRange) -> Vec<(u64, u64, u64)> {
    let mut runs = Vec::new();
    let bytes = unloaded.unmap(at, |run| runs.push((run.gpa.0, run.bytes, run.hpa.0))).unwrap();
    assert_eq!(bytes, runs.iter().map(|run| run.1).sum::<u64>());
    runs
}

fn mapped<H: Hardware>(unloaded: &mut InactiveOf<'_, H>, gpa: u64) -> Option<PageSize> {
    unloaded.enter_mut().translate(Gpa(gpa)).unwrap().map(|found| found.size)
}

fn owned_addresses_and_their_table_outlast_leaves_beside_them<H: Hardware>() {
    on_unloaded::<H>((H::usual(), 40), |_, unloaded, cache| {
        let owned = range(4 * K, 4 * K);
        unloaded.enter_mut().set_owner(owned, None, ONE, cache).unwrap();
        let parts = [range(0, 12 * K), range(0, 2 * M), range(0, 4 * M)];
        for (part, discards) in parts.iter().flat_map(|part| [(*part, false), (*part, true)]) {
            for at in [0, 8 * K] {
                unloaded.map(range(at, 4 * K), Hpa(G + at), RAM, PAGE, cache).unwrap();
            }
            if part.size() == 4 * M {
                unloaded.map(range(2 * M, 2 * M), Hpa(2 * M), RAM, BLOCK, cache).unwrap();
            }
            if discards {
                unloaded.discard(part).unwrap();
            } else {
                let runs = unmap::<H>(unloaded, part);
                assert_eq!(runs[..2], [(0, 4 * K, G), (8 * K, 4 * K, G + 8 * K)]);
                assert_eq!(runs.len(), if part.size() == 4 * M { 3 } else { 2 });
            }
            let found = [0, 4 * K, 8 * K, 2 * M].map(|at| mapped::<H>(unloaded, at));
            assert_eq!(found, [None; 4], "{part:?}, {discards}");
            assert_eq!(unloaded.enter_mut().owner(Gpa(4 * K)), Ok(ONE), "{part:?}, {discards}");
        }
    });
}
on!(owned_addresses_and_their_table_outlast_leaves_beside_them);

fn a_block_is_unmapped_also_where_nobody_owns_anything<H: Hardware>() {
    on_unloaded::<H>((H::usual(), 40), |_, unloaded, cache| {
        for discards in [false, true] {
            unloaded.map(range(2 * M, 4 * M), Hpa(G), RAM, BLOCK, cache).unwrap();
            if discards {
                unloaded.discard(range(2 * M, 2 * M)).unwrap();
            } else {
                assert_eq!(unmap::<H>(unloaded, range(2 * M, 2 * M)), [(2 * M, 2 * M, G)]);
            }
            let found = [2 * M, 4 * M].map(|at| mapped::<H>(unloaded, at));
            assert_eq!(found, [None, Some(BLOCK)]);
            unloaded.discard(range(4 * M, 2 * M)).unwrap();
        }
    });
}
on!(a_block_is_unmapped_also_where_nobody_owns_anything);

#[test]
fn each_table_that_a_discard_covers_whole_is_met_once() {
    on_unloaded::<Ept<true>>((ept(), 48), |platform, unloaded, cache| {
        let all = range(512 * G, 512 * G);
        for at in [0, 4 * M].map(|at| all.start().0 + at) {
            unloaded.map(range(at, 4 * K), Hpa(0), RAM, PAGE, cache).unwrap();
        }
        let met = Rc::new(RefCell::new(Vec::new()));
        let meets = met.clone();
        platform.entered(Some(Box::new(move |_, table| meets.borrow_mut().push(table))));
        unloaded.discard(all).unwrap();
        platform.entered(None);
        let mut met = met.take();
        assert_eq!(met.len(), 4, "two of tables, and two of pages");
        met.sort_unstable();
        met.dedup();
        assert_eq!(met.len(), 4);
    });
}

/// A table of pages has fewer entries than the tables above it.
#[test]
fn the_last_page_of_a_short_table_takes_the_table_with_it() {
    let format = PowerK64 { output_bits: 48 };
    on_unloaded::<Core<16, true>>((format, 48), |platform, unloaded, cache| {
        let live = platform.live() - cache.len();
        let page = range(2 * M + 64 * K, 64 * K);
        let size = PageSize::from_bytes(64 * K).unwrap();
        unloaded.map(page, Hpa(G), RAM, size, cache).unwrap();
        assert!(platform.live() - cache.len() > live);
        let runs = unmap::<Core<16, true>>(unloaded, page);
        assert_eq!(runs, [(page.start().0, 64 * K, G)]);
        assert_eq!(platform.live() - cache.len(), live);
    });
}

#[test]
fn a_group_behind_what_is_discarded_stays_whole() {
    on_unloaded::<Arm<12>>((arm(), 40), |_, unloaded, cache| {
        let groups = range(0, 192 * K);
        unloaded.map_contiguous(groups, Hpa(0), RAM, PAGE, cache).unwrap();
        unloaded.discard(range(64 * K, 64 * K)).unwrap();
        let found = [0, 64 * K, 128 * K].map(|at| mapped::<Arm<12>>(unloaded, at));
        let group = PageSize::from_bytes(64 * K);
        assert_eq!(found, [group, None, group]);
    });
}

fn a_table_of_the_hosts_first_memory_is_one_run<H: Hardware>() {
    on_unloaded::<H>((H::usual(), 40), |_, unloaded, cache| {
        let all = range(0, 2 * M);
        unloaded.map(all, Hpa(0), RAM, PAGE, cache).unwrap();
        assert_eq!(unmap::<H>(unloaded, all), [(0, 2 * M, 0)]);
    });
}
on!(a_table_of_the_hosts_first_memory_is_one_run);

fn a_page_64g_behind_a_run_does_not_continue_it<H: Hardware>() {
    on_unloaded::<H>((H::usual(), 40), |_, unloaded, cache| {
        for (at, hpa) in [(0, G), (64 * G, G + 4 * K)] {
            unloaded.map(range(at, 4 * K), Hpa(hpa), RAM, PAGE, cache).unwrap();
        }
        let runs = unmap::<H>(unloaded, range(0, 128 * G));
        assert_eq!(runs, [(0, 4 * K, G), (64 * G, 4 * K, G + 4 * K)]);
    });
}
on!(a_page_64g_behind_a_run_does_not_continue_it);

fn pages_that_share_memory_are_handed_out_apart<H: Hardware>() {
    fn apart<H: Hardware>(format: H::Format) {
        on_unloaded::<H>((format, 41), |_, unloaded, cache| {
            let pages = [(0, G), (4 * K, G + 8 * K), (8 * K, G + 8 * K), (12 * K, G + 8 * K)];
            for count in 2..5 {
                for (at, hpa) in &pages[..count] {
                    unloaded.map(range(*at, 4 * K), Hpa(*hpa), RAM, PAGE, cache).unwrap();
                }
                let runs = unmap::<H>(unloaded, range(0, 2 * M));
                assert_eq!(runs, pages[..count].iter().map(run).collect::<Vec<_>>());
            }
        });
    }
    fn run((at, hpa): &(u64, u64)) -> (u64, u64, u64) {
        (*at, 4 * K, *hpa)
    }
    apart::<H>(H::usual());
}
on!(pages_that_share_memory_are_handed_out_apart: arm_4k, ept, riscv);

/// In some formats the descriptor of a block is that of a page.
fn a_block_is_no_part_of_the_run_of_pages_before_it<H: Hardware>(bits: u32) {
    on_unloaded::<H>((H::usual(), bits), |_, unloaded, cache| {
        let (page, block) = (range(2 * M - 4 * K, 4 * K), range(2 * M, 2 * M));
        for (at, size) in [(page, PAGE), (block, BLOCK)] {
            unloaded.map(at, Hpa(G + at.start().0), RAM, size, cache).unwrap();
        }
        let runs = unmap::<H>(unloaded, range(2 * M - 4 * K, 2 * M + 4 * K));
        let expected = [page, block].map(|at| (at.start().0, at.size(), G + at.start().0));
        assert_eq!(runs, expected);
    });
}
on!(a_block_is_no_part_of_the_run_of_pages_before_it: arm_4k(40), ept(40), riscv(41), radix_4k(48));

/// Behind the highest address of all is the lowest, with one software bit more.
#[test]
fn a_page_that_continues_a_run_by_descriptor_only_is_apart() {
    let format = Ept1G { output_bits: 52, ..Default::default() };
    on_unloaded::<Ept<true>>((format, 40), |_, unloaded, cache| {
        let last = (1 << 52) - 4 * K;
        let other = Attributes { software: Software::A, ..RAM };
        for (at, hpa, attributes) in [(0, last, RAM), (4 * K, 0, other)] {
            unloaded.map(range(at, 4 * K), Hpa(hpa), attributes, PAGE, cache).unwrap();
        }
        let runs = unmap::<Ept<true>>(unloaded, range(0, 8 * K));
        assert_eq!(runs, [(0, 4 * K, last), (4 * K, 4 * K, 0)]);
    });
}
