//! Arm's stage-2 walk, written from the manual (DDI 0487) and from nothing in the engine: levels
//! are Arm's (3 is that of pages), bits are numbers.

use super::TestPlatform;
use slat::{Attributes, Execute, Format, Memory, Tables};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// What VTCR_EL2 and VTTBR_EL2 say.
#[derive(Clone, Copy, Debug)]
pub struct Regime {
    /// Base-2 logarithm of the granule.
    pub granule: u32,
    /// 64 - T0SZ.
    pub address_bits: u32,
    /// From SL0.
    pub start_level: u32,
    /// BADDR.
    pub root: u64,
    /// HCR_EL2.FWB.
    pub forced_write_back: bool,
}

/// A leaf's fields under their names in D8.3.1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Leaf {
    pub oa: u64,
    pub mem_attr: u64,
    pub s2ap: u64,
    pub sh: u64,
    pub af: bool,
    pub dbm: bool,
    pub xn: u64,
    /// Bits 58:55.
    pub software: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Descriptor {
    Invalid,
    Table(u64),
    Leaf(Leaf),
}

/// Neighbouring leaves of one size and one set of attributes, with contiguous output.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    pub start: u64,
    pub end: u64,
    /// Bytes of each leaf.
    pub size: u64,
    /// `oa` is that of `start`.
    pub leaf: Leaf,
}

impl Run {
    pub fn oa(&self, gpa: u64) -> u64 {
        self.leaf.oa + (gpa - self.start)
    }

    /// The part inside `start..end`, if any.
    pub fn clip(&self, start: u64, end: u64) -> Option<Self> {
        let (start, end) = (self.start.max(start), self.end.min(end));
        let leaf = Leaf { oa: self.oa(start.max(self.start).min(self.end)), ..self.leaf };
        (start < end).then_some(Self { start, end, leaf, ..*self })
    }
}

/// Appends a run, or extends the last one.
pub fn append(runs: &mut Vec<Run>, run: Run) {
    match runs.last_mut() {
        Some(last)
            if last.end == run.start
                && last.size == run.size
                && (Leaf { oa: last.oa(run.start), ..last.leaf }) == run.leaf =>
        {
            last.end = run.end;
        }
        _ => runs.push(run),
    }
}

/// All that the tables say.
#[derive(Default)]
pub struct Tree {
    pub runs: Vec<Run>,
    /// Tables below the root: address, and the guest addresses that each covers.
    pub tables: BTreeMap<u64, (u64, u64)>,
    /// What stands in slots that are invalid and not zero.
    pub markers: usize,
}

impl Tree {
    pub fn at(&self, gpa: u64) -> Option<&Run> {
        let index = self.runs.partition_point(|run| run.end <= gpa);
        self.runs.get(index).filter(|run| run.start <= gpa)
    }

    pub fn within(&self, start: u64, end: u64) -> impl Iterator<Item = Run> {
        self.runs.iter().filter_map(move |run| run.clip(start, end))
    }

    pub fn has_table(&self, start: u64, size: u64) -> bool {
        self.tables.values().any(|&table| table == (start, start + size))
    }
}

/// What an access did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// The leaf, as it was translated; hardware has set what it sets.
    Done { start: u64, end: u64 },
    /// A fault of translation or permission; nothing was changed.
    Fault,
}

fn bits(raw: u64, high: u32, low: u32) -> u64 {
    raw >> low & ((1 << (high - low + 1)) - 1)
}

impl Regime {
    pub fn of<F: Format>(tables: &Tables<'_, F, TestPlatform>, forced_write_back: bool) -> Self {
        let geometry = tables.geometry();
        let regime = Self {
            granule: F::PAGE_SHIFT,
            address_bits: geometry.address_bits,
            start_level: 3 - u32::from(geometry.root_level),
            root: tables.root().0,
            forced_write_back,
        };
        assert_eq!(regime.root_slots(), geometry.root_slots, "what software says of the root");
        assert_eq!(regime.root % (8 * regime.root_slots() as u64).max(64), 0, "VTTBR_EL2.BADDR");
        regime
    }

    /// Bits that a slot of `level` covers.
    pub fn shift(&self, level: u32) -> u32 {
        self.granule + (self.granule - 3) * (3 - level)
    }

    /// Slots of the concatenated root. `AArch64.S2InconsistentSL` of the manual's pseudocode: at
    /// least one bit is resolved by the root, at most one stride and four bits of concatenation.
    pub fn root_slots(&self) -> usize {
        let (stride, below) = (self.granule - 3, self.shift(self.start_level));
        assert!(self.address_bits > below, "T0SZ leaves nothing to the start level: always faults");
        assert!(self.address_bits - below <= stride + 4, "more than 16 concatenated tables");
        1 << (self.address_bits - below)
    }

