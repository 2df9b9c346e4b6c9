//! A watch for other programs: OpenMetrics text, and a JSON object for each sample.

use super::report::key;
use super::verdict::{self, Verdict};
use serde::Serialize;
use slat_kvm::watch::{GuestTotal, Metric, Sample, Values};
use std::fmt::{Display, Write};

/// The type of the text, for HTTP (openmetrics.io).
pub const TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// A family of metrics: its samples have its name, and a counter's the suffix `_total` as well.
struct Family<'t> {
    name: &'t str,
    is_counter: bool,
    unit: &'t str,
    help: &'t str,
}

impl Family<'_> {
    fn head(&self, text: &mut String) {
        let Self { name, unit, help, .. } = self;
        let kind = if self.is_counter { "counter" } else { "gauge" };
        let _ = writeln!(text, "# TYPE {name} {kind}");
        if !unit.is_empty() {
            let _ = writeln!(text, "# UNIT {name} {unit}");
        }
        let _ = writeln!(text, "# HELP {name} {help}");
    }

    fn sample(&self, text: &mut String, labels: &str, value: impl Display) {
        let total = if self.is_counter { "_total" } else { "" };
        let _ = writeln!(text, "{}{total}{labels} {value}", self.name);
    }
}

/// What the watch tells of itself.
#[derive(Clone, Copy, Debug, Default)]
pub struct Own {
    /// Its CPU time, in seconds.
    pub cpu: f64,
    /// Number of processes that could not be inspected.
    pub hidden: usize,
    /// Number of guests that ended.
    pub ended: usize,
}

/// Returns the watch as OpenMetrics text: all guests that are there, with what is known of them.
pub fn openmetrics(guests: &[&GuestTotal], it: Own) -> String {
    let mut text = String::new();
    let labels: Vec<String> = guests.iter().map(|guest| labels(guest)).collect();
    let each = || guests.iter().zip(&labels);
    let vcpus = gauge("slat_guest_vcpus", "", "Number of vCPUs; divides times into shares.");
    if !guests.is_empty() {
        vcpus.head(&mut text);
    }
    each().for_each(|(guest, labels)| vcpus.sample(&mut text, labels, guest.vcpus.len()));
    for metric in Metric::ALL {
        if !guests.iter().any(|guest| guest.total.contains_key(&metric)) {
            continue;
        }
        let key = key(metric);
        let (stem, unit) = match key.rsplit_once('_') {
            Some((stem, "ns")) => (stem, "seconds"),
            Some((stem, "bytes")) => (stem, "bytes"),
            _ if key == "fault_ns_with_transitions" => ("fault_with_transitions", "seconds"),
            _ => (&*key, ""),
        };
        let unit_suffix = if unit.is_empty() { String::new() } else { format!("_{unit}") };
        let name = format!("slat_guest_{stem}{unit_suffix}");
        let family =
            Family { name: &name, is_counter: !metric.is_level(), unit, help: metric.help() };
        family.head(&mut text);
        for (guest, labels) in each() {
            let Some(value) = guest.total.get(&metric) else { continue };
            match unit {
                "seconds" => family.sample(&mut text, labels, *value as f64 / 1e9),
                _ => family.sample(&mut text, labels, value),
            }
        }
    }
    let own = Family {
        name: "slat_watch_cpu_seconds",
        is_counter: true,
        unit: "seconds",
        help: "CPU time of the watch itself.",
    };
    own.head(&mut text);
    own.sample(&mut text, "", it.cpu);
    let unseen =
        gauge("slat_watch_hidden_processes", "", "Processes that this user may not inspect.");
    unseen.head(&mut text);
    unseen.sample(&mut text, "", it.hidden);
    let ended = Family {
        name: "slat_watch_guests_ended",
        is_counter: true,
        unit: "",
        help: "Guests that ended while the watch ran.",
    };
    ended.head(&mut text);
    ended.sample(&mut text, "", it.ended);
    text + "# EOF\n"
}

fn gauge<'t>(name: &'t str, unit: &'t str, help: &'t str) -> Family<'t> {
    Family { name, is_counter: false, unit, help }
}

/// Returns the labels of a guest. A label that is not known is empty, which is the same to
/// OpenMetrics as none.
fn labels(guest: &GuestTotal) -> String {
    let text = |label: &Option<String>| escaped(label.as_deref().unwrap_or_default());
    let name = escaped(guest.domain.as_ref().unwrap_or(&guest.name));
    let (domain, pod, cgroup) = (text(&guest.domain), text(&guest.pod), text(&guest.cgroup));
    let pid = guest.pid;
    format!(
        "{{pid=\"{pid}\",name=\"{name}\",domain=\"{domain}\",pod=\"{pod}\",cgroup=\"{cgroup}\"}}"
    )
}

