//! The scenario `execute`: a guest executes from all of its memory.

use super::kept::Answer;
use super::options::GuestArgs;
use super::runs::{Runs, asked};
use super::tables::{Shown, reader};
use crate::needs::GUEST;
use clap::Args;
use slat_kvm::figure::Results;
use slat_kvm::phase::Phase;
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

/// Options of `slat bench execute`.
#[derive(Clone, Debug, Args)]
pub struct ExecuteArgs {
    /// The guest.
    #[command(flatten)]
    pub guest: GuestArgs,
}

/// The scenario.
pub struct Execute;

impl Shown for Execute {
    const RESULTS: Results = execute::RESULTS;
}

impl Scenario for Execute {
    const NAME: &'static str = Self::RESULTS.name;
    const ABOUT: &'static str = "Execute from huge pages that may not be executed";
    const EXAMPLES: &'static str = EXAMPLES;
    const DEFAULTS: &'static [(&'static str, &'static str)] = &[("backing", "2m")];
    const NEEDS: &'static [&'static [&'static str]] = GUEST;
    const RENDERER: Renderer = reader::<Self>();
    type Settings = ExecuteArgs;

    fn run(args: &ExecuteArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
        let mut guest = args.guest.clone();
        guest.shrink();
        // At least a page for each vCPU.
        let least = guest.backing.0.page_size() * u64::from(guest.vcpus);
        guest.memory = guest.memory.max(Size(least));
        let guests = Runs::new(Execute::NAME, &asked(&guest, false))?;
        session.start(&guests.name(), guests.steps(6));
        let answer = Answer::Time(Phase::Execute);
        let measured =
            guests.measure(session, answer, |shape, setting| execute::run(shape, 2, setting));
        session.finish();
        Ok(measured?.results)
    }
}
