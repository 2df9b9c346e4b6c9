//! The workspace as stages build it, and what a stage returns.

use crate::{root, setup, target};
use anyhow::{Context, bail, ensure};
use serde_json::Value;
use std::path::PathBuf;
use std::process::{Command, Output};

/// Returns the CPU seconds of the processes that this one has waited for, and of theirs.
pub fn cpu_seconds() -> u64 {
    // Its 16th and 17th field (proc_pid_stat(5)), in hundredths; a name may hold spaces.
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    fields.skip(13).take(2).filter_map(|ticks| ticks.parse::<u64>().ok()).sum::<u64>() / 100
}

/// The outcome of a stage that did not fail.
pub enum Outcome {
    /// The stage ran; the parts that it left out, with reasons.
    Ran(Vec<String>),
    /// The stage did not run; the reason.
    Skipped(String),
}

/// Options for the workspace as it is tested: without the commands' feature `every-format`, which
/// takes as long to compile as the rest. (The default features of `slat-programs`, `slat-capi` and
/// `slat-axvm` are the list of formats.)
pub const TESTED: [&str; 4] = [
    "--workspace",
    "--no-default-features",
    "--features",
    "slat-bench/peers,slat-bench/granules,slat-cli/granules,slat-programs/counts,\
     slat-programs/stick,slat-programs/work,slat-capi/default,slat-axvm/default",
];

/// Words of cargo that run `slat-bench` as it is tested.
pub const SLAT_BENCH: [&str; 7] = [
    "run",
    "--quiet",
    "--no-default-features",
    "--features",
    "peers,granules",
    "--package",
    "slat-bench",
];

/// Returns the folder of both programs as the tests have them. `cargo run` would compile the
/// libraries again, with other features.
pub fn programs() -> anyhow::Result<PathBuf> {
    let mut build = cargo(&["test", "--quiet", "--no-run", "--test", "cli"]);
    ran(build.args(TESTED))?;
    Ok(target().join("debug"))
}

/// Returns the command that runs the release build of `slat-bench`.
pub fn slat_bench() -> Command {
    cargo(&["run", "--quiet", "--release", "--package", "slat-bench", "--"])
}

/// Crates that are published, each after those that it depends on.
pub const PUBLISHED: [&str; 4] = ["slat", "slat-guest", "slat-sim", "slat-reclaim"];

/// Crates that are published after them so that `cargo install slat-cli` works. Their interfaces
/// are for the programs alone, and change freely.
pub const INSTALLED: [&str; 5] = ["slat-kvm", "slat-lab", "slat-kernel", "slat-bench", "slat-cli"];

/// Returns cargo, in the workspace.
pub fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new(setup::cargo());
    command.args(arguments).current_dir(root());
    command
}

/// Returns what cargo says of each crate.
pub fn packages() -> anyhow::Result<Vec<Value>> {
    let said = output(&mut cargo(&["metadata", "--no-deps", "--format-version", "1"]))?.stdout;
    let metadata: Value = serde_json::from_slice(&said).context("`cargo metadata`")?;
    metadata["packages"].as_array().cloned().context("`cargo metadata` lists no packages")
}

/// Runs a command to its end; its output goes to the stage's.
pub fn ran(command: &mut Command) -> anyhow::Result<Outcome> {
    let status = command.status().with_context(|| format!("cannot start {command:?}"))?;
    if !status.success() {
        bail!("{command:?} failed: {status}");
    }
    Ok(Outcome::Ran(Vec::new()))
}

/// Runs a command to its end, and returns its output.
pub fn output(command: &mut Command) -> anyhow::Result<Output> {
    let done = command.output().with_context(|| format!("cannot start {command:?}"))?;
    let said = String::from_utf8_lossy(&done.stderr);
    ensure!(done.status.success(), "{command:?} failed: {}\n{said}", done.status);
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_published_crate_has_the_licences_and_a_page() {
        for name in PUBLISHED.into_iter().chain(INSTALLED) {
            let folder = crate::root().join("crates").join(name);
            for licence in ["LICENSE-APACHE", "LICENSE-MIT"] {
                let read = |folder: &std::path::Path| std::fs::read(folder.join(licence)).unwrap();
                assert_eq!(read(&folder), read(crate::root()), "{name}: {licence}");
            }
            let has_page = folder.join("README.md").is_file();
            assert!(has_page || INSTALLED.contains(&name), "{name}");
        }
    }
}
