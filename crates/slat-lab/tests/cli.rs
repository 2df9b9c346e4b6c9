//! The `slat` command as a user meets it: what it prints, and the exit code.

use assert_cmd::Command;
use predicates::prelude::*;
use predicates::str::contains;
use rustix::process::{Pid, Signal, kill_process};

fn slat(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_slat"));
    command.args(arguments);
    command
}

/// Runs the command and demands that it is refused as bad input, in words that have all of `words`.
fn refused(arguments: &[&str], words: &[&str]) {
    let mut assert = slat(arguments).assert().code(2).stdout("");
    for word in words {
        assert = assert.stderr(contains(*word));
    }
}

/// What a guest may be is known only where guests can run.
fn kvm_is_usable() -> bool {
    let usable = std::fs::File::options().read(true).write(true).open("/dev/kvm").is_ok();
    if !usable {
        eprintln!("skipped in part: /dev/kvm cannot be opened");
    }
    usable
}

#[test]
fn help_has_examples_and_exit_codes() {
    slat(&["--help"]).assert().success().stdout(
        contains("slat bench split --memory 64G").and(contains("Exit codes")).and(contains("130")),
    );
    for bench in [
        "split",
        "engine",
        "dirty-log",
        "execute",
        "age",
        "populate",
        "memory-stress",
        "memslot",
        "migrate",
        "boot-caches",
    ] {
        slat(&["bench", bench, "--help"]).assert().success().stdout(contains("Examples:"));
    }
    for words in [&["explain", "--help"][..], &["tune", "dirty-log", "--help"]] {
        slat(words).assert().success().stdout(contains("Examples:"));
    }
}

#[test]
fn completions_complete_the_subcommands() {
    let words = contains("dirty-log").and(contains("arm64-lpa2-16k")).and(contains("riscv"));
    slat(&["completions", "bash"]).assert().success().stdout(words);
    refused(&["completions", "cobol"], &["cobol", "bash"]);
}

#[test]
fn a_format_is_refused_what_it_lacks_with_what_it_has() {
    let split = ["bench", "split", "--memory", "1g", "--format"];
    let split = |more: &[&'static str]| [&split[..], more].concat();
    refused(&split(&["power"]), &["power", "arm64-16k", "riscv"]);
    refused(&split(&["riscv", "--backing", "32m"]), &["--backing 32m", "4k, 2m, 1g"]);
    refused(&split(&["npt", "--bbm", "2"]), &["--bbm 2", "arm64"]);
    refused(&split(&["ept", "--granule", "16k"]), &["--granule", "--format"]);
    refused(
        &["bench", "split", "--format", "ept", "--memory", "1024t"],
        &["1024t", "at most 128t"],
    );
    let execute = ["bench", "execute", "--format", "arm64-16k", "--backing", "2m"];
    refused(&execute, &["--backing 2m", "16k, 32m"]);
    let linux =
        ["bench", "split", "--format", "npt", "--target", "linux-source", "--linux-tree", "."];
    refused(&linux, &["npt", "arm64-4k, arm64-16k and arm64-64k"]);
    refused(&["bench", "populate", "--target", "kvm", "--format", "npt"], &["--format", "engine"]);
}

#[test]
fn a_memory_of_zero_is_refused() {
    refused(&["bench", "split", "--memory", "0"], &["--memory", "zero"]);
    refused(&["bench", "dirty-log", "--memory", "0"], &["--memory", "zero"]);
}

#[test]
fn a_memory_that_is_no_size_is_refused_with_an_example() {
    refused(&["bench", "split", "--memory", "lots"], &["lots", "64G"]);
}

#[test]
fn an_unaligned_memory_is_refused() {
    refused(&["bench", "split", "--memory", "1073741825"], &["1073741825"]);
    if kvm_is_usable() {
        refused(&["bench", "dirty-log", "--memory", "4097"], &["4097"]);
    }
}

#[test]
fn a_memory_larger_than_the_format_allows_is_refused() {
    refused(&["bench", "split", "--memory", "1048576T"], &["1048576t", "at most"]);
}

#[test]
fn a_backing_that_the_granule_does_not_have_is_refused_with_those_it_has() {
    refused(&["bench", "split", "--backing", "3m"], &["3m", "2m"]);
    refused(&["bench", "split", "--granule", "64k", "--backing", "2m"], &["2m", "512m"]);
    refused(&["bench", "dirty-log", "--backing", "3m"], &["3m", "hugetlb-2m"]);
}

#[test]
fn fewer_than_ten_samples_are_refused() {
    refused(&["bench", "split", "--samples", "9"], &["9", "10"]);
}

#[test]
fn a_bbm_level_that_no_cpu_has_is_refused() {
    refused(&["bench", "split", "--bbm", "4"], &["4", "0..=3"]);
}

#[test]
fn a_clear_chunk_that_kvm_would_refuse_is_refused_before_any_guest_runs() {
    refused(&["bench", "dirty-log", "--clear-chunk", "0"], &["--clear-chunk", "64"]);
    refused(&["bench", "dirty-log", "--clear-chunk", "65"], &["65", "multiple of 64"]);
    refused(&["bench", "dirty-log", "--clear-chunk", "5k"], &["5k", "multiple of 64"]);
}

#[test]
fn an_output_that_cannot_be_written_is_refused_before_anything_is_measured() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let below = file.join("report");
    refused(&["--output", below.to_str().unwrap()], &["--output", "cannot write there"]);
    refused(&["--output", file.to_str().unwrap()], &["--output", "cannot write there"]);
    refused(
        &["bench", "split", "--output", below.to_str().unwrap()],
        &["--output", "cannot write there"],
    );
}

