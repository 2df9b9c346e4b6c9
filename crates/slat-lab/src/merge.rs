//! Merging of reports: samples of one thing on one host are joined, and hosts are kept apart.
//!
//! A merged `results.json` is still that of one host, so that programs read it like any other. Two
//! reports are of one host if all that they say of the host agrees, except what changes by itself.
//! A kernel update, or another value of a KVM parameter, makes another host.

pub mod files;

use crate::child::without_output;
use crate::host::keep_lasting;
use crate::record::{Measurement, Skipped};
use crate::record::{Report, SCHEMA};
use crate::trust::Trust;
use crate::verdict::Verdict;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// The merged reports of one host.
#[derive(Clone, Debug)]
pub struct HostReport {
    /// A name that no other host has here.
    pub name: String,
    /// The files of its results.
    pub files: Vec<PathBuf>,
    /// Its differences from the first host of the same name.
    pub differs: Vec<String>,
    /// The merged report.
    pub report: Report,
}

/// Joins reports. With `any_name`, hosts that differ in nothing but their name are one.
pub fn merge(
    reports: Vec<(PathBuf, Report)>,
    any_name: bool,
    command: &[String],
) -> Vec<HostReport> {
    let mut hosts: Vec<(Value, Vec<(PathBuf, Report)>)> = Vec::new();
    for (file, report) in reports {
        let print = fingerprint(&report, any_name);
        match hosts.iter_mut().find(|(known, _)| *known == print) {
            Some((_, reports)) => reports.push((file, report)),
            None => hosts.push((print, vec![(file, report)])),
        }
    }
    let mut all: Vec<HostReport> = Vec::new();
    let mut prints: Vec<(String, &Value)> = Vec::new();
    for (print, reports) in &hosts {
        let own = slug(reports[0].1.host.name.0.as_deref());
        let first = prints.iter().find(|(name, _)| *name == own);
        let differs = first.map_or_else(Vec::new, |(_, first)| differences(first, print));
        let before = prints.iter().filter(|(name, _)| *name == own).count();
        let mut name = own.clone();
        for number in before + 1.. {
            if number > 1 {
                name = format!("{own}-{number}");
            }
            if !all.iter().any(|other| other.name == name) {
                break;
            }
        }
        prints.push((own, print));
        let files = reports.iter().map(|(file, _)| file.clone()).collect();
        let reports = reports.iter().map(|(_, report)| report);
        all.push(HostReport { name, files, differs, report: joined(reports, command) });
    }
    all
}

/// Returns all facts about a report's host that do not change by themselves, and the version of
/// slat.
fn fingerprint(report: &Report, any_name: bool) -> Value {
    let mut host = report.host.clone();
    if any_name {
        host.name.0 = None;
    }
    let mut print = serde_json::json!({ "host": host, "slat": report.tool });
    keep_lasting(&mut print["host"]);
    print
}

/// Returns a name that can be the name of a directory.
fn slug(name: Option<&str>) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' };
    let name: String = name.unwrap_or_default().chars().map(plain).collect();
    match name.trim_start_matches(['.', '-']) {
        "" => "host".to_owned(),
        name => name.to_owned(),
    }
}

/// Returns the differences of two values, by their keys.
fn differences(a: &Value, b: &Value) -> Vec<String> {
    fn collect(path: &str, a: &Value, b: &Value, found: &mut Vec<String>) {
        match (a, b) {
            (Value::Object(one), Value::Object(two)) => {
                for name in one.keys().chain(two.keys()).collect::<BTreeSet<_>>() {
                    let path = format!("{path}{}{name}", if path.is_empty() { "" } else { "." });
                    let of = |map: &Map<String, Value>| map.get(name).cloned().unwrap_or_default();
                    collect(&path, &of(one), &of(two), found);
                }
            }
            (a, b) if a != b => found.push(format!("{path}: {a}, here {b}")),
            _ => {}
        }
    }
    let mut found = Vec::new();
    collect("", a, b, &mut found);
    found
}

/// A measurement, and the command line of its run.
struct Entry {
    command: Vec<String>,
    measurement: Measurement,
    /// Number of samples of each process.
    processes: Vec<usize>,
}

