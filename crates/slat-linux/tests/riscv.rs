//! Faults of KVM on RISC-V's adversarial harts, which cache invalid entries.

#[path = "../../../tests/seed.rs"]
mod seed;

use slat::format::riscv::{Mode, RiscV};
use slat::{Frame, Gpa, GpaRange, Hpa, Invalidation, Platform, Pte, Vmid};
use slat_linux::{EXECUTE, Errno, FaultAnswer, Leaf, READ, Stage2, WRITE};
use slat_sim::{Access, Machine, RiscV as Hart};
use std::collections::BTreeMap;

const VMID: Vmid = Vmid(1);
const RAM: u64 = 0x4000_0000;
const BASE: u64 = 0x8000_0000;
const PAGE: u64 = 4096;
const BLOCK: u64 = 2 << 20;
const READS: u64 = READ | EXECUTE;
const ALL: u64 = READS | WRITE;

/// Harts of each mode, with and without Svadu and Svvptc.
fn harts() -> impl Iterator<Item = Hart> {
    (0..12).map(|at| Hart {
        levels: 3 + (at % 3),
        hardware_marks: at / 3 % 2 == 0,
        svvptc: at / 6 == 0,
        ..Hart::default()
    })
}

fn machine(hart: Hart) -> Machine<Hart> {
    let machine = Machine::new(hart, 2);
    machine.give(Hpa(RAM), 64 << 20);
    machine
}

struct Vm<'p> {
    machine: &'p Machine<Hart>,
    tables: Stage2<'p, RiscV, Machine<Hart>>,
}

fn range(gpa: u64, bytes: u64) -> GpaRange {
    GpaRange::new(Gpa(gpa), bytes).unwrap()
}

