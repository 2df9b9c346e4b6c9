//! Descriptors against values from outside the engine: the Arm ARM (DDI 0487: D8.3.1 descriptor
//! formats, D8.3.2 stage-2 attributes, D8.6.5 memory types, D8.6.6 with FEAT_S2FWB), Linux's
//! `arch/arm64/include/asm/kvm_pgtable.h` and `memory.h`, and what QEMU's walker was seen to do.
//!
//! With VTCR_EL2.DS=1 (FEAT_LPA2), bits 49:12 of tables, blocks and pages of the 4K and 16K
//! granules are those of the address, and bits 9:8 its bits 51:50 (D8.3.1); a leaf has no
//! shareability, VTCR_EL2.SH0 is that of all (D8.6.2). With FEAT_LPA, bits 15:12 of the 64K
//! granule are the address bits 51:48 (Linux's `PTE_ADDR_HIGH` and `PTE_ADDR_HIGH_SHIFT`, 36).

use crate::common::hardware::arm::{Arm, Descriptor, Leaf};
use crate::common::hardware::leaves::{Marks, check_entries, check_leaves, check_roots};
use crate::common::hardware::{Access, Hardware};
use crate::common::stage::{BBM, CLEAN, RAM, range};
use crate::common::world::size;
use crate::common::{TestPlatform, destroy};
use slat::format::arm64::{
    Arm64, Arm64K4, Arm64K16, Arm64K64, Arm64Lpa2K4, Arm64Lpa2K16, Arm64LpaK64, Shareability,
};
use slat::format::{AttributeError, Kind};
use slat::{
    Attributes, BatchedSplit, BoundedWalk, BreakBeforeMake, EveryEntry, Execute, Format, Gpa, Hpa,
    Memory, PageSize, Software, SplitWalk, TableCache, Tables, UnloadedTables, UnmapEntry, Vmid,
};
use std::sync::atomic::Ordering;

/// Maps one leaf of `bytes` at `gpa`, and returns its raw descriptor as memory holds it.
fn one_leaf<const G: u32, const WIDE: bool>(
    format: Arm64<G, WIDE>,
    hpa: u64,
    bytes: u64,
    attributes: Attributes,
) -> u64 {
    // Wide enough for entries of 64 GiB.
    let bits = if WIDE { 48 } else { 40 };
    let platform = TestPlatform::new(BreakBeforeMake::Always);
    let mut tables = Tables::new(format, Vmid(1), bits, &platform).unwrap();
    let mut storage = [const { None }; 4];
    let mut cache = TableCache::new(&platform, &mut storage);
    cache.fill(4).unwrap();
    let gpa = bytes;
    let mut guard = tables.enter_mut();
    let done = guard.map(range(gpa, bytes), Hpa(hpa), attributes, size(bytes), &mut cache);
    assert_eq!(done, Ok(bytes));
    let descriptor = guard.descriptor(Gpa(gpa));
    drop(guard);
    let regime = Arm::<G, WIDE>::of(&tables);
    let raw = regime.pte(&platform, gpa).0.load(Ordering::SeqCst);
    assert_eq!(descriptor, Some((raw, size(bytes))));
    drop(cache);
    destroy(tables);
    raw
}

fn raw(format: Arm64K4, attributes: Attributes) -> u64 {
    one_leaf(format, 0x8000_0000, 0x1000, attributes)
}

