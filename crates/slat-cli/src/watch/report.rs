//! The report after the watch: totals, their sources, and the reasons for unknown values.

use super::live::{count, label, row, table};
use super::migration::{Dirty, MigrationFigures, Prediction};
use super::stalls;
use super::verdict::{self, Verdict};
use serde::Serialize;
use slat_kvm::watch::{GuestTotal, Metric, Source, State, WorkingSet};
use slat_lab::numbers::{bytes, seconds, thousands};
use slat_lab::report::text;
use std::collections::BTreeMap;
use std::fmt::Write;
use textwrap::Options;

/// Title of the table of averages.
pub(super) const AVERAGE: &str = "On average; %: of the time of all its vCPUs";

/// Version of the JSON. docs/watch.md explains its keys.
const SCHEMA: u32 = 1;

/// Why a watch ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum WatchEnd {
    /// The time that the user asked for is over.
    Time,
    /// The user pressed Ctrl-C, or a signal asked the program to end.
    Interrupted,
    /// The process that was watched ended.
    ProcessEnded,
}

/// The results of a watch.
#[derive(Debug, Serialize, schemars::JsonSchema)]
pub struct Report<'a> {
    /// Version of the JSON.
    pub schema: u32,
    /// The version of `slat`.
    pub tool: &'static str,
    /// Start of the watch, in seconds since 1970.
    pub began: u64,
    /// Duration of the watch, in seconds.
    pub seconds: f64,
    /// Seconds between samples.
    pub every: f64,
    /// Why the watch ended.
    pub ended: WatchEnd,
    /// CPU time of the watch itself, in seconds.
    pub cpu_seconds: f64,
    /// Number of processes whose descriptors could not be read.
    pub hidden: usize,
    /// How debugfs is read, or why it is not.
    pub debugfs: String,
    /// How KVM's tracepoints are received, or why they are not.
    pub events: String,
    /// Time that an exit takes outside of `kvm_exit` to `kvm_entry`, in nanoseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub transition_ns: Option<u64>,
    /// Number of events of tracepoints that are not in the accounts.
    pub lost_events: u64,
    /// Number of ranges that the host unmapped at addresses at which several guests have memory.
    pub ambiguous_ranges: u64,
    /// What kept each guest from running.
    pub verdicts: Vec<Verdict>,
    /// Dirty rates of the guests by each means, the best first.
    pub dirty_rates: Vec<Dirty>,
    /// Predictions of the guests' migrations.
    pub predictions: Vec<Prediction>,
    /// Estimates of the guests' working sets, if the user asked for them.
    pub working_sets: Vec<WorkingSet>,
    /// Which of these are unknown, in words.
    #[serde(skip)]
    pub missing: Vec<String>,
    /// The guests.
    pub guests: Vec<&'a GuestTotal>,
}

impl<'a> Report<'a> {
    /// Makes a report of guests. The caller sets its other fields.
    pub fn new(guests: Vec<&'a GuestTotal>, ended: WatchEnd) -> Self {
        let verdicts = guests.iter().map(|guest| verdict::of(guest)).collect();
        Self {
            schema: SCHEMA,
            tool: slat_lab::VERSION,
            began: 0,
            seconds: 0.0,
            every: 0.0,
            ended,
            cpu_seconds: 0.0,
            hidden: 0,
            debugfs: String::new(),
            events: String::new(),
            transition_ns: None,
            lost_events: 0,
            ambiguous_ranges: 0,
            verdicts,
            dirty_rates: Vec::new(),
            predictions: Vec::new(),
            missing: Vec::new(),
            working_sets: Vec::new(),
            guests,
        }
    }

    /// Formats the report as JSON.
    ///
    /// # Errors
    /// None is known.
    pub fn json(&self) -> serde_json::Result<String> {
        serde_json::to_string_pretty(self).map(|text| text + "\n")
    }

