//! `cargo xtask peers`: installs what the comparison with Linux and crates needs, and runs it.

use crate::workspace::{Outcome, SLAT_BENCH, TESTED, cargo, output, ran, slat_bench};
use crate::{in_ci, setup, target};
use anyhow::{Context, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Patterns of tar for the parts of a Linux tree that are compiled.
const PARTS: [&str; 5] = [
    "*/Makefile",
    "*/arch/arm64/include/asm/*.h",
    "*/arch/arm64/kvm/*.c",
    "*/arch/arm64/kvm/hyp/*.c",
    "*/virt/kvm/kvm_main.c",
];

/// Edits of the tree that are measured in addition to the tree itself.
const EDITS: [&str; 2] = ["bounded-walks/2", "bounded-walks"];

/// Installs what is missing, builds for release, and runs `slat-bench peers`.
pub fn run(arguments: &[String]) -> anyhow::Result<()> {
    setup::package("coccinelle", "spatch")?;
    let tree = linux_tree()?;
    let mut slat = slat_bench();
    slat.args(["peers", "--linux-tree"]).arg(tree);
    if !arguments.iter().any(|argument| argument.starts_with("--with")) {
        slat.args(["--with", EDITS[0]]);
    }
    ran(slat.args(arguments)).map(|_| ())
}

/// Installs Coccinelle and the tree; returns the tree's path.
pub fn tree() -> anyhow::Result<PathBuf> {
    setup::package("coccinelle", "spatch").and_then(|()| linux_tree())
}

/// Runs the tests that need a tree; with `long` also more histories, all granules, and the whole
/// command.
pub fn test(long: bool) -> anyhow::Result<Outcome> {
    let tree = match tree() {
        Ok(tree) => tree,
        Err(error) if in_ci() => return Err(error),
        Err(error) => return Ok(Outcome::Skipped(format!("{error:#}"))),
    };
    // Builds the whole workspace, as the other tests do, so that nothing is compiled again.
    let mut tests = cargo(&["test"]);
    tests.args(TESTED);
    if long {
        tests.envs([("HISTORIES", "120"), ("ROUNDS", "20")]);
    }
    let ran_tests = ran(tests
        .args(["--test", "trees", "--test", "transcript", "--test", "peers"])
        .env("SLAT_LINUX_TREES", &tree))?;
    if !long {
        return Ok(ran_tests);
    }
    let mut slat = cargo(&SLAT_BENCH);
    slat.args(["--", "peers", "--quick", "--rounds", "1", "--linux-tree"]).arg(&tree);
    for edits in EDITS {
        slat.args(["--with", edits]);
    }
    ran(&mut slat)
}

/// Unpacks the parts of Debian's Linux source that are needed, of the newest package that this
/// machine has or can install.
pub fn linux_tree() -> anyhow::Result<PathBuf> {
    unpacked("linux", &PARTS)
}

/// Unpacks all of Debian's Linux source, to build kernels.
pub fn whole_tree() -> anyhow::Result<PathBuf> {
    unpacked("linux-whole", &["*"])
}

/// Unpacks the files of these patterns below a folder of this name.
fn unpacked(folder: &str, parts: &[&str]) -> anyhow::Result<PathBuf> {
    let name = newest_source()?;
    let packed = Path::new("/usr/src").join(format!("{name}.tar.xz"));
    let tree = target().join(folder).join(name.trim_start_matches("linux-source-"));
    if !packed.exists() {
        setup::install(&name)?;
    }
    let stamp = tree.join(".unpacked");
    let newer = |a: &Path, b: &Path| -> Option<bool> {
        Some(a.metadata().ok()?.modified().ok()? >= b.metadata().ok()?.modified().ok()?)
    };
    if newer(&stamp, &packed) == Some(true) {
        return Ok(tree);
    }
    println!("unpacking {}", packed.display());
    std::fs::create_dir_all(&tree).context("cannot make a folder for Linux's source")?;
    let mut tar = Command::new("tar");
    tar.arg("--extract").arg("--file").arg(&packed).arg("--directory").arg(&tree);
    tar.arg("--strip-components=1");
    if parts != ["*"] {
        tar.args(["--wildcards", "--no-wildcards-match-slash"]).args(parts);
    }
    ran(&mut tar)?;
    ensure!(
        tree.join("arch/arm64/kvm/hyp/pgtable.c").exists(),
        "{} is no Linux source",
        packed.display()
    );
    std::fs::write(&stamp, "").context("cannot mark the tree as unpacked")?;
    Ok(tree)
}

/// Returns the name of the newest source package from 6.6 to 7.x.
fn newest_source() -> anyhow::Result<String> {
    let mut known = listed()?;
    if known.is_empty() {
        // A fresh machine has no package lists.
        setup::update()?;
        known = listed()?;
    }
    let newest = known.into_iter().max().context(
        "no package linux-source-6.6 to -7.x is known to apt; give a tree to `slat-bench peers \
         --linux-tree PATH` yourself",
    )?;
    Ok(format!("linux-source-{}.{}", newest.0, newest.1))
}

fn listed() -> anyhow::Result<Vec<(u32, u32)>> {
    let mut search = Command::new("apt-cache");
    search.args(["search", "--names-only", "^linux-source-[67][.][0-9]+$"]);
    let found = output(&mut search).context("apt-cache is needed, of a Debian system")?;
    Ok(versions(&String::from_utf8_lossy(&found.stdout)))
}

fn versions(text: &str) -> Vec<(u32, u32)> {
    let version = |line: &str| -> Option<(u32, u32)> {
        let name = line.split_whitespace().next()?.strip_prefix("linux-source-")?;
        let (major, minor) = name.split_once('.')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    };
    let known = (6, 6)..(8, 0);
    text.lines().filter_map(version).filter(|version| known.contains(version)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sources_whose_code_is_known_are_taken() {
        let text =
            "linux-source-6.1 - Linux\nlinux-source-6.12 - Linux\nlinux-source-6.6 - x\nother\n";
        assert_eq!(versions(text), [(6, 12), (6, 6)]);
        assert_eq!(versions(text).into_iter().max(), Some((6, 12)));
    }
}
