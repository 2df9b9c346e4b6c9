//! The right to write, given to one page out of a group.

use crate::common::hardware::Hardware;
use crate::common::hardware::grouped::GroupedArm;
use crate::common::stage::{K, M, RAM, on_stage, range};
use crate::common::world::GuardOf;
use slat::format::arm64::Arm64K4;
use slat::{Attributes, Gpa, GpaRange, Hpa, PageSize, Software};
use std::sync::atomic::Ordering::SeqCst;

const PAGE: PageSize = PageSize::SIZE_4K;
const A: Software = Software::A;

fn page(number: u64) -> GpaRange {
    range(number * 4 * K, 4 * K)
}

fn writable<H: Hardware>(guard: &GuardOf<'_, '_, H>, number: u64) -> bool {
    guard.translate(page(number).start()).unwrap().unwrap().attributes.write
}

#[test]
fn any_page_of_a_group_gets_the_right_to_write_alone() {
    type Arm = GroupedArm<12>;
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
