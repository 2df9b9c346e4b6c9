//! EPT entries against values from outside the engine: the Intel SDM, volume 3C, "The Extended
//! Page Table Mechanism" (entry formats, "EPT Misconfigurations", "EPT and Memory Typing"), and the
//! names that Linux gives to bits in `arch/x86/include/asm/vmx.h`.

use crate::common::hardware::ept::{Cpu, Entry, Page, Rights, XEON};
use crate::common::hardware::leaves::{
    Marks, all_attributes, check_entries, check_leaves, check_roots,
};
use crate::common::stage::says;
use slat::format::ept::vtd::{MissingVtd, Vtd};
use slat::format::ept::{Ept, Ept1G, Ept2M};
use slat::format::{Access, AttributeError, Format, Kind};
use slat::{Attributes, Execute, Hpa, Memory, PageSize, Software};

#[test]
fn the_decoder_rejects_what_the_manual_calls_misconfigured() {
    let xo = Cpu { execute_only: true, ..XEON };
    let mbe = Cpu { mode_based_execute: true, ..XEON };
    let client = Cpu { maxphyaddr: 39, huge_1g: false, ..XEON };
    let what = |cpu: Cpu, raw, level| match cpu.decode(raw, level) {
        Entry::Misconfiguration(what) => what,
        Entry::NotPresent => "not present",
        Entry::Table { .. } => "table",
        Entry::Page(_) => "page",
    };
    // Bits 2:0 as 010b and 110b at every level; 100b without the capability.
    for level in 1..=4 {
        assert_eq!(what(xo, 0x2, level), "writable, not readable");
        assert_eq!(what(xo, 0x6, level), "writable, not readable");
        assert_eq!(what(XEON, 0x4, level), "execute-only");
        assert_eq!(what(mbe, 0x400, level), "execute-only", "bit 10 is execute access, too");
        assert_eq!(what(XEON, 0x400, level), "not present", "bit 10 is ignored");
        assert_eq!(what(XEON, 0xffff_ffff_ffff_fbf8, level), "not present");
    }
    assert_eq!((what(xo, 0x4, 1), what(xo, 0x4, 4)), ("page", "table"));
    // UC, WC, -, -, WT, WP, WB, -.
    let types = (0..8).map(|n| what(XEON, 0x7 | n << 3, 1) == "page");
    assert!(types.eq([true, true, false, false, true, true, true, false]));
    // RWX, WB, bit 7, in each table: 2^21 = 0x20_0000, 2^30 = 0x4000_0000.
    assert_eq!(what(XEON, 0x20_00b7, 2), "page");
    assert_eq!(what(XEON, 0x20_10b7, 2), "reserved address bits of a large page");
    assert_eq!(what(XEON, 0x4000_00b7, 3), "page");
    assert_eq!(what(XEON, 0x4020_00b7, 3), "reserved address bits of a large page");
    assert_eq!(what(client, 0x4000_00b7, 3), "bit 7 of a PDPTE without 1 GiB pages");
    assert_eq!(what(XEON, 0x87, 4), "reserved bits 7:3 of a PML4E");
    assert_eq!(what(XEON, 0x87, 5), "reserved bits 7:3 of a PML5E");
    assert_eq!(what(XEON, 1 << 52 | 0x807, 5), "table");
    for n in 3..=6 {
        assert_eq!(what(XEON, 0x7 | 1 << n, 4), "reserved bits 7:3 of a PML4E");
        assert_eq!(what(XEON, 0x7 | 1 << n, 3), "reserved bits 6:3 of a table");
        assert_eq!(what(XEON, 0x7 | 1 << n, 2), "reserved bits 6:3 of a table");
    }
    // Bit 39 is an address bit on one CPU and reserved on another; ignored bits are neither.
    assert_eq!(what(XEON, 1 << 39 | 0x37, 1), "page");
    assert_eq!(what(client, 1 << 39 | 0x37, 1), "address beyond MAXPHYADDR");
    assert_eq!(what(XEON, 1 << 46 | 0x7, 4), "address beyond MAXPHYADDR");
    assert_eq!(what(XEON, 1 << 52 | 1 << 59 | 1 << 62 | 0x807, 4), "table");
}

