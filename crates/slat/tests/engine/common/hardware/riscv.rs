//! The G-stage walk of RISC-V, from the privileged manual ("Guest Physical Address Translation",
//! "Virtual Address Translation Process", "Svpbmt", "Svade"). Levels are the manual's (0 is the
//! level of pages), and bits are numbers.

use super::{Config, Descriptor, Hardware, Leaf, Root, TestPlatform};
use slat::format::AttributeError;
use slat::format::riscv::{Mode, RiscV};
use slat::{Attributes, Execute, Memory, Tables};

/// The settings that the walk depends on.
#[derive(Clone, Copy, Debug)]
pub struct Cpu {
    /// Svpbmt, enabled in menvcfg.
    pub svpbmt: bool,
    pub physical_bits: u32,
}

/// How hardware reads an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pte {
    /// V is clear.
    Invalid,
    Table(u64),
    Page(Page),
    /// An entry on which every access faults, though V is set.
    Fault(&'static str),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Page {
    pub address: u64,
    pub size: u64,
    pub read: bool,
    pub write: bool,
    pub execute: bool,
    pub accessed: bool,
    pub dirty: bool,
    pub pbmt: u64,
    pub rsw: u64,
}

impl Cpu {
    /// Steps 3 to 8 of the translation process: decodes an entry at the manual's level `i`.
    pub fn decode(&self, pte: u64, i: u32) -> Pte {
        let bit = |n: u32| pte >> n & 1 == 1;
        let field = |high: u32, low: u32| pte >> low & ((1 << (high - low + 1)) - 1);
        if !bit(0) {
            return Pte::Invalid;
        }
        if !bit(1) && bit(2) {
            return Pte::Fault("writable, not readable");
        }
        if field(60, 54) != 0 {
            return Pte::Fault("reserved bits 60:54");
        }
        if bit(63) {
            return Pte::Fault("N without Svnapot");
        }
        if field(62, 61) == 3 || field(62, 61) != 0 && !self.svpbmt {
            return Pte::Fault("a memory type that is reserved");
        }
        let address = field(53, 10) << 12;
        if address >> self.physical_bits != 0 {
            return Pte::Fault("no such physical address");
        }
        if !bit(1) && !bit(3) {
            return match i {
                0 => Pte::Fault("a table at level 0"),
                _ if bit(4) || bit(6) || bit(7) => Pte::Fault("A, D or U of a table"),
                _ if field(62, 61) != 0 => Pte::Fault("a memory type of a table"),
                _ => Pte::Table(address),
            };
        }
        let size = 1u64 << (12 + 9 * i);
        if address % size != 0 {
            return Pte::Fault("misaligned superpage");
        }
        // "The current privilege mode is always taken to be U-mode": U clear forbids everything.
        let user = bit(4);
        Pte::Page(Page {
            address,
            size,
            read: user && bit(1),
            write: user && bit(2),
            execute: user && bit(3),
            accessed: bit(6),
            dirty: bit(7),
            pbmt: field(62, 61),
            rsw: field(9, 8),
        })
    }
}

/// A hart with hgatp loaded. With `SVADU` it sets A and D; without it (Svade) it faults where they
/// are clear.
#[derive(Clone, Copy, Debug)]
pub struct Hart<const SVADU: bool> {
    pub cpu: Cpu,
    pub hgatp: u64,
    /// The bits that the guest may use; hardware itself takes two bits more than Sv39, Sv48, Sv57.
    pub address_bits: u32,
}

impl<const SVADU: bool> Hart<SVADU> {
    /// LEVELS of the mode.
    fn levels(&self) -> u32 {
        match self.hgatp >> 60 {
            8 => 3,
            9 => 4,
            10 => 5,
            mode => panic!("hgatp.MODE {mode}"),
        }
    }
}

