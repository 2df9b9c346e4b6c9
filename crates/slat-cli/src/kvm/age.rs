//! The scenario `age`: looks for the pages that a guest used, by the interface that the host has.

use super::kept::Answer;
use super::options::GuestArgs;
use super::runs::{Measured, Runs, asked};
use super::tables::{Shown, reader};
use crate::needs;
use clap::Args;
use slat_kvm::figure::Results;
use slat_kvm::idle::Tracking;
use slat_kvm::phase::Phase;
use slat_kvm::scenario::age::{self, Report};
use slat_lab::record::{Measurement, merged_counts};
use slat_lab::renderer::Renderer;
use slat_lab::scenario::Scenario;
use slat_lab::session::Session;
use std::collections::BTreeMap;

const EXAMPLES: &str = "\
Examples:
  slat bench age
      a guest under KVM, aged by the kernel's idle page tracking (needs root)";

/// Options of `slat bench age`.
#[derive(Clone, Debug, Args)]
pub struct AgeArgs {
    /// The guest.
    #[command(flatten)]
    pub guest: GuestArgs,
}

/// The scenario.
pub struct Age;

impl Shown for Age {
    const RESULTS: Results = age::RESULTS;
}

impl Scenario for Age {
    const NAME: &'static str = Self::RESULTS.name;
    const ABOUT: &'static str = "Look for the pages that a guest used";
    const EXAMPLES: &'static str = EXAMPLES;
    const DEFAULTS: &'static [(&'static str, &'static str)] = &[("vcpus", "1")];
    const NEEDS: &'static [&'static [&'static str]] =
        &[&[needs::GUEST_CODE], &[needs::KVM_DEVICE], &[needs::PAGE_IDLE, needs::MGLRU]];
    const RENDERER: Renderer = reader::<Self>();
    type Settings = AgeArgs;

    fn run(args: &AgeArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
        let mut guest = args.guest.clone();
        guest.shrink();
        let mut guests = Runs::new(Age::NAME, &asked(&guest, false))?;
        slat_kvm::probe()?;
        let tracking = Tracking::of_host()?;
        guests.params.insert("tracking".to_owned(), tracking.to_string().into());
        session.start(&guests.name(), guests.steps(8));
        let answer = Answer::Time(Phase::WriteIdle);
        let measured =
            guests.measure(session, answer, |shape, setting| age::run(shape, tracking, setting));
        session.finish();
        let Measured { mut results, reports, .. } = measured?;
        let told: [(Phase, &str, Count); 3] = [
            (Phase::WriteIdle, "idle_after", |report| report.idle_after_writes),
            (Phase::ReadIdle, "idle_after", |report| report.idle_after_reads),
            (Phase::MarkIdle, "marked", |report| report.marked),
        ];
        for (phase, name, of) in told {
            let whole = |m: &&mut Measurement| phase == *m.variant && !m.is_vcpu();
            let samples = reports.iter().filter_map(of);
            let counts = samples.map(|count| BTreeMap::from([(name.to_owned(), count)]));
            if let Some(whole) = results.iter_mut().find(whole) {
                whole.counts.extend(merged_counts(counts));
            }
        }
        Ok(results)
    }
}

/// Reads a count from the report of a run; the count is missing where the host does not give it.
type Count = fn(&Report) -> Option<u64>;
