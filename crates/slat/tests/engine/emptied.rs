//! Entries that were emptied, and entries that look as if they continued others: unmaps of pages
//! that share memory or an end, and groups reserved where pages were.

use crate::common::hardware::Hardware;
use crate::common::hardware::arm::Arm;
use crate::common::hardware::ept::Ept;
use crate::common::hardware::grouped::GroupedArm;
use crate::common::stage::{G, K, M, RAM, arm, on_stage, range, refused};
use crate::common::world::{CacheOf, GuardOf};
use slat::{Attributes, Gpa, GpaRange, Hpa, PageSize, Software, UnmapEntry, UnmapError};

const PAGE: PageSize = PageSize::SIZE_4K;

fn pages(first: u64, count: u64) -> GpaRange {
    range(first * 4 * K, count * 4 * K)
}

#[test]
fn a_page_is_unmapped_without_room_only_if_it_continues_a_run() {
    on_stage::<Arm<12>>((arm(), 40, 8), |_, guard, cache| {
        guard.map(pages(0, 16), Hpa(0), RAM, PAGE, cache).unwrap();
        let mut places = [UnmapEntry::EMPTY];
        let mut batch = guard.unmap_batch(&mut places);
        assert_eq!(guard.unmap(pages(0, 1), &mut batch), Ok(4 * K));
        refused(guard.unmap(pages(5, 1), &mut batch), 20 * K, UnmapError::Full);
        assert_eq!(guard.unmap(pages(1, 1), &mut batch), Ok(4 * K));
        let removed: Vec<_> = batch.complete().map(|run| (run.gpa, run.bytes)).collect();
        assert_eq!(removed, [(Gpa(0), 8 * K)]);
        assert!(guard.translate(Gpa(20 * K)).unwrap().is_some());
    });
}

/// Maps page 7, and from page 8 on each of `memory`; unmaps the table, and returns the first page,
/// the number of pages, the memory and the attributes of each run.
fn removed<H: Hardware>(
    guard: &mut GuardOf<'_, '_, H>,
    cache: &mut CacheOf<'_, H>,
    memory: [(u64, Attributes); 9],
) -> Vec<(u64, u64, u64, Attributes)> {
    for (page, (hpa, attributes)) in (7..).zip(memory) {
        assert_eq!(guard.map(pages(page, 1), Hpa(hpa), attributes, PAGE, cache), Ok(4 * K));
    }
    let mut places = [const { UnmapEntry::EMPTY }; 9];
    let mut batch = guard.unmap_batch(&mut places);
    assert_eq!(guard.unmap(range(0, M), &mut batch), Ok(9 * 4 * K));
    let of = |run: slat::UnmappedRun| {
        (run.gpa.0 / (4 * K), run.bytes / (4 * K), run.hpa.0, run.attributes)
    };
    batch.complete().map(of).collect()
}

fn pages_form_a_run_if_memory_is_contiguous_and_not_if_shared<H: Hardware>() {
    on_stage::<H>((H::usual(), 40, 8), |_, guard, cache| {
        // The host's first pages.
        let memory = std::array::from_fn(|page| (page as u64 * 4 * K, RAM));
        assert_eq!(removed::<H>(guard, cache, memory), [(7, 9, 0, RAM)]);
        let memory = std::array::from_fn(|page| (page.min(1) as u64 * 4 * K, RAM));
        let mut expected = vec![(7, 2, 0, RAM)];
        expected.extend((9..16).map(|page| (page, 1, 4 * K, RAM)));
        assert_eq!(removed::<H>(guard, cache, memory), expected);
    });
}
on!(pages_form_a_run_if_memory_is_contiguous_and_not_if_shared);

/// The descriptor of the host's first page with the first software bit is that of its last page,
/// and a page more.
#[test]
fn the_hosts_first_page_does_not_continue_its_last() {
    const END: u64 = 1 << 52;
    let format = slat::format::ept::Ept { output_bits: 52, ..Default::default() };
    on_stage::<Ept<true>>((format, 40, 8), |_, guard, cache| {
        let marked = Attributes { software: Software::bit(0), ..RAM };
        let memory = std::array::from_fn(|page| match page as u64 {
            page @ 0..2 => (END - (2 - page) * 4 * K, RAM),
            page => ((page - 2) * 4 * K, marked),
        });
        let expected = [(7, 2, END - 8 * K, RAM), (9, 7, 0, marked)];
        assert_eq!(removed::<Ept<true>>(guard, cache, memory), expected);
    });
}

#[test]
fn an_unfold_returns_the_bytes_of_its_own_groups() {
    on_stage::<GroupedArm<12>>((arm(), 40, 8), |_, guard, cache| {
        guard.map_contiguous(pages(0, 32), Hpa(G), RAM, PAGE, cache).unwrap();
        assert_eq!(guard.unfold(pages(0, 1)), Ok(64 * K));
        assert_eq!(guard.unfold(pages(0, 32)), Ok(64 * K));
    });
}

#[test]
fn a_group_of_emptied_entries_waits_for_an_invalidation() {
    on_stage::<GroupedArm<12>>((arm(), 40, 8), |_, guard, cache| {
        guard.map(pages(0, 16), Hpa(G), RAM, PAGE, cache).unwrap();
        // It keeps the table.
        guard.map(pages(64, 1), Hpa(0), RAM, PAGE, cache).unwrap();
        let mut places = [UnmapEntry::EMPTY];
        let mut batch = guard.unmap_batch(&mut places);
        guard.unmap(pages(0, 16), &mut batch).unwrap();
        guard.platform().take_events();
        let reserved = guard.reserve_contiguous(Gpa(0), PAGE, cache).unwrap();
        assert_eq!(reserved.range(), pages(0, 16));
        drop(reserved);
        let told = guard.platform().take_invalidations();
        let invalidated: Vec<_> = told.iter().map(|what| what.range).collect();
        assert_eq!(invalidated, [Some(pages(0, 1)), Some(pages(0, 16))]);
        assert_eq!(guard.counts().invalidations, 2);
        batch.complete().for_each(drop);
    });
}

#[test]
fn a_block_that_has_no_groups_is_reserved_once() {
    on_stage::<GroupedArm<12>>((arm(), 40, 8), |_, guard, cache| {
        let huge = PageSize::from_bytes(G).unwrap();
        let reserved = guard.reserve_contiguous(Gpa(G), huge, cache).unwrap();
        assert_eq!(reserved.range(), range(G, G));
        drop(reserved);
        assert_eq!(guard.counts().entries_written, 1);
    });
}
