//! Rights of the pages that a bitmap names, and of one page: by which way they are changed, and
//! where the change stops.

use crate::common::hardware::Hardware;
use crate::common::hardware::arm::Arm;
use crate::common::hardware::grouped::GroupedArm;
use crate::common::stage::{K, M, RAM, arm, on_stage, range, refused, relax};
use crate::common::world::GuardOf;
use slat::{
    Access, ChangeError, Gpa, GpaRange, Hpa, Owner, PageSize, Pages, RangeError, UnmapEntry,
    UnmapError,
};
use std::sync::atomic::Ordering::SeqCst;

const PAGE: PageSize = PageSize::SIZE_4K;
const BLOCK: PageSize = PageSize::SIZE_2M;

fn page(number: u64) -> GpaRange {
    range(number * 4 * K, 4 * K)
}

/// Write-protects pages of the first table, from page `first` on. Returns the entries that it read
/// and wrote, and the pages that changed.
fn protect<H: Hardware>(
    guard: &mut GuardOf<'_, '_, H>,
    first: u64,
    bits: &[u64],
) -> (u64, u64, u64) {
    let before = guard.counts();
    let bytes = guard.write_protect_pages(&Pages { start: page(first).start(), bits }).unwrap();
    let after = guard.counts();
    let read = after.entries_read - before.entries_read;
    (read, after.entries_written - before.entries_written, bytes / (4 * K))
}

fn short_runs_skip_the_path_to_their_table_and_long_runs_walk<H: Hardware>() {
    on_stage::<H>((H::usual(), 39, 8), |_, guard, cache| {
        let up = u64::from(guard.geometry().root_level);
        guard.map(range(0, 2 * M), Hpa(0), RAM, PAGE, cache).unwrap();
        assert_eq!(protect::<H>(guard, 1, &[0b1011]), (3, 3, 3));
        assert_eq!(protect::<H>(guard, 1, &[0, u64::MAX]), (up + 64, 64, 64));
    });
}
on!(short_runs_skip_the_path_to_their_table_and_long_runs_walk);

fn a_bitmap_that_begins_inside_a_page_is_refused<H: Hardware>() {
    on_stage::<H>((H::usual(), 40, 8), |_, guard, cache| {
        guard.map(range(0, 2 * M), Hpa(0), RAM, PAGE, cache).unwrap();
        let before = guard.counts().entries_written;
        let odd = Pages { start: Gpa(8), bits: &[0b101] };
        let reason = RangeError::Unaligned { range: range(8, 4 * K), page: 4 * K };
        refused(guard.write_protect_pages(&odd), 8, ChangeError::Range(reason));
        refused(guard.clean_pages(&odd), 8, ChangeError::Range(reason));
        assert_eq!(guard.counts().entries_written, before);
    });
}
on!(a_bitmap_that_begins_inside_a_page_is_refused);

/// Entries that have an owner are left to the walk, which reads the whole run again.
fn pages_before_and_behind_one_that_has_an_owner_count_once<H: Hardware>() {
    on_stage::<H>((H::usual(), 40, 8), |_, guard, cache| {
        for number in [0, 2, 4, 6, 8] {
            guard.map(page(number), Hpa(number * 4 * K), RAM, PAGE, cache).unwrap();
        }
        for number in [1, 7] {
            guard.set_owner(page(number), None, Owner::new(7), cache).unwrap();
        }
        // The run that finds the table, one without an owner, and one more with an owner.
        let (_, written, pages) = protect::<H>(guard, 0, &[0b1_1101_0111]);
        assert_eq!((written, pages), (5, 5));
    });
}
on!(pages_before_and_behind_one_that_has_an_owner_count_once);

fn a_fault_gives_no_right_where_no_page_is_mapped<H: Hardware>() {
    on_stage::<H>((H::usual(), 40, 8), |tables, guard, cache| {
        guard.map(page(0), Hpa(0), RAM, PAGE, cache).unwrap();
        let _ = guard.reserve(page(1).start(), PAGE, cache).unwrap();
        guard.set_owner(page(2), None, Owner::new(7), cache).unwrap();
        let (hardware, platform) = (H::of(tables), guard.platform());
        let before = guard.counts().entries_written;
        for number in 1..=3 {
            let pte = hardware.pte(platform, number * 4 * K).0;
            let was = pte.load(SeqCst);
            for access in [Access::Read, Access::Write, Access::Execute] {
                let given = relax(guard, page(number), access);
                assert_eq!(given, Ok(0), "{access:?} of page {number}");
            }
            assert_eq!(guard.write_protect(page(number)), Ok(0));
            assert_eq!(pte.load(SeqCst), was);
        }
        assert_eq!(guard.counts().entries_written, before);
    });
}
on!(a_fault_gives_no_right_where_no_page_is_mapped);

