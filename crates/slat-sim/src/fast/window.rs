//! Windows, in which a CPU accesses memory, and the wait until a window ends. The documentation of
//! [`fast`](super) explains the protocol.

use rustix::io::Errno;
use rustix::thread::{MembarrierCommand, membarrier, membarrier_query};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, compiler_fence, fence};

/// How often a wait reads the counter before it yields to other threads.
const SPINS: u32 = 128;

/// How stores and loads of CPUs and of invalidating threads are ordered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Barriers {
    /// The invalidating thread executes a barrier on all CPUs.
    Asymmetric,
    /// Each side executes its own barrier.
    Symmetric,
}

impl Barriers {
    /// Returns `Asymmetric`, which is cheaper, if the kernel supports it.
    pub fn register() -> Self {
        let (register, execute) =
            (MembarrierCommand::RegisterPrivateExpedited, MembarrierCommand::PrivateExpedited);
        if membarrier_query().contains_command(execute) && membarrier(register).is_ok() {
            Self::Asymmetric
        } else {
            Self::Symmetric
        }
    }

    /// Orders a CPU's store of the odd counter before its load of the generation.
    #[inline(always)]
    pub fn here(self) {
        match self {
            Self::Asymmetric => compiler_fence(Ordering::SeqCst),
            Self::Symmetric => fence(Ordering::SeqCst),
        }
    }

    /// Orders the store of the new generation before the loads of the CPUs' counters.
    pub fn everywhere(self) {
        fence(Ordering::SeqCst);
        if self == Self::Symmetric {
            return;
        }
        loop {
            match membarrier(MembarrierCommand::PrivateExpedited) {
                Ok(()) => return,
                Err(Errno::NOMEM) => std::thread::yield_now(),
                // It was registered, so this cannot happen. To continue would be unsound, and a
                // caller must not see an unwinding.
                Err(_) => std::process::abort(),
            }
        }
    }
}

/// The state of a CPU: whether it is in a window, and whether a thread has it.
#[derive(Default, Debug)]
#[repr(align(128))]
pub(super) struct Door {
    /// Odd in a window; changes at its begin and end.
    window: AtomicU64,
    taken: AtomicBool,
}

impl Door {
    /// Takes the CPU for the calling thread, and returns its counter. Returns `None` if it is
    /// taken.
    pub fn take(&self) -> Option<u64> {
        let taken = self.taken.swap(true, Ordering::AcqRel);
        (!taken).then(|| self.window.load(Ordering::Relaxed))
    }

    /// Gives the CPU back, and ends a window that a panic left open.
    pub fn give(&self, window: u64) {
        self.set(window.next_multiple_of(2));
        self.taken.store(false, Ordering::Release);
    }

    /// Release, also where a window begins: a thread that sees the next window need not wait for
    /// the one before.
    #[inline(always)]
    pub fn set(&self, window: u64) {
        self.window.store(window, Ordering::Release);
    }

    /// Returns when the window that is open now has ended.
    pub fn wait(&self) {
        let open = self.window.load(Ordering::Acquire);
        if open.is_multiple_of(2) {
            return;
        }
        let mut spins = 0;
        while self.window.load(Ordering::Acquire) == open {
            spins += 1;
            if spins < SPINS {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn until(done: impl Fn() -> bool) {
        let mut spins = 0;
        while !done() {
            spins += 1;
            if spins % 1024 == 0 { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
    }

    /// A CPU begins a window while the generation changes, repeatedly, at slightly different times.
    fn crossing(barriers: Barriers) {
        const ROUNDS: u64 = 20_000;
        let (door, generation) = (&Door::default(), &PaddedCounter::default());
        let (start, looked) = (&PaddedCounter::default(), &PaddedCounter::default());
        let blind = std::thread::scope(|scope| {
            scope.spawn(move || {
                for round in 1..=ROUNDS {
                    until(|| start.0.load(Ordering::Acquire) == round);
                    (0..round % 61).for_each(|_| std::hint::black_box(()));
                    door.set(2 * round + 1);
                    barriers.here();
                    let saw = generation.0.load(Ordering::Acquire) == round;
                    looked.0.store(2 * round + u64::from(saw), Ordering::Release);
                }
            });
            (1..=ROUNDS)
                .filter(|&round| {
                    start.0.store(round, Ordering::Release);
                    (0..round % 127).for_each(|_| std::hint::black_box(()));
                    generation.0.store(round, Ordering::Release);
                    barriers.everywhere();
                    let saw = door.window.load(Ordering::Acquire) == 2 * round + 1;
                    until(|| looked.0.load(Ordering::Acquire) / 2 == round);
                    !saw && looked.0.load(Ordering::Acquire).is_multiple_of(2)
                })
                .count()
        });
        assert_eq!(blind, 0, "neither saw the other");
    }

    #[derive(Default)]
    #[repr(align(128))]
    struct PaddedCounter(AtomicU64);

    #[test]
    fn of_a_window_and_an_invalidation_one_sees_the_other() {
        crossing(Barriers::register());
        crossing(Barriers::Symmetric);
    }
}
