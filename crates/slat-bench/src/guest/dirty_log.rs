//! Dirty logging of a guest whose vCPUs go on writing while its log is read and cleared.
//!
//! Each round lets the vCPUs write for a while, reads the log, clears it, and copies the pages that
//! it named. In the end the vCPUs stop, the remaining pages are copied, and memory and copy must be
//! equal. If the log lost a page, the measurement fails.

use super::log_options::{DirtyLogArgs, LogWay};
use super::migration::{Migration, RING};
use super::{density, parallel};
use crate::guest::fixture::{Fixture, Shape};
use crate::guest::lock::FairLock;
use crate::guest::runner::{Locks, Runner};
use crate::guest::tables::{Figures, MEANING, renderer};
use crate::guest::times::Times;
use crate::guest::turns::{Counts, Recorder, counts, ratios, take_turns};
use crate::guest::vcpus::faults_between;
use crate::on_machine;
use anyhow::Context;
use slat::Format;
use slat_guest::{Config, Logging, Worker};
use slat_lab::record::Measurement;
use slat_lab::renderer::Renderer;
use slat_lab::scenario::Scenario;
use slat_lab::session::Session;
use slat_lab::size::Size;
use slat_sim::arch::Arch;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

const EXAMPLES: &str = "\
Examples:
  slat-bench dirty-log
      vCPUs as threads that write on while the log is read, in six ways; sparse and parallel clears
  slat-bench dirty-log --format arm64 --way manual,hardware --backing 2m
  slat-bench dirty-log --format arm64-16k --backing 32m";

/// Columns of the table.
const FIGURES: Figures = Figures {
    of: "guest-log",
    title: "Dirty logging while the vCPUs write on",
    counts: &[("stall", "faults", "faults"), ("stall", "waits_for_ring", "ring full")],
    note: "stall: how long a vCPU waited in each second, of half of the guests: what its faults \
           took, and what they waited for. in faults: without locks, full rings and the way \
           there, as the guest counts. p99, longest: of one such wait. Calls: enable, read, \
           clear, disable (nobody writes then). For rings, read and clear are all harvests and \
           resets of a round. Where threads are more than CPUs, waits and calls include turns of \
           others, and a lock costs far more than in a kernel. Counts are of one guest. All pages \
           were compared with the copy that the log kept: none was lost.",
    // The median is in results.json only: the worst cases matter to users.
    without: &["p50"],
    wide: true,
    ..Figures::NONE
};

/// All tables.
const TABLES: [Figures; 3] = [FIGURES, density::FIGURES, parallel::CLEARS];

/// The scenario of dirty logging.
pub struct DirtyLog;

impl Scenario for DirtyLog {
    const NAME: &'static str = "dirty-log";
    const ABOUT: &'static str = "Log the dirty pages of a guest, in six ways";
    const EXAMPLES: &'static str = EXAMPLES;
    const RENDERER: Renderer = renderer!(TABLES, MEANING);
    type Settings = DirtyLogArgs;

    fn run(args: &DirtyLogArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
        let format = args.tables.format;
        let backing = match args.backing {
            Some(backing) => format.leaf("--backing", backing)?,
            None => format.leaves()[0],
        };
        let small = backing.bytes().max(16 << 20);
        let memory = if args.quick { Size(small) } else { args.memory };
        let rounds = if args.quick { 2 } else { args.iterations };
        let runs = if args.quick { 1 } else { args.runs };
        let shape = Shape::new(memory, format, backing, args.vcpus)?;
        let ways = LogWay::all_or(&args.way);
        let mut results = on_machine!(&args.tables, |format, arch| {
            let fixture = Fixture::new(format, arch, &args.tables, shape, session)?;
            let plan = Plan { ways: &ways, rounds, runs, percent: args.write_percent.into() };
            let mut results = measure(&fixture, &plan, session)?;
            let rounds = if args.quick { 1 } else { runs.max(5) };
            results.extend(density::measure(&fixture, rounds, session)?);
            results
        });
        results.extend(parallel::clears(args, memory, session)?);
        Ok(results)
    }
}

