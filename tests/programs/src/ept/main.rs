//! Tests tables of `slat::format::ept` with an independent walker: VMX in Bochs. A guest of a few
//! instructions reads, writes and executes through them, and the results are compared with the
//! Intel SDM, volume 3C, "The Extended Page Table Mechanism".
//!
//! Each line on the serial port says whether a case was `right` or `wrong`. `cargo xtask test
//! walkers` makes the program a ROM, which takes the place of a BIOS (`npt/rom.s`). Bochs drops all
//! translations at each VM entry: a missing INVEPT is not noticed.

#![cfg_attr(all(target_os = "none", target_arch = "x86_64"), no_std, no_main)]

#[cfg(all(target_os = "none", target_arch = "x86_64"))]
#[path = "../npt/cases.rs"]
mod cases;
#[cfg(all(target_os = "none", target_arch = "x86_64"))]
#[path = "vmx.rs"]
mod cpu;
#[cfg(all(target_os = "none", target_arch = "x86_64"))]
#[path = "../npt/machine.rs"]
mod machine;
#[cfg(all(target_os = "none", target_arch = "x86_64"))]
mod maps;
#[cfg(all(target_os = "none", target_arch = "x86_64"))]
#[path = "../npt/platform.rs"]
mod platform;

#[cfg(all(target_os = "none", target_arch = "x86_64"))]
#[unsafe(no_mangle)]
extern "C" fn main() -> ! {
    machine::finish(cases::run(maps::cases))
}

#[cfg(not(all(target_os = "none", target_arch = "x86_64")))]
fn main() {}