    /// D8.3.1. Without FEAT_LPA and LPA2, reserved bits must be zero; the engine sets neither nT
    /// nor Contiguous, and no ignored bits but its own 58:55.
    pub fn decode(&self, raw: u64, level: u32) -> Descriptor {
        if raw & 1 == 0 {
            return Descriptor::Invalid;
        }
        let shift = if raw & 2 == 0 { self.shift(level) } else { self.granule };
        if raw & 2 != 0 && level < 3 {
            assert_eq!(bits(raw, 63, 48), 0, "upper bits of the table descriptor {raw:#x}");
            assert_eq!(bits(raw, self.granule - 1, 2), 0, "lower bits of the table {raw:#x}");
            return Descriptor::Table(raw & !3);
        }
        assert!(raw & 2 != 0 || level < 3, "0b01 is reserved at level 3: {raw:#x}");
        let largest = if self.granule == 12 { 1 } else { 2 };
        assert!(level >= largest, "no block at level {level} of this granule: {raw:#x}");
        assert_eq!(bits(raw, 11, 11), 0, "FnXS of {raw:#x}");
        let below = raw & ((1 << shift) - 1);
        assert_eq!(below >> 12, 0, "RES0, nT or an unaligned address in {raw:#x}");
        assert_eq!(bits(raw, 50, 48), 0, "RES0 of {raw:#x}");
        assert_eq!(bits(raw, 52, 52), 0, "Contiguous of {raw:#x}");
        assert_eq!(bits(raw, 63, 59), 0, "PBHA and bit 63 of {raw:#x}");
        Descriptor::Leaf(Leaf {
            oa: bits(raw, 47, shift) << shift,
            mem_attr: bits(raw, 5, 2),
            s2ap: bits(raw, 7, 6),
            sh: bits(raw, 9, 8),
            af: bits(raw, 10, 10) == 1,
            dbm: bits(raw, 51, 51) == 1,
            xn: bits(raw, 54, 53),
            software: bits(raw, 58, 55),
        })
    }

    /// The slot where the walk for `gpa` ends, and its level.
    pub fn slot<'p>(&self, memory: &'p TestPlatform, gpa: u64) -> (&'p AtomicU64, u32) {
        let (mut table, mut slots) = (self.root, self.root_slots());
        let mut level = self.start_level;
        loop {
            let index = (gpa >> self.shift(level)) as usize % slots;
            let slot = &memory.table(table, slots)[index];
            match self.decode(slot.load(Ordering::SeqCst), level) {
                Descriptor::Table(next) => (table, slots) = (next, 1 << (self.granule - 3)),
                _ => return (slot, level),
            }
            level += 1;
        }
    }

    /// Everything that hardware could translate.
    pub fn tree(&self, memory: &TestPlatform) -> Tree {
        let mut tree = Tree::default();
        self.collect(memory, (self.root, self.root_slots()), self.start_level, 0, &mut tree);
        tree
    }

    fn collect(
        &self,
        memory: &TestPlatform,
        (table, slots): (u64, usize),
        level: u32,
        base: u64,
        tree: &mut Tree,
    ) {
        let size = 1u64 << self.shift(level);
        for (slot, start) in memory.table(table, slots).iter().zip((base..).step_by(size as usize))
        {
            let raw = slot.load(Ordering::SeqCst);
            if raw == 0 {
                continue;
            }
            let end = start + size;
            match self.decode(raw, level) {
                Descriptor::Invalid => tree.markers += 1,
                Descriptor::Leaf(leaf) => append(&mut tree.runs, Run { start, end, size, leaf }),
                Descriptor::Table(next) => {
                    let twice = tree.tables.insert(next, (start, end));
                    assert_eq!(twice, None, "the table at {next:#x} is linked twice");
                    self.collect(memory, (next, 1 << (self.granule - 3)), level + 1, start, tree);
                }
            }
        }
    }

    /// An access with VTCR_EL2.HA and HD set (D8.5): AF is set; a write through a leaf with DBM
    /// sets S2AP[1].
    pub fn access(&self, memory: &TestPlatform, gpa: u64, write: bool) -> Access {
        let (slot, level) = self.slot(memory, gpa);
        loop {
            let raw = slot.load(Ordering::SeqCst);
            let Descriptor::Leaf(leaf) = self.decode(raw, level) else {
                return Access::Fault;
            };
            let allowed = if write { leaf.dbm || leaf.s2ap >= 2 } else { leaf.s2ap & 1 == 1 };
            if !allowed {
                return Access::Fault;
            }
            let new = raw | 1 << 10 | if write { 1 << 7 } else { 0 };
            if slot.compare_exchange(raw, new, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
                let start = gpa >> self.shift(level) << self.shift(level);
                return Access::Done { start, end: start + (1 << self.shift(level)) };
            }
        }
    }

    /// The leaf in the engine's words, by D8.6.5 (D8.6.6 with FWB) and D8.4 for rights.
    pub fn attributes(&self, leaf: &Leaf) -> Attributes {
        let memory = match (leaf.mem_attr, self.forced_write_back) {
            (0b1111, false) | (0b0110, true) => Memory::Normal,
            (0b0101, _) => Memory::NonCacheable,
            (0b0001, _) => Memory::Device,
            (0b0000, _) => Memory::DeviceStrict,
            (other, fwb) => panic!("MemAttr {other:#b} with FWB={fwb}"),
        };
        Attributes {
            read: leaf.s2ap & 0b01 != 0,
            write: leaf.s2ap & 0b10 != 0 || leaf.dbm,
            execute: [Execute::All, Execute::User, Execute::None, Execute::Kernel]
                [leaf.xn as usize],
            memory,
            accessed: leaf.af,
            dirty: leaf.s2ap & 0b10 != 0 || leaf.software & 0b0010 != 0,
            software: leaf.software & 0b0001 != 0,
        }
    }
}
