//! Measures vCPUs that keep running while the VMM fetches their log.

use super::guest::{Pattern, course, figures, observe};
use super::kept::{Answer, Kept};
use super::log_options::{DirtyLogArgs, asked, chunk, log_params};
use super::phases;
use super::repeat::Repeatable;
use serde_json::{Map, Value};
use slat_kvm::phase::Phase;
use slat_kvm::scenario::live::{self, Config, Report};
use slat_kvm::scenario::pace;
use slat_lab::record::Measurement;
use slat_lab::session::Session;
use std::time::Duration;

/// Name of the scenario in results.
pub const SCENARIO: &str = live::RESULTS.name;
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
        if let Some(run) = results.iter_mut().find(|m| Phase::Run == *m.variant) {
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
        results.extend(figures(SCENARIO, &params, live::FIGURES, kept));
        results.extend(course(SCENARIO, &params, pace::course(&last.samples, last.baseline)));
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
