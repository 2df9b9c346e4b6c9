//! Radix entries against values from outside the engine: the Power ISA, Book III ("Radix Tree
//! Translation", 3.0B 5.7.10, 3.1 6.7.10; "In-Memory Tables"), and the names that Linux gives to
//! bits in `arch/powerpc/include/asm/book3s/64/pgtable.h`, `mmu.h` and `radix.h`. Entries are
//! compared as bytes, the first of which is the most significant.

use crate::common::hardware::leaves::{Marks, check_entries, check_leaves, check_roots};
use crate::common::hardware::power::{Core, Cpu, Entry, Page, Word};
use crate::common::hardware::{Access as Used, Hardware};
use crate::common::stage::{CLEAN, G, K, M, RAM, on_stage, range, relax, says};
use crate::common::world::size;
use crate::common::{TestPlatform, destroy};
use slat::format::power::{Power, PowerK4, PowerK64, RootError};
use slat::format::{Access, AttributeError, Format, Kind};
use slat::{
    Attributes, BreakBeforeMake, Execute, Gpa, Hpa, Memory, PageSize, Pte, Software, TableCache,
    UnloadedTables, Vmid,
};

const CPU: Cpu = Cpu { real_bits: 57 };
const FORMAT: Power<16> = Power { output_bits: 48 };

/// Returns what a walker reads where `raw` was stored.
fn bytes(raw: u64) -> [u8; 8] {
    let pte = Pte::new(raw);
    // SAFETY: an entry is eight bytes, and no other code changes it.
    unsafe { std::ptr::from_ref(&pte).cast::<[u8; 8]>().read() }
}

fn word(raw: u64) -> u64 {
    Word::of(bytes(raw)).0
}

#[test]
fn the_decoder_faults_where_the_manual_does() {
    let at = |word: u64, shift| match CPU.decode(word.to_be_bytes(), shift) {
        Entry::Fault(what) => what,
        Entry::Invalid => "invalid",
        Entry::Directory(..) => "directory",
        Entry::Page(_) => "page",
    };
    let (directory, page) = (1 << 63, 0b11 << 62);
    for shift in [12, 16, 21, 30, 39] {
        assert_eq!(at(!directory, shift), "invalid", "V clear, all else software's");
        assert_eq!(at(directory | 0x1_0005, shift), "directory");
        for bit in [61, 60, 7, 6, 5] {
            let fault = "reserved bits of a directory entry";
            assert_eq!(at(directory | 9 | 1 << bit, shift), fault, "bit {bit}");
        }
    }
    for shift in [12, 16, 21, 30] {
        assert_eq!(at(page, shift), "page");
        // Software's, R, C, ATT, EAA with the privileged bit.
        assert_eq!(at(page | 1 << 61 | 0xe00 | 0x180 | 0x30 | 0xf, shift), "page");
        for bit in [60, 59, 58, 57, 6] {
            let fault = "reserved bits of a page table entry";
            assert_eq!(at(page | 1 << bit, shift), fault, "bit {bit}");
        }
        assert_eq!(at(page | 1 << shift, shift), "page");
        if shift > 12 {
            assert_eq!(
                at(page | 1 << (shift - 1), shift),
                "a page that is not aligned to its size"
            );
        }
    }
    assert_eq!(at(page, 39), "no such page size");
    let fault = "a base that is not aligned to its table";
    assert_eq!(
        (at(directory | 0x1100 | 9, 21), at(directory | 0x1100 | 5, 21)),
        (fault, "directory")
    );
    let small = Cpu { real_bits: 40 };
    let fault = Entry::Fault("no such real address");
    assert_eq!(small.decode((page | 1 << 40).to_be_bytes(), 12), fault);
    assert_eq!(small.decode((directory | 1 << 40 | 9).to_be_bytes(), 21), fault);
}

