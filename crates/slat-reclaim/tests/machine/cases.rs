//! The formats and machines that the tests of a guest's memory use, and others with larger pages.

#[macro_use]
#[allow(dead_code, unused_imports, unused_macros, reason = "a part of it is for other tests")]
#[path = "../../../slat-guest/tests/memory/fixture.rs"]
mod guest;

pub use guest::*;

#[cfg(feature = "every-format")]
use slat::format::{arm64::*, power::PowerK64};
#[cfg(feature = "every-format")]
use slat_sim::{Arm, Machine, Power};

case!(
    /// Arm with hardware dirty state and larger pages.
    #[cfg(feature = "every-format")]
    Arm16K: Arm64K16, Arm;
    Arm64 { hardware_dirty: true, forced_write_back: true, ..Arm64::default() },
    Arm { forced_write_back: true, ..Arm::new(14, BITS) }
);
case!(
    /// As above.
    #[cfg(feature = "every-format")]
    Arm64K: Arm64K64, Arm;
    Arm64 { hardware_dirty: true, forced_write_back: true, ..Arm64::default() },
    Arm { forced_write_back: true, ..Arm::new(16, BITS) }
);
case!(
    /// Power with its larger pages.
    #[cfg(feature = "every-format")]
    Radix64K: PowerK64, Power; PowerK64 { output_bits: 51 }, Power::new(16)
);
