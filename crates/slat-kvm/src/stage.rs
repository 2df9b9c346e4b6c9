//! A guest with its threads, and the phases of a scenario.
//!
//! A phase times either the vCPUs' work or the host's calls, unless a scenario runs both at once.
//! Counters are read before and after a phase, and nothing is printed during one.

use crate::Error;
use crate::guest::{Guest, Shape, Vcpu};
use crate::meter::Meter;
use crate::phase::{Phase, PhaseRun, VcpuRun};
use crate::vcpu_threads::{Board, HostFaults, VcpuThreads, VcpuWork};
use crate::work::{Touch, Work};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Progress of a run, reported to the caller between phases and never during one.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// A phase is about to begin.
    Begin {
        /// The phase.
        phase: Phase,
        /// The round, from 1, if the phase belongs to one.
        iteration: Option<u32>,
    },
    /// A phase is over.
    End(&'a PhaseRun),
    /// The guest's memory or the logs are about to be checked.
    Checking,
}

/// Environment of a run: the flag that stops it, the CPUs of the vCPUs, and the receiver of its
/// events.
pub struct Setting<'a> {
    /// Stops the run once it is true. It is read between phases, and every 50 ms while vCPUs run.
    pub stop: &'a AtomicBool,
    /// CPUs for the vCPUs' threads, used in turn. If it is empty, the scheduler places the threads.
    pub pin: &'a [usize],
    /// Receives the events.
    pub on_event: &'a mut dyn FnMut(Event<'_>),
}

/// Times of the ioctls of a phase.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Calls {
    pub count: u64,
    pub total: Duration,
    pub longest: Duration,
    pub last: Duration,
}

impl Calls {
    /// Times one ioctl.
    pub fn time<T>(&mut self, call: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        let start = Instant::now();
        let result = call();
        let took = start.elapsed();
        self.count += 1;
        self.total += took;
        self.longest = self.longest.max(took);
        self.last = took;
        result
    }
}

/// A guest and the threads of its vCPUs.
pub(crate) struct Stage<'a> {
    pub guest: &'a Guest,
    threads: VcpuThreads<'a>,
    stop: &'a AtomicBool,
    on_event: &'a mut dyn FnMut(Event<'_>),
    meter: Meter<'a>,
    phases: Vec<PhaseRun>,
}

