//! An address space with one owner, on every format, compared with a map of pages.

use crate::common::TestPlatform;
use crate::common::flat::Flat;
use crate::common::stage::{K, M, RAM, on_space, range};
use crate::common::world::covers;
use proptest::prelude::*;
use slat::format::arm64::Arm64K4;
use slat::format::ept::Ept1G;
use slat::{
    AddressSpace, AgeBitmaps, AgeOptions, AnyAddressSpace, Attributes, BreakBeforeMake,
    ChangeError, Contention, Execute, Format, Gpa, GpaRange, Hpa, Interruption, MapError, Memory,
    Owner, PageSize, Rights, Software, SpaceError, TableBits, TableCache, UnmapEntry, UnmapError,
    Vmid,
};
use std::sync::atomic::Ordering::SeqCst;

type Any<'p> = AnyAddressSpace<'p, TestPlatform>;

/// The guest memory of the histories, around the end of a table of tables.
const WINDOW: u64 = 12 * M;
const BASE: u64 = (1 << 30) - WINDOW / 2;

#[derive(Clone, Copy, Debug)]
enum Op {
    Map { at: u64, pages: u64, odd: bool, attributes: Attributes, largest: PageSize },
    MapEach { at: u64, pages: u64, attributes: Attributes },
    Protect { at: u64, pages: u64, rights: Rights },
    Unmap { at: u64, pages: u64 },
    UnmapLeaf { at: u64 },
    Discard { at: u64, pages: u64 },
}

fn rights() -> impl Strategy<Value = Rights> {
    let execute = prop_oneof![Just(Execute::None), Just(Execute::All)];
    (any::<bool>(), execute).prop_map(|(write, execute)| Rights { read: true, write, execute })
}

fn op() -> impl Strategy<Value = Op> {
    // In units of 16K: every format's page is a multiple or a part of it.
    let all = WINDOW / (16 * K);
    let at = prop_oneof![Just(0), Just(128), Just(256), 0..all];
    let pages = prop_oneof![2 => Just(128_u64), 1 => Just(384), 2 => 1..300_u64, 1 => Just(1)];
    let span = (at.clone(), pages)
        .prop_map(move |(at, pages)| (BASE + at * 16 * K, pages.min(all - at) * 16 * K));
    let memory = prop_oneof![4 => Just(Memory::Normal), 1 => Just(Memory::Device)];
    let largest =
        prop_oneof![3 => Just(PageSize::SIZE_1G), 1 => Just(PageSize::from_bytes(16 * K).unwrap())];
    prop_oneof![
        4 => (span.clone(), prop::bool::weighted(0.2), rights(), memory, largest).prop_map(
            |((at, pages), odd, Rights { read, write, execute }, memory, largest)| Op::Map {
                at, pages, odd, largest,
                attributes: Attributes { read, write, execute, memory, ..RAM },
            }
        ),
        2 => (span.clone(), rights()).prop_map(
            |((at, pages), Rights { read, write, execute })| Op::MapEach {
                at, pages, attributes: Attributes { read, write, execute, ..RAM }
            }
        ),
        2 => (span.clone(), rights()).prop_map(|((at, pages), rights)| Op::Protect {
            at, pages, rights
        }),
        2 => span.clone().prop_map(|(at, pages)| Op::Unmap { at, pages }),
        1 => span.prop_map(|(at, pages)| Op::Discard { at, pages }),
        1 => at.prop_map(|at| Op::UnmapLeaf { at: BASE + at * 16 * K }),
    ]
}

