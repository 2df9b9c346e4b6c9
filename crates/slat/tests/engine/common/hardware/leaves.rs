//! Roots, entries and leaves of every kind and with every combination of attributes, against what a
//! manual says of them.

use slat::format::{Access, AttributeError, Format, Kind, RUN};
use slat::{Attributes, Execute, Hpa, Memory, Software};
use std::collections::BTreeSet;
use std::fmt::Debug;
use std::ops::RangeInclusive;

/// Attributes in every combination, with the first two software bits.
pub fn all_attributes() -> impl Iterator<Item = Attributes> {
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

/// The right after a fetch that faulted, on a CPU that tells the levels apart, or not. A fault that
/// does not tell the level leaves a leaf alone that has the right at one level.
fn fetched(before: Execute, access: Access, split: bool) -> Execute {
    let kernel = matches!(before, Execute::All | Execute::Kernel);
    let user = matches!(before, Execute::All | Execute::User);
    let none = !kernel && !user;
    let (more_kernel, more_user) = match access {
        Access::ExecuteKernel => (true, !split),
        Access::ExecuteUser => (!split, true),
        _ => (none, none),
    };
    match (kernel || more_kernel, user || more_user) {
        (true, true) => Execute::All,
        (true, false) => Execute::Kernel,
        (false, true) => Execute::User,
        (false, false) => Execute::None,
    }
}

/// What a CPU is, as far as leaves depend on it.
#[derive(Clone, Copy)]
pub struct Marks {
    /// Its leaves tell kernel from user execution.
    pub split: bool,
    /// Hardware marks writes, or faults.
    pub dirty: bool,
}

/// Checks the leaves of a format. `page` decodes a leaf at a level as hardware does, but for what
/// only the engine reads; `manual` has the same fields for attributes, an address and a size;
/// `refuses` checks why attributes are refused, if they are. Returns the number of leaves.
pub fn check_leaves<F: Format, P: PartialEq + Debug>(
    format: F,
    marks: Marks,
    page: impl Fn(u64, u8) -> P,
    manual: impl Fn(Attributes, u64, u64) -> P,
    refuses: impl Fn(Attributes, Option<AttributeError>),
) -> usize {
    let mut seen = BTreeSet::new();
    let levels = 0..=F::LARGEST_LEAF;
    for (level, a) in levels.flat_map(|level| all_attributes().map(move |a| (level, a))) {
        refuses(a, format.encode(a).err());
        let Ok(bits) = format.encode(a) else { continue };
        // The highest address: all of its bits are set.
        let place = |level| {
            let size = F::size(level).bytes();
            ((1 << format.output_bits()) - size, size)
        };
        let (hpa, size) = place(level);
        let raw = F::leaf(bits, level, Hpa(hpa));
        let is = |raw, a| assert_eq!(page(raw, level), manual(a, hpa, size), "{raw:#x}");
        is(raw, a);
        assert!(seen.insert((level, raw)), "two meanings of {raw:#x}");
        assert_eq!((format.decode(raw, level), F::leaf_address(raw, level)), (a, Hpa(hpa)));
        // Sealed: for hardware, nothing changes.
        let sealed = raw | F::MARK;
        is(sealed, a);
        assert_eq!(
            (F::kind(sealed, level), F::attribute_bits(sealed, level)),
            (Kind::Sealed, bits)
        );
        // Changes of rights that are made twice are made once.
        let protected = F::write_protected(raw);
        is(protected, Attributes { write: false, ..a });
        assert_eq!((protected & F::WRITE, F::write_protected(protected)), (0, protected));
        let data = F::execute_protected(raw);
        is(data, Attributes { execute: Execute::None, ..a });
        assert_eq!(F::execute_protected(data), data);
        for read in [a.read, !a.read] {
            let other = Attributes { read, ..a };
            if format.encode(other).is_ok() {
                let readable = F::readable(raw, read);
                is(readable, other);
                let (kind, address) = (F::kind(readable, level), F::leaf_address(readable, level));
                assert_eq!((kind, address), (Kind::Leaf, Hpa(hpa)));
            }
        }
        let used = Attributes { accessed: true, ..a };
        is(format.relaxed(raw, Access::Read), used);
        for access in [Access::Execute, Access::ExecuteKernel, Access::ExecuteUser] {
            let execute = fetched(a.execute, access, marks.split);
            is(format.relaxed(raw, access), Attributes { execute, ..used });
        }
        let written = Attributes { write: true, dirty: true, ..used };
        // Where the right to write needs that to read, it comes with it.
        let read = a.read || format.encode(written).is_err();
        let written = Attributes { read, ..written };
        is(format.relaxed(raw, Access::Write), written);
        let dirty = a.dirty && a.write && !marks.dirty;
        is(format.cleaned(raw), Attributes { dirty, ..a });
        // The last child of a split, made from the attribute bits alone.
        if level > 0 {
            let (hpa, size) = place(level - 1);
            let child = F::leaf(F::attribute_bits(raw, level), level - 1, Hpa(hpa));
            assert_eq!(page(child, level - 1), manual(a, hpa, size), "{child:#x}");
        }
    }
    seen.len()
}

/// Checks where walks begin: for each width of `roots`, the manual's level and the number of
/// entries. Widths that are not `allowed` are refused with those that are.
#[track_caller]
pub fn check_roots<F: Format>(format: F, allowed: RangeInclusive<u32>, roots: &[(u32, i8, usize)]) {
    for bits in (0..=64).chain([u32::MAX]) {
        let found = format.geometry(bits);
        assert_eq!(found.is_ok(), allowed.contains(&bits), "{bits} bits: {found:?}");
        match found {
            Ok(it) => {
                let bytes = (8 * it.root_entries).max(1 << F::PAGE_SHIFT);
                assert_eq!((it.address_bits, it.root_bytes(F::PAGE_SHIFT)), (bits, bytes));
            }
            Err(error) => {
                assert_eq!((error.min..=error.max, error.format), (allowed.clone(), F::NAME));
                let text = format!("{} to {} bits", error.min, error.max);
                super::super::stage::says(&error.to_string(), &[F::NAME, &text]);
            }
        }
    }
    for &(bits, level, entries) in roots {
        let it = format.geometry(bits).unwrap();
        assert_eq!(
            (F::level_name(it.root_level), it.root_entries),
            (level, entries),
            "{bits} bits"
        );
    }
}

/// Checks the kind of every value at each level up to `top`, with any of the bits that hardware or
/// the engine sets. `hardware` returns the address of a table, which withholds no right, or that an
/// entry is invalid.
pub fn check_entries<F: Format>(formats: &[F], top: u8, hardware: impl Fn(u64, u8) -> Option<u64>) {
    let (bits, bytes) = (formats[0].output_bits(), F::TABLE_BYTES as u64);
    let frames = [0, bytes, 1 << (bits - 1), (1 << bits) - bytes].map(Hpa);
    let tokens = [0, 1, 0x5555_5555_5555, 0xaaaa_aaaa_aaaa, 1 << 47, (1 << 48) - 1];
    let mut invalid = vec![(0, Kind::Empty)];
    for frame in frames {
        let markers = [(F::frozen(frame), Kind::Frozen), (F::retired(frame), Kind::Retired)];
        assert!(markers.iter().all(|(raw, _)| F::table_address(*raw) == frame));
        invalid.extend(markers);
    }
    invalid.extend(tokens.map(|token| (F::reserved(token), Kind::Reserved)));
    assert_eq!(invalid.iter().map(|(raw, _)| raw).collect::<BTreeSet<_>>().len(), invalid.len());
    let leaves = |level| -> Vec<u64> {
        let hpa = Hpa((1 << bits) - (1 << F::shift(level)));
        let bits = formats.iter().flat_map(|f| all_attributes().filter_map(|a| f.encode(a).ok()));
        bits.map(|bits| F::leaf(bits, level, hpa)).collect()
    };
    let flips = [0, F::ACCESSED, F::DIRTY, F::ACCESSED | F::DIRTY];
    for (flip, level) in flips.into_iter().flat_map(|flip| (0..=top).map(move |l| (flip, l))) {
        // Formats in which hardware marks tables keep the bits of marks out of all invalid entries.
        let other = if F::TABLE_ACCESSED != 0 { flip } else { 0 };
        for &(raw, kind) in &invalid {
            assert_eq!(
                (F::kind(raw ^ other, level), hardware(raw, level)),
                (kind, None),
                "{raw:#x}"
            );
            let marked = matches!(kind, Kind::Frozen | Kind::Retired);
            assert_eq!(raw & F::MARK != 0, marked, "{raw:#x}");
        }
        let above = level > F::LARGEST_LEAF;
        let (kind, marked) =
            if above { (Kind::Frozen, Kind::Frozen) } else { (Kind::Leaf, Kind::Sealed) };
        for raw in leaves(level) {
            for changed in [raw, F::write_protected(raw), F::execute_protected(raw)] {
                assert_eq!(F::kind(changed ^ flip, level), kind);
                assert_eq!(F::kind(changed ^ flip | F::MARK, level), marked);
            }
        }
        for frame in frames.into_iter().filter(|_| level > 0) {
            let table = F::table(frame, level);
            assert_eq!(hardware(table, level), Some(frame.0), "{table:#x}");
            let bits = [F::TABLE_ACCESSED, F::MARK, F::AGEING];
            for set in 0..1u32 << bits.len() {
                let chosen = (0..).zip(bits).filter(|(n, _)| set >> n & 1 == 1);
                let raw = chosen.fold(table, |raw, (_, bit)| raw ^ bit);
                assert_eq!(F::kind(raw ^ other, level), Kind::Table);
                assert_eq!(F::table_address(raw ^ other), frame);
                if F::TABLE_ACCESSED != 0 {
                    assert_eq!(hardware(raw, level), Some(frame.0), "{raw:#x}");
                }
            }
        }
    }
    // A run is all tables only if each entry is.
    let all_tables = |run: &[u64; RUN], level| {
        let common = run.iter().fold(!0, |common, raw| common & raw);
        F::all_tables(common, run.iter().fold(0, |any, raw| any | raw), level)
    };
    let tables = [F::table(frames[1], 1); RUN];
    assert!(!all_tables(&tables, 0), "level 0 has none");
    invalid.extend(leaves(1).into_iter().map(|raw| (raw, Kind::Leaf)));
    let bare = F::table(Hpa(0), 1) & !F::TABLE_ACCESSED;
    invalid.extend([(bare, Kind::Table), (bare | F::MARK, Kind::Table)]);
    for (place, (raw, kind)) in (0..RUN).flat_map(|at| invalid.iter().map(move |it| (at, it))) {
        let mut run = tables;
        run[place] = *raw;
        assert_eq!(all_tables(&run, 1), *kind == Kind::Table, "{raw:#x}");
    }
}
