//! Promises of the engine's documentation to its caller, each as a test: closures that panic,
//! refusals that do nothing, and reports while another thread works.

use crate::common::hardware::arm::Arm;
use crate::common::stage::{K, M, RAM, on_stage, range};
use crate::common::world::VMID;
use crate::common::{TestPlatform, destroy};
use slat::format::arm64::Arm64K4;
use slat::{
    BreakBeforeMake, Frame, Gpa, Hpa, Invalidation, PageSize, Platform, Pte, Reader, ReaderSlot,
    Readers, TableCache, Tables, UnloadedTables, UnmapEntry, Vmid,
};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;

const PAGE: PageSize = PageSize::SIZE_4K;
const BLOCK: PageSize = PageSize::SIZE_2M;

/// A format whose CPUs mark written pages dirty by themselves.
fn hardware_dirty() -> Arm64K4 {
    Arm64K4 { hardware_dirty: true, ..Default::default() }
}

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
fn a_panic_in_the_unmap_callback_leaves_intact_tables() {
    let platform = always();
    for panic_at in 0..4 {
        cache!(cache, &platform);
        let mut tables = UnloadedTables::new(Arm64K4::default(), VMID, 40, &platform).unwrap();
        // Runs that end inside a table, with a table, and with the range.
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
        // Exactly the runs that the closure was given are unmapped: a repeated call hands out the
        // rest.
        let behind = told.last().map_or(0, |last| last.gpa.0 + last.bytes);
        let leaves: Vec<_> =
            tables.enter_mut().leaves(range(0, 1 << 30)).unwrap().flatten().collect();
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
    on_stage::<Arm<12>>((Arm64K4::default(), 40, 8), |_, guard, cache| {
        let block = range(0, 2 * M);
        guard.map(block, Hpa(1 << 32), RAM, PAGE, cache).unwrap();
        let panics = || guard.collapse_where(block, BLOCK, |_| panic!("the closure's own"));
        assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
        let mut places = [UnmapEntry::EMPTY; 4];
        let mut batch = guard.unmap_batch(&mut places);
        assert_eq!(guard.unmap(range(0, 4 * K), &mut batch), Ok(4 * K));
    });
}

#[test]
fn a_grace_period_ends_when_all_threads_inside_have_left() {
    let platform = always();
    let tables = Tables::new(Arm64K4::default(), VMID, 40, &platform).unwrap();
    let (mut first, mut second) = (platform.register(), platform.register());
    let readers = platform.readers();
    assert!(readers.has_elapsed(readers.begin_grace_period()), "nobody was inside");
    let guard = tables.enter(&mut first).unwrap();
    let period = readers.begin_grace_period();
    assert!(!readers.has_elapsed(period));
    let late = tables.enter(&mut second).unwrap();
    drop(guard);
    assert!(readers.has_elapsed(period), "who entered later does not count");
    drop(late);
    drop((first, second));
    destroy(tables);
}

#[test]
fn a_clean_of_inactive_tables_is_not_under_way_once_active() {
    let platform = always();
    cache!(cache, &platform);
    let mut unloaded = UnloadedTables::new(hardware_dirty(), VMID, 40, &platform).unwrap();
    let page = range(0, 4 * K);
    assert_eq!(unloaded.map(page, Hpa(1 << 32), RAM, PAGE, &mut cache), Ok(4 * K));
    assert_eq!(unloaded.enter_mut().clean(page), Ok(4 * K));
    let tables = unloaded.activate();
    let mut reader = platform.register();
    let mut guard = tables.enter(&mut reader).unwrap();
    let removed = crate::common::unmap(&mut guard, page);
    assert_eq!(removed.iter().map(|run| run.attributes.dirty).collect::<Vec<_>>(), [false]);
    drop(guard);
    drop((cache, reader));
    destroy(tables);
}

#[test]
fn tables_that_are_emptied_page_by_page_make_room_for_a_block() {
    for alone in [false, true] {
        let platform = always();
        cache!(cache, &platform);
        let mut tables = UnloadedTables::new(Arm64K4::default(), VMID, 40, &platform).unwrap();
        tables.map(range(0, 2 * M), Hpa(1 << 32), RAM, PAGE, &mut cache).unwrap();
        let with_tables = platform.live();
        let pages = (0..512).map(|page| range((page * 173 % 512) * 4 * K, 4 * K));
        let tables = if alone {
            pages.for_each(|page| assert_eq!(tables.unmap(page, |_| {}), Ok(4 * K)));
            assert_eq!(platform.live(), with_tables - 2, "the table, and the one above it");
            tables.activate()
        } else {
            let tables = tables.activate();
            let mut reader = platform.register();
            let mut guard = tables.enter(&mut reader).unwrap();
            pages.for_each(|page| assert_eq!(crate::common::unmap(&mut guard, page).len(), 1));
            drop(guard);
            assert_eq!((tables.reclaim(), platform.live()), (2, with_tables - 2));
            tables
        };
        let mut reader = platform.register();
        let mut guard = tables.enter(&mut reader).unwrap();
        cache.fill(8).unwrap();
        guard.map(range(0, 2 * M), Hpa(1 << 32), RAM, BLOCK, &mut cache).unwrap();
        assert_eq!(guard.translate(Gpa(0)).unwrap().unwrap().size, BLOCK);
        drop(guard);
        drop((cache, reader));
        destroy(tables);
    }
}

/// A platform without state.
struct Unit;
static READERS: Readers<[ReaderSlot; 4]> = Readers::new([const { ReaderSlot::new() }; 4]);

// SAFETY: 1. to 3. frames are the allocator's, never given back, and no CPU walks them; 4. the
// readers are a static; 5. `fill` is the engine's; 6. nothing unwinds.
unsafe impl Platform for Unit {
    fn allocate(&self, bytes: usize) -> Option<Frame> {
        let layout = std::alloc::Layout::from_size_align(bytes, bytes).ok()?;
        // SAFETY: the size is not 0; the frame is new, and reached by its own address.
        unsafe { Frame::from_hpa(Hpa(std::alloc::alloc_zeroed(layout) as u64)) }
    }

    unsafe fn free(&self, _: Frame, _: usize) {}

    fn entries(&self, table: Hpa) -> NonNull<Pte> {
        NonNull::new(table.0 as *mut Pte).unwrap()
    }

    fn publish(&self) {}

    fn invalidate(&self, _: &Invalidation) {}

    fn break_before_make(&self) -> BreakBeforeMake {
        BreakBeforeMake::Always
    }

    fn readers(&self) -> &Readers {
        &READERS
    }
}

#[test]
fn a_platform_without_state_is_one_wherever_it_lies() {
    let boxed = Box::new((0_u8, Unit));
    let here = (0_u64, Unit);
    let tables = Tables::new(Arm64K4::default(), Vmid(1), 40, &boxed.1).unwrap();
    let mut reader = Reader::register(&here.1).unwrap();
    let mut storage = [const { None }; 4];
    let mut cache = TableCache::new(&here.1, &mut storage);
    cache.fill(4).unwrap();
    let mut guard = tables.enter(&mut reader).expect("the same platform");
    let page = range(0, 4 * K);
    assert_eq!(guard.map(page, Hpa(1 << 32), RAM, PAGE, &mut cache), Ok(4 * K));
}
