//! The right to write, given to one page: below a table that withholds it, or out of a group; and
//! what is left alone where the page is not one that is meant.

use crate::common::hardware::Hardware;
use crate::common::hardware::ept::Ept;
use crate::common::hardware::grouped::Grouped;
use crate::common::stage::{G, K, M, RAM, ept, on_stage, range, refused};
use crate::common::world::GuardOf;
use slat::format::arm64::Arm64K4;
use slat::{
    Access, Attributes, ChangeError, Gpa, GpaRange, Hpa, PageSize, Relax, Rights, Software,
};
use std::sync::atomic::Ordering::SeqCst;

type Intel = Ept<true>;

const PAGE: PageSize = PageSize::SIZE_4K;
const BLOCK: PageSize = PageSize::SIZE_2M;
const A: Software = Software::A;

fn page(number: u64) -> GpaRange {
    range(number * 4 * K, 4 * K)
}

fn writable<H: Hardware>(guard: &GuardOf<'_, '_, H>, number: u64) -> bool {
    guard.translate(page(number).start()).unwrap().unwrap().attributes.write
}

type Call = fn(&mut GuardOf<'_, '_, Intel>, u64) -> u64;

#[test]
fn a_table_gives_its_right_to_write_for_a_page_that_gets_it_and_for_no_other() {
    let calls: [(&str, Call); 3] = [
        ("relax", |guard, number| {
            guard
                .relax(page(number), Relax::new(Access::Write).only_if(A))
                .unwrap()
                .not_needed_here()
        }),
        ("allow", |guard, number| {
            guard
                .relax(page(number), Relax::new(Access::Write).only_if(A).unmarked())
                .unwrap()
                .not_needed_here()
        }),
        // The memory of page 1.
        ("grant", |guard, number| {
            guard.grant_write(page(number).start(), Hpa(4 * K), A).unwrap().not_needed_here()
        }),
    ];
    for (name, call) in calls {
        on_stage::<Intel>((ept(), 40, 8), |_, guard, cache| {
            for (number, software) in [(0, Software::B), (1, A.union(Software::B))] {
                let how = Attributes { software, ..RAM };
                guard.map(page(number), Hpa(number * 4 * K), how, PAGE, cache).unwrap();
            }
            guard.write_protect_subtrees(range(0, 2 * M)).unwrap();
            guard.invalidate();
            assert!(!writable::<Intel>(guard, 0) && !writable::<Intel>(guard, 1));
            let written = guard.counts().entries_written;
            assert_eq!(call(guard, 0), 0, "{name}");
            assert_eq!(guard.counts().entries_written, written, "{name}: nothing is to be done");
            assert_eq!(call(guard, 1), 4 * K, "{name}");
            assert!(!writable::<Intel>(guard, 0) && writable::<Intel>(guard, 1), "{name}");
        });
    }
}

#[test]
fn a_page_whose_rights_are_set_gets_the_right_that_its_table_withholds() {
    on_stage::<Intel>((ept(), 40, 8), |_, guard, cache| {
        guard.map(range(0, 8 * K), Hpa(0), RAM, PAGE, cache).unwrap();
        guard.write_protect_subtrees(range(0, 2 * M)).unwrap();
        guard.invalidate();
        assert_eq!(guard.protect(page(1), Rights::ALL), Ok(4 * K));
        assert!(!writable::<Intel>(guard, 0) && writable::<Intel>(guard, 1));
    });
}

#[test]
fn a_table_keeps_its_protection_if_the_page_is_in_a_block_that_is_refused() {
    on_stage::<Intel>((ept(), 40, 8), |_, guard, cache| {
        guard.map(range(0, 2 * M), Hpa(0), RAM, BLOCK, cache).unwrap();
        guard.write_protect_subtrees(range(0, G)).unwrap();
        guard.invalidate();
        let written = guard.counts().entries_written;
        let cuts = ChangeError::CutsBlock { size: BLOCK };
        let result = guard.relax(page(1), Access::Write).map(slat::LocalFlush::not_needed_here);
        refused(result, 4 * K, cuts);
        assert_eq!(guard.counts().entries_written, written);
    });
}

#[test]
fn a_page_of_a_group_gets_the_right_to_write_alone_whichever_member_it_is() {
    type Arm = Grouped<12>;
    const CONTIGUOUS: u64 = 1 << 52;
    let format = Arm64K4 { hardware_dirty: true, ..Default::default() };
    for member in [0, 3, 15] {
        on_stage::<Arm>((format, 39, 8), |tables, guard, cache| {
            let group = range(0, 64 * K);
            let how = Attributes { write: false, dirty: false, ..RAM };
            assert_eq!(guard.map_contiguous(group, Hpa(M), how, PAGE, cache), Ok(64 * K));
            let memory = guard.platform();
            let folded = |number: u64| {
                let pte = Arm::of(tables).pte(memory, number * 4 * K).0;
                pte.load(SeqCst) & CONTIGUOUS != 0
            };
            let gpa = Gpa(member * 4 * K);
            // The memory of another member.
            let other = Hpa(M + if member == 0 { 4 * K } else { 0 });
            assert!(!guard.grant_write(gpa, other, A).unwrap().is_changed());
            assert!((0..16).all(folded), "nothing is done");
            assert!(guard.grant_write(gpa, Hpa(M + gpa.0), A).unwrap().is_changed());
            for number in 0..16 {
                assert!(!folded(number));
                assert_eq!(writable::<Arm>(guard, number), number == member);
            }
        });
    }
}
