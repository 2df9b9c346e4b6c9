//! The formats on which tests run, by the names that tests get from them.
#![allow(non_camel_case_types, reason = "they are names of tests, too")]

use super::hardware::{
    arm::Arm, ept::Ept, grouped::GroupedArm, npt::Npt, power::Core, riscv::Hart,
};

pub type arm_4k = Arm<12>;
pub type arm_16k = Arm<14>;
pub type arm_64k = Arm<16>;
/// Whose hardware sees groups of contiguous leaves as one.
pub type arm_4k_groups = GroupedArm<12>;
pub type arm_4k_lpa2 = Arm<12, true>;
pub type arm_16k_lpa2 = Arm<14, true>;
pub type arm_64k_lpa = Arm<16, true>;
pub type ept = Ept<true>;
pub type ept_2m = Ept<false>;
pub type ept_five_levels = Ept<true, true>;
pub type npt = Npt<true>;
pub type npt_2m = Npt<false>;
pub type npt_five_levels = Npt<true, true>;
pub type riscv = Hart<true>;
pub type riscv_without_svadu = Hart<false>;
pub type radix_4k = Core<12, true>;
pub type radix_4k_where_software_sets_r_and_c = Core<12, false>;
pub type radix_64k = Core<16, true>;

/// Makes a test of a generic function for each format that is named; for those behind the semicolon
/// only with `every-format`. Where none is named, they are Arm with pages of 4k, and EPT. A name
/// may have arguments for the function. The tests that are there without the feature are in a
/// module `usual`, so that a run with it may skip them.
macro_rules! on {
    ($test:ident $(; $($others:tt)*)?) => {
        on!($test: arm_4k, ept $(; $($others)*)?);
    };
    ($test:ident:
        $($name:ident $(($($arg:expr),*))?),*
        $(; $($other:ident $(($($other_arg:expr),*))?),*)?
    ) => {
        mod $test {
            #[allow(unused_imports, reason = "most functions have no arguments")]
            use super::*;
            use crate::common::formats;

            mod usual {
                #[allow(unused_imports, reason = "as above")]
                use super::*;

                $(
                    #[test]
                    fn $name() {
                        super::super::$test::<formats::$name>($($($arg),*)?);
                    }
                )*
            }
            $($(
                #[cfg(feature = "every-format")]
                #[test]
                fn $other() {
                    super::$test::<formats::$other>($($($other_arg),*)?);
                }
            )*)?
        }
    };
}

/// Runs a random history on the format with that number, and with what its CPUs demand.
macro_rules! on_format {
    ($number:expr, $run:ident, $ops:expr) => {
        match $number {
            #[cfg(feature = "every-format")]
            1 => $run(slat::format::arm64::Arm64K16::default(), BreakBeforeMake::Never, $ops),
            2 => $run(slat::format::ept::Ept1G::default(), BreakBeforeMake::Never, $ops),
            #[cfg(feature = "every-format")]
            3 => $run(slat::format::npt::Npt2M::default(), BreakBeforeMake::Never, $ops),
            #[cfg(feature = "every-format")]
            4 => $run(slat::format::power::PowerK4::default(), BreakBeforeMake::Always, $ops),
            #[cfg(feature = "every-format")]
            5 => {
                let format =
                    slat::format::riscv::RiscV { memory_types: true, ..Default::default() };
                $run(format, BreakBeforeMake::Never, $ops)
            }
            _ => $run(slat::format::arm64::Arm64K4::default(), BreakBeforeMake::Always, $ops),
        }
    };
}
