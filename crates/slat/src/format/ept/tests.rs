//! Tests of the bits of EPT.

use super::vtd::{MissingVtd, Vtd};
use super::*;
use crate::format::entries::{entries, invalid, leaves};
use crate::format::long_mode::ADDRESS;

fn configurations() -> [Ept1G; 24] {
    core::array::from_fn(|n| Ept1G {
        accessed_dirty: n & 1 != 0,
        split_execute: n & 2 != 0,
        forced_write_back: n & 4 != 0,
        five_levels: false,
        output_bits: 52,
        vtd: [None, Some(Vtd { snoop: false }), Some(Vtd { snoop: true })][n % 3],
    })
}

entries!(configurations(), 3, R | W | X | XU);

#[test]
fn the_root_is_the_pml4_of_which_the_width_selects_entries() {
    let of = |bits| Ept1G::default().geometry(bits).map(|g| (g.root_level, g.root_entries));
    for (bits, ptes) in [(12, 1), (32, 1), (39, 1), (40, 2), (46, 128), (48, 512)] {
        assert_eq!(of(bits), Ok((3, ptes)), "{bits} bits");
    }
    for bits in [0, 11, 49, 57, 64] {
        let error = of(bits).unwrap_err();
        assert_eq!((error.min, error.max), (12, 48));
    }
}

#[test]
fn the_root_is_the_pml5_where_four_levels_do_not_suffice() {
    let five = Ept1G { five_levels: true, ..Default::default() };
    let of = |bits| five.geometry(bits).map(|g| (g.root_level, g.root_entries));
    for (bits, root) in [(12, (3, 1)), (48, (3, 512)), (49, (4, 2)), (52, (4, 16))] {
        assert_eq!(of(bits), Ok(root), "{bits} bits");
    }
    assert_eq!(five.geometry(53).unwrap_err().max, 52, "MAXPHYADDR is no more");
    let small = Ept1G { output_bits: 48, ..five };
    assert_eq!(small.geometry(49).unwrap_err().max, 48);
}

#[test]
fn a_cpu_with_fewer_physical_address_bits_takes_no_wider_guest() {
    let client = Ept1G { output_bits: 39, ..Default::default() };
    assert_eq!(client.geometry(40).unwrap_err().max, 39);
    assert!(client.geometry(39).is_ok());
    assert_eq!(Ept1G { output_bits: 64, ..client }.output_bits(), 52);
}

#[test]
fn without_1g_blocks_a_leaf_of_1g_is_none() {
    let raw = Ept1G::leaf(Ept1G::default().encode(Attributes::RAM).unwrap(), 2, Hpa(1 << 30));
    assert_eq!(Ept1G::kind(raw, 2), Kind::Leaf);
    assert_eq!(Ept2M::kind(raw, 2), Kind::Frozen);
    assert_eq!(Ept2M::level_of(crate::PageSize::SIZE_1G).ok(), None);
    assert_eq!(Ept2M::level_of(crate::PageSize::SIZE_2M), Ok(1));
}

#[test]
fn foreign_memory_types_decode_to_one_that_encodes() {
    for format in configurations() {
        for raw in (0..16u64).map(|n| R | n << MEMORY_SHIFT) {
            let once = format.decode(raw, 0);
            let twice = format.decode(format.encode(once).unwrap(), 0);
            assert_eq!(once, twice);
        }
    }
}

#[test]
fn an_error_names_the_features_that_a_cpu_lacks() {
    // The value of a client CPU.
    let full = 0x0f01_0673_4141;
    let format = Ept1G::from_capabilities(full, 46).unwrap();
    assert_eq!((format.accessed_dirty, format.output_bits), (true, 46));
    assert!(!Ept1G::from_capabilities(full & !(1 << 21), 36).unwrap().accessed_dirty);
    assert!(Ept2M::from_capabilities(full & !(1 << 17), 36).is_ok());
    for number in [6, 14, 16, 17, 20] {
        let error = Ept1G::from_capabilities(full & !(1 << number), 46).unwrap_err();
        assert_eq!(error.missing, 1 << number);
        let text = std::format!("{error}");
        assert!(text.contains(&std::format!("(bit {number} of")), "{text}");
    }
    assert!(Ept1G::from_capabilities(full & !(1 << 25), 46).is_ok(), "all contexts will do");
    let error = Ept1G::from_capabilities(1 << 6, 46).unwrap_err();
    let text = std::format!("{error}");
    assert!(text.contains("write-back") && text.contains(", INVEPT (bit 20"), "{text}");
}