/// Runs the same history on each format.
fn play(platform: &TestPlatform, mut space: Any<'_>, sizes: &[u64], ops: &[Op]) {
    let page = sizes[0];
    let mut model = Flat::default();
    let pages = |at: u64, bytes: u64| (at..at + bytes).step_by(page as usize);
    for op in ops {
        platform.take_events();
        let before = model.clone();
        match *op {
            Op::Map { at, pages: bytes, odd, attributes, largest } => {
                let largest = *sizes.iter().rev().find(|size| **size <= largest.bytes()).unwrap();
                let hpa = at + (1 << 32) + if odd { page } else { 0 };
                let leaf = |gpa: u64| (hpa + (gpa - at), attributes);
                let occupied = pages(at, bytes)
                    .any(|gpa| model.at(gpa).is_some_and(|found| found != leaf(gpa)));
                let largest = PageSize::from_bytes(largest).unwrap();
                match space.map(range(at, bytes), Hpa(hpa), attributes, largest) {
                    Ok(()) => {
                        assert!(!occupied);
                        model.map(at, at + bytes, hpa, attributes);
                    }
                    Err(Interruption {
                        reason: SpaceError::Map(MapError::Occupied { .. }),
                        ..
                    }) => {
                        assert!(occupied)
                    }
                    Err(stopped) => panic!("{stopped}"),
                }
            }
            Op::MapEach { at, pages: bytes, attributes } => {
                for gpa in pages(at, bytes) {
                    let leaf = (gpa + (1 << 32), attributes);
                    let size = PageSize::from_bytes(page).unwrap();
                    let mapped = space.map(range(gpa, page), Hpa(leaf.0), attributes, size);
                    model.map(gpa, gpa + page, leaf.0, attributes);
                    let there = model.at(gpa).unwrap();
                    match mapped {
                        Ok(()) => assert_eq!(there, leaf),
                        Err(stopped) => {
                            let occupied = SpaceError::Map(MapError::Occupied {
                                size: space.query(Gpa(gpa)).unwrap().size,
                                hpa: Hpa(
                                    there.0 & !(space.query(Gpa(gpa)).unwrap().size.bytes() - 1)
                                ),
                            });
                            assert_eq!(stopped, Interruption { at: Gpa(gpa), reason: occupied });
                            assert_ne!(there, leaf);
                        }
                    }
                }
            }
            Op::Protect { at, pages: bytes, rights: Rights { read, write, execute } } => {
                let changed = space.protect(range(at, bytes), Rights { read, write, execute });
                let mut expected = 0;
                for (from, piece) in model.within(at, at + bytes) {
                    let new = Attributes { read, write, execute, ..piece.attributes };
                    expected += if new == piece.attributes { 0 } else { piece.end - from };
                    piece.attributes = new;
                }
                assert_eq!(changed, Ok(expected));
            }
            Op::Unmap { at, pages: bytes } => {
                let (mut told, mut rest) = (Flat::default(), Flat::default());
                let unmapped = space.unmap(range(at, bytes), |run| {
                    let attributes = Attributes { accessed: true, dirty: true, ..run.attributes };
                    let end = run.gpa.0 + run.bytes;
                    assert_eq!(told.within(run.gpa.0, end).count(), 0, "twice");
                    told.map(run.gpa.0, end, run.hpa.0, attributes);
                });
                rest.0.extend(model.within(at, at + bytes).map(|(at, piece)| (at, *piece)));
                model.unmap(at, at + bytes);
                assert_eq!(unmapped, Ok(rest.0.iter().map(|(at, piece)| piece.end - at).sum()));
                assert_eq!(told.merged(), rest.merged());
            }
            Op::Discard { at, pages: bytes } => {
                model.unmap(at, at + bytes);
                assert_eq!(space.discard(range(at, bytes)), Ok(()));
            }
            Op::UnmapLeaf { at } => {
                let found = space.unmap_leaf(Gpa(at + 8)).unwrap();
                assert_eq!(found.is_some(), model.at(at).is_some());
                if let Some(leaf) = found {
                    assert!(leaf.gpa.0 <= at && at < leaf.gpa.0 + leaf.bytes);
                    assert_eq!(leaf.bytes, leaf.size.bytes());
                    let (start, end) = (leaf.gpa.0, leaf.gpa.0 + leaf.bytes);
                    let gone = model.within(start, end).map(|(at, piece)| piece.end - at);
                    assert_eq!(gone.sum::<u64>(), leaf.bytes);
                    model.unmap(start, end);
                }
            }
        }
        for gpa in pages(BASE, WINDOW) {
            let found = space.query(Gpa(gpa)).map(|found| {
                (found.hpa.0, Attributes { accessed: true, dirty: true, ..found.attributes })
            });
            assert_eq!(found, model.at(gpa), "{gpa:#x} after {op:?}");
        }
        // No TLB has what was unmapped or changed.
        let told = platform.take_invalidations();
        let invalidated = |gpa: u64| told.iter().any(|what| covers(what, gpa, page));
        for gpa in pages(BASE, WINDOW).filter(|&gpa| before.at(gpa).is_some()) {
            let same = model.at(gpa) == before.at(gpa);
            assert!(same || invalidated(gpa), "{gpa:#x} after {op:?}");
        }
    }
    space.unmap(range(BASE, WINDOW), drop).unwrap();
    assert_eq!(platform.live(), 1, "the root is left");
    // SAFETY: no machine has the root.
    unsafe { space.destroy() };
    assert_eq!(platform.live(), 0);
}

