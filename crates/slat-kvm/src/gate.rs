//! Where vCPUs whose dirty rings are full wait for the one who harvests.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Where vCPUs with full rings and the one who harvests meet.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Grows with each reset.
    resets: u64,
    /// Stops because of a full ring since the guest was made.
    full: u64,
    /// vCPUs that wait.
    waiting: usize,
    /// A vCPU has finished since that was looked at last.
    finished: bool,
    /// Nobody will reset again.
    closed: bool,
}

impl Gate {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A vCPU's ring is full: waits until the rings were reset. False if nobody will.
    pub fn wait_for_reset(&self) -> bool {
        let mut state = self.lock();
        let seen = state.resets;
        state.full += 1;
        state.waiting += 1;
        self.changed.notify_all();
        while state.resets == seen && !state.closed {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.waiting -= 1;
        !state.closed
    }

    /// Waits until a vCPU's ring is full or a vCPU's thread has finished its work, or for a time.
    pub fn wait_for_full(&self, at_most: Duration) -> bool {
        let mut state = self.lock();
        if state.waiting == 0 && !state.finished {
            let waited = self.changed.wait_timeout(state, at_most);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        state.finished = false;
        state.waiting > 0
    }

    /// Whether a vCPU waits.
    pub fn has_full(&self) -> bool {
        self.lock().waiting > 0
    }

    /// A vCPU's thread has finished its work: whoever waits for full rings looks again.
    pub fn finish(&self) {
        self.lock().finished = true;
        self.changed.notify_all();
    }

    /// The rings were reset.
    pub fn reset(&self) {
        self.lock().resets += 1;
        self.changed.notify_all();
    }

    /// Lets all go that wait, now and later.
    pub fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    /// How often a vCPU stopped because its ring was full.
    pub fn stops(&self) -> u64 {
        self.lock().full
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vcpu_with_a_full_ring_waits_for_the_reset_and_is_let_go_when_nobody_will() {
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
}
