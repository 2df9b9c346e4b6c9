//! What a run produces: the schema of `results.json`, one type for every scenario.

use crate::host::Host;
use crate::stats::median;
use crate::unit::Unit;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

/// One variant of one scenario, with every sample that was taken of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Measurement {
    /// `split`, `limit`, `dirty-log`, ...
    pub scenario: String,
    /// What was measured: `engine`, `kvm`, `machine`.
    pub target: String,
    /// The way it was done, or the phase: `bounded`, `fill-plain`, `populate`, ...
    pub variant: String,
    /// Everything that has to be equal for two results to be compared.
    pub params: Map<String, Value>,
    /// Unit of `samples`.
    pub unit: Unit,
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
    /// Whether the samples are times, ratios of times, or hang on how fast things went.
    pub fn is_timed(&self) -> bool {
        self.unit.is_timed()
    }

    /// The median of each group. Reports from before groups were told have the number of guests
    /// among the parameters.
    pub fn group_medians(&self) -> Vec<f64> {
        let all = self.samples.len();
        let guests = self.params.get("runs").and_then(Value::as_u64).unwrap_or(0) as usize;
        let sizes = match guests {
            _ if self.groups.iter().sum::<usize>() == all => self.groups.clone(),
            0 => vec![1; all],
            guests if all.is_multiple_of(guests) => vec![all / guests; guests],
            _ => vec![all],
        };
        let mut rest = &self.samples[..];
        let medians = sizes.into_iter().filter_map(|size| {
            let (group, others) = rest.split_at(size);
            rest = others;
            median(group)
        });
        medians.collect()
    }

    /// Whether it was made of other results, which stand in the same report.
    pub fn is_made(&self) -> bool {
        self.scenario.ends_with("-asked") || ["replay", "ideas"].contains(&&*self.scenario)
    }
}

/// Something that could not be measured here, and why.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Skipped {
    /// What would have been measured.
    pub what: String,
    /// Why it was not, and what would change that.
    pub reason: String,
    /// Whether it was tried and failed, as opposed to left out.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub failed: bool,
}

/// The version of the schema of `results.json`. A change that a reader can stumble over counts it
/// up.
pub const SCHEMA: u32 = 1;

/// Everything about one run; `results.json` is this, serialised.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Whether Ctrl-C ended the run before it was complete.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub partial: bool,
    /// The version of this program.
    pub tool: Cow<'static, str>,
    /// Where it ran.
    pub host: Host,
    /// The command line that does it again.
    pub command: Vec<String>,
    /// What was measured, in the order it was measured in.
    pub results: Vec<Measurement>,
    /// What was not.
    pub skipped: Vec<Skipped>,
}

/// The counts of several samples: one number where they agree, first, least and most where not; of
/// times the median.
pub fn merged_counts(
    samples: impl Iterator<Item = BTreeMap<String, u64>>,
) -> BTreeMap<String, u64> {
    let samples: Vec<_> = samples.collect();
    let names: BTreeSet<&String> = samples.iter().flat_map(BTreeMap::keys).collect();
    let mut merged = BTreeMap::new();
    for name in names {
        // KVM's counters are given where they changed.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake;

    /// `UPDATE_SCHEMA=1 cargo test -p slat-lab` writes it.
    #[test]
    fn the_published_schema_is_that_of_the_types_and_a_report_fits_it() {
        let schema = serde_json::to_value(schemars::schema_for!(Report)).unwrap();
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/results.schema.json");
        let text = serde_json::to_string_pretty(&schema).unwrap() + "\n";
        if std::env::var_os("UPDATE_SCHEMA").is_some() {
            std::fs::write(file, &text).unwrap();
        }
        assert_eq!(std::fs::read_to_string(file).unwrap(), text, "UPDATE_SCHEMA=1 writes it anew");
        let validator = jsonschema::validator_for(&schema).unwrap();
        let mut report = serde_json::to_value(fake::report()).unwrap();
        validator.validate(&report).unwrap();
        report["results"][0]["samples"][0] = "fast".into();
        assert!(!validator.is_valid(&report));
    }
}