#[test]
fn a_writable_clean_leaf_is_the_one_qemu_marked_in_hardware() {
    let format = Arm64K4 { hardware_dirty: true, ..Default::default() };
    let platform = TestPlatform::new(BreakBeforeMake::Always);
    let tables = Tables::new(format, Vmid(1), 40, &platform).unwrap();
    let mut reader = platform.register();
    let mut guard = tables.enter(&mut reader).unwrap();
    let mut storage = [const { None }; 4];
    let mut cache = TableCache::new(&platform, &mut storage);
    cache.fill(4).unwrap();
    let page = range(0x5000, 0x1000);
    let done = guard.map(page, Hpa(0x7c20_6000), CLEAN, PageSize::SIZE_4K, &mut cache);
    assert_eq!(done, Ok(0x1000));
    let regime = Arm::<12>::of(&tables);
    let mut other = platform.register();
    let look = tables.enter(&mut other).unwrap();
    let now = || look.descriptor(Gpa(0x5000)).unwrap().0;
    let state = || look.translate(Gpa(0x5000)).unwrap().unwrap().attributes;
    let root = regime.root();
    // AF=0, S2AP=01, DBM=1, inner shareable, normal write-back.
    assert_eq!(now(), 0x0008_0000_7c20_637f);
    assert_eq!((state().accessed, state().dirty, state().write), (false, false, true));
    assert_eq!(
        regime.access(&platform, root, 0x5000, false),
        Access::Done { start: 0x5000, end: 0x6000 }
    );
    assert_eq!(now(), 0x0008_0000_7c20_677f);
    assert_eq!((state().accessed, state().dirty), (true, false));
    assert!(matches!(regime.access(&platform, root, 0x5000, true), Access::Done { .. }));
    assert_eq!(now(), 0x0008_0000_7c20_67ff);
    assert_eq!((state().accessed, state().dirty), (true, true));
    // Protected: S2AP[1] and DBM are clear, or hardware would make it writable; bit 57 keeps the
    // dirty state.
    let done = guard.write_protect(page);
    assert_eq!(now(), 0x0200_0000_7c20_677f);
    assert_eq!(regime.access(&platform, root, 0x5000, true), Access::Fault);
    assert_eq!((done, state().write, state().dirty), (Ok(0x1000), false, true));
    drop((cache, guard, look));
    destroy(tables);
}

#[test]
fn an_unwritten_block_is_protected_without_a_dirty_mark() {
    let format = Arm64K4 { hardware_dirty: true, ..Default::default() };
    assert_eq!(one_leaf(format, 0x7c20_0000, 0x20_0000, CLEAN), 0x0008_0000_7c20_037d);
    assert_eq!(Arm64K4::write_protected(0x0008_0000_7c20_037d), 0x7c20_037d);
    assert_eq!(Arm64K4::readable(0x7c20_037d, false), 0x7c20_033d, "S2AP[0]");
    assert_eq!(Arm64K4::readable(0x7c20_033d, true), 0x7c20_037d);
}

#[test]
fn each_attribute_is_the_bit_that_linux_names() {
    let plain = Arm64K4::default();
    let fwb = Arm64K4 { forced_write_back: true, ..plain };
    let dbm = Arm64K4 { hardware_dirty: true, ..plain };
    let no_xnx = Arm64K4 { split_execute: false, ..plain };
    let ram = Attributes::RAM;
    // KVM_PTE_VALID and KVM_PTE_TYPE_PAGE (0b11), MT_S2_NORMAL (0xf) in MEMATTR (5:2),
    // S2AP_R (6), S2AP_W (7), SH_IS (0b11 in 9:8), S2_AF (10).
    let base = 0x8000_0000 | 0b11 | 0xf << 2 | 1 << 6 | 1 << 7 | 0b11 << 8 | 1 << 10;
    assert_eq!(base, 0x8000_07ff);
    assert_eq!(raw(plain, ram), base);
    // MT_S2_FWB_NORMAL, MT_S2_NORMAL_NC, MT_S2_FWB_NORMAL_NC, MT_S2(_FWB)_DEVICE_nGnRE.
    let memory = |format, memory| raw(format, Attributes { memory, ..ram }) >> 2 & 0xf;
    assert_eq!(memory(fwb, Memory::Normal), 6);
    assert_eq!((memory(plain, Memory::NonCacheable), memory(fwb, Memory::NonCacheable)), (5, 5));
    assert_eq!((memory(plain, Memory::Device), memory(fwb, Memory::Device)), (1, 1));
    // Device-nGnRnE, which Linux does not use at stage 2.
    assert_eq!((memory(plain, Memory::DeviceStrict), memory(fwb, Memory::DeviceStrict)), (0, 0));
    assert_eq!(raw(plain, Attributes { read: false, ..ram }), base & !(1 << 6));
    assert_eq!(raw(plain, Attributes { accessed: false, ..ram }), base & !(1 << 10));
    let read_only = Attributes { write: false, dirty: false, ..ram };
    assert_eq!(raw(plain, read_only), base & !(1 << 7));
    assert_eq!(raw(dbm, read_only), base & !(1 << 7), "DBM would make it writable");
    // PTE_DBM is bit 51.
    assert_eq!(raw(dbm, ram), base | 1 << 51);
    assert_eq!(raw(dbm, Attributes { dirty: false, ..ram }), (base | 1 << 51) & !(1 << 7));
    // KVM_PTE_LEAF_ATTR_HI_S2_XN is 54:53; with FEAT_XNX 0b01 bars EL1, 0b10 all, 0b11 EL0.
    let execute = |format, execute| raw(format, Attributes { execute, ..ram }) ^ base;
    assert_eq!(execute(plain, Execute::User), 0b01 << 53);
    assert_eq!(execute(plain, Execute::None), 0b10 << 53);
    assert_eq!(execute(plain, Execute::Kernel), 0b11 << 53);
    assert_eq!(execute(no_xnx, Execute::None), 1 << 54);
    // KVM_PTE_LEAF_ATTR_HI_SW is 58:55; VTCR_EL2_HWU59 to HWU62 give 62:59 to hardware, or not.
    let places = (0..6).map(|bit| raw(plain, Attributes { software: Software::bit(bit), ..ram }));
    assert!(places.eq([55, 56, 59, 60, 61, 62].map(|place| base | 1 << place)));
    assert_eq!(raw(plain, Attributes { dirty: true, ..read_only }), base & !(1 << 7) | 1 << 57);
    let sh = |shareability| raw(Arm64K4 { shareability, ..plain }, ram) >> 8 & 3;
    let (outer, inner) = (sh(Shareability::Outer), sh(Shareability::Inner));
    assert_eq!((sh(Shareability::Non), outer, inner), (0b00, 0b10, 0b11));
}

