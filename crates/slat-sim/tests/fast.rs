//! Tests of the fast machine: threads access real memory through the engine's tables.

#![cfg(target_os = "linux")]

use slat::format::{arm64::Arm64K4, arm64::Arm64K16, ept::Ept1G};
use slat::{
    Attributes, Execute, Format, Gpa, GpaRange, Guard, Hpa, PageSize, Platform, Reader, TableCache,
    Tables, UnmapBatch, UnmapEntry, Vmid,
};
use slat_sim::fast::{AccessError, CpuError, FastMachine, Why};
use slat_sim::{Access, Arch, Arm, Ept, Fault};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;

const VMID: Vmid = Vmid(3);
const GUEST: u64 = 0x8000_0000;
const PAGE: u64 = 0x1000;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Two pages at this distance share an entry of the TLB.
const CONFLICT: u64 = 4 * MIB;

const CLEAN: Attributes = Attributes { accessed: false, dirty: false, ..Attributes::RAM };

fn ept() -> (Ept, Ept1G) {
    (Ept::default(), Ept1G::default())
}

fn arm() -> (Arm, Arm64K4) {
    (Arm::new(12, 40), Arm64K4 { hardware_dirty: true, ..Arm64K4::default() })
}

fn machine<A: Arch>(arch: A, cpus: usize, memory: u64) -> FastMachine<A> {
    FastMachine::new(arch, cpus, memory, 4 * MIB).expect("the host maps memory")
}

fn tables<A: Arch, F: Format>(
    machine: &FastMachine<A>,
    format: F,
) -> Tables<'_, F, FastMachine<A>> {
    Tables::new(format, VMID, machine.arch().address_bits(), machine).expect("there are frames")
}

fn range(gpa: u64, bytes: u64) -> GpaRange {
    GpaRange::new(Gpa(gpa), bytes).expect("a range")
}

fn hpa<A: Arch>(machine: &FastMachine<A>, offset: u64) -> Hpa {
    Hpa(machine.memory_base().0 + offset)
}

fn map<F: Format, A: Arch>(
    guard: &mut Guard<'_, '_, F, FastMachine<A>>,
    machine: &FastMachine<A>,
    gpa: GpaRange,
    hpa: Hpa,
    attributes: Attributes,
) {
    let mut storage = [const { None }; 8];
    let mut cache = TableCache::new(machine, &mut storage);
    cache.fill(8).expect("there are frames");
    let shift = if machine.arch().leaf_level(30).is_some() { 30 } else { 25 };
    let largest = PageSize::from_bytes(1 << shift).expect("a power of two");
    guard.map(gpa, hpa, attributes, largest, &mut cache).expect("the range is free");
}

fn unmap<'p, F: Format, A: Arch>(
    tables: &Tables<'p, F, FastMachine<A>>,
    reader: &mut Reader<'p, FastMachine<A>>,
    gpa: GpaRange,
) {
    let mut storage = [UnmapEntry::EMPTY; 8];
    let mut batch = UnmapBatch::new(tables, &mut storage);
    tables.enter(reader).unwrap().unmap(gpa, &mut batch).expect("nothing is cut");
    assert_ne!(batch.complete().count(), 0);
}

fn fault<T>(result: Result<T, AccessError>) -> Option<Fault> {
    result.err().and_then(|error| error.fault())
}

fn write_lands<A: Arch, F: Format>(arch: A, format: F, block: u64) {
    let machine = machine(arch, 1, 1 << 30);
    let tables = tables(&machine, format);
    let mut reader = Reader::register(&machine).unwrap();
    let mut guard = tables.enter(&mut reader).unwrap();
    let mut cpu = machine.cpu(0).unwrap();
    cpu.load(VMID, tables.root());
    let page = 0x10000;
    map(&mut guard, &machine, range(GUEST, page), hpa(&machine, 2 * page), Attributes::RAM);
    map(&mut guard, &machine, range(4 << 30, block), hpa(&machine, 0), Attributes::RAM);

    cpu.write(GUEST + 0x18, 42).unwrap();
    assert_eq!(machine.read_host(hpa(&machine, 2 * page + 0x18)), 42);
    assert_eq!(cpu.read((4 << 30) + 2 * page + 0x18), Ok(42), "the same memory, elsewhere");
    assert_eq!(cpu.execute((4 << 30) + block - 8), Ok(0));
    let walks = cpu.walks();
    (0..512).for_each(|word| cpu.write(GUEST + word * 8, word).unwrap());
    assert_eq!(cpu.walks(), walks, "the TLB has it");
    let mut bytes = [0; 4096];
    machine.copy_out(hpa(&machine, 2 * page), &mut bytes);
    assert_eq!(bytes[511 * 8..], 511u64.to_ne_bytes());
    machine.discard(hpa(&machine, 2 * page), page).unwrap();
    assert_eq!(cpu.read(GUEST + 8), Ok(0));
    machine.copy_in(hpa(&machine, 2 * page), &bytes);
    assert_eq!(cpu.read(GUEST + 8), Ok(1));
}