    /// Formats the report as text of this width.
    pub fn text(&self, width: u16) -> String {
        let mut said = format!(
            "Watched {} for {:.1} s{}; the watch took {:.2} s of a CPU.\n",
            count(self.guests.len()),
            self.seconds,
            match self.ended {
                WatchEnd::Time => "",
                WatchEnd::Interrupted => ", until it was interrupted",
                WatchEnd::ProcessEnded => ", until the process ended",
            },
            self.cpu_seconds,
        );
        for verdict in &self.verdicts {
            let words = textwrap::fill(&verdict.said, usize::from(width));
            let _ = writeln!(said, "{words}");
        }
        self.verdicts.iter().for_each(|verdict| time_line(&mut said, verdict, width));
        let mut rows = Vec::new();
        for guest in &self.guests {
            rows.push(row(label(guest), &guest.total, guest.seconds, guest.vcpus.len()));
            if self.guests.len() <= 4 {
                let vcpu =
                    |(index, values)| row(format!("  vCPU {index}"), values, guest.seconds, 1);
                let vcpus = guest.vcpus.iter().map(|vcpu| (vcpu.index, &vcpu.total));
                rows.extend(vcpus.map(vcpu));
            }
        }
        if !rows.is_empty() {
            text::grid(&mut said, &table(AVERAGE.to_owned(), rows), width);
        }
        if let Some(table) = stalls::table(&self.guests, self.transition_ns) {
            text::grid(&mut said, &table, width);
        }
        for guest in self.guests.iter().filter(|guest| !guest.invalidated_by.is_empty()) {
            let by = guest.invalidated_by.iter().map(|(name, count)| {
                let name: String = name.chars().filter(|c| !c.is_control()).collect();
                format!("{} by {name}", thousands((*count).try_into().unwrap_or(i64::MAX)))
            });
            let by = by.collect::<Vec<_>>().join(", ");
            let _ = writeln!(
                said,
                "{}: ranges unmapped by the host (MMU notifier): {by}.",
                label(guest)
            );
        }
        for guest in &self.guests {
            let runs = guest.total.get(&Metric::NestedRuns).copied().unwrap_or(0);
            if runs > 0 {
                let runs = thousands(runs.try_into().unwrap_or(i64::MAX));
                let _ = writeln!(
                    said,
                    "{}: entered guests of its own {runs} times (nested); their exits and faults \
                     are in its own.",
                    label(guest)
                );
            }
        }
        let told = MigrationFigures {
            rates: self.dirty_rates.clone(),
            predictions: self.predictions.clone(),
            missing: self.missing.clone(),
        };
        for line in self.working_sets.iter().map(working_set).chain(told.text()) {
            let _ = writeln!(said, "{}", textwrap::fill(&line, usize::from(width)));
        }
        for guest in &self.guests {
            let what = match guest.state {
                State::Runs => continue,
                State::ProcessEnded => "its process ended",
                State::VmClosed => "its VM was closed",
            };
            let at = guest.found_at + guest.seconds;
            let _ = writeln!(said, "{}: {what} {at:.1} s after the watch began.", label(guest));
        }
        let sources = self.guests.iter().flat_map(|guest| &guest.knowledge.sources);
        let sources = sources.map(|(metric, by)| (by.to_string(), *metric));
        list(&mut said, "Read from", sources, width);
        let unknown = self.guests.iter().flat_map(|guest| &guest.knowledge.unknown);
        let unknown = unknown.map(|(metric, why)| (why.clone(), *metric));
        list(&mut said, "Not known here", unknown, width);
        if self.lost_events > 0 {
            let _ = writeln!(
                said,
                "\n{} events of tracepoints were lost: there was no room for more threads or \
                 ranges, or another program ran on that CPU.",
                self.lost_events
            );
        }
        if self.ambiguous_ranges > 0 {
            let _ = writeln!(
                said,
                "\n{} ranges were unmapped at addresses at which several guests have memory, so \
                 that no guest's counts include them.",
                self.ambiguous_ranges
            );
        }
        if self.hidden > 0 {
            let _ = writeln!(
                said,
                "\n{} processes did not let this user look at them; run as root to see their \
                 guests.",
                self.hidden
            );
        }
        said
    }
}

/// Appends what happened to a guest, a line for each event.
fn time_line(text: &mut String, verdict: &Verdict, width: u16) {
    if !verdict.events.is_empty() {
        let _ = writeln!(text, "\nTime line of {}", verdict.guest);
    }
    for event in &verdict.events {
        let line = format!("{:8.1} s  {}", event.at, event.what);
        let options = Options::new(width.into()).subsequent_indent("            ");
        let _ = writeln!(text, "{}", textwrap::fill(&line, options.break_words(false)));
    }
}

