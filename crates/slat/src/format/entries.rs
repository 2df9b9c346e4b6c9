//! Tests of entries that are the same for every format.

use super::{Format, Kind, RUN, Software, links_tables};
use crate::addr::Hpa;
use crate::{Attributes, Execute, Memory};
use std::vec::Vec;

#[path = "../../tests/engine/common/attributes.rs"]
mod attributes;
use attributes::all_attributes;

const TOKENS: [u64; 5] = [0, 1, 0x5555_5555_5555, 1 << 47, (1 << 48) - 1];

/// Leaves at the highest address, with all attributes that the format has.
pub fn leaves<F: Format>(format: F, level: u8) -> impl Iterator<Item = u64> {
    let hpa = Hpa((1 << format.output_bits()) - (1 << F::shift(level)));
    all_attributes()
        .filter_map(move |attributes| format.encode(attributes).ok())
        .map(move |bits| F::leaf(bits, level, hpa))
}

/// Addresses of tables.
fn frames<F: Format>(format: F) -> [Hpa; 4] {
    let (bits, table) = (format.output_bits(), F::TABLE_BYTES as u64);
    [0, table, 1 << (bits - 1), (1 << bits) - table].map(Hpa)
}

/// Entries that are invalid to hardware.
pub fn invalid<F: Format>(format: F) -> Vec<(u64, Kind)> {
    let markers = frames(format)
        .into_iter()
        .flat_map(|frame| [(F::frozen(frame), Kind::Frozen), (F::retired(frame), Kind::Retired)]);
    let reserved = TOKENS.into_iter().map(|token| (F::reserved(token), Kind::Reserved));
    markers.chain(reserved).chain([(0, Kind::Empty)]).collect()
}

/// Every value has its kind at every level up to `top`, with any of the bits that hardware or the
/// engine sets.
pub fn check_kinds<F: Format>(formats: &[F], top: u8) {
    let flips = [0, F::ACCESSED, F::DIRTY, F::ACCESSED | F::DIRTY];
    for (flip, level) in flips.into_iter().flat_map(|flip| (0..=top).map(move |l| (flip, l))) {
        // Formats in which hardware marks tables keep the bits of marks out of all invalid entries.
        let other = if F::TABLE_ACCESSED != 0 { flip } else { 0 };
        for (raw, kind) in invalid(formats[0]) {
            assert_eq!(F::kind(raw ^ other, level), kind, "{raw:#x} ^ {other:#x}");
        }
        let above = level > F::LARGEST_LEAF;
        let (kind, marked) =
            if above { (Kind::Frozen, Kind::Frozen) } else { (Kind::Leaf, Kind::Sealed) };
        for raw in formats.iter().flat_map(|format| leaves(*format, level)) {
            for changed in [raw, F::write_protected(raw), F::execute_protected(raw)] {
                assert_eq!(F::kind(changed ^ flip, level), kind);
                assert_eq!(F::kind(changed ^ flip | F::MARK, level), marked);
            }
        }
        for frame in frames(formats[0]).into_iter().filter(|_| level > 0) {
            let table = F::table(frame, level) ^ other;
            for bits in [0, F::AGEING] {
                assert_eq!(F::kind(table ^ bits, level), Kind::Table);
                assert_eq!(F::table_address(table ^ bits), frame);
            }
        }
    }
}

/// Markers and tokens are invalid to hardware, which looks at the bits `valid`; markers carry an
/// address, and different tokens are different entries.
pub fn check_markers<F: Format>(format: F, valid: u64) {
    for (raw, kind) in invalid(format) {
        assert_eq!(raw & valid, 0, "{raw:#x}");
        let marked = matches!(kind, Kind::Frozen | Kind::Retired);
        assert_eq!(raw & F::MARK != 0, marked, "{raw:#x}");
    }
    for frame in frames(format) {
        assert_eq!(F::table_address(F::frozen(frame)), frame);
        assert_eq!(F::table_address(F::retired(frame)), frame);
    }
    let raws = TOKENS.map(F::reserved);
    for (place, &raw) in raws.iter().enumerate() {
        assert!(raw != 0 && !raws[..place].contains(&raw));
    }
}

/// A run is all tables only if each entry is.
pub fn check_runs<F: Format>(format: F) {
    let tables = [F::table(Hpa(F::TABLE_BYTES as u64), 1); RUN];
    assert!(!links_tables::<F>(&tables, 0), "level 0 has none");
    let mut others = invalid(format);
    others.extend(leaves(format, 1).map(|raw| (raw, Kind::Leaf)));
    let bare = F::table(Hpa(0), 1) & !F::TABLE_ACCESSED;
    others.extend([(bare, Kind::Table), (bare | F::AGEING, Kind::Table)]);
    for (place, (raw, kind)) in (0..RUN).flat_map(|at| others.iter().map(move |it| (at, it))) {
        let mut run = tables;
        run[place] = *raw;
        assert_eq!(links_tables::<F>(&run, 1), *kind == Kind::Table, "{raw:#x}");
    }
}

/// Makes these tests for a format, from its configurations, the highest level of a table, and the
/// bits without all of which an entry is invalid to hardware.
macro_rules! entries {
    ($formats:expr, $top:expr, $valid:expr) => {
        #[test]
        fn every_value_has_its_kind_at_every_level_regardless_of_the_bits_that_hardware_sets() {
            crate::format::entries::check_kinds(&$formats, $top);
        }

        #[test]
        fn markers_are_invalid_to_hardware_and_carry_an_address() {
            crate::format::entries::check_markers($formats[0], $valid);
        }

        #[test]
        fn a_run_is_all_tables_only_if_each_entry_is() {
            crate::format::entries::check_runs($formats[0]);
        }
    };
}
pub(crate) use entries;