/// Joins reports of one host; samples of equal measurements are in the order of the files.
fn joined<'r>(reports: impl Iterator<Item = &'r Report>, command: &[String]) -> Report {
    let mut entries: Vec<Entry> = Vec::new();
    let mut skipped: Vec<Skipped> = Vec::new();
    let (mut host, mut partial, mut trusts) = (None, false, Vec::new());
    for report in reports {
        host.get_or_insert_with(|| (report.host.clone(), report.tool.clone()));
        partial |= report.partial;
        trusts.push(report.trust.as_ref());
        let words = without_output(report.command.get(1..).unwrap_or_default());
        for measurement in &report.results {
            let same = |entry: &&mut Entry| {
                entry.command == words && is_same(&entry.measurement, measurement)
            };
            match entries.iter_mut().find(same) {
                Some(entry) => append(entry, measurement),
                None => {
                    let processes = vec![measurement.samples.len()];
                    let (command, measurement) = (words.clone(), measurement.clone());
                    entries.push(Entry { command, measurement, processes });
                }
            }
        }
        for one in &report.skipped {
            if !skipped.contains(one) {
                skipped.push(one.clone());
            }
        }
    }
    let (host, tool) = host.expect("a host has a report at least");
    let results = told_apart(entries);
    Report {
        schema: SCHEMA,
        partial,
        tool,
        trust: Trust::joined(&trusts),
        verdict: Verdict::default(),
        host,
        command: command.to_vec(),
        results,
        skipped,
        // The merged samples are more than each run's, so that its precision does not apply.
        repeated: Vec::new(),
    }
}

/// Returns whether both measure the same thing, by their names and parameters.
fn is_same(a: &Measurement, b: &Measurement) -> bool {
    let key = |m: &Measurement| {
        let mut params = m.params.clone();
        params.remove("note");
        (m.scenario.clone(), m.target.clone(), m.variant.clone(), m.unit.clone(), params)
    };
    key(a) == key(b)
}

fn append(entry: &mut Entry, more: &Measurement) {
    entry.processes.push(more.samples.len());
    let to = &mut entry.measurement;
    // Guests of one process have more in common than two processes have.
    to.groups.clone_from(&entry.processes);
    to.samples.extend(&more.samples);
    to.counts = counts(&to.counts, &more.counts);
}

/// Command lines may differ in a way that no parameter of the result shows. Such results are not
/// joined, and get the command line as an additional parameter.
fn told_apart(entries: Vec<Entry>) -> Vec<Measurement> {
    let twins = |entry: &Entry| {
        entries.iter().any(|other| {
            other.command != entry.command && is_same(&other.measurement, &entry.measurement)
        })
    };
    let apart: Vec<bool> = entries.iter().map(twins).collect();
    entries
        .into_iter()
        .zip(apart)
        .map(|(entry, apart)| {
            let mut one = entry.measurement;
            if apart {
                let _ = one.params.insert("command".to_owned(), entry.command.join(" ").into());
            }
            one
        })
        .collect()
}

/// Suffixes of a count that is not the same in each sample.
const SUFFIXES: [&str; 3] = ["_first", "_min", "_max"];

type Counts = BTreeMap<String, u64>;

/// Joins counts. Counts that differ are given as first, least and most. A count that is missing was
/// 0.
fn counts(one: &Counts, two: &Counts) -> Counts {
    let (one, two) = (spread(one), spread(two));
    let mut all = Counts::new();
    for name in one.keys().chain(two.keys()).collect::<BTreeSet<_>>() {
        let [first, a, b] = one.get(name).copied().unwrap_or_default();
        let [_, c, d] = two.get(name).copied().unwrap_or_default();
        let (least, most) = (a.min(c), b.max(d));
        if least == most {
            let _ = all.insert(name.clone(), first);
            continue;
        }
        for (suffix, value) in SUFFIXES.iter().zip([first, least, most]) {
            let _ = all.insert(format!("{name}{suffix}"), value);
        }
    }
    all
}

