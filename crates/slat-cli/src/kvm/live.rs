//! Measures vCPUs that keep running while the VMM fetches their log.

use super::guest::{Pattern, measurement, observe};
use super::kept::{Answer, Kept};
use super::log_options::{DirtyLogArgs, asked, chunk, log_params};
use super::phases;
use super::repeat::Repeatable;
use serde_json::{Map, Value};
use slat_kvm::Backing;
use slat_kvm::phase::Phase;
use slat_kvm::scenario::live::{self, CallTimes, Config, Report, Sample};
use slat_kvm::work::Work;
use slat_lab::record::Measurement;
use slat_lab::session::Session;
use std::time::Duration;

/// Name of the scenario in results.
pub const SCENARIO: &str = "dirty-log-live";
/// Default time from one fetch to the next.
const INTERVAL: Duration = Duration::from_millis(100);
/// Phases of a run.
const PHASES: u64 = 4;

/// Measures the guest that `args` describes, for the time that it asks for.
///
/// # Errors
/// Values that cannot be right, what this host lacks, or a guest or a log that went wrong.
pub fn run(args: &DirtyLogArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
    let clear_chunk = chunk(args)?;
    let interval = args.interval.unwrap_or(INTERVAL);
    let duration = args.duration.unwrap_or(Duration::from_secs(1));
    let config = Config {
        shape: asked(args)?.shape()?,
        work: Pattern::of(&args.log).work(args.guest.vcpus),
        duration,
        interval,
        clear_chunk,
    };
    let mut params = log_params(args, clear_chunk)?;
    params.insert("duration".to_owned(), duration.as_secs_f64().into());
    params.insert("interval_ms".to_owned(), (interval.as_millis() as u64).into());
    let mut guest = Live::new(config, params, args.guest.run.kvm.cpus()?);
    session.announce(args.guest.memory.bytes(), args.guest.vcpus as usize, 2);
    let repeat = args.guest.run.repeat();
    session.start(&guest.name(), repeat.steps() * PHASES);
    repeat.run(&mut [&mut guest], session)?;
    session.finish();
    Ok(guest.measurements())
}

/// One way of logging, which is measured in several runs; the first run warms up.
pub(super) struct Live {
    pub config: Config,
    params: Map<String, Value>,
    pin: Vec<usize>,
    pub kept: Kept<Report>,
}

impl Live {
    pub fn new(config: Config, params: Map<String, Value>, pin: Vec<usize>) -> Self {
        Self { config, params, pin, kept: Kept::new(Answer::Stalls(Phase::Run)) }
    }

    /// Returns the measurements so far.
    pub fn measurements(&self) -> Vec<Measurement> {
        let Kept { phases, reports: kept, .. } = &self.kept;
        let params = self.kept.params(&self.params);
        let mut results = phases::measurements(SCENARIO, &params, phases);
        // A run that was stopped has no report, so it has no pace with logging off to compare with.
        let Some(last) = kept.last() else { return results };
        if let Some(run) = results.iter_mut().find(|m| m.variant == Phase::Run.name()) {
            let reports = kept.iter().map(|report| {
                let counts = [
                    ("fetches", report.rounds),
                    ("pages_named", report.named),
                    ("pages_in_excess", report.verified.excess),
                    ("writes_verified", report.verified.writes),
                    ("full_rings", report.full_rings),
                ];
                counts.map(|(name, count)| (name.to_owned(), count)).into()
            });
            run.counts.extend(slat_lab::record::merged_counts(reports));
        }
        let reports = || kept.iter();
        let mut add = |variant: &str, unit: &str, samples: Vec<f64>| {
            results.push(measurement(SCENARIO, variant, params.clone(), unit, samples));
        };
        let work = &self.config.work;
        add("write-rate", "MiB/s", reports().map(|it| written(&it.samples, work)).collect());
        add("loss", "%", reports().map(|it| loss(&it.samples, it.baseline)).collect());
        add("loss-worst", "%", reports().map(|it| worst(&it.samples, it.baseline)).collect());
        for (name, of) in
            [("enable", enable as fn(&Report) -> CallTimes), ("get", get), ("clear", clear)]
        {
            let each: Vec<CallTimes> = reports().map(of).collect();
            results.extend(calls(SCENARIO, &params, name, &each));
        }
        let (times, pace) = pace(&last.samples, last.baseline).into_iter().unzip();
        results.push(measurement(SCENARIO, "pace", params.clone(), "%", pace));
        results.push(measurement(SCENARIO, "pace-at", params, "s", times));
        results
    }
}

impl Repeatable for Live {
    fn name(&self) -> String {
        let shape = &self.config.shape;
        format!("dirty-log beside running vCPUs, on {}, {}", shape.backing, shape.mode)
    }

