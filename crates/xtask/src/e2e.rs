//! Runs the `slat` command as a user does, on small sizes, and checks its files.

use crate::workspace::{output, programs};
use anyhow::{Context, ensure};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Runs the main job into `directory` and checks its results; returns what it had to skip.
pub fn run(directory: &Path) -> anyhow::Result<Vec<String>> {
    let _ = fs::remove_dir_all(directory);
    let mut slat = Command::new(programs()?.join("slat"));
    let said = output(slat.arg("--quick").arg("--output").arg(directory))?;
    let said = String::from_utf8(said.stdout)?;
    println!("{said}");
    for words in ["What it could cost", "split in the fault"] {
        ensure!(said.contains(words), "the main job did not say `{words}`");
    }
    let page = fs::read_to_string(directory.join("report.html")).context("report.html")?;
    ensure!(page.starts_with("<!DOCTYPE html>"), "report.html is not a page");
    let text = fs::read_to_string(directory.join("results.json")).context("results.json")?;
    let report = serde_json::from_str(&text).context("results.json is not JSON")?;
    check(&report)?;
    let skipped = report["skipped"].as_array().context("no list of what was skipped")?;
    Ok(skipped
        .iter()
        .map(|skipped| format!("{}: {}", text_of(&skipped["what"]), text_of(&skipped["reason"])))
        .collect())
}

/// Checks that a program that reads `results.json` finds all that is promised.
fn check(report: &Value) -> anyhow::Result<()> {
    ensure!(report["schema"] == 1, "the schema is {}, not 1", report["schema"]);
    for key in ["cpu", "kernel", "virtualisation", "kvm", "thp", "hugetlb"] {
        ensure!(!report["host"][key].is_null(), "the host has no {key}");
    }
    ensure!(report["command"][0] == "slat", "the command is {}", report["command"]);
    let results = report["results"].as_array().context("no results")?;
    for result in results {
        let samples = result["samples"].as_array().context("a result without samples")?;
        ensure!(!samples.is_empty(), "no sample in {result}");
        // Differences of two times may be negative because of noise: a guest's loss of pace, and
        // the time that one way takes beyond another.
        let of_difference = result["unit"] == "%" || text_of(&result["variant"]).contains("beyond");
        let least = if of_difference { f64::MIN } else { 0.0 };
        ensure!(
            samples.iter().all(|s| s.as_f64().is_some_and(|s| s >= least)),
            "bad sample in {result}"
        );
        let units = ["s", "ms/s", "x", "%", "rounds", "pages", "MiB", "MiB/s"];
        ensure!(units.iter().any(|unit| result["unit"] == *unit), "the unit of {result}");
    }
    let of = |scenario: &'static str, variant: &'static str| {
        results.iter().filter(move |r| r["scenario"] == scenario && r["variant"] == variant)
    };
    // Five ideas as proposed, and further work of the engine on four of them.
    for (kind, rows) in [("as proposed", 5), ("further", 4)] {
        ensure!(of("ideas", kind).count() == rows, "{kind}: {} ideas", of("ideas", kind).count());
    }
    for walk in ["every-entry", "bounded", "batched"] {
        // The split alone, and in a call.
        ensure!(of("split", walk).count() == 2, "{walk}: {} splits", of("split", walk).count());
        for split in of("split", walk) {
            ensure!(split["counts"]["entries_read"].is_u64(), "no count of slots in {split}");
        }
    }
    if report["host"]["kvm"]["device"] == "usable" {
        for figure in ["total", "downtime", "write-rate", "copy-rate"] {
            ensure!(of("migrate", figure).count() == 1, "no {figure} of a migration");
        }
        let says = report["verdict"]["says"].as_array().map_or(0, Vec::len);
        ensure!(says >= 3, "the verdict has {says} sentences");
        for phase in ["populate", "enable", "dirty", "get", "clear", "disable"] {
            ensure!(of("dirty-log", phase).count() > 0, "no {phase} of a guest, and KVM is usable");
        }
    }
    Ok(())
}

fn text_of(value: &Value) -> &str {
    value.as_str().unwrap_or("?")
}
