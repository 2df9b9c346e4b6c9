//! Tells the library its version with the commit that it was built from.
//!
//! A packager's `SLAT_COMMIT` counts first, then the note that cargo leaves in a package, then git.
//! A debug build names no commit: it would have to be compiled again after each one.

use std::env;
use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=SLAT_COMMIT");
    let version = env::var("CARGO_PKG_VERSION").unwrap();
    let given = env::var("SLAT_COMMIT").ok().filter(|commit| !commit.is_empty());
    let from = match given.map(|commit| short(&commit)).or_else(packed) {
        Some(commit) => commit,
        None if env::var("PROFILE").is_ok_and(|profile| profile == "debug") => "debug".to_owned(),
        None => checked_out().unwrap_or_else(|| "unknown commit".to_owned()),
    };
    println!("cargo::rustc-env=SLAT_VERSION={version} ({from})");
}

/// Returns the commit of a package.
fn packed() -> Option<String> {
    let note = std::fs::read_to_string(".cargo_vcs_info.json").ok()?;
    println!("cargo::rerun-if-changed=.cargo_vcs_info.json");
    let (_, rest) = note.split_once("\"sha1\"")?;
    let commit = rest.split('"').nth(1)?;
    let changed = if note.contains("\"dirty\": true") { ", changed" } else { "" };
    Some(short(commit) + changed)
}

/// Returns the commit of the folder's repository, and whether files that it has were changed.
fn checked_out() -> Option<String> {
    // The sources may lie unpacked in a repository of somebody else's.
    git(&["ls-files", "--error-unmatch", "build.rs"])?;
    let commit = git(&["rev-parse", "HEAD"])?;
    for file in ["HEAD", "logs/HEAD", "index"] {
        let path = git(&["rev-parse", "--git-path", file])?;
        if Path::new(&path).exists() {
            println!("cargo::rerun-if-changed={path}");
        }
    }
    let is_clean = git(&["status", "--porcelain", "--untracked-files=no"])?.is_empty();
    Some(short(&commit) + if is_clean { "" } else { ", changed" })
}

fn git(words: &[&str]) -> Option<String> {
    let done = Command::new("git").args(words).output().ok()?;
    let text = String::from_utf8(done.stdout).ok()?;
    done.status.success().then(|| text.trim().to_owned())
}

fn short(commit: &str) -> String {
    commit.chars().take(12).collect()
}
