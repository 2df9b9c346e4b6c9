//! Scans for used pages at full speed while vCPUs fault.
//!
//! Half of the guest's memory is mapped, and scanned repeatedly; the vCPUs map the other half, page
//! by page. Linux's reclaim takes a lock for a run of at most 64 pages, or for each page; each
//! fault takes it shared.

use super::fixture::{Fixture, Shape, TheGuest};
use super::lock::FairLock;
use super::runner::{Locks, Runner};
use super::tables::{Figures, MEANING, renderer};
use super::times::Times;
use super::turns::{Counts, Recorder, counts, ratios, take_turns};
use crate::format::TablesArgs;
use crate::on_machine;
use crate::threads::{Pin, cpus};
use anyhow::{Context, ensure};
use clap::Args;
use slat::{Access, AgeOptions, Format, Reader};
use slat_guest::Worker;
use slat_lab::cli::count;
use slat_lab::record::Measurement;
use slat_lab::renderer::Renderer;
use slat_lab::scenario::Scenario;
use slat_lab::session::Session;
use slat_lab::size::Size;
use slat_sim::arch::Arch;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// A way to scan memory.
#[derive(Clone, Copy)]
struct Way {
    name: &'static str,
    /// Pages of a call; 0 means that there is no scan.
    pages: u64,
    locked: bool,
}

const WAYS: [Way; 6] = [
    Way { name: "alone", pages: 0, locked: false },
    Way { name: "lock-free-512", pages: 512, locked: false },
    Way { name: "lock-free-64", pages: 64, locked: false },
    Way { name: "locked-64", pages: 64, locked: true },
    Way { name: "lock-free-1", pages: 1, locked: false },
    Way { name: "locked-1", pages: 1, locked: true },
];
const ALONE: usize = 0;
const FREE_64: usize = 2;
const LOCKED_64: usize = 3;

const EXAMPLES: &str = "\
Examples:
  slat-bench age
      1 GiB aged over and over beside a vCPU that faults, locked and lock-free
  slat-bench age --format arm64-16k --vcpus 2 --memory 2g";

/// Options of a scan for used pages while vCPUs fault.
#[derive(Clone, Debug, Args)]
pub struct AgeArgs {
    /// The guest's tables.
    #[command(flatten)]
    pub tables: TablesArgs,

    /// vCPUs that fault during the scan
    #[arg(long, short = 'v', value_name = "N", default_value_t = 1)]
    #[arg(value_parser = count::threads())]
    pub vcpus: u16,

    /// Memory that is aged; the vCPUs map as much again, by pages [default: 1g]
    #[arg(long, short = 'b', value_name = "SIZE")]
    pub memory: Option<Size>,

    /// Samples of each way, in turns [default: 9]
    #[arg(long, value_name = "N", value_parser = count::rounds())]
    pub rounds: Option<u32>,

    /// 64 MiB, one round: a trial run, gives no figures to quote
    #[arg(long)]
    pub quick: bool,
}

/// Columns of the table.
const FIGURES: Figures = Figures {
    of: "guest-age",
    title: "Looking for used pages beside faults",
    counts: &[
        ("p50", "faults", "faults"),
        ("p50", "pages_asked_again", "asked again"),
        ("p50", "pages_unanswered", "unanswered"),
    ],
    note: "The number is that of the pages of a call; locked holds a lock during each, which \
           faults take for reading. p50, p99, longest: of a fault beside the scan; the kernel \
           takes the CPU away now and then, and the longest shows it.",
    ..Figures::NONE
};

/// The scenario of scans while vCPUs fault.
pub struct Age;

impl Scenario for Age {
    const NAME: &'static str = "age";
    const ABOUT: &'static str = "Look for used pages beside faults";
    const EXAMPLES: &'static str = EXAMPLES;
    const RENDERER: Renderer = renderer!([FIGURES], MEANING);
    type Settings = AgeArgs;

    fn run(args: &AgeArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
        let memory = args.memory.unwrap_or(Size(if args.quick { 64 << 20 } else { 1 << 30 }));
        let rounds = args.rounds.unwrap_or(if args.quick { 1 } else { 9 });
        let half =
            Shape::new(memory, args.tables.format, args.tables.format.leaves()[0], args.vcpus)?;
        // Both halves have the same host memory.
        let shape = Shape { memory: 2 * half.memory, ..half };
        let cpus = cpus()?;
        on_machine!(&args.tables, |format, arch| {
            let fixture = Fixture::new(format, arch, &args.tables, shape, session)?;
            measure(&fixture, rounds, &cpus, session)
        })
    }
}

