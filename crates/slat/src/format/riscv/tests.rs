//! Tests of the bits of the G-stage.

use super::*;
use crate::format::entries::{entries, leaves};

fn configurations() -> [RiscV; 2] {
    [false, true].map(|memory_types| RiscV { memory_types, ..Default::default() })
}

entries!(configurations(), 4, V);

#[test]
fn tables_take_the_narrowest_mode_and_a_root_of_2048_entries() {
    let format = RiscV { widest: Mode::Sv57x4, ..Default::default() };
    for (bits, level) in [(12, 2), (32, 2), (41, 2), (42, 3), (50, 3), (51, 4), (59, 4)] {
        let geometry = format.geometry(bits).unwrap();
        assert_eq!((geometry.root_level, geometry.root_entries), (level, 2048), "{bits} bits");
        assert_eq!(geometry.root_bytes(RiscV::PAGE_SHIFT), 16 << 10);
    }
}

#[test]
fn a_width_that_the_cpu_has_no_mode_for_is_refused_with_those_that_it_has() {
    for (widest, most) in [(Mode::Sv39x4, 41), (Mode::Sv48x4, 50), (Mode::Sv57x4, 59)] {
        let format = RiscV { widest, ..Default::default() };
        assert_eq!(widest.address_bits(), most);
        assert!(format.geometry(most).is_ok());
        for bits in [0, 11, most + 1, 64, u32::MAX] {
            let error = format.geometry(bits).unwrap_err();
            assert_eq!((error.min, error.max), (12, most));
        }
    }
    assert_eq!(RiscV { output_bits: 64, ..Default::default() }.output_bits(), 56);
}

#[test]
fn no_change_of_rights_makes_a_leaf_a_table_or_a_reserved_encoding() {
    let all = configurations().into_iter().flat_map(|f| leaves(f, 0).map(move |raw| (f, raw)));
    for (format, raw) in all {
        let accesses = [Access::Read, Access::Write, Access::Execute];
        let changed = accesses.map(|access| format.relaxed(raw, access));
        let protected = RiscV::execute_protected(RiscV::write_protected(raw));
        let unread = RiscV::readable(raw, false);
        let all = [raw, RiscV::write_protected(raw), RiscV::execute_protected(raw), protected];
        let unreadable = [unread, RiscV::write_protected(unread), RiscV::execute_protected(unread)];
        for leaf in all.into_iter().chain(unreadable).chain(changed) {
            assert_ne!(leaf & (R | X), 0, "{leaf:#x}");
            assert!(leaf & W == 0 || leaf & R != 0, "{leaf:#x}");
            assert_eq!(leaf & U == 0, rights(leaf) == 0, "{leaf:#x}");
        }
    }
}

#[test]
fn an_hgatp_that_cannot_be_is_refused_with_the_field_that_does_not_fit() {
    let geometry = RiscV::default().geometry(41).unwrap();
    let hgatp = |level, root, vmid| {
        RiscV::hgatp(&Geometry { root_level: level, ..geometry }, Hpa(root), Vmid(vmid))
    };
    assert_eq!(hgatp(1, 0x4000, 1), Err(HgatpError::Level { level: 1 }));
    assert_eq!(hgatp(5, 0x4000, 1), Err(HgatpError::Level { level: 5 }));
    assert_eq!(hgatp(2, 0x4000, 1 << 14), Err(HgatpError::Vmid { vmid: Vmid(1 << 14) }));
    for root in [0x1000, 0x2000, 1 << 56] {
        assert_eq!(hgatp(2, root, 1), Err(HgatpError::Root { root: Hpa(root) }));
    }
    let text = std::format!("{}", hgatp(2, 0x1000, 1).unwrap_err());
    assert!(text.contains("0x1000") && text.contains("0x4000"), "{text}");
    assert!(hgatp(4, (1 << 56) - 0x4000, 0x3fff).is_ok());
}
