//! What the ID registers of a CPU say about stage 2, and the registers that a configuration takes.
//!
//! Fields as in the Arm Architecture Reference Manual (DDI 0487), "AArch64 System Register
//! Descriptions", under the name of each register. A value that a field does not define yet means
//! at least what the highest defined one does, as the manual's "Principles of the ID scheme" says.

use super::tlbi::Tlbi;
use super::{Arm64, Shareability};
use crate::addr::Hpa;
use crate::format::{Format, Geometry};
use crate::platform::BreakBeforeMake;
use crate::shootdown::Vmid;
use core::fmt;

/// The page size of a format.
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
    /// All of them.
    pub const ALL: [Self; 3] = [Self::K4, Self::K16, Self::K64];

    /// The granule of `2^page_shift` bytes.
    ///
    /// # Panics
    /// If there is none. It is meant for constants, where that is an error of the compiler.
    pub const fn of_shift(page_shift: u32) -> Self {
        match page_shift {
            12 => Self::K4,
            14 => Self::K16,
            16 => Self::K64,
            _ => panic!("the granule is 4K, 16K or 64K"),
        }
    }

    /// Base-2 logarithm of its bytes.
    pub const fn shift(self) -> u32 {
        match self {
            Self::K4 => 12,
            Self::K16 => 14,
            Self::K64 => 16,
        }
    }

    /// As operands of TLB maintenance name it: TG of a range, and bits 3:2 of TTL.
    pub(super) const fn tg(self) -> u64 {
        match self {
            Self::K4 => 0b01,
            Self::K16 => 0b10,
            Self::K64 => 0b11,
        }
    }

    /// VTCR_EL2.TG0: not the same.
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

/// The values of a CPU's ID registers, as read at EL2.
///
/// Where the CPUs of a machine differ, each field holds what all of them have. Where an erratum
/// takes a feature away, the platform clears the field before it asks (HAFDBS in `mmfr1`, where
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
}

/// The four bits of a field from `shift`.
const fn field(register: u64, shift: u32) -> u64 {
    register >> shift & 0b1111
}

/// PARange and VTCR_EL2.PS: the bits of a physical address by value.
const ADDRESS_BITS: [u32; 8] = [32, 36, 40, 42, 44, 48, 52, 56];

const VTCR_SL0_SHIFT: u32 = 6;
/// IRGN0 and ORGN0: walks are write-back, and allocate for reads and writes.
const VTCR_WALKS_WRITE_BACK: u64 = 0b01 << 8 | 0b01 << 10;
/// SH0: walks are inner shareable.
const VTCR_WALKS_SHARED: u64 = (Shareability::Inner as u64) << 12;
const VTCR_TG0_SHIFT: u32 = 14;
const VTCR_PS_SHIFT: u32 = 16;
const VTCR_VS: u64 = 1 << 19;
const VTCR_HA: u64 = 1 << 21;
const VTCR_HD: u64 = 1 << 22;
const VTCR_RES1: u64 = 1 << 31;

const VTTBR_VMID_SHIFT: u32 = 48;
/// A table of fewer than eight slots is aligned to this all the same.
const ROOT_ALIGNMENT: u64 = 64;

