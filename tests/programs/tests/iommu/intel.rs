//! QEMU's VT-d unit: one root table, one context, one domain; in scalable mode the context leads to
//! a PASID table, whose entry for requests without a PASID has the second stage.

use crate::qemu::{Board, Qemu};
use crate::unit::{GUEST, Old, SLOT, Unit};
use slat::format::Geometry;
use slat::format::ept::Ept;
use slat::format::ept::vtd::Vtd;
use slat::format::ept::vtd::commands::{Descriptor, Iotlb, wait};
use slat::{Hpa, Invalidation};
use std::cell::Cell;
use std::rc::Rc;

/// Registers of the unit.
const UNIT: u64 = 0xfed9_0000;
/// Memory of the unit: its queue, the status of waits, the root table, the context table.
const QUEUE: u64 = 0x10_0000;
const STATUS: u64 = 0x10_2000;
const ROOT: u64 = 0x10_4000;
const CONTEXT: u64 = 0x10_5000;
/// In scalable mode, the directory of PASIDs and a table of them.
const DIRECTORY: u64 = 0x10_6000;
const PASIDS: u64 = 0x10_7000;
/// Where the device's registers are.
const DEVICE: u64 = 0xfe00_0000;

const fn board(options: &'static [&'static str]) -> Board {
    Board {
        program: "qemu-system-x86_64",
        memory: 0,
        // At the reset vector: cli; hlt; jmp to hlt.
        code: &[0xfa, 0xf4, 0xeb, 0xfd],
        at: 65520,
        bytes: 65536,
        options,
    }
}

static LEGACY: Board =
    board(&["-M", "q35,memory-backend=mem", "-device", "intel-iommu,aw-bits=48"]);

static SCALABLE_MODE: Board = board(&[
    "-M",
    "q35,memory-backend=mem",
    "-device",
    "intel-iommu,aw-bits=48,x-scalable-mode=on",
]);

/// The unit.
pub struct Intel<const SCALABLE: bool> {
    qemu: Rc<Qemu>,
    iotlb: Iotlb,
    tail: Cell<u64>,
}

impl<const SCALABLE: bool> Intel<SCALABLE> {
    /// Bytes of a descriptor in the queue.
    const DESCRIPTOR: u64 = if SCALABLE { 32 } else { 16 };

    /// Returns its capability register and its extended one.
    fn capabilities(qemu: &Qemu) -> [u64; 2] {
        [8, 0x10].map(|register| qemu.read64(UNIT + register))
    }

    /// Executes a descriptor and waits for it.
    fn send(&self, descriptor: Descriptor) {
        self.qemu.put(STATUS, 0);
        for [low, high] in [descriptor, wait(Hpa(STATUS), 1)] {
            let at = self.tail.get();
            self.qemu.put(QUEUE + at, low);
            self.qemu.put(QUEUE + at + 8, high);
            self.tail.set((at + Self::DESCRIPTOR) % 4096);
        }
        self.qemu.write64(UNIT + 0x88, self.tail.get());
        assert_eq!(self.qemu.get(STATUS) & 0xffff_ffff, 1, "the wait is complete");
    }
}

impl<const SCALABLE: bool> Unit for Intel<SCALABLE> {
    type Format = Ept<true>;
    const ADDRESS_BITS: u32 = 48;
    const OLD: Old = Old::Used;

    fn board() -> &'static Board {
        if SCALABLE { &SCALABLE_MODE } else { &LEGACY }
    }

    fn new(qemu: Rc<Qemu>) -> Self {
        let iotlb = Iotlb::new(GUEST, Self::capabilities(&qemu)[0]);
        Self { qemu, iotlb, tail: Cell::new(0) }
    }

    fn format(&self) -> Ept<true> {
        let [capability, extended] = Self::capabilities(&self.qemu);
        let vtd = Vtd::with_coherent_walks(capability, extended, true).unwrap();
        Ept { accessed_dirty: true, vtd: Some(vtd), ..Ept::default() }
    }

    fn switch_on(&self, root: Hpa, _: &Geometry) -> u64 {
        let qemu = &*self.qemu;
        // The device: its registers, memory accesses and DMA.
        for (register, value) in [(0x10, DEVICE), (4, 6)] {
            qemu.out32(0xcf8, 1 << 31 | SLOT << 11 | register);
            qemu.out32(0xcfc, value);
        }
        qemu.put(ROOT, CONTEXT | 1);
        if SCALABLE {
            // Devices 0 to 15 have the lower context table.
            qemu.put(CONTEXT + 32 * (SLOT << 3), DIRECTORY | 1);
            qemu.put(DIRECTORY, PASIDS | 1);
            // Second stage alone, an address width of 48 bits.
            qemu.put(PASIDS, root.0 | 2 << 6 | 2 << 2 | 1);
            qemu.put(PASIDS + 8, GUEST.into());
        } else {
            let entry = CONTEXT + 16 * (SLOT << 3);
            qemu.put(entry, root.0 | 1);
            // An address width of 48 bits.
            qemu.put(entry + 8, 2 | u64::from(GUEST) << 8);
        }
        let command = |bit: u64| {
            // What stays on; the other bits are commands that are done.
            let status = qemu.read32(UNIT + 0x1c) & 0x96ff_ffff;
            qemu.write32(UNIT + 0x18, status | 1 << bit);
        };
        qemu.write64(UNIT + 0x90, QUEUE | u64::from(SCALABLE) << 11);
        command(26);
        qemu.write64(UNIT + 0x20, ROOT | u64::from(SCALABLE) << 10);
        command(30);
        // Contexts and translations of before.
        self.send([1 | 1 << 4, 0]);
        self.send([2 | 1 << 4 | 3 << 6, 0]);
        command(31);
        assert_eq!(qemu.read32(UNIT + 0x1c) >> 30, 3, "translation is on");
        DEVICE
    }

    fn invalidate(&self, what: &Invalidation, guest: u16) {
        let iotlb = Iotlb { domain: guest, ..self.iotlb };
        iotlb.descriptors(what).for_each(|descriptor| self.send(descriptor));
    }

    fn take_refused(&self) -> bool {
        let is_refused = self.qemu.read64(UNIT + 0x228) >> 63 != 0;
        if is_refused {
            self.qemu.write64(UNIT + 0x228, 1 << 63);
            self.qemu.write32(UNIT + 0x34, 0x7f);
        }
        is_refused
    }
}