#[test]
fn a_write_lands_in_the_memory_the_tables_name() {
    write_lands(ept().0, ept().1, GIB);
    write_lands(arm().0, arm().1, GIB);
    write_lands(Arm::new(14, 36), Arm64K16::default(), 32 * MIB);
}

fn marks<A: Arch, F: Format>(arch: A, format: F) {
    let machine = machine(arch, 1, 2 * MIB);
    let tables = tables(&machine, format);
    let mut reader = Reader::register(&machine).unwrap();
    let mut guard = tables.enter(&mut reader).unwrap();
    let mut cpu = machine.cpu(0).unwrap();
    cpu.load(VMID, tables.root());
    let page = range(GUEST, PAGE);
    map(&mut guard, &machine, page, hpa(&machine, 0), CLEAN);
    let state = |guard: &Guard<'_, '_, F, _>| {
        let attributes = guard.translate(Gpa(GUEST)).unwrap().unwrap().attributes;
        (attributes.accessed, attributes.dirty)
    };
    assert_eq!(state(&guard), (false, false));
    cpu.read(GUEST).unwrap();
    assert_eq!(state(&guard), (true, false));
    cpu.write(GUEST, 1).unwrap();
    assert_eq!(state(&guard), (true, true));

    let walks = cpu.walks();
    cpu.write(GUEST, 2).unwrap();
    assert_eq!(cpu.walks(), walks, "known to be dirty");
    let mut bitmap = [0];
    assert_eq!(guard.harvest(page, &mut bitmap), Ok(1));
    assert_eq!((state(&guard).1, bitmap), (false, [1]));
    cpu.write(GUEST, 3).unwrap();
    assert!(state(&guard).1, "no longer known to be dirty");
}

#[test]
fn hardware_marks_what_it_uses() {
    marks(ept().0, ept().1);
    marks(arm().0, arm().1);
}

#[test]
fn intels_walks_mark_the_tables_on_their_way() {
    let machine = machine(ept().0, 1, 2 * MIB);
    let tables = tables(&machine, ept().1);
    let mut reader = Reader::register(&machine).unwrap();
    let mut guard = tables.enter(&mut reader).unwrap();
    map(&mut guard, &machine, range(0, PAGE), hpa(&machine, 0), CLEAN);
    // SAFETY: the root stays allocated while the tables live.
    let root = unsafe { machine.entries(tables.root()).as_ref() };
    // The engine links tables with the bit set.
    let unused = root.load() & !(1 << 8);
    root.exchange(root.load(), unused).unwrap();
    let mut cpu = machine.cpu(0).unwrap();
    cpu.load(VMID, tables.root());
    cpu.read(0).unwrap();
    assert_eq!(root.load(), unused | 1 << 8);
}

#[test]
fn what_hardware_leaves_to_software_faults() {
    let arch = Arm { hardware_accessed: false, hardware_dirty: false, ..arm().0 };
    let machine = machine(arch, 1, 2 * MIB);
    let tables = tables(&machine, Arm64K4::default());
    let mut reader = Reader::register(&machine).unwrap();
    let mut guard = tables.enter(&mut reader).unwrap();
    let mut cpu = machine.cpu(0).unwrap();
    cpu.load(VMID, tables.root());
    let page = range(GUEST, PAGE);
    let old = Attributes { accessed: false, ..Attributes::RAM };
    map(&mut guard, &machine, page, hpa(&machine, 0), old);
    assert_eq!(fault(cpu.read(GUEST)), Some(Fault::Accessed));
    guard.relax(page, slat::Access::Read).map(slat::LocalFlush::not_needed_here).unwrap();
    assert_eq!(cpu.read(GUEST), Ok(0));
    guard.write_protect(page).unwrap();
    guard.invalidate();
    assert_eq!(fault(cpu.write(GUEST, 1)), Some(Fault::Permission));
    guard.relax(page, slat::Access::Write).map(slat::LocalFlush::not_needed_here).unwrap();
    assert_eq!(cpu.write(GUEST, 1), Ok(()));
}

