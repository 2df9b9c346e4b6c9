//! The cost of dirty logging, phase by phase.
//!
//! The phases are those of Linux's `dirty_log_perf_test`, so that the times can be compared with
//! those that kernel developers quote:
//!
//! | phase | timed |
//! |---|---|
//! | populate | every vCPU writes each of its pages for the first time, logging off |
//! | warm | every vCPU does the work of a round, logging off: how long an access usually takes |
//! | enable | `KVM_SET_USER_MEMORY_REGION` with `KVM_MEM_LOG_DIRTY_PAGES` |
//! | dirty | every vCPU writes its share of its pages, logging on |
//! | get | `KVM_GET_DIRTY_LOG` of all memslots; with rings, a last harvest |
//! | clear | `KVM_CLEAR_DIRTY_LOG` over all memslots, in chunks; only with manual protect |
//! | disable | `KVM_SET_USER_MEMORY_REGION` without the flag |
//!
//! dirty, get and clear are repeated. The vCPUs are stopped during the host's phases: this measures
//! the calls and the faults separately, unlike a migration ([`live`](super::live)). With rings, the
//! host harvests them while the vCPUs write, and a vCPU whose ring is full waits.
//!
//! populate includes the host's own first touch of its pages, as it does in `dirty_log_perf_test`.
//! If the host is itself a guest, the first use of its memory also costs a fault in the machine
//! below: the first run after a boot can take ten times as long as the next.
//!
//! Every fetched log is compared with the pages that the guest wrote, and at the end each page is
//! compared with the stamp that it must hold. A log that lacks a written page is an error.

use super::harvest::{check_chunk, clear};
use crate::bitmap::{DirtyBitmap, MissingPages, Tally};
use crate::figure::{Figure, Outcome};
use crate::guest::{Guest, Shape};
use crate::phase::{Phase, PhaseRun};
use crate::stage::{Setting, Stage, perform};
use crate::work::{Touch, Work};
use crate::{Backing, Error, HostKvm, Mode};
use std::time::Duration;

/// Name of the scenario.
pub const NAME: &str = "dirty-log";

/// What its runs give.
pub const OUTCOME: Outcome<Report> = Outcome {
    last: &[
        (Phase::Populate, "transparent_huge_bytes", |report| report.transparent_huge_bytes),
        (Phase::Get, "left_after_last_round", |report| Some(report.left_in_log)),
        (Phase::Dirty, "full_rings_of_last_run", |report| {
            report.config.shape.mode.is_ring().then_some(report.full_rings)
        }),
    ],
    ..Outcome::of(Figure::Time(Phase::Dirty))
};

/// Configuration of a run. [`Default`] is a short run, in manual mode.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The guest.
    pub shape: Shape,
    /// Number of rounds of dirty, get and clear.
    pub iterations: u32,
    /// Pages per `KVM_CLEAR_DIRTY_LOG`, a multiple of 64; `None` for a whole memslot.
    pub clear_chunk: Option<u64>,
    /// Time between two harvests of the rings while vCPUs write. A full ring is harvested at once.
    pub ring_interval: Duration,
    /// The work of a vCPU in a round. With a share below 100, each round writes different pages.
    pub work: Work,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            shape: Shape::default(),
            iterations: 2,
            clear_chunk: None,
            ring_interval: Duration::from_millis(10),
            work: Work::each_page(Touch::Write),
        }
    }
}

impl Config {
    /// Checks the configuration, without making a guest.
    ///
    /// # Errors
    /// [`Error::Invalid`], and the errors of [`Shape::check`].
    pub fn check(&self, host: &HostKvm) -> Result<(), Error> {
        self.work.check()?;
        if self.iterations == 0 {
            return Err(Error::invalid("iterations", 0, "must be at least 1"));
        }
        check_chunk(self.clear_chunk, self.shape.mode)?;
        self.shape.check(host)
    }
}

/// Results of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// The configuration of the run.
    pub config: Config,
    /// Number of pages of the memory, of the log's page size.
    pub pages: u64,
    /// All phases, in the order of the run.
    pub phases: Vec<PhaseRun>,
    /// Bytes of the memory in transparent huge pages after `warm`, if the kernel reports it. With
    /// [`Backing::Thp`], a value below the size of the memory means a different workload.
    pub transparent_huge_bytes: Option<u64>,
    /// Number of pages still in the log after the last round cleared it. No vCPU writes after the
    /// clear, so these are pages that the clear left behind.
    pub left_in_log: u64,
    /// Number of pages whose stamp was checked in the host's memory at the end, which is all of
    /// them.
    pub stamps_checked: u64,
    /// Number of times that a vCPU stopped because its ring was full.
    pub full_rings: u64,
}

