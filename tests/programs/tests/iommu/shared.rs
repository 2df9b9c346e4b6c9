//! One table for a vCPU and for a device: the guest of a CPU at EL2 reads and writes a page over
//! and over, a device reads and writes the same page, and both walk the engine's stage 2. After
//! each change the TLBs of both are invalidated one after the other, in either order.

use crate::arm::{Arm, BOARD};
use crate::machine::{Fault, Machine};
use crate::qemu::{Board, Edu, Qemu};
use crate::unit::{GUEST, Unit};
use slat::format::arm64::Arm64K4;
use slat::format::arm64::id::IdRegisters;
use slat::{AddressSpace, Attributes, Gpa, GpaRange, Hpa, Invalidation, PageSize, Rights, Vmid};
use std::rc::Rc;
use std::thread;
use std::time::{Duration, Instant};

const PAGE: u64 = 4096;
/// Guest addresses of the vCPU's program, the page that changes, the vCPU's report, and a page of
/// the device.
const PROGRAM: u64 = 0x5000;
const DATA: u64 = 0x8000;
const REPORT: u64 = 0x9000;
const SCRATCH: u64 = 0xa000;
/// The guest's memory, and what the page moves to.
const MEMORY: u64 = 0x4100_0000;
const ELSEWHERE: u64 = MEMORY + 0xb000;
/// Words of the report: what was read, whether to leave, the rounds so far.
const FOUND: u64 = MEMORY + REPORT;
const LEAVE: u64 = FOUND + 8;
const ROUNDS: u64 = FOUND + 16;
const OLD: u64 = 1111;
const NEW: u64 = 2222;

/// What the CPU at EL2 is to do, the registers for it, how often its guest has stopped, and its ID
/// registers.
const MAILBOX: u64 = 0x4012_0000;
const REGISTERS: u64 = MAILBOX + 8;
const EXITS: u64 = MAILBOX + 40;
const IDS: u64 = MAILBOX + 64;
/// Enter the guest, with the translations that the CPU has, or without.
const ENTER: u64 = 1;
const INVALIDATE: u64 = 2;
/// HCR_EL2: AArch64, data cached while stage 1 is off, stage 2. SCTLR_EL1: stage 1 is off.
const HCR: u64 = 1 << 31 | 1 << 12 | 1;
const SCTLR: u64 = 0x30d0_0800;

/// The CPU's program at EL2.
const EL2: [u32; 31] = [
    0xd2a8_0249, // mov x9, MAILBOX
    0xd538_0700, // mrs x0, id_aa64mmfr0_el1
    0xd538_0721, // mrs x1, id_aa64mmfr1_el1
    0xa904_0520, // stp x0, x1, [x9, 64]
    0xd538_0740, // mrs x0, id_aa64mmfr2_el1
    0xd538_0601, // mrs x1, id_aa64isar0_el1
    0xa905_0520, // stp x0, x1, [x9, 80]
    0xd281_0000, // mov x0, 0x800
    0xd51c_c000, // msr vbar_el2, x0
    0xd280_78a0, // mov x0, 0x3c5: EL1, interrupts masked
    0xd51c_4000, // msr spsr_el2, x0
    0xf940_0120, // wait: ldr x0, [x9]
    0xb4ff_ffe0, // cbz x0, wait
    0xf900_013f, // str xzr, [x9]
    0xa940_8921, // ldp x1, x2, [x9, 8]
    0xd51c_2101, // msr vttbr_el2, x1
    0xd51c_2142, // msr vtcr_el2, x2
    0xa941_8921, // ldp x1, x2, [x9, 24]
    0xd51c_1101, // msr hcr_el2, x1
    0xd518_1002, // msr sctlr_el1, x2
    0xd503_3fdf, // isb
    0xf100_081f, // cmp x0, INVALIDATE
    0x5400_0081, // b.ne enter
    0xd50c_83df, // tlbi vmalls12e1is
    0xd503_3b9f, // dsb ish
    0xd503_3fdf, // isb
    0xd28a_0000, // enter: mov x0, PROGRAM
    0xd51c_4020, // msr elr_el2, x0
    0xd290_0000, // mov x0, DATA
    0xd292_0001, // mov x1, REPORT
    0xd69f_03e0, // eret
];
/// Its vector for what the guest does.
const EXIT: [u32; 5] = [
    0xd2a8_0249, // mov x9, MAILBOX
    0xf940_1520, // ldr x0, [x9, 40]
    0x9100_0400, // add x0, x0, 1
    0xf900_1520, // str x0, [x9, 40]
    0x17ff_fd07, // b wait
];
const EXIT_AT: usize = 0x800 + 0x400;
/// The guest's program: reads the page, reports, counts in the report and in the page.
const GUEST_CODE: [u32; 9] = [
    0xf940_0002, // ldr x2, [x0]
    0xf900_0022, // str x2, [x1]
    0xf940_0822, // ldr x2, [x1, 16]
    0x9100_0442, // add x2, x2, 1
    0xf900_0822, // str x2, [x1, 16]
    0xf900_0802, // str x2, [x0, 16]
    0xf940_0422, // ldr x2, [x1, 8]
    0xb4ff_ff22, // cbz x2 to the first
    0xd400_0002, // hvc 0
];

