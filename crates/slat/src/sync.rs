//! One shim over the atomics, so that the same code runs on hardware, under `loom` and under
//! `shuttle`.
//!
//! Loom explores every interleaving of small models, and what weak orderings allow. Shuttle samples
//! the interleavings of larger ones, and takes every access as sequentially consistent: what it
//! proves of a protocol holds of its order of steps, not of its memory orderings.

#[cfg(not(any(loom, shuttle, feature = "observed")))]
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
#[cfg(all(feature = "observed", not(any(loom, shuttle))))]
pub use observed::AtomicU64;
#[cfg(shuttle)]
pub use shuttle::sync::atomic::AtomicU64;

/// Between a store or an exchange and a load of other memory, where of two threads that do so
/// crosswise at least one has to see the other's change, whatever the orderings of the accesses.
///
/// A fence on every machine: an order of the accesses themselves (sequentially consistent loads
/// cost nothing on x86) would have to include plain releases, and no model can hold it: loom knows
/// sequentially consistent fences, not accesses (ADR 32).
#[inline(always)]
pub fn agreed() {
    fence(Ordering::SeqCst);
}

/// Behind relaxed loads of slots: what was done before those values were stored is seen from here
/// on.
#[inline(always)]
pub(crate) fn acquired() {
    fence(Ordering::Acquire);
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

/// The machine's atomics, whose stores are told to [`observe::writes`](crate::observe::writes).
#[cfg(all(feature = "observed", not(any(loom, shuttle))))]
mod observed {
    use super::Ordering;
    use crate::observe::written;
    use core::sync::atomic::AtomicU64 as Atomic;

    #[derive(Debug, Default)]
    #[repr(transparent)]
    pub struct AtomicU64(Atomic);

    macro_rules! changes {
        ($($name:ident)*) => {$(
            #[inline(always)]
            pub fn $name(&self, value: u64, order: Ordering) -> u64 {
                written(self.address());
                self.0.$name(value, order)
            }
        )*};
    }

    impl AtomicU64 {
        pub const fn new(value: u64) -> Self {
            Self(Atomic::new(value))
        }

        fn address(&self) -> usize {
            core::ptr::from_ref(self).addr()
        }

        #[inline(always)]
        pub fn load(&self, order: Ordering) -> u64 {
            self.0.load(order)
        }

        #[inline(always)]
        pub fn store(&self, value: u64, order: Ordering) {
            written(self.address());
            self.0.store(value, order);
        }

        changes!(swap fetch_add fetch_sub fetch_and fetch_or fetch_max);

        #[inline(always)]
        pub fn compare_exchange(
            &self,
            old: u64,
            new: u64,
            done: Ordering,
            failed: Ordering,
        ) -> Result<u64, u64> {
            // One that fails takes the line away from others all the same.
            written(self.address());
            self.0.compare_exchange(old, new, done, failed)
        }

        #[inline(always)]
        pub fn fetch_update(
            &self,
            done: Ordering,
            failed: Ordering,
            change: impl FnMut(u64) -> Option<u64>,
        ) -> Result<u64, u64> {
            written(self.address());
            self.0.fetch_update(done, failed, change)
        }

        #[inline(always)]
        pub fn get_mut(&mut self) -> &mut u64 {
            self.0.get_mut()
        }
    }
}
