//! Other toolchains and targets: the oldest Rust that the workspace promises, and a machine without
//! an operating system.

use crate::stages::{Outcome, cargo, ran};
use crate::{in_ci, setup, target};

/// The `rust-version` of the workspace, of which any patch release serves.
const OLDEST: &str = concat!(env!("CARGO_PKG_RUST_VERSION"), ".0");

/// The engine compiles with the oldest Rust.
pub fn oldest() -> anyhow::Result<Outcome> {
    needs(setup::toolchain(OLDEST), || {
        let mut check = setup::cargo_of(OLDEST);
        check.arg("check");
        check.args(["--package", "slat", "--package", "slat-sim", "--package", "slat-axvm"]);
        ran(check.env("CARGO_TARGET_DIR", target().join("msrv")))
    })
}

/// The engine, and a user of all of it, compile for a machine without an operating system.
pub fn bare() -> anyhow::Result<Outcome> {
    needs(setup::target(setup::BARE), || {
        for format in ["arm64", "ept", "npt", "power", "riscv"] {
            let mut check = cargo(&["check", "--target", setup::BARE, "--no-default-features"]);
            check.args(["--package", "slat-size", "--features", format]);
            check.env("CARGO_PROFILE_DEV_PANIC", "abort");
            ran(&mut check)?;
        }
        let mut check = cargo(&["check", "--target", setup::BARE, "--package", "slat-capi"]);
        check.args(["--no-default-features", "--features", "arm64,panic-handler"]);
        ran(check.env("CARGO_PROFILE_DEV_PANIC", "abort"))?;
        ran(&mut cargo(&[
            "check",
            "--target",
            setup::BARE,
            "--package",
            "slat",
            "--package",
            "slat-guest",
            "--package",
            "slat-axvm",
        ]))
    })
}

/// Runs a stage if `there` is what it needs. Without rustup nothing can be installed, so nothing
/// that could be there is missing.
pub fn needs(
    there: anyhow::Result<()>,
    stage: impl FnOnce() -> anyhow::Result<Outcome>,
) -> anyhow::Result<Outcome> {
    match there {
        Ok(()) => stage(),
        Err(error) if in_ci() && setup::has_rustup() => Err(error),
        Err(error) => Ok(Outcome::Skipped(format!("{error:#}"))),
    }
}
