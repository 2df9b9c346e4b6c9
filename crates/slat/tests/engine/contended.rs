//! Entries that another thread holds: operations report that, change nothing there, and go on
//! elsewhere.

use crate::common::hardware::Hardware;
use crate::common::stage::{
    CLEAN, EXACT, K, M, RAM, age, holding, on_stage, range, refused, relax, says,
};
use crate::common::world::{CacheOf, GuardOf, TablesOf};
use crate::common::{Moment, TestPlatform, destroy};
use slat::{
    Access, AgeBitmaps, AgeCounts, AgeOptions, Attributes, BreakBeforeMake, ChangeError,
    Contention, Gpa, Hpa, MapError, PageSize, SplitError, TableBits, TableCache, Tables,
    UnmapEntry, UnmapError, Vmid,
};
use std::sync::atomic::Ordering::SeqCst;

/// Makes sixteen pages from 2m on. The fourth, at 2m + 12k, is held, frozen or sealed, and
/// afterwards as it was.
fn with_held<H: Hardware>(
    body: impl Fn(bool, &TablesOf<'_, H>, &mut GuardOf<'_, '_, H>, &mut CacheOf<'_, H>),
) {
    for sealed in [false, true] {
        on_stage::<H>((H::usual(), 40, 8), |tables, guard, cache| {
            let pages = range(2 * M, 64 * K);
            assert_eq!(guard.map(pages, Hpa(0), RAM, PageSize::SIZE_4K, cache), Ok(64 * K));
            let held = |raw| if sealed { raw | H::MARK } else { H::MARK };
            holding((H::of(tables), guard.platform()), [HELD], held, || {
                body(sealed, tables, guard, cache);
            });
        });
    }
}

const PAGES: u64 = 64 * K;
const HELD: u64 = 2 * M + 12 * K;

fn an_entry_that_one_thread_holds_is_contended_for_all_others<H: Hardware>() {
    with_held::<H>(|_, _, guard, cache| {
        let pages = range(2 * M, PAGES);
        let before = guard.counts().entries_written;
        let mut storage = [const { UnmapEntry::EMPTY }; 16];
        let mut batch = guard.unmap_batch(&mut storage);
        let result = guard.unmap(range(HELD, 8 * K), &mut batch);
        let text = refused(result, HELD, UnmapError::Contended);
        says(&text, &["0x203000", "another thread is changing"]);
        assert_eq!(batch.complete().next(), None);
        // Map changes nothing before it could look at the whole range.
        let page = PageSize::SIZE_4K;
        let result = guard.map(pages, Hpa(0), RAM, page, cache);
        let text = refused(result, 2 * M, MapError::Contended);
        says(&text, &["another thread is changing"]);
        refused(guard.map(range(HELD, 4 * K), Hpa(0), RAM, page, cache), HELD, MapError::Contended);
        let result = guard.split_by::<slat::EveryEntry>(pages, page, cache, 1);
        assert_eq!(result, Ok(0), "there is nothing to split");
        assert_eq!(guard.counts().entries_written, before);
        // Everything before the held entry is done.
        let reason = ChangeError::Contended;
        refused(guard.write_protect(pages), HELD, reason);
        refused(relax(guard, pages, Access::Write), HELD, reason);
        refused(guard.execute_protect(pages), HELD, reason);
        refused(relax(guard, pages, Access::Execute), HELD, reason);
        refused(guard.clean(pages), HELD, reason);
        refused(relax(guard, pages, Access::Write), HELD, reason);
        assert_eq!(guard.counts().entries_written, before + 6 * 3);
        let mut bits = [0];
        refused(guard.harvest(pages, &mut bits), HELD, reason);
        assert_eq!(bits, [0b111], "what was harvested is in the bitmap");
        let owed = guard.pending_invalidation();
        assert!(owed.is_none(), "the harvest completed what was owed");
        relax(guard, range(HELD + 4 * K, 4 * K), Access::Read).unwrap();
    });
}

on!(an_entry_that_one_thread_holds_is_contended_for_all_others; npt, ept_2m);

