//! First touches: faults per second, by the size of the backing and the number of vCPUs.
//!
//! Each fault is the first touch of a page or block, and one word is written. The baselines hold a
//! lock during each fault: shared, as Linux does, or exclusive. How two vCPUs do beside one is also
//! compared with two plain loops beside one, which is what the machine allows.

use super::parallel;
use crate::format::TablesArgs;
use crate::guest::fixture::{Fixture, GUEST_BASE, Shape};
use crate::guest::lock::FairLock;
use crate::guest::runner::Locks;
use crate::guest::tables::{Figures, MEANING, renderer};
use crate::guest::turns::{Recorder, ratios, take_turns};
use crate::guest::vcpus::{PhaseRun, run_phases};
use crate::on_machine;
use anyhow::ensure;
use clap::Args;
use slat::{Format, PageSize};
use slat_lab::cli::count;
use slat_lab::failure::bad_input;
use slat_lab::numbers::several;
use slat_lab::record::Measurement;
use slat_lab::renderer::Renderer;
use slat_lab::scenario::Scenario;
use slat_lab::session::Session;
use slat_lab::size::Size;
use slat_sim::arch::Arch;

/// Locking of a fault, by name.
const WAYS: [&str; 3] = ["lock-free", "shared", "exclusive"];

/// The most huge blocks that are touched: each takes only one page of memory, but many addresses.
const MOST: u64 = 16384;
/// The most huge blocks of at least `HUGE` that are touched.
const MOST_HUGE: u64 = 512;
const HUGE: u64 = 512 << 20;

const EXAMPLES: &str = "\
Examples:
  slat-bench populate
      faults of 1 and 2 vCPUs on 4k, 2m and 1g blocks, without a lock and with one
  slat-bench populate --format npt --backing 2m
  slat-bench populate --vcpus 1,2,4,8 --backing 4k --overlap
      all vCPUs touch the same memory";

/// Options of first touches.
#[derive(Clone, Debug, Args)]
pub struct PopulateArgs {
    /// The guest's tables.
    #[command(flatten)]
    pub tables: TablesArgs,

    /// Size of the pages that back the guest's memory [default: all of the format]
    #[arg(long, short = 's', value_name = "SIZE,...", value_delimiter = ',')]
    pub backing: Vec<Size>,

    /// vCPUs
    #[arg(long, short = 'v', value_name = "N,...", value_delimiter = ',', default_value = "1,2")]
    #[arg(value_parser = count::threads())]
    pub vcpus: Vec<u16>,

    /// Host memory that is touched, one page per fault; of huge blocks fewer are touched [default:
    /// 512m]
    #[arg(long, short = 'b', value_name = "SIZE")]
    pub memory: Option<Size>,

    /// Let all vCPUs touch all of the memory in the same order, instead of a share each
    #[arg(long)]
    pub overlap: bool,

    /// Samples of each way, in turns [default: 9]
    #[arg(long, value_name = "N", value_parser = count::rounds())]
    pub rounds: Option<u32>,

    /// 16 MiB, one round: a trial run, gives no figures to quote
    #[arg(long)]
    pub quick: bool,
}

/// Columns of the table.
const FIGURES: Figures = Figures {
    of: "guest-populate",
    title: "First touches",
    counts: &[
        ("all", "faults", "faults"),
        ("all", "faults_spurious", "spurious"),
        ("all", "faults_retry", "retries"),
    ],
    note: "Each fault maps a page or block. The locks are held during each fault: shared for \
           reading, as Linux does. They are spun on: where vCPUs are more than CPUs that nobody \
           else uses, who holds one may have to wait for a turn, which a kernel avoids, and the \
           rows with a lock say nothing.",
    wide: true,
    ..Figures::NONE
};

const TABLES: [Figures; 2] = [FIGURES, parallel::FAULTS];

/// The scenario of first touches.
pub struct Populate;

impl Scenario for Populate {
    const NAME: &'static str = "populate";
    const ABOUT: &'static str =
        "Touch memory for the first time: faults, without a lock and with one";
    const EXAMPLES: &'static str = EXAMPLES;
    const RENDERER: Renderer = renderer!(TABLES, MEANING);
    type Settings = PopulateArgs;

