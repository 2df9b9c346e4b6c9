//! `cargo xtask bench`: the engine's operations against what was asked of each.

use crate::stages::slat_bench;
use crate::target;
use anyhow::{Context, bail};
use serde_json::Value;
use std::fs;

/// One threshold, and the ratios that were measured for it.
struct Asked {
    operation: String,
    memory: u64,
    unit: String,
    at_most: Option<f64>,
    samples: Vec<f64>,
}

/// Builds what users get, measures, and prints asked and reached. A threshold that is missed is no
/// failure: a benchmark is not a test.
pub fn run(arguments: &[String]) -> anyhow::Result<()> {
    let directory = target().join("engine-bench");
    let mut slat = slat_bench();
    slat.arg("engine").args(arguments).arg("--output").arg(&directory);
    slat.stdout(std::process::Stdio::null());
    let status = slat.status().context("cannot start slat-bench")?;
    if !status.success() {
        bail!("{slat:?} failed: {status}");
    }
    let text = fs::read_to_string(directory.join("results.json")).context("results.json")?;
    let report: Value = serde_json::from_str(&text).context("results.json is not JSON")?;
    print!("{}", table(&asked(&report)?));
    for skipped in report["skipped"].as_array().into_iter().flatten() {
        let text = |key: &str| skipped[key].as_str().unwrap_or("?").to_owned();
        println!("skipped: {}: {}", text("what"), text("reason"));
    }
    Ok(())
}

fn asked(report: &Value) -> anyhow::Result<Vec<Asked>> {
    let results = report["results"].as_array().context("no results")?;
    let asked = results.iter().filter(|result| result["scenario"] == "engine-asked");
    asked
        .map(|result| {
            let samples = result["samples"].as_array().context("no samples")?;
            Ok(Asked {
                operation: result["variant"].as_str().context("no name")?.to_owned(),
                memory: result["params"]["memory"].as_u64().context("no memory")?,
                unit: result["unit"].as_str().context("no unit")?.to_owned(),
                at_most: result["params"]["asked"].as_f64(),
                samples: samples.iter().filter_map(Value::as_f64).collect(),
            })
        })
        .collect()
}

fn table(all: &[Asked]) -> String {
    let widest = all.iter().map(|asked| asked.operation.chars().count()).max().unwrap_or(0);
    let mut text = String::new();
    let mut line = |cells: [&str; 5], verdict: &str| {
        let [operation, memory, asked, reached, range] = cells;
        text += &format!(
            "{operation:<widest$}  {memory:>6}  {asked:>8}  {reached:>9}  {range:>15}  {verdict}"
        );
        text.truncate(text.trim_end().len());
        text.push('\n');
    };
    line(["operation", "memory", "asked", "reached", "least to most"], "");
    let (mut met, mut of) = (0, 0);
    for asked in all {
        let mut sorted = asked.samples.clone();
        sorted.sort_by(f64::total_cmp);
        let (Some(least), Some(most), Some(median)) =
            (sorted.first(), sorted.last(), median(&sorted))
        else {
            continue;
        };
        let verdict = asked.at_most.map(|at_most| median <= at_most);
        of += u32::from(verdict.is_some());
        met += u32::from(verdict == Some(true));
        line(
            [
                &asked.operation,
                &format!("{} GiB", asked.memory >> 30),
                &asked.at_most.map_or_else(String::new, |most| format!("{most} {}", asked.unit)),
                &format!("{median:.3} {}", asked.unit),
                &format!("{least:.2} to {most:.2}"),
            ],
            verdict.map_or("", |met| if met { "met" } else { "MISSED" }),
        );
    }
    text + &format!("{met} of {of} met\n")
}

/// The middle of samples in ascending order.
fn median(sorted: &[f64]) -> Option<f64> {
    let (low, high) =
        (sorted.get(sorted.len().checked_sub(1)? / 2)?, sorted.get(sorted.len() / 2)?);
    Some((low + high) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_median_decides_whether_a_threshold_is_met() {
        let result = |samples: &[f64], asked: Value| {
            json!({
                "scenario": "engine-asked", "variant": "split", "unit": "x", "samples": samples,
                "params": { "memory": 8u64 << 30, "asked": asked },
            })
        };
        let other = json!({ "scenario": "engine" });
        let report = json!({ "results": [
            other, result(&[1.0, 1.2, 9.0], json!(1.3)), result(&[1.3, 1.4], json!(1.3)),
            result(&[2.0], Value::Null),
        ]});
        let text = table(&asked(&report).unwrap());
        let lines: Vec<_> = text.lines().collect();
        assert!(lines[1].ends_with("1.00 to 9.00  met"), "{text}");
        assert!(lines[2].contains("1.350 x") && lines[2].ends_with("MISSED"), "{text}");
        assert!(lines[3].ends_with("2.00 to 2.00"), "{text}");
        assert_eq!(lines[4], "1 of 2 met");
    }
}
