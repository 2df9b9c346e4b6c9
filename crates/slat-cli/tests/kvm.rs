//! `slat bench` and the main job on the command line, with guests under this host's KVM.

mod common;

use common::{kvm_is_usable, refused, send, slat, spawned};
use predicates::prelude::*;
use predicates::str::contains;
use rustix::process::Signal;

#[test]
fn rates_hot_sets_and_rings_that_cannot_be_are_refused() {
    refused(&["bench", "migrate", "--link", "10Gbit"], &["10Gbit", "500MiB/s"]);
    refused(&["bench", "dirty-log", "--hot-set", "10"], &["hot set", "10:90"]);
    refused(&["bench", "dirty-log", "--duration", "5"], &["no unit", "5s"]);
    refused(&["bench", "dirty-log", "--duration", "0s"], &["50ms"]);
    refused(&["bench", "dirty-log", "--interval", "5ms"], &["--duration"]);
    if cfg!(target_arch = "x86_64") && kvm_is_usable() {
        slat(&["bench", "boot-caches"]).assert().code(4).stderr(contains("(Arm)"));
        let told = slat(&["bench", "boot-caches", "--json"]).assert().code(4);
        let report: serde_json::Value = serde_json::from_slice(&told.get_output().stdout).unwrap();
        let why = report["skipped"][0]["reason"].as_str().unwrap();
        assert!(why.contains("(Arm)") && report["results"] == serde_json::json!([]), "{report}");
    }
    if kvm_is_usable() {
        let pinned = ["bench", "dirty-log", "--quick", "--memory", "8m", "--pin", "0-0"];
        slat(&pinned).assert().success();
        let ring = ["bench", "dirty-log", "--memory", "8m", "--dirty-ring-size", "1000"];
        refused(&ring, &["power of two"]);
        let cpu = ["bench", "dirty-log", "--memory", "8m", "--pin", "4095"];
        refused(&cpu, &["CPU 4095 is beyond", "4095"]);
    }
}

/// Returns the report on stdout.
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
        let words = ["explain", "--json", "--", "bench", "dirty-log", "--memory", "8m"];
        let done = slat(&words).args(["--runs", "1", "--iterations", "1"]).assert().success();
        let explained: serde_json::Value =
            serde_json::from_slice(&done.get_output().stdout).expect("JSON");
        let phases: Vec<_> =
            explained.as_array().unwrap().iter().map(|it| it["what"][1].clone()).collect();
        for phase in ["dirty", "get", "clear"] {
            assert!(phases.contains(&phase.into()), "{phases:?}");
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let nothing = r#"{"schema": 1, "results": [], "host": {}, "command": []}"#;
    std::fs::write(folder.path().join("results.json"), nothing).unwrap();
    let words = ["explain", folder.path().to_str().unwrap()];
    slat(&words).assert().code(1).stderr(contains("slat explain -- bench dirty-log"));
}

#[test]
fn tuning_says_what_to_set_in_the_report_and_in_its_json() {
    if !kvm_is_usable() {
        return;
    }
    let words = ["tune", "dirty-log", "--memory", "8m", "--runs", "1", "--duration", "200ms"];
    let said = contains("No setting was shown to be better").and(contains("least stall first"));
    slat(&words).assert().success().stdout(said);
    let json = report(&words);
    let first = json["verdict"]["says"][0].as_str().unwrap();
    assert!(first.contains("--runs 5"), "{first}");
}

#[test]
fn a_migration_reports_its_result_and_a_larger_guests() {
    if !kvm_is_usable() {
        return;
    }
    let words = ["bench", "migrate", "--memory", "8m", "--runs", "1", "--way", "legacy"];
    let words = [&words[..], &["--sweep", "20MiB/s,40MiB/s", "--link", "200MiB/s"]].concat();
    let json = report(&words);
    let says: Vec<_> = json["verdict"]["says"].as_array().unwrap().iter().collect();
    assert_eq!(says.len(), 3, "{says:?}");
    let said = |place: usize, words: &str| says[place].as_str().unwrap().contains(words);
    assert!(said(0, "(20 MiB/s asked for)") && said(1, "(40 MiB/s asked for)"));
    assert!(said(2, "By calculation") && said(2, "16 GiB"), "{says:?}");
    for variant in ["write-rate", "copy-rate"] {
        assert_eq!(named(&json, variant).len(), 2, "{variant}");
    }
}

