//! The partition-scoped radix walk of POWER9 and POWER10, from the Power ISA, Book III ("Radix Tree
//! Translation" with its figures of entries, "Reference and Change Recording"; 3.0B 5.7.10 and
//! 5.7.12, 3.1 6.7.10 and 6.7.12) and the processors' manuals ("Supported Radix Tree
//! Configurations"). Entries are eight bytes, the first of which is the most significant; bits are
//! numbered as the manual does, from the highest.

use super::{Config, Descriptor, Hardware, Leaf, Root, TestPlatform};
use slat::format::AttributeError;
use slat::format::power::Power;
use slat::{Attributes, Execute, Memory, Tables};

/// The fields of a word.
#[derive(Clone, Copy, Debug)]
pub struct Word(pub u64);

impl Word {
    /// Reads the eight bytes as a walker does.
    pub const fn of(bytes: [u8; 8]) -> Self {
        Self(u64::from_be_bytes(bytes))
    }

    /// Returns bits `first` to `last`, both included.
    pub const fn field(self, first: u32, last: u32) -> u64 {
        self.0 << first >> (63 - (last - first))
    }

    pub const fn bit(self, n: u32) -> bool {
        self.field(n, n) == 1
    }
}

/// How hardware reads an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Entry {
    /// V is clear.
    Invalid,
    /// The next level's base, and its size in bits of index.
    Directory(u64, u64),
    Page(Page),
    /// An unsupported radix tree configuration, or a field that should be 0.
    Fault(&'static str),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Page {
    pub address: u64,
    pub read: bool,
    pub write: bool,
    /// The right by EAA alone: nothing is fetched from a guarded page.
    pub execute: bool,
    pub reference: bool,
    pub change: bool,
    pub att: u64,
    /// Bit 2, then 52:54.
    pub software: u64,
}

/// A core.
#[derive(Clone, Copy, Debug)]
pub struct Cpu {
    pub real_bits: u32,
}

impl Cpu {
    /// Returns the entry in a table whose entries translate `2^shift` bytes each.
    pub fn decode(&self, entry: [u8; 8], shift: u32) -> Entry {
        let word = Word::of(entry);
        if !word.bit(0) {
            return Entry::Invalid;
        }
        if !word.bit(1) {
            let (base, size) = (word.field(4, 55) << 8, word.field(59, 63));
            return if word.field(2, 3) != 0 || word.field(56, 58) != 0 {
                Entry::Fault("reserved bits of a directory entry")
            } else if !base.is_multiple_of(8 << size) {
                Entry::Fault("a base that is not aligned to its table")
            } else if base >> self.real_bits != 0 {
                Entry::Fault("no such real address")
            } else {
                Entry::Directory(base, size)
            };
        }
        if !matches!(shift, 12 | 16 | 21 | 30) {
            return Entry::Fault("no such page size");
        }
        if word.field(3, 6) != 0 || word.bit(57) {
            return Entry::Fault("reserved bits of a page table entry");
        }
        let address = word.field(7, 51) << 12;
        if !address.is_multiple_of(1 << shift) {
            return Entry::Fault("a page that is not aligned to its size");
        }
        if address >> self.real_bits != 0 {
            return Entry::Fault("no such real address");
        }
        Entry::Page(Page {
            address,
            // EAA; its bit 60 (privileged) counts in process-scoped entries only.
            read: word.bit(61) || word.bit(62),
            write: word.bit(62),
            execute: word.bit(63),
            reference: word.bit(55),
            change: word.bit(56),
            att: word.field(58, 59),
            software: word.field(2, 2) << 3 | word.field(52, 54),
        })
    }
}

/// A core with a partition table entry. With `SETS`, hardware sets R and C; without it, an
/// interrupt makes software set them.
#[derive(Clone, Copy, Debug)]
pub struct Core<const PAGE: u32, const SETS: bool> {
    pub cpu: Cpu,
    /// The first doubleword of the partition table entry.
    pub entry: Word,
    /// The part of 52 bits that the guest may use.
    pub address_bits: u32,
}

impl<const PAGE: u32, const SETS: bool> Core<PAGE, SETS> {
    /// Returns the index bits of a table at `height`: with 64K pages the last level has five.
    const fn index_bits(height: u32) -> u64 {
        if height == 0 && PAGE == 16 { 5 } else { 9 }
    }
}

