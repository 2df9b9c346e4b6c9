//! An arm64 hypervisor at EL2, under QEMU. It runs one guest, Linux, on `slat-guest`.
//!
//! Each vCPU has a CPU of its own. One more CPU is the manager's, which logs, copies and ages the
//! guest's memory while the guest runs. `docs/hypervisor.md` explains the code.

#![cfg_attr(target_os = "none", no_std, no_main)]

#[cfg(target_os = "none")]
extern crate alloc;
#[cfg(target_os = "none")]
mod el2;

#[cfg(not(target_os = "none"))]
fn main() -> std::process::ExitCode {
    eprintln!("this is for a machine without an operating system: cargo xtask hypervisor run");
    std::process::ExitCode::FAILURE
}
