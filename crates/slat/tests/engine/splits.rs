//! Splits by what they read and invalidate, which blocks wait for one invalidation, and what they
//! make of blocks that change while they work.

use crate::common::hardware::Hardware;
use crate::common::hardware::arm::Arm;
use crate::common::hardware::ept::Ept;
use crate::common::hardware::power::Core;
use crate::common::stage::{G, K, M, RAM, arm, ept, on_stage, range, refused};
use crate::common::{Moment, TestPlatform};
use slat::format::arm64::Arm64K4;
use slat::format::power::PowerK64;
use slat::{
    Access, Attributes, BreakBeforeMake, Execute, Format, Gpa, Hpa, LocalFlush, PageSize, Software,
    SplitError, TableCache, Tables, Vmid,
};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::atomic::Ordering::SeqCst;

const PAGE: PageSize = PageSize::SIZE_4K;
const BLOCK: PageSize = PageSize::SIZE_2M;
const READ: Attributes = Attributes { write: false, ..RAM };

fn a_split_within_one_table_of_pages_reads_only_the_way_there<H: Hardware>() {
    on_stage::<H>((H::usual(), 39, 8), |_, guard, cache| {
        let up = u64::from(guard.geometry().root_level);
        let pages = range(0, 4 * M);
        guard.map(pages, Hpa(0), RAM, PAGE, cache).unwrap();
        let before = guard.counts().entries_read;
        assert_eq!(guard.split(range(4 * M - 4 * K, 4 * K), PAGE, cache), Ok(0));
        assert_eq!(guard.counts().entries_read - before, up);
        assert_eq!(guard.split(range(2 * M, 4 * K), PAGE, cache), Ok(0));
        assert_eq!(guard.split(range(4 * M - 8 * K, 8 * K), PAGE, cache), Ok(0));
        assert_eq!(guard.counts().entries_read - before, 3 * up);
        assert_eq!(guard.write_protect(pages), Ok(4 * M));
    });
}
on!(a_split_within_one_table_of_pages_reads_only_the_way_there);

#[test]
fn a_walk_may_cut_more_blocks_aside_than_it_has_patience() {
    const BLOCKS: u64 = 4100;
    let platform = TestPlatform::new(BreakBeforeMake::Never);
    let tables = Tables::new(Arm64K4::default(), Vmid(1), 43, &platform).unwrap();
    let mut storage: Vec<_> = (0..BLOCKS).map(|_| None).collect();
    let mut cache = TableCache::new(&platform, &mut storage);
    cache.fill(BLOCKS as usize).unwrap();
    let all = range(0, BLOCKS << 30);
    // SAFETY: no test gave the root to a machine.
    let mut unloaded = unsafe { tables.deactivate() };
    assert_eq!(unloaded.map(all, Hpa(0), RAM, BLOCK, &mut cache), Ok(BLOCKS << 30));
    drop(cache);
    unloaded.destroy();
}

#[test]
fn a_split_to_the_roots_largest_blocks_reads_nothing() {
    on_stage::<Arm<12>>((arm(), 34, 4), |_, guard, cache| {
        assert_eq!(guard.geometry().root_level, 1);
        guard.map(range(G, 2 * M), Hpa(0), RAM, BLOCK, cache).unwrap();
        let before = guard.counts().entries_read;
        assert_eq!(guard.split(range(0, 2 * G), BLOCK, cache), Ok(0));
        assert_eq!(guard.counts().entries_read, before);
    });
}

fn a_split_large_block_is_read_once_more_before_its_table<H: Hardware>(widths: [u32; 2]) {
    for bits in widths {
        on_stage::<H>((H::usual(), bits, 8), |_, guard, cache| {
            let way = u64::from(guard.geometry().root_level) - 1;
            let block = range(G, G);
            guard.map(block, Hpa(G), RAM, PageSize::SIZE_1G, cache).unwrap();
            let before = guard.counts().entries_read;
            assert_eq!(guard.split(block, BLOCK, cache), Ok(G));
            assert_eq!(guard.counts().entries_read - before, 2 * way);
        });
    }
}
on!(
    a_split_large_block_is_read_once_more_before_its_table:
    arm_4k([40, 44]), ept([39, 40])
);

#[test]
fn a_large_block_gone_before_its_second_read_is_not_split() {
    on_stage::<Ept<true>>((ept(), 40, 8), |tables, guard, cache| {
        let (hardware, platform) = (Ept::<true>::of(tables), guard.platform());
        let block = range(G, G);
        guard.map(block, Hpa(G), RAM, PageSize::SIZE_1G, cache).unwrap();
        let before = guard.counts();
        let raw = hardware.pte(platform, G).0.load(SeqCst);
        // The split follows the only link to see if it is needed, in its walk, and once more.
        let mut links = 0;
        platform.entered(Some(Box::new(move |platform, _| {
            links += 1;
            if links == 3 {
                hardware.pte(platform, G).0.store(0, SeqCst);
            }
        })));
        let done = guard.split(block, BLOCK, cache);
        platform.entered(None);
        assert_eq!(done, Ok(0));
        assert_eq!(hardware.pte(platform, G).0.swap(raw, SeqCst), 0);
        let after = guard.counts();
        assert_eq!(after.tables_built, before.tables_built);
        assert_eq!(after.entries_read - before.entries_read, 3 * 2, "it was there at first");
    });
}

