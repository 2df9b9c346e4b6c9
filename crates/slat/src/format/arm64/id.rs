//! ID registers of a CPU, as far as stage 2 is concerned, and the values of VTCR_EL2 and VTTBR_EL2.
//!
//! Fields as in the Arm Architecture Reference Manual (DDI 0487), "AArch64 System Register
//! Descriptions", under the name of each register. A value that a field does not define yet means
//! at least what the highest defined one does (the manual's "Principles of the ID scheme").

use super::{Arm64, Shareability};
use crate::addr::Hpa;
use crate::format::{Format, Geometry, GuestRoot};
use crate::invalidation::{BreakBeforeMake, Vmid};
use core::fmt;

/// Translation granule: the page size of a format.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Granule {
    /// 4 KiB.
    K4,
    /// 16 KiB.
    K16,
    /// 64 KiB.
    K64,
}

impl Granule {
    /// All granules.
    pub const ALL: [Self; 3] = [Self::K4, Self::K16, Self::K64];

    /// Returns the granule of `2^page_shift` bytes.
    ///
    /// # Panics
    /// If there is none. Call it in constants, where that is a compile-time error.
    pub const fn of_shift(page_shift: u32) -> Self {
        match page_shift {
            12 => Self::K4,
            14 => Self::K16,
            16 => Self::K64,
            _ => panic!("the granule is 4K, 16K or 64K"),
        }
    }

    /// Returns the base-2 logarithm of the granule in bytes.
    pub const fn shift(self) -> u32 {
        match self {
            Self::K4 => 12,
            Self::K16 => 14,
            Self::K64 => 16,
        }
    }

    /// Returns the encoding for operands of TLB maintenance: TG of a range, and bits 3:2 of TTL.
    pub(super) const fn tg(self) -> u64 {
        match self {
            Self::K4 => 0b01,
            Self::K16 => 0b10,
            Self::K64 => 0b11,
        }
    }

    /// Returns the encoding for VTCR_EL2.TG0, which is another one.
    const fn tg0(self) -> u64 {
        match self {
            Self::K4 => 0b00,
            Self::K16 => 0b10,
            Self::K64 => 0b01,
        }
    }
}

impl fmt::Display for Granule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}k", (1u32 << self.shift()) >> 10)
    }
}

/// Values of a CPU's ID registers, as read at EL2.
///
/// Where the CPUs of a machine differ, each field has the value that holds for all of them. Where
/// an erratum disables a feature, the platform clears the field first (HAFDBS in `mmfr1`, where
/// hardware must not set the accessed flag).
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct IdRegisters {
    /// ID_AA64MMFR0_EL1.
    pub mmfr0: u64,
    /// ID_AA64MMFR1_EL1.
    pub mmfr1: u64,
    /// ID_AA64MMFR2_EL1.
    pub mmfr2: u64,
    /// ID_AA64ISAR0_EL1.
    pub isar0: u64,
    /// MIDR_EL1, for errata; 0 if no CPU has one that concerns stage 2. Where CPUs differ, take
    /// that of one for which [`repeats_tlbi`] is true.
    pub midr: u64,
}

/// Returns whether a CPU needs each broadcast TLBI and its DSB twice
/// ([`Tlbi::repeat`](super::tlbi::Tlbi::repeat)), by its MIDR_EL1: one does not wait for stores of
/// other CPUs through the translation.
///
/// Arm's errata 4118414 (of Cortex-A76 to X925, Neoverse N1 to V3, C1), 2441007 (Cortex-A55),
/// 2441009 (Cortex-A510 before r1p2) and 1286807 (Cortex-A76), and the same in CPUs of others, as
/// Linux 7.3 has them (`arm64_repeat_tlbi_list`).
pub const fn repeats_tlbi(midr: u64) -> bool {
    const ARM: u64 = 0x41;
    const QUALCOMM: u64 = 0x51;
    const NVIDIA: u64 = 0x4e;
    const MICROSOFT: u64 = 0x6d;
    let (implementer, part) = (midr >> 24 & 0xff, midr >> 4 & 0xfff);
    // rVpP as 0xVP.
    let version = midr >> 16 & 0xf0 | midr & 0xf;
    match (implementer, part) {
        // Cortex-A510.
        (ARM, 0xd46) => version <= 0x11,
        // Cortex-A55, A76, A76AE, A77, A78, A78AE, A78C, A710.
        (ARM, 0xd05 | 0xd0b | 0xd0e | 0xd0d | 0xd41 | 0xd42 | 0xd4b | 0xd47) => true,
        // Cortex-X1, X1C, X2, X3, X4, X925; C1-Premium, C1-Ultra.
        (ARM, 0xd44 | 0xd4c | 0xd48 | 0xd4e | 0xd82 | 0xd85 | 0xd90 | 0xd8c) => true,
        // Neoverse N1, N2, V1, V2, V3, V3AE.
        (ARM, 0xd0c | 0xd49 | 0xd40 | 0xd4f | 0xd84 | 0xd83) => true,
        // Olympus; Azure Cobalt 100.
        (NVIDIA, 0x010) | (MICROSOFT, 0xd49) => true,
        // Falkor v1; Kryo and Kryo 4xx Gold.
        (QUALCOMM, 0x800) => version == 0,
        (QUALCOMM, 0x804) => 0xce <= version && version <= 0xfe,
        (QUALCOMM, part) => part & 0xf00 == 0x200,
        _ => false,
    }
}

