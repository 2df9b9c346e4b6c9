//! A guest that misbehaves: each of its probes does at EL1 what no guest should, and checks what
//! the hypervisor answers. The word `probe=NAME` of its command line says which; see `probes.rs`.

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
