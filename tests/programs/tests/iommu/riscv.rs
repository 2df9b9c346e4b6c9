//! QEMU's RISC-V IOMMU: a device directory of one level, whose one context has a G-stage alone.

use crate::qemu::{Board, Qemu};
use crate::unit::{GUEST, Old, SLOT, Unit};
use slat::format::Geometry;
use slat::format::riscv::RiscV;
use slat::format::riscv::iommu::{Command, Iotinval, fence};
use slat::{Hpa, Invalidation, Vmid};
use std::cell::Cell;
use std::rc::Rc;

/// Registers of the unit.
const UNIT: u64 = 0x301_0000;
/// Memory of the unit: its directory, its commands, its faults, the status of fences.
const DIRECTORY: u64 = 0x8010_0000;
const QUEUE: u64 = 0x8011_0000;
const FAULTS: u64 = 0x8011_1000;
const STATUS: u64 = 0x8011_2000;
/// Base-2 logarithm of commands and of faults.
const COMMANDS_LOG: u64 = 7;
const FAULTS_LOG: u64 = 6;
/// Where the device's registers are, and its configuration.
const DEVICE: u64 = 0x4000_0000;
const CONFIGURATION: u64 = 0x3000_0000 + (SLOT << 15);

pub static BOARD: Board = Board {
    program: "qemu-system-riscv64",
    memory: 0x8000_0000,
    // wfi; j to itself less one.
    code: &[0x73, 0x00, 0x50, 0x10, 0x6f, 0xf0, 0xdf, 0xff],
    at: 0,
    bytes: 8,
    options: &["-M", "virt,iommu-sys=on,memory-backend=mem"],
};

/// The unit.
pub struct Riscv {
    qemu: Rc<Qemu>,
    tail: Cell<u64>,
    faults: Cell<u64>,
}

/// A register with the page number of a queue, and the base-2 logarithm of its entries less one.
const fn queue(at: u64, log: u64) -> u64 {
    at >> 12 << 10 | (log - 1)
}

impl Riscv {
    /// Executes commands and waits for them.
    fn send(&self, commands: impl IntoIterator<Item = Command>) {
        self.qemu.put(STATUS, 0);
        for [low, high] in commands.into_iter().chain([fence(Hpa(STATUS), 1)]) {
            let at = QUEUE + 16 * self.tail.get();
            self.qemu.put(at, low);
            self.qemu.put(at + 8, high);
            self.tail.set((self.tail.get() + 1) % (1 << COMMANDS_LOG));
        }
        self.qemu.write32(UNIT + 0x24, self.tail.get());
        // A thread of QEMU's works on the queue.
        while self.qemu.get(STATUS) & 0xffff_ffff != 1 {
            let control = self.qemu.read32(UNIT + 0x48);
            assert!(control >> 8 & 0xf == 0, "the queue has stopped: cqcsr is {control:#x}");
        }
    }
}

impl Unit for Riscv {
    type Format = RiscV;
    const ADDRESS_BITS: u32 = 41;
    const OLD: Old = Old::NotRead;

    fn board() -> &'static Board {
        &BOARD
    }

    fn new(qemu: Rc<Qemu>) -> Self {
        Self { qemu, tail: Cell::new(0), faults: Cell::new(0) }
    }

    fn format(&self) -> RiscV {
        RiscV::default()
    }

    fn switch_on(&self, root: Hpa, geometry: &Geometry) -> u64 {
        let qemu = &*self.qemu;
        assert!(qemu.read64(UNIT) >> 24 & 1 == 0, "the unit sets no A and D (AMO_HWAD)");
        qemu.enable(CONFIGURATION, DEVICE);
        // tc.V; iohgatp, which is as hgatp is.
        let context = DIRECTORY + 64 * (SLOT << 3);
        qemu.put(context, 1);
        qemu.put(context + 8, RiscV::hgatp(geometry, root, Vmid(GUEST)).unwrap());
        qemu.write64(UNIT + 0x18, queue(QUEUE, COMMANDS_LOG));
        qemu.write64(UNIT + 0x28, queue(FAULTS, FAULTS_LOG));
        qemu.write32(UNIT + 0x24, 0);
        // Commands on, faults on, a directory of one level.
        qemu.write32(UNIT + 0x48, 1);
        qemu.write32(UNIT + 0x4c, 1);
        qemu.write64(UNIT + 0x10, DIRECTORY >> 12 << 10 | 2);
        while qemu.read32(UNIT + 0x48) >> 16 & 1 == 0 || qemu.read32(UNIT + 0x4c) >> 16 & 1 == 0 {}
        // IODIR.INVAL_DDT, and all translations.
        self.send([[3, 0], [1 | 1 << 7, 0]]);
        DEVICE
    }

    fn invalidate(&self, what: &Invalidation, guest: u16) {
        self.send(Iotinval { gscid: guest }.commands(what));
    }

    fn take_refused(&self) -> bool {
        let faults = self.qemu.read32(UNIT + 0x34);
        let is_refused = faults != self.faults.get();
        self.faults.set(faults);
        self.qemu.write32(UNIT + 0x30, faults);
        is_refused
    }
}
