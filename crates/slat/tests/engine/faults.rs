//! Reservations of faults: what they cost, which entry they take, what they leave in it, and what
//! they invalidate before.

use crate::common::hardware::Hardware;
use crate::common::hardware::ept::Ept;
use crate::common::hardware::power::Core;
use crate::common::stage::{K, M, RAM, ept, on_stage, on_stage_of, range, refused, relax};
use crate::common::world::cache;
use crate::common::{Event, TestPlatform};
use slat::{
    Access, BreakBeforeMake, Format, Gpa, Hpa, Invalidation, MapError, PageSize, Tables,
    UnmapEntry, Vmid,
};
use std::sync::atomic::Ordering::SeqCst;

const PAGE: PageSize = PageSize::SIZE_4K;
const BLOCK: PageSize = PageSize::SIZE_2M;

fn a_fault_invalidates_and_counts_the_rest_of_an_unmap<H: Hardware>() {
    let (page, block) = (range(2 * M + 20 * K, 4 * K), range(6 * M, 2 * M));
    // Entries below the one that a larger leaf would take; and a table in place of a block.
    for (at, size, largest) in
        [(page, PAGE, BLOCK), (block, BLOCK, PageSize::SIZE_1G), (block, BLOCK, PAGE)]
    {
        on_stage::<H>((H::usual(), 40, 8), |_, guard, frames| {
            // This page keeps the tables while others are unmapped.
            guard.map(range(2 * M, 4 * K), Hpa(0), RAM, PAGE, frames).unwrap();
            guard.map(at, Hpa(at.start().0), RAM, size, frames).unwrap();
            let mut places = [const { UnmapEntry::EMPTY }; 1];
            let mut batch = guard.unmap_batch(&mut places);
            assert_eq!(guard.unmap(at, &mut batch), Ok(at.size()));
            guard.platform().take_events();
            let last = at.end().0 - 1;
            let reserved = guard.reserve(Gpa(last), largest, frames).unwrap().range();
            let pages = range(at.end().0 - 4 * K, 4 * K);
            assert_eq!(reserved, if largest == PAGE { pages } else { at });
            let stale = Invalidation { vmid: Vmid(1), range: Some(at), leaf: None, tables: true };
            assert_eq!(guard.platform().take_events(), [Event::Invalidate(stale)]);
            assert_eq!(guard.counts().invalidations, 1);
            assert_eq!(batch.complete().count(), 1);
        });
    }
}
on!(a_fault_invalidates_and_counts_the_rest_of_an_unmap);

fn a_fault_that_wants_a_block_shares_anothers_reserved_page<H: Hardware>() {
    let platform = TestPlatform::new(BreakBeforeMake::Always);
    let tables = Tables::new(H::usual(), Vmid(1), 40, &platform).unwrap();
    let (mut first, mut second) = (platform.register(), platform.register());
    let mut frames = Vec::new();
    let mut frames = cache::<H>(&platform, &mut frames, 4);
    let mut guard = tables.enter(&mut first).unwrap();
    let mut other = tables.enter(&mut second).unwrap();
    let early = guard.reserve(Gpa(0), PAGE, &mut frames).unwrap();
    let late = other.reserve(Gpa(0), BLOCK, &mut frames).unwrap();
    assert_eq!(late.range(), range(0, 4 * K));
    assert_eq!(early.commit(Hpa(0), RAM), Ok(Some(4 * K)));
    assert_eq!(late.commit(Hpa(0), RAM), Ok(None));
    drop((guard, other, frames));
    crate::common::destroy(tables);
}
on!(a_fault_that_wants_a_block_shares_anothers_reserved_page);

/// The guest's numbers are those that no reader slot has.
fn the_guest_numbers_the_reservations_of_those_without_a_slot<H: Hardware>() {
    let platform = TestPlatform::new(BreakBeforeMake::Always);
    let mut tables = Tables::new(H::usual(), Vmid(1), 40, &platform).unwrap();
    let hardware = H::of(&tables);
    let mut frames = Vec::new();
    let mut frames = cache::<H>(&platform, &mut frames, 4);
    let mut guard = tables.enter_mut();
    for number in 0..5 {
        let at = number * 4 * K;
        let _ = guard.reserve(Gpa(at), PAGE, &mut frames).unwrap();
        let token = <H::Format as slat::Format>::reserved(1 << 47 | number);
        assert_eq!(hardware.pte(&platform, at).0.load(SeqCst), token, "{number}");
    }
    drop((guard, frames));
    crate::common::destroy(tables);
}
on!(the_guest_numbers_the_reservations_of_those_without_a_slot);