/// Returns the field of four bits from `shift` on.
const fn field(register: u64, shift: u32) -> u64 {
    register >> shift & 0b1111
}

/// Encoding of PARange and VTCR_EL2.PS: the number of bits of a physical address, by value.
const ADDRESS_BITS: [u32; 8] = [32, 36, 40, 42, 44, 48, 52, 56];

const VTCR_SL0_SHIFT: u32 = 6;
const VTCR_SL2: u64 = 1 << 33;
/// IRGN0 and ORGN0: walks are write-back cached, with read and write allocation.
const VTCR_WALKS_WRITE_BACK: u64 = 0b01 << 8 | 0b01 << 10;
/// SH0: shareability of walks, and with DS of the memory that leaves map.
const VTCR_SH0_SHIFT: u32 = 12;
const VTCR_TG0_SHIFT: u32 = 14;
const VTCR_PS_SHIFT: u32 = 16;
const VTCR_VS: u64 = 1 << 19;
const VTCR_HA: u64 = 1 << 21;
const VTCR_HD: u64 = 1 << 22;
const VTCR_RES1: u64 = 1 << 31;
const VTCR_DS: u64 = 1 << 32;

const VTTBR_VMID_SHIFT: u32 = 48;
/// Bits 51:48 of a root go here, below its alignment, where tables have 52-bit addresses.
const VTTBR_HIGH_SHIFT: u32 = 2;
/// Minimum alignment, also of a root of fewer than eight entries.
const ROOT_ALIGNMENT: u64 = 64;

impl IdRegisters {
    /// Returns whether stage 2 has the granule: TGran4_2, TGran16_2 or TGran64_2, which may refer
    /// to the field of stage 1.
    pub const fn has_granule(&self, granule: Granule) -> bool {
        // The fields of 4K and 64K are signed, and negative where the granule is missing; that of
        // 16K is 0.
        let (stage2, stage1) = match granule {
            Granule::K4 => (40, field(self.mmfr0, 28) < 8),
            Granule::K16 => (32, field(self.mmfr0, 20) != 0),
            Granule::K64 => (36, field(self.mmfr0, 24) < 8),
        };
        match field(self.mmfr0, stage2) {
            0 => stage1,
            1 => false,
            _ => true,
        }
    }

    /// Returns whether stage 2 with the granule has VTCR_EL2.DS, and so addresses of 52 bits:
    /// FEAT_LPA2, by the fields of [`IdRegisters::has_granule`]. (The 64K granule has FEAT_LPA
    /// instead: [`IdRegisters::has_lpa`].)
    pub const fn has_lpa2(&self, granule: Granule) -> bool {
        let (stage2, stage1) = match granule {
            Granule::K4 => (40, matches!(field(self.mmfr0, 28), 1..=7)),
            Granule::K16 => (32, field(self.mmfr0, 20) >= 2),
            Granule::K64 => return false,
        };
        match field(self.mmfr0, stage2) {
            0 => stage1,
            own => own >= 3,
        }
    }

    /// Returns whether the 64K granule has addresses of 52 bits: FEAT_LPA, by PARange.
    pub fn has_lpa(&self) -> bool {
        self.address_bits() >= 52
    }

    /// Returns the number of bits of a physical address that the CPU implements: PARange.
    pub fn address_bits(&self) -> u32 {
        ADDRESS_BITS[field(self.mmfr0, 0).min(7) as usize]
    }

    /// Returns whether hardware sets the accessed flag: FEAT_HAFDBS.
    pub const fn hardware_accessed(&self) -> bool {
        field(self.mmfr1, 0) >= 1
    }

    /// Returns whether hardware marks the first write: FEAT_HAFDBS, with dirty state.
    pub const fn hardware_dirty(&self) -> bool {
        field(self.mmfr1, 0) >= 2
    }

