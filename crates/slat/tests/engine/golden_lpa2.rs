//! Descriptors with VTCR_EL2.DS=1 (FEAT_LPA2), as the Arm ARM has them (DDI 0487, D8.3.1: in
//! tables, blocks and pages of the 4K and 16K granules, bits 49:12 are those of the address, bits
//! 9:8 its bits 51:50; D8.6.2: a leaf has no shareability, VTCR_EL2.SH0 is that of all).

use crate::common::hardware::arm::{Arm, Descriptor};
use crate::common::hardware::{Access, Hardware};
use crate::common::{TestPlatform, destroy};
use crate::golden_arm64::{
    BBM, CLEAN, children_keep_everything, leaves_are_the_manuals, one_leaf, range, size,
    widths_are_the_manuals,
};
use slat::format::Kind;
use slat::format::arm64::{Arm64, Arm64Lpa2K4, Arm64Lpa2K16, Shareability};
use slat::{
    Attributes, Batched, Bounded, BreakBeforeMake, EveryEntry, Format, Gpa, Hpa, PageSize,
    TableCache, Tables, UnloadedTables, UnmapEntry, Vmid,
};
use std::sync::atomic::Ordering;

const RAM: Attributes = Attributes::RAM;

#[test]
fn address_bits_51_and_50_are_where_shareability_was() {
    let format = Arm64Lpa2K4::default();
    // V, page, MemAttr 1111, S2AP 11, AF: 0x4ff; bits 51:50 are 10, 01 and 11.
    let page = one_leaf(format, 0xa_edcb_a987_6000, 0x1000, RAM);
    assert_eq!(page, 0x0002_edcb_a987_66ff);
    let block = one_leaf(format, 0x5_0000_4020_0000, 0x20_0000, RAM);
    assert_eq!(block, 0x0001_0000_4020_05fd);
    let block = one_leaf(format, 0xf_ffff_c000_0000, 0x4000_0000, RAM);
    assert_eq!(block, 0x0003_ffff_c000_07fd);
    // Below 2^50 the field is 0 for each shareability.
    for shareability in [Shareability::Non, Shareability::Outer, Shareability::Inner] {
        let format = Arm64Lpa2K4 { shareability, ..format };
        assert_eq!(one_leaf(format, 0x8000_0000, 0x1000, RAM), 0x8000_04ff);
    }
    // 16K: pages, 32m, 64g.
    let format = Arm64Lpa2K16::default();
    let page = one_leaf(format, 0xa_edcb_a987_4000, 0x4000, RAM);
    assert_eq!(page, 0x0002_edcb_a987_46ff);
    let block = one_leaf(format, 0x5_0000_4200_0000, 0x200_0000, RAM);
    assert_eq!(block, 0x0001_0000_4200_05fd);
    let block = one_leaf(format, 0xf_fff0_0000_0000, 0x10_0000_0000, RAM);
    assert_eq!(block, 0x0003_fff0_0000_07fd);
}

#[test]
fn a_table_descriptor_has_its_address_in_the_same_places() {
    for (hpa, raw) in [
        (0xb_0000_8000_3000, 0x0003_0000_8000_3203),
        (0x4_0000_0000_0000, 0x103),
        (0xf_ffff_ffff_f000, 0x0003_ffff_ffff_f303),
    ] {
        assert_eq!(Arm64Lpa2K4::table(Hpa(hpa), 1), raw);
        assert_eq!(Arm::<12, true>::fields(raw, 0), Descriptor::Table(hpa));
        let markers = [Arm64Lpa2K4::frozen(Hpa(hpa)), Arm64Lpa2K4::retired(Hpa(hpa))];
        assert_eq!(markers.map(|raw| Arm64Lpa2K4::kind(raw, 1)), [Kind::Frozen, Kind::Retired]);
        assert_eq!(markers.map(Arm64Lpa2K4::table_address), [Hpa(hpa); 2]);
    }
    let hpa = 0xf_ffff_ffff_c000;
    assert_eq!(Arm64Lpa2K16::table(Hpa(hpa), 1), 0x0003_ffff_ffff_c303);
    assert_eq!(Arm::<14, true>::fields(0x0003_ffff_ffff_c303, 1), Descriptor::Table(hpa));
}

#[test]
fn leaves_with_lpa2_are_the_manuals_in_every_combination() {
    leaves_are_the_manuals::<12, true>();
    leaves_are_the_manuals::<14, true>();
}

#[test]
fn roots_of_every_width_up_to_52_bits_are_walked_by_hardware_as_by_the_engine() {
    widths_are_the_manuals::<12, true>(25);
    widths_are_the_manuals::<14, true>(26);
}

#[test]
fn children_of_a_split_block_keep_address_bits_51_and_50() {
    for bbm in BBM {
        for large in [0x20_0000, 0x4000_0000] {
            children_keep_everything::<12, true, EveryEntry>(bbm, large);
            children_keep_everything::<12, true, Bounded>(bbm, large);
            children_keep_everything::<12, true, Batched>(bbm, large);
        }
        children_keep_everything::<14, true, Batched>(bbm, 0x200_0000);
    }
}

