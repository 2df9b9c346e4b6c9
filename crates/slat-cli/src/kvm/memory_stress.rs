//! The scenario `memory-stress`: a guest fills its memory, the VMM takes it away, and the guest
//! fills it again.

use super::options::GuestArgs;
use super::runs::{Guest, asked};
use super::tables::renderer;
use crate::needs::GUEST;
use clap::Args;
use slat_kvm::Setting;
use slat_kvm::cgroup::MemoryLimit;
use slat_kvm::guest::Shape;
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

/// The scenario.
pub struct MemoryStress;

impl Scenario for MemoryStress {
    const NAME: &'static str = memory_stress::RESULTS.name;
    const ABOUT: &'static str =
        "Fill a guest's memory, take it away, fill it again, and move on to swap if asked";
    const EXAMPLES: &'static str = EXAMPLES;
    const DEFAULTS: &'static [(&'static str, &'static str)] = &[("memory", "512M")];
    const NEEDS: &'static [&'static [&'static str]] = GUEST;
    const RENDERER: Renderer = renderer!(memory_stress::RESULTS);
    type Settings = MemoryStressArgs;

    fn run(args: &MemoryStressArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
        let mut args = args.clone();
        if args.guest.shrink() {
            args.iterations = 1;
        }
        let (memory, iterations) = (args.guest.memory.bytes(), args.iterations);
        let run = move |shape: &Shape, setting: Setting<'_>| {
            memory_stress::run(shape, iterations, setting)
        };
        let asked = asked(&args.guest, false);
        let mut guest = Guest::of(Self::NAME, &asked, &memory_stress::OUTCOME, run)?;
        guest = guest.with("iterations", iterations);
        if let Some(limit) = args.limit {
            guest = guest.with("limit", limit.bytes());
        }
        let limit = args.limit.map(|limit| MemoryLimit::new(limit.bytes(), memory)).transpose()?;
        session.announce(memory, args.guest.vcpus as usize, 0);
        let results = guest.alone(2 + 4 * u64::from(iterations), session);
        drop(limit);
        results
    }
}
