//! Both ends of both address spaces, on the widest guests and on the smallest.

use crate::common::hardware::Hardware;
use crate::common::stage::{K, M, RAM, host, on_stage, range, refused, relax};
use crate::common::unmap;
use crate::common::world::size;
use slat::{
    Access, AgeBitmaps, AgeOptions, ChangeError, Gpa, Hpa, PageSize, Pages, RangeError, TableBits,
};

/// Every operation, on the widest guests and on the smallest.
fn everything_can_be_done_to_the_first_and_the_last_page<H: Hardware>(widths: &[u32]) {
    for &bits in widths {
        pages_at_both_ends::<H>(bits);
    }
}
on!(
    everything_can_be_done_to_the_first_and_the_last_page:
    arm_4k(&[48, 40, 25]), ept_five_levels(&[52, 49]), ept(&EACH);
    arm_16k(&[48, 41, 26]), arm_64k(&[48, 47, 30]), arm_4k_lpa2(&[52, 51, 26]),
    arm_16k_lpa2(&[52, 51, 26]), arm_64k_lpa(&[52, 47, 30]), npt_five_levels(&[52, 49]),
    npt(&EACH), ept_2m(&EACH), riscv(&[59, 51, 50, 42, 41, 12]), radix_4k(&[52, 40, 21, 16]),
    radix_64k(&[52, 40, 21, 16])
);
/// The smallest range is one page.
const EACH: [u32; 9] = [48, 40, 39, 38, 30, 21, 20, 13, 12];

fn pages_at_both_ends<H: Hardware>(bits: u32) {
    let page = 1 << H::PAGE;
    let top = 1u64 << bits;
    let smallest = size(page);
    on_stage::<H>((H::usual(), bits, 12), |tables, guard, cache| {
        let ends = [(0, (1 << H::OUTPUT) - page), (top - page, 0)];
        let ends = if top == page { &ends[1..] } else { &ends[..] };
        for &(gpa, hpa) in ends {
            let at = range(gpa, page);
            // Every size is tried; those that do not fit into the guest are not used.
            let reservation = guard.reserve(Gpa(gpa + 5), size(H::sizes()[0]), cache).unwrap();
            let reserved = reservation.range();
            assert!(reserved.start().0 <= gpa && gpa < reserved.end().0 && reserved.end().0 <= top);
            drop(reservation);
            assert_eq!(guard.map(at, Hpa(hpa), RAM, size(H::sizes()[0]), cache), Ok(page));
            // Nothing is mapped beyond the address space, even if the lower bits of the address
            // select a leaf.
            for beyond in [gpa.wrapping_add(top), gpa.wrapping_add(1 << 63), u64::MAX] {
                assert_eq!(guard.translate(Gpa(beyond)), Ok(None));
                assert_eq!(guard.descriptor(Gpa(beyond)), None);
            }
            assert_eq!(host::<H>(guard, gpa), Some(Hpa(hpa)));
            assert_eq!(host::<H>(guard, gpa + page - 1), Some(Hpa(hpa + page - 1)));
            assert_eq!(guard.leaves(at).unwrap().count(), 1);
            assert_eq!(guard.clean_caches(at), Ok(page));
            let mut bits_of = [0];
            assert_eq!(guard.harvest(at, &mut bits_of), Ok(1));
            assert_eq!(bits_of, [1]);
            for skip in [TableBits::Ignored, TableBits::Exact] {
                let (mut young, mut unanswered) = ([0], [0]);
                let mut ages = AgeBitmaps { young: &mut young, unanswered: &mut unanswered };
                let how = AgeOptions { clear: true, table_bits: skip, flush_tlb: true };
                assert_eq!(guard.age(at, &mut ages, how).unwrap().young, 1);
                assert_eq!(young, [1]);
                assert_eq!(relax(guard, at, Access::Read), Ok(page));
            }
            assert_eq!(relax(guard, at, Access::Write), Ok(page));
            let named = Pages { start: Gpa(gpa), bits: &[1] };
            assert_eq!(guard.clean_pages(&named), Ok(page));
            assert_eq!(guard.write_protect_pages(&named), Ok(page));
            assert_eq!(guard.execute_protect(at), Ok(page));
            assert_eq!(relax(guard, at, Access::Execute), Ok(page));
            assert_eq!(guard.split(at, smallest, cache), Ok(0));
            assert_eq!(guard.collapse(at, smallest), Ok(0));
        }
        // The whole address space at once; in a large guest the walk skips empty parts.
        let all = range(0, top);
        assert_eq!(guard.leaves(all).unwrap().count(), ends.len());
        assert_eq!(guard.clean_caches(all), Ok(ends.len() as u64 * page));
        assert_eq!(guard.write_protect(all), Ok(0));
        assert_eq!(relax(guard, all, Access::Write), Ok(ends.len() as u64 * page));
        assert_eq!(guard.write_protect(all), Ok(ends.len() as u64 * page));
        assert_eq!(guard.split(all, smallest, cache), Ok(0));
        assert_eq!(guard.collapse(all, size(H::sizes()[0])), Ok(0));
        assert_eq!(guard.dump().to_string().lines().count(), 1 + ends.len());
        let gone = unmap(guard, all);
        let ends: Vec<_> = ends.iter().map(|&(gpa, hpa)| (Gpa(gpa), Hpa(hpa))).collect();
        assert_eq!(gone.iter().map(|run| (run.gpa, run.hpa)).collect::<Vec<_>>(), ends);
        guard.refresh();
        tables.reclaim();
        // The tables that remain cover more than the guest's addresses.
        let hardware = H::of(tables);
        let tree = hardware.tree(guard.platform());
        assert!(tree.runs.is_empty());
        assert!(tree.tables.values().all(|table| table.end > top), "{:x?}", tree.tables);
    });
}