impl<const SVADU: bool> Hardware for Hart<SVADU> {
    type Format = RiscV;
    const PAGE: u32 = 12;
    const STRIDE: u32 = 9;
    const SIZES: u32 = 3;
    const TABLES_COUNT: bool = false;
    const MARK: u64 = 1 << 5;
    const SOFTWARE_BITS: u8 = 2;
    const REFILL_BREAKS: bool = false;
    const WRITE_READS: bool = true;

    fn of(tables: &Tables<'_, RiscV, TestPlatform>) -> Self {
        let (geometry, format) = (tables.geometry(), tables.format());
        let hgatp = RiscV::hgatp(&geometry, tables.root(), tables.vmid()).unwrap();
        assert_eq!(hgatp >> 44 & 0x3fff, u64::from(tables.vmid().0));
        assert_eq!(hgatp >> 58 & 3, 0, "WPRI");
        assert_eq!(hgatp & 3, 0, "a root of 16 KiB, aligned to it");
        let cpu = Cpu { svpbmt: format.memory_types, physical_bits: format.output_bits };
        let hart = Self { cpu, hgatp, address_bits: geometry.address_bits };
        assert!(geometry.address_bits <= 12 + 9 * hart.levels() + 2);
        hart
    }

    fn format(config: &Config) -> RiscV {
        RiscV { widest: Mode::Sv57x4, memory_types: config.forced_write_back, output_bits: 48 }
    }

    fn usual() -> RiscV {
        RiscV { widest: Mode::Sv57x4, output_bits: 48, ..Default::default() }
    }

    fn address_bits(&self) -> u32 {
        self.address_bits
    }

    fn root(&self) -> Root {
        let table = (self.hgatp & ((1 << 44) - 1)) << 12;
        Root { table, ptes: 2048, height: self.levels() - 1 }
    }

    fn decode(&self, raw: u64, height: u32) -> Descriptor {
        match self.cpu.decode(raw, height) {
            Pte::Invalid => Descriptor::Invalid,
            Pte::Fault(what) => panic!("{raw:#x} at level {height}: {what}"),
            Pte::Table(table) => Descriptor::Table { table, accessed: true },
            Pte::Page(page) => Descriptor::Leaf(Leaf {
                oa: page.address,
                memory: page.pbmt,
                own: Attributes {
                    read: page.read,
                    write: page.write,
                    execute: if page.execute { Execute::All } else { Execute::None },
                    memory: [Memory::Normal, Memory::NonCacheable, Memory::Device]
                        [page.pbmt as usize],
                    accessed: page.accessed,
                    dirty: page.dirty,
                    software: super::software(page.rsw, &[0, 1]),
                },
                marks: true,
                reached: true,
            }),
        }
    }

    fn marked(raw: u64, _height: u32) -> bool {
        raw & Self::MARK != 0
    }

    /// Step 9: A, and for a store D.
    fn used(&self, raw: u64, write: bool) -> u64 {
        raw | if write { 0xc0 } else { 0x40 }
    }

    fn passed(&self, raw: u64) -> u64 {
        raw
    }

    /// "Svade": a guest-page fault where A, or D for a store, would have to be set.
    fn faults(&self, leaf: &Attributes, write: bool) -> bool {
        !SVADU && (!leaf.accessed || write && !leaf.dirty)
    }

    fn records_accessed(&self) -> bool {
        true
    }

    fn refuses(&self, a: Attributes) -> Vec<AttributeError> {
        let split = matches!(a.execute, Execute::User | Execute::Kernel);
        let typed = matches!(a.memory, Memory::NonCacheable | Memory::Device) && self.cpu.svpbmt;
        let all = [
            (a.write && !a.read, AttributeError::NeedsRead),
            (split, AttributeError::ExecuteNeedsSplitRights),
            (!typed && a.memory != Memory::Normal, AttributeError::MemoryType),
        ];
        let all = all.into_iter().filter_map(|(refused, reason)| refused.then_some(reason));
        all.chain(Self::lacks(a.software)).collect()
    }
}
