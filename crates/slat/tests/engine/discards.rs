//! Discards and maps of an address space with one owner, by what is invalidated and what is left.

use crate::common::TestPlatform;
use crate::common::stage::{G, K, M, RAM, on_space, range};
use slat::format::arm64::Arm64K4;
use slat::format::ept::Ept2M;
use slat::{BreakBeforeMake, Gpa, GpaRange, Hpa, MapError, PageSize, SpaceError, TableCache};

const PAGE: PageSize = PageSize::SIZE_4K;
const BLOCK: PageSize = PageSize::SIZE_2M;

/// Returns what was invalidated since the last call, and whether walk caches were, too.
fn invalidated(platform: &TestPlatform) -> Vec<(Option<GpaRange>, bool)> {
    platform.take_invalidations().iter().map(|what| (what.range, what.tables)).collect()
}

#[test]
fn whole_tables_of_a_discard_are_invalidated_apart_from_pages() {
    on_space(BreakBeforeMake::Always, Arm64K4::default(), |platform, space| {
        let all = range(2 * M, 4 * M + 8 * K);
        space.map(all, Hpa(2 * M), RAM, PAGE).unwrap();
        platform.take_events();
        space.discard(range(2 * M, 4 * M + 4 * K)).unwrap();
        let (tables, page) = (range(2 * M, 4 * M), range(6 * M, 4 * K));
        assert_eq!(invalidated(platform), [(Some(tables), true), (Some(page), false)]);
        assert_eq!(platform.live(), 3, "the root, and the tables of the page that is left");
        let there = [2 * M, 6 * M, 6 * M + 4 * K].map(|at| space.query(Gpa(at)).is_some());
        assert_eq!(there, [false, false, true]);
    });
}

#[test]
fn an_empty_table_beside_a_discard_stays() {
    on_space(BreakBeforeMake::Always, Arm64K4::default(), |platform, space| {
        {
            let mut storage = [const { None }; 4];
            let mut cache = TableCache::new(platform, &mut storage);
            cache.fill(4).unwrap();
            let mut guard = space.enter();
            let reserved = guard.reserve(Gpa(G), BLOCK, &mut cache).unwrap();
            assert_eq!(reserved.range(), range(G, 2 * M));
        }
        space.map(range(0, 2 * M), Hpa(0), RAM, PAGE).unwrap();
        assert_eq!(platform.live(), 4, "the root, a table on either side of 1g, one of pages");
        platform.take_events();
        space.discard(range(0, G)).unwrap();
        assert_eq!(invalidated(platform), [(Some(range(0, G)), true)]);
        assert_eq!(platform.live(), 2);
    });
}

#[test]
fn a_block_next_to_what_is_discarded_stays() {
    on_space(BreakBeforeMake::Always, Ept2M::default(), |platform, space| {
        space.map(range(0, 2 * M), Hpa(0), RAM, PAGE).unwrap();
        space.map(range(4 * M, 2 * M), Hpa(4 * M), RAM, BLOCK).unwrap();
        space.discard(range(0, 2 * M)).unwrap();
        assert_eq!(space.query(Gpa(4 * M)).map(|found| found.size), Some(BLOCK));
        assert_eq!(platform.live(), 3, "the root, and two tables above the block");
    });
}

#[test]
fn several_pages_after_one_in_a_table_are_mapped_as_pages() {
    on_space(BreakBeforeMake::Always, Arm64K4::default(), |_, space| {
        space.map(range(0, 4 * K), Hpa(0), RAM, PAGE).unwrap();
        space.map(range(4 * K, 8 * K), Hpa(4 * K), RAM, PAGE).unwrap();
        for page in 0..3 {
            let found = space.query(Gpa(page * 4 * K)).map(|found| found.hpa);
            assert_eq!(found, Some(Hpa(page * 4 * K)));
        }
    });
}

#[test]
fn a_range_of_no_whole_page_is_refused_beside_the_last_page() {
    on_space(BreakBeforeMake::Always, Arm64K4::default(), |_, space| {
        let hpa = Hpa(8 * K);
        space.map(range(4 * K, 4 * K), hpa, RAM, PAGE).unwrap();
        let mut refused = |at, hpa, largest| {
            let reason = space.map(range(at, 4 * K), hpa, RAM, largest).unwrap_err().reason;
            assert_eq!(space.query(Gpa(0)), None);
            reason
        };
        for at in [1, 2, 0x800, 0xfff] {
            let reason = refused(at, hpa, PAGE);
            assert!(matches!(reason, SpaceError::Map(MapError::Range(_))), "{at:#x}: {reason}");
        }
        let reason = refused(0, Hpa(1), PAGE);
        assert!(matches!(reason, SpaceError::Map(MapError::HostAddress { .. })), "{reason}");
        let reason = refused(0, hpa, PageSize::from_bytes(16 * K).unwrap());
        assert!(matches!(reason, SpaceError::Map(MapError::LeafSize(_))), "{reason}");
    });
}
