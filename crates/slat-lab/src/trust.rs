//! Whether a run can be trusted: disturbances of the run, with a bound for each.
//!
//! | bound | why |
//! |---|---|
//! | [`WAITED`] | a tenth of a vCPU's time is more than most differences asked about |
//! | [`STOLEN`] | no clock of a guest shows the time that the machine below took from its CPUs |
//! | [`OTHERS`] | other processes compete for CPUs, caches and memory |
//! | no more vCPUs than CPUs | if vCPUs wait for each other, times depend on the scheduler |

use crate::host::Maybe;
use crate::numbers::several;
use serde::{Deserialize, Serialize};
use slat_kvm::procfs::{Files, Ticks};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Bound of the milliseconds of each second that a vCPU waited for a CPU.
pub const WAITED: f64 = 100.0;
/// Bound of the per cent of the CPUs' time that the machine below took.
pub const STOLEN: f64 = 1.0;
/// Bound of the per cent of the CPUs' time that other processes used.
pub const OTHERS: f64 = 10.0;

/// What went on while the run did, and whether its times can be trusted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Trust {
    /// Whether nothing was beyond its bound.
    pub trusted: bool,
    /// What was.
    pub reasons: Vec<Reason>,
    /// When the run began, in seconds since 1970.
    pub began: u64,
    /// How many seconds it took.
    pub seconds: f64,
    /// Processes ready to run, on average of the minute before the run.
    pub load_begin: Maybe<f64>,
    /// The same at its end; the run's own threads are among them.
    pub load_end: Maybe<f64>,
    /// Per cent of the CPUs' time that the machine below took.
    pub steal: Maybe<f64>,
    /// Per cent of the CPUs' time that other processes used: what was neither idle, nor stolen, nor
    /// this process's or its children's.
    pub others: Maybe<f64>,
    /// The most milliseconds of a second that a vCPU waited for a CPU, by the medians of phases.
    pub waited: Maybe<f64>,
}

/// A bound that was exceeded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Reason {
    /// `waited`, `steal`, `others` or `vcpus`.
    pub what: String,
    /// What was found.
    pub value: f64,
    /// What is allowed.
    pub bound: f64,
    /// The same as a sentence.
    pub sentence: String,
}

/// The state of the host when a run begins.
#[derive(Debug)]
pub struct Begin {
    at: Instant,
    time: u64,
    load: Option<f64>,
    ticks: Option<Ticks>,
    own: Option<u64>,
}

impl Begin {
    /// Reads the state now.
    pub fn now() -> Self {
        let files = Files::here();
        let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        let (load, ticks, own) = (files.load(), files.ticks(), files.own());
        Self { at: Instant::now(), time, load, ticks, own }
    }

    /// Returns what happened since. At most `vcpus` vCPUs ran at once, and waited for CPUs for
    /// `waited` milliseconds of a second.
    pub fn end(&self, vcpus: usize, waited: Option<f64>) -> Trust {
        let files = Files::here();
        let ticks = self.ticks.zip(files.ticks()).filter(|(before, after)| after.all > before.all);
        let share = |of: fn(&Ticks) -> u64, own: u64| {
            let (before, after) = ticks?;
            let all = (after.all - before.all) as f64;
            let part = of(&after).saturating_sub(of(&before)).saturating_sub(own);
            Some(part as f64 / all * 100.0)
        };
        let own = self.own.zip(files.own()).map(|(before, after)| after.saturating_sub(before));
        let used = |ticks: &Ticks| ticks.all - ticks.idle - ticks.stolen;
        Trust {
            trusted: true,
            reasons: Vec::new(),
            began: self.time,
            seconds: self.at.elapsed().as_secs_f64(),
            load_begin: Maybe(self.load),
            load_end: Maybe(files.load()),
            steal: Maybe(share(|ticks| ticks.stolen, 0)),
            others: Maybe(own.and_then(|own| share(used, own))),
            waited: Maybe(waited),
        }
        .judged(vcpus, cpus())
    }
}