impl IdRegisters {
    /// Whether stage 2 has the granule: TGran4_2, TGran16_2 or TGran64_2, which may refer to the
    /// field of stage 1.
    pub const fn has_granule(&self, granule: Granule) -> bool {
        // The fields of 4K and 64K are signed, and negative where it is missing; that of 16K is 0.
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

    /// Bits of a physical address that the CPU implements: PARange.
    pub fn address_bits(&self) -> u32 {
        ADDRESS_BITS[field(self.mmfr0, 0).min(7) as usize]
    }

    /// Hardware sets the accessed flag: FEAT_HAFDBS.
    pub const fn hardware_accessed(&self) -> bool {
        field(self.mmfr1, 0) >= 1
    }

    /// Hardware marks the first write: FEAT_HAFDBS, with dirty state.
    pub const fn hardware_dirty(&self) -> bool {
        field(self.mmfr1, 0) >= 2
    }

    /// Bits of a VMID: 8, or 16 with FEAT_VMID16.
    pub const fn vmid_bits(&self) -> u32 {
        if field(self.mmfr1, 4) >= 2 { 16 } else { 8 }
    }

    /// Execute rights tell EL1 from EL0: FEAT_XNX.
    pub const fn split_execute(&self) -> bool {
        field(self.mmfr1, 28) >= 1
    }

    /// Entries may be shared by PEs that have the same tables: FEAT_TTCNP, for VTTBR_EL2.CnP.
    pub const fn common_not_private(&self) -> bool {
        field(self.mmfr2, 0) >= 1
    }

    /// Small translation tables: FEAT_TTST, T0SZ up to 48 (47 with the 64K granule).
    pub const fn small_tables(&self) -> bool {
        field(self.mmfr2, 28) >= 1
    }

    /// Stage 2 may force the memory type: FEAT_S2FWB, for HCR_EL2.FWB.
    pub const fn forced_write_back(&self) -> bool {
        field(self.mmfr2, 40) >= 1
    }

    /// Invalidations may name a level: FEAT_TTL.
    pub const fn ttl(&self) -> bool {
        field(self.mmfr2, 48) >= 1
    }

    /// Invalidations may take a range: FEAT_TLBIRANGE.
    pub const fn range_instructions(&self) -> bool {
        field(self.isar0, 56) >= 2
    }

    /// Which changes of size need a break, by FEAT_BBM.
    ///
    /// Level 2 counts only where the platform `handles_conflicts`, the TLB conflict abort that a
    /// PE may then raise. CPUs older than level 3 that never raise one report 2: a platform that
    /// knows them answers [`BreakBeforeMake::Never`] itself.
    pub const fn break_before_make(&self, handles_conflicts: bool) -> BreakBeforeMake {
        match field(self.mmfr2, 52) {
            0 | 1 => BreakBeforeMake::Always,
            2 if handles_conflicts => BreakBeforeMake::ConflictHandled,
            2 => BreakBeforeMake::Always,
            _ => BreakBeforeMake::Never,
        }
    }

    /// The format as this CPU has it, with all that it offers.
    ///
    /// # Errors
    /// [`Unsupported::Granule`] names the granules that stage 2 has.
    pub fn format<const PAGE_SHIFT: u32>(&self) -> Result<Arm64<PAGE_SHIFT>, Unsupported> {
        self.check_granule(const { Granule::of_shift(PAGE_SHIFT) })?;
        let widest = Arm64::default();
        Ok(Arm64 {
            forced_write_back: self.forced_write_back(),
            hardware_dirty: self.hardware_dirty(),
            split_execute: self.split_execute(),
            output_bits: self.address_bits().min(widest.output_bits),
            ..widest
        })
    }

    /// How this CPU invalidates translations of tables with `granule`, on all PEs.
    pub fn tlbi(&self, granule: Granule) -> Tlbi {
        Tlbi {
            range_instructions: self.range_instructions(),
            ttl: self.ttl(),
            address_bits: self.address_bits(),
            ..Tlbi::new(granule)
        }
    }

    /// The value of VTCR_EL2 for tables of `format` and `geometry`.
    ///
    /// Walks are write-back and inner shareable. Hardware sets the accessed flag where it can, and
    /// dirty state if the format asks for it. HCR_EL2.FWB, which the format may ask for too, is the
    /// platform's to set.
    ///
    /// # Errors
    /// [`Unsupported`], where this CPU lacks what the format was configured for: its walks would
    /// fault, or read bits of a descriptor as something else.
    pub fn vtcr<const PAGE_SHIFT: u32>(
        &self,
        format: &Arm64<PAGE_SHIFT>,
        geometry: &Geometry,
    ) -> Result<u64, Unsupported> {
        let granule = const { Granule::of_shift(PAGE_SHIFT) };
        self.check_granule(granule)?;
        let needs = [
            (format.forced_write_back, self.forced_write_back(), "FEAT_S2FWB"),
            (format.hardware_dirty, self.hardware_dirty(), "FEAT_HAFDBS with dirty state"),
            (format.split_execute, self.split_execute(), "FEAT_XNX"),
        ];
        if let Some(&(_, _, name)) = needs.iter().find(|(asked, has, _)| *asked && !has) {
            return Err(Unsupported::Feature { name });
        }
        let wanted = format.output_bits().max(geometry.address_bits);
        if wanted > self.address_bits() {
            return Err(Unsupported::AddressBits { wanted, most: self.address_bits() });
        }
        // `wanted` is at most what PARange names: some entry of the table holds it.
        let ps = ADDRESS_BITS.iter().position(|&bits| bits >= wanted).unwrap_or(0) as u64;
        let sl0 = self.start_level::<PAGE_SHIFT>(geometry)?;
        let bit = |on: bool, bit: u64| if on { bit } else { 0 };
        Ok(u64::from(64 - geometry.address_bits)
            | sl0 << VTCR_SL0_SHIFT
            | VTCR_WALKS_WRITE_BACK
            | VTCR_WALKS_SHARED
            | granule.tg0() << VTCR_TG0_SHIFT
            | ps << VTCR_PS_SHIFT
            | bit(self.vmid_bits() == 16, VTCR_VS)
            | bit(self.hardware_accessed(), VTCR_HA)
            | bit(format.hardware_dirty, VTCR_HD)
            | VTCR_RES1)
    }

    /// SL0. For 4K it counts from the manual's level 2, for 16K and 64K from level 3; 2 is reserved
    /// on a CPU whose addresses are too narrow to need it. A root has two slots to sixteen tables.
    fn start_level<const PAGE_SHIFT: u32>(&self, geometry: &Geometry) -> Result<u64, Unsupported> {
        let (lowest, third_needs) = match const { Granule::of_shift(PAGE_SHIFT) } {
            Granule::K4 => (1, 44),
            Granule::K16 => (0, 42),
            Granule::K64 => (0, 44),
        };
        let Geometry { address_bits, root_level, root_slots } = *geometry;
        let most_slots = 1 << (Arm64::<PAGE_SHIFT>::INDEX_BITS + Arm64::<PAGE_SHIFT>::CONCATENATED);
        let sl0 = root_level.checked_sub(lowest).filter(|&sl0| {
            let slots_bits = address_bits.checked_sub(Arm64::<PAGE_SHIFT>::shift(root_level));
            address_bits >= Arm64::<PAGE_SHIFT>::MIN_BITS
                && slots_bits.is_some_and(|bits| 1usize.checked_shl(bits) == Some(root_slots))
                && (2..=most_slots).contains(&root_slots)
                && (sl0 < 2 || sl0 == 2 && self.address_bits() >= third_needs)
        });
        let most = self.address_bits();
        sl0.map(u64::from).ok_or(Unsupported::StartLevel { geometry: *geometry, most })
    }

    /// The value of VTTBR_EL2 for the root table at `root`.
    ///
    /// CnP is 0. It may be set if FEAT_TTCNP is there and every PE that has this VMID loaded has
    /// the same root, always.
    ///
    /// # Errors
    /// [`Unsupported::Vmid`] where the CPU has no such VMID, [`Unsupported::Root`] where the
    /// register cannot hold the address: either would run into the other's bits.
    pub fn vttbr(&self, root: Hpa, vmid: Vmid) -> Result<u64, Unsupported> {
        let bits = self.vmid_bits();
        if u32::from(vmid.0) >> bits != 0 {
            return Err(Unsupported::Vmid { vmid, bits });
        }
        let most = self.address_bits().min(VTTBR_VMID_SHIFT);
        if !root.0.is_multiple_of(ROOT_ALIGNMENT) || root.0 >> most != 0 {
            return Err(Unsupported::Root { root, most });
        }
        Ok(u64::from(vmid.0) << VTTBR_VMID_SHIFT | root.0)
    }

    fn check_granule(&self, wanted: Granule) -> Result<(), Unsupported> {
        if self.has_granule(wanted) {
            return Ok(());
        }
        let supported = Granule::ALL.map(|granule| self.has_granule(granule).then_some(granule));
        Err(Unsupported::Granule { wanted, supported })
    }
}

/// What a CPU lacks, and what it has instead.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Unsupported {
    /// Stage 2 lacks the granule.
    Granule {
        /// The one asked for.
        wanted: Granule,
        /// Those that stage 2 has.
        supported: [Option<Granule>; 3],
    },
    /// A format was configured for a feature that the CPU lacks.
    Feature {
        /// The manual's name.
        name: &'static str,
    },
    /// Addresses are wider than the CPU implements.
    AddressBits {
        /// Bits asked for.
        wanted: u32,
        /// Bits of a physical address.
        most: u32,
    },
    /// The CPU starts no walk at a root of this level and size.
    StartLevel {
        /// The tables.
        geometry: Geometry,
        /// Bits of a physical address.
        most: u32,
    },
    /// The VMID is wider than the CPU implements.
    Vmid {
        /// The VMID.
        vmid: Vmid,
        /// Bits of one.
        bits: u32,
    },
    /// The root is not aligned, or beyond what the register holds.
    Root {
        /// Its address.
        root: Hpa,
        /// Bits of an address at most.
        most: u32,
    },
}

