//! Tests of guests of the engine, as commands.

mod common;

use common::{bench, refused, send, spawned};
use rustix::process::Signal;

/// Returns the results of a quick run of a scenario on a guest of the engine.
fn quick(arguments: &[&str]) -> Vec<serde_json::Value> {
    let mut command = bench(&[]);
    command.args(arguments).args(["--quick", "--json"]);
    let output = command.assert().success().get_output().clone();
    // A slow machine gets a line of progress a minute, and nothing else.
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.lines().all(|line| line.contains(" steps, ")), "{stderr}");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    report["results"].as_array().unwrap().clone()
}

/// Returns a count of the only result with this scenario, variant and figure.
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
    // The vCPUs fault in the same blocks, so some faults are spurious.
    assert!(count(&results, ["execute", "zap", "execute", "faults_zapped"]) >= 16);
    assert!(count(&results, ["execute", "split", "execute", "faults_split"]) >= 16);
}

#[test]
fn the_engines_log_loses_no_page() {
    let results = quick(&["dirty-log", "--format", "arm64"]);
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
    let line = "execute --backing 2m --memory 64m --rounds 1000 --output";
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
    refused(&["execute", "--memory", "512m"], &["512m", "1g"]);
    refused(&["execute", "--bbm", "1"], &["--bbm 1", "--format arm64"]);
    refused(&["execute", "--memory", "1000g"], &["1000g", "smaller --memory"]);
    refused(&["age", "--vcpus", "0"], &["0", "192"]);
    refused(&["populate", "--backing", "3m"], &["3m", "2m"]);
    refused(&["dirty-log", "--way", "lost"], &["lost", "initially-set"]);
    refused(&["dirty-log", "--memory", "3m"], &["--memory 3m", "2m"]);
}

#[test]
fn idle_pages_of_a_guest_are_reported_and_taken() {
    let results = quick(&["idle", "--memory", "2m", "--pattern", "zipf", "--may-return", "5"]);
    let of = |name: &'static str| ["guest-idle-taken", "at most 5 %", "taken", name];
    let (taken, returned) = (count(&results, of("taken")), count(&results, of("returned")));
    assert!(taken > 0 && returned > 0, "{taken} {returned}");
    refused(&["idle", "--may-return", "101"], &["101", "100"]);
    refused(&["idle", "--pattern", "fill"], &["fill", "another --pattern"]);
    refused(&["reclaim", "--swap", "/nonexistent"], &["/nonexistent", "directory"]);
}

#[test]
fn a_killed_swapping_run_leaves_no_file_and_the_next_run_works() {
    let swap = tempfile::tempdir().unwrap();
    let run = |rounds: u32| {
        let line = "reclaim --memory 2m --pattern uniform --policy free-bitmap --accesses 4";
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
