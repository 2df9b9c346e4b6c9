//! Dirty logging of a guest whose vCPUs write on while its log is read and cleared.
//!
//! Each round lets the vCPUs write for a while, reads the log, clears it, and copies the pages it
//! named. In the end the vCPUs stop, what is left is copied, and memory and copy must be equal: a page
//! that the log lost is a measurement that failed.

use super::bed::{Bed, Locks, Runner, SLOT, Shape, TheWorker, gpa, on_format, room};
use super::lock::FairLock;
use super::times::Times;
use super::turns::{Counts, Recorder, counts, ratios, take_turns};
use super::vcpus::faults_between;
use super::{density, parallel};
use crate::cli::{DirtyLogArgs, GuestBacking, KvmBacking, LogWay};
use crate::failure::bad_input;
use crate::record::Measurement;
use crate::session::Session;
use crate::size::Size;
use anyhow::{Context, ensure};
use slat::Format;
use slat_guest::{Config, DirtyPage, Logging, SlotId, Worker};
use slat_sim::arch::Arch;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long vCPUs write before each read of the log.
const DWELL: Duration = Duration::from_millis(20);
/// How often rings are harvested meanwhile.
const HARVEST: Duration = Duration::from_micros(200);
/// Entries of a ring.
const RING: u32 = 4096;

/// Measures the engine's log as `args` asks for.
///
/// # Errors
/// Values that cannot be right, too little memory, or a page that a log lost.
pub fn run(args: &DirtyLogArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
    if !args.manual_protect.is_on() || args.initially_set.is_on() || args.clear_chunk.is_some() {
        return Err(bad_input(
            "--manual-protect, --initially-set and --clear-chunk are of --target kvm; with --target \
             engine take --way legacy, --way manual or --way initially-set",
        ));
    }
    let backing = match args.backing {
        KvmBacking::Small => GuestBacking::Size4k,
        KvmBacking::Transparent2m | KvmBacking::Hugetlb2m => GuestBacking::Size2m,
        KvmBacking::Block1g | KvmBacking::Hugetlb1g => GuestBacking::Size1g,
    };
    let vcpus = u16::try_from(args.vcpus).ok().filter(|&vcpus| vcpus <= 192);
    let vcpus = vcpus.ok_or_else(|| {
        bad_input(format!("--vcpus {}: a guest of the engine's has at most 192", args.vcpus))
    })?;
    let small = backing.size().bytes().max(16 << 20);
    let memory = if args.quick { Size(small) } else { args.memory };
    let rounds = if args.quick { 2 } else { args.iterations };
    let runs = if args.quick { 1 } else { args.runs };
    let shape = Shape::new(memory, backing.size(), vcpus)?;
    let ways = LogWay::all_or(&args.way);
    let mut results = on_format!(&args.tables, |format, arch| {
        let bed = Bed::new(format, arch, &args.tables, shape, session)?;
        let plan = Plan { ways: &ways, rounds, runs, percent: args.write_percent.into() };
        let mut results = measure(&bed, &plan, session)?;
        let rounds = if args.quick { 1 } else { runs.max(5) };
        results.extend(density::measure(&bed, rounds, session)?);
        results
    });
    results.extend(parallel::run(args, memory, session)?);
    Ok(results)
}

struct Plan<'a> {
    ways: &'a [LogWay],
    rounds: u32,
    runs: u32,
    percent: u64,
}

/// What one guest gave.
struct Sample {
    /// From before logging was enabled until the vCPUs had stopped.
    seconds: f64,
    times: Times,
    enable: f64,
    reads: Vec<f64>,
    clears: Vec<f64>,
    disable: f64,
    counts: Counts,
}