fn a_held_entry_is_noticed_among_entries_that_need_no_change<H: Hardware>() {
    on_stage::<H>((H::usual(), 40, 8), |tables, guard, cache| {
        // The page was not used or written, nor can it be written.
        let pages = range(2 * M, PAGES);
        let quiet = Attributes { write: false, ..CLEAN };
        assert_eq!(guard.map(pages, Hpa(0), quiet, PageSize::SIZE_4K, cache), Ok(PAGES));
        holding(
            (H::of(tables), guard.platform()),
            [HELD],
            |_| H::MARK,
            || {
                let reason = ChangeError::Contended;
                refused(guard.write_protect(pages), HELD, reason);
                refused(guard.clean(pages), HELD, reason);
                refused(guard.harvest(pages, &mut [0]), HELD, reason);
                let aged = AgeCounts { young: 0, unanswered: 1 };
                assert_eq!(age(guard, pages, AgeOptions::LEAVES), (aged, [0, 0b1000]));
            },
        );
    });
}
on!(a_held_entry_is_noticed_among_entries_that_need_no_change);

fn an_entry_that_is_held_is_noticed_among_empty_ones<H: Hardware>() {
    on_stage::<H>((H::usual(), 40, 8), |tables, guard, cache| {
        // A page in the third run of its table; an entry is held in the first, then in the
        // fourth.
        let page = range(2 * M + 64 * K, 4 * K);
        assert_eq!(guard.map(page, Hpa(0), RAM, PageSize::SIZE_4K, cache), Ok(4 * K));
        for held in [2 * M + 12 * K, 2 * M + 108 * K] {
            holding(
                (H::of(tables), guard.platform()),
                [held],
                |_| H::MARK,
                || {
                    let reason = ChangeError::Contended;
                    refused(guard.execute_protect(range(2 * M, 128 * K)), held, reason);
                    refused(guard.write_protect(range(2 * M, 128 * K)), held, reason);
                },
            );
        }
    });
}
on!(an_entry_that_is_held_is_noticed_among_empty_ones);

fn a_table_that_stays_linked_while_it_is_retired_is_contended<H: Hardware>() {
    on_stage::<H>((H::usual(), 40, 8), |tables, guard, cache| {
        let pages = range(2 * M, PAGES);
        assert_eq!(guard.map(pages, Hpa(0), RAM, PageSize::SIZE_4K, cache), Ok(PAGES));
        let retired = <H::Format as slat::Format>::retired(Hpa(0));
        holding(
            (H::of(tables), guard.platform()),
            [HELD],
            |_| retired,
            || {
                // From the table's first page, and from a later one.
                for start in [2 * M, 2 * M + 4 * K] {
                    refused(
                        guard.write_protect(range(start, 32 * K)),
                        start,
                        ChangeError::Contended,
                    );
                }
            },
        );
    });
}
on!(a_table_that_stays_linked_while_it_is_retired_is_contended);

fn a_held_entrys_age_is_unanswered_and_all_others_are_told<H: Hardware>() {
    with_held::<H>(|_, tables, guard, _| {
        let pages = range(2 * M, PAGES);
        for skip in [TableBits::Ignored, TableBits::Exact] {
            let (mut young, mut unanswered) = ([0], [0]);
            let mut ages = AgeBitmaps { young: &mut young, unanswered: &mut unanswered };
            let how = AgeOptions { table_bits: skip, ..EXACT };
            let aged = guard.age(pages, &mut ages, how);
            assert_eq!(aged, Ok(AgeCounts { young: 15, unanswered: 1 }));
            assert_eq!((young, unanswered), ([0xfff7], [0b1000]));
            if H::TABLES_COUNT && skip != TableBits::Ignored {
                // A table with a leaf that could not be cleared keeps its mark: the leaf is not
                // forgotten.
                let tree = H::of(tables).tree(guard.platform());
                assert!(tree.tables.values().all(|table| table.accessed), "{skip:?}");
            }
            // All bits are in the bitmaps already, so none is added.
            let mut ages = AgeBitmaps { young: &mut young, unanswered: &mut unanswered };
            assert_eq!(guard.age(pages, &mut ages, how), Ok(AgeCounts::default()));
            relax(guard, range(2 * M, 12 * K), Access::Read).unwrap();
            relax(guard, range(HELD + 4 * K, PAGES - 16 * K), Access::Read).unwrap();
        }
    });
}
on!(a_held_entrys_age_is_unanswered_and_all_others_are_told; npt);

/// Makes pages from 2m to 4m, of which the entries of the first 64 are retired so far, by a thread
/// that does not go on.
fn with_retired<H: Hardware>(format: H::Format, body: impl FnOnce(&mut GuardOf<'_, '_, H>)) {
    on_stage::<H>((format, 40, 8), |tables, guard, cache| {
        guard.map(range(2 * M, 2 * M), Hpa(0), RAM, PageSize::SIZE_4K, cache).unwrap();
        let places = (0..64).map(|page| 2 * M + page * 4 * K);
        let retired = <H::Format as slat::Format>::retired(Hpa(0));
        holding((H::of(tables), guard.platform()), places, |_| retired, || body(guard));
    });
}

