//! A guest's memory that comes back from a file, in the ways of VMMs, and what the guest feels of
//! it.
//!
//! The guest touches pages in a random order that its seed fixes, as a function that is resumed
//! touches its working set, and records its clock after each access. Then it does the same once
//! more, which gives the usual time of an access. At the end each word of its memory is compared
//! with the file, or with what the guest wrote since: also the pages that it never touched, which
//! come the same way.

pub use super::handler::Slow;
pub use super::times::Times;
use super::visits::Visits;

use super::handler::{Handler, ServedFaults};
use super::visits::{Visit, recorded};
use crate::error::size_name;
use crate::figure::Figure::{self, Time};
use crate::figure::{Outcome, Results, Sentence};
use crate::guest::{Guest, Shape};
use crate::image::{Cache, Image};
use crate::memory::HostMemory;
use crate::phase::{Phase, PhaseRun};
use crate::procfs::{Files, value};
use crate::stage::{Setting, Stage, perform_on};
use crate::work::Work;
use crate::{Backing, Error, HostKvm, pagemap};
use std::ops::Range;
use std::sync::Arc;

/// From the start of the restore to the guest's first access.
pub const FIRST: Figure = Figure::Own("first-access", "s");
/// The same to half of its accesses.
pub const HALF: Figure = Figure::Own("half-of-accesses", "s");
/// The same to the last access, when its working set is there.
pub const WORKING_SET: Figure = Figure::Own("working-set", "s");
/// The guest's stalls.
pub const STALL_P99: Figure = Figure::Own("access-p99", "s");
/// The longest stall.
pub const STALL_MAX: Figure = Figure::Own("access-longest", "s");
/// Faults of the host's memory that vCPUs took, and those that a handler resolved for them.
pub const FAULTS: Figure = Figure::Own("host-faults", "faults");
/// The guest's memory that this process maps when the working set is there.
pub const RESIDENT: Figure = Figure::Own("resident", "MiB");
/// CPU time of the handler.
pub const HANDLER: Figure = Figure::Own("handler-cpu", "s");
const READ: Figure = Figure::Own("read", "MiB");
/// Pages that came slower than five times the median.
pub const SLOW: Figure = Figure::Own("slow-pages", "pages");
/// How much longer the median stall of these pages is than that of all pages.
pub const SLOW_TIME: Figure = Figure::Own("slow-page", "s");
/// The course: when each of twenty parts of the accesses was over.
pub const COURSE: Figure = Figure::Course("pass-accesses", "s");

/// How its results are shown.
pub const RESULTS: Results = Results {
    name: "restore",
    title: "Restoring a guest's memory from a file (KVM)",
    columns: &[
        (Time(Phase::Prepare), "prepare"),
        (FIRST, "first access"),
        (HALF, "half of them"),
        (WORKING_SET, "working set"),
        (STALL_P99, "stall p99"),
        (STALL_MAX, "longest"),
        (FAULTS, "host faults"),
        (RESIDENT, "resident"),
        (READ, "read"),
        (HANDLER, "handler CPU"),
        (SLOW, "slow pages"),
        (SLOW_TIME, "slower by"),
    ],
    note: "From the start of the restore, with what is done before the vCPUs run (“prepare”); \
           accesses and stalls by the guest's own clock. “host faults”: those of the host's memory \
           that vCPUs took or a handler resolved; KVM's own come on top. “slow pages” came five \
           times slower than the median. Each word of the memory was compared at the end.",
    said: Sentence::Whole(WORKING_SET, "The working set of a restored guest is there after"),
};

/// Ways to bring a guest's memory back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum Way {
    /// All of the file is read before the guest runs.
    Eager,
    /// The file is mapped privately (MAP_PRIVATE).
    Private,
    /// Userfaultfd: a missing page is copied from the file.
    #[cfg_attr(feature = "clap", value(name = "uffd-4k"))]
    Copy,
    /// The same, 2 MiB at a time.
    #[cfg_attr(feature = "clap", value(name = "uffd-2m"))]
    CopyLarge,
    /// Userfaultfd on a memfd: a page is read into the file, then mapped (UFFDIO_CONTINUE).
    Minor,
    /// The same on a memfd of the pool of 2 MiB pages.
    MinorHugetlb,
}

impl Way {
    /// Returns whether a handler resolves faults.
    pub fn has_handler(self) -> bool {
        !matches!(self, Self::Eager | Self::Private)
    }

