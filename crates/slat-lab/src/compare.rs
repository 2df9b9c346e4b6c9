//! Two runs held against each other: which results are of the same thing, whether they differ, and
//! what else differs between the runs.

pub mod groups;
pub mod ranks;

use crate::failure::bad_input;
use crate::host::keep_lasting;
use crate::record::Measurement;
use crate::record::SCHEMA;
use crate::stats::{Summary, median};
use crate::unit::Unit;
use anyhow::Context;
use serde::Serialize;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// With fewer samples no order of them is rare enough to say anything.
pub const LEAST: usize = 5;

/// How seldom a difference may be shown where there is none, of a pair. Not of all pairs together:
/// with the few samples that a run has, a whole report could then never show any.
const LEVEL: f64 = 0.01;

/// A run, as its file has it.
#[derive(Clone, Debug)]
pub struct Run {
    host: Value,
    tool: Value,
    command: Vec<String>,
    results: Vec<Measurement>,
}

impl Run {
    /// Reads `results.json`, or the one in a directory.
    ///
    /// # Errors
    /// There is none, it is no report, or one of another schema.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let file = if path.is_dir() { path.join("results.json") } else { path.to_owned() };
        let name = file.display().to_string();
        let mut report = read_report(&file)?;
        let results: Result<Vec<Measurement>, _> = serde_json::from_value(report["results"].take());
        let command = serde_json::from_value(report["command"].take());
        let mut host = report["host"].take();
        keep_lasting(&mut host);
        Ok(Self {
            host,
            tool: report["tool"].take(),
            command: command.with_context(|| format!("{name}: command"))?,
            results: results
                .with_context(|| format!("{name}: results"))?
                .into_iter()
                // What was made of other results is not compared beside them.
                .filter(|m| !m.scenario.ends_with("-asked") && m.scenario != "replay")
                // Nor what is a course over time, and no sample beside others.
                .filter(|m| !m.variant.starts_with("pace") && !m.variant.starts_with("pass"))
                // Nor a rate, of which more is better: its time stands beside it.
                .filter(|m| m.unit != Unit::RATE)
                .collect(),
        })
    }

    /// What was measured, without what was made of other results.
    pub fn results(&self) -> &[Measurement] {
        &self.results
    }

    /// Processes of one command line as one run, whose samples are each process's median: two
    /// samples of one process have more in common than two processes.
    pub fn of_processes(runs: Vec<Self>, words: &[String]) -> Self {
        let mut runs = runs.into_iter();
        let Some(mut all) = runs.next() else {
            let (host, tool, command, results) = (Value::Null, Value::Null, Vec::new(), Vec::new());
            return Self { host, tool, command, results };
        };
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
        all
    }
}

/// A report as its file has it.
///
/// # Errors
/// There is none, it is no report, or one of another schema; the text names the file.
pub fn read_report(file: &Path) -> anyhow::Result<Value> {
    let refused = |why: String| {
        bad_input(format!("{}: {why}; give the results.json of a run", file.display()))
    };
    let text = std::fs::read(file).map_err(|error| refused(error.to_string()))?;
    parse_report(&text).map_err(refused)
}

/// The text of a report, or why it is none.
///
/// # Errors
/// It is no JSON, or of another schema.
pub fn parse_report(text: &[u8]) -> Result<Value, String> {
    let report: Value = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    match &report["schema"] {
        schema if *schema == SCHEMA => Ok(report),
        schema => Err(format!("its schema is {schema}, not {SCHEMA}")),
    }
}

/// What is said of a pair of results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// The second takes less, by more than the threshold.
    Faster,
    /// The second takes more, by more than the threshold.
    Slower,
    /// Neither was shown.
    NoDifferenceShown,
    /// Samples are too few, or the machines differ.
    NotComparable,
}