#[test]
fn leaves_and_directory_entries_have_the_bytes_a_walker_reads() {
    let ram = FORMAT.encode(RAM).unwrap();
    // V, L, the address as it is, R 0x100, C 0x80, EAA read, write and execute 7.
    let leaf = PowerK4::leaf(ram, 0, Hpa(0x8020_1000));
    assert_eq!(bytes(leaf), [0xc0, 0, 0, 0, 0x80, 0x20, 0x11, 0x87]);
    assert_eq!(word(PowerK64::leaf(ram, 0, Hpa(0x8021_0000))), 0xc000_0000_8021_0187);
    assert_eq!(word(PowerK4::leaf(ram, 1, Hpa(0x8020_0000))), 0xc000_0000_8020_0187);
    assert_eq!(word(PowerK64::leaf(ram, 2, Hpa(0x8000_0000))), 0xc000_0000_8000_0187);
    let clean = FORMAT.encode(CLEAN).unwrap();
    assert_eq!(word(PowerK4::leaf(clean, 0, Hpa(0x8020_1000))), 0xc000_0000_8020_1007);
    // The highest real address that RPN, bits 7:51, holds.
    assert_eq!(word(PowerK4::leaf(0, 0, Hpa((1 << 57) - 0x1000))), 0xc1ff_ffff_ffff_f000);
    // A directory entry has the size of the next table: NLS 9, but 5 above 64K pages.
    let tables = [1, 2, 3].map(|level| word(PowerK4::table(Hpa(0x8020_1000), level)));
    assert_eq!(tables, [0x8000_0000_8020_1009; 3]);
    let tables = [1, 2, 3].map(|level| word(PowerK64::table(Hpa(0x8020_1000), level)));
    assert_eq!(tables, [0x8000_0000_8020_1005, 0x8000_0000_8020_1009, 0x8000_0000_8020_1009]);
}

#[test]
fn each_attribute_is_the_bit_that_linux_names() {
    let raw = |a: Attributes| word(PowerK4::leaf(FORMAT.encode(a).unwrap(), 0, Hpa(0)));
    let base = raw(RAM);
    // _PAGE_PRESENT, _PAGE_PTE, _PAGE_ACCESSED, _PAGE_DIRTY, _PAGE_READ, _PAGE_WRITE, _PAGE_EXEC.
    assert_eq!(base, 0x8000_0000_0000_0000 | 0x4000_0000_0000_0000 | 0x100 | 0x80 | 4 | 2 | 1);
    assert_eq!(base ^ raw(Attributes { write: false, ..RAM }), 2);
    assert_eq!(base ^ raw(Attributes { execute: Execute::None, ..RAM }), 1);
    assert_eq!(base ^ raw(Attributes { read: false, write: false, ..RAM }), 6);
    assert_eq!(base ^ raw(Attributes { accessed: false, ..RAM }), 0x100);
    assert_eq!(base ^ raw(Attributes { dirty: false, ..RAM }), 0x80);
    let constants = [PowerK4::ACCESSED, PowerK4::DIRTY, PowerK4::WRITE].map(word);
    assert_eq!(constants, [0x100, 0x80, 2]);
    // _PAGE_TOLERANT and _PAGE_NON_IDEMPOTENT.
    assert_eq!(base ^ raw(Attributes { memory: Memory::NonCacheable, ..RAM }), 0x30);
    assert_eq!(base ^ raw(Attributes { memory: Memory::Device, ..RAM }), 0x20);
    // _RPAGE_SW1, _RPAGE_SW2, _RPAGE_SW3, _RPAGE_SW0.
    let user = |software| base ^ raw(Attributes { software, ..RAM });
    assert_eq!([0, 1, 2].map(|bit| user(Software::bit(bit))), [0x800, 0x400, 0x200]);
    assert_eq!(word(PowerK4::MARK), 0x2000_0000_0000_0000);
    // V is in the first byte, EAA in the last, on any host.
    let leaf = bytes(PowerK4::leaf(FORMAT.encode(RAM).unwrap(), 0, Hpa(0)));
    assert_eq!((leaf[0], leaf[7] & 7), (0xc0, 7));
    // A leaf and a base have all bits of an address: RPN, bits 7:51, and NLB, bits 4:55.
    let all = (1 << 57) - 0x1000;
    assert_eq!(word(PowerK4::leaf(0, 0, Hpa(all)) ^ PowerK4::leaf(0, 0, Hpa(0))), all);
    let all = 0x0fff_ffff_ffff_ff00;
    assert_eq!(word(PowerK4::table(Hpa(all), 1) ^ PowerK4::table(Hpa(0), 1)), all);
}

