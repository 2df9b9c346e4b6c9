//! Entries of nested page tables against values from outside the engine: the AMD64 Architecture
//! Programmer's Manual, volume 2, 5.3, 5.4 and 15.25, and the names that Linux gives to bits in
//! `arch/x86/include/asm/pgtable_types.h`.

use crate::common::hardware::leaves::{Marks, check_entries, check_leaves, check_roots};
use crate::common::hardware::npt::{
    Cpu, EPYC, Entry, Page, RESET_PAT, Rights, UC, UC_MINUS, WB, memory_type,
};
use crate::common::stage::says;
use slat::format::npt::{MissingFeatures, Npt, Npt1G, Npt2M};
use slat::format::{Access, AttributeError, Format, Kind};
use slat::{Attributes, Execute, Hpa, Memory, PageSize, Software};

#[test]
fn the_decoder_rejects_what_the_manual_calls_reserved() {
    let small = Cpu { physical_bits: 40, huge_1g: false };
    let what = |cpu: Cpu, raw, level| match cpu.decode(raw, level) {
        Entry::Reserved(what) => what,
        Entry::NotPresent => "not present",
        Entry::Table { .. } => "table",
        Entry::Page(_) => "page",
    };
    for level in 1..=4 {
        assert_eq!(what(EPYC, 0xffff_ffff_ffff_fffe, level), "not present");
    }
    assert!((1..=4).map(|level| what(EPYC, 1, level)).eq(["page", "table", "table", "table"]));
    // P, R/W, U/S, PS in each table: 2^21 = 0x20_0000, 2^30 = 0x4000_0000; bit 12 is the PAT's.
    assert_eq!(what(EPYC, 0x20_0087, 2), "page");
    assert_eq!(what(EPYC, 0x20_1087, 2), "page");
    assert_eq!(what(EPYC, 0x20_2087, 2), "address bits of a large page");
    assert_eq!(what(EPYC, 0x4000_1087, 3), "page");
    assert_eq!(what(EPYC, 0x4020_0087, 3), "address bits of a large page");
    assert_eq!(what(small, 0x4000_0087, 3), "bit 7 of a PDPE without 1 GiB pages");
    assert_eq!(what(EPYC, 0x87, 4), "bits 8:7 of a PML4E");
    assert_eq!(what(EPYC, 0x87, 5), "bits 8:7 of a PML5E");
    assert_eq!(what(EPYC, 0x7f << 52 | 0xe07, 5), "table");
    // Bit 40 is an address on one CPU and reserved on another; available bits are neither.
    assert_eq!(what(EPYC, 1 << 40 | 7, 1), "page");
    assert_eq!(what(small, 1 << 40 | 7, 1), "address beyond the physical address width");
    assert_eq!(what(EPYC, 1 << 48 | 7, 4), "address beyond the physical address width");
    assert_eq!(what(EPYC, 0x7f << 52 | 0xe07, 4), "table");
    // Reset's PAT by index: WB 6, WT 4, UC- 7, UC 0, and again.
    let types = (0..8).map(|index| memory_type(RESET_PAT, index));
    assert!(types.eq([6, 4, 7, 0, 6, 4, 7, 0]));
    let index = |raw, level| match EPYC.decode(raw, level) {
        Entry::Page(page) => page.pat_index,
        other => panic!("{other:?}"),
    };
    assert_eq!((index(0x8f, 1), index(0x97, 2), index(0x1097, 2)), (5, 2, 6));
}

