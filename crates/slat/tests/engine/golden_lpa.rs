//! FEAT_LPA's 52-bit addresses on the 64K granule, against values from the manual (DDI 0487,
//! D8.3.1) and Linux's names (`PTE_ADDR_HIGH`, bits 15:12, from `PTE_ADDR_HIGH_SHIFT`, 36, up).

use crate::common::hardware::arm::{Arm, Descriptor};
use crate::common::stage::BBM;
use crate::golden_arm64::{
    children_keep_everything, leaves_are_the_manuals, widths_are_the_manuals,
};
use crate::golden_lpa2::{across, is_marked};
use slat::format::Format;
use slat::format::arm64::{Arm64K64, Arm64LpaK64};
use slat::{Attributes, Batched, Bounded, EveryEntry, Hpa};

#[test]
fn address_bits_51_to_48_stand_in_bits_15_to_12_of_leaves_and_tables() {
    let ram = Arm64LpaK64::default().encode(Attributes::RAM).unwrap();
    // Write-back 0b1111 << 2, S2AP 0b11 << 6, inner shareable 0b11 << 8, AF 1 << 10: 0x7fc.
    assert_eq!(ram, 0x7fc);
    for (hpa, raw) in [
        (0xa_1234_5678_0000, 0x0000_1234_5678_a7ff),
        (0xf_ffff_ffff_0000, 0x0000_ffff_ffff_f7ff),
        (0x1_0000_0000_0000, 0x17ff),
    ] {
        assert_eq!(Arm64LpaK64::leaf(ram, 0, Hpa(hpa)), raw);
        assert_eq!(Arm64LpaK64::leaf_address(raw, 0), Hpa(hpa));
    }
    // A block of 512m.
    assert_eq!(Arm64LpaK64::leaf(ram, 1, Hpa(0x9_8000_2000_0000)), 0x0000_8000_2000_97fd);
    assert_eq!(Arm64LpaK64::leaf_address(0x0000_8000_2000_97fd, 1), Hpa(0x9_8000_2000_0000));
    for (hpa, raw) in
        [(0x7_0000_0001_0000, 0x0000_0000_0001_7003), (0xf_ffff_ffff_0000, 0x0000_ffff_ffff_f003)]
    {
        assert_eq!(Arm64LpaK64::table(Hpa(hpa), 1), raw);
        assert_eq!(Arm64LpaK64::table_address(raw), Hpa(hpa));
        assert_eq!(Arm::<16, true>::fields(raw, 2), Descriptor::Table(hpa));
        let markers = [Arm64LpaK64::frozen(Hpa(hpa)), Arm64LpaK64::retired(Hpa(hpa))];
        assert_eq!(markers.map(Arm64LpaK64::table_address), [Hpa(hpa); 2]);
    }
    // Below 2^48 the descriptors are those of a CPU without FEAT_LPA.
    for level in [0, 1] {
        let hpa = Hpa(0xffff_e000_0000);
        assert_eq!(Arm64LpaK64::leaf(ram, level, hpa), Arm64K64::leaf(ram, level, hpa));
    }
}

#[test]
fn leaves_with_lpa_are_the_manuals_in_every_combination() {
    leaves_are_the_manuals::<16, true>();
}

#[test]
fn roots_of_every_width_up_to_52_bits_are_walked_by_hardware_as_by_the_engine() {
    widths_are_the_manuals::<16, true>(30);
}

#[test]
fn children_of_a_split_block_keep_address_bits_51_to_48() {
    for bbm in BBM {
        children_keep_everything::<16, true, EveryEntry>(bbm, 0x2000_0000);
        children_keep_everything::<16, true, Bounded>(bbm, 0x2000_0000);
        children_keep_everything::<16, true, Batched>(bbm, 0x2000_0000);
    }
}

#[test]
fn a_run_of_leaves_goes_on_where_address_bit_48_changes() {
    for unloaded in [false, true] {
        for before in [1, 5, 15, 16] {
            across::<16>(0x1_0000, 16, before, unloaded);
            across::<16>(0x2000_0000, 16, before, unloaded);
        }
    }
}

#[test]
fn hardware_marks_a_leaf_and_a_protection_forgets_nothing_of_its_address() {
    // AF=0, S2AP=01, DBM=1, inner shareable, normal write-back; bits 51:48 of the address are 0xc.
    let words = [0xc37f, 0xc77f, 0xc7ff].map(|low| 0x0008_0000_7c20_0000 | low);
    let words = [words[0], words[1], words[2], 0x0200_0000_7c20_c77f];
    is_marked::<16>((0x8_1234_5678_0000, 0xc_0000_7c20_0000), words);
}
