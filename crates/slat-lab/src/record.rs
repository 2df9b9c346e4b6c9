//! The results of a run: the schema of `results.json`, with one type for all scenarios.

use crate::host::{Host, Maybe};
use crate::numbers::{several, three_digits};
use crate::stats::{median, median_precision};
use crate::trust::{Begin, Trust};
use crate::unit::Unit;
use crate::verdict::Verdict;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

/// What was measured, where it is this engine.
pub const ENGINE: &str = "engine";
/// What was measured, where it is a limit of the machine.
pub const MACHINE: &str = "machine";
/// What was measured, where it is a guest under the host's KVM.
pub const KVM: &str = "kvm";

/// What the samples of a measurement are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// What was measured.
    #[default]
    Measured,
    /// Values that were counted in buckets of at most an eighth of their width.
    Bucketed,
    /// Milliseconds of each second that a vCPU waited for a CPU.
    Waited,
    /// A course over time.
    Course,
    /// Ratios of other results in the same report, to be held against a threshold.
    Ratio,
    /// Made of other results in the same report, to be held against published figures.
    Published,
}

impl Kind {
    fn is_measured(&self) -> bool {
        *self == Self::Measured
    }
}

/// One variant of one scenario, with every sample that was taken of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Measurement {
    /// The name of the scenario.
    pub scenario: String,
    /// What was measured: `engine`, `kvm`, `machine`.
    pub target: String,
    /// The way it was done, or the phase.
    pub variant: String,
    /// Everything that has to be equal for two results to be compared.
    pub params: Map<String, Value>,
    /// Unit of `samples`.
    pub unit: Unit,
    /// What the samples are.
    #[serde(default, skip_serializing_if = "Kind::is_measured")]
    pub kind: Kind,
    /// Every sample, in the order it was taken.
    pub samples: Vec<f64>,
    /// How many samples, in their order, are of one guest or one process; absent if each is of its
    /// own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<usize>,
    /// Exact counts of one sample (the same in each, unless the scenario says otherwise).
    pub counts: BTreeMap<String, u64>,
}

impl Measurement {
    /// Creates a measurement without counts, whose samples no other measurement shares.
    pub fn new(
        scenario: impl Into<String>,
        target: impl Into<String>,
        variant: impl Into<String>,
        params: Map<String, Value>,
        unit: impl Into<Unit>,
        samples: Vec<f64>,
    ) -> Self {
        Self {
            scenario: scenario.into(),
            target: target.into(),
            variant: variant.into(),
            params,
            unit: unit.into(),
            kind: Kind::Measured,
            samples,
            groups: Vec::new(),
            counts: BTreeMap::new(),
        }
    }

    /// Returns the same of another kind.
    pub fn of_kind(self, kind: Kind) -> Self {
        Self { kind, ..self }
    }

    /// Returns whether the samples are times, ratios of times, or depend on speed.
    pub fn is_timed(&self) -> bool {
        self.unit.is_timed()
    }

    /// Returns the relative width of a sample's bucket, or 0.
    pub fn coarseness(&self) -> f64 {
        if self.kind == Kind::Bucketed { 0.125 } else { 0.0 }
    }

    /// Returns the median of each group; each sample is a group of its own where there are none.
    pub fn group_medians(&self) -> Vec<f64> {
        self.group_values(median)
    }

    /// Returns one value of each group.
    pub fn group_values(&self, value: impl Fn(&[f64]) -> Option<f64>) -> Vec<f64> {
        self.by_group().filter_map(value).collect()
    }

    /// Returns the samples of each group; each sample is a group of its own where there are none.
    pub fn by_group(&self) -> impl Iterator<Item = &[f64]> {
        let all = self.samples.len();
        let sizes = match self.groups.iter().sum::<usize>() == all {
            true => self.groups.clone(),
            false => vec![1; all],
        };
        let mut rest = &self.samples[..];
        sizes.into_iter().map(move |size| rest.split_off(..size).unwrap_or_default())
    }

    /// Returns whether it was made of other results in the same report, to be held against what
    /// was asked for or published.
    pub fn is_derived(&self) -> bool {
        matches!(self.kind, Kind::Ratio | Kind::Published)
    }

    /// Returns whether it is the part of a single vCPU.
    pub fn is_vcpu(&self) -> bool {
        self.params.contains_key("vcpu")
    }
}

/// Something that could not be measured here, and why.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Omission {
    /// What would have been measured.
    pub what: String,
    /// Why it was not, and what would change that.
    pub reason: String,
    /// Whether it was tried and failed, as opposed to left out.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub failed: bool,
}

/// How exact an answer is that runs were repeated for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Repetition {
    /// The guest that was run.
    pub what: String,
    /// The answer: the variant of its results, all rounds of a run together.
    pub variant: String,
    /// Runs that counted.
    pub runs: usize,
    /// Half of where its median lies, nineteen times of twenty, in per cent of it.
    pub percent: Maybe<f64>,
    /// At most this much was asked for.
    pub asked: f64,
    /// Whether it was reached, or else time or the most runs came first.
    pub reached: bool,
}