#[test]
fn tables_are_as_large_as_the_processors_walk_them() {
    let roots = [12, 16, 40, 52].map(|bits| (bits, 1, 8192));
    check_roots(PowerK4::default(), 12..=52, &roots);
    check_roots(PowerK64::default(), 16..=52, &roots[1..]);
    assert_eq!([0, 1, 2].map(PowerK4::entries), [512, 512, 512]);
    assert_eq!([0, 1, 2].map(PowerK64::entries), [32, 512, 512]);
    assert_eq!([0, 1, 2, 3, 4].map(PowerK4::shift), [12, 21, 30, 39, 48]);
    assert_eq!([0, 1, 2, 3, 4].map(PowerK64::shift), [16, 21, 30, 39, 48]);
    assert_eq!((PowerK4::TABLE_BYTES, PowerK64::TABLE_BYTES), (4096, 4096));
    // Real addresses end where the page number does, or the CPU's own.
    let output = |output_bits| Power::<12> { output_bits }.output_bits();
    assert_eq!((PowerK4::default().output_bits(), output(51), output(64)), (57, 51, 57));
}

#[test]
fn a_page_size_the_format_lacks_is_refused_with_valid_ones() {
    let level = |bytes| PowerK64::level_of(size(bytes));
    assert_eq!([1 << 16, 2 << 20, 1 << 30].map(level), [Ok(0), Ok(1), Ok(2)]);
    for bytes in [4 << 10, 1 << 20, 16 << 20, 1 << 39] {
        let error = level(bytes).unwrap_err();
        assert_eq!((error.smallest.bytes(), error.largest.bytes()), (64 << 10, 1 << 30));
    }
    assert!(PowerK4::level_of(size(64 << 10)).is_err());
}

#[test]
fn a_leaf_advanced_by_a_page_is_the_next_addresss_leaf() {
    let leaf = |hpa| PowerK4::leaf(PowerK4::ACCESSED, 0, Hpa(hpa));
    for shift in 12..52 {
        let (here, next) = ((1 << shift) - 0x1000, 1 << shift);
        assert_eq!(PowerK4::further(leaf(here), 0x1000), leaf(next));
    }
}

#[test]
fn descriptors_go_up_by_one_step_up_to_each_end_of_a_field() {
    fn check<const P: u32>() {
        let leaf = |page: u64| Power::<P>::leaf(Power::<P>::ACCESSED, 0, Hpa(page << P));
        let step = Power::<P>::leaf(0, 0, Hpa(1 << P)) - Power::<P>::leaf(0, 0, Hpa(0));
        let mut ends = 0;
        for page in 1..1 << 12 {
            let even = leaf(page - 1).wrapping_add(step) == leaf(page);
            let end = Power::<P>::CARRY != 0 && (page << P).is_multiple_of(Power::<P>::CARRY);
            assert_eq!(even, !end, "{page:#x}");
            ends += u64::from(end);
        }
        assert_eq!(ends != 0, cfg!(target_endian = "little"));
    }
    check::<12>();
    check::<16>();
}

#[test]
fn a_partition_table_entry_is_the_doubleword_that_linux_stores() {
    // PATB_HR, radix__get_tree_size (5 << 5 and 2 << 61 for 52 bits), the root,
    // RADIX_PGD_INDEX_SIZE 13.
    let entry = |root| PowerK4::partition_entry(Hpa(root)).unwrap();
    assert_eq!(entry(0x8021_0000), 0xc000_0000_8021_00ad);
    assert_eq!(entry((1 << 60) - 0x1_0000), 0xcfff_ffff_ffff_00ad);
    assert_eq!(PowerK64::partition_entry(Hpa(0x8021_0000)), Ok(entry(0x8021_0000)));
    for root in [0x1000, 0x8000, 1 << 60, u64::MAX] {
        let error = RootError { root: Hpa(root) };
        assert_eq!(PowerK4::partition_entry(Hpa(root)), Err(error));
    }
    says(&RootError { root: Hpa(0x8000) }.to_string(), &["0x8000", "0x10000"]);
}