struct Plan<'a> {
    ways: &'a [LogWay],
    rounds: u32,
    runs: u32,
    percent: u64,
}

/// Results of one guest.
struct Sample {
    /// Seconds from before logging is enabled until the vCPUs have stopped.
    seconds: f64,
    times: Times,
    enable: f64,
    reads: Vec<f64>,
    clears: Vec<f64>,
    disable: f64,
    counts: Counts,
}

fn measure<F: Format, A: Arch>(
    fixture: &Fixture<F, A>,
    plan: &Plan<'_>,
    session: &mut Session,
) -> anyhow::Result<Vec<Measurement>> {
    session.start("dirty-log", u64::from(plan.runs) + 1);
    let samples = take_turns(session, plan.runs, plan.ways.len(), |way, _| {
        let way = plan.ways[way];
        session.say(&way.to_string());
        sample(fixture, way, plan, session).with_context(|| format!("dirty-log, {way}"))
    })?;
    session.finish();
    let mut params = fixture.params();
    params.insert("iterations".to_owned(), plan.rounds.into());
    params.insert("write_percent".to_owned(), plan.percent.into());
    let recorder = Recorder { scenario: "guest-log", params };
    let vcpus = f64::from(fixture.shape.vcpus);
    let stall = |sample: &Sample| sample.times.sum as f64 / 1e6 / sample.seconds / vcpus;
    let mut results = Vec::new();
    for (way, samples) in plan.ways.iter().zip(&samples) {
        if samples.is_empty() {
            continue;
        }
        let target = if *way == LogWay::Locked { "baseline" } else { "engine" };
        let way = way.to_string();
        let mut add = |figure: &str, unit: &str, guests: Vec<Vec<f64>>| {
            let counts = samples.iter().map(|sample| match figure {
                "stall" => sample.counts.clone(),
                _ => Counts::new(),
            });
            results.push(recorder.figure_of_guests(&way, target, figure, unit, guests, counts));
        };
        let each = |figure: &dyn Fn(&Sample) -> f64| {
            samples.iter().map(|sample| vec![figure(sample)]).collect::<Vec<_>>()
        };
        let calls = |figure: fn(&Sample) -> &[f64]| {
            samples.iter().map(|sample| figure(sample).to_vec()).collect::<Vec<_>>()
        };
        add("stall", "ms/s", each(&stall));
        let in_faults =
            |sample: &Sample| sample.counts["in_faults_ns"] as f64 / 1e6 / sample.seconds / vcpus;
        add("in faults", "ms/s", each(&in_faults));
        add("p50", "s", each(&|s| s.times.quantile(0.5) as f64 / 1e9));
        add("p99", "s", each(&|s| s.times.quantile(0.99) as f64 / 1e9));
        add("longest", "s", each(&|s| s.times.longest as f64 / 1e9));
        add("enable", "s", each(&|s| s.enable));
        add("read", "s", calls(|s| &s.reads));
        if samples.iter().any(|s| !s.clears.is_empty()) {
            add("clear", "s", calls(|s| &s.clears));
        }
        add("disable", "s", each(&|s| s.disable));
    }
    let place = |way| plan.ways.iter().position(|other| *other == way);
    if let (Some(free), Some(locked)) = (place(LogWay::Manual), place(LogWay::Locked))
        && !samples[free].is_empty()
    {
        let of = |way: usize| samples[way].iter().map(stall);
        let stalls = ratios(of(free), of(locked));
        results.push(recorder.ratio("stall of vCPUs", "manual", "locked", stalls, None));
    }
    Ok(results)
}

fn config<F: Format, A: Arch>(fixture: &Fixture<F, A>, way: LogWay) -> Config {
    let config = fixture.config();
    match way {
        LogWay::Legacy | LogWay::Manual | LogWay::Locked => config,
        LogWay::InitiallySet => Config { initially_set: true, ..config },
        LogWay::Ring => Config { ring: Some(RING), ..config },
        LogWay::Hardware => Config { logging: Logging::Hardware, ..config },
    }
}

