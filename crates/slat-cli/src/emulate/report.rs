//! A report from an emulated machine, which keeps counts and leaves out times.

use crate::cli::EmulateArgs;
use anyhow::ensure;
use serde::Serialize;
use serde_json::Value;
use slat_kernel::vm::Architecture;
use slat_lab::numbers::several;
use slat_lab::record::SCHEMA;
use slat_lab::record::{Measurement, Omission};
use slat_lab::unit::Unit;
use std::collections::{BTreeMap, BTreeSet};

/// The emulator of the machine, which `results.json` has under `emulator`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Emulator {
    /// Name and version of QEMU.
    pub program: String,
    /// The architecture of the machine.
    pub architecture: String,
    /// The kernel as it was asked for.
    pub kernel: String,
    /// Whether the report has instructions in place of times.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub counts_instructions: bool,
}

impl Emulator {
    /// Describes the emulator of a machine.
    pub fn new(arch: Architecture, args: &EmulateArgs, program: String) -> Self {
        Self {
            program,
            architecture: arch.to_string(),
            kernel: args.named(),
            counts_instructions: args.count_instructions,
        }
    }
}

/// Returns whether a count depends on time: it is a time, or the number of accesses that took long.
fn hangs_on_time(name: &str) -> bool {
    name.ends_with("_ns") || name.split('_').next() == Some("stalls")
}

/// Converts times to instructions; the machine's clock counts one instruction as a nanosecond.
/// Rates and ratios of times are not converted.
fn as_instructions(m: &mut Measurement) {
    let each = match m.unit.name() {
        "s" => 1e9,
        "ns" => 1.0,
        _ => return,
    };
    // Stalls are measured by the guest's own clock, which ticks only every 16 ns.
    if m.variant.contains("stall") {
        return;
    }
    m.unit = Unit::INSTRUCTIONS;
    m.samples.iter_mut().for_each(|sample| *sample = (*sample * each).round());
}

/// Joins the counts of boots: a count that is not the same in all has its least and its most.
fn joined(boots: &[BTreeMap<String, u64>]) -> BTreeMap<String, u64> {
    // Guests of one boot that differ have both already.
    fn base<'a>(of: &BTreeMap<String, u64>, name: &'a str) -> &'a str {
        let ends = ["_first", "_min", "_max"];
        let base = ends.iter().find_map(|end| name.strip_suffix(end));
        base.filter(|base| of.contains_key(&format!("{base}_min"))).unwrap_or(name)
    }
    let names = boots.iter().flat_map(|of| of.keys().map(|name| base(of, name)));
    let mut all = BTreeMap::new();
    for name in names.collect::<BTreeSet<_>>() {
        let end = |of: &BTreeMap<String, u64>, end: &str| {
            of.get(name).or_else(|| of.get(&format!("{name}{end}"))).copied()
        };
        let least = boots.iter().filter_map(|of| end(of, "_min")).min().unwrap_or(0);
        let most = boots.iter().filter_map(|of| end(of, "_max")).max().unwrap_or(0);
        if least == most {
            all.insert(name.to_owned(), least);
        } else {
            all.insert(format!("{name}_min"), least);
            all.insert(format!("{name}_max"), most);
        }
    }
    all
}

/// A report from an emulated machine.
#[derive(Clone, Debug)]
pub struct EmulatedReport {
    /// The report as JSON.
    value: Value,
    /// The results of the report.
    pub results: Vec<Measurement>,
    /// What the report leaves out, with reasons.
    pub skipped: Vec<Omission>,
}

impl EmulatedReport {
    /// Reads a report, and removes its times, or converts them where the clock counts instructions.
    ///
    /// # Errors
    /// Returns an error if the text is not a report of this schema.
    pub fn read(text: &str, emulator: Emulator) -> anyhow::Result<Self> {
        let mut value: Value = serde_json::from_str(text)?;
        ensure!(value["schema"] == SCHEMA, "its schema is {}, not {SCHEMA}", value["schema"]);
        let mut results: Vec<Measurement> = serde_json::from_value(value["results"].take())?;
        let mut skipped: Vec<Omission> = serde_json::from_value(value["skipped"].take())?;
        if emulator.counts_instructions {
            results.iter_mut().for_each(as_instructions);
        }
        let timed = results.iter().filter(|m| m.is_timed()).count();
        for m in results.iter_mut().filter(|m| m.is_timed()) {
            m.samples.clear();
        }
        // Some counts are times as well.
        results.iter_mut().for_each(|m| m.counts.retain(|name, _| !hangs_on_time(name)));
        results.retain(|m| !m.samples.is_empty() || !m.counts.is_empty());
        if emulator.counts_instructions {
            skipped.push(Omission {
                what: "cycles".to_owned(),
                reason: "an emulator counts instructions: a cache miss, a barrier and an \
                         invalidation of a TLB count one, and caches are not there"
                    .to_owned(),
                failed: false,
            });
        } else if timed > 0 {
            skipped.push(Omission {
                what: "emulator".to_owned(),
                reason: format!(
                    "{} interprets every instruction, so times, and ratios of them, say nothing of \
                     any CPU: they have been left out of {timed} results; counts are exact",
                    emulator.program
                ),
                failed: false,
            });
        }
        value["results"] = serde_json::to_value(&results)?;
        value["skipped"] = serde_json::to_value(&skipped)?;
        // `repeated` has the precision of times, which means nothing either.
        value.as_object_mut().map(|report| report.remove("repeated"));
        value["emulator"] = serde_json::to_value(emulator)?;
        Ok(Self { value, results, skipped })
    }

