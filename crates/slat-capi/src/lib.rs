//! Slat for hypervisors in C: the functions that `include/slat.h` declares.
//!
//! A `slat_space` is one guest's second-stage tables with one owner, in the caller's storage, of a
//! format that is chosen at run time. Its functions allocate only through the caller's
//! [`slat_platform`](abi::slat_platform), return their errors as a
//! [`slat_status`](abi::slat_status), and never unwind: a panic, which is a bug of the engine or a
//! broken promise of the platform, ends the program.
//!
//! The invalidation that an operation owes is a [`slat_shootdown`](abi::slat_shootdown), a value
//! that the caller passes to [`slat_complete`](log::slat_complete), as a `Shootdown` in Rust.
//!
//! The crate's `README.md` says how to link it and what to implement.

#![cfg_attr(target_os = "none", no_std)]
#![allow(non_camel_case_types, reason = "they are C's names")]

#[cfg(not(any(
    feature = "arm64-4k",
    feature = "ept",
    feature = "npt",
    feature = "power",
    feature = "riscv"
)))]
compile_error!(
    "choose a format: turn on one of the features arm64, arm64-4k, ept, npt, power, riscv"
);

pub mod abi;
pub mod arm64;
pub mod handle;
pub mod log;
mod machine;
pub mod space;

/// Handles a panic in a program without an operating system: calls the hypervisor's function.
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
