//! The scenario `age`: looks for the pages that a guest used, by the interface that the host has.

use super::kept::Answer;
use super::options::GuestArgs;
use super::runs::{Measured, Runs, asked};
use super::tables::{Shown, reader};
use crate::needs;
use clap::{Args, ValueEnum};
use slat_kvm::figure::Results;
use slat_kvm::idle::Tracking;
use slat_kvm::phase::Phase;
use slat_kvm::scenario::age::{self, Report};
use slat_lab::failure::bad_input;
use slat_lab::record::{Measurement, merged_counts};
use slat_lab::renderer::Renderer;
use slat_lab::scenario::Scenario;
use slat_lab::session::Session;
use std::collections::BTreeMap;

const EXAMPLES: &str = "\
Examples:
  slat bench age
      a guest under KVM, aged by the interfaces that the kernel has (needs root)
  slat bench age --tracking lru-gen --probe 'kvm_age_gfn,__mmu_notifier_age?'
      by the multi-generational LRU, and how often it asks KVM: with batched-ageing, also for 64
      pages at once";

/// Options of `slat bench age`.
#[derive(Clone, Debug, Args)]
pub struct AgeArgs {
    /// The guest.
    #[command(flatten)]
    pub guest: GuestArgs,
    /// How the host looks for used pages: page-idle, which asks KVM for a page at a time, or
    /// lru-gen, the multi-generational LRU, with and without questions for 64 pages where the
    /// kernel can ask them [default: all that the host has]
    #[arg(long, value_name = "WHAT,...", value_delimiter = ',')]
    pub tracking: Vec<By>,
}

/// An interface for access tracking.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum By {
    /// Idle page tracking.
    PageIdle,
    /// The multi-generational LRU.
    LruGen,
}

impl By {
    /// Returns whether it is this interface, or one of its ways.
    fn is(self, tracking: Tracking) -> bool {
        (self == Self::PageIdle) == (tracking == Tracking::IdlePages)
    }
}

impl AgeArgs {
    /// Returns the interfaces to use.
    fn tracking(&self) -> anyhow::Result<Vec<Tracking>> {
        let found = Tracking::all_of_host()?;
        let has = |by: &By| found.iter().any(|tracking| by.is(*tracking));
        if let Some(missing) = self.tracking.iter().find(|by| !has(by)) {
            let missing =
                missing.to_possible_value().map_or_else(String::new, |it| it.get_name().into());
            let found: Vec<String> = found.iter().map(Tracking::to_string).collect();
            return Err(bad_input(format!(
                "--tracking: this host lets nobody write {missing}; it has {}",
                found.join(", ")
            )));
        }
        let is_asked = |tracking: &Tracking| self.tracking.iter().any(|by| by.is(*tracking));
        Ok(found.into_iter().filter(|it| self.tracking.is_empty() || is_asked(it)).collect())
    }
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
        let mut all = Vec::new();
        for tracking in args.tracking()? {
            guests.params.insert("tracking".to_owned(), tracking.to_string().into());
            all.extend(measured(&guests, tracking, session)?);
        }
        Ok(all)
    }
}

/// Measures guests that are aged by an interface.
fn measured(
    guests: &Runs,
    tracking: Tracking,
    session: &mut Session,
) -> anyhow::Result<Vec<Measurement>> {
    session.start(&format!("{}, {tracking}", guests.name()), guests.steps(8));
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

/// Reads a count from the report of a run; the count is missing where the host does not give it.
type Count = fn(&Report) -> Option<u64>;