impl fmt::Display for Unsupported {
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
                geometry: Geometry { address_bits, root_level, root_slots },
                most,
            } => {
                write!(
                    f,
                    "a CPU with {most}-bit addresses starts no walk of {address_bits} bits at a \
                     root of {root_slots} slots, {root_level} levels above pages"
                )
            }
            Self::Vmid { vmid, bits } => write!(f, "VMID {} has more than {bits} bits", vmid.0),
            Self::Root { root, most } => {
                write!(f, "the root {root} must be a multiple of {ROOT_ALIGNMENT} below 2^{most}")
            }
        }
    }
}

impl core::error::Error for Unsupported {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::arm64::{Arm64K4, Arm64K16, Arm64K64};
    use std::string::ToString;

    // As the CPUs' technical reference manuals, and QEMU's models of them, have them.
    const CORTEX_A53: IdRegisters =
        IdRegisters { mmfr0: 0x1122, mmfr1: 0, mmfr2: 0, isar0: 0x11120 };
    const CORTEX_A55: IdRegisters = IdRegisters {
        mmfr0: 0x10_1122,
        mmfr1: 0x1021_2122,
        mmfr2: 0x1011,
        isar0: 0x1000_1021_1120,
    };
    const NEOVERSE_N2: IdRegisters = IdRegisters {
        mmfr0: 0x222_0010_1125,
        mmfr1: 0x1021_2122,
        mmfr2: 0x1221_0111_1010_1011,
        isar0: 0x0221_1111_1021_2120,
    };

