//! QEMU's SMMUv3: a linear stream table, whose one entry has stage 2 alone.

use crate::qemu::{Board, Qemu};
use crate::unit::{GUEST, Old, SLOT, Unit};
use slat::format::Geometry;
use slat::format::arm64::Arm64K4;
use slat::format::arm64::id::Granule;
use slat::format::arm64::smmu::{Command, SYNC, Smmu};
use slat::{Hpa, Invalidation, Vmid};
use std::cell::Cell;
use std::rc::Rc;

/// Registers of the unit.
const UNIT: u64 = 0x905_0000;
/// Memory of the unit: its stream table, its commands, its events.
const STREAMS: u64 = 0x4010_0000;
const QUEUE: u64 = 0x4011_0000;
const EVENTS: u64 = 0x4011_1000;
/// Base-2 logarithm of commands and of events.
const COMMANDS_LOG: u64 = 7;
const EVENTS_LOG: u64 = 6;
/// Where the device's registers are, and its configuration.
const DEVICE: u64 = 0x1000_0000;
const CONFIGURATION: u64 = 0x3f00_0000 + (SLOT << 15);

pub static BOARD: Board = Board {
    program: "qemu-system-aarch64",
    memory: 0x4000_0000,
    // wfi; b to itself less one.
    code: &[0x7f, 0x20, 0x03, 0xd5, 0xff, 0xff, 0xff, 0x17],
    at: 0,
    bytes: 8,
    options: &[
        "-M",
        "virt,iommu=smmuv3,highmem=off,gic-version=3,memory-backend=mem",
        "-cpu",
        "cortex-a76",
        "-global",
        "arm-smmuv3.stage=2",
    ],
};

/// The unit; `RANGES` says whether commands take ranges, which the unit has.
pub struct Arm<const RANGES: bool> {
    qemu: Rc<Qemu>,
    made: Cell<u64>,
    events: Cell<u64>,
}

impl<const RANGES: bool> Arm<RANGES> {
    /// Executes commands and waits for them.
    fn send(&self, commands: impl IntoIterator<Item = Command>) {
        for [low, high] in commands.into_iter().chain([SYNC]) {
            let at = QUEUE + 16 * (self.made.get() % (1 << COMMANDS_LOG));
            self.qemu.put(at, low);
            self.qemu.put(at + 8, high);
            // One bit more than an index: it tells a full queue from an empty one.
            self.made.set((self.made.get() + 1) % (2 << COMMANDS_LOG));
        }
        self.qemu.write32(UNIT + 0x98, self.made.get());
        assert_eq!(self.qemu.read32(UNIT + 0x9c), self.made.get(), "the commands are consumed");
    }
}

impl<const RANGES: bool> Unit for Arm<RANGES> {
    type Format = Arm64K4;
    const ADDRESS_BITS: u32 = 40;
    const OLD: Old = Old::Refused;

    fn board() -> &'static Board {
        &BOARD
    }

    fn new(qemu: Rc<Qemu>) -> Self {
        Self { qemu, made: Cell::new(0), events: Cell::new(0) }
    }

    fn format(&self) -> Arm64K4 {
        Arm64K4 { split_execute: false, output_bits: 44, ..Arm64K4::default() }
    }

    fn switch_on(&self, root: Hpa, geometry: &Geometry) -> u64 {
        let qemu = &*self.qemu;
        assert!(qemu.read32(UNIT + 0xc) >> 10 & 1 == 1, "SMMU_IDR3.RIL");
        qemu.enable(CONFIGURATION, DEVICE);
        let entry = STREAMS + 64 * (SLOT << 3);
        // Valid, stage 2; incoming shareability.
        qemu.put(entry, 1 | 6 << 1);
        qemu.put(entry + 8, 1 << 44);
        // S2VMID, S2T0SZ, S2SL0; write-back and inner shareable walks; 44 bits, AArch64, S2R.
        let start = u64::from(64 - geometry.address_bits) << 32 | 1 << 38;
        let walks = 1 << 40 | 1 << 42 | 3 << 44;
        qemu.put(entry + 16, u64::from(GUEST) | start | walks | 4 << 48 | 1 << 51 | 1 << 58);
        qemu.put(entry + 24, root.0);
        qemu.write64(UNIT + 0x80, STREAMS);
        // A linear table of 2^8 entries.
        qemu.write32(UNIT + 0x88, 8);
        qemu.write64(UNIT + 0x90, QUEUE | COMMANDS_LOG);
        qemu.write64(UNIT + 0xa0, EVENTS | EVENTS_LOG);
        // CR1: tables and queues are write-back and inner shareable. CR0: events, commands, on.
        qemu.write32(UNIT + 0x28, 0xd75);
        qemu.write32(UNIT + 0x20, 0b1100);
        qemu.write32(UNIT + 0x20, 0b1101);
        // CMD_CFGI_ALL, CMD_TLBI_NSNH_ALL.
        self.send([[4, 31], [0x30, 0]]);
        assert_eq!(qemu.read32(UNIT + 0x24), 0b1101, "translation is on");
        DEVICE
    }

    fn invalidate(&self, what: &Invalidation, guest: u16) {
        let unit = Smmu { granule: Granule::K4, ranges: RANGES, nested: false };
        self.send(unit.commands(&Invalidation { vmid: Vmid(guest), ..*what }));
    }

    fn take_refused(&self) -> bool {
        let events = self.qemu.read32(UNIT + 0x1_00a8);
        let is_refused = events != self.events.get();
        self.events.set(events);
        self.qemu.write32(UNIT + 0x1_00ac, events);
        is_refused
    }
}
