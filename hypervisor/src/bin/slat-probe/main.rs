//! A guest that misbehaves: each of its probes does something at EL1 that a guest should not do,
//! and checks the hypervisor's response. The word `probe=NAME` of its command line selects the
//! probe; see `probes.rs`.

#![cfg_attr(target_os = "none", no_std, no_main)]

#[cfg(target_os = "none")]
mod machine;
#[cfg(target_os = "none")]
mod probes;

#[cfg(not(target_os = "none"))]
fn main() -> std::process::ExitCode {
    eprintln!("this is a guest of slat-hypervisor: cargo xtask hypervisor run");
    std::process::ExitCode::FAILURE
}
