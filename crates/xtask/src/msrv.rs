//! Other toolchains and targets: the oldest Rust that the libraries support, and a machine without
//! an operating system.

use crate::workspace::{Outcome, PUBLISHED, cargo, packages, ran};
use crate::{in_ci, setup, target};
use anyhow::Context;

/// Checks that the published crates, and `slat-axvm`, compile with the oldest Rust that each
/// supports.
pub fn oldest() -> anyhow::Result<Outcome> {
    for name in PUBLISHED.into_iter().chain(["slat-axvm"]) {
        // Any patch release works.
        let toolchain = format!("{}.0", promised(name)?);
        let checked = needs(setup::toolchain(&toolchain), || {
            let mut check = setup::cargo_of(&toolchain);
            check.args(["check", "--package", name, "--all-features"]);
            ran(check.env("CARGO_TARGET_DIR", target().join("msrv")))
        })?;
        if let Outcome::Skipped(_) = checked {
            return Ok(checked);
        }
    }
    Ok(Outcome::Ran(Vec::new()))
}

/// Returns the `rust-version` of a crate, without a patch release.
fn promised(name: &str) -> anyhow::Result<String> {
    let packages = packages()?;
    let package = packages.iter().find(|package| package["name"] == name);
    let version = package.and_then(|package| package["rust_version"].as_str());
    Ok(version.with_context(|| format!("{name} has no rust-version"))?.to_owned())
}

/// Checks that the engine, and a user of all of it, compile without an operating system.
pub fn bare() -> anyhow::Result<Outcome> {
    needs(setup::target(setup::BARE), || {
        for format in ["arm64", "ept", "npt", "power", "riscv"] {
            let mut check = cargo(&["check", "--target", setup::BARE, "--no-default-features"]);
            check.args(["--package", "slat-programs", "--lib", "--features", format]);
            check.env("CARGO_PROFILE_DEV_PANIC", "abort");
            ran(&mut check)?;
        }
        for format in ["arm64", "arm64-4k"] {
            let mut check = cargo(&["check", "--target", setup::BARE, "--package", "slat-capi"]);
            check.args(["--no-default-features", "--features", &format!("{format},panic-handler")]);
            ran(check.env("CARGO_PROFILE_DEV_PANIC", "abort"))?;
        }
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

/// Runs a stage if `there` says that its tools exist. Otherwise the stage fails in CI if rustup
/// could install them, and is skipped elsewhere.
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
