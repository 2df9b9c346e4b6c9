use super::*;

#[test]
fn start_level_is_the_lowest_that_sixteen_tables_reach() {
    let of = |bits| {
        let g = Arm64K4::default().geometry(bits).unwrap();
        (Arm64K4::level_name(g.root_level), g.root_entries / 512)
    };
    // DDI 0487, D8.2.8, "Concatenated translation tables", 4 KiB granule.
    assert_eq!(of(34), (2, 16));
    assert_eq!(of(35), (1, 0), "32 entries of 1 GiB");
    assert_eq!(of(39), (1, 1));
    assert_eq!(of(40), (1, 2));
    assert_eq!(of(43), (1, 16));
    assert_eq!(of(44), (0, 0), "32 entries of 512 GiB");
    assert_eq!(of(48), (0, 1));
    let g = Arm64K64::default().geometry(40).unwrap();
    assert_eq!((Arm64K64::level_name(g.root_level), g.root_entries), (2, 2048));
    let g = Arm64K16::default().geometry(40).unwrap();
    assert_eq!((Arm64K16::level_name(g.root_level), g.root_entries), (2, 16 * 2048));
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
fn address_bits_51_and_50_stand_where_the_shareability_was() {
    let bits = Arm64Lpa2K4::default().encode(Attributes::RAM).unwrap();
    assert_eq!(bits >> SH_SHIFT & 0b11, 0);
    for high in 0..4u64 {
        let hpa = Hpa(high << 50 | 0x2_5a5a_4000_0000);
        let held = high << 8 | 0x2_5a5a_4000_0000;
        for level in 0..3 {
            let leaf = Arm64Lpa2K4::leaf(bits, level, hpa);
            assert_eq!(leaf, bits | held | if level == 0 { 0b11 } else { 0b01 });
            assert_eq!(Arm64Lpa2K4::leaf_address(leaf, level), hpa);
            assert_eq!(Arm64Lpa2K4::attribute_bits(leaf, level), bits);
        }
        assert_eq!(Arm64Lpa2K4::table(hpa, 1), held | 0b11);
        let frozen = Arm64Lpa2K4::frozen(hpa);
        assert_eq!(Arm64Lpa2K4::kind(frozen, 1), Kind::Frozen);
        let retired = Arm64Lpa2K4::retired(hpa);
        assert_eq!(Arm64Lpa2K4::kind(retired, 1), Kind::Retired);
        for raw in [Arm64Lpa2K4::table(hpa, 1), frozen, retired] {
            assert_eq!((Arm64Lpa2K4::table_address(raw), raw & DBM), (hpa, 0));
        }
    }
}

#[test]
fn attributes_survive_encoding_in_every_combination() {
    attributes_survive::<false>();
    attributes_survive::<true>();
}

fn attributes_survive<const DS: bool>() {
    let bools = [false, true];
    for fwb in bools {
        let format =
            Arm64::<12, DS> { forced_write_back: fwb, hardware_dirty: true, ..Default::default() };
        use Memory::{Device, DeviceStrict, NonCacheable, Normal};
        for memory in [Normal, NonCacheable, Device, DeviceStrict] {
            for execute in [Execute::All, Execute::User, Execute::None, Execute::Kernel] {
                for bits in 0..64u8 {
                    let on = |i: u8| bits >> i & 1 == 1;
                    let attributes = Attributes {
                        read: on(0),
                        write: on(1),
                        execute,
                        memory,
                        accessed: on(2),
                        dirty: on(3),
                        software: Software::new(on(4), on(5)),
                    };
                    let raw = format.encode(attributes).unwrap();
                    let top = Hpa((1 << format.output_bits()) - 0x1000);
                    for raw in [raw, Arm64::<12, DS>::leaf(raw, 0, top)] {
                        assert_eq!(format.decode(raw, 0), attributes);
                    }
                }
            }
        }
    }
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
