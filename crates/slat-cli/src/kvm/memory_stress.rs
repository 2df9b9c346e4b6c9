//! The scenario `memory-stress`: a guest fills its memory, the VMM takes it away, and the guest
//! fills it again.

use super::kept::Answer;
use super::options::GuestArgs;
use super::runs::{Runs, asked};
use super::tables::{Shown, reader};
use crate::needs::GUEST;
use clap::Args;
use slat_kvm::cgroup::MemoryLimit;
use slat_kvm::figure::Results;
use slat_kvm::phase::Phase;
use slat_kvm::scenario::memory_stress;
use slat_lab::cli::count;
use slat_lab::record::Measurement;
use slat_lab::renderer::Renderer;
use slat_lab::scenario::Scenario;
use slat_lab::session::Session;
use slat_lab::size::Size;

const EXAMPLES: &str = "\
Examples:
  slat bench memory-stress
      512 MiB: fill, write again, take it away, fill again, read
  slat bench memory-stress --memory 1g --limit 512m
      under a memory limit of a cgroup of its own: what does not fit is swapped (root, swap)
  slat bench memory-stress --backing 2m --vcpus 8 --slots 16";

/// Options of `slat bench memory-stress`.
#[derive(Clone, Debug, Args)]
pub struct MemoryStressArgs {
    /// The guest.
    #[command(flatten)]
    pub guest: GuestArgs,

    /// Times that memory is written, taken away and filled again
    #[arg(long, short = 'i', value_name = "N", default_value_t = 2)]
    #[arg(value_parser = count::iterations())]
    pub iterations: u32,

    /// Memory that a cgroup made for the run allows; the rest is swapped (needs root and swap)
    #[arg(long, value_name = "SIZE")]
    pub limit: Option<Size>,
}

impl MemoryStressArgs {
    /// Returns the options, reduced if `--quick` is given.
    pub fn sized(&self) -> Self {
        let mut args = self.clone();
        if args.guest.shrink() {
            args.iterations = 1;
        }
        args
    }
}

/// The scenario.
pub struct MemoryStress;

impl Shown for MemoryStress {
    const RESULTS: Results = memory_stress::RESULTS;
}

impl Scenario for MemoryStress {
    const NAME: &'static str = Self::RESULTS.name;
    const ABOUT: &'static str =
        "Fill a guest's memory, take it away, fill it again, and move on to swap if asked";
    const EXAMPLES: &'static str = EXAMPLES;
    const DEFAULTS: &'static [(&'static str, &'static str)] = &[("memory", "512M")];
    const NEEDS: &'static [&'static [&'static str]] = GUEST;
    const RENDERER: Renderer = reader::<Self>();
    type Settings = MemoryStressArgs;

    fn run(args: &MemoryStressArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
        let args = &args.sized();
        let asked = asked(&args.guest, false);
        let mut guests = Runs::new(MemoryStress::NAME, &asked)?;
        guests.params.insert("iterations".to_owned(), args.iterations.into());
        let limit = match args.limit {
            Some(limit) => {
                guests.params.insert("limit".to_owned(), limit.bytes().into());
                Some(MemoryLimit::new(limit.bytes(), args.guest.memory.bytes())?)
            }
            None => None,
        };
        session.start(&guests.name(), guests.steps(2 + 4 * u64::from(args.iterations)));
        let measured = guests.measure(session, Answer::Time(Phase::Refill), |shape, setting| {
            memory_stress::run(shape, args.iterations, setting)
        });
        drop(limit);
        session.finish();
        Ok(measured?.results)
    }
}
