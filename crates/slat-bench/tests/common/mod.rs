//! Helpers that the tests of the command share.

#![allow(dead_code, reason = "each test takes a part of it")]

use assert_cmd::Command;
use predicates::str::contains;
use rustix::process::{Pid, Signal, kill_process};

pub fn bench(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_slat-bench"));
    command.args(arguments);
    command
}

/// Runs the command and checks that it is refused as bad input, with a message that has all of
/// `words`.
pub fn refused(arguments: &[&str], words: &[&str]) {
    let mut assert = bench(arguments).assert().code(2).stdout("");
    for word in words {
        assert = assert.stderr(contains(*word));
    }
}

/// Starts the command line. Its last option takes the path.
pub fn spawned(line: &str, path: &std::path::Path) -> std::process::Child {
    let mut slat = std::process::Command::new(env!("CARGO_BIN_EXE_slat-bench"));
    slat.args(line.split(' ')).arg(path);
    slat.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
    slat.spawn().unwrap()
}

pub fn send(child: &std::process::Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}
