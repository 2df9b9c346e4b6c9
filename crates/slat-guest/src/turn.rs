//! Work for which threads take turns, and during which they call the VMM.

use crate::host::Host;
use crate::sync::Lock;
use core::num::NonZeroUsize;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{AtomicUsize, Ordering};

/// A lock that its holder keeps while it calls the VMM: events, hooks, [`Host::between_pieces`]. A
/// VMM that asks for the same work from there would wait for itself. In debug builds such a call
/// panics, if the platform tells threads apart ([`slat::Platform::thread`]).
#[derive(Debug)]
pub(crate) struct Turn<T> {
    lock: Lock<T>,
    /// The number of the thread that has the turn; 0 if it has none, or no thread has the turn.
    thread: AtomicUsize,
}

impl<T> Turn<T> {
    pub fn new(value: T) -> Self {
        Self { lock: Lock::new(value), thread: AtomicUsize::new(0) }
    }

    /// Waits until no other thread has the turn, and takes it until the result is dropped.
    #[track_caller]
    pub fn take<H: Host>(&self, host: &H) -> impl DerefMut<Target = T> + '_ {
        let this = if cfg!(debug_assertions) && !cfg!(loom) { host.thread() } else { None };
        if let Some(this) = this {
            assert!(
                self.thread.load(Ordering::Relaxed) != this.get(),
                "this thread would wait for itself: an event, a hook or `Host::between_pieces` \
                 asks for the work that calls it; do that work after the call has returned"
            );
        }
        let held = self.lock.lock_patiently(|| host.wait());
        if let Some(this) = this {
            self.thread.store(this.get(), Ordering::Relaxed);
        }
        TurnGuard { held, this, turn: &self.thread }
    }
}

struct TurnGuard<'t, G> {
    held: G,
    this: Option<NonZeroUsize>,
    turn: &'t AtomicUsize,
}

impl<G: Deref> Deref for TurnGuard<'_, G> {
    type Target = G::Target;

    fn deref(&self) -> &Self::Target {
        &self.held
    }
}

impl<G: DerefMut> DerefMut for TurnGuard<'_, G> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.held
    }
}

impl<G> Drop for TurnGuard<'_, G> {
    /// While the lock is still held.
    fn drop(&mut self) {
        if self.this.is_some() {
            self.turn.store(0, Ordering::Relaxed);
        }
    }
}
