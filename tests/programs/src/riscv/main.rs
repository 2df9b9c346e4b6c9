//! Tests RISC-V's G-stage tables with an independent walker: QEMU's virt machine, without firmware.
//!
//! In HS-mode it builds tables with the engine, runs a guest of four instructions that uses
//! addresses, and checks the behaviour of the hart: one line for each claim, `right` or `wrong`. It
//! ends by the machine's test device, with exit code 0 only if nothing was wrong.
//!
//! ```text
//! cargo build --release -p slat-programs --no-default-features --features riscv \
//!     --bin slat-walker-riscv --target riscv64gc-unknown-none-elf
//! qemu-system-riscv64 -M virt -cpu rv64 -smp 2 -bios none -nographic \
//!     -kernel target/riscv64gc-unknown-none-elf/release/slat-walker-riscv
//! ```
//!
//! QEMU drops all translations at each entry of a guest. So a second hart stays in one, and shows
//! an HFENCE.GVMA that is missing or on the wrong hart (`second.rs`). QEMU 7.2 always sets A and D;
//! QEMU 10 also faults instead, with `-cpu rv64,svade=on,svadu=off`.

#![cfg_attr(target_os = "none", no_std, no_main)]

#[cfg(target_os = "none")]
mod checks;
#[cfg(target_os = "none")]
#[path = "../claims.rs"]
mod claims;
#[cfg(target_os = "none")]
mod machine;
#[cfg(target_os = "none")]
#[path = "../pair.rs"]
mod pair;
#[cfg(target_os = "none")]
mod second;

#[cfg(not(target_os = "none"))]
fn main() -> std::process::ExitCode {
    eprintln!("this is for a machine without an operating system: riscv64gc-unknown-none-elf");
    std::process::ExitCode::FAILURE
}
