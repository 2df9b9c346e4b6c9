//! A guest that may have less memory than it uses: its pace, its stalls, and the pages that come
//! back, by several ways to take memory away.
//!
//! The guest visits its pages in an order with a hot set. First it does so while the host keeps it
//! within what it may have, then undisturbed, which gives its usual pace. Its memory comes from an
//! image, and each word is compared at the end: a page that was taken away has to come back as it
//! was. A balloon is the exception: its pages come back empty, and the guest writes them first.

mod keeper;

pub use keeper::Way;

use super::times::Times;
use super::visits::{Visit, recorded};
use crate::figure::{Figure, Outcome, Results, Sentence};
use crate::guest::{Guest, Shape};
use crate::image::{Cache, Image};
use crate::memory::HostMemory;
use crate::phase::{Phase, PhaseRun};
use crate::stage::{Setting, perform_on};
use crate::work::{Order, Touch, Work};
use crate::{Backing, Error, HostKvm, pagemap};
use keeper::Keeper;
use std::path::Path;

/// The guest's pace, of what it is undisturbed.
pub const SPEED: Figure = Figure::Own("speed", "%");
/// The guest's stalls.
pub const STALL_P99: Figure = Figure::Own("access-p99", "s");
/// The longest stall.
pub const STALL_MAX: Figure = Figure::Own("access-longest", "s");
/// Faults of vCPUs for which the host read from swap, or from the file.
pub const READ: Figure = Figure::Own("refaults", "faults");
/// Other faults of the host's memory that vCPUs took.
pub const FAULTS: Figure = Figure::Own("host-faults", "faults");
/// The memory that the guest had, on average.
pub const RESIDENT: Figure = Figure::Own("resident", "MiB");
/// Time of the guest under the limit.
pub const TIME: Figure = Figure::Own("working-set", "s");

/// How its results are shown.
pub const RESULTS: Results = Results {
    name: "reclaim",
    title: "A guest with less memory than it uses (KVM)",
    columns: &[
        (SPEED, "speed"),
        (Figure::Time(Phase::Shrink), "shrink"),
        (TIME, "accesses done"),
        (STALL_P99, "stall p99"),
        (STALL_MAX, "longest"),
        (READ, "refaults"),
        (FAULTS, "other faults"),
        (RESIDENT, "resident"),
    ],
    note: "“speed”: of the same accesses undisturbed. “refaults”: faults for which the host read \
           from swap or the file; “other faults”: those that found the page in memory, or an empty \
           one. Stalls by the guest's own clock. “resident”: on average. Each word of the memory \
           was compared at the end.",
    said: Sentence::Whole(SPEED, "With the memory that it may have, a guest keeps"),
};

/// Where the contents of pages go that are taken away.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum Store {
    /// The host's swap: a disk, zram, or zswap before one.
    Swap,
    /// The file that the memory is a shared mapping of.
    File,
}

/// Configuration of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The guest. Its memory is anonymous with [`Store::Swap`].
    pub shape: Shape,
    /// The way to take memory away.
    pub way: Way,
    /// Where its contents go.
    pub store: Store,
    /// The part of its memory that the guest may have, in per cent.
    pub allowed: u8,
    /// Accesses, in per cent of the pages.
    pub accesses: u32,
    /// The part of the accesses that write, in per cent. With a balloon all write.
    pub writes: u8,
    /// The hot set, in per cent of the pages, and its part of the accesses, in per cent.
    pub hot: (u8, u8),
    /// Seed of the order.
    pub seed: u64,
}

impl Config {
    /// Checks the configuration, without making a guest.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::NotEnoughSwap`], [`Error::NoDamon`], and the errors of
    /// [`Shape::check`].
    pub fn check(&self, host: &HostKvm) -> Result<(), Error> {
        if !(1..=100).contains(&self.allowed) {
            let rule = "must be 1 to 100 per cent of the memory";
            return Err(Error::invalid("memory allowed", self.allowed, rule));
        }
        self.work().check()?;
        self.shape.check(host)?;
        self.way.check(self.store)?;
        if self.store == Store::Swap && self.way.keeps_contents() {
            // What is read back keeps its copy in swap for a time.
            let needed = self.shape.memory;
            let host = rustix::system::sysinfo();
            let free = host.freeswap * u64::from(host.mem_unit);
            if free < needed {
                return Err(Error::NotEnoughSwap { needed: needed >> 20, free: free >> 20 });
            }
        }
        Ok(())
    }

    /// As [`check`](Self::check); also makes, and removes, the control group that the way needs.
    ///
    /// # Errors
    /// Those of `check`; [`Error::NoControlGroup`]; [`Error::Os`].
    pub fn try_out(&self, host: &HostKvm) -> Result<(), Error> {
        self.check(host)?;
        Keeper::new(self).map(drop)
    }