impl Repetition {
    /// Creates the answer of several runs.
    pub fn new(what: String, variant: String, answers: &[f64], asked: f64) -> Self {
        let percent = median_precision(answers).map(|part| part * 100.0);
        let reached = percent.is_some_and(|percent| percent <= asked);
        Self { what, variant, runs: answers.len(), percent: Maybe(percent), asked, reached }
    }

    /// Returns the same as a line of text.
    pub fn line(&self) -> String {
        let Self { what, variant, runs, asked, .. } = self;
        let runs = several(*runs, "run");
        let found = match self.percent.0 {
            Some(percent) => format!("±{} % after {runs}", three_digits(percent)),
            None => format!("no interval after {runs}"),
        };
        let met = if self.reached { "narrow enough" } else { "not reached" };
        format!("{what}: {variant} {found}: {met} (±{asked} % asked)")
    }
}

/// The version of the schema of `results.json`. A change that could break a reader increments it.
pub const SCHEMA: u32 = 1;

/// Everything about one run; `results.json` is this, serialised.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Whether Ctrl-C ended the run before it was complete.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub partial: bool,
    /// The version of this program.
    pub tool: Cow<'static, str>,
    /// What went on beside the run.
    pub trust: Trust,
    /// What its results answer, in plain words.
    #[serde(default, skip_serializing_if = "Verdict::is_empty")]
    pub verdict: Verdict,
    /// Where it ran.
    pub host: Host,
    /// The command line that does it again.
    pub command: Vec<String>,
    /// What was measured, in the order it was measured in.
    pub results: Vec<Measurement>,
    /// What was not.
    pub skipped: Vec<Omission>,
    /// How exact the answers are that runs were repeated for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub repeated: Vec<Repetition>,
}

impl Report {
    /// Returns whether a disturbance of the run exceeded its bound.
    pub fn is_noisy(&self) -> bool {
        !self.trust.trusted
    }
}

/// Merges the counts of several samples: one number if they agree; otherwise first, least and most;
/// for times the median.
pub fn merged_counts(
    samples: impl Iterator<Item = BTreeMap<String, u64>>,
) -> BTreeMap<String, u64> {
    let samples: Vec<_> = samples.collect();
    let names: BTreeSet<&String> = samples.iter().flat_map(BTreeMap::keys).collect();
    let mut merged = BTreeMap::new();
    for name in names {
        // KVM's counters are given only if they changed.
        let counts = || samples.iter().map(|sample| sample.get(name).copied().unwrap_or(0));
        let (Some(first), Some(min), Some(max)) = (counts().next(), counts().min(), counts().max())
        else {
            continue;
        };
        if name.ends_with("_ns") {
            let all: Vec<f64> = counts().map(|count| count as f64).collect();
            merged.insert(name.clone(), median(&all).unwrap_or(0.0) as u64);
        } else if min == max {
            merged.insert(name.clone(), first);
        } else {
            let three = [("first", first), ("min", min), ("max", max)];
            merged.extend(three.map(|(which, count)| (format!("{name}_{which}"), count)));
        }
    }
    merged
}

/// Returns what disturbed the run that gave these results.
pub fn trust(begin: &Begin, results: &[Measurement]) -> Trust {
    begin.end(vcpus(results), waited(results))
}

/// Returns the longest wait of vCPUs in a phase, in milliseconds of a second.
fn waited(results: &[Measurement]) -> Option<f64> {
    let waited = results.iter().filter(|m| m.kind == Kind::Waited);
    waited.filter_map(|m| crate::stats::median(&m.samples)).reduce(f64::max)
}

fn vcpus(results: &[Measurement]) -> usize {
    let vcpus = results.iter().filter(|m| m.target == KVM);
    let vcpus = vcpus.filter_map(|m| m.params.get("vcpus")?.as_u64());
    vcpus.max().unwrap_or(0) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake;

    #[test]
    fn an_answer_states_its_precision_and_whether_it_suffices() {
        let of = |answers: &[f64]| Repetition::new("a".into(), "dirty".into(), answers, 10.0);
        let narrow = of(&[1.0, 1.0, 1.0, 1.0, 1.0, 1.1]);
        assert!(narrow.reached);
        assert_eq!(narrow.line(), "a: dirty ±5.00 % after 6 runs: narrow enough (±10 % asked)");
        let wide = of(&[1.0, 1.0, 1.0, 1.0, 1.0, 1.4]).line();
        assert_eq!(wide, "a: dirty ±20.0 % after 6 runs: not reached (±10 % asked)");
        assert!(of(&[1.0]).line().contains("no interval after 1 run: not reached"));
    }

    #[test]
    fn the_schema_fits_a_report_and_no_sample_that_is_text() {
        let schema = schemars::schema_for!(Report).into();
        let mut report = serde_json::to_value(fake::report()).unwrap();
        assert!(fake::fits(&schema, &report));
        report["results"][0]["samples"][0] = "fast".into();
        assert!(!fake::fits(&schema, &report));
    }
}