/// Escapes the value of a label.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// What a line of JSON has of a guest beside its values.
#[derive(Serialize, schemars::JsonSchema)]
pub(crate) struct Line<'t> {
    /// `sample` or `verdict`.
    kind: &'static str,
    /// Seconds since 1970 at the end of the sample.
    time: f64,
    pid: i32,
    name: &'t str,
    #[serde(skip_serializing_if = "Option::is_none")]
    domain: Option<&'t str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cgroup: Option<&'t str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pod: Option<&'t str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    seconds: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    guest: Option<&'t Values>,
    #[serde(skip_serializing_if = "Option::is_none")]
    vcpus: Option<&'t [Values]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    verdict: Option<Verdict>,
}

/// Returns a sample of a guest as a line of JSON. `began`: the watch's, in seconds since 1970.
pub fn sample(guest: &GuestTotal, sample: &Sample, began: f64) -> String {
    let it = Line {
        seconds: Some(sample.seconds),
        guest: Some(&sample.guest),
        vcpus: Some(&sample.vcpus),
        ..line("sample", guest, began + sample.at)
    };
    written(&it)
}

/// Returns the verdict on a guest as a line of JSON.
pub fn verdict(guest: &GuestTotal, began: f64) -> String {
    let time = began + guest.found_at + guest.seconds;
    written(&Line { verdict: Some(verdict::of(guest)), ..line("verdict", guest, time) })
}

fn line<'t>(kind: &'static str, guest: &'t GuestTotal, time: f64) -> Line<'t> {
    let (domain, cgroup) = (guest.domain.as_deref(), guest.cgroup.as_deref());
    let pod = guest.pod.as_deref();
    let (seconds, vcpus, verdict) = Default::default();
    let (pid, name) = (guest.pid, &*guest.name);
    Line { kind, time, pid, name, domain, cgroup, pod, seconds, guest: None, vcpus, verdict }
}

