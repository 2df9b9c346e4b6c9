//! G-stage entries against values from outside the engine: the RISC-V privileged manual ("Guest
//! Physical Address Translation", "Sv39", "Svpbmt"), and the names that Linux gives to bits in
//! `arch/riscv/include/asm/pgtable-bits.h`, `pgtable-64.h` and `csr.h`.

use crate::common::hardware::leaves::{
    Marks, all_attributes, check_entries, check_leaves, check_roots,
};
use crate::common::hardware::riscv::{Cpu, Hart, Page, Pte};
use crate::common::hardware::{Access as Used, Hardware};
use crate::common::stage::{CLEAN, G, K, M, RAM, on_stage, on_stage_of, range, relax, says};
use crate::common::{TestPlatform, destroy};
use slat::format::riscv::{HgatpError, Mode, RiscV};
use slat::format::{Access, AttributeError, Format, Geometry};
use slat::{
    Attributes, BreakBeforeMake, Execute, Gpa, Hpa, Memory, PageSize, Software, TableCache, Tables,
    Vmid,
};
use std::sync::atomic::Ordering;

const CPU: Cpu = Cpu { svpbmt: true, physical_bits: 56 };

#[test]
fn the_decoder_faults_where_the_manual_does() {
    let what = |cpu: Cpu, pte, i| match cpu.decode(pte, i) {
        Pte::Fault(what) => what,
        Pte::Invalid => "invalid",
        Pte::Table(_) => "table",
        Pte::Page(_) => "page",
    };
    let plain = Cpu { svpbmt: false, physical_bits: 40 };
    assert_eq!(what(CPU, 0xffff_ffff_ffff_fffe, 0), "invalid", "V clear, all else software's");
    for i in 0..5 {
        assert_eq!(what(CPU, 0x5, i), "writable, not readable");
        assert_eq!(what(CPU, 0xd, i), "writable, not readable");
        assert_eq!(what(CPU, 0x13, i), "page");
        assert_eq!(what(CPU, 0x19, i), "page", "execute-only");
        for n in 54..=60 {
            assert_eq!(what(CPU, 0x13 | 1 << n, i), "reserved bits 60:54");
        }
        assert_eq!(what(CPU, 0x13 | 1 << 63, i), "N without Svnapot");
        assert_eq!(what(CPU, 0x13 | 3 << 61, i), "a memory type that is reserved");
        assert_eq!(what(plain, 0x13 | 1 << 61, i), "a memory type that is reserved");
        // Hardware ignores RSW and G.
        assert_eq!(what(CPU, 0x13 | 0x320, i), "page");
    }
    assert_eq!(what(CPU, 0x1, 0), "a table at level 0");
    assert_eq!((what(CPU, 0x1, 1), what(CPU, 0x321, 4)), ("table", "table"));
    for pte in [0x11, 0x41, 0x81] {
        assert_eq!(what(CPU, pte, 1), "A, D or U of a table");
    }
    assert_eq!(what(CPU, 0x1 | 1 << 61, 1), "a memory type of a table");
    // PPN[0] of a 2 MiB page is bits 18:10, PPN[1:0] of a 1 GiB page 27:10.
    assert_eq!((what(CPU, 0x413, 1), what(CPU, 0x8_0013, 1)), ("misaligned superpage", "page"));
    assert_eq!(
        (what(CPU, 0x8_0013, 2), what(CPU, 0x1000_0013, 2)),
        ("misaligned superpage", "page")
    );
    assert_eq!(what(plain, 0x13 | 1 << 38, 0), "no such physical address");
}

#[test]
fn leaves_and_tables_are_the_words_that_hypervisors_write() {
    let format = RiscV::default();
    let ram = format.encode(RAM).unwrap();
    // V 0x1, R 0x2, W 0x4, X 0x8, U 0x10, A 0x40, D 0x80: 0xdf; the PPN begins at bit 10, so
    // 0x8020_1000 is 0x80201 << 10.
    assert_eq!(RiscV::leaf(ram, 0, Hpa(0x8020_1000)), 0x2008_04df);
    assert_eq!(RiscV::leaf(ram, 1, Hpa(0x8020_0000)), 0x2008_00df);
    assert_eq!(RiscV::leaf(ram, 2, Hpa(0x8000_0000)), 0x2000_00df);
    assert_eq!(RiscV::leaf(format.encode(CLEAN).unwrap(), 0, Hpa(0x8020_1000)), 0x2008_041f);
    assert_eq!(RiscV::table(Hpa(0x8020_1000), 1), 0x2008_0401);
    // The highest physical address: PPN is bits 53:10.
    assert_eq!(RiscV::table(Hpa((1 << 56) - 0x1000), 1), 0x003f_ffff_ffff_fc01);
}