/// Results of one thing in both runs.
#[derive(Clone, Debug, Serialize)]
pub struct Pair {
    /// Scenario, target and variant.
    pub what: [String; 3],
    /// Parameters in common.
    pub params: Map<String, Value>,
    /// Unit of the samples.
    pub unit: Unit,
    /// Median of each, and how many samples there are.
    pub medians: [f64; 2],
    /// Samples of each.
    pub samples: [usize; 2],
    /// Half the interquartile range by the median, of each.
    pub spreads: [f64; 2],
    /// The second median by the first; no number if both are 0.
    pub ratio: f64,
    /// Where that ratio lies, nineteen times of twenty.
    pub interval: Option<(f64, f64)>,
    /// The probability of such ranks if nothing differed.
    pub p: f64,
    /// What is said of it.
    pub verdict: Verdict,
    /// Counts that differ: both values, if both runs have it.
    pub counts: BTreeMap<String, [Option<u64>; 2]>,
    /// Whether both runs counted something.
    #[serde(skip)]
    pub counted: bool,
}

/// A comparison.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// The least change that counts, as a part of one.
    pub threshold: f64,
    /// What of the machine differs: times cannot be compared then, counts can.
    pub machines_differ: Vec<[String; 3]>,
    /// What else differs between the runs: name, first, second.
    pub variables: Vec<[String; 3]>,
    /// Results of both.
    pub pairs: Vec<Pair>,
    /// Results that only one of the runs has: of the first, of the second.
    pub alone: [usize; 2],
}

/// What of the host is the machine itself.
const MACHINE: [&str; 6] = [
    "/cpu/model",
    "/cpu/architecture",
    "/cpu/usable",
    "/memory/total",
    "/virtualisation/hypervisor",
    "/virtualisation/product",
];

/// Compares two runs.
pub fn compare(first: &Run, second: &Run, threshold: f64) -> Comparison {
    let machines_differ: Vec<[String; 3]> = MACHINE
        .iter()
        .filter_map(|path| {
            let (a, b) = (first.host.pointer(path), second.host.pointer(path));
            // Kernels keep different amounts for themselves.
            let close = *path == "/memory/total"
                && a.and_then(Value::as_f64)
                    .zip(b.and_then(Value::as_f64))
                    .is_some_and(|(a, b)| (a - b).abs() <= a.max(b) * 0.02);
            (a != b && !close).then(|| [path[1..].replace('/', " "), shown(a), shown(b)])
        })
        .collect();
    let mut variables = host_variables(first, second);
    let common = |run: &Run| constants(&run.results);
    let (a, b) = (common(first), common(second));
    let differing: BTreeSet<String> = a
        .keys()
        .filter(|name| b.get(*name).is_some_and(|value| *value != a[*name]))
        .cloned()
        .collect();
    variables.extend(
        differing
            .iter()
            .map(|name| [format!("parameter {name}"), shown(a.get(name)), shown(b.get(name))]),
    );
    let mut left: Vec<&Measurement> = second.results.iter().collect();
    let mut pairs = Vec::new();
    let mut alone = 0;
    for one in &first.results {
        let same = |other: &&Measurement| key(one, &differing) == key(other, &differing);
        match left.iter().position(same) {
            Some(place) => pairs.push(pair(one, left.swap_remove(place), &differing)),
            None => alone += 1,
        }
    }
    if machines_differ.is_empty() {
        pairs.iter_mut().for_each(|pair| pair.verdict = judged(pair, threshold));
    }
    // What changed most stands first, what has no verdict last; else as it was measured.
    pairs.sort_by(|one, other| rank(one).total_cmp(&rank(other)));
    Comparison { threshold, machines_differ, variables, pairs, alone: [alone, left.len()] }
}

impl Comparison {
    /// Whether something of both runs could be held against each other: times, or counts.
    pub fn compares(&self) -> bool {
        let judged = |pair: &Pair| pair.verdict != Verdict::NotComparable || pair.counted;
        self.pairs.iter().any(judged)
    }
}