    /// Returns the number of bits of a VMID: 8, or 16 with FEAT_VMID16.
    pub const fn vmid_bits(&self) -> u32 {
        if field(self.mmfr1, 4) >= 2 { 16 } else { 8 }
    }

    /// Returns whether EL1 and EL0 have separate execute rights: FEAT_XNX.
    pub const fn split_execute(&self) -> bool {
        field(self.mmfr1, 28) >= 1
    }

    /// Returns whether PEs that have the same tables may share entries: FEAT_TTCNP, for
    /// VTTBR_EL2.CnP.
    pub const fn common_not_private(&self) -> bool {
        field(self.mmfr2, 0) >= 1
    }

    /// Returns whether the CPU has small translation tables: FEAT_TTST, T0SZ up to 48 (47 with the
    /// 64K granule).
    pub const fn small_tables(&self) -> bool {
        field(self.mmfr2, 28) >= 1
    }

    /// Returns whether stage 2 can force the memory type: FEAT_S2FWB, for HCR_EL2.FWB.
    pub const fn forced_write_back(&self) -> bool {
        field(self.mmfr2, 40) >= 1
    }

    /// Returns whether an invalidation can name a level: FEAT_TTL.
    pub const fn ttl(&self) -> bool {
        field(self.mmfr2, 48) >= 1
    }

    /// Returns whether an invalidation can take a range: FEAT_TLBIRANGE.
    pub const fn range_instructions(&self) -> bool {
        field(self.isar0, 56) >= 2
    }

    /// Returns which changes of size need break-before-make, by FEAT_BBM.
    ///
    /// Level 2 counts only if the platform `handles_conflicts`: the TLB conflict abort that a PE
    /// may then raise. Some CPUs older than level 3 never raise one and report 2; a platform that
    /// knows them returns [`BreakBeforeMake::Never`] itself.
    pub const fn break_before_make(&self, handles_conflicts: bool) -> BreakBeforeMake {
        match field(self.mmfr2, 52) {
            0 | 1 => BreakBeforeMake::Always,
            2 if handles_conflicts => BreakBeforeMake::ConflictHandled,
            2 => BreakBeforeMake::Always,
            _ => BreakBeforeMake::Never,
        }
    }

    /// Returns the format with all features that this CPU offers.
    ///
    /// # Errors
    /// [`UnsupportedFeature::Granule`] names the granules that stage 2 has.
    /// [`UnsupportedFeature::Feature`] if this granule lacks FEAT_LPA2, or the CPU lacks FEAT_LPA.
    pub fn format<const PAGE_SHIFT: u32, const WIDE: bool>(
        &self,
    ) -> Result<Arm64<PAGE_SHIFT, WIDE>, UnsupportedFeature> {
        self.check::<PAGE_SHIFT, WIDE>()?;
        let widest = Arm64::default();
        Ok(Arm64 {
            forced_write_back: self.forced_write_back(),
            hardware_dirty: self.hardware_dirty(),
            split_execute: self.split_execute(),
            output_bits: self.address_bits().min(widest.output_bits),
            ..widest
        })
    }

    /// Returns the value of VTCR_EL2 for tables of `format` and `geometry`.
    ///
    /// Walks are write-back and inner shareable; with FEAT_LPA2 they have the shareability that the
    /// format has for memory, since one field serves both. Hardware sets the accessed flag where it
    /// can, and dirty state if the format asks for it. The platform sets HCR_EL2.FWB, which the
    /// format may ask for too.
    ///
    /// # Errors
    /// [`UnsupportedFeature`] if this CPU lacks a feature that the format is configured for: its
    /// walks would fault, or read bits of a descriptor as something else.
    pub fn vtcr<const PAGE_SHIFT: u32, const WIDE: bool>(
        &self,
        format: &Arm64<PAGE_SHIFT, WIDE>,
        geometry: &Geometry,
    ) -> Result<u64, UnsupportedFeature> {
        let granule = const { Granule::of_shift(PAGE_SHIFT) };
        self.check::<PAGE_SHIFT, WIDE>()?;
        let needs = [
            (format.forced_write_back, self.forced_write_back(), "FEAT_S2FWB"),
            (format.hardware_dirty, self.hardware_dirty(), "FEAT_HAFDBS with dirty state"),
            (format.split_execute, self.split_execute(), "FEAT_XNX"),
        ];
        if let Some(&(_, _, name)) = needs.iter().find(|(asked, has, _)| *asked && !has) {
            return Err(UnsupportedFeature::Feature { name });
        }
        let wanted = format.output_bits().max(geometry.address_bits);
        if wanted > self.address_bits() {
            return Err(UnsupportedFeature::AddressBits { wanted, most: self.address_bits() });
        }
        // `wanted` is at most what PARange says, so an entry of the table holds it.
        let ps = ADDRESS_BITS.iter().position(|&bits| bits >= wanted).unwrap_or(0) as u64;
        let start = self.start_level::<PAGE_SHIFT, WIDE>(geometry)?;
        let ds = Arm64::<PAGE_SHIFT, WIDE>::DS;
        let shareability = if ds { format.shareability } else { Shareability::Inner };
        let bit = |on: bool, bit: u64| if on { bit } else { 0 };
        Ok(u64::from(64 - geometry.address_bits)
            | start
            | VTCR_WALKS_WRITE_BACK
            | (shareability as u64) << VTCR_SH0_SHIFT
            | granule.tg0() << VTCR_TG0_SHIFT
            | ps << VTCR_PS_SHIFT
            | bit(self.vmid_bits() == 16, VTCR_VS)
            | bit(self.hardware_accessed(), VTCR_HA)
            | bit(format.hardware_dirty, VTCR_HD)
            | bit(ds, VTCR_DS)
            | VTCR_RES1)
    }

