//! KVM's operations on the adversarial machine.

#[path = "../../../tests/seed.rs"]
mod seed;

#[path = "machine/broken.rs"]
mod broken;

use slat::format::arm64::{Arm64K4, Shareability};
use slat::{Frame, Gpa, GpaRange, Hpa, Invalidation, Platform, Pte, Vmid};
use slat_linux::{DEVICE, EXECUTE, Errno, NORMAL_NC, READ, Stage2, WRITE};
use slat_sim::{Access, Arm, Machine};

const VMID: Vmid = Vmid(1);
const BITS: u32 = 39;
const RAM: u64 = 0x4000_0000;
const BASE: u64 = 0x8000_0000;
const PAGE: u64 = 4096;
const BLOCK: u64 = 2 << 20;
const ALL: u64 = READ | WRITE | EXECUTE;

fn machine(forced_write_back: bool) -> Machine<Arm> {
    let arm = Arm { hardware_dirty: false, forced_write_back, ..Arm::new(12, BITS) };
    let machine = Machine::new(arm, 2);
    machine.give(Hpa(RAM), 64 << 20);
    machine
}

struct Vm<'p> {
    machine: &'p Machine<Arm>,
    stage2: Stage2<'p, Arm64K4, Machine<Arm>>,
}

fn range(gpa: u64, bytes: u64) -> GpaRange {
    GpaRange::new(Gpa(gpa), bytes).unwrap()
}

impl<'p> Vm<'p> {
    fn new(machine: &'p Machine<Arm>) -> Self {
        let format = Arm64K4 {
            forced_write_back: machine.arch().forced_write_back,
            hardware_dirty: false,
            split_execute: false,
            shareability: Shareability::Inner,
            output_bits: 40,
        };
        let stage2 = Stage2::new(format, BITS, machine).unwrap();
        (0..2).for_each(|cpu| machine.cpu(cpu).load(VMID, stage2.tables().root()));
        Self { machine, stage2 }
    }

    /// A page of KVM's memory cache: zeroed.
    fn page(&self) -> Option<Frame> {
        let frame = self.machine.allocate(4096)?;
        let ptes = self.machine.entries(frame.hpa()).as_ptr();
        // SAFETY: the frame has 512 entries, and is this function's own.
        let ptes = unsafe { std::slice::from_raw_parts_mut(ptes, 512) };
        ptes.iter_mut().for_each(|pte: &mut Pte| pte.set(0));
        Some(frame)
    }

    /// A fault of CPU 0, answered with the memory at the same offset.
    fn fault(&self, gpa: u64, size: u64, prot: u64) -> Result<(), Errno> {
        self.machine.here(0);
        self.map(gpa, size, RAM + (gpa - BASE), prot)
    }

    fn map(&self, gpa: u64, size: u64, hpa: u64, prot: u64) -> Result<(), Errno> {
        self.stage2.map(gpa, size, hpa, prot, &mut || self.page())
    }

    /// Takes the right to write, and flushes as KVM does when it has protected a memslot.
    fn protect(&self, gpa: u64, bytes: u64) {
        self.stage2.wrprotect(gpa, bytes).unwrap();
        self.flush();
        self.machine.protect(VMID, range(gpa, bytes));
    }

    fn flush(&self) {
        let all = Invalidation { vmid: VMID, range: None, leaf: None, tables: true };
        self.machine.invalidate(&all);
    }

    fn raw(&self, gpa: u64) -> u64 {
        // SAFETY: nothing reclaims.
        unsafe { self.stage2.tables().enter_unchecked() }.descriptor(Gpa(gpa)).unwrap().0
    }

    fn size(&self, gpa: u64) -> u64 {
        // SAFETY: as above.
        unsafe { self.stage2.tables().enter_unchecked() }.descriptor(Gpa(gpa)).unwrap().1.bytes()
    }

    /// Ends a grace period.
    fn readers(&self) -> usize {
        // SAFETY: no other thread exists.
        unsafe { self.stage2.take_retired().free(self.machine) }
    }

