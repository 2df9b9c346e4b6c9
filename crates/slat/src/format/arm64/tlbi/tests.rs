//! Tests of sequences against operands worked out by hand, and against a separate decoder that
//! models a TLB.

use super::*;
use crate::addr::Gpa;
use crate::invalidation::Vmid;
use proptest::prelude::*;
use std::string::ToString;
use std::vec::Vec;

const PAGE: u64 = 0x1000;

fn invalidation(start: u64, size: u64, leaf: Option<u32>) -> Invalidation {
    let range = GpaRange::new(Gpa(start), size).unwrap();
    let leaf = leaf.map(PageSize::from_shift);
    Invalidation { vmid: Vmid(1), range: Some(range), leaf, tables: false }
}

fn text(tlbi: Tlbi, what: &Invalidation) -> Vec<std::string::String> {
    tlbi.sequence(what).map(|i| i.to_string()).collect()
}

/// Returns the operands of a sequence, in order.
fn operands(tlbi: Tlbi, start: u64, size: u64, leaf: Option<u32>) -> Vec<u64> {
    let decoded = tlbi.sequence(&invalidation(start, size, leaf)).map(decode);
    decoded.filter_map(|(.., operand)| operand).collect()
}

/// Returns whether an instruction takes a range, whether it is last level only, whether it is
/// local, and its operand.
fn decode(i: Instruction) -> (bool, bool, bool, Option<u64>) {
    let text = i.to_string();
    let name = text.split([' ', ',']).nth(1).unwrap_or_default();
    let operand = text.split("= 0x").nth(1).map(|x| u64::from_str_radix(x, 16).unwrap());
    (name.starts_with('r'), name.contains("2le1"), !name.ends_with("is"), operand)
}

/// An entry of a TLB: a leaf, or the walk cache of a table, of `1 << shift` bytes.
#[derive(Clone, Copy, Debug)]
struct Entry {
    at: u64,
    shift: u32,
    leaf: bool,
}

/// Returns whether the manual promises that an instruction by address removes `entry` of a guest
/// with this granule. It is written from the manual's tables of fields, and shares no code with the
/// encoder.
fn removes(i: Instruction, page_shift: u32, ds: bool, entry: Entry) -> bool {
    let (is_range, last_level, _, Some(operand)) = decode(i) else { return false };
    let granules = [(0b01, 12), (0b10, 14), (0b11, 16)];
    let bits = |high: u32, low: u32| operand >> low & ((1 << (high - low + 1)) - 1);
    let level_shift = |level: u64| page_shift + (3 - level as u32) * (page_shift - 3);
    assert_eq!(bits(63, 48), 0, "NS and reserved bits: {i}");
    let tg = bits(47, 46);
    let (start, end, level) = if is_range {
        assert!(granules.contains(&(tg, page_shift)), "TG: {i}");
        let size = (bits(43, 39) + 1) << (5 * bits(45, 44) + 1) << page_shift;
        let start = bits(36, 0) << if ds { 16 } else { page_shift };
        (start, start + size, Some(bits(38, 37)).filter(|&level| level != 0))
    } else {
        assert_eq!(bits(43, 40), 0, "reserved bits: {i}");
        assert!(tg == 0 || granules.contains(&(tg, page_shift)), "TTL[3:2]: {i}");
        let start = bits(39, 0) << 12;
        (start, start + 1, Some(bits(45, 44)).filter(|_| tg != 0))
    };
    if let Some(level) = level {
        let reserved = match page_shift {
            12 => level == 0 && !ds,
            14 => level == 0 || level == 1 && !ds,
            _ => level == 0,
        };
        assert!(!reserved, "a level without leaves: {i}");
        let unit = 1 << level_shift(level);
        assert!(!is_range || start % unit == 0, "TTL of an unaligned base: {i}");
    }
    let wanted = level.is_none_or(|level| entry.leaf && level_shift(level) == entry.shift);
    let reached = start < entry.at + (1 << entry.shift) && entry.at < end;
    wanted && reached && (entry.leaf || !last_level)
}

fn granule() -> impl Strategy<Value = Granule> {
    prop::sample::select(&Granule::ALL[..])
}

