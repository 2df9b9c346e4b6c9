//! The `slat` command on the command line: what it prints, and its exit code.

mod common;

use common::{kvm_is_usable, refused, send, slat, spawned};
use predicates::prelude::*;
use predicates::str::contains;
use rustix::process::Signal;

#[test]
fn help_has_examples_and_exit_codes() {
    let help = contains("slat bench dirty-log").and(contains("Exit codes")).and(contains("130"));
    slat(&["--help"]).assert().success().stdout(help);
    for scenario in [
        "dirty-log", "execute", "age", "populate", "memory-stress", "memslot", "migrate",
        "restore", "snapshot", "postcopy", "fork", "reclaim", "boot-caches",
    ] {
        slat(&["bench", scenario, "--help"]).assert().success().stdout(contains("Examples:"));
    }
    for words in [&["explain", "--help"][..], &["tune", "dirty-log", "--help"]] {
        slat(words).assert().success().stdout(contains("Examples:"));
    }
}

#[test]
fn a_memory_that_cannot_be_is_refused_with_an_example() {
    refused(&["bench", "dirty-log", "--memory", "0"], &["--memory", "zero"]);
    refused(&["bench", "dirty-log", "--memory", "lots"], &["lots", "64G"]);
    refused(&["bench", "dirty-log", "--backing", "3m"], &["3m", "hugetlb-2m"]);
    if kvm_is_usable() {
        refused(&["bench", "dirty-log", "--memory", "4097"], &["4097"]);
    }
}

#[test]
fn an_unwritable_output_is_refused_before_any_measurement() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let below = file.join("report");
    let words = &["--output", "cannot write there"];
    refused(&["--output", below.to_str().unwrap()], words);
    refused(&["--output", file.to_str().unwrap()], words);
    refused(&["bench", "dirty-log", "--output", below.to_str().unwrap()], words);
}

#[test]
fn the_main_job_keeps_its_results_at_ctrl_c() {
    let folder = tempfile::tempdir().unwrap();
    let begun = folder.path().join("begun");
    let mut child = spawned("--output", &begun, &std::env::temp_dir());
    while !begun.exists() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    std::thread::sleep(std::time::Duration::from_millis(3000));
    send(&child, Signal::INT);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let report = std::fs::read_to_string(begun.join("results.json")).unwrap();
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["partial"], true);
}

#[test]
fn the_manual_is_a_page_of_man() {
    let page = contains(".TH slat 1").and(contains("Exit codes"));
    slat(&["manual"]).assert().success().stdout(page);
    let page = contains(".TH slat-bench-dirty-log 1").and(contains("initially\\-set"));
    slat(&["manual", "bench", "dirty-log"]).assert().success().stdout(page);
    refused(&["manual", "watch", "it"], &["`slat watch` has no subcommand it"]);
}

#[test]
fn short_help_is_printed_and_names_the_long_one() {
    let help = contains("--qmp").not().and(contains("slat watch --help"));
    slat(&["watch", "-h"]).assert().success().stdout(help.and(contains("--listen")));
    slat(&["-h"]).assert().success().stdout(contains("dirty-log").not().and(contains("doctor")));
}

#[test]
fn text_is_ascii_where_the_locale_is() {
    let words = "predict --memory 1G --vcpus 2 --dirty-rate 1MiB/s --link 1Gbit/s";
    let words: Vec<&str> = words.split(' ').collect();
    for (locale, is_ascii) in [("C", true), ("C.UTF-8", false)] {
        let done = slat(&words).env("LC_ALL", locale).assert().success();
        assert_eq!(done.get_output().stdout.is_ascii(), is_ascii, "{locale}");
    }
}

#[test]
fn schemas_are_listed_and_printed_by_name() {
    slat(&["schema"]).assert().success().stdout(contains("watch-lines"));
    slat(&["schema", "doctor"]).assert().success().stdout(contains("json-schema.org"));
    refused(&["schema", "nothing"], &["nothing", "results"]);
}

#[test]
fn completions_complete_the_subcommands() {
    let words = contains("dirty-log").and(contains("arm64-lpa2-16k")).and(contains("riscv"));
    slat(&["completions", "bash"]).assert().success().stdout(words);
    refused(&["completions", "cobol"], &["cobol", "bash"]);
}

#[test]
fn a_clear_chunk_kvm_would_refuse_is_refused_before_any_guest() {
    refused(&["bench", "dirty-log", "--clear-chunk", "0"], &["--clear-chunk", "64"]);
    refused(&["bench", "dirty-log", "--clear-chunk", "65"], &["65", "multiple of 64"]);
    refused(&["bench", "dirty-log", "--clear-chunk", "5k"], &["5k", "multiple of 64"]);
}

#[test]
fn an_output_whose_files_are_directories_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("results.json")).unwrap();
    refused(&["--output", folder.path().to_str().unwrap()], &["results.json", "directory"]);
}

#[test]
fn the_doctor_has_an_exit_code_for_an_unfit_host() {
    // With a PATH of a folder that does not exist, no program is found, whatever is installed.
    slat(&["doctor", "--for", "emulate"])
        .env("PATH", "/nonexistent")
        .assert()
        .code(4)
        .stdout(contains("missing  dpkg-deb").and(contains("tdp_mmu").not()))
        .stderr(contains("cannot run emulate").and(contains("qemu-system-aarch64")));
    slat(&["doctor"]).assert().success().stdout(contains("tdp_mmu").and(contains("What can run")));
    let output = slat(&["doctor", "--json"]).output().unwrap();
    let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(document["scenarios"].as_array().unwrap().len(), 16);
    refused(&["doctor", "--for", "sorting"], &["sorting", "dirty-log"]);
}

#[test]
fn a_time_limit_keeps_measured_results_and_has_its_exit_code() {
    if !kvm_is_usable() {
        return;
    }
    let words = ["bench", "dirty-log", "--memory", "8m", "--runs", "1000", "--time-limit", "3s"];
    let done = slat(&words).arg("--json").assert().code(5);
    let report: serde_json::Value =
        serde_json::from_slice(&done.get_output().stdout).expect("a report is JSON");
    assert_eq!(report["partial"], true);
    let results = report["results"].as_array().unwrap();
    assert!(results.iter().any(|result| result["variant"] == "dirty"));
    assert!(report["skipped"][0]["reason"].as_str().unwrap().contains("time limit"), "{report}");
}

#[test]
fn what_can_be_right_nowhere_is_no_test_that_failed() {
    refused(&["bench", "dirty-log", "--clear-chunk", "65", "--json"], &["65"]);
}