    fn unmap(&self, gpa: u64, bytes: u64) {
        self.stage2.unmap(gpa, bytes).unwrap();
        self.machine.take_back(Hpa(RAM + (gpa - BASE)), bytes);
        self.machine.give(Hpa(RAM + (gpa - BASE)), bytes);
    }

    /// Ends the VM; no table is left.
    fn end(self) {
        (0..2).for_each(|cpu| self.machine.cpu(cpu).unload());
        self.flush();
        // SAFETY: no CPU has them loaded.
        let mut tables = unsafe { self.stage2.into_unloaded() };
        let mut calls = 1;
        while !tables.destroy_some(1) {
            calls += 1;
        }
        assert!(calls > 1, "no table was below the root");
        tables.destroy();
        assert_eq!(self.machine.frames(), 0);
        let violations = self.machine.finish();
        assert!(violations.is_empty(), "{violations:?}");
    }
}

#[test]
fn a_fault_maps_and_a_permission_fault_gives_rights() {
    let machine = machine(true);
    let vm = Vm::new(&machine);
    assert!(machine.cpu(0).read(BASE).is_err());
    vm.fault(BASE, PAGE, READ).unwrap();
    assert_eq!(machine.cpu(0).read(BASE), Ok(Hpa(RAM)));
    assert!(machine.cpu(0).write(BASE).is_err());
    assert_eq!(vm.fault(BASE, PAGE, ALL), Err(Errno::AGAIN), "rights are not map's to give");
    machine.here(0);
    vm.stage2.relax(BASE, ALL).unwrap();
    machine.claim_progress(0, Gpa(BASE), Access::Write);
    assert_eq!(machine.cpu(0).write(BASE), Ok(Hpa(RAM)));
    assert_eq!(machine.cpu(0).execute(BASE), Ok(Hpa(RAM)));
    assert_eq!(vm.stage2.relax(BASE + PAGE, ALL), Err(Errno::AGAIN));
    vm.end();
}

#[test]
fn what_kvm_cannot_map_is_refused_and_nothing_is_there() {
    let machine = machine(true);
    let vm = Vm::new(&machine);
    vm.fault(BASE + BLOCK, PAGE, READ).unwrap();
    for prot in [READ | EXECUTE | DEVICE, READ | DEVICE | NORMAL_NC, READ | 1 << 55] {
        assert_eq!(vm.fault(BASE, PAGE, prot), Err(Errno::INVALID));
    }
    assert_eq!(vm.fault(BASE, 3 * PAGE, READ), Err(Errno::INVALID));
    assert_eq!(vm.map(u64::MAX - 1, PAGE, RAM, READ), Err(Errno::INVALID));
    assert_eq!(vm.stage2.unmap(u64::MAX, PAGE), Err(Errno::INVALID));
    let none = &mut || None;
    assert_eq!(vm.stage2.map(BASE, PAGE, RAM, READ, none), Err(Errno::NO_MEMORY));
    assert_eq!(vm.stage2.map(BASE + BLOCK + PAGE, PAGE, RAM, READ, none), Ok(()));
    vm.end();
}

#[test]
fn after_wrprotect_and_the_flush_every_write_faults() {
    let machine = machine(true);
    let vm = Vm::new(&machine);
    for at in 0..8 {
        vm.fault(BASE + at * PAGE, PAGE, ALL).unwrap();
        machine.cpu((at % 2) as usize).write(BASE + at * PAGE).unwrap();
    }
    vm.protect(BASE, 8 * PAGE);
    assert!(machine.cpu(1).write(BASE + PAGE).is_err());
    machine.unprotect(VMID, range(BASE + PAGE, PAGE));
    machine.here(1);
    vm.stage2.relax(BASE + PAGE, READ | WRITE).unwrap();
    assert!(machine.cpu(1).write(BASE + PAGE).is_ok());
    vm.end();
}

