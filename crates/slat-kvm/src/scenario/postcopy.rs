//! A guest that runs on before its memory is there: post-copy, and pre-copy of the same guest.
//!
//! The guest starts with no page. A page that it touches is asked for, over a link with a delay and
//! a rate, while all others come in their order. The guest records its clock after each access. As
//! many of its longest accesses as pages were asked for are the stalls of remote faults.
//!
//! Pre-copy is the scenario `migrate`, with the same guest over the same link.

pub use super::link::Link;

use super::handler::Handler;
use super::link::Wire;
use super::migrate;
use super::times::Times;
use super::visits::{Visit, Visits, listed, recorded};
use crate::error::size_name;
use crate::figure::{Figure, Outcome, Results, Sentence};
use crate::guest::{Guest, Shape};
use crate::image::Image;
use crate::memory::HostMemory;
use crate::phase::PhaseRun;
use crate::stage::{Setting, perform_on};
use crate::work::Work;
use crate::{Backing, Error, HostKvm, meminfo};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// From the start of the migration until all of the memory is there, and none is needed any more
/// from the host that the guest left.
pub const ALL_THERE: Figure = Figure::Own("all-there", "s");
/// How long all vCPUs stood still for the move.
pub const STOPPED: Figure = Figure::Own("stopped", "s");
/// Faults whose page was asked for over the link.
pub const REMOTE: Figure = Figure::Own("remote-faults", "faults");
/// Their stalls.
pub const REMOTE_P50: Figure = Figure::Own("remote-p50", "s");
/// The same.
pub const REMOTE_P99: Figure = Figure::Own("remote-p99", "s");
/// The same.
pub const REMOTE_MAX: Figure = Figure::Own("remote-longest", "s");
/// From the start to the guest's last access.
pub const WORKING_SET: Figure = Figure::Own("working-set", "s");
const COPIED: Figure = Figure::Own("copied", "MiB");
const COPY_RATE: Figure = Figure::Own("copy-rate", "MiB/s");
/// The course of post-copy: when each of twenty parts of the accesses was over.
pub const COURSE: Figure = Figure::Course("pass-accesses", "s");

/// How its results are shown.
pub const RESULTS: Results = Results {
    name: "postcopy",
    title: "A guest that runs on before its memory is there (KVM)",
    columns: &[
        (STOPPED, "guest stopped"),
        (ALL_THERE, "all there"),
        (REMOTE, "remote faults"),
        (REMOTE_P50, "stall p50"),
        (REMOTE_P99, "p99"),
        (REMOTE_MAX, "longest"),
        (WORKING_SET, "accesses done"),
        (COPIED, "copied"),
        (COPY_RATE, "copied at"),
        (Figure::LOSS, "guest lost"),
    ],
    note: "Stalls of remote faults are by the guest's own clock; all of its memory was compared at \
           the end. “guest stopped”: post-copy moves no state of devices here, so only one delay \
           of the link counts. “guest lost”: of its pace, until its accesses were done (post-copy) \
           or it was stopped (pre-copy).",
    said: Sentence::Whole(ALL_THERE, "A guest's memory has moved after"),
};

/// Ways to move a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum Way {
    /// The guest runs on at once, and its pages follow.
    PostCopy,
    /// Its pages are copied before it moves.
    PreCopy,
}

/// Configuration of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The guest.
    pub shape: Shape,
    /// The way.
    pub way: Way,
    /// The accesses of post-copy. Pre-copy repeats them without end.
    pub visits: Visits,
    /// The accesses a second of all vCPUs.
    pub per_second: f64,
    /// The link.
    pub link: Link,
    /// The longest time for which pre-copy may stop the guest.
    pub max_downtime: Duration,
    /// Rounds after which pre-copy stops the guest in any case.
    pub max_rounds: u32,
}

impl Config {
    /// Checks the configuration, without making a guest.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::NotEnoughMemory`] for both memories, and the errors of
    /// [`Shape::check`].
    pub fn check(&self, host: &HostKvm) -> Result<(), Error> {
        self.link.check()?;
        if !matches!(self.shape.backing, Backing::Small | Backing::Thp) {
            let rule = format!("must be anonymous: {}", size_name(Backing::Small.page_size()));
            return Err(Error::invalid("backing", self.shape.backing, rule));
        }
        self.work().check()?;
        match self.way {
            Way::PreCopy => self.migration().check(host),
            Way::PostCopy => {
                self.shape.check(host)?;
                meminfo::check(2 * self.shape.memory)
            }
        }
    }

    fn work(&self) -> Work {
        let each = self.per_second / self.shape.vcpus.max(1) as f64;
        Work { per_second: Some(each), ..self.visits.work(&self.shape, 0) }
    }

    fn migration(&self) -> migrate::Config {
        migrate::Config {
            shape: Shape { records: listed(&self.work()), ..self.shape.clone() },
            work: Work { steps: None, ..self.work() },
            link: self.link.rate,
            max_downtime: self.max_downtime,
            max_rounds: self.max_rounds,
            baseline: Duration::from_secs(1),
            clear_chunk: None,
        }
    }
}

