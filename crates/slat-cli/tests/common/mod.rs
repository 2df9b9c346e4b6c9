//! Functions that several tests of the command use.

#![allow(dead_code, reason = "each test takes a part of it")]

use assert_cmd::Command;
use predicates::str::contains;
use rustix::process::{Pid, Signal, kill_process};
use std::path::Path;

pub fn slat(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_slat"));
    command.args(arguments);
    command
}

/// Runs the command, and checks that it fails as bad input with a message that has all of `words`.
pub fn refused(arguments: &[&str], words: &[&str]) {
    let mut assert = slat(arguments).assert().code(2).stdout("");
    for word in words {
        assert = assert.stderr(contains(*word));
    }
}

/// Returns whether guests can run here. Only then are a guest's options checked.
pub fn kvm_is_usable() -> bool {
    let usable = std::fs::File::options().read(true).write(true).open("/dev/kvm").is_ok();
    // A host that must have KVM fails the tests without it.
    let required = std::env::var("SLAT_REQUIRE_KVM").is_ok_and(|value| value == "1");
    assert!(usable || !required, "SLAT_REQUIRE_KVM=1, and /dev/kvm cannot be opened");
    if !usable {
        eprintln!("skipped in part: /dev/kvm cannot be opened");
    }
    usable
}

/// Starts the command of a line, whose last option takes the path, with a folder for temporary
/// files.
pub fn spawned(line: &str, path: &Path, temporary: &Path) -> std::process::Child {
    let mut slat = std::process::Command::new(env!("CARGO_BIN_EXE_slat"));
    slat.args(line.split(' ')).arg(path).env("TMPDIR", temporary);
    slat.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
    slat.spawn().unwrap()
}

pub fn send(child: &std::process::Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}
