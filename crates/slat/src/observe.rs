//! Shows each store to an entry to an observer where it happens, for tools that check what the
//! engine writes, in which order, and on which thread.
//!
//! It also reports the address of each atomic that a thread changes, entry or not, for tests that
//! count which cache lines threads share.
//!
//! All of this exists only with the feature `observed`, which is for tests. Without it, a store is
//! its instruction alone.

#[cfg(feature = "observed")]
use core::{
    ptr,
    sync::atomic::{AtomicPtr, Ordering},
};

/// How a store is ordered after the earlier stores of its thread.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Order {
    /// Not at all.
    Plain,
    /// After all of them.
    Release,
}

/// A function that is called in place of each store of `raw` to the entry at the address `pte`.
///
/// It must call `store` exactly once, which stores unless the entry was found changed, and returns
/// whether it stored. An observer that holds a lock meanwhile sees the stores of all threads in the
/// order in which they happen. It must not store to entries itself.
#[cfg(feature = "observed")]
pub type Observer = fn(pte: usize, raw: u64, order: Order, store: &mut dyn FnMut() -> bool);

#[cfg(feature = "observed")]
static OBSERVER: AtomicPtr<Observer> = AtomicPtr::new(ptr::null_mut());

/// Sends stores of all threads through `observer` from now on. It does not see stores of a platform
/// that fills entries as words ([`Pte::words`](crate::Pte::words)).
#[cfg(feature = "observed")]
pub fn observe(observer: &'static Observer) {
    OBSERVER.store(ptr::from_ref(observer).cast_mut(), Ordering::Release);
}

/// Does `store`, through the observer if there is one.
#[cfg(feature = "observed")]
pub(crate) fn shown<T>(
    pte: usize,
    raw: u64,
    order: Order,
    store: impl FnOnce() -> Result<(), T>,
) -> Result<(), T> {
    let observer = OBSERVER.load(Ordering::Acquire);
    // SAFETY: null, or from the `&'static` of `observe`, which never changes.
    let Some(observer) = (unsafe { observer.as_ref() }) else { return store() };
    let (mut store, mut result) = (Some(store), Ok(()));
    observer(pte, raw, order, &mut || {
        let Some(store) = store.take() else { return false };
        result = store();
        result.is_ok()
    });
    assert!(store.is_none(), "an observer does the store");
    result
}

/// Does `store`.
#[cfg(not(feature = "observed"))]
#[inline(always)]
pub(crate) fn shown<T>(
    _pte: usize,
    _raw: u64,
    _order: Order,
    store: impl FnOnce() -> Result<(), T>,
) -> Result<(), T> {
    store()
}

/// A function that is called with the address of each atomic word of the engine that is stored to,
/// or that an exchange tries to store to, on the thread that does so.
#[cfg(feature = "observed")]
pub type Writes = fn(address: usize);

#[cfg(feature = "observed")]
static WRITES: AtomicPtr<Writes> = AtomicPtr::new(ptr::null_mut());

/// Reports the stores of all threads to the engine's atomics to `writes` from now on, except in
/// models.
#[cfg(feature = "observed")]
pub fn writes(writes: &'static Writes) {
    WRITES.store(ptr::from_ref(writes).cast_mut(), Ordering::Release);
}

/// Reports a store to the word at `address`. Users of the engine call it for their own words, so
/// that those are counted, too.
#[cfg(feature = "observed")]
pub fn written(address: usize) {
    let writes = WRITES.load(Ordering::Acquire);
    // SAFETY: null, or from the `&'static` of `writes`, which never changes.
    if let Some(writes) = unsafe { writes.as_ref() } {
        writes(address);
    }
}