/// The place of a pair: the less, the sooner it is to be seen.
fn rank(pair: &Pair) -> f64 {
    let change = pair.ratio.ln().abs();
    match pair.verdict {
        Verdict::Faster | Verdict::Slower if change.is_nan() => f64::NEG_INFINITY,
        Verdict::Faster | Verdict::Slower => -change,
        Verdict::NoDifferenceShown => 1.0,
        Verdict::NotComparable => 2.0,
    }
}

/// What results must have in common to be of one thing.
fn key<'m>(
    m: &'m Measurement,
    ignoring: &BTreeSet<String>,
) -> (&'m str, &'m str, &'m str, &'m str, Map<String, Value>) {
    let mut params = m.params.clone();
    params.retain(|name, _| !ignoring.contains(name) && name != "note");
    (&m.scenario, &m.target, &m.variant, m.unit.name(), params)
}

/// Parameters that all results of a run that have them agree on: what its command line chose.
fn constants(results: &[Measurement]) -> BTreeMap<String, Value> {
    let mut values: BTreeMap<String, Option<Value>> = BTreeMap::new();
    for (name, value) in results.iter().flat_map(|m| &m.params) {
        values
            .entry(name.clone())
            .and_modify(|known| {
                if known.as_ref() != Some(value) {
                    *known = None;
                }
            })
            .or_insert_with(|| Some(value.clone()));
    }
    values.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
}

/// Kernel, parameters of its modules, choices of the host, the tool, the command line.
fn host_variables(first: &Run, second: &Run) -> Vec<[String; 3]> {
    let mut found = Vec::new();
    let mut say = |name: &str, a: Option<&Value>, b: Option<&Value>| {
        if a != b {
            found.push([name.to_owned(), shown(a), shown(b)]);
        }
    };
    say("tool", Some(&first.tool), Some(&second.tool));
    for path in [
        "/name",
        "/kernel/release",
        "/kernel/version",
        "/kernel/command_line",
        "/cpu/microcode",
        "/cpu/governor",
        "/cpu/smt",
        "/cpu/turbo",
        "/kvm/device",
        "/thp",
        "/hugetlb",
        "/aslr",
        "/numa_nodes",
    ] {
        let (a, b) = (first.host.pointer(path), second.host.pointer(path));
        // What a report older than the field does not tell is no difference.
        if a.is_some() && b.is_some() {
            say(&path[1..].replace(['/', '_'], " "), a, b);
        }
    }
    let none = Map::new();
    let map = |value: Option<&Value>| value.and_then(Value::as_object).unwrap_or(&none).clone();
    let of = |run: &Run, path: &str| map(run.host.pointer(path));
    let both = |a: &Map<String, Value>, b: &Map<String, Value>| -> BTreeSet<String> {
        a.keys().chain(b.keys()).cloned().collect()
    };
    let (a, b) = (of(first, "/cpu/mitigations"), of(second, "/cpu/mitigations"));
    for name in both(&a, &b).into_iter().filter(|_| !a.is_empty() && !b.is_empty()) {
        say(&format!("vulnerability {}", name.replace('_', " ")), a.get(&name), b.get(&name));
    }
    let (a, b) = (of(first, "/kvm/parameters"), of(second, "/kvm/parameters"));
    for module in both(&a, &b) {
        let (a, b) = (map(a.get(&module)), map(b.get(&module)));
        for name in both(&a, &b) {
            say(&format!("{module}.{name}"), a.get(&name), b.get(&name));
        }
    }
    if first.command != second.command {
        found.push(["command".to_owned(), first.command.join(" "), second.command.join(" ")]);
    }
    found
}

