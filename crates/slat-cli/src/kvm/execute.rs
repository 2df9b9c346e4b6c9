//! Execution from all of memory.

use super::options::KvmArgs;
use super::runs::{Runs, asked, runs, usual};
use super::values::KvmBacking;
use crate::needs::GUEST;
use clap::Args;
use slat_kvm::scenario::execute;
use slat_lab::record::Measurement;
use slat_lab::scenario::Scenario;
use slat_lab::session::Session;
use slat_lab::size::Size;

const EXAMPLES: &str = "\
Examples:
  slat bench execute
      256 MiB on transparent huge pages: write, execute, read, write every page
  slat bench execute --backing hugetlb-1g --vcpus 8 --memory 8g
      no-execute huge pages as the host has them set";

/// A guest that executes from all of its memory.
#[derive(Clone, Debug, Args)]
pub struct ExecuteArgs {
    /// Memory of the guest; at least a page of the backing for each vCPU [default: 256m]
    #[arg(long, short = 'b', value_name = "SIZE")]
    pub memory: Option<Size>,

    /// vCPUs
    #[arg(long, short = 'v', value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=512))]
    pub vcpus: u32,

    /// What backs the guest's memory
    #[arg(long, short = 's', value_name = "BACKING", default_value = "2m")]
    pub backing: KvmBacking,

    /// Guests that are measured, one after the other; one more warms the host's memory up [default: 3]
    #[arg(long, short = 'r', value_name = "N", alias = "rounds", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub runs: Option<u32>,

    /// What only KVM has.
    #[command(flatten)]
    pub kvm: KvmArgs,

    /// At most 16 MiB, one guest: shows that it works, gives no figures to quote
    #[arg(long)]
    pub quick: bool,
}

/// The scenario.
pub struct Execute;

impl Scenario for Execute {
    const NAME: &'static str = "execute";
    const ABOUT: &'static str = "Execute from huge pages that may not be executed";
    const EXAMPLES: &'static str = EXAMPLES;
    const NEEDS: &'static [&'static [&'static str]] = GUEST;
    type Settings = ExecuteArgs;

    fn run(args: &ExecuteArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
        run(args, session)
    }
}

/// Execution from all of memory.
///
/// # Errors
/// Values that cannot be right, what this host lacks, or a guest that went wrong.
fn run(args: &ExecuteArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
    let backing = args.backing;
    let least = backing.in_kvm().page_size() * u64::from(args.vcpus);
    let memory = args.memory.unwrap_or(Size(least.max(usual(args.quick).bytes())));
    let runs = runs(args.runs, args.quick);
    let asked = asked(memory, args.vcpus, backing, false, &args.kvm);
    let guests = Runs::new("execute", &asked, runs)?;
    session.start(&guests.name(), u64::from(runs + 1) * 6);
    let results = guests.measure(session, |shape, setting| execute::run(shape, 2, setting));
    session.finish();
    results
}
