//! The run itself.

use super::crew::{Board, Crew};
use super::{Config, MappedPages, Mode, Phase, PhaseRun, Report, VcpuRun};
use crate::bitmap::{DirtyBitmap, Missing, Tally};
use crate::guest::Guest;
use crate::probe::probe;
use crate::stats::{Changes, Reading};
use crate::write_pass::WritePass;
use crate::{Backing, Error};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Something that the caller may want to show. Told between phases, never during one.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// A phase is about to begin.
    Begin {
        /// Which phase.
        phase: Phase,
        /// Which round, from 1, if it is in one.
        iteration: Option<u32>,
    },
    /// A phase is over.
    End(&'a PhaseRun),
    /// The stamps in the guest's memory are about to be checked.
    Checking,
}

/// Runs a guest and times the phases of dirty logging.
///
/// `stop` is looked at between phases and, by the vCPUs, every
/// [`PAGES_PER_RUN`](crate::write_pass::PAGES_PER_RUN) pages. When the call returns, for
/// whatever reason, all threads have left and the guest and its memory are gone.
///
/// # Errors
/// What [`Config::check`] finds; [`Error::Stopped`]; [`Error::PagesMissing`],
/// [`Error::NotInitiallySet`] or [`Error::WrongStamp`] if the host's KVM is wrong; any other
/// [`Error`] that the guest or the kernel gives cause for.
pub fn run(
    config: &Config,
    stop: &AtomicBool,
    on_event: &mut dyn FnMut(Event<'_>),
) -> Result<Report, Error> {
    config.check(&probe()?)?;
    let (guest, mut vcpus) = Guest::new(config.memory, config.backing, config.vcpus, config.mode)?;
    let parts = vcpus.iter().map(|vcpu| (vcpu.first_page(), vcpu.pages())).collect();
    let board = Board::new(vcpus.len());
    std::thread::scope(|scope| {
        let crew = Crew::start(scope, &board, &mut vcpus, stop)?;
        Run::new(config, &guest, parts, crew, stop, on_event).all()
    })
}

/// Counters before and after a phase, in buffers that are made once.
struct Meter<'a> {
    guest: &'a Guest,
    vm: [Reading; 2],
    vcpus: Vec<[Reading; 2]>,
}

impl<'a> Meter<'a> {
    fn new(guest: &'a Guest) -> Self {
        let vcpus = guest.vcpu_stats().iter();
        Self { guest, vm: Default::default(), vcpus: vcpus.map(|_| Default::default()).collect() }
    }

    /// Takes the readings before (0) or after (1) a phase.
    fn read(&mut self, when: usize) -> Result<(), Error> {
        if let Some(stats) = self.guest.vm_stats() {
            stats.read(&mut self.vm[when])?;
        }
        for (stats, readings) in self.guest.vcpu_stats().iter().zip(&mut self.vcpus) {
            stats.read(&mut readings[when])?;
        }
        Ok(())
    }

    fn vm_changes(&self) -> Changes {
        let [before, after] = &self.vm;
        self.guest.vm_stats().map(|stats| stats.changes(before, after)).unwrap_or_default()
    }

    fn vcpu_changes(&self, index: usize) -> Changes {
        let stats = self.guest.vcpu_stats().get(index).zip(self.vcpus.get(index));
        stats.map(|(stats, [before, after])| stats.changes(before, after)).unwrap_or_default()
    }

    fn mapped(&self) -> Option<MappedPages> {
        let stats = self.guest.vm_stats()?;
        let value = |name| stats.value(&self.vm[1], name);
        Some(MappedPages {
            size_4k: value("pages_4k")?,
            size_2m: value("pages_2m")?,
            size_1g: value("pages_1g")?,
        })
    }
}

/// Times of the ioctls of a phase.
#[derive(Default)]
struct Calls {
    count: u64,
    total: Duration,
    longest: Duration,
}