#[test]
fn leaves_and_tables_are_the_words_that_hypervisors_write() {
    let format = Npt1G::default();
    let ram = format.encode(Attributes::RAM).unwrap();
    // P, R/W, U/S 0x7, A 0x20, D 0x40: 0x67, Linux's _PAGE_TABLE with A and D; a large page adds
    // 0x80: 0xe7.
    assert_eq!(Npt1G::leaf(ram, 0, Hpa(0x1_2345_6000)), 0x0001_2345_6067);
    assert_eq!(Npt1G::leaf(ram, 1, Hpa(0x1_2340_0000)), 0x0001_2340_00e7);
    assert_eq!(Npt1G::leaf(ram, 2, Hpa(0x1_4000_0000)), 0x0001_4000_00e7);
    let unused = Attributes { accessed: false, dirty: false, ..Attributes::RAM };
    let unused = format.encode(unused).unwrap();
    assert_eq!(Npt1G::leaf(unused, 0, Hpa(0x5000)), 0x5007);
    let data = Attributes { execute: Execute::None, ..Attributes::RAM };
    assert_eq!(format.encode(data).unwrap(), 0x8000_0000_0000_0067);
    // A table: 0x7, accessed 0x20.
    assert_eq!(Npt1G::table(Hpa(0x1_2345_6000), 1), 0x0001_2345_6027);
    assert_eq!(format.ncr3(Hpa(0x7000)), 0x7000);
}

#[test]
fn each_attribute_is_the_bit_that_linux_names() {
    let format = Npt1G::default();
    let raw = |a: Attributes| format.encode(a).unwrap();
    let (ram, base) = (Attributes::RAM, raw(Attributes::RAM));
    // _PAGE_BIT_PRESENT 0, _RW 1, _USER 2, _NX 63.
    assert_eq!(base & 0x7, 0x7);
    assert_eq!(base ^ raw(Attributes { write: false, ..ram }), 1 << 1);
    assert_eq!(base ^ raw(Attributes { execute: Execute::None, ..ram }), 1 << 63);
    // _PAGE_BIT_ACCESSED 5, _DIRTY 6.
    assert_eq!(base ^ raw(Attributes { accessed: false, ..ram }), 1 << 5);
    assert_eq!(base ^ raw(Attributes { dirty: false, ..ram }), 1 << 6);
    assert_eq!((Npt1G::ACCESSED, Npt1G::DIRTY, Npt1G::WRITE), (1 << 5, 1 << 6, 1 << 1));
    assert_eq!(Npt1G::TABLE_ACCESSED, 1 << 5);
    assert_eq!(Npt1G::STATUS, 0x60);
    // _PAGE_BIT_PWT 3, _PCD 4: the index of the PAT.
    let memory = |memory| raw(Attributes { memory, ..ram }) >> 3 & 3;
    assert_eq!((memory(Memory::Normal), memory(Memory::NonCacheable)), (0, 2));
    assert_eq!((memory(Memory::Device), memory(Memory::DeviceStrict)), (2, 3));
    // The bits that only software uses are among those that are available in every entry: 58:52 and
    // 11:9. They differ from each other in a leaf; the engine's bits in tables are not among them.
    let user = |software| base ^ raw(Attributes { software, ..ram });
    let users = [0, 1, 2, 3, 4, 5, 6, 7].map(|bit| user(Software::bit(bit)));
    assert_eq!(users, [52, 53, 55, 56, 57, 58, 9, 10].map(|place| 1 << place));
    let [device, other] =
        [Memory::Device, Memory::NonCacheable].map(|memory| raw(Attributes { memory, ..ram }));
    let available = 0x7f << 52 | 7 << 9;
    let leaves = users.iter().sum::<u64>() + (device ^ other) + Npt1G::MARK;
    assert_eq!(leaves, available, "no bit is left over");
    assert!(Npt1G::AGEING.count_ones() == 1 && Npt1G::AGEING & available != 0);
}

