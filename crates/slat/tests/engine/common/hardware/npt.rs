//! AMD's walk of nested page tables, from the AMD64 manual, volume 2: the figures of 5.3 "Long-Mode
//! Page Translation", and 15.25 "Nested Paging". Levels are the manual's (1 is the page table, 4
//! the PML4, 5 the PML5), bits are numbers.

use super::{Config, Descriptor, Hardware, Leaf, Root, TestPlatform};
use slat::format::AttributeError;
use slat::{Attributes, Execute, Memory, Tables};

/// The features of a CPU besides four levels, 2 MiB pages and EFER.NXE.
#[derive(Clone, Copy, Debug)]
pub struct Cpu {
    pub physical_bits: u32,
    pub huge_1g: bool,
}

pub const EPYC: Cpu = Cpu { physical_bits: 48, huge_1g: true };

/// How hardware reads an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Entry {
    NotPresent,
    Table { address: u64, rights: Rights },
    Page(Page),
    Reserved(&'static str),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rights {
    pub write: bool,
    pub user: bool,
    pub execute: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Page {
    pub address: u64,
    pub size: u64,
    pub rights: Rights,
    /// The index into the host's PAT.
    pub pat_index: u64,
    pub accessed: bool,
    pub dirty: bool,
    /// The global bit and the protection key, which belong to other features.
    pub features: u64,
}

/// Values of a PAT entry, as bytes of the MSR (7.8).
pub const UC: u64 = 0;
pub const UC_MINUS: u64 = 7;
pub const WB: u64 = 6;

/// The PAT as reset leaves it: WB, WT, UC-, UC, twice.
pub const RESET_PAT: u64 = 0x0007_0406_0007_0406;

pub fn memory_type(pat: u64, index: u64) -> u64 {
    pat >> (8 * index) & 7
}

impl Cpu {
    /// Returns the manual's level of an entry: 5 in the PML5, 4 in the PML4, 1 in a page table.
    pub fn decode(&self, raw: u64, level: u8) -> Entry {
        let bit = |n: u32| raw >> n & 1 == 1;
        let field = |high: u32, low: u32| raw >> low & ((1 << (high - low + 1)) - 1);
        if !bit(0) {
            return Entry::NotPresent;
        }
        if self.physical_bits < 52 && field(51, self.physical_bits) != 0 {
            return Entry::Reserved("address beyond the physical address width");
        }
        let rights = Rights { write: bit(1), user: bit(2), execute: !bit(63) };
        let (low, pat_bit) = match (level, bit(7)) {
            (1, _) => (12, 7),
            (2, true) => (21, 12),
            (3, true) if self.huge_1g => (30, 12),
            (3, true) => return Entry::Reserved("bit 7 of a PDPE without 1 GiB pages"),
            (4, _) if field(8, 7) != 0 => return Entry::Reserved("bits 8:7 of a PML4E"),
            (5, _) if field(8, 7) != 0 => return Entry::Reserved("bits 8:7 of a PML5E"),
            _ => return Entry::Table { address: raw & 0xf_ffff_ffff_f000, rights },
        };
        if low > 12 && field(low - 1, 13) != 0 {
            return Entry::Reserved("address bits of a large page");
        }
        Entry::Page(Page {
            address: field(51, low) << low,
            size: 1 << low,
            rights,
            pat_index: field(4, 3) | field(pat_bit, pat_bit) << 2,
            accessed: bit(5),
            dirty: bit(6),
            features: raw & (0xf << 59 | 1 << 8),
        })
    }
}

/// The format, with physical addresses of the width in the tests.
pub const FORMAT: slat::format::npt::Npt1G =
    slat::format::npt::Npt { five_levels: false, output_bits: 48 };

/// Bits that are available in an entry that maps a page, except those that the engine uses.
pub const USERS: [u32; 8] = [52, 53, 55, 56, 57, 58, 9, 10];

/// A CPU with N_CR3 loaded; if `FIVE`, its host has CR4.LA57 set.
#[derive(Clone, Copy, Debug)]
pub struct Npt<const HUGE_1G: bool, const FIVE: bool = false> {
    pub cpu: Cpu,
    pub root: u64,
    /// The part of the root that the guest may use; hardware itself reads all of it.
    pub address_bits: u32,
}

impl<const HUGE_1G: bool, const FIVE: bool> Hardware for Npt<HUGE_1G, FIVE> {
    type Format = slat::format::npt::Npt<HUGE_1G>;
    const PAGE: u32 = 12;
    const STRIDE: u32 = 9;
    const OUTPUT: u32 = if FIVE { 52 } else { 48 };
    const SIZES: u32 = if HUGE_1G { 3 } else { 2 };
    const TABLES_COUNT: bool = true;
    const MARK: u64 = 1 << 11;
    const SOFTWARE_BITS: u8 = 8;
    const REFILL_BREAKS: bool = false;

    fn of(tables: &Tables<'_, Self::Format, TestPlatform>) -> Self {
        let (geometry, format) = (tables.geometry(), tables.format());
        let cpu = Cpu { physical_bits: format.output_bits, huge_1g: HUGE_1G };
        assert_eq!(format.five_levels, FIVE, "the host's mode");
        assert!(geometry.address_bits <= if FIVE { 57 } else { 48 });
        assert!(geometry.address_bits <= cpu.physical_bits, "no such guest-physical address");
        let root = format.ncr3(tables.root());
        assert_eq!(root & 0xfff, 0, "neither PWT nor PCD, and nothing reserved");
        Self { cpu, root, address_bits: geometry.address_bits }
    }

    fn format(_: &Config) -> Self::Format {
        Self::usual()
    }

    fn usual() -> Self::Format {
        slat::format::npt::Npt { five_levels: FIVE, output_bits: Self::OUTPUT }
    }

    fn address_bits(&self) -> u32 {
        self.address_bits
    }

    fn root(&self) -> Root {
        Root { table: self.root, ptes: 512, height: if FIVE { 4 } else { 3 } }
    }

    fn decode(&self, raw: u64, height: u32) -> Descriptor {
        let bit = |n: u32| raw >> n & 1 == 1;
        match self.cpu.decode(raw, height as u8 + 1) {
            Entry::NotPresent => Descriptor::Invalid,
            Entry::Reserved(what) => panic!("{raw:#x} in a table of level {}: {what}", height + 1),
            Entry::Table { address, rights } => {
                assert!(rights.user, "a table that no nested walk may use: {raw:#x}");
                assert!(rights.write && rights.execute, "a table withholds rights: {raw:#x}");
                Descriptor::Table { table: address, accessed: bit(5) }
            }
            Entry::Page(page) => {
                assert_eq!(page.features, 0, "other features in {raw:#x}");
                assert!(page.rights.user, "a leaf that no nested walk may use: {raw:#x}");
                let memory = match (memory_type(RESET_PAT, page.pat_index), bit(54)) {
                    (WB, false) => Memory::Normal,
                    (UC_MINUS, true) => Memory::NonCacheable,
                    (UC_MINUS, false) => Memory::Device,
                    (UC, false) => Memory::DeviceStrict,
                    other => panic!("memory type {other:?}"),
                };
                Descriptor::Leaf(Leaf {
                    oa: page.address,
                    memory: page.pat_index,
                    own: Attributes {
                        read: true,
                        write: page.rights.write,
                        execute: if page.rights.execute { Execute::All } else { Execute::None },
                        memory,
                        accessed: page.accessed,
                        dirty: page.dirty,
                        software: super::software(raw, &USERS),
                    },
                    marks: true,
                    reached: true,
                })
            }
        }
    }

    /// And bits 9 and 10 of a table, which hardware ignores.
    fn marked(raw: u64, height: u32) -> bool {
        let table = raw & 1 == 1 && height > 0 && raw & 1 << 7 == 0;
        raw & Self::MARK != 0 || table && raw & 0b11 << 9 != 0
    }

    /// 5.4: A in each entry that is used, D in the entry of a page that is written.
    fn used(&self, raw: u64, write: bool) -> u64 {
        raw | if write { 0x60 } else { 0x20 }
    }

    fn passed(&self, raw: u64) -> u64 {
        raw | 0x20
    }

    fn records_accessed(&self) -> bool {
        true
    }

    fn refuses(&self, a: Attributes) -> Vec<AttributeError> {
        let split = matches!(a.execute, Execute::User | Execute::Kernel);
        let all = [
            (!a.read, AttributeError::NeedsRead),
            (split, AttributeError::ExecuteNeedsSplitRights),
        ];
        let all = all.into_iter().filter_map(|(refused, reason)| refused.then_some(reason));
        all.chain(Self::lacks(a.software)).collect()
    }
}
