//! Tests of the bits of EPT.

use super::vtd::{MissingVtd, Vtd};
use super::*;
use crate::format::long_mode::{ADDRESS, TOKEN_SHIFT};
use crate::format::{RUN, links_tables};
use std::vec::Vec;

const PRESENT: u64 = R | W | X | XU;
const TOKENS: [u64; 5] = [0, 1, 0x5555_5555_5555, 1 << 47, (1 << 48) - 1];
const FRAMES: [Hpa; 4] = [Hpa(0), Hpa(0x1000), Hpa(1 << 51), Hpa(ADDRESS)];

fn configurations() -> impl Iterator<Item = Ept1G> {
    (0..24u8).map(|n| Ept1G {
        accessed_dirty: n & 1 != 0,
        split_execute: n & 2 != 0,
        forced_write_back: n & 4 != 0,
        five_levels: false,
        output_bits: 52,
        vtd: [None, Some(Vtd { snoop: false }), Some(Vtd { snoop: true })][n as usize % 3],
    })
}

fn all_attributes() -> impl Iterator<Item = Attributes> {
    let memories = [Memory::Normal, Memory::NonCacheable, Memory::Device, Memory::DeviceStrict];
    let executes = [Execute::All, Execute::None, Execute::User, Execute::Kernel];
    (0..1024usize).map(move |n| Attributes {
        read: n & 1 != 0,
        write: n & 2 != 0,
        accessed: n & 4 != 0,
        dirty: n & 8 != 0,
        software: Software::new(n & 16 != 0, n & 512 != 0),
        execute: executes[n >> 5 & 3],
        memory: memories[n >> 7 & 3],
    })
}

fn leaves(format: Ept1G, level: u8) -> impl Iterator<Item = u64> {
    all_attributes()
        .filter_map(move |attributes| format.encode(attributes).ok())
        .map(move |bits| Ept1G::leaf(bits, level, Hpa(ADDRESS & !0u64 << Ept1G::shift(level))))
}

fn not_present() -> Vec<(u64, Kind)> {
    let markers = FRAMES.iter().flat_map(|&frame| {
        [(Ept1G::frozen(frame), Kind::Frozen), (Ept1G::retired(frame), Kind::Retired)]
    });
    let reserved = TOKENS.iter().map(|&token| (Ept1G::reserved(token), Kind::Reserved));
    markers.chain(reserved).chain([(0, Kind::Empty)]).collect()
}

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
fn attributes_survive_encoding_in_every_combination_or_are_refused_for_a_reason() {
    for format in configurations() {
        for a in all_attributes() {
            let split = matches!(a.execute, Execute::User | Execute::Kernel);
            let expected = match () {
                () if !a.read => Err(AttributeError::NeedsRead),
                () if a.write && !a.dirty && !format.accessed_dirty => {
                    Err(AttributeError::CleanNeedsHardwareDirty)
                }
                () if split && !format.split_execute => {
                    Err(AttributeError::ExecuteNeedsSplitRights)
                }
                () => Ok(a),
            };
            assert_eq!(format.encode(a).map(|raw| format.decode(raw, 0)), expected);
        }
    }
}

