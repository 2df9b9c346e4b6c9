//! Incremental snapshots: after each epoch the guest stands still, and the pages that it wrote are
//! found, by one of several ways, and copied.
//!
//! The guest knows which pages it wrote. Pages that a way misses and pages that it reports without
//! need are counted. A way of KVM's log or of userfaultfd that misses a page is an error. After the
//! last epoch the snapshot is compared with the memory word by word, unless pages were missed.

use super::visits::{Visits, listed};

use super::handler::Handler;
use super::live::check_reads;
use super::migrate::{compare, copy_page};
use super::writes::{Writes, positions};
use crate::bitmap::DirtyBitmap;
use crate::figure::Figure::{self, Time};
use crate::figure::{Outcome, Results, Sentence};
use crate::guest::{Guest, Shape};
use crate::memory::HostMemory;
use crate::phase::{Phase, PhaseRun};
use crate::stage::{Setting, Stage, perform};
use crate::uffd::{self, Uffd, feature};
use crate::work::Work;
use crate::{Backing, Error, HostKvm, Mode, meminfo, pagemap};
use std::time::Duration;

/// How long the guest stands still for one snapshot, on average.
pub const ROUND: Figure = Figure::Own("round", "s");
/// Pages that the guest wrote in all epochs.
pub const WRITTEN: Figure = Figure::Own("written", "pages");
/// Pages that were copied.
pub const REPORTED: Figure = Figure::Own("reported", "pages");
/// Pages that were written and not reported.
pub const MISSED: Figure = Figure::Own("missed", "pages");
/// Pages that were reported and not written.
pub const SURPLUS: Figure = Figure::Own("surplus", "pages");

/// How its results are shown.
pub const RESULTS: Results = Results {
    name: "snapshot",
    title: "Incremental snapshots of a guest (KVM)",
    columns: &[
        (ROUND, "guest stopped"),
        (Time(Phase::Get), "find"),
        (Time(Phase::Clear), "protect"),
        (Time(Phase::Copy), "copy"),
        (Time(Phase::Dirty), "epoch"),
        (WRITTEN, "written"),
        (REPORTED, "reported"),
        (MISSED, "missed"),
        (SURPLUS, "surplus"),
    ],
    note: "The guest stands still while its written pages are found, protected again and copied \
           (“guest stopped”: all three, for each epoch). Pages are summed over the epochs; the \
           guest knows which it wrote. What was missed is not in the snapshot.",
    said: Sentence::Whole(ROUND, "An incremental snapshot stops the guest for"),
};

/// Ways to find the pages that a guest wrote.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum Way {
    /// KVM's dirty log, fetched and cleared.
    Log,
    /// KVM's dirty rings.
    Ring,
    /// Write-protecting userfaultfd: a handler takes each first write.
    UffdWp,
    /// Userfaultfd with WP_ASYNC, and PAGEMAP_SCAN.
    PagemapScan,
    /// Soft-dirty bits of the process.
    SoftDirty,
    /// All pages that are in memory, as mincore tells.
    Mincore,
}

impl Way {
    /// Returns the mode of KVM's log.
    pub fn mode(self) -> Mode {
        match self {
            Self::Log => Mode::Manual,
            Self::Ring => Mode::Ring { entries: 4096 },
            _ => Mode::Legacy,
        }
    }

    /// Returns whether a page that it misses is an error of the kernel.
    fn must_be_right(self) -> bool {
        self != Self::Mincore
    }
}

/// Configuration of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The guest, with the mode of its way.
    pub shape: Shape,
    /// The way.
    pub way: Way,
    /// Number of epochs.
    pub epochs: u32,
    /// The accesses of each epoch.
    pub visits: Visits,
}

impl Config {
    /// Checks the configuration, without making a guest.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::NotEnoughMemory`] for the memory and its snapshot,
    /// [`Error::NoSoftDirty`], and the errors of [`Shape::check`].
    pub fn check(&self, host: &HostKvm) -> Result<(), Error> {
        if self.epochs == 0 {
            return Err(Error::invalid("epochs", 0, "must be at least 1"));
        }
        self.visits.work(&self.shape, 1).check()?;
        self.shape.check(host)?;
        if self.way == Way::SoftDirty {
            pagemap::check_soft_dirty()?;
        }
        meminfo::check(2 * self.shape.memory)
    }

    fn is_shared(&self) -> bool {
        !matches!(self.shape.backing, Backing::Small | Backing::Thp | Backing::Hugetlb(_))
    }
}

