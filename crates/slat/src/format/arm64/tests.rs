use super::*;
use crate::format::entries::entries;

entries!(configurations(), 2, 1);

fn configurations() -> [Arm64K4; 2] {
    [false, true].map(|hardware_dirty| Arm64K4 { hardware_dirty, ..Default::default() })
}

#[test]
fn address_widths_that_the_format_lacks_are_refused_with_the_allowed_ones() {
    for bits in [0, 24, 49, 64] {
        let error = Arm64K4::default().geometry(bits).unwrap_err();
        assert_eq!((error.min, error.max), (25, 48));
    }
}

#[test]
fn a_cpu_with_fewer_physical_address_bits_takes_no_wider_guest() {
    let small = Arm64K4 { output_bits: 40, ..Default::default() };
    assert_eq!(small.geometry(41).unwrap_err().max, 40);
    assert!(small.geometry(40).is_ok());
}

#[test]
fn with_lpa2_sixteen_tables_at_level_0_reach_52_bits() {
    let of = |bits| {
        let g = Arm64Lpa2K4::default().geometry(bits).unwrap();
        (Arm64Lpa2K4::level_name(g.root_level), g.root_entries)
    };
    // DDI 0487, AArch64.S2InconsistentSL: level -1, which takes no concatenation, is never the
    // lowest.
    assert_eq!((of(43), of(44), of(48)), ((1, 8192), (0, 32), (0, 512)));
    assert_eq!((of(49), of(52)), ((0, 1024), (0, 8192)));
    let of = |bits| {
        let g = Arm64Lpa2K16::default().geometry(bits).unwrap();
        (Arm64Lpa2K16::level_name(g.root_level), g.root_entries)
    };
    assert_eq!((of(48), of(51), of(52)), ((1, 2 * 2048), (1, 16 * 2048), (0, 32)));
}

#[test]
fn with_lpa_sixteen_tables_and_less_reach_52_bits_from_level_1() {
    let of = |bits| {
        let g = Arm64LpaK64::default().geometry(bits).unwrap();
        (Arm64LpaK64::level_name(g.root_level), g.root_entries)
    };
    assert_eq!((of(46), of(47)), ((2, 16 * 8192), (1, 32)));
    assert_eq!((of(48), of(52)), ((1, 64), (1, 1024)));
    let error = Arm64LpaK64::default().geometry(53).unwrap_err();
    assert_eq!((error.min, error.max), (30, 52));
}

#[test]
fn widths_beyond_lpa2_are_refused_with_the_allowed_ones() {
    for bits in [0, 24, 53, 64] {
        let error = Arm64Lpa2K4::default().geometry(bits).unwrap_err();
        assert_eq!((error.min, error.max), (25, 52));
    }
    let small = Arm64Lpa2K16 { output_bits: 48, ..Default::default() };
    let error = small.geometry(49).unwrap_err();
    assert_eq!((error.min, error.max), (26, 48));
}

#[test]
fn a_relaxed_leaf_is_as_one_mapped_for_that_access() {
    for hardware_dirty in [false, true] {
        let format = Arm64K4 { hardware_dirty, ..Default::default() };
        let ram = format.encode(Attributes::RAM).unwrap();
        let old = Arm64K4::write_protected(ram) & !AF;
        assert_eq!(format.relaxed(old, Access::Write), ram);
        let read = format.decode(format.relaxed(old, Access::Read), 0);
        assert_eq!((read.accessed, read.write, read.dirty), (true, false, true));
    }
}

#[test]
fn write_protection_remembers_a_written_leaf_and_is_idempotent() {
    let format = Arm64K4 { hardware_dirty: true, ..Default::default() };
    let clean = Attributes { dirty: false, ..Attributes::RAM };
    for (attributes, dirty) in [(Attributes::RAM, true), (clean, false)] {
        let raw = Arm64K4::leaf(format.encode(attributes).unwrap(), 0, Hpa(0x1000));
        let protected = Arm64K4::write_protected(raw);
        let after = format.decode(protected, 0);
        assert_eq!((after.write, after.dirty), (false, dirty));
        assert_eq!(Arm64K4::write_protected(protected), protected);
    }
}
