//! Tests of `slat-bench plan` and `slat-bench merge`, as commands.

use assert_cmd::Command;
use predicates::prelude::*;
use predicates::str::contains;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

fn bench() -> Command {
    Command::new(env!("CARGO_BIN_EXE_slat-bench"))
}

/// A folder with a plan in it.
struct Fixture(tempfile::TempDir);

impl Fixture {
    fn new(plan: &str) -> Self {
        let fixture = Self(tempfile::tempdir().unwrap());
        std::fs::write(fixture.at("plan.toml"), plan).unwrap();
        fixture
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn plan(&self, options: &[&str]) -> Command {
        let mut command = bench();
        command.current_dir(self.0.path()).args(["plan", "plan.toml"]).args(options);
        command
    }

    fn names(&self, folder: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.at(folder)).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

fn json(file: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap()
}

/// A plan of two cells of a few milliseconds each, with two repeats.
const QUICK: &str = "\
version = 1
scenarios = ['split --memory 1g --when enable --what split --samples 10 --walk batched']
repeats = 2
[settings]
backing = ['2m', '1g']
";

#[test]
fn a_list_has_each_cell_and_runs_nothing() {
    let fixture = Fixture::new(QUICK);
    let line = "slat-bench split --memory 1g --when enable --what split --samples 10 --walk \
                batched --backing";
    let all = format!("1  {line} 2m\n2  {line} 1g\n3  {line} 2m\n4  {line} 1g\n");
    fixture.plan(&["--list"]).assert().success().stdout(all).stderr("");
    fixture
        .plan(&["--list", "--cell", "2/2"])
        .assert()
        .success()
        .stdout(format!("2  {line} 1g\n4  {line} 1g\n"));
    let output = fixture.plan(&["--list", "--report", "json"]).output().unwrap().stdout;
    let list: Value = serde_json::from_slice(&output).unwrap();
    assert_eq!((&list[2]["cell"], &list[2]["repeat"]), (&3.into(), &2.into()));
    assert_eq!(fixture.names("."), ["plan.toml"]);
}

#[test]
fn shares_of_two_jobs_are_all_cells_and_what_is_there_is_not_measured_again() {
    let fixture = Fixture::new(QUICK);
    fixture
        .plan(&["--cell", "1/2", "-o", "out"])
        .assert()
        .success()
        .stdout("2 cells: 2 measured; reports in out\n")
        .stderr("");
    fixture.plan(&["--cell", "2/2", "-o", "out"]).assert().success();
    let cells = ["cell-001.json", "cell-002.json", "cell-003.json", "cell-004.json"];
    assert_eq!(fixture.names("out"), cells);
    let report = json(&fixture.at("out/cell-002.json"));
    assert_eq!(report["schema"], 1);
    assert_eq!(report["results"][0]["params"]["backing"], "1g");
    let before = std::fs::read(fixture.at("out/cell-003.json")).unwrap();
    fixture
        .plan(&["-o", "out"])
        .assert()
        .success()
        .stdout("4 cells: 0 measured, 4 already there; reports in out\n");
    assert_eq!(std::fs::read(fixture.at("out/cell-003.json")).unwrap(), before);
    fixture
        .plan(&["-o", "out", "--cell", "3", "--again"])
        .assert()
        .success()
        .stdout("1 cell: 1 measured; reports in out\n");
    assert_ne!(std::fs::read(fixture.at("out/cell-003.json")).unwrap(), before);

    // Reports of another plan are refused.
    std::fs::write(fixture.at("plan.toml"), QUICK.replace("['2m', '1g']", "['1g', '2m']")).unwrap();
    let assert = fixture.plan(&["-o", "out"]).assert().code(2).stdout("");
    assert.stderr(contains("cell-001.json").and(contains("plan has changed")));
    std::fs::write(fixture.at("out/cell-001.json"), "{\"schema\"").unwrap();
    let assert = fixture.plan(&["-o", "out"]).assert().code(2);
    assert.stderr(contains("cell-001.json").and(contains("--again")));
}

#[test]
fn a_cell_that_fails_is_recorded_and_the_others_go_on() {
    // No tables are large enough for the memory of the second cell.
    let plan = "version = 1\nscenarios = ['split --when enable --what split --walk batched']\n\
                [settings]\nmemory = ['1g', '1048576t', '2g']\nsamples = [10]\n";
    let fixture = Fixture::new(plan);
    let assert = fixture.plan(&["-o", "out"]).assert().code(1);
    assert
        .stdout(contains("3 cells: 2 measured, 1 failed").and(contains("1048576t")))
        .stderr(contains("cell 2").and(contains("at most")));
    assert_eq!(fixture.names("out"), ["cell-001.json", "cell-002.failed.json", "cell-003.json"]);
    let failed = json(&fixture.at("out/cell-002.failed.json"));
    assert_eq!(failed["exit_code"], 2);
    assert!(failed["reason"].as_str().unwrap().contains("at most"), "{failed}");
    // The cell is measured again, and its record is deleted once it succeeds.
    std::fs::write(fixture.at("plan.toml"), plan.replace("1048576t", "3g")).unwrap();
    fixture.plan(&["-o", "out"]).assert().success().stdout(contains("1 measured, 2 already there"));
    assert_eq!(fixture.names("out"), ["cell-001.json", "cell-002.json", "cell-003.json"]);
}

/// A command line that takes far longer than any test.
const LONG: &str = "split --memory 64g --samples 1000";

#[test]
fn a_time_limit_ends_its_cell_and_no_other() {
    let plan = format!(
        "version = 1\ntime-limit = '2s'\nscenarios = ['{LONG}', \
         'split --memory 1g --when enable --what split --samples 10 --walk batched --backing 2m']"
    );
    let fixture = Fixture::new(&plan);
    let began = Instant::now();
    let assert = fixture.plan(&["-o", "out", "--report", "json"]).assert().code(1);
    assert!(began.elapsed() < Duration::from_secs(60));
    let outcomes: Value = serde_json::from_slice(&assert.get_output().stdout).unwrap();
    assert_eq!(outcomes["cells"][0]["state"], "failed");
    assert!(outcomes["cells"][0]["reason"].as_str().unwrap().contains("within 2s"), "{outcomes}");
    assert_eq!(outcomes["cells"][1]["state"], "measured");
    assert_eq!(fixture.names("out"), ["cell-001.failed.json", "cell-002.json"]);
}

/// Returns the number of processes with these words in their command line.
fn processes_of(words: &str) -> usize {
    let lines = std::fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| {
        let line = std::fs::read(entry.path().join("cmdline")).ok()?;
        Some(String::from_utf8_lossy(&line).replace('\0', " "))
    });
    lines.filter(|line| line.contains(words)).count()
}

#[test]
fn ctrl_c_ends_the_child_too_and_keeps_what_is_done() {
    // No other test's processes have these options in their command lines.
    let long = format!("{LONG} --bbm 3 --walk every-entry");
    let plan = format!(
        "version = 1\nscenarios = ['split --memory 1g --when enable --what split --samples 10', \
         '{long}']"
    );
    for signals in [1, 2] {
        let fixture = Fixture::new(&plan);
        let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_slat-bench"))
            .current_dir(fixture.0.path())
            .args(["plan", "plan.toml", "-o", "out"])
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        while processes_of(&long) == 0 {
            std::thread::sleep(Duration::from_millis(20));
        }
        std::thread::sleep(Duration::from_millis(300));
        for _ in 0..signals {
            kill_process(Pid::from_child(&child), Signal::INT).unwrap();
            std::thread::sleep(Duration::from_millis(100));
        }
        assert_eq!(child.wait().unwrap().code(), Some(130));
        let began = Instant::now();
        while processes_of(&long) != 0 {
            assert!(began.elapsed() < Duration::from_secs(20), "a child outlives its parent");
            std::thread::sleep(Duration::from_millis(50));
        }
        assert_eq!(fixture.names("out"), ["cell-001.json"], "{signals} signals");
    }
}

#[test]
fn a_plan_that_cannot_be_is_refused_before_anything_runs() {
    let fixture = Fixture::new(&QUICK.replace("backing", "bcking"));
    let refused = |options: &[&str], words: &[&str]| {
        let mut assert = fixture.plan(options).assert().code(2).stdout("");
        for word in words {
            assert = assert.stderr(contains(*word));
        }
    };
    refused(&["-o", "out"], &["plan.toml", "--bcking", "slat-bench split"]);
    assert_eq!(fixture.names("."), ["plan.toml"]);
    std::fs::write(fixture.at("plan.toml"), QUICK).unwrap();
    refused(&["--cell", "5"], &["--cell 5", "4 cells"]);
    refused(&["--cell", "0/2"], &["from 1"]);
    refused(&["--cell", "3/2"], &["2/2"]);
    std::fs::write(fixture.at("file"), "").unwrap();
    refused(&["-o", "file"], &["cannot write there"]);
    std::fs::write(fixture.at("plan.toml"), "version = 1\nscenario = []").unwrap();
    refused(&["--list"], &["line 2", "scenario", "scenarios"]);
    bench().args(["plan", "none.toml"]).assert().code(2).stderr(contains("none.toml"));
}

/// Copies the reports of a folder, as those of another host on which everything took longer.
fn on_another_host(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().flatten() {
        let mut report = json(&entry.path());
        report["host"]["name"] = "other".into();
        for result in report["results"].as_array_mut().unwrap() {
            for sample in result["samples"].as_array_mut().unwrap() {
                *sample = (sample.as_f64().unwrap() * 3.0).into();
            }
        }
        std::fs::write(to.join(entry.file_name()), report.to_string()).unwrap();
    }
}

#[test]
fn reports_of_two_hosts_are_merged_into_two_and_one_table() {
    let fixture = Fixture::new(QUICK);
    fixture.plan(&["-o", "results/this"]).assert().success();
    on_another_host(&fixture.at("results/this"), &fixture.at("results/that"));
    let merge = |options: &[&str]| {
        let mut command = bench();
        command.current_dir(fixture.0.path()).args(["merge", "results"]).args(options);
        command
    };
    // The second merge skips the files that the first one wrote below the directory.
    for _ in 0..2 {
        let assert = merge(&["-o", "results/merged"]).assert().success().stderr("");
        assert.stdout(contains("Hosts").and(contains("other")).and(contains("split (engine)")));
    }
    let table = json(&fixture.at("results/merged/table.json"));
    assert_eq!(table["hosts"].as_array().unwrap().len(), 2);
    let of = |host: &str| -> Vec<&Value> {
        let rows = table["rows"].as_array().unwrap().iter();
        rows.filter(|row| row["scenario"] == "split" && row["host"] == host).collect()
    };
    let name = table["hosts"].as_array().unwrap().iter();
    let name = name.map(|host| host["name"].as_str().unwrap()).find(|name| *name != "other");
    let (this, that) = (of(name.unwrap()), of("other"));
    assert_eq!((this.len(), that.len()), (2, 2), "a row for each page size");
    for (this, that) in this.iter().zip(that) {
        assert_eq!(this["params"], that["params"]);
        // Two repeats of ten samples.
        assert_eq!(this["samples"], 20);
        let ratio = that["median"].as_f64().unwrap() / this["median"].as_f64().unwrap();
        assert!((ratio - 3.0).abs() < 1e-9, "{ratio}");
    }
    // A merged report can be read like any other.
    let report = json(&fixture.at("results/merged/other/results.json"));
    assert_eq!((&report["schema"], &report["host"]["name"]), (&1.into(), &"other".into()));
    let mut compare = bench();
    compare.current_dir(fixture.at("results/merged")).args(["compare", name.unwrap(), "other"]);
    compare.assert().success().stdout(contains("slower"));

    // A truncated file.
    let cell = fixture.at("results/that/cell-002.json");
    let text = std::fs::read(&cell).unwrap();
    std::fs::write(&cell, &text[..text.len() / 2]).unwrap();
    let assert = merge(&["-o", "out"]).assert().code(2).stdout("");
    assert.stderr(contains("that/cell-002.json").and(contains("--skip-bad")));
    assert!(!fixture.at("out").exists());
    let assert = merge(&["-o", "out", "--skip-bad", "--report", "json"]).assert().success();
    let table: Value = serde_json::from_slice(&assert.get_output().stdout).unwrap();
    assert!(table["bad"][0]["file"].as_str().unwrap().ends_with("cell-002.json"), "{table}");
}

#[test]
fn the_array_job_measures_its_share() {
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/slurm");
    let fixture = Fixture::new(QUICK);
    let job = |share: &[(&str, &str)]| {
        let mut command = Command::new("sh");
        command.current_dir(fixture.0.path()).arg(examples.join("job.sh"));
        command.env("SLAT", env!("CARGO_BIN_EXE_slat-bench")).envs(share.iter().copied());
        command.assert().success();
    };
    job(&[("SLURM_ARRAY_TASK_ID", "2"), ("SLURM_ARRAY_TASK_COUNT", "2")]);
    assert_eq!(fixture.names("results"), ["cell-002.json", "cell-004.json"]);
    job(&[]);
    assert_eq!(fixture.names("results").len(), 4);
}
