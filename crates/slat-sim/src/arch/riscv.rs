//! RISC-V's G-stage, from the Instruction Set Manual, volume II: "Guest Physical Address
//! Translation" and "Virtual Address Translation Process" for the walk, "Supervisor
//! Memory-Management Fence Instruction" and "Hypervisor Memory-Management Fence Instructions" for
//! what may be cached; "Svade", "Svadu", "Svpbmt", "Svvptc". Levels are the manual's: 0 is that of
//! pages.

use super::{Arch, Descriptor, Fault, Leaf, Rights};

/// A hart, with its hgatp and menvcfg.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RiscV {
    /// Levels of hgatp.MODE: 3 for Sv39x4, 4 for Sv48x4, 5 for Sv57x4.
    pub levels: u8,
    /// Bits of a physical address.
    pub physical_bits: u32,
    /// Svadu, menvcfg.ADUE: hardware sets A and D. Without it (Svade), a clear bit is a fault.
    pub hardware_marks: bool,
    /// Svpbmt, menvcfg.PBMTE: leaves have a memory type.
    pub memory_types: bool,
    /// Svvptc: a hart sees within bounded time that an entry has become valid.
    pub svvptc: bool,
}

impl Default for RiscV {
    /// Creates a hart with Sv39x4 and Svadu, and no other extension.
    fn default() -> Self {
        Self {
            levels: 3,
            physical_bits: 56,
            hardware_marks: true,
            memory_types: false,
            svvptc: false,
        }
    }
}

const VALID: u64 = 1 << 0;
const READ: u64 = 1 << 1;
const WRITE: u64 = 1 << 2;
const EXECUTE: u64 = 1 << 3;
const USER: u64 = 1 << 4;
const ACCESSED: u64 = 1 << 6;
const DIRTY: u64 = 1 << 7;
/// Number of index bits that the root has in addition to those of another table.
const ROOT_EXTRA_BITS: u32 = 2;

const fn bits(raw: u64, high: u32, low: u32) -> u64 {
    raw >> low & ((1 << (high - low + 1)) - 1)
}

impl Arch for RiscV {
    fn address_bits(&self) -> u32 {
        12 + 9 * u32::from(self.levels) + ROOT_EXTRA_BITS
    }

    fn root_level(&self) -> i8 {
        self.levels as i8 - 1
    }

    fn shift(&self, level: i8) -> u32 {
        12 + 9 * level as u32
    }

    fn entries(&self, level: i8) -> usize {
        if level == self.root_level() { 512 << ROOT_EXTRA_BITS } else { 512 }
    }

    /// Steps 3 to 6 of the translation process, for a CPU without Svnapot. Encodings that raise a
    /// page fault because they are reserved are distinguished from invalid entries.
    fn decode(&self, raw: u64, level: i8) -> Descriptor {
        if raw & VALID == 0 {
            return Descriptor::Invalid;
        }
        if bits(raw, 60, 54) != 0 {
            return Descriptor::Reserved("bits 60:54");
        }
        if raw >> 63 != 0 {
            return Descriptor::Reserved("N without Svnapot");
        }
        let memory = bits(raw, 62, 61) as u8;
        if memory != 0 && !self.memory_types {
            return Descriptor::Reserved("PBMT without Svpbmt");
        }
        let address = bits(raw, 53, 10) << 12;
        if address >> self.physical_bits != 0 {
            return Descriptor::Reserved("an address beyond the physical ones");
        }
        if raw & (READ | WRITE) == WRITE {
            return Descriptor::Reserved("writable and not readable");
        }
        if raw & (READ | WRITE | EXECUTE) == 0 {
            if level == 0 {
                return Descriptor::Reserved("a link at level 0");
            }
            if raw & (ACCESSED | DIRTY | USER) != 0 || memory != 0 {
                return Descriptor::Reserved("A, D, U or PBMT in a link");
            }
            return Descriptor::Table { table: address, rights: Rights::ALL };
        }
        if memory == 3 {
            return Descriptor::Reserved("PBMT 3");
        }
        if address & ((1 << self.shift(level)) - 1) != 0 {
            return Descriptor::Reserved("a misaligned superpage");
        }
        // "All memory accesses are considered to be user-level accesses"; sstatus.MXR is clear.
        let user = raw & USER != 0;
        Descriptor::Leaf(Leaf {
            hpa: address,
            rights: Rights {
                read: user && raw & READ != 0,
                write: user && raw & WRITE != 0,
                execute: user && raw & EXECUTE != 0,
            },
            memory,
            shareability: 0,
            accessed: raw & ACCESSED != 0,
            dirty: raw & DIRTY != 0,
        })
    }