#[test]
fn leaves_and_tables_are_the_words_that_hypervisors_write() {
    let format = Ept1G::default();
    let ram = format.encode(Attributes::RAM).unwrap();
    // RWX 0x7, WB 6 << 3 = 0x30, IPAT 0x40: 0x77, as KVM maps memory without non-coherent DMA;
    // accessed 0x100 and dirty 0x200: 0x377; a large page adds 0x80: 0x3f7.
    assert_eq!(Ept1G::leaf(ram, 0, Hpa(0x1_2345_6000)), 0x0001_2345_6377);
    assert_eq!(Ept1G::leaf(ram, 1, Hpa(0x1_2340_0000)), 0x0001_2340_03f7);
    assert_eq!(Ept1G::leaf(ram, 2, Hpa(0x1_4000_0000)), 0x0001_4000_03f7);
    let unused = Attributes { accessed: false, dirty: false, ..Attributes::RAM };
    let unused = format.encode(unused).unwrap();
    assert_eq!(Ept1G::leaf(unused, 0, Hpa(0x5000)), 0x5077);
    // Where the guest's PAT applies: no IPAT.
    let honoured = Ept1G { forced_write_back: false, ..format };
    assert_eq!(honoured.encode(Attributes::RAM).unwrap(), 0x337);
    // With mode-based execute control: user execution 0x400.
    let split = Ept1G { split_execute: true, ..format };
    assert_eq!(split.encode(Attributes::RAM).unwrap(), 0x777);
    // A table: RWX 0x7, accessed 0x100, and 0x400, which is ignored without that control.
    assert_eq!(Ept1G::table(Hpa(0x1_2345_6000), 1), 0x0001_2345_6507);
    // The pointer: WB 6, a walk of four levels 3 << 3 = 0x18, accessed and dirty flags 0x40.
    let geometry = format.geometry(48).unwrap();
    assert_eq!(format.eptp(&geometry, Hpa(0x7000)), 0x705e);
    let plain = Ept1G { accessed_dirty: false, ..format };
    assert_eq!(plain.eptp(&geometry, Hpa(0x7000)), 0x701e);
    // With five levels 4 << 3 = 0x20.
    let five = Ept1G { five_levels: true, ..format };
    assert_eq!(five.eptp(&five.geometry(49).unwrap(), Hpa(0x7000)), 0x7066);
    assert_eq!(five.eptp(&five.geometry(48).unwrap(), Hpa(0x7000)), 0x705e, "as it suffices");
}

#[test]
fn each_attribute_is_the_bit_that_linux_names() {
    let format = Ept1G { split_execute: true, ..Default::default() };
    let raw = |a: Attributes| format.encode(a).unwrap();
    let (ram, base) = (Attributes::RAM, raw(Attributes::RAM));
    // VMX_EPT_READABLE_MASK 0x1, VMX_EPT_WRITABLE_MASK 0x2, VMX_EPT_EXECUTABLE_MASK 0x4.
    assert_eq!(base & 0x7, 0x7);
    assert_eq!(base ^ raw(Attributes { write: false, ..ram }), 0x2);
    assert_eq!(base ^ raw(Attributes { execute: Execute::User, ..ram }), 0x4);
    // VMX_EPT_USER_EXECUTABLE_MASK 1 << 10.
    assert_eq!(base ^ raw(Attributes { execute: Execute::Kernel, ..ram }), 1 << 10);
    assert_eq!(base ^ raw(Attributes { execute: Execute::None, ..ram }), 0x404);
    // VMX_EPT_ACCESS_BIT 1 << 8, VMX_EPT_DIRTY_BIT 1 << 9.
    assert_eq!(base ^ raw(Attributes { accessed: false, ..ram }), 1 << 8);
    assert_eq!(base ^ raw(Attributes { dirty: false, ..ram }), 1 << 9);
    assert_eq!((Ept1G::ACCESSED, Ept1G::DIRTY, Ept1G::WRITE), (1 << 8, 1 << 9, 1 << 1));
    assert_eq!(Ept1G::TABLE_ACCESSED, 1 << 8);
    // VMX_EPT_MT_EPTE_SHIFT 3 under X86_MEMTYPE_UC 0, _WC 1, _WB 6; VMX_EPT_IPAT_BIT 1 << 6.
    // KVM maps a device as 0, which lets the guest's PAT choose write-combining.
    let memory = |memory| raw(Attributes { memory, ..ram }) >> 3 & 0xf;
    assert_eq!((memory(Memory::Normal), memory(Memory::NonCacheable)), (0b1110, 0b0001));
    assert_eq!((memory(Memory::Device), memory(Memory::DeviceStrict)), (0b0000, 0b1000));
    assert_eq!(Ept1G::STATUS, 0x300);
    // The bits that only software uses are among those that hardware ignores in every entry: 56:52,
    // 59, 62 and
    // 11. They differ from each other in a leaf; the engine's bits in tables are not among them.
    let user = |software| base ^ raw(Attributes { software, ..ram });
    let users = [0, 1, 2, 3, 4, 5].map(|bit| user(Software::bit(bit)));
    assert_eq!(users, [52, 55, 56, 59, 53, 54].map(|place| 1 << place));
    // Bit 11 is used by an IOMMU.
    let ignored = 0x1f << 52 | 1 << 59 | 1 << 62;
    assert_eq!(users.iter().sum::<u64>() + Ept1G::MARK, ignored, "no bit is left over");
    assert!(Ept1G::AGEING.count_ones() == 1 && Ept1G::AGEING & ignored != 0);
}

