//! What a hypervisor needs that waits for threads by its own read-copy-update, flushes later by
//! itself, and has a cache of table pages.

use crate::common::hardware::Hardware;
use crate::common::hardware::arm::Arm;
use crate::common::stage::{CLEAN, M, RAM, on_stage, range};
use crate::common::{TestPlatform, unmap};
use slat::format::arm64::Arm64K4;
use slat::{
    Access, Accesses, Attributes, BreakBeforeMake, Execute, Frame, Gpa, Hpa, PageSize, Platform,
    RetiredTables, SplitError, TableCache, Tables, UnmapEntry, Vmid,
};

const PAGE: PageSize = PageSize::SIZE_4K;
const BLOCK: PageSize = PageSize::SIZE_2M;

/// A source whose test has one thread.
struct Alone<S>(S);

// SAFETY: the value stays on the test's only thread.
unsafe impl<S> Send for Alone<S> {}

impl<S: FnMut() -> Option<Frame>> Alone<S> {
    fn call(&mut self) -> Option<Frame> {
        (self.0)()
    }
}

/// A page of a hypervisor's own cache: zeroed.
fn page(platform: &TestPlatform) -> Option<Frame> {
    let frame = platform.allocate(4096)?;
    let words = platform.table(frame.hpa().0, 512);
    words.iter().for_each(|word| word.store(0, std::sync::atomic::Ordering::Relaxed));
    Some(frame)
}

fn a_leaf_of_any_size_gets_all_rights_in_one_change<H: Hardware>() {
    let less = Attributes { write: false, execute: Execute::None, dirty: false, ..RAM };
    for (size, written) in [(PAGE, 1), (BLOCK, 1)] {
        on_stage::<H>((H::usual(), 40, 8), |_, guard, cache| {
            guard.map(range(0, size.bytes()), Hpa(0), less, size, cache).unwrap();
            let before = guard.counts();
            let all = Accesses::from(Access::Write).with(Access::Execute);
            let given = guard.relax_leaf(Gpa(0x123), all).unwrap().expect("a leaf is there");
            assert_eq!(given.flush_local(), size.bytes());
            assert_eq!(guard.counts().entries_written - before.entries_written, written);
            let found = guard.translate(Gpa(0)).unwrap().unwrap();
            assert_eq!(found.size, size);
            assert!(found.attributes.write && found.attributes.execute != Execute::None);
            // A leaf that has the rights is there as well.
            let again = guard.relax_leaf(Gpa(0), all).unwrap().expect("a leaf is there");
            assert_eq!(again.not_needed_here(), 0);
            assert!(guard.relax_leaf(Gpa(4 * M), all).unwrap().is_none());
            assert!(guard.relax_leaf(Gpa(u64::MAX), all).is_err());
            assert_eq!(guard.pending_invalidation(), None);
        });
    }
}
on!(a_leaf_of_any_size_gets_all_rights_in_one_change; npt, ept_2m);

#[test]
fn an_access_that_is_not_asked_for_gives_no_right() {
    assert_eq!(Accesses::NONE.iter().count(), 0);
    on_stage::<Arm<12>>((Arm::usual(), 40, 8), |_, guard, cache| {
        let less = Attributes { write: false, execute: Execute::None, ..CLEAN };
        guard.map(range(0, 4096), Hpa(0), less, PAGE, cache).unwrap();
        guard.relax_leaf(Gpa(0), Access::Read.into()).unwrap().unwrap().not_needed_here();
        let found = guard.translate(Gpa(0)).unwrap().unwrap().attributes;
        assert_eq!(found, Attributes { accessed: true, ..less });
    });
}

fn an_invalidation_handed_over_is_not_executed_again<H: Hardware>() {
    on_stage::<H>((H::usual(), 40, 8), |tables, guard, cache| {
        guard.map(range(0, 2 * M), Hpa(0), RAM, PAGE, cache).unwrap();
        guard.write_protect(range(0x4000, 0x8000)).unwrap();
        guard.platform().take_events();
        // SAFETY: no CPU has the tables loaded.
        let what = unsafe { guard.hand_over() }.expect("rights were taken");
        assert_eq!(what.range, Some(range(0x4000, 0x8000)));
        assert_eq!(guard.pending_invalidation(), None);
        guard.invalidate();
        tables.reclaim();
        assert_eq!(guard.platform().take_invalidations(), []);
    });
}
on!(an_invalidation_handed_over_is_not_executed_again);

