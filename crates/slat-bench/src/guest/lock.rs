//! A fair readers-writer spin lock, like a kernel's, for baselines.

use std::hint::spin_loop;
use std::sync::atomic::{AtomicU64, Ordering};

/// Number of spins before a thread yields.
const SPINS: u32 = 512;

/// A lock that serves threads in the order in which they come; adjacent readers hold it together.
#[derive(Debug, Default)]
pub struct FairLock {
    next: AtomicU64,
    serving: AtomicU64,
    readers: AtomicU64,
}

fn until(done: impl Fn() -> bool) {
    let mut spins = 0;
    while !done() {
        spins += 1;
        // There may be more threads than CPUs, while a kernel's lock holder is not preempted.
        if spins < SPINS { spin_loop() } else { std::thread::yield_now() }
    }
}

impl FairLock {
    fn ticket(&self) -> u64 {
        let ticket = self.next.fetch_add(1, Ordering::Relaxed);
        until(|| self.serving.load(Ordering::Acquire) == ticket);
        ticket
    }

    /// Does `work` together with other readers.
    pub fn shared<R>(&self, work: impl FnOnce() -> R) -> R {
        let ticket = self.ticket();
        self.readers.fetch_add(1, Ordering::Relaxed);
        self.serving.store(ticket + 1, Ordering::Release);
        let result = work();
        self.readers.fetch_sub(1, Ordering::Release);
        result
    }

    /// Does `work` with exclusive access.
    pub fn exclusive<R>(&self, work: impl FnOnce() -> R) -> R {
        let ticket = self.ticket();
        until(|| self.readers.load(Ordering::Acquire) == 0);
        let result = work();
        self.serving.store(ticket + 1, Ordering::Release);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writers_are_alone_and_no_thread_waits_for_ever() {
        let (lock, value) = (FairLock::default(), [AtomicU64::new(0), AtomicU64::new(0)]);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (lock, value) = (&lock, &value);
                scope.spawn(move || {
                    for _ in 0..1000 {
                        if thread < 2 {
                            lock.exclusive(|| {
                                for word in value {
                                    let now = word.load(Ordering::Relaxed);
                                    word.store(now + 1, Ordering::Relaxed);
                                }
                            });
                        } else {
                            let [a, b] =
                                lock.shared(|| value.each_ref().map(|w| w.load(Ordering::Relaxed)));
                            assert_eq!(a, b);
                        }
                    }
                });
            }
        });
        assert_eq!(value[0].load(Ordering::Relaxed), 2000);
    }
}
