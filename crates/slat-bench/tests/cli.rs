//! Tests of the `slat-bench` command: its output, and its exit codes.

mod common;

use common::{bench, refused, send, spawned};
use predicates::prelude::*;
use predicates::str::contains;
use rustix::process::Signal;

#[test]
fn help_has_examples_and_exit_codes() {
    let help = contains("slat-bench split --memory 64G").and(contains("Exit codes"));
    bench(&["--help"]).assert().success().stdout(help.and(contains("130")));
    let scenarios = [
        "split", "engine", "peers", "check", "replay", "dirty-log", "execute", "age", "populate",
        "reclaim", "idle", "cache-toggle",
    ];
    for scenario in scenarios {
        bench(&[scenario, "--help"]).assert().success().stdout(contains("Examples:"));
    }
}

#[test]
fn the_manual_is_a_page_of_man() {
    let page = contains(".TH slat-bench 1").and(contains("Exit codes"));
    bench(&["manual"]).assert().success().stdout(page);
}

#[test]
fn completions_complete_the_subcommands() {
    let words = contains("cache-toggle").and(contains("arm64-lpa2-16k")).and(contains("riscv"));
    bench(&["completions", "bash"]).assert().success().stdout(words);
}

#[test]
fn a_format_is_refused_what_it_lacks_with_what_it_has() {
    let split = ["split", "--memory", "1g", "--format"];
    let split = |more: &[&'static str]| [&split[..], more].concat();
    refused(&split(&["power"]), &["power", "arm64-16k", "riscv"]);
    refused(&split(&["riscv", "--backing", "32m"]), &["--backing 32m", "4k, 2m, 1g"]);
    refused(&split(&["npt", "--bbm", "2"]), &["--bbm 2", "arm64"]);
    refused(&split(&["ept", "--granule", "16k"]), &["--granule", "--format"]);
    refused(&["split", "--format", "ept", "--memory", "1024t"], &["1024t", "at most 128t"]);
    let execute = ["execute", "--format", "arm64-16k", "--backing", "2m"];
    refused(&execute, &["--backing 2m", "16k, 32m"]);
    let linux = ["split", "--format", "npt", "--target", "linux-source", "--linux-tree", "."];
    refused(&linux, &["npt", "arm64-4k, arm64-16k and arm64-64k"]);
}

#[test]
fn a_memory_of_zero_is_refused() {
    refused(&["split", "--memory", "0"], &["--memory", "zero"]);
    refused(&["dirty-log", "--memory", "0"], &["--memory", "zero"]);
}

#[test]
fn a_memory_that_is_no_size_is_refused_with_an_example() {
    refused(&["split", "--memory", "lots"], &["lots", "64G"]);
}

#[test]
fn an_unaligned_memory_is_refused() {
    refused(&["split", "--memory", "1073741825"], &["1073741825"]);
}

#[test]
fn a_memory_larger_than_the_format_allows_is_refused() {
    refused(&["split", "--memory", "1048576T"], &["1048576t", "at most"]);
}

#[test]
fn a_backing_the_granule_lacks_is_refused_with_the_valid_ones() {
    refused(&["split", "--backing", "3m"], &["3m", "2m"]);
    refused(&["split", "--granule", "64k", "--backing", "2m"], &["2m", "512m"]);
}

#[test]
fn fewer_than_ten_samples_are_refused() {
    refused(&["split", "--samples", "9"], &["9", "10"]);
}

#[test]
fn a_bbm_level_that_no_cpu_has_is_refused() {
    refused(&["split", "--bbm", "4"], &["4", "0..=3"]);
}

#[test]
fn an_unwritable_output_is_refused_before_any_measurement() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let below = file.join("report");
    refused(&["split", "--output", below.to_str().unwrap()], &["--output", "cannot write there"]);
}

#[test]
fn a_refused_command_leaves_no_file_behind() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    refused(&["split", "--output", path, "--memory", "1073741825"], &["1073741825"]);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn a_split_prints_a_table_and_writes_every_sample() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let arguments = ["split", "--memory", "1g", "--backing", "2m", "--when", "enable"];
    let mut command = bench(&arguments);
    command.args(["--what", "split", "--samples", "10", "--output", path]);
    command.assert().success().stdout(contains("every-entry").and(contains("Entries read")));
    let text = std::fs::read_to_string(folder.path().join("results.json")).unwrap();
    let report: serde_json::Value = serde_json::from_str(&text).unwrap();
    let results = report["results"].as_array().unwrap();
    let splits: Vec<_> = results.iter().filter(|r| r["scenario"] == "split").collect();
    assert_eq!(splits.len(), 3);
    assert!(splits.iter().all(|split| split["samples"].as_array().unwrap().len() == 10));
    assert_eq!(report["command"][0], "slat-bench");
    // No temporary file is left.
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
}

#[test]
fn json_on_stdout_is_all_that_is_on_stdout() {
    let arguments = ["split", "--memory", "1g", "--backing", "1g", "--when", "enable"];
    let output = bench(&arguments)
        .args(["--what", "split", "--json"])
        .assert()
        .success()
        .get_output()
        .clone();
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["schema"], 1);
}

#[test]
fn the_engine_is_held_against_its_limits_in_seconds() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let mut command = bench(&["engine", "--quick", "--rounds", "1"]);
    command.args(["--only", "protect,translate", "--output", path]);
    command.assert().success().stdout(contains("at most").and(contains("protected already")));
    let text = std::fs::read_to_string(folder.path().join("results.json")).unwrap();
    let report: serde_json::Value = serde_json::from_str(&text).unwrap();
    let results = report["results"].as_array().unwrap();
    let asked: Vec<_> = results.iter().filter(|r| r["scenario"] == "engine-asked").collect();
    assert!(asked.iter().any(|r| r["variant"] == "write-protect" && r["params"]["asked"] == 1.25));
    assert!(asked.iter().all(|r| r["samples"][0].as_f64().unwrap() > 0.0));
}

