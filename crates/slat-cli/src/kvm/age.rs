//! The scenario `age`: looks for the pages that a guest used, by the interface that the host has.

use super::options::GuestArgs;
use super::repeat::Repeatable;
use super::runs::{Guest, asked};
use super::tables::renderer;
use crate::needs;
use clap::{Args, ValueEnum};
use slat_kvm::Setting;
use slat_kvm::guest::Shape;
use slat_kvm::idle::AccessTracking;
use slat_kvm::scenario::age;
use slat_lab::failure::bad_input;
use slat_lab::record::Measurement;
use slat_lab::renderer::Renderer;
use slat_lab::scenario::Scenario;
use slat_lab::session::Session;

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
    fn is(self, tracking: AccessTracking) -> bool {
        (self == Self::PageIdle) == (tracking == AccessTracking::IdlePages)
    }
}

impl AgeArgs {
    /// Returns the interfaces to use.
    fn tracking(&self) -> anyhow::Result<Vec<AccessTracking>> {
        let found = AccessTracking::all_of_host()?;
        let has = |by: &By| found.iter().any(|tracking| by.is(*tracking));
        if let Some(missing) = self.tracking.iter().find(|by| !has(by)) {
            let missing =
                missing.to_possible_value().map_or_else(String::new, |it| it.get_name().into());
            let found: Vec<String> = found.iter().map(AccessTracking::to_string).collect();
            return Err(bad_input(format!(
                "--tracking: this host lets nobody write {missing}; it has {}",
                found.join(", ")
            )));
        }
        let is_asked = |tracking: &AccessTracking| self.tracking.iter().any(|by| by.is(*tracking));
        Ok(found.into_iter().filter(|it| self.tracking.is_empty() || is_asked(it)).collect())
    }
}

/// The scenario.
pub struct Age;

impl Scenario for Age {
    const NAME: &'static str = age::RESULTS.name;
    const ABOUT: &'static str = "Look for the pages that a guest used";
    const EXAMPLES: &'static str = EXAMPLES;
    const DEFAULTS: &'static [(&'static str, &'static str)] = &[("vcpus", "1")];
    const NEEDS: &'static [&'static [&'static str]] =
        &[&[needs::GUEST_CODE], &[needs::KVM_DEVICE], &[needs::PAGE_IDLE, needs::MGLRU]];
    const RENDERER: Renderer = renderer!(age::RESULTS);
    type Settings = AgeArgs;

    fn run(args: &AgeArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
        let mut guest = args.guest.clone();
        guest.shrink();
        let asked = asked(&guest, false);
        asked.shape()?;
        slat_kvm::probe()?;
        let mut all = Vec::new();
        for tracking in args.tracking()? {
            let run = move |shape: &Shape, setting: Setting<'_>| age::run(shape, tracking, setting);
            let case = Guest::of(Self::NAME, &asked, &age::OUTCOME, run)?;
            let case = case.with("tracking", tracking.to_string());
            session.start(&format!("{}, {tracking}", case.name()), case.steps(8));
            session.announce(guest.memory.bytes(), guest.vcpus as usize, 0);
            let results = case.measure(session);
            session.finish();
            all.extend(results?);
        }
        Ok(all)
    }
}
