//! Runs the engine's invalidation sequences under herd7, a simulator of memory models: each litmus
//! test that `crates/slat/tests/litmus.rs` writes must have the result that it states, and so must
//! those of KVM on the engine.

use crate::workspace::{Outcome, TESTED, cargo, output, ran};
use crate::{in_ci, root, setup, target};
use anyhow::{Context, bail, ensure};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Packages of herd7 and of its libraries, all of its Debian suite, which may be newer than this
/// machine's.
const PACKAGES: [&str; 3] = ["herdtools7", "libc6", "libgmp10"];
const SUITE: &str = "sid";

/// The folder of litmus tests that are written by hand.
const WRITTEN: &str = "crates/slat-linux/litmus";

/// Time limit of all tests together, in seconds.
const LIMIT: &str = "120";

/// Observations of herd7, by the test's name.
type Observations = BTreeMap<String, String>;

/// Runs all litmus tests.
pub fn test() -> anyhow::Result<Outcome> {
    let folder = match setup::unpacked("herdtools7", SUITE, &PACKAGES) {
        Ok(folder) => folder,
        Err(error) if in_ci() => return Err(error),
        Err(error) => return Ok(Outcome::Skipped(format!("herd7: {error:#}"))),
    };
    let (files, expected) = litmus_files()?;
    let found = herd7(&folder, &files)?;
    let differs = |name: &&String| found.get(*name) != expected.get(*name);
    let wrong: Vec<_> = expected.keys().filter(differs).collect();
    for name in &wrong {
        let found = found.get(*name).map_or("nothing", |found| found);
        eprintln!("{name}: herd7 says {found}, the test expects {}", expected[*name]);
    }
    ensure!(wrong.is_empty(), "{} litmus tests do not end as they say", wrong.len());
    let never = expected.values().filter(|expected| *expected == "Never").count();
    println!("{} litmus tests as expected: {never} Never, the others Sometimes", expected.len());
    Ok(Outcome::Ran(Vec::new()))
}

/// Writes the tests; returns their files, and the observation that each states, by its name.
fn litmus_files() -> anyhow::Result<(Vec<PathBuf>, Observations)> {
    let folder = target().join("litmus");
    let failed = || format!("cannot write the litmus tests to {}", folder.display());
    // Those of an older version go.
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(failed)?;
    }
    fs::create_dir_all(&folder).with_context(failed)?;
    let mut tests = cargo(&["test", "--quiet", "--test", "litmus"]);
    ran(tests.args(TESTED).env("SLAT_LITMUS", &folder))?;
    let (mut files, mut expected) = (Vec::new(), BTreeMap::new());
    let made = fs::read_dir(&folder).with_context(failed)?;
    let written = fs::read_dir(root().join(WRITTEN)).context("cannot read KVM's litmus tests")?;
    for file in made.chain(written) {
        let path = file.with_context(failed)?.path();
        let text = fs::read_to_string(&path).with_context(failed)?;
        let (name, ends) = header(&text)
            .with_context(|| format!("{} does not say what is expected", path.display()))?;
        expected.insert(name.to_owned(), ends.to_owned());
        files.push(path);
    }
    ensure!(!files.is_empty(), "no litmus test in {}", folder.display());
    Ok((files, expected))
}

/// Returns a test's name, and the result that it states.
fn header(text: &str) -> Option<(&str, &str)> {
    let name = text.lines().next()?.strip_prefix("AArch64 ")?;
    let (_, expected) = text.split_once("Expected: ")?;
    let end = expected.find(|letter: char| !letter.is_ascii_alphabetic())?;
    Some((name, &expected[..end]))
}

/// Runs herd7 with the dynamic linker of its suite.
fn herd7(folder: &Path, files: &[PathBuf]) -> anyhow::Result<Observations> {
    let (linker, libraries) = linker(folder)?;
    let mut herd7 = Command::new("timeout");
    herd7.arg(LIMIT).arg(linker).arg("--library-path").arg(libraries);
    herd7.arg(folder.join("usr/bin/herd7"));
    herd7.arg("-set-libdir").arg(folder.join("usr/share/herdtools7/herd")).args(files);
    let said = output(herd7.stdin(Stdio::null()))?;
    ensure!(said.stderr.is_empty(), "herd7: {}", String::from_utf8_lossy(&said.stderr));
    Ok(observations(&String::from_utf8(said.stdout)?))
}

/// Returns the dynamic linker among the packages, and its folder, which also has the libraries.
fn linker(folder: &Path) -> anyhow::Result<(PathBuf, PathBuf)> {
    let name = |path: &Path| path.file_name()?.to_str().map(str::to_owned);
    let entries = |folder: &Path| -> Vec<PathBuf> {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect()
    };
    for libraries in entries(&folder.join("usr/lib")) {
        let of_this = |path: &PathBuf| name(path).is_some_and(|name| name.starts_with("ld-linux"));
        if let Some(linker) = entries(&libraries).into_iter().find(of_this) {
            return Ok((linker, libraries));
        }
    }
    bail!("no dynamic linker in {}; remove it to fetch it anew", folder.display())
}

/// Parses lines like `Observation NAME Never 0 4`.
fn observations(text: &str) -> Observations {
    let one = |line: &str| {
        let mut words = line.strip_prefix("Observation ")?.split_whitespace();
        Some((words.next()?.to_owned(), words.next()?.to_owned()))
    };
    text.lines().filter_map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_says_its_name_and_how_it_ends() {
        let text = "AArch64 guest-back\n(* Not: that.\n   Expected: Never, as it is whole. *)\n";
        assert_eq!(header(text), Some(("guest-back", "Never")));
        assert_eq!(header("AArch64 guest-back\n{}"), None);
        let said = "States 2\nNo\nObservation guest-back Sometimes 1 3\nTime guest-back 0.01\n";
        assert_eq!(observations(said)["guest-back"], "Sometimes");
    }
}