prop_compose! {
    fn machine()(
        granule in granule(),
        features in any::<[bool; 5]>(),
        most_by_address in prop::sample::select(&[8, 512, 1 << 12][..]),
    ) -> Tlbi {
        let [range_instructions, ttl, lpa2, local, repeat] = features;
        let scope = if local { Scope::Local } else { Scope::InnerShareable };
        let address_bits = if lpa2 || granule == Granule::K64 { 52 } else { 48 };
        Tlbi {
            granule,
            range_instructions,
            ttl,
            lpa2,
            address_bits,
            most_by_address,
            scope,
            repeat,
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..crate::properties::config() })]

    #[test]
    fn everything_asked_for_is_gone_and_neighbours_stay(
        tlbi in machine(),
        leaf_level in prop::option::of(0u32..4),
        tables in any::<bool>(),
        from_top in any::<bool>(),
        start in any::<u64>(),
        magnitude in 0u32..24,
        length in any::<u64>(),
        picks in prop::collection::vec(any::<u64>(), 8),
    ) {
        let page_shift = tlbi.granule.shift();
        let shift_of = |level: u32| page_shift + level * (page_shift - 3);
        // Leaves stand at three levels at most, pages included. A fourth level of 4K, and a third
        // of 16K, need DS=1.
        let levels = match (tlbi.granule, tlbi.lpa2) {
            (Granule::K4, true) => 4,
            (Granule::K16, false) => 2,
            _ => 3,
        };
        let leaf = leaf_level.filter(|&level| level < levels).map(shift_of);
        let unit_shift = leaf.unwrap_or(page_shift);
        let units = 1u64 << (tlbi.address_bits - unit_shift);
        let count = 1 + length % (1 << magnitude).min(units);
        let first = if from_top { units - count } else { start % (units - count + 1) };
        let (start, end) = (first << unit_shift, (first + count) << unit_shift);
        let what = Invalidation { tables, ..invalidation(start, end - start, leaf) };
        let sequence = tlbi.sequence(&what);
        let whole = sequence.is_whole_guest();
        let all: Vec<_> = sequence.collect();

        // The instructions before and after those by address.
        let wait = if tlbi.scope == Scope::Local { "dsb nsh" } else { "dsb ish" };
        let publish = std::format!("{wait}st");
        let is = if tlbi.scope == Scope::Local { "" } else { "is" };
        let names: Vec<_> = all.iter().map(|i| i.to_string()).collect();
        let times = if tlbi.repeat && tlbi.scope == Scope::InnerShareable { 2 } else { 1 };
        prop_assert_eq!(&names[0], &publish);
        if whole {
            let all_of_it = std::format!("tlbi vmalls12e1{is}");
            let once = [&all_of_it, wait];
            prop_assert_eq!(&names[1..], [once.repeat(times).as_slice(), &["isb"]].concat());
            let stride = if tables { page_shift } else { unit_shift };
            prop_assert!((end - start) >> stride > tlbi.most_by_address);
            return Ok(());
        }
        let combined = std::format!("tlbi vmalle1{is}");
        let tail = [&[wait], [&combined, wait].repeat(times).as_slice(), &["isb"]].concat();
        let end_of_addresses = names.len() - tail.len();
        prop_assert_eq!(&names[end_of_addresses..], tail);
        let by_address = &all[1..end_of_addresses];
        for &i in by_address {
            let (range, last_level, local, operand) = decode(i);
            prop_assert!(operand.is_some() && (!range || tlbi.range_instructions));
            prop_assert_eq!((last_level, local), (!tables, tlbi.scope == Scope::Local));
        }

        // The sequence has as many instructions as were counted, and no more than the limit.
        prop_assert!(by_address.len() as u64 <= tlbi.most_by_address);
        let planned = tlbi.addresses(what.range.unwrap(), &what).unwrap().instructions();
        prop_assert_eq!(by_address.len() as u64, planned);
        let pages = (end - start) >> page_shift;
        let head = if tlbi.lpa2 { 15 } else { 0 };
        if tlbi.range_instructions {
            prop_assert!(planned <= head + pages.div_ceil(1 << 21) + 4);
        }

        let gone =
            |entry| by_address.iter().any(|&i| removes(i, page_shift, tlbi.lpa2, entry));
        let shifts = match leaf {
            Some(leaf) if !tables => std::vec![leaf],
            _ => (0..levels).map(shift_of).collect(),
        };
        let asked = [start, end - 1].into_iter();
        for at in asked.chain(picks.iter().map(|pick| start + pick % (end - start))) {
            for &shift in &shifts {
                let entry = Entry { at: at >> shift << shift, shift, leaf: true };
                prop_assert!(gone(entry), "{:?} of {}", entry, what.range.unwrap());
                let cached = Entry { leaf: false, ..entry };
                prop_assert_eq!(gone(cached), tables, "{:?}", cached);
            }
        }
        for at in [start.checked_sub(1), Some(end)].into_iter().flatten() {
            let entry = Entry { at: at >> page_shift << page_shift, shift: page_shift, leaf: true };
            prop_assert!(!gone(entry), "{:?} next to {}", entry, what.range.unwrap());
        }
    }
}

