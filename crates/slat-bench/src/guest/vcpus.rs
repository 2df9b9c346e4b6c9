//! Runs all vCPUs of a guest, phase by phase.

use super::fixture::{Fixture, TheGuest};
use super::runner::{Locks, Runner};
use super::times::Times;
use super::turns::Counts;
use crate::stopwatch::Stopwatch;
use slat::Format;
use slat_guest::{FaultKind, Stats};
use slat_sim::arch::Arch;
use std::sync::Barrier;
use std::time::Instant;

/// Costs of a phase.
#[derive(Debug)]
pub struct PhaseRun {
    /// Seconds from the first vCPU's begin to the last one's end.
    pub seconds: f64,
    /// Seconds on a CPU, of all vCPUs together.
    pub cpu_seconds: f64,
    /// Faults by kind: their number, and nanoseconds in them.
    pub faults: Vec<(FaultKind, u64, u64)>,
    /// Times for which vCPUs were held up.
    pub times: Times,
    /// Number of invalidations that the machine executed.
    pub invalidations: u64,
}

impl PhaseRun {
    /// Returns the number of faults.
    pub fn fault_count(&self) -> u64 {
        self.faults.iter().map(|(_, count, _)| count).sum()
    }

    /// Returns the seconds of all vCPUs in faults, as the guest counts them.
    pub fn fault_seconds(&self) -> f64 {
        self.faults.iter().map(|(_, _, ticks)| *ticks as f64 / 1e9).sum()
    }

    /// Returns all counts.
    pub fn counts(&self) -> Counts {
        let kinds = self.faults.iter().filter(|(_, count, _)| *count != 0);
        let mut counts: Counts = kinds
            .map(|(kind, count, _)| (format!("faults_{}", kind.name().replace(' ', "_")), *count))
            .collect();
        counts.insert("faults".to_owned(), self.fault_count());
        counts.insert("invalidations".to_owned(), self.invalidations);
        counts.insert("in_faults_ns".to_owned(), (self.fault_seconds() * 1e9) as u64);
        counts.insert("on_cpu_ns".to_owned(), (self.cpu_seconds * 1e9) as u64);
        counts
    }
}

/// Returns the increase of the guest's counters.
pub fn faults_between(before: &Stats, after: &Stats) -> Vec<(FaultKind, u64, u64)> {
    let kind = |kind: FaultKind| {
        let (a, b) = (before.faults(kind), after.faults(kind));
        (kind, b.count - a.count, b.ticks - a.ticks)
    };
    FaultKind::ALL.iter().copied().map(kind).collect()
}

/// Runs a thread for each vCPU. All do a phase, wait for each other, and do the next. `work` gets
/// the numbers of the vCPU and of the phase.
///
/// # Errors
/// The first error of `work`; later phases are not done.
pub fn run_phases<'p, F: Format, A: Arch>(
    fixture: &'p Fixture<F, A>,
    guest: &TheGuest<'p, F, A>,
    locks: Locks<'_>,
    phases: usize,
    work: impl Fn(&mut Runner<'_, 'p, F, A>, u16, usize) -> anyhow::Result<()> + Sync,
) -> anyhow::Result<Vec<PhaseRun>> {
    let vcpus = fixture.shape.vcpus;
    let barrier = &Barrier::new(usize::from(vcpus) + 1);
    let work = &work;
    let vcpu = |id: u16| {
        move || -> anyhow::Result<Vec<(Instant, Instant, f64, Times)>> {
            let mut runner = Runner::new(guest, fixture.machine(), id, locks);
            let (mut done, mut failed) = (Vec::new(), None);
            for phase in 0..phases {
                // A thread that fails still comes to each barrier.
                barrier.wait();
                let (begin, watch) = (Instant::now(), Stopwatch::start());
                let result = match &mut runner {
                    Ok(runner) if failed.is_none() => work(runner, id, phase),
                    _ => Ok(()),
                };
                let times = runner
                    .as_mut()
                    .map_or_else(|_| Times::default(), |r| std::mem::take(&mut r.times));
                done.push((begin, Instant::now(), watch.seconds(), times));
                failed = failed.or(result.err());
                barrier.wait();
            }
            match (runner, failed) {
                (Err(error), _) | (_, Some(error)) => Err(error),
                _ => Ok(done),
            }
        }
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..vcpus).map(|id| scope.spawn(vcpu(id))).collect();
        let read = || (guest.stats(), fixture.machine().service().invalidations);
        let mut stats = vec![read()];
        for _ in 0..phases {
            barrier.wait();
            barrier.wait();
            stats.push(read());
        }
        let mut runs = Vec::new();
        for thread in threads {
            match thread.join() {
                Ok(run) => runs.push(run?),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        let phase = |phase: usize| {
            let of_all = || runs.iter().map(|run| &run[phase]);
            let begin = of_all().map(|(begin, ..)| *begin).min();
            let end = of_all().map(|(_, end, ..)| *end).max();
            let mut times = Times::default();
            of_all().for_each(|(.., of_one)| times.merge(of_one));
            let ((before, from), (after, to)) = (&stats[phase], &stats[phase + 1]);
            PhaseRun {
                seconds: begin.zip(end).map_or(0.0, |(begin, end)| (end - begin).as_secs_f64()),
                cpu_seconds: of_all().map(|(_, _, cpu, _)| cpu).sum(),
                faults: faults_between(before, after),
                times,
                invalidations: to - from,
            }
        };
        Ok((0..phases).map(phase).collect())
    })
}
