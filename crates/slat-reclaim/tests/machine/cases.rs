//! The formats and machines that the tests of a guest's memory use, and others with larger pages.

#[allow(dead_code, unused_imports, unused_macros, reason = "a part of it is for other tests")]
#[path = "../../../slat-guest/tests/memory/fixture.rs"]
mod guest;

pub use guest::*;

#[cfg(feature = "every-format")]
pub use larger::*;

#[cfg(feature = "every-format")]
mod larger {
    use super::{BITS, Case};
    use slat::format::arm64::{Arm64, Arm64K16, Arm64K64};
    use slat::format::power::PowerK64;
    use slat_sim::{Arm, Machine, Power};

    macro_rules! arm {
        ($name:ident: $F:ty, $granule:literal) => {
            /// Arm with hardware dirty state and larger pages.
            pub struct $name;

            impl Case for $name {
                type F = $F;
                type A = Arm;
                const HARDWARE_DIRTY: bool = true;

                fn format() -> $F {
                    Arm64 { hardware_dirty: true, forced_write_back: true, ..Arm64::default() }
                }

                fn machine(cpus: usize) -> Machine<Arm> {
                    let arch = Arm { forced_write_back: true, ..Arm::new($granule, BITS) };
                    Machine::new(arch, cpus)
                }
            }
        };
    }
    arm!(Arm16K: Arm64K16, 14);
    arm!(Arm64K: Arm64K64, 16);

    /// Power with its larger pages.
    pub struct Radix64K;

    impl Case for Radix64K {
        type F = PowerK64;
        type A = Power;
        const HARDWARE_DIRTY: bool = true;

        fn format() -> PowerK64 {
            PowerK64 { output_bits: 51 }
        }

        fn machine(cpus: usize) -> Machine<Power> {
            Machine::new(Power::new(16), cpus)
        }
    }
}