#[test]
fn all_of_memory_is_touched_under_kvm() {
    if !kvm_is_usable() {
        return;
    }
    let small = ["--memory", "8m", "--runs", "1"];
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
fn a_guest_is_restored_and_snapshotted_in_each_way() {
    refused(&["bench", "restore", "--slow", "500us"], &["500us", "1:500us"]);
    refused(&["bench", "restore", "--way", "lazy"], &["lazy", "uffd-4k"]);
    if !kvm_is_usable() {
        return;
    }
    refused(&["bench", "restore", "--memory", "4097"], &["4097", "multiple"]);
    let small = ["--memory", "8m", "--runs", "1"];
    let json = report(&[&["bench", "restore", "--way", "eager,private"][..], &small].concat());
    let ways = named(&json, "working-set");
    assert!(ways.len() >= 2, "{json}");
    assert!(json["verdict"]["says"][0].as_str().unwrap().contains("working set"), "{json}");
    for way in named(&json, "pass-accesses") {
        assert_eq!(way["samples"].as_array().unwrap().len(), 20);
    }
    let json = report(&[&["bench", "snapshot", "--way", "log,mincore"][..], &small].concat());
    let of = |variant| named(&json, variant).into_iter().map(|m| m["samples"][0].clone());
    assert_eq!(of("missed").collect::<Vec<_>>(), [0.0, 0.0]);
    assert_eq!(of("reported").nth(1), Some((4.0 * 2048.0).into()));
    let said = json["verdict"]["says"][1].as_str().unwrap();
    assert!(said.contains("missed: none") && said.contains("mincore "), "{said}");
}

#[test]
fn guests_are_moved_forked_and_reclaimed_and_restores_ranked() {
    refused(&["bench", "postcopy", "--queue", "much"], &["much"]);
    refused(&["bench", "reclaim", "--hot-set", "20"], &["10:90"]);
    refused(&["bench", "restore", "--pattern", "no-such"], &["no-such", "requests"]);
    if !kvm_is_usable() {
        return;
    }
    let small = ["--memory", "8m", "--runs", "1"];
    let run = |words: &[&str]| report(&[words, &small].concat());
    let json = run(&["bench", "postcopy", "--dirty-rate", "50MiB/s", "--link", "2Gbit/s"]);
    let moved = named(&json, "all-there");
    assert!(!moved.is_empty() && moved.iter().any(|m| m["params"]["way"] == "pre-copy"), "{json}");
    let json = run(&["bench", "fork", "--guests", "3", "--way", "private,memfd"]);
    let each = |at: usize| named(&json, "resident-each")[at]["samples"][0].as_f64().unwrap();
    assert!(each(0) < each(1) && (each(1) - 8.0).abs() < 0.1, "{json}");
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace");
    // A way that the host lacks is left out.
    let trace_words = ["--allowed", "50", "--trace", trace.to_str().unwrap()];
    let json = run(&[&["bench", "reclaim"][..], &trace_words].concat());
    let says = json["verdict"]["says"].as_array().unwrap().iter();
    assert!(says.flat_map(|it| it.as_str()).any(|it| it.contains("by balloon")), "{json}");
    assert_eq!(std::fs::read_to_string(trace).unwrap().lines().count(), 2048);
    let json = run(&["tune", "restore", "--way", "eager,private", "--pattern", "script"]);
    let said = json["verdict"]["says"][0].as_str().unwrap();
    assert!(said.contains("to answer soonest"), "{said}");
}

#[test]
fn memslots_change_while_vcpus_run_on_bound_memory() {
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

/// Interrupts a run after some seconds. Returns its report, and checks that the run left no file
/// and no control group.
fn told_to_end(line: &str, signal: Signal, seconds: u64) -> serde_json::Value {
    let folder = tempfile::tempdir().unwrap();
    let (report, temporary) = (folder.path().join("report"), folder.path().join("tmp"));
    std::fs::create_dir(&temporary).unwrap();
    let mut child = spawned(line, &report, &temporary);
    std::thread::sleep(std::time::Duration::from_secs(seconds));
    // The signal comes twice, as from `timeout`: to the process, and to its group.
    send(&child, signal);
    std::thread::sleep(std::time::Duration::from_millis(5));
    send(&child, signal);
    let group = format!("slat-{}", child.id());
    assert_eq!(child.wait().unwrap().code(), Some(130), "{line}");
    let left: Vec<_> = temporary.read_dir().unwrap().flatten().collect();
    assert!(left.is_empty(), "{line}: {left:?}");
    // The parent of the control group depends on the host.
    let groups = walkdir(std::path::Path::new("/sys/fs/cgroup"));
    assert!(!groups.iter().any(|path| path.ends_with(&group)), "{line}: {group} is left");
    let text = std::fs::read(report.join("results.json")).unwrap();
    let report: serde_json::Value = serde_json::from_slice(&text).unwrap();
    assert_eq!(report["partial"], true, "{line}");
    assert!(report["trust"]["seconds"].as_f64().unwrap() > 1.0, "{report}");
    report
}

/// Returns all folders below one.
fn walkdir(folder: &std::path::Path) -> Vec<std::path::PathBuf> {
    let entries = folder.read_dir().into_iter().flatten().flatten();
    let folders = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    let paths: Vec<_> = folders.map(|entry| entry.path()).collect();
    let below = paths.iter().flat_map(|path| walkdir(path)).collect::<Vec<_>>();
    paths.into_iter().chain(below).collect()
}

#[test]
fn an_interrupted_run_leaves_only_a_report_of_its_results() {
    if !kvm_is_usable() {
        return;
    }
    for (line, signal) in [
        ("tune dirty-log --memory 8m --runs 1000 --duration 200ms -o", Signal::INT),
        ("bench dirty-log --memory 8m --runs 1000 --iterations 50 -o", Signal::INT),
        ("bench dirty-log --memory 8m --runs 9-1000 --until 0.1 --iterations 50 -o", Signal::TERM),
        ("bench migrate --memory 8m --runs 1000 -o", Signal::INT),
    ] {
        let report = told_to_end(line, signal, 4);
        assert!(!named(&report, "populate").is_empty(), "{report}");
    }
}

#[test]
fn a_run_that_only_warmed_up_stands_and_is_named_so() {
    if !kvm_is_usable() {
        return;
    }
    let line = "bench memory-stress --memory 64m --iterations 10000 -o";
    let report = told_to_end(line, Signal::INT, 2);
    let fills = named(&report, "refill");
    assert!(fills.iter().any(|m| m["params"]["warm_up"] == true), "{report}");
    // All memory fits below the limit, so the test needs a control group but no swap.
    let limit = "bench memory-stress --memory 64m --limit 128m";
    let words: Vec<_> = limit.split(' ').chain(["--quick"]).collect();
    let done = slat(&words).output().unwrap();
    if done.status.success() {
        told_to_end(&format!("{limit} --iterations 10000 -o"), Signal::INT, 2);
    } else {
        let why = String::from_utf8_lossy(&done.stderr);
        eprintln!("skipped in part: no control group can be made: {}", why.trim());
    }
}

#[test]
fn runs_go_on_until_their_answer_is_known_closely_and_say_so() {
    if !kvm_is_usable() {
        return;
    }
    let words = ["bench", "populate", "-s", "4k", "-v", "1", "--memory", "8m", "--runs", "1-9"];
    let wide = report(&[&words[..], &["--until", "1000"]].concat());
    assert_eq!(named(&wide, "populate")[0]["samples"].as_array().unwrap().len(), 6);
    let said = &wide["repeated"][0];
    assert_eq!((&said["variant"], &said["runs"]), (&"populate".into(), &6.into()));
    assert_eq!(said["reached"], true, "{said}");
    slat(&words).args(["--until", "0.1"]).assert().success().stdout(contains("% asked)"));
    let fixed = report(&["bench", "populate", "-s", "4k", "-v", "1", "--memory", "8m", "-r", "2"]);
    assert!(fixed["repeated"].is_null() && fixed["results"][0]["params"]["runs"] == 2);
    refused(&[&words[..], &["--until", "soon"]].concat(), &["soon", "percentage"]);
}

#[test]
fn more_vcpus_than_cpus_is_reported_and_fails_on_request() {
    let cpus = std::thread::available_parallelism().unwrap().get();
    if !kvm_is_usable() || cpus > 7 {
        return;
    }
    let words = ["bench", "populate", "-s", "4k", "--memory", "8m", "-r", "1", "-v", "8"];
    let said = contains("8 vCPUs share");
    slat(&words).arg("--fail-if-noisy").assert().code(6).stderr(said.clone());
    slat(&words).assert().success().stdout(predicates::str::starts_with("NOT TO BE TRUSTED: "));
}