/// The fields that the manual gives for attributes, as numbers.
fn manual(a: Attributes, address: u64) -> Page {
    let bit = |software| u64::from(a.software.contains(software));
    Page {
        address,
        read: a.read,
        write: a.write,
        execute: a.execute == Execute::All,
        reference: a.accessed,
        change: a.dirty,
        att: match a.memory {
            Memory::Normal => 0b00,
            Memory::NonCacheable => 0b11,
            _ => 0b10,
        },
        software: bit(Software::A) << 2 | bit(Software::B) << 1,
    }
}

fn leaves_of<const P: u32>() {
    // Without the engine's own bit.
    let page = |raw, level| match CPU.decode(bytes(raw), Power::<P>::shift(level)) {
        Entry::Page(page) => Page { software: page.software & !8, ..page },
        other => panic!("{raw:#x} at {level}: {other:?}"),
    };
    let marks = Marks { split: false, dirty: true };
    let manual = |a, hpa, _| manual(a, hpa);
    let leaves =
        check_leaves(Power::<P>::default(), marks, page, manual, |a, reason| match reason {
            Some(AttributeError::NeedsRead) => assert!(a.write && !a.read),
            Some(AttributeError::MemoryType) => assert_eq!(a.memory, Memory::DeviceStrict),
            Some(AttributeError::ExecuteNeedsSplitRights) => {
                assert!(matches!(a.execute, Execute::User | Execute::Kernel));
            }
            Some(reason) => panic!("{reason}"),
            None => {}
        });
    assert_eq!(leaves, 3 * 384 * 3 / 4);
}

#[test]
fn leaves_are_the_manuals_in_every_combination() {
    leaves_of::<12>();
    leaves_of::<16>();
}

#[test]
fn entries_are_the_manuals_whatever_the_engine_records_in_them() {
    fn check<const P: u32>() {
        check_entries(&[Power::<P>::default()], 3, |raw, level| {
            match CPU.decode(bytes(raw), Power::<P>::shift(level)) {
                Entry::Directory(base, size) => {
                    assert_eq!(size, u64::from(Power::<P>::entries(level - 1).ilog2()));
                    assert!(!Power::<P>::all_pages(raw));
                    Some(base)
                }
                Entry::Invalid => {
                    // EAA, R and C: walks pass it quickly.
                    assert_eq!(word(raw) & 0x183, 0, "{raw:#x}");
                    None
                }
                other => panic!("{raw:#x} at {level}: {other:?}"),
            }
        });
        assert_eq!(Power::<P>::kind(Power::<P>::table(Hpa(0x1000), 1), 0), Kind::Frozen);
        assert!(Power::<P>::all_pages(Power::<P>::leaf(0, 0, Hpa(0))));
    }
    check::<12>();
    check::<16>();
}

/// The pages of a table are filled by runs of stores. A run ends where a byte of the address
/// overflows: within a table, and between tables.
fn runs<const P: u32>() {
    let page = 1 << P;
    on_stage::<Core<P, true>>((Power { output_bits: 48 }, 52, 90), |tables, guard, cache| {
        let (block, to) = (range(G, 2 * M), Hpa(6 * M));
        assert_eq!(guard.map(block, to, RAM, PageSize::SIZE_2M, cache), Ok(2 * M));
        assert_eq!(guard.split(block, size(page), cache), Ok(2 * M));
        // Across 2^24, 2^32 and 2^40 (and 2^16 before), each at another place of a table.
        let far = [24, 32, 40].map(|end| (1u64 << end) - (end - 15) * page);
        let mut expected = vec![(G, G + 2 * M, page, 6 * M)];
        for (n, hpa) in (0..).zip(far) {
            let at = range((3 + n) * G + 5 * page, 700 * page);
            assert_eq!(guard.map(at, Hpa(hpa), RAM, size(page), cache), Ok(700 * page));
            expected.push((at.start().0, at.end().0, page, hpa));
        }
        let tree = Core::<P, true>::of(tables).tree(tables.platform());
        let found: Vec<_> = tree.runs.iter().map(|r| (r.start, r.end, r.size, r.leaf.oa)).collect();
        assert_eq!(found, expected);
    });
}

