//! A run to be compared: read from a file, or made of several processes.

use crate::failure::bad_input;
use crate::host::keep_lasting;
use crate::param::is_prose;
use crate::record::{Kind, Measurement, SCHEMA};
use crate::stats::median;
use crate::trust::date;
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::path::Path;

/// A run, without the parts of its report that are not compared.
#[derive(Clone, Debug)]
pub struct Run {
    pub(super) host: Value,
    pub(super) tool: Value,
    pub(super) command: Vec<String>,
    pub(super) results: Vec<Measurement>,
    /// Whether its groups took turns, in their order, with those of the other run.
    pub(super) took_turns: bool,
    /// When it began, in seconds since 1970, if the report has it.
    pub(super) began: Option<u64>,
}

impl Run {
    /// Reads `results.json`, or the one in a directory.
    ///
    /// # Errors
    /// There is no such file, or it is no report, or a report of another schema.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let file = if path.is_dir() { path.join("results.json") } else { path.to_owned() };
        Self::of(read_report(&file)?, &file.display().to_string())
    }

    /// Takes a run from a report; `name` is the report's in errors.
    ///
    /// # Errors
    /// It is no report.
    pub fn of(mut report: Value, name: &str) -> anyhow::Result<Self> {
        // Guests of one boot of an emulated machine are alike to the last digit.
        let is_boot = !report["emulator"].is_null();
        let results: Result<Vec<Measurement>, _> = serde_json::from_value(report["results"].take());
        let command = serde_json::from_value(report["command"].take());
        let mut host = report["host"].take();
        keep_lasting(&mut host);
        Ok(Self {
            host,
            tool: report["tool"].take(),
            command: command.map_err(|error| bad_input(format!("{name}: command: {error}")))?,
            took_turns: false,
            began: report["trust"]["began"].as_u64(),
            results: results
                .map_err(|error| bad_input(format!("{name}: results: {error}")))?
                .into_iter()
                // Results that were made of others are not compared in addition to them.
                .filter(|m| !m.is_derived())
                // A course over time has no samples to compare.
                .filter(|m| m.kind != Kind::Course)
                // More of a rate is better; the time of the same work is compared instead.
                .filter(|m| !m.unit.is_rate())
                // The parts of single vCPUs are not compared in addition to the whole.
                .filter(|m| !m.is_vcpu())
                .map(|mut m| {
                    if is_boot && m.groups.is_empty() {
                        m.groups = vec![m.samples.len()];
                    }
                    m
                })
                .collect(),
        })
    }

    /// Returns the command line, and when it was run.
    pub fn said(&self) -> String {
        let date = self.began.map_or_else(String::new, |began| format!(", {}", date(began)));
        format!("`{}`{date}", self.command.join(" "))
    }

    /// Returns the measurements, without those that were made of others.
    pub fn results(&self) -> &[Measurement] {
        &self.results
    }

    /// Joins processes of one command line into one run, whose samples are the medians of the
    /// processes: two samples of one process have more in common than two processes have.
    pub fn of_processes(runs: Vec<Self>, words: &[String]) -> Self {
        let mut runs = runs.into_iter();
        let Some(mut all) = runs.next() else {
            let (host, tool, command, results) = (Value::Null, Value::Null, Vec::new(), Vec::new());
            return Self { host, tool, command, results, took_turns: true, began: None };
        };
        all.took_turns = true;
        all.command = words.to_vec();
        for m in &mut all.results {
            m.samples = median(&m.samples).into_iter().collect();
        }
        let none = BTreeSet::new();
        for run in runs {
            for m in &mut all.results {
                let same = run.results.iter().find(|other| key(m, &none) == key(other, &none));
                m.samples.extend(same.and_then(|other| median(&other.samples)));
            }
        }
        all.results.iter_mut().for_each(|m| m.groups = vec![1; m.samples.len()]);
        all
    }

    /// Returns the same run with all samples that depend on speed larger by `part`.
    pub fn slowed(mut self, part: f64) -> Self {
        for m in self.results.iter_mut().filter(|m| m.is_timed()) {
            m.samples.iter_mut().for_each(|sample| *sample *= 1.0 + part);
        }
        self
    }
}

/// Reads a report from a file.
///
/// # Errors
/// There is no such file, or it is no report, or a report of another schema. The text names the
/// file.
pub fn read_report(file: &Path) -> anyhow::Result<Value> {
    let refused = |why: String| {
        bad_input(format!("{}: {why}; give the results.json of a run", file.display()))
    };
    let text = std::fs::read(file).map_err(|error| refused(error.to_string()))?;
    parse_report(&text).map_err(refused)
}

/// Parses a report; the error says why the text is none.
///
/// # Errors
/// The text is no JSON, or of another schema.
pub fn parse_report(text: &[u8]) -> Result<Value, String> {
    let report: Value = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    match &report["schema"] {
        schema if *schema == SCHEMA => Ok(report),
        schema => Err(format!("its schema is {schema}, not {SCHEMA}")),
    }
}

/// Returns what two results of the same thing have in common.
pub(super) fn key<'m>(
    m: &'m Measurement,
    ignoring: &BTreeSet<String>,
) -> (&'m str, &'m str, &'m str, &'m str, Map<String, Value>) {
    let mut params = m.params.clone();
    params.retain(|name, _| !ignoring.contains(name) && !is_prose(name));
    (&m.scenario, &m.target, &m.variant, m.unit.name(), params)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::{DRIFT, compare};
    use crate::fake;

    #[test]
    fn more_of_a_rate_is_not_slower_whatever_is_counted() {
        let folder = tempfile::tempdir().unwrap();
        let read = |name: &str, scale: f64| {
            let mut report = fake::short_report();
            let one = report.results[0].clone();
            report.results = ["s", "ms/s", "MiB/s", "faults/s", "M/s"]
                .map(|unit| Measurement {
                    unit: unit.into(),
                    samples: (0..9).map(|i| scale * (1.0 + f64::from(i) / 1000.0)).collect(),
                    groups: Vec::new(),
                    ..one.clone()
                })
                .into();
            // More accesses in a second take less time each.
            for m in &mut report.results[..2] {
                m.samples.iter_mut().for_each(|sample| *sample = 1.0 / *sample);
            }
            let file = folder.path().join(name);
            std::fs::write(&file, serde_json::to_vec(&report).unwrap()).unwrap();
            Run::read(&file).unwrap()
        };
        let comparison = compare(&read("first", 1.0), &read("second", 1.5), DRIFT / 100.0);
        assert!(!comparison.slower() && comparison.judges(), "{comparison:?}");
        let units: BTreeSet<&str> = comparison.pairs.iter().map(|pair| pair.unit.name()).collect();
        assert_eq!(units, ["s", "ms/s"].into());
    }
}
