//! One shim over the atomics, so that the same code runs on hardware, under `loom` and under `shuttle`.
//!
//! Loom explores every interleaving of small models, and what weak orderings allow. Shuttle samples the
//! interleavings of larger ones, and takes every access as sequentially consistent: what it proves of
//! a protocol holds of its order of steps, not of its memory orderings.

#[cfg(not(any(loom, shuttle)))]
pub use core::sync::atomic::AtomicU64;
pub use core::sync::atomic::Ordering;
#[cfg(loom)]
pub use modelled::AtomicU64;
#[cfg(shuttle)]
pub use shuttle::sync::atomic::AtomicU64;

/// How slots are loaded and exchanged: in one order that all agree on, which costs no more than
/// acquire and release where an exchange is a full barrier. Needed by [`agreed`] alone: models hold
/// everything else to acquire and release.
#[cfg(not(loom))]
pub(crate) const LOAD: Ordering = Ordering::SeqCst;
#[cfg(not(loom))]
pub(crate) const EXCHANGE: Ordering = Ordering::SeqCst;
#[cfg(loom)]
pub(crate) const LOAD: Ordering = Ordering::Acquire;
#[cfg(loom)]
pub(crate) const EXCHANGE: Ordering = Ordering::AcqRel;

/// Between a change of one slot and a load of another, where of two threads that do so crosswise
/// at least one has to see the other's change: what `LOAD` and `EXCHANGE` say, as a fence for
/// loom, which knows no other way.
#[inline(always)]
pub fn agreed() {
    #[cfg(loom)]
    loom::sync::atomic::fence(Ordering::SeqCst);
}

/// Lets the holder of a marker make progress. Not under loom: a yield there forces a step of the
/// holder, and hides that a wait may end in vain. Waits are bounded, so nothing hangs.
pub fn relax() {
    #[cfg(not(any(loom, shuttle)))]
    core::hint::spin_loop();
    #[cfg(shuttle)]
    shuttle::thread::yield_now();
}

/// Loom 0.7 looks for races with the last access to an object only: a thread's own load hides the
/// one before it by another thread, and its compare-and-swap is never tried ahead of that. So each
/// atomic has a companion for each thread. A load is followed by a relaxed read-modify-write of the
/// companion of its own thread, a change preceded by one of every companion: that orders nothing
/// for the engine, but tells loom that a load depends on each change, and a change on each access;
/// not a load on a load, whose order makes no difference. Loads may still see stale values.
#[cfg(loom)]
mod modelled {
    use super::Ordering;
    use core::hash::{Hash, Hasher};
    use loom::sync::atomic::AtomicU64 as Atomic;

    /// Threads of a model, the main one included.
    const THREADS: usize = 4;

    #[derive(Debug)]
    pub struct AtomicU64 {
        value: Atomic,
        companions: [Atomic; THREADS],
    }

    /// The last number in a thread's identity: its own, behind that of the execution.
    #[derive(Default)]
    struct Number(usize);

    impl Hasher for Number {
        fn write(&mut self, _: &[u8]) {}

        fn write_usize(&mut self, number: usize) {
            self.0 = number;
        }

        fn finish(&self) -> u64 {
            self.0 as u64
        }
    }

    fn current() -> usize {
        let mut number = Number::default();
        loom::thread::current().id().hash(&mut number);
        number.0 % THREADS
    }

    impl AtomicU64 {
        #[track_caller]
        pub fn new(value: u64) -> Self {
            Self { value: Atomic::new(value), companions: [(); THREADS].map(|()| Atomic::new(0)) }
        }

        /// One point to switch threads at: an exchange finds the newest value anyway.
        #[track_caller]
        fn change<R>(&self, change: impl FnOnce(&Atomic) -> R) -> R {
            self.companions[0].fetch_add(1, Ordering::Relaxed);
            loom::stop_exploring();
            for companion in &self.companions[1..] {
                companion.fetch_add(1, Ordering::Relaxed);
            }
            let result = change(&self.value);
            loom::explore();
            result
        }

        #[track_caller]
        pub fn load(&self, order: Ordering) -> u64 {
            let value = self.value.load(order);
            loom::stop_exploring();
            self.companions[current()].fetch_add(1, Ordering::Relaxed);
            loom::explore();
            value
        }

        /// Behind a relaxed read-modify-write: without, loom may take an exchange by another
        /// thread, which came before, for the later of the two.
        #[track_caller]
        pub fn store(&self, value: u64, order: Ordering) {
            self.change(|slot| {
                slot.fetch_add(0, Ordering::Relaxed);
                slot.store(value, order);
            });
        }

        #[track_caller]
        pub fn swap(&self, value: u64, order: Ordering) -> u64 {
            self.change(|slot| slot.swap(value, order))
        }

        #[track_caller]
        pub fn compare_exchange(
            &self,
            old: u64,
            new: u64,
            success: Ordering,
            failure: Ordering,
        ) -> Result<u64, u64> {
            self.change(|slot| slot.compare_exchange(old, new, success, failure))
        }

        #[track_caller]
        pub fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
            self.change(|slot| slot.fetch_add(value, order))
        }

        #[track_caller]
        pub fn fetch_sub(&self, value: u64, order: Ordering) -> u64 {
            self.change(|slot| slot.fetch_sub(value, order))
        }

        #[track_caller]
        pub fn fetch_max(&self, value: u64, order: Ordering) -> u64 {
            self.change(|slot| slot.fetch_max(value, order))
        }

        #[track_caller]
        pub fn fetch_or(&self, value: u64, order: Ordering) -> u64 {
            self.change(|slot| slot.fetch_or(value, order))
        }

        #[track_caller]
        pub fn fetch_and(&self, value: u64, order: Ordering) -> u64 {
            self.change(|slot| slot.fetch_and(value, order))
        }

        #[track_caller]
        pub fn with_mut<R>(&mut self, change: impl FnOnce(&mut u64) -> R) -> R {
            self.value.with_mut(change)
        }
    }
}
