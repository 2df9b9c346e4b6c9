//! Tests of registers against values worked out by hand, and against the manual's rules for them.

use super::*;
use crate::format::arm64::{Arm64K4, Arm64K16, Arm64K64, Arm64Lpa2K4, Arm64Lpa2K16, Arm64LpaK64};
use std::string::ToString;

// Values from the CPUs' technical reference manuals, and from QEMU's models of them.
const CORTEX_A53: IdRegisters =
    IdRegisters { mmfr0: 0x1122, mmfr1: 0, mmfr2: 0, isar0: 0x11120, midr: 0x410f_d034 };
const CORTEX_A55: IdRegisters = IdRegisters {
    mmfr0: 0x10_1122,
    mmfr1: 0x1021_2122,
    mmfr2: 0x1011,
    isar0: 0x1000_1021_1120,
    midr: 0x412f_d050,
};
const NEOVERSE_N2: IdRegisters = IdRegisters {
    mmfr0: 0x222_0010_1125,
    mmfr1: 0x1021_2122,
    mmfr2: 0x1221_0111_1010_1011,
    isar0: 0x0221_1111_1021_2120,
    midr: 0x410f_d493,
};
/// QEMU's `max`, as far as addresses are concerned: 52 bits, and FEAT_LPA2 for both granules.
const MAX: IdRegisters = IdRegisters { mmfr0: 0x323_1020_1126, ..NEOVERSE_N2 };

#[test]
fn features_are_those_of_the_cpus_manuals() {
    let of = |id: IdRegisters| {
        (
            (id.address_bits(), id.vmid_bits(), id.hardware_accessed(), id.hardware_dirty()),
            (id.split_execute(), id.forced_write_back(), id.common_not_private()),
            (id.small_tables(), id.ttl(), id.range_instructions()),
        )
    };
    let no = (false, false, false);
    assert_eq!(of(CORTEX_A53), ((40, 8, false, false), no, no));
    assert_eq!(of(CORTEX_A55), ((40, 16, true, true), (true, false, true), no));
    let yes = (true, true, true);
    assert_eq!(of(NEOVERSE_N2), ((48, 16, true, true), yes, yes));
}

#[test]
fn a_stage_2_granule_equals_stage_1s_unless_its_field_says() {
    let has = |mmfr0| {
        let id = IdRegisters { mmfr0, ..IdRegisters::default() };
        Granule::ALL.map(|granule| id.has_granule(granule))
    };
    assert_eq!(has(0x1122), [true, false, true], "Cortex-A53");
    assert_eq!(has(0xff00_0000), [false, false, false], "0xf: none of 4k and 64k");
    assert_eq!(has(0x1020_0000), [true, true, true], "1 and 2: 52 bits");
    assert_eq!(has(0x111_0010_0000), [false, false, false], "1: not at stage 2");
    assert_eq!(has(0x222_ff00_0000), [true, true, true], "2: at stage 2 all the same");
}

#[test]
fn stage_2_lpa2_equals_stage_1s_unless_its_field_says() {
    let has = |mmfr0| {
        let id = IdRegisters { mmfr0, ..IdRegisters::default() };
        Granule::ALL.map(|granule| id.has_lpa2(granule))
    };
    assert_eq!(has(MAX.mmfr0), [true, true, false]);
    assert_eq!(has(NEOVERSE_N2.mmfr0), [false; 3]);
    assert_eq!(has(0x1020_0000), [true, true, false], "52 bits at stage 1, and nothing else said");
    assert_eq!(has(0x222_1020_0000), [false; 3], "2: stage 2 has the granule alone");
    assert_eq!(has(0x111_1020_0000), [false; 3], "1: not at stage 2");
    assert_eq!(has(0xf000_0000), [false; 3], "0xf: there is no 4k");
    assert_eq!(has(0x300_f000_0000), [true, false, false], "3: at stage 2 all the same");
}

#[test]
fn a_granule_without_lpa2_is_refused_by_the_features_name() {
    let error = NEOVERSE_N2.format::<12, true>().unwrap_err();
    assert!(error.to_string().contains("FEAT_LPA2"), "{error}");
    assert_eq!(NEOVERSE_N2.vtcr(&Arm64Lpa2K16::default(), &GEOMETRY), Err(error));
    let narrow = IdRegisters { mmfr0: MAX.mmfr0 & !0xf | 5, ..MAX };
    assert_eq!(narrow.format::<12, true>().unwrap().output_bits, 48);
    let error = CORTEX_A53.format::<14, true>().unwrap_err();
    assert!(matches!(error, UnsupportedFeature::Granule { wanted: Granule::K16, .. }));
}