#[test]
fn an_output_whose_files_are_directories_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("results.json")).unwrap();
    refused(&["--output", folder.path().to_str().unwrap()], &["results.json", "directory"]);
}

#[test]
fn a_refused_command_leaves_no_file_behind() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    refused(&["bench", "split", "--output", path, "--memory", "1073741825"], &["1073741825"]);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn a_split_prints_a_table_and_writes_every_sample() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let arguments = ["bench", "split", "--memory", "1g", "--backing", "2m", "--when", "enable"];
    let mut command = slat(&arguments);
    command.args(["--what", "split", "--samples", "10", "--output", path]);
    command.assert().success().stdout(contains("every-entry").and(contains("Slots read")));
    let text = std::fs::read_to_string(folder.path().join("results.json")).unwrap();
    let report: serde_json::Value = serde_json::from_str(&text).unwrap();
    let results = report["results"].as_array().unwrap();
    let splits: Vec<_> = results.iter().filter(|r| r["scenario"] == "split").collect();
    assert_eq!(splits.len(), 3);
    assert!(splits.iter().all(|split| split["samples"].as_array().unwrap().len() == 10));
    assert_eq!(report["command"][0], "slat");
    // Nothing temporary stays beside the two files.
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
}

#[test]
fn json_on_stdout_is_all_that_is_on_stdout() {
    let arguments = ["bench", "split", "--memory", "1g", "--backing", "1g", "--when", "enable"];
    let output = slat(&arguments)
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
    let mut command = slat(&["bench", "engine", "--quick", "--rounds", "1"]);
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
    refused(&["bench", "engine", "--only", "sort"], &["sort", "protect-tables"]);
    refused(&["bench", "engine", "--memory", "1536m"], &["1536m", "multiple of 1g"]);
    refused(&["bench", "engine", "--memory", "1t"], &["1t", "512g"]);
}

/// The results of a quick run of a scenario on a guest of the engine's.
fn quick(arguments: &[&str]) -> Vec<serde_json::Value> {
    let mut command = slat(&["bench"]);
    command.args(arguments).args(["--quick", "--json"]);
    let output = command.assert().success().stderr("").get_output().clone();
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    report["results"].as_array().unwrap().clone()
}

/// A count of the one result of that scenario, variant and figure.
fn count(results: &[serde_json::Value], [scenario, variant, figure, name]: [&str; 4]) -> u64 {
    let found = results.iter().find(|r| {
        r["scenario"] == scenario && r["variant"] == variant && r["params"]["figure"] == figure
    });
    let counts = &found.unwrap_or_else(|| panic!("no {figure} of {variant}"))["counts"];
    counts[name].as_u64().unwrap_or_else(|| panic!("no {name} in {counts}"))
}

#[test]
fn a_fetch_that_splits_spares_five_hundred_faults() {
    let results = quick(&["execute", "--backing", "1g", "--vcpus", "1"]);
    let faults = |way| count(&results, ["execute", way, "execute", "faults"]);
    assert!(faults("split") * 500 <= faults("zap"), "{}, {}", faults("split"), faults("zap"));
    assert_eq!(count(&results, ["execute", "split", "write", "faults"]), 0);
    let asked = results.iter().filter(|r| r["scenario"] == "guest-asked");
    assert!(asked.into_iter().any(|r| r["params"]["asked"] == 0.1));
}