/// Makes a guest and runs `script` on it.
///
/// When the call returns, with or without an error, all threads have ended and the guest and its
/// memory are freed.
pub(crate) fn perform<T>(
    shape: &Shape,
    setting: Setting<'_>,
    script: impl FnOnce(&mut Stage<'_>) -> Result<T, Error>,
) -> Result<(T, Vec<PhaseRun>), Error> {
    perform_on(Guest::new(shape)?, setting, script)
}

/// Does the same as [`perform`] on a guest that is made already.
pub(crate) fn perform_on<T>(
    (guest, mut vcpus): (Guest, Vec<Vcpu>),
    setting: Setting<'_>,
    script: impl FnOnce(&mut Stage<'_>) -> Result<T, Error>,
) -> Result<(T, Vec<PhaseRun>), Error> {
    let board = Board::new(vcpus.len(), setting.pin);
    std::thread::scope(|scope| {
        let threads = VcpuThreads::start(scope, &board, &guest, &mut vcpus, setting.stop)?;
        let mut stage = Stage {
            guest: &guest,
            threads,
            stop: setting.stop,
            on_event: setting.on_event,
            meter: Meter::new(&guest),
            phases: Vec::new(),
        };
        let result = script(&mut stage)?;
        Ok((result, stage.phases))
    })
}

impl<'a> Stage<'a> {
    /// Returns [`Error::Stopped`] if the caller has asked the run to stop.
    pub fn go_on(&self) -> Result<(), Error> {
        if self.stop.load(Ordering::Relaxed) { Err(Error::Stopped) } else { Ok(()) }
    }

    /// Returns the environment of another guest, which runs while this one stands still.
    pub fn setting<'s>(&'s mut self, pin: &'s [usize]) -> Setting<'s> {
        Setting { stop: self.stop, pin, on_event: &mut *self.on_event }
    }

    /// Runs a phase of the vCPUs.
    pub fn vcpus(&mut self, phase: Phase, round: Option<u32>, work: Work) -> Result<(), Error> {
        self.vcpus_beside(phase, round, work, |_, _| Ok(false))
    }

    /// Runs a phase of the vCPUs with calls of the host at the same time. It calls `beside`
    /// repeatedly until the vCPUs have finished, or until `beside` returns false because it has no
    /// more to do.
    pub fn vcpus_beside(
        &mut self,
        phase: Phase,
        round: Option<u32>,
        work: Work,
        mut beside: impl FnMut(&Guest, &mut Calls) -> Result<bool, Error>,
    ) -> Result<(), Error> {
        self.begin(phase, round)?;
        self.threads.load(work)?;
        self.meter.before()?;
        self.threads.go();
        let mut calls = Calls::default();
        while !self.threads.has_finished() && beside(self.guest, &mut calls)? {
            if self.stop.load(Ordering::Relaxed) {
                break;
            }
        }
        let done = self.threads.wait()?;
        self.meter.after()?;
        let (total, vcpus) = self.vcpu_runs(&done);
        self.end(phase, round, total, calls, vcpus);
        Ok(())
    }

    /// Populates the memory, and measures with `warm` how long an access usually takes.
    pub fn populate(&mut self, warm: Work) -> Result<(), Error> {
        self.populate_with(warm, |_| ())
    }

    /// Does the same as [`Stage::populate`], and calls `before` between the two phases.
    pub fn populate_with(&mut self, warm: Work, before: impl FnOnce(&Guest)) -> Result<(), Error> {
        self.vcpus(Phase::Populate, None, Work::each_page(Touch::Write))?;
        before(self.guest);
        self.vcpus(Phase::Warm, None, warm)?;
        self.set_warm();
        Ok(())
    }

    /// Makes the last phase the reference for the usual time of an access.
    pub fn set_warm(&mut self) {
        self.meter.set_warm();
    }

    /// Returns the flag that stops the run.
    pub fn stop(&self) -> &'a AtomicBool {
        self.stop
    }

    /// Returns the phase that ended last.
    pub fn last_phase(&self) -> Option<&PhaseRun> {
        self.phases.last()
    }

    /// Runs the vCPUs while `beside` runs. Then it asks the vCPUs to stop, and calls `stopping`
    /// until they have stopped or until it returns false. As soon as they have stopped, it calls
    /// `stopped` with the result of `beside`.
    pub fn live<T, U>(
        &mut self,
        phase: Phase,
        work: Work,
        beside: impl FnOnce(&'a Guest) -> Result<T, Error>,
        mut stopping: impl FnMut(&'a Guest, &mut T) -> Result<bool, Error>,
        stopped: impl FnOnce(&'a Guest, T) -> Result<U, Error>,
    ) -> Result<U, Error> {
        self.begin(phase, None)?;
        self.threads.load(work)?;
        self.meter.before()?;
        self.threads.go();
        let mut result = beside(self.guest)?;
        (0..self.guest.parts().len()).for_each(|vcpu| self.guest.ask_to_stop(vcpu));
        while !self.threads.has_finished() && stopping(self.guest, &mut result)? {
            if self.stop.load(Ordering::Relaxed) {
                break;
            }
        }
        let done = self.threads.wait()?;
        let result = stopped(self.guest, result)?;
        self.meter.after()?;
        let (total, vcpus) = self.vcpu_runs(&done);
        self.end(phase, None, total, Calls::default(), vcpus);
        Ok(result)
    }

    fn vcpu_runs(&self, done: &[VcpuWork]) -> (Duration, Vec<VcpuRun>) {
        let start = done.iter().map(|done| done.start).min();
        let end = done.iter().map(|done| done.end).max();
        let total = start.zip(end).map_or(Duration::ZERO, |(start, end)| end - start);
        let runs = done.iter().enumerate().map(|(index, done)| VcpuRun {
            pages: done.steps,
            seconds: (done.end - done.start).as_secs_f64(),
            counters: {
                let mut counters = self.meter.vcpu_changes(index);
                counters.extend(done.host_faults.iter().flat_map(HostFaults::counters));
                counters
            },
            stalls: self.meter.stalls(index, done),
            waited: done.waits.map(|waits| waits.seconds),
        });
        (total, runs.collect())
    }

    /// Runs a phase of the host's calls.
    pub fn calls(
        &mut self,
        phase: Phase,
        round: Option<u32>,
        work: impl FnOnce(&Guest, &mut Calls) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.begin(phase, round)?;
        self.meter.before()?;
        let mut calls = Calls::default();
        work(self.guest, &mut calls)?;
        self.meter.after()?;
        self.end(phase, round, calls.total, calls, Vec::new());
        Ok(())
    }

    fn begin(&mut self, phase: Phase, iteration: Option<u32>) -> Result<(), Error> {
        self.go_on()?;
        (self.on_event)(Event::Begin { phase, iteration });
        self.go_on()
    }

    fn end(
        &mut self,
        phase: Phase,
        iteration: Option<u32>,
        total: Duration,
        calls: Calls,
        vcpus: Vec<VcpuRun>,
    ) {
        self.phases.push(PhaseRun {
            phase,
            iteration,
            seconds: total.as_secs_f64(),
            calls: calls.count,
            longest_call_seconds: calls.longest.as_secs_f64(),
            call_seconds: calls.total.as_secs_f64(),
            vcpus,
            log: None,
            vm: self.meter.vm_changes(),
            mapped: self.meter.mapped(),
            tables: self.meter.tables(),
            nodes: match phase {
                Phase::Populate => self.guest.placement(),
                _ => Default::default(),
            },
            stolen: self.meter.stolen(),
        });
        // For `get`, `checked` reports the end, once the log has been checked.
        if phase != Phase::Get {
            self.tell_end();
        }
    }

    /// Reports that the last phase has ended.
    fn tell_end(&mut self) {
        if let Some(run) = self.phases.last() {
            (self.on_event)(Event::End(run));
        }
    }

    /// Notes the result of checking the log that the last phase fetched, and reports the phase's
    /// end.
    pub fn checked(&mut self, tally: crate::bitmap::Tally) {
        if let Some(run) = self.phases.last_mut() {
            run.log = Some(tally);
        }
        self.tell_end();
    }

    /// Reports that the guest's memory or the logs are about to be checked.
    pub fn checking(&mut self) -> Result<(), Error> {
        (self.on_event)(Event::Checking);
        self.go_on()
    }
}
