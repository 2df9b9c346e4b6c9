//! A live migration to a second memory on the same machine.
//!
//! It is a pre-copy as VMMs do it. All pages are copied while the guest runs. Then the pages in the
//! log are copied, round after round, until the rest can be copied within the allowed downtime.
//! Then the vCPUs stop and the rest is copied. The link is simulated by a limit on the bytes per
//! second. The pages are really copied, and at the end the two memories are compared word by word.

use super::harvest::{Harvester, check_chunk};
use super::live::{CallTimes, Verification, baseline, check_reads, keep_emptying, sampled, wait};
use super::pace::{self, Sample, loss, worst, written};
use crate::bitmap::DirtyBitmap;
use crate::figure::Figure::{self, LongestCall, Time};
use crate::figure::{Column, Outcome, Results, Sentence};
use crate::guest::{Guest, Shape};
use crate::memory::HostMemory;
use crate::phase::{Phase, PhaseRun};
use crate::stage::{Calls, Setting, perform};
use crate::work::Work;
use crate::{Backing, Error, HostKvm, Mode, meminfo};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// From the start to the end of the downtime.
pub const TOTAL: Figure = Figure::Own("total", "s");
/// The time in which the vCPUs stood still.
pub const DOWNTIME: Figure = Time(Phase::Downtime);
/// The rate at which pages were copied while the vCPUs ran.
pub const COPY_RATE: Figure = Figure::Own("copy-rate", "MiB/s");
const ROUNDS: Figure = Figure::Own("rounds", "rounds");
const COPIED: Figure = Figure::Own("copied", "MiB");
/// The pages that each pass left to the next.
pub const PASS_LEFT: Figure = Figure::Course("pass-left", "pages");
/// The end of each pass.
pub const PASS_AT: Figure = Figure::Course("pass-at", "s");
/// When the vCPUs stopped, and the end.
pub const PASS_STOP: Figure = Figure::Course("pass-stop", "s");

/// How its results are shown.
pub const RESULTS: Results = Results {
    name: "migrate",
    title: "Migrating a running guest (KVM)",
    columns: &[
        (TOTAL, "total"),
        (DOWNTIME, "downtime"),
        (ROUNDS, "rounds"),
        (COPIED, "copied"),
        (Figure::WRITE_RATE, "written at"),
        (COPY_RATE, "copied at"),
        (Figure::LOSS, "guest lost"),
        (Figure::WORST_LOSS, "worst second"),
    ],
    note: "Copied into a second memory, no faster than the link, and held against it word by word. \
           “written at” and “copied at”: what was reached of the dirty rate and of the link that \
           were asked for. Rounds with * did not come to fit into the downtime allowed: the guest \
           was stopped all the same. “guest lost” is what is missing of the pace that the vCPUs \
           kept with logging off.",
    said: Sentence::Whole(TOTAL, "A migration takes"),
};

/// The columns of its calls, which have a table of their own.
pub const CALLS: &[Column] = &[
    (Time(Phase::Enable), "enable"),
    (LongestCall(Phase::Get), "longest get"),
    (LongestCall(Phase::Clear), "longest clear"),
];

/// What its runs give.
pub const OUTCOME: Outcome<Report> = Outcome {
    figures: &[
        (TOTAL, |report| Some(report.seconds)),
        (DOWNTIME, |report| Some(report.downtime)),
        (ROUNDS, |report| Some(report.passes.len() as f64)),
        (COPIED, |report| Some(report.bytes as f64 / f64::from(1 << 20))),
        (Figure::WRITE_RATE, |report| Some(written(&report.samples, &report.config.work))),
        (COPY_RATE, |report| Some(copied(report))),
        (Figure::LOSS, |report| Some(loss(&report.samples, report.baseline))),
        (Figure::WORST_LOSS, |report| Some(worst(&report.samples, report.baseline))),
        (Time(Phase::Enable), |report| Some(report.enable.seconds)),
        (LongestCall(Phase::Get), |report| Some(report.get.longest)),
        (LongestCall(Phase::Clear), |report| report.clear.longest()),
    ],
    counts: &[
        (Phase::Run, "converged", |report| Some(report.converged.into())),
        (Phase::Run, "pages_compared", |report| Some(report.compared)),
        (Phase::Run, "writes_verified", |report| Some(report.verified.writes)),
        (Phase::Run, "pages_in_excess", |report| Some(report.verified.excess)),
        (Phase::Run, "full_rings", |report| Some(report.full_rings)),
    ],
    course: |report| {
        // A short migration ends before the first sample of the guest's pace.
        let pace = pace::course(&report.samples, report.baseline);
        pace.into_iter().chain(course(report)).collect()
    },
    ..Outcome::of(TOTAL)
};