#[test]
fn more_vcpus_than_cpus_execute_in_turns() {
    let results = quick(&["execute", "--backing", "2m", "--vcpus", "96", "--memory", "32m"]);
    // They meet in the same blocks, so some faults are for nothing.
    assert!(count(&results, ["execute", "zap", "execute", "faults_zapped"]) >= 16);
    assert!(count(&results, ["execute", "split", "execute", "faults_split"]) >= 16);
}

#[test]
fn the_engines_log_loses_no_page() {
    let results = quick(&["dirty-log", "--target", "engine", "--format", "arm64"]);
    for way in ["legacy", "manual", "locked", "initially-set", "ring", "hardware"] {
        assert_eq!(count(&results, ["guest-log", way, "stall", "pages_compared"]), 4096, "{way}");
    }
    assert_eq!(count(&results, ["guest-log", "hardware", "stall", "faults"]), 0);
    assert!(results.iter().any(|r| r["scenario"] == "guest-log-density"));
}

#[test]
fn ageing_and_populating_run_in_seconds() {
    let results = quick(&["age"]);
    assert!(count(&results, ["guest-age", "locked-64", "p99", "pages_scanned"]) >= 512);
    let results = quick(&["populate", "--overlap", "--backing", "4k", "--vcpus", "2"]);
    let mapped = count(&results, ["guest-populate", "lock-free", "all", "faults_mapped"]);
    assert_eq!(mapped, 4096);
}

#[test]
fn a_guest_that_is_interrupted_keeps_whole_rounds() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("report");
    let line = "bench execute --backing 2m --memory 64m --rounds 1000 --output";
    let mut child = spawned(line, &output);
    while !output.exists() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    std::thread::sleep(std::time::Duration::from_millis(1500));
    send(&child, Signal::INT);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let text = std::fs::read_to_string(output.join("results.json")).unwrap();
    let report: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(report["partial"], true);
    let results = report["results"].as_array().unwrap();
    let samples = |r: &serde_json::Value| r["samples"].as_array().unwrap().len();
    assert!(results.iter().all(|result| samples(result) == samples(&results[0])));
}

#[test]
fn guests_that_cannot_be_are_refused() {
    refused(&["bench", "execute", "--memory", "512m"], &["512m", "1g"]);
    refused(&["bench", "execute", "--bbm", "1"], &["--bbm 1", "--format arm64"]);
    refused(&["bench", "execute", "--memory", "1000g"], &["1000g", "smaller --memory"]);
    refused(&["bench", "age", "--vcpus", "0"], &["0", "192"]);
    refused(&["bench", "populate", "--backing", "3m"], &["3m", "2m"]);
    refused(&["bench", "dirty-log", "--way", "ring"], &["--way", "--target engine"]);
    let engine = ["bench", "dirty-log", "--target", "engine"];
    refused(&[&engine[..], &["--initially-set", "on"]].concat(), &["--way initially-set"]);
    refused(&[&engine[..], &["--memory", "3m"]].concat(), &["--memory 3m", "2m"]);
}

#[test]
fn what_is_idle_in_a_guest_is_told_and_taken() {
    let results = quick(&["idle", "--memory", "2m", "--pattern", "zipf", "--may-return", "5"]);
    let of = |name: &'static str| ["guest-idle-taken", "at most 5 %", "taken", name];
    let (taken, returned) = (count(&results, of("taken")), count(&results, of("returned")));
    assert!(taken > 0 && returned > 0, "{taken} {returned}");
    refused(&["bench", "idle", "--may-return", "101"], &["101", "100"]);
    refused(&["bench", "idle", "--pattern", "fill"], &["fill", "another --pattern"]);
    refused(&["bench", "reclaim", "--swap", "/nonexistent"], &["/nonexistent", "directory"]);
}

#[test]
fn a_swapping_run_that_is_killed_leaves_no_file_and_the_next_one_runs() {
    let swap = tempfile::tempdir().unwrap();
    let run = |rounds: u32| {
        let line = "bench reclaim --memory 2m --pattern uniform --policy free-bitmap --accesses 4";
        spawned(&format!("{line} --rounds {rounds} --swap"), swap.path())
    };
    for wait in [20, 100, 300] {
        let mut child = run(1000);
        std::thread::sleep(std::time::Duration::from_millis(wait));
        child.kill().and_then(|()| child.wait()).unwrap();
        assert_eq!(swap.path().read_dir().unwrap().count(), 0, "after {wait} ms");
    }
    assert!(run(1).wait().unwrap().success());
}