/// The specification's figures of second-stage entries: SNP is bit 11 of a leaf and reserved in a
/// table; TM, bit 62 of a leaf, is reserved in a table.
#[test]
fn vt_d_finds_snp_in_leaves_and_no_bit_that_it_reserves() {
    let alone = Ept1G::default();
    let shared = |snoop| Ept1G { vtd: Some(Vtd { snoop }), ..alone };
    let page = |format: Ept1G, level, hpa| {
        Ept1G::leaf(format.encode(Attributes::RAM).unwrap(), level, Hpa(hpa))
    };
    assert_eq!(page(alone, 0, 0x1234_5000), 0x1234_5377);
    assert_eq!(page(shared(false), 0, 0x1234_5000), 0x1234_5377);
    assert_eq!(page(shared(true), 0, 0x1234_5000), 0x1234_5b77);
    assert_eq!(page(shared(true), 1, 0x1240_0000), 0x1240_0bf7);
    assert_eq!(page(shared(true), 2, 0x4000_0000), 0x4000_0bf7);
    let device = Attributes { memory: Memory::Device, ..Attributes::RAM };
    assert_eq!(shared(true).encode(device).unwrap() | 0xfee0_0000, 0xfee0_0b07);
    let reserved = |table| if table { 1 << 7 | 1 << 11 | 1 << 62 } else { 1u64 << 62 };
    for format in [shared(false), shared(true)] {
        assert!(!format.marks_valid() && alone.marks_valid());
        for leaf in (0..3).flat_map(|level| leaves(format, level)) {
            assert_eq!(leaf & reserved(false), 0);
            assert_eq!(leaf >> 11 & 1 == 1, format.vtd.unwrap().snoop);
            // The children of a split keep SNP, and so does a leaf whose rights change.
            let bits = Ept1G::attribute_bits(leaf, 1);
            assert_eq!(format.encode(format.decode(leaf, 1)), Ok(bits));
            assert_eq!((bits ^ leaf) >> 11 & 1, 0);
            let relaxed = format.relaxed(Ept1G::write_protected(leaf), Access::Write);
            assert_eq!((relaxed ^ leaf) & (1 << 11 | 1 << 62), 0);
        }
    }
    for level in 1..4 {
        assert_eq!(Ept1G::table(Hpa(ADDRESS), level) & reserved(true), 0);
    }
    // With neither R nor W an entry is not present, and VT-d ignores the rest.
    assert!(invalid(Ept1G::default()).iter().all(|(raw, _)| raw & 0b11 == 0));
}

#[test]
fn a_unit_is_taken_if_it_walks_these_tables_coherently() {
    let (capability, extended) = (1 << 10 | 1 << 34 | 1 << 35, 1 << 0 | 1 << 7);
    assert_eq!(Vtd::from_registers(capability, extended, true), Ok(Vtd { snoop: true }));
    assert_eq!(Vtd::from_registers(capability, 1, true), Ok(Vtd { snoop: false }));
    assert!(Vtd::from_registers(capability & !(1 << 35), extended, false).is_ok());
    let lacks = |missing, extended| Err(MissingVtd { capability: missing, extended });
    for missing in [1 << 10, 1 << 34, 1 << 35] {
        let found = Vtd::from_registers(capability & !missing, extended, true);
        assert_eq!(found, lacks(missing, 0));
    }
    assert_eq!(Vtd::from_registers(capability, 1 << 7, true), lacks(0, 1));
    let text = std::format!("{}", Vtd::from_registers(0, 0, false).unwrap_err());
    assert_eq!(
        text,
        "this IOMMU lacks tables of four levels (bit 10 of CAP_REG), 2m blocks (bit 34 of \
         CAP_REG), coherent walks (bit 0 of ECAP_REG)"
    );
}