/// Results of a run.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Report {
    /// The phases.
    pub phases: Vec<PhaseRun>,
    /// Number of epochs.
    pub epochs: u32,
    /// Pages written, summed over the epochs.
    pub written: u64,
    /// Pages reported.
    pub reported: u64,
    /// Pages written and not reported.
    pub missed: u64,
    /// Pages reported and not written.
    pub surplus: u64,
    /// Pages of the snapshot that were compared with the memory.
    pub compared: u64,
}

/// What its runs give.
pub const OUTCOME: Outcome<Report> = Outcome {
    figures: &[
        (ROUND, |report| Some(round(report))),
        (WRITTEN, |report| Some(report.written as f64)),
        (REPORTED, |report| Some(report.reported as f64)),
        (MISSED, |report| Some(report.missed as f64)),
        (SURPLUS, |report| Some(report.surplus as f64)),
    ],
    ..Outcome::of(ROUND)
};

/// Returns how long the guest stood still for each snapshot, in seconds.
pub fn round(report: &Report) -> f64 {
    let still = report.phases.iter().filter(|run| {
        run.iteration.is_some() && matches!(run.phase, Phase::Get | Phase::Clear | Phase::Copy)
    });
    still.map(|run| run.seconds).sum::<f64>() / f64::from(report.epochs.max(1))
}

/// Runs a guest, and takes a snapshot after each epoch.
///
/// # Errors
/// The errors of [`Config::check`]; [`Error::NoUserfaultfd`]; [`Error::Stopped`];
/// [`Error::PagesMissing`], [`Error::NotCopied`] or [`Error::Misread`] if the host's kernel is
/// wrong; any other [`Error`] of the guest or the kernel.
pub fn run(config: &Config, setting: Setting<'_>) -> Result<Report, Error> {
    config.check(&crate::probe()?)?;
    let snapshot = HostMemory::new(config.shape.memory, Backing::Small)?;
    let records = listed(&config.visits.work(&config.shape, 0));
    let shape = Shape { records, ..config.shape.clone() };
    let (report, phases) = perform(&shape, setting, |stage| {
        stage.populate(config.visits.work(&config.shape, 0))?;
        let guest = stage.guest;
        (0..guest.pages())
            .for_each(|page| copy_page(guest.memory(), &snapshot, page, guest.page_size()));
        let taker = Taker { config, guest, snapshot: &snapshot };
        let shared = config.is_shared();
        match config.way {
            Way::UffdWp => {
                let handler = Handler::of_writes(guest.memory(), shared)?;
                handler.protect()?;
                handler.serve(1, || taker.epochs(stage, &mut Tracker::Protect(&handler)))
            }
            Way::PagemapScan => {
                let of_memory = if shared { feature::WP_SHMEM } else { 0 };
                let features = feature::WP_ASYNC | feature::WP_UNPOPULATED | of_memory;
                let uffd = Uffd::open(features)?;
                uffd.register(guest.memory(), uffd::WP)?;
                uffd.protect(guest.memory(), 0..guest.memory().len(), true)?;
                taker.epochs(stage, &mut Tracker::Scan)
            }
            Way::Log | Way::Ring => {
                guest.start_log()?;
                taker.epochs(stage, &mut Tracker::Kvm)
            }
            Way::SoftDirty => {
                pagemap::clear_soft_dirty()?;
                taker.epochs(stage, &mut Tracker::SoftDirty)
            }
            Way::Mincore => taker.epochs(stage, &mut Tracker::Mincore),
        }
    })?;
    Ok(Report { phases, ..report })
}

/// What tells which pages were written.
enum Tracker<'a> {
    Kvm,
    Protect(&'a Handler<'a>),
    Scan,
    SoftDirty,
    Mincore,
}

struct Taker<'a> {
    config: &'a Config,
    guest: &'a Guest,
    snapshot: &'a HostMemory,
}

