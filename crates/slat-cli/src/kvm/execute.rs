//! The scenario `execute`: a guest executes from all of its memory.

use super::options::GuestArgs;
use super::runs::{Guest, asked};
use super::tables::renderer;
use crate::needs::GUEST;
use slat_kvm::Setting;
use slat_kvm::guest::Shape;
use slat_kvm::scenario::execute;
use slat_lab::record::Measurement;
use slat_lab::renderer::Renderer;
use slat_lab::scenario::Scenario;
use slat_lab::session::Session;
use slat_lab::size::Size;

const EXAMPLES: &str = "\
Examples:
  slat bench execute
      256 MiB on transparent huge pages: write, execute, read, write every page
  slat bench execute --backing hugetlb-1g --vcpus 8 --memory 8g
      no-execute huge pages as the host has them set";

/// The scenario.
pub struct Execute;

impl Scenario for Execute {
    const NAME: &'static str = execute::RESULTS.name;
    const ABOUT: &'static str = "Execute from huge pages that may not be executed";
    const EXAMPLES: &'static str = EXAMPLES;
    const DEFAULTS: &'static [(&'static str, &'static str)] = &[("backing", "2m")];
    const NEEDS: &'static [&'static [&'static str]] = GUEST;
    const RENDERER: Renderer = renderer!(execute::RESULTS);
    type Settings = GuestArgs;

    fn run(args: &GuestArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
        let mut args = args.clone();
        args.shrink();
        // At least a page for each vCPU.
        let least = args.backing.0.page_size() * u64::from(args.vcpus);
        args.memory = args.memory.max(Size(least));
        session.announce(args.memory.bytes(), args.vcpus as usize, 0);
        let run = |shape: &Shape, setting: Setting<'_>| execute::run(shape, 2, setting);
        Guest::of(Self::NAME, &asked(&args, false), &execute::OUTCOME, run)?.alone(6, session)
    }
}