#[test]
fn a_page_fault_in_a_block_splits_it_and_keeps_its_neighbours() {
    let machine = machine(true);
    let vm = Vm::new(&machine);
    vm.fault(BASE, BLOCK, ALL).unwrap();
    vm.protect(BASE, BLOCK);
    machine.unprotect(VMID, range(BASE + 5 * PAGE, PAGE));
    vm.fault(BASE + 5 * PAGE, PAGE, ALL).unwrap();
    assert_eq!(machine.cpu(0).write(BASE + 5 * PAGE), Ok(Hpa(RAM + 5 * PAGE)));
    for at in [0, 4, 6, 511] {
        assert_eq!(machine.cpu(1).read(BASE + at * PAGE), Ok(Hpa(RAM + at * PAGE)));
        assert!(machine.cpu(1).write(BASE + at * PAGE).is_err());
    }
    vm.end();
}

#[test]
fn a_block_replaces_a_table_and_a_grace_period_frees_the_table() {
    let machine = machine(true);
    let vm = Vm::new(&machine);
    vm.fault(BASE + 3 * BLOCK, PAGE, ALL).unwrap();
    for at in [0, 7, 511] {
        vm.fault(BASE + at * PAGE, PAGE, ALL).unwrap();
        machine.cpu(1).read(BASE + at * PAGE).unwrap();
    }
    let before = machine.frames();
    vm.fault(BASE, BLOCK, ALL).unwrap();
    assert_eq!(vm.size(BASE + 9 * PAGE), BLOCK);
    assert_eq!(machine.cpu(0).write(BASE + 9 * PAGE), Ok(Hpa(RAM + 9 * PAGE)));
    assert_eq!(machine.frames(), before, "a walker may still be in it");
    assert!(vm.stage2.has_retired());
    assert_eq!(vm.readers(), 1);
    assert_eq!(machine.frames(), before - 1);
    assert!(!vm.stage2.has_retired());
    vm.end();
}

/// The calls of a thread that may be in a table while a fault puts a block in its place.
#[test]
fn faults_and_ageing_in_a_table_being_replaced_keep_the_block() {
    for (call, nth) in (0..4).flat_map(|call| (1..12).map(move |nth| (call, nth))) {
        let machine: &'static Machine<Arm> = Box::leak(Box::new(machine(true)));
        let vm: &'static Vm<'static> = Box::leak(Box::new(Vm::new(machine)));
        (0..8).for_each(|at| vm.fault(BASE + at * PAGE, PAGE, ALL).unwrap());
        vm.protect(BASE, 8 * PAGE);
        machine.unprotect(VMID, range(BASE, BLOCK));
        let mut calls = 0;
        machine.meanwhile(move |machine, _| {
            calls += 1;
            _ = machine.cpu(1).write(BASE + 2 * PAGE);
            if calls == nth {
                let page = BASE + 2 * PAGE;
                machine.here(1);
                match call {
                    0 => _ = vm.stage2.relax(page, ALL),
                    1 => _ = vm.map(BASE + 9 * PAGE, PAGE, RAM + 9 * PAGE, ALL),
                    2 => _ = vm.stage2.age(BASE, 16 * PAGE, true),
                    _ => _ = vm.map(BASE, BLOCK, RAM, ALL),
                }
                machine.here(0);
            }
        });
        let mapped = vm.fault(BASE, BLOCK, ALL);
        machine.undisturbed();
        assert!(mapped == Ok(()) || call == 3 && mapped == Err(Errno::AGAIN), "{mapped:?}");
        // A page that is mapped afterwards splits the block.
        assert!(vm.size(BASE) == BLOCK || call == 1);
        for at in [0, 2, 9] {
            assert_eq!(machine.cpu(1).write(BASE + at * PAGE), Ok(Hpa(RAM + at * PAGE)));
        }
        vm.readers();
        let violations = machine.violations();
        assert!(violations.is_empty(), "{call}, {nth}: {violations:?}");
    }
}

#[test]
fn an_unmap_that_cuts_a_block_takes_all_of_it() {
    let machine = machine(true);
    let vm = Vm::new(&machine);
    vm.fault(BASE, BLOCK, ALL).unwrap();
    machine.cpu(1).write(BASE).unwrap();
    vm.stage2.unmap(BASE + 8 * PAGE, PAGE).unwrap();
    machine.take_back(Hpa(RAM), BLOCK);
    assert!(machine.cpu(1).read(BASE).is_err());
    vm.fault(BASE + BLOCK, PAGE, ALL).unwrap();
    vm.end();
}