fn retired_tables_are_the_callers_to_give_back<H: Hardware>() {
    on_stage::<H>((H::usual(), 40, 8), |tables, guard, cache| {
        let platform = guard.platform();
        guard.map(range(0, 4 * M), Hpa(0), RAM, PAGE, cache).unwrap();
        assert!(!tables.has_retired() && tables.take_retired().is_empty());
        assert!(!unmap(guard, range(0, 2 * M)).is_empty());
        let live = platform.live();
        assert!(tables.has_retired());
        let taken = tables.take_retired();
        assert!(!taken.is_empty() && !tables.has_retired());
        // No other way gives them back meanwhile.
        guard.refresh();
        assert_eq!((tables.reclaim(), platform.live()), (0, live));
        // SAFETY: the words are those of the line before; no thread is inside but the guard, which
        // has no reference to a table.
        let freed = unsafe {
            let words = taken.into_words();
            RetiredTables::<H::Format>::from_words(words).free(platform)
        };
        assert_eq!((freed, platform.live()), (1, live - 1));
        // Hardware may still walk what a removal that was dropped has unlinked.
        let mut places = [const { UnmapEntry::EMPTY }; 1];
        let mut batch = guard.unmap_batch(&mut places);
        guard.unmap(range(2 * M, 2 * M), &mut batch).unwrap();
        drop(batch);
        platform.take_events();
        let taken = tables.take_retired();
        assert!(platform.take_invalidations().iter().any(|what| what.range.is_none()));
        let live = platform.live();
        // SAFETY: as above.
        let freed = unsafe { taken.free(platform) };
        assert!(freed != 0 && platform.live() == live - freed);
    });
}
on!(retired_tables_are_the_callers_to_give_back; npt, ept_2m);

#[test]
fn a_source_is_asked_when_a_table_is_needed_and_not_before() {
    let platform = TestPlatform::new(BreakBeforeMake::Always);
    let tables = Tables::new(Arm64K4::default(), Vmid(1), 40, &platform).unwrap();
    let asked = std::cell::Cell::new(0);
    let most = std::cell::Cell::new(usize::MAX);
    let mut alone = Alone(|| {
        most.set(most.get().checked_sub(1)?);
        asked.set(asked.get() + 1);
        page(&platform)
    });
    let mut source = move || alone.call();
    let mut storage = [const { None }; 4];
    {
        // SAFETY: the pages are as `allocate` returns them, and zeroed.
        let mut cache = unsafe { TableCache::asking(&platform, &mut storage, &mut source) };
        let mut reader = platform.register();
        let mut guard = tables.enter(&mut reader).unwrap();
        let entry = guard.reserve(Gpa(0x1000), PAGE, &mut cache).unwrap();
        entry.commit(Hpa(0x1000), RAM).unwrap().unwrap();
        assert_eq!(asked.get(), 2);
        let entry = guard.reserve(Gpa(0x2000), PAGE, &mut cache).unwrap();
        entry.commit(Hpa(0x2000), RAM).unwrap().unwrap();
        assert_eq!(asked.get(), 2, "the table was there");
        for block in 1..9 {
            let entry = guard.reserve(Gpa(block * 2 * M), BLOCK, &mut cache).unwrap();
            entry.commit(Hpa(block * 2 * M), RAM).unwrap().unwrap();
        }
        // No more blocks wait for their link than the storage has places.
        guard.split_together(range(2 * M, 8 * M), PAGE, &mut cache, 4).unwrap();
        assert_eq!(asked.get(), 6);
        most.set(1);
        let stopped = guard.split_together(range(10 * M, 8 * M), PAGE, &mut cache, 4).unwrap_err();
        assert_eq!((stopped.at, stopped.reason), (Gpa(12 * M), SplitError::CacheEmpty));
    }
    assert_eq!(asked.get(), 7);
    crate::common::destroy(tables);
    assert_eq!(platform.live(), 0);
}

#[test]
fn tables_that_end_by_pieces_end_whole() {
    let platform = TestPlatform::new(BreakBeforeMake::Always);
    let tables = Tables::new(Arm64K4::default(), Vmid(1), 40, &platform).unwrap();
    let mut storage = [const { None }; 40];
    let mut reader = platform.register();
    let mut cache = TableCache::new(&platform, &mut storage);
    cache.fill(40).unwrap();
    let mut guard = tables.enter(&mut reader).unwrap();
    guard.map(range(0, 64 * M), Hpa(0), RAM, PAGE, &mut cache).unwrap();
    drop((guard, cache));
    // SAFETY: no CPU has them loaded.
    let mut tables = unsafe { tables.deactivate() };
    let mut left = platform.live();
    while !tables.destroy_some(5) {
        assert_eq!(platform.live(), left - 5);
        left -= 5;
    }
    assert_eq!(platform.live(), 1, "the root");
    // What is left is empty, and in order.
    assert_eq!(tables.enter_mut().translate(Gpa(0)).unwrap(), None);
    tables.destroy();
    assert_eq!(platform.live(), 0);
}