fn distant_blocks_of_a_table_are_broken_one_after_the_other<H: Hardware>() {
    on_stage::<H>((H::usual(), 40, 8), |_, guard, cache| {
        for at in [0, 200 * M] {
            guard.map(range(at, 2 * M), Hpa(at), RAM, BLOCK, cache).unwrap();
        }
        assert_eq!(guard.split(range(0, 202 * M), PAGE, cache), Ok(4 * M));
        assert_eq!((guard.counts().broken, guard.counts().invalidations), (2, 2));
    });
}
on!(distant_blocks_of_a_table_are_broken_one_after_the_other);

fn neighbours_are_broken_together_in_any_table<H: Hardware>() {
    for start in [0, G, 3 * G + 64 * M] {
        on_stage::<H>((H::usual(), 40, 8), |_, guard, cache| {
            let blocks = range(start, 4 * M);
            guard.map(blocks, Hpa(start), RAM, BLOCK, cache).unwrap();
            assert_eq!(guard.split(blocks, PAGE, cache), Ok(4 * M));
            let counts = guard.counts();
            assert_eq!((counts.broken, counts.invalidations), (2, 1), "{start:#x}");
        });
    }
}
on!(neighbours_are_broken_together_in_any_table);

fn neighbours_in_two_tables_or_sizes_are_broken_once_each<H: Hardware>() {
    for (second, tables) in [(BLOCK, 2), (PageSize::SIZE_1G, 3)] {
        on_stage::<H>((H::usual(), 40, 8), |_, guard, cache| {
            guard.map(range(G - 2 * M, 2 * M), Hpa(0), RAM, BLOCK, cache).unwrap();
            guard.map(range(G, second.bytes()), Hpa(G), RAM, second, cache).unwrap();
            let (at, before) = (range(G - 2 * M, 2 * M + 4 * K), guard.counts().tables_built);
            assert_eq!(guard.split(at, PAGE, cache), Ok(2 * M + second.bytes()));
            let counts = guard.counts();
            assert_eq!((counts.broken, counts.invalidations), (2, 2), "{second}");
            assert_eq!(counts.tables_built - before, tables, "{second}");
        });
    }
}
on!(neighbours_in_two_tables_or_sizes_are_broken_once_each);

#[test]
fn a_split_gives_up_on_a_block_that_changes_at_each_build() {
    const TRIES: u32 = 5000;
    let page = PageSize::from_bytes(64 * K).unwrap();
    on_stage::<Core<16, true>>((PowerK64 { output_bits: 48 }, 48, 8), |tables, guard, cache| {
        let (hardware, platform) = (Core::<16, true>::of(tables), guard.platform());
        let block = range(0, 2 * M);
        guard.map(block, Hpa(0), RAM, BLOCK, cache).unwrap();
        let left = cache.len();
        // A table is filled in three parts; the accessed bit changes with the first of them.
        let filled = Rc::new(Cell::new(0_u32));
        let fills = filled.clone();
        platform.meanwhile(Some(Box::new(move |platform, moment| {
            if moment == Moment::Fill {
                if fills.get().is_multiple_of(3) && fills.get() < 3 * TRIES {
                    hardware.pte(platform, 0).0.fetch_xor(PowerK64::ACCESSED, SeqCst);
                }
                fills.set(fills.get() + 1);
            }
        })));
        let result = guard.split(block, page, cache);
        platform.meanwhile(None);
        refused(result, 0, SplitError::Contended);
        assert!((3 * 100..3 * TRIES).contains(&filled.get()), "it tried long enough");
        assert_eq!((cache.len(), guard.counts().broken), (left, 0));
        assert_eq!(guard.split(block, page, cache), Ok(2 * M));
    });
}

fn a_split_for_an_access_that_is_no_fetch_gives_no_right<H: Hardware>() {
    on_stage::<H>((H::usual(), 40, 8), |_, guard, cache| {
        guard.map(range(0, 2 * M), Hpa(0), READ, BLOCK, cache).unwrap();
        let page = range(4 * K, 4 * K);
        let done = guard.split_to_execute(page, cache, Access::Write, Software::NONE);
        assert_eq!(done.map(LocalFlush::not_needed_here), Ok(2 * M));
        let found = guard.translate(Gpa(4 * K)).unwrap().unwrap();
        assert_eq!((found.size, found.attributes), (PAGE, READ));
    });
}
on!(a_split_for_an_access_that_is_no_fetch_gives_no_right);

fn a_block_with_pages_made_executable_is_invalidated_once<H: Hardware>() {
    let data = Attributes { execute: Execute::None, software: Software::A, ..RAM };
    on_stage::<H>((H::usual(), 40, 8), |_, guard, cache| {
        let block = range(4 * G, 2 * M);
        guard.map(block, Hpa(4 * G), data, BLOCK, cache).unwrap();
        guard.platform().take_events();
        let page = range(4 * G + 4 * K, 4 * K);
        let done = guard.split_to_execute(page, cache, Access::Execute, Software::A);
        assert_eq!(done.map(LocalFlush::not_needed_here), Ok(2 * M));
        let told = guard.platform().take_invalidations();
        assert_eq!(told.iter().map(|what| what.range).collect::<Vec<_>>(), [Some(block)]);
        assert_eq!((guard.counts().broken, guard.counts().invalidations), (1, 1));
    });
}
on!(a_block_with_pages_made_executable_is_invalidated_once);
