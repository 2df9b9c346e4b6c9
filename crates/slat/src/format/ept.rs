//! Intel extended page tables (EPT): four or five levels, pages of 4k, blocks of 2m and 1g.
//!
//! Bits as in the Intel Software Developer's Manual, volume 3C, "VMX Support for Address
//! Translation", section "The Extended Page Table Mechanism": its tables of entry formats, "EPT
//! Misconfigurations" and "EPT and Memory Typing". (Intel renumbers the chapter: 28 to 31 so far.)
//!
//! Four levels translate 48 bits of a guest-physical address, five 57. No guest-physical address is
//! wider than MAXPHYADDR, which is 52 at most ("EPT Translation Mechanism").
//!
//! The hypervisor must not enable features that give bits of an entry another meaning:
//! EPT-violation #VE (bit 63), sub-page permissions (61), supervisor shadow stacks (60),
//! paging-write (58), guest-paging verification (57).

pub mod fault;
pub mod invept;
pub mod vtd;

use super::long_mode::{
    self, Bits, FIVE_LEVELS_BITS, FOUR_LEVELS_BITS, MAX_OUTPUT_BITS, PRESENT as R, W, bit,
    long_mode,
};
use super::{
    Access, AttributeError, Attributes, Execute, Format, Geometry, GeometryError, GuestRoot, Kind,
    Memory, Software, TOKEN_BITS, software,
};
use crate::addr::Hpa;
use core::fmt;

/// EPT of a CPU that has blocks of 1 GiB.
pub type Ept1G = Ept<true>;
/// EPT of a CPU whose largest block is 2 MiB.
pub type Ept2M = Ept<false>;

/// EPT with or without blocks of 1 GiB, as the user of the tables configured it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ept<const HUGE_1G: bool> {
    /// Bit 6 of the EPT pointer: hardware sets accessed and dirty bits. Then the guest's walks of
    /// its own page tables count as writes, and need the right to write. Without it, a use of a
    /// leaf whose accessed bit is clear does *not* fault, so the bit has no meaning.
    pub accessed_dirty: bool,
    /// The VM-execution control "mode-based execute control for EPT": bit 2 of a leaf lets the
    /// guest's kernel execute, bit 10 its user programs.
    pub split_execute: bool,
    /// Normal memory ignores the guest's PAT. This is right where all DMA is coherent.
    pub forced_write_back: bool,
    /// The CPU can walk five levels (bit 7 of IA32_VMX_EPT_VPID_CAP), which guest addresses of more
    /// than 48 bits need. Tables for narrower addresses have four levels all the same.
    pub five_levels: bool,
    /// MAXPHYADDR, at most 52; hardware rejects entries with bits above it.
    pub output_bits: u32,
    /// Intel's IOMMU also walks the tables (see [`vtd`]); `None` if it does not.
    pub vtd: Option<vtd::Vtd>,
}

impl<const HUGE_1G: bool> Default for Ept<HUGE_1G> {
    /// A CPU of 2013 or later, with physical addresses as wide as an entry can hold. Hardware has
    /// narrower ones: use [`Ept::from_capabilities`].
    fn default() -> Self {
        Self {
            accessed_dirty: true,
            split_execute: false,
            forced_write_back: true,
            five_levels: false,
            output_bits: MAX_OUTPUT_BITS,
            vtd: None,
        }
    }
}

/// With mode-based execute control: lets the kernel execute.
const X: u64 = 1 << 2;
/// With mode-based execute control: lets user programs execute. Ignored without it.
const XU: u64 = 1 << 10;
const MEMORY_SHIFT: u32 = 3;
const MEMORY: u64 = 0b111 << MEMORY_SHIFT;
/// The guest's PAT does not take part in the memory type.
const IPAT: u64 = 1 << 6;
const A: u64 = 1 << 8;
const D: u64 = 1 << 9;
/// SNP, for VT-d; the CPU ignores it. Reserved in tables.
const SNP: u64 = 1 << 11;
/// The CPU ignores bits 56:52, 59, 62 and 11 of leaves and of tables; VT-d's second stage does not
/// (see [`vtd`]). The bits that the engine uses in tables are its user's in leaves: only
/// [`Format::leaf`] and [`Format::table`] make one from the other.
const SW_USER: [u64; Software::MOST] =
    software::masks([1 << 52, 1 << 55, 1 << 56, 1 << 59, 1 << 53, 1 << 54]);
const SW_AGEING: u64 = 1 << 54;
const MARK: u64 = 1 << 62;

const BITS: Bits = Bits {
    accessed: A,
    dirty: D,
    mark: MARK,
    ageing: SW_AGEING,
    software: SW_USER,
    inherited: R | W | X | XU | MEMORY | IPAT | A | D | SNP | software::all(SW_USER),
};