#[test]
fn a_leaf_goes_through_its_life_in_the_words_of_the_manual() {
    let format = Ept1G::default();
    let clean = Attributes { accessed: false, dirty: false, ..Attributes::RAM };
    let mut raw = Ept1G::leaf(format.encode(clean).unwrap(), 1, Hpa(0x7c20_0000));
    assert_eq!(raw, 0x7c20_00f7);
    raw |= 0x300; // A write by the guest.
    assert_eq!(format.decode(raw, 1), Attributes::RAM);
    raw = Ept1G::write_protected(raw);
    assert_eq!(raw, 0x7c20_03f5, "written before, and still known to be");
    raw = format.cleaned(raw);
    assert_eq!(raw, 0x7c20_01f5);
    raw = format.relaxed(raw, Access::Write);
    assert_eq!(raw, 0x7c20_03f7);
    assert_eq!(format.cleaned(raw), 0x7c20_01f7, "hardware marks the next write");
    let unmarked = Ept1G { accessed_dirty: false, ..format };
    assert_eq!(unmarked.cleaned(raw), raw, "nobody would mark the next write");
    raw = Ept1G::execute_protected(raw);
    assert_eq!(raw, 0x7c20_03f3);
    assert_eq!(format.relaxed(raw, Access::Execute), 0x7c20_03f7);
    assert_eq!(format.relaxed(0x7c20_00f1, Access::Read), 0x7c20_01f1);
}

#[test]
fn capabilities_are_read_from_the_bits_that_linux_names() {
    // VMX_EPT_EXECUTE_ONLY_BIT 0, PAGE_WALK_4 6, EPTP_UC 8, EPTP_WB 14, 2MB_PAGE 16, 1GB_PAGE 17,
    // INVEPT 20, AD 21, exit information 22, EXTENT_CONTEXT 25, EXTENT_GLOBAL 26.
    let bits = [0, 6, 8, 14, 16, 17, 20, 21, 22, 25, 26];
    let cap = bits.iter().fold(0u64, |cap, bit| cap | 1 << bit);
    assert_eq!(cap, 0x0673_4141);
    let format = Ept1G::from_capabilities(cap, 39).unwrap();
    assert_eq!(format, Ept1G { output_bits: 39, ..Default::default() });
    assert_eq!(format.geometry(48).unwrap_err().max, 39);
    // VMX_EPT_PAGE_WALK_5_BIT 7.
    let five = Ept1G::from_capabilities(cap | 1 << 7, 52).unwrap();
    assert_eq!(five, Ept1G { five_levels: true, ..Default::default() });
    assert_eq!(
        Ept1G::from_capabilities(cap | 1 << 7, 46).unwrap().geometry(47).unwrap_err().max,
        46
    );
    assert!(Ept2M::from_capabilities(cap & !(1 << 17), 39).is_ok());
    assert!(Ept1G::from_capabilities(cap & !(1 << 25), 46).is_ok(), "all contexts will do");
    assert!(format.accessed_dirty);
    assert!(!Ept1G::from_capabilities(cap & !(1 << 21), 36).unwrap().accessed_dirty);
    for number in [6, 14, 16, 17, 20] {
        let error = Ept1G::from_capabilities(cap & !(1 << number), 39).unwrap_err();
        assert_eq!(error.missing, 1 << number);
        says(&error.to_string(), &[&format!("(bit {number} of")]);
    }
    let error = Ept1G::from_capabilities(1 << 6, 46).unwrap_err();
    says(&error.to_string(), &["write-back", ", INVEPT (bit 20"]);
}

#[test]
fn the_root_is_the_pml4_or_where_it_does_not_suffice_the_pml5() {
    let four = Ept1G::default();
    let roots = [(12, 4, 1), (32, 4, 1), (39, 4, 1), (40, 4, 2), (46, 4, 128), (48, 4, 512)];
    check_roots(four, 12..=48, &roots);
    // A CPU with fewer physical address bits takes no wider guest.
    check_roots(Ept1G { output_bits: 39, ..four }, 12..=39, &[]);
    assert_eq!(Ept1G { output_bits: 64, ..four }.output_bits(), 52);
    let five = Ept1G { five_levels: true, ..four };
    check_roots(five, 12..=52, &[(12, 4, 1), (48, 4, 512), (49, 5, 2), (52, 5, 16)]);
    check_roots(Ept1G { output_bits: 48, ..five }, 12..=48, &[]);
}

