//! The scenario `boot-caches`: all vCPUs of an Arm guest switch their caches off and on at once.

use super::options::GuestArgs;
use super::runs::{Guest, asked};
use super::tables::renderer;
use crate::needs;
use slat_kvm::scenario::boot_caches;
use slat_lab::record::Measurement;
use slat_lab::renderer::Renderer;
use slat_lab::scenario::Scenario;
use slat_lab::session::Session;

const EXAMPLES: &str = "\
Examples:
  slat bench boot-caches --vcpus 8 --memory 1g
      on an arm64 host whose CPU has no FEAT_S2FWB; as root, KVM's own count of the edges, too
  slat emulate --arch aarch64 --cpu cortex-a76 -- bench boot-caches --vcpus 16 --memory 16m
      on an emulated one: counts";

/// The scenario.
pub struct BootCaches;

impl Scenario for BootCaches {
    const NAME: &'static str = boot_caches::RESULTS.name;
    const ABOUT: &'static str = "Have each vCPU of an Arm guest switch its caches, as at boot";
    const EXAMPLES: &'static str = EXAMPLES;
    const DEFAULTS: &'static [(&'static str, &'static str)] = &[("vcpus", "8")];
    const NEEDS: &'static [&'static [&'static str]] =
        &[&[needs::CACHES], &[needs::GUEST_CODE], &[needs::KVM_DEVICE]];
    const RENDERER: Renderer = renderer!(boot_caches::RESULTS);
    type Settings = GuestArgs;

    fn run(args: &GuestArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
        let mut args = args.clone();
        args.shrink();
        session.announce(args.memory.bytes(), args.vcpus as usize, 0);
        let (asked, outcome) = (asked(&args, false), &boot_caches::OUTCOME);
        Guest::of(Self::NAME, &asked, outcome, boot_caches::run)?.alone(4, session)
    }
}
