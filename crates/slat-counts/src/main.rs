//! Each operation of the engine, and each service of a guest, once: a program that runs under
//! callgrind, so that what an operation costs is a number of instructions, which noise cannot
//! touch.
//!
//! `cargo xtask counts` runs it, and holds what it counted to the table in `docs/counts.md`. Only
//! what happens inside [`measured`] is counted: callgrind is told the name of that function, and
//! writes its counters each time it returns. So the program prints, in the order of the
//! measurements, what each was of and how many pages (or other units) it worked on.
//!
//! With an argument it measures only what has the argument in its name, such as `arm64: relax`:
//! counts of one row, or where its instructions are.

mod engine;
mod guest;
mod machine;

use std::hint::black_box;
use std::io::{self, Write as _};

/// Runs `operation`, which is what callgrind counts. Not inlined, nor part of another: callgrind
/// knows it by its name.
#[inline(never)]
fn measured<R>(operation: impl FnOnce() -> R) -> R {
    black_box(operation())
}

/// Whether the command line asks for this measurement.
fn wanted(format: &str, operation: &str) -> bool {
    let name = format!("{format}: {operation}");
    std::env::args().nth(1).is_none_or(|part| name.contains(&part))
}

/// Says what the next measurement is of. callgrind writes the counters of the one before.
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
