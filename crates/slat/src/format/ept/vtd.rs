//! Tables that Intel's IOMMU walks as well, as its second stage.
//!
//! As in the Intel Virtualization Technology for Directed I/O Architecture Specification:
//! "Second-Stage Paging Entries", "Capability Register", "Extended Capability Register", "Snoop
//! Behavior", "Invalidation of Translation Caches".
//!
//! A page of EPT is a second-stage page but for three bits. Bit 11 of a leaf is SNP: requests snoop
//! the CPU's caches, whatever the device asked for. Bit 62 of a leaf is TM, and of a table
//! reserved: the engine's mark, so it must not stand there. Accessed and dirty (8, 9) are ignored,
//! or set by hardware where the unit can and is told to. Memory type and IPAT (6:3) say nothing to
//! most units, and mean the same to others. In an entry that is not present VT-d ignores the rest,
//! as EPT does: markers and tokens stay the engine's.
//!
//! With [`Ept::vtd`](super::Ept::vtd) set, leaves are made with SNP where the units have it, and no
//! mark is ever put into an entry that is present: [`Guard::collapse`](crate::Guard::collapse)
//! answers [`SplitError::Shared`](crate::SplitError::Shared), and
//! [`Guard::write_protect_subtrees`](crate::Guard::write_protect_subtrees) takes the right from the
//! leaves, as on formats whose tables have none.
//!
//! # What is left to the owner
//!
//! - **Invalidation.** [`Platform::invalidate`](crate::Platform::invalidate) also invalidates the
//!   IOTLB by domain or page, with paging-structure caches where `tables` says so (IH = 0), then
//!   the device TLBs of devices that have ATS on, and waits for both (an invalidation wait
//!   descriptor). An invalidation that only reaches CPUs leaves a device writing to memory that was
//!   given away.
//! - **Units that cache what is not present** (Caching Mode, bit 7 of the capability register, as
//!   virtual units have) take an invalidation of the IOTLB after each map as well, and units with
//!   bit 4 (RWBF) a flush of their write buffer: in [`Platform::publish`](crate::Platform::publish).
//! - **Faults.** A device's access that the tables refuse is aborted, unless the device and unit
//!   have page requests (PRS). So memory that a device may use is mapped, and pinned, before it
//!   does, and write protection does not log its writes: it breaks them.
//! - **What devices write.** Without second-stage accessed and dirty bits (SSADS, bit 45 of the
//!   extended capability register, and the bit of the domain's PASID-table entry) a device's write
//!   leaves no trace: [`Guard::harvest`](crate::Guard::harvest) does not see it, and
//!   [`Guard::age`](crate::Guard::age) takes its page for old. Pages that devices may write count
//!   as dirty always.
//! - **Rights.** The right to execute, and who has it, is the CPU's alone. A leaf without the right
//!   to read cannot be made here, nor one that devices may write and not read.
//! - **Guest addresses** beyond the unit's MGAW are refused by it. The unit's AGAW for the domain
//!   is 48 bits, four levels.
//! - **The platform's `fill`** and stores need no flush: units whose walks are not coherent are
//!   refused by [`Vtd::from_registers`].

use super::bit;
use core::fmt;

/// How VT-d walks the tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Vtd {
    /// Snoop control: leaves have SNP. Units without it take the bit for reserved, so all units
    /// that walk these tables have it, or it is off; then a device may leave caches out where it
    /// asks to, and its guest needs what CPUs do for such devices (WBINVD).
    pub snoop: bool,
}

/// Bits of the capability register.
const FOUR_LEVELS: u64 = 1 << 10;
const BLOCKS_2M: u64 = 1 << 34;
const BLOCKS_1G: u64 = 1 << 35;
/// Bits of the extended capability register.
const COHERENT: u64 = 1 << 0;
const SNOOP_CONTROL: u64 = 1 << 7;

impl Vtd {
    /// What a unit supports: its capability register (offset 0x8) and extended capability register
    /// (0x10), for tables whose largest block is 1 GiB (`huge_1g`) or 2 MiB. Of several units that
    /// walk the same tables, the bits that all have.
    ///
    /// # Errors
    /// [`MissingVtd`] names what these tables need and the unit lacks.
    pub const fn from_registers(
        capability: u64,
        extended: u64,
        huge_1g: bool,
    ) -> Result<Self, MissingVtd> {
        let needed = FOUR_LEVELS | BLOCKS_2M | bit(huge_1g, BLOCKS_1G);
        let (capability, coherent) = (needed & !capability, COHERENT & !extended);
        if capability | coherent != 0 {
            return Err(MissingVtd { capability, extended: coherent });
        }
        Ok(Self { snoop: extended & SNOOP_CONTROL != 0 })
    }
}

/// The unit lacks what the tables need.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MissingVtd {
    /// Bits of the capability register that are clear and should be set.
    pub capability: u64,
    /// The same of the extended capability register.
    pub extended: u64,
}

impl fmt::Display for MissingVtd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = [
            (self.capability & FOUR_LEVELS, "tables of four levels (bit 10 of CAP_REG)"),
            (self.capability & BLOCKS_2M, "2m blocks (bit 34 of CAP_REG)"),
            (self.capability & BLOCKS_1G, "1g blocks (bit 35 of CAP_REG)"),
            (self.extended & COHERENT, "coherent walks (bit 0 of ECAP_REG)"),
        ];
        f.write_str("this IOMMU lacks ")?;
        let mut separator = "";
        for (_, name) in names.iter().filter(|(missing, _)| *missing != 0) {
            write!(f, "{separator}{name}")?;
            separator = ", ";
        }
        Ok(())
    }
}

impl core::error::Error for MissingVtd {}