#[test]
fn a_missing_granule_is_refused_with_those_that_are_there() {
    let error = CORTEX_A53.format::<14, false>().unwrap_err();
    assert_eq!(error.to_string(), "this CPU has no 16k granule at stage 2; it has 4k, 64k");
    assert_eq!(CORTEX_A53.vtcr(&Arm64K16::default(), &GEOMETRY), Err(error));
}

const GEOMETRY: Geometry = Geometry { address_bits: 40, root_level: 2, root_entries: 1024 };

#[test]
fn a_break_is_spared_where_the_cpu_and_the_platform_allow_it() {
    let of = |level: u64, handles| {
        let id = IdRegisters { mmfr2: level << 52, ..IdRegisters::default() };
        id.break_before_make(handles)
    };
    for handles in [false, true] {
        assert_eq!(of(0, handles), BreakBeforeMake::Always);
        assert_eq!(of(1, handles), BreakBeforeMake::Always);
        assert_eq!(of(3, handles), BreakBeforeMake::Never);
    }
    assert_eq!(of(2, false), BreakBeforeMake::Always);
    assert_eq!(of(2, true), BreakBeforeMake::ConflictHandled);
}

/// Returns VTCR_EL2 for tables with all that a CPU and a granule allow, `bits` wide.
fn vtcr<const PAGE_SHIFT: u32>(id: IdRegisters, bits: u32) -> u64 {
    vtcr_of::<PAGE_SHIFT, false>(id, bits)
}

fn vtcr_of<const PAGE_SHIFT: u32, const WIDE: bool>(id: IdRegisters, bits: u32) -> u64 {
    let format = id.format::<PAGE_SHIFT, WIDE>().unwrap();
    id.vtcr(&format, &format.geometry(bits).unwrap()).unwrap()
}

#[test]
fn vtcr_is_what_a_guest_ran_with() {
    // The value that ran under QEMU: T0SZ 24, SL0 1, write-back, inner shareable, 4K, PS 2, HA, HD,
    // RES1, with VMIDs of 8 bits.
    let short = IdRegisters { mmfr1: CORTEX_A55.mmfr1 & !0xf0, ..CORTEX_A55 };
    assert_eq!(vtcr::<12>(short, 40), 0x8062_3558);
    assert_eq!(vtcr::<12>(CORTEX_A55, 40), 0x806a_3558, "VS");
    assert_eq!(vtcr::<12>(CORTEX_A53, 40), 0x8002_3558, "no HA, no HD");
}

#[test]
fn vtcr_encodes_granule_and_start_level_by_granule() {
    // T0SZ 16, SL0 2, PS 5: the manual's level 0 for 4K, level 1 for 16K and 64K.
    assert_eq!(vtcr::<12>(NEOVERSE_N2, 48), 0x806d_3590);
    assert_eq!(vtcr::<14>(NEOVERSE_N2, 48), 0x806d_b590);
    assert_eq!(vtcr::<16>(NEOVERSE_N2, 48), 0x806d_7590);
    // T0SZ 24, SL0 1, PS 2: level 2.
    assert_eq!(vtcr::<16>(CORTEX_A55, 40), 0x806a_7558);
}

#[test]
fn vtcr_with_lpa2_has_ds_and_where_the_walk_begins() {
    // T0SZ 12, SL0 2, write-back, inner shareable, 4K, PS 6, VS, HA, HD, RES1, DS.
    assert_eq!(vtcr_of::<12, true>(MAX, 52), 0x1_806e_358c);
    // 16K: SL0 3, the manual's level 0.
    assert_eq!(vtcr_of::<14, true>(MAX, 52), 0x1_806e_b5cc);
    let format = MAX.format::<12, true>().unwrap();
    // Level -1: SL2, SL0 0.
    let five = Geometry { address_bits: 52, root_level: 4, root_entries: 16 };
    assert_eq!(MAX.vtcr(&format, &five), Ok(0x3_806e_350c));
    // SH0 is the shareability of memory, too.
    let outer = Arm64 { shareability: Shareability::Outer, ..format };
    assert_eq!(MAX.vtcr(&outer, &five), Ok(0x3_806e_250c));
}