    /// Adds the counts whose names start with `begin` from the same results of another report.
    ///
    /// # Errors
    /// None in practice, because the value was read from JSON.
    pub fn add(&mut self, other: &Self, begin: &str) -> serde_json::Result<()> {
        for m in &mut self.results {
            let same = |other: &&Measurement| {
                let (params, of) = (&m.params, &other.params);
                (&m.scenario, &m.variant) == (&other.scenario, &other.variant)
                    && params.get("vcpu") == of.get("vcpu")
                    && params.iter().all(|(name, value)| of.get(name) == Some(value))
            };
            let Some(same) = other.results.iter().find(same) else { continue };
            let counts = same.counts.iter().filter(|(name, _)| name.starts_with(begin));
            m.counts.extend(counts.map(|(name, count)| (name.clone(), *count)));
        }
        self.value["results"] = serde_json::to_value(&self.results)?;
        Ok(())
    }

    /// Gathers the samples of several boots; each boot is a group.
    ///
    /// # Errors
    /// None in practice, because the value was read from JSON.
    pub fn join(boots: Vec<Self>) -> serde_json::Result<Option<Self>> {
        let mut boots = boots.into_iter();
        let Some(mut all) = boots.next() else { return Ok(None) };
        let others: Vec<Self> = boots.collect();
        for m in &mut all.results {
            let same = |other: &&Measurement| {
                (&m.scenario, &m.target, &m.variant, &m.params)
                    == (&other.scenario, &other.target, &other.variant, &other.params)
            };
            let others = others.iter().filter_map(|boot| boot.results.iter().find(same));
            let others: Vec<&Measurement> = others.collect();
            m.groups = vec![m.samples.len()];
            m.groups.extend(others.iter().map(|other| other.samples.len()));
            let counts: Vec<_> =
                [&m.counts].into_iter().chain(others.iter().map(|m| &m.counts)).cloned().collect();
            m.counts = joined(&counts);
            m.samples.extend(others.iter().flat_map(|other| &other.samples));
        }
        all.value["results"] = serde_json::to_value(&all.results)?;
        Ok(Some(all))
    }

    /// Returns the report as a value.
    pub const fn value(&self) -> &Value {
        &self.value
    }

    /// Sets the command line that repeats the run.
    pub fn set_command(&mut self, words: Vec<String>) {
        self.value["command"] = words.into();
    }

    /// Returns the report as JSON that ends in a newline.
    ///
    /// # Errors
    /// None in practice, because the value was read from JSON.
    pub fn json(&self) -> serde_json::Result<String> {
        serde_json::to_string_pretty(&self.value).map(|text| text + "\n")
    }