#[test]
fn what_cuts_a_block_spares_the_pages_before_it() {
    let machine = machine(true);
    let vm = Vm::new(&machine);
    vm.fault(BASE + 7 * PAGE, PAGE, ALL).unwrap();
    vm.fault(BASE + BLOCK, BLOCK, ALL).unwrap();
    let (from, bytes) = (BASE + 8 * PAGE, BLOCK);
    assert!(vm.stage2.age(from, bytes, true), "the block is used");
    assert!(!vm.stage2.age(from, bytes, false), "all of it is old now");
    assert!(vm.stage2.age(BASE, from - BASE, false), "the page before is not");
    vm.stage2.wrprotect(from, bytes).unwrap();
    vm.flush();
    assert!(machine.cpu(0).write(BASE + 7 * PAGE).is_ok());
    vm.stage2.unmap(from, bytes).unwrap();
    assert_eq!(machine.cpu(0).read(BASE + 7 * PAGE), Ok(Hpa(RAM + 7 * PAGE)));
    assert!(machine.cpu(0).read(BASE + 2 * BLOCK - PAGE).is_err());
    vm.end();
}

#[test]
fn an_unmap_without_forced_write_back_cleans_memory_first() {
    let machine = machine(false);
    let vm = Vm::new(&machine);
    // Every other page, so that there are more runs than an unmap keeps.
    for at in (0..32).step_by(2) {
        machine.host_write(Hpa(RAM + at * PAGE));
        vm.fault(BASE + at * PAGE, PAGE, ALL).unwrap();
        // The caches get a copy, which the uncached write leaves behind.
        machine.cpu(0).read(BASE + at * PAGE).unwrap();
        machine.cpu(1).access_uncached(BASE + at * PAGE, Access::Write).unwrap();
    }
    vm.stage2.unmap(BASE, 32 * PAGE).unwrap();
    (0..32).step_by(2).for_each(|at| machine.host_read(Hpa(RAM + at * PAGE)));
    vm.fault(BASE + 3 * BLOCK, PAGE, ALL).unwrap();
    vm.end();
}

#[test]
fn a_used_page_is_young_until_it_is_aged() {
    let machine = machine(true);
    let vm = Vm::new(&machine);
    for at in 0..4 {
        vm.fault(BASE + at * PAGE, PAGE, ALL).unwrap();
    }
    assert!(vm.stage2.age(BASE, 4 * PAGE, true));
    assert!(!vm.stage2.age(BASE, 4 * PAGE, false));
    assert_eq!(vm.stage2.mkyoung(BASE + 2 * PAGE), vm.raw(BASE + 2 * PAGE));
    assert!(!vm.stage2.age(BASE, PAGE, false) && vm.stage2.age(BASE + 2 * PAGE, PAGE, true));
    assert!(!vm.stage2.age(BASE + 2 * PAGE, PAGE, false));
    assert_eq!(vm.stage2.mkyoung(BASE + 9 * PAGE), 0);
    vm.end();
}

#[test]
fn a_split_takes_pages_from_the_cache_as_long_as_it_has_some() {
    let machine = machine(true);
    let vm = Vm::new(&machine);
    for block in 0..24 {
        vm.fault(BASE + block * BLOCK, BLOCK, ALL).unwrap();
    }
    let mut left = 5;
    let mut few = || {
        left = u64::checked_sub(left, 1)?;
        vm.page()
    };
    assert_eq!(vm.stage2.split(BASE, 24 * BLOCK, &mut few), Err(Errno::NO_MEMORY));
    let sizes = (0..24).map(|block| vm.size(BASE + block * BLOCK));
    assert_eq!(sizes.filter(|size| *size == PAGE).count(), 5);
    vm.stage2.split(BASE, 24 * BLOCK, &mut || vm.page()).unwrap();
    for block in 0..24 {
        assert_eq!(vm.size(BASE + block * BLOCK), PAGE);
        let gpa = block * BLOCK + 17 * PAGE;
        assert_eq!(machine.cpu(1).write(BASE + gpa), Ok(Hpa(RAM + gpa)));
    }
    vm.end();
}