    /// Returns whether the memory is anonymous, so that it may be in huge pages.
    pub fn is_anonymous(self) -> bool {
        matches!(self, Self::Eager | Self::Copy | Self::CopyLarge)
    }

    /// Returns the bytes that a fault brings.
    fn chunk(self) -> u64 {
        match self {
            Self::CopyLarge | Self::MinorHugetlb => LARGE,
            _ => Backing::Small.page_size(),
        }
    }
}

const LARGE: u64 = 2 << 20;

/// Configuration of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The guest. [`Backing::Thp`] asks for huge pages where the memory is anonymous.
    pub shape: Shape,
    /// The way.
    pub way: Way,
    /// Whether the file is in the page cache.
    pub cache: Cache,
    /// Pages to bring before the vCPUs run.
    pub prefetch: Option<Arc<[u64]>>,
    /// Threads of the handler.
    pub handlers: u32,
    /// The guest's accesses.
    pub visits: Visits,
    /// Pages for which the handler is slow.
    pub slow: Option<Slow>,
}

impl Config {
    /// Checks the configuration, without making a guest.
    ///
    /// # Errors
    /// [`Error::Invalid`], and the errors of [`Shape::check`].
    pub fn check(&self, host: &HostKvm) -> Result<(), Error> {
        if self.handlers == 0 {
            return Err(Error::invalid("threads of the handler", 0, "must be at least 1"));
        }
        if !self.shape.memory.is_multiple_of(self.way.chunk()) {
            let rule = format!("must be a multiple of {}", size_name(self.way.chunk()));
            return Err(Error::invalid("memory", self.shape.memory, rule));
        }
        self.visits.work(&self.shape, 0).check()?;
        self.shape.check(host)?;
        match self.way {
            Way::MinorHugetlb => Backing::MemfdHugetlb(LARGE).check(self.shape.memory),
            _ => Ok(()),
        }
    }
}

/// Results of a restore.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// The phases.
    pub phases: Vec<PhaseRun>,
    /// Seconds before the vCPUs ran.
    pub prepare: f64,
    /// The guest's accesses.
    pub times: Times,
    /// Faults of the host's memory that vCPUs took, where procfs tells.
    pub faults: Option<u64>,
    /// Bytes of the guest's memory that this process maps after the restore.
    pub resident: Option<u64>,
    /// Bytes that this process read from disks, where procfs tells.
    pub read: Option<u64>,
    /// CPU time of the handler in seconds.
    pub handler: Option<f64>,
    /// Pages whose faults the handler resolved until the working set was there, in their order.
    pub order: Vec<u64>,
    /// Chunks for which the handler was slow, and the seconds that it waited for them.
    pub slowed: (u64, f64),
}

/// What its runs give.
pub const OUTCOME: Outcome<Report> = Outcome {
    figures: &[
        (FIRST, |report| Some(report.prepare + report.times.share(0.0)?)),
        (HALF, |report| Some(report.prepare + report.times.share(0.5)?)),
        (WORKING_SET, |report| working_set(report)),
        (STALL_P99, |report| report.times.stall(0.99)),
        (STALL_MAX, |report| report.times.stall(1.0)),
        (FAULTS, |report| report.faults.map(|faults| faults as f64)),
        (RESIDENT, |report| report.resident.map(mib)),
        (READ, |report| report.read.filter(|read| *read > 0).map(mib)),
        (HANDLER, |report| report.handler),
        (SLOW, |report| slow(report).map(|pages| pages.len() as f64)),
        (SLOW_TIME, |report| {
            let pages = slow(report)?;
            Some(pages.get(pages.len() / 2)? - report.times.stall(0.5)?)
        }),
    ],
    course: |report| vec![(COURSE, report.times.course(report.prepare))],
    ..Outcome::of(WORKING_SET)
};

/// Returns the stalls of the pages that came slowly, where the handler was told to be slow: without
/// that, what a busy host does would be told as pages.
fn slow(report: &Report) -> Option<&[f64]> {
    Some(report.times.outliers()).filter(|_| report.slowed.0 > 0)
}

