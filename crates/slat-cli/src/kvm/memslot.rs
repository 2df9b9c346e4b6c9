//! The scenario `memslot`: the VMM adds, moves and deletes a memslot while vCPUs run.

use super::guest::Pattern;
use super::options::GuestArgs;
use super::runs::{Guest, asked};
use super::tables::renderer;
use crate::needs::GUEST;
use clap::Args;
use slat_kvm::Setting;
use slat_kvm::guest::Shape;
use slat_kvm::scenario::memslot::{self, Config};
use slat_lab::cli::time;
use slat_lab::rate::Rate;
use slat_lab::record::Measurement;
use slat_lab::renderer::Renderer;
use slat_lab::scenario::Scenario;
use slat_lab::session::Session;
use slat_lab::size::Size;
use std::time::Duration;

/// Phases of a run.
const PHASES: u64 = 5;

const EXAMPLES: &str = "\
Examples:
  slat bench memslot
      64 MiB come, move and go beside two vCPUs, a change every 10 ms
  slat bench memslot --memory 4G --slot-size 1G --backing 2m --delay 100ms
      memory that is plugged, into a guest with huge pages, ten times a second
  slat bench memslot --disable-slot-zap-all
      on x86 since Linux 6.12, a VM that gave up that each deletion unmaps everything";

/// Options of `slat bench memslot`.
#[derive(Clone, Debug, Args)]
pub struct MemslotArgs {
    /// The guest.
    #[command(flatten)]
    pub guest: GuestArgs,

    /// Size of the slot, which no vCPU touches; at most the memory
    #[arg(long, value_name = "SIZE", default_value = "64M")]
    pub slot_size: Size,

    /// From the end of each change to the next
    #[arg(long, short = 'd', value_name = "TIME", default_value = "10ms", value_parser = time::any)]
    pub delay: Duration,

    /// Times that the slot is added, moved and deleted
    #[arg(long, short = 'i', value_name = "N", default_value_t = 32)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub iterations: u32,

    /// Bytes that all vCPUs write a second, a page a step: 200MiB/s [default: all they can]
    #[arg(long, value_name = "RATE")]
    pub dirty_rate: Option<Rate>,

    /// Every vCPU touches all of the memory, not its share
    #[arg(long)]
    pub overlap: bool,

    /// Disable KVM_X86_QUIRK_SLOT_ZAP_ALL, so that deletion unmaps only the slot (x86, Linux 6.12)
    #[arg(long, short = 'q')]
    pub disable_slot_zap_all: bool,
}

/// The scenario.
pub struct Memslot;

impl Scenario for Memslot {
    const NAME: &'static str = memslot::RESULTS.name;
    const ABOUT: &'static str = "Add, move and delete a memslot beside running vCPUs";
    const EXAMPLES: &'static str = EXAMPLES;
    const NEEDS: &'static [&'static [&'static str]] = GUEST;
    const RENDERER: Renderer = renderer!(memslot::RESULTS);
    type Settings = MemslotArgs;

    fn run(args: &MemslotArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
        let mut args = args.clone();
        if args.guest.shrink() {
            args.slot_size = args.slot_size.min(args.guest.memory);
            args.iterations = args.iterations.min(4);
        }
        let pattern = Pattern { dirty_rate: args.dirty_rate, ..Pattern::WRITES };
        let work = pattern.work(args.guest.vcpus);
        let run = |shape: &Shape, setting: Setting<'_>| {
            let config = Config {
                shape: Shape { slot_zap_all: !args.disable_slot_zap_all, ..shape.clone() },
                work,
                slot: args.slot_size.bytes(),
                iterations: args.iterations,
                delay: args.delay,
            };
            memslot::run(&config, setting)
        };
        let asked = asked(&args.guest, args.overlap);
        let mut guest = Guest::of(Self::NAME, &asked, &memslot::OUTCOME, run)?
            .with("slot_size", args.slot_size.bytes())
            .with("delay_us", args.delay.as_micros() as u64)
            .with("iterations", args.iterations);
        if args.disable_slot_zap_all {
            guest = guest.with("slot_zap_all", "off");
        }
        pattern.add_to(&mut guest.params);
        session.announce(args.guest.memory.bytes(), args.guest.vcpus as usize, 0);
        guest.alone(PHASES, session)
    }
}