const CODE: [u8; 4096] = {
    let mut code = [0; 4096];
    let mut n = 0;
    while n < EL2.len() + EXIT.len() {
        let exit = n >= EL2.len();
        let (word, at) = if exit {
            (EXIT[n - EL2.len()], EXIT_AT + 4 * (n - EL2.len()))
        } else {
            (EL2[n], 4 * n)
        };
        let bytes = word.to_le_bytes();
        (code[at], code[at + 1], code[at + 2], code[at + 3]) =
            (bytes[0], bytes[1], bytes[2], bytes[3]);
        n += 1;
    }
    code
};

static SHARED: Board = Board {
    code: &CODE,
    at: 0,
    bytes: CODE.len(),
    options: &[
        "-M",
        "virt,iommu=smmuv3,highmem=off,gic-version=3,virtualization=on,memory-backend=mem",
        "-cpu",
        "cortex-a76",
        "-global",
        "arm-smmuv3.stage=2",
    ],
    ..BOARD
};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Change {
    Unmap,
    Move,
    Protect,
}

struct Both<'m> {
    qemu: Rc<Qemu>,
    machine: &'m Machine<Arm<false>>,
    space: AddressSpace<'m, Arm64K4, Machine<Arm<false>>>,
    device: Edu,
    exits: u64,
}

fn page(gpa: u64) -> GpaRange {
    GpaRange::new(Gpa(gpa), PAGE).unwrap()
}

impl Both<'_> {
    /// Lets the guest run for a while; returns whether it still runs.
    fn runs(&self) -> bool {
        let (until, begin) = (self.qemu.get(ROUNDS) + 2000, Instant::now());
        while self.qemu.get(ROUNDS) < until {
            if self.qemu.get(EXITS) != self.exits {
                return false;
            }
            assert!(begin.elapsed() < Duration::from_secs(60), "the vCPU does not run");
            thread::yield_now();
        }
        true
    }

    /// Makes the vCPU leave the guest and enter it.
    fn again(&mut self, how: u64) {
        self.qemu.put(LEAVE, 1);
        while self.qemu.get(EXITS) == self.exits {
            thread::yield_now();
        }
        self.exits = self.qemu.get(EXITS);
        self.qemu.put(LEAVE, 0);
        self.qemu.put(MAILBOX, how);
    }

    fn map(&mut self, to: u64) {
        let size = PageSize::SIZE_4K;
        self.space.map(page(DATA), Hpa(to), Attributes::RAM, size).unwrap();
    }

    fn change(&mut self, change: Change) {
        let read_only = Rights { write: false, ..Rights::ALL };
        self.machine.fault.set(Fault::NoInvalidation);
        match change {
            Change::Protect => _ = self.space.protect(page(DATA), read_only).unwrap(),
            _ => _ = self.space.unmap(page(DATA), |_| ()).unwrap(),
        }
        if change == Change::Move {
            self.map(ELSEWHERE);
        }
        self.machine.fault.set(Fault::None);
    }

    /// Returns whether the vCPU uses the leaf as it was.
    fn is_vcpu_stale(&self, change: Change) -> bool {
        let runs = self.runs();
        if change == Change::Move { self.qemu.get(FOUND) == OLD } else { runs }
    }

    /// Returns whether the device does.
    fn is_device_stale(&self, change: Change) -> bool {
        let (scratch, written) = (MEMORY + SCRATCH, MEMORY + DATA + 64);
        self.qemu.put(scratch, 0);
        self.device.fill(SCRATCH);
        self.device.fill(DATA);
        self.device.spill(SCRATCH);
        let read = self.qemu.get(scratch);
        self.qemu.put(written, 0);
        self.device.spill(DATA + 64);
        let is_written = self.qemu.get(written) == read;
        self.machine.unit.take_refused();
        match change {
            Change::Unmap | Change::Move => read == OLD,
            Change::Protect => is_written,
        }
    }

    /// Makes one change; returns whether the vCPU and whether the device are stale after it, and
    /// after each of two invalidations.
    fn check(&mut self, change: Change, vcpu_first: bool) -> [(bool, bool); 3] {
        self.space.unmap(page(DATA), |_| ()).unwrap();
        self.qemu.put(MEMORY + DATA, OLD);
        self.qemu.put(ELSEWHERE, NEW);
        self.map(MEMORY + DATA);
        self.again(INVALIDATE);
        let begin = self.runs() && self.qemu.get(FOUND) == OLD;
        assert!(begin && self.is_device_stale(change), "both use the page before");
        self.change(change);
        let what =
            Invalidation { vmid: Vmid(GUEST), range: Some(page(DATA)), leaf: None, tables: false };
        let mut found = [(true, true); 3];
        for (step, found) in found.iter_mut().enumerate() {
            match (step, vcpu_first) {
                (0, _) => {}
                (1, true) | (2, false) => self.again(INVALIDATE),
                _ => self.machine.unit.invalidate(&what, GUEST),
            }
            *found = (self.is_vcpu_stale(change), self.is_device_stale(change));
            if step == 0 && found.0 {
                // An exit and an entry drop nothing.
                self.again(ENTER);
                found.0 = self.is_vcpu_stale(change);
            }
        }
        found
    }
}

