//! Execution from huge pages that are not executable: a fetch unmaps the huge page, or splits it.
//!
//! Each page is written, executed from, read, and written again. Linux used `zap` before 6.2.

use super::fixture::{Fixture, Shape};
use super::runner::Locks;
use super::tables::{Figures, MEANING, renderer};
use super::turns::{Recorder, ratios, take_turns};
use super::vcpus::{PhaseRun, run_phases};
use crate::format::TablesArgs;
use crate::on_machine;
use crate::published;
use anyhow::ensure;
use clap::Args;
use slat::{Format, PageSize};
use slat_guest::{Config, ExecuteHuge};
use slat_lab::cli::count;
use slat_lab::record::Measurement;
use slat_lab::renderer::Renderer;
use slat_lab::scenario::Scenario;
use slat_lab::session::Session;
use slat_lab::size::Size;
use slat_sim::arch::Arch;
use std::hint::black_box;
use std::time::Duration;

/// Policies for a huge page that the guest executes from, by name. `zap` is the baseline; `allowed`
/// has nothing to do.
const WAYS: [(&str, ExecuteHuge); 4] = [
    ("zap", ExecuteHuge::Zap),
    ("split", ExecuteHuge::Split),
    ("split-page", ExecuteHuge::SplitPage),
    ("allowed", ExecuteHuge::Allowed),
];
const ZAP: usize = 0;
const SPLIT: usize = 1;
const ALLOWED: usize = 3;

/// The phases of vCPUs, in their order.
const PHASES: [&str; 4] = ["populate", "execute", "read", "write"];
const EXECUTE: usize = 1;

const EXAMPLES: &str = "\
Examples:
  slat-bench execute
      2 GiB on 1g blocks, 2 vCPUs: write, execute, read, write every page
  slat-bench execute --backing 1g --vcpus 96
      more vCPUs than CPUs: they take turns
  slat-bench execute --exit 1000
      as if each fault left the guest for a microsecond longer
  slat-bench execute --format arm64 --bbm 3 --memory 1g --output execute/
  slat-bench execute --format arm64-64k --backing 512m";

/// Options of a guest that executes from all of its memory.
#[derive(Clone, Debug, Args)]
pub struct ExecuteArgs {
    /// Its tables.
    #[command(flatten)]
    pub tables: TablesArgs,

    /// Size of the blocks that back the guest's memory [default: the largest]
    #[arg(long, short = 's', value_name = "SIZE")]
    pub backing: Option<Size>,

    /// vCPUs; each takes its own share of the memory
    #[arg(long, short = 'v', value_name = "N", default_value_t = 2)]
    #[arg(value_parser = count::threads())]
    pub vcpus: u16,

    /// Memory of the guest, a multiple of the backing [default: 2g]
    #[arg(long, short = 'b', value_name = "SIZE")]
    pub memory: Option<Size>,

    /// Guests measured for each policy, in turns [default: 7]
    #[arg(long, value_name = "N", value_parser = count::rounds())]
    pub rounds: Option<u32>,

    /// Extra nanoseconds of a fault, for the exit that hardware would take
    #[arg(long, value_name = "NS", default_value_t = 0)]
    #[arg(value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    pub exit: u32,

    /// One block or 64 MiB, one round: a trial run, gives no figures to quote
    #[arg(long)]
    pub quick: bool,
}

/// Columns of the table.
const FIGURES: Figures = Figures {
    of: "execute",
    title: "Executing from huge pages that may not be executed",
    counts: &[("execute", "faults", "faults, execute"), ("read", "faults", "read")],
    note: "Each phase goes over all pages. zap unmaps a huge page for a fetch, and is the \
           baseline; split splits it, and frees the new table's pages together; split-page frees \
           one page a fault; in allowed huge pages may be executed: what the accesses alone take. \
           published: “KVM: Split huge pages mapped by the TDP MMU on fault” (v2, October 2022), \
           96 vCPUs on 1g pages under KVM, another machine.",
    published: published::EXECUTE_PHASES,
    ..Figures::NONE
};

/// The scenario of execution from huge pages.
pub struct Execute;

impl Scenario for Execute {
    const NAME: &'static str = "execute";
    const ABOUT: &'static str = "Execute from huge pages that may not be executed";
    const EXAMPLES: &'static str = EXAMPLES;
    const RENDERER: Renderer = renderer!([FIGURES], MEANING);
    type Settings = ExecuteArgs;

    fn run(args: &ExecuteArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
        let format = args.tables.format;
        let leaves = format.leaves();
        let backing = match args.backing {
            Some(backing) => format.leaf("--backing", backing)?,
            None => leaves[leaves.len() - 1],
        };
        let small = backing.bytes().max(64 << 20);
        let memory = args.memory.unwrap_or(Size(if args.quick { small } else { 2 << 30 }));
        let rounds = args.rounds.unwrap_or(if args.quick { 1 } else { 7 });
        let shape = Shape::new(memory, format, backing, args.vcpus)?;
        let exit = Duration::from_nanos(args.exit.into());
        on_machine!(&args.tables, |format, arch| {
            let fixture = Fixture::new(format, arch, &args.tables, shape, session)?;
            measure(&fixture, rounds, exit, session)
        })
    }
}

