//! Descriptors against values from outside the engine: the Arm ARM (DDI 0487: D8.3.1 descriptor
//! formats, D8.3.2 stage-2 attributes, D8.6.5 memory types, D8.6.6 with FEAT_S2FWB), Linux's
//! `arch/arm64/include/asm/kvm_pgtable.h` and `memory.h`, and what QEMU's walker was seen to do.

use crate::common::hardware::arm::{Arm, Descriptor, Leaf};
use crate::common::hardware::leaves::all_attributes;
use crate::common::hardware::{Access, Hardware};
use crate::common::{TestPlatform, destroy, unmap};
use slat::format::arm64::{Arm64, Arm64K4, Arm64K16, Arm64K64, Shareability};
use slat::{
    Attributes, Batched, Bounded, BreakBeforeMake, EveryEntry, Execute, Format, Gpa, GpaRange, Hpa,
    Memory, PageSize, Software, SplitWalk, TableCache, Tables, Vmid,
};
use std::sync::atomic::Ordering;

pub const CLEAN: Attributes = Attributes { accessed: false, dirty: false, ..Attributes::RAM };
pub const BBM: [BreakBeforeMake; 3] =
    [BreakBeforeMake::Always, BreakBeforeMake::ConflictHandled, BreakBeforeMake::Never];

pub fn size(bytes: u64) -> PageSize {
    PageSize::from_bytes(bytes).unwrap()
}

pub fn range(start: u64, size: u64) -> GpaRange {
    GpaRange::new(Gpa(start), size).unwrap()
}

/// Maps one leaf of `bytes` at `gpa`, and returns its raw descriptor as memory holds it.
pub fn one_leaf<const G: u32, const WIDE: bool>(
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
fn a_writable_clean_leaf_is_the_one_that_qemu_marked_in_hardware() {
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
fn a_block_that_was_not_written_is_protected_without_being_remembered_as_written() {
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
pub fn leaves_are_the_manuals<const G: u32, const WIDE: bool>() {
    let (bits, sh) = (Arm::<G, WIDE>::OUTPUT, if WIDE && G < 16 { 0 } else { 0b11 });
    for (fwb, hd) in [(false, false), (false, true), (true, false), (true, true)] {
        let (forced_write_back, hardware_dirty) = (fwb, hd);
        let format = Arm64::<G, WIDE> { forced_write_back, hardware_dirty, ..Default::default() };
        let platform = TestPlatform::new(BreakBeforeMake::Always);
        let tables = Tables::new(format, Vmid(1), bits, &platform).unwrap();
        let mut reader = platform.register();
        let mut guard = tables.enter(&mut reader).unwrap();
        let regime = Arm::<G, WIDE>::of(&tables);
        let mut storage = [const { None }; 8];
        let mut cache = TableCache::new(&platform, &mut storage);
        cache.fill(8).unwrap();
        for bytes in Arm::<G, WIDE>::sizes() {
            let (at, hpa) = (range((1 << bits) - bytes, bytes), (1 << bits) - bytes);
            for attributes in all_attributes() {
                cache.fill(8).unwrap();
                let result = guard.map(at, Hpa(hpa), attributes, size(bytes), &mut cache);
                if attributes.write && !attributes.dirty && !hd {
                    assert!(result.is_err());
                    continue;
                }
                assert_eq!(result, Ok(bytes));
                let (pte, height) = regime.pte(&platform, at.start().0);
                let expected = Leaf { oa: hpa, ..manual(attributes, fwb, hd, sh) };
                let raw = pte.load(Ordering::SeqCst);
                let found = Arm::<G, WIDE>::fields(raw, 3 - height);
                assert_eq!(found, Descriptor::Leaf(expected), "{raw:#x}");
                assert_eq!(Arm::<G, WIDE>::size(height), bytes);
                assert_eq!(guard.translate(at.start()).unwrap().unwrap().attributes, attributes);
                pte.store(0, Ordering::SeqCst);
            }
            // The table above a block must go, too, before a larger block can be mapped.
            assert_eq!(unmap(&mut guard, at), []);
            guard.refresh();
            tables.reclaim();
        }
        drop((cache, guard));
        destroy(tables);
        assert_eq!(platform.live(), 0);
    }
}

#[test]
fn leaves_of_the_4k_granule_are_the_manuals_in_every_combination() {
    leaves_are_the_manuals::<12, false>();
}

#[test]
fn leaves_of_the_16k_granule_are_the_manuals_in_every_combination() {
    leaves_are_the_manuals::<14, false>();
}

#[test]
fn leaves_of_the_64k_granule_are_the_manuals_in_every_combination() {
    leaves_are_the_manuals::<16, false>();
}

/// Hardware accepts every width that the engine accepts, with the same start level, and looks for
/// both ends of the space where the engine has them.
pub fn widths_are_the_manuals<const G: u32, const WIDE: bool>(narrowest: u32) {
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
fn roots_of_every_width_are_walked_by_hardware_as_by_the_engine() {
    // 64 - T0SZ, T0SZ at most 39 (no FEAT_TTST); the start level resolves at least one bit.
    widths_are_the_manuals::<12, false>(25);
    widths_are_the_manuals::<14, false>(26);
    widths_are_the_manuals::<16, false>(30);
}

#[test]
fn start_levels_are_those_of_vtcr_sl0_with_concatenated_roots() {
    let of = |geometry: slat::format::Geometry| (3 - geometry.root_level, geometry.root_entries);
    let k4 = |bits| of(Arm64K4::default().geometry(bits).unwrap());
    assert_eq!((k4(34), k4(35), k4(39), k4(40)), ((2, 8192), (1, 32), (1, 512), (1, 1024)));
    assert_eq!((k4(43), k4(44), k4(48)), ((1, 8192), (0, 32), (0, 512)));
    let k16 = |bits| of(Arm64K16::default().geometry(bits).unwrap());
    assert_eq!((k16(26), k16(40), k16(41)), ((2, 2), (2, 16 * 2048), (1, 32)));
    assert_eq!(k16(48), (1, 2 * 2048));
    let k64 = |bits| of(Arm64K64::default().geometry(bits).unwrap());
    assert_eq!((k64(30), k64(46), k64(47)), ((2, 2), (2, 16 * 8192), (1, 32)));
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
pub fn children_keep_everything<const G: u32, const WIDE: bool, W: SplitWalk>(
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
        let mut tables = Tables::new(format, Vmid(1), 40, &platform).unwrap();
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
fn children_of_a_split_block_keep_translation_rights_type_state_and_software_bits() {
    fn each<const G: u32>(bbm: BreakBeforeMake) {
        for large in Arm::<G>::sizes().into_iter().filter(|&bytes| bytes > 1 << G) {
            children_keep_everything::<G, false, EveryEntry>(bbm, large);
            children_keep_everything::<G, false, Bounded>(bbm, large);
            children_keep_everything::<G, false, Batched>(bbm, large);
        }
    }
    for bbm in BBM {
        each::<12>(bbm);
        each::<14>(bbm);
        each::<16>(bbm);
    }
}

#[test]
fn a_child_inherits_neither_the_contiguous_hint_nor_nt() {
    // A block that other software wrote: 2m at 0x4020_0000, nT (16), Contiguous (52), bit 63.
    let marked = 0x4020_07fd | 1 << 16 | 1 << 52 | 1 << 63;
    let child =
        Arm64K4::leaf(Arm64K4::attribute_bits(marked, 1), 0, Arm64K4::leaf_address(marked, 1));
    assert_eq!(child, 0x4020_07ff);
}
