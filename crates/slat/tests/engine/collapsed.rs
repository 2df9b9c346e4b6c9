//! What a collapse reads before it seals, and what it makes of leaves that change while it works.

use crate::common::Moment;
use crate::common::hardware::Hardware;
use crate::common::hardware::grouped::GroupedArm;
use crate::common::stage::{BBM, CLEAN, G, K, M, RAM, arm, on_stage, on_stage_of, range};
use crate::common::world::{CacheOf, GuardOf};
use slat::{Attributes, BreakBeforeMake, Gpa, GpaRange, Hpa, PageSize, Software};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

const PAGE: PageSize = PageSize::SIZE_4K;
const BLOCK: PageSize = PageSize::SIZE_2M;

fn page(number: u64) -> GpaRange {
    range(number * 4 * K, 4 * K)
}

/// Maps the leaves of a size with the numbers `from..to` to memory at the same addresses.
fn map<H: Hardware>(
    guard: &mut GuardOf<'_, '_, H>,
    cache: &mut CacheOf<'_, H>,
    (from, to): (u64, u64),
    (attributes, size): (Attributes, PageSize),
) {
    if from != to {
        let at = range(from * size.bytes(), (to - from) * size.bytes());
        guard.map(at, Hpa(at.start().0), attributes, size, cache).unwrap();
    }
}

fn attributes<H: Hardware>(guard: &GuardOf<'_, '_, H>, gpa: u64) -> Attributes {
    guard.translate(Gpa(gpa)).unwrap().unwrap().attributes
}

fn a_table_is_read_to_the_first_difference_without_a_callback<H: Hardware>() {
    let format = H::usual();
    let asked = |guard: &mut GuardOf<'_, '_, H>| {
        let before = guard.counts().entries_read;
        let result = guard.collapse_where(range(0, 2 * M), BLOCK, |_| panic!("they differ"));
        assert_eq!(result, Ok(0));
        // One entry of each table on the way is read.
        guard.counts().entries_read - before - u64::from(guard.geometry().root_level)
    };
    let other = Some(Attributes { software: Software::A, ..RAM });
    for (odd, what) in [(0, None), (1, None), (100, None), (1, other), (100, other)] {
        on_stage::<H>((format, 39, 4), |_, guard, cache| {
            map::<H>(guard, cache, (0, odd), (RAM, PAGE));
            map::<H>(guard, cache, (odd + 1, 512), (RAM, PAGE));
            if let Some(what) = what {
                map::<H>(guard, cache, (odd, odd + 1), (what, PAGE));
            }
            assert_eq!(asked(guard), odd + 1, "{what:?}");
        });
    }
    // Memory whose address is no multiple of a block's size.
    on_stage::<H>((format, 39, 4), |_, guard, cache| {
        guard.map(range(0, 2 * M), Hpa(4 * K), RAM, PAGE, cache).unwrap();
        assert_eq!(asked(guard), 1);
    });
}
on!(a_table_is_read_to_the_first_difference_without_a_callback);

fn a_table_whose_second_leaf_is_missing_or_elsewhere_stays<H: Hardware>() {
    let read = Attributes { write: false, ..RAM };
    let cases = [
        (PAGE, read, None),
        // The memory of the first leaf once more; or that of a larger leaf's neighbour.
        (PAGE, RAM, Some(0)),
        (PAGE, RAM, Some(2 * M)),
        (BLOCK, RAM, Some(G)),
        (BLOCK, RAM, Some(512 * G)),
    ];
    for (size, what, second) in cases {
        on_stage::<H>((H::usual(), 40, 4), |_, guard, cache| {
            map::<H>(guard, cache, (0, 1), (what, size));
            map::<H>(guard, cache, (2, 512), (what, size));
            if let Some(hpa) = second {
                let at = range(size.bytes(), size.bytes());
                guard.map(at, Hpa(hpa), what, size, cache).unwrap();
            }
            let all = range(0, 512 * size.bytes());
            let to = PageSize::from_bytes(all.size()).unwrap();
            assert_eq!(guard.collapse(all, to), Ok(0), "{size}, {second:x?}");
        });
    }
}
on!(a_table_whose_second_leaf_is_missing_or_elsewhere_stays);

