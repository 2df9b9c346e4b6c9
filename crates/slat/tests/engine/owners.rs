//! Owners of addresses where nothing is mapped, by single calls; `handover` has histories of them.

use crate::common::hardware::Hardware;
use crate::common::hardware::arm::Arm;
use crate::common::hardware::power::Core;
use crate::common::stage::{K, M, RAM, holding, on_stage, range, refused, says};
use crate::common::{Event, TestPlatform};
use slat::format::arm64::Arm64K4;
use slat::format::ept::Ept1G;
use slat::format::power::PowerK64;
use slat::{
    BreakBeforeMake, Format, Gpa, Hpa, Owner, OwnerError, PageSize, TableCache, Tables, UnmapEntry,
    Vmid,
};

const PAGE: PageSize = PageSize::SIZE_4K;
const BLOCK: PageSize = PageSize::SIZE_2M;
const ONE: Option<Owner> = Owner::new(1);
const TWO: Option<Owner> = Owner::new(2);

#[test]
fn who_cannot_have_an_address_is_told_why() {
    on_stage::<Arm<12>>((Arm64K4::default(), 40, 8), |_, guard, cache| {
        let page = range(0, 4 * K);
        let reason = OwnerError::Owned { owner: None };
        let said = refused(guard.set_owner(page, ONE, TWO, cache), 0, reason);
        says(&said, &["no owner"]);
        guard.set_owner(page, None, ONE, cache).unwrap();
        let reason = OwnerError::Owned { owner: ONE };
        let said = refused(guard.set_owner(page, None, TWO, cache), 0, reason);
        says(&said, &["another owner", "0x1"]);
        guard.map(range(4 * K, 4 * K), Hpa(8 * K), RAM, PAGE, cache).unwrap();
        let reason = OwnerError::Occupied { size: PAGE, hpa: Hpa(8 * K) };
        let said = refused(guard.set_owner(range(0, 8 * K), ONE, TWO, cache), 4 * K, reason);
        says(&said, &["4k", "0x2000", "unmap"]);
    });
}

#[test]
fn an_entry_that_is_held_keeps_a_range_from_its_owner() {
    on_stage::<Arm<12>>((Arm64K4::default(), 40, 8), |tables, guard, cache| {
        guard.set_owner(range(0, 4 * K), None, ONE, cache).unwrap();
        let of = (Arm::<12>::of(tables), guard.platform());
        holding(
            of,
            [12 * K],
            |_| Arm::<12>::MARK,
            || {
                // The caller has to begin anew, as nothing is done.
                let done = guard.set_owner(range(0, 64 * K), None, ONE, cache);
                refused(done, 0, OwnerError::Contended);
                assert_eq!(guard.owner(Gpa(4 * K)), Ok(None));
            },
        );
    });
}

#[test]
fn an_owner_costs_the_tables_that_are_missing_and_one_entry() {
    fn costs<H: Hardware>(format: H::Format) {
        on_stage::<H>((format, 40, 8), |_, guard, cache| {
            let page = <H::Format as Format>::size(0).bytes();
            let root = guard.geometry().root_level;
            let up = u64::from(root);
            let below: u64 = (0..root).map(|at| <H::Format as Format>::entries(at) as u64).sum();
            let publishes = |platform: &TestPlatform| platform.take_events() == [Event::Publish];
            guard.platform().take_events();
            assert_eq!(guard.set_owner(range(0, page), None, ONE, cache), Ok(page));
            let first = guard.counts();
            assert_eq!((first.tables_built, first.entries_written), (up, below + up + 1));
            assert!(publishes(guard.platform()), "there are new tables");
            assert_eq!(guard.set_owner(range(page, page), None, ONE, cache), Ok(page));
            let second = guard.counts();
            // The range is checked, then walked again.
            assert_eq!(second.entries_read - first.entries_read, 2 * (up + 1));
            assert_eq!(second.entries_written - first.entries_written, 1);
            assert!(!publishes(guard.platform()), "nothing is there that hardware would use");
        });
    }
    costs::<Arm<12>>(Arm64K4::default());
    // A table of pages has fewer entries than the tables above it.
    costs::<Core<16, true>>(PowerK64 { output_bits: 48 });
}

#[test]
fn a_part_of_an_owners_range_passes_to_another_owner() {
    on_stage::<Arm<12>>((Arm64K4::default(), 40, 8), |_, guard, cache| {
        guard.set_owner(range(0, 2 * M), None, ONE, cache).unwrap();
        assert_eq!(guard.set_owner(range(4 * K, 4 * K), ONE, TWO, cache), Ok(4 * K));
        let owners = [0, 4 * K, 8 * K, 2 * M - 4 * K].map(|at| guard.owner(Gpa(at)).unwrap());
        assert_eq!(owners, [ONE, TWO, ONE, ONE]);
    });
}

#[test]
fn an_address_once_owned_is_invalidated_before_it_is_mapped() {
    on_stage::<Arm<12>>((Arm64K4::default(), 40, 8), |_, guard, cache| {
        let page = range(0, 4 * K);
        guard.map(range(0, 8 * K), Hpa(0), RAM, PAGE, cache).unwrap();
        let mut places = [UnmapEntry::EMPTY];
        let mut batch = guard.unmap_batch(&mut places);
        guard.unmap(page, &mut batch).unwrap();
        guard.set_owner(page, None, ONE, cache).unwrap();
        guard.set_owner(page, ONE, None, cache).unwrap();
        assert_eq!(guard.counts().invalidations, 0);
        guard.map(page, Hpa(2 * M), RAM, PAGE, cache).unwrap();
        assert_eq!(guard.counts().invalidations, 1, "the removal has not completed");
        batch.complete().for_each(drop);
    });
}

#[test]
fn a_table_replaces_a_removed_block_after_an_invalidation() {
    on_stage::<Arm<12>>((Arm64K4::default(), 40, 8), |_, guard, cache| {
        guard.map(range(0, 4 * M), Hpa(0), RAM, BLOCK, cache).unwrap();
        let mut places = [UnmapEntry::EMPTY];
        let mut batch = guard.unmap_batch(&mut places);
        guard.unmap(range(0, 2 * M), &mut batch).unwrap();
        assert_eq!(guard.counts().invalidations, 0);
        guard.set_owner(range(0, 4 * K), None, ONE, cache).unwrap();
        assert_eq!(guard.counts().invalidations, 1);
        batch.complete().for_each(drop);
    });
}

#[test]
fn without_breaks_a_released_owner_leaves_its_address_empty() {
    let platform = TestPlatform::new(BreakBeforeMake::Never);
    let mut tables = Tables::new(Ept1G::default(), Vmid(1), 40, &platform).unwrap();
    let mut storage = [const { None }; 4];
    let mut cache = TableCache::new(&platform, &mut storage);
    cache.fill(4).unwrap();
    let mut guard = tables.enter_mut();
    let page = range(0, 4 * K);
    guard.set_owner(page, None, ONE, &mut cache).unwrap();
    guard.set_owner(page, ONE, None, &mut cache).unwrap();
    assert_eq!(guard.descriptor(Gpa(0)), Some((0, PAGE)));
    drop((guard, cache));
    crate::common::destroy(tables);
}