#[test]
fn what_is_not_allowed_does_not_happen() {
    let machine = machine(ept().0, 1, 2 * MIB);
    let tables = tables(&machine, ept().1);
    let mut reader = Reader::register(&machine).unwrap();
    let mut guard = tables.enter(&mut reader).unwrap();
    let mut cpu = machine.cpu(0).unwrap();
    assert_eq!(fault(cpu.read(GUEST)), Some(Fault::Translation), "nothing is loaded");
    cpu.load(VMID, tables.root());
    let rights = Attributes { write: false, execute: Execute::None, ..Attributes::RAM };
    map(&mut guard, &machine, range(GUEST, PAGE), hpa(&machine, 0), rights);
    map(&mut guard, &machine, range(0, PAGE), tables.root(), Attributes::RAM);
    assert_eq!(cpu.read(GUEST), Ok(0));
    assert_eq!(fault(cpu.write(GUEST, 1)), Some(Fault::Permission));
    assert_eq!(fault(cpu.execute(GUEST)), Some(Fault::Permission));
    assert_eq!(fault(cpu.read(GUEST + PAGE)), Some(Fault::Translation));
    assert_eq!(fault(cpu.read(1 << 48)), Some(Fault::Translation));
    let (gpa, access) = (GUEST + 4, Access::Read);
    assert_eq!(cpu.read(gpa), Err(AccessError { gpa, access, reason: Why::Unaligned }));
    let reason = Why::NoMemory { hpa: tables.root().0 };
    assert_eq!(
        cpu.write(0, 1).map_err(|error| error.reason),
        Err(reason),
        "tables are no guest memory"
    );
    assert_eq!(machine.read_host(hpa(&machine, 0)), 0);
}

#[test]
fn a_cpu_is_one_threads() {
    let machine = machine(ept().0, 2, 2 * MIB);
    let first = machine.cpu(0).unwrap();
    assert_eq!(machine.cpu(0).err(), Some(CpuError::Taken));
    assert_eq!(machine.cpu(2).err(), Some(CpuError::Unknown { cpus: 2 }));
    drop(first);
    assert!(machine.cpu(0).is_ok());
}

fn stale<A: Arch, F: Format>(arch: A, format: F) {
    let machine = machine(arch, 1, 1 << 30);
    let tables = tables(&machine, format);
    let mut reader = Reader::register(&machine).unwrap();
    let mut cpu = machine.cpu(0).unwrap();
    cpu.load(VMID, tables.root());
    // A range that the TLB looks up; a larger one; one large entry; a block in pieces.
    for bytes in [PAGE, MIB, 2 * MIB, 1 << 30] {
        let gpa = range(4 << 30, bytes);
        let last = (4 << 30) + bytes - 8;
        let mut guard = tables.enter(&mut reader).unwrap();
        map(&mut guard, &machine, gpa, hpa(&machine, 0), Attributes::RAM);
        drop(guard);
        cpu.write(4 << 30, bytes).unwrap();
        cpu.read(last).unwrap();
        unmap(&tables, &mut reader, gpa);
        assert_eq!(fault(cpu.write(4 << 30, 1)), Some(Fault::Translation));
        assert_eq!(fault(cpu.read(last)), Some(Fault::Translation));
        assert_eq!(machine.read_host(hpa(&machine, 0)), bytes);
    }
    let (page, other) = (range(GUEST, PAGE), range(GUEST + PAGE, PAGE));
    let mut guard = tables.enter(&mut reader).unwrap();
    map(&mut guard, &machine, page, hpa(&machine, 0), Attributes::RAM);
    map(&mut guard, &machine, other, hpa(&machine, PAGE), Attributes::RAM);
    drop(guard);
    cpu.read(GUEST + PAGE).unwrap();
    // From round 10 on the CPU does not look, and misses more invalidations than it can look up.
    for round in 0..100 {
        unmap(&tables, &mut reader, page);
        let to = hpa(&machine, PAGE * (2 + round));
        machine.write_host(to, round);
        let mut guard = tables.enter(&mut reader).unwrap();
        map(&mut guard, &machine, page, to, Attributes::RAM);
        if round < 10 {
            let walks = cpu.walks();
            assert_eq!(cpu.read(GUEST), Ok(round));
            cpu.read(GUEST + PAGE).unwrap();
            assert_eq!(cpu.walks(), walks + 1, "the other page is still there");
        }
    }
    assert_eq!(cpu.read(GUEST), Ok(99));
    assert!(machine.service().invalidations >= 100);
}

#[test]
fn a_stale_entry_is_never_used_after_invalidation() {
    stale(ept().0, ept().1);
    stale(arm().0, arm().1);
}