    fn run(&mut self, session: &Session) -> anyhow::Result<()> {
        let mut phases = Vec::new();
        let name = self.name();
        let report = observe(session, &name, &self.pin, &mut phases, |setting| {
            live::run(&self.config, setting)
        })?;
        self.kept.add(phases, report);
        Ok(())
    }

    fn answer(&self) -> (String, &[f64]) {
        self.kept.answer()
    }
}

/// Returns two measurements of the calls of one kind, with a sample for each run: the mean, and the
/// longest call. Returns none if no run made such a call.
pub(super) fn calls(
    scenario: &str,
    params: &Map<String, Value>,
    name: &str,
    runs: &[CallTimes],
) -> Vec<Measurement> {
    if runs.iter().all(|calls| calls.count == 0) {
        return Vec::new();
    }
    let mean = runs.iter().map(|calls| calls.seconds / calls.count.max(1) as f64).collect();
    let longest = runs.iter().map(|calls| calls.longest).collect();
    let longest_call = format!("{name}-longest-call");
    vec![
        measurement(scenario, name, params.clone(), "s", mean),
        measurement(scenario, &longest_call, params.clone(), "s", longest),
    ]
}

/// Returns the rate at which the vCPUs wrote, in MiB/s, where each write counts as a page.
pub(super) fn written(samples: &[Sample], work: &Work) -> f64 {
    let steps: u64 = samples.iter().map(|sample| sample.steps).sum();
    let seconds: f64 = samples.iter().map(|sample| sample.seconds).sum();
    let bytes = steps as f64 * f64::from(work.share) / 100.0 * Backing::Small.page_size() as f64;
    bytes / seconds.max(f64::MIN_POSITIVE) / f64::from(1 << 20)
}

fn enable(report: &Report) -> CallTimes {
    report.enable
}

fn get(report: &Report) -> CallTimes {
    report.get
}

fn clear(report: &Report) -> CallTimes {
    report.clear
}

/// Returns, for each sample longer than 50 ms, its end in seconds, and its steps in per cent of
/// what the vCPUs do with logging off.
pub(super) fn pace(samples: &[Sample], baseline: f64) -> Vec<(f64, f64)> {
    let whole = samples.iter().filter(|sample| sample.seconds > 0.05);
    whole.map(|sample| (sample.at, share(sample.steps, sample.seconds, baseline))).collect()
}

fn share(steps: u64, seconds: f64, baseline: f64) -> f64 {
    if seconds * baseline > 0.0 { steps as f64 / (seconds * baseline) * 100.0 } else { 0.0 }
}

/// Returns the part of its pace that the guest lost, in per cent; it is below 0 if the guest was
/// faster.
pub(super) fn loss(samples: &[Sample], baseline: f64) -> f64 {
    let steps = samples.iter().map(|sample| sample.steps).sum();
    let seconds = samples.iter().map(|sample| sample.seconds).sum();
    100.0 - share(steps, seconds, baseline)
}

/// Returns the loss of the second that lost most, in per cent.
pub(super) fn worst(samples: &[Sample], baseline: f64) -> f64 {
    let from = |first: usize| {
        let begin = samples[first].at - samples[first].seconds;
        // The sum of ten tenths of a second in floating point may be a little below one.
        let last = samples[first..].iter().position(|it| it.at - begin > 0.999)?;
        Some(loss(&samples[first..=first + last], baseline))
    };
    // A run of less than a second counts as one second.
    (0..samples.len()).filter_map(from).reduce(f64::max).unwrap_or_else(|| loss(samples, baseline))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(steps: &[u64]) -> Vec<Sample> {
        let sample = |(index, &steps)| Sample {
            at: (index + 1) as f64 / 10.0,
            seconds: 0.1,
            steps,
            stalled: Vec::new(),
        };
        steps.iter().enumerate().map(sample).collect()
    }

    #[test]
    fn a_loss_is_what_is_missing_of_the_pace_before() {
        let even = samples(&[5; 20]);
        assert!((loss(&even, 100.0) - 50.0).abs() < 1e-9);
        assert!((worst(&even, 100.0) - 50.0).abs() < 1e-9);
        assert_eq!(pace(&even, 100.0).len(), 20);
        assert!(loss(&even, 0.0) == 100.0, "no pace, nothing but loss");
    }

    #[test]
    fn the_worst_second_is_found_wherever_it_is() {
        let mut steps = [10; 30];
        steps[12..20].fill(0);
        assert!((worst(&samples(&steps), 100.0) - 80.0).abs() < 1e-6);
        assert!((worst(&samples(&[10; 3]), 100.0)).abs() < 1e-6);
        // The worst second may lie across the boundary of two whole seconds.
        let mut steps = [10; 20];
        steps[5..15].fill(0);
        assert!((worst(&samples(&steps), 100.0) - 100.0).abs() < 1e-6);
    }
}