/// A process that executes the line, whose last option takes the path.
fn spawned(line: &str, path: &std::path::Path) -> std::process::Child {
    let mut slat = std::process::Command::new(env!("CARGO_BIN_EXE_slat"));
    slat.args(line.split(' ')).arg(path);
    slat.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
    slat.spawn().unwrap()
}

fn send(child: &std::process::Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

#[test]
fn the_first_ctrl_c_stops_cleanly_and_keeps_what_was_measured() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("report");
    let mut child = spawned("bench split --memory 1g --samples 1000 --output", &output);
    // The directory appears before anything is measured; a moment later the run is under way.
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
    let mut child = spawned("bench split --memory 64g --samples 1000 --output", folder.path());
    // The first row takes many seconds; by now the handler is in place.
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
    let split = ["bench", "split", "-b", "1g", "--what", "split", "--when", "enable"];
    for (name, backing) in [("one", "2m"), ("two", "1g")] {
        let options = ["--samples", "10", "--backing", backing, "--output", &at(name)];
        slat(&[&split[..], &options].concat()).assert().success();
    }
    // What the command line chose is a variable; the counts say how the two differ.
    slat(&["compare", &at("one"), &at("two")]).assert().success().stdout(
        contains("parameter backing")
            .and(contains("parameter slots"))
            .and(contains("0 not comparable"))
            .and(contains("split: batched")),
    );
    slat(&["compare", &at("one"), &at("one"), "--fail-if-slower", "--report", "markdown"])
        .assert()
        .success()
        .stdout(contains("### The second run by the first").and(contains("difference\u{a0}shown")));
    let output = slat(&["compare", &at("one"), &at("two"), "--report", "json"]).output().unwrap();
    let comparison: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(comparison["alone"], serde_json::json!([0, 0]));
    // Another machine: times are not comparable.
    let file = std::path::Path::new(&at("two")).join("results.json");
    let mut report: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    report["host"]["cpu"]["model"] = "another".into();
    std::fs::write(&file, report.to_string()).unwrap();
    slat(&["compare", &at("one"), &at("two")])
        .assert()
        .success()
        .stdout(contains("The machines differ: times are not comparable").and(contains("another")));
    slat(&["compare", &at("one"), &at("two"), "--fail-if-slower"])
        .assert()
        .code(1)
        .stderr(contains("no time of these runs can be compared").and(contains("5 samples")));
    report["results"] = serde_json::json!([]);
    std::fs::write(&file, report.to_string()).unwrap();
    slat(&["compare", &at("one"), &at("two")])
        .assert()
        .code(1)
        .stderr(contains("no result in common"));
    report["schema"] = 7.into();
    std::fs::write(&file, report.to_string()).unwrap();
    refused(&["compare", &at("one"), &at("two")], &["its schema is 7, not 1", "results.json"]);
    refused(&["compare", &at("three"), &at("one")], &["give the results.json of a run"]);
    refused(&["compare", &at("one"), &at("one"), "--threshold", "x"], &["write a percentage"]);
}

#[test]
fn two_commands_run_in_turns_and_one_against_itself() {
    let split = "bench split -b 64m --backing 2m --what split --when enable --samples 10";
    let again = format!("{split} --walk 'bounded'");
    slat(&["ab", "--pairs", "1", "--first", split, "--second", &again]).assert().success().stdout(
        contains("What else differs between the runs")
            .and(contains("--walk bounded"))
            .and(contains("split: bounded"))
            .and(contains("2 + 2")),
    );
    let words: Vec<&str> = split.split(' ').collect();
    let noise = [&["noise", "--pairs", "3", "--report", "json", "--"][..], &words].concat();
    let output = slat(&noise).output().unwrap();
    let comparison: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(comparison["variables"], serde_json::json!([]));
    assert_eq!(comparison["pairs"][0]["samples"], serde_json::json!([6, 6]));
    refused(&["noise", "--", "compare", "x"], &["nothing to measure", "bench split"]);
    refused(&["ab", "--first", split, "--second", "bench 'x"], &["a quote is not closed"]);
    refused(&["noise", "--", "bench", "split", "--json"], &["leave out --output, --json"]);
    slat(&["noise", "--", "bench", "split", "-b", "3m"])
        .assert()
        .code(1)
        .stderr(contains("is not a whole number of"));
}

