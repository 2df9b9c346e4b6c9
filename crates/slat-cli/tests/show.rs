//! `slat show` on the command line.

use assert_cmd::Command;
use predicates::prelude::*;
use predicates::str::contains;

fn slat(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_slat"));
    command.args(arguments);
    command
}

fn refused(arguments: &[&str], words: &[&str]) {
    let mut assert = slat(arguments).assert().code(2).stdout("");
    for word in words {
        assert = assert.stderr(contains(*word));
    }
}

const OPS: &str = "map:0-2g:1g,protect:0-2g:rx,split:4m-6m:4k,write:5m+4k";

#[test]
fn operations_are_drawn_in_the_format_asked_for() {
    let drawn = |format, title| {
        let drawn = slat(&["show", "--do", OPS, "--format", format]).assert().success();
        drawn.stdout(contains("0x500000–0x501000").and(contains("rwx")).and(contains(title)));
    };
    drawn("ept", "Intel EPT, 4k pages");
    drawn("arm64", "arm64 stage 2, 4K granule, 4k pages");
}

#[test]
fn what_cannot_be_drawn_is_refused() {
    refused(&["show"], &["--do"]);
    refused(&["show", "--do", "mop:0-1g"], &["mop", "map:RANGE"]);
    refused(&["show", "--do", "map:0-1g,protect:0-4k:r"], &["protect:0-4k:r", "split it first"]);
}
