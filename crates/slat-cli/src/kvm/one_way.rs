//! A guest that is run in one of the ways that a scenario compares.

use super::guest::{figures, observe};
use super::kept::{Answer, Kept};
use super::options::RunArgs;
use super::phases;
use super::repeat::Repeatable;
use serde_json::{Map, Value};
use slat_kvm::{Error, Setting, figure};
use slat_lab::failure::bad_input;
use slat_lab::record::Measurement;
use slat_lab::session::Session;

/// Runs the guest once.
type Run<'a, R> = Box<dyn FnMut(Setting<'_>) -> Result<R, Error> + 'a>;

/// The guest, what runs it, and the results of its runs.
pub struct OneWay<'a, R> {
    name: String,
    params: Map<String, Value>,
    pin: Vec<usize>,
    kept: Kept<R>,
    run: Run<'a, R>,
}

impl<'a, R> OneWay<'a, R> {
    /// Makes a guest that was not run yet. `params` get the number of runs.
    ///
    /// # Errors
    /// Returns an error for a NUMA node that does not exist or has no CPU.
    pub fn new(
        name: String,
        mut params: Map<String, Value>,
        args: &RunArgs,
        answer: Answer<R>,
        run: impl FnMut(Setting<'_>) -> Result<R, Error> + 'a,
    ) -> anyhow::Result<Self> {
        params.insert("runs".to_owned(), args.repeat().param());
        let kept = Kept::new(answer);
        Ok(Self { name, params, pin: args.kvm.cpus()?, kept, run: Box::new(run) })
    }

    /// Returns the measurements of the phases, and of `values`.
    pub fn measurements(&self, scenario: &str, values: &[figure::Value<R>]) -> Vec<Measurement> {
        let params = self.params();
        let mut results = phases::measurements(scenario, &params, &self.kept.phases);
        results.extend(figures(scenario, &params, values, &self.kept.reports));
        results
    }

    /// Returns the parameters of the results.
    pub fn params(&self) -> Map<String, Value> {
        self.kept.params(&self.params)
    }

    /// Returns the report of the last run, if one is complete.
    pub fn last(&self) -> Option<&R> {
        self.kept.reports.last()
    }
}

impl<R> Repeatable for OneWay<'_, R> {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn run(&mut self, session: &Session) -> anyhow::Result<()> {
        let mut phases = Vec::new();
        let report = observe(session, &self.name, &self.pin, &mut phases, &mut self.run)?;
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
    scenario: &str,
    guests: &mut [OneWay<'_, R>],
    args: &RunArgs,
    phases: u64,
    session: &mut Session,
) -> anyhow::Result<()> {
    let repeat = args.repeat();
    session.start(scenario, guests.len() as u64 * repeat.steps() * phases);
    repeat.run(&mut guests.iter_mut().collect::<Vec<_>>(), session)?;
    session.finish();
    Ok(())
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