    /// Returns the description of the machine that is printed above the tables.
    pub fn machine(&self) -> String {
        let text = |path: &str| {
            let value = self.value.pointer(path);
            value.and_then(Value::as_str).unwrap_or("unknown").to_owned()
        };
        let cpus = self.value.pointer("/host/cpu/usable").and_then(Value::as_u64).unwrap_or(0);
        let what = match self.value.pointer("/emulator/counts_instructions") {
            Some(Value::Bool(true)) => "Instructions and counts",
            _ => "Counts",
        };
        format!(
            "{}, {}, Linux {}, KVM {}; {}. {what} only.",
            text("/emulator/architecture"),
            several(cpus as usize, "CPU"),
            text("/host/kernel/release"),
            text("/host/kvm/device"),
            text("/emulator/program"),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use slat_lab::compare::{Run, compare};
    use slat_lab::fake;
    use slat_lab::report::json;

    fn emulator() -> Emulator {
        Emulator {
            program: "QEMU emulator version 0".to_owned(),
            architecture: "x86_64".to_owned(),
            kernel: "debian-6.1".to_owned(),
            counts_instructions: false,
        }
    }

    fn emulated() -> EmulatedReport {
        let text = json::render(&fake::report()).unwrap();
        EmulatedReport::read(&text, emulator()).unwrap()
    }

    #[test]
    fn no_time_and_no_ratio_of_times_stays_and_every_count_does() {
        let mut report = fake::report();
        assert!(report.results.iter().any(|m| m.unit == Unit::SECONDS));
        let ratio =
            Measurement { unit: Unit::RATIO, counts: [].into(), ..report.results[0].clone() };
        report.results.push(ratio);
        let text = json::render(&report).unwrap();
        let (before, after) = (report.results, EmulatedReport::read(&text, emulator()).unwrap());
        assert!(after.results.iter().all(|m| m.samples.is_empty()));
        let counts = |results: &[Measurement]| -> Vec<_> {
            results.iter().map(|m| m.counts.clone()).filter(|counts| !counts.is_empty()).collect()
        };
        assert_eq!(counts(&after.results), counts(&before));
        assert!(!after.results.is_empty() && after.results.len() < before.len());
        let last = after.skipped.last().unwrap();
        assert!(last.what == "emulator" && last.reason.contains("counts are exact"));
    }

    #[test]
    fn an_instruction_counting_clock_reports_instructions() {
        let mut report = fake::report();
        report.results.truncate(1);
        report.results[0].unit = Unit::SECONDS;
        report.results[0].samples = vec![0.002_118_417];
        let text = json::render(&report).unwrap();
        let emulator = Emulator { counts_instructions: true, ..emulator() };
        let after = EmulatedReport::read(&text, emulator).unwrap();
        assert_eq!(after.results[0].unit, Unit::INSTRUCTIONS);
        assert_eq!(after.results[0].samples, [2_118_417.0]);
        assert!(after.skipped.iter().any(|skipped| skipped.what == "cycles"));
    }

    #[test]
    fn calls_of_one_run_are_added_to_the_same_results_of_another() {
        let run = |counts: &[(&str, u64)]| {
            let mut report = fake::report();
            let of_all = |m: &Measurement| !m.is_vcpu();
            let first = report.results.iter().position(of_all).unwrap();
            let m = &mut report.results[first];
            m.counts = counts.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect();
            if counts.len() > 1 {
                m.params.insert("probes".to_owned(), "f".into());
            }
            EmulatedReport::read(&json::render(&report).unwrap(), emulator()).unwrap()
        };
        let mut one = run(&[("other", 1)]);
        one.add(&run(&[("calls_f", 7), ("other", 2)]), "calls_").unwrap();
        let with = |name: &str| -> Vec<u64> {
            one.results.iter().filter_map(|m| m.counts.get(name).copied()).collect()
        };
        assert_eq!((with("calls_f"), with("other")), (vec![7], vec![1]));
    }

    #[test]
    fn boots_are_groups_and_counts_that_differ_have_their_ends() {
        let boot = |counts: &[(&str, u64)]| {
            let mut report = fake::report();
            report.results.truncate(1);
            let m = &mut report.results[0];
            m.unit = Unit::INSTRUCTIONS;
            m.samples = vec![1.0, 2.0, 3.0];
            m.counts = counts.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect();
            EmulatedReport::read(&json::render(&report).unwrap(), emulator()).unwrap()
        };
        let all = [
            boot(&[("same", 4), ("one", 5)]),
            boot(&[("same", 4), ("one_first", 6), ("one_min", 5), ("one_max", 9)]),
        ];
        let all = EmulatedReport::join(all.into()).unwrap().unwrap();
        let m = &all.results[0];
        assert_eq!((m.samples.len(), &*m.groups), (6, &[3, 3][..]));
        let counts = m.counts.iter().map(|(name, count)| (&**name, *count));
        let counts: Vec<(&str, u64)> = counts.collect();
        assert_eq!(counts, [("one_max", 9), ("one_min", 5), ("same", 4)]);
        assert!(EmulatedReport::join(Vec::new()).unwrap().is_none());
    }

    #[test]
    fn samples_that_are_counts_stay() {
        let mut report = fake::report();
        report.results.truncate(1);
        report.results[0].unit = Unit::OPERATIONS;
        let text = json::render(&report).unwrap();
        let after = EmulatedReport::read(&text, emulator()).unwrap();
        assert_eq!(after.results, report.results);
        assert_eq!(after.skipped.len(), report.skipped.len());
    }

    #[test]
    fn it_is_a_report_that_can_be_compared() {
        let folder = tempfile::tempdir().unwrap();
        let (first, second) = (folder.path().join("a.json"), folder.path().join("b.json"));
        std::fs::write(&first, emulated().json().unwrap()).unwrap();
        let mut other = emulated();
        other.value["host"]["kernel"]["release"] = "9.9".into();
        std::fs::write(&second, other.json().unwrap()).unwrap();
        let comparison = compare(&Run::read(&first).unwrap(), &Run::read(&second).unwrap(), 0.02);
        assert_eq!(comparison.variables[0][0], "kernel release");
        assert_eq!(comparison.variables[0][2], "9.9");
        assert!(!comparison.pairs.is_empty());
    }

    #[test]
    fn what_is_no_report_is_refused() {
        for text in ["", "{}", "{\"schema\": 99}", "{\"schema\": 1}"] {
            assert!(EmulatedReport::read(text, emulator()).is_err(), "{text}");
        }
    }
}
