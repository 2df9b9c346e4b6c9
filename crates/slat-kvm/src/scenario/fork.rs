//! Guests of one image, of which more and more are on the host: how much memory each takes, and how
//! soon it answers.
//!
//! Guests are started one after the other. Each visits a part of its pages in an order of its own,
//! and stays. When all are there, the memory that they hold is counted. Then each visits its pages
//! once more, in the reverse order of their start: a page that the host shared since has to be
//! copied if it is written. A third visit gives the usual time.

use super::times::Times;
use super::visits::{Visit, Visits, recorded};
use crate::figure::{Figure, Outcome, Results, Sentence};
use crate::guest::{Guest, Shape};
use crate::image::Image;
use crate::ksm::PageMerging;
use crate::memory::HostMemory;
use crate::phase::{Phase, PhaseRun};
use crate::procfs::Files;
use crate::stage::{Setting, Stage, perform_on};
use crate::{Backing, Error, HostKvm, meminfo};
use std::ops::Range;
use std::time::{Duration, Instant};

/// Memory that one guest takes: its own pages, and its share of those that others map, too.
pub const EACH: Figure = Figure::Own("resident-each", "MiB");
/// The same, of all guests.
pub const ALL: Figure = Figure::Own("resident", "MiB");
/// From the start of a guest to its first access, in the median of the guests.
pub const FIRST: Figure = Figure::Own("first-access", "s");
/// The same, of the slowest guest.
pub const FIRST_MAX: Figure = Figure::Own("first-access-longest", "s");
/// From the start of a guest until its working set is there, in the median.
pub const WORKING_SET: Figure = Figure::Own("working-set", "s");
/// How long the second visit takes of what the third does, in the median.
pub const SLOWDOWN: Figure = Figure::Own("slowdown", "x");
/// How long the host looked for equal pages.
pub const MERGE: Figure = Figure::Time(Phase::Merge);

/// How its results are shown.
pub const RESULTS: Results = Results {
    name: "fork",
    title: "Guests of one image (KVM)",
    columns: &[
        (EACH, "memory a guest"),
        (ALL, "all guests"),
        (FIRST, "first access"),
        (FIRST_MAX, "slowest"),
        (WORKING_SET, "working set"),
        (SLOWDOWN, "slowdown"),
        (MERGE, "merged in"),
    ],
    note: "Memory: proportional set size (PSS) of the guests' memory when all are there, without \
           KVM's tables. Times: from the start of each guest, with the making of its VM, medians. \
           “slowdown”: a visit when all guests are there, against the same visit at once again. \
           Each word of each guest was compared at the end.",
    said: Sentence::Whole(EACH, "A guest of an image that others run, too, takes"),
};

/// Ways to give guests the contents of one image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum Way {
    /// Each maps the file privately (MAP_PRIVATE).
    Private,
    /// Each has a copy in a memfd of its own.
    Memfd,
    /// Each has a copy, and the kernel merges equal pages (needs root).
    Ksm,
}

/// Longest time that the kernel gets to merge pages, for each guest.
const PATIENCE: Duration = Duration::from_secs(10);

/// Configuration of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Each guest.
    pub shape: Shape,
    /// The way.
    pub way: Way,
    /// Number of guests.
    pub guests: u32,
    /// The accesses of each.
    pub visits: Visits,
}

impl Config {
    /// Checks the configuration, without making a guest.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::NotEnoughMemory`] for all guests, [`Error::NoMerging`], and the
    /// errors of [`Shape::check`].
    pub fn check(&self, host: &HostKvm) -> Result<(), Error> {
        if self.guests == 0 {
            return Err(Error::invalid("guests", 0, "must be at least 1"));
        }
        self.visits.work(&self.shape, 1).check()?;
        self.shape.check(host)?;
        if self.way == Way::Ksm {
            PageMerging::check()?;
        }
        // Until pages are merged, each guest has its own. A little for each guest's tables.
        let each = self.shape.memory + self.shape.memory / 64 + (2 << 20);
        meminfo::check(each.saturating_mul(u64::from(self.guests)))
    }
}

/// What was measured of one guest.
#[derive(Debug, Clone, PartialEq)]
pub struct One {
    /// Seconds from its start until its vCPUs ran.
    pub prepare: f64,
    /// Its accesses after that.
    pub times: Times,
    /// The seconds of its second visit.
    pub second: f64,
}

/// Results of a run.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Report {
    /// The phases of all guests.
    pub phases: Vec<PhaseRun>,
    /// The guests, the last that was started first.
    pub guests: Vec<One>,
    /// Bytes of memory that all guests held, where procfs tells.
    pub resident: Option<u64>,
    /// Whether the kernel had looked at all pages often enough; without KSM true.
    pub merged: bool,
}