/// Hardware marks a leaf of the highest addresses, which has `words` clean, read, written, and
/// protected.
pub fn is_marked<const G: u32>((gpa, hpa): (u64, u64), words: [u64; 4]) {
    let format = Arm64::<G, true> { hardware_dirty: true, ..Default::default() };
    let platform = TestPlatform::new(BreakBeforeMake::Always);
    let mut tables = Tables::new(format, Vmid(1), 52, &platform).unwrap();
    let mut storage = [const { None }; 4];
    let mut cache = TableCache::new(&platform, &mut storage);
    cache.fill(4).unwrap();
    let regime = Arm::<G, true>::of(&tables);
    let page = range(gpa, 1 << G);
    let mut guard = tables.enter_mut();
    assert_eq!(guard.map(page, Hpa(hpa), CLEAN, size(1 << G), &mut cache), Ok(1 << G));
    let now = || regime.pte(&platform, gpa).0.load(Ordering::SeqCst);
    assert_eq!(now(), words[0]);
    for (write, marked) in [(false, words[1]), (true, words[2])] {
        let access = regime.access(&platform, regime.root(), gpa, write);
        assert!(matches!(access, Access::Done { .. }));
        assert_eq!(now(), marked);
    }
    assert_eq!(guard.write_protect(page), Ok(1 << G));
    assert_eq!(now(), words[3]);
    assert_eq!(guard.translate(Gpa(gpa + 5)).unwrap().unwrap().hpa, Hpa(hpa + 5));
    drop(guard);
    drop(cache);
    destroy(tables);
}

#[test]
fn hardware_marks_a_leaf_and_a_protection_forgets_nothing_of_its_address() {
    // AF=0, S2AP=01, DBM=1, normal write-back; bits 51:50 of the address are 11.
    let words = [0x637f, 0x677f, 0x67ff].map(|low| 0x0008_0000_7c20_0000 | low);
    let words = [words[0], words[1], words[2], 0x0200_0000_7c20_677f];
    is_marked::<12>((0x8_1234_5678_9000, 0xc_0000_7c20_6000), words);
}

/// Maps `count` leaves across a host address at which a part of the address changes that a
/// descriptor holds in another field: with DS a multiple of 2^50.
pub fn across<const G: u32>(bytes: u64, count: u64, before: u64, unloaded: bool) {
    let format = Arm64::<G, true>::default();
    for high in 1..4u64 {
        let hpa = (high << Arm::<G, true>::PARTED) - before * bytes;
        // Not congruent modulo a larger leaf, all in one table.
        let at = range(bytes * (1 << (G - 3)) + bytes, count * bytes);
        let platform = TestPlatform::new(BreakBeforeMake::Always);
        let mut storage = [const { None }; 8];
        let mut cache = TableCache::new(&platform, &mut storage);
        cache.fill(8).unwrap();
        let mut tables = if unloaded {
            let mut new = UnloadedTables::new(format, Vmid(1), 48, &platform).unwrap();
            let done = new.map(at, Hpa(hpa), RAM, size(bytes), &mut cache);
            assert_eq!(done, Ok(count * bytes));
            new.activate()
        } else {
            let mut new = Tables::new(format, Vmid(1), 48, &platform).unwrap();
            let mut guard = new.enter_mut();
            let done = guard.map(at, Hpa(hpa), RAM, size(bytes), &mut cache);
            assert_eq!(done, Ok(count * bytes));
            drop(guard);
            new
        };
        let regime = Arm::<G, true>::of(&tables);
        let tree = regime.tree(&platform);
        assert_eq!(tree.runs.len(), 1, "one run of memory: {:x?}", tree.runs);
        let run = tree.runs[0];
        assert_eq!((run.start, run.end, run.size), (at.start().0, at.end().0, bytes));
        assert_eq!(run.leaf.oa, hpa);
        let mut guard = tables.enter_mut();
        for number in 0..count {
            let gpa = Gpa(at.start().0 + number * bytes);
            let found = guard.translate(gpa).unwrap().unwrap();
            assert_eq!((found.hpa, found.attributes), (Hpa(hpa + number * bytes), RAM));
        }
        let mut places = [const { UnmapEntry::EMPTY }; 4];
        let mut batch = guard.unmap_batch(&mut places);
        assert_eq!(guard.unmap(at, &mut batch), Ok(count * bytes));
        let gone: Vec<_> = batch.complete().map(|run| (run.hpa, run.bytes)).collect();
        assert_eq!(gone, [(Hpa(hpa), count * bytes)]);
        drop(batch);
        drop(guard);
        drop(cache);
        destroy(tables);
    }
}

#[test]
fn a_run_of_leaves_goes_on_where_address_bit_50_changes() {
    for unloaded in [false, true] {
        // The end of the field as the second leaf, in the middle, as the last, and behind all.
        for before in [1, 5, 15, 16] {
            across::<12>(0x1000, 16, before, unloaded);
            across::<14>(0x4000, 16, before, unloaded);
            across::<12>(0x20_0000, 16, before, unloaded);
        }
    }
}

#[test]
fn tables_without_a_cpu_hand_out_such_a_run_in_two() {
    let platform = TestPlatform::new(BreakBeforeMake::Always);
    let format = Arm64Lpa2K4::default();
    let mut tables = UnloadedTables::new(format, Vmid(1), 48, &platform).unwrap();
    let mut storage = [const { None }; 8];
    let mut cache = TableCache::new(&platform, &mut storage);
    cache.fill(8).unwrap();
    let table = range(0x20_0000, 0x20_0000);
    let hpa = (2 << 50) - 0x5000;
    let done = tables.map(table, Hpa(hpa), RAM, PageSize::SIZE_4K, &mut cache);
    assert_eq!(done, Ok(0x20_0000));
    let mut gone = Vec::new();
    let done = tables.unmap(table, |run| gone.push((run.gpa.0, run.hpa.0, run.bytes)));
    assert_eq!(done, Ok(0x20_0000));
    let expected = [(0x20_0000, hpa, 0x5000), (0x20_5000, 2 << 50, 0x1f_b000)];
    assert_eq!(gone, expected);
    drop(cache);
    destroy(tables.activate());
    assert_eq!(platform.live(), 0);
}
