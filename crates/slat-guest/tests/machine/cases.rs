//! The formats that scenarios run on, each with a machine that is as lazy as it may be.

#[macro_use]
#[path = "../../../../tests/case.rs"]
mod case;

use crate::common::{BITS, Guest};
use slat::Format;
use slat::format::arm64::Arm64K4;
#[cfg(feature = "every-format")]
use slat::format::arm64::{Arm64, Arm64Lpa2K4, Arm64Lpa2K16, Arm64LpaK64};
use slat::format::ept::Ept1G;
#[cfg(feature = "every-format")]
use slat::format::npt::Npt1G;
#[cfg(feature = "every-format")]
use slat::format::power::{PowerK4, PowerK64};
use slat::format::riscv::RiscV as GStage;
use slat_sim::{Arm, Ept, HasFirmware, Machine, RiscV};
#[cfg(feature = "every-format")]
use slat_sim::{Npt, Power};

/// A format, and the architecture that walks its tables.
pub trait Case {
    type F: Format + Sync;
    type A: HasFirmware;
    /// Where the memory of histories begins: at addresses that are difficult for the format to
    /// hold.
    const HOST: u64 = 1 << 33;
    /// Number of steps of a random history.
    const STEPS: usize = 60;

    fn format() -> Self::F;
    fn machine(cpus: usize) -> Machine<Self::A>;

    fn guest(machine: &Machine<Self::A>) -> Guest<'_, Self::F, Self::A> {
        Guest::new(machine, Self::format())
    }
}

case!(ArmK4: Arm64K4, Arm; crate::common::arm64(), Arm::new(12, BITS));
case!(
    /// Hardware sets the access flag, and nothing else.
    #[cfg(feature = "every-format")]
    ArmPlain: Arm64K4, Arm; Arm64::default(), Arm { hardware_dirty: false, ..Arm::new(12, BITS) }
);
case!(
    /// Memory on both sides of the address at which a descriptor splits its fields.
    #[cfg(feature = "every-format")]
    Lpa2K4: Arm64Lpa2K4, Arm;
    Arm64 { hardware_dirty: true, ..Arm64::default() },
    Arm::new(12, BITS).with_lpa2(), .frames_from(0b11 << 50);
    const HOST: u64 = (1 << 50) - (32 << 20);
);
case!(
    #[cfg(feature = "every-format")]
    Lpa2K16: Arm64Lpa2K16, Arm;
    Arm64 { hardware_dirty: true, ..Arm64::default() },
    Arm { range_instructions: true, ..Arm::new(14, BITS).with_lpa2() }, .frames_from(0b11 << 50);
    const HOST: u64 = (1 << 50) - (128 << 20);
    const STEPS: usize = 15;
);
case!(
    #[cfg(feature = "every-format")]
    LpaK64: Arm64LpaK64, Arm;
    Arm64 { hardware_dirty: true, ..Arm64::default() },
    Arm::new(16, BITS).with_lpa(), .frames_from(0b1111 << 48);
    const HOST: u64 = (1 << 48) - (512 << 20);
    const STEPS: usize = 10;
);
case!(Intel: Ept1G, Ept; crate::common::ept(), Ept::default());
case!(
    #[cfg(feature = "every-format")]
    Amd: Npt1G, Npt;
    Npt1G { output_bits: Npt::default().physical_bits, ..Default::default() },
    Npt::default(), .frames_from(1 << 47)
);
case!(
    /// With five levels.
    #[cfg(feature = "every-format")]
    Amd5: Npt1G, Npt;
    Npt1G { five_levels: true, output_bits: 48 },
    Npt { levels: 5, ..Npt::default() }, .frames_from(1 << 47)
);
case!(
    /// With Svadu.
    Hart: GStage, RiscV; GStage::default(), RiscV::default(), .frames_from(0b11 << 54);
    const HOST: u64 = 1 << 55;
);
case!(
    /// Faults set the accessed and dirty bits.
    #[cfg(feature = "every-format")]
    HartSvade: GStage, RiscV;
    GStage::default(), RiscV { hardware_marks: false, ..RiscV::default() };
    const HOST: u64 = 1 << 55;
);
case!(
    /// Invalid entries are not cached, and fences are by address where possible.
    #[cfg(feature = "every-format")]
    HartSvvptc: GStage, RiscV; GStage::default(), RiscV { svvptc: true, ..RiscV::default() };
);

case!(
    #[cfg(feature = "every-format")]
    Radix4k: PowerK4, Power; PowerK4 { output_bits: 51 }, Power::new(12)
);
case!(
    /// An interrupt sets R and C.
    #[cfg(feature = "every-format")]
    Radix4kAsks: PowerK4, Power;
    PowerK4 { output_bits: 51 }, Power { sets: false, ..Power::new(12) }
);
case!(
    #[cfg(feature = "every-format")]
    Radix64k: PowerK64, Power; PowerK64 { output_bits: 51 }, Power::new(16)
);
case!(
    #[cfg(feature = "every-format")]
    Radix64kAsks: PowerK64, Power;
    PowerK64 { output_bits: 51 }, Power { sets: false, ..Power::new(16) }
);

/// Runs scenarios, which are functions of a [`Case`], on every format; by default on some.
macro_rules! on_every_format {
    ($($name:ident),* $(,)?) => {$(
        mod $name {
            use super::$name;
            use crate::cases::*;

            on_cases!($name: on_arm ArmK4, on_intel Intel, on_riscv Hart);
            #[cfg(feature = "every-format")]
            on_cases!($name: on_arm_without_dirty_state ArmPlain, on_arm_lpa2 Lpa2K4, on_amd Amd,
                on_riscv_without_svadu HartSvade, on_riscv_with_svvptc HartSvvptc, on_radix Radix4k,
                on_radix_where_software_sets_r_and_c Radix4kAsks);
        }
    )*};
}

/// Runs scenarios on the formats whose links have rights and accessed bits.
macro_rules! on_x86 {
    ($($name:ident),* $(,)?) => {$(
        mod $name {
            use super::$name;
            use crate::cases::*;

            on_cases!($name: on_intel Intel);
            #[cfg(feature = "every-format")]
            on_cases!($name: on_amd Amd, on_amd_with_five_levels Amd5);
        }
    )*};
}