/// Three threads write all the time. They walk once a round, at each write, and at every fourth
/// write.
fn no_late_store<A: Arch, F: Format>(arch: A, format: F, membarrier: bool) {
    const WRITERS: u64 = 3;
    const ROUNDS: u64 = 100;
    let mut machine = machine(arch, WRITERS as usize, 2 * ROUNDS * PAGE);
    machine.set_membarrier(membarrier);
    let machine = &machine;
    let tables = &tables(machine, format);
    let (stop, counter) = (&AtomicBool::new(false), &AtomicU64::new(1));
    let mut last = Vec::new();
    thread::scope(|scope| {
        for writer in 0..WRITERS {
            scope.spawn(move || {
                let mut cpu = machine.cpu(writer as usize).unwrap();
                cpu.load(VMID, tables.root());
                // Pages that share an entry evict each other.
                let other = GUEST + if writer == 1 { CONFLICT } else { 0 };
                while !stop.load(Relaxed) {
                    let value = counter.fetch_add(1, Relaxed);
                    if writer > 1 && value.is_multiple_of(2) {
                        cpu.load(VMID, tables.root());
                    }
                    for page in [GUEST, other] {
                        let result = cpu.write(page + 8 * writer, value);
                        assert!(matches!(fault(result), None | Some(Fault::Translation)));
                    }
                }
            });
        }
        let mut reader = Reader::register(machine).unwrap();
        for round in 0..ROUNDS {
            let to = [hpa(machine, 2 * round * PAGE), hpa(machine, (2 * round + 1) * PAGE)];
            let pages = [GUEST, GUEST + CONFLICT].map(|page| range(page, PAGE));
            let mut guard = tables.enter(&mut reader).unwrap();
            (0..2).for_each(|n| map(&mut guard, machine, pages[n], to[n], Attributes::RAM));
            drop(guard);
            let words = || to.into_iter().flat_map(|Hpa(at)| (0..WRITERS).map(move |n| at + 8 * n));
            while words().filter(|&at| machine.read_host(Hpa(at)) != 0).count() < 3 {
                thread::yield_now();
            }
            for (n, page) in pages.into_iter().enumerate() {
                unmap(tables, &mut reader, page);
                let now = (0..WRITERS).map(|writer| Hpa(to[n].0 + 8 * writer));
                last.extend(now.map(|at| (at, machine.read_host(at))));
            }
        }
        stop.store(true, Relaxed);
    });
    let late = last.iter().filter(|&&(at, was)| machine.read_host(at) != was).count();
    assert_eq!(late, 0, "words that changed after the invalidation had returned");
}

#[test]
fn no_store_arrives_after_the_invalidation_has_returned() {
    no_late_store(ept().0, ept().1, true);
    no_late_store(arm().0, arm().1, true);
}

#[test]
fn nor_does_one_where_the_kernel_has_no_membarrier() {
    no_late_store(ept().0, ept().1, false);
}

/// A migration: the copies made after each harvest must, in the end, equal the guest's memory.
fn migration<A: Arch, F: Format>(arch: A, format: F) {
    const PAGES: u64 = 64;
    let machine = &machine(arch, 2, PAGES * PAGE);
    let tables = &tables(machine, format);
    let guest = range(GUEST, PAGES * PAGE);
    let mut reader = Reader::register(machine).unwrap();
    map(&mut tables.enter(&mut reader).unwrap(), machine, guest, hpa(machine, 0), CLEAN);
    let stop = &AtomicBool::new(false);
    let mut copy = vec![[0u8; PAGE as usize]; PAGES as usize];
    let mut round = |guard: &mut Guard<'_, '_, F, FastMachine<A>>| {
        let mut bitmap = [0];
        guard.harvest(guest, &mut bitmap).unwrap();
        let dirty = (0..PAGES).filter(|page| bitmap[0] >> page & 1 == 1);
        dirty
            .for_each(|page| machine.copy_out(hpa(machine, page * PAGE), &mut copy[page as usize]));
    };
    thread::scope(|scope| {
        for writer in 0..2 {
            scope.spawn(move || {
                let mut cpu = machine.cpu(writer as usize).unwrap();
                cpu.load(VMID, tables.root());
                let mut value = 0u64;
                while !stop.load(Relaxed) {
                    value += 1;
                    let page = value.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58;
                    cpu.write(GUEST + page * PAGE + 8 * writer, value).unwrap();
                }
            });
        }
        (0..300).for_each(|_| round(&mut tables.enter(&mut reader).unwrap()));
        stop.store(true, Relaxed);
    });
    round(&mut tables.enter(&mut reader).unwrap());
    for (page, copy) in copy.iter().enumerate() {
        let mut now = [0; PAGE as usize];
        machine.copy_out(hpa(machine, page as u64 * PAGE), &mut now);
        assert!(now == *copy, "page {page} was written, and no harvest said so");
    }
}

#[test]
fn no_write_is_missing_from_the_harvests_of_a_migration() {
    migration(ept().0, ept().1);
    migration(arm().0, arm().1);
}