/// Every format that a user can configure, with the CPU that it suits.
fn machines<const HUGE_1G: bool>() -> impl Iterator<Item = (Ept<HUGE_1G>, Cpu)> {
    [39, 46, 52].into_iter().flat_map(|maxphyaddr| {
        (0..8u8).map(move |n| {
            let format = Ept {
                vtd: None,
                accessed_dirty: n & 1 != 0,
                split_execute: n & 2 != 0,
                forced_write_back: n & 4 != 0,
                five_levels: false,
                output_bits: maxphyaddr,
            };
            let (huge_1g, mode_based_execute) = (HUGE_1G, format.split_execute);
            (format, Cpu { maxphyaddr, huge_1g, mode_based_execute, ..XEON })
        })
    })
}

/// The fields that the manual gives for attributes, as numbers.
fn manual(a: Attributes, forced_write_back: bool, address: u64, size: u64) -> Page {
    let (memory_type, ignore_pat) = match a.memory {
        Memory::Normal => (6, forced_write_back),
        Memory::NonCacheable => (1, false),
        Memory::Device => (0, false),
        Memory::DeviceStrict => (0, true),
    };
    let rights = Rights {
        read: true,
        write: a.write,
        execute_kernel: matches!(a.execute, Execute::All | Execute::Kernel),
        execute_user: matches!(a.execute, Execute::All | Execute::User),
    };
    let (accessed, dirty) = (a.accessed, a.dirty);
    Page { address, size, rights, memory_type, ignore_pat, accessed, dirty, features: 0 }
}

/// Returns why no entry has these attributes: 110b is a misconfiguration, 100b one without the
/// capability, 000b is not present.
fn refusal<const HUGE_1G: bool>(format: &Ept<HUGE_1G>, a: Attributes) -> Option<AttributeError> {
    let split = matches!(a.execute, Execute::User | Execute::Kernel);
    match () {
        () if !a.read => Some(AttributeError::NeedsRead),
        () if a.write && !a.dirty && !format.accessed_dirty => {
            Some(AttributeError::CleanNeedsHardwareDirty)
        }
        () if split && !format.split_execute => Some(AttributeError::ExecuteNeedsSplitRights),
        () => None,
    }
}

