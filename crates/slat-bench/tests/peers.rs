//! Tests of the comparison with other code. `SLAT_LINUX_TREES` names Linux source trees, separated
//! by colons, whose code is then also measured; `cargo xtask test peers` sets it.

use assert_cmd::Command;
use predicates::str::contains;
use serde_json::Value;
use std::path::{Path, PathBuf};

fn bench(arguments: &[&str]) -> Command {
    let mut command = Command::cargo_bin("slat-bench").unwrap();
    command.args(arguments);
    command
}

fn tree() -> Option<PathBuf> {
    let trees = std::env::var_os("SLAT_LINUX_TREES");
    let first = trees.and_then(|trees| std::env::split_paths(&trees).last());
    if first.is_none() {
        eprintln!("skipped: SLAT_LINUX_TREES names no Linux source tree");
    }
    first
}

/// Returns whether to test all granules, trees and bugs, which takes long: `HISTORIES=N` is set.
fn is_long() -> bool {
    std::env::var_os("HISTORIES").is_some()
}

fn beside(tree: &Path, arguments: &[&str]) -> Command {
    let mut command = bench(arguments);
    command.args(["--linux-tree"]).arg(tree).env("SLAT_ANY_LINUX", "1");
    command
}

fn json(mut command: Command) -> Value {
    let output = command.arg("--json").assert().success().get_output().stdout.clone();
    serde_json::from_slice(&output).unwrap()
}

fn of<'v>(report: &'v Value, operation: &'v str, variant: &'v str) -> Vec<&'v Value> {
    let results = report["results"].as_array().unwrap().iter();
    let fits = move |r: &&Value| r["params"]["operation"] == operation && r["variant"] == variant;
    results.filter(|r| r["scenario"] == "peers").filter(fits).collect()
}

#[test]
fn what_cannot_be_used_says_what_to_do() {
    let linux = ["split", "--target", "linux-source", "-b", "1g"];
    bench(&linux).assert().code(2).stderr(contains("needs a tree: --linux-tree PATH"));
    let empty = tempfile::tempdir().unwrap();
    let none = |command: &mut Command| command.arg("--linux-tree").arg(empty.path()).assert();
    none(&mut bench(&linux)).code(2).stderr(contains("Makefile is missing; give the top folder"));
    none(bench(&linux).env("CC", "/nonexistent")).code(1).stderr(contains("install gcc or clang"));
    std::fs::write(empty.path().join("Makefile"), "VERSION = 4\nPATCHLEVEL = 19\n").unwrap();
    none(&mut bench(&linux)).code(2).stderr(contains("this is Linux 4.19.0"));
    let chunk = [&linux[..], &["--linux-tree", "x", "--chunk-size", "3m"]].concat();
    bench(&chunk).assert().code(2).stderr(contains("--chunk-size 3m is not what KVM takes"));
    // An option that would be ignored is an error.
    let ignored = ["split", "-b", "1g", "--linux-tree", "x"];
    bench(&ignored).assert().code(2).stderr(contains("need --target linux-source"));
    let ignored = ["engine", "--quick", "--granule", "16k"];
    bench(&ignored).assert().code(2).stderr(contains("or --target linux-source"));
    let check = ["check", "--linux-tree", "/nonexistent/linux"];
    bench(&check).assert().code(2).stderr(contains("/nonexistent/linux: Makefile is missing"));
    bench(&[&linux[..], &["--linux-tree", "="]].concat())
        .assert()
        .code(2)
        .stderr(contains("NAME=PATH"));
    let size = [&linux[..], &["--linux-tree", "x", "--backing", "1m"]].concat();
    bench(&size).assert().code(2).stderr(contains("4k, 2m, 1g"));
}

#[test]
fn all_other_entrants_run_where_no_linux_tree_can_be_used() {
    // With a usable tree, more entrants would run.
    if std::env::var_os("SLAT_LINUX_TREES").is_some() {
        return;
    }
    let arguments = ["peers", "--quick", "--rounds", "1", "--linux-tree", "/nonexistent"];
    let report = json(bench(&arguments));
    let skipped = report["skipped"].as_array().unwrap();
    assert!(skipped.iter().any(|s| s["reason"].as_str().unwrap().contains("give the top folder")));
    assert_eq!(of(&report, "write-protect", "slat").len(), 1);
    let levels = |levels, what| format!("inactive, {levels} levels: {what}");
    for (operation, who) in [
        (levels(3, "split"), "aarch64-paging"),
        (levels(4, "split"), "page-table-generic"),
        (levels(4, "unmap"), "page_table_multiarch"),
        (levels(4, "look up"), "x86_64"),
    ] {
        if cfg!(target_arch = "x86_64") {
            assert_eq!(of(&report, &operation, who).len(), 1, "{operation} {who}");
        }
    }
}

