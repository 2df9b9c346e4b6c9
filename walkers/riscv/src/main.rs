//! RISC-V's G-stage tables before a real walker: QEMU's virt machine, without firmware.
//!
//! In HS-mode it builds tables with the engine, has a guest of four instructions use addresses, and
//! compares what the hart did: one line for each claim, `right` or `wrong`. It leaves by the
//! machine's test device, whose exit code is 0 only if nothing was wrong.
//!
//! ```text
//! cargo build --release -p slat-walker-riscv --target riscv64gc-unknown-none-elf
//! qemu-system-riscv64 -M virt -cpu rv64 -bios none -nographic -kernel target/riscv64gc-unknown-none-elf/release/slat-walker-riscv
//! ```
//!
//! QEMU forgets all translations at each entry of a guest: what an HFENCE.GVMA is needed for cannot
//! be seen here. QEMU 7.2 always sets A and D; QEMU 10 also faults instead, with `-cpu
//! rv64,svade=on,svadu=off`.

#![cfg_attr(target_os = "none", no_std, no_main)]

#[cfg(target_os = "none")]
mod checks;
#[cfg(target_os = "none")]
mod machine;

#[cfg(not(target_os = "none"))]
fn main() -> std::process::ExitCode {
    eprintln!("this is for a machine without an operating system: riscv64gc-unknown-none-elf");
    std::process::ExitCode::FAILURE
}
