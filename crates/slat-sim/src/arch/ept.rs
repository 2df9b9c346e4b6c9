//! Intel's extended page tables, from the Software Developer's Manual, volume 3C: 30.3 (formats,
//! misconfigurations, accessed and dirty flags), 30.4 (caching and INVEPT). Levels are Intel's: 4
//! is the PML4, 1 the page table.

use super::{Arch, Descriptor, Fault, Leaf, Rights, Sizes};

/// An Intel CPU, with its EPTP and VM-execution controls.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ept {
    /// MAXPHYADDR: neither guest nor host addresses are wider.
    pub physical_bits: u32,
    /// Bit 6 of the EPTP: hardware sets accessed and dirty flags.
    pub accessed_dirty: bool,
    /// Mode-based execute control: bit 10 is a separate right.
    pub mode_based_execute: bool,
    /// IA32_VMX_EPT_VPID_CAP bit 0: a leaf may be executable and not readable.
    pub execute_only: bool,
    /// `IF_PSCHANGE_MC_NO` is clear: code cached in two sizes is a machine check (CVE-2018-12207).
    pub multihit: bool,
}

impl Default for Ept {
    fn default() -> Self {
        Self {
            physical_bits: 46,
            accessed_dirty: true,
            mode_based_execute: false,
            execute_only: true,
            multihit: false,
        }
    }
}

const READ: u64 = 1 << 0;
const WRITE: u64 = 1 << 1;
const EXECUTE: u64 = 1 << 2;
const LARGE: u64 = 1 << 7;
const ACCESSED: u64 = 1 << 8;
const DIRTY: u64 = 1 << 9;
const USER_EXECUTE: u64 = 1 << 10;

impl Ept {
    fn rights(&self, raw: u64) -> Rights {
        Rights {
            read: raw & READ != 0,
            write: raw & WRITE != 0,
            execute: raw & EXECUTE != 0 || self.mode_based_execute && raw & USER_EXECUTE != 0,
        }
    }
}

impl Arch for Ept {
    fn address_bits(&self) -> u32 {
        48
    }

    fn root_level(&self) -> i8 {
        4
    }

    /// 30.3.2 and 30.3.3.1 ("EPT misconfigurations").
    fn decode(&self, raw: u64, level: i8) -> Descriptor {
        let rights = self.rights(raw);
        if rights == (Rights { read: false, write: false, execute: false }) {
            return Descriptor::Invalid;
        }
        if rights.write && !rights.read {
            return Descriptor::Reserved("writable and not readable");
        }
        if !rights.read && !self.execute_only {
            return Descriptor::Reserved("executable and not readable");
        }
        let address = raw & ((1 << 52) - (1 << 12));
        if address >> self.physical_bits != 0 {
            return Descriptor::Reserved("an address beyond MAXPHYADDR");
        }
        let leaf = level == 1 || raw & LARGE != 0;
        if !leaf {
            if raw & 0b1111_1000 != 0 {
                return Descriptor::Reserved("bits 7:3 of a table");
            }
            return Descriptor::Table { table: address, rights };
        }
        if level > 3 {
            return Descriptor::Reserved("no page of 512 GiB");
        }
        if address & ((1 << self.shift(level)) - 1) != 0 {
            return Descriptor::Reserved("bits below the address of a large page");
        }
        let memory = (raw >> 3 & 0b111) as u8;
        if matches!(memory, 2 | 3 | 7) {
            return Descriptor::Reserved("memory type 2, 3 or 7");
        }
        Descriptor::Leaf(Leaf {
            hpa: address,
            rights,
            memory,
            shareability: 0,
            accessed: !self.accessed_dirty || raw & ACCESSED != 0,
            dirty: !self.accessed_dirty || raw & DIRTY != 0,
        })
    }

    /// 30.3.5: accessed in every entry of the walk; dirty in the leaf of a write.
    fn mark(&self, raw: u64, level: i8, write: bool) -> Result<u64, Fault> {
        if !self.accessed_dirty {
            return Ok(raw);
        }
        let leaf = level == 1 || raw & LARGE != 0;
        Ok(raw | ACCESSED | if write && leaf { DIRTY } else { 0 })
    }

    fn sizes(&self) -> Sizes {
        if self.multihit { Sizes::ForbiddenForCode } else { Sizes::Allowed }
    }

    /// 30.4.3.1: an EPT violation invalidates the cached entries for the address.
    fn fault_forgets(&self) -> bool {
        true
    }

    /// 30.3.3.2: with accessed and dirty flags, accesses to the guest's paging structures are
    /// writes.
    fn walks_write(&self) -> bool {
        self.accessed_dirty
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misconfigurations_are_reserved() {
        let cpu = Ept::default();
        let reserved = |raw, level| matches!(cpu.decode(raw, level), Descriptor::Reserved(_));
        assert!(reserved(0b010, 1), "writable and not readable");
        assert!(reserved(0b111 | 2 << 3, 1), "memory type 2");
        assert!(reserved(0b111 | 1 << 46, 1), "beyond MAXPHYADDR");
        assert!(reserved(0b111 | 1 << 3, 2), "bits 7:3 of a table");
        assert!(reserved(0b111 | LARGE | 1 << 12, 2), "an unaligned large page");
        assert!(reserved(0b111 | LARGE, 4), "512 GiB");
        assert!(!reserved(0b100, 1) && cpu.decode(1 << 9, 1) == Descriptor::Invalid);
    }

    #[test]
    fn dirty_is_set_in_leaves_and_accessed_everywhere() {
        let cpu = Ept::default();
        assert_eq!(cpu.mark(0b111, 2, true), Ok(0b111 | ACCESSED));
        assert_eq!(cpu.mark(0b111, 1, true), Ok(0b111 | ACCESSED | DIRTY));
        assert_eq!(cpu.mark(0b111 | LARGE, 3, false), Ok(0b111 | LARGE | ACCESSED));
    }
}
