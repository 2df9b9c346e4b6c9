//! Partition-scoped radix trees of POWER9 and POWER10, from the Power ISA, Book III ("Radix Tree
//! Translation", 3.0B 5.7.10; "Reference and Change Recording", 5.7.12; "TLB Management
//! Instructions") and the processors' manuals ("Supported Radix Tree Configurations"). Levels count
//! from the root, 1, to the page table, 4; bits of a word are numbered from the most significant,
//! 0.

use super::{Arch, Descriptor, Fault, Leaf, Rights, Sizes};
use slat::BreakBeforeMake;

/// A core, and the page size of the guest's tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Power {
    /// Base-2 logarithm of the bytes of a page: 12 or 16.
    pub page: u32,
    /// Bits of a real address.
    pub real_bits: u32,
    /// Hardware sets R and C; otherwise it raises an interrupt, and software sets them.
    pub sets: bool,
}

/// Returns bits `first` to `last` of a word, both included.
pub(crate) const fn field(word: u64, first: u32, last: u32) -> u64 {
    word << first >> (63 - (last - first))
}

const fn bit(word: u64, n: u32) -> bool {
    field(word, n, n) == 1
}

const fn mask(n: u32) -> u64 {
    1 << (63 - n)
}

/// Returns the entry as a word, whose most significant byte comes first in memory.
const fn word(raw: u64) -> u64 {
    u64::from_be_bytes(raw.to_ne_bytes())
}

const fn raw(word: u64) -> u64 {
    u64::from_ne_bytes(word.to_be_bytes())
}

impl Power {
    /// Creates a core that sets R and C, with pages of `2^page` bytes.
    pub const fn new(page: u32) -> Self {
        Self { page, real_bits: 51, sets: true }
    }

    /// Returns the number of index bits of a table of `level` (NLS, or RPDS for the root).
    fn index_bits(&self, level: i8) -> u32 {
        match level {
            1 => 13,
            4 => 21 - self.page,
            _ => 9,
        }
    }
}

impl Arch for Power {
    fn address_bits(&self) -> u32 {
        52
    }

    fn root_level(&self) -> i8 {
        1
    }

    fn below(&self, level: i8) -> i8 {
        level + 1
    }

    fn shift(&self, level: i8) -> u32 {
        self.page + (level + 1..=4).map(|below| self.index_bits(below)).sum::<u32>()
    }

    fn entries(&self, level: i8) -> usize {
        1 << self.index_bits(level)
    }

    fn decode(&self, raw: u64, level: i8) -> Descriptor {
        let word = word(raw);
        if !bit(word, 0) {
            return Descriptor::Invalid;
        }
        if !bit(word, 1) {
            let (base, size) = (field(word, 4, 55) << 8, field(word, 59, 63) as u32);
            return if level == 4 || size != self.index_bits(level + 1) {
                Descriptor::Reserved("an unsupported radix tree configuration")
            } else if field(word, 2, 3) != 0 || field(word, 56, 58) != 0 {
                Descriptor::Reserved("reserved bits of a directory entry")
            } else if !base.is_multiple_of(8 << size) || base >> self.real_bits != 0 {
                Descriptor::Reserved("no base of a table")
            } else {
                Descriptor::Table { table: base, rights: Rights::ALL }
            };
        }
        if level == 1 {
            return Descriptor::Reserved("no page of 512 GiB");
        }
        let address = field(word, 7, 51) << 12;
        if field(word, 3, 6) != 0 || bit(word, 57) {
            return Descriptor::Reserved("reserved bits of a page table entry");
        }
        if address & ((1 << self.shift(level)) - 1) != 0 || address >> self.real_bits != 0 {
            return Descriptor::Reserved("no address of a page");
        }
        let att = field(word, 58, 59);
        Descriptor::Leaf(Leaf {
            hpa: address,
            rights: Rights {
                read: bit(word, 61) || bit(word, 62),
                write: bit(word, 62),
                // Instructions are not fetched from guarded memory.
                execute: bit(word, 63) && att != 0b10,
            },
            memory: att as u8,
            shareability: 0,
            accessed: bit(word, 55),
            dirty: bit(word, 56),
        })
    }

    fn mark(&self, raw_entry: u64, _level: i8, write: bool) -> Result<u64, Fault> {
        let old = word(raw_entry);
        if !bit(old, 1) {
            return Ok(raw_entry);
        }
        let new = old | mask(55) | if write { mask(56) } else { 0 };
        if new != old && !self.sets { Err(Fault::Accessed) } else { Ok(raw(new)) }
    }