#[test]
fn an_engine_bench_of_something_unknown_or_uneven_is_refused() {
    refused(&["engine", "--only", "sort"], &["sort", "age-tables"]);
    refused(&["engine", "--memory", "1536m"], &["1536m", "multiple of 1g"]);
    refused(&["engine", "--memory", "1t"], &["1t", "512g"]);
}

#[test]
fn the_first_ctrl_c_stops_cleanly_and_keeps_what_was_measured() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("report");
    let mut child = spawned("split --memory 1g --samples 1000 --output", &output);
    // The directory is created before anything is measured, so the measurement begins a moment
    // later.
    while !output.exists() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    std::thread::sleep(std::time::Duration::from_millis(500));
    send(&child, Signal::INT);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let text = std::fs::read_to_string(output.join("results.json")).unwrap();
    let report: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(report["partial"], true);
    assert!(report["skipped"].to_string().contains("Ctrl-C"));
}

#[test]
fn an_early_end_costs_no_earlier_report_and_leaves_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let results = folder.path().join("results.json");
    std::fs::write(&results, "an earlier run").unwrap();
    let mut child = spawned("split --memory 64g --samples 1000 --output", folder.path());
    // The first row takes many seconds, and by now the handler is installed.
    std::thread::sleep(std::time::Duration::from_millis(700));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "a file while measuring");
    send(&child, Signal::TERM);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert_eq!(std::fs::read_to_string(&results).unwrap(), "an earlier run");
}

#[test]
fn two_runs_are_compared_and_what_cannot_be_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let split = ["split", "-b", "1g", "--what", "split", "--when", "enable"];
    for (name, backing) in [("one", "2m"), ("two", "1g")] {
        let options = ["--samples", "10", "--backing", backing, "--output", &at(name)];
        bench(&[&split[..], &options].concat()).assert().success();
    }
    // The option of the command line is a parameter that differs; the counts show the difference.
    bench(&["compare", &at("one"), &at("two")]).assert().success().stdout(
        contains("parameter backing")
            .and(contains("parameter entries"))
            .and(contains("0 not comparable"))
            .and(contains("split: batched")),
    );
    bench(&["compare", &at("one"), &at("one"), "--fail-if-slower", "--markdown"])
        .assert()
        .success()
        .stdout(contains("### The second run by the first").and(contains("difference\u{a0}shown")));
    let output = bench(&["compare", &at("one"), &at("two"), "--json"]).output().unwrap();
    let comparison: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(comparison["alone"], serde_json::json!([0, 0]));
    // On another machine, times are not comparable.
    let file = std::path::Path::new(&at("two")).join("results.json");
    let mut report: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    report["host"]["cpu"]["model"] = "another".into();
    std::fs::write(&file, report.to_string()).unwrap();
    bench(&["compare", &at("one"), &at("two")])
        .assert()
        .success()
        .stdout(contains("The machines differ: times are not comparable").and(contains("another")));
    bench(&["compare", &at("one"), &at("two"), "--fail-if-slower"])
        .assert()
        .code(2)
        .stderr(contains("nothing of these runs can be judged").and(contains("-r 5")));
    report["results"] = serde_json::json!([]);
    std::fs::write(&file, report.to_string()).unwrap();
    bench(&["compare", &at("one"), &at("two")])
        .assert()
        .code(2)
        .stderr(contains("no result in common"));
    report["schema"] = 7.into();
    std::fs::write(&file, report.to_string()).unwrap();
    refused(&["compare", &at("one"), &at("two")], &["its schema is 7, not 1", "results.json"]);
    refused(&["compare", &at("three"), &at("one")], &["give the results.json of a run"]);
    refused(&["compare", &at("one"), &at("one"), "--threshold", "x"], &["write a percentage"]);
}

#[test]
fn two_commands_run_in_turns_and_one_against_itself() {
    let split = "split -b 64m --backing 2m --what split --when enable --samples 10";
    let again = format!("{split} --walk 'bounded'");
    bench(&["ab", "--pairs", "1", "--first", split, "--second", &again]).assert().success().stdout(
        contains("What else differs between the runs")
            .and(contains("--walk bounded"))
            .and(contains("split: bounded"))
            .and(contains("2 + 2")),
    );
    let words: Vec<&str> = split.split(' ').collect();
    let noise = [&["noise", "--pairs", "3", "--json", "--"][..], &words].concat();
    let output = bench(&noise).output().unwrap();
    let comparison: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(comparison["variables"], serde_json::json!([]));
    assert_eq!(comparison["pairs"][0]["samples"], serde_json::json!([6, 6]));
    let check = ["noise", "--check", "2", "--slowdown", "900%", "--"];
    bench(&[&check[..], &words].concat())
        .assert()
        .success()
        .stdout(contains("2 comparisons of").and(contains("find 900 % more")));
    let in_turns =
        ["noise", "--check", "1", "--in-turns", "--pairs", "3", "--slowdown", "900", "--"];
    let found = predicate::str::is_match("10 % +[01] +1\n").unwrap();
    bench(&[&in_turns[..], &words].concat())
        .assert()
        .success()
        .stdout(contains("6 processes a side in turns").and(found));
    refused(&["noise", "--", "compare", "x"], &["nothing to measure with slat-bench", "split"]);
    refused(&["ab", "--first", split, "--second", "split 'x"], &["a quote is not closed"]);
    refused(&["noise", "--", "split", "--json"], &["leave out --output, --json"]);
    bench(&["noise", "--", "split", "-b", "3m"])
        .assert()
        .code(1)
        .stderr(contains("is not a whole number of"));
}
