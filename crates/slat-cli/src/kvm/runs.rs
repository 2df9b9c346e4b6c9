//! Runs one guest several times, for the scenarios that touch all of a guest's memory.

use super::guest::{Asked, observe};
use super::kept::{Answer, Kept};
use super::options::GuestArgs;
use super::phases;
use super::repeat::{Repeat, Repeatable};
use serde_json::{Map, Value};
use slat_kvm::guest::Shape;
use slat_kvm::{Error, Mode, Setting};
use slat_lab::record::Measurement;
use slat_lab::session::Session;
use slat_lab::size::Size;

/// A guest that is run several times.
pub struct Runs {
    scenario: &'static str,
    pub shape: Shape,
    pub params: Map<String, Value>,
    pin: Vec<usize>,
    repeat: Repeat,
}

/// Results of the runs.
pub struct Measured<R> {
    pub results: Vec<Measurement>,
    /// Parameters of the results, for further measurements that a scenario makes from the reports.
    pub params: Map<String, Value>,
    pub reports: Vec<R>,
}

impl Runs {
    pub fn new(scenario: &'static str, asked: &Asked<'_>) -> anyhow::Result<Self> {
        let repeat = asked.guest.run.repeat();
        let mut params = asked.params();
        params.insert("runs".to_owned(), repeat.param());
        let pin = asked.guest.run.kvm.cpus()?;
        Ok(Self { scenario, shape: asked.shape()?, params, pin, repeat })
    }

    /// Returns the number of steps of all runs, each of which has `phases` phases.
    pub fn steps(&self, phases: u64) -> u64 {
        self.repeat.steps() * phases
    }

    /// Returns the name that is shown while the guest runs.
    pub fn name(&self) -> String {
        let Shape { memory, backing, vcpus, .. } = &self.shape;
        format!("{}, {} on {backing}, {vcpus} vCPUs", self.scenario, Size(*memory))
    }

    /// Runs the guest once to warm the host's memory up, and then as often as was asked for.
    pub fn measure<R>(
        &self,
        session: &mut Session,
        answer: Answer<R>,
        run: impl FnMut(&Shape, Setting<'_>) -> Result<R, Error>,
    ) -> anyhow::Result<Measured<R>> {
        session.announce(self.shape.memory, self.shape.vcpus, 0);
        let mut one = One { runs: self, run, kept: Kept::new(answer) };
        self.repeat.run(&mut [&mut one], session)?;
        let params = one.kept.params(&self.params);
        let results = phases::measurements(self.scenario, &params, &one.kept.phases);
        Ok(Measured { results, params, reports: one.kept.reports })
    }
}

struct One<'a, R, F> {
    runs: &'a Runs,
    run: F,
    kept: Kept<R>,
}

impl<R, F: FnMut(&Shape, Setting<'_>) -> Result<R, Error>> Repeatable for One<'_, R, F> {
    fn name(&self) -> String {
        self.runs.name()
    }

    fn run(&mut self, session: &Session) -> anyhow::Result<()> {
        let mut phases = Vec::new();
        let report = observe(session, &self.name(), &self.runs.pin, &mut phases, |setting| {
            (self.run)(&self.runs.shape, setting)
        })?;
        self.kept.add(phases, report);
        Ok(())
    }

    fn answer(&self) -> (String, &[f64]) {
        self.kept.answer()
    }
}

/// Returns a guest that is not logged.
pub fn asked(guest: &GuestArgs, overlap: bool) -> Asked<'_> {
    Asked { guest, overlap, mode: Mode::Legacy, eager_split: None }
}