/// Returns the rate at which pages were copied while the vCPUs ran, in MiB/s.
fn copied(report: &Report) -> f64 {
    let pages: u64 = report.passes.iter().map(|pass| pass.pages).sum();
    let seconds: f64 = report.passes.iter().map(|pass| pass.seconds).sum();
    (pages * Backing::Small.page_size()) as f64
        / seconds.max(f64::MIN_POSITIVE)
        / f64::from(1 << 20)
}

/// Returns the course of the passes over time.
fn course(report: &Report) -> [(Figure, Vec<f64>); 4] {
    let of = |of: fn(&Pass) -> f64| report.passes.iter().map(of).collect();
    [
        (Figure::Course("pass", "pages"), of(|pass| pass.pages as f64)),
        (PASS_LEFT, of(|pass| pass.left as f64)),
        (PASS_AT, of(|pass| pass.end)),
        (PASS_STOP, vec![report.seconds - report.downtime, report.seconds]),
    ]
}

/// Time between two harvests of the rings while pages are copied.
const RING_INTERVAL: Duration = Duration::from_millis(10);
/// Pages copied between two checks of the time.
const BURST: u64 = 64;

/// Configuration of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The guest.
    pub shape: Shape,
    /// The work of its vCPUs, repeated without end.
    pub work: Work,
    /// Bandwidth of the link, in bytes per second.
    pub link: f64,
    /// The longest time for which the vCPUs may be stopped at the end.
    pub max_downtime: Duration,
    /// Number of rounds after which the vCPUs are stopped in any case.
    pub max_rounds: u32,
    /// Time that the vCPUs run before the migration, to measure their pace.
    pub baseline: Duration,
    /// Pages per `KVM_CLEAR_DIRTY_LOG`, a multiple of 64; `None` for a whole memslot.
    pub clear_chunk: Option<u64>,
}

impl Config {
    /// Checks the configuration, without making a guest.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::NotEnoughMemory`] for both memories, and the errors of
    /// [`Shape::check`].
    pub fn check(&self, host: &HostKvm) -> Result<(), Error> {
        self.work.check()?;
        check_chunk(self.clear_chunk, self.shape.mode)?;
        if !(self.link.is_finite() && self.link >= 1.0) {
            let rule = "must be at least 1";
            return Err(Error::invalid("bytes a second of the link", self.link, rule));
        }
        if self.max_rounds == 0 {
            return Err(Error::invalid("rounds", 0, "must be at least 1"));
        }
        self.shape.check(host)?;
        let second = match self.shape.backing.is_hugetlb() {
            // Pages of the hugetlb pool are not part of the available memory.
            true => self.shape.memory,
            false => self.shape.memory * 2,
        };
        meminfo::check(second)
    }
}

/// One round of copying while vCPUs run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pass {
    /// Number of pages copied.
    pub pages: u64,
    /// Duration in seconds, including the calls for the log.
    pub seconds: f64,
    /// End of the round, in seconds since the migration began.
    pub end: f64,
    /// Number of pages left to copy at its end.
    pub left: u64,
    /// Expected downtime in seconds, if the vCPUs had stopped before this round; infinite for the
    /// first.
    pub expected_downtime: f64,
}

/// Results of a migration.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// The configuration of the run.
    pub config: Config,
    /// The phases.
    pub phases: Vec<PhaseRun>,
    /// Steps per second of all vCPUs before the migration.
    pub baseline: f64,
    /// Samples over time during the migration.
    pub samples: Vec<Sample>,
    /// The rounds. The first copies all pages.
    pub passes: Vec<Pass>,
    /// Whether the rest fitted into the allowed downtime before the rounds ended.
    pub converged: bool,
    /// Seconds from the start of the migration to the end of the downtime.
    pub seconds: f64,
    /// Seconds from the request that the vCPUs stop until the last page was copied.
    pub downtime: f64,
    /// Number of pages copied in the downtime.
    pub downtime_pages: u64,
    /// Number of bytes copied in total.
    pub bytes: u64,
    /// Call that enabled logging.
    pub enable: CallTimes,
    /// Calls that fetched the log.
    pub get: CallTimes,
    /// Calls that cleared the log.
    pub clear: CallTimes,
    /// The result of checking the logs.
    pub verified: Verification,
    /// Number of pages that were compared with their copy, which is all of them.
    pub compared: u64,
    /// Number of times that a vCPU stopped because its ring was full.
    pub full_rings: u64,
}

