//! Each store to a slot, shown to an observer where it happens: for tools that judge what the
//! engine writes, in which order, and on which thread.
//!
//! Only with the feature `observed`, which is for tests: without it a store is its instruction
//! alone.

#[cfg(feature = "observed")]
use core::{ptr, sync::atomic::AtomicPtr};

/// How a store is ordered behind what its thread did before.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Order {
    /// Not at all.
    Plain,
    /// Behind all of it.
    Release,
}

/// Is called in place of each store of `raw` to the slot at the address `slot`.
///
/// It calls `store` exactly once, which stores, unless the slot was found changed; the answer says
/// whether it stored. Who holds a lock meanwhile learns the stores in the order in which they
/// happen, of all threads. It must not store to slots itself.
#[cfg(feature = "observed")]
pub type Observer = fn(slot: usize, raw: u64, order: Order, store: &mut dyn FnMut() -> bool);

#[cfg(feature = "observed")]
static OBSERVER: AtomicPtr<Observer> = AtomicPtr::new(ptr::null_mut());

/// From now on, stores of all threads go through `observer`. Stores of a platform that fills slots
/// as words ([`Slot::words`](crate::Slot::words)) are not seen.
#[cfg(feature = "observed")]
pub fn observe(observer: &'static Observer) {
    OBSERVER.store(ptr::from_ref(observer).cast_mut(), super::sync::Ordering::Release);
}

/// Does `store`, before the eyes of the observer if there is one.
#[cfg(feature = "observed")]
pub(crate) fn shown<T>(
    slot: *const crate::Slot,
    raw: u64,
    order: Order,
    store: impl FnOnce() -> Result<(), T>,
) -> Result<(), T> {
    let observer = OBSERVER.load(super::sync::Ordering::Acquire);
    // SAFETY: null, or from the `&'static` of `observe`, which nobody changes.
    let Some(observer) = (unsafe { observer.as_ref() }) else { return store() };
    let (mut store, mut result) = (Some(store), Ok(()));
    observer(slot.addr(), raw, order, &mut || {
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
    _slot: *const crate::Slot,
    _raw: u64,
    _order: Order,
    store: impl FnOnce() -> Result<(), T>,
) -> Result<(), T> {
    store()
}