#[test]
fn attributes_and_address_of_a_leaf_come_back_at_every_level() {
    for format in configurations() {
        for (level, a) in (0..=2).flat_map(|level| all_attributes().map(move |a| (level, a))) {
            let Ok(bits) = format.encode(a) else { continue };
            let hpa = Hpa(ADDRESS & !0u64 << Ept1G::shift(level));
            let raw = Ept1G::leaf(bits, level, hpa);
            assert_eq!(Ept1G::leaf_address(raw, level), hpa);
            assert_eq!(Ept1G::attribute_bits(raw, level), bits);
            assert_eq!(Ept1G::attribute_bits(raw | MARK, level), bits);
        }
    }
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
fn a_relaxed_leaf_is_as_one_mapped_for_that_access() {
    for format in configurations() {
        let ram = format.encode(Attributes::RAM).unwrap();
        let old = Ept1G::write_protected(ram) & !(A | D);
        assert_eq!(format.relaxed(old, Access::Write), ram);
        let read = Attributes { write: false, dirty: false, ..Attributes::RAM };
        assert_eq!(format.relaxed(old, Access::Read), format.encode(read).unwrap());
        let data = Ept1G::execute_protected(ram) & !A;
        assert_eq!(format.decode(data, 0).execute, Execute::None);
        assert_eq!(format.relaxed(data, Access::Execute), ram);
    }
}

#[test]
fn protection_keeps_everything_else_and_is_idempotent() {
    for raw in configurations().flat_map(|format| leaves(format, 0)) {
        let protected = Ept1G::write_protected(raw);
        assert_eq!(protected | raw & Ept1G::WRITE, raw);
        assert_eq!(protected & Ept1G::WRITE, 0);
        assert_eq!(Ept1G::write_protected(protected), protected);
        let protected = Ept1G::execute_protected(raw);
        assert_eq!(protected | raw & (X | XU), raw);
        assert_eq!(Ept1G::execute_protected(protected), protected);
    }
}

#[test]
fn a_cleaned_leaf_is_dirty_only_where_nothing_would_mark_the_next_write() {
    for format in configurations() {
        for raw in leaves(format, 0) {
            let (before, after) = (format.decode(raw, 0), format.decode(format.cleaned(raw), 0));
            let dirty = before.dirty && before.write && !format.accessed_dirty;
            assert_eq!(after, Attributes { dirty, ..before });
        }
    }
}

#[test]
fn every_value_has_its_kind_at_every_level_regardless_of_the_bits_that_hardware_sets() {
    let flips = [0, A, D, A | D];
    for (flip, level) in flips.into_iter().flat_map(|flip| (0..=3).map(move |l| (flip, l))) {
        for (raw, kind) in not_present() {
            assert_eq!(Ept1G::kind(raw ^ flip, level), kind, "{raw:#x} ^ {flip:#x}");
        }
        for raw in configurations().flat_map(|format| leaves(format, level)) {
            let above = level > Ept1G::LARGEST_LEAF;
            let (kind, marked) =
                if above { (Kind::Frozen, Kind::Frozen) } else { (Kind::Leaf, Kind::Sealed) };
            for changed in [raw, Ept1G::write_protected(raw), Ept1G::execute_protected(raw)] {
                assert_eq!(Ept1G::kind(changed ^ flip, level), kind);
                assert_eq!(Ept1G::kind(changed ^ flip | MARK, level), marked);
            }
        }
        for table in FRAMES.map(|frame| Ept1G::table(frame, 1)).into_iter().filter(|_| level > 0) {
            for bits in [0, W, MARK, SW_RENEWED, SW_AGEING, W | MARK | SW_RENEWED | SW_AGEING] {
                assert_eq!(Ept1G::kind(table ^ flip ^ bits, level), Kind::Table);
                assert_eq!(Ept1G::table_address(table ^ flip ^ bits), Hpa(table & ADDRESS));
            }
        }
    }
}

#[test]
fn no_marker_is_present_to_hardware_with_or_without_mode_based_execution() {
    for (raw, kind) in not_present() {
        assert_eq!(raw & PRESENT, 0, "{raw:#x}");
        let marked = matches!(kind, Kind::Frozen | Kind::Retired);
        assert_eq!(raw & MARK != 0, marked, "{raw:#x}");
    }
    for frame in FRAMES {
        assert_eq!(Ept1G::table_address(Ept1G::frozen(frame)), frame);
        assert_eq!(Ept1G::table_address(Ept1G::retired(frame)), frame);
    }
}

#[test]
fn different_tokens_are_different_entries_and_none_is_empty() {
    let raws = TOKENS.map(Ept1G::reserved);
    for (i, &raw) in raws.iter().enumerate() {
        assert_eq!((raw >> TOKEN_SHIFT, raw & MARK), (TOKENS[i], 0));
        assert!(raw != 0 && !raws[..i].contains(&raw));
    }
}

#[test]
fn a_run_is_all_tables_only_if_each_entry_is() {
    let tables = [Ept1G::table(Hpa(0x1000), 1); RUN];
    assert!(!links_tables::<Ept1G>(&tables, 0), "level 0 has none");
    let mut others = not_present();
    others.extend(leaves(Ept1G::default(), 1).map(|raw| (raw, Kind::Leaf)));
    others.push((Ept1G::table(Hpa(0), 1) & !(A | W) | MARK, Kind::Table));
    for (i, (raw, kind)) in (0..RUN).flat_map(|i| others.iter().map(move |other| (i, other))) {
        let mut run = tables;
        run[i] = *raw;
        assert_eq!(links_tables::<Ept1G>(&run, 1), *kind == Kind::Table, "{raw:#x}");
    }
}

#[test]
fn the_pointer_says_four_levels_through_the_cache() {
    for (accessed_dirty, bits) in [(false, 0x1e), (true, 0x5e)] {
        let format = Ept1G { accessed_dirty, ..Default::default() };
        let geometry = format.geometry(40).unwrap();
        assert_eq!(format.eptp(&geometry, Hpa(0x1234_5000)), 0x1234_5000 | bits);
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
            assert_eq!((bits ^ leaf) >> 11 & 1, 0);
            let relaxed = format.relaxed(Ept1G::write_protected(leaf), Access::Write);
            assert_eq!((relaxed ^ leaf) & (1 << 11 | 1 << 62), 0);
        }
    }
    for level in 1..4 {
        assert_eq!(Ept1G::table(Hpa(ADDRESS), level) & reserved(true), 0);
    }
    // With neither R nor W an entry is not present, and VT-d ignores the rest.
    assert!(not_present().iter().all(|(raw, _)| raw & 0b11 == 0));
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