#[test]
fn each_attribute_is_the_bit_that_linux_names() {
    let format = RiscV { memory_types: true, ..Default::default() };
    let raw = |a: Attributes| RiscV::leaf(format.encode(a).unwrap(), 0, Hpa(0));
    let base = raw(RAM);
    // _PAGE_PRESENT, _READ, _WRITE, _EXEC, _USER; _ACCESSED and _DIRTY are 1 << 6 and 1 << 7.
    assert_eq!(base, 0x1f | 1 << 6 | 1 << 7);
    assert_eq!(base ^ raw(Attributes { write: false, ..RAM }), 1 << 2);
    assert_eq!(base ^ raw(Attributes { execute: Execute::None, ..RAM }), 1 << 3);
    assert_eq!(base ^ raw(Attributes { read: false, write: false, ..RAM }), 0b11 << 1);
    assert_eq!(base ^ raw(Attributes { accessed: false, ..RAM }), 1 << 6);
    assert_eq!(base ^ raw(Attributes { dirty: false, ..RAM }), 1 << 7);
    assert_eq!((RiscV::ACCESSED, RiscV::DIRTY, RiscV::WRITE), (1 << 6, 1 << 7, 1 << 2));
    // _PAGE_NOCACHE_SVPBMT is 1 << 61, _PAGE_IO_SVPBMT 1 << 62, _PAGE_PMA 0.
    assert_eq!(base ^ raw(Attributes { memory: Memory::NonCacheable, ..RAM }), 1 << 61);
    assert_eq!(base ^ raw(Attributes { memory: Memory::Device, ..RAM }), 1 << 62);
    // _PAGE_SOFT is 3 << 8, _PAGE_GLOBAL 1 << 5.
    let user = |software| base ^ raw(Attributes { software, ..RAM });
    assert_eq!((user(Software::A), user(Software::B)), (1 << 8, 1 << 9));
    assert_eq!(RiscV::MARK, 1 << 5);
}

#[test]
fn hgatp_is_the_word_that_linux_loads() {
    // HGATP_MODE_SV39X4 8, SV48X4 9, SV57X4 10 at 60; HGATP64_VMID_SHIFT 44; the root's page
    // number.
    let format = RiscV { widest: Mode::Sv57x4, ..Default::default() };
    let hgatp = |bits, root, vmid| {
        RiscV::hgatp(&format.geometry(bits).unwrap(), Hpa(root), Vmid(vmid)).unwrap()
    };
    assert_eq!(hgatp(41, 0x8020_4000, 0), 0x8000_0000_0008_0204);
    assert_eq!(hgatp(50, 0x8020_4000, 1), 0x9000_1000_0008_0204);
    assert_eq!(hgatp(59, 0x8020_4000, 0x3fff), 0xa3ff_f000_0008_0204);
    // One that cannot be is refused with the field that does not fit.
    let geometry = format.geometry(41).unwrap();
    let hgatp = |root_level, root, vmid| {
        RiscV::hgatp(&Geometry { root_level, ..geometry }, Hpa(root), Vmid(vmid))
    };
    for (level, root, vmid, error) in [
        (1, 0x4000, 1, HgatpError::Level { level: 1 }),
        (5, 0x4000, 1, HgatpError::Level { level: 5 }),
        (2, 0x4000, 1 << 14, HgatpError::Vmid { vmid: Vmid(1 << 14) }),
        (2, 0x1000, 1, HgatpError::Root { root: Hpa(0x1000) }),
        (2, 0x2000, 1, HgatpError::Root { root: Hpa(0x2000) }),
        (2, 1 << 56, 1, HgatpError::Root { root: Hpa(1 << 56) }),
    ] {
        assert_eq!(hgatp(level, root, vmid), Err(error));
    }
    says(&hgatp(2, 0x1000, 1).unwrap_err().to_string(), &["0x1000", "0x4000"]);
    assert!(hgatp(4, (1 << 56) - 0x4000, 0x3fff).is_ok());
}

#[test]
fn tables_take_the_narrowest_mode_and_a_root_of_2048_entries() {
    let all = [(12, 2), (32, 2), (41, 2), (42, 3), (50, 3), (51, 4), (59, 4)];
    let all = all.map(|(bits, level)| (bits, level, 2048));
    for (widest, most, modes) in
        [(Mode::Sv39x4, 41, 3), (Mode::Sv48x4, 50, 5), (Mode::Sv57x4, 59, 7)]
    {
        assert_eq!(widest.address_bits(), most);
        check_roots(RiscV { widest, ..Default::default() }, 12..=most, &all[..modes]);
    }
    assert_eq!(RiscV { output_bits: 64, ..Default::default() }.output_bits(), 56);
}