fn measure<F: Format, A: Arch>(
    fixture: &Fixture<F, A>,
    rounds: u32,
    exit: Duration,
    session: &mut Session,
) -> anyhow::Result<Vec<Measurement>> {
    session.start("execute", u64::from(rounds) + 1);
    let samples = take_turns(session, rounds, WAYS.len(), |way, _| {
        session.say(WAYS[way].0);
        sample(fixture, WAYS[way].1, exit)
    })?;
    session.finish();
    if samples[0].is_empty() {
        return Ok(Vec::new());
    }
    let mut params = fixture.params();
    params.insert("exit_ns".to_owned(), (exit.as_nanos() as u64).into());
    let recorder = Recorder { scenario: "execute", params };
    let mut results = Vec::new();
    for ((name, _), samples) in WAYS.iter().zip(&samples) {
        for (number, phase) in PHASES.iter().enumerate() {
            let of_phase = || samples.iter().map(|phases| &phases[number]);
            let seconds = of_phase().map(|run| run.seconds).collect();
            let target = if *name == WAYS[ZAP].0 { "baseline" } else { "engine" };
            let counts = of_phase().map(PhaseRun::counts);
            results.push(recorder.figure(name, target, phase, "s", seconds, counts));
        }
    }
    let all = |way: usize, figure: fn(&PhaseRun) -> f64| {
        samples[way]
            .iter()
            .map(move |phases| figure(&phases[EXECUTE]))
            .collect::<Vec<_>>()
            .into_iter()
    };
    let faults = |run: &PhaseRun| run.fault_count() as f64;
    let over = |way| {
        let base = all(ALLOWED, |run| run.seconds);
        all(way, |run| run.seconds).zip(base).map(|(time, base)| time - base)
    };
    let on_1g = fixture.shape.block == PageSize::SIZE_1G;
    results.push(recorder.ratio(
        "faults of executing from all pages",
        "split",
        "zap",
        ratios(all(SPLIT, faults), all(ZAP, faults)),
        on_1g.then_some(0.002),
    ));
    results.push(recorder.ratio(
        "time to execute from all pages",
        "split",
        "zap",
        ratios(all(SPLIT, |run| run.seconds), all(ZAP, |run| run.seconds)),
        on_1g.then_some(0.1),
    ));
    results.push(recorder.ratio(
        "  of it, on CPUs",
        "split",
        "zap",
        ratios(all(SPLIT, |run| run.cpu_seconds), all(ZAP, |run| run.cpu_seconds)),
        None,
    ));
    results.push(recorder.ratio(
        "  of it, in faults",
        "split",
        "zap",
        ratios(all(SPLIT, PhaseRun::fault_seconds), all(ZAP, PhaseRun::fault_seconds)),
        None,
    ));
    results.push(recorder.ratio(
        "  of it, beyond what `allowed` takes",
        "split",
        "zap",
        ratios(over(SPLIT), over(ZAP)),
        None,
    ));
    Ok(results)
}

fn sample<F: Format, A: Arch>(
    fixture: &Fixture<F, A>,
    execute_huge: ExecuteHuge,
    exit: Duration,
) -> anyhow::Result<Vec<PhaseRun>> {
    fixture.with_guest(Config { execute_huge, ..fixture.config() }, |guest| {
        let phases = run_phases(fixture, guest, Locks::Free, PHASES.len(), |runner, id, phase| {
            let mut sum = 0u64;
            runner.exit = exit;
            for page in fixture.share(id.into(), fixture.shape.vcpus.into()) {
                let at = fixture.gpa(page);
                match phase {
                    0 | 3 => runner.write(at, page)?,
                    1 => sum = sum.wrapping_add(runner.execute(at)?),
                    _ => {
                        let found = runner.read(at)?;
                        ensure!(found == page, "page {page} holds {found}, as nobody wrote");
                    }
                }
            }
            black_box(sum);
            Ok(())
        })?;
        Ok(phases)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::TableFormat;

    fn args(format: TableFormat, backing: u64, memory: u64) -> ExecuteArgs {
        ExecuteArgs {
            tables: TablesArgs::of(format),
            backing: Some(Size(backing)),
            vcpus: 2,
            memory: Some(Size(memory)),
            rounds: Some(1),
            exit: 0,
            quick: true,
        }
    }

    fn faults(results: &[Measurement], variant: &str, phase: &str) -> u64 {
        let found = results.iter().find(|m| m.variant == variant && m.params["figure"] == phase);
        found.expect("each phase of each way").counts["faults"]
    }

    #[test]
    fn a_split_faults_once_a_table_and_a_zap_once_a_page() {
        for format in [TableFormat::Ept, TableFormat::Arm64K4] {
            let args = args(format, 2 << 20, 16 << 20);
            let results = Execute::run(&args, &mut Session::quiet()).unwrap();
            assert_eq!(faults(&results, "zap", "execute"), 4096);
            assert_eq!(faults(&results, "split", "execute"), 8);
            assert_eq!(faults(&results, "allowed", "execute"), 0);
            assert_eq!(faults(&results, "split", "write"), 0);
        }
    }

    #[test]
    fn memory_that_is_not_whole_blocks_is_refused() {
        let args = args(TableFormat::Ept, 1 << 30, 512 << 20);
        let error = Execute::run(&args, &mut Session::quiet()).unwrap_err().to_string();
        assert!(error.contains("--memory 512m") && error.contains("1g"), "{error}");
    }
}
