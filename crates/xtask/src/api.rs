//! The stage `api`: the public interface of the published crates, against the last tag.

use crate::workspace::{Outcome, PUBLISHED, cargo, ran};
use crate::{root, setup};
use std::process::Command;

/// Compares by `cargo semver-checks`, which knows the rules of what breaks users' code.
///
/// # Errors
/// A change breaks users' code and the version does not say so, or the tool cannot be installed.
pub fn check() -> anyhow::Result<Outcome> {
    let Some(base) = base() else {
        let reason = "there is no tag, and SLAT_API_BASE names no commit";
        return Ok(Outcome::Skipped(reason.to_owned()));
    };
    setup::cargo_semver_checks()?;
    let mut checks = cargo(&["semver-checks", "--baseline-rev", &base]);
    for package in PUBLISHED {
        checks.args(["--package", package]);
    }
    ran(&mut checks)
}

/// Returns the commit to compare with.
fn base() -> Option<String> {
    if let Ok(base) = std::env::var("SLAT_API_BASE") {
        return Some(base);
    }
    let mut git = Command::new("git");
    git.args(["describe", "--tags", "--abbrev=0"]).current_dir(root());
    let tag = git.output().ok().filter(|output| output.status.success())?;
    String::from_utf8(tag.stdout).ok().map(|tag| tag.trim().to_owned())
}