#[test]
fn sv57x4_reaches_its_last_page_and_its_last_block() {
    let format = RiscV { widest: Mode::Sv57x4, ..Default::default() };
    let platform = TestPlatform::new(BreakBeforeMake::Never);
    let mut tables = Tables::new(format, Vmid(1), 59, &platform).unwrap();
    let mut storage = [const { None }; 8];
    let mut cache = TableCache::new(&platform, &mut storage);
    cache.fill(8).unwrap();
    let top = 1u64 << 59;
    let root = tables.root().0;
    let mut guard = tables.enter_mut();
    for (at, bytes, hpa) in [(top - 4 * K, 4 * K, 0x8000_0000), (top - 2 * G, G, 0xc000_0000)] {
        let size = PageSize::from_bytes(bytes).unwrap();
        assert_eq!(guard.map(range(at, bytes), Hpa(hpa), RAM, size, &mut cache), Ok(bytes));
    }
    // The address ends in VPN[4], of 11 bits, all ones: the last of 2,048 entries.
    let pte = |table: u64, ptes: usize, index: usize| {
        platform.table(table, ptes)[index].load(Ordering::SeqCst)
    };
    let next = |pte: u64| {
        assert_eq!(pte & 0x3ff, 1, "V alone");
        (pte >> 10) << 12
    };
    let level3 = next(pte(root, 2048, 2047));
    let level2 = next(pte(level3, 512, 511));
    // PPN 0xc_0000 and 0x8_0000, D A U X W R V: 0xdf.
    assert_eq!(pte(level2, 512, 510), 0x3000_00df);
    let level1 = next(pte(level2, 512, 511));
    let level0 = next(pte(level1, 512, 511));
    assert_eq!(pte(level0, 512, 511), 0x2000_00df);
    let found = guard.translate(Gpa(top - 1)).unwrap().unwrap();
    assert_eq!(found.hpa, Hpa(0x8000_0fff));
    let split = range(top - 2 * G, 4 * K);
    assert_eq!(guard.split(split, PageSize::SIZE_4K, &mut cache), Ok(G));
    let last = guard.translate(Gpa(top - G - 1)).unwrap().unwrap();
    assert_eq!((last.hpa, last.size), (Hpa(0xffff_ffff), PageSize::SIZE_2M));
    drop(guard);
    drop(cache);
    destroy(tables);
}

/// The fields that the manual gives for attributes, as numbers.
fn manual(a: Attributes, address: u64, size: u64) -> Page {
    let pbmt = match a.memory {
        Memory::Normal => 0,
        Memory::NonCacheable => 1,
        _ => 2,
    };
    let bit = |software| u64::from(a.software.contains(software));
    Page {
        address,
        size,
        read: a.read,
        write: a.write,
        execute: a.execute == Execute::All,
        accessed: a.accessed,
        dirty: a.dirty,
        pbmt,
        rsw: bit(Software::A) | bit(Software::B) << 1,
    }
}

/// Returns why no entry has these attributes.
fn refusal(format: &RiscV, a: Attributes) -> Option<AttributeError> {
    let split = matches!(a.execute, Execute::User | Execute::Kernel);
    let typed = matches!(a.memory, Memory::NonCacheable | Memory::Device) && format.memory_types;
    match () {
        () if a.write && !a.read => Some(AttributeError::NeedsRead),
        () if split => Some(AttributeError::ExecuteNeedsSplitRights),
        () if a.memory != Memory::Normal && !typed => Some(AttributeError::MemoryType),
        () => None,
    }
}

#[test]
fn without_svpbmt_leaves_have_no_memory_type() {
    let format = RiscV { memory_types: false, ..Default::default() };
    for a in all_attributes() {
        assert_eq!(
            format.encode(a).map(|bits| format.decode(bits, 0)),
            refusal(&format, a).map_or(Ok(a), Err)
        );
    }
}

#[test]
fn leaves_are_the_manuals_in_every_combination() {
    let format = RiscV { memory_types: true, ..Default::default() };
    let page = |raw, level| match CPU.decode(raw, u32::from(level)) {
        Pte::Page(page) => page,
        other => panic!("{raw:#x} at {level}: {other:?}"),
    };
    let marks = Marks { split: false, dirty: true };
    let leaves = check_leaves(format, marks, page, manual, |a, reason| {
        assert_eq!(reason, refusal(&format, a));
    });
    assert_eq!(leaves, 3 * 384 * 3 / 4);
}