/// Results of the scan, and the times for which vCPUs waited.
struct Sample {
    times: Times,
    /// Seconds in the calls.
    scan: f64,
    /// Pages that the calls covered.
    scanned: u64,
    young: u64,
    unanswered: u64,
    slow: u64,
    /// Size of a page, in bytes.
    page: u64,
}

impl Sample {
    /// Returns the seconds that the scan of a GiB takes.
    fn scan_of_gib(&self) -> f64 {
        self.scan / (self.scanned.max(1) * self.page) as f64 * (1u64 << 30) as f64
    }

    fn counts(&self) -> Counts {
        counts([
            ("faults", self.times.count()),
            ("pages_scanned", self.scanned),
            ("pages_young", self.young),
            ("pages_asked_again", self.slow),
            ("pages_unanswered", self.unanswered),
        ])
    }
}

fn measure<F: Format, A: Arch>(
    fixture: &Fixture<F, A>,
    rounds: u32,
    cpus: &[usize],
    session: &mut Session,
) -> anyhow::Result<Vec<Measurement>> {
    session.start("age", u64::from(rounds) + 1);
    let samples = take_turns(session, rounds, WAYS.len(), |place, _| {
        session.say(WAYS[place].name);
        sample(fixture, WAYS[place], cpus).with_context(|| format!("age, {}", WAYS[place].name))
    })?;
    session.finish();
    if samples[0].is_empty() {
        return Ok(Vec::new());
    }
    let mut params = fixture.params();
    params.insert("memory".to_owned(), (fixture.shape.memory / 2).into());
    let recorder = Recorder { scenario: "guest-age", params };
    let mut results = Vec::new();
    for (way, samples) in WAYS.iter().zip(&samples) {
        let target = if way.locked { "baseline" } else { "engine" };
        let mut add = |figure: &str, of: fn(&Sample) -> f64| {
            let values = samples.iter().map(of).collect();
            let counts = samples.iter().map(Sample::counts);
            results.push(recorder.figure(way.name, target, figure, "s", values, counts));
        };
        if way.pages != 0 {
            add("scan of 1 GiB", Sample::scan_of_gib);
        }
        add("p50", |s| s.times.quantile(0.5) as f64 / 1e9);
        add("p99", |s| s.times.quantile(0.99) as f64 / 1e9);
        add("longest", |s| s.times.longest as f64 / 1e9);
    }
    let p99 = |way: usize| samples[way].iter().map(|s| s.times.quantile(0.99) as f64);
    let scan = |way: usize| samples[way].iter().map(Sample::scan_of_gib);
    let rows = [
        (
            "p99 of a fault beside the scan",
            ("lock-free-64", "alone"),
            ratios(p99(FREE_64), p99(ALONE)),
        ),
        (
            "p99 of a fault beside the scan",
            ("locked-64", "alone"),
            ratios(p99(LOCKED_64), p99(ALONE)),
        ),
        ("time of the scan", ("lock-free-64", "locked-64"), ratios(scan(FREE_64), scan(LOCKED_64))),
    ];
    for (what, (of, by), samples) in rows {
        results.push(recorder.ratio(what, of, by, samples, None));
    }
    Ok(results)
}

fn sample<F: Format, A: Arch>(
    fixture: &Fixture<F, A>,
    way: Way,
    cpus: &[usize],
) -> anyhow::Result<Sample> {
    let lock = &FairLock::default();
    let locks = if way.locked { Locks::Shared(lock) } else { Locks::Free };
    let (vcpus, half) = (u64::from(fixture.shape.vcpus), fixture.pages() / 2);
    fixture.with_guest(fixture.config(), |guest| {
        let barrier = &Barrier::new(vcpus as usize + 1);
        let (over, running) = (&AtomicBool::new(false), &std::sync::atomic::AtomicU64::new(vcpus));
        let vcpu = |id: u64| {
            move || -> anyhow::Result<Times> {
                let pages = |first: u64| first + half * id / vcpus..first + half * (id + 1) / vcpus;
                let mut prepared = once(move || -> anyhow::Result<_> {
                    // The scan has the last CPU, if there are at least two.
                    let pin = Pin::to(cpus[id as usize % (cpus.len() - 1).max(1)])?;
                    let mut runner = Runner::new(guest, fixture.machine(), id as u16, locks)?;
                    // Maps the half that is scanned.
                    pages(0).try_for_each(|page| runner.write(fixture.gpa(page), page))?;
                    runner.times = Times::default();
                    Ok((runner, pin))
                });
                // A thread that failed still comes to the barrier, so that the others do not wait
                // for it.
                barrier.wait();
                let done = prepared.as_mut().map_or(Ok(()), |(runner, _)| {
                    pages(half).try_for_each(|page| runner.write(fixture.gpa(page), page))
                });
                if running.fetch_sub(1, Ordering::AcqRel) == 1 {
                    over.store(true, Ordering::Release);
                }
                done?;
                Ok(prepared?.0.times)
            }
        };
        let mut worker = Worker::new(guest)?;
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..vcpus).map(|id| scope.spawn(vcpu(id))).collect();
            let pin = Pin::to(cpus[cpus.len() - 1]);
            barrier.wait();
            let _pin = pin?;
            let scan = Scan { fixture, guest, way, lock, half }.until(over, &mut worker);
            let mut sample = scan?;
            for thread in threads {
                match thread.join() {
                    Ok(times) => sample.times.merge(&times?),
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
            sample.slow = guest.stats().totals.ageing_slow;
            let expected = half;
            ensure!(
                sample.times.count() >= expected,
                "{} faults for {expected} pages: some were mapped before",
                sample.times.count()
            );
            Ok(sample)
        })
    })
}

