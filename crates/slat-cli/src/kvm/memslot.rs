//! The scenario `memslot`: the VMM adds, moves and deletes a memslot while vCPUs run.

use super::guest::{Pattern, measurement};
use super::kept::Answer;
use super::live::{calls, loss, pace, worst};
use super::options::GuestArgs;
use super::runs::{Measured, Runs, asked};
use super::tables::{Column, MEANING, is, of, whole};
use super::values::Others;
use crate::needs::GUEST;
use clap::Args;
use serde_json::{Map, Value};
use slat_kvm::phase::{Phase, VcpuRun};
use slat_kvm::scenario::live::CallTimes;
use slat_kvm::scenario::memslot::{self, Config, Report};
use slat_lab::cli::time;
use slat_lab::rate::Rate;
use slat_lab::record::Measurement;
use slat_lab::renderer::Renderer;
use slat_lab::scenario::Scenario;
use slat_lab::session::Session;
use slat_lab::size::Size;
use std::time::Duration;

/// Name of the scenario in results.
const SCENARIO: &str = "memslot";
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
    #[arg(
        long,
        short = 'i',
        value_name = "N",
        default_value_t = 32,
        value_parser = clap::value_parser!(u32).range(1..=1_000_000)
    )]
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

const TITLE: &str = "A memslot that comes, moves and goes beside running vCPUs (KVM)";
const NOTE: &str = "No vCPU touches the slot. “guest lost” is what is missing of the pace that the \
    vCPUs kept before; “faults” are theirs for each move and deletion.";

/// Columns of its table.
const COLUMNS: &[Column] = &[
    ("loss", "guest lost"),
    ("loss-worst", "worst second"),
    ("faults", "faults"),
    ("add", "add"),
    ("add-longest-call", "longest"),
    ("move", "move"),
    ("move-longest-call", "longest"),
    ("delete", "delete"),
    ("delete-longest-call", "longest"),
];

/// The scenario.
pub struct Memslot;

impl Scenario for Memslot {
    const NAME: &'static str = "memslot";
    const ABOUT: &'static str = "Add, move and delete a memslot beside running vCPUs";
    const EXAMPLES: &'static str = EXAMPLES;
    const NEEDS: &'static [&'static [&'static str]] = GUEST;
    const RENDERER: Renderer = Renderer {
        reads: |m| is(m, Self::NAME),
        verdict: |results| {
            whole(
                results,
                Self::NAME,
                "loss",
                "Memslots that come, move and go take from the guest's pace",
            )
        },
        tables: |results| of(results, Self::NAME, TITLE, COLUMNS, NOTE),
        meaning: MEANING,
        ..Renderer::NONE
    };
    type Settings = MemslotArgs;

    fn run(args: &MemslotArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
        run(args, session)
    }
}

/// Measures a guest while the VMM adds, moves and deletes a memslot, as `args` asks.
///
/// # Errors
/// Values that cannot be right, what this host lacks, or a guest that went wrong.
pub fn run(args: &MemslotArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
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
    results.extend(figures(&params, &reports));
    Ok(results)
}

/// Reads the times of one kind of call from a run's report.
type Times = fn(&Report) -> CallTimes;

/// Returns the faults of all vCPUs for each move and deletion, if KVM counts them.
fn faults(report: &Report) -> Option<f64> {
    let run = report.phases.iter().find(|run| run.phase == Phase::Run)?;
    // A phase lists only counters that changed: a counter that no phase lists may not exist.
    let counted = report.phases.iter().flat_map(|run| &run.vcpus).any(|vcpu| has(vcpu).is_some());
    let faults: i64 = run.vcpus.iter().filter_map(has).sum();
    let changes = report.shift.count + report.delete.count;
    counted.then(|| faults as f64 / changes.max(1) as f64)
}

fn has(vcpu: &VcpuRun) -> Option<i64> {
    vcpu.counters.get("pf_taken").copied()
}

fn figures(params: &Map<String, Value>, reports: &[Report]) -> Vec<Measurement> {
    let Some(last) = reports.last() else { return Vec::new() };
    let of_each = |name: &str, unit: &str, of: &dyn Fn(&Report) -> f64| {
        measurement(SCENARIO, name, params.clone(), unit, reports.iter().map(of).collect())
    };
    let mut results = vec![
        of_each("loss", "%", &|report| loss(&report.samples, report.baseline)),
        of_each("loss-worst", "%", &|report| worst(&report.samples, report.baseline)),
    ];
    if let Some(faults) = reports.iter().map(faults).collect() {
        results.push(measurement(SCENARIO, "faults", params.clone(), "faults", faults));
    }
    let kinds: [(&str, Times); 3] = [
        ("add", |report| report.add),
        ("move", |report| report.shift),
        ("delete", |report| report.delete),
    ];
    for (name, of) in kinds {
        let each: Vec<_> = reports.iter().map(of).collect();
        results.extend(calls(SCENARIO, params, name, &each));
    }
    let (times, pace) = pace(&last.samples, last.baseline).into_iter().unzip();
    results.push(measurement(SCENARIO, "pace", params.clone(), "%", pace));
    results.push(measurement(SCENARIO, "pace-at", params.clone(), "s", times));
    results
}
