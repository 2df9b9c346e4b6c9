//! The scenario `memslot`: the VMM adds, moves and deletes a memslot while vCPUs run.

use super::guest::{Pattern, course, figures};
use super::kept::Answer;
use super::options::GuestArgs;
use super::runs::{Measured, Runs, asked};
use super::tables::{Shown, reader};
use super::values::Others;
use crate::needs::GUEST;
use clap::Args;
use serde_json::Value;
use slat_kvm::figure::Results;
use slat_kvm::phase::Phase;
use slat_kvm::scenario::memslot::{self, Config};
use slat_kvm::scenario::pace;
use slat_lab::cli::time;
use slat_lab::rate::Rate;
use slat_lab::record::Measurement;
use slat_lab::renderer::Renderer;
use slat_lab::scenario::Scenario;
use slat_lab::session::Session;
use slat_lab::size::Size;
use std::time::Duration;

/// Name of the scenario in results.
const SCENARIO: &str = memslot::RESULTS.name;
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

impl MemslotArgs {
    /// Returns the options, reduced if `--quick` is given.
    pub fn sized(&self) -> Self {
        let mut args = self.clone();
        if args.guest.shrink() {
            args.slot_size = args.slot_size.min(args.guest.memory);
            args.iterations = args.iterations.min(4);
        }
        args
    }
}

/// The scenario.
pub struct Memslot;

impl Shown for Memslot {
    const RESULTS: Results = memslot::RESULTS;
}

impl Scenario for Memslot {
    const NAME: &'static str = Self::RESULTS.name;
    const ABOUT: &'static str = "Add, move and delete a memslot beside running vCPUs";
    const EXAMPLES: &'static str = EXAMPLES;
    const NEEDS: &'static [&'static [&'static str]] = GUEST;
    const RENDERER: Renderer = reader::<Self>();
    type Settings = MemslotArgs;

    fn run(args: &MemslotArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
        let args = &args.sized();
        let asked = asked(&args.guest, args.overlap);
        let mut guests = Runs::new(SCENARIO, &asked)?;
        guests.shape.slot_zap_all = !args.disable_slot_zap_all;
        let pattern = Pattern {
            write_percent: 100,
            others: Others::Skip,
            random: false,
            hot_set: None,
            dirty_rate: args.dirty_rate,
        };
        let mut add = |name: &str, value: Value| guests.params.insert(name.to_owned(), value);
        add("slot_size", args.slot_size.bytes().into());
        add("delay_us", (args.delay.as_micros() as u64).into());
        add("iterations", args.iterations.into());
        if args.disable_slot_zap_all {
            add("slot_zap_all", "off".into());
        }
        pattern.add_to(&mut guests.params);
        let work = pattern.work(args.guest.vcpus);
        session.start(&guests.name(), guests.steps(PHASES));
        let measured = guests.measure(session, Answer::Stalls(Phase::Run), |shape, setting| {
            let config = Config {
                shape: shape.clone(),
                work,
                slot: args.slot_size.bytes(),
                iterations: args.iterations,
                delay: args.delay,
            };
            memslot::run(&config, setting)
        });
        session.finish();
        let Measured { mut results, params, reports } = measured?;
        results.extend(figures(SCENARIO, &params, memslot::FIGURES, &reports));
        let pace = reports.last().map(|last| pace::course(&last.samples, last.baseline));
        results.extend(course(SCENARIO, &params, pace.into_iter().flatten()));
        Ok(results)
    }
}
