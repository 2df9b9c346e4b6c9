//! Fetching the log while vCPUs run: the cost of dirty logging to a guest, over time.
//!
//! | phase | activity |
//! |---|---|
//! | populate | every vCPU writes each of its pages for the first time, logging off |
//! | warm | every vCPU reads each of its pages, logging off |
//! | baseline | the vCPUs run at their pace, logging off: how long an access usually takes |
//! | run | the vCPUs run with logging on, and the log is fetched at intervals |
//!
//! Each log is checked against the model of the vCPUs' writes, step by step ([`Verification`]).

use super::harvest::{Harvester, LOGS, check_chunk};
use super::pace::{Sample, course, loss, worst, written};
use crate::figure::Figure::{self, LongestCall, Time};
use crate::figure::{Outcome, Results, Sentence, Stall};
use crate::guest::{Guest, Shape};
use crate::phase::{Phase, PhaseRun};
use crate::stage::{Calls, Setting, Stage, perform};
use crate::work::Work;
use crate::{Error, HostKvm};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

pub use super::harvest::Verification;

/// How its results are shown.
pub const RESULTS: Results = Results {
    name: "dirty-log-live",
    title: "A log fetched beside running vCPUs (KVM)",
    columns: &[
        (Figure::LOSS, "guest lost"),
        (Figure::WORST_LOSS, "worst second"),
        (Time(Phase::Enable), "enable"),
        (Time(Phase::Get), "get"),
        (LongestCall(Phase::Get), "longest get"),
        (Time(Phase::Clear), "a clear"),
        (LongestCall(Phase::Clear), "longest clear"),
    ],
    note: "Every log was held against what the vCPUs wrote; “guest lost” is what is missing of the \
           pace that the vCPUs kept with logging off.",
    said: Sentence::Whole(
        Figure::LOSS,
        "A log that is fetched beside running vCPUs takes from their pace",
    ),
};

/// What its runs give.
pub const OUTCOME: Outcome<Report> = Outcome {
    figures: &[
        (Figure::WRITE_RATE, |report| Some(written(&report.samples, &report.config.work))),
        (Figure::LOSS, |report| Some(loss(&report.samples, report.baseline))),
        (Figure::WORST_LOSS, |report| Some(worst(&report.samples, report.baseline))),
        (Time(Phase::Enable), |report| report.enable.mean()),
        (LongestCall(Phase::Enable), |report| report.enable.longest()),
        (Time(Phase::Get), |report| report.get.mean()),
        (LongestCall(Phase::Get), |report| report.get.longest()),
        (Time(Phase::Clear), |report| report.clear.mean()),
        (LongestCall(Phase::Clear), |report| report.clear.longest()),
    ],
    counts: &[
        (Phase::Run, "fetches", |report| Some(report.rounds)),
        (Phase::Run, "pages_named", |report| Some(report.named)),
        (Phase::Run, "pages_in_excess", |report| Some(report.verified.excess)),
        (Phase::Run, "writes_verified", |report| Some(report.verified.writes)),
        (Phase::Run, "full_rings", |report| Some(report.full_rings)),
    ],
    course: |report| course(&report.samples, report.baseline).into(),
    ..Outcome::of(Figure::Stall(Phase::Run, Stall::Page))
};

/// Time between two samples of the vCPUs' positions and stalls.
const SAMPLE: Duration = Duration::from_millis(100);
/// The longest time between two checks of the stop flag.
const NAP: Duration = Duration::from_millis(50);

/// Configuration of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The guest.
    pub shape: Shape,
    /// The work of its vCPUs, repeated without end.
    pub work: Work,
    /// Time that the vCPUs run with logging off, and then again with logging on.
    pub duration: Duration,
    /// Time from one fetch of the log to the next.
    pub interval: Duration,
    /// Pages per `KVM_CLEAR_DIRTY_LOG`, a multiple of 64; `None` for a whole memslot.
    pub clear_chunk: Option<u64>,
}

