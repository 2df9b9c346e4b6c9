//! Intel's walk of extended page tables, from the SDM, volume 3C, "The Extended Page Table
//! Mechanism": levels are Intel's (1 is the page table, 4 the PML4, 5 the PML5), bits are numbers.

use super::{Config, Descriptor, Hardware, Leaf, Root, TestPlatform};
use slat::format::AttributeError;
use slat::{Attributes, Execute, Memory, Tables};

/// The features of a CPU besides four levels and 2 MiB pages; it has five levels if the EPT pointer
/// says so.
#[derive(Clone, Copy, Debug)]
pub struct Cpu {
    pub maxphyaddr: u32,
    pub huge_1g: bool,
    pub execute_only: bool,
    pub mode_based_execute: bool,
}

pub const XEON: Cpu =
    Cpu { maxphyaddr: 46, huge_1g: true, execute_only: false, mode_based_execute: false };

/// How hardware reads an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Entry {
    NotPresent,
    Table { address: u64, rights: Rights },
    Page(Page),
    Misconfiguration(&'static str),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rights {
    pub read: bool,
    pub write: bool,
    pub execute_kernel: bool,
    pub execute_user: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Page {
    pub address: u64,
    pub size: u64,
    pub rights: Rights,
    pub memory_type: u64,
    pub ignore_pat: bool,
    pub accessed: bool,
    pub dirty: bool,
    /// Bits 57, 58, 60, 61 and 63, which are rights of other features.
    pub features: u64,
}

impl Cpu {
    /// Returns the SDM's level of an entry: 5 in the PML5, 4 in the PML4, 1 in a page table.
    pub fn decode(&self, raw: u64, level: u8) -> Entry {
        let bit = |n: u32| raw >> n & 1 == 1;
        let field = |high: u32, low: u32| raw >> low & ((1 << (high - low + 1)) - 1);
        let mode_based = self.mode_based_execute;
        if field(2, 0) == 0 && !(mode_based && bit(10)) {
            return Entry::NotPresent;
        }
        if !bit(0) && bit(1) {
            return Entry::Misconfiguration("writable, not readable");
        }
        if !bit(0) && !self.execute_only {
            return Entry::Misconfiguration("execute-only");
        }
        if self.maxphyaddr < 52 && field(51, self.maxphyaddr) != 0 {
            return Entry::Misconfiguration("address beyond MAXPHYADDR");
        }
        let rights = Rights {
            read: bit(0),
            write: bit(1),
            execute_kernel: bit(2),
            execute_user: bit(if mode_based { 10 } else { 2 }),
        };
        let low = match (level, bit(7)) {
            (1, _) => 12,
            (2, true) => 21,
            (3, true) if self.huge_1g => 30,
            (2 | 3, false) if field(6, 3) != 0 => {
                return Entry::Misconfiguration("reserved bits 6:3 of a table");
            }
            (4, _) if field(7, 3) != 0 => {
                return Entry::Misconfiguration("reserved bits 7:3 of a PML4E");
            }
            (5, _) if field(7, 3) != 0 => {
                return Entry::Misconfiguration("reserved bits 7:3 of a PML5E");
            }
            (2..=5, false) => return Entry::Table { address: raw & 0xf_ffff_ffff_f000, rights },
            _ => return Entry::Misconfiguration("bit 7 of a PDPTE without 1 GiB pages"),
        };
        if low > 12 && field(low - 1, 12) != 0 {
            return Entry::Misconfiguration("reserved address bits of a large page");
        }
        if matches!(field(5, 3), 2 | 3 | 7) {
            return Entry::Misconfiguration("reserved memory type");
        }
        Entry::Page(Page {
            address: field(51, low) << low,
            size: 1 << low,
            rights,
            memory_type: field(5, 3),
            ignore_pat: bit(6),
            accessed: bit(8),
            dirty: bit(9),
            features: raw & (1 << 57 | 1 << 58 | 1 << 60 | 1 << 61 | 1 << 63),
        })
    }
}

/// Bits that hardware ignores in an entry that maps a page, except those that the engine uses.
pub const USERS: [u32; 6] = [52, 55, 56, 59, 53, 54];

/// A CPU with an EPT pointer loaded; with `FIVE`, one that can walk five levels.
#[derive(Clone, Copy, Debug)]
pub struct Ept<const HUGE_1G: bool, const FIVE: bool = false> {
    pub cpu: Cpu,
    /// The page-walk length: one more than bits 5:3 of the EPT pointer.
    pub levels: u32,
    /// Bits 51:12 of the EPT pointer, and its bit 6.
    pub root: u64,
    pub accessed_dirty: bool,
    /// The part of the root that the guest may use; hardware itself reads all of it.
    pub address_bits: u32,
}

impl<const HUGE_1G: bool, const FIVE: bool> Hardware for Ept<HUGE_1G, FIVE> {
    type Format = slat::format::ept::Ept<HUGE_1G>;
    const PAGE: u32 = 12;
    const STRIDE: u32 = 9;
    const OUTPUT: u32 = if FIVE { 52 } else { 48 };
    const SIZES: u32 = if HUGE_1G { 3 } else { 2 };
    const TABLES_COUNT: bool = true;
    const MARK: u64 = 1 << 62;
    const SOFTWARE_BITS: u8 = 6;
    const REFILL_BREAKS: bool = false;

    fn of(tables: &Tables<'_, Self::Format, TestPlatform>) -> Self {
        let (geometry, format) = (tables.geometry(), tables.format());
        let mode_based_execute = format.split_execute;
        let cpu = Cpu {
            maxphyaddr: format.output_bits,
            huge_1g: HUGE_1G,
            execute_only: false,
            mode_based_execute,
        };
        let pointer = format.eptp(&geometry, tables.root());
        assert_eq!(pointer & 0xf87, 0x6, "write-back, nothing reserved");
        let levels = (pointer >> 3 & 7) as u32 + 1;
        assert!(levels == 4 || levels == 5 && FIVE, "IA32_VMX_EPT_VPID_CAP");
        assert!(geometry.address_bits <= if levels == 5 { 57 } else { 48 });
        assert!(geometry.address_bits <= cpu.maxphyaddr, "no such guest-physical address");
        let root = pointer & !0xfff;
        let accessed_dirty = pointer >> 6 & 1 == 1;
        Self { cpu, levels, root, accessed_dirty, address_bits: geometry.address_bits }
    }

    fn format(config: &Config) -> Self::Format {
        slat::format::ept::Ept {
            vtd: None,
            accessed_dirty: config.hardware_marks,
            split_execute: config.split_execute,
            forced_write_back: config.forced_write_back,
            five_levels: FIVE,
            output_bits: Self::OUTPUT,
        }
    }

    fn usual() -> Self::Format {
        let output_bits = Self::OUTPUT;
        slat::format::ept::Ept { five_levels: FIVE, output_bits, ..Default::default() }
    }

    fn address_bits(&self) -> u32 {
        self.address_bits
    }

    fn root(&self) -> Root {
        Root { table: self.root, ptes: 512, height: self.levels - 1 }
    }

    fn decode(&self, raw: u64, height: u32) -> Descriptor {
        let bit = |n: u32| raw >> n & 1 == 1;
        match self.cpu.decode(raw, height as u8 + 1) {
            Entry::NotPresent => Descriptor::Invalid,
            Entry::Misconfiguration(what) => {
                panic!("{raw:#x} in a table of level {}: {what}", height + 1)
            }
            Entry::Table { address, rights } => {
                let user = rights.execute_kernel && rights.execute_user;
                let all = rights.read && rights.write && user;
                assert!(all, "a table withholds rights: {raw:#x}");
                // Where hardware marks nothing, bit 8 says nothing.
                let accessed = bit(8) || !self.accessed_dirty;
                Descriptor::Table { table: address, accessed }
            }
            Entry::Page(page) => {
                assert_eq!(page.features, 0, "rights of other features in {raw:#x}");
                let memory = match (page.memory_type, page.ignore_pat) {
                    (6, _) => Memory::Normal,
                    (1, false) => Memory::NonCacheable,
                    (0, false) => Memory::Device,
                    (0, true) => Memory::DeviceStrict,
                    other => panic!("memory type and IPAT {other:?}"),
                };
                let execute = match (page.rights.execute_kernel, page.rights.execute_user) {
                    (true, true) => Execute::All,
                    (true, false) => Execute::Kernel,
                    (false, true) => Execute::User,
                    (false, false) => Execute::None,
                };
                Descriptor::Leaf(Leaf {
                    oa: page.address,
                    memory: page.memory_type | u64::from(page.ignore_pat) << 3,
                    own: Attributes {
                        read: page.rights.read,
                        write: page.rights.write,
                        execute,
                        memory,
                        accessed: page.accessed,
                        dirty: page.dirty,
                        software: super::software(raw, &USERS),
                    },
                    marks: self.accessed_dirty,
                    reached: true,
                })
            }
        }
    }

    /// And bits 53 and 54 of a table, which hardware ignores.
    fn marked(raw: u64, height: u32) -> bool {
        let table = raw & 1 == 1 && height > 0 && raw & 1 << 7 == 0;
        raw & Self::MARK != 0 || table && raw & 0b11 << 53 != 0
    }

    /// "Accessed and Dirty Flags for EPT": A in each entry that is used, D in the entry of a page
    /// that is written.
    fn used(&self, raw: u64, write: bool) -> u64 {
        let marks = if write { 0x300 } else { 0x100 };
        if self.accessed_dirty { raw | marks } else { raw }
    }

    fn passed(&self, raw: u64) -> u64 {
        if self.accessed_dirty { raw | 0x100 } else { raw }
    }

    fn records_accessed(&self) -> bool {
        self.accessed_dirty
    }

    fn refuses(&self, a: Attributes) -> Vec<AttributeError> {
        let split = matches!(a.execute, Execute::User | Execute::Kernel);
        let all = [
            (!a.read, AttributeError::NeedsRead),
            (a.write && !a.dirty && !self.accessed_dirty, AttributeError::CleanNeedsHardwareDirty),
            (split && !self.cpu.mode_based_execute, AttributeError::ExecuteNeedsSplitRights),
        ];
        let all = all.into_iter().filter_map(|(refused, reason)| refused.then_some(reason));
        all.chain(Self::lacks(a.software)).collect()
    }
}
