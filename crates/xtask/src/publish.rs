//! Packs the published crates as for a registry, and checks that the libraries and the programs
//! compile from the packages.

use crate::workspace::{INSTALLED, Outcome, PUBLISHED, cargo, ran};
use crate::{root, target};
use anyhow::Context;
use std::fmt::Write as _;
use std::fs;
use std::process::Command;

/// Packs the crates, and compiles each library, and each program with the crates that are there for
/// programs alone.
pub fn pack() -> anyhow::Result<Outcome> {
    // Cargo's own check builds each crate twice, and all that they depend on once more.
    let mut pack = cargo(&["package", "--quiet", "--allow-dirty", "--no-verify"]);
    for name in all() {
        pack.args(["--package", name]);
    }
    ran(&mut pack)?;
    let folder = target().join("publish");
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).context("a folder for the packages")?;
    let mut workspace = "[workspace]\nresolver = \"2\"\nmembers = [\"*\"]\n\
                         [patch.crates-io]\n"
        .to_owned();
    for name in all() {
        let package = format!("{name}-{}", env!("CARGO_PKG_VERSION"));
        let packed = target().join("package").join(format!("{package}.crate"));
        let mut unpack = Command::new("tar");
        ran(unpack.arg("--extract").arg("--file").arg(packed).arg("--directory").arg(&folder))?;
        let _ = writeln!(workspace, "{name} = {{ path = \"{package}\" }}");
    }
    fs::write(folder.join("Cargo.toml"), workspace)?;
    fs::copy(root().join("Cargo.lock"), folder.join("Cargo.lock"))?;
    for name in PUBLISHED.into_iter().chain(["slat-bench", "slat-cli"]) {
        // By itself, so that it has the features that it asks for, and no others.
        let mut check = cargo(&["check", "--quiet", "--package", name]);
        ran(check.current_dir(&folder).env("CARGO_TARGET_DIR", target()))?;
    }
    Ok(Outcome::Ran(Vec::new()))
}

/// Returns the crates, each after those that it depends on.
fn all() -> impl Iterator<Item = &'static str> {
    PUBLISHED.into_iter().chain(INSTALLED)
}