/// The fields that the manual gives for attributes, as numbers.
fn manual(a: Attributes, fwb: bool, hd: bool, sh: u64) -> Leaf {
    let normal = if fwb { 0b0110 } else { 0b1111 };
    Leaf {
        oa: 0,
        mem_attr: match a.memory {
            Memory::Normal => normal,
            Memory::NonCacheable => 0b0101,
            Memory::Device => 0b0001,
            Memory::DeviceStrict => 0b0000,
        },
        s2ap: u64::from(a.read) + 2 * u64::from(a.write && a.dirty),
        sh,
        af: a.accessed,
        dbm: a.write && hd,
        contiguous: false,
        xn: match a.execute {
            Execute::All => 0b00,
            Execute::User => 0b01,
            Execute::None => 0b10,
            Execute::Kernel => 0b11,
        },
        software: u64::from(a.software.contains(Software::A))
            + 2 * u64::from(a.software.contains(Software::B))
            + 4 * u64::from(a.dirty && !a.write),
        ignored: 0,
    }
}

/// Every leaf size of a granule, with the highest address that fits: no bit is in the wrong place.
fn leaves_are_the_manuals<const G: u32, const WIDE: bool>() {
    let sh = if WIDE && G < 16 { 0 } else { 0b11 };
    for (fwb, hd) in [(false, false), (false, true), (true, false), (true, true)] {
        let (forced_write_back, hardware_dirty) = (fwb, hd);
        let format = Arm64::<G, WIDE> { forced_write_back, hardware_dirty, ..Default::default() };
        // Without the engine's own bit.
        let page = |raw, level| match Arm::<G, WIDE>::fields(raw, 3 - u32::from(level)) {
            Descriptor::Leaf(leaf) => Leaf { software: leaf.software & !8, ..leaf },
            other => panic!("{raw:#x} at {level}: {other:?}"),
        };
        let marks = Marks { split: true, dirty: hd };
        let manual = |a, hpa, bytes| {
            assert!(Arm::<G, WIDE>::sizes().contains(&bytes));
            Leaf { oa: hpa, ..manual(a, fwb, hd, sh) }
        };
        let leaves = check_leaves(format, marks, page, manual, |a, reason| {
            let unmarked = a.write && !a.dirty && !hd;
            assert_eq!(reason, unmarked.then_some(AttributeError::CleanNeedsHardwareDirty));
        });
        let states = if hd { 1024 } else { 768 };
        assert_eq!(leaves, Arm::<G, WIDE>::sizes().len() * states);
        check_entries(&[format], Arm64::<G, WIDE>::LARGEST_LEAF, |raw, level| {
            match Arm::<G, WIDE>::fields(raw, 3 - u32::from(level)) {
                Descriptor::Table(address) => Some(address),
                Descriptor::Invalid => None,
                other => panic!("{raw:#x} at {level}: {other:?}"),
            }
        });
    }
}

