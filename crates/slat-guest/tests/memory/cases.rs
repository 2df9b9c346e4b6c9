//! The formats and machines on which tests run.

#[macro_use]
#[path = "../../../../tests/case.rs"]
mod case;

use super::{BITS, G1};
#[cfg(feature = "every-format")]
use slat::format::arm64::Arm64Lpa2K4;
use slat::format::arm64::{Arm64, Arm64K4};
use slat::format::ept::Ept1G;
#[cfg(feature = "every-format")]
use slat::format::{npt::Npt1G, power::PowerK4, riscv::RiscV as GStage};
use slat::{BreakBeforeMake, Format};
use slat_sim::{Arch, Arm, Ept, Machine};
#[cfg(feature = "every-format")]
use slat_sim::{Npt, Power, RiscV};

/// The buffer into which hardware writes the addresses of pages that it marks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Buffer {
    /// Intel's page modification log.
    Pml,
    /// Arm's dirty state buffer.
    Hdbss,
}

/// A format and a machine on which tests run.
pub trait Case {
    type F: Format + 'static;
    type A: Arch + 'static;
    /// Whether a leaf may be writable and clean.
    const HARDWARE_DIRTY: bool = true;
    /// Whether hardware marks a leaf without a fault.
    const MARKS: bool = true;
    /// The buffer into which hardware writes the pages that it marks, if it does.
    const BUFFER: Option<Buffer> = None;
    /// The first address of the host's memory.
    const FIRST_HPA: u64 = 64 * G1;

    fn format() -> Self::F;
    fn machine(cpus: usize) -> Machine<Self::A>;
}

/// The guest always uses its caches.
const FORCED: Arm = Arm { forced_write_back: true, ..Arm::new(12, BITS) };

case!(
    /// Arm without hardware dirty state, with break-before-make.
    ArmPlain: Arm64K4, Arm;
    Arm64 { forced_write_back: true, ..Arm64::default() }, Arm { hardware_dirty: false, ..FORCED };
    const HARDWARE_DIRTY: bool = false;
);
case!(
    /// Arm with hardware dirty state and FEAT_BBM level 3.
    ArmDirty: Arm64K4, Arm;
    Arm64 { hardware_dirty: true, forced_write_back: true, ..Arm64::default() },
    Arm { bbm: 3, ..FORCED }, .declaring(BreakBeforeMake::Never);
    const BUFFER: Option<Buffer> = Some(Buffer::Hdbss);
);
case!(
    /// As `ArmDirty`, with break-before-make.
    ArmBreaks: Arm64K4, Arm; ArmDirty::format(), FORCED;
    const BUFFER: Option<Buffer> = Some(Buffer::Hdbss);
);
case!(
    /// Arm without FEAT_S2FWB: vCPUs begin with their caches off. The guest is responsible for data
    /// that its vCPUs share with caches on and off: not checked here.
    ArmUncached: Arm64K4, Arm;
    Arm64 { hardware_dirty: true, ..Arm64::default() },
    Arm { bbm: 3, ..Arm::new(12, BITS) }, .declaring(BreakBeforeMake::Never),
    .lazy(slat_sim::Lazy { data_cache: false, ..slat_sim::Lazy::ALL });
    const BUFFER: Option<Buffer> = Some(Buffer::Hdbss);
);
case!(
    Intel: Ept1G, Ept; Ept1G::default(), Ept::default();
    const BUFFER: Option<Buffer> = Some(Buffer::Pml);
);
case!(
    /// FEAT_LPA2, with memory on both sides of the point at which the address bits are split.
    #[cfg(feature = "every-format")]
    ArmLpa2: Arm64Lpa2K4, Arm;
    Arm64 { hardware_dirty: true, forced_write_back: true, ..Arm64::default() }, FORCED.with_lpa2();
    const FIRST_HPA: u64 = (1 << 50) - 2 * super::M2;
    const BUFFER: Option<Buffer> = Some(Buffer::Hdbss);
);
case!(
    #[cfg(feature = "every-format")]
    Amd: Npt1G, Npt;
    Npt1G { output_bits: Npt::default().physical_bits, ..Default::default() }, Npt::default()
);
case!(
    /// RISC-V with Svadu.
    #[cfg(feature = "every-format")]
    Hart: GStage, RiscV; GStage::default(), RiscV::default();
    const FIRST_HPA: u64 = 1 << 55;
);
case!(
    /// RISC-V that leaves accessed and dirty bits to faults, and caches no invalid entries.
    #[cfg(feature = "every-format")]
    HartSvade: GStage, RiscV;
    GStage::default(), RiscV { hardware_marks: false, svvptc: true, ..RiscV::default() };
    const MARKS: bool = false;
);
case!(
    /// Power, with R and C set by hardware.
    #[cfg(feature = "every-format")]
    Radix: PowerK4, Power; PowerK4 { output_bits: 51 }, Power::new(12)
);
case!(
    /// Power that leaves R and C to interrupts.
    #[cfg(feature = "every-format")]
    RadixAsks: PowerK4, Power;
    PowerK4 { output_bits: 51 }, Power { sets: false, ..Power::new(12) };
    const MARKS: bool = false;
);

/// Makes a test of `$run` for each case that only the feature has, except `ArmDirty`.
#[cfg(feature = "every-format")]
#[macro_export]
macro_rules! on_others {
    ($run:ident) => {
        $crate::on_cases! {
            $run: on_arm_lpa2 ArmLpa2, on_amd Amd, on_riscv Hart, on_riscv_without_svadu HartSvade,
            on_radix Radix, on_radix_where_software_sets_r_and_c RadixAsks
        }
    };
}