impl Calls {
    /// Times one ioctl.
    fn time(&mut self, call: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
        let start = Instant::now();
        let result = call();
        let took = start.elapsed();
        self.count += 1;
        self.total += took;
        self.longest = self.longest.max(took);
        result
    }
}

struct Run<'a> {
    config: &'a Config,
    guest: &'a Guest,
    /// First page and number of pages of each vCPU.
    parts: Vec<(u64, u64)>,
    crew: Crew<'a>,
    stop: &'a AtomicBool,
    on_event: &'a mut dyn FnMut(Event<'_>),
    meter: Meter<'a>,
    phases: Vec<PhaseRun>,
    /// The log as fetched.
    log: DirtyBitmap,
    /// The pages written in the round.
    written: DirtyBitmap,
    /// The round in which each page was written last.
    last_round: Vec<u32>,
}

impl<'a> Run<'a> {
    fn new(
        config: &'a Config,
        guest: &'a Guest,
        parts: Vec<(u64, u64)>,
        crew: Crew<'a>,
        stop: &'a AtomicBool,
        on_event: &'a mut dyn FnMut(Event<'_>),
    ) -> Self {
        let pages = guest.pages();
        Self {
            config,
            guest,
            parts,
            crew,
            stop,
            on_event,
            meter: Meter::new(guest),
            phases: Vec::new(),
            log: DirtyBitmap::new(pages),
            written: DirtyBitmap::new(pages),
            last_round: vec![0; pages as usize],
        }
    }

    fn all(mut self) -> Result<Report, Error> {
        self.vcpus_write(Phase::Populate, None, WritePass::new(0, 100)?)?;
        let transparent_huge_bytes = match self.config.backing {
            Backing::Thp | Backing::Small => self.guest.memory().transparent_huge_bytes(),
            Backing::Hugetlb2M | Backing::Hugetlb1G => None,
        };
        let guest = self.guest;
        self.host_calls(Phase::Enable, None, |_, calls| calls.time(|| guest.start_log()))?;
        for iteration in 1..=self.config.iterations {
            self.round(iteration)?;
        }
        // Before logging ends: what the last clear left behind. Not timed.
        self.log.reset();
        guest.get_dirty_log(&mut self.log)?;
        let left_in_log = self.log.count();
        self.host_calls(Phase::Disable, None, |_, calls| calls.time(|| guest.stop_log()))?;
        (self.on_event)(Event::Checking);
        let stamps_checked = self.check_stamps()?;
        Ok(Report {
            config: self.config.clone(),
            pages: guest.pages(),
            phases: self.phases,
            transparent_huge_bytes,
            left_in_log,
            stamps_checked,
        })
    }

    fn round(&mut self, iteration: u32) -> Result<(), Error> {
        let pass = WritePass::new(iteration, self.config.write_share)?;
        self.vcpus_write(Phase::Dirty, Some(iteration), pass)?;
        // Zeros, so that a bit that the kernel does not write is a page that is missing.
        self.log.reset();
        let guest = self.guest;
        self.host_calls(Phase::Get, Some(iteration), |log, calls| {
            calls.time(|| guest.get_dirty_log(log))
        })?;
        let tally = self.check_log(iteration, pass)?;
        if let Some(get) = self.phases.last_mut() {
            get.log = Some(tally);
            (self.on_event)(Event::End(get));
        }
        if self.config.mode.is_manual() {
            let (pages, stop) = (guest.pages(), self.stop);
            // A slot has less than 2^31 pages, so that any piece of it fits.
            let chunk = self.config.clear_chunk.unwrap_or(pages).min(pages);
            self.host_calls(Phase::Clear, Some(iteration), |log, calls| {
                (0..pages).step_by(chunk as usize).try_for_each(|first| {
                    let count = chunk.min(pages - first) as u32;
                    if stop.load(Ordering::Relaxed) {
                        return Err(Error::Stopped);
                    }
                    calls.time(|| guest.clear_dirty_log(log, first, count))
                })
            })?;
        }
        Ok(())
    }

    /// A phase of the vCPUs.
    fn vcpus_write(
        &mut self,
        phase: Phase,
        iteration: Option<u32>,
        pass: WritePass,
    ) -> Result<(), Error> {
        self.begin(phase, iteration)?;
        self.crew.load(pass)?;
        self.meter.read(0)?;
        let done = self.crew.run()?;
        self.meter.read(1)?;
        let start = done.iter().map(|done| done.start).min();
        let end = done.iter().map(|done| done.end).max();
        let total = start.zip(end).map_or(Duration::ZERO, |(start, end)| end - start);
        let vcpus = done.iter().enumerate().map(|(index, done)| VcpuRun {
            pages: done.pages,
            seconds: (done.end - done.start).as_secs_f64(),
            counters: self.meter.vcpu_changes(index),
        });
        let vcpus = vcpus.collect();
        self.end(phase, iteration, Calls { total, ..Calls::default() }, vcpus);
        Ok(())
    }

    /// A phase of the host.
    fn host_calls(
        &mut self,
        phase: Phase,
        iteration: Option<u32>,
        work: impl FnOnce(&mut DirtyBitmap, &mut Calls) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.begin(phase, iteration)?;
        self.meter.read(0)?;
        let mut calls = Calls::default();
        work(&mut self.log, &mut calls)?;
        self.meter.read(1)?;
        self.end(phase, iteration, calls, Vec::new());
        Ok(())
    }

    fn begin(&mut self, phase: Phase, iteration: Option<u32>) -> Result<(), Error> {
        self.go_on()?;
        (self.on_event)(Event::Begin { phase, iteration });
        self.go_on()
    }

    fn go_on(&self) -> Result<(), Error> {
        if self.stop.load(Ordering::Relaxed) { Err(Error::Stopped) } else { Ok(()) }
    }

    fn end(&mut self, phase: Phase, iteration: Option<u32>, calls: Calls, vcpus: Vec<VcpuRun>) {
        self.phases.push(PhaseRun {
            phase,
            iteration,
            seconds: calls.total.as_secs_f64(),
            calls: calls.count,
            longest_call_seconds: calls.longest.as_secs_f64(),
            vcpus,
            log: None,
            vm: self.meter.vm_changes(),
            mapped: self.meter.mapped(),
        });
        // The end of a get is told when its log has been checked.
        if let (Some(run), true) = (self.phases.last(), phase != Phase::Get) {
            (self.on_event)(Event::End(run));
        }
    }

    /// Holds the log against the pages that the round wrote.
    fn check_log(&mut self, iteration: u32, pass: WritePass) -> Result<Tally, Error> {
        self.written.reset();
        for &(first, pages) in &self.parts {
            for page in (0..pages).filter(|&page| pass.writes(page)) {
                self.written.insert(first + page);
                self.last_round[(first + page) as usize] = iteration;
            }
        }
        let tally = self.log.check(&self.written).map_err(|Missing { first, count }| {
            Error::PagesMissing { iteration, first, missing: count }
        })?;
        let starts_full = self.config.mode == Mode::ManualInitiallySet && iteration == 1;
        if starts_full && tally.in_log != self.log.pages() {
            return Err(Error::NotInitiallySet { set: tally.in_log, pages: self.log.pages() });
        }
        Ok(tally)
    }

    /// Looks for each page's stamp in the memory as the host sees it.
    fn check_stamps(&self) -> Result<u64, Error> {
        let passes = (0..=self.config.iterations).map(|round| WritePass::new(round, 100));
        let passes = passes.collect::<Result<Vec<_>, _>>()?;
        for (page, &round) in (0..).zip(&self.last_round) {
            self.go_on()?;
            self.guest.check_stamp(page, passes[round as usize])?;
        }
        Ok(self.last_round.len() as u64)
    }
}