#[test]
fn pages_translate_to_the_next_address_across_each_byte_of_it() {
    runs::<12>();
    runs::<16>();
}

#[test]
fn tables_without_a_cpu_hand_out_a_run_across_each_byte_as_one() {
    fn run<const P: u32>() {
        let platform = TestPlatform::new(BreakBeforeMake::Always);
        let format = Power::<P>::default();
        let mut tables = UnloadedTables::new(format, Vmid(1), 48, &platform).unwrap();
        let mut storage = [const { None }; 40];
        let mut cache = TableCache::new(&platform, &mut storage);
        cache.fill(40).unwrap();
        let at = range(2 * M, 600 << P);
        let hpa = (1 << 32) - (5 << P);
        assert_eq!(tables.map(at, Hpa(hpa), RAM, size(1 << P), &mut cache), Ok(600 << P));
        let mut gone = Vec::new();
        let done = tables.unmap(at, |run| gone.push((run.gpa.0, run.hpa.0, run.bytes)));
        assert_eq!((done, gone), (Ok(600 << P), vec![(2 * M, hpa, 600 << P)]));
        drop(cache);
        destroy(tables.activate());
        assert_eq!(platform.live(), 0);
    }
    run::<12>();
    run::<16>();
}

#[test]
fn a_table_of_64k_pages_has_32_entries_in_a_frame_of_4_kib() {
    on_stage::<Core<16, true>>((FORMAT, 52, 4), |tables, guard, cache| {
        let before = guard.counts().entries_written;
        let page = range(5 << 39, 64 * K);
        assert_eq!(guard.map(page, Hpa(0), RAM, size(64 * K), cache), Ok(64 * K));
        // 32, 512 and 512 entries, and the root's.
        assert_eq!(guard.counts().entries_written - before, 32 + 512 + 512 + 1);
        assert_eq!((cache.len(), tables.platform().live()), (1, 5));
        let core = Core::<16, true>::of(tables);
        assert_eq!((core.root().ptes, core.root().table % (64 * K)), (8192, 0));
        let tree = core.tree(tables.platform());
        assert_eq!(tree.tables.len(), 3);
        let (last, _) = tree.table(5 << 39, 1).unwrap();
        // After the last entry is the frame's earlier content.
        let words = tables.platform().table(last, 512);
        let of = |n: usize| words[n].load(std::sync::atomic::Ordering::SeqCst);
        assert_eq!((of(31), of(32) == 0), (0, false));
    });
}

#[test]
fn a_use_interrupts_until_relaxed_unless_hardware_sets_r_and_c() {
    fn uses<const SETS: bool>() {
        on_stage::<Core<16, SETS>>((FORMAT, 52, 3), |tables, guard, cache| {
            let (core, platform) = (Core::<16, SETS>::of(tables), guard.platform());
            let page = range(5 * 64 * K, 64 * K);
            guard.map(page, Hpa(0x8021_0000), CLEAN, size(64 * K), cache).unwrap();
            for (write, access, after) in [
                (false, Access::Read, 0xc000_0000_8021_0107),
                (true, Access::Write, 0xc000_0000_8021_0187),
            ] {
                let used = || core.access(platform, core.root(), 0x5_0123, write);
                if !SETS {
                    assert_eq!(used(), Used::Fault);
                    assert_eq!(relax(guard, page, access), Ok(64 * K));
                }
                assert_eq!(used(), Used::Done { start: 0x5_0000, end: 0x6_0000 });
                let (raw, found) = guard.descriptor(Gpa(0x5_0000)).unwrap();
                assert_eq!((word(raw), found), (after, size(64 * K)));
            }
            // After a harvest, the next write is marked, or interrupts, again.
            let mut bitmap = [0];
            assert_eq!((guard.harvest(page, &mut bitmap), bitmap), (Ok(1), [1]));
            let used = core.access(platform, core.root(), 0x5_0000, true);
            assert_eq!(used == Used::Fault, !SETS);
        });
    }
    uses::<true>();
    uses::<false>();
}