#[test]
fn a_fault_takes_no_entry_that_covers_more_than_the_guest() {
    on_stage::<Ept<true>>((ept(), 28, 4), |_, guard, frames| {
        let mut storage = Vec::new();
        let mut one = cache::<Ept<true>>(guard.platform(), &mut storage, 1);
        // The table that would hold a block of 1 GiB is built, and stays empty.
        let early = guard.reserve(Gpa(5), PageSize::SIZE_1G, &mut one);
        refused(early, 5, MapError::CacheEmpty);
        let reserved = guard.reserve(Gpa(5), PageSize::SIZE_1G, frames).unwrap();
        assert_eq!(reserved.range(), range(0, 2 * M));
    });
}

fn a_fault_without_new_tables_refuses_a_foreign_cache_too<H: Hardware>() {
    let other = TestPlatform::new(BreakBeforeMake::Always);
    on_stage::<H>((H::usual(), 40, 4), |_, guard, frames| {
        guard.map(range(0, 4 * K), Hpa(0), RAM, PAGE, frames).unwrap();
        let before = guard.counts().entries_written;
        let mut storage = Vec::new();
        let mut foreign = cache::<H>(&other, &mut storage, 0);
        let result = guard.reserve(Gpa(4 * K), PAGE, &mut foreign);
        refused(result, 4 * K, MapError::ForeignCache);
        assert_eq!(guard.counts().entries_written, before);
    });
}
on!(a_fault_without_new_tables_refuses_a_foreign_cache_too);

fn a_fault_on_a_block_reads_down_to_it_and_writes_it_thrice<H: Hardware>() {
    on_stage::<H>((H::usual(), 39, 4), |_, guard, frames| {
        guard.map(range(0, 2 * M), Hpa(0), RAM, BLOCK, frames).unwrap();
        let before = guard.counts();
        let reserved = guard.reserve(Gpa(4 * M + 5), BLOCK, frames).unwrap();
        let done = reserved.commit_told(Hpa(4 * M), RAM, || Ok::<(), ()>(()));
        assert_eq!(done, Ok(Ok(Some(2 * M))));
        let after = guard.counts();
        let read = after.entries_read - before.entries_read;
        let written = after.entries_written - before.entries_written;
        assert_eq!((read, written), (u64::from(guard.geometry().root_level), 3));
    });
}
on!(a_fault_on_a_block_reads_down_to_it_and_writes_it_thrice);

#[test]
fn a_fault_fills_the_entries_of_a_table_and_not_all_its_frame() {
    let format = slat::format::power::Power { output_bits: 48 };
    on_stage::<Core<16, true>>((format, 52, 4), |tables, guard, frames| {
        let size = PageSize::from_bytes(64 * K).unwrap();
        let _ = guard.reserve(Gpa(0), size, frames).unwrap();
        let tree = Core::<16, true>::of(tables).tree(guard.platform());
        let (table, _) = tree.tables.iter().find(|(_, table)| table.height == 1).unwrap();
        let words = guard.platform().table(*table, 512).iter().map(|word| word.load(SeqCst));
        let empty: Vec<_> = words.map(|word| word == 0).collect();
        assert_eq!(empty[1..32], [true; 31]);
        assert!(!empty[32..].contains(&true));
    });
}

/// A block that allows an access, and lacks nothing but the accessed state, becomes accessed.
fn a_fault_in_an_old_block_that_allows_the_access_is_answered<H: Hardware>() {
    on_stage_of::<H>(BreakBeforeMake::Never, (H::usual(), 40, 8), |_, guard, cache| {
        let (all, page) = (range(2 * M, 2 * M), 1 << H::PAGE);
        guard.map(all, Hpa(0), RAM, PageSize::SIZE_2M, cache).unwrap();
        for access in [Access::Read, Access::Write, Access::Execute] {
            for pages in [1, 3] {
                guard.age_leaf(Gpa(2 * M), true).unwrap().unwrap();
                let part = range(2 * M + 12 * page, pages * page);
                let result = relax(guard, part, access);
                assert_eq!(result, Ok(2 * M), "{}, {access:?}", H::Format::NAME);
                let found = guard.translate(Gpa(2 * M)).unwrap().unwrap();
                assert_eq!((found.size.bytes(), found.attributes), (2 * M, RAM));
                let again = relax(guard, part, access);
                assert_eq!(again, Ok(0));
            }
        }
        // A part of a block gets no right that the block lacks, nor does it become dirty alone.
        guard.clean(all).unwrap();
        guard.write_protect(all).unwrap();
        guard.invalidate();
        let part = range(2 * M + 12 * page, page);
        let reason = slat::ChangeError::CutsBlock { size: PageSize::SIZE_2M };
        let result = relax(guard, part, Access::Write);
        assert_eq!(result.unwrap_err().reason, reason);
    });
}
on!(
    a_fault_in_an_old_block_that_allows_the_access_is_answered:
    arm_4k, ept, riscv_without_svadu, radix_4k_where_software_sets_r_and_c
);