#[test]
fn entries_are_the_manuals_in_every_combination() {
    leaves_are_the_manuals::<12, false>();
    leaves_are_the_manuals::<14, false>();
    leaves_are_the_manuals::<16, false>();
}

#[test]
fn entries_with_52_bit_addresses_are_as_in_the_manual() {
    leaves_are_the_manuals::<12, true>();
    leaves_are_the_manuals::<14, true>();
    leaves_are_the_manuals::<16, true>();
}

/// Hardware accepts every width that the engine accepts, with the same start level, and looks for
/// both ends of the space where the engine has them.
fn widths_are_the_manuals<const G: u32, const WIDE: bool>(narrowest: u32) {
    let widest = Arm::<G, WIDE>::OUTPUT;
    for bits in 0..=64 {
        let platform = TestPlatform::new(BreakBeforeMake::Always);
        let result = Tables::new(Arm64::<G, WIDE>::default(), Vmid(1), bits, &platform);
        assert_eq!(result.is_ok(), (narrowest..=widest).contains(&bits), "{bits} bits");
        let Ok(mut tables) = result else { continue };
        let regime = Arm::<G, WIDE>::of(&tables);
        let mut storage = [const { None }; 8];
        let mut cache = TableCache::new(&platform, &mut storage);
        cache.fill(8).unwrap();
        let (page, top) = (1u64 << G, 1u64 << bits);
        for (gpa, hpa) in [(0, 0), (top - page, (1 << widest) - page)] {
            let at = range(gpa, page);
            let ram = Attributes::RAM;
            let done = tables.enter_mut().map(at, Hpa(hpa), ram, size(page), &mut cache);
            assert_eq!(done, Ok(page));
        }
        let tree = regime.tree(&platform);
        let found: Vec<_> = tree.runs.iter().map(|r| (r.start, r.end, r.leaf.oa)).collect();
        assert_eq!(found, [(0, page, 0), (top - page, top, (1 << widest) - page)]);
        drop(cache);
        destroy(tables);
        assert_eq!(platform.live(), 0);
    }
}

#[test]
fn hardware_walks_roots_of_every_width_as_the_engine_does() {
    // 64 - T0SZ, T0SZ at most 39 (no FEAT_TTST); the start level resolves at least one bit.
    widths_are_the_manuals::<12, false>(25);
    widths_are_the_manuals::<14, false>(26);
    widths_are_the_manuals::<16, false>(30);
    widths_are_the_manuals::<12, true>(25);
    widths_are_the_manuals::<14, true>(26);
    widths_are_the_manuals::<16, true>(30);
}

/// DDI 0487, AArch64.S2InconsistentSL: level -1, which takes no concatenation, is never the lowest.
#[test]
fn start_levels_are_those_of_vtcr_sl0_with_concatenated_roots() {
    let plain = Arm64K4::default();
    let k4 = [(34, 2, 8192), (35, 1, 32), (39, 1, 512), (40, 1, 1024), (43, 1, 8192), (44, 0, 32)];
    check_roots(plain, 25..=48, &[&k4[..], &[(48, 0, 512)]].concat());
    // A CPU with fewer physical address bits takes no wider guest.
    check_roots(Arm64K4 { output_bits: 40, ..plain }, 25..=40, &k4[..4]);
    let k16 = [(26, 2, 2), (40, 2, 16 * 2048), (41, 1, 32), (48, 1, 2 * 2048)];
    check_roots(Arm64K16::default(), 26..=48, &k16);
    let k64 = [(30, 2, 2), (46, 2, 16 * 8192), (47, 1, 32), (48, 1, 64)];
    check_roots(Arm64K64::default(), 30..=48, &k64);
    let wide = [(48, 0, 512), (49, 0, 1024), (52, 0, 8192)];
    check_roots(Arm64Lpa2K4::default(), 25..=52, &[&k4[..], &wide].concat());
    let wide = [(51, 1, 16 * 2048), (52, 0, 32)];
    check_roots(Arm64Lpa2K16::default(), 26..=52, &[&k16[..], &wide].concat());
    check_roots(Arm64Lpa2K16 { output_bits: 48, ..Default::default() }, 26..=48, &k16);
    check_roots(Arm64LpaK64::default(), 30..=52, &[&k64[..], &[(52, 1, 1024)]].concat());
}