impl<const PAGE: u32, const SETS: bool> Hardware for Core<PAGE, SETS> {
    type Format = Power<PAGE>;
    const PAGE: u32 = PAGE;
    const STRIDE: u32 = 9;
    const LAST_STRIDE: u32 = if PAGE == 16 { 5 } else { 9 };
    const SIZES: u32 = 3;
    const TABLES_COUNT: bool = false;
    const MARK: u64 = u64::from_ne_bytes([0x20, 0, 0, 0, 0, 0, 0, 0]);
    const SOFTWARE_BITS: u8 = 3;
    const REFILL_BREAKS: bool = true;
    const WRITE_READS: bool = true;

    fn of(tables: &Tables<'_, Power<PAGE>, TestPlatform>) -> Self {
        let entry = Word(Power::<PAGE>::partition_entry(tables.root()).unwrap());
        assert!(entry.bit(0), "HR: the host's tables are radix trees");
        assert_eq!((entry.field(1, 2) << 3 | entry.field(56, 58)) + 31, 52, "RTS");
        let cpu = Cpu { real_bits: tables.format().output_bits };
        Self { cpu, entry, address_bits: tables.geometry().address_bits }
    }

    fn format(_: &Config) -> Power<PAGE> {
        Self::usual()
    }

    fn usual() -> Power<PAGE> {
        Power { output_bits: 48 }
    }

    fn address_bits(&self) -> u32 {
        self.address_bits
    }

    fn root(&self) -> Root {
        let (table, size) = (self.entry.field(4, 55) << 8, self.entry.field(59, 63));
        assert_eq!((size, table % (8 << size)), (13, 0), "RPDS, RPDB");
        Root { table, ptes: 1 << size, height: 3 }
    }

    fn decode(&self, raw: u64, height: u32) -> Descriptor {
        match self.cpu.decode(raw.to_ne_bytes(), Self::shift(height)) {
            Entry::Invalid => Descriptor::Invalid,
            Entry::Fault(what) => panic!("{raw:#x} at height {height}: {what}"),
            Entry::Directory(table, size) => {
                assert!(height > 0, "a directory entry in a table of pages");
                assert_eq!(size, Self::index_bits(height - 1), "unsupported configuration");
                Descriptor::Table { table, accessed: true }
            }
            Entry::Page(page) => Descriptor::Leaf(Leaf {
                oa: page.address,
                memory: page.att,
                own: Attributes {
                    read: page.read,
                    write: page.write,
                    execute: if page.execute { Execute::All } else { Execute::None },
                    memory: [Memory::Normal, Memory::Normal, Memory::Device, Memory::NonCacheable]
                        [page.att as usize],
                    accessed: page.reference,
                    dirty: page.change,
                    software: super::software(page.software, &[2, 1, 0]),
                },
                marks: true,
                reached: true,
            }),
        }
    }

    fn marked(raw: u64, _height: u32) -> bool {
        raw & Self::MARK != 0
    }

    fn used(&self, raw: u64, write: bool) -> u64 {
        let mut bytes = raw.to_ne_bytes();
        // R is bit 55, the lowest of the seventh byte; C is bit 56, the highest of the last.
        bytes[6] |= 1;
        bytes[7] |= if write { 0x80 } else { 0 };
        u64::from_ne_bytes(bytes)
    }

    fn passed(&self, raw: u64) -> u64 {
        raw
    }

    fn faults(&self, leaf: &Attributes, write: bool) -> bool {
        !SETS && (!leaf.accessed || write && !leaf.dirty)
    }

    fn records_accessed(&self) -> bool {
        true
    }

    fn refuses(&self, a: Attributes) -> Vec<AttributeError> {
        let split = matches!(a.execute, Execute::User | Execute::Kernel);
        let all = [
            (a.write && !a.read, AttributeError::NeedsRead),
            (split, AttributeError::ExecuteNeedsSplitRights),
            (a.memory == Memory::DeviceStrict, AttributeError::MemoryType),
        ];
        let all = all.into_iter().filter_map(|(refused, reason)| refused.then_some(reason));
        all.chain(Self::lacks(a.software)).collect()
    }
}
