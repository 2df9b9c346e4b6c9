//! vCPUs that run on while their log is fetched: what logging costs a guest, over time.
//!
//! | phase | what happens |
//! |---|---|
//! | populate | every vCPU writes each of its pages for the first time, logging off |
//! | baseline | the vCPUs run at their pace, logging off: what an access usually takes |
//! | run | they run on, logging on, and the log is fetched at intervals |
//!
//! Each log is held against the model of what the vCPUs wrote, step by step ([`Verified`]).

use super::harvest::{Harvester, LOGS, check_chunk};
use crate::guest::{Guest, Shape};
use crate::phase::{Phase, PhaseRun};
use crate::stage::{Calls, Setting, Stage, perform};
use crate::work::Work;
use crate::{Error, HostKvm};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

pub use super::harvest::Verified;

/// How often the vCPUs' positions and stalls are looked at.
const SAMPLE: Duration = Duration::from_millis(100);
/// How long nobody looks whether to stop, at most.
const NAP: Duration = Duration::from_millis(50);

/// What to run.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The guest.
    pub shape: Shape,
    /// What its vCPUs do, again and again.
    pub work: Work,
    /// How long they run with logging off, and how long with logging on.
    pub duration: Duration,
    /// From one fetch of the log to the next.
    pub interval: Duration,
    /// Pages of one `KVM_CLEAR_DIRTY_LOG`: a multiple of 64, or none for a whole slot.
    pub clear_chunk: Option<u64>,
}

impl Config {
    /// Checks what can be checked without a guest.
    ///
    /// # Errors
    /// [`Error::Invalid`], and what [`Shape::check`] finds.
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

/// What the vCPUs did within a tenth of a second.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// Its end, in seconds since the phase began.
    pub at: f64,
    /// Its length in seconds.
    pub seconds: f64,
    /// Steps of all vCPUs.
    pub steps: u64,
    /// Each vCPU's seconds in stalls. A stall counts where it ends.
    pub stalled: Vec<f64>,
}

/// Calls of one kind.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct CallTimes {
    /// How many.
    pub count: u64,
    /// Seconds in all of them.
    pub seconds: f64,
    /// Seconds in the longest.
    pub longest: f64,
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

/// What a run found.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// What was run.
    pub config: Config,
    /// The phases.
    pub phases: Vec<PhaseRun>,
    /// Steps a second of all vCPUs with logging off.
    pub baseline: f64,
    /// And over time with logging on.
    pub samples: Vec<Sample>,
    /// Fetches of the log.
    pub rounds: u64,
    /// Pages that they named, each time counted.
    pub named: u64,
    /// Switching logging on.
    pub enable: CallTimes,
    /// Fetching the log.
    pub get: CallTimes,
    /// Clearing it.
    pub clear: CallTimes,
    /// The logs, held against what was written.
    pub verified: Verified,
    /// How often a vCPU stopped because its ring was full.
    pub full_rings: u64,
}

/// Runs vCPUs beside a log that is fetched.
///
/// # Errors
/// What [`Config::check`] finds; [`Error::Stopped`]; [`Error::PagesMissing`] or [`Error::Misread`]
/// if the host's KVM is wrong; any other [`Error`] that the guest or the kernel gives cause for.
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

/// Populates, and lets the vCPUs run for a time with nothing in their way; answers with the work
/// that goes on for ever, and how many steps a second all vCPUs make of it.
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

/// Lets vCPUs run until a time, or until all is to stop; with rings, until one is full.
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

/// vCPUs were asked to stop: one that waits at a full ring does not see it before there is room.
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

/// A page that a vCPU read must hold what was written to it.
pub(super) fn check_reads(guest: &Guest) -> Result<(), Error> {
    match guest.misread() {
        0 => Ok(()),
        pages => Err(Error::Misread { pages }),
    }
}

/// Does something while another thread looks at the vCPUs.
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

/// Ends the sampler, be it by a panic of who works beside it.
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
