//! The threads of the vCPUs, started and stopped together.
//!
//! Each piece of work has two steps: every thread loads it into its vCPU, then all vCPUs run. The
//! threads sleep in between, and while phases of the host are timed.

use crate::Error;
use crate::guest::Guest;
use crate::procfs::Files;
use crate::stall::Waits;
use crate::vcpu::Vcpu;
use crate::work::Work;
use rustix::thread::{CpuSet, sched_setaffinity};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, Scope};
use std::time::{Duration, Instant};

/// Time between two checks by a thread that waits for vCPUs whether it must stop them.
const PATIENCE: Duration = Duration::from_millis(50);

/// The current step of all threads, and their progress.
#[derive(Debug, Clone, Copy)]
struct Order {
    /// Grows by one with each step.
    number: u64,
    step: Step,
    /// Threads that have finished the step.
    finished: usize,
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Rest,
    Pin,
    Load(Work),
    Run,
    Leave,
}

/// The result of one vCPU's work.
#[derive(Debug, Clone, Copy)]
pub(crate) struct VcpuWork {
    pub steps: u64,
    pub start: Instant,
    pub end: Instant,
    /// The thread's waits for a CPU.
    pub waits: Option<Waits>,
    /// The host's faults that the thread took; only of work that is recorded.
    pub host_faults: Option<HostFaults>,
}

/// Page faults of the host's memory that one thread took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct HostFaults {
    pub minor: u64,
    major: u64,
}

impl HostFaults {
    /// Returns the faults of the calling thread so far, where procfs tells.
    pub fn now() -> Option<Self> {
        let stat = Files::here().text("proc/thread-self/stat")?;
        // The name, which may have blanks, is in parentheses (proc_pid_stat(5)).
        let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(7);
        let minor = fields.next()?.parse().ok()?;
        Some(Self { minor, major: fields.nth(1)?.parse().ok()? })
    }

    /// Returns the faults by their names among a vCPU's counters.
    pub fn counters(&self) -> [(String, i64); 2] {
        [("host_minor_faults", self.minor), ("host_major_faults", self.major)]
            .map(|(name, count)| (name.to_owned(), count as i64))
    }
}

type Outcome = Result<Option<VcpuWork>, Error>;

/// Data that the threads shares with its threads. It outlives the threads' scope.
#[derive(Debug)]
pub(crate) struct Board {
    order: Mutex<Order>,
    changed: Condvar,
    /// One for each vCPU.
    outcomes: Vec<Mutex<Outcome>>,
    /// CPUs for the vCPUs' threads, used in turn. If it is empty, the scheduler places the threads.
    pin: Vec<usize>,
}

impl Board {
    pub fn new(vcpus: usize, pin: &[usize]) -> Self {
        Self {
            order: Mutex::new(Order { number: 0, step: Step::Rest, finished: 0 }),
            changed: Condvar::new(),
            outcomes: (0..vcpus).map(|_| Mutex::new(Ok(None))).collect(),
            pin: pin.to_vec(),
        }
    }

    /// Waits for an order with a number other than `seen`.
    fn next(&self, seen: u64) -> Order {
        let mut order = lock(&self.order);
        while order.number == seen {
            order = self.changed.wait(order).unwrap_or_else(PoisonError::into_inner);
        }
        *order
    }

    /// Counts a thread as finished. Only the last one wakes the waiting thread, so that it does not
    /// run while a vCPU is still timed.
    fn finish(&self) {
        let mut order = lock(&self.order);
        order.finished += 1;
        if order.finished == self.outcomes.len() {
            self.changed.notify_all();
        }
    }

    fn issue(&self, step: Step) {
        let mut order = lock(&self.order);
        *order = Order { number: order.number + 1, step, finished: 0 };
        self.changed.notify_all();
    }
}

/// Locks a mutex even if it is poisoned: the scope of the panicked thread reports the panic, and no
/// lock is held across a partial update.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The vCPUs' threads. Dropping it stops their vCPUs and ends the threads.
#[derive(Debug)]
pub(crate) struct VcpuThreads<'env> {
    board: &'env Board,
    guest: &'env Guest,
    stop: &'env AtomicBool,
    size: usize,
}