/// Migrates a guest.
///
/// # Errors
/// The errors of [`Config::check`]; [`Error::Stopped`]; [`Error::NotCopied`],
/// [`Error::PagesMissing`] or [`Error::Misread`] if the host's KVM is wrong; any other [`Error`] of
/// the guest or the kernel.
pub fn run(config: &Config, setting: Setting<'_>) -> Result<Report, Error> {
    config.check(&crate::probe()?)?;
    let copy = HostMemory::new(config.shape.memory, Backing::Small)?;
    let (report, phases) = perform(&config.shape, setting, |stage| {
        let (work, baseline) = baseline(stage, config.work, config.baseline)?;
        let stop = stage.stop();
        let guest = stage.guest;
        let harvester = Harvester::new(guest, &config.shape, config.clear_chunk)?;
        let mover = Mover {
            config,
            guest,
            copy: &copy,
            stop,
            harvester,
            enable: Calls::default(),
            passes: Vec::new(),
            bytes: 0,
            begin: Instant::now(),
            pending: DirtyBitmap::new(guest.pages()),
        };
        let outcome = stage.live(
            Phase::Run,
            work,
            |guest| {
                let mut mover = mover;
                let (converged, samples) = sampled(guest, || mover.precopy())?;
                Ok((mover, converged, samples, Instant::now()))
            },
            |guest, (mover, ..)| keep_emptying(guest, || mover.fetch()),
            |_, (mut mover, converged, samples, stopped)| {
                let pages = mover.last_pages()?;
                let seconds = mover.begin.elapsed().as_secs_f64();
                Ok((mover, converged, samples, stopped.elapsed(), seconds, pages))
            },
        )?;
        let (mover, converged, samples, downtime, seconds, downtime_pages) = outcome;
        stage.guest.stop_log()?;
        stage.checking()?;
        let verified = mover.harvester.verify(&work, stop)?;
        let compared = compare(stage.guest, &copy, stop)?;
        check_reads(stage.guest)?;
        Ok(Report {
            config: config.clone(),
            phases: Vec::new(),
            baseline,
            samples,
            passes: mover.passes,
            converged,
            seconds,
            downtime: downtime.as_secs_f64(),
            downtime_pages,
            bytes: mover.bytes,
            enable: mover.enable.into(),
            get: mover.harvester.get.into(),
            clear: mover.harvester.clear.into(),
            verified,
            compared,
            full_rings: stage.guest.full_rings(),
        })
    })?;
    Ok(Report { phases, ..report })
}

/// Copies the guest's memory.
struct Mover<'a> {
    config: &'a Config,
    guest: &'a Guest,
    copy: &'a HostMemory,
    stop: &'a AtomicBool,
    harvester: Harvester<'a>,
    enable: Calls,
    passes: Vec<Pass>,
    bytes: u64,
    begin: Instant,
    /// Pages that are still to be copied.
    pending: DirtyBitmap,
}