fn blocks_at_both_ends_are_split_protected_and_collapsed<H: Hardware>(widths: &[u32]) {
    for &bits in widths {
        blocks_at_both_ends::<H>(bits);
    }
}
on!(
    blocks_at_both_ends_are_split_protected_and_collapsed:
    arm_4k(&[48, 40, 25]), ept_five_levels(&[52, 49]), ept(&[48, 39, 22]);
    arm_16k(&[48, 26]), arm_64k(&[48, 30]), arm_4k_lpa2(&[52, 51, 26]), arm_16k_lpa2(&[52, 51, 26]),
    arm_64k_lpa(&[52, 47]), npt_five_levels(&[52, 49]), npt(&[48, 39, 22]), ept_2m(&[48, 39, 22]),
    riscv(&[59, 50, 41, 22]), radix_4k(&[52, 40, 22]), radix_64k(&[52, 40, 22])
);

fn blocks_at_both_ends<H: Hardware>(bits: u32) {
    let (page, block) = (1u64 << H::PAGE, 1u64 << (H::PAGE + H::LAST_STRIDE));
    let (top, largest) = (1u64 << bits, size(H::sizes()[0]));
    on_stage::<H>((H::usual(), bits, 16), |_, guard, cache| {
        for (gpa, hpa) in [(0, (1 << H::OUTPUT) - block), (top - block, 0)] {
            let all = range(gpa, block);
            assert_eq!(guard.map(all, Hpa(hpa), RAM, largest, cache), Ok(block));
            for at in [gpa, gpa + block - 1] {
                let found = guard.translate(Gpa(at)).unwrap().unwrap();
                let leaf = (found.hpa, found.size.bytes());
                assert_eq!(leaf, (Hpa(hpa + (at - gpa)), block));
            }
            for end in [range(gpa, page), range(gpa + block - page, page)] {
                guard.split(end, size(page), cache).unwrap();
                assert_eq!(guard.write_protect(end), Ok(page));
            }
            assert_eq!(relax(guard, all, Access::Write), Ok(2 * page));
            assert_eq!(guard.collapse(all, size(block)), Ok(block));
            assert_eq!(guard.leaves(all).unwrap().count(), 1);
            let pages = block / page;
            let bitmap = match pages {
                ..64 => vec![(1 << pages) - 1],
                _ => vec![!0; pages as usize / 64],
            };
            let named = Pages { start: Gpa(gpa), bits: &bitmap };
            assert_eq!(guard.write_protect_pages(&named), Ok(block));
            assert_eq!(unmap(guard, all)[0].bytes, block);
        }
    });
}

fn a_bitmap_names_pages_to_the_last_and_is_refused_beyond<H: Hardware>(widths: &[u32]) {
    for &bits in widths {
        let (page, top) = (1u64 << H::PAGE, 1u64 << bits);
        on_stage::<H>((H::usual(), bits, 12), |_, guard, cache| {
            let last = range(top - 2 * page, 2 * page);
            assert_eq!(guard.map(last, Hpa(0), RAM, size(page), cache), Ok(2 * page));
            let start = Gpa(top - 64 * page);
            let named = Pages { start, bits: &[1 << 63, 0, 0] };
            assert_eq!(guard.write_protect_pages(&named), Ok(page));
            let writable = |guard: &crate::common::world::GuardOf<'_, '_, H>, at| {
                guard.translate(Gpa(at)).unwrap().unwrap().attributes.write
            };
            assert!(writable(guard, top - 2 * page) && !writable(guard, top - page));
            // The pages before the end are done.
            let across = Pages { start, bits: &[1 << 62, 1] };
            let end = Gpa(top + page);
            let reason = ChangeError::Range(RangeError::BeyondAddressSize { end, bits });
            refused(guard.write_protect_pages(&across), top, reason);
            assert!(!writable(guard, top - 2 * page));
            let across = Pages { start, bits: &[1 << 63, 1] };
            refused(guard.clean_pages(&across), top, reason);
            assert!(!guard.translate(Gpa(top - page)).unwrap().unwrap().attributes.dirty);
            // Addresses that do not fit into a number.
            let near = !(page - 1);
            for (start, bit, from) in [(near, 1, near), (near, 2, near), (near - page, 2, near)] {
                let bitmap = [bit];
                let named = Pages { start: Gpa(start), bits: &bitmap };
                let (bad, size) = (if bit == 2 && start == near { near } else { from }, page);
                let reason = RangeError::Overflow { start: Gpa(bad), size };
                for result in [guard.clean_pages(&named), guard.write_protect_pages(&named)] {
                    refused(result, start, ChangeError::Range(reason));
                }
            }
            // The start is inside a page.
            let odd = Pages { start: Gpa(8), bits: &[1] };
            let range = range(8, page);
            let reason = ChangeError::Range(RangeError::Unaligned { range, page });
            refused(guard.clean_pages(&odd), 8, reason);
            // An empty bitmap names no page, so nothing is refused.
            let none = Pages { start: Gpa(u64::MAX), bits: &[0; 4] };
            assert_eq!(guard.clean_pages(&none), Ok(0));
            assert_eq!(guard.write_protect_pages(&Pages { start, bits: &[] }), Ok(0));
        });
    }
}
on!(
    a_bitmap_names_pages_to_the_last_and_is_refused_beyond:
    arm_4k(&[48, 25]), ept(&[48]);
    arm_16k(&[48]), arm_64k(&[30]), npt(&[48]), ept_2m(&[20])
);