fn sample<F: Format, A: Arch>(
    fixture: &Fixture<F, A>,
    way: LogWay,
    plan: &Plan<'_>,
    session: &Session,
) -> anyhow::Result<Sample> {
    let lock = FairLock::default();
    let locks = if way == LogWay::Locked { Locks::Shared(&lock) } else { Locks::Free };
    let vcpus = fixture.shape.vcpus;
    fixture.with_guest(config(fixture, way), |guest| {
        let (over, barrier) = (&AtomicBool::new(false), &Barrier::new(usize::from(vcpus) + 1));
        let writer = |id: u16| {
            move || -> anyhow::Result<(Times, u64)> {
                let runner = Runner::new(guest, fixture.machine(), id, locks);
                let mut runner = runner.inspect_err(|_| over.store(true, Ordering::Relaxed));
                let populated = match &mut runner {
                    Ok(runner) => write(fixture, runner, id, plan.percent, None),
                    Err(_) => Ok(0),
                };
                barrier.wait();
                barrier.wait();
                let mut runner = runner?;
                runner.times = Times::default();
                let written =
                    write(fixture, &mut runner, id, plan.percent, Some((over, populated?)))?;
                Ok((runner.times, written))
            }
        };
        let mut migration = Migration {
            fixture,
            worker: Worker::new(guest)?,
            lock: &lock,
            way,
            bitmap: vec![0; fixture.pages().div_ceil(64) as usize],
            copy: vec![0; fixture.pages() as usize],
            reads: Vec::new(),
            clears: Vec::new(),
            dirty: 0,
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..vcpus).map(|id| scope.spawn(writer(id))).collect();
            barrier.wait();
            let before = (guest.stats(), fixture.machine().service().invalidations);
            barrier.wait();
            let begin = Instant::now();
            let rounds = migration.rounds(plan.rounds, session);
            over.store(true, Ordering::Relaxed);
            while way == LogWay::Ring && threads.iter().any(|thread| !thread.is_finished()) {
                // A vCPU may wait for room in its ring.
                migration.harvest();
                std::thread::yield_now();
            }
            let mut times = Times::default();
            let mut written = 0;
            for thread in threads {
                let (of_one, pages) = match thread.join() {
                    Ok(result) => result?,
                    Err(panic) => std::panic::resume_unwind(panic),
                };
                times.merge(&of_one);
                written += pages;
            }
            let seconds = begin.elapsed().as_secs_f64();
            let enable = rounds?;
            let after = (guest.stats(), fixture.machine().service().invalidations);
            let faults = faults_between(&before.0, &after.0);
            let count = |figure: fn(&(slat_guest::FaultKind, u64, u64)) -> u64| {
                faults.iter().map(figure).sum::<u64>()
            };
            migration.finish()?;
            let disable = Instant::now();
            migration.worker.set_memslot(fixture.memslot(false))?;
            let disable = disable.elapsed().as_secs_f64();
            let counts = counts([
                ("faults", count(|f| f.1)),
                ("in_faults_ns", count(|f| f.2)),
                ("stalls", times.count()),
                ("waits_for_ring", times.waited_for_room),
                ("pages_in_log", migration.dirty),
                ("pages_written", written),
                ("pages_compared", fixture.pages()),
                ("invalidations", after.1 - before.1),
            ]);
            let Migration { reads, clears, .. } = migration;
            Ok(Sample { seconds, times, enable, reads, clears, disable, counts })
        })
    })
}