fn leaves_are_the_manuals<const HUGE_1G: bool>() {
    for (format, cpu) in machines::<HUGE_1G>() {
        let marks = Marks { split: format.split_execute, dirty: format.accessed_dirty };
        let page = |raw, level| match cpu.decode(raw, level + 1) {
            Entry::Page(page) => page,
            other => panic!("{raw:#x} at {level}: {other:?}"),
        };
        let manual = |a, hpa, size| manual(a, format.forced_write_back, hpa, size);
        let leaves = check_leaves(format, marks, page, manual, |a, reason| {
            assert_eq!(reason, refusal(&format, a));
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
    let format = Ept2M::default();
    let raw = Ept1G::leaf(format.encode(Attributes::RAM).unwrap(), 2, Hpa(1 << 30));
    let cpu = Cpu { huge_1g: false, ..XEON };
    assert!(matches!(cpu.decode(raw, 3), Entry::Misconfiguration(_)));
    assert_eq!((Ept1G::kind(raw, 2), Ept2M::kind(raw, 2)), (Kind::Leaf, Kind::Frozen));
    let level = |size| Ept2M::level_of(size).ok();
    assert_eq!([PageSize::SIZE_1G, PageSize::SIZE_2M].map(level), [None, Some(1)]);
}

#[test]
fn foreign_memory_types_decode_to_one_that_encodes() {
    for format in configurations() {
        for raw in (0..16u64).map(|n| 1 | n << 3) {
            let once = format.decode(raw, 0);
            assert_eq!(format.decode(format.encode(once).unwrap(), 0), once);
        }
    }
}

fn configurations() -> [Ept1G; 24] {
    std::array::from_fn(|n| Ept1G {
        accessed_dirty: n & 1 != 0,
        split_execute: n & 2 != 0,
        forced_write_back: n & 4 != 0,
        five_levels: false,
        output_bits: 52,
        vtd: [None, Some(Vtd { snoop: false }), Some(Vtd { snoop: true })][n % 3],
    })
}

/// An entry with neither R nor W is not present to VT-d, which ignores the rest, either.
#[test]
fn entries_with_the_engines_marks_are_as_in_the_manual() {
    let cpus = [(false, false), (false, true), (true, false), (true, true)];
    let cpus = cpus.map(|(execute_only, mode_based_execute)| Cpu {
        maxphyaddr: 52,
        huge_1g: true,
        execute_only,
        mode_based_execute,
    });
    check_entries(&configurations(), 3, |raw, level| {
        let seen = cpus.map(|cpu| match cpu.decode(raw, level + 1) {
            Entry::Table { address, rights } => {
                let all = [rights.read, rights.write, rights.execute_kernel, rights.execute_user];
                assert_eq!(all, [true; 4], "{raw:#x}");
                Some(address)
            }
            Entry::NotPresent => None,
            other => panic!("{raw:#x} at {level}: {other:?}"),
        });
        assert_eq!(seen, [seen[0]; 4]);
        seen[0]
    });
}

/// The specification's figures of second-stage entries: SNP is bit 11 of a leaf and reserved in a
/// table; TM, bit 62 of a leaf, is reserved in a table.
#[test]
fn vt_d_finds_snp_in_leaves_and_no_bit_that_it_reserves() {
    let alone = Ept1G::default();
    let shared = |snoop| Ept1G { vtd: Some(Vtd { snoop }), ..alone };
    let page = |format: Ept1G, level, hpa| {
        Ept1G::leaf(format.encode(Attributes::RAM).unwrap(), level, Hpa(hpa))
    };
    assert_eq!(page(alone, 0, 0x1234_5000), 0x1234_5377);
    assert_eq!(page(shared(false), 0, 0x1234_5000), 0x1234_5377);
    assert_eq!(page(shared(true), 0, 0x1234_5000), 0x1234_5b77);
    assert_eq!(page(shared(true), 1, 0x1240_0000), 0x1240_0bf7);
    assert_eq!(page(shared(true), 2, 0x4000_0000), 0x4000_0bf7);
    let device = Attributes { memory: Memory::Device, ..Attributes::RAM };
    assert_eq!(shared(true).encode(device).unwrap() | 0xfee0_0000, 0xfee0_0b07);
    let reserved = |table| if table { 1 << 7 | 1 << 11 | 1 << 62 } else { 1u64 << 62 };
    for format in [shared(false), shared(true)] {
        assert!(!format.marks_valid() && alone.marks_valid());
        let words: Vec<_> = all_attributes().filter_map(|a| format.encode(a).ok()).collect();
        let leaves = |level| words.iter().map(move |&bits| Ept1G::leaf(bits, level, Hpa(1 << 51)));
        for leaf in (0..3).flat_map(leaves) {
            assert_eq!(leaf & reserved(false), 0);
            assert_eq!(leaf >> 11 & 1 == 1, format.vtd.unwrap().snoop);
            // The children of a split keep SNP, and so does a leaf whose rights change.
            let bits = Ept1G::attribute_bits(leaf, 1);
            assert_eq!(format.encode(format.decode(leaf, 1)), Ok(bits));
            assert_eq!((bits ^ leaf) >> 11 & 1, 0);
            let relaxed = format.relaxed(Ept1G::write_protected(leaf), Access::Write);
            assert_eq!((relaxed ^ leaf) & (1 << 11 | 1 << 62), 0);
        }
    }
    for level in 1..4 {
        assert_eq!(Ept1G::table(Hpa((1 << 52) - 0x1000), level) & reserved(true), 0);
    }
}

#[test]
fn a_unit_is_taken_if_it_walks_these_tables_coherently() {
    let (capability, extended) = (1 << 10 | 1 << 34 | 1 << 35, 1 << 0 | 1 << 7);
    assert_eq!(Vtd::from_registers(capability, extended, true), Ok(Vtd { snoop: true }));
    assert_eq!(Vtd::from_registers(capability, 1, true), Ok(Vtd { snoop: false }));
    assert!(Vtd::from_registers(capability & !(1 << 35), extended, false).is_ok());
    let lacks = |missing, extended| Err(MissingVtd { capability: missing, extended });
    for missing in [1 << 10, 1 << 34, 1 << 35] {
        let found = Vtd::from_registers(capability & !missing, extended, true);
        assert_eq!(found, lacks(missing, 0));
    }
    assert_eq!(Vtd::from_registers(capability, 1 << 7, true), lacks(0, 1));
    assert_eq!(
        Vtd::from_registers(0, 0, false).unwrap_err().to_string(),
        "this IOMMU lacks tables of four levels (bit 10 of CAP_REG), 2m blocks (bit 34 of \
         CAP_REG), coherent walks (bit 0 of ECAP_REG)"
    );
}
