//! Compares the public interface of the published crates with the accepted listings in `docs/api`.

mod changes;
mod listing;

use crate::stages::{Outcome, PUBLISHED, cargo, ran};
use crate::{msrv, root, setup, target};
use anyhow::{Context, bail};
use changes::Changes;
use std::path::PathBuf;
use std::process::Command;

/// The Rust release whose rustdoc makes the listings; any patch release of it works. rustdoc's
/// format is not stable, and its listing differs a little from release to release.
const RUSTDOC: &str = "1.95";

/// Header of a listing.
const HEADER: &str = "\
# The public interface of CRATE, one item a line, with every feature of the crate. Written by
# `cargo xtask api --accept`; `cargo xtask test api` fails where the crate differs from it.
";

/// Compares each published crate with its listing.
pub fn check() -> anyhow::Result<Outcome> {
    msrv::needs(rustdoc().map(|_| ()), || compare().map(|()| Outcome::Ran(Vec::new())))
}

/// Prints the changes since the listings were accepted, or accepts them.
pub fn run(accept: bool) -> anyhow::Result<()> {
    if !accept {
        return compare();
    }
    for name in PUBLISHED {
        let lines = current(name)?;
        let changes = Changes::between(&accepted(name).unwrap_or_default(), &lines);
        let mut text = HEADER.replace("CRATE", name);
        lines.iter().for_each(|line| text.extend([line, "\n"]));
        let path = file(name);
        std::fs::write(&path, text).with_context(|| path.display().to_string())?;
        print!("{name}: {} items\n{changes}", lines.len());
    }
    Ok(())
}

fn compare() -> anyhow::Result<()> {
    let (mut breaking, mut additions) = (0, 0);
    for name in PUBLISHED {
        let changes = Changes::between(&accepted(name)?, &current(name)?);
        if changes.is_empty() {
            println!("{name}: as accepted");
        } else {
            print!("{name}:\n{changes}");
        }
        breaking += changes.breaking.len();
        additions += changes.additions.len();
    }
    if breaking + additions == 0 {
        return Ok(());
    }
    let what = match breaking {
        0 => "the public interface grew",
        _ => "the public interface breaks its users: CHANGELOG.md has to say how they migrate",
    };
    bail!("{what}; `cargo xtask api --accept` accepts it")
}

fn file(name: &str) -> PathBuf {
    root().join("docs/api").join(name).with_extension("txt")
}

/// Returns the accepted lines.
fn accepted(name: &str) -> anyhow::Result<Vec<String>> {
    let path = file(name);
    let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    Ok(text.lines().filter(|line| !line.starts_with("# ")).map(str::to_owned).collect())
}

/// Returns the present lines of the crate.
fn current(name: &str) -> anyhow::Result<Vec<String>> {
    let default = listed(name, &[])?;
    let all = listed(name, &["--all-features"])?;
    if let Some(line) = default.difference(&all).next() {
        bail!("{name}: a feature takes away `{line}`, or changes it: features must only add");
    }
    let note = |line: &String| match default.contains(line) {
        true => "",
        false => listing::BY_A_FEATURE,
    };
    Ok(all.iter().map(|line| format!("{line}{}", note(line))).collect())
}

fn listed(name: &str, features: &[&str]) -> anyhow::Result<std::collections::BTreeSet<String>> {
    // A separate folder: build scripts depend on RUSTC_BOOTSTRAP, and would otherwise run each
    // time.
    let target = target().join("api");
    let mut doc = rustdoc()?;
    doc.args(["rustdoc", "--quiet", "--lib", "--package", name]).args(features);
    doc.args(["--", "-Zunstable-options", "--output-format", "json"]);
    // With this variable the stable rustdoc writes JSON, so that no nightly is needed.
    doc.env("RUSTC_BOOTSTRAP", "1").env("CARGO_TARGET_DIR", &target);
    ran(&mut doc)?;
    listing::of(&target.join("doc").join(name.replace('-', "_")).with_extension("json"))
}

/// Returns cargo with the rustdoc that makes the listings: this one, or one that rustup installs.
fn rustdoc() -> anyhow::Result<Command> {
    let version = Command::new("rustc").arg("--version").output();
    let version = version.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    if version.is_ok_and(|version| version.starts_with(&format!("rustc {RUSTDOC}."))) {
        return Ok(cargo(&[]));
    }
    let toolchain = format!("{RUSTDOC}.0");
    setup::toolchain(&toolchain)?;
    Ok(setup::cargo_of(&toolchain))
}