    fn late(&self) -> bool {
        true
    }

    fn breaks(&self) -> bool {
        true
    }

    fn sizes(&self) -> Sizes {
        Sizes::Forbidden
    }

    /// 3.1B 6.10.1.2: before it faults for a missing right, the CPU fetches the entry again.
    fn fault_forgets(&self) -> bool {
        true
    }

    /// Attributes 2 and 3 inhibit caching. A guest's attribute that conflicts raises an interrupt.
    fn bypasses(&self, memory: u8, _uncached: bool) -> bool {
        memory >= 0b10
    }

    fn stale_fetch(&self) -> bool {
        true
    }

    fn leaf_level(&self, shift: u32) -> Option<i8> {
        (2..=4).find(|&level| self.shift(level) == shift)
    }

    fn break_before_make(&self) -> BreakBeforeMake {
        BreakBeforeMake::Always
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEAF: u64 = mask(0) | mask(1);

    fn decode(word: u64, page: u32, level: i8) -> Descriptor {
        Power::new(page).decode(raw(word), level)
    }

    #[test]
    fn a_tree_has_the_sizes_that_the_processors_walk() {
        let (small, large) = (Power::new(12), Power::new(16));
        assert_eq!([1, 2, 3, 4].map(|level| small.shift(level)), [39, 30, 21, 12]);
        assert_eq!([1, 2, 3, 4].map(|level| large.shift(level)), [39, 30, 21, 16]);
        assert_eq!([1, 2, 3, 4].map(|level| large.entries(level)), [8192, 512, 512, 32]);
    }

    #[test]
    fn an_entry_is_read_with_its_first_byte_the_most_significant() {
        let entry = u64::from_ne_bytes([0xc0, 0, 0, 0, 0x80, 0x20, 0x11, 0x87]);
        let Descriptor::Leaf(leaf) = Power::new(12).decode(entry, 4) else { panic!("no leaf") };
        assert_eq!((leaf.hpa, leaf.rights), (0x8020_1000, Rights::ALL));
        assert!(leaf.accessed && leaf.dirty);
    }

    #[test]
    fn reserved_bits_and_other_trees_are_reserved() {
        let reserved =
            |word, page, level| matches!(decode(word, page, level), Descriptor::Reserved(_));
        let table = mask(0) | 0x1_0000;
        assert!(!reserved(table | 9, 12, 3) && !reserved(table | 5, 16, 3));
        assert!(reserved(table | 5, 12, 3), "five bits of 4K pages");
        assert!(reserved(table | 9, 16, 3), "nine bits of 64K pages");
        assert!(reserved(table | 9, 12, 4), "a table below pages");
        assert!(reserved(table | 9 | mask(2), 12, 3) && reserved(table | 9 | mask(56), 12, 3));
        assert!(reserved(LEAF, 12, 1), "512 GiB");
        assert!(reserved(LEAF | 0x1000, 16, 4) && reserved(LEAF | 1 << 51, 12, 4), "addresses");
        assert!(reserved(LEAF | mask(3), 12, 4) && reserved(LEAF | mask(57), 12, 4));
        assert_eq!(decode(!mask(0), 12, 4), Descriptor::Invalid);
    }

    #[test]
    fn guarded_memory_is_never_executed_and_write_implies_read() {
        let rights = |word| match decode(LEAF | word, 12, 4) {
            Descriptor::Leaf(leaf) => leaf.rights,
            other => panic!("{other:?}"),
        };
        assert!(rights(1).execute && rights(0x31).execute && !rights(0x21).execute);
        assert!(rights(2).read && rights(2).write && !rights(4).write);
        assert!(rights(8) == Rights { read: false, write: false, execute: false }, "privileged");
    }

    #[test]
    fn reference_and_change_are_set_or_asked_for_in_leaves_alone() {
        let (sets, asks) = (Power::new(12), Power { sets: false, ..Power::new(12) });
        assert_eq!(sets.mark(raw(LEAF), 4, false), Ok(raw(LEAF | 0x100)));
        assert_eq!(sets.mark(raw(LEAF), 3, true), Ok(raw(LEAF | 0x180)));
        assert_eq!(asks.mark(raw(LEAF | 0x100), 4, true), Err(Fault::Accessed));
        assert_eq!(asks.mark(raw(LEAF | 0x100), 4, false), Ok(raw(LEAF | 0x100)));
        assert_eq!(asks.mark(raw(mask(0) | 9), 3, true), Ok(raw(mask(0) | 9)));
    }
}
