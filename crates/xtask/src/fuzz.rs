//! `cargo xtask fuzz`: random histories, guided by the code that they reach.

use crate::setup;
use crate::stages::{Outcome, cargo, ran};
use crate::target;
use anyhow::Context;

/// Fuzzes for `seconds`. Needs a C++ compiler, and a nightly toolchain and cargo-fuzz, which it
/// installs.
pub fn run(seconds: u64) -> anyhow::Result<()> {
    setup::toolchain("nightly").context("fuzzing needs a nightly toolchain")?;
    setup::cargo_fuzz()?;
    let mut fuzz = setup::cargo_of("nightly");
    fuzz.args(["fuzz", "run", "--fuzz-dir", "tests/fuzz", "operations", "--"]);
    fuzz.arg(format!("-max_total_time={seconds}")).args([
        "-max_len=1024",
        "-len_control=0",
        "-print_final_stats=1",
    ]);
    ran(fuzz.env("CARGO_TARGET_DIR", target().join("fuzz"))).map(|_| ())
}

/// Checks that the fuzzed target compiles, without running it or building the fuzzer.
pub fn check() -> anyhow::Result<Outcome> {
    let manifest = "tests/fuzz/Cargo.toml";
    let mut check = cargo(&["check", "--manifest-path", manifest, "--no-default-features"]);
    ran(check.env("CARGO_TARGET_DIR", target().join("fuzz-check")))
}
