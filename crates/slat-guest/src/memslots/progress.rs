//! The progress of a change of a memslot, and its result.

use crate::identity::Identity;
use crate::memslots::spec::MemslotId;
use crate::outcome::SplitReport;
use crate::sync::{AtomicU64, Lock, Ordering};
use alloc::sync::Arc;

/// The result of a change of a memslot ([`Worker::set_memslot`](crate::Worker::set_memslot)).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MemslotChange {
    /// The memslot was already as asked for.
    Same,
    /// There is a new memslot.
    Inserted,
    /// The memslot is at another guest address.
    Moved,
    /// The memslot logs. The report is of eager splits, if they were asked for.
    LogOn(Option<SplitReport>),
    /// The memslot no longer logs.
    LogOff {
        /// The bytes of blocks that were collapsed from tables. A table stays a table if its pages
        /// cannot be a block, or if another thread held an entry of it, as a fault does while it
        /// asks the backing: [`Worker::collapse`](crate::Worker::collapse) collapses it later.
        collapsed: u64,
    },
    /// The memslot is deleted.
    Deleted,
}

/// A change of a memslot that has begun ([`Worker::begin_memslot`](crate::Worker::begin_memslot)),
/// and is done piece by piece ([`MemslotWork::run`]).
///
/// The guest keeps the remaining work: this value borrows nothing, and no thread waits for a change
/// while no thread runs it. Faults, logs of other memslots, ageing, invalidations and changes of
/// other memslots go on. Until the change ends:
/// - A memslot that is being deleted or moved answers faults by
///   [`Retry::MemslotDeleting`](crate::Retry::MemslotDeleting). No other memslot can have its
///   addresses, nor those that it moves to.
/// - The log of a memslot that begins to log cannot be read
///   ([`LogError::Beginning`](crate::LogError::Beginning)). It has all writes of that time, except
///   those to pages that were writable before.
///
/// If the value is dropped, the change stays unfinished. A caller that asks for the same change
/// again continues it. A caller that asks for another change of the memslot, or for addresses or
/// private memory that the memslot is about to leave, completes it first. Dropping the guest ends
/// it.
#[derive(Debug)]
#[must_use = "the memslot stays as it is between two states until the change is run to its end"]
pub struct MemslotWork {
    pub(crate) guest: Identity,
    pub(crate) id: MemslotId,
    pub(crate) progress: Arc<Progress>,
}

impl MemslotWork {
    /// Makes the value for a change that takes no work on the memslot's memory.
    pub(crate) fn over(guest: &Identity, id: MemslotId, change: MemslotChange) -> Self {
        let progress = Arc::new(Progress::new(0));
        let work = Self { guest: guest.clone(), id, progress };
        work.progress.end(change);
        work
    }

    /// Returns the memslot's name.
    pub const fn id(&self) -> MemslotId {
        self.id
    }

    /// Returns the bytes of the memslot that are done, out of [`MemslotWork::bytes`].
    pub fn done(&self) -> u64 {
        self.progress.done.load(Ordering::Relaxed)
    }

    /// Returns the size of the memslot in bytes; 0 if the change takes no work on its memory.
    pub fn bytes(&self) -> u64 {
        self.progress.bytes
    }

    /// Returns the change's result, once any thread has ended it.
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

    /// Ends the change. A thread that finds it over sees all that was done before.
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
