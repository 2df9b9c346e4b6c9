//! Tables that Intel's IOMMU (VT-d) also walks, as its second stage.
//!
//! Source: the Intel Virtualization Technology for Directed I/O Architecture Specification,
//! "Second-Stage Paging Entries", "Capability Register", "Extended Capability Register", "Snoop
//! Behavior", "Invalidation of Translation Caches".
//!
//! An entry of EPT is a second-stage entry except for a few bits. Bit 11 of a leaf is SNP: requests
//! snoop the CPU's caches, even if the device asked for no snoop. Bit 62 is TM in a leaf and
//! reserved in a table: the engine must not use it as its mark there. Accessed and dirty (8, 9) are
//! ignored, or set by hardware where the unit can do so and it is enabled. Memory type and IPAT
//! (6:3) are ignored by most units, and mean the same to others. VT-d ignores the other bits of an
//! entry that is not present, as EPT does, so markers and tokens work unchanged.
//!
//! With [`Ept::vtd`](super::Ept::vtd) set, the format makes leaves with SNP where the units have
//! it, and the engine never puts its mark into an entry that is present:
//! [`Guard::collapse`](crate::Guard::collapse) returns
//! [`SplitError::Shared`](crate::SplitError::Shared).
//!
//! # What the hypervisor does
//!
//! - **Invalidation.** [`Platform::invalidate`](crate::Platform::invalidate) also invalidates the
//!   IOTLB by domain or page, with paging-structure caches where `tables` says so (IH = 0), then
//!   the device TLBs of devices that have ATS enabled, and waits for both (an invalidation wait
//!   descriptor). If it reaches only CPUs, a device goes on writing to memory that now has another
//!   use.
//! - **Units that cache entries that are not present** (Caching Mode, bit 7 of the capability
//!   register, as virtual units have) need an invalidation of the IOTLB after each map as well, and
//!   units with bit 4 (RWBF) a flush of their write buffer.
//!   [`Platform::publish`](crate::Platform::publish) does both.
//! - **Faults.** An access of a device that the tables refuse is aborted, unless device and unit
//!   have page requests (PRS). So memory that a device may use has to be mapped, and pinned, before
//!   the device uses it. Write protection does not log a device's writes: it makes them fail.
//! - **Writes of devices.** Without second-stage accessed and dirty bits (SSADS, bit 45 of the
//!   extended capability register, and the bit of the domain's PASID-table entry) a device's write
//!   leaves no trace: [`Guard::harvest`](crate::Guard::harvest) does not report it, and
//!   [`Guard::age`](crate::Guard::age) finds its page old. The hypervisor has to count pages that
//!   devices may write as dirty always.
//! - **Rights.** The right to execute applies to the CPU only. A leaf without the right to read
//!   cannot be made here, nor one that devices may write and not read.
//! - **Guest addresses.** The unit refuses addresses beyond its MGAW. Its AGAW for the domain is 48
//!   bits, four levels.
//! - **The platform's `fill`** and stores need no cache flush: [`Vtd::from_registers`] refuses
//!   units whose walks are not coherent; see [`Vtd::with_coherent_walks`].
//!
//! [`commands`] has the descriptors of the invalidation queue.

pub mod commands;

use super::bit;
use core::fmt;

/// Configuration for tables that VT-d walks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Vtd {
    /// Snoop control: leaves have SNP. Units without snoop control treat the bit as reserved, so it
    /// may be set only if all units that walk these tables have it. If it is unset, a device may
    /// bypass caches where it asks to, and its guest needs what CPUs offer for such devices
    /// (WBINVD).
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
    /// Returns the configuration that a unit supports, for tables whose largest block is 1 GiB
    /// (`huge_1g`) or 2 MiB. `capability` is its capability register (offset 0x8), `extended` its
    /// extended capability register (0x10). If several units walk the same tables, pass the bits
    /// that all of them have.
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

    /// As [`Vtd::from_registers`], for a unit that does not claim coherent walks (bit 0 of
    /// `extended`) although its walks see what CPUs store. So does a unit that a VMM emulates in
    /// software, such as QEMU's, and a unit before memory that the platform maps uncached for
    /// tables. Hardware whose walks are not coherent reads stale entries.
    ///
    /// # Errors
    /// Those of [`Vtd::from_registers`] but for coherent walks.
    pub const fn with_coherent_walks(
        capability: u64,
        extended: u64,
        huge_1g: bool,
    ) -> Result<Self, MissingVtd> {
        Self::from_registers(capability, extended | COHERENT, huge_1g)
    }
}

/// The unit lacks features that the tables need.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MissingVtd {
    /// Bits of the capability register that are clear and should be set.
    pub capability: u64,
    /// Bits of the extended capability register that are clear and should be set.
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