fn shown(value: Option<&Value>) -> String {
    match value {
        None | Some(Value::Null) => "–".to_owned(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    }
}

fn pair(a: &Measurement, b: &Measurement, ignoring: &BTreeSet<String>) -> Pair {
    let (one, two) = (Summary::of(&a.samples), Summary::of(&b.samples));
    let median = |summary: Option<Summary>| summary.map_or(f64::NAN, |summary| summary.median);
    let spread =
        |summary: Option<Summary>| summary.map_or(0.0, |summary| summary.relative_spread());
    let (_, _, _, _, params) = key(a, ignoring);
    let names: BTreeSet<&String> = a.counts.keys().chain(b.counts.keys()).collect();
    let counts = names.into_iter().filter_map(|name| {
        let both = [a.counts.get(name).copied(), b.counts.get(name).copied()];
        // Times among them are medians, which never agree.
        (both[0] != both[1] && !name.ends_with("_ns")).then(|| (name.clone(), both))
    });
    Pair {
        what: [a.scenario.clone(), a.target.clone(), a.variant.clone()],
        params,
        unit: a.unit.clone(),
        medians: [median(one), median(two)],
        samples: [a.samples.len(), b.samples.len()],
        spreads: [spread(one), spread(two)],
        ratio: median(two) / median(one),
        interval: ranks::ratio_interval(&a.samples, &b.samples),
        p: ranks::mann_whitney(&a.samples, &b.samples),
        verdict: Verdict::NotComparable,
        counts: counts.collect(),
        counted: a.counts.keys().any(|name| b.counts.contains_key(name)),
    }
}

/// What is said of a pair of one machine's.
fn judged(pair: &Pair, threshold: f64) -> Verdict {
    if pair.samples.iter().any(|samples| *samples < LEAST) {
        return Verdict::NotComparable;
    }
    // What can be 0 or less, as a stall or a loss can, has no ratio: any change counts.
    let change = match pair.medians {
        [a, b] if a <= 0.0 && b > a => f64::INFINITY,
        [a, b] if a <= 0.0 && b < a => f64::NEG_INFINITY,
        [a, b] if a <= 0.0 && a == b => 0.0,
        _ => pair.ratio - 1.0,
    };
    match change {
        _ if pair.p > LEVEL => Verdict::NoDifferenceShown,
        change if change > threshold => Verdict::Slower,
        change if change < -threshold => Verdict::Faster,
        _ => Verdict::NoDifferenceShown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn run(cpu: &str, results: &[(&str, Value, Vec<f64>)]) -> Run {
        let results = results.iter().map(|(variant, params, samples)| Measurement {
            scenario: "split".to_owned(),
            target: "engine".to_owned(),
            variant: (*variant).to_owned(),
            params: params.as_object().unwrap().clone(),
            unit: Unit::SECONDS,
            samples: samples.clone(),
            counts: [("slots_read".to_owned(), samples.len() as u64)].into(),
        });
        let host = json!({
            "cpu": { "model": cpu }, "kernel": { "release": cpu.len() },
            "kvm": { "parameters": { "kvm": { "eager": "Y" } } },
        });
        Run {
            host,
            tool: json!("0.1.0"),
            command: vec![cpu.to_owned()],
            results: results.collect(),
        }
    }

    fn around(middle: f64) -> Vec<f64> {
        (0..12).map(|i| middle * (1.0 + f64::from(i) / 1000.0)).collect()
    }

    #[test]
    fn verdicts_need_ranks_that_differ_and_a_change_that_matters() {
        let of = |a: f64, b: f64| {
            let one = |middle| run("cpu", &[("x", json!({}), around(middle))]);
            compare(&one(a), &one(b), 0.05).pairs[0].verdict
        };
        assert_eq!(of(1.0, 1.5), Verdict::Slower);
        assert_eq!(of(1.0, 0.5), Verdict::Faster);
        assert_eq!(of(1.0, 1.0), Verdict::NoDifferenceShown);
        // It differs, and does not matter.
        assert_eq!(of(1.0, 1.03), Verdict::NoDifferenceShown);
        let few = |middle| run("cpu", &[("x", json!({}), vec![middle; 4])]);
        assert_eq!(compare(&few(1.0), &few(9.0), 0.05).pairs[0].verdict, Verdict::NotComparable);
    }

    #[test]
    fn what_changed_most_stands_first_and_what_has_no_verdict_last() {
        let all = |samples: [Vec<f64>; 5]| {
            let names = ["same", "few", "faster", "zero", "slower"];
            let rows = names.into_iter().zip(samples).map(|(name, it)| (name, json!({}), it));
            run("cpu", &rows.collect::<Vec<_>>())
        };
        let few = vec![1.0; 2];
        let one = all([around(1.0), few.clone(), around(1.0), vec![0.0; 12], around(1.0)]);
        let two = all([around(1.0), few, around(0.8), vec![0.0; 12], around(2.0)]);
        let comparison = compare(&one, &two, 0.05);
        let names: Vec<&str> = comparison.pairs.iter().map(|pair| &*pair.what[2]).collect();
        assert_eq!(names, ["slower", "faster", "same", "zero", "few"]);
        assert!(comparison.pairs[3].ratio.is_nan(), "nothing by nothing");
    }

    #[test]
    fn runs_without_a_result_in_common_or_with_too_few_samples_compare_nothing() {
        let of = |name: &str, n: usize| run("cpu", &[(name, json!({}), around(1.0)[..n].to_vec())]);
        assert!(compare(&of("x", 12), &of("x", 12), 0.05).compares());
        assert!(!compare(&of("x", 12), &of("y", 12), 0.05).compares());
        // Counts are compared whatever the samples are.
        assert!(compare(&of("x", 2), &of("x", 2), 0.05).compares());
        let mut bare = of("x", 2);
        bare.results[0].counts.clear();
        assert!(!compare(&bare, &of("x", 2), 0.05).compares());
    }

    #[test]
    fn the_machine_must_be_the_same_and_counts_are_compared_all_the_same() {
        let of = |cpu: &str, n: usize| run(cpu, &[("x", json!({}), around(1.0)[..n].to_vec())]);
        let comparison = compare(&of("one", 12), &of("three", 10), 0.05);
        assert_eq!(comparison.machines_differ, [["cpu model", "one", "three"].map(str::to_owned)]);
        assert_eq!(comparison.pairs[0].verdict, Verdict::NotComparable);
        assert_eq!(comparison.pairs[0].counts["slots_read"], [Some(12), Some(10)]);
        let names: Vec<&str> = comparison.variables.iter().map(|v| &*v[0]).collect();
        assert_eq!(names, ["kernel release", "command"]);
    }

    #[test]
    fn what_the_kernel_was_booted_with_and_mitigates_is_told_unless_a_report_is_older() {
        let of = |kernel: Value, mitigations: Value| Run {
            host: json!({ "kernel": kernel, "cpu": { "mitigations": mitigations } }),
            ..run("cpu", &[("x", json!({}), around(1.0))])
        };
        let one = of(json!({ "command_line": "ro" }), json!({ "mds": "Vulnerable" }));
        let two = of(json!({ "command_line": "rw" }), json!({ "mds": "Not affected" }));
        let names = |a: &Run, b: &Run| {
            let variables = compare(a, b, 0.05).variables.into_iter();
            variables.map(|[name, ..]| name).collect::<Vec<_>>()
        };
        assert_eq!(names(&one, &two), ["kernel command line", "vulnerability mds"]);
        assert!(names(&one, &of(json!({}), Value::Null)).is_empty());
    }

    #[test]
    fn a_parameter_that_a_whole_run_has_otherwise_is_a_variable() {
        let of = |backing: &str, other: &str| {
            let params = |when: &str| json!({ "backing": backing, "when": when });
            run(
                "cpu",
                &[
                    ("x", params("a"), around(1.0)),
                    ("x", params("b"), around(2.0)),
                    (other, json!({}), around(1.0)),
                ],
            )
        };
        let comparison = compare(&of("4k", "y"), &of("2m", "z"), 0.05);
        assert_eq!(comparison.variables[0], ["parameter backing", "4k", "2m"].map(str::to_owned));
        assert_eq!((comparison.pairs.len(), comparison.alone), (2, [1, 1]));
        assert_eq!(comparison.pairs[1].params["when"], "b");
        assert!(comparison.pairs.iter().all(|pair| pair.verdict == Verdict::NoDifferenceShown));
    }
}
