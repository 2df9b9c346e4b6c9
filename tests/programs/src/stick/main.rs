//! A UEFI application that proves the engine's tables on the machine that boots it: EPT or NPT,
//! whichever the CPU has, with the cases of the emulated walkers, on each CPU in turn. It checks
//! invalidations while another CPU stays in a guest, and times the engine's operations.
//!
//! `cargo xtask stick` makes an image of it. It prints what it finds, writes it to `\slat.txt` on
//! the volume that it was started from, and powers the machine off.

#![cfg_attr(target_os = "uefi", no_std, no_main)]

#[cfg(target_os = "uefi")]
mod firmware;
#[cfg(target_os = "uefi")]
mod machine;
#[cfg(target_os = "uefi")]
#[path = "../pair.rs"]
mod pair;
#[cfg(target_os = "uefi")]
#[path = "../npt/platform.rs"]
mod platform;

#[cfg(target_os = "uefi")]
mod amd;
#[cfg(target_os = "uefi")]
mod intel;
#[cfg(target_os = "uefi")]
mod run;

#[cfg(not(target_os = "uefi"))]
fn main() -> std::process::ExitCode {
    eprintln!("this is for a machine's firmware: x86_64-unknown-uefi");
    std::process::ExitCode::FAILURE
}