    /// Returns SL0 and SL2, in place. For 4K, SL0 counts from the manual's level 2, for 16K and 64K
    /// from level 3; the value 2 is reserved on a CPU whose addresses are too narrow to need it.
    /// The next level, with DS and addresses of 52 bits, is SL2 for 4K. A root has at least two
    /// entries and at most 16 tables.
    fn start_level<const PAGE_SHIFT: u32, const WIDE: bool>(
        &self,
        geometry: &Geometry,
    ) -> Result<u64, UnsupportedFeature> {
        let (lowest, third_needs, fourth) = match const { Granule::of_shift(PAGE_SHIFT) } {
            Granule::K4 => (1, 44, VTCR_SL2),
            Granule::K16 => (0, 42, 3 << VTCR_SL0_SHIFT),
            Granule::K64 => (0, 44, 0),
        };
        let Geometry { address_bits, root_level, root_entries } = *geometry;
        let most_entries =
            1 << (Arm64::<PAGE_SHIFT, WIDE>::INDEX_BITS + Arm64::<PAGE_SHIFT, WIDE>::CONCATENATED);
        let widths = Arm64::<PAGE_SHIFT, WIDE>::MIN_BITS..=Arm64::<PAGE_SHIFT, WIDE>::MAX_BITS;
        let steps = root_level.checked_sub(lowest).filter(|&steps| {
            let entries_bits =
                address_bits.checked_sub(Arm64::<PAGE_SHIFT, WIDE>::shift(root_level));
            let needs = match steps {
                0 | 1 => Some(0),
                2 => Some(third_needs),
                3 if Arm64::<PAGE_SHIFT, WIDE>::DS => Some(52),
                _ => None,
            };
            widths.contains(&address_bits)
                && entries_bits.is_some_and(|bits| 1usize.checked_shl(bits) == Some(root_entries))
                && (2..=most_entries).contains(&root_entries)
                && needs.is_some_and(|needs| self.address_bits() >= needs)
        });
        match steps {
            Some(3) => Ok(fourth),
            Some(steps) => Ok(u64::from(steps) << VTCR_SL0_SHIFT),
            None => {
                let most = self.address_bits();
                Err(UnsupportedFeature::StartLevel { geometry: *geometry, most })
            }
        }
    }

    /// Returns the value of VTTBR_EL2 for tables of `format` with their root at `root`.
    ///
    /// CnP is 0. The platform may set it if the CPU has FEAT_TTCNP and every PE that has this VMID
    /// loaded always has the same root.
    ///
    /// # Errors
    /// [`UnsupportedFeature::Vmid`] if the CPU has no such VMID, [`UnsupportedFeature::Root`] if
    /// the register cannot hold the address. Either would overwrite bits of the other.
    pub fn vttbr<const PAGE_SHIFT: u32, const WIDE: bool>(
        &self,
        format: &Arm64<PAGE_SHIFT, WIDE>,
        root: Hpa,
        vmid: Vmid,
    ) -> Result<u64, UnsupportedFeature> {
        let bits = self.vmid_bits();
        if u32::from(vmid.0) >> bits != 0 {
            return Err(UnsupportedFeature::Vmid { vmid, bits });
        }
        let most = self.address_bits().min(format.output_bits());
        if !root.0.is_multiple_of(ROOT_ALIGNMENT) || root.0 >> most != 0 {
            return Err(UnsupportedFeature::Root { root, most });
        }
        let low = root.0 & ((1 << VTTBR_VMID_SHIFT) - 1);
        let high = root.0 >> VTTBR_VMID_SHIFT << VTTBR_HIGH_SHIFT;
        Ok(u64::from(vmid.0) << VTTBR_VMID_SHIFT | low | high)
    }