impl<'p> Vm<'p> {
    fn new(machine: &'p Machine<Hart>) -> Self {
        let modes = [Mode::Sv39x4, Mode::Sv48x4, Mode::Sv57x4];
        let widest = modes[usize::from(machine.arch().levels) - 3];
        let format = RiscV { widest, ..RiscV::default() };
        let tables = Stage2::new(format, widest.address_bits(), machine).unwrap();
        (0..2).for_each(|hart| machine.cpu(hart).load(VMID, tables.tables().root()));
        Self { machine, tables }
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

    /// A fault of a hart, answered with the memory at the same offset.
    fn fault(&self, hart: usize, gpa: u64, size: u64, prot: u64) -> Result<FaultAnswer, Errno> {
        self.machine.here(hart);
        let start = gpa & !(size - 1);
        let leaf = Leaf { gpa: start, size, hpa: RAM + (start - BASE), prot };
        self.tables.fault(gpa, leaf, self.machine.arch().svvptc, &mut || self.page())
    }

    /// Takes the right to write, and fences as KVM does when it has protected a memslot.
    fn protect(&self, gpa: u64, bytes: u64) {
        self.tables.wrprotect(gpa, bytes).unwrap();
        let all = Invalidation { vmid: VMID, range: None, leaf: None, tables: true };
        self.machine.invalidate(&all);
        self.machine.protect(VMID, range(gpa, bytes));
    }

    fn size(&self, gpa: u64) -> u64 {
        // SAFETY: nothing reclaims.
        unsafe { self.tables.tables().enter_unchecked() }.descriptor(Gpa(gpa)).unwrap().1.bytes()
    }

    /// Ends a grace period.
    fn readers(&self) -> usize {
        // SAFETY: no other thread exists.
        unsafe { self.tables.take_retired().free(self.machine) }
    }

    fn end(self) {
        (0..2).for_each(|hart| self.machine.cpu(hart).unload());
        self.machine.invalidate(&Invalidation {
            vmid: VMID,
            range: None,
            leaf: None,
            tables: true,
        });
        // SAFETY: no hart has them loaded.
        unsafe { self.tables.into_unloaded() }.destroy();
        assert_eq!(self.machine.frames(), 0);
        let violations = self.machine.finish();
        assert!(violations.is_empty(), "{violations:?}");
    }
}

#[test]
fn a_fault_lets_its_hart_go_on_whatever_that_hart_has_cached() {
    for hart in harts() {
        let machine = machine(hart);
        let vm = Vm::new(&machine);
        // Both harts have found the links invalid.
        (0..2).for_each(|hart| assert!(machine.cpu(hart).read(BASE).is_err()));
        assert_eq!(vm.fault(0, BASE, PAGE, READS), Ok(FaultAnswer::Mapped));
        machine.claim_progress(0, Gpa(BASE), Access::Read);
        assert_eq!(
            vm.fault(1, BASE, PAGE, READS),
            Ok(FaultAnswer::Rights),
            "it was another hart's"
        );
        machine.claim_progress(1, Gpa(BASE), Access::Read);
        assert_eq!(machine.cpu(1).read(BASE), Ok(Hpa(RAM)));
        for hart in [0, 1] {
            assert!(machine.cpu(hart).write(BASE).is_err() || hart == 1);
            assert_eq!(vm.fault(hart, BASE, PAGE, ALL), Ok(FaultAnswer::Rights));
            machine.claim_progress(hart, Gpa(BASE), Access::Write);
            assert_eq!(machine.cpu(hart).write(BASE), Ok(Hpa(RAM)));
        }
        assert_eq!(machine.cpu(0).execute(BASE), Ok(Hpa(RAM)));
        vm.end();
    }
}

#[test]
fn an_aged_page_is_used_again_after_a_fault_or_without_one() {
    for hart in harts() {
        let machine = machine(hart);
        let vm = Vm::new(&machine);
        vm.fault(0, BASE, PAGE, ALL).unwrap();
        machine.cpu(0).read(BASE).unwrap();
        assert!(vm.tables.age(BASE, PAGE, true) && !vm.tables.age(BASE, PAGE, false));
        let all = Invalidation { vmid: VMID, range: None, leaf: None, tables: true };
        machine.invalidate(&all);
        if machine.cpu(0).read(BASE).is_err() {
            assert!(!hart.hardware_marks);
            assert_eq!(vm.fault(0, BASE, PAGE, ALL), Ok(FaultAnswer::Rights));
            assert_eq!(machine.cpu(0).read(BASE), Ok(Hpa(RAM)));
        }
        assert!(vm.tables.age(BASE, PAGE, false));
        vm.end();
    }
}

#[test]
fn a_page_splits_its_block_under_a_log_and_a_block_replaces_it() {
    for hart in harts() {
        let machine = machine(hart);
        let vm = Vm::new(&machine);
        let page = BASE + 5 * PAGE;
        assert_eq!(vm.fault(0, page, BLOCK, ALL), Ok(FaultAnswer::Mapped));
        (0..2).for_each(|hart| _ = machine.cpu(hart).write(page));
        vm.protect(BASE, BLOCK);
        assert!(machine.cpu(0).write(page).is_err());
        machine.unprotect(VMID, range(page, PAGE));
        assert_eq!(vm.fault(0, page, PAGE, ALL), Ok(FaultAnswer::Split));
        machine.claim_progress(0, Gpa(page), Access::Write);
        assert_eq!(machine.cpu(0).write(page), Ok(Hpa(RAM + 5 * PAGE)));
        for at in [0, 4, 6, 511] {
            assert_eq!(machine.cpu(1).read(BASE + at * PAGE), Ok(Hpa(RAM + at * PAGE)));
            assert!(machine.cpu(1).write(BASE + at * PAGE).is_err());
        }
        machine.unprotect(VMID, range(BASE, BLOCK));
        assert_eq!(vm.fault(1, BASE, BLOCK, ALL), Ok(FaultAnswer::Joined));
        machine.claim_progress(1, Gpa(BASE), Access::Write);
        assert_eq!((vm.size(page), vm.readers()), (BLOCK, 1));
        vm.end();
    }
}

#[test]
fn a_fault_without_memory_for_tables_changes_nothing() {
    let machine = machine(Hart::default());
    let vm = Vm::new(&machine);
    machine.here(0);
    let leaf = Leaf { gpa: BASE, size: PAGE, hpa: RAM, prot: ALL };
    assert_eq!(vm.tables.fault(BASE, leaf, false, &mut || None), Err(Errno::NO_MEMORY));
    let outside = Leaf { gpa: 1 << 60, ..leaf };
    assert_eq!(vm.tables.fault(1 << 60, outside, false, &mut || None), Err(Errno::INVALID));
    let unknown = Leaf { prot: ALL | 1 << 40, ..leaf };
    assert_eq!(vm.tables.fault(BASE, unknown, false, &mut || vm.page()), Err(Errno::INVALID));
    vm.fault(0, BASE, PAGE, ALL).unwrap();
    vm.end();
}

#[test]
fn faults_of_two_harts_in_a_block_being_split_log_every_write() {
    for (hart, nth) in harts().flat_map(|hart| (1..9).map(move |nth| (hart, nth))) {
        let machine: &'static Machine<Hart> = Box::leak(Box::new(machine(hart)));
        let vm: &'static Vm<'static> = Box::leak(Box::new(Vm::new(machine)));
        vm.fault(0, BASE, BLOCK, ALL).unwrap();
        vm.protect(BASE, BLOCK);
        let pages = [BASE + PAGE, BASE + 2 * PAGE];
        pages.iter().for_each(|page| machine.unprotect(VMID, range(*page, PAGE)));
        let mut calls = 0;
        machine.meanwhile(move |_, _| {
            calls += 1;
            if calls == nth {
                _ = vm.fault(1, pages[1], PAGE, ALL);
                vm.machine.here(0);
            }
        });
        _ = vm.fault(0, pages[0], PAGE, ALL);
        machine.undisturbed();
        for (hart, page) in pages.into_iter().enumerate() {
            while machine.cpu(hart).write(page).is_err() {
                _ = vm.fault(hart, page, PAGE, ALL);
            }
        }
        assert!(machine.cpu(0).write(BASE).is_err() && machine.cpu(1).write(BASE).is_err());
        let violations = machine.violations();
        assert!(violations.is_empty(), "{hart:?}, {nth}: {violations:?}");
    }
}

#[test]
fn histories_of_faults_give_each_hart_what_kvm_decided() {
    for seed in seed::seeds(6) {
        let hart = harts().nth((seed % 12) as usize).unwrap();
        let machine = machine(hart).random(seed);
        let vm = Vm::new(&machine);
        vm.fault(0, BASE + 31 * BLOCK, PAGE, ALL).unwrap();
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut random = |below: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 20) % below
        };
        // Which pages are mapped, and may be written.
        let mut model = BTreeMap::<u64, bool>::new();
        for _ in 0..150 {
            let page = random(3) * 512 + if random(2) == 0 { random(8) } else { random(512) };
            let (gpa, block) = (BASE + page * PAGE, page & !511);
            let hart = random(2) as usize;
            let whole = vm.size(gpa) == BLOCK && model.contains_key(&page);
            let (from, pages) = if whole { (block, 512) } else { (page, 1) };
            match random(8) {
                0..4 => {
                    let write = random(3) != 0;
                    machine.unprotect(VMID, range(gpa, PAGE));
                    let given = vm.fault(hart, gpa, PAGE, if write { ALL } else { READS });
                    assert!(given.is_ok(), "seed {seed}: {given:?}");
                    *model.entry(page).or_default() |= write;
                    let access = if write { Access::Write } else { Access::Read };
                    machine.claim_progress(hart, Gpa(gpa), access);
                    assert!(machine.cpu(hart).access(gpa, access).is_ok(), "seed {seed}");
                }
                4 => {
                    machine.unprotect(VMID, range(BASE + block * PAGE, BLOCK));
                    assert!(vm.fault(hart, gpa, BLOCK, ALL).is_ok(), "seed {seed}");
                    model.extend((block..block + 512).map(|page| (page, true)));
                }
                5 => {
                    vm.protect(gpa, PAGE);
                    model.range_mut(from..from + pages).for_each(|(_, write)| *write = false);
                }
                6 => {
                    vm.tables.unmap(gpa, PAGE).unwrap();
                    let memory = Hpa(RAM + from * PAGE);
                    machine.take_back(memory, pages * PAGE);
                    machine.give(memory, pages * PAGE);
                    model.retain(|page, _| !(from..from + pages).contains(page));
                }
                _ => {
                    vm.tables.age(gpa, PAGE << random(4), random(2) == 0);
                    _ = vm.tables.split(BASE + block * PAGE, BLOCK, &mut || vm.page());
                    vm.readers();
                }
            }
            for (page, write) in model.iter().step_by(97) {
                let (gpa, hart) = (BASE + page * PAGE, (page % 2) as usize);
                if !write {
                    assert!(machine.cpu(hart).write(gpa).is_err(), "seed {seed}, page {page}");
                }
                // An aged page may be in a TLB at first, and leave it.
                let mut hpa = machine.cpu(hart).read(gpa);
                for _ in 0..2 {
                    hpa = hpa.or_else(|_| {
                        assert_eq!(vm.fault(hart, gpa, PAGE, READS), Ok(FaultAnswer::Rights));
                        machine.cpu(hart).read(gpa)
                    });
                }
                assert_eq!(hpa, Ok(Hpa(RAM + page * PAGE)), "seed {seed}");
            }
            let violations = machine.violations();
            assert!(violations.is_empty(), "seed {seed}: {violations:?}");
        }
        vm.end();
    }
}