/// Describes a guest's working set in words.
pub(super) fn working_set(it: &WorkingSet) -> String {
    let all = it.seconds * f64::from(it.times);
    format!(
        "{} used {}{} of {} within {} ({} on average of {} times, {} at most), by {}; error: {}; \
         it {}; cost: {} of a CPU, {:.2} % of the time.",
        it.pid,
        if it.by == Source::Referenced { "at least " } else { "" },
        bytes(it.bytes),
        bytes(it.of_bytes),
        seconds(it.seconds),
        bytes(it.mean_bytes),
        it.times,
        bytes(it.largest_bytes),
        it.by,
        it.error,
        it.changes,
        seconds(it.cpu_seconds),
        if all > 0.0 { 100.0 * it.cpu_seconds / all } else { 0.0 },
    )
}

/// Lists metrics, grouped by their text.
fn list(text: &mut String, title: &str, said: impl Iterator<Item = (String, Metric)>, width: u16) {
    let mut by: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (what, metric) in said {
        let (metrics, name) = (by.entry(what).or_default(), name(metric));
        if !metrics.contains(&name) {
            metrics.push(name);
        }
    }
    if !by.is_empty() {
        let _ = writeln!(text, "\n{title}");
    }
    for (what, metrics) in by {
        let options = Options::new(width.into()).initial_indent("  ").subsequent_indent("    ");
        let line = format!("{}: {what}", metrics.join(", "));
        let _ = writeln!(text, "{}", textwrap::fill(&line, options.break_words(false)));
    }
}

/// Returns a metric's name: its key in the JSON, in words.
pub(super) fn name(metric: Metric) -> String {
    key(metric).replace("_ns", " time").replace('_', " ")
}

/// Returns a metric's key in the JSON.
pub(super) fn key(metric: Metric) -> String {
    let key = serde_json::to_value(metric).ok();
    key.as_ref().and_then(serde_json::Value::as_str).unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::watch::fake::guest;

    fn report(guest: &GuestTotal) -> Report<'_> {
        Report {
            began: 1_700_000_000,
            seconds: 2.0,
            every: 2.0,
            cpu_seconds: 0.01,
            hidden: 3,
            debugfs: "not mounted".to_owned(),
            transition_ns: Some(812),
            ..Report::new(vec![guest], WatchEnd::ProcessEnded)
        }
    }

    #[test]
    fn a_report_reads_like_this() {
        insta::assert_snapshot!(report(&guest("qemu")).text(100));
    }

    #[test]
    fn a_guest_that_runs_guests_is_said_to() {
        let mut one = guest("qemu");
        assert!(!report(&one).text(100).contains("nested"));
        one.total.insert(Metric::NestedRuns, 1200);
        let said = report(&one).text(100);
        assert!(said.contains("entered guests of its own 1,200 times (nested)"), "{said}");
    }

    #[test]
    fn json_has_the_documented_keys() {
        let guest = guest("qemu");
        let json: serde_json::Value =
            serde_json::from_str(&report(&guest).json().unwrap()).unwrap();
        assert_eq!((&json["schema"], &json["ended"]), (&1.into(), &"process_ended".into()));
        let guest = &json["guests"][0];
        assert_eq!((&guest["pid"], &guest["state"]), (&4711.into(), &"process_ended".into()));
        assert_eq!(guest["total"]["faults"], 1000);
        assert_eq!(guest["sources"]["faults"], "binary_statistics");
        assert_eq!(guest["unknown"]["fault_ns"], "nobody times them");
        assert_eq!(guest["statistics"]["pf_taken"], 1000);
        assert_eq!(guest["vcpus"][0]["total"]["running_ns"], 3_000_000_000_u64);
        assert_eq!(guest["samples"][0]["guest"]["faults"], 1000);
        assert_eq!(guest["samples"][0]["vcpus"][0]["faults"], 1000);
        let page = include_str!("../../../../docs/watch.md");
        for metric in Metric::ALL {
            let name = serde_json::to_value(metric).unwrap();
            let name = format!("`{}`", name.as_str().unwrap());
            assert!(page.contains(&name), "docs/watch.md does not say what {name} is");
        }
    }
}
