//! AMD nested paging (NPT): four or five levels, pages of 4k, blocks of 2m and 1g.
//!
//! Bits as in the AMD64 Architecture Programmer's Manual, volume 2: the formats of 5.3 "Long-Mode
//! Page Translation", the fields of 5.4 "Page-Translation-Table Entry Fields", and their use in
//! 15.25 "Nested Paging".
//!
//! The CPU walks nested tables in the host's paging mode (15.25.3). That has to be long mode with
//! EFER.NXE set: four levels, or five where the host has CR4.LA57 set. The hypervisor must not
//! enable features that give bits another meaning: guest mode execute trap and supervisor shadow
//! stacks in the VMCB, and memory encryption (its C-bit lies among the bits of the address).

pub mod asid;
pub mod fault;

use super::long_mode::{
    self, Bits, FIVE_LEVELS_BITS, FOUR_LEVELS_BITS, MAX_OUTPUT_BITS, PRESENT as P, W, bit,
    long_mode,
};
use super::{
    Access, AttributeError, Attributes, Execute, Format, Geometry, GeometryError, GuestRoot, Kind,
    Memory, Software, TOKEN_BITS, software,
};
use crate::addr::Hpa;
use core::fmt;

/// Nested paging on a CPU that has blocks of 1 GiB.
pub type Npt1G = Npt<true>;
/// Nested paging on a CPU whose largest block is 2 MiB.
pub type Npt2M = Npt<false>;

/// Nested paging with or without blocks of 1 GiB.
///
/// Hardware always sets accessed and dirty bits. The guest's walks of its own page tables count as
/// writes, and need the right to write (15.25.6).
///
/// The guest's PAT always takes part in the memory type (15.25.8); a leaf cannot force one. A leaf
/// selects a type from the host's PAT, by an index on which the PAT of reset and Linux's agree: 0
/// is write-back, 2 UC-, 3 uncacheable. No index is write-combining in both. So memory that is not
/// cacheable is UC-, like a device, which lets the guest choose write-combining. A bit that
/// hardware ignores tells the two apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Npt<const HUGE_1G: bool> {
    /// The host's CR4.LA57 while the guest runs: nested walks have five levels, for any width of
    /// guest addresses. They translate 57 bits, and physical addresses have 52 at most.
    pub five_levels: bool,
    /// Bits of a physical address, at most 52; hardware rejects entries with bits above it.
    pub output_bits: u32,
}

impl<const HUGE_1G: bool> Default for Npt<HUGE_1G> {
    /// Physical addresses as wide as an entry can hold. Hardware has narrower ones: use
    /// [`Npt::from_cpuid`].
    fn default() -> Self {
        Self { five_levels: false, output_bits: MAX_OUTPUT_BITS }
    }
}

/// Nested walks have the rights of user programs (15.25.6): without this bit all of them fail.
const U: u64 = 1 << 2;
const PWT: u64 = 1 << 3;
const PCD: u64 = 1 << 4;
const A: u64 = 1 << 5;
/// Only in leaves; hardware ignores the bit in tables.
const D: u64 = 1 << 6;
const NX: u64 = 1 << 63;
/// Hardware ignores bits 58:52 and 11:9 of leaves and of tables. (Bits 62:59 of a leaf are the
/// protection key where the host's CR4.PKE is set.) The bits that the engine uses in tables are its
/// user's in leaves: only [`Format::leaf`] and [`Format::table`] make one from the other.
const SW_USER: [u64; Software::MOST] =
    software::masks([1 << 52, 1 << 53, 1 << 55, 1 << 56, 1 << 57, 1 << 58, 1 << 9, 1 << 10]);
/// Together with UC-: normal memory that is not cacheable, and no device.
const SW_NORMAL: u64 = 1 << 54;
const SW_AGEING: u64 = 1 << 10;
const MARK: u64 = 1 << 11;

const BITS: Bits = Bits {
    accessed: A,
    dirty: D,
    mark: MARK,
    ageing: SW_AGEING,
    software: SW_USER,
    inherited: P | W | U | PWT | PCD | A | D | NX | software::all(SW_USER) | SW_NORMAL,
};

const WRITE_BACK: u64 = 0;
const UNCACHEABLE_MINUS: u64 = PCD;
const UNCACHEABLE: u64 = PCD | PWT;

/// Bits of EDX of CPUID function 0x8000_0001.
const FEATURE_NX: u32 = 1 << 20;
const FEATURE_1G: u32 = 1 << 26;
/// Bit of EDX of CPUID function 0x8000_000a.
const FEATURE_NP: u32 = 1 << 0;

impl<const HUGE_1G: bool> Npt<HUGE_1G> {
    /// Returns the format that a CPU supports. `extended` is EDX of CPUID function 0x8000_0001,
    /// `sizes` EAX of 0x8000_0008, `svm` EDX of 0x8000_000a. It has four levels; the host's paging
    /// mode decides whether there are five.
    ///
    /// # Errors
    /// [`MissingFeatures`] names what these tables need and the CPU lacks.
    pub const fn from_cpuid(extended: u32, sizes: u32, svm: u32) -> Result<Self, MissingFeatures> {
        let needed = FEATURE_NX | if HUGE_1G { FEATURE_1G } else { 0 };
        let missing = MissingFeatures { extended: needed & !extended, svm: FEATURE_NP & !svm };
        if missing.extended | missing.svm != 0 {
            return Err(missing);
        }
        Ok(Self { five_levels: false, output_bits: sizes & 0xff })
    }

    /// Returns the VMCB's N_CR3: tables at `root`, with write-back walks.
    pub const fn ncr3(&self, root: Hpa) -> u64 {
        root.0
    }
}