fn of<F: Format>(format: F, bbm: BreakBeforeMake, ops: &[Op])
where
    for<'p> Any<'p>: From<AddressSpace<'p, F, TestPlatform>>,
{
    let platform = TestPlatform::new(bbm);
    let sizes: Vec<u64> = (0..=F::LARGEST_LEAF).map(|level| F::size(level).bytes()).collect();
    let space = AddressSpace::new(format, Vmid(3), 40, &platform).unwrap();
    play(&platform, space.into(), &sizes, ops);
}

proptest! {
    #![proptest_config(crate::properties::config())]

    #[test]
    fn any_history_of_one_owner_agrees_with_a_map_of_pages(
        ops in prop::collection::vec(op(), 1..12),
        format in 0..6,
    ) {
        on_format!(format, of, &ops);
    }
}

fn format() -> Arm64K4 {
    Arm64K4 { split_execute: false, ..Default::default() }
}

#[test]
fn a_platform_without_frames_leaves_what_precedes_the_address() {
    on_space(BreakBeforeMake::Always, format(), |platform, space| {
        // The root, a table of blocks, and two of pages.
        platform.limit(4);
        let odd = Hpa((1 << 32) + 4 * K);
        let stopped = space.map(range(0, 8 * M), odd, RAM, PageSize::SIZE_2M).unwrap_err();
        assert_eq!(stopped, Interruption { at: Gpa(4 * M), reason: SpaceError::OutOfFrames });
        assert!(stopped.to_string().contains("no more table pages"));
        assert!(space.query(Gpa(4 * M - 1)).is_some() && space.query(Gpa(4 * M)).is_none());
        platform.limit(usize::MAX);
        assert_eq!(space.map(range(0, 8 * M), odd, RAM, PageSize::SIZE_2M), Ok(()));
        // A block that cannot be split stays as it is.
        assert_eq!(space.map(range(8 * M, 2 * M), Hpa(0), RAM, PageSize::SIZE_2M), Ok(()));
        platform.limit(platform.live());
        let stopped = space.protect(range(8 * M, 4 * K), Rights::READ).unwrap_err();
        assert_eq!(stopped.reason, SpaceError::OutOfFrames);
        let stopped = space.unmap(range(9 * M, M), drop).unwrap_err();
        assert_eq!(stopped.reason, SpaceError::OutOfFrames);
        assert_eq!(space.query(Gpa(8 * M)).unwrap().attributes, RAM);
    });
}