    #[test]
    fn features_are_those_of_the_cpus_manuals() {
        let of = |id: IdRegisters| {
            (
                (id.address_bits(), id.vmid_bits(), id.hardware_accessed(), id.hardware_dirty()),
                (id.split_execute(), id.forced_write_back(), id.common_not_private()),
                (id.small_tables(), id.ttl(), id.range_instructions()),
            )
        };
        let no = (false, false, false);
        assert_eq!(of(CORTEX_A53), ((40, 8, false, false), no, no));
        assert_eq!(of(CORTEX_A55), ((40, 16, true, true), (true, false, true), no));
        let yes = (true, true, true);
        assert_eq!(of(NEOVERSE_N2), ((48, 16, true, true), yes, yes));
    }

    #[test]
    fn a_granule_of_stage_2_is_that_of_stage_1_unless_its_own_field_says() {
        let has = |mmfr0| {
            let id = IdRegisters { mmfr0, ..IdRegisters::default() };
            Granule::ALL.map(|granule| id.has_granule(granule))
        };
        assert_eq!(has(0x1122), [true, false, true], "Cortex-A53");
        assert_eq!(has(0xff00_0000), [false, false, false], "0xf: none of 4k and 64k");
        assert_eq!(has(0x1020_0000), [true, true, true], "1 and 2: 52 bits");
        assert_eq!(has(0x111_0010_0000), [false, false, false], "1: not at stage 2");
        assert_eq!(has(0x222_ff00_0000), [true, true, true], "2: at stage 2 all the same");
    }

    #[test]
    fn a_missing_granule_is_refused_with_those_that_are_there() {
        let error = CORTEX_A53.format::<14>().unwrap_err();
        assert_eq!(error.to_string(), "this CPU has no 16k granule at stage 2; it has 4k, 64k");
        assert_eq!(CORTEX_A53.vtcr(&Arm64K16::default(), &GEOMETRY), Err(error));
    }

    const GEOMETRY: Geometry = Geometry { address_bits: 40, root_level: 2, root_slots: 1024 };

