//! Tests of the bits of the G-stage.

use super::*;
use crate::format::{RUN, links_tables};
use std::vec::Vec;

const TOKENS: [u64; 5] = [0, 1, 0x5555_5555_5555, 1 << 47, (1 << 48) - 1];
const FRAMES: [Hpa; 4] = [Hpa(0), Hpa(0x1000), Hpa(1 << 55), Hpa((1 << 56) - 0x1000)];

fn configurations() -> [RiscV; 2] {
    [false, true].map(|memory_types| RiscV { memory_types, ..Default::default() })
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

fn highest(level: u8) -> Hpa {
    Hpa((1 << 56) - (1 << RiscV::shift(level)))
}

/// Returns leaves in every configuration.
fn leaves(level: u8) -> impl Iterator<Item = (RiscV, u64)> {
    let all = configurations().into_iter().flat_map(|f| all_attributes().map(move |a| (f, a)));
    all.filter_map(move |(format, a)| {
        Some((format, RiscV::leaf(format.encode(a).ok()?, level, highest(level))))
    })
}

fn invalid() -> Vec<(u64, Kind)> {
    let markers = FRAMES.iter().flat_map(|&frame| {
        [(RiscV::frozen(frame), Kind::Frozen), (RiscV::retired(frame), Kind::Retired)]
    });
    let reserved = TOKENS.iter().map(|&token| (RiscV::reserved(token), Kind::Reserved));
    markers.chain(reserved).chain([(0, Kind::Empty)]).collect()
}

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
fn attributes_survive_encoding_in_every_combination_or_are_refused_for_a_reason() {
    for format in configurations() {
        for a in all_attributes() {
            let split = matches!(a.execute, Execute::User | Execute::Kernel);
            let typed = matches!(a.memory, Memory::NonCacheable | Memory::Device);
            let expected = match () {
                () if a.write && !a.read => Err(AttributeError::NeedsRead),
                () if split => Err(AttributeError::ExecuteNeedsSplitRights),
                () if a.memory != Memory::Normal && !(typed && format.memory_types) => {
                    Err(AttributeError::MemoryType)
                }
                () => Ok(a),
            };
            assert_eq!(format.encode(a).map(|raw| format.decode(raw, 0)), expected);
        }
    }
}

#[test]
fn attributes_and_address_of_a_leaf_come_back_at_every_level() {
    for (level, format) in (0..=2).flat_map(|level| configurations().map(|format| (level, format)))
    {
        for bits in all_attributes().filter_map(|a| format.encode(a).ok()) {
            let raw = RiscV::leaf(bits, level, highest(level));
            assert_eq!(RiscV::leaf_address(raw, level), highest(level));
            assert_eq!(RiscV::attribute_bits(raw, level), bits);
            assert_eq!(RiscV::attribute_bits(raw | MARK | 1 << 63, level), bits);
        }
    }
}

#[test]
fn no_change_of_rights_makes_a_leaf_a_table_or_a_reserved_encoding() {
    for (format, raw) in leaves(0) {
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
fn a_relaxed_leaf_is_as_one_mapped_for_that_access() {
    let format = RiscV::default();
    let ram = format.encode(Attributes::RAM).unwrap();
    let old = RiscV::write_protected(ram) & !(A | D);
    assert_eq!(format.relaxed(old, Access::Write), ram);
    let read = Attributes { write: false, dirty: false, ..Attributes::RAM };
    assert_eq!(format.relaxed(old, Access::Read), format.encode(read).unwrap());
    for (format, raw) in leaves(0) {
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
fn protection_keeps_everything_else_and_is_idempotent() {
    for (format, raw) in leaves(0) {
        let before = format.decode(raw, 0);
        let protected = RiscV::write_protected(raw);
        assert_eq!(format.decode(protected, 0), Attributes { write: false, ..before });
        assert_eq!((protected & RiscV::WRITE, RiscV::write_protected(protected)), (0, protected));
        let protected = RiscV::execute_protected(raw);
        assert_eq!(format.decode(protected, 0), Attributes { execute: Execute::None, ..before });
        assert_eq!(RiscV::execute_protected(protected), protected);
        let bits = format.encode(format.decode(protected, 0)).unwrap();
        assert_eq!(protected, RiscV::leaf(bits, 0, highest(0)), "one encoding of each");
    }
}

#[test]
fn a_cleaned_leaf_keeps_all_but_its_dirty_state() {
    for (format, raw) in leaves(0) {
        let after = Attributes { dirty: false, ..format.decode(raw, 0) };
        assert_eq!(format.decode(format.cleaned(raw), 0), after);
    }
}

#[test]
fn every_value_has_its_kind_at_every_level_regardless_of_the_bits_that_hardware_sets() {
    let flips = [0, A, D, A | D];
    for (flip, level) in flips.into_iter().flat_map(|flip| (0..=4).map(move |l| (flip, l))) {
        for (raw, kind) in invalid() {
            assert_eq!(RiscV::kind(raw, level), kind, "{raw:#x}");
        }
        let above = level > RiscV::LARGEST_LEAF;
        let (kind, marked) =
            if above { (Kind::Frozen, Kind::Frozen) } else { (Kind::Leaf, Kind::Sealed) };
        for (_, raw) in leaves(level) {
            for changed in [raw, RiscV::write_protected(raw), RiscV::execute_protected(raw)] {
                assert_eq!(RiscV::kind(changed ^ flip, level), kind);
                assert_eq!(RiscV::kind(changed ^ flip | MARK, level), marked);
            }
        }
        for frame in FRAMES.into_iter().filter(|_| level > 0) {
            for raw in [RiscV::table(frame, 1), RiscV::table(frame, 1) | MARK] {
                assert_eq!(RiscV::kind(raw, level), Kind::Table);
                assert_eq!(RiscV::table_address(raw), frame);
            }
        }
    }
}

#[test]
fn markers_are_invalid_to_hardware_and_carry_an_address() {
    for (raw, kind) in invalid() {
        assert_eq!(raw & V, 0, "{raw:#x}");
        let marked = matches!(kind, Kind::Frozen | Kind::Retired);
        assert_eq!(raw & MARK != 0, marked, "{raw:#x}");
    }
    for frame in FRAMES {
        assert_eq!(RiscV::table_address(RiscV::frozen(frame)), frame);
        assert_eq!(RiscV::table_address(RiscV::retired(frame)), frame);
    }
}

#[test]
fn different_tokens_are_different_entries_and_none_is_empty() {
    let raws = TOKENS.map(RiscV::reserved);
    for (i, &raw) in raws.iter().enumerate() {
        assert_eq!(raw >> TOKEN_SHIFT, TOKENS[i]);
        assert!(raw != 0 && !raws[..i].contains(&raw));
    }
}

#[test]
fn a_run_is_all_tables_only_if_each_entry_is() {
    let tables = [RiscV::table(Hpa(0x1000), 1); RUN];
    assert!(!links_tables::<RiscV>(&tables, 0), "level 0 has none");
    let mut others = invalid();
    others.extend(leaves(1).map(|(_, raw)| (raw, Kind::Leaf)));
    others.push((RiscV::table(Hpa(0), 1), Kind::Table));
    for (i, (raw, kind)) in (0..RUN).flat_map(|i| others.iter().map(move |other| (i, other))) {
        let mut run = tables;
        run[i] = *raw;
        assert_eq!(links_tables::<RiscV>(&run, 1), *kind == Kind::Table, "{raw:#x}");
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