#[test]
fn what_cannot_be_is_refused_and_nothing_is_done() {
    on_space(BreakBeforeMake::Always, format(), |platform, space| {
        platform.take_events();
        let far = range(1 << 40, 4 * K);
        let refused = |reason: SpaceError| assert!(!reason.to_string().is_empty());
        let map = space.map(far, Hpa(0), RAM, PageSize::SIZE_4K).unwrap_err().reason;
        assert!(matches!(map, SpaceError::Map(MapError::Range(_))));
        let protect = space.protect(far, Rights::ALL).unwrap_err().reason;
        assert!(matches!(protect, SpaceError::Change(ChangeError::Range(_))));
        let unmap = space.unmap(far, drop).unwrap_err().reason;
        assert!(matches!(unmap, SpaceError::Unmap(UnmapError::Range(_))));
        let user = Rights { execute: Execute::User, ..Rights::ALL };
        let rights = space.protect(range(0, 4 * K), user).unwrap_err().reason;
        assert!(matches!(rights, SpaceError::Change(ChangeError::Attributes(_))));
        [map, protect, unmap, rights].into_iter().for_each(refused);
        assert_eq!(space.unmap_leaf(Gpa(1 << 45)), Ok(None));
        assert_eq!((space.query(Gpa(u64::MAX)), platform.live()), (None, 1));
        assert_eq!(platform.take_events(), []);
    });
}

#[test]
fn the_rest_of_the_engine_is_at_hand() {
    on_space(BreakBeforeMake::Always, format(), |_, space| {
        space.map(range(0, 2 * M), Hpa(0), RAM, PageSize::SIZE_2M).unwrap();
        let pages = GpaRange::new(Gpa(0), 2 * M).unwrap();
        let mut guard = space.enter();
        assert_eq!(guard.write_protect(pages), Ok(2 * M));
        guard.invalidate();
        drop(guard);
        assert!(!space.query(Gpa(0)).unwrap().attributes.write);
        assert_eq!(space.geometry().address_bits, 40);
    });
}

#[test]
fn an_owner_changes_software_bits_and_learns_the_bytes_changed() {
    on_space(BreakBeforeMake::Always, format(), |_, space| {
        assert_eq!(space.vmid(), Vmid(3));
        space.map(range(0, 2 * M), Hpa(0), RAM, PageSize::SIZE_2M).unwrap();
        let (a, none) = (Software::A, Software::NONE);
        // A block that the range cuts is split.
        assert_eq!(space.set_software(range(0, 8 * K), a, none), Ok(8 * K));
        assert_eq!(space.set_software(range(0, 16 * K), a, none), Ok(8 * K));
        assert_eq!(space.set_software(range(4 * K, 4 * K), none, a), Ok(4 * K));
        let bits = |page: u64| space.query(Gpa(page * 4 * K)).unwrap().attributes.software;
        assert_eq!([0, 1, 2, 3, 4].map(bits), [a, none, a, a, none]);
    });
}

#[test]
fn a_look_up_waits_until_an_entry_is_released() {
    on_space(BreakBeforeMake::Always, format(), |platform, space| {
        space.map(range(0, 4 * K), Hpa(4 * M), RAM, PageSize::SIZE_4K).unwrap();
        let mut table = space.root().0;
        for _ in 0..space.geometry().root_level {
            table = platform.table(table, 1)[0].load(SeqCst) & 0xffff_ffff_f000;
        }
        // Frozen, as where another thread breaks the entry.
        let leaf = platform.table(table, 1)[0].swap(Arm64K4::MARK, SeqCst);
        // A guard answers at once that it is held. A look-up waits for as long as an operation
        // does.
        assert!(space.enter().translate(Gpa(0)).is_err());
        assert_eq!(
            (space.query(Gpa(0)), space.translate(Gpa(0))),
            (None, Err(Contention { at: Gpa(0) }))
        );
        // What is held is not told as unmapped.
        let held = Interruption { at: Gpa(0), reason: SpaceError::Contended };
        assert_eq!(space.unmap_leaf(Gpa(0)), Err(held));
        assert_eq!(space.unmap(range(0, 4 * K), |_| ()), Err(held));
        let mut attempts = 0;
        platform.entered(Some(Box::new(move |platform, entered| {
            attempts += u64::from(entered == table);
            if attempts == 1_000 {
                platform.table(table, 1)[0].store(leaf, SeqCst);
            }
        })));
        assert_eq!(space.query(Gpa(0)).unwrap().hpa, Hpa(4 * M));
        platform.entered(None);
    });
}