/// Results of a run. What a way does not have is `None`.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// The phases.
    pub phases: Vec<PhaseRun>,
    /// Seconds for which all vCPUs stood still.
    pub stopped: f64,
    /// Seconds until all of the memory was there.
    pub all_there: f64,
    /// Bytes that were copied.
    pub bytes: u64,
    /// What the guest lost of its pace, in per cent.
    pub lost: f64,
    /// The pages that were asked for, in their order; empty with pre-copy.
    pub asked: Vec<u64>,
    /// The guest's accesses, with as many stalls as pages were asked for.
    pub times: Times,
}

/// What its runs give.
pub const OUTCOME: Outcome<Report> = Outcome {
    figures: &[
        (STOPPED, |report| Some(report.stopped)),
        (ALL_THERE, |report| Some(report.all_there)),
        (REMOTE, |report| report.times.share(1.0).map(|_| report.asked.len() as f64)),
        (REMOTE_P50, |report| report.times.stall(0.5)),
        (REMOTE_P99, |report| report.times.stall(0.99)),
        (REMOTE_MAX, |report| report.times.stall(1.0)),
        (WORKING_SET, |report| report.times.share(1.0)),
        (COPIED, |report| Some(report.bytes as f64 / MIB)),
        (COPY_RATE, |report| Some(report.bytes as f64 / MIB / report.all_there.max(1e-9))),
        (Figure::LOSS, |report| Some(report.lost)),
    ],
    course: |report| vec![(COURSE, report.times.course(0.0))],
    ..Outcome::of(ALL_THERE)
};

const MIB: f64 = (1 << 20) as f64;

/// Moves a guest.
///
/// # Errors
/// The errors of [`Config::check`]; [`Error::NoUserfaultfd`]; [`Error::Stopped`];
/// [`Error::WrongStamp`], [`Error::Misread`] or [`Error::NotCopied`] if a page came wrong; any
/// other [`Error`] of the guest or the kernel.
pub fn run(config: &Config, image: &Image, setting: Setting<'_>) -> Result<Report, Error> {
    config.check(&crate::probe()?)?;
    match config.way {
        Way::PreCopy => {
            let report = migrate::run(&config.migration(), setting)?;
            Ok(Report {
                stopped: report.downtime,
                all_there: report.seconds,
                bytes: report.bytes,
                lost: super::pace::loss(&report.samples, report.baseline),
                asked: Vec::new(),
                times: Times::default(),
                phases: report.phases,
            })
        }
        Way::PostCopy => postcopy(config, image, setting),
    }
}

/// Cuts the link when it is dropped, also by an error or a panic.
struct Cut<'a>(&'a Wire);

impl Drop for Cut<'_> {
    fn drop(&mut self) {
        self.0.cut();
    }
}

fn postcopy(config: &Config, image: &Image, setting: Setting<'_>) -> Result<Report, Error> {
    let (shape, work) = recorded(&config.shape, config.work());
    let left = image.map_private()?;
    let guest = Guest::with_memory(&shape, || HostMemory::new(shape.memory, shape.backing))?;
    let (mut report, phases) = perform_on(guest, setting, |stage| {
        let wire = Wire::new(config.link)?;
        let memory = stage.guest.memory();
        let handler = Handler::of_remote(memory, &wire)?;
        let stop = stage.stop();
        let begin = Instant::now();
        handler.serve(1, || {
            std::thread::scope(|scope| {
                let _cut = Cut(&wire);
                let start = |name: &str| std::thread::Builder::new().name(name.into());
                let failed = Error::os::<std::io::Error>("start of a thread");
                start("source")
                    .spawn_scoped(scope, || handler.note(wire.send(&left)))
                    .map_err(failed)?;
                let receiver = start("receiver")
                    .spawn_scoped(scope, || {
                        handler.receive(&wire);
                        begin.elapsed()
                    })
                    .map_err(Error::os::<std::io::Error>("start of a thread"))?;
                let all = |_: &mut _| {
                    while !receiver.is_finished() {
                        if stop.load(Ordering::Relaxed) {
                            return Err(Error::Stopped);
                        }
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    let all_there = receiver.join().map_err(|_| Error::ThreadPanicked)?;
                    Ok((all_there, handler.so_far().order))
                };
                let waited = |(_, asked): &(Duration, Vec<u64>)| Some(asked.len() as u64);
                let visit = Visit { work, image, may_be_empty: false };
                let visited = visit.run(stage, |_, _| Ok(false), all, waited)?;
                let (all_there, asked) = visited.between;
                let done = visited.times.share(1.0).unwrap_or(0.0);
                Ok(Report {
                    phases: Vec::new(),
                    stopped: config.link.delay.as_secs_f64(),
                    all_there: all_there.as_secs_f64(),
                    bytes: memory.len(),
                    lost: 100.0 * (1.0 - (visited.times.again / done.max(1e-9)).min(1.0)),
                    asked,
                    times: visited.times,
                })
            })
        })
    })?;
    report.phases = phases;
    Ok(report)
}
