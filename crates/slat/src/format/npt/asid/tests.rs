//! Tests against the manual's table of TLB_CONTROL and its VMCB layout.

use super::*;
use crate::addr::{Gpa, GpaRange};
use crate::invalidation::Vmid;

fn all() -> Invalidation {
    Invalidation { vmid: Vmid(3), range: None, leaf: None, tables: true }
}

#[test]
fn encodings_are_the_manuals_and_stand_above_the_asid() {
    use TlbControl::*;
    let words = [Nothing, FlushAll, FlushGuest, FlushGuestNonGlobal].map(|it| it.with_asid(0x7fff));
    assert_eq!(words, [0x7fff, 0x1_0000_7fff, 0x3_0000_7fff, 0x7_0000_7fff]);
}

#[test]
fn without_flush_by_asid_all_entries_go() {
    let page = GpaRange::new(Gpa(0x1000), 0x1000).unwrap();
    let page = Invalidation { range: Some(page), tables: false, ..all() };
    for what in [all(), page] {
        assert_eq!(Asids::from_cpuid(64, 1 << 6).control(&what), TlbControl::FlushGuest);
        assert_eq!(Asids::from_cpuid(64, !(1 << 6)).control(&what), TlbControl::FlushAll);
    }
}

#[test]
fn a_guest_gets_neither_the_hosts_asid_nor_an_invalid_one() {
    let cpu = Asids::from_cpuid(64, 0);
    assert_eq!([0, 1, 63, 64].map(|asid| cpu.can_be(asid)), [false, true, true, false]);
    assert!(!Asids::from_cpuid(0, 0).can_be(0));
}
