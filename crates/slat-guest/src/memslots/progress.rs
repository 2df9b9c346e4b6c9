//! How far a change of a memslot is, and its result.

use crate::memslots::spec::MemslotId;
use crate::outcome::SplitReport;
use crate::sync::{AtomicU64, Lock, Ordering};
use alloc::sync::Arc;

/// The result of a change of a memslot ([`Worker::set_memslot`](crate::Worker::set_memslot)).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MemslotChange {
    /// The memslot was there already, as asked for.
    Same,
    /// There is a new memslot.
    Inserted,
    /// The memslot is at another guest address.
    Moved,
    /// The memslot logs: with what was split eagerly, if that was asked for.
    LogOn(Option<SplitReport>),
    /// The memslot logs no more.
    LogOff {
        /// Bytes of blocks that were put together again.
        collapsed: u64,
    },
    /// The memslot is deleted.
    Deleted,
}

/// A change of a memslot that has begun ([`Worker::begin_memslot`](crate::Worker::begin_memslot)),
/// and is worked on piece by piece ([`MemslotWork::run`]).
///
/// The guest keeps what is left of it: this value borrows nothing, and no thread waits for a change
/// that is not being run. Faults, logs of other memslots, ageing, invalidations and changes of
/// other memslots go on. Until the end a memslot that is deleted or moves answers faults by
/// [`Retry::MemslotGoing`](crate::Retry::MemslotGoing), and its addresses, also those that it moves
/// to, are no other memslot's. The log of a memslot that begins to log cannot be read
/// ([`LogError::Beginning`](crate::LogError::Beginning)), and has all that is written meanwhile,
/// but for what was writable before.
///
/// Dropped, it leaves the change as far as it is. A caller that asks for the same change again
/// takes it up; one that asks for another change of the memslot, or for addresses that it is about
/// to leave, completes it first. Dropping the guest ends it.
#[derive(Debug)]
#[must_use = "the slot stays as it is between two states until the change is run to its end"]
pub struct MemslotWork {
    pub(crate) id: MemslotId,
    pub(crate) progress: Arc<Progress>,
}

impl MemslotWork {
    /// Makes the value for a change without work on the memslot's memory.
    pub(crate) fn over(id: MemslotId, change: MemslotChange) -> Self {
        let work = Self { id, progress: Arc::new(Progress::new(0)) };
        work.progress.end(change);
        work
    }

    /// The memslot.
    pub const fn id(&self) -> MemslotId {
        self.id
    }

    /// Bytes of the memslot that were worked on, of [`MemslotWork::bytes`].
    pub fn done(&self) -> u64 {
        self.progress.done.load(Ordering::Relaxed)
    }

    /// Bytes of the memslot; 0 if the change takes no work on its memory.
    pub fn bytes(&self) -> u64 {
        self.progress.bytes
    }

    /// The change's result, once it has ended, whichever thread ran it.
    pub fn change(&self) -> Option<MemslotChange> {
        self.progress.change()
    }
}

/// The progress of a change, shared by the guest and the threads that run it.
#[derive(Debug)]
pub(crate) struct Progress {
    bytes: u64,
    done: AtomicU64,
    over: AtomicU64,
    change: Lock<Option<MemslotChange>>,
}

impl Progress {
    pub fn new(bytes: u64) -> Self {
        let zero = || AtomicU64::new(0);
        Self { bytes, done: zero(), over: zero(), change: Lock::new(None) }
    }

    pub fn at(&self, done: u64) {
        self.done.store(done, Ordering::Relaxed);
    }

    /// A thread that finds the change over sees all that was done before.
    pub fn end(&self, change: MemslotChange) {
        *self.change.lock() = Some(change);
        self.over.store(1, Ordering::Release);
    }

    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire) != 0
    }

    pub fn change(&self) -> Option<MemslotChange> {
        *self.change.lock()
    }
}
