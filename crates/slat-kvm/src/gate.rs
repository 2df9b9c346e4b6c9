//! The meeting point of vCPUs whose dirty rings are full and the thread that harvests the rings.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Lets vCPUs with full rings wait for a reset, and the harvesting thread wait for full rings.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Number of resets.
    resets: u64,
    /// Number of times that a vCPU stopped because its ring was full.
    full: u64,
    /// Number of vCPUs that have stopped since the last reset, and were not released by `closed`.
    waiting: usize,
    /// Whether a vCPU has finished its work since `wait_for_full` returned last.
    finished: bool,
    /// Whether waiting vCPUs must give up, because the rings are not reset any more.
    closed: bool,
}

impl Gate {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a vCPU whose ring is full wait until the rings are reset. Returns false if `close` was
    /// called.
    pub fn wait_for_reset(&self) -> bool {
        self.wait_after(self.stop())
    }

    /// Notes that a vCPU stops because its ring is full, and returns the number of resets so far.
    fn stop(&self) -> u64 {
        let mut state = self.lock();
        state.full += 1;
        state.waiting += 1;
        self.changed.notify_all();
        state.resets
    }

    /// Waits for a reset after the first `seen`. Returns false if `close` was called.
    fn wait_after(&self, seen: u64) -> bool {
        let mut state = self.lock();
        while state.resets == seen && !state.closed {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.resets == seen {
            state.waiting -= 1;
        }
        !state.closed
    }

    /// Waits until a vCPU's ring is full, until a vCPU has finished its work, or for `at_most`.
    /// Returns whether a ring is full.
    pub fn wait_for_full(&self, at_most: Duration) -> bool {
        let mut state = self.lock();
        if state.waiting == 0 && !state.finished {
            let waited = self.changed.wait_timeout(state, at_most);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        state.finished = false;
        state.waiting > 0
    }

    /// Returns whether a vCPU waits.
    pub fn has_full(&self) -> bool {
        self.lock().waiting > 0
    }

    /// Notes that a vCPU has finished its work, and wakes the thread that waits for full rings.
    pub fn finish(&self) {
        self.lock().finished = true;
        self.changed.notify_all();
    }

    /// Notes that the rings were reset, and wakes the vCPUs. From now on none counts as waiting,
    /// even if its thread has not run yet: the caller would see a full ring where there is none.
    pub fn reset(&self) {
        let mut state = self.lock();
        state.resets += 1;
        state.waiting = 0;
        self.changed.notify_all();
    }

    /// Releases all vCPUs that wait, and those that will.
    pub fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    /// Returns whether `close` was called.
    pub fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// Returns how often a vCPU stopped because its ring was full.
    pub fn stops(&self) -> u64 {
        self.lock().full
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vcpu_with_a_full_ring_waits_for_a_reset_or_the_end() {
        let gate = Gate::default();
        std::thread::scope(|scope| {
            let vcpu = scope.spawn(|| (gate.wait_for_reset(), gate.wait_for_reset()));
            while gate.stops() == 0 {
                gate.wait_for_full(Duration::from_millis(1));
            }
            gate.reset();
            while gate.stops() == 1 {
                gate.wait_for_full(Duration::from_millis(1));
            }
            gate.close();
            assert_eq!(vcpu.join().unwrap(), (true, false));
        });
    }

    #[test]
    fn after_a_reset_no_vcpu_waits_even_if_none_has_run_since() {
        let gate = Gate::default();
        let first = gate.stop();
        assert!(gate.has_full() && gate.wait_for_full(Duration::ZERO));
        gate.reset();
        assert!(!gate.has_full() && !gate.wait_for_full(Duration::ZERO));
        // Another vCPU stops before the first has seen the reset.
        let second = gate.stop();
        assert!(gate.has_full());
        assert!(gate.wait_after(first));
        assert!(gate.has_full(), "the second still waits");
        gate.close();
        assert!(!gate.wait_after(second));
        assert!(!gate.has_full());
        assert_eq!(gate.stops(), 2);
    }
}