#[test]
fn a_discard_is_invalidated_once_however_scattered_its_memory() {
    on_space(BreakBeforeMake::Always, format(), |platform, space| {
        let scattered = |space: &mut AddressSpace<'_, _, _>| {
            for page in 0..512 {
                let hpa = Hpa((512 - page) * 8 * K);
                space.map(range(page * 4 * K, 4 * K), hpa, RAM, PageSize::SIZE_4K).unwrap();
            }
        };
        scattered(space);
        platform.take_events();
        let mut handed = 0;
        assert_eq!(space.unmap(range(0, 2 * M), |run| handed += run.bytes), Ok(2 * M));
        assert_eq!(handed, 2 * M);
        assert_eq!(platform.take_invalidations().len(), 512 / 16);
        scattered(space);
        platform.take_events();
        assert_eq!(space.discard(range(0, 2 * M)), Ok(()));
        assert_eq!(platform.take_invalidations().len(), 1);
        assert_eq!(platform.live(), 1, "the root is left");
        let far = space.discard(range(1 << 40, 4 * K)).unwrap_err().reason;
        assert!(matches!(far, SpaceError::Unmap(UnmapError::Range(_))));
    });
}

#[test]
fn a_part_of_a_block_is_discarded_and_the_rest_stays() {
    on_space(BreakBeforeMake::Always, format(), |platform, space| {
        space.map(range(0, 2 * M), Hpa(0), RAM, PageSize::SIZE_2M).unwrap();
        platform.limit(platform.live());
        assert_eq!(space.discard(range(M, 4 * K)).unwrap_err().reason, SpaceError::OutOfFrames);
        assert_eq!(space.query(Gpa(M)).unwrap().size, PageSize::SIZE_2M);
        platform.limit(usize::MAX);
        assert_eq!(space.discard(range(M, 4 * K)), Ok(()));
        assert!(space.query(Gpa(M)).is_none());
        assert_eq!(space.query(Gpa(M + 4 * K)).unwrap().hpa, Hpa(M + 4 * K));
        assert_eq!(space.query(Gpa(M - 1)).unwrap().hpa, Hpa(M - 1));
    });
}

#[test]
fn guards_of_one_owner_see_each_other_and_free_no_table_early() {
    on_space(BreakBeforeMake::Never, format(), |platform, space| {
        let mut storage = [const { None }; 4];
        let mut cache = TableCache::new(platform, &mut storage);
        cache.fill(4).unwrap();
        let (all, page) = (range(0, 2 * M), PageSize::SIZE_4K);
        let (walker, mut other) = (space.enter(), space.enter());
        other.map(all, Hpa(0), RAM, page, &mut cache).unwrap();
        assert!(walker.translate(Gpa(M)).unwrap().is_some());
        let mapped = platform.live();
        let mut places = [UnmapEntry::EMPTY];
        let mut batch = other.unmap_batch(&mut places);
        assert_eq!(other.unmap(all, &mut batch), Ok(2 * M));
        batch.complete().for_each(drop);
        drop(batch);
        assert_eq!((walker.translate(Gpa(M)), space.query(Gpa(M))), (Ok(None), None));
        assert_eq!(platform.live(), mapped, "the walker may be in the tables");
        drop((walker, other, cache));
        assert_eq!(space.reclaim(), 2, "a table of pages, and the one above it");
        assert_eq!(platform.live(), 1, "the root is left");
    });
}