/// Returns each count as first, least and most.
fn spread(counts: &Counts) -> BTreeMap<String, [u64; 3]> {
    let three = |base: &str| {
        let [first, least, most] = SUFFIXES.map(|suffix| counts.get(&format!("{base}{suffix}")));
        Some([*first?, *least?, *most?])
    };
    let mut all = BTreeMap::new();
    for (name, value) in counts {
        let base = SUFFIXES.iter().find_map(|suffix| name.strip_suffix(suffix));
        let _ = match base.and_then(|base| Some((base, three(base)?))) {
            Some((base, three)) => all.insert(base.to_owned(), three),
            None => all.insert(name.clone(), [*value; 3]),
        };
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake;
    use crate::host::Maybe;

    fn report(command: &str, samples: &[f64]) -> (PathBuf, Report) {
        let mut report = fake::short_report();
        report.command = shlex::split(command).unwrap();
        report.results[0].samples = samples.to_vec();
        (PathBuf::from(format!("{}.json", samples[0])), report)
    }

    const SPLIT: &str = "slat bench split";

    fn merged(reports: Vec<(PathBuf, Report)>) -> Vec<HostReport> {
        merge(reports, false, &["slat".to_owned(), "merge".to_owned()])
    }

    #[test]
    fn samples_of_one_thing_are_joined_in_the_order_of_the_files() {
        let mut second = report("slat bench split --output b --json", &[2.0]);
        // Values that change by themselves do not make another host.
        second.1.host.memory.available = Maybe(Some(1));
        second.1.host.hugetlb[0].free = Maybe(None);
        second.1.host.cpu.mhz = Maybe(Some(800.0));
        let all = merged(vec![report(SPLIT, &[3.0, 1.0]), second]);
        assert_eq!((all.len(), &*all[0].name), (1, "example"));
        assert_eq!(all[0].report.results.len(), 1);
        assert_eq!(all[0].report.results[0].samples, [3.0, 1.0, 2.0]);
        assert_eq!(all[0].report.command, ["slat", "merge"]);
        assert_eq!(all[0].report.skipped.len(), 1, "what both left out is said once");
    }

    #[test]
    fn hosts_are_kept_apart_by_anything_that_they_say_of_themselves() {
        let mut other_kernel = report(SPLIT, &[2.0]);
        other_kernel.1.host.kernel.release = Maybe(Some("7.0".to_owned()));
        let mut other_name = report(SPLIT, &[3.0]);
        other_name.1.host.name = Maybe(Some("a b/../c".to_owned()));
        let mut other_slat = report(SPLIT, &[4.0]);
        other_slat.1.tool = "0.2.0".into();
        let reports = vec![report(SPLIT, &[1.0]), other_kernel, other_name.clone(), other_slat];
        let all = merged(reports);
        let names: Vec<_> = all.iter().map(|host| &*host.name).collect();
        assert_eq!(names, ["example", "example-2", "a-b-..-c", "example-3"]);
        assert_eq!(all[1].differs.len(), 1, "{:?}", all[1].differs);
        assert!(all[1].differs[0].contains("kernel.release") && all[1].differs[0].contains("7.0"));
        assert!(all[3].differs[0].starts_with("slat: "), "{:?}", all[3].differs);

        let both = vec![report(SPLIT, &[1.0]), other_name];
        assert_eq!(merge(both, true, &[]).len(), 1);
    }

    #[test]
    fn a_run_that_was_disturbed_disturbs_what_it_is_joined_with() {
        let quiet = report(SPLIT, &[1.0]);
        let mut busy = report(SPLIT, &[2.0]);
        let trust = crate::trust::Trust { steal: Maybe(Some(30.0)), ..fake::trust() };
        busy.1.trust = Some(trust.judged(2, 2));
        let mut older = report(SPLIT, &[3.0]);
        older.1.trust = None;
        let all = merged(vec![quiet, busy, older.clone()]);
        let trust = all[0].report.trust.as_ref().unwrap();
        assert_eq!((trust.trusted, trust.steal, trust.parts.len()), (false, Maybe(Some(30.0)), 3));
        assert_eq!(trust.parts[2], None);
        let line = trust.line();
        assert!(line.starts_with("NOT TO BE TRUSTED: 1 of 3 runs"), "{line}");
        assert!(line.contains("took 30.0 %") && line.contains("of 1 it is not known"), "{line}");
        let joined = serde_json::to_value(&all[0].report).unwrap();
        let joined: Report = serde_json::from_value(joined).unwrap();
        let again = merged(vec![("m.json".into(), joined), report(SPLIT, &[4.0])]);
        assert_eq!(again[0].report.trust.as_ref().unwrap().parts.len(), 4);
        assert_eq!(merged(vec![older])[0].report.trust, None);
    }

    #[test]
    fn command_lines_that_differ_keep_results_apart_that_say_the_same_of_themselves() {
        let reports = vec![
            report("slat bench split --samples 10", &[1.0]),
            report("slat bench split --samples 20", &[2.0]),
            report("slat bench split --samples 10", &[3.0]),
        ];
        let results = &merged(reports)[0].report.results;
        assert_eq!(results[0].samples, [1.0, 3.0]);
        assert_eq!(results[0].params["command"], "bench split --samples 10");
        assert_eq!(results[1].params["command"], "bench split --samples 20");
    }

    #[test]
    fn counts_that_differ_become_first_least_and_most() {
        let counted = |pairs: &[(&str, u64)]| -> Counts {
            pairs.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect()
        };
        let one = counted(&[("entries", 5), ("faults", 7), ("pages_max", 3)]);
        let two = counted(&[("entries", 5), ("faults", 9), ("pages_max", 3), ("exits", 2)]);
        let both = counts(&one, &two);
        let wanted = [
            ("entries", 5),
            ("pages_max", 3),
            ("faults_first", 7),
            ("faults_min", 7),
            ("faults_max", 9),
            ("exits_first", 0),
            ("exits_min", 0),
            ("exits_max", 2),
        ];
        assert_eq!(both, counted(&wanted));
        let three = counts(&both, &counted(&[("faults", 1), ("entries", 5), ("pages_max", 3)]));
        assert_eq!((three["faults_first"], three["faults_min"], three["faults_max"]), (7, 1, 9));
        assert_eq!((three["exits_min"], three["exits_max"]), (0, 2));
    }
}
