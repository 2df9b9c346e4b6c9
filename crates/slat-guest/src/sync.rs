//! Additions to the engine's own shim: counters, and a lock for rare operations.

pub(crate) use slat::sync::{AtomicU64, Ordering, agreed};

/// Reports a store, to a word that no model has, to tests that count shared cache lines.
#[inline(always)]
pub(crate) fn written(_word: &core::sync::atomic::AtomicU64) {
    #[cfg(all(feature = "observed", not(loom)))]
    slat::observe::written(core::ptr::from_ref(_word).addr());
}

/// A counter that orders no other memory accesses. It is part of no protocol: models leave it out.
#[derive(Debug, Default)]
pub(crate) struct AtomicCount(core::sync::atomic::AtomicU64);

impl AtomicCount {
    #[inline]
    pub fn add(&self, n: u64) {
        if n != 0 {
            written(&self.0);
            self.0.fetch_add(n, Ordering::Relaxed);
        }
    }

    #[inline]
    pub fn raise(&self, to: u64) {
        if to > self.get() {
            written(&self.0);
            self.0.fetch_max(to, Ordering::Relaxed);
        }
    }

    #[inline]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A lock for changes of memslots, recovery and resets of rings, for reports to devices, and for
/// lists that seldom change. Clears and ageing never take one. A fault takes one only if it reports
/// a leaf to devices ([`Config::devices`](crate::Config::devices)), copies a page or waits for one.
#[derive(Debug)]
pub(crate) struct Lock<T>(Mutex<T>);

#[cfg(loom)]
use loom::sync::Mutex;
#[cfg(not(loom))]
use spin::Mutex;

impl<T> Lock<T> {
    pub fn new(value: T) -> Self {
        Self(Mutex::new(value))
    }

    #[cfg(not(loom))]
    pub fn lock(&self) -> impl core::ops::DerefMut<Target = T> + '_ {
        self.0.lock()
    }

    /// As `lock`, if another thread may hold it for long: calls `wait` meanwhile.
    #[cfg(not(loom))]
    pub fn lock_patiently(&self, wait: impl Fn()) -> impl core::ops::DerefMut<Target = T> + '_ {
        loop {
            if let Some(held) = self.0.try_lock() {
                return held;
            }
            wait();
        }
    }

    #[cfg(loom)]
    pub fn lock_patiently(&self, _wait: impl Fn()) -> impl core::ops::DerefMut<Target = T> + '_ {
        self.0.lock().expect("a model does not panic under the lock")
    }

    #[cfg(loom)]
    pub fn lock(&self) -> impl core::ops::DerefMut<Target = T> + '_ {
        self.0.lock().expect("a model does not panic under the lock")
    }
}