impl Mover<'_> {
    /// Copies until the rest fits into the allowed downtime. Returns whether it does.
    fn precopy(&mut self) -> Result<bool, Error> {
        self.begin = Instant::now();
        self.harvester.start_log(&mut self.enable)?;
        self.pending.words_mut().fill(u64::MAX);
        if self.guest.mode() == Mode::ManualInitiallySet {
            // No page is write-protected before the first clear, so the log is fetched and cleared
            // first.
            self.fetch()?;
        }
        let mut expected = f64::INFINITY;
        for _ in 0..self.config.max_rounds {
            let begin = Instant::now();
            let pages = self.copy_pending(true)?;
            let copying = begin.elapsed();
            self.fetch()?;
            let seconds = begin.elapsed().as_secs_f64();
            let (end, left) = (self.begin.elapsed().as_secs_f64(), self.pending.count());
            self.passes.push(Pass { pages, seconds, end, left, expected_downtime: expected });
            let left = left * self.guest.page_size();
            // The rest is copied at the rate of the last round, at most that of the link, and the
            // log is fetched once more.
            let rate = (pages * self.guest.page_size()) as f64 / copying.as_secs_f64().max(1e-9);
            let rate = if pages == 0 { self.config.link } else { rate.min(self.config.link) };
            expected = left as f64 / rate + self.harvester.last_round.as_secs_f64();
            if expected <= self.config.max_downtime.as_secs_f64() {
                return Ok(true);
            }
            if self.stop.load(Ordering::Relaxed) {
                return Err(Error::Stopped);
            }
        }
        Ok(false)
    }

    /// Fetches the log a last time and copies the rest, while the vCPUs are stopped.
    fn last_pages(&mut self) -> Result<u64, Error> {
        self.fetch()?;
        self.copy_pending(false)
    }

    /// Fetches the log, and adds its pages to those that are to be copied.
    fn fetch(&mut self) -> Result<u64, Error> {
        let named = self.harvester.round()?;
        let words = self.pending.words_mut().iter_mut().zip(self.harvester.last().words());
        words.for_each(|(pending, log)| *pending |= log);
        Ok(named)
    }

    /// Copies the pending pages, no faster than the link.
    fn copy_pending(&mut self, running: bool) -> Result<u64, Error> {
        let page_size = self.guest.page_size();
        let all = std::mem::replace(&mut self.pending, DirtyBitmap::new(self.guest.pages()));
        let begin = Instant::now();
        let mut copied = 0;
        let mut look = begin + RING_INTERVAL;
        for page in (0..self.guest.pages()).filter(|&page| all.contains(page)) {
            copy_page(self.guest.memory(), self.copy, page, page_size);
            copied += 1;
            if copied % BURST == 0 {
                self.keep_to_the_link(begin, copied * page_size, running, &mut look)?;
            }
        }
        // The last burst must take its time on the link, too.
        self.keep_to_the_link(begin, copied * page_size, running, &mut look)?;
        self.bytes += copied * page_size;
        Ok(copied)
    }

    /// Waits until the link can have carried `bytes` since `begin`. If the vCPUs run, it harvests
    /// the rings meanwhile, because a vCPU at a full ring must not wait for the end of the round.
    fn keep_to_the_link(
        &mut self,
        begin: Instant,
        bytes: u64,
        running: bool,
        look: &mut Instant,
    ) -> Result<(), Error> {
        let due = begin + Duration::from_secs_f64((bytes as f64 / self.config.link).min(1e9));
        loop {
            let rings = running && self.guest.mode().is_ring();
            if self.stop.load(Ordering::Relaxed) {
                return Err(Error::Stopped);
            }
            if rings && (Instant::now() >= *look || self.guest.has_full_ring()) {
                self.fetch()?;
                *look = Instant::now() + RING_INTERVAL;
            }
            if Instant::now() >= due {
                return Ok(());
            }
            wait(self.guest, if rings { due.min(*look) } else { due }, self.stop);
        }
    }
}

pub(super) fn copy_page(from: &HostMemory, to: &HostMemory, page: u64, page_size: u64) {
    let words = [from, to].map(|memory| memory.words(page * page_size, page_size));
    if let [Some(from), Some(to)] = words {
        for (from, to) in from.iter().zip(to) {
            to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }
}

/// Compares the two memories, and returns the number of pages.
pub(super) fn compare(guest: &Guest, copy: &HostMemory, stop: &AtomicBool) -> Result<u64, Error> {
    let page_size = guest.page_size();
    for page in 0..guest.pages() {
        if page % 4096 == 0 && stop.load(Ordering::Relaxed) {
            return Err(Error::Stopped);
        }
        let words = [guest.memory(), copy].map(|memory| memory.words(page * page_size, page_size));
        let [Some(originals), Some(copies)] = words else {
            return Err(Error::NotCopied { page, found: 0, expected: 0 });
        };
        for (original, copied) in originals.iter().zip(copies) {
            let expected = original.load(Ordering::Relaxed);
            let found = copied.load(Ordering::Relaxed);
            if expected != found {
                return Err(Error::NotCopied { page, found, expected });
            }
        }
    }
    Ok(guest.pages())
}