const UNCACHEABLE: u64 = 0;
const WRITE_COMBINING: u64 = 1;
const WRITE_THROUGH: u64 = 4;
const WRITE_PROTECTED: u64 = 5;
const WRITE_BACK: u64 = 6;

impl<const HUGE_1G: bool> Ept<HUGE_1G> {
    /// Returns the format that a CPU supports. `capabilities` is its MSR IA32_VMX_EPT_VPID_CAP
    /// (0x48c), `maxphyaddr` bits 7:0 of EAX of CPUID leaf 0x8000_0008. Mode-based execute control
    /// stays off: other registers report and enable it.
    ///
    /// # Errors
    /// [`MissingCapabilities`] names what these tables need and the CPU lacks.
    pub const fn from_capabilities(
        capabilities: u64,
        maxphyaddr: u32,
    ) -> Result<Self, MissingCapabilities> {
        let no_context = capabilities & (1 << 25 | 1 << 26) == 0;
        let needed = 1 << 6 | 1 << 14 | 1 << 16 | 1 << 20 | bit(HUGE_1G, 1 << 17);
        let missing = needed & !capabilities | bit(no_context, 1 << 25);
        if missing != 0 {
            return Err(MissingCapabilities { missing });
        }
        Ok(Self {
            accessed_dirty: capabilities & 1 << 21 != 0,
            split_execute: false,
            forced_write_back: true,
            five_levels: capabilities & 1 << 7 != 0,
            output_bits: maxphyaddr,
            vtd: None,
        })
    }

    /// Returns the EPT pointer for the VMCS: tables at `root`, of this `geometry`, with write-back
    /// walks.
    pub const fn eptp(&self, geometry: &Geometry, root: Hpa) -> u64 {
        // The field is the number of levels of a walk, less one.
        let length = geometry.root_level as u64;
        root.0 | bit(self.accessed_dirty, 1 << 6) | length << 3 | WRITE_BACK
    }
}

impl<const HUGE_1G: bool> GuestRoot<Ept<HUGE_1G>> {
    /// Returns the EPT pointer for the VMCS ([`Ept::eptp`]; SDM 3C, "Extended-Page-Table Pointer").
    /// The VMID is not part of it: the CPU tags what it caches with the pointer.
    pub const fn eptp(&self) -> u64 {
        self.format.eptp(&self.geometry, self.root)
    }
}

/// The CPU lacks features that the tables need.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MissingCapabilities {
    /// The bits of IA32_VMX_EPT_VPID_CAP that are clear and should be set.
    pub missing: u64,
}

impl fmt::Display for MissingCapabilities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const NAMES: [(u32, &str); 6] = [
            (6, "walks of four levels"),
            (14, "write-back page tables"),
            (16, "2m blocks"),
            (17, "1g blocks"),
            (20, "INVEPT"),
            (25, "INVEPT of a single context or of all"),
        ];
        f.write_str("this CPU's EPT lacks ")?;
        let mut separator = "";
        for (number, name) in NAMES {
            if self.missing >> number & 1 == 1 {
                write!(f, "{separator}{name} (bit {number} of IA32_VMX_EPT_VPID_CAP)")?;
                separator = ", ";
            }
        }
        Ok(())
    }
}

impl core::error::Error for MissingCapabilities {}

/// Indexed by the memory type and, above its bits, IPAT: a load is faster than comparisons.
const MEMORY_TYPES: [Memory; 16] = {
    assert!(IPAT == (MEMORY + (1 << MEMORY_SHIFT)), "the next bit above the type's");
    let mut types = [Memory::DeviceStrict; 16];
    let mut ignores_pat = 0;
    while ignores_pat < 16 {
        types[ignores_pat + WRITE_BACK as usize] = Memory::Normal;
        types[ignores_pat + WRITE_THROUGH as usize] = Memory::Normal;
        types[ignores_pat + WRITE_PROTECTED as usize] = Memory::Normal;
        types[ignores_pat + WRITE_COMBINING as usize] = Memory::NonCacheable;
        ignores_pat += 8;
    }
    types[UNCACHEABLE as usize] = Memory::Device;
    types
};

/// Returns the bits of a right to execute, with mode-based execute control.
const fn execute_bits(execute: Execute) -> u64 {
    match execute {
        Execute::None => 0,
        Execute::All => X | XU,
        Execute::User => XU,
        Execute::Kernel => X,
    }
}

/// Returns the right to execute in `raw`, where `user` is the bit that user programs need.
const fn execute(raw: u64, user: u64) -> Execute {
    match (raw & X != 0, raw & user != 0) {
        (true, true) => Execute::All,
        (true, false) => Execute::Kernel,
        (false, true) => Execute::User,
        (false, false) => Execute::None,
    }
}