#[test]
fn every_operation_leaves_the_engines_leaves_on_every_granule() {
    let Some(tree) = tree() else { return };
    let granules = [("64k", 2), ("16k", 32), ("4k", 512)];
    // A larger granule has fewer pages, and is faster to test.
    for &(granule, tables) in &granules[..if is_long() { 3 } else { 1 }] {
        let arguments = ["engine", "--target", "linux-source", "--quick", "--rounds", "1"];
        let report = json({
            let mut command = beside(&tree, &arguments);
            command.args(["--granule", granule, "--caches", "cold"]);
            command
        });
        let name = report["results"].as_array().unwrap().iter().find_map(|r| {
            (r["target"] == "linux-source").then(|| r["variant"].as_str().unwrap().to_owned())
        });
        let name = name.unwrap();
        for operation in [
            "map page by page",
            "unmap",
            "write-protect",
            "write-protect, protected",
            "clear the log, all dirty",
            "clear the log, 4 of 64",
            "clear the log and split",
            "age, all young",
            "age, all old",
            "age page by page",
            "allow writing page by page",
            "look up",
            "flush",
            "inactive: map a range",
            "inactive: write-protect",
        ] {
            let found = of(&report, operation, &name);
            assert_eq!(found.len(), 1, "{granule} {operation}");
            assert!(found[0]["samples"][0].as_f64().unwrap() > 0.0, "{granule} {operation}");
            let counts = &found[0]["counts"];
            assert!(counts["visits"].as_u64().unwrap() > 0, "{granule} {operation}: {counts}");
            let all_gone = operation == "unmap";
            assert_eq!(counts["leaves_compared"].as_u64().unwrap() == 0, all_gone, "{operation}");
        }
        let sparse = &of(&report, "clear the log, 4 of 64", &name)[0]["counts"];
        // In each word, Linux protects all pages between the first and the last one.
        let pages = (1 << 30)
            / (4 << 10)
            / if granule == "4k" {
                1
            } else if granule == "16k" {
                4
            } else {
                16
            };
        assert_eq!(sparse["leaves_protected_in_hull"], pages / 64 * (48 - 4), "{granule}");
        let shared = format!("{name}, shared");
        assert_eq!(of(&report, "write-protect", &shared).len(), 1);
        assert_eq!(of(&report, "look up", &shared).len(), 0);
        let splits = of(&report, "split", &name);
        let blocks = splits.iter().find(|split| split["params"]["backing"] != granule).unwrap();
        assert_eq!(blocks["counts"]["tlbis"], tables, "{granule}");
        let flush = &of(&report, "flush", &name)[0]["counts"];
        assert_eq!(flush["cache_bytes"], 1 << 30);
    }
}

#[test]
fn one_run_compares_trees_and_edits_and_omits_failed_ones() {
    let Some(tree) = tree().filter(|_| is_long()) else { return };
    let report = json({
        let mut command = bench(&["split", "--target", "linux-source", "-b", "1g"]);
        command.args(["--samples", "10", "--walks", "exclusive", "--chunk-size", "2m"]);
        command.arg("--linux-tree").arg(format!("before={}", tree.display()));
        command.arg("--linux-tree").arg(format!("after={}", tree.display()));
        command.args([
            "--linux-tree", "gone=/nonexistent", "--with", "bounded-walks/2", "--with", "nothing",
        ]);
        command.env("SLAT_ANY_LINUX", "1");
        command
    });
    for name in ["before", "after", "before+bounded-walks/2"] {
        assert_eq!(of(&report, "split", name).len(), 3, "{name}");
        assert_eq!(of(&report, "protect and split", name).len(), 3, "{name}");
        assert_eq!(of(&report, "clear the log and split", name).len(), 3, "{name}");
    }
    let from_1g = of(&report, "split", "before")[2];
    assert_eq!(from_1g["params"]["backing"], "1g");
    // With a chunk of 2m, a block of 1g is split to 2m first, and then each of these.
    assert_eq!(from_1g["counts"]["tlbis"], 513);
    // Trees are compared with each other, too.
    let asked = report["results"].as_array().unwrap().iter();
    let between = |name: &str| {
        let of = |r: &&Value| r["params"]["variants"] == name && r["params"]["against"] == "before";
        asked.clone().filter(|r| r["scenario"] == "peers-asked").filter(of).count()
    };
    assert_eq!((between("after"), between("before+bounded-walks/2")), (9, 9));
    let skipped = report["skipped"].to_string();
    assert!(skipped.contains("no edit is called nothing") && skipped.contains("gone"), "{skipped}");
}

#[test]
fn histories_agree_and_show_a_bug_that_an_edit_brings() {
    let Some(tree) = tree() else { return };
    let more = std::env::var("HISTORIES").unwrap_or_else(|_| "2".to_owned());
    let histories = ["check", "--histories", &more];
    for granule in ["4k", "16k", "64k"] {
        let mut check = beside(&tree, &histories);
        check.args(["--granule", granule, "--with", "bounded-walks", "--with", "split-in-a-loop"]);
        check.assert().success();
    }
    // The first line of each file describes its bug.
    let bugs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../linux/bugs");
    let all = ["age", "leak", "less", "rights"];
    for bug in &all[..if is_long() { 4 } else { 1 }] {
        let mut check = beside(&tree, &["check", "--histories", "12"]);
        check.args(["--with", bug, "--edits"]).arg(&bugs);
        let output = check.assert().code(1).get_output().stderr.clone();
        let text = String::from_utf8_lossy(&output);
        assert!(
            text.contains("--seed") && text.contains("after the last of these"),
            "{bug}: {text}"
        );
        assert!(text.contains(&format!("+{bug}")), "{bug}: {text}");
    }
}