    /// Step 9 of the translation process. Links are not marked.
    fn mark(&self, raw: u64, level: i8, write: bool) -> Result<u64, Fault> {
        if !matches!(self.decode(raw, level), Descriptor::Leaf(_)) {
            return Ok(raw);
        }
        let marked = raw | ACCESSED | if write { DIRTY } else { 0 };
        if marked != raw && !self.hardware_marks {
            return Err(Fault::Accessed);
        }
        Ok(marked)
    }

    /// Only fences order implicit reads of the tables.
    fn late(&self) -> bool {
        true
    }

    /// The hart uses either of two entries, "but the behavior is otherwise well-defined".
    fn breaks(&self) -> bool {
        false
    }

    /// A fault does not order reads of the tables.
    fn fault_forgets(&self) -> bool {
        false
    }

    fn caches_invalid(&self) -> bool {
        !self.svvptc
    }

    fn caches_unmarked(&self) -> bool {
        !self.hardware_marks
    }

    /// Svpbmt's NC and IO bypass the caches; the guest itself cannot choose that.
    fn bypasses(&self, memory: u8, _uncached: bool) -> bool {
        memory != 0
    }

    /// Fetches may see older memory until FENCE.I.
    fn stale_fetch(&self) -> bool {
        true
    }

    fn leaf_level(&self, shift: u32) -> Option<i8> {
        (0..=self.root_level()).find(|&level| self.shift(level) == shift)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = VALID | READ | WRITE | EXECUTE | USER | ACCESSED | DIRTY;

    #[test]
    fn the_root_is_four_times_a_table() {
        let of = |levels| {
            let hart = RiscV { levels, ..RiscV::default() };
            (
                hart.address_bits(),
                hart.root_level(),
                hart.entries(hart.root_level()),
                hart.entries(0),
            )
        };
        assert_eq!(of(3), (41, 2, 2048, 512));
        assert_eq!(of(4), (50, 3, 2048, 512));
        assert_eq!(of(5), (59, 4, 2048, 512));
    }

    #[test]
    fn what_the_manual_reserves_faults() {
        let hart = RiscV { physical_bits: 40, ..RiscV::default() };
        let reserved = |raw, level| matches!(hart.decode(raw, level), Descriptor::Reserved(_));
        assert!(reserved(VALID | WRITE | USER, 0), "writable and not readable");
        assert!(reserved(VALID, 0), "a link at level 0");
        assert!(!reserved(VALID, 1));
        for bit in [4, 6, 7] {
            assert!(reserved(VALID | 1 << bit, 1), "U, A or D in a link: bit {bit}");
        }
        for bit in 54..64 {
            assert!(reserved(PAGE | 1 << bit, 0) && reserved(VALID | 1 << bit, 1), "bit {bit}");
        }
        assert!(reserved(PAGE | 1 << 38, 0), "beyond 40 bits");
        assert!(reserved(PAGE | 1 << 10, 1) && !reserved(PAGE | 1 << 19, 1), "misaligned");
        assert!(!reserved(PAGE | 0b11 << 8 | 1 << 5, 0), "RSW, and G");
        assert_eq!(hart.decode(!VALID, 0), Descriptor::Invalid);
        let typed = RiscV { memory_types: true, ..hart };
        assert!(
            matches!(typed.decode(PAGE | 2 << 61, 0), Descriptor::Leaf(leaf) if leaf.memory == 2)
        );
        assert!(matches!(typed.decode(PAGE | 3 << 61, 0), Descriptor::Reserved(_)));
        assert!(matches!(typed.decode(VALID | 1 << 61, 1), Descriptor::Reserved(_)));
    }

    #[test]
    fn a_leaf_that_is_not_the_users_gives_no_right() {
        let found = RiscV::default().decode(PAGE & !USER | 5 << 10, 0);
        let Descriptor::Leaf(leaf) = found else { panic!("{found:?}") };
        assert_eq!(leaf.rights, Rights { read: false, write: false, execute: false });
        assert_eq!(leaf.hpa, 5 << 12);
    }

    #[test]
    fn a_leaf_is_marked_by_hardware_or_by_a_fault_and_a_link_never() {
        let hart = RiscV::default();
        let old = PAGE & !(ACCESSED | DIRTY);
        assert_eq!(hart.mark(old, 0, false), Ok(old | ACCESSED));
        assert_eq!(hart.mark(old, 1, true), Ok(PAGE));
        assert_eq!(hart.mark(VALID, 1, true), Ok(VALID));
        let soft = RiscV { hardware_marks: false, ..hart };
        assert_eq!(soft.mark(old, 0, false), Err(Fault::Accessed));
        assert_eq!(soft.mark(old | ACCESSED, 0, false), Ok(old | ACCESSED));
        assert_eq!(soft.mark(old | ACCESSED, 0, true), Err(Fault::Accessed));
        assert_eq!(soft.mark(PAGE, 0, true), Ok(PAGE));
    }
}
