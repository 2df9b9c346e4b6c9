//! Tests of the bits of nested paging.

use super::*;
use crate::format::long_mode::{ADDRESS, TOKEN_SHIFT};
use crate::format::{RUN, links_tables};
use std::vec::Vec;

const TOKENS: [u64; 5] = [0, 1, 0x5555_5555_5555, 1 << 47, (1 << 48) - 1];
const FRAMES: [Hpa; 4] = [Hpa(0), Hpa(0x1000), Hpa(1 << 51), Hpa(ADDRESS)];
const FORMAT: Npt1G = Npt1G { five_levels: false, output_bits: 52 };
const FIVE: Npt1G = Npt1G { five_levels: true, ..FORMAT };

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

fn leaves(level: u8) -> impl Iterator<Item = u64> {
    all_attributes()
        .filter_map(|attributes| FORMAT.encode(attributes).ok())
        .map(move |bits| Npt1G::leaf(bits, level, Hpa(ADDRESS & !0u64 << Npt1G::shift(level))))
}

fn not_present() -> Vec<(u64, Kind)> {
    let markers = FRAMES.iter().flat_map(|&frame| {
        [(Npt1G::frozen(frame), Kind::Frozen), (Npt1G::retired(frame), Kind::Retired)]
    });
    let reserved = TOKENS.iter().map(|&token| (Npt1G::reserved(token), Kind::Reserved));
    markers.chain(reserved).chain([(0, Kind::Empty)]).collect()
}

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
fn attributes_survive_encoding_in_every_combination_or_are_refused_for_a_reason() {
    for a in all_attributes() {
        let expected = match a.execute {
            _ if !a.read => Err(AttributeError::NeedsRead),
            Execute::User | Execute::Kernel => Err(AttributeError::ExecuteNeedsSplitRights),
            Execute::All | Execute::None => Ok(a),
        };
        assert_eq!(FORMAT.encode(a).map(|raw| FORMAT.decode(raw, 0)), expected);
    }
}

#[test]
fn attributes_and_address_of_a_leaf_come_back_at_every_level() {
    for (level, a) in (0..=2).flat_map(|level| all_attributes().map(move |a| (level, a))) {
        let Ok(bits) = FORMAT.encode(a) else { continue };
        let hpa = Hpa(ADDRESS & !0u64 << Npt1G::shift(level));
        let raw = Npt1G::leaf(bits, level, hpa);
        assert_eq!(Npt1G::leaf_address(raw, level), hpa);
        assert_eq!(Npt1G::attribute_bits(raw, level), bits);
        assert_eq!(Npt1G::attribute_bits(raw | MARK, level), bits);
        assert_eq!(FORMAT.decode(raw | MARK, level), a);
    }
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
fn a_relaxed_leaf_is_as_one_mapped_for_that_access() {
    let ram = FORMAT.encode(Attributes::RAM).unwrap();
    let old = Npt1G::write_protected(ram) & !(A | D);
    assert_eq!(FORMAT.relaxed(old, Access::Write), ram);
    let read = Attributes { write: false, dirty: false, ..Attributes::RAM };
    assert_eq!(FORMAT.relaxed(old, Access::Read), FORMAT.encode(read).unwrap());
    let data = Npt1G::execute_protected(ram) & !A;
    assert_eq!(FORMAT.decode(data, 0).execute, Execute::None);
    assert_eq!(FORMAT.relaxed(data, Access::Execute), ram);
}

#[test]
fn protection_keeps_everything_else_and_is_idempotent() {
    for raw in leaves(0) {
        let protected = Npt1G::write_protected(raw);
        assert_eq!(protected | raw & Npt1G::WRITE, raw);
        assert_eq!(protected & Npt1G::WRITE, 0);
        assert_eq!(Npt1G::write_protected(protected), protected);
        let protected = Npt1G::execute_protected(raw);
        assert_eq!(protected, raw | NX);
        assert_eq!(Npt1G::execute_protected(protected), protected);
    }
}

#[test]
fn a_cleaned_leaf_is_as_before_and_not_dirty() {
    for raw in leaves(0) {
        let (before, after) = (FORMAT.decode(raw, 0), FORMAT.decode(FORMAT.cleaned(raw), 0));
        assert_eq!(after, Attributes { dirty: false, ..before });
    }
}

#[test]
fn every_value_has_its_kind_at_every_level_regardless_of_the_bits_that_hardware_sets() {
    let flips = [0, A, D, A | D];
    for (flip, level) in flips.into_iter().flat_map(|flip| (0..=3).map(move |l| (flip, l))) {
        for (raw, kind) in not_present() {
            assert_eq!(Npt1G::kind(raw ^ flip, level), kind, "{raw:#x} ^ {flip:#x}");
        }
        for raw in leaves(level) {
            let above = level > Npt1G::LARGEST_LEAF;
            let (kind, marked) =
                if above { (Kind::Frozen, Kind::Frozen) } else { (Kind::Leaf, Kind::Sealed) };
            for changed in [raw, Npt1G::write_protected(raw), Npt1G::execute_protected(raw)] {
                assert_eq!(Npt1G::kind(changed ^ flip, level), kind);
                assert_eq!(Npt1G::kind(changed ^ flip | MARK, level), marked);
            }
        }
        for table in FRAMES.map(|frame| Npt1G::table(frame, 1)).into_iter().filter(|_| level > 0) {
            for bits in [0, W, MARK, SW_RENEWED, SW_AGEING, W | MARK | SW_RENEWED | SW_AGEING] {
                assert_eq!(Npt1G::kind(table ^ flip ^ bits, level), Kind::Table);
                assert_eq!(Npt1G::table_address(table ^ flip ^ bits), Hpa(table & ADDRESS));
            }
        }
    }
}

#[test]
fn no_marker_is_present_to_hardware() {
    for (raw, kind) in not_present() {
        assert_eq!(raw & P, 0, "{raw:#x}");
        let marked = matches!(kind, Kind::Frozen | Kind::Retired);
        assert_eq!(raw & MARK != 0, marked, "{raw:#x}");
    }
    for frame in FRAMES {
        assert_eq!(Npt1G::table_address(Npt1G::frozen(frame)), frame);
        assert_eq!(Npt1G::table_address(Npt1G::retired(frame)), frame);
    }
}

#[test]
fn different_tokens_are_different_entries_and_none_is_empty() {
    let raws = TOKENS.map(Npt1G::reserved);
    for (i, &raw) in raws.iter().enumerate() {
        assert_eq!((raw >> TOKEN_SHIFT, raw & MARK), (TOKENS[i], 0));
        assert!(raw != 0 && !raws[..i].contains(&raw));
    }
}

#[test]
fn a_run_is_all_tables_only_if_each_entry_is() {
    let tables = [Npt1G::table(Hpa(0x1000), 1); RUN];
    assert!(!links_tables::<Npt1G>(&tables, 0), "level 0 has none");
    let mut others = not_present();
    others.extend(leaves(1).map(|raw| (raw, Kind::Leaf)));
    others.push((Npt1G::table(Hpa(0), 1) & !(A | W) | MARK, Kind::Table));
    for (i, (raw, kind)) in (0..RUN).flat_map(|i| others.iter().map(move |other| (i, other))) {
        let mut run = tables;
        run[i] = *raw;
        assert_eq!(links_tables::<Npt1G>(&run, 1), *kind == Kind::Table, "{raw:#x}");
    }
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