impl Report {
    /// Returns all runs of a phase, in order.
    pub fn of(&self, phase: Phase) -> impl Iterator<Item = &PhaseRun> {
        self.phases.iter().filter(move |run| run.phase == phase)
    }

    /// Returns the number of pages in the fetched logs that were not written. A log that starts
    /// full is not counted.
    pub fn excess(&self) -> u64 {
        let starts_full = self.config.shape.mode == Mode::ManualInitiallySet;
        self.of(Phase::Get)
            .skip(usize::from(starts_full))
            .filter_map(|run| run.log)
            .map(|log| log.excess)
            .sum()
    }
}

/// Runs a guest and times the phases of dirty logging.
///
/// # Errors
/// The errors of [`Config::check`]; [`Error::Stopped`]; [`Error::PagesMissing`],
/// [`Error::NotInitiallySet`] or [`Error::WrongStamp`] if the host's KVM is wrong; any other
/// [`Error`] of the guest or the kernel.
pub fn run(config: &Config, setting: Setting<'_>) -> Result<Report, Error> {
    config.check(&crate::probe()?)?;
    let (report, phases) = perform(&config.shape, setting, |stage| {
        let pages = stage.guest.pages();
        Run {
            config,
            log: DirtyBitmap::new(pages),
            written: DirtyBitmap::new(pages),
            stamps: vec![0; pages as usize],
        }
        .all(stage)
    })?;
    Ok(Report { phases, ..report })
}

struct Run<'a> {
    config: &'a Config,
    /// The log that was fetched last.
    log: DirtyBitmap,
    /// The pages that the round writes.
    written: DirtyBitmap,
    /// The number of the last step that wrote each page.
    stamps: Vec<u64>,
}

