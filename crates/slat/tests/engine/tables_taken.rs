//! The most table pages that an operation takes: never more than `Geometry` says, and exactly that
//! many where nothing is mapped.

use crate::common::hardware::Config;
use crate::common::hardware::Hardware;
use crate::common::hardware::ept::Ept;
use crate::common::stage::{RAM, on_stage, range};
use crate::common::unmap;
use proptest::prelude::*;
use slat::{Gpa, GpaRange, Hpa, MapError, PageSize};

const CONFIG: Config =
    Config { forced_write_back: false, hardware_marks: true, split_execute: false };

/// Guest and host addresses, in units of the smallest block and of pages, and sizes of leaves.
#[derive(Clone, Debug)]
struct Case {
    from: (u64, u64),
    length: (u64, u64),
    /// The difference of the host's addresses from the guest's.
    delta: (u64, u64),
    largest: usize,
    before: (u64, u64),
}

fn case() -> impl Strategy<Value = Case> {
    let pages = || prop_oneof![3 => Just(0u64), 2 => 0..4u64, 1 => 0..64u64];
    // Also around the first entries of the next level.
    let blocks = || prop_oneof![0..4u64, 510..514u64, 8190..8194u64];
    let length = (0..5u64, pages());
    let delta =
        (prop_oneof![2 => Just(0), 1 => Just(1u64)], prop_oneof![3 => Just(0), 1 => 0..3u64]);
    (blocks(), pages(), length, delta, 0..3usize, (0..3u64, pages())).prop_map(
        |(blocks, pages, length, delta, largest, before)| Case {
            from: (blocks, pages),
            length,
            delta,
            largest,
            before,
        },
    )
}

fn takes<H: Hardware>(case: &Case, bits: u32) {
    let (page, block) = (H::size(0), H::size(1));
    let bytes = |(blocks, pages): (u64, u64)| blocks * block + pages * page;
    let start = bytes(case.from);
    let range = range(start, bytes(case.length).max(page));
    let hpa = Hpa(start + 4 * H::size(2) + bytes(case.delta));
    let size = |index: usize| {
        let sizes = H::sizes();
        PageSize::from_bytes(sizes[index.min(sizes.len() - 1)]).unwrap()
    };
    let (largest, smallest) = (size(case.largest), PageSize::from_bytes(page).unwrap());
    on_stage::<H>((H::format(&CONFIG), bits, MOST), |tables, guard, cache| {
        let geometry = tables.geometry();
        let full = |cache: &mut crate::common::world::CacheOf<'_, H>| {
            cache.fill(MOST).unwrap();
            assert_eq!(cache.len(), MOST);
        };
        let map = geometry.tables_to_map::<H::Format>(range, hpa, largest);
        let any = geometry.tables_to_map::<H::Format>(range, hpa, smallest);
        let split = geometry.tables_to_split::<H::Format>(range, smallest);
        assert!(map <= any, "larger leaves need no more");
        if any.max(split) as usize > MOST {
            return;
        }
        // Empty tables take exactly that many.
        full(cache);
        assert_eq!(guard.map(range, hpa, RAM, largest, cache), Ok(range.size()));
        assert_eq!((MOST - cache.len()) as u64, map, "{range} to {hpa}, {largest}");
        full(cache);
        guard.split(range, smallest, cache).unwrap();
        let taken = (MOST - cache.len()) as u64;
        assert!(taken <= split, "{taken} for {range} from {largest}, not {split}");
        guard.invalidate();
        unmap(guard, GpaRange::new(Gpa(0), 1 << geometry.address_bits).unwrap());
        guard.refresh();
        tables.reclaim();
        // Some pages are mapped already.
        full(cache);
        let first = GpaRange::new(range.start(), bytes(case.before).clamp(page, range.size()));
        guard.map(first.unwrap(), hpa, RAM, smallest, cache).unwrap();
        full(cache);
        guard.map(range, hpa, RAM, largest, cache).unwrap();
        let taken = (MOST - cache.len()) as u64;
        assert!(taken <= map, "{taken} for {range} to {hpa}, not {map}");
        unmap(guard, GpaRange::new(Gpa(0), 1 << geometry.address_bits).unwrap());
        guard.refresh();
        tables.reclaim();
        // A fault.
        full(cache);
        let most = geometry.tables_to_reserve::<H::Format>(largest);
        drop(guard.reserve(range.start(), largest, cache).unwrap());
        assert_eq!((MOST - cache.len()) as u64, most, "a fault at {}", range.start());
        let short = geometry.tables_to_reserve::<H::Format>(smallest);
        assert!(most <= short && short == u64::from(geometry.root_level));
    });
}

const MOST: usize = 40;

fn no_operation_takes_more_table_pages_than_its_bound<H: Hardware>(widths: &[u32]) {
    let config = ProptestConfig { source_file: Some(file!()), ..crate::properties::config() };
    proptest!(config, |(case in case())| {
        widths.iter().for_each(|&bits| takes::<H>(&case, bits));
    });
}
on!(
    no_operation_takes_more_table_pages_than_its_bound:
    arm_4k(&[40, 48]), ept(&[48]);
    ept_five_levels(&[52]), riscv(&[50, 59]), radix_64k(&[52]), arm_16k(&[48]), arm_64k_lpa(&[52]),
    npt_five_levels(&[52])
);

fn a_split_of_the_largest_blocks_takes_its_bound_of_tables<H: Hardware>(bits: u32) {
    let sizes = H::sizes();
    let (large, page) = (sizes[0], PageSize::from_bytes(H::size(0)).unwrap());
    on_stage::<H>((H::format(&CONFIG), bits, MOST), |tables, guard, cache| {
        let all = range(0, 4 * large);
        let largest = PageSize::from_bytes(large).unwrap();
        let geometry = tables.geometry();
        guard.map(all, Hpa(0), RAM, largest, cache).unwrap();
        // Both ends of the range lie in blocks that it covers in part.
        let part = range(large - page.bytes(), 2 * page.bytes());
        let most = geometry.tables_to_split::<H::Format>(part, page);
        assert_eq!(most, 2 * (sizes.len() as u64 - 1));
        cache.fill(MOST).unwrap();
        guard.split(part, page, cache).unwrap();
        assert_eq!((MOST - cache.len()) as u64, most);
        guard.invalidate();
        unmap(guard, all);
    });
}
on!(
    a_split_of_the_largest_blocks_takes_its_bound_of_tables:
    arm_4k(48), ept(48);
    riscv(50), radix_64k(52)
);

#[test]
fn an_operation_with_one_table_less_than_its_bound_runs_dry() {
    on_stage::<Ept<true>>((<Ept<true>>::format(&CONFIG), 40, 4), |tables, guard, cache| {
        let at = range((1 << 30) - 0x1000, 0x2000);
        let page = PageSize::SIZE_4K;
        let most = tables.geometry().tables_to_map::<slat::format::ept::Ept1G>(at, Hpa(0), page);
        // A table of 1g entries, and on either side of 1 GiB one of 2m entries and one of pages.
        assert_eq!(most, 5);
        assert_eq!(cache.len() as u64, most - 1);
        let stopped = guard.map(at, Hpa(0), RAM, page, cache).unwrap_err();
        assert_eq!((stopped.at, stopped.reason), (Gpa(1 << 30), MapError::CacheEmpty));
        unmap(guard, at);
    });
}