/// Checks each change in both orders.
pub fn check() {
    let qemu = Rc::new(Qemu::start(&SHARED));
    let machine = Machine::<Arm<false>>::new(Rc::clone(&qemu));
    let bits = Arm::<false>::ADDRESS_BITS;
    // As the CPU has them; the unit has more.
    let format = Arm64K4 { output_bits: bits, ..machine.unit.format() };
    let mut space = AddressSpace::new(format, Vmid(GUEST), bits, &machine).unwrap();
    for gpa in [PROGRAM, REPORT, SCRATCH, DATA] {
        let at = Hpa(MEMORY + gpa);
        space.map(page(gpa), at, Attributes::RAM, PageSize::SIZE_4K).unwrap();
    }
    let registers = machine.unit.switch_on(space.root(), &space.geometry());
    let device = Edu::new(Rc::clone(&qemu), registers);
    for (at, words) in (MEMORY + PROGRAM..).step_by(8).zip(GUEST_CODE.chunks(2)) {
        let word = |n: usize| u64::from(words.get(n).copied().unwrap_or(0));
        qemu.put(at, word(0) | word(1) << 32);
    }
    let id = [0, 8, 16, 24].map(|at| {
        let begin = Instant::now();
        while qemu.get(IDS + 24) == 0 {
            assert!(begin.elapsed() < Duration::from_secs(60), "the CPU does not start");
            thread::yield_now();
        }
        qemu.get(IDS + at)
    });
    let [mmfr0, mmfr1, mmfr2, isar0] = id;
    let id = IdRegisters { mmfr0, mmfr1, mmfr2, isar0, midr: 0 };
    let root = space.guest_root();
    let values = [root.vttbr(&id).unwrap(), root.vtcr(&id).unwrap(), HCR, SCTLR];
    (REGISTERS..).step_by(8).zip(values).for_each(|(at, value)| qemu.put(at, value));
    qemu.put(MAILBOX, INVALIDATE);
    let mut both = Both { qemu, machine: &machine, space, device, exits: 0 };
    for change in [Change::Unmap, Change::Move, Change::Protect] {
        for vcpu_first in [false, true] {
            let found = both.check(change, vcpu_first);
            println!("{change:?}, vCPU first {vcpu_first}: {found:?}");
            let one = (!vcpu_first, vcpu_first);
            assert_eq!(found, [(true, true), one, (false, false)], "{change:?}");
        }
    }
}
