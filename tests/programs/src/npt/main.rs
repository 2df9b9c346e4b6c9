//! Tests tables of `slat::format::npt` with an independent walker: the nested paging of an x86 CPU,
//! which QEMU emulates. A guest of a few instructions reads, writes and executes through them, and
//! the results are compared with the AMD64 manual, volume 2, 15.25.
//!
//! Each line on the serial port says whether a case was `right` or `wrong`. The program ends by
//! QEMU's `isa-debug-exit`, with status 33 if all cases were right. On other targets than the bare
//! machine it does nothing.
//!
//! ```text
//! cargo build -p slat-programs --no-default-features --features npt \
//!     --bin slat-walker-npt --target x86_64-unknown-none
//! qemu-system-x86_64 -cpu max -m 64 -display none -serial stdio -no-reboot \
//!     -device isa-debug-exit,iobase=0xf4,iosize=4 \
//!     -kernel target/x86_64-unknown-none/debug/slat-walker-npt
//! ```

#![cfg_attr(all(target_os = "none", target_arch = "x86_64"), no_std, no_main)]

#[cfg(all(target_os = "none", target_arch = "x86_64"))]
mod cases;
#[cfg(all(target_os = "none", target_arch = "x86_64"))]
#[path = "svm.rs"]
mod cpu;
#[cfg(all(target_os = "none", target_arch = "x86_64"))]
mod machine;
#[cfg(all(target_os = "none", target_arch = "x86_64"))]
mod platform;
#[cfg(all(target_os = "none", target_arch = "x86_64"))]
mod wide;

#[cfg(all(target_os = "none", target_arch = "x86_64"))]
#[unsafe(no_mangle)]
extern "C" fn main() -> ! {
    machine::finish(cases::run(wide::cases))
}

#[cfg(not(all(target_os = "none", target_arch = "x86_64")))]
fn main() {}