impl Run<'_> {
    fn all(mut self, stage: &mut Stage<'_>) -> Result<Report, Error> {
        let guest = stage.guest;
        self.expect(guest, Work::each_page(Touch::Write));
        let warm = Work { round: 0, ..self.config.work };
        stage.populate_with(warm, |guest| self.expect(guest, warm))?;
        let transparent_huge_bytes = match self.config.shape.backing {
            Backing::Thp | Backing::Small => guest.memory().transparent_huge_bytes(),
            _ => None,
        };
        stage.calls(Phase::Enable, None, |guest, calls| calls.time(|| guest.start_log()))?;
        for iteration in 1..=self.config.iterations {
            self.round(stage, iteration)?;
        }
        // Fetched before logging ends, to count the pages that the last clear left behind. It is
        // not timed.
        self.log.reset();
        match guest.mode().is_ring() {
            true => drop(guest.harvest(&mut self.log)?),
            false => guest.get_dirty_log(&mut self.log)?,
        }
        let left_in_log = self.log.count();
        stage.calls(Phase::Disable, None, |guest, calls| calls.time(|| guest.stop_log()))?;
        stage.checking()?;
        let stamps_checked = self.check_stamps(stage)?;
        Ok(Report {
            config: self.config.clone(),
            pages: guest.pages(),
            phases: Vec::new(),
            transparent_huge_bytes,
            left_in_log,
            stamps_checked,
            full_rings: guest.full_rings(),
        })
    }

    fn round(&mut self, stage: &mut Stage<'_>, iteration: u32) -> Result<(), Error> {
        let work = Work { round: iteration, ..self.config.work };
        let round = Some(iteration);
        self.expect(stage.guest, work);
        // Zeroed, so that a bit that the kernel does not write counts as a missing page.
        self.log.reset();
        let (log, interval) = (&mut self.log, self.config.ring_interval);
        if stage.guest.mode().is_ring() {
            stage.vcpus_beside(Phase::Dirty, round, work, |guest, calls| {
                guest.wait_for_full_ring(interval);
                calls.time(|| guest.harvest(log))?;
                Ok(true)
            })?;
            stage.calls(Phase::Get, round, |guest, calls| {
                calls.time(|| guest.harvest(log)).map(drop)
            })?;
        } else {
            stage.vcpus(Phase::Dirty, round, work)?;
            stage
                .calls(Phase::Get, round, |guest, calls| calls.time(|| guest.get_dirty_log(log)))?;
        }
        let tally = self.check_log(iteration)?;
        stage.checked(tally);
        if stage.guest.mode().is_manual() {
            let chunk = self.config.clear_chunk;
            stage
                .calls(Phase::Clear, round, |guest, calls| clear(guest, &self.log, chunk, calls))?;
        }
        Ok(())
    }

    /// Computes, before the work runs, which pages it will write, with the model of the guest's
    /// code.
    fn expect(&mut self, guest: &Guest, work: Work) {
        self.written.reset();
        for (vcpu, part) in guest.parts().iter().enumerate() {
            let steps = work.steps(vcpu, part.pages).take(part.pages as usize);
            for (number, (page, touch)) in (guest.position(vcpu)..).zip(steps) {
                if touch == Touch::Write {
                    self.written.insert(part.first + page);
                    self.stamps[(part.first + page) as usize] = number;
                }
            }
        }
    }

    /// Compares the log with the pages that the round wrote.
    fn check_log(&mut self, iteration: u32) -> Result<Tally, Error> {
        let tally = self.log.check(&self.written).map_err(|MissingPages { first, count }| {
            Error::PagesMissing { iteration, first, missing: count }
        })?;
        let starts_full = self.config.shape.mode == Mode::ManualInitiallySet && iteration == 1;
        if starts_full && tally.in_log != self.log.pages() {
            return Err(Error::NotInitiallySet { set: tally.in_log, pages: self.log.pages() });
        }
        Ok(tally)
    }

    /// Compares each page with its stamp, in the host's memory.
    fn check_stamps(&self, stage: &Stage<'_>) -> Result<u64, Error> {
        for (page, &step) in (0..).zip(&self.stamps) {
            if page % 4096 == 0 {
                stage.go_on()?;
            }
            // If two vCPUs write a page, the order of their writes is unknown.
            match self.config.shape.overlap {
                true if stage.guest.written_by(page)? == 0 => {
                    return Err(Error::WrongStamp {
                        page,
                        found: 0,
                        expected: stage.guest.gpa(page),
                    });
                }
                true => {}
                false => stage.guest.check_stamp(page, step)?,
            }
        }
        match stage.guest.misread() {
            0 => Ok(self.stamps.len() as u64),
            pages => Err(Error::Misread { pages }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> HostKvm {
        HostKvm { max_vcpus: 4, max_memslots: 8, manual_protect: true, ..HostKvm::default() }
    }

    fn message(config: Config) -> String {
        config.check(&host()).expect_err("refused").to_string()
    }

    #[test]
    fn the_default_can_be_run() {
        Config::default().check(&host()).unwrap();
    }

    #[test]
    fn a_chunk_is_a_multiple_of_64_and_needs_manual_protect() {
        for chunk in [0, 1, 63, 65] {
            let config = Config { clear_chunk: Some(chunk), ..Config::default() };
            assert!(message(config).contains("multiple of 64"));
        }
        let legacy = Shape { mode: Mode::Legacy, ..Shape::default() };
        let legacy = Config { clear_chunk: Some(64), shape: legacy, ..Config::default() };
        assert!(message(legacy).contains("needs manual protect"));
        let good = Config { clear_chunk: Some(64), ..Config::default() };
        good.check(&host()).unwrap();
    }

    #[test]
    fn values_that_measure_nothing_are_refused() {
        assert!(message(Config { iterations: 0, ..Config::default() }).contains("at least 1"));
        let work = Work { share: 0, ..Work::each_page(Touch::Write) };
        assert!(message(Config { work, ..Config::default() }).contains("1 to 100"));
        let shape = Shape { memory: 4095, ..Shape::default() };
        assert!(message(Config { shape, ..Config::default() }).contains("multiple"));
    }

    #[test]
    fn more_memory_than_the_machine_has_is_refused() {
        let shape = Shape { memory: 1 << 42, ..Shape::default() };
        let config = Config { shape, ..Config::default() };
        assert!(matches!(config.check(&host()), Err(Error::NotEnoughMemory { .. })));
    }

    fn get(iteration: u32, excess: u64) -> PhaseRun {
        PhaseRun {
            phase: Phase::Get,
            iteration: Some(iteration),
            seconds: 0.0,
            calls: 1,
            longest_call_seconds: 0.0,
            call_seconds: 0.0,
            vcpus: Vec::new(),
            log: Some(Tally { in_log: 9, written: 9 - excess, excess }),
            vm: Default::default(),
            mapped: None,
            tables: None,
            nodes: Default::default(),
            stolen: 0.0,
        }
    }

    #[test]
    fn a_log_that_starts_full_has_no_excess_in_its_first_round() {
        let report = |mode| Report {
            config: Config { shape: Shape { mode, ..Shape::default() }, ..Config::default() },
            pages: 9,
            phases: vec![get(1, 5), get(2, 2), get(3, 1)],
            transparent_huge_bytes: None,
            left_in_log: 0,
            stamps_checked: 9,
            full_rings: 0,
        };
        assert_eq!(report(Mode::Manual).excess(), 8);
        assert_eq!(report(Mode::ManualInitiallySet).excess(), 3);
    }
}