/// Maps the page at `gpa` to the same address.
fn map_page<F: Format>(space: &mut AddressSpace<'_, F, TestPlatform>, gpa: u64) {
    space.map(range(gpa, 4 * K), Hpa(gpa), RAM, PageSize::SIZE_4K).unwrap();
    assert_eq!(space.query(Gpa(gpa)).unwrap().hpa, Hpa(gpa));
}

#[test]
fn the_next_page_maps_into_a_linked_table_after_any_removal() {
    on_space(BreakBeforeMake::Always, format(), |platform, space| {
        let first = range(0, 8 * K);
        let by_guard = |space: &AddressSpace<'_, _, TestPlatform>| {
            let mut places = [UnmapEntry::EMPTY];
            let mut guard = space.enter();
            let mut batch = guard.unmap_batch(&mut places);
            guard.unmap(first, &mut batch).unwrap();
            batch.complete().for_each(drop);
        };
        let by_tables = |space: &mut AddressSpace<'_, _, TestPlatform>| {
            let tables = space.tables();
            let mut places = [UnmapEntry::EMPTY];
            // SAFETY: no thread reclaims while the guard lives.
            let mut guard = unsafe { tables.enter_unchecked() };
            let mut batch = guard.unmap_batch(&mut places);
            guard.unmap(first, &mut batch).unwrap();
            batch.complete().for_each(drop);
            drop((batch, guard));
            tables.reclaim();
        };
        for way in 0..5 {
            // The first page builds its tables; the second goes into one that is there.
            map_page(space, 0);
            map_page(space, 4 * K);
            match way {
                0 => assert_eq!(space.unmap(first, drop), Ok(8 * K)),
                1 => space.discard(first).unwrap(),
                2 => {
                    assert!(space.unmap_leaf(Gpa(0)).unwrap().is_some());
                    assert!(space.unmap_leaf(Gpa(4 * K)).unwrap().is_some());
                }
                3 => {
                    by_guard(space);
                    assert_eq!(space.reclaim(), 2);
                }
                _ => by_tables(space),
            }
            assert_eq!(platform.live(), 1, "way {way}: the root is left");
            map_page(space, 8 * K);
            space.discard(range(0, 2 * M)).unwrap();
        }
    });
}

#[test]
fn a_page_mapped_next_to_the_last_is_young_to_a_skipping_scan() {
    on_space(BreakBeforeMake::Never, Ept1G::default(), |_, space| {
        map_page(space, 0);
        let all = range(0, 2 * M);
        let (clear, skip) = (true, TableBits::Exact);
        let young_pages = |space: &AddressSpace<'_, Ept1G, _>| {
            let (mut young, mut unanswered) = ([0; 8], [0; 8]);
            let mut ages = AgeBitmaps { young: &mut young, unanswered: &mut unanswered };
            space
                .enter()
                .age(all, &mut ages, AgeOptions { clear, table_bits: skip, flush_tlb: true })
                .unwrap();
            young[0]
        };
        map_page(space, 4 * K);
        assert_eq!(young_pages(space), 0b11);
        map_page(space, 8 * K);
        assert_eq!(young_pages(space), 0b100);
    });
}