#[test]
fn operands_are_those_worked_out_by_hand() {
    let of = |granule| Tlbi { ttl: true, ..Tlbi::new(granule) };
    // IPA[47:12] of 2G is 0x80000; TTL[3:0] in bits 47:44 is granule and level: 01.11 is 7,
    // 01.10 is 6, 10.11 is 11, 10.10 is 10, 11.11 is 15, 11.10 is 14.
    for (granule, leaf, operand) in [
        (Granule::K4, 12, 0x7000_0008_0000),
        (Granule::K4, 21, 0x6000_0008_0000),
        (Granule::K4, 30, 0x5000_0008_0000),
        (Granule::K16, 14, 0xb000_0008_0000),
        (Granule::K16, 25, 0xa000_0008_0000),
        (Granule::K64, 16, 0xf000_0008_0000),
        (Granule::K64, 29, 0xe000_0008_0000),
    ] {
        let size = 1 << leaf;
        assert_eq!(operands(of(granule), 1 << 31, size, Some(leaf)), [operand]);
        let plain = Tlbi { ttl: false, ..of(granule) };
        assert_eq!(operands(plain, 1 << 31, size, Some(leaf)), [0x80000]);
        let ranges = Tlbi { range_instructions: true, ..of(granule) };
        assert_eq!(operands(ranges, 1 << 31, size, Some(leaf)), [operand], "one leaf, one op");
    }
}

#[test]
fn range_operands_are_those_worked_out_by_hand() {
    let of =
        |granule, lpa2| Tlbi { range_instructions: true, ttl: true, lpa2, ..Tlbi::new(granule) };
    // 1G of 4k pages is 4 * 2^16: TG 1<<46, SCALE 3<<44, NUM 3<<39, base 2G >> 12.
    assert_eq!(operands(of(Granule::K4, false), 1 << 31, 1 << 30, None), [0x7180_0008_0000]);
    // With TTL 3<<37; with DS=1, base 2G >> 16.
    let pages = operands(of(Granule::K4, false), 1 << 31, 1 << 30, Some(12));
    assert_eq!(pages, [0x71e0_0008_0000]);
    assert_eq!(operands(of(Granule::K4, true), 1 << 31, 1 << 30, None), [0x7180_0000_8000]);
    // 2G of 16k pages is 2 * 2^16, TG 2<<46, base 2G >> 14; of 64k pages 16 * 2^11, TG 3<<46,
    // SCALE 2<<44, NUM 15<<39, base 2G >> 16.
    assert_eq!(operands(of(Granule::K16, false), 1 << 31, 1 << 31, None), [0xb080_0002_0000]);
    assert_eq!(operands(of(Granule::K64, false), 1 << 31, 1 << 31, None), [0xe780_0000_8000]);
    // Seven pages: 3 * 2 of SCALE 0, NUM 2<<39, and one alone, six pages on.
    let seven = operands(of(Granule::K4, false), 1 << 31, 7 * PAGE, None);
    assert_eq!(seven, [0x4100_0008_0000, 0x0008_0006]);
}

#[test]
fn the_highest_scale_takes_all_of_its_32_steps() {
    // 8G of 4k pages: Linux once encoded this as no range at all, and lost dirty pages.
    let tlbi = Tlbi { range_instructions: true, ..Tlbi::new(Granule::K4) };
    // TG 1<<46, SCALE 3<<44, NUM 31<<39, base 1G >> 12.
    assert_eq!(operands(tlbi, 1 << 30, 8 << 30, None), [0x7f80_0004_0000]);
}

#[test]
fn the_last_page_of_the_address_space_encodes_without_overflow() {
    for (granule, lpa2, bits) in
        [(Granule::K4, false, 48), (Granule::K4, true, 52), (Granule::K64, false, 52)]
    {
        let (top, page) = (1u64 << bits, 1u64 << granule.shift());
        let base = Tlbi { lpa2, address_bits: bits, ..Tlbi::new(granule) };
        let all_ones = (top >> 12) - (page >> 12);
        assert_eq!(operands(base, top - page, page, None), [all_ones]);
        assert_eq!(operands(base, top - page, page, Some(granule.shift())), [all_ones]);
    }
}