    /// Checks that stage 2 has the granule, and the feature for wide addresses if `WIDE`.
    fn check<const PAGE_SHIFT: u32, const WIDE: bool>(&self) -> Result<(), UnsupportedFeature> {
        let wanted = const { Granule::of_shift(PAGE_SHIFT) };
        if WIDE && self.has_granule(wanted) {
            let (has, name) = match wanted {
                Granule::K64 => (self.has_lpa(), "FEAT_LPA"),
                _ => (self.has_lpa2(wanted), "FEAT_LPA2 of this granule at stage 2"),
            };
            if !has {
                return Err(UnsupportedFeature::Feature { name });
            }
        }
        if self.has_granule(wanted) {
            return Ok(());
        }
        let supported = Granule::ALL.map(|granule| self.has_granule(granule).then_some(granule));
        Err(UnsupportedFeature::Granule { wanted, supported })
    }
}

impl<const PAGE_SHIFT: u32, const WIDE: bool> GuestRoot<Arm64<PAGE_SHIFT, WIDE>> {
    /// Returns the value of VTTBR_EL2 for a CPU ([`IdRegisters::vttbr`]; D24.2, "VTTBR_EL2").
    ///
    /// # Errors
    /// The errors of [`IdRegisters::vttbr`].
    pub fn vttbr(&self, cpu: &IdRegisters) -> Result<u64, UnsupportedFeature> {
        cpu.vttbr(&self.format, self.root, self.vmid)
    }

    /// Returns the value of VTCR_EL2 for a CPU ([`IdRegisters::vtcr`]; D24.2, "VTCR_EL2").
    ///
    /// # Errors
    /// The errors of [`IdRegisters::vtcr`].
    pub fn vtcr(&self, cpu: &IdRegisters) -> Result<u64, UnsupportedFeature> {
        cpu.vtcr(&self.format, &self.geometry)
    }
}

/// A feature that a CPU lacks, with what it has instead.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum UnsupportedFeature {
    /// Stage 2 lacks the granule.
    Granule {
        /// The granule asked for.
        wanted: Granule,
        /// The granules that stage 2 has.
        supported: [Option<Granule>; 3],
    },
    /// The CPU lacks a feature that the format is configured for.
    Feature {
        /// The manual's name of the feature.
        name: &'static str,
    },
    /// Addresses are wider than the CPU implements.
    AddressBits {
        /// Width asked for, in bits.
        wanted: u32,
        /// Width of a physical address of the CPU, in bits.
        most: u32,
    },
    /// The CPU cannot start a walk at a root of this level and size.
    StartLevel {
        /// Geometry of the tables.
        geometry: Geometry,
        /// Width of a physical address of the CPU, in bits.
        most: u32,
    },
    /// The VMID is wider than the CPU implements.
    Vmid {
        /// The VMID.
        vmid: Vmid,
        /// Width of the CPU's VMIDs, in bits.
        bits: u32,
    },
    /// The root is not aligned, or its address is beyond what the register holds.
    Root {
        /// Address of the root.
        root: Hpa,
        /// The largest width of an address, in bits.
        most: u32,
    },
}

impl fmt::Display for UnsupportedFeature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Granule { wanted, supported } => {
                write!(f, "this CPU has no {wanted} granule at stage 2; it has")?;
                for (i, granule) in supported.iter().flatten().enumerate() {
                    write!(f, "{} {granule}", if i == 0 { "" } else { "," })?;
                }
                Ok(())
            }
            Self::Feature { name } => write!(f, "this CPU lacks {name}, which the format asks for"),
            Self::AddressBits { wanted, most } => {
                write!(f, "{wanted}-bit addresses are wider than this CPU's {most} bits")
            }
            Self::StartLevel {
                geometry: Geometry { address_bits, root_level, root_entries },
                most,
            } => {
                write!(
                    f,
                    "a CPU with {most}-bit addresses starts no walk of {address_bits} bits at a \
                     root of {root_entries} entries, {root_level} levels above pages"
                )
            }
            Self::Vmid { vmid, bits } => write!(f, "VMID {} has more than {bits} bits", vmid.0),
            Self::Root { root, most } => {
                write!(f, "the root {root} must be a multiple of {ROOT_ALIGNMENT} below 2^{most}")
            }
        }
    }
}

impl core::error::Error for UnsupportedFeature {}

#[cfg(test)]
mod tests;