#[test]
fn a_discard_removes_whole_tables_with_one_invalidation() {
    on_space(BreakBeforeMake::Always, format(), |platform, space| {
        let (gib, page) = (1 << 30, PageSize::SIZE_4K);
        // Four whole tables of pages, with a page on either side of them.
        for at in [gib - 8 * M, gib - 2 * M, gib, gib + 2 * M] {
            space.map(range(at, 2 * M), Hpa(at), RAM, page).unwrap();
        }
        map_page(space, gib - 8 * M - 4 * K);
        map_page(space, gib + 4 * M);
        platform.take_events();
        space.discard(range(gib - 8 * M, 12 * M)).unwrap();
        assert_eq!(platform.take_invalidations().len(), 1);
        // The root, a table of blocks on either side, and a table for the page on either side.
        assert_eq!(platform.live(), 5);
        for (gpa, stays) in [(8 * M + 1, true), (8 * M, false), (1, false)] {
            assert_eq!(space.query(Gpa(gib - gpa)).is_some(), stays, "{gpa:#x} before");
        }
        assert!(space.query(Gpa(gib)).is_none() && space.query(Gpa(gib + 4 * M)).is_some());
        // A table around an end of the range that becomes empty is dropped with the others.
        space.discard(range(gib - 8 * M - 4 * K, 4 * M)).unwrap();
        space.map(range(2 * M, 4 * M), Hpa(2 * M), RAM, page).unwrap();
        assert_eq!((platform.take_invalidations().len(), platform.live()), (1, 6));
        space.discard(range(2 * M, 4 * M)).unwrap();
        assert_eq!((platform.take_invalidations().len(), platform.live()), (1, 3));
    });
}

#[test]
fn an_owner_keeps_its_addresses_through_a_discard() {
    on_space(BreakBeforeMake::Always, format(), |platform, space| {
        map_page(space, 0);
        let owner = Owner::new(7).unwrap();
        let mut storage = [const { None }; 4];
        let mut cache = TableCache::new(platform, &mut storage);
        cache.fill(4).unwrap();
        space.enter().set_owner(range(4 * K, 4 * K), None, Some(owner), &mut cache).unwrap();
        space.discard(range(0, 1 << 30)).unwrap();
        assert!(space.query(Gpa(0)).is_none());
        assert_eq!(space.enter().owner(Gpa(4 * K)), Ok(Some(owner)));
        drop(cache);
    });
}

#[test]
fn a_forgotten_removal_is_invalidated_with_its_table() {
    on_space(BreakBeforeMake::Always, format(), |platform, space| {
        space.map(range(0, 2 * M), Hpa(0), RAM, PageSize::SIZE_4K).unwrap();
        space.map(range(1 << 30, 4 * K), Hpa(0), RAM, PageSize::SIZE_4K).unwrap();
        space.map(range((1 << 30) + 4 * K, 4 * K), Hpa(0), RAM, PageSize::SIZE_4K).unwrap();
        let mut places = [UnmapEntry::EMPTY];
        let mut guard = space.enter();
        let mut batch = guard.unmap_batch(&mut places);
        guard.unmap(range(1 << 30, 4 * K), &mut batch).unwrap();
        std::mem::forget(batch);
        drop(guard);
        platform.take_events();
        space.discard(range(0, 2 * M)).unwrap();
        assert!(platform.take_invalidations().iter().any(|what| what.range.is_none()));
    });
}

#[test]
fn a_block_of_a_group_that_a_range_covers_whole_is_not_split() {
    on_space(BreakBeforeMake::Never, format(), |platform, space| {
        let mut storage = [const { None }; 4];
        let mut tables = TableCache::new(platform, &mut storage);
        tables.fill(4).unwrap();
        let group = range(0, 32 * M);
        let block = PageSize::SIZE_2M;
        space.enter().map_contiguous(group, Hpa(0), RAM, block, &mut tables).unwrap();
        drop(tables);
        space.map(range(32 * M, 2 * M), Hpa(32 * M), RAM, block).unwrap();
        assert_eq!(space.query(Gpa(2 * M)).unwrap().size.bytes(), 32 * M);
        space.protect(range(2 * M, 30 * M + 4 * K), Rights::READ).unwrap();
        // The group is unfolded; the one block that the range cuts is split.
        let found = |at: u64| {
            let found = space.query(Gpa(at)).unwrap();
            (found.size.bytes(), found.attributes.write)
        };
        assert_eq!([found(0), found(2 * M)], [(2 * M, true), (2 * M, false)]);
        assert_eq!([found(32 * M), found(32 * M + 4 * K)], [(4 * K, false), (4 * K, true)]);
    });
}