fn measure<F: Format, A: Arch>(
    bed: &Bed<F, A>,
    plan: &Plan<'_>,
    session: &mut Session,
) -> anyhow::Result<Vec<Measurement>> {
    session.start("dirty-log", u64::from(plan.runs) + 1);
    let samples = take_turns(session, plan.runs, plan.ways.len(), |way, _| {
        let way = plan.ways[way];
        session.say(&way.to_string());
        sample(bed, way, plan, session).with_context(|| format!("dirty-log, {way}"))
    })?;
    session.finish();
    let mut params = bed.params();
    params.insert("iterations".to_owned(), plan.rounds.into());
    params.insert("write_percent".to_owned(), plan.percent.into());
    let recorder = Recorder { scenario: "guest-log", params };
    let vcpus = f64::from(bed.shape.vcpus);
    let stall = |sample: &Sample| sample.times.sum as f64 / 1e6 / sample.seconds / vcpus;
    let mut results = Vec::new();
    for (way, samples) in plan.ways.iter().zip(&samples) {
        if samples.is_empty() {
            continue;
        }
        let target = if *way == LogWay::ManualLocked { "baseline" } else { "engine" };
        let mut add = |figure: &str, unit: &str, values: Vec<f64>| {
            let counts = samples.iter().map(|sample| match figure {
                "stall" => sample.counts.clone(),
                _ => Counts::new(),
            });
            results.push(recorder.figure(&way.to_string(), target, figure, unit, values, counts));
        };
        let each = |figure: fn(&Sample) -> f64| samples.iter().map(figure).collect::<Vec<_>>();
        let calls = |figure: fn(&Sample) -> &[f64]| {
            samples.iter().flat_map(|sample| figure(sample).to_vec()).collect::<Vec<_>>()
        };
        add("stall", "ms/s", samples.iter().map(stall).collect());
        add("p50", "s", each(|s| s.times.quantile(0.5) as f64 / 1e9));
        add("p99", "s", each(|s| s.times.quantile(0.99) as f64 / 1e9));
        add("longest", "s", each(|s| s.times.longest as f64 / 1e9));
        add("enable", "s", each(|s| s.enable));
        add("read", "s", calls(|s| &s.reads));
        if samples.iter().any(|s| !s.clears.is_empty()) {
            add("clear", "s", calls(|s| &s.clears));
        }
        add("disable", "s", each(|s| s.disable));
    }
    let place = |way| plan.ways.iter().position(|other| *other == way);
    if let (Some(free), Some(locked)) = (place(LogWay::Manual), place(LogWay::ManualLocked))
        && !samples[free].is_empty()
    {
        let of = |way: usize| samples[way].iter().map(stall);
        let stalls = ratios(of(free), of(locked));
        results.push(recorder.ratio("stall of vCPUs", "manual", "manual-locked", None, stalls));
    }
    Ok(results)
}

fn config<F: Format, A: Arch>(bed: &Bed<F, A>, way: LogWay) -> Config {
    let config = bed.config();
    match way {
        LogWay::Legacy | LogWay::Manual | LogWay::ManualLocked => config,
        LogWay::InitiallySet => Config { initially_set: true, ..config },
        LogWay::Ring => Config { ring: Some(RING), ..config },
        LogWay::Hardware => Config { logging: Logging::Hardware, ..config },
    }
}

fn sample<F: Format, A: Arch>(
    bed: &Bed<F, A>,
    way: LogWay,
    plan: &Plan<'_>,
    session: &Session,
) -> anyhow::Result<Sample> {
    let lock = FairLock::default();
    let locks = if way == LogWay::ManualLocked { Locks::Shared(&lock) } else { Locks::Free };
    let vcpus = bed.shape.vcpus;
    bed.with_guest(config(bed, way), |guest| {
        let (over, barrier) = (&AtomicBool::new(false), &Barrier::new(usize::from(vcpus) + 1));
        let writer = |id: u16| {
            move || -> anyhow::Result<(Times, u64)> {
                let mut room = room();
                let runner = Runner::new(guest, bed.machine(), id, &mut room, locks);
                let mut runner = runner.inspect_err(|_| over.store(true, Ordering::Relaxed));
                let populated = match &mut runner {
                    Ok(runner) => write(bed, runner, id, plan.percent, None),
                    Err(_) => Ok(0),
                };
                barrier.wait();
                barrier.wait();
                let mut runner = runner?;
                runner.times = Times::default();
                let written = write(bed, &mut runner, id, plan.percent, Some((over, populated?)))?;
                Ok((runner.times, written))
            }
        };
        let mut room = room();
        let mut migration = Migration {
            bed,
            worker: Worker::new(guest, &mut room)?,
            lock: &lock,
            way,
            bitmap: vec![0; bed.pages().div_ceil(64) as usize],
            copy: vec![0; bed.pages() as usize],
            reads: Vec::new(),
            clears: Vec::new(),
            dirty: 0,
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..vcpus).map(|id| scope.spawn(writer(id))).collect();
            barrier.wait();
            let before = (guest.stats(), bed.machine().service().invalidations);
            barrier.wait();
            let begin = Instant::now();
            let rounds = migration.rounds(plan.rounds, session);
            over.store(true, Ordering::Relaxed);
            while way == LogWay::Ring && threads.iter().any(|thread| !thread.is_finished()) {
                // Somebody may wait for room.
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
            let after = (guest.stats(), bed.machine().service().invalidations);
            let faults = faults_between(&before.0, &after.0);
            let count = |figure: fn(&(slat_guest::FaultKind, u64, u64)) -> u64| {
                faults.iter().map(figure).sum::<u64>()
            };
            migration.finish()?;
            let disable = Instant::now();
            migration.worker.set_slot(bed.slot(false))?;
            let disable = disable.elapsed().as_secs_f64();
            let counts = counts([
                ("faults", count(|f| f.1)),
                ("in_faults_ns", count(|f| f.2)),
                ("stalls", times.count),
                ("waits_for_ring", times.waited_for_room),
                ("pages_in_log", migration.dirty),
                ("pages_written", written),
                ("pages_compared", bed.pages()),
                ("invalidations", after.1 - before.1),
            ]);
            let Migration { reads, clears, .. } = migration;
            Ok(Sample { seconds, times, enable, reads, clears, disable, counts })
        })
    })
}

