//! Runs each operation of the engine, and each service of a guest, once under callgrind. The cost
//! of an operation is its number of instructions, which noise does not change.
//!
//! `cargo xtask counts` runs the program, and compares the counts with the table in
//! `docs/counts.md`. callgrind collects only inside [`measured`], and writes its counters before
//! each call of [`announce`]. The program prints, in the order of the measurements, the name of
//! each and the number of pages (or other units) that it worked on.
//!
//! With an argument it measures only operations whose names contain the argument, for example
//! `arm64: relax`: for the counts of one row, or to find its instructions.

mod engine;
mod guest;
mod machine;

use std::hint::black_box;
use std::io::{self, Write as _};

/// Runs `operation`; callgrind counts it. The function must not be inlined or merged, because
/// callgrind identifies it by its name.
#[inline(never)]
fn measured<R>(operation: impl FnOnce() -> R) -> R {
    black_box(operation())
}

/// Returns whether the command line asks for this measurement.
fn wanted(format: &str, operation: &str) -> bool {
    let name = format!("{format}: {operation}");
    std::env::args().nth(1).is_none_or(|part| name.contains(&part))
}

/// Prints the name and units of the next measurement. callgrind writes the counters of the one
/// before.
#[inline(never)]
fn announce(format: &str, operation: &str, units: u64) -> io::Result<()> {
    writeln!(io::stdout(), "{format}\t{operation}\t{units}")
}

fn main() -> io::Result<()> {
    engine::all::<slat::format::arm64::Arm64K4>("arm64")?;
    engine::all::<slat::format::ept::Ept1G>("ept")?;
    engine::all::<slat::format::riscv::RiscV>("riscv")?;
    guest::all::<slat::format::arm64::Arm64K4>("arm64")?;
    guest::all::<slat::format::ept::Ept1G>("ept")
}
