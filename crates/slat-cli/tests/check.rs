//! `slat check` on this host's KVM, and on the command line.

mod common;

use common::{kvm_is_usable, refused, send, slat, spawned};
use predicates::prelude::*;
use predicates::str::contains;
use rustix::process::Signal;
use std::time::{Duration, Instant};

#[test]
fn histories_that_cannot_be_are_refused() {
    slat(&["check", "--help"]).assert().success().stdout(contains("Examples:"));
    refused(&["check", "--class", "luck"], &["luck", "memslots"]);
    refused(&["check", "--number", "3"], &["--seed"]);
    refused(&["emulate", "--", "check", "--json"], &["before `--`"]);
    if !kvm_is_usable() {
        return;
    }
    refused(&["check", "--memory", "3m"], &["--memory", "multiple of"]);
    refused(&["check", "--history", "/nowhere"], &["--history /nowhere"]);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("history.json");
    std::fs::write(&file, "{\"class\": \"log\"}").unwrap();
    refused(&["check", "--history", file.to_str().unwrap()], &["is no history"]);
    let one = ["check", "--class", "log", "--seed", "1", "--number", "0"];
    refused(&[&one[..], &["--steps", "999"]].concat(), &["--steps 999", "steps 0 to"]);
}

#[test]
fn this_hosts_kvm_loses_no_write_in_a_short_run() {
    if !kvm_is_usable() {
        return;
    }
    slat(&["check", "--list"]).assert().success().stdout(contains("memslots").and(contains("log")));
    let folder = tempfile::tempdir().unwrap();
    let words = ["check", "--for", "1s", "--seed", "5", "--memory", "4m", "-o"];
    let path = folder.path().to_str().unwrap();
    let held = contains("held").and(contains("nothing was lost"));
    slat(&[&words[..], &[path]].concat()).assert().success().stdout(held);
    let text = std::fs::read_to_string(folder.path().join("results.json")).unwrap();
    let report: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert!(report["classes"][0]["counts"]["writes"].as_u64() > Some(1000), "{report}");
    assert_eq!(report["seed"], 5);
}

#[test]
fn a_check_that_is_interrupted_ends_and_leaves_no_process() {
    if !kvm_is_usable() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let line = "check --for 1h --class host-pages -o";
    let mut child = spawned(line, folder.path(), folder.path());
    let group = format!("/proc/{}/task/{0}/children", child.id());
    // It forks now and then.
    let begin = Instant::now();
    while std::fs::read_to_string(&group).is_ok_and(|it| it.is_empty()) {
        assert!(begin.elapsed() < Duration::from_secs(60), "it forks");
        std::thread::sleep(Duration::from_millis(5));
    }
    let forked = std::fs::read_to_string(&group).unwrap_or_default();
    send(&child, Signal::INT);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    for process in forked.split_whitespace() {
        let alive = std::fs::read_to_string(format!("/proc/{process}/stat"));
        assert!(alive.is_err(), "{alive:?}");
    }
}
