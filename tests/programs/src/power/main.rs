//! Tests Power's partition-scoped radix trees with an independent walker: QEMU's `powernv9`,
//! without firmware.
//!
//! In HV real mode it builds tables with the engine, runs a guest of a few instructions that uses
//! addresses, and checks the behaviour of the CPU: one line for each claim, `right` or `wrong`. The
//! machine has no device that ends it; the last line says how many claims were wrong.
//!
//! `cargo xtask test walkers` builds it, without relocation and with the linker of
//! `binutils-powerpc64-linux-gnu`, and makes it a plain image for QEMU's `-bios`.
//!
//! QEMU's TLB keeps entries while the hypervisor runs, so that an invalidation that is left out, or
//! is of another page, is noticed. It completes all invalidations at `hrfid`: only a second CPU,
//! which stays in the guest, shows missing barriers (`second.rs`).

#![cfg_attr(target_arch = "powerpc64", no_std, no_main)]

#[cfg(target_arch = "powerpc64")]
mod checks;
#[cfg(target_arch = "powerpc64")]
#[path = "../claims.rs"]
mod claims;
#[cfg(target_arch = "powerpc64")]
mod machine;
#[cfg(target_arch = "powerpc64")]
#[path = "../pair.rs"]
mod pair;
#[cfg(target_arch = "powerpc64")]
mod runtime;
#[cfg(target_arch = "powerpc64")]
mod second;

#[cfg(not(target_arch = "powerpc64"))]
fn main() -> std::process::ExitCode {
    eprintln!("this is for a machine without an operating system: powerpc64-unknown-linux-gnu");
    std::process::ExitCode::FAILURE
}
