//! A shim over the atomics, so that the same code runs on hardware, under `loom` and under
//! `shuttle`.
//!
//! Loom explores every interleaving of small models, and what weak orderings allow. Shuttle samples
//! interleavings of larger models, and treats every access as sequentially consistent: it tests the
//! order of a protocol's steps, not its memory orderings.

#[cfg(not(any(loom, shuttle, feature = "observed")))]
pub use core::sync::atomic::AtomicU64;
#[cfg(not(any(loom, shuttle)))]
use core::sync::atomic::fence;
#[cfg(loom)]
use loom::sync::atomic::fence;
/// Shuttle runs all accesses in one order, so it needs no fence.
#[cfg(shuttle)]
const fn fence(_: Ordering) {}
pub use core::sync::atomic::Ordering;
#[cfg(loom)]
pub use modelled::AtomicU64;
#[cfg(all(feature = "observed", not(any(loom, shuttle))))]
pub use observed::AtomicU64;
#[cfg(shuttle)]
pub use shuttle::sync::atomic::AtomicU64;

/// A full fence between a store or exchange and a load of other memory. If each of two threads
/// changes what the other then loads, with this in between, at least one of them sees the other's
/// change, for any orderings of the accesses.
///
/// It is a fence on every machine. Sequentially consistent accesses (which cost nothing on x86 for
/// loads) could replace it only if the plain releases were sequentially consistent, too; and no
/// model could check them, as loom knows sequentially consistent fences, not accesses.
#[inline(always)]
pub fn agreed() {
    fence(Ordering::SeqCst);
}

/// An acquire fence behind relaxed loads of entries: later code sees what other threads did before
/// they stored those values.
#[inline(always)]
pub(crate) fn acquired() {
    fence(Ordering::Acquire);
}

/// Returns a number of the calling thread that no other thread has at the same time: the address of
/// a variable of its own. Threads of a model share such variables.
pub(crate) fn thread() -> Option<core::num::NonZeroUsize> {
    #[cfg(all(feature = "std", debug_assertions, any(unix, windows), not(any(loom, shuttle))))]
    {
        std::thread_local!(static OWN: u8 = const { 0 });
        OWN.try_with(|own| core::ptr::from_ref(own).addr()).ok()?.try_into().ok()
    }
    #[cfg(not(all(
        feature = "std",
        debug_assertions,
        any(unix, windows),
        not(any(loom, shuttle))
    )))]
    None
}

/// Work that one thread at a time does. No thread waits: one that does not get the turn skips the
/// work.
///
/// *Invariant*: from [`Turn::take`] to [`Turn::end`] no other thread has the turn, and the next
/// thread that has it sees all that this one did.
#[derive(Debug)]
pub(crate) struct Turn(AtomicU64);

impl Turn {
    pub fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Takes the turn; returns whether this thread has it now.
    pub fn take(&self) -> bool {
        self.0.swap(1, Ordering::AcqRel) == 0
    }

    pub fn end(&self) {
        self.0.store(0, Ordering::Release);
    }
}

/// Pauses, so that the holder of a marker can make progress. It does nothing under loom, where a
/// yield would force a step of the holder, and hide that a wait may end without success. Waits are
/// bounded, so nothing hangs.
pub fn relax() {
    #[cfg(not(any(loom, shuttle)))]
    core::hint::spin_loop();
    #[cfg(shuttle)]
    shuttle::thread::yield_now();
}

/// Loom 0.7 looks for races only with the last access to an object: a thread's own load hides the
/// one before it by another thread, so loom never tries this thread's compare-and-swap ahead of
/// that load. So each atomic has a companion for each thread. A load is followed by a relaxed
/// read-modify-write of its own thread's companion; a change is preceded by one of every companion.
/// This orders nothing for the engine, but tells loom that a load depends on each change, and a
/// change on each access. A load does not depend on a load, as their order makes no difference.
/// Loads may still see stale values.
#[cfg(loom)]
mod modelled {
    use super::Ordering;
    use core::hash::{Hash, Hasher};
    use loom::sync::atomic::AtomicU64 as Atomic;

    /// The number of threads of a model, the main one included.
    const THREADS: usize = 4;

    #[derive(Debug)]
    pub struct AtomicU64 {
        value: Atomic,
        companions: [Atomic; THREADS],
    }

    /// The last number that a thread's identity hashes: the thread's own, after that of the
    /// execution.
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

        /// This is one point to switch threads at, as an exchange finds the newest value anyway.
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

        /// The store follows a relaxed read-modify-write. Without that, loom may order an earlier
        /// exchange by another thread after the store.
        #[track_caller]
        pub fn store(&self, value: u64, order: Ordering) {
            self.change(|pte| {
                pte.fetch_add(0, Ordering::Relaxed);
                pte.store(value, order);
            });
        }

        #[track_caller]
        pub fn swap(&self, value: u64, order: Ordering) -> u64 {
            self.change(|pte| pte.swap(value, order))
        }

        #[track_caller]
        pub fn compare_exchange(
            &self,
            old: u64,
            new: u64,
            success: Ordering,
            failure: Ordering,
        ) -> Result<u64, u64> {
            self.change(|pte| pte.compare_exchange(old, new, success, failure))
        }

        #[track_caller]
        pub fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
            self.change(|pte| pte.fetch_add(value, order))
        }

        #[track_caller]
        pub fn fetch_sub(&self, value: u64, order: Ordering) -> u64 {
            self.change(|pte| pte.fetch_sub(value, order))
        }

        #[track_caller]
        pub fn fetch_max(&self, value: u64, order: Ordering) -> u64 {
            self.change(|pte| pte.fetch_max(value, order))
        }

        #[track_caller]
        pub fn fetch_or(&self, value: u64, order: Ordering) -> u64 {
            self.change(|pte| pte.fetch_or(value, order))
        }

        #[track_caller]
        pub fn fetch_and(&self, value: u64, order: Ordering) -> u64 {
            self.change(|pte| pte.fetch_and(value, order))
        }

        #[track_caller]
        pub fn with_mut<R>(&mut self, change: impl FnOnce(&mut u64) -> R) -> R {
            self.value.with_mut(change)
        }
    }
}

/// The machine's atomics, which report their stores to [`observe::writes`](crate::observe::writes).
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
            // An exchange that fails takes the cache line away from other CPUs as well.
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