#[test]
fn memory_types_are_the_same_by_the_pat_of_reset_and_by_linuxs() {
    // WB, WC, UC-, UC, WB, WP, UC-, WT.
    let linux = 0x0407_0506_0007_0106;
    for (memory, expected) in [
        (Memory::Normal, WB),
        (Memory::NonCacheable, UC_MINUS),
        (Memory::Device, UC_MINUS),
        (Memory::DeviceStrict, UC),
    ] {
        let bits = Npt1G::default().encode(Attributes { memory, ..Attributes::RAM }).unwrap();
        for level in 0..=2 {
            let Entry::Page(page) = EPYC.decode(Npt1G::leaf(bits, level, Hpa(0)), level + 1) else {
                panic!("{memory:?} is no page at {level}");
            };
            let types = [RESET_PAT, linux].map(|pat| memory_type(pat, page.pat_index));
            assert_eq!(types, [expected; 2], "{memory:?}");
        }
    }
}

#[test]
fn a_leaf_goes_through_its_life_in_the_words_of_the_manual() {
    let format = Npt1G::default();
    let clean = Attributes { accessed: false, dirty: false, ..Attributes::RAM };
    let mut raw = Npt1G::leaf(format.encode(clean).unwrap(), 1, Hpa(0x7c20_0000));
    assert_eq!(raw, 0x7c20_0087);
    raw |= 0x60; // A write by the guest.
    assert_eq!(format.decode(raw, 1), Attributes::RAM);
    raw = Npt1G::write_protected(raw);
    assert_eq!(raw, 0x7c20_00e5, "written before, and still known to be");
    raw = format.cleaned(raw);
    assert_eq!(raw, 0x7c20_00a5);
    raw = format.relaxed(raw, Access::Write);
    assert_eq!(raw, 0x7c20_00e7);
    assert_eq!(format.cleaned(raw), 0x7c20_00a7, "hardware marks the next write");
    raw = Npt1G::execute_protected(raw);
    assert_eq!(raw, 0x8000_0000_7c20_00e7);
    assert_eq!(format.relaxed(raw, Access::Execute), 0x7c20_00e7);
    assert_eq!(format.relaxed(0x8000_0000_7c20_0085, Access::Read), 0x8000_0000_7c20_00a5);
}

#[test]
fn features_are_read_from_the_bits_that_the_manual_names() {
    // Fn8000_0001 EDX: NX 20, Page1GB 26. Fn8000_0008 EAX: PhysAddrSize 7:0, LinAddrSize 15:8.
    // Fn8000_000A EDX: NP 0.
    let format = Npt1G::from_cpuid(0x0410_0000, 0x302b, 0x1).unwrap();
    assert_eq!(format, Npt1G { output_bits: 43, ..Default::default() });
    assert_eq!(format.geometry(48).unwrap_err().max, 43);
    let error = Npt1G::from_cpuid(0x0010_0000, 0x302b, 0x1).unwrap_err();
    assert_eq!(error, MissingFeatures { extended: 1 << 26, svm: 0 });
    assert!(Npt2M::from_cpuid(0x0010_0000, 0x302b, 0x1).is_ok());
    assert_eq!(Npt2M::from_cpuid(!0, 0x302b, !1).unwrap_err().svm, 1);
    let text = Npt1G::from_cpuid(0, 0x302b, 0).unwrap_err().to_string();
    says(&text, &["nested paging (bit 0 ", ", no-execute (bit 20 ", ", 1g blocks (bit 26 "]);
}

#[test]
fn the_root_is_the_pml4_or_with_five_levels_the_pml5() {
    let four = Npt1G { output_bits: 52, ..Default::default() };
    let roots = [(12, 4, 1), (32, 4, 1), (39, 4, 1), (40, 4, 2), (46, 4, 128), (48, 4, 512)];
    check_roots(four, 12..=48, &roots);
    // A CPU with fewer physical address bits takes no wider guest.
    check_roots(Npt1G { output_bits: 40, ..four }, 12..=40, &[]);
    assert_eq!(Npt1G { output_bits: 64, ..four }.output_bits(), 52);
    let five = Npt1G { five_levels: true, ..four };
    check_roots(five, 12..=52, &[(12, 5, 1), (40, 5, 1), (48, 5, 1), (49, 5, 2), (52, 5, 16)]);
    check_roots(Npt1G { output_bits: 48, ..five }, 12..=48, &[]);
}