    #[test]
    fn a_break_is_spared_where_the_cpu_and_the_platform_allow_it() {
        let of = |level: u64, handles| {
            let id = IdRegisters { mmfr2: level << 52, ..IdRegisters::default() };
            id.break_before_make(handles)
        };
        for handles in [false, true] {
            assert_eq!(of(0, handles), BreakBeforeMake::Always);
            assert_eq!(of(1, handles), BreakBeforeMake::Always);
            assert_eq!(of(3, handles), BreakBeforeMake::Never);
        }
        assert_eq!(of(2, false), BreakBeforeMake::Always);
        assert_eq!(of(2, true), BreakBeforeMake::ConflictHandled);
    }

    /// VTCR_EL2 for tables of all that a CPU and a granule allow, `bits` wide.
    fn vtcr<const PAGE_SHIFT: u32>(id: IdRegisters, bits: u32) -> u64 {
        let format = id.format::<PAGE_SHIFT>().unwrap();
        id.vtcr(&format, &format.geometry(bits).unwrap()).unwrap()
    }

    #[test]
    fn vtcr_is_what_a_guest_ran_with() {
        // Run under QEMU: T0SZ 24, SL0 1, write-back, inner shareable, 4K, PS 2, HA, HD, RES1. That
        // was with VMIDs of 8 bits.
        let short = IdRegisters { mmfr1: CORTEX_A55.mmfr1 & !0xf0, ..CORTEX_A55 };
        assert_eq!(vtcr::<12>(short, 40), 0x8062_3558);
        assert_eq!(vtcr::<12>(CORTEX_A55, 40), 0x806a_3558, "VS");
        assert_eq!(vtcr::<12>(CORTEX_A53, 40), 0x8002_3558, "no HA, no HD");
    }

    #[test]
    fn vtcr_names_granule_and_start_level_as_each_granule_counts_them() {
        // T0SZ 16, SL0 2, PS 5. The manual's level 0 for 4K, level 1 for 16K and 64K.
        assert_eq!(vtcr::<12>(NEOVERSE_N2, 48), 0x806d_3590);
        assert_eq!(vtcr::<14>(NEOVERSE_N2, 48), 0x806d_b590);
        assert_eq!(vtcr::<16>(NEOVERSE_N2, 48), 0x806d_7590);
        // T0SZ 24, SL0 1, PS 2: level 2.
        assert_eq!(vtcr::<16>(CORTEX_A55, 40), 0x806a_7558);
    }

    /// Start level and slots of the root that a walk takes from VTCR_EL2, after the manual's
    /// AArch64.S2InvalidSL and AArch64.S2InconsistentSL (FEAT_LPA2 and FEAT_TTST left out).
    fn walk_start(vtcr: u64, address_bits: u32) -> Option<(i8, usize)> {
        let (t0sz, sl0, tg0) = ((vtcr & 63) as u32, vtcr >> 6 & 3, vtcr >> 14 & 3);
        let (page_shift, stride, level, widest) = match (tg0, sl0) {
            (0b00, 0..=2) => (12, 9, 2 - sl0 as i8, 44),
            (0b10, 0..=2) => (14, 11, 3 - sl0 as i8, 42),
            (0b01, 0..=2) => (16, 13, 3 - sl0 as i8, 44),
            _ => return None,
        };
        if sl0 == 2 && address_bits < widest || !(16..=39).contains(&t0sz) {
            return None;
        }
        let root_bits = (64 - t0sz).checked_sub(page_shift + (3 - level as u32) * stride)?;
        (1..=stride + 4).contains(&root_bits).then_some((level, 1 << root_bits))
    }

    fn check_all_widths<const PAGE_SHIFT: u32>(id: IdRegisters) {
        let format = id.format::<PAGE_SHIFT>().unwrap();
        for bits in 0..=52 {
            let Ok(geometry) = format.geometry(bits) else { continue };
            let start = walk_start(id.vtcr(&format, &geometry).unwrap(), id.address_bits());
            let wanted =
                (Arm64::<PAGE_SHIFT>::level_name(geometry.root_level), geometry.root_slots);
            assert_eq!(start, Some(wanted), "{PAGE_SHIFT}: {bits} of {}", id.address_bits());
        }
    }