fn written(line: &Line<'_>) -> String {
    serde_json::to_string(line).map_or_else(|_| String::new(), |text| text + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::watch::fake::guest;
    use std::collections::BTreeMap;

    /// A family as a strict reader of OpenMetrics sees it.
    #[derive(Debug, Default, PartialEq)]
    struct ReadFamily {
        kind: String,
        unit: String,
        help: String,
        samples: Vec<(BTreeMap<String, String>, f64)>,
    }

    /// Reads labels: quoted, with no escape but three.
    fn read_labels(mut text: &str) -> BTreeMap<String, String> {
        let mut labels = BTreeMap::new();
        while !text.is_empty() {
            let (name, rest) = text.split_once("=\"").expect("a label has a quoted value");
            assert!(name.chars().all(|c| c.is_ascii_lowercase() || c == '_'), "{name}");
            let (mut value, mut chars) = (String::new(), rest.char_indices());
            let end = loop {
                match chars.next().expect("a quote is closed") {
                    (at, '"') => break at,
                    (_, '\\') => value.push(match chars.next().map(|(_, c)| c) {
                        Some('n') => '\n',
                        Some(c @ ('\\' | '"')) => c,
                        other => panic!("{other:?} is escaped"),
                    }),
                    (_, c) => value.push(c),
                }
            };
            assert!(labels.insert(name.to_owned(), value).is_none(), "{name} is there twice");
            text = &rest[end + 1..];
            text = text.strip_prefix(',').unwrap_or(text);
        }
        labels
    }

    /// Reads OpenMetrics text by its rules: metadata first, once, families in one piece, units as
    /// suffixes, counters that end in `_total`, no sample twice, an end.
    fn read(text: &str) -> BTreeMap<String, ReadFamily> {
        let body = text.strip_suffix("# EOF\n").expect("an end");
        let mut families: BTreeMap<String, ReadFamily> = BTreeMap::new();
        let mut now = String::new();
        for line in body.lines() {
            assert!(!line.is_empty() && !line.ends_with(' '), "{line:?}");
            if let Some(meta) = line.strip_prefix("# ") {
                let mut words = meta.splitn(3, ' ');
                let [key, name, rest] = [(); 3].map(|()| words.next().unwrap());
                if key == "TYPE" {
                    now = name.to_owned();
                    assert!(
                        families.insert(now.clone(), ReadFamily::default()).is_none(),
                        "{name}"
                    );
                }
                assert_eq!(name, now, "metadata is beside its family");
                let family = families.get_mut(name).unwrap();
                assert!(family.samples.is_empty(), "metadata is before samples: {line}");
                let place = match key {
                    "TYPE" => &mut family.kind,
                    "UNIT" => &mut family.unit,
                    "HELP" => &mut family.help,
                    other => panic!("{other}"),
                };
                assert!(place.is_empty());
                *place = rest.to_owned();
                continue;
            }
            let family = families.get_mut(&now).expect("a sample has a type");
            let (head, value) = line.rsplit_once(' ').unwrap();
            let (name, labels) = match head.split_once('{') {
                Some((name, labels)) => (name, labels.strip_suffix('}').unwrap()),
                None => (head, ""),
            };
            let suffix = if family.kind == "counter" { "_total" } else { "" };
            assert_eq!(name, now.clone() + suffix);
            assert!(family.unit.is_empty() || now.ends_with(&format!("_{}", family.unit)));
            let labels = read_labels(labels);
            assert!(family.samples.iter().all(|(other, _)| *other != labels), "twice: {line}");
            let value: f64 = value.parse().unwrap();
            assert!(value.is_finite() && (family.kind != "counter" || value >= 0.0));
            family.samples.push((labels, value));
        }
        for (name, family) in &families {
            let is_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
            assert!(name.chars().all(is_name), "{name}");
            assert!(matches!(&*family.kind, "counter" | "gauge") && !family.help.is_empty());
            assert!(!name.ends_with("_total") && !family.samples.is_empty(), "{name}");
        }
        families
    }

    #[test]
    fn a_strict_parser_accepts_metrics_and_unknown_ones_are_absent() {
        let mut one = guest("a\"\\\nb");
        one.cgroup = Some("/vms/a".to_owned());
        one.total = Metric::ALL.into_iter().map(|metric| (metric, 3_000_000_000)).collect();
        one.total.remove(&Metric::FaultNs);
        let mut other = guest("qemu");
        (other.pid, other.domain) = (4712, Some("web01".to_owned()));
        other.pod = Some("6a1b".to_owned());
        let families = read(&openmetrics(&[&one, &other], Own { cpu: 0.25, hidden: 3, ended: 2 }));
        let running = &families["slat_guest_running_seconds"];
        assert_eq!((&*running.kind, &*running.unit), ("counter", "seconds"));
        assert_eq!((running.samples[0].1, running.samples.len()), (3.0, 2));
        assert_eq!(running.samples[0].0["name"], "a\"\\\nb");
        assert_eq!(running.samples[0].0["cgroup"], "/vms/a");
        assert_eq!(running.samples[1].0["name"], "web01");
        let labels = ["domain", "pod", "cgroup"].map(|label| &*running.samples[1].0[label]);
        assert_eq!(labels, ["web01", "6a1b", ""]);
        let swap = &families["slat_guest_swap_bytes"];
        assert_eq!((&*swap.kind, &*swap.unit, swap.samples.len()), ("gauge", "bytes", 1));
        assert_eq!(families["slat_guest_fault_with_transitions_seconds"].samples.len(), 1);
        assert!(!families.contains_key("slat_guest_fault_seconds"), "it is not known");
        assert_eq!(families["slat_watch_hidden_processes"].samples[0].1, 3.0);
        assert_eq!(families["slat_watch_guests_ended"].samples[0].1, 2.0);
        // All but the unknown one, and the four that are no metrics of guests.
        assert_eq!(families.len(), Metric::ALL.len() - 1 + 4);
        assert_eq!(read(&openmetrics(&[], Own::default())).len(), 3);
    }

    #[test]
    fn a_sample_and_a_verdict_are_a_line_of_json_each() {
        let mut one = guest("qemu\n");
        one.domain = Some("web01".to_owned());
        let lines = [sample(&one, &one.samples[0], 1e9), verdict(&one, 1e9)];
        let [sample, verdict] = lines.map(|line| {
            assert_eq!(line.matches('\n').count(), 1, "{line}");
            serde_json::from_str::<serde_json::Value>(&line).unwrap()
        });
        assert_eq!((&sample["kind"], &sample["guest"]["faults"]), (&"sample".into(), &1000.into()));
        assert_eq!(
            (&sample["time"], &sample["domain"]),
            (&1_000_000_002.0.into(), &"web01".into())
        );
        assert_eq!(
            (&verdict["kind"], &verdict["verdict"]["pid"]),
            (&"verdict".into(), &4711.into())
        );
    }
}