fn fields<const G: u32, const WIDE: bool>(
    regime: &Arm<G, WIDE>,
    platform: &TestPlatform,
    gpa: u64,
) -> Leaf {
    let (pte, height) = regime.pte(platform, gpa);
    match Arm::<G, WIDE>::fields(pte.load(Ordering::SeqCst), 3 - height) {
        Descriptor::Leaf(leaf) => leaf,
        other => panic!("{other:?} at {gpa:#x}"),
    }
}

/// A block with unusual attributes that hardware has used, split in three ways, keeps every bit.
fn children_keep_everything<const G: u32, const WIDE: bool, W: SplitWalk>(
    bbm: BreakBeforeMake,
    large: u64,
) {
    let format = Arm64::<G, WIDE> { hardware_dirty: true, ..Default::default() };
    let odd = Attributes { software: Software::B, execute: Execute::User, ..CLEAN };
    let read_only = Attributes { write: false, dirty: true, accessed: false, ..odd };
    for (attributes, write) in
        [(odd, None), (odd, Some(false)), (odd, Some(true)), (read_only, None)]
    {
        let platform = TestPlatform::new(bbm);
        let mut tables = Tables::new(format, Vmid(1), 48, &platform).unwrap();
        let regime = Arm::<G, WIDE>::of(&tables);
        let mut storage = [const { None }; 8];
        let mut cache = TableCache::new(&platform, &mut storage);
        cache.fill(8).unwrap();
        let highest_bit = 1 << (Arm::<G, WIDE>::OUTPUT - 1);
        let (block, hpa) = (range(large, large), highest_bit + 8 * large);
        let mut guard = tables.enter_mut();
        let done = guard.map(block, Hpa(hpa), attributes, size(large), &mut cache);
        assert_eq!(done, Ok(large));
        if let Some(write) = write {
            let access = regime.access(&platform, regime.root(), large + 5, write);
            assert!(matches!(access, Access::Done { .. }));
        }
        let before = fields(&regime, &platform, large);
        assert_eq!((before.af, before.s2ap & 2 != 0), (write.is_some(), write == Some(true)));
        let page = range(large, 1 << G);
        assert_eq!(guard.split_by::<W>(page, size(1 << G), &mut cache, 1), Ok(large));
        guard.invalidate();
        drop(guard);
        let tree = regime.tree(&platform);
        let mut covered = large;
        for run in &tree.runs {
            assert_eq!(run.start, covered);
            for at in [run.start, run.end - run.size] {
                let leaf = Leaf { oa: hpa + (at - large), ..before };
                assert_eq!(fields(&regime, &platform, at), leaf);
            }
            covered = run.end;
        }
        assert_eq!((covered, tree.at(large).unwrap().size), (2 * large, 1 << G));
        drop(cache);
        destroy(tables);
    }
}

#[test]
fn children_of_a_split_block_keep_all_its_attributes() {
    fn each<const G: u32, const WIDE: bool>() {
        let blocks = Arm::<G, WIDE>::sizes().into_iter().filter(|&bytes| bytes > 1 << G);
        for (bbm, large) in blocks.flat_map(|large| BBM.map(|bbm| (bbm, large))) {
            children_keep_everything::<G, WIDE, EveryEntry>(bbm, large);
            children_keep_everything::<G, WIDE, BoundedWalk>(bbm, large);
            children_keep_everything::<G, WIDE, BatchedSplit>(bbm, large);
        }
    }
    each::<12, false>();
    each::<14, false>();
    each::<16, false>();
    each::<12, true>();
    each::<14, true>();
    each::<16, true>();
}