#[test]
fn an_address_that_no_operand_holds_takes_the_whole_guest() {
    let tlbi = Tlbi { address_bits: 40, ..Tlbi::new(Granule::K4) };
    for start in [1 << 40, (1 << 40) - PAGE, u64::MAX - 2 * PAGE] {
        assert!(tlbi.sequence(&invalidation(start, 2 * PAGE, None)).is_whole_guest());
    }
    assert!(!tlbi.sequence(&invalidation((1 << 40) - PAGE, PAGE, None)).is_whole_guest());
}

#[test]
fn a_range_that_ends_inside_a_page_takes_the_page() {
    assert_eq!(operands(Tlbi::new(Granule::K4), 0x1fff, 2, None), [1, 2]);
    let sixteen = Tlbi::new(Granule::K16);
    assert_eq!(operands(sixteen, 0x5000, 0x1000, None), [4], "in units of 4k, not of 16k");
}

#[test]
fn more_than_the_limit_takes_the_whole_guest() {
    let tlbi = Tlbi::new(Granule::K4);
    let whole =
        |tlbi: Tlbi, size, leaf| tlbi.sequence(&invalidation(0, size, leaf)).is_whole_guest();
    assert!(!whole(tlbi, 512 * PAGE, None));
    assert!(whole(tlbi, 513 * PAGE, None));
    assert!(!whole(tlbi, 512 << 21, Some(21)), "one for each block");
    let ranges = Tlbi { range_instructions: true, ..tlbi };
    assert!(!whole(ranges, 1 << 40, None));
    assert!(whole(ranges, 1 << 48, None));
}

#[test]
fn the_whole_guest_takes_four_instructions() {
    let what = Invalidation { range: None, ..invalidation(0, PAGE, None) };
    let shareable = Tlbi::new(Granule::K4);
    assert_eq!(text(shareable, &what), ["dsb ishst", "tlbi vmalls12e1is", "dsb ish", "isb"]);
    let local = Tlbi { scope: Scope::Local, ..shareable };
    assert_eq!(text(local, &what), ["dsb nshst", "tlbi vmalls12e1", "dsb nsh", "isb"]);
}

#[test]
fn a_contiguous_run_is_invalidated_by_page_without_a_hint() {
    let tlbi = Tlbi { ttl: true, ..Tlbi::new(Granule::K4) };
    assert_eq!(operands(tlbi, 0, 4 * PAGE, Some(14)), [0, 1, 2, 3]);
}

#[test]
fn only_a_size_that_leaves_have_names_a_level() {
    let level = |granule, lpa2, shift| {
        Tlbi { lpa2, ..Tlbi::new(granule) }.level(PageSize::from_shift(shift))
    };
    for (granule, shift, plain, lpa2) in [
        (Granule::K4, 30, Some(1), Some(1)),
        (Granule::K4, 39, None, Some(0)),
        (Granule::K4, 48, None, None),
        (Granule::K16, 25, Some(2), Some(2)),
        (Granule::K16, 36, None, Some(1)),
        (Granule::K16, 47, None, None),
        (Granule::K64, 42, Some(1), Some(1)),
        (Granule::K64, 55, None, None),
        (Granule::K64, 12, None, None),
        (Granule::K4, 22, None, None),
    ] {
        assert_eq!(level(granule, false, shift), plain, "{granule} {shift}");
        assert_eq!(level(granule, true, shift), lpa2, "{granule} {shift}, DS=1");
    }
}

#[test]
fn a_repeated_sequence_ends_in_its_last_invalidation_twice() {
    let cpu = Tlbi { repeat: true, ..Tlbi::new(Granule::K4) };
    let page = invalidation(0x8000_0000, PAGE, None);
    let name = |line: &std::string::String| line.split(',').next().unwrap().to_string();
    let names: Vec<_> = text(cpu, &page).iter().map(name).collect();
    let [tlbi, dsb] = ["tlbi vmalle1is", "dsb ish"];
    assert_eq!(names, ["dsb ishst", "tlbi ipas2le1is", dsb, tlbi, dsb, tlbi, dsb, "isb"]);
    let whole = Invalidation { range: None, ..page };
    let all = "tlbi vmalls12e1is";
    assert_eq!(text(cpu, &whole), ["dsb ishst", all, dsb, all, dsb, "isb"]);
    // One PE waits for its own stores.
    assert_eq!(text(cpu.local(), &page), text(Tlbi::new(Granule::K4).local(), &page));
}
