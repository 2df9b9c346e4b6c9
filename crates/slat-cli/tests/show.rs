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
fn operations_are_drawn_and_a_dump_draws_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let drawn = slat(&["show", "--do", OPS]).assert().success();
    let text = String::from_utf8(drawn.get_output().stdout.clone()).unwrap();
    assert!(text.contains("0x500000–0x501000") && text.contains("rwx"), "{text}");
    let dump = slat(&["show", "--do", OPS, "--json"]).assert().success();
    std::fs::write(at("dump.json"), &dump.get_output().stdout).unwrap();
    let again = slat(&["show", &at("dump.json")]).assert().success();
    assert_eq!(again.get_output().stdout, text.as_bytes());
    slat(&["show", &at("dump.json"), "--range", "5m+4k"])
        .assert()
        .success()
        .stdout(contains("4 KiB mapped by 1 of 4k"));
}

#[test]
fn scenarios_are_drawn_in_the_format_asked_for() {
    slat(&["show", "--scenario", "dirty-log", "--format", "arm64", "--markdown"])
        .assert()
        .success()
        .stdout(contains("### arm64 stage 2, 4K granule, 4k pages").and(contains("| --- |")));
}

#[test]
fn what_cannot_be_drawn_is_refused() {
    refused(&["show"], &["--do", "--scenario"]);
    refused(&["show", "--do", "mop:0-1g"], &["mop", "map:RANGE"]);
    refused(&["show", "--do", "map:0-1g,protect:0-4k:r"], &["protect:0-4k:r", "split it first"]);
    refused(&["show", "--do", OPS, "--scenario", "age"], &["cannot be used with"]);
    refused(&["show", "--do", OPS, "--unit", "3m"], &["power of two"]);
    refused(&["show", "/no/such"], &["/no/such"]);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("results.json");
    std::fs::write(&file, "{\"schema\": 1}").unwrap();
    refused(&["show", file.to_str().unwrap()], &["results.json", "slat show --json"]);
}