    /// Returns the guest's accesses.
    pub fn work(&self) -> Work {
        let pages = self.shape.memory / Backing::Small.page_size();
        let each = pages / self.shape.vcpus.max(1) as u64;
        let (percent, share) = self.hot;
        Work {
            order: Order::Hot { seed: self.seed, percent, share },
            miss: Touch::Read,
            share: if self.way.keeps_contents() { self.writes } else { 100 },
            steps: Some((each * u64::from(self.accesses) / 100).max(1)),
            ..Work::each_page(Touch::Write)
        }
    }

    /// Returns the trace of the guest's accesses, for one vCPU: each page, and whether it is
    /// written.
    pub fn trace(&self) -> impl Iterator<Item = (u64, bool)> {
        let work = self.work();
        let steps = work.steps(0, self.shape.memory / Backing::Small.page_size());
        let count = work.steps.unwrap_or(0) as usize;
        steps.take(count).map(|(page, touch)| (page, touch == Touch::Write))
    }
}

/// Results of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// The phases.
    pub phases: Vec<PhaseRun>,
    /// The guest's accesses under the limit.
    pub times: Times,
    /// Faults of the host's memory that vCPUs took: with a read, and others.
    pub faults: Option<[u64; 2]>,
    /// Bytes that the guest had, on average, where procfs tells.
    pub resident: Option<f64>,
}

/// What its runs give.
pub const OUTCOME: Outcome<Report> = Outcome {
    figures: &[
        (SPEED, |report| speed(report)),
        (TIME, |report| report.times.share(1.0)),
        (STALL_P99, |report| report.times.stall(0.99)),
        (STALL_MAX, |report| report.times.stall(1.0)),
        (READ, |report| report.faults.map(|[read, _]| read as f64)),
        (FAULTS, |report| report.faults.map(|[_, other]| other as f64)),
        (RESIDENT, |report| report.resident.map(|bytes| bytes / f64::from(1 << 20))),
    ],
    ..Outcome::of(SPEED)
};

/// Returns the pace under the limit, in per cent of the pace undisturbed.
pub fn speed(report: &Report) -> Option<f64> {
    report.times.share(1.0).map(|under| 100.0 * report.times.again / under.max(1e-9))
}

/// Runs a guest with less memory than it uses. The file of its memory lies in `folder`.
///
/// # Errors
/// The errors of [`Config::check`]; [`Error::NoControlGroup`]; [`Error::Stopped`];
/// [`Error::WrongStamp`] or [`Error::Misread`] if a page came back wrong; any other [`Error`] of
/// the guest or the kernel.
pub fn run(config: &Config, folder: &Path, setting: Setting<'_>) -> Result<Report, Error> {
    config.check(&crate::probe()?)?;
    let (shape, work) = recorded(&config.shape, config.work());
    // The pages of the file, too, are to count for the group.
    let mut keeper = Keeper::new(config)?;
    let image = Image::new(folder, shape.memory)?;
    let guest = Guest::with_memory(&shape, || match config.store {
        Store::Swap => HostMemory::new(shape.memory, shape.backing),
        Store::File => image.map_shared(),
    })?;
    let (mut report, phases) = perform_on(guest, setting, |stage| {
        let memory = stage.guest.memory();
        stage.calls(Phase::Prepare, None, |_, calls| {
            calls.time(|| {
                match config.store {
                    Store::Swap => memory.fill(image.file(), 0..memory.len())?,
                    Store::File => memory.populate(0..memory.len())?,
                }
                // The file's pages are no longer needed, and are not to be taken in place of the
                // guest's.
                if config.store == Store::Swap {
                    let _ = image.set_cache(Cache::Cold);
                }
                Ok(())
            })
        })?;
        // KVM maps the pages, so that only those that were taken away cost a fault.
        stage.vcpus(Phase::Populate, None, work)?;
        stage.calls(Phase::Shrink, None, |_, calls| calls.time(|| keeper.begin(memory)))?;
        let (mut sum, mut count) = (0.0, 0.0);
        let visit = Visit { work, image: &image, may_be_empty: !config.way.keeps_contents() };
        let keeper = std::cell::RefCell::new(keeper);
        let visited = visit.run(
            stage,
            |guest, _| {
                let pages = pagemap::present(guest.memory());
                let bytes = pages.map(|pages| pages * Backing::Small.page_size());
                if let Some(bytes) = bytes {
                    (sum, count) = (sum + bytes as f64, count + 1.0);
                }
                keeper.borrow_mut().keep(guest.memory(), bytes)?;
                std::thread::sleep(keeper::INTERVAL);
                Ok(true)
            },
            |stage| {
                keeper.borrow_mut().end()?;
                // What was taken away comes back before the usual pace is measured.
                stage.vcpus(Phase::Revisit, None, work)
            },
            |()| None,
        )?;
        Ok(Report {
            phases: Vec::new(),
            times: visited.times,
            faults: visited.faults,
            resident: (count > 0.0).then(|| sum / count),
        })
    })?;
    report.phases = phases;
    Ok(report)
}
