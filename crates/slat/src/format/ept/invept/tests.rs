//! Tests of operands against the manual's figure of the descriptor and its list of types.

use super::*;
use crate::addr::{Gpa, GpaRange, Hpa};
use crate::format::Format;
use crate::format::ept::Ept2M;
use crate::invalidation::Vmid;
use std::string::ToString;

const CAPABILITIES: u64 = 0x0000_0f01_0633_4141;

fn all() -> Invalidation {
    Invalidation { vmid: Vmid(3), range: None, leaf: None, tables: true }
}

#[test]
fn the_invept_descriptor_is_the_eptp_and_64_zero_bits_aligned() {
    let format = Ept2M::default();
    let eptp = format.eptp(&format.geometry(48).unwrap(), Hpa(0x000f_ffff_ffff_f000));
    let it = Invept { single_context: true }.instruction(&all(), eptp);
    // SAFETY: two words without padding.
    let words: [u64; 2] = unsafe { core::mem::transmute(it.descriptor) };
    // Write-back (6), a walk of 4 (3 << 3), accessed and dirty (1 << 6).
    assert_eq!(words, [0x000f_ffff_ffff_f05e, 0]);
    assert_eq!((size_of::<Descriptor>(), align_of::<Descriptor>()), (16, 16));
    assert_eq!(
        it.to_string(),
        "invept rax, [rcx] ; rax = 1, [rcx] = 0000000000000000:000ffffffffff05e"
    );
}

#[test]
fn single_context_is_type_1_and_all_contexts_are_type_2() {
    let cpu = Invept::from_capabilities(CAPABILITIES);
    assert_eq!(cpu.instruction(&all(), 0x505e).operand(), 1);
    let cpu = Invept::from_capabilities(CAPABILITIES & !(1 << 25));
    let it = cpu.instruction(&all(), 0x505e);
    assert_eq!((it.operand(), it.descriptor), (2, Descriptor::default()));
}

#[test]
fn a_page_takes_as_much_as_the_guest() {
    let cpu = Invept { single_context: true };
    let page = GpaRange::new(Gpa(0x1000), 0x1000).unwrap();
    let page = Invalidation { range: Some(page), tables: false, ..all() };
    assert_eq!(cpu.instruction(&page, 0x505e), cpu.instruction(&all(), 0x505e));
}