#[test]
fn a_doctor_refuses_what_the_host_cannot_run_by_an_exit_code_of_its_own() {
    // No program is in a folder that does not exist, whatever is installed.
    slat(&["doctor", "--for", "emulate"])
        .env("PATH", "/nonexistent")
        .assert()
        .code(4)
        .stdout(contains("missing  dpkg-deb").and(contains("tdp_mmu").not()))
        .stderr(contains("cannot run emulate").and(contains("qemu-system-aarch64")));
    slat(&["doctor"]).assert().success().stdout(contains("tdp_mmu").and(contains("What can run")));
    let output = slat(&["doctor", "--report", "json"]).output().unwrap();
    let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(document["scenarios"].as_array().unwrap().len(), 9);
    refused(&["doctor", "--for", "sorting"], &["sorting", "dirty-log"]);
}

#[test]
fn a_report_is_printed_as_csv_or_as_ktap() {
    let split = ["bench", "split", "-b", "1g", "--backing", "1g", "--when", "enable"];
    let rest = ["--what", "split", "--samples", "10", "--report"];
    let output = slat(&[&split[..], &rest, &["csv"]].concat()).output().unwrap();
    let mut reader = csv::Reader::from_reader(&output.stdout[..]);
    let value = reader.headers().unwrap().iter().position(|name| name == "value").unwrap();
    let rows: Vec<_> = reader.records().map(Result::unwrap).collect();
    let of = |variant| rows.iter().filter(|row| &row[2] == variant && &row[0] == "split").count();
    // Ten samples and four counts.
    assert_eq!((of("bounded"), of("batched")), (14, 14));
    assert!(rows.iter().all(|row| row[value].parse::<f64>().is_ok()));
    slat(&[&split[..], &rest, &["ktap"]].concat()).assert().success().stdout(
        predicates::str::starts_with("KTAP version 1\n1..").and(contains("ok 1 - split engine")),
    );
    refused(&[&split[..], &rest, &["csv", "--json"]].concat(), &["--report", "--json"]);
    refused(&["noise", "--", "bench", "split", "--report", "csv"], &["leave out", "--report"]);
    // What can be right nowhere is no test that failed.
    refused(&["bench", "dirty-log", "--clear-chunk", "65", "--report", "ktap"], &["65"]);
}

#[test]
fn rates_hot_sets_and_rings_that_cannot_be_are_refused() {
    refused(&["bench", "migrate", "--link", "10Gbit"], &["10Gbit", "500MiB/s"]);
    refused(&["bench", "dirty-log", "--hot-set", "10"], &["hot set", "10:90"]);
    refused(&["bench", "dirty-log", "--duration", "5"], &["no unit", "5s"]);
    refused(&["bench", "dirty-log", "--duration", "0s"], &["50ms"]);
    refused(&["bench", "dirty-log", "--interval", "5ms"], &["--duration"]);
    refused(&["bench", "execute", "--pin", "0"], &["--target kvm"]);
    refused(&["bench", "populate", "--backing", "memfd"], &["memfd", "--target kvm"]);
    if cfg!(target_arch = "x86_64") && kvm_is_usable() {
        slat(&["bench", "boot-caches"]).assert().code(1).stderr(contains("(Arm)"));
    }
    refused(&["bench", "execute", "--target", "kvm", "--exit", "9"], &["--exit", "engine"]);
    if kvm_is_usable() {
        slat(&["bench", "migrate", "--quick", "--pin", "0-0"]).assert().success();
        let ring = ["bench", "dirty-log", "--memory", "8m", "--dirty-ring-size", "1000"];
        refused(&ring, &["power of two"]);
        let cpu = ["bench", "dirty-log", "--memory", "8m", "--pin", "4095"];
        refused(&cpu, &["CPU to pin to", "4095"]);
    }
}

/// The report on stdout.
fn report(words: &[&str]) -> serde_json::Value {
    let done = slat(words).arg("--json").assert().success();
    serde_json::from_slice(&done.get_output().stdout).expect("a report is JSON")
}

fn named<'a>(report: &'a serde_json::Value, variant: &str) -> Vec<&'a serde_json::Value> {
    let results = report["results"].as_array().expect("results");
    results.iter().filter(|m| m["variant"] == variant && m["params"]["vcpu"].is_null()).collect()
}

