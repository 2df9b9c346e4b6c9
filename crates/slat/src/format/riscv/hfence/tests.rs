//! Tests of operands and encodings against the manuals' figures, and against the words that Linux's
//! `arch/riscv/include/asm/insn-def.h` makes.

use super::*;
use crate::addr::{Gpa, PageSize};
use proptest::prelude::*;
use std::string::{String, ToString};
use std::vec::Vec;

const VMID: Vmid = Vmid(0x123);

fn what(range: Option<(u64, u64)>, leaf: Option<u64>, tables: bool) -> Invalidation {
    let range = range.map(|(at, bytes)| GpaRange::new(Gpa(at), bytes).unwrap());
    let leaf = leaf.map(|bytes| PageSize::from_bytes(bytes).unwrap());
    Invalidation { vmid: VMID, range, leaf, tables }
}

fn text(hart: &Hfence, what: &Invalidation) -> Vec<String> {
    hart.sequence(what).map(|instruction| instruction.to_string()).collect()
}

#[test]
fn instructions_are_encoded_as_the_manual_has_them() {
    let both = Operands { rs1: Some(0), rs2: Some(VMID) };
    let (none, guest) = (Operands { rs1: None, rs2: None }, Operands { rs1: None, ..both });
    // funct7 | rs2 | rs1 | funct3 | rd | opcode
    assert_eq!(Instruction::HfenceGvma(none).encoding(), 0x6200_0073);
    assert_eq!(Instruction::HfenceGvma(guest).encoding(), 0x62b0_0073);
    assert_eq!(Instruction::HfenceGvma(both).encoding(), 0x62b5_0073);
    assert_eq!(Instruction::HinvalGvma(both).encoding(), 0x66b5_0073);
    assert_eq!(Instruction::SfenceWInval.encoding(), 0x1800_0073);
    assert_eq!(Instruction::SfenceInvalIr.encoding(), 0x1810_0073);
}

#[test]
fn an_instructions_address_is_shifted_by_two_and_the_sbis_not() {
    let page = what(Some((0x123_4567_8000, 0x1000)), None, false);
    let hart = Hfence::default();
    assert_eq!(text(&hart, &page), ["hfence.gvma a0, a1 # a0 = 0x48d159e000, a1 = 0x123"]);
    let call = hart.remote(&page, Harts { mask: 0b101, base: 4 });
    assert_eq!((call.extension, call.function), (u64::from(u32::from_be_bytes(*b"RFNC")), 3));
    assert_eq!(call.arguments, [0b101, 4, 0x123_4567_8000, 0x1000, 0x123]);
}

#[test]
fn unlinked_tables_and_many_pages_take_the_whole_guest() {
    let hart = Hfence::default();
    for what in [
        what(Some((0x1000, 0x1000)), None, true),
        what(Some((0, 65 << 12)), None, false),
        what(None, None, false),
        what(Some((0, 65 << 21)), Some(2 << 20), false),
        what(Some((u64::MAX << 12, 0xfff)), Some(2 << 20), false),
    ] {
        assert_eq!(text(&hart, &what), ["hfence.gvma x0, a1 # a1 = 0x123"]);
        assert!(hart.sequence(&what).is_whole_guest());
        assert_eq!(hart.remote(&what, Harts::ALL).arguments, [0, u64::MAX, 0, u64::MAX, 0x123]);
    }
    let most = what(Some((0, 64 << 12)), None, false);
    assert_eq!(text(&hart, &most).len(), 64);
    assert_eq!(text(&hart, &what(Some((0x3f_f000, 0x2000)), Some(2 << 20), false)).len(), 2);
}

#[test]
fn two_svinval_fences_order_all_invalidations_between_them() {
    let hart = Hfence { svinval: true, ..Hfence::default() };
    let pages = what(Some((0x4000, 0x2000)), None, false);
    assert_eq!(
        text(&hart, &pages),
        [
            "sfence.w.inval",
            "hinval.gvma a0, a1 # a0 = 0x1000, a1 = 0x123",
            "hinval.gvma a0, a1 # a0 = 0x1400, a1 = 0x123",
            "sfence.inval.ir",
        ]
    );
    let all = ["sfence.w.inval", "hinval.gvma x0, a1 # a1 = 0x123", "sfence.inval.ir"];
    assert_eq!(text(&hart, &what(None, None, true)), all);
}

proptest! {
    #[test]
    fn every_page_of_a_range_is_named_once(
        page in 0u64..1 << 47,
        pages in 1u64..80,
        leaf in prop_oneof![Just(12u32), Just(21), Just(30)],
        svinval: bool,
        most in 0u64..70,
    ) {
        let what = what(Some((page << 12, pages << 12)), Some(1 << leaf), false);
        let hart = Hfence { svinval, most_by_address: most };
        let sequence = hart.sequence(&what);
        let (first, last) = (page << 12 >> leaf, (page + pages - 1) << 12 >> leaf);
        prop_assert_eq!(sequence.is_whole_guest(), last - first + 1 > most);
        let named: Vec<_> = sequence
            .filter_map(|it| match it {
                Instruction::HfenceGvma(operands) if !svinval => Some(operands),
                Instruction::HinvalGvma(operands) if svinval => Some(operands),
                _ => None,
            })
            .collect();
        prop_assert!(named.iter().all(|operands| operands.rs2 == Some(VMID)));
        let leaves: Vec<_> = named.iter().filter_map(|it| Some(it.rs1? << 2 >> leaf)).collect();
        if last - first + 1 > most {
            prop_assert_eq!((leaves.len(), named.len()), (0, 1));
        } else {
            prop_assert_eq!(leaves, (first..=last).collect::<Vec<_>>());
        }
    }
}