impl Taker<'_> {
    fn epochs(&self, stage: &mut Stage<'_>, tracker: &mut Tracker<'_>) -> Result<Report, Error> {
        let mut report = Report { epochs: self.config.epochs, ..Report::default() };
        for epoch in 1..=self.config.epochs {
            self.epoch(stage, tracker, epoch, &mut report)?;
        }
        stage.checking()?;
        if report.missed == 0 {
            report.compared = compare(self.guest, self.snapshot, stage.stop())?;
        }
        check_reads(self.guest)?;
        Ok(report)
    }

    fn epoch(
        &self,
        stage: &mut Stage<'_>,
        tracker: &Tracker<'_>,
        epoch: u32,
        report: &mut Report,
    ) -> Result<(), Error> {
        let (guest, work) = (self.guest, self.config.visits.work(&self.config.shape, epoch));
        let given = positions(guest);
        let mut found = DirtyBitmap::new(guest.pages());
        match self.config.way {
            Way::Ring => stage.vcpus_beside(Phase::Dirty, Some(epoch), work, |guest, _| {
                guest.wait_for_full_ring(Duration::from_millis(10));
                guest.harvest(&mut found)?;
                Ok(true)
            })?,
            _ => stage.vcpus(Phase::Dirty, Some(epoch), work)?,
        }
        stage.calls(Phase::Get, Some(epoch), |_, calls| {
            calls.time(|| self.find(tracker, &mut found))
        })?;
        let tally = self.judge(&found, &work, &given, epoch, stage, report)?;
        stage.checked(tally);
        stage.calls(Phase::Clear, Some(epoch), |_, calls| {
            calls.time(|| self.protect(tracker, &found))
        })?;
        stage.calls(Phase::Copy, Some(epoch), |_, calls| {
            calls.time(|| {
                (0..guest.pages())
                    .filter(|&page| found.contains(page))
                    .for_each(|page| self.copy(page));
                Ok(())
            })
        })
    }

    fn copy(&self, page: u64) {
        copy_page(self.guest.memory(), self.snapshot, page, self.guest.page_size());
    }

    /// Finds the pages that were written.
    fn find(&self, tracker: &Tracker<'_>, found: &mut DirtyBitmap) -> Result<(), Error> {
        let guest = self.guest;
        let mut add = |pages: Vec<u64>| pages.into_iter().for_each(|page| found.insert(page));
        match tracker {
            Tracker::Kvm if guest.mode().is_ring() => guest.harvest(found).map(drop)?,
            Tracker::Kvm => guest.get_dirty_log(found)?,
            Tracker::Protect(handler) => add(handler.so_far().order),
            Tracker::Scan => pagemap::take_written(guest.memory(), |pages| add(pages.collect()))?,
            Tracker::SoftDirty => add(pagemap::soft_dirty(guest.memory())),
            Tracker::Mincore => add(pagemap::in_core(guest.memory())?),
        }
        Ok(())
    }

    /// Prepares the next epoch, where [`Taker::find`] has not.
    fn protect(&self, tracker: &Tracker<'_>, found: &DirtyBitmap) -> Result<(), Error> {
        let guest = self.guest;
        match tracker {
            Tracker::Kvm if guest.mode().is_manual() => {
                let each = guest.slot_pages();
                (0..guest.pages())
                    .step_by(each as usize)
                    .try_for_each(|first| guest.clear_dirty_log(found, first, each as u32))
            }
            Tracker::Protect(handler) => handler.protect(),
            Tracker::SoftDirty => pagemap::clear_soft_dirty(),
            Tracker::Kvm | Tracker::Scan | Tracker::Mincore => Ok(()),
        }
    }

    /// Compares what was found with what the guest wrote.
    fn judge(
        &self,
        found: &DirtyBitmap,
        work: &Work,
        given: &[u64],
        epoch: u32,
        stage: &Stage<'_>,
        report: &mut Report,
    ) -> Result<crate::bitmap::Tally, Error> {
        let guest = self.guest;
        let mut written = DirtyBitmap::new(guest.pages());
        for (vcpu, writes) in Writes::of(guest, work, given).iter_mut().enumerate() {
            while let Some((_, page)) = writes.next(guest.position(vcpu), stage.stop())? {
                written.insert(page);
            }
        }
        let missed =
            (0..guest.pages()).filter(|&page| written.contains(page) && !found.contains(page));
        let missed: Vec<u64> = missed.collect();
        let both = written.count() - missed.len() as u64;
        let tally = crate::bitmap::Tally {
            in_log: found.count(),
            written: written.count(),
            excess: found.count() - both,
        };
        report.written += tally.written;
        report.reported += tally.in_log;
        report.missed += missed.len() as u64;
        report.surplus += tally.excess;
        match missed.first().filter(|_| self.config.way.must_be_right()) {
            Some(&first) => {
                let missing = missed.len() as u64;
                Err(Error::PagesMissing { iteration: epoch, first, missing })
            }
            None => Ok(tally),
        }
    }
}