/// What the guest may do with a page, by KVM's calls alone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct PageRights {
    hpa: u64,
    write: bool,
}

#[test]
fn histories_leave_what_kvm_asked_for() {
    for seed in seed::seeds(6) {
        let machine = machine(seed & 1 == 0).random(seed);
        let vm = Vm::new(&machine);
        vm.fault(BASE + 31 * BLOCK, PAGE, ALL).unwrap();
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut random = |below: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 20) % below
        };
        let mut model = std::collections::BTreeMap::<u64, PageRights>::new();
        for _ in 0..150 {
            let page = random(3) * 512 + if random(2) == 0 { random(8) } else { random(512) };
            let gpa = BASE + page * PAGE;
            let block = page & !511;
            match random(9) {
                0..3 => {
                    let write = random(3) != 0;
                    let prot = if write { ALL } else { READ };
                    machine.unprotect(VMID, range(gpa, PAGE));
                    let inside = model.contains_key(&page);
                    match vm.fault(gpa, PAGE, prot) {
                        Ok(()) => {
                            let old = model.get(&page).is_some_and(|known| known.write);
                            let known = PageRights { hpa: RAM + page * PAGE, write: write || old };
                            model.insert(page, known);
                        }
                        Err(errno) => assert!(inside && errno == Errno::AGAIN, "{seed}"),
                    }
                }
                3 => {
                    let of_block = BASE + block * PAGE;
                    machine.unprotect(VMID, range(of_block, BLOCK));
                    if vm.fault(of_block, BLOCK, ALL).is_ok() {
                        for page in block..block + 512 {
                            model.insert(page, PageRights { hpa: RAM + page * PAGE, write: true });
                        }
                    }
                }
                4 => {
                    let whole = vm.size(gpa) == BLOCK && model.contains_key(&page);
                    vm.protect(gpa, PAGE);
                    let pages = if whole { block..block + 512 } else { page..page + 1 };
                    for (_, known) in model.range_mut(pages) {
                        known.write = false;
                    }
                }
                5 => {
                    machine.unprotect(VMID, range(gpa, PAGE));
                    machine.here(0);
                    let whole = vm.size(gpa) == BLOCK && model.contains_key(&page);
                    let relaxed = vm.stage2.relax(gpa, ALL);
                    assert_eq!(relaxed.is_ok(), model.contains_key(&page), "{seed}");
                    let pages = if whole { block..block + 512 } else { page..page + 1 };
                    machine.unprotect(
                        VMID,
                        range(BASE + pages.start * PAGE, if whole { BLOCK } else { PAGE }),
                    );
                    for (_, known) in model.range_mut(pages) {
                        known.write = true;
                    }
                }
                6 => {
                    let whole = vm.size(gpa) == BLOCK && model.contains_key(&page);
                    let (from, bytes) = if whole { (block, BLOCK) } else { (page, PAGE) };
                    vm.unmap(BASE + from * PAGE, bytes);
                    model.retain(|page, _| !(from..from + bytes / PAGE).contains(page));
                }
                7 => {
                    _ = vm.stage2.split(BASE + block * PAGE, BLOCK, &mut || vm.page());
                }
                _ => {
                    vm.stage2.age(gpa, PAGE << random(4), random(2) == 0);
                    vm.readers();
                }
            }
            for (page, known) in model.iter().step_by(97) {
                let cpu = machine.cpu((page % 2) as usize);
                // A CPU that holds older rights faults once more, as a guest would.
                let hpa = cpu.read(BASE + page * PAGE).or_else(|_| {
                    machine.here((page % 2) as usize);
                    vm.stage2.mkyoung(BASE + page * PAGE);
                    vm.flush();
                    cpu.read(BASE + page * PAGE)
                });
                assert_eq!(hpa, Ok(Hpa(known.hpa)), "seed {seed}");
                let writes = vm.raw(BASE + page * PAGE) & 1 << 7 != 0;
                assert_eq!(writes, known.write, "seed {seed}, page {page}");
            }
            let violations = machine.violations();
            assert!(violations.is_empty(), "seed {seed}: {violations:?}");
        }
        vm.end();
    }
}