impl<'env> VcpuThreads<'env> {
    /// Starts a thread for each vCPU.
    pub fn start<'scope>(
        scope: &'scope Scope<'scope, 'env>,
        board: &'env Board,
        guest: &'env Guest,
        vcpus: &'env mut [Vcpu],
        stop: &'env AtomicBool,
    ) -> Result<Self, Error> {
        // Made before the threads, so that its drop ends the threads that did start if a later one
        // does not.
        let mut threads = Self { board, guest, stop, size: 0 };
        for (vcpu, outcome) in vcpus.iter_mut().zip(&board.outcomes) {
            Builder::new()
                .name(format!("vcpu{}", vcpu.index()))
                .spawn_scoped(scope, move || work(board, vcpu, outcome))
                .map_err(Error::os::<io::Error>("start of a vCPU's thread"))?;
            threads.size += 1;
        }
        if !board.pin.is_empty() {
            threads.step(Step::Pin)?;
        }
        Ok(threads)
    }

    /// Loads work into all vCPUs. It is a call of its own, so that it is not timed.
    pub fn load(&self, work: Work) -> Result<(), Error> {
        self.step(Step::Load(work)).map(drop)
    }

    /// Starts all vCPUs at once.
    pub fn go(&self) {
        self.board.issue(Step::Run);
    }

    /// Returns whether all threads have finished the step.
    pub fn has_finished(&self) -> bool {
        lock(&self.board.order).finished >= self.size
    }

    /// Waits until all threads have finished the step.
    ///
    /// # Errors
    /// The error of any of them; [`Error::Stopped`] if the caller has asked the run to stop.
    pub fn wait(&self) -> Result<Vec<VcpuWork>, Error> {
        let mut order = lock(&self.board.order);
        while order.finished < self.size {
            let waited = self.board.changed.wait_timeout(order, PATIENCE);
            order = waited.unwrap_or_else(PoisonError::into_inner).0;
            if self.stop.load(Ordering::Relaxed) {
                self.guest.give_up();
            }
        }
        drop(order);
        let outcomes = self.board.outcomes.iter();
        let outcomes = outcomes.map(|outcome| std::mem::replace(&mut *lock(outcome), Ok(None)));
        // Any other error is reported before `Stopped`, which may only be its consequence.
        let (stopped, mut rest): (Vec<_>, Vec<_>) =
            outcomes.partition(|outcome| matches!(outcome, Err(Error::Stopped)));
        rest.extend(stopped);
        let done: Result<Vec<_>, _> = rest.into_iter().filter_map(Result::transpose).collect();
        match self.stop.load(Ordering::Relaxed) {
            true => done.and(Err(Error::Stopped)),
            false => done,
        }
    }

    fn step(&self, step: Step) -> Result<Vec<VcpuWork>, Error> {
        self.board.issue(step);
        self.wait()
    }
}

impl Drop for VcpuThreads<'_> {
    fn drop(&mut self) {
        // After an early return with an error, vCPUs may still run.
        self.guest.give_up();
        self.board.issue(Step::Leave);
    }
}

/// Reports the end of a step when it is dropped, so that a panic of the thread ends the step, too.
struct Finish<'a> {
    board: &'a Board,
    outcome: &'a Mutex<Outcome>,
    result: Outcome,
}

impl Drop for Finish<'_> {
    fn drop(&mut self) {
        *lock(self.outcome) = std::mem::replace(&mut self.result, Ok(None));
        self.board.finish();
    }
}

/// Runs a vCPU's thread: it executes steps until `Leave`.
fn work(board: &Board, vcpu: &mut Vcpu, outcome: &Mutex<Outcome>) {
    let (mut seen, mut recorded) = (0, false);
    loop {
        let order = board.next(seen);
        seen = order.number;
        if let Step::Leave = order.step {
            return;
        }
        // `ThreadPanicked` is reported unless the step returns.
        let mut finish = Finish { board, outcome, result: Err(Error::ThreadPanicked) };
        finish.result = match order.step {
            Step::Rest | Step::Leave => Ok(None),
            Step::Pin => pin(board.pin[vcpu.index() % board.pin.len()]).map(|()| None),
            Step::Load(work) => {
                recorded = work.record;
                vcpu.load(&work).map(|()| None)
            }
            Step::Run => run(vcpu, recorded).map(Some),
        };
        drop(finish);
        vcpu.finish();
    }
}

fn run(vcpu: &mut Vcpu, recorded: bool) -> Result<VcpuWork, Error> {
    let faults = || HostFaults::now().filter(|_| recorded);
    let before = faults();
    let waits = Waits::now();
    let start = Instant::now();
    let steps = vcpu.run()?;
    let end = Instant::now();
    let waits = Waits::now().zip(waits).map(|(after, before)| after.since(before));
    let host_faults = faults().zip(before).map(|(after, before)| HostFaults {
        minor: after.minor - before.minor,
        major: after.major - before.major,
    });
    Ok(VcpuWork { steps, start, end, waits, host_faults })
}

fn pin(cpu: usize) -> Result<(), Error> {
    if cpu >= CpuSet::MAX_CPU {
        return Err(Error::invalid("CPU", cpu, "is beyond what the kernel knows"));
    }
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).map_err(|answer| match answer {
        rustix::io::Errno::INVAL => {
            Error::invalid("CPU", cpu, "is not one that this process may run on")
        }
        other => Error::os("sched_setaffinity")(other),
    })
}
