//! One shim over the atomics, so that the same code runs on hardware, under `loom` and under
//! `shuttle`.
//!
//! Loom explores every interleaving of small models, and what weak orderings allow. Shuttle samples
//! the interleavings of larger ones, and takes every access as sequentially consistent: what it
//! proves of a protocol holds of its order of steps, not of its memory orderings.

#[cfg(not(any(loom, shuttle)))]
pub use core::sync::atomic::AtomicU64;
#[cfg(not(any(loom, shuttle)))]
use core::sync::atomic::fence;
#[cfg(loom)]
use loom::sync::atomic::fence;
/// Shuttle's accesses are in one order anyway.
#[cfg(shuttle)]
const fn fence(_: Ordering) {}
pub use core::sync::atomic::Ordering;
#[cfg(loom)]
pub use modelled::AtomicU64;
#[cfg(shuttle)]
pub use shuttle::sync::atomic::AtomicU64;

/// Whether slots are loaded and exchanged in one order that all threads agree on: where that costs
/// no more than acquire and release (x86, arm64). Elsewhere (Power, RISC-V) it would be a full
/// fence before each load, so [`agreed`] is the fence, where one is needed. Loom knows fences only,
/// so its models hold what other machines run; `slat_fences` has the same compiled anywhere.
const ONE_ORDER: bool = cfg!(all(
    any(target_arch = "x86", target_arch = "x86_64", target_arch = "aarch64"),
    not(any(loom, slat_fences)),
));

/// How slots are loaded and exchanged. Needed to be more than acquire and release by [`agreed`]
/// alone.
pub(crate) const LOAD: Ordering = if ONE_ORDER { Ordering::SeqCst } else { Ordering::Acquire };
pub(crate) const EXCHANGE: Ordering = if ONE_ORDER { Ordering::SeqCst } else { Ordering::AcqRel };

// Weaker orderings would compile to the same instructions on the machines that tests run on.
const _: () = assert!(
    !ONE_ORDER || matches!((LOAD, EXCHANGE), (Ordering::SeqCst, Ordering::SeqCst)),
    "`agreed` is no fence here: loads and exchanges of slots must have one order",
);
const _: () = assert!(
    matches!(LOAD, Ordering::Acquire | Ordering::SeqCst)
        && matches!(EXCHANGE, Ordering::AcqRel | Ordering::SeqCst),
    "a table that a slot links must be seen as it was published",
);

/// Between a change of one slot and a load of another, where of two threads that do so crosswise
/// at least one has to see the other's change: a fence, unless `LOAD` and `EXCHANGE` say as much.
#[inline(always)]
pub fn agreed() {
    if !ONE_ORDER {
        fence(Ordering::SeqCst);
    }
}

/// Between a store and a load of two threads that do so crosswise, in any orders: at least one
/// sees the other's store.
#[inline(always)]
pub(crate) fn full_fence() {
    fence(Ordering::SeqCst);
}

/// Work that one thread at a time does. Nobody waits: who does not get the turn does without.
///
/// *Invariant*: from [`Turn::take`] to [`Turn::end`] no other thread has it, and the next sees all
/// that this one did.
#[derive(Debug)]
pub(crate) struct Turn(AtomicU64);

impl Turn {
    pub fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Whether this thread has the turn now.
    pub fn take(&self) -> bool {
        self.0.swap(1, Ordering::AcqRel) == 0
    }

    pub fn end(&self) {
        self.0.store(0, Ordering::Release);
    }
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
