//! One guest, several times: what touches all of a guest's memory.

use super::guest::{Asked, observe};
use super::options::GuestArgs;
use super::phases;
use serde_json::{Map, Value};
use slat_kvm::guest::Shape;
use slat_kvm::phase::PhaseRun;
use slat_kvm::{Error, Mode, Setting};
use slat_lab::record::Measurement;
use slat_lab::session::Session;
use slat_lab::size::Size;

/// One guest, several times.
pub struct Runs {
    scenario: &'static str,
    pub shape: Shape,
    pub params: Map<String, Value>,
    pin: Vec<usize>,
    runs: u32,
}

impl Runs {
    pub fn new(scenario: &'static str, asked: &Asked<'_>, runs: u32) -> anyhow::Result<Self> {
        let mut params = asked.params();
        params.insert("runs".to_owned(), runs.into());
        Ok(Self { scenario, shape: asked.shape()?, params, pin: asked.guest.run.kvm.cpus()?, runs })
    }

    /// Guests that are run, the one that warms up included.
    pub fn steps(&self) -> u64 {
        u64::from(self.runs) + 1
    }

    /// What is measured, for the person waiting.
    pub fn name(&self) -> String {
        let Shape { memory, backing, vcpus, .. } = &self.shape;
        format!("{}, {} on {backing}, {vcpus} vCPUs", self.scenario, Size(*memory))
    }

    /// Runs the guest once more than is asked for; the first warms the host's memory up.
    pub fn measure(
        &self,
        session: &Session,
        mut run: impl FnMut(&Shape, Setting<'_>) -> Result<Vec<PhaseRun>, Error>,
    ) -> anyhow::Result<Vec<Measurement>> {
        let name = self.name();
        session.announce(self.shape.memory, self.shape.vcpus, 0);
        let mut all = Vec::new();
        for number in 0..=self.runs {
            if session.interrupted() {
                break;
            }
            let mut phases = Vec::new();
            observe(session, &name, &self.pin, &mut phases, |setting| run(&self.shape, setting))?;
            if number > 0 {
                all.extend(phases);
            }
        }
        Ok(phases::measurements(self.scenario, &self.params, &all))
    }
}

/// A guest that is not logged.
pub fn asked(guest: &GuestArgs, overlap: bool) -> Asked<'_> {
    Asked { guest, overlap, mode: Mode::Legacy, eager_split: None }
}