/// A vCPU writes to its share: once to every page, or to `percent` of them, over and over, until it is
/// over. Each write is a stamp that no other write has; returns how many there were.
fn write<F: Format, A: Arch>(
    bed: &Bed<F, A>,
    runner: &mut Runner<'_, '_, F, A>,
    id: u16,
    percent: u64,
    on: Option<(&AtomicBool, u64)>,
) -> anyhow::Result<u64> {
    let mut stamp = on.map_or(0, |(_, written)| written);
    let share = bed.share(id.into(), bed.shape.vcpus.into());
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
            runner.write(gpa(page), u64::from(id) << 48 | stamp)?;
        }
        if on.is_none() {
            return Ok(stamp);
        }
    }
}

/// Who reads the log, and copies.
struct Migration<'m, 'w, 'p, F: Format, A: Arch> {
    bed: &'p Bed<F, A>,
    worker: TheWorker<'w, 'p, F, A>,
    lock: &'m FairLock,
    way: LogWay,
    bitmap: Vec<u64>,
    copy: Vec<u64>,
    reads: Vec<f64>,
    clears: Vec<f64>,
    /// Pages that the log named.
    dirty: u64,
}

impl<F: Format, A: Arch> Migration<'_, '_, '_, F, A> {
    /// Enables the log, copies everything, and goes round; returns how long enabling took.
    fn rounds(&mut self, rounds: u32, session: &Session) -> anyhow::Result<f64> {
        let begin = Instant::now();
        let slot = self.bed.slot(true);
        match self.way {
            LogWay::ManualLocked => self.lock.exclusive(|| self.worker.set_slot(slot))?,
            _ => self.worker.set_slot(slot)?,
        };
        let enable = begin.elapsed().as_secs_f64();
        for page in 0..self.bed.pages() {
            self.copy[page as usize] = self.bed.first_word(page);
        }
        for _ in 0..rounds {
            if session.interrupted() {
                break;
            }
            match self.way {
                LogWay::Ring => self.harvest_for(DWELL)?,
                _ => {
                    std::thread::sleep(DWELL);
                    self.round()?;
                }
            }
        }
        Ok(enable)
    }

    /// Reads the log, clears it, and copies what it named.
    fn round(&mut self) -> anyhow::Result<()> {
        let begin = Instant::now();
        self.dirty += match self.way {
            LogWay::Legacy | LogWay::Ring => self.worker.take_log(SLOT, &mut self.bitmap)?,
            _ => self.worker.read_log(SLOT, &mut self.bitmap)?,
        };
        let read = begin.elapsed().as_secs_f64();
        if self.way != LogWay::Ring {
            self.reads.push(read);
        }
        let pages = self.bed.pages();
        let begin = Instant::now();
        match self.way {
            LogWay::Legacy | LogWay::Ring => {}
            LogWay::ManualLocked => {
                let (worker, bitmap) = (&mut self.worker, &self.bitmap);
                self.lock.exclusive(|| worker.clear_log(SLOT, 0, pages, bitmap))?;
                self.clears.push(begin.elapsed().as_secs_f64());
            }
            _ => {
                self.worker.clear_log(SLOT, 0, pages, &self.bitmap)?;
                self.clears.push(begin.elapsed().as_secs_f64());
            }
        }
        for (index, &word) in self.bitmap.iter().enumerate() {
            let mut bits = word;
            while bits != 0 {
                let page = index as u64 * 64 + u64::from(bits.trailing_zeros());
                self.copy[page as usize] = self.bed.first_word(page);
                bits &= bits - 1;
            }
        }
        Ok(())
    }

    /// Harvests all rings over and over; then what did not fit into them is read from the bitmap.
    fn harvest_for(&mut self, time: Duration) -> anyhow::Result<()> {
        let begin = Instant::now();
        let (mut read, mut clear) = (0.0, 0.0);
        loop {
            let (harvest, reset, pages) = self.harvest();
            (read, clear) = (read + harvest, clear + reset);
            if begin.elapsed() > time {
                break;
            }
            if pages == 0 {
                std::thread::sleep(HARVEST);
            }
        }
        self.reads.push(read);
        self.clears.push(clear);
        self.round()
    }

    /// Harvests all rings once: seconds of that and of the reset, and how many pages there were.
    fn harvest(&mut self) -> (f64, f64, usize) {
        const NONE: DirtyPage = DirtyPage { slot: SlotId(u16::MAX), page: u64::MAX };
        let begin = Instant::now();
        let mut pages = vec![NONE; RING as usize * usize::from(self.bed.shape.vcpus)];
        let mut found = 0;
        for vcpu in 0..self.bed.shape.vcpus {
            found += self.worker.harvest_ring(vcpu, &mut pages[found..]);
        }
        let harvest = begin.elapsed().as_secs_f64();
        if found == 0 {
            return (harvest, 0.0, 0);
        }
        let begin = Instant::now();
        self.worker.reset_rings();
        let reset = begin.elapsed().as_secs_f64();
        for page in &pages[..found] {
            self.copy[page.page as usize] = self.bed.first_word(page.page);
        }
        self.dirty += found as u64;
        (harvest, reset, found)
    }

    /// Nobody writes any more: copies the rest, and compares.
    fn finish(&mut self) -> anyhow::Result<()> {
        let (reads, clears) = (self.reads.len(), self.clears.len());
        while self.way == LogWay::Ring && self.harvest().2 != 0 {}
        self.round()?;
        self.reads.truncate(reads);
        self.clears.truncate(clears);
        compare(self.bed, &self.copy)
    }
}

