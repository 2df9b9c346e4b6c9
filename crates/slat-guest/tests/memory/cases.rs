//! The formats and machines on which tests run.

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
    type F: Format;
    type A: Arch;
    /// Whether a leaf may be writable and clean.
    const HARDWARE_DIRTY: bool;
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

/// Arm without hardware dirty state, with break-before-make.
pub struct ArmPlain;
/// Arm with hardware dirty state and FEAT_BBM level 3.
pub struct ArmDirty;
/// As `ArmDirty`, with break-before-make.
pub struct ArmBreaks;
/// Arm without FEAT_S2FWB: vCPUs begin with their caches off.
pub struct ArmUncached;
/// Intel.
pub struct Intel;

impl Case for ArmPlain {
    type F = Arm64K4;
    type A = Arm;
    const HARDWARE_DIRTY: bool = false;

    fn format() -> Arm64K4 {
        Arm64 { forced_write_back: true, ..Arm64::default() }
    }

    fn machine(cpus: usize) -> Machine<Arm> {
        Machine::new(Arm { hardware_dirty: false, ..FORCED }, cpus)
    }
}

impl Case for ArmDirty {
    type F = Arm64K4;
    type A = Arm;
    const HARDWARE_DIRTY: bool = true;
    const BUFFER: Option<Buffer> = Some(Buffer::Hdbss);

    fn format() -> Arm64K4 {
        Arm64 { hardware_dirty: true, forced_write_back: true, ..Arm64::default() }
    }

    fn machine(cpus: usize) -> Machine<Arm> {
        Machine::new(Arm { bbm: 3, ..FORCED }, cpus).declaring(BreakBeforeMake::Never)
    }
}

impl Case for ArmBreaks {
    type F = Arm64K4;
    type A = Arm;
    const HARDWARE_DIRTY: bool = true;
    const BUFFER: Option<Buffer> = Some(Buffer::Hdbss);

    fn format() -> Arm64K4 {
        ArmDirty::format()
    }

    fn machine(cpus: usize) -> Machine<Arm> {
        Machine::new(FORCED, cpus)
    }
}

impl Case for ArmUncached {
    type F = Arm64K4;
    type A = Arm;
    const HARDWARE_DIRTY: bool = true;
    const BUFFER: Option<Buffer> = Some(Buffer::Hdbss);

    fn format() -> Arm64K4 {
        Arm64 { hardware_dirty: true, ..Arm64::default() }
    }

    fn machine(cpus: usize) -> Machine<Arm> {
        // The guest is responsible for data that its vCPUs share with caches on and off: not
        // checked here.
        let lazy = slat_sim::Lazy { data_cache: false, ..slat_sim::Lazy::ALL };
        Machine::new(Arm { bbm: 3, ..Arm::new(12, BITS) }, cpus)
            .declaring(BreakBeforeMake::Never)
            .lazy(lazy)
    }
}

impl Case for Intel {
    type F = Ept1G;
    type A = Ept;
    const HARDWARE_DIRTY: bool = true;
    const BUFFER: Option<Buffer> = Some(Buffer::Pml);

    fn format() -> Ept1G {
        Ept1G::default()
    }

    fn machine(cpus: usize) -> Machine<Ept> {
        Machine::new(Ept::default(), cpus)
    }
}

#[cfg(feature = "every-format")]
macro_rules! case {
    ($(#[$meta:meta])* $name:ident: $F:ty, $A:ty; $format:expr, $arch:expr $(; $($more:tt)*)?) => {
        $(#[$meta])*
        pub struct $name;

        impl Case for $name {
            type F = $F;
            type A = $A;
            const HARDWARE_DIRTY: bool = true;
            $($($more)*)?

            fn format() -> $F {
                $format
            }

            fn machine(cpus: usize) -> Machine<$A> {
                Machine::new($arch, cpus)
            }
        }
    };
}

#[cfg(feature = "every-format")]
case!(
    /// FEAT_LPA2, with memory on both sides of the point at which the address bits are split.
    ArmLpa2: Arm64Lpa2K4, Arm;
    Arm64 { hardware_dirty: true, forced_write_back: true, ..Arm64::default() }, FORCED.with_lpa2();
    const FIRST_HPA: u64 = (1 << 50) - 2 * super::M2;
    const BUFFER: Option<Buffer> = Some(Buffer::Hdbss);
);
#[cfg(feature = "every-format")]
case!(
    Amd: Npt1G, Npt;
    Npt1G { output_bits: Npt::default().physical_bits, ..Default::default() }, Npt::default()
);
#[cfg(feature = "every-format")]
case!(
    /// RISC-V with Svadu.
    Hart: GStage, RiscV; GStage::default(), RiscV::default();
    const FIRST_HPA: u64 = 1 << 55;
);
#[cfg(feature = "every-format")]
case!(
    /// RISC-V that leaves accessed and dirty bits to faults, and caches no invalid entries.
    HartSvade: GStage, RiscV;
    GStage::default(), RiscV { hardware_marks: false, svvptc: true, ..RiscV::default() };
    const MARKS: bool = false;
);

#[cfg(feature = "every-format")]
case!(
    /// Power, with R and C set by hardware.
    Radix: PowerK4, Power; PowerK4 { output_bits: 51 }, Power::new(12);
);
#[cfg(feature = "every-format")]
case!(
    /// Power that leaves R and C to interrupts.
    RadixAsks: PowerK4, Power;
    PowerK4 { output_bits: 51 }, Power { sets: false, ..Power::new(12) };
    const MARKS: bool = false;
);

/// Makes a test of `$run` for each of these cases.
#[macro_export]
macro_rules! on_cases {
    ($run:ident: $($name:ident $C:ident),*) => {$(
        #[test]
        fn $name() {
            $run::<$C>();
        }
    )*};
}

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
