//! QEMU's VT-d unit, in legacy mode: one root table, one context, one domain.

use crate::qemu::Qemu;
use slat::format::ept::vtd::commands::{Descriptor, Iotlb, wait};
use slat::{Hpa, Invalidation};
use std::cell::Cell;

/// Registers of the unit.
const UNIT: u64 = 0xfed9_0000;
/// Memory of the unit: its queue, the status of waits, the root table, the context table.
const QUEUE: u64 = 0x10_0000;
const STATUS: u64 = 0x10_2000;
const ROOT: u64 = 0x10_4000;
const CONTEXT: u64 = 0x10_5000;
/// The machine: the unit, and a device in slot 4 of bus 0.
pub const OPTIONS: [&str; 6] = [
    "-M",
    "q35,memory-backend=mem",
    "-device",
    "intel-iommu,aw-bits=48",
    "-device",
    "edu,addr=4.0,dma_mask=0xffffffffffffffff",
];
const SLOT: u64 = 4;
/// Where the device's registers are.
pub const DEVICE: u64 = 0xfe00_0000;
/// The domain of the device.
pub const DOMAIN: u16 = 7;

/// What is left out of invalidations, on purpose.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// Nothing.
    None,
    /// All of them.
    NoInvalidation,
    /// They name another domain.
    OtherDomain,
    /// Of each range the first descriptor is sent alone.
    FirstOnly,
}

/// The unit.
pub struct Intel<'q> {
    qemu: &'q Qemu,
    iotlb: Iotlb,
    tail: Cell<u64>,
    pub fault: Cell<Fault>,
}

impl<'q> Intel<'q> {
    /// Returns its capability register and its extended one.
    pub fn capabilities(qemu: &Qemu) -> [u64; 2] {
        [8, 0x10].map(|register| qemu.read64(UNIT + register))
    }

    /// The unit, not yet on.
    pub fn new(qemu: &'q Qemu) -> Self {
        let iotlb = Iotlb::new(DOMAIN, Self::capabilities(qemu)[0]);
        Self { qemu, iotlb, tail: Cell::new(0), fault: Cell::new(Fault::None) }
    }

    /// Switches translation on, by these tables of four levels.
    pub fn switch_on(&self, tables: Hpa) {
        let qemu = self.qemu;
        // The device: its registers, memory accesses and DMA.
        for (register, value) in [(0x10, DEVICE), (4, 6)] {
            qemu.out32(0xcf8, 1 << 31 | SLOT << 11 | register);
            qemu.out32(0xcfc, value);
        }
        qemu.put(ROOT, CONTEXT | 1);
        let entry = CONTEXT + 16 * (SLOT << 3);
        qemu.put(entry, tables.0 | 1);
        // An address width of 48 bits.
        qemu.put(entry + 8, 2 | u64::from(DOMAIN) << 8);
        let command = |bit: u64| {
            // What stays on; the other bits are commands that are done.
            let status = qemu.read32(UNIT + 0x1c) & 0x96ff_ffff;
            qemu.write32(UNIT + 0x18, status | 1 << bit);
        };
        qemu.write64(UNIT + 0x90, QUEUE);
        command(26);
        qemu.write64(UNIT + 0x20, ROOT);
        command(30);
        // Contexts and translations of before.
        self.send([1 | 1 << 4, 0]);
        self.send([2 | 1 << 4 | 3 << 6, 0]);
        command(31);
        assert_eq!(qemu.read32(UNIT + 0x1c) >> 30, 3, "translation is on");
    }

    /// Executes a descriptor and waits for it.
    fn send(&self, descriptor: Descriptor) {
        self.qemu.put(STATUS, 0);
        for [low, high] in [descriptor, wait(Hpa(STATUS), 1)] {
            let at = self.tail.get();
            self.qemu.put(QUEUE + at, low);
            self.qemu.put(QUEUE + at + 8, high);
            self.tail.set((at + 16) % 4096);
        }
        self.qemu.write64(UNIT + 0x88, self.tail.get());
        assert_eq!(self.qemu.get(STATUS) & 0xffff_ffff, 1, "the wait is complete");
    }

    /// Does what the engine asks for, but for the fault.
    pub fn invalidate(&self, what: &Invalidation) {
        let most = match self.fault.get() {
            Fault::NoInvalidation => 0,
            Fault::FirstOnly => 1,
            _ => usize::MAX,
        };
        let other = u16::from(self.fault.get() == Fault::OtherDomain);
        let iotlb = Iotlb { domain: DOMAIN + other, ..self.iotlb };
        iotlb.descriptors(what).take(most).for_each(|descriptor| self.send(descriptor));
    }

    /// Does what the engine asks for, whatever is left out otherwise.
    pub fn invalidate_whole(&self, what: &Invalidation) {
        self.iotlb.descriptors(what).for_each(|descriptor| self.send(descriptor));
    }

    /// Returns whether the unit refused an access since the last call.
    pub fn take_refused(&self) -> bool {
        let is_refused = self.qemu.read64(UNIT + 0x228) >> 63 != 0;
        if is_refused {
            self.qemu.write64(UNIT + 0x228, 1 << 63);
            self.qemu.write32(UNIT + 0x34, 0x7f);
        }
        is_refused
    }
}
