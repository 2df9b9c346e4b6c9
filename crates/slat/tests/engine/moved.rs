//! Leaves that get other memory, by their costs and by what the machine is told.

use crate::common::Event;
use crate::common::hardware::arm::Arm;
use crate::common::hardware::grouped::GroupedArm;
use crate::common::stage::{G, K, M, RAM, host, on_stage, range};
use slat::format::arm64::Arm64K4;
use slat::{Attributes, Gpa, Hpa, Maintenance, PageSize};

const PAGE: PageSize = PageSize::SIZE_4K;
const BLOCK: PageSize = PageSize::SIZE_2M;
const READ: Attributes = Attributes { write: false, ..RAM };

#[test]
fn a_page_that_is_moved_costs_one_read_at_each_level() {
    on_stage::<Arm<12>>((Arm64K4::default(), 40, 8), |_, guard, cache| {
        let up = u64::from(guard.geometry().root_level);
        guard.map(range(0, 16 * K), Hpa(0), READ, PAGE, cache).unwrap();
        let before = guard.counts().entries_read;
        let page = range(4 * K, 4 * K);
        assert_eq!(guard.replace(page, Hpa(4 * K), Hpa(G), READ), Ok(4 * K));
        assert_eq!(guard.counts().entries_read - before, up + 1);
    });
}

#[test]
fn an_unmapped_page_is_not_taken_for_a_page_at_host_address_0() {
    on_stage::<Arm<12>>((Arm64K4::default(), 40, 8), |_, guard, cache| {
        guard.map(range(4 * K, 4 * K), Hpa(4 * K), READ, PAGE, cache).unwrap();
        assert_eq!(guard.replace(range(0, 4 * K), Hpa(0), Hpa(G), READ), Ok(0));
        assert_eq!(host::<Arm<12>>(guard, 0), None);
    });
}

#[test]
fn a_page_of_a_group_is_moved_alone() {
    on_stage::<GroupedArm<12>>((Arm64K4::default(), 40, 8), |_, guard, cache| {
        let group = range(2 * M, 64 * K);
        guard.map_contiguous(group, Hpa(2 * M), READ, PAGE, cache).unwrap();
        let page = range(2 * M + 8 * K, 4 * K);
        assert_eq!(guard.replace(page, Hpa(2 * M + 8 * K), Hpa(G), READ), Ok(4 * K));
        for number in 0..16 {
            let at = 2 * M + number * 4 * K;
            let found = guard.translate(Gpa(at)).unwrap().unwrap();
            let hpa = if number == 2 { G } else { at };
            assert_eq!((found.hpa, found.size), (Hpa(hpa), PAGE));
        }
    });
}

#[test]
fn a_blocks_new_memory_is_maintained_whole_before_its_use() {
    on_stage::<Arm<12>>((Arm64K4::default(), 40, 8), |_, guard, cache| {
        let up = u64::from(guard.geometry().root_level);
        let block = range(2 * M, 2 * M);
        guard.map(block, Hpa(2 * M), READ, BLOCK, cache).unwrap();
        guard.platform().take_events();
        let before = guard.counts().entries_read;
        assert_eq!(guard.replace(block, Hpa(2 * M), Hpa(8 * M), READ), Ok(2 * M));
        let events = guard.platform().take_events();
        let what = Maintenance::Instructions;
        assert_eq!(events[0], Event::Maintain { hpa: 8 * M, bytes: 2 * M, what });
        assert!(matches!(events[1..], [Event::Invalidate(_), Event::Publish]), "{events:?}");
        assert_eq!(guard.counts().entries_read - before, up, "the link and the block");
    });
}

#[test]
fn pages_that_were_moved_are_published_and_nothing_else_is() {
    on_stage::<Arm<12>>((Arm64K4::default(), 40, 8), |_, guard, cache| {
        let pages = range(0, 8 * K);
        guard.map(pages, Hpa(0), READ, PAGE, cache).unwrap();
        for (bytes, published) in [(8 * K, 1), (0, 0)] {
            guard.platform().take_events();
            assert_eq!(guard.replace(pages, Hpa(0), Hpa(G), READ), Ok(bytes));
            let events = guard.platform().take_events();
            assert_eq!(events.iter().filter(|event| **event == Event::Publish).count(), published);
        }
    });
}
