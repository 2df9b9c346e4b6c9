//! Guests that are run several times, and the results of their runs.

use super::guest::{GuestOptions, course, figures, observe};
use super::kept::KeptResults;
use super::options::{GuestArgs, RunArgs};
use super::phases;
use super::repeat::{Repeat, Repeatable};
use serde_json::{Map, Value};
use slat_kvm::figure::Outcome;
use slat_kvm::guest::Shape;
use slat_kvm::{Error, Mode, Setting};
use slat_lab::failure::bad_input;
use slat_lab::record::{Measurement, merged_counts};
use slat_lab::session::Session;
use slat_lab::size::Size;
use std::collections::BTreeMap;

/// Runs the guest once.
type Run<'a, R> = Box<dyn FnMut(Setting<'_>) -> Result<R, Error> + 'a>;

/// Returns what is to be said of a run of the guest with that name, of which it is known whether
/// it was the first.
type Notes<R> = fn(&str, &R, bool) -> Vec<String>;

/// A guest, what runs it, and the results of its runs; the first run warms up.
pub struct Guest<'a, R: 'static> {
    scenario: &'static str,
    name: String,
    /// Parameters of the results.
    pub params: Map<String, Value>,
    pin: Vec<usize>,
    repeat: Repeat,
    kept: KeptResults<R>,
    run: Run<'a, R>,
    notes: Notes<R>,
}

impl<'a, R> Guest<'a, R> {
    /// Makes a guest that was not run yet. `params` get the number of runs.
    ///
    /// # Errors
    /// Returns an error for a NUMA node that does not exist or has no CPU.
    pub fn new(
        scenario: &'static str,
        name: String,
        params: Map<String, Value>,
        args: &RunArgs,
        outcome: &'static Outcome<R>,
        run: impl FnMut(Setting<'_>) -> Result<R, Error> + 'a,
    ) -> anyhow::Result<Self> {
        let (repeat, pin, kept) = (args.repeat(), args.kvm.cpus()?, KeptResults::new(outcome));
        let (run, notes) = (Box::new(run), (|_, _, _| Vec::new()) as Notes<R>);
        let guest = Self { scenario, name, params, pin, repeat, kept, run, notes };
        Ok(guest.with("runs", repeat.param()))
    }

    /// Makes a guest of the shape that the options ask for.
    ///
    /// # Errors
    /// Values that cannot be right.
    pub fn of(
        scenario: &'static str,
        asked: &GuestOptions<'_>,
        outcome: &'static Outcome<R>,
        mut run: impl FnMut(&Shape, Setting<'_>) -> Result<R, Error> + 'a,
    ) -> anyhow::Result<Self> {
        let shape = asked.shape()?;
        let Shape { memory, backing, vcpus, .. } = &shape;
        let name = format!("{scenario}, {} on {backing}, {vcpus} vCPUs", Size(*memory));
        let run = move |setting: Setting<'_>| run(&shape, setting);
        Self::new(scenario, name, asked.params(), &asked.guest.run, outcome, run)
    }

    /// Adds a parameter of the results.
    pub fn with(mut self, param: &str, value: impl Into<Value>) -> Self {
        self.params.insert(param.to_owned(), value.into());
        self
    }

    /// Has `notes` said of each run.
    pub fn noting(self, notes: Notes<R>) -> Self {
        Self { notes, ..self }
    }

    /// Returns the number of steps of all runs, each of which has `phases` phases.
    pub fn steps(&self, phases: u64) -> u64 {
        self.repeat.steps() * phases
    }

    /// Runs the guest as often as was asked for, and returns the measurements.
    ///
    /// # Errors
    /// Returns the error of a run.
    pub fn measure(mut self, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
        let repeat = self.repeat;
        repeat.run(&mut [&mut self], session)?;
        Ok(self.measurements())
    }

    /// The same, for a guest whose runs have `phases` phases each, and which is all that is
    /// measured.
    ///
    /// # Errors
    /// Returns the error of a run.
    pub fn alone(self, phases: u64, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
        session.start(&self.name, self.steps(phases));
        let results = self.measure(session);
        session.finish();
        results
    }

    /// Returns the measurements so far: of the phases, and of what the reports of the runs give. A
    /// run that was stopped has no report.
    pub fn measurements(&self) -> Vec<Measurement> {
        let KeptResults { phases, reports, outcome, .. } = &self.kept;
        let (scenario, params) = (self.scenario, self.kept.params(&self.params));
        let mut results = phases::measurements(scenario, &params, phases);
        let last = &reports[reports.len().saturating_sub(1)..];
        for (counts, reports) in [(outcome.counts, &reports[..]), (outcome.last, last)] {
            for (phase, name, of) in counts {
                let samples = reports.iter().filter_map(of);
                let samples = samples.map(|count| BTreeMap::from([((*name).to_owned(), count)]));
                if let Some(whole) = results.iter_mut().find(|m| *phase == *m.variant) {
                    whole.counts.extend(merged_counts(samples));
                }
            }
        }
        results.extend(figures(scenario, &params, outcome.figures, reports));
        results.extend(course(scenario, &params, last.iter().flat_map(outcome.course)));
        results
    }
}

impl<R> Repeatable for Guest<'_, R> {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn run(&mut self, session: &Session) -> anyhow::Result<()> {
        let mut phases = Vec::new();
        let report = observe(session, &self.name, &self.pin, &mut phases, &mut self.run)?;
        if let Some(report) = &report {
            let notes = (self.notes)(&self.name, report, !self.kept.is_warm());
            notes.iter().for_each(|line| session.note(line));
        }
        self.kept.add(phases, report);
        Ok(())
    }

    fn answer(&self) -> (String, &[f64]) {
        self.kept.answer()
    }
}

/// Runs all guests in turns, each of which has `phases` phases.
///
/// # Errors
/// Returns the error of a guest's run.
pub fn in_turns<R>(
    what: &str,
    mut guests: Vec<Guest<'_, R>>,
    phases: u64,
    session: &mut Session,
) -> anyhow::Result<Vec<Measurement>> {
    let Some(repeat) = guests.first().map(|guest| guest.repeat) else { return Ok(Vec::new()) };
    session.start(what, guests.len() as u64 * repeat.steps() * phases);
    repeat.run(&mut guests.iter_mut().collect::<Vec<_>>(), session)?;
    session.finish();
    Ok(guests.iter().flat_map(Guest::measurements).collect())
}

/// Returns whether a way whose check had that result is measured. A way that the host lacks and
/// that was not `asked` for by name is skipped.
///
/// # Errors
/// Returns the error of a check otherwise, as bad input where a value cannot be.
pub fn admits(
    checked: Result<(), Error>,
    name: &str,
    asked: bool,
    session: &mut Session,
) -> anyhow::Result<bool> {
    match checked {
        Ok(()) => Ok(true),
        Err(error @ Error::Invalid { .. }) => Err(bad_input(error.to_string())),
        Err(error) if error.is_missing_feature() && !asked => {
            session.skip(name.to_owned(), error.to_string());
            Ok(false)
        }
        Err(error) => Err(error.into()),
    }
}

/// Returns a guest that is not logged.
pub fn asked(guest: &GuestArgs, overlap: bool) -> GuestOptions<'_> {
    GuestOptions { guest, overlap, mode: Mode::Legacy, eager_split: None }
}
