//! When a CPU is accessing memory, and how one waits until it no longer is. The protocol is argued
//! in the documentation of [`fast`](super).

use rustix::io::Errno;
use rustix::thread::{MembarrierCommand, membarrier, membarrier_query};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, compiler_fence, fence};

/// How often one looks before one lets others run.
const SPINS: u32 = 128;

/// How stores and loads of CPUs and of those who invalidate are ordered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Barriers {
    /// Who invalidates executes a barrier on all CPUs.
    Asymmetric,
    /// Each executes its own.
    Symmetric,
}

impl Barriers {
    /// The cheaper ones, if the kernel has them.
    pub fn register() -> Self {
        let (register, execute) =
            (MembarrierCommand::RegisterPrivateExpedited, MembarrierCommand::PrivateExpedited);
        if membarrier_query().contains_command(execute) && membarrier(register).is_ok() {
            Self::Asymmetric
        } else {
            Self::Symmetric
        }
    }

    /// Between a CPU's odd counter and its look at the generation.
    #[inline(always)]
    pub fn here(self) {
        match self {
            Self::Asymmetric => compiler_fence(Ordering::SeqCst),
            Self::Symmetric => fence(Ordering::SeqCst),
        }
    }

    /// Between the new generation and the look at the CPUs' counters.
    pub fn everywhere(self) {
        fence(Ordering::SeqCst);
        if self == Self::Symmetric {
            return;
        }
        loop {
            match membarrier(MembarrierCommand::PrivateExpedited) {
                Ok(()) => return,
                Err(Errno::NOMEM) => std::thread::yield_now(),
                // It was registered. To go on would be unsound, and nobody here may unwind.
                Err(_) => std::process::abort(),
            }
        }
    }
}

/// Of one CPU: whether it is in a window, and whether a thread has it.
#[derive(Default, Debug)]
#[repr(align(128))]
pub(super) struct Door {
    /// Odd in a window; moves at its begin and end.
    window: AtomicU64,
    taken: AtomicBool,
}

impl Door {
    /// The present counter, for the thread that has the CPU from now on.
    pub fn take(&self) -> Option<u64> {
        let taken = self.taken.swap(true, Ordering::AcqRel);
        (!taken).then(|| self.window.load(Ordering::Relaxed))
    }

    /// The CPU is nobody's; a window that was left by a panic ends.
    pub fn give(&self, window: u64) {
        self.set(window.next_multiple_of(2));
        self.taken.store(false, Ordering::Release);
    }

    /// Release, also where a window begins: who sees the next window has waited for the one before.
    #[inline(always)]
    pub fn set(&self, window: u64) {
        self.window.store(window, Ordering::Release);
    }

    /// Returns once a window that is open now has ended.
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

    /// A CPU begins a window while the generation moves, over and over, at slightly different
    /// times.
    fn crossing(barriers: Barriers) {
        const ROUNDS: u64 = 20_000;
        let (door, generation) = (&Door::default(), &Padded::default());
        let (start, looked) = (&Padded::default(), &Padded::default());
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
    struct Padded(AtomicU64);

    #[test]
    fn of_a_window_and_an_invalidation_one_sees_the_other() {
        crossing(Barriers::register());
        crossing(Barriers::Symmetric);
    }
}
