//! Tests of the bits of a radix tree. Words are written as the manual has them, and compared with
//! the bytes in memory.

use super::*;
use crate::addr::PageSize;
use crate::format::{RUN, links_tables};
use std::vec::Vec;

const TOKENS: [u64; 5] = [0, 1, 0x5555_5555_5555, 1 << 47, (1 << 48) - 1];
const FRAMES: [Hpa; 4] = [Hpa(0), Hpa(0x1000), Hpa(1 << 56), Hpa((1 << 57) - 0x1000)];

/// Returns the manual's word of a raw value, byte by byte.
fn word(raw: u64) -> u64 {
    raw.to_ne_bytes().iter().fold(0, |word, &byte| word << 8 | u64::from(byte))
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

fn highest<const P: u32>(level: u8) -> Hpa {
    Hpa((1 << 57) - (1 << Power::<P>::shift(level)))
}

fn leaves<const P: u32>(level: u8) -> impl Iterator<Item = u64> {
    let format = Power::<P>::default();
    all_attributes().filter_map(move |a| {
        Some(Power::<P>::leaf(format.encode(a).ok()?, level, highest::<P>(level)))
    })
}

fn invalid<const P: u32>() -> Vec<(u64, Kind)> {
    let markers = FRAMES.iter().flat_map(|&frame| {
        [(Power::<P>::frozen(frame), Kind::Frozen), (Power::<P>::retired(frame), Kind::Retired)]
    });
    let reserved = TOKENS.iter().map(|&token| (Power::<P>::reserved(token), Kind::Reserved));
    markers.chain(reserved).chain([(0, Kind::Empty)]).collect()
}

#[test]
fn tables_are_as_large_as_the_processors_walk_them() {
    let geometry = PowerK4::default().geometry(40).unwrap();
    assert_eq!((geometry.root_level, geometry.root_entries), (3, 8192));
    assert_eq!(geometry.root_bytes(12), 64 << 10);
    assert_eq!(PowerK64::default().geometry(40).unwrap().root_bytes(16), 64 << 10);
    assert_eq!([0, 1, 2].map(PowerK4::entries), [512, 512, 512]);
    assert_eq!([0, 1, 2].map(PowerK64::entries), [32, 512, 512]);
    assert_eq!([0, 1, 2, 3, 4].map(PowerK4::shift), [12, 21, 30, 39, 48]);
    assert_eq!([0, 1, 2, 3, 4].map(PowerK64::shift), [16, 21, 30, 39, 48]);
    assert_eq!((PowerK4::TABLE_BYTES, PowerK64::TABLE_BYTES), (4096, 4096));
}

#[test]
fn a_width_that_no_tree_has_is_refused_with_those_that_it_can_have() {
    fn refused<const P: u32>(bits: u32) {
        let error = Power::<P>::default().geometry(bits).unwrap_err();
        assert_eq!((error.min, error.max), (P, 52));
        let text = std::format!("{error}");
        assert!(text.contains(&std::format!("{P} to 52 bits")) && text.contains("Power"), "{text}");
    }
    [0, 11, 53, 64, u32::MAX].into_iter().for_each(refused::<12>);
    [0, 15, 53, 64, u32::MAX].into_iter().for_each(refused::<16>);
    assert!(PowerK4::default().geometry(12).is_ok() && PowerK64::default().geometry(52).is_ok());
}

#[test]
fn real_addresses_end_where_the_page_number_does_or_the_cpus_own() {
    assert_eq!(PowerK4::default().output_bits(), 57);
    assert_eq!(PowerK4 { output_bits: 51 }.output_bits(), 51);
    assert_eq!(PowerK64 { output_bits: 64 }.output_bits(), 57);
}

#[test]
fn a_page_size_that_the_format_has_not_is_refused_with_those_that_it_has() {
    let level = |bytes| PowerK64::level_of(PageSize::from_bytes(bytes).unwrap());
    assert_eq!([1 << 16, 2 << 20, 1 << 30].map(level), [Ok(0), Ok(1), Ok(2)]);
    for bytes in [4 << 10, 1 << 20, 16 << 20, 1 << 39] {
        let error = level(bytes).unwrap_err();
        assert_eq!((error.smallest.bytes(), error.largest.bytes()), (64 << 10, 1 << 30));
    }
    assert!(PowerK4::level_of(PageSize::from_bytes(64 << 10).unwrap()).is_err());
}

#[test]
fn every_bit_lies_in_memory_where_the_manual_has_it() {
    assert_eq!([V, L, MARK].map(word), [1 << 63, 1 << 62, 1 << 61]);
    assert_eq!([R, C].map(word), [1 << 8, 1 << 7]);
    assert_eq!([READ, WRITE, EXECUTE].map(word), [4, 2, 1]);
    assert_eq!([NORMAL, NON_IDEMPOTENT, TOLERANT].map(word), [0, 0x20, 0x30]);
    assert_eq!(word(RPN), 0x01ff_ffff_ffff_f000);
    assert_eq!(word(NLB), 0x0fff_ffff_ffff_ff00);
    // V is in the first byte, EAA in the last, on any host.
    assert_eq!((V.to_ne_bytes()[0], EXECUTE.to_ne_bytes()[7]), (0x80, 1));
}

#[test]
fn what_was_encoded_is_decoded_or_refused() {
    let format = PowerK4::default();
    for a in all_attributes() {
        match format.encode(a) {
            Ok(bits) => assert_eq!(format.decode(PowerK4::leaf(bits, 0, Hpa(0)), 0), a),
            Err(AttributeError::NeedsRead) => assert!(a.write && !a.read),
            Err(AttributeError::MemoryType) => assert_eq!(a.memory, Memory::DeviceStrict),
            Err(AttributeError::ExecuteNeedsSplitRights) => {
                assert!(matches!(a.execute, Execute::User | Execute::Kernel));
            }
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn leaves_give_back_their_address_and_attributes_at_every_level() {
    fn check<const P: u32>() {
        for level in 0..=2 {
            for raw in leaves::<P>(level) {
                assert_eq!(Power::<P>::leaf_address(raw, level), highest::<P>(level));
                let bits = Power::<P>::attribute_bits(raw, level);
                assert_eq!(Power::<P>::leaf(bits, level, highest::<P>(level)), raw);
            }
        }
    }
    check::<12>();
    check::<16>();
}

#[test]
fn a_leaf_that_points_further_is_that_of_the_next_address_across_every_byte() {
    for shift in (12..52).rev() {
        let (here, next) = (Hpa((1 << shift) - 0x1000), Hpa(1 << shift));
        assert_eq!(PowerK4::further(PowerK4::leaf(R, 0, here), 0x1000), PowerK4::leaf(R, 0, next));
    }
}

#[test]
fn descriptors_go_up_by_one_step_up_to_each_end_of_a_field() {
    fn check<const P: u32>() {
        let leaf = |page: u64| Power::<P>::leaf(R, 0, Hpa(page << P));
        let step = Power::<P>::leaf(0, 0, Hpa(1 << P)) - Power::<P>::leaf(0, 0, Hpa(0));
        let mut ends = 0;
        for page in 1..1 << 12 {
            let even = leaf(page - 1).wrapping_add(step) == leaf(page);
            let end = Power::<P>::CARRY != 0 && (page << P).is_multiple_of(Power::<P>::CARRY);
            assert_eq!(even, !end, "{page:#x}");
            ends += u64::from(end);
        }
        assert_eq!(ends != 0, cfg!(target_endian = "little"));
    }
    check::<12>();
    check::<16>();
}

#[test]
fn a_fault_gets_what_it_asks_for_and_nothing_else() {
    let format = PowerK64::default();
    for raw in leaves::<16>(0) {
        let before = format.decode(raw, 0);
        let after = |access| format.decode(format.relaxed(raw, access), 0);
        let used = Attributes { accessed: true, ..before };
        assert_eq!(after(Access::Read), used);
        assert_eq!(after(Access::Execute), Attributes { execute: Execute::All, ..used });
        let written = Attributes { read: true, write: true, dirty: true, ..used };
        assert_eq!(after(Access::Write), written);
    }
}

#[test]
fn protection_and_cleaning_keep_everything_else() {
    let format = PowerK4::default();
    for raw in leaves::<12>(1) {
        let before = format.decode(raw, 1);
        let protected = PowerK4::write_protected(raw);
        assert_eq!(format.decode(protected, 1), Attributes { write: false, ..before });
        assert_eq!(
            (protected & PowerK4::WRITE, PowerK4::write_protected(protected)),
            (0, protected)
        );
        let protected = PowerK4::execute_protected(raw);
        assert_eq!(format.decode(protected, 1), Attributes { execute: Execute::None, ..before });
        let cleaned = format.decode(format.cleaned(raw), 1);
        assert_eq!(cleaned, Attributes { dirty: false, ..before });
    }
}

#[test]
fn every_value_has_its_kind_at_every_level_regardless_of_the_bits_that_hardware_sets() {
    fn check<const P: u32>(flip: u64, level: u8) {
        for (raw, kind) in invalid::<P>() {
            assert_eq!(Power::<P>::kind(raw, level), kind, "{raw:#x}");
        }
        let above = level > Power::<P>::LARGEST_LEAF;
        let (kind, marked) =
            if above { (Kind::Frozen, Kind::Frozen) } else { (Kind::Leaf, Kind::Sealed) };
        for raw in leaves::<P>(level) {
            for changed in
                [raw, Power::<P>::write_protected(raw), Power::<P>::execute_protected(raw)]
            {
                assert_eq!(Power::<P>::kind(changed ^ flip, level), kind);
                assert_eq!(Power::<P>::kind(changed ^ flip | MARK, level), marked);
            }
        }
        for frame in FRAMES {
            let table = Power::<P>::table(frame, level.max(1));
            let kind = if level == 0 { Kind::Frozen } else { Kind::Table };
            for raw in [table, table | MARK] {
                assert_eq!(Power::<P>::kind(raw, level), kind);
                assert_eq!(Power::<P>::table_address(raw), frame);
            }
        }
    }
    for (flip, level) in [0, R, C, R | C].into_iter().flat_map(|f| (0..=3).map(move |l| (f, l))) {
        check::<12>(flip, level);
        check::<16>(flip, level);
    }
}

#[test]
fn markers_are_invalid_to_hardware_and_carry_an_address() {
    for (raw, kind) in invalid::<16>() {
        assert_eq!(word(raw) >> 63, 0, "{raw:#x}");
        let marked = matches!(kind, Kind::Frozen | Kind::Retired);
        assert_eq!(raw & MARK != 0, marked, "{raw:#x}");
        assert_eq!(raw & (WRITE | R | C | EXECUTE), 0, "walks pass it quickly");
    }
    for frame in FRAMES {
        assert_eq!(PowerK64::table_address(PowerK64::frozen(frame)), frame);
        assert_eq!(PowerK64::table_address(PowerK64::retired(frame)), frame);
    }
}

#[test]
fn different_tokens_are_different_entries_and_none_is_empty() {
    let raws = TOKENS.map(PowerK4::reserved);
    for (i, &raw) in raws.iter().enumerate() {
        assert!(raw != 0 && !raws[..i].contains(&raw));
    }
}

#[test]
fn a_run_is_all_tables_only_if_each_entry_is_and_all_pages_only_of_leaves() {
    let tables = [PowerK64::table(Hpa(0x1000), 1); RUN];
    assert!(!links_tables::<PowerK64>(&tables, 0), "level 0 has none");
    assert!(!PowerK64::all_pages(tables[0]) && PowerK64::all_pages(PowerK64::leaf(0, 0, Hpa(0))));
    let mut others = invalid::<16>();
    others.extend(leaves::<16>(1).map(|raw| (raw, Kind::Leaf)));
    others.push((PowerK64::table(Hpa(0), 2), Kind::Table));
    for (i, (raw, kind)) in (0..RUN).flat_map(|i| others.iter().map(move |other| (i, other))) {
        let mut run = tables;
        run[i] = *raw;
        assert_eq!(links_tables::<PowerK64>(&run, 1), *kind == Kind::Table, "{raw:#x}");
    }
}

#[test]
fn a_root_that_no_partition_table_entry_holds_is_refused_by_its_address() {
    for root in [0x1000, 0x8000, 1 << 60, u64::MAX] {
        assert_eq!(PowerK4::partition_entry(Hpa(root)), Err(RootError { root: Hpa(root) }));
    }
    let text = std::format!("{}", PowerK4::partition_entry(Hpa(0x8000)).unwrap_err());
    assert!(text.contains("0x8000") && text.contains("0x10000"), "{text}");
    assert!(PowerK64::partition_entry(Hpa((1 << 60) - 0x1_0000)).is_ok());
}
