//! Tests of the bits of nested paging.

use super::*;
use crate::format::entries::entries;

const FORMAT: Npt1G = Npt1G { five_levels: false, output_bits: 52 };
const FIVE: Npt1G = Npt1G { five_levels: true, ..FORMAT };

entries!([FORMAT], 3, P);

#[test]
fn the_root_is_the_pml4_of_which_the_width_selects_entries() {
    let of = |bits| FORMAT.geometry(bits).map(|g| (g.root_level, g.root_entries));
    for (bits, ptes) in [(12, 1), (32, 1), (39, 1), (40, 2), (46, 128), (48, 512)] {
        assert_eq!(of(bits), Ok((3, ptes)), "{bits} bits");
    }
}

#[test]
fn with_five_levels_the_root_is_the_pml5_for_every_width() {
    let of = |bits| FIVE.geometry(bits).map(|g| (g.root_level, g.root_entries));
    for (bits, ptes) in [(12, 1), (40, 1), (48, 1), (49, 2), (52, 16)] {
        assert_eq!(of(bits), Ok((4, ptes)), "{bits} bits");
    }
    assert_eq!(FIVE.geometry(53).unwrap_err().max, 52, "physical addresses have no more");
    let small = Npt1G { output_bits: 48, ..FIVE };
    assert_eq!(small.geometry(49).unwrap_err().max, 48);
}

#[test]
fn a_width_of_five_levels_or_of_less_than_a_page_is_refused_with_those_allowed() {
    for bits in [0, 11, 49, 57, 64] {
        let error = FORMAT.geometry(bits).unwrap_err();
        assert_eq!((error.min, error.max), (12, 48));
        let text = std::format!("{error}");
        assert!(text.contains("AMD NPT") && text.contains("12 to 48 bits"), "{text}");
    }
}

#[test]
fn a_cpu_with_fewer_physical_address_bits_takes_no_wider_guest() {
    let small = Npt1G { output_bits: 40, ..FORMAT };
    assert_eq!(small.geometry(41).unwrap_err().max, 40);
    assert!(small.geometry(40).is_ok());
    assert_eq!(Npt1G { output_bits: 64, ..FORMAT }.output_bits(), 52);
}

#[test]
fn without_1g_blocks_a_leaf_of_1g_is_none() {
    let raw = Npt1G::leaf(FORMAT.encode(Attributes::RAM).unwrap(), 2, Hpa(1 << 30));
    assert_eq!(Npt1G::kind(raw, 2), Kind::Leaf);
    assert_eq!(Npt2M::kind(raw, 2), Kind::Frozen);
    assert_eq!(Npt2M::level_of(crate::PageSize::SIZE_1G).ok(), None);
    assert_eq!(Npt2M::level_of(crate::PageSize::SIZE_2M), Ok(1));
}

#[test]
fn foreign_memory_types_decode_to_one_that_encodes() {
    for memory in [0, PWT, PCD, PCD | PWT] {
        for raw in [P | U | memory, P | U | memory | SW_NORMAL] {
            let once = FORMAT.decode(raw, 0);
            let twice = FORMAT.decode(FORMAT.encode(once).unwrap(), 0);
            assert_eq!(once, twice);
        }
    }
    // Above level 0, bit 12 belongs to the PAT and not to the address.
    let raw = Npt1G::leaf(P | U, 1, Hpa(1 << 21)) | 1 << 12;
    assert_eq!(Npt1G::leaf_address(raw, 1), Hpa(1 << 21));
}

#[test]
fn an_error_names_the_features_that_a_cpu_lacks() {
    let (extended, sizes, svm) = (FEATURE_NX | FEATURE_1G, 0x3030, FEATURE_NP);
    assert_eq!(Npt1G::from_cpuid(extended, sizes, svm), Ok(Npt1G { output_bits: 48, ..FORMAT }));
    assert!(Npt2M::from_cpuid(FEATURE_NX, sizes, svm).is_ok());
    let error = Npt1G::from_cpuid(FEATURE_NX, sizes, svm).unwrap_err();
    assert_eq!(error, MissingFeatures { extended: FEATURE_1G, svm: 0 });
    let text = std::format!("{}", Npt1G::from_cpuid(0, sizes, 0).unwrap_err());
    for name in ["nested paging (bit 0 ", ", no-execute (bit 20 ", ", 1g blocks (bit 26 "] {
        assert!(text.contains(name), "{text}");
    }
}
