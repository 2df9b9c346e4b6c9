//! One shim over the atomics, so that the same code runs on hardware and under `loom`.

#[cfg(not(loom))]
pub(crate) use core::sync::atomic::AtomicU64;
pub(crate) use core::sync::atomic::Ordering;
#[cfg(loom)]
pub(crate) use modelled::AtomicU64;

/// Lets the holder of a marker make progress. Not under loom: a yield there forces a step of the
/// holder, and hides that a wait may end in vain. Waits are bounded, so nothing hangs.
pub(crate) fn relax() {
    #[cfg(not(loom))]
    core::hint::spin_loop();
}

/// Loom 0.7 looks for races with the last access to an object only: a thread's own load hides the
/// one before it by another thread, and its compare-and-swap is never tried ahead of that. So each
/// access is preceded by a relaxed read-modify-write of a companion, which orders nothing, but on
/// which every access depends. Loads may still see stale values.
#[cfg(loom)]
mod modelled {
    use super::Ordering;
    use loom::sync::atomic::AtomicU64 as Atomic;

    #[derive(Debug)]
    pub(crate) struct AtomicU64 {
        value: Atomic,
        access: Atomic,
    }

    impl AtomicU64 {
        #[track_caller]
        pub(crate) fn new(value: u64) -> Self {
            Self { value: Atomic::new(value), access: Atomic::new(0) }
        }

        #[track_caller]
        fn accessed(&self) {
            self.access.fetch_add(1, Ordering::Relaxed);
        }

        /// No second point to switch threads at: an exchange finds the newest value anyway.
        #[track_caller]
        fn change<R>(&self, change: impl FnOnce(&Atomic) -> R) -> R {
            self.accessed();
            loom::stop_exploring();
            let result = change(&self.value);
            loom::explore();
            result
        }

        #[track_caller]
        pub(crate) fn load(&self, order: Ordering) -> u64 {
            self.accessed();
            self.value.load(order)
        }

        #[track_caller]
        pub(crate) fn store(&self, value: u64, order: Ordering) {
            self.change(|slot| slot.store(value, order));
        }

        #[track_caller]
        pub(crate) fn swap(&self, value: u64, order: Ordering) -> u64 {
            self.change(|slot| slot.swap(value, order))
        }

        #[track_caller]
        pub(crate) fn compare_exchange(
            &self,
            old: u64,
            new: u64,
            success: Ordering,
            failure: Ordering,
        ) -> Result<u64, u64> {
            self.change(|slot| slot.compare_exchange(old, new, success, failure))
        }

        #[track_caller]
        pub(crate) fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
            self.change(|slot| slot.fetch_add(value, order))
        }

        #[track_caller]
        pub(crate) fn with_mut<R>(&mut self, change: impl FnOnce(&mut u64) -> R) -> R {
            self.value.with_mut(change)
        }
    }
}
