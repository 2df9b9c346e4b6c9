//! How far a change of a slot is, and what it came to.

use crate::outcome::SplitReport;
use crate::slots::spec::SlotId;
use crate::sync::{AtomicU64, Lock, Ordering};
use alloc::sync::Arc;

/// What [`Worker::set_slot`](crate::Worker::set_slot) did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SlotChange {
    /// The slot was there, just so.
    Same,
    /// There is a new slot.
    Inserted,
    /// It is somewhere else in the guest's addresses.
    Moved,
    /// It logs: what was split eagerly, if that was asked for.
    LogOn(Option<SplitReport>),
    /// It does so no more: bytes of blocks that were put together again.
    LogOff {
        /// Bytes.
        collapsed: u64,
    },
    /// There is no such slot any more.
    Deleted,
}

/// A change of a slot that has begun ([`Worker::begin_slot`](crate::Worker::begin_slot)), and is
/// worked on piece by piece ([`SlotWork::run`]).
///
/// What is left of it is kept with the guest: it borrows nothing, and while nobody runs it nobody
/// waits for it. Faults, logs of other slots, ageing, invalidations and changes of other slots go
/// on. Until the end a slot that is deleted or moves answers faults by
/// [`Retry::SlotGoing`](crate::Retry::SlotGoing), and its addresses are its own, those where it
/// moves to, too; the log of one that begins to log is not read
/// ([`LogError::Beginning`](crate::LogError::Beginning)), and has all that is written meanwhile,
/// but for what was writable before.
///
/// Dropped, it leaves the change as far as it is, to be taken up by whoever asks for the same
/// again; who asks for another change of the slot, or for addresses that it is about to leave,
/// completes it first. A guest that is dropped takes it along.
#[derive(Debug)]
#[must_use = "the slot stays as it is between two states until the change is run to its end"]
pub struct SlotWork {
    pub(crate) id: SlotId,
    pub(crate) progress: Arc<Progress>,
}

impl SlotWork {
    /// Of a change without any work on the slot's memory.
    pub(crate) fn over(id: SlotId, change: SlotChange) -> Self {
        let work = Self { id, progress: Arc::new(Progress::new(0)) };
        work.progress.end(change);
        work
    }

    /// The slot.
    pub const fn id(&self) -> SlotId {
        self.id
    }

    /// Bytes of the slot that were worked on, of [`SlotWork::bytes`].
    pub fn done(&self) -> u64 {
        self.progress.done.load(Ordering::Relaxed)
    }

    /// Bytes of the slot; 0 where the change takes no work on its memory.
    pub fn bytes(&self) -> u64 {
        self.progress.bytes
    }

    /// What the change came to, if it has come to its end, by whoever ran it.
    pub fn change(&self) -> Option<SlotChange> {
        self.progress.change()
    }
}

/// What the guest and who runs a change both see.
#[derive(Debug)]
pub(crate) struct Progress {
    bytes: u64,
    done: AtomicU64,
    over: AtomicU64,
    change: Lock<Option<SlotChange>>,
}

impl Progress {
    pub fn new(bytes: u64) -> Self {
        let zero = || AtomicU64::new(0);
        Self { bytes, done: zero(), over: zero(), change: Lock::new(None) }
    }

    pub fn at(&self, done: u64) {
        self.done.store(done, Ordering::Relaxed);
    }

    /// Who finds it over finds all that was done before.
    pub fn end(&self, change: SlotChange) {
        *self.change.lock() = Some(change);
        self.over.store(1, Ordering::Release);
    }

    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire) != 0
    }

    pub fn change(&self) -> Option<SlotChange> {
        *self.change.lock()
    }
}