#[test]
fn with_lpa_the_64k_granule_has_52_bits_and_no_ds() {
    assert!(MAX.has_lpa() && !NEOVERSE_N2.has_lpa());
    // T0SZ 12, SL0 2 (the manual's level 1), write-back, inner shareable, 64K, PS 6, VS, HA, HD,
    // RES1.
    assert_eq!(vtcr_of::<16, true>(MAX, 52), 0x806e_758c);
    let wide = MAX.format::<16, true>().unwrap();
    assert_eq!((wide.output_bits, MAX.tlbi(&wide).lpa2), (52, false));
    // BADDR[51:48] in bits 5:2.
    let root = MAX.vttbr(&Arm64LpaK64::default(), Hpa(0xf_0000_0001_0000), Vmid(1));
    assert_eq!(root, Ok(0x1_0000_0001_003c));
    let error = NEOVERSE_N2.format::<16, true>().unwrap_err();
    assert_eq!(error.to_string(), "this CPU lacks FEAT_LPA, which the format asks for");
    assert_eq!(NEOVERSE_N2.vtcr(&Arm64LpaK64::default(), &GEOMETRY), Err(error));
}

/// Returns start level and entries of the root that a walk takes from VTCR_EL2, after the manual's
/// AArch64.S2InvalidSL, AArch64.S2InconsistentSL and AArch64.S2MinTxSZ (without FEAT_TTST).
fn walk_start(vtcr: u64, address_bits: u32) -> Option<(i8, usize)> {
    let (t0sz, sl0, tg0) = ((vtcr & 63) as u32, vtcr >> 6 & 3, vtcr >> 14 & 3);
    let (ds, sl2) = (vtcr >> 32 & 1 == 1, vtcr >> 33 & 1 == 1);
    let (page_shift, stride, level, least) = match (tg0, ds && sl2, sl0) {
        (0b00, true, 0) => (12, 9, -1, 52),
        (0b00, false, 2) => (12, 9, 0, 44),
        (0b00, false, 0 | 1) => (12, 9, 2 - sl0 as i8, 0),
        (0b10, _, 3) if ds => (14, 11, 0, 52),
        (0b10, _, 2) => (14, 11, 1, 42),
        (0b10, _, 0 | 1) => (14, 11, 3 - sl0 as i8, 0),
        (0b01, _, 2) => (16, 13, 1, 44),
        (0b01, _, 0 | 1) => (16, 13, 3 - sl0 as i8, 0),
        _ => return None,
    };
    let wide = if page_shift == 16 { address_bits >= 52 } else { ds };
    let shortest = if wide { 12 } else { 16 };
    if address_bits < least || !(shortest..=39).contains(&t0sz) {
        return None;
    }
    let below = page_shift + (3 - i32::from(level)) as u32 * stride;
    let root_bits = (64 - t0sz).checked_sub(below)?;
    (1..=stride + 4).contains(&root_bits).then_some((level, 1 << root_bits))
}

fn check_all_widths<const PAGE_SHIFT: u32, const WIDE: bool>(id: IdRegisters) {
    let format = id.format::<PAGE_SHIFT, WIDE>().unwrap();
    for bits in 0..=64 {
        let Ok(geometry) = format.geometry(bits) else { continue };
        let vtcr = id.vtcr(&format, &geometry).unwrap();
        assert_eq!(vtcr >> 32, u64::from(WIDE && PAGE_SHIFT < 16), "no level -1 is needed");
        let start = walk_start(vtcr, id.address_bits());
        let wanted =
            (Arm64::<PAGE_SHIFT, WIDE>::level_name(geometry.root_level), geometry.root_entries);
        assert_eq!(start, Some(wanted), "{PAGE_SHIFT}: {bits} of {}", id.address_bits());
    }
}