impl<const HUGE_1G: bool> GuestRoot<Npt<HUGE_1G>> {
    /// Returns the VMCB's N_CR3, at offset 0xb0 ([`Npt::ncr3`]; APM 2, 15.25.3 and appendix B).
    pub const fn ncr3(&self) -> u64 {
        self.format.ncr3(self.root)
    }

    /// Returns the VMCB's quadword at offset 0x58: the VMID as ASID, and `control` for the TLB (APM
    /// 2, 15.16). The CPU has to have that ASID ([`Asids::can_be`](asid::Asids::can_be)).
    pub const fn asid(&self, control: asid::TlbControl) -> u64 {
        control.with_asid(self.vmid.0 as u32)
    }
}

/// The CPU lacks features that the tables need.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MissingFeatures {
    /// The bits of EDX of CPUID function 0x8000_0001 that are clear and should be set.
    pub extended: u32,
    /// The same for function 0x8000_000a.
    pub svm: u32,
}

impl fmt::Display for MissingFeatures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = [
            (self.svm & FEATURE_NP, "nested paging (bit 0 of EDX of CPUID function 0x8000000a)"),
            (self.extended & FEATURE_NX, "no-execute (bit 20 of EDX of 0x80000001)"),
            (self.extended & FEATURE_1G, "1g blocks (bit 26 of EDX of 0x80000001)"),
        ];
        f.write_str("this CPU lacks ")?;
        let mut separator = "";
        for (_, name) in names.iter().filter(|(missing, _)| *missing != 0) {
            write!(f, "{separator}{name}")?;
            separator = ", ";
        }
        Ok(())
    }
}

impl core::error::Error for MissingFeatures {}

// SAFETY: `long_mode` answers for its items, and these add:
// 1. The attribute bits of `encode` include bit 0, and so does `table`. Methods that make a leaf
//    from a leaf change only W, NX, A and D.
// 2. `table` sets no bit of an address but those of the frame.
// 3. `geometry` puts the root at level 3 or 4.
// 4. The tables are those of `long_mode`.
// 5. A leaf has the address unchanged, in bits that no attribute uses.
// 6. There are no groups.
unsafe impl<const HUGE_1G: bool> Format for Npt<HUGE_1G> {
    const NAME: &'static str = if HUGE_1G { "AMD NPT" } else { "AMD NPT without 1g blocks" };
    long_mode!(BITS);

    /// Walks begin at the PML4, or with five levels at the PML5. Narrow guests use only the first
    /// entry of it. No guest address is wider than the CPU's physical addresses.
    fn geometry(&self, address_bits: u32) -> Result<Geometry, GeometryError> {
        let (root_level, widest) =
            if self.five_levels { (4, FIVE_LEVELS_BITS) } else { (3, FOUR_LEVELS_BITS) };
        let (min, max) = (Self::PAGE_SHIFT, widest.min(self.output_bits()));
        if !(min..=max).contains(&address_bits) {
            return Err(GeometryError { address_bits, min, max, format: Self::NAME });
        }
        let bits = address_bits.saturating_sub(Self::shift(root_level));
        Ok(Geometry { address_bits, root_level, root_entries: 1 << bits })
    }

    #[inline(always)]
    fn encode(&self, a: Attributes) -> Result<u64, AttributeError> {
        // A present leaf is readable.
        if !a.read {
            return Err(AttributeError::NeedsRead);
        }
        let execute = match a.execute {
            Execute::None => NX,
            Execute::All => 0,
            Execute::User | Execute::Kernel => return Err(AttributeError::ExecuteNeedsSplitRights),
        };
        let memory = match a.memory {
            Memory::Normal => WRITE_BACK,
            Memory::NonCacheable => UNCACHEABLE_MINUS | SW_NORMAL,
            Memory::Device => UNCACHEABLE_MINUS,
            Memory::DeviceStrict => UNCACHEABLE,
        };
        Ok(P | U
            | bit(a.write, W)
            | execute
            | memory
            | bit(a.accessed, A)
            | bit(a.dirty, D)
            | a.software.encode(SW_USER)?)
    }

    /// Leaves that others made may select further types. Index 1 of reset's PAT is write-through,
    /// which is cached, and the index's high bit selects the same four again.
    #[inline(always)]
    fn decode(&self, raw: u64, _level: u8) -> Attributes {
        Attributes {
            read: raw & P != 0,
            write: raw & W != 0,
            execute: if raw & NX == 0 { Execute::All } else { Execute::None },
            memory: match raw & (PCD | PWT) {
                UNCACHEABLE => Memory::DeviceStrict,
                UNCACHEABLE_MINUS if raw & SW_NORMAL == 0 => Memory::Device,
                UNCACHEABLE_MINUS => Memory::NonCacheable,
                _ => Memory::Normal,
            },
            accessed: raw & A != 0,
            dirty: raw & D != 0,
            software: Software::decode(raw, SW_USER),
        }
    }

    /// With all rights, because leaves restrict them; and accessed, as a table above an accessed
    /// leaf must be.
    #[inline(always)]
    fn table(hpa: Hpa, _level: u8) -> u64 {
        hpa.0 | P | W | U | A
    }

    #[inline(always)]
    fn execute_protected(raw: u64) -> u64 {
        raw | NX
    }

    #[inline(always)]
    fn relaxed(&self, raw: u64, access: Access) -> u64 {
        match access {
            Access::Read => raw | A,
            Access::Write => raw | A | W | D,
            _ => (raw | A) & !NX,
        }
    }

    #[inline(always)]
    fn cleaned(&self, raw: u64) -> u64 {
        raw & !D
    }
}