impl Config {
    /// Checks the configuration, without making a guest.
    ///
    /// # Errors
    /// [`Error::Invalid`], and the errors of [`Shape::check`].
    pub fn check(&self, host: &HostKvm) -> Result<(), Error> {
        self.work.check()?;
        check_chunk(self.clear_chunk, self.shape.mode)?;
        if self.interval.is_zero() || self.duration < self.interval {
            let rule = "must be above 0 and at most the duration";
            return Err(Error::invalid("interval", format!("{:?}", self.interval), rule));
        }
        let rounds = self.duration.as_nanos() / self.interval.as_nanos();
        let each = self.shape.memory / rustix::param::page_size() as u64 / 8;
        if rounds * u128::from(each) > LOGS.into() {
            let rule = "gives more logs than can be kept to be checked: make it longer";
            return Err(Error::invalid("interval", format!("{:?}", self.interval), rule));
        }
        self.shape.check(host)
    }
}

/// Times of calls of one kind.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct CallTimes {
    /// Number of calls.
    pub count: u64,
    /// Seconds of all calls.
    pub seconds: f64,
    /// Seconds of the longest call.
    pub longest: f64,
}

impl CallTimes {
    /// Returns the mean time of a call, if there was one.
    pub fn mean(self) -> Option<f64> {
        (self.count > 0).then(|| self.seconds / self.count as f64)
    }

    /// Returns the time of the longest call, if there was one.
    pub fn longest(self) -> Option<f64> {
        (self.count > 0).then_some(self.longest)
    }
}

impl From<Calls> for CallTimes {
    fn from(calls: Calls) -> Self {
        Self {
            count: calls.count,
            seconds: calls.total.as_secs_f64(),
            longest: calls.longest.as_secs_f64(),
        }
    }
}

/// Results of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// The configuration of the run.
    pub config: Config,
    /// The phases.
    pub phases: Vec<PhaseRun>,
    /// Steps per second of all vCPUs with logging off.
    pub baseline: f64,
    /// Samples over time with logging on.
    pub samples: Vec<Sample>,
    /// Number of fetches of the log.
    pub rounds: u64,
    /// Sum of the pages in all fetched logs.
    pub named: u64,
    /// Call that enabled logging.
    pub enable: CallTimes,
    /// Calls that fetched the log.
    pub get: CallTimes,
    /// Calls that cleared the log.
    pub clear: CallTimes,
    /// The result of checking the logs.
    pub verified: Verification,
    /// Number of times that a vCPU stopped because its ring was full.
    pub full_rings: u64,
}

/// Runs vCPUs while the log is fetched.
///
/// # Errors
/// The errors of [`Config::check`]; [`Error::Stopped`]; [`Error::PagesMissing`] or
/// [`Error::Misread`] if the host's KVM is wrong; any other [`Error`] of the guest or the kernel.
pub fn run(config: &Config, setting: Setting<'_>) -> Result<Report, Error> {
    config.check(&crate::probe()?)?;
    let (report, phases) = perform(&config.shape, setting, |stage| {
        let (work, baseline) = baseline(stage, config.work, config.duration)?;
        let stop = stage.stop();
        let (interval, duration) = (config.interval, config.duration);
        let harvester = Harvester::new(stage.guest, &config.shape, config.clear_chunk)?;
        let mut enable = Calls::default();
        let (harvester, samples) = stage.live(
            Phase::Run,
            work,
            |guest| {
                let mut harvester = harvester;
                let samples = sampled(guest, || {
                    harvester.start_log(&mut enable)?;
                    let end = Instant::now() + duration;
                    while Instant::now() < end && !stop.load(Ordering::Relaxed) {
                        wait(guest, end.min(Instant::now() + interval), stop);
                        harvester.round()?;
                    }
                    Ok(())
                })?;
                Ok((harvester, samples.1))
            },
            |guest, (harvester, _)| keep_emptying(guest, || harvester.round()),
            |_, (mut harvester, samples)| {
                harvester.round()?;
                Ok((harvester, samples))
            },
        )?;
        stage.guest.stop_log()?;
        stage.checking()?;
        let verified = harvester.verify(&work, stop)?;
        check_reads(stage.guest)?;
        Ok(Report {
            config: config.clone(),
            phases: Vec::new(),
            baseline,
            samples,
            rounds: harvester.fetches,
            named: harvester.named,
            enable: enable.into(),
            get: harvester.get.into(),
            clear: harvester.clear.into(),
            verified,
            full_rings: stage.guest.full_rings(),
        })
    })?;
    Ok(Report { phases, ..report })
}

