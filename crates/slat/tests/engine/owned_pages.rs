//! Pages that an owner maps and unmaps one by one, without a walk: where the walk is still needed.

use crate::common::stage::{K, M, RAM, on_space, range};
use crate::common::{Event, TestPlatform};
use slat::format::arm64::Arm64K4;
use slat::{
    AddressSpace, Attributes, BreakBeforeMake, Gpa, Hpa, MapError, Owner, PageSize, RangeError,
    SpaceError, TableCache, UnmapEntry, UnmapError, Vmid,
};

type Space<'p> = AddressSpace<'p, Arm64K4, TestPlatform>;

const PAGE: PageSize = PageSize::SIZE_4K;

/// Calls `test` with a space where the first four pages are mapped, to the same addresses.
fn with_pages(test: impl FnOnce(&TestPlatform, &mut Space<'_>)) {
    with_pages_on(BreakBeforeMake::Always, test);
}

fn with_pages_on(breaks: BreakBeforeMake, test: impl FnOnce(&TestPlatform, &mut Space<'_>)) {
    on_space(breaks, Arm64K4::default(), |platform, space| {
        map_from(space, 0);
        test(platform, space);
    });
}

/// Maps four pages from `first` on.
fn map_from(space: &mut Space<'_>, first: u64) {
    for page in first..first + 4 {
        let at = page * 4 * K;
        space.map(range(at, 4 * K), Hpa(at), RAM, PAGE).unwrap();
    }
}

fn unmap(space: &mut Space<'_>, page: u64) -> Option<Hpa> {
    let mut found = None;
    let bytes = space.unmap(range(page * 4 * K, 4 * K), |run| found = Some(run.hpa)).unwrap();
    assert_eq!(bytes, if found.is_some() { 4 * K } else { 0 });
    found
}

#[test]
fn an_empty_page_next_to_others_is_unmapped_without_effect() {
    with_pages(|platform, space| {
        assert_eq!(unmap(space, 1), Some(Hpa(4 * K)));
        platform.take_events();
        assert_eq!(unmap(space, 1), None);
        assert_eq!(platform.take_invalidations(), []);
    });
}

#[test]
fn a_page_is_unmapped_with_one_invalidation_of_its_size() {
    with_pages(|platform, space| {
        platform.take_events();
        assert_eq!(unmap(space, 2), Some(Hpa(8 * K)));
        let whats = platform.take_invalidations();
        let [what] = whats[..] else { panic!("one invalidation: {whats:?}") };
        assert_eq!((what.vmid, what.range), (Vmid(3), Some(range(8 * K, 4 * K))));
        assert_eq!((what.leaf, what.tables), (Some(PAGE), false));
    });
}

#[test]
fn a_range_of_a_pages_size_that_is_not_aligned_is_refused() {
    with_pages(|_, space| {
        let odd = range(4 * K + 2 * K, 4 * K);
        let reason = RangeError::Unaligned { range: odd, page: 4 * K };
        let refused = space.unmap(odd, |_| unreachable!()).unwrap_err().reason;
        assert_eq!(refused, SpaceError::Unmap(UnmapError::Range(reason)));
        assert!((0..4).all(|page| space.query(Gpa(page * 4 * K)).is_some()));
    });
}

#[test]
fn an_owners_page_next_to_others_keeps_its_owner() {
    with_pages(|platform, space| {
        let owner = Owner::new(7).unwrap();
        let mut storage = [const { None }; 1];
        let mut cache = TableCache::new(platform, &mut storage);
        let page = range(16 * K, 4 * K);
        space.enter().set_owner(page, None, Some(owner), &mut cache).unwrap();
        map_from(space, 5);
        assert_eq!(unmap(space, 4), None);
        let reason = space.map(page, Hpa(0), RAM, PAGE).unwrap_err().reason;
        assert_eq!(reason, SpaceError::Map(MapError::Owned { owner }));
        assert_eq!(space.enter().owner(page.start()), Ok(Some(owner)));
    });
}

#[test]
fn a_mapped_page_next_to_others_is_not_mapped_over() {
    with_pages(|_, space| {
        let page = range(4 * K, 4 * K);
        let reason = space.map(page, Hpa(0), RAM, PAGE).unwrap_err().reason;
        let hpa = Hpa(4 * K);
        assert_eq!(reason, SpaceError::Map(MapError::Occupied { size: PAGE, hpa }));
        assert_eq!(space.map(page, hpa, RAM, PAGE), Ok(()));
        assert_eq!(space.query(page.start()).unwrap().hpa, hpa);
    });
}

#[test]
fn a_member_of_a_group_is_unfolded_before_it_is_unmapped() {
    with_pages(|platform, space| {
        let mut storage = [const { None }; 1];
        let mut cache = TableCache::new(platform, &mut storage);
        let group = range(64 * K, 64 * K);
        space.enter().map_contiguous(group, Hpa(64 * K), RAM, PAGE, &mut cache).unwrap();
        map_from(space, 4);
        assert_eq!(space.query(group.start()).unwrap().size.bytes(), 64 * K);
        assert_eq!(unmap(space, 20), Some(Hpa(80 * K)));
        assert_eq!(space.query(group.start()).unwrap().size, PAGE);
    });
}

#[test]
fn a_guards_dropped_obligation_is_covered_by_the_next_unmap() {
    let all = |event: &Event| matches!(event, Event::Invalidate(what) if what.range.is_none());
    for removes in [false, true] {
        with_pages_on(BreakBeforeMake::Never, |platform, space| {
            let block = range(2 * M, 2 * M);
            space.map(block, Hpa(2 * M), RAM, PageSize::SIZE_2M).unwrap();
            let mut places = [UnmapEntry::EMPTY];
            let mut storage = [const { None }; 1];
            let mut cache = TableCache::new(platform, &mut storage);
            cache.fill(1).unwrap();
            let mut guard = space.enter();
            if removes {
                let mut batch = guard.unmap_batch(&mut places);
                guard.unmap(range(0, 4 * K), &mut batch).unwrap();
                drop(batch);
            } else {
                guard.split(block, PAGE, &mut cache).unwrap();
            }
            drop((guard, cache));
            map_from(space, 4);
            platform.take_events();
            assert_eq!(unmap(space, 5), Some(Hpa(20 * K)));
            assert!(platform.take_events().iter().any(all), "removals: {removes}");
        });
    }
}

#[test]
fn a_page_that_is_unmapped_beside_a_forgotten_clean_is_dirty() {
    with_pages(|_, space| {
        let mut guard = space.enter();
        guard.clean(range(0, 4 * K)).unwrap();
        std::mem::forget(guard);
        let clean = Attributes { write: false, dirty: false, ..RAM };
        for at in [16 * K, 20 * K] {
            space.map(range(at, 4 * K), Hpa(at), clean, PAGE).unwrap();
        }
        let mut dirty = false;
        space.unmap(range(20 * K, 4 * K), |page| dirty = page.attributes.dirty).unwrap();
        assert!(dirty);
    });
}