fn a_page_cleaned_in_the_collapse_callback_leaves_block_clean<H: Hardware>() {
    on_stage::<H>((H::usual(), 40, 4), |tables, guard, cache| {
        map::<H>(guard, cache, (0, 1), (RAM, PAGE));
        map::<H>(guard, cache, (1, 512), (CLEAN, PAGE));
        let mut reader = guard.platform().register();
        let other = RefCell::new(tables.enter(&mut reader).unwrap());
        let done = guard.collapse_where(range(0, 2 * M), BLOCK, |first| {
            first.dirty && other.borrow_mut().clean(page(0)) == Ok(4 * K)
        });
        assert_eq!(done, Ok(2 * M));
        assert_eq!(attributes::<H>(guard, 0), Attributes { accessed: true, ..CLEAN });
    });
}
on!(a_page_cleaned_in_the_collapse_callback_leaves_block_clean);

fn a_page_that_loses_a_right_in_the_callback_keeps_its_table<H: Hardware>() {
    for odd in [0, 5, 511] {
        on_stage::<H>((H::usual(), 40, 4), |tables, guard, cache| {
            map::<H>(guard, cache, (0, 512), (RAM, PAGE));
            let mut reader = guard.platform().register();
            let other = RefCell::new(tables.enter(&mut reader).unwrap());
            let done = guard.collapse_where(range(0, 2 * M), BLOCK, |_| {
                other.borrow_mut().write_protect(page(odd)) == Ok(4 * K)
            });
            assert_eq!(done, Ok(0));
            assert_eq!(H::of(tables).tree(guard.platform()).marks, 0, "{odd}");
            let writable = [0, 4, 5, 6, 511].map(|n| attributes::<H>(guard, n * 4 * K).write);
            assert_eq!(writable, [0, 4, 5, 6, 511].map(|n| n != odd));
        });
    }
}
on!(a_page_that_loses_a_right_in_the_callback_keeps_its_table);

fn a_block_was_used_if_two_of_its_pages_were<H: Hardware>() {
    for bbm in BBM {
        on_stage_of::<H>(bbm, (H::usual(), 40, 4), |_, guard, cache| {
            for (pages, what) in [((0, 3), CLEAN), ((3, 5), RAM), ((5, 512), CLEAN)] {
                map::<H>(guard, cache, pages, (what, PAGE));
            }
            assert_eq!(guard.collapse(range(0, 2 * M), BLOCK), Ok(2 * M));
            assert_eq!(attributes::<H>(guard, 0), RAM);
        });
    }
}
on!(a_block_was_used_if_two_of_its_pages_were);

/// The block stands while the leaves are invalidated: if it were not accessed, vCPUs could fault.
#[test]
fn a_block_was_used_at_once_if_a_page_before_a_group_was() {
    on_stage_of::<GroupedArm<12>>(
        BreakBeforeMake::Never,
        (arm(), 40, 4),
        |tables, guard, cache| {
            for (pages, what) in
                [((0, 1), CLEAN), ((1, 2), RAM), ((2, 16), CLEAN), ((32, 512), CLEAN)]
            {
                map::<GroupedArm<12>>(guard, cache, pages, (what, PAGE));
            }
            let group = range(64 * K, 64 * K);
            guard.map_contiguous(group, Hpa(64 * K), CLEAN, PAGE, cache).unwrap();
            let (hardware, platform) = (GroupedArm::<12>::of(tables), guard.platform());
            assert!(hardware.tree(platform).runs.iter().any(|run| run.size == 64 * K));
            let seen = Rc::new(Cell::new(None));
            let sees = seen.clone();
            platform.meanwhile(Some(Box::new(move |platform, moment| {
                if moment == Moment::Invalidating {
                    let run = hardware.tree(platform).runs[0];
                    sees.set(Some((run.size, run.leaf.own)));
                }
            })));
            assert_eq!(guard.collapse(range(0, 2 * M), BLOCK), Ok(2 * M));
            platform.meanwhile(None);
            assert_eq!(seen.get(), Some((2 * M, RAM)));
        },
    );
}