    fn run(args: &PopulateArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
        let memory = args.memory.unwrap_or(Size(if args.quick { 16 << 20 } else { 512 << 20 }));
        let rounds = args.rounds.unwrap_or(if args.quick { 1 } else { 9 });
        if !memory.bytes().is_multiple_of(2 << 20) {
            return Err(bad_input(format!("--memory {memory} is no multiple of 2m; take one")));
        }
        let format = args.tables.format;
        let backings: Vec<PageSize> = match &args.backing[..] {
            [] => format.leaves(),
            given => given
                .iter()
                .map(|&it| format.leaf("--backing", it))
                .collect::<anyhow::Result<_>>()?,
        };
        let page = format.leaves()[0];
        let cases: Vec<(PageSize, u16)> = backings
            .iter()
            .flat_map(|&backing| args.vcpus.iter().map(move |&vcpus| (backing, vcpus)))
            .collect();
        session.start("populate", cases.len() as u64 * (u64::from(rounds) + 1));
        let mut results = Vec::new();
        for (block, vcpus) in cases {
            session.say(&format!("{block}, {vcpus} vCPUs"));
            let pages = memory.bytes() / page.bytes();
            let blocks = match block.bytes() {
                _ if block == page => pages,
                ..HUGE => pages.min(MOST),
                _ => pages.min(MOST_HUGE),
            };
            let bytes = blocks * block.bytes();
            let resident = block == page;
            let shape = Shape { memory: bytes, host: bytes, block, page, vcpus, resident };
            on_machine!(&args.tables, |format, arch| {
                let fixture = Fixture::new(format, arch, &args.tables, shape, session)?;
                results.extend(measure(&fixture, blocks, args.overlap, rounds, session)?);
            });
            if session.interrupted() {
                break;
            }
        }
        session.finish();
        let pages = args.backing.is_empty() || args.backing.contains(&Size(page.bytes()));
        let both = [1, 2].iter().all(|vcpus| args.vcpus.contains(vcpus));
        if pages && both && !args.overlap && !session.interrupted() {
            results.extend(parallel::faults(&args.tables, memory, rounds, session)?);
        }
        Ok(results)
    }
}

fn measure<F: Format, A: Arch>(
    fixture: &Fixture<F, A>,
    blocks: u64,
    overlap: bool,
    rounds: u32,
    session: &Session,
) -> anyhow::Result<Vec<Measurement>> {
    let samples =
        take_turns(session, rounds, WAYS.len(), |way, _| sample(fixture, blocks, overlap, way))?;
    if samples[0].is_empty() {
        return Ok(Vec::new());
    }
    let mut params = fixture.params();
    params.insert("overlap".to_owned(), overlap.into());
    let recorder = Recorder { scenario: "guest-populate", params };
    let mut results = Vec::new();
    for (way, samples) in WAYS.iter().zip(&samples) {
        let target = if *way == WAYS[0] { "engine" } else { "baseline" };
        let counts = || samples.iter().map(PhaseRun::counts);
        let mut add = |figure: &str, unit: &str, of: fn(&PhaseRun) -> f64| {
            let values = samples.iter().map(of).collect();
            results.push(recorder.figure(way, target, figure, unit, values, counts()));
        };
        add("all", "s", |run| run.seconds);
        add("rate", "faults/s", |run| run.fault_count() as f64 / run.seconds);
        add("p50", "s", |run| run.times.quantile(0.5) as f64 / 1e9);
        add("p99", "s", |run| run.times.quantile(0.99) as f64 / 1e9);
        add("longest", "s", |run| run.times.longest as f64 / 1e9);
    }
    let time = |way: usize| samples[way].iter().map(|run| run.seconds);
    let what = format!(
        "populate, {}, {}",
        Size(fixture.shape.block.bytes()),
        several(fixture.shape.vcpus.into(), "vCPU")
    );
    results.push(recorder.ratio(what, WAYS[0], WAYS[1], ratios(time(0), time(1)), None));
    Ok(results)
}

fn sample<F: Format, A: Arch>(
    fixture: &Fixture<F, A>,
    blocks: u64,
    overlap: bool,
    way: usize,
) -> anyhow::Result<PhaseRun> {
    let lock = FairLock::default();
    let locks = [Locks::Free, Locks::Shared(&lock), Locks::Exclusive(&lock)][way];
    let (vcpus, block) = (u64::from(fixture.shape.vcpus), fixture.shape.block.bytes());
    fixture.with_guest(fixture.config(), |guest| {
        let mut phases = run_phases(fixture, guest, locks, 1, |runner, id, _| {
            let id = u64::from(id);
            let mut share = blocks * id / vcpus..blocks * (id + 1) / vcpus;
            if overlap {
                share = 0..blocks;
            }
            share
                .into_iter()
                .try_for_each(|number| runner.write(GUEST_BASE + number * block, number))
        })?;
        let run = phases.pop().expect("there is a phase");
        let mapped = run.counts().get("faults_mapped").copied().unwrap_or(0);
        ensure!(mapped == blocks, "{mapped} of {blocks} blocks were mapped by faults");
        Ok(run)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::TableFormat;

    #[test]
    fn each_block_is_mapped_once_whichever_vcpus_touch_it() {
        for (format, overlap) in [(TableFormat::Ept, false), (TableFormat::Arm64K4, true)] {
            let args = PopulateArgs {
                tables: TablesArgs::of(format),
                backing: Vec::new(),
                vcpus: vec![1, 2],
                memory: Some(Size(4 << 20)),
                overlap,
                rounds: Some(1),
                quick: true,
            };
            let results = Populate::run(&args, &mut Session::quiet()).unwrap();
            let all = results.iter().filter(|m| m.params.get("figure").is_some_and(|f| f == "all"));
            let mut seen = 0;
            for result in all {
                let blocks = if result.params["backing"] == "1g" { 512 } else { 1024 };
                assert_eq!(result.counts["faults_mapped"], blocks);
                seen += 1;
            }
            assert_eq!(seen, 3 * 2 * WAYS.len());
        }
    }
}