// SAFETY: `long_mode` answers for its items, and these add:
// 1. The attribute bits of `encode` include bit 0, and so does `table`. Methods that make a leaf
//    from a leaf change only W, X, XU, A and D.
// 2. `table` sets no bit of an address but those of the frame.
// 3. `geometry` puts the root at level 3 or 4.
// 4. The tables are those of `long_mode`.
// 5. A leaf has the address unchanged, in bits that no attribute uses.
// 6. There are no groups.
unsafe impl<const HUGE_1G: bool> Format for Ept<HUGE_1G> {
    const NAME: &'static str = if HUGE_1G { "Intel EPT" } else { "Intel EPT without 1g blocks" };
    long_mode!(BITS);

    /// Walks begin at the PML4, or at the PML5 where four levels do not suffice. Narrow guests use
    /// only the first entry of it. No guest address is wider than the CPU's physical addresses.
    fn geometry(&self, address_bits: u32) -> Result<Geometry, GeometryError> {
        let widest = if self.five_levels { FIVE_LEVELS_BITS } else { FOUR_LEVELS_BITS };
        let (min, max) = (Self::PAGE_SHIFT, widest.min(self.output_bits()));
        if !(min..=max).contains(&address_bits) {
            return Err(GeometryError { address_bits, min, max, format: Self::NAME });
        }
        let root_level = if address_bits > FOUR_LEVELS_BITS { 4 } else { 3 };
        let bits = address_bits.saturating_sub(Self::shift(root_level));
        Ok(Geometry { address_bits, root_level, root_entries: 1 << bits })
    }

    #[inline(always)]
    fn encode(&self, a: Attributes) -> Result<u64, AttributeError> {
        if !a.read {
            return Err(AttributeError::NeedsRead);
        }
        if a.write && !a.dirty && !self.accessed_dirty {
            return Err(AttributeError::CleanNeedsHardwareDirty);
        }
        let execute = match a.execute {
            Execute::All if !self.split_execute => X,
            Execute::User | Execute::Kernel if !self.split_execute => {
                return Err(AttributeError::ExecuteNeedsSplitRights);
            }
            execute => execute_bits(execute),
        };
        // The guest's PAT cannot make these types cacheable, but it can turn uncacheable into
        // write-combining. That is right for a frame buffer, and not for a strict device.
        let (memory, ignore_pat) = match a.memory {
            Memory::Normal => (WRITE_BACK, self.forced_write_back),
            Memory::NonCacheable => (WRITE_COMBINING, false),
            Memory::Device => (UNCACHEABLE, false),
            Memory::DeviceStrict => (UNCACHEABLE, true),
        };
        Ok(R | bit(a.write, W)
            | execute
            | memory << MEMORY_SHIFT
            | bit(ignore_pat, IPAT)
            | bit(self.vtd.is_some_and(|vtd| vtd.snoop), SNP)
            | bit(a.accessed, A)
            | bit(a.dirty, D)
            | a.software.encode(SW_USER)?)
    }

    #[inline(always)]
    fn decode(&self, raw: u64, _level: u8) -> Attributes {
        let user = if self.split_execute { XU } else { X };
        Attributes {
            read: raw & R != 0,
            write: raw & W != 0,
            execute: execute(raw, user),
            memory: MEMORY_TYPES[(raw >> MEMORY_SHIFT & 0b1111) as usize],
            accessed: raw & A != 0,
            dirty: raw & D != 0,
            software: Software::decode(raw, SW_USER),
        }
    }

    /// With all rights, because leaves restrict them; and accessed, as a table above an accessed
    /// leaf must be.
    #[inline(always)]
    fn table(hpa: Hpa, _level: u8) -> u64 {
        hpa.0 | R | W | X | XU | A
    }

    #[inline(always)]
    fn execute_protected(raw: u64) -> u64 {
        raw & !(X | XU)
    }

    #[inline(always)]
    fn relaxed(&self, raw: u64, access: Access) -> u64 {
        match access {
            Access::Read => raw | A,
            Access::Write => raw | A | W | D,
            _ if !self.split_execute => raw | A | X,
            _ => raw | A | execute_bits(execute(raw, XU).with(access)),
        }
    }

    #[inline(always)]
    fn records_accessed(&self) -> bool {
        self.accessed_dirty
    }

    #[inline(always)]
    fn marks_valid(&self) -> bool {
        self.vtd.is_none()
    }

    #[inline(always)]
    fn cleaned(&self, raw: u64) -> u64 {
        if self.accessed_dirty || raw & W == 0 { raw & !D } else { raw }
    }
}