fn ageing_does_not_wait_for_a_table_that_is_being_unmapped<H: Hardware>() {
    for skip in [TableBits::Ignored, TableBits::Exact] {
        with_retired::<H>(H::usual(), |guard| {
            let before = guard.counts().entries_read;
            let how = AgeOptions { table_bits: skip, ..EXACT };
            let aged = AgeCounts { young: 448, unanswered: 64 };
            assert_eq!(age(guard, range(2 * M, 2 * M), how), (aged, [0, !0]));
            let read = guard.counts().entries_read - before;
            assert!(read < 2 * 512, "{read} entries were read for 512 pages");
        });
    }
}
on!(ageing_does_not_wait_for_a_table_that_is_being_unmapped);

fn a_list_of_leaves_names_each_page_of_a_table_being_unmapped<H: Hardware>() {
    with_retired::<H>(H::usual(), |guard| {
        let leaves: Vec<_> = guard.leaves(range(2 * M, 2 * M)).unwrap().collect();
        for (page, leaf) in leaves.iter().enumerate() {
            let at = Gpa(2 * M + page as u64 * 4 * K);
            assert_eq!(
                leaf.map(|leaf| leaf.gpa),
                if page < 64 { Err(Contention { at }) } else { Ok(at) }
            );
        }
        assert_eq!(leaves.len(), 512);
    });
}
on!(a_list_of_leaves_names_each_page_of_a_table_being_unmapped);

fn a_reader_sees_a_sealed_leaf_and_reports_a_frozen_one<H: Hardware>() {
    with_held::<H>(|sealed, _, guard, cache| {
        let at = Gpa(HELD + 5);
        let pages = range(2 * M, PAGES);
        let found = guard.translate(at);
        let leaves: Vec<_> = guard.leaves(pages).unwrap().collect();
        let text = guard.dump().to_string();
        assert_eq!(leaves.len(), 16);
        if sealed {
            let found = found.unwrap().unwrap();
            assert_eq!((found.hpa, found.attributes), (Hpa(12 * K + 5), RAM));
            assert!(leaves.iter().all(Result::is_ok));
            assert_eq!(text.lines().count(), 2, "{text}");
            assert_eq!(guard.clean_caches(pages), Ok(PAGES));
            let reason = MapError::Occupied { size: PageSize::SIZE_4K, hpa: Hpa(12 * K) };
            refused(guard.reserve(at, PageSize::SIZE_4K, cache), at.0, reason);
        } else {
            says(&found.unwrap_err().to_string(), &["0x203005", "try again"]);
            assert_eq!(leaves[3], Err(Contention { at: Gpa(HELD) }));
            assert_eq!(leaves.iter().filter(|leaf| leaf.is_ok()).count(), 15);
            says(&text, &["0x203000  being changed"]);
            assert_eq!(text.lines().count(), 4, "{text}");
            refused(guard.clean_caches(pages), HELD, ChangeError::Contended);
            let result = guard.reserve(at, PageSize::SIZE_4K, cache);
            refused(result, at.0, MapError::Contended);
        }
    });
}
on!(a_reader_sees_a_sealed_leaf_and_reports_a_frozen_one; npt);

fn a_table_with_a_held_leaf_stays_and_its_neighbours_collapse<H: Hardware>() {
    for sealed in [false, true] {
        on_stage::<H>((H::usual(), 40, 8), |tables, guard, cache| {
            let all = range(0, 8 * M);
            assert_eq!(guard.map(all, Hpa(0), RAM, PageSize::SIZE_4K, cache), Ok(8 * M));
            let held = |raw| if sealed { raw | H::MARK } else { H::MARK };
            // It reports the first table that it left.
            let places = [HELD, 6 * M + 12 * K];
            holding((H::of(tables), guard.platform()), places, held, || {
                let result = guard.collapse(all, PageSize::SIZE_2M);
                let text = refused(result, 2 * M, SplitError::Contended);
                says(&text, &["0x200000", "another thread is changing"]);
            });
            let size =
                |guard: &GuardOf<'_, '_, H>, at| guard.translate(Gpa(at)).unwrap().unwrap().size;
            let sizes = [0, 2 * M, 4 * M, 6 * M].map(|at| size(guard, at));
            let (page, block) = (PageSize::SIZE_4K, PageSize::SIZE_2M);
            assert_eq!(sizes, [block, page, block, page]);
            // The seals were taken back: every leaf can be changed.
            assert_eq!(guard.write_protect(range(2 * M, 2 * M)), Ok(2 * M));
            relax(guard, range(2 * M, 2 * M), Access::Write).unwrap();
            assert_eq!(guard.collapse(all, block), Ok(4 * M));
            assert_eq!(size(guard, 2 * M), block);
        });
    }
}
on!(a_table_with_a_held_leaf_stays_and_its_neighbours_collapse; npt);

