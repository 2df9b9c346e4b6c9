//! What the engine's documentation promises its caller, each as a test: closures that panic, refusals
//! that do nothing, and what is reported beside another thread.

use crate::common::stage::{K, M, RAM, range};
use crate::common::world::VMID;
use crate::common::{Event, TestPlatform, destroy};
use slat::format::arm64::Arm64K4;
use slat::format::ept::Ept1G;
use slat::{
    Access, Attributes, BreakBeforeMake, ChangeError, Execute, Frame, Gpa, Grace, Halted, Hpa,
    Inactive, Invalidation, Member, PageSize, Place, Platform, Seat, Slot, Software, TableCache,
    Tables, Vmid,
};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;

const PAGE: PageSize = PageSize::SIZE_4K;
const BLOCK: PageSize = PageSize::SIZE_2M;

fn always() -> TestPlatform {
    TestPlatform::new(BreakBeforeMake::Always)
}

/// A cache with eight table pages, in storage that outlives it.
macro_rules! cache {
    ($cache:ident, $platform:expr) => {
        let mut storage = [const { None }; 8];
        let mut $cache = TableCache::new($platform, &mut storage);
        $cache.fill(8).unwrap();
    };
}

#[test]
fn a_panic_of_the_closure_that_is_told_what_was_unmapped_leaves_whole_tables() {
    let platform = always();
    for panic_at in 0..4 {
        cache!(cache, &platform);
        let mut tables = Inactive::new(Arm64K4::default(), VMID, 40, &platform).unwrap();
        // Runs that end inside a table, with one, and with the range.
        let runs = [
            (range(0, 2 * M + 8 * K), 1 << 32),
            (range(2 * M + 12 * K, 2 * M), 2 << 32),
            (range(6 * M, 2 * M), 3 << 32),
        ];
        for (run, hpa) in runs {
            assert_eq!(tables.map(run, Hpa(hpa), RAM, PAGE, &mut cache), Ok(run.size()));
        }
        let mut told = Vec::new();
        let result = catch_unwind(AssertUnwindSafe(|| {
            tables.unmap(range(0, 1 << 30), |removed| {
                told.push(removed);
                assert!(told.len() <= panic_at, "the closure's own panic");
            })
        }));
        assert_eq!(result.is_ok(), panic_at >= runs.len());
        // What it was told of is unmapped, and nothing else: a repeated call tells the rest.
        let behind = told.last().map_or(0, |last| last.gpa.0 + last.bytes);
        let leaves: Vec<_> = tables.guard().leaves(range(0, 1 << 30)).unwrap().flatten().collect();
        let kept: u64 = leaves.iter().map(|leaf| leaf.size.bytes()).sum();
        assert!(leaves.iter().all(|leaf| leaf.gpa.0 >= behind));
        let all: u64 = runs.iter().map(|(run, _)| run.size()).sum();
        assert_eq!(kept + told.iter().map(|run| run.bytes).sum::<u64>(), all);
        assert_eq!(tables.unmap(range(0, 1 << 30), |removed| told.push(removed)), Ok(kept));
        let seen: Vec<_> = told.iter().map(|run| (run.gpa.0, run.bytes)).collect();
        let wanted: Vec<_> = runs.iter().map(|(run, _)| (run.start().0, run.size())).collect();
        assert_eq!(seen, wanted);
        tables.destroy();
        drop(cache);
        assert_eq!(platform.live(), 0, "no frame is lost or given back twice");
    }
}

#[test]
fn a_panic_of_the_closure_that_chooses_blocks_holds_no_leaf() {
    let platform = always();
    cache!(cache, &platform);
    let tables = Tables::new(Arm64K4::default(), VMID, 40, &platform).unwrap();
    let mut member = platform.join();
    let mut guard = tables.enter(&mut member).unwrap();
    let block = range(0, 2 * M);
    guard.map(block, Hpa(1 << 32), RAM, PAGE, &mut cache).unwrap();
    let panics = || guard.collapse_where(block, BLOCK, |_| panic!("the closure's own"));
    assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
    let mut places = [Place::EMPTY; 4];
    let mut removals = guard.removals(&mut places);
    assert_eq!(guard.unmap(range(0, 4 * K), &mut removals), Ok(4 * K));
    drop((removals, guard));
    drop((cache, member));
    destroy(tables);
}