#[test]
fn every_width_on_every_cpu_starts_walks_at_its_root() {
    for parange in 0..=6 {
        let id = IdRegisters { mmfr0: NEOVERSE_N2.mmfr0 & !0xf | parange, ..NEOVERSE_N2 };
        check_all_widths::<12, false>(id);
        check_all_widths::<14, false>(id);
        check_all_widths::<16, false>(id);
        let id = IdRegisters { mmfr0: MAX.mmfr0 & !0xf | parange, ..MAX };
        check_all_widths::<12, true>(id);
        check_all_widths::<14, true>(id);
    }
    check_all_widths::<16, true>(MAX);
}

#[test]
fn a_root_that_no_walk_starts_at_is_refused() {
    let format = NEOVERSE_N2.format::<12, false>().unwrap();
    let of = |address_bits, root_level, root_entries| {
        let geometry = Geometry { address_bits, root_level, root_entries };
        NEOVERSE_N2.vtcr(&format, &geometry).is_ok()
    };
    assert!(of(40, 2, 1024) && of(40, 3, 2), "two tables, or two entries above them");
    assert!(!of(40, 1, 1 << 19), "more than sixteen tables");
    assert!(!of(39, 3, 1) && !of(40, 2, 512), "one entry, or entries for half of it");
    assert!(!of(24, 1, 8), "T0SZ above 39");
    assert!(!of(0, 0, 1) && !of(48, 4, 1) && !of(40, u8::MAX >> 3, 1024), "no level at all");
}

#[test]
fn level_minus_1_and_widths_above_48_bits_need_ds() {
    let format = MAX.format::<12, false>().unwrap();
    let wide = Geometry { address_bits: 52, root_level: 3, root_entries: 8192 };
    assert!(MAX.vtcr(&format, &wide).is_err(), "T0SZ below 16, without DS");
    let format = MAX.format::<12, true>().unwrap();
    assert!(MAX.vtcr(&format, &wide).is_ok());
    let of = |id: IdRegisters, address_bits, root_entries| {
        let geometry = Geometry { address_bits, root_level: 4, root_entries };
        let format = Arm64 { output_bits: id.address_bits(), ..format };
        id.vtcr(&format, &geometry).map(|vtcr| walk_start(vtcr, id.address_bits()))
    };
    assert_eq!(of(MAX, 49, 2), Ok(Some((-1, 2))));
    assert_eq!(of(MAX, 52, 16), Ok(Some((-1, 16))));
    assert!(of(MAX, 48, 1).is_err() && of(MAX, 52, 8).is_err());
    let narrow = IdRegisters { mmfr0: MAX.mmfr0 & !0xf | 5, ..MAX };
    assert!(of(narrow, 49, 2).is_err(), "level -1 with 48-bit addresses");
}

#[test]
fn a_cpu_with_40_bit_addresses_starts_no_walk_at_level_0() {
    let format = CORTEX_A55.format::<12, false>().unwrap();
    assert_eq!((format.output_bits, format.geometry(41).unwrap_err().max), (40, 40));
    assert_eq!(format.geometry(40).unwrap().root_level, 2, "the manual's level 1");
    let forced = Geometry { root_level: 3, root_entries: 2, ..GEOMETRY };
    let error = CORTEX_A55.vtcr(&format, &forced).unwrap_err();
    assert_eq!(error, UnsupportedFeature::StartLevel { geometry: forced, most: 40 });
    let wide = Arm64K4 { output_bits: 48, ..format };
    let error = CORTEX_A55.vtcr(&wide, &GEOMETRY).unwrap_err();
    assert_eq!(error, UnsupportedFeature::AddressBits { wanted: 48, most: 40 });
}

#[test]
fn a_configuration_beyond_the_cpu_is_refused_by_feature_name() {
    let format = CORTEX_A53.format::<16, false>().unwrap();
    let geometry = format.geometry(40).unwrap();
    assert!(CORTEX_A53.vtcr(&format, &geometry).is_ok());
    for (format, name) in [
        (Arm64K64 { forced_write_back: true, ..format }, "FEAT_S2FWB"),
        (Arm64K64 { hardware_dirty: true, ..format }, "FEAT_HAFDBS"),
        (Arm64K64 { split_execute: true, ..format }, "FEAT_XNX"),
    ] {
        let error = CORTEX_A53.vtcr(&format, &geometry).unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
    }
}