#[test]
fn foreign_memory_types_decode_to_one_that_encodes() {
    let format = Npt1G::default();
    // P and U/S, PWT and PCD, and the bit that tells normal memory from other.
    for raw in (0..8).map(|n| 5 | (n & 3) << 3 | (n & 4) << (54 - 2)) {
        let once = format.decode(raw, 0);
        assert_eq!(format.decode(format.encode(once).unwrap(), 0), once);
    }
    // Above level 0, bit 12 belongs to the PAT and not to the address.
    let raw = Npt1G::leaf(5, 1, Hpa(1 << 21)) | 1 << 12;
    assert_eq!(Npt1G::leaf_address(raw, 1), Hpa(1 << 21));
}

/// The fields that the manual gives for attributes, as numbers.
fn manual(a: Attributes, address: u64, size: u64) -> Page {
    let pat_index = match a.memory {
        Memory::Normal => 0,
        Memory::NonCacheable | Memory::Device => 2,
        Memory::DeviceStrict => 3,
    };
    let rights = Rights { write: a.write, user: true, execute: a.execute == Execute::All };
    let (accessed, dirty) = (a.accessed, a.dirty);
    Page { address, size, rights, pat_index, accessed, dirty, features: 0 }
}

/// Returns why no entry has these attributes.
fn refusal(a: Attributes) -> Option<AttributeError> {
    match a.execute {
        _ if !a.read => Some(AttributeError::NeedsRead),
        Execute::User | Execute::Kernel => Some(AttributeError::ExecuteNeedsSplitRights),
        Execute::All | Execute::None => None,
    }
}

fn leaves_are_the_manuals<const HUGE_1G: bool>() {
    for physical_bits in [40, 48, 52] {
        let format = Npt::<HUGE_1G> { output_bits: physical_bits, ..Default::default() };
        let cpu = Cpu { physical_bits, huge_1g: HUGE_1G };
        let page = |raw, level| match cpu.decode(raw, level + 1) {
            Entry::Page(page) => page,
            other => panic!("{raw:#x} at {level}: {other:?}"),
        };
        let marks = Marks { split: false, dirty: true };
        let leaves = check_leaves(format, marks, page, manual, |a, reason| {
            assert_eq!(reason, refusal(a));
        });
        assert_ne!(leaves, 0);
    }
}

#[test]
fn leaves_up_to_1g_are_the_manuals_in_every_combination() {
    leaves_are_the_manuals::<true>();
}

#[test]
fn leaves_up_to_2m_are_the_manuals_in_every_combination() {
    leaves_are_the_manuals::<false>();
    let format = Npt2M::default();
    let raw = Npt1G::leaf(format.encode(Attributes::RAM).unwrap(), 2, Hpa(1 << 30));
    let cpu = Cpu { huge_1g: false, ..EPYC };
    assert!(matches!(cpu.decode(raw, 3), Entry::Reserved(_)));
    assert_eq!((Npt1G::kind(raw, 2), Npt2M::kind(raw, 2)), (Kind::Leaf, Kind::Frozen));
    let level = |size| Npt2M::level_of(size).ok();
    assert_eq!([PageSize::SIZE_1G, PageSize::SIZE_2M].map(level), [None, Some(1)]);
}

#[test]
fn entries_with_the_engines_marks_are_as_in_the_manual() {
    for physical_bits in [40, 48, 52] {
        let cpu = Cpu { physical_bits, huge_1g: true };
        let format = Npt1G { output_bits: physical_bits, ..Default::default() };
        check_entries(&[format], 3, |raw, level| match cpu.decode(raw, level + 1) {
            Entry::Table { address, rights } => {
                assert!(rights.user && rights.write && rights.execute);
                Some(address)
            }
            Entry::NotPresent => None,
            other => panic!("{raw:#x} at {level}: {other:?}"),
        });
    }
}
