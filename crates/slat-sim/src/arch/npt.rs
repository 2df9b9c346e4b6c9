//! AMD's nested paging, from the AMD64 Architecture Programmer's Manual, volume 2: 5.3 and 5.4
//! (formats), 5.5 (translation caches), 15.16 (TLB control), 15.25 (nested paging). Levels are the
//! manual's: 5 is the PML5, 4 the PML4, 1 the page table.

use super::{Arch, Descriptor, Fault, Leaf, Rights};

/// An AMD CPU whose host runs in long mode, with no-execute enabled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Npt {
    /// Bits of a physical address.
    pub physical_bits: u32,
    /// Levels of the host's paging mode: 5 if it sets CR4.LA57, else 4.
    pub levels: u8,
}

impl Default for Npt {
    fn default() -> Self {
        Self { physical_bits: 48, levels: 4 }
    }
}

const PRESENT: u64 = 1 << 0;
const WRITE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const LARGE: u64 = 1 << 7;
const NO_EXECUTE: u64 = 1 << 63;

impl Arch for Npt {
    fn address_bits(&self) -> u32 {
        12 + 9 * u32::from(self.levels)
    }

    fn root_level(&self) -> i8 {
        self.levels as i8
    }

    /// 5.3.3 to 5.3.5; nested walks count as accesses of user mode (15.25.6).
    fn decode(&self, raw: u64, level: i8) -> Descriptor {
        if raw & PRESENT == 0 {
            return Descriptor::Invalid;
        }
        let address = raw & ((1 << 52) - (1 << 12));
        if address >> self.physical_bits != 0 {
            return Descriptor::Reserved("an address beyond the physical address width");
        }
        let user = raw & USER != 0;
        let rights = Rights {
            read: user,
            write: user && raw & WRITE != 0,
            execute: user && raw & NO_EXECUTE == 0,
        };
        if level != 1 && raw & LARGE == 0 {
            return Descriptor::Table { table: address, rights };
        }
        if level > 3 {
            return Descriptor::Reserved("no page of 512 GiB");
        }
        // The high bit of the PAT index is bit 7 of a page, and bit 12 of a large page.
        let pat = if level == 1 { raw >> 7 & 1 } else { raw >> 12 & 1 };
        let address = if level == 1 { address } else { address & !(1 << 12) };
        if address & ((1 << self.shift(level)) - 1) != 0 {
            return Descriptor::Reserved("bits below the address of a large page");
        }
        Descriptor::Leaf(Leaf {
            hpa: address,
            rights,
            memory: (pat << 2 | raw >> 3 & 0b11) as u8,
            shareability: 0,
            accessed: raw & ACCESSED != 0,
            dirty: raw & DIRTY != 0,
        })
    }

    /// 5.4.2: accessed in every entry of the walk; dirty in the leaf of a write.
    fn mark(&self, raw: u64, level: i8, write: bool) -> Result<u64, Fault> {
        let leaf = level == 1 || raw & LARGE != 0;
        Ok(raw | ACCESSED | if write && leaf { DIRTY } else { 0 })
    }

    /// 5.5: a right that was added needs no invalidation, because a fault walks the tables again.
    fn fault_forgets(&self) -> bool {
        true
    }

    /// 15.25.6: the guest's page-table walks need the right to write, and set dirty marks.
    fn walks_write(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_bits_are_reserved() {
        let cpu = Npt { physical_bits: 40, ..Npt::default() };
        let reserved = |raw, level| matches!(cpu.decode(raw, level), Descriptor::Reserved(_));
        assert!(reserved(0b111 | 1 << 40, 1), "beyond the physical address width");
        assert!(reserved(0b111 | LARGE | 1 << 13, 2), "an unaligned large page");
        assert!(!reserved(0b111 | LARGE | 1 << 12, 2), "the PAT's bit");
        assert!(reserved(0b111 | LARGE, 4), "512 GiB");
        assert_eq!(cpu.decode(!PRESENT, 1), Descriptor::Invalid);
    }

    #[test]
    fn an_entry_that_is_not_the_users_gives_no_right() {
        let Descriptor::Leaf(leaf) = Npt::default().decode(0b011, 1) else { panic!("no leaf") };
        assert_eq!(leaf.rights, Rights { read: false, write: false, execute: false });
    }

    #[test]
    fn dirty_is_set_in_leaves_and_accessed_everywhere() {
        let cpu = Npt::default();
        assert_eq!(cpu.mark(0b111, 2, true), Ok(0b111 | ACCESSED));
        assert_eq!(cpu.mark(0b111, 1, true), Ok(0b111 | ACCESSED | DIRTY));
        assert_eq!(cpu.mark(0b111 | LARGE, 3, false), Ok(0b111 | LARGE | ACCESSED));
    }
}