/// What its runs give.
pub const OUTCOME: Outcome<Report> = Outcome {
    figures: &[
        (EACH, |report| each(report)),
        (ALL, |report| report.resident.map(mib)),
        (FIRST, |report| median(report, |one| Some(one.prepare + one.times.share(0.0)?))),
        (FIRST_MAX, |report| {
            let first =
                report.guests.iter().filter_map(|one| Some(one.prepare + one.times.share(0.0)?));
            first.reduce(f64::max)
        }),
        (WORKING_SET, |report| median(report, |one| Some(one.prepare + one.times.share(1.0)?))),
        (SLOWDOWN, |report| median(report, |one| Some(one.second / one.times.again.max(1e-9)))),
    ],
    ..Outcome::of(EACH)
};

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// Returns the memory that one guest took, in MiB.
pub fn each(report: &Report) -> Option<f64> {
    report.resident.map(|bytes| mib(bytes) / report.guests.len().max(1) as f64)
}

fn median(report: &Report, of: impl Fn(&One) -> Option<f64>) -> Option<f64> {
    let mut all: Vec<f64> = report.guests.iter().filter_map(of).collect();
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied()
}

/// Starts the guests, and lets them visit their pages.
///
/// # Errors
/// The errors of [`Config::check`]; [`Error::Stopped`]; [`Error::WrongStamp`] or
/// [`Error::Misread`] if a page is wrong; any other [`Error`] of a guest or the kernel.
pub fn run(config: &Config, image: &Image, setting: Setting<'_>) -> Result<Report, Error> {
    config.check(&crate::probe()?)?;
    let merging = (config.way == Way::Ksm).then(PageMerging::start).transpose()?;
    let fleet = Fleet { config, image, merging, pin: setting.pin.to_vec() };
    fleet.guest(1, &mut Vec::new(), setting)
}

/// What all guests have in common.
struct Fleet<'a> {
    config: &'a Config,
    image: &'a Image,
    merging: Option<PageMerging>,
    pin: Vec<usize>,
}

impl Fleet<'_> {
    /// Starts the guest of that number, and those after it while it stands still. `memories` has
    /// the addresses of those before it.
    fn guest(
        &self,
        number: u32,
        memories: &mut Vec<Range<u64>>,
        setting: Setting<'_>,
    ) -> Result<Report, Error> {
        let begin = Instant::now();
        let config = self.config;
        let (shape, work) = recorded(&config.shape, config.visits.work(&config.shape, number));
        let guest = Guest::with_memory(&shape, || {
            let memory = match config.way {
                Way::Private => return self.image.map_private(),
                Way::Memfd => HostMemory::new(shape.memory, Backing::Memfd)?,
                Way::Ksm => HostMemory::new(shape.memory, Backing::Small)?,
            };
            memory.fill(self.image.file(), 0..shape.memory)?;
            if config.way == Way::Ksm {
                memory.allow_merging()?;
            }
            Ok(memory)
        })?;
        memories.push(guest.0.memory().addresses());
        let (mut report, mut phases) = perform_on(guest, setting, |stage| {
            let prepare = begin.elapsed().as_secs_f64();
            let rest = |stage: &mut Stage<'_>| {
                let report = if number < config.guests {
                    self.guest(number + 1, memories, stage.setting(&self.pin))?
                } else {
                    self.count(memories, stage)?
                };
                stage.vcpus(Phase::Revisit, None, work)?;
                let second = stage.last_phase().map_or(0.0, |run| run.seconds);
                Ok((report, second))
            };
            let visit = Visit { work, image: self.image, may_be_empty: false };
            let visited = visit.run(stage, |_, _| Ok(false), rest, |_| None)?;
            let (mut report, second) = visited.between;
            report.guests.push(One { prepare, times: visited.times, second });
            Ok(report)
        })?;
        report.phases.append(&mut phases);
        Ok(report)
    }

    /// Counts the memory of all guests, after the kernel has merged what it can.
    fn count(&self, memories: &[Range<u64>], stage: &mut Stage<'_>) -> Result<Report, Error> {
        let mut merged = true;
        if let Some(merging) = &self.merging {
            let stop = stage.stop();
            stage.calls(Phase::Merge, None, |_, calls| {
                merged = calls.time(|| merging.wait(PATIENCE * self.config.guests, stop))?;
                Ok(())
            })?;
        }
        let resident = Files::here().proportional(memories);
        Ok(Report { resident, merged, ..Report::default() })
    }
}