fn a_block_cut_at_the_ranges_end_is_found_before_any_change<H: Hardware>() {
    on_stage::<H>((H::usual(), 40, 8), |_, guard, cache| {
        guard.map(page(1), Hpa(0), RAM, PAGE, cache).unwrap();
        guard.map(range(2 * M, 2 * M), Hpa(2 * M), RAM, BLOCK, cache).unwrap();
        let before = guard.counts().entries_written;
        let pages = range(4 * K, 2 * M);
        refused(guard.write_protect(pages), 4 * K, ChangeError::CutsBlock { size: BLOCK });
        let mut places = [const { UnmapEntry::EMPTY }; 2];
        let mut batch = guard.unmap_batch(&mut places);
        let result = guard.unmap(pages, &mut batch);
        refused(result, 4 * K, UnmapError::CutsBlock { size: BLOCK });
        assert_eq!(batch.complete().count(), 0);
        assert_eq!(guard.counts().entries_written, before);
    });
}
on!(a_block_cut_at_the_ranges_end_is_found_before_any_change);

/// The ends of a range of one page are not looked up before.
fn a_walk_to_a_page_that_cuts_a_block_reads_down_to_the_block<H: Hardware>() {
    on_stage::<H>((H::usual(), 39, 8), |_, guard, cache| {
        guard.map(range(2 * M, 2 * M), Hpa(0), RAM, BLOCK, cache).unwrap();
        let (at, up) = (2 * M + 4 * K, u64::from(guard.geometry().root_level));
        let before = guard.counts().entries_read;
        let result = guard.write_protect(range(at, 4 * K));
        refused(result, at, ChangeError::CutsBlock { size: BLOCK });
        assert_eq!(guard.counts().entries_read - before, up);
        let mut places = [const { UnmapEntry::EMPTY }; 1];
        let mut batch = guard.unmap_batch(&mut places);
        let result = guard.unmap(range(at, 4 * K), &mut batch);
        refused(result, at, UnmapError::CutsBlock { size: BLOCK });
        assert_eq!(batch.complete().count(), 0);
        assert_eq!(guard.counts().entries_read - before, 2 * up);
    });
}
on!(a_walk_to_a_page_that_cuts_a_block_reads_down_to_the_block);

#[test]
fn only_the_named_pages_of_a_group_are_protected() {
    on_stage::<GroupedArm<12>>((arm(), 40, 8), |_, guard, cache| {
        let group = range(0, 64 * K);
        guard.map_contiguous(range(0, 128 * K), Hpa(0), RAM, PAGE, cache).unwrap();
        let size = |guard: &GuardOf<'_, '_, GroupedArm<12>>, number: u64| {
            guard.translate(page(number).start()).unwrap().unwrap().size.bytes()
        };
        assert_eq!(size(guard, 0), group.size());
        let named = Pages { start: Gpa(0), bits: &[0b10_0101] };
        assert_eq!(guard.write_protect_pages(&named), Ok(3 * 4 * K));
        for number in 0..32 {
            let found = guard.translate(page(number).start()).unwrap().unwrap();
            assert_eq!(found.attributes.write, ![0, 2, 5].contains(&number), "page {number}");
        }
        assert_eq!((size(guard, 0), size(guard, 16)), (4 * K, 64 * K));
        guard.invalidate();
    });
}

#[test]
fn entries_of_two_tables_named_by_one_word_are_read_once() {
    on_stage::<Arm<12>>((arm(), 40, 8), |_, guard, cache| {
        guard.map(range(0, 4 * M), Hpa(0), RAM, PAGE, cache).unwrap();
        assert_eq!(protect::<Arm<12>>(guard, 510, &[0b10_1111]), (5, 5, 5));
    });
}