fn a_split_that_loses_a_block_and_waits_in_vain_stops_there<H: Hardware>() {
    let platform = TestPlatform::new(BreakBeforeMake::Always);
    let tables = Tables::new(H::usual(), Vmid(1), 40, &platform).unwrap();
    let hardware = H::of(&tables);
    let mut reader = platform.register();
    let mut guard = tables.enter(&mut reader).unwrap();
    let mut storage = [const { None }; 4];
    let mut cache = TableCache::new(&platform, &mut storage);
    cache.fill(4).unwrap();
    let all = range(0, 4 * M);
    assert_eq!(guard.map(all, Hpa(0), RAM, PageSize::SIZE_2M, &mut cache), Ok(4 * M));
    drop(cache);
    let mut cache = TableCache::new(&platform, &mut storage);
    cache.fill(1).unwrap();
    // Other software freezes the first block while its table is built. The second block finds
    // the cache empty; the walk goes back to the first, and waits.
    platform.meanwhile(Some(Box::new(move |platform, moment| {
        if moment == Moment::Fill {
            hardware.pte(platform, 0).0.store(H::MARK, SeqCst);
        }
    })));
    let result = guard.split(all, PageSize::SIZE_4K, &mut cache);
    platform.meanwhile(None);
    let text = refused(result, 0, SplitError::Contended);
    says(&text, &["0x0", "another thread is changing"]);
    assert_eq!(cache.len(), 1, "the table went back to the cache");
    hardware.pte(&platform, 0).0.store(0, SeqCst);
    drop((cache, guard));
    destroy(tables);
    assert_eq!(platform.live(), 0);
}
on!(a_split_that_loses_a_block_and_waits_in_vain_stops_there; npt, ept_2m);

fn all_blocks_that_change_while_they_wait_are_split_after_all<H: Hardware>() {
    on_stage::<H>((H::usual(), 40, 8), |tables, guard, cache| {
        let (hardware, platform) = (H::of(tables), guard.platform());
        let blocks = range(0, 6 * M);
        assert_eq!(guard.map(blocks, Hpa(0), CLEAN, PageSize::SIZE_2M, cache), Ok(6 * M));
        // Hardware uses all three blocks while the table of the last is built.
        let mut filled = 0;
        platform.meanwhile(Some(Box::new(move |platform, moment| {
            filled += usize::from(moment == Moment::Fill);
            if moment == Moment::Fill && filled == 7 {
                for at in [0, 2 * M, 4 * M] {
                    hardware.access(platform, hardware.root(), at, false);
                }
            }
        })));
        let done = guard.split(range(0, 8 * M), PageSize::SIZE_4K, cache);
        platform.meanwhile(None);
        assert_eq!(done, Ok(6 * M));
        assert_eq!(guard.leaves(blocks).unwrap().count(), 3 * 512);
        let accessed = |leaf: Result<slat::Leaf, _>| leaf.unwrap().attributes.accessed;
        assert!(guard.leaves(blocks).unwrap().all(accessed), "what hardware marked is kept");
    });
}
on!(all_blocks_that_change_while_they_wait_are_split_after_all);

fn a_large_block_that_changes_meanwhile_is_split_after_all<H: Hardware>() {
    on_stage::<H>((H::usual(), 40, 8), |tables, guard, cache| {
        let (hardware, platform) = (H::of(tables), guard.platform());
        let block = range(0, 1 << 30);
        assert_eq!(guard.map(block, Hpa(0), CLEAN, PageSize::SIZE_1G, cache), Ok(1 << 30));
        let left = cache.len();
        let mut used = false;
        platform.meanwhile(Some(Box::new(move |platform, moment| {
            if moment == Moment::Fill && !std::mem::replace(&mut used, true) {
                hardware.access(platform, hardware.root(), 0, false);
            }
        })));
        let done = guard.split(range(4 * K, 4 * K), PageSize::SIZE_4K, cache);
        platform.meanwhile(None);
        assert_eq!(done, Ok(1 << 30));
        assert_eq!(cache.len(), left - 2, "a table of blocks, and one of pages");
        assert_eq!(guard.leaves(block).unwrap().count(), 511 + 512);
    });
}
on!(a_large_block_that_changes_meanwhile_is_split_after_all);