fn a_fault_never_maps_past_the_end_of_a_small_guest<H: Hardware>(
    widths: std::ops::RangeInclusive<u32>,
) {
    for bits in widths {
        let top = 1 << bits;
        on_stage::<H>((H::usual(), bits, 8), |tables, guard, cache| {
            let (at, root) = (Gpa(top - 1), H::of(tables).root().height);
            let reservation = guard.reserve(at, size(H::sizes()[0]), cache).unwrap();
            let range = reservation.range();
            let most = top.min(H::size(root));
            let expected = H::sizes().into_iter().find(|&size| size <= most).unwrap();
            assert_eq!((range.end().0, range.size()), (top, expected));
            assert_eq!(reservation.commit(Hpa(0), RAM), Ok(Some(expected)));
            assert_eq!(host::<H>(guard, top - 1), Some(Hpa(expected - 1)));
            assert_eq!(unmap(guard, crate::common::stage::range(0, top))[0].bytes, expected);
        });
    }
}
on!(
    a_fault_never_maps_past_the_end_of_a_small_guest:
    arm_4k(25..=31), ept(12..=31);
    npt(12..=31), ept_2m(12..=31)
);

/// As many blocks stand broken together as the caller allows, and none that are far apart.
fn blocks_are_broken_together_with_their_neighbours_only<H: Hardware>() {
    for (second, together, apart) in [
        (2 * M, 2, false),
        (4 * M, 2, true),
        (4 * M, 3, false),
        (38 * M, 64, false),
        (40 * M, 64, true),
        (2 * M, 1, true),
    ] {
        // The range ends with the last block, or after it.
        for more in [0, 2 * M] {
            on_stage::<H>((H::usual(), 40, 24), |_, guard, cache| {
                let block = PageSize::SIZE_2M;
                for at in [0, second] {
                    let done = guard.map(range(at, 2 * M), Hpa(at), RAM, block, cache);
                    assert_eq!(done, Ok(2 * M));
                }
                guard.platform().take_events();
                let all = range(0, second + 2 * M + more);
                let page = PageSize::SIZE_4K;
                let done = guard.split_together(all, page, cache, together);
                assert_eq!((done, guard.counts().broken), (Ok(4 * M), 2));
                let told = guard.platform().take_invalidations();
                let found: Vec<_> = told.iter().map(|what| what.range.unwrap()).collect();
                let one = vec![range(0, second + 2 * M)];
                let two = vec![range(0, 2 * M), range(second, 2 * M)];
                assert_eq!(found, if apart { two } else { one }, "{together} at {second:#x}");
            });
        }
    }
}
on!(blocks_are_broken_together_with_their_neighbours_only);

/// It holds wherever in a table the range begins, and however many tables it skips at once.
fn a_split_without_frames_stops_at_the_start_of_the_block<H: Hardware>() {
    on_stage::<H>((H::usual(), 40, 24), |_, guard, cache| {
        let (page, block) = (PageSize::SIZE_4K, PageSize::SIZE_2M);
        let all = range(0, 40 * M);
        assert_eq!(guard.map(all, Hpa(0), RAM, block, cache), Ok(40 * M));
        // Seventeen tables, then three blocks.
        assert_eq!(guard.split(range(0, 34 * M), page, cache), Ok(34 * M));
        for first in [0, 4 * K, 1020 * K, 2 * M, 2 * M + 4 * K] {
            let mut none = [];
            let mut none = slat::TableCache::new(guard.platform(), &mut none);
            let part = range(first, 40 * M - first);
            let result = guard.split(part, page, &mut none);
            refused(result, 34 * M, slat::SplitError::CacheEmpty);
        }
    });
}
on!(a_split_without_frames_stops_at_the_start_of_the_block);