#[test]
fn a_guest_is_migrated_in_each_way_that_the_host_has() {
    if !kvm_is_usable() {
        return;
    }
    let words = ["bench", "migrate", "--memory", "8m", "--runs", "1", "--dirty-rate", "4MiB/s"];
    let report = report(&[&words[..], &["--link", "1Gbit/s"]].concat());
    let ways = named(&report, "downtime").len();
    assert!(ways >= 1, "{report}");
    for run in named(&report, "run") {
        assert_eq!(run["counts"]["pages_compared"], 2048);
        assert_eq!(run["counts"]["pages_in_excess"], 0);
    }
    assert_eq!(named(&report, "run-stall-p99").len(), ways);
}

#[test]
fn a_run_is_explained_and_one_without_guests_is_not() {
    if kvm_is_usable() {
        let words = ["explain", "--report", "json", "--", "bench", "dirty-log", "--memory", "8m"];
        let done = slat(&words).args(["--runs", "1", "--iterations", "1"]).assert().success();
        let explained: serde_json::Value =
            serde_json::from_slice(&done.get_output().stdout).expect("JSON");
        let phases: Vec<_> =
            explained.as_array().unwrap().iter().map(|it| it["what"][1].clone()).collect();
        for phase in ["dirty", "get", "clear"] {
            assert!(phases.contains(&phase.into()), "{phases:?}");
        }
    }
    let engine = ["explain", "--", "bench", "execute", "--quick", "--memory", "64m", "-s", "2m"];
    slat(&engine).assert().code(1).stderr(contains("slat explain -- bench dirty-log"));
}

#[test]
fn tuning_says_what_to_set() {
    if !kvm_is_usable() {
        return;
    }
    let words = ["tune", "dirty-log", "--memory", "8m", "--runs", "1", "--duration", "200ms"];
    let said = contains("Least stall:").and(contains("QEMU:")).and(contains("others:"));
    slat(&words).assert().success().stderr(said);
}

#[test]
fn a_time_limit_keeps_what_was_measured_and_has_its_own_exit_code() {
    if !kvm_is_usable() {
        return;
    }
    let words = ["bench", "dirty-log", "--memory", "8m", "--runs", "1000", "--time-limit", "3s"];
    let done = slat(&words).arg("--json").assert().code(5);
    let report: serde_json::Value =
        serde_json::from_slice(&done.get_output().stdout).expect("a report is JSON");
    assert_eq!(report["partial"], true);
    assert!(!named(&report, "dirty").is_empty());
    assert!(report["skipped"][0]["reason"].as_str().unwrap().contains("time limit"), "{report}");
}

#[test]
fn all_of_memory_is_touched_under_kvm() {
    if !kvm_is_usable() {
        return;
    }
    let small = ["--memory", "8m", "--target", "kvm", "--rounds", "1"];
    let populate =
        report(&[&["bench", "populate", "-v", "1", "-s", "4k,shmem"][..], &small].concat());
    assert_eq!(named(&populate, "populate").len(), 2);
    let execute = report(&[&["bench", "execute", "-s", "4k"][..], &small].concat());
    assert_eq!(named(&execute, "execute")[0]["counts"]["pages"], 2048);
    let stress = ["bench", "memory-stress", "--memory", "8m", "-r", "1", "-x", "2", "-i", "1"];
    let stress = report(&stress);
    for phase in ["populate", "write", "reset", "refill", "read"] {
        assert_eq!(named(&stress, phase).len(), 1, "{phase}");
    }
}

#[test]
fn slots_come_and_go_beside_vcpus_and_memory_lies_where_it_is_bound() {
    refused(&["bench", "populate", "--memory-node", "0"], &["--target kvm"]);
    refused(&["bench", "memslot", "--cpu-node", "0", "--pin", "0"], &["--pin"]);
    if !kvm_is_usable() {
        return;
    }
    refused(&["bench", "memslot", "--memory", "8m"], &["slot", "at most the guest's memory"]);
    refused(&["bench", "memslot", "--memory-node", "4000"], &["4000", "nodes that have"]);
    refused(&["bench", "memslot", "--cpu-node", "4000"], &["4000", "nodes that have"]);
    let small = ["bench", "memslot", "--memory", "8m", "--slot-size", "4m", "-r", "1", "-i", "4"];
    let numa = std::path::Path::new("/proc/self/numa_maps").exists();
    let bound = ["--memory-node", "0", "--cpu-node", "0"];
    let report = report(&[&small[..], if numa { &bound } else { &[] }].concat());
    for variant in ["add", "move", "delete", "add-longest-call", "loss", "run-stall"] {
        assert_eq!(named(&report, variant).len(), 1, "{variant}");
    }
    if numa {
        assert_eq!(named(&report, "populate")[0]["counts"]["bytes_on_node0"], 8 << 20);
    }
}
