//! A UEFI application that proves the engine's tables on the machine that boots it: EPT, NPT or
//! Arm's stage 2, whichever the CPU has, with the claims of the emulated walkers, on each CPU in
//! turn where the firmware lends them. It checks invalidations while another CPU stays in a guest,
//! and times the engine's operations on x86.
//!
//! `cargo xtask stick` makes an image of it. It prints what it finds, writes it to `\slat.txt` on
//! the volume that it was started from, and powers the machine off.

#![cfg_attr(target_os = "uefi", no_std, no_main)]

#[cfg(all(target_os = "uefi", target_arch = "aarch64"))]
mod arm;
#[cfg(all(target_os = "uefi", target_arch = "aarch64"))]
#[path = "../claims.rs"]
mod claims;
#[cfg(target_os = "uefi")]
mod firmware;
#[cfg(target_os = "uefi")]
mod machine;
#[cfg(target_os = "uefi")]
#[path = "../pair.rs"]
mod pair;
#[cfg(all(target_os = "uefi", target_arch = "x86_64"))]
#[path = "../npt/platform.rs"]
mod platform;
#[cfg(any(test, all(target_os = "uefi", target_arch = "aarch64")))]
#[path = "arm/psci.rs"]
mod psci;
#[cfg(target_os = "uefi")]
mod run;
#[cfg(all(target_os = "uefi", target_arch = "x86_64"))]
mod x86;

#[cfg(all(target_os = "uefi", target_arch = "aarch64"))]
use arm as cpu;
#[cfg(all(target_os = "uefi", target_arch = "x86_64"))]
use x86 as cpu;

#[cfg(not(target_os = "uefi"))]
fn main() -> std::process::ExitCode {
    eprintln!("this is for a machine's firmware: x86_64-unknown-uefi, aarch64-unknown-uefi");
    std::process::ExitCode::FAILURE
}