#[test]
fn entries_are_the_manuals_whatever_the_engine_records_in_them() {
    let formats = [false, true].map(|memory_types| RiscV { memory_types, ..Default::default() });
    check_entries(&formats, 4, |raw, level| match CPU.decode(raw, u32::from(level)) {
        Pte::Table(address) => Some(address),
        Pte::Invalid => None,
        other => panic!("{raw:#x} at {level}: {other:?}"),
    });
}

/// A change of rights makes neither a table nor a reserved encoding, with and without memory types.
#[test]
fn every_sequence_of_changes_of_rights_leaves_a_leaf() {
    for memory_types in [false, true] {
        let format = RiscV { memory_types, ..Default::default() };
        for bits in all_attributes().filter_map(|a| format.encode(a).ok()) {
            let raw = RiscV::leaf(bits, 0, Hpa((1 << 56) - 0x1000));
            let unread = RiscV::readable(raw, false);
            let accesses = [Access::Read, Access::Write, Access::Execute];
            let changed = accesses.map(|access| format.relaxed(raw, access));
            let protected = [raw, unread].into_iter().flat_map(|raw| {
                let read_only = RiscV::write_protected(raw);
                let both = RiscV::execute_protected(read_only);
                [raw, read_only, RiscV::execute_protected(raw), both]
            });
            for leaf in protected.chain(changed) {
                let Pte::Page(page) = CPU.decode(leaf, 0) else { panic!("{leaf:#x}") };
                // U, without which hardware faults, stands where there is a right.
                assert_eq!(leaf >> 4 & 1 == 1, page.read || page.execute, "{leaf:#x}");
            }
        }
    }
}

/// The pages of a table are filled by a run of stores: each value is the one before plus a page, in
/// units of the entry.
#[test]
fn a_split_block_and_a_run_of_pages_translate_as_before() {
    on_stage::<Hart<true>>(
        (RiscV { output_bits: 48, ..Default::default() }, 41, 8),
        |tables, guard, cache| {
            let (block, to) = (range(G, 2 * M), Hpa(6 * M));
            assert_eq!(guard.map(block, to, RAM, PageSize::SIZE_2M, cache), Ok(2 * M));
            assert_eq!(guard.split(block, PageSize::SIZE_4K, cache), Ok(2 * M));
            let pages = range(3 * G + 5 * 4 * K, 400 * 4 * K);
            assert_eq!(
                guard.map(pages, Hpa(4 * K), RAM, PageSize::SIZE_4K, cache),
                Ok(400 * 4 * K)
            );
            let tree = Hart::<true>::of(tables).tree(tables.platform());
            let found: Vec<_> =
                tree.runs.iter().map(|r| (r.start, r.end, r.size, r.leaf.oa)).collect();
            let (start, end) = (pages.start().0, pages.end().0);
            assert_eq!(found, [(G, G + 2 * M, 4 * K, 6 * M), (start, end, 4 * K, 4 * K)]);
        },
    );
}

#[test]
fn a_use_faults_until_relaxed_unless_svadu_marks_it() {
    fn uses<const SVADU: bool>() {
        on_stage_of::<Hart<SVADU>>(
            BreakBeforeMake::Never,
            (RiscV::default(), 41, 2),
            |tables, guard, cache| {
                let (hart, platform) = (Hart::<SVADU>::of(tables), guard.platform());
                let page = range(0x5000, 4 * K);
                guard.map(page, Hpa(0x8020_1000), CLEAN, PageSize::SIZE_4K, cache).unwrap();
                for (write, access, after) in
                    [(false, Access::Read, 0x2008_045f), (true, Access::Write, 0x2008_04df)]
                {
                    let used = || hart.access(platform, hart.root(), 0x5123, write);
                    if !SVADU {
                        assert_eq!(used(), Used::Fault);
                        assert_eq!(relax(guard, page, access), Ok(4 * K));
                    }
                    assert_eq!(used(), Used::Done { start: 0x5000, end: 0x6000 });
                    assert_eq!(guard.descriptor(Gpa(0x5000)), Some((after, PageSize::SIZE_4K)));
                }
                // After a harvest, the next write is marked, or faults, again.
                let mut bitmap = [0];
                assert_eq!((guard.harvest(page, &mut bitmap), bitmap), (Ok(1), [1]));
                let used = hart.access(platform, hart.root(), 0x5000, true);
                assert_eq!(used == Used::Fault, !SVADU);
            },
        );
    }
    uses::<true>();
    uses::<false>();
}
