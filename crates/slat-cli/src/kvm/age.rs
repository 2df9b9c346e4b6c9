//! The scenario `age`: looks for the pages that a guest used, by the interface that the host has.

use super::kept::Answer;
use super::options::GuestArgs;
use super::runs::{Measured, Runs, asked};
use super::tables::{Column, MEANING, WHOLE_PHASES, cost, is, of};
use crate::needs;
use clap::Args;
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

/// Columns of its table.
const COLUMNS: &[Column] = &[
    ("populate", "populate"),
    ("write", "write"),
    ("read", "read"),
    ("mark-idle", "mark idle"),
    ("write-idle", "write to idle"),
    ("read-idle", "read idle"),
];

/// The scenario.
pub struct Age;

impl Scenario for Age {
    const NAME: &'static str = "age";
    const ABOUT: &'static str = "Look for the pages that a guest used";
    const EXAMPLES: &'static str = EXAMPLES;
    const DEFAULTS: &'static [(&'static str, &'static str)] = &[("vcpus", "1")];
    const NEEDS: &'static [&'static [&'static str]] =
        &[&[needs::GUEST_CODE], &[needs::KVM_DEVICE], &[needs::PAGE_IDLE, needs::MGLRU]];
    const RENDERER: Renderer = Renderer {
        reads: |m| is(m, Self::NAME),
        verdict: |results| {
            cost(results, Self::NAME, "write-idle", "A write to memory that was marked idle")
        },
        tables: |results| of(results, Self::NAME, "Ageing (KVM)", COLUMNS, WHOLE_PHASES),
        meaning: MEANING,
        ..Renderer::NONE
    };
    type Settings = AgeArgs;

    fn run(args: &AgeArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
        run(args, session)
    }
}

/// Reads a count from the report of a run; the count is missing where the host does not give it.
type Count = fn(&Report) -> Option<u64>;

/// Ages a guest's memory by the interface that the host has, and measures each phase.
///
/// # Errors
/// Values that cannot be right, what this host lacks, or a guest that went wrong.
fn run(args: &AgeArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
    let mut guest = args.guest.clone();
    guest.shrink();
    let mut guests = Runs::new("age", &asked(&guest, false))?;
    slat_kvm::probe()?;
    let tracking = Tracking::of_host()?;
    guests.params.insert("tracking".to_owned(), tracking.to_string().into());
    session.start(&guests.name(), guests.steps(8));
    let answer = Answer::Time(Phase::WriteIdle);
    let measured =
        guests.measure(session, answer, |shape, setting| age::run(shape, tracking, setting));
    session.finish();
    let Measured { mut results, reports, .. } = measured?;
    let told: [(&str, &str, Count); 3] = [
        ("write-idle", "idle_after", |report| report.idle_after_writes),
        ("read-idle", "idle_after", |report| report.idle_after_reads),
        ("mark-idle", "marked", |report| report.marked),
    ];
    for (phase, name, of) in told {
        let whole = |m: &&mut Measurement| m.variant == phase && !m.params.contains_key("vcpu");
        let samples = reports.iter().filter_map(of);
        let counts = samples.map(|count| BTreeMap::from([(name.to_owned(), count)]));
        if let Some(whole) = results.iter_mut().find(whole) {
            whole.counts.extend(merged_counts(counts));
        }
    }
    Ok(results)
}