/// Whether every page is as it was copied last.
fn compare<F: Format, A: Arch>(bed: &Bed<F, A>, copy: &[u64]) -> anyhow::Result<()> {
    let differs = |&page: &u64| copy[page as usize] != bed.first_word(page);
    let lost: Vec<u64> = (0..bed.pages()).filter(differs).collect();
    ensure!(
        lost.is_empty(),
        "the log lost {} of {} pages, the first at {:#x}: they were written and not named",
        lost.len(),
        bed.pages(),
        gpa(lost[0])
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Bench, Cli, Command};
    use clap::Parser;

    fn args(more: &[&str]) -> DirtyLogArgs {
        let base = ["slat", "bench", "dirty-log", "--target", "engine", "--quick"];
        let cli = Cli::try_parse_from(base.iter().chain(more)).unwrap();
        match cli.command {
            Some(Command::Bench { bench: Bench::DirtyLog(args) }) => args,
            other => panic!("{other:?}"),
        }
    }

    fn results(more: &[&str]) -> Vec<Measurement> {
        run(&args(more), &mut Session::quiet()).unwrap()
    }

    fn count(results: &[Measurement], way: &str, name: &str) -> u64 {
        let of_way = |m: &&Measurement| m.variant == way && m.params["figure"] == "stall";
        results.iter().find(of_way).unwrap_or_else(|| panic!("no {way}")).counts[name]
    }

    /// Each sample compares all pages; here it only has to get through.
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
    fn a_page_that_the_log_did_not_name_is_an_error() {
        let shape = Shape::new(Size(2 << 20), slat::PageSize::SIZE_4K, 1).unwrap();
        let (format, arch) = (slat::format::ept::Ept1G::default(), slat_sim::Ept::default());
        let (session, args) = (Session::quiet(), args(&[]));
        let bed = Bed::new(format, arch, &args.tables, shape, &session).unwrap();
        let copy = vec![0; 512];
        compare(&bed, &copy).unwrap();
        bed.machine().write_host(slat::Hpa(bed.machine().memory_base().0 + 3 * 4096), 1);
        let error = compare(&bed, &copy).unwrap_err().to_string();
        assert!(error.contains("lost 1 of 512") && error.contains("0x100003000"), "{error}");
    }

    #[test]
    fn what_belongs_to_the_other_target_is_refused() {
        let refusal =
            |more: &[&str]| run(&args(more), &mut Session::quiet()).unwrap_err().to_string();
        assert!(refusal(&["--initially-set", "on"]).contains("--way initially-set"));
        assert!(refusal(&["--manual-protect", "off"]).contains("--way legacy"));
        assert!(refusal(&["--bbm", "2"]).contains("--format arm64"));
        assert!(refusal(&["--vcpus", "500"]).contains("192"));
    }
}