/// Populates the memory, and runs the vCPUs undisturbed for `duration`. Returns the endless work,
/// and how many steps of it all vCPUs do per second.
pub(super) fn baseline(
    stage: &mut Stage<'_>,
    work: Work,
    duration: Duration,
) -> Result<(Work, f64), Error> {
    stage.populate(Work::each_page(crate::work::Touch::Read))?;
    let work = Work { endless: true, ..work };
    let stop = stage.stop();
    stage.live(
        Phase::Baseline,
        work,
        |_| {
            let end = Instant::now() + duration;
            while Instant::now() < end && !stop.load(Ordering::Relaxed) {
                std::thread::sleep(NAP.min(end.saturating_duration_since(Instant::now())));
            }
            Ok(())
        },
        |_, ()| Ok(false),
        |_, ()| Ok(()),
    )?;
    stage.set_warm();
    let run = stage.last_phase().expect("it has just ended");
    let steps: u64 = run.vcpus.iter().map(|vcpu| vcpu.pages).sum();
    Ok((work, steps as f64 / run.seconds.max(f64::MIN_POSITIVE)))
}

/// Waits while vCPUs run until `until` or until `stop` is set. With rings, it also returns when one
/// is full.
pub(super) fn wait(guest: &Guest, until: Instant, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        if !guest.mode().is_ring() {
            std::thread::sleep(left.min(NAP));
        } else if guest.wait_for_full_ring(left.min(NAP)) {
            return;
        }
    }
}

/// Fetches the log while vCPUs are stopping, because a vCPU at a full ring does not see the request
/// before its ring has room. Returns whether there are rings.
pub(super) fn keep_emptying(
    guest: &Guest,
    fetch: impl FnOnce() -> Result<u64, Error>,
) -> Result<bool, Error> {
    if guest.mode().is_ring() {
        guest.wait_for_full_ring(Duration::from_millis(1));
        fetch()?;
    }
    Ok(guest.mode().is_ring())
}

/// Returns an error if a vCPU read a page that held another page's stamp.
pub(super) fn check_reads(guest: &Guest) -> Result<(), Error> {
    match guest.misread() {
        0 => Ok(()),
        pages => Err(Error::Misread { pages }),
    }
}

/// Runs `work` while another thread samples the vCPUs.
pub(super) fn sampled<T>(
    guest: &Guest,
    work: impl FnOnce() -> Result<T, Error>,
) -> Result<(T, Vec<Sample>), Error> {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let sampler = std::thread::Builder::new()
            .name("sampler".into())
            .spawn_scoped(scope, || samples(guest, &over))
            .map_err(Error::os::<std::io::Error>("start of a thread"))?;
        let end = End { over: &over, sampler: sampler.thread() };
        let result = work();
        drop(end);
        let samples = sampler.join().map_err(|_| Error::ThreadPanicked)?;
        Ok((result?, samples))
    })
}

/// Ends the sampler when it is dropped, also by a panic of the work.
struct End<'a> {
    over: &'a AtomicBool,
    sampler: &'a std::thread::Thread,
}

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        self.sampler.unpark();
    }
}

fn samples(guest: &Guest, over: &AtomicBool) -> Vec<Sample> {
    let vcpus = 0..guest.parts().len();
    let read = || {
        let steps: Vec<u64> = vcpus.clone().map(|vcpu| guest.position(vcpu)).collect();
        let stalls: Vec<u64> = vcpus.clone().map(|vcpu| guest.stalls(vcpu).1).collect();
        (Instant::now(), steps, stalls)
    };
    let begin = read();
    let mut samples = Vec::new();
    let mut last = begin.clone();
    while !over.load(Ordering::Relaxed) {
        let due = last.0 + SAMPLE;
        while !over.load(Ordering::Relaxed) && Instant::now() < due {
            std::thread::park_timeout(due.saturating_duration_since(Instant::now()));
        }
        let now = read();
        let pairs = now.2.iter().zip(&last.2);
        samples.push(Sample {
            at: (now.0 - begin.0).as_secs_f64(),
            seconds: (now.0 - last.0).as_secs_f64(),
            steps: now.1.iter().zip(&last.1).map(|(now, last)| now - last).sum(),
            stalled: pairs
                .map(|(now, last)| (now - last) as f64 / guest.ticks_per_second())
                .collect(),
        });
        last = now;
    }
    samples
}
