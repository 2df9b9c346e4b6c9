//! The scenario `execute`: a guest executes from all of its memory.

use super::kept::Answer;
use super::options::GuestArgs;
use super::runs::{Runs, asked};
use super::tables::{Column, MEANING, WHOLE_PHASES, cost, is, of};
use crate::needs::GUEST;
use clap::Args;
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

/// Columns of its table.
const COLUMNS: &[Column] =
    &[("populate", "populate"), ("execute", "execute"), ("read", "read"), ("write", "write")];

/// The scenario.
pub struct Execute;

impl Scenario for Execute {
    const NAME: &'static str = "execute";
    const ABOUT: &'static str = "Execute from huge pages that may not be executed";
    const EXAMPLES: &'static str = EXAMPLES;
    const DEFAULTS: &'static [(&'static str, &'static str)] = &[("backing", "2m")];
    const NEEDS: &'static [&'static [&'static str]] = GUEST;
    const RENDERER: Renderer = Renderer {
        reads: |m| is(m, Self::NAME),
        verdict: |results| {
            cost(results, Self::NAME, "execute", "Executing from memory for the first time")
        },
        tables: |results| {
            of(results, Self::NAME, "Executing from all of memory (KVM)", COLUMNS, WHOLE_PHASES)
        },
        meaning: MEANING,
        ..Renderer::NONE
    };
    type Settings = ExecuteArgs;

    fn run(args: &ExecuteArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
        run(args, session)
    }
}

/// Measures a guest that executes from all of its memory.
///
/// # Errors
/// Values that cannot be right, what this host lacks, or a guest that went wrong.
fn run(args: &ExecuteArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
    let mut guest = args.guest.clone();
    guest.shrink();
    // At least a page for each vCPU.
    let least = guest.backing.in_kvm().page_size() * u64::from(guest.vcpus);
    guest.memory = guest.memory.max(Size(least));
    let guests = Runs::new("execute", &asked(&guest, false))?;
    session.start(&guests.name(), guests.steps(6));
    let answer = Answer::Time(Phase::Execute);
    let measured =
        guests.measure(session, answer, |shape, setting| execute::run(shape, 2, setting));
    session.finish();
    Ok(measured?.results)
}