/// Calls `work`, which may borrow from its environment.
fn once<R>(work: impl FnOnce() -> R) -> R {
    work()
}

struct Scan<'s, 'p, F: Format, A: Arch> {
    fixture: &'p Fixture<F, A>,
    guest: &'s TheGuest<'p, F, A>,
    way: Way,
    lock: &'s FairLock,
    half: u64,
}

impl<'s, 'p, F: Format, A: Arch> Scan<'s, 'p, F, A> {
    /// Scans until the faults are over. After each call it makes the pages young again, as if the
    /// guest had used them; that is not timed, and takes no lock.
    fn until(
        &self,
        over: &AtomicBool,
        worker: &mut super::fixture::TheWorker<'s, F, A>,
    ) -> anyhow::Result<Sample> {
        let mut sample = Sample {
            times: Times::default(),
            scan: 0.0,
            scanned: 0,
            young: 0,
            unanswered: 0,
            slow: 0,
            page: F::size(0).bytes(),
        };
        let done = || over.load(Ordering::Acquire);
        if self.way.pages == 0 {
            while !done() {
                std::thread::yield_now();
            }
            return Ok(sample);
        }
        let mut reader = Reader::register(self.fixture.machine())?;
        // Number of pages that are made young again together.
        let batch = 512;
        let mut young = vec![0u64; self.way.pages.div_ceil(64) as usize];
        'rounds: loop {
            for first in (0..self.half).step_by(batch) {
                if done() && sample.scanned != 0 {
                    break 'rounds;
                }
                let begin = Instant::now();
                let pages = (self.half - first).min(batch as u64);
                for call in (first..first + pages).step_by(self.way.pages as usize) {
                    let pages = self.way.pages.min(first + pages - call);
                    let mut age = || {
                        worker.age(
                            self.fixture.range(call, pages),
                            None,
                            &mut young,
                            AgeOptions::LEAVES,
                        )
                    };
                    let aged = match self.way.locked {
                        true => self.lock.exclusive(age),
                        false => age(),
                    };
                    let aged = aged.context("the scan was refused")?;
                    sample.young += aged.young;
                    sample.unanswered += aged.unanswered;
                    young.fill(0);
                }
                sample.scan += begin.elapsed().as_secs_f64();
                sample.scanned += pages;
                let mut guard = self.guest.tables().enter(&mut reader)?;
                guard
                    .relax(self.fixture.range(first, pages), Access::Read)
                    .map(slat::LocalFlush::not_needed_here)?;
                guard.invalidate();
            }
        }
        ensure!(
            sample.young + sample.unanswered == sample.scanned,
            "{} of {} pages were young; all had been used",
            sample.young,
            sample.scanned
        );
        Ok(sample)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::TableFormat;

    /// Each sample checks that all pages were found young; this test only checks that every way
    /// runs.
    #[test]
    fn every_way_finds_all_pages_in_both_formats() {
        for format in [TableFormat::Ept, TableFormat::Arm64K4] {
            let args = AgeArgs {
                tables: TablesArgs::of(format),
                vcpus: 2,
                memory: Some(Size(2 << 20)),
                rounds: Some(1),
                quick: true,
            };
            let results = Age::run(&args, &mut Session::quiet()).unwrap();
            for way in WAYS {
                let p99 = |m: &&Measurement| m.variant == way.name && m.params["figure"] == "p99";
                let found = results.iter().find(p99).unwrap();
                assert!(found.counts["faults"] >= 512, "{}", way.name);
                assert_eq!(found.counts["pages_scanned"] != 0, way.pages != 0, "{}", way.name);
            }
        }
    }
}