    #[test]
    fn every_width_on_every_cpu_starts_a_walk_at_the_root_of_its_tables() {
        for parange in 0..=6 {
            let id = IdRegisters { mmfr0: NEOVERSE_N2.mmfr0 & !0xf | parange, ..NEOVERSE_N2 };
            check_all_widths::<12>(id);
            check_all_widths::<14>(id);
            check_all_widths::<16>(id);
        }
    }

    #[test]
    fn a_root_that_no_walk_starts_at_is_refused() {
        let format = NEOVERSE_N2.format::<12>().unwrap();
        let of = |address_bits, root_level, root_slots| {
            let geometry = Geometry { address_bits, root_level, root_slots };
            NEOVERSE_N2.vtcr(&format, &geometry).is_ok()
        };
        assert!(of(40, 2, 1024) && of(40, 3, 2), "two tables, or two slots above them");
        assert!(!of(40, 1, 1 << 19), "more than sixteen tables");
        assert!(!of(39, 3, 1) && !of(40, 2, 512), "one slot, or slots for half of it");
        assert!(!of(24, 1, 8), "T0SZ above 39");
        assert!(!of(0, 0, 1) && !of(48, 4, 1) && !of(40, u8::MAX >> 3, 1024), "no level at all");
    }

    #[test]
    fn a_cpu_with_40_bit_addresses_starts_no_walk_at_level_0() {
        let format = CORTEX_A55.format::<12>().unwrap();
        assert_eq!((format.output_bits, format.geometry(41).unwrap_err().max), (40, 40));
        assert_eq!(format.geometry(40).unwrap().root_level, 2, "the manual's level 1");
        let forced = Geometry { root_level: 3, root_slots: 2, ..GEOMETRY };
        let error = CORTEX_A55.vtcr(&format, &forced).unwrap_err();
        assert_eq!(error, Unsupported::StartLevel { geometry: forced, most: 40 });
        let wide = Arm64K4 { output_bits: 48, ..format };
        let error = CORTEX_A55.vtcr(&wide, &GEOMETRY).unwrap_err();
        assert_eq!(error, Unsupported::AddressBits { wanted: 48, most: 40 });
    }

    #[test]
    fn a_configuration_beyond_the_cpu_is_refused_by_the_features_name() {
        let format = CORTEX_A53.format::<16>().unwrap();
        let geometry = format.geometry(40).unwrap();
        assert!(CORTEX_A53.vtcr(&format, &geometry).is_ok());
        for (format, name) in [
            (Arm64K64 { forced_write_back: true, ..format }, "FEAT_S2FWB"),
            (Arm64K64 { hardware_dirty: true, ..format }, "FEAT_HAFDBS"),
            (Arm64K64 { split_execute: true, ..format }, "FEAT_XNX"),
        ] {
            let error = CORTEX_A53.vtcr(&format, &geometry).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        }
    }

    #[test]
    fn neither_root_nor_vmid_runs_into_the_others_bits() {
        assert_eq!(CORTEX_A53.vttbr(Hpa(0x8000_2000), Vmid(0xff)), Ok(0xff_0000_8000_2000));
        let error = CORTEX_A53.vttbr(Hpa(0x8000_2000), Vmid(0x100)).unwrap_err();
        assert_eq!(error, Unsupported::Vmid { vmid: Vmid(0x100), bits: 8 });
        assert_eq!(NEOVERSE_N2.vttbr(Hpa(0x2000), Vmid(0xffff)), Ok(0xffff_0000_0000_2000));
        for root in [Hpa(1), Hpa(0x20), Hpa(1 << 48)] {
            let error = NEOVERSE_N2.vttbr(root, Vmid(1)).unwrap_err();
            assert_eq!(error, Unsupported::Root { root, most: 48 });
        }
    }

    #[test]
    fn invalidation_uses_what_the_cpu_has() {
        let old = CORTEX_A55.tlbi(Granule::K4);
        assert_eq!((old.range_instructions, old.ttl, old.address_bits), (false, false, 40));
        let new = NEOVERSE_N2.tlbi(Granule::K64);
        assert_eq!((new.range_instructions, new.ttl, new.lpa2), (true, true, false));
        assert_eq!((new.granule, new.address_bits), (Granule::K64, 48));
    }
}
