//! Tests of the bits of a radix tree. Words are written as the manual has them, and compared with
//! the bytes in memory.

use super::*;
use crate::addr::PageSize;
use crate::format::entries::{entries, invalid};

/// Returns the manual's word of a raw value, byte by byte.
fn word(raw: u64) -> u64 {
    raw.to_ne_bytes().iter().fold(0, |word, &byte| word << 8 | u64::from(byte))
}

mod pages_of_4k {
    use super::*;

    entries!([PowerK4::default()], 3, V);
}

mod pages_of_64k {
    use super::*;

    entries!([PowerK64::default()], 3, V);
}

#[test]
fn markers_have_no_bit_that_walks_look_for_and_a_run_of_pages_is_of_leaves() {
    for (raw, _) in invalid(PowerK64::default()) {
        assert_eq!(raw & (WRITE | R | C | EXECUTE), 0, "walks pass it quickly");
    }
    let table = PowerK64::table(Hpa(0x1000), 1);
    assert_eq!(PowerK64::kind(table, 0), Kind::Frozen);
    assert!(!PowerK64::all_pages(table) && PowerK64::all_pages(PowerK64::leaf(0, 0, Hpa(0))));
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
fn a_root_that_no_partition_table_entry_holds_is_refused_by_its_address() {
    for root in [0x1000, 0x8000, 1 << 60, u64::MAX] {
        assert_eq!(PowerK4::partition_entry(Hpa(root)), Err(RootError { root: Hpa(root) }));
    }
    let text = std::format!("{}", PowerK4::partition_entry(Hpa(0x8000)).unwrap_err());
    assert!(text.contains("0x8000") && text.contains("0x10000"), "{text}");
    assert!(PowerK64::partition_entry(Hpa((1 << 60) - 0x1_0000)).is_ok());
}