#[test]
fn a_child_inherits_neither_the_contiguous_hint_nor_nt() {
    // A block that other software wrote: 2m at 0x4020_0000, nT (16), Contiguous (52), bit 63.
    let marked = 0x4020_07fd | 1 << 16 | 1 << 52 | 1 << 63;
    let child =
        Arm64K4::leaf(Arm64K4::attribute_bits(marked, 1), 0, Arm64K4::leaf_address(marked, 1));
    assert_eq!(child, 0x4020_07ff);
}

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
fn address_bits_51_to_48_are_in_bits_15_to_12_of_descriptors() {
    let ram = Arm64LpaK64::default().encode(Attributes::RAM).unwrap();
    // Write-back 0b1111 << 2, S2AP 0b11 << 6, inner shareable 0b11 << 8, AF 1 << 10: 0x7fc.
    assert_eq!(ram, 0x7fc);
    for (hpa, raw) in [
        (0xa_1234_5678_0000, 0x0000_1234_5678_a7ff),
        (0xf_ffff_ffff_0000, 0x0000_ffff_ffff_f7ff),
        (0x1_0000_0000_0000, 0x17ff),
    ] {
        assert_eq!(Arm64LpaK64::leaf(ram, 0, Hpa(hpa)), raw);
        assert_eq!(Arm64LpaK64::leaf_address(raw, 0), Hpa(hpa));
    }
    // A block of 512m.
    assert_eq!(Arm64LpaK64::leaf(ram, 1, Hpa(0x9_8000_2000_0000)), 0x0000_8000_2000_97fd);
    assert_eq!(Arm64LpaK64::leaf_address(0x0000_8000_2000_97fd, 1), Hpa(0x9_8000_2000_0000));
    for (hpa, raw) in
        [(0x7_0000_0001_0000, 0x0000_0000_0001_7003), (0xf_ffff_ffff_0000, 0x0000_ffff_ffff_f003)]
    {
        assert_eq!(Arm64LpaK64::table(Hpa(hpa), 1), raw);
        assert_eq!(Arm64LpaK64::table_address(raw), Hpa(hpa));
        assert_eq!(Arm::<16, true>::fields(raw, 2), Descriptor::Table(hpa));
        let markers = [Arm64LpaK64::frozen(Hpa(hpa)), Arm64LpaK64::retired(Hpa(hpa))];
        assert_eq!(markers.map(Arm64LpaK64::table_address), [Hpa(hpa); 2]);
    }
    // Below 2^48 the descriptors are those of a CPU without FEAT_LPA.
    for level in [0, 1] {
        let hpa = Hpa(0xffff_e000_0000);
        assert_eq!(Arm64LpaK64::leaf(ram, level, hpa), Arm64K64::leaf(ram, level, hpa));
    }
}

/// Hardware marks a leaf of the highest addresses, which has `words` clean, read, written, and
/// protected.
fn is_marked<const G: u32>((gpa, hpa): (u64, u64), words: [u64; 4]) {
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
fn hardware_marks_a_leaf_and_protection_keeps_its_address() {
    // AF=0, S2AP=01, DBM=1, normal write-back; bits 51:50 of the address are 11.
    let words = [0x637f, 0x677f, 0x67ff].map(|low| 0x0008_0000_7c20_0000 | low);
    let words = [words[0], words[1], words[2], 0x0200_0000_7c20_677f];
    is_marked::<12>((0x8_1234_5678_9000, 0xc_0000_7c20_6000), words);
    // The same, inner shareable; bits 51:48 are 0xc.
    let words = [0xc37f, 0xc77f, 0xc7ff].map(|low| 0x0008_0000_7c20_0000 | low);
    let words = [words[0], words[1], words[2], 0x0200_0000_7c20_c77f];
    is_marked::<16>((0x8_1234_5678_0000, 0xc_0000_7c20_0000), words);
}

/// Maps `count` leaves across a host address at which a part of the address changes that a
/// descriptor holds in another field: with DS a multiple of 2^50.
fn across<const G: u32>(bytes: u64, count: u64, before: u64, unloaded: bool) {
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
fn a_run_of_leaves_goes_on_where_address_bit_50_or_48_changes() {
    for unloaded in [false, true] {
        // The end of the field as the second leaf, in the middle, as the last, and behind all.
        for before in [1, 5, 15, 16] {
            across::<12>(0x1000, 16, before, unloaded);
            across::<14>(0x4000, 16, before, unloaded);
            across::<12>(0x20_0000, 16, before, unloaded);
            across::<16>(0x1_0000, 16, before, unloaded);
            across::<16>(0x2000_0000, 16, before, unloaded);
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
