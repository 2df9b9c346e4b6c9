//! The scenario `boot-caches`: all vCPUs of an Arm guest switch their caches off and on at once.

use super::kept::Answer;
use super::options::GuestArgs;
use super::runs::{Measured, Runs, asked};
use super::tables::{Column, MEANING, WHOLE_PHASES, is, of, whole};
use crate::needs;
use clap::Args;
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

/// Columns of its table.
const COLUMNS: &[Column] = &[("populate", "populate"), ("toggle", "switch")];

/// The scenario.
pub struct BootCaches;

impl Scenario for BootCaches {
    const NAME: &'static str = "boot-caches";
    const ABOUT: &'static str = "Have each vCPU of an Arm guest switch its caches, as at boot";
    const EXAMPLES: &'static str = EXAMPLES;
    const DEFAULTS: &'static [(&'static str, &'static str)] = &[("vcpus", "8")];
    const NEEDS: &'static [&'static [&'static str]] =
        &[&[needs::CACHES], &[needs::GUEST_CODE], &[needs::KVM_DEVICE]];
    const RENDERER: Renderer = Renderer {
        reads: |m| is(m, Self::NAME),
        verdict: |results| {
            whole(
                results,
                Self::NAME,
                "toggle",
                "Switching the caches of all vCPUs off and on takes",
            )
        },
        tables: |results| {
            of(results, Self::NAME, "Caches switched off and on (KVM)", COLUMNS, WHOLE_PHASES)
        },
        meaning: MEANING,
        ..Renderer::NONE
    };
    type Settings = BootCachesArgs;

    fn run(args: &BootCachesArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
        run(args, session)
    }
}

/// Measures a guest whose vCPUs switch their caches off and on.
///
/// # Errors
/// Values that cannot be right, what this host lacks, or a guest that went wrong.
fn run(args: &BootCachesArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
    let args = &args.sized();
    let asked = asked(&args.guest, false);
    let guests = Runs::new("boot-caches", &asked)?;
    session.start(&guests.name(), guests.steps(4));
    let measured = guests.measure(session, Answer::Time(Phase::Toggle), boot_caches::run);
    session.finish();
    let Measured { mut results, reports, .. } = measured?;
    let toggles = reports.iter().filter_map(|report| report.toggles);
    let counts = toggles.map(|toggles| BTreeMap::from([("cache_toggles".to_owned(), toggles)]));
    if let Some(whole) = results.iter_mut().find(|m| m.variant == "toggle") {
        whole.counts.extend(merged_counts(counts));
    }
    Ok(results)
}