/// Returns when the last access was over, in seconds since the start of the restore.
pub fn working_set(report: &Report) -> Option<f64> {
    Some(report.prepare + report.times.share(1.0)?)
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// Restores a guest, and lets it touch its working set.
///
/// # Errors
/// The errors of [`Config::check`]; [`Error::NoUserfaultfd`]; [`Error::NoColdCache`];
/// [`Error::Stopped`]; [`Error::WrongStamp`] or [`Error::Misread`] if a page came back wrong; any
/// other [`Error`] of the guest or the kernel.
pub fn run(config: &Config, image: &Image, setting: Setting<'_>) -> Result<Report, Error> {
    config.check(&crate::probe()?)?;
    let (shape, work) = recorded(&config.shape, config.visits.work(&config.shape, 0));
    let mut alias = None;
    let guest = Guest::with_memory(&shape, || match config.way {
        Way::Private => image.map_private(),
        Way::Minor | Way::MinorHugetlb => {
            let huge = (config.way == Way::MinorHugetlb).then_some(LARGE);
            let [memory, other] = HostMemory::twice(shape.memory, huge)?;
            alias = Some(other);
            Ok(memory)
        }
        _ => HostMemory::new(shape.memory, shape.backing),
    })?;
    image.set_cache(config.cache)?;
    let ranges = config.prefetch.as_deref().map(ranges).unwrap_or_default();
    let read = || value(&Files::here().text("proc/self/io")?, "read_bytes")?.trim().parse().ok();
    let (report, phases) = perform_on(guest, setting, |stage| {
        let guest = stage.guest;
        let memory = guest.memory();
        let before: Option<u64> = read();
        let report = if config.way.has_handler() {
            let mut handler = None;
            stage.calls(Phase::Prepare, None, |_, calls| {
                calls.time(|| {
                    let huge = config.way == Way::MinorHugetlb;
                    let chunk = config.way.chunk();
                    let made =
                        Handler::new(image, memory, alias.as_ref(), huge, chunk, config.slow)?;
                    made.prefetch(&ranges)?;
                    handler = Some(made);
                    Ok(())
                })
            })?;
            let handler = handler.expect("the phase has made it");
            let told = || (Some(handler.so_far()), read());
            handler.serve(config.handlers, || touch(image, stage, work, told))?
        } else {
            stage.calls(Phase::Prepare, None, |_, calls| {
                calls.time(|| match config.way {
                    Way::Eager => memory.fill(image.file(), 0..memory.len()),
                    _ => ranges.iter().try_for_each(|range| memory.populate(range.clone())),
                })
            })?;
            touch(image, stage, work, || (None, read()))?
        };
        let read = report.read.zip(before).map(|(after, before)| after.saturating_sub(before));
        Ok(Report { read, ..report })
    })?;
    let prepare = phases.iter().find(|run| run.phase == Phase::Prepare);
    Ok(Report { prepare: prepare.map_or(0.0, |run| run.seconds), phases, ..report })
}

/// Lets the guest touch its pages twice, and compares all of its memory. `told` is called when the
/// working set is there.
fn touch(
    image: &Image,
    stage: &mut Stage<'_>,
    work: Work,
    told: impl FnOnce() -> (Option<ServedFaults>, Option<u64>),
) -> Result<Report, Error> {
    let between = |stage: &mut Stage<'_>| Ok((told(), pagemap::present(stage.guest.memory())));
    let visit = Visit { work, image, may_be_empty: false };
    let visited = visit.run(stage, |_, _| Ok(false), between, |_| None)?;
    let ((served, read), resident) = visited.between;
    // A fault that a handler resolves is none of the thread's count.
    let resolved = served.as_ref().map_or(0, |served| served.order.len() as u64);
    Ok(Report {
        phases: Vec::new(),
        prepare: 0.0,
        times: visited.times,
        faults: visited.faults.map(|[major, minor]| major + minor + resolved),
        resident: resident.map(|pages| pages * Backing::Small.page_size()),
        read,
        handler: served.as_ref().map(|served| served.cpu.as_secs_f64()),
        slowed: served
            .as_ref()
            .map_or((0, 0.0), |served| (served.slowed.0, served.slowed.1.as_secs_f64())),
        order: served.map_or_else(Vec::new, |served| served.order),
    })
}

/// Returns the bytes of pages, in ranges that are as long as can be.
fn ranges(pages: &[u64]) -> Vec<Range<u64>> {
    let mut pages = pages.to_vec();
    pages.sort_unstable();
    pages.dedup();
    let size = Backing::Small.page_size();
    let rows = pages.chunk_by(|one, other| one + 1 == *other);
    rows.map(|row| row[0] * size..(row[0] + row.len() as u64) * size).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_in_a_row_are_one_range() {
        let size = Backing::Small.page_size();
        let found = ranges(&[7, 3, 4, 9, 8, 3]);
        assert_eq!(found, [3 * size..5 * size, 7 * size..10 * size]);
        assert!(ranges(&[]).is_empty());
    }
}
