//! The scenario `boot-caches`: all vCPUs of an Arm guest switch their caches off and on at once.

use super::kept::Answer;
use super::options::GuestArgs;
use super::runs::{Measured, Runs, asked};
use super::tables::{Shown, reader};
use crate::needs;
use clap::Args;
use slat_kvm::figure::Results;
use slat_kvm::phase::Phase;
use slat_kvm::scenario::boot_caches;
use slat_lab::record::{Measurement, merged_counts};
use slat_lab::renderer::Renderer;
use slat_lab::scenario::Scenario;
use slat_lab::session::Session;
use std::collections::BTreeMap;

const EXAMPLES: &str = "\
Examples:
  slat bench boot-caches --vcpus 8 --memory 1g
      on an arm64 host whose CPU has no FEAT_S2FWB; as root, KVM's own count of the edges, too
  slat emulate --arch aarch64 --cpu cortex-a76 -- bench boot-caches --vcpus 16 --memory 16m
      on an emulated one: counts";

/// Options of `slat bench boot-caches`.
#[derive(Clone, Debug, Args)]
pub struct BootCachesArgs {
    /// The guest.
    #[command(flatten)]
    pub guest: GuestArgs,
}

impl BootCachesArgs {
    /// Returns the options, reduced if `--quick` is given.
    pub fn sized(&self) -> Self {
        let mut args = self.clone();
        args.guest.shrink();
        args
    }
}

/// The scenario.
pub struct BootCaches;

impl Shown for BootCaches {
    const RESULTS: Results = boot_caches::RESULTS;
}

impl Scenario for BootCaches {
    const NAME: &'static str = Self::RESULTS.name;
    const ABOUT: &'static str = "Have each vCPU of an Arm guest switch its caches, as at boot";
    const EXAMPLES: &'static str = EXAMPLES;
    const DEFAULTS: &'static [(&'static str, &'static str)] = &[("vcpus", "8")];
    const NEEDS: &'static [&'static [&'static str]] =
        &[&[needs::CACHES], &[needs::GUEST_CODE], &[needs::KVM_DEVICE]];
    const RENDERER: Renderer = reader::<Self>();
    type Settings = BootCachesArgs;

    fn run(args: &BootCachesArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
        let args = &args.sized();
        let asked = asked(&args.guest, false);
        let guests = Runs::new(BootCaches::NAME, &asked)?;
        session.start(&guests.name(), guests.steps(4));
        let measured = guests.measure(session, Answer::Time(Phase::Toggle), boot_caches::run);
        session.finish();
        let Measured { mut results, reports, .. } = measured?;
        let toggles = reports.iter().filter_map(|report| report.toggles);
        let counts = toggles.map(|toggles| BTreeMap::from([("cache_toggles".to_owned(), toggles)]));
        if let Some(whole) = results.iter_mut().find(|m| Phase::Toggle == *m.variant) {
            whole.counts.extend(merged_counts(counts));
        }
        Ok(results)
    }
}