/// Writes as a vCPU to its share, once to every page, or repeatedly to `percent` of them, until the
/// run is over. Each write is a unique stamp; returns the number of writes.
fn write<F: Format, A: Arch>(
    fixture: &Fixture<F, A>,
    runner: &mut Runner<'_, '_, F, A>,
    id: u16,
    percent: u64,
    on: Option<(&AtomicBool, u64)>,
) -> anyhow::Result<u64> {
    let mut stamp = on.map_or(0, |(_, written)| written);
    let share = fixture.share(id.into(), fixture.shape.vcpus.into());
    loop {
        for page in share.clone() {
            if let Some((over, _)) = on {
                if over.load(Ordering::Relaxed) {
                    return Ok(stamp);
                }
                if density::scatter(page ^ stamp << 32) % 100 >= percent {
                    continue;
                }
            }
            stamp += 1;
            runner.write(fixture.gpa(page), u64::from(id) << 48 | stamp)?;
        }
        if on.is_none() {
            return Ok(stamp);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(more: &[&str]) -> DirtyLogArgs {
        slat_lab::scenario::settings::<DirtyLog>(&format!("--quick {}", more.join(" "))).unwrap()
    }

    fn results(more: &[&str]) -> Vec<Measurement> {
        DirtyLog::run(&args(more), &mut Session::quiet()).unwrap()
    }

    fn count(results: &[Measurement], way: &str, name: &str) -> u64 {
        let of_way = |m: &&Measurement| m.variant == way && m.params["figure"] == "stall";
        results.iter().find(of_way).unwrap_or_else(|| panic!("no {way}")).counts[name]
    }

    /// Each sample compares all pages; this test only checks that every way runs.
    #[test]
    fn every_way_logs_every_page_in_both_formats_and_on_huge_pages() {
        for more in [&["--backing", "4k"][..], &["--format", "arm64", "--bbm", "3", "-s", "2m"]] {
            let results = results(more);
            for way in LogWay::all_or(&[]) {
                let way = way.to_string();
                assert_eq!(count(&results, &way, "pages_compared"), 4096, "{way}");
                assert!(count(&results, &way, "pages_in_log") > 0, "{way}");
            }
            assert_eq!(count(&results, "ring", "in_faults_ns").min(1), 1);
        }
    }

    #[test]
    fn rounds_of_a_guest_are_one_group() {
        let (args, mut session) = (args(&[]), Session::quiet());
        let backing = args.tables.format.leaves()[0];
        let shape = Shape::new(Size(4 << 20), args.tables.format, backing, 2).unwrap();
        let plan = Plan { ways: &[LogWay::Manual], rounds: 3, runs: 2, percent: 50 };
        let mut run = || -> anyhow::Result<Vec<Measurement>> {
            Ok(on_machine!(&args.tables, |format, arch| {
                let fixture = Fixture::new(format, arch, &args.tables, shape, &session)?;
                measure(&fixture, &plan, &mut session)?
            }))
        };
        let results = run().unwrap();
        let groups = |figure: &str| {
            let found = results.iter().find(|m| m.params["figure"] == figure).unwrap();
            (found.samples.len(), &*found.groups)
        };
        assert_eq!((groups("read"), groups("clear")), ((6, &[3, 3][..]), (6, &[3, 3][..])));
        assert_eq!(groups("enable"), (2, &[][..]));
    }

    #[test]
    fn hardware_marks_pages_without_a_fault() {
        let results = results(&["--way", "hardware,manual"]);
        assert_eq!(count(&results, "hardware", "faults"), 0);
        assert!(count(&results, "manual", "faults") > 0);
    }

    #[test]
    fn exact_clears_protect_what_was_named_and_hulls_more() {
        let results = results(&["--way", "manual"]);
        let protected = |variant: &str, bits: u64| {
            let found = results.iter().find(|m| {
                m.scenario == "guest-log-density"
                    && m.variant == variant
                    && m.params["bits"] == bits
            });
            found.unwrap().counts["protected"]
        };
        for bits in [1, 2, 4, 8, 16, 32, 64] {
            assert_eq!(protected("exact", bits), 64 * bits);
        }
        assert_eq!(protected("hull", 1), 64);
        assert!(protected("hull", 2) > 8 * protected("exact", 2));
        let parallel = results.iter().filter(|m| m.scenario == "guest-log-parallel");
        assert!(parallel.into_iter().all(|m| m.counts["pages"] == 4096));
    }

    #[test]
    fn a_level_of_bbm_needs_a_format_that_has_one() {
        let error =
            DirtyLog::run(&args(&["--bbm", "2"]), &mut Session::quiet()).unwrap_err().to_string();
        assert!(error.contains("--format arm64"), "{error}");
    }
}
