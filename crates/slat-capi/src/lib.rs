//! Slat for hypervisors in C: what `include/slat.h` declares.
//!
//! A `slat_space` is one guest's second-stage tables with one owner, in storage of the caller's,
//! of a format that is chosen at run time. Its functions allocate by the caller's
//! [`slat_platform`](abi::slat_platform) alone, state their errors as a
//! [`slat_status`](abi::slat_status), and never unwind: a panic, which is a bug of the engine or a
//! broken promise of the platform, ends the program.
//!
//! What an operation leaves in TLBs is a [`slat_shootdown`](abi::slat_shootdown), a value that goes
//! to [`slat_complete`](log::slat_complete), as a `Shootdown` does in Rust.
//!
//! The crate's `README.md` says how to link it and what to implement.

#![cfg_attr(target_os = "none", no_std)]
#![allow(non_camel_case_types, reason = "they are C's names")]

#[cfg(not(any(
    feature = "arm64",
    feature = "ept",
    feature = "npt",
    feature = "power",
    feature = "riscv"
)))]
compile_error!("choose a format: turn on one of the features arm64, ept, npt, power, riscv");

pub mod abi;
pub mod arm64;
pub mod handle;
pub mod log;
mod machine;
pub mod space;

/// A panic in a program without an operating system: the hypervisor's to handle.
#[cfg(all(target_os = "none", feature = "panic-handler"))]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: the user of the feature defines the function, which takes nothing and does not
    // return.
    unsafe extern "C" {
        safe fn slat_panic() -> !;
    }
    slat_panic()
}