impl Trust {
    /// Adds the reasons that its figures give on a machine with `cpus` CPUs.
    pub(crate) fn judged(self, vcpus: usize, cpus: usize) -> Self {
        let beyond = |what: &str, value: Option<f64>, bound: f64, sentence: fn(f64) -> String| {
            let value = value.filter(|value| *value > bound)?;
            Some(Reason { what: what.to_owned(), value, bound, sentence: sentence(value) })
        };
        let reasons: Vec<Reason> = [
            beyond("waited", self.waited.0, WAITED, |ms| {
                format!("vCPUs waited for a CPU for up to {ms:.0} ms of each second")
            }),
            beyond("steal", self.steal.0, STOLEN, |percent| {
                format!("the machine below took {percent:.1} % of the CPUs' time")
            }),
            beyond("others", self.others.0, OTHERS, |percent| {
                format!("other processes used {percent:.0} % of the CPUs' time")
            }),
            crowded(vcpus, cpus).map(|sentence| Reason {
                what: "vcpus".to_owned(),
                value: vcpus as f64,
                bound: cpus as f64,
                sentence,
            }),
        ]
        .into_iter()
        .flatten()
        .collect();
        Self { trusted: reasons.is_empty(), reasons, ..self }
    }

    /// Returns the first line of a report.
    pub fn line(&self) -> String {
        if !self.trusted {
            let sentences: Vec<_> = self.reasons.iter().map(|it| &*it.sentence).collect();
            return format!("NOT TO BE TRUSTED: {}.", sentences.join("; "));
        }
        let known = [
            self.others.0.map(|percent| format!("others used {percent:.0} % of the CPUs")),
            self.steal.0.map(|percent| format!("{percent:.1} % stolen")),
            self.waited.0.map(|ms| format!("vCPUs waited at most {ms:.0} ms/s")),
        ];
        let known: Vec<_> = known.into_iter().flatten().collect();
        match known.is_empty() {
            true => "This host does not tell whether the run was disturbed.".to_owned(),
            false => format!("A quiet run: {}.", known.join(", ")),
        }
    }
}

/// Formats a time, in seconds since 1970.
pub fn date(seconds: u64) -> String {
    let date = humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(seconds));
    date.to_string().replace('T', " ").replace('Z', " UTC")
}

/// Returns the number of CPUs that this process may use.
pub fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, Into::into)
}

/// Returns the sentence about more vCPUs than CPUs, if there are more.
pub fn crowded(vcpus: usize, cpus: usize) -> Option<String> {
    (vcpus > cpus).then(|| {
        let cpus = several(cpus, "CPU");
        format!("{vcpus} vCPUs share {cpus} and wait for each other")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake;

    #[test]
    fn a_run_beyond_a_bound_says_first_why_it_is_not_trusted() {
        let trust = fake::trust();
        assert!(trust.line().starts_with("A quiet run: others"), "{}", trust.line());
        let busy = Trust { waited: Maybe(Some(778.0)), ..trust }.judged(16, 2);
        let whats: Vec<_> = busy.reasons.iter().map(|it| &*it.what).collect();
        assert_eq!((busy.trusted, &whats[..]), (false, &["waited", "vcpus"][..]));
        assert!(busy.line().starts_with("NOT TO BE TRUSTED: "), "{}", busy.line());
        assert!(busy.line().contains("778 ms") && busy.line().contains("16 vCPUs share 2 CPUs"));
    }

    #[test]
    fn what_the_host_does_not_report_is_no_reason_for_distrust() {
        let none = Maybe(None);
        let trust = Trust { others: none, steal: none, waited: none, ..fake::trust() };
        let trust = trust.judged(2, 2);
        assert!(trust.trusted && trust.line().contains("does not tell"), "{}", trust.line());
    }
}