#[test]
fn neither_root_nor_vmid_runs_into_the_others_bits() {
    let plain = Arm64K4::default();
    assert_eq!(CORTEX_A53.vttbr(&plain, Hpa(0x8000_2000), Vmid(0xff)), Ok(0xff_0000_8000_2000));
    let error = CORTEX_A53.vttbr(&plain, Hpa(0x8000_2000), Vmid(0x100)).unwrap_err();
    assert_eq!(error, UnsupportedFeature::Vmid { vmid: Vmid(0x100), bits: 8 });
    assert_eq!(NEOVERSE_N2.vttbr(&plain, Hpa(0x2000), Vmid(0xffff)), Ok(0xffff_0000_0000_2000));
    for root in [Hpa(1), Hpa(0x20), Hpa(1 << 48)] {
        let error = NEOVERSE_N2.vttbr(&plain, root, Vmid(1)).unwrap_err();
        assert_eq!(error, UnsupportedFeature::Root { root, most: 48 });
    }
    let error = MAX.vttbr(&plain, Hpa(1 << 48), Vmid(1)).unwrap_err();
    assert_eq!(error, UnsupportedFeature::Root { root: Hpa(1 << 48), most: 48 });
}

#[test]
fn with_lpa2_the_roots_bits_51_to_48_are_below_its_alignment() {
    let (format, vmid) = (Arm64Lpa2K4::default(), Vmid(0xfedc));
    let of = |root| MAX.vttbr(&format, Hpa(root), vmid);
    assert_eq!(of(0xa_1234_5678_9040), Ok(0xfedc_1234_5678_9068));
    assert_eq!(of((1 << 52) - 64), Ok(0xfedc_ffff_ffff_fffc));
    for root in [0xa_1234_5678_9020, 1 << 52] {
        assert_eq!(of(root), Err(UnsupportedFeature::Root { root: Hpa(root), most: 52 }));
    }
    let error = NEOVERSE_N2.vttbr(&format, Hpa(1 << 48), vmid).unwrap_err();
    assert_eq!(error, UnsupportedFeature::Root { root: Hpa(1 << 48), most: 48 });
}

#[test]
fn invalidation_uses_what_the_cpu_has() {
    let old = CORTEX_A55.tlbi(&Arm64K4::default());
    assert_eq!((old.range_instructions, old.ttl, old.address_bits), (false, false, 40));
    let new = NEOVERSE_N2.tlbi(&Arm64K64::default());
    assert_eq!((new.range_instructions, new.ttl, new.lpa2), (true, true, false));
    assert_eq!((new.granule, new.address_bits), (Granule::K64, 48));
    let wide = MAX.tlbi(&Arm64Lpa2K4::default());
    assert_eq!((wide.lpa2, wide.granule, wide.address_bits), (true, Granule::K4, 52));
}

#[test]
fn a_cpu_with_late_stores_repeats_a_tlbi_by_its_midr() {
    let of = |cpu: IdRegisters| cpu.tlbi(&Arm64K4::default()).repeat;
    assert_eq!([of(CORTEX_A53), of(CORTEX_A55), of(NEOVERSE_N2)], [false, true, true]);
    let midr = |implementer: u64, part: u64, version: u64| {
        implementer << 24 | (version >> 4) << 20 | 0xf << 16 | part << 4 | version & 0xf
    };
    for (implementer, part, version, repeats) in [
        (0x41, 0xd0c, 0x41, true),  // Neoverse N1 r4p1
        (0x41, 0xd46, 0x11, true),  // Cortex-A510
        (0x41, 0xd46, 0x12, false), // the same, mended
        (0x41, 0xd08, 0x03, false), // Cortex-A72
        (0x51, 0x800, 0x00, true),  // Falkor v1
        (0x51, 0x800, 0x01, false),
        (0x51, 0x804, 0xcd, false), // Kryo 4xx Gold
        (0x51, 0x804, 0xce, true),
        (0x51, 0x211, 0x20, true),  // Kryo
        (0x4e, 0x010, 0x00, true),  // Olympus
        (0x6d, 0xd49, 0x00, true),  // Azure Cobalt 100
        (0xc0, 0xd0b, 0x00, false), // no CPU of Arm
        (0x00, 0x000, 0x00, false),
    ] {
        assert_eq!(repeats_tlbi(midr(implementer, part, version)), repeats, "{part:#x}");
    }
}
