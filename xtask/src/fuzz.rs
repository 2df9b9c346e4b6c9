//! `cargo xtask fuzz`: random histories that are guided by the code they reach.

use crate::setup;
use crate::stages::{Outcome, cargo, ran};
use crate::target;
use anyhow::Context;

/// Fuzzes for so many seconds. Needs a nightly toolchain and a C++ compiler, and installs
/// cargo-fuzz, all but the compiler.
pub fn run(seconds: u64) -> anyhow::Result<()> {
    setup::toolchain("nightly").context("fuzzing needs a nightly toolchain")?;
    setup::cargo_fuzz()?;
    let mut fuzz = setup::cargo_of("nightly");
    fuzz.args(["fuzz", "run", "operations", "--"]);
    fuzz.arg(format!("-max_total_time={seconds}")).args([
        "-max_len=1024",
        "-len_control=0",
        "-print_final_stats=1",
    ]);
    ran(fuzz.env("CARGO_TARGET_DIR", target().join("fuzz"))).map(|_| ())
}

/// The fuzzed target compiles; it does not run, and the fuzzer itself is left out.
pub fn check() -> anyhow::Result<Outcome> {
    let manifest = "fuzz/Cargo.toml";
    let mut check = cargo(&["check", "--manifest-path", manifest, "--no-default-features"]);
    ran(check.env("CARGO_TARGET_DIR", target().join("fuzz-check")))
}
