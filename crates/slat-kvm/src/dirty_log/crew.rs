//! The vCPUs' threads, started and stopped together.
//!
//! Each pass has two steps. In the first, every thread sets its vCPU's registers; in the second
//! they all run. The threads sleep in between, and while the host's phases are timed.

use crate::Error;
use crate::guest::Vcpu;
use crate::write_pass::WritePass;
use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, Scope};
use std::time::Instant;

/// What the threads are to do, and how far they are.
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
    Load(WritePass),
    Run,
    Leave,
}

/// What one vCPU did in a pass.
#[derive(Debug, Clone, Copy)]
pub(super) struct Done {
    pub pages: u64,
    pub start: Instant,
    pub end: Instant,
}

type Outcome = Result<Option<Done>, Error>;

/// What the crew and its threads share. It outlives the threads' scope.
#[derive(Debug)]
pub(super) struct Board {
    order: Mutex<Order>,
    changed: Condvar,
    /// One a vCPU.
    outcomes: Vec<Mutex<Outcome>>,
}

impl Board {
    pub(super) fn new(vcpus: usize) -> Self {
        Self {
            order: Mutex::new(Order { number: 0, step: Step::Rest, finished: 0 }),
            changed: Condvar::new(),
            outcomes: (0..vcpus).map(|_| Mutex::new(Ok(None))).collect(),
        }
    }

    /// Waits for an order after number `seen`.
    fn next(&self, seen: u64) -> Order {
        let mut order = lock(&self.order);
        while order.number == seen {
            order = self.changed.wait(order).unwrap_or_else(PoisonError::into_inner);
        }
        *order
    }

    /// Wakes others when the last thread has finished, and not while any vCPU may still be timed.
    fn finish(&self) {
        let mut order = lock(&self.order);
        order.finished += 1;
        if order.finished == self.outcomes.len() {
            self.changed.notify_all();
        }
    }

    fn issue(&self, step: Step) -> MutexGuard<'_, Order> {
        let mut order = lock(&self.order);
        *order = Order { number: order.number + 1, step, finished: 0 };
        self.changed.notify_all();
        order
    }
}

/// A panic of another thread is reported by its own scope; the data here is whole at all times.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The threads, which leave when it is dropped.
#[derive(Debug)]
pub(super) struct Crew<'env> {
    board: &'env Board,
    size: usize,
}

impl<'env> Crew<'env> {
    /// Starts a thread for each vCPU.
    pub(super) fn start<'scope>(
        scope: &'scope Scope<'scope, 'env>,
        board: &'env Board,
        vcpus: &'env mut [Vcpu],
        stop: &'env AtomicBool,
    ) -> Result<Self, Error> {
        // Made first, so that an early return makes the threads that did start leave.
        let mut crew = Self { board, size: 0 };
        for (vcpu, outcome) in vcpus.iter_mut().zip(&board.outcomes) {
            Builder::new()
                .name(format!("vcpu{}", vcpu.index()))
                .spawn_scoped(scope, move || work(board, vcpu, outcome, stop))
                .map_err(Error::os::<io::Error>("start of a vCPU's thread"))?;
            crew.size += 1;
        }
        Ok(crew)
    }

    /// Sets all vCPUs' registers for a pass, ahead of what is timed.
    pub(super) fn load(&mut self, pass: WritePass) -> Result<(), Error> {
        self.step(Step::Load(pass)).map(drop)
    }

    /// Runs the pass on all vCPUs at once.
    pub(super) fn run(&mut self) -> Result<Vec<Done>, Error> {
        self.step(Step::Run)
    }

    fn step(&mut self, step: Step) -> Result<Vec<Done>, Error> {
        let mut order = self.board.issue(step);
        while order.finished < self.size {
            order = self.board.changed.wait(order).unwrap_or_else(PoisonError::into_inner);
        }
        drop(order);
        let outcomes = self.board.outcomes.iter();
        let outcomes = outcomes.map(|outcome| std::mem::replace(&mut *lock(outcome), Ok(None)));
        // Being stopped is the least of what may have happened.
        let (stopped, mut rest): (Vec<_>, Vec<_>) =
            outcomes.partition(|outcome| matches!(outcome, Err(Error::Stopped)));
        rest.extend(stopped);
        rest.into_iter().filter_map(Result::transpose).collect()
    }
}

impl Drop for Crew<'_> {
    fn drop(&mut self) {
        drop(self.board.issue(Step::Leave));
    }
}

/// Reports a step that ended, be it by a panic: nobody waits for a thread that is gone.
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

/// A thread's life.
fn work(board: &Board, vcpu: &mut Vcpu, outcome: &Mutex<Outcome>, stop: &AtomicBool) {
    let mut seen = 0;
    loop {
        let order = board.next(seen);
        seen = order.number;
        if let Step::Leave = order.step {
            return;
        }
        // What is reported unless the step comes to its end.
        let mut finish = Finish { board, outcome, result: Err(Error::ThreadPanicked) };
        finish.result = match order.step {
            Step::Rest | Step::Leave => Ok(None),
            Step::Load(pass) => vcpu.load(pass).map(|()| None),
            Step::Run => {
                let start = Instant::now();
                let pages = vcpu.run(stop);
                let end = Instant::now();
                pages.map(|pages| Some(Done { pages, start, end }))
            }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_panics_is_not_waited_for() {
        let board = Board::new(1);
        let mut crew = Crew { board: &board, size: 1 };
        let result = std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                let _ = board.next(0);
                let _finish = Finish {
                    board: &board,
                    outcome: &board.outcomes[0],
                    result: Err(Error::ThreadPanicked),
                };
                std::panic::resume_unwind(Box::new(()));
            });
            let result = crew.run();
            assert!(thread.join().is_err());
            result
        });
        assert!(matches!(result, Err(Error::ThreadPanicked)), "{result:?}");
    }
}
