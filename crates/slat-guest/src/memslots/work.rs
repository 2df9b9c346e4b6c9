//! Changes of memslots that have begun and not ended, and the remaining work of each.
//!
//! # Protocol
//! 1. A change begins: when the call that begins it returns, all faults see it.
//! 2. Threads work on pieces of the memslot's memory, in ascending order.
//! 3. The change ends.
//!
//! A thread holds the lock for changes of memslots during each part; other threads may have it
//! between two parts. The guest keeps the remaining work, not the thread that began the change.
//!
//! *Invariants*:
//! - A memslot has at most one unfinished change, and no other change alters the memslot: a request
//!   for another change completes that one first. So an end finds the memslot as the beginning left
//!   it, except for changes of the whole guest ([`switches`](crate::switches)), which take
//!   unfinished changes into account. A piece that is done is not revisited: the next points say
//!   why it stays as it is.
//! - Until the change ends, no other memslot can have the addresses or the private memory of a
//!   memslot that is going, nor the addresses that it moves to.
//! - No fault maps anything in a memslot that is going, in any of the tables, so a piece that was
//!   emptied stays empty. The guest can still access the rest: invalidations, forks, and threads
//!   that take away the right to write find the memslot in the list.
//! - While a log begins, each page either satisfies the invariant of [`log`](crate::log) or lies
//!   behind the position of the change. No thread reads the log before the end. So the hardware
//!   marks that the beginning takes from leaves are older than the log for all its readers.
//! - After a log has ended, each leaf is correct at every moment: no log is read, and a fault gives
//!   back a right to write that is missing.
//!
//! Threads that take no turn (faults, readers of logs, invalidations, threads that hold writes)
//! meet a change in three places:
//! 1. The list of memslots: a beginning waits for all threads that were inside the tables with the
//!    previous list.
//! 2. The leaves: a piece completes its invalidations before it counts as done.
//! 3. The bits kept for pages, and the log: marks of leaves that a piece removes are moved as
//!    [`Moves`](crate::bits::Moves) says, and have arrived before a thread that waits for the piece
//!    looks.
//!
//! `tests/loom/paused.rs` has a model of each.

use crate::backing::HvaRange;
use crate::identity::Identity;
use crate::memslots::Memslot;
use crate::memslots::progress::{MemslotWork, Progress};
use crate::memslots::spec::{MemslotId, MemslotSpec};
use crate::outcome::SplitReport;
use crate::private::PrivateRange;
use crate::ranges::pieces;
use alloc::sync::Arc;
use alloc::vec::Vec;
use slat::{Gpa, GpaRange, PageSize};

/// The work on each piece, and its result so far.
#[derive(Debug)]
pub(crate) enum Work {
    /// The piece is emptied, for good.
    Delete,
    /// The piece is emptied; the memslot comes back at other addresses.
    Move(Memslot),
    /// The piece is write-protected, and its blocks are split if a size is given. `scratch` has
    /// room for hardware's marks of a piece.
    LogOn { split: Option<(PageSize, SplitReport)>, scratch: Vec<u64> },
    /// Tables of the piece are collapsed into blocks; the field has the bytes so far.
    LogOff { collapsed: u64 },
}

/// A change that has begun and not ended.
#[derive(Debug)]
pub(crate) struct Unfinished {
    /// The memslot as it was asked for.
    spec: MemslotSpec,
    /// The memslot's guest addresses before the change.
    range: GpaRange,
    /// The memslot's host memory.
    host: HvaRange,
    /// The memslot's private memory.
    private: Option<PrivateRange>,
    pub work: Work,
    /// Everything before this is done.
    next: Gpa,
    progress: Arc<Progress>,
}

impl Unfinished {
    pub fn new(spec: MemslotSpec, before: &MemslotSpec, work: Work) -> Self {
        let (range, private) = (before.range(), before.private_range());
        let progress = Arc::new(Progress::new(range.size()));
        let host = before.host_range();
        Self { spec, range, host, private, work, next: range.start(), progress }
    }

    /// Makes the value by which a caller runs the change.
    pub fn ticket(&self, guest: &Identity) -> MemslotWork {
        MemslotWork { guest: guest.clone(), id: self.id(), progress: self.progress.clone() }
    }

    pub fn is_of(&self, work: &MemslotWork) -> bool {
        Arc::ptr_eq(&self.progress, &work.progress)
    }

    pub const fn id(&self) -> MemslotId {
        self.spec.id
    }

    pub const fn spec(&self) -> &MemslotSpec {
        &self.spec
    }

    pub const fn host(&self) -> HvaRange {
        self.host
    }

    pub const fn progress(&self) -> &Arc<Progress> {
        &self.progress
    }

    /// Returns whether the change is exactly the one that `spec` asks for.
    pub fn does(&self, spec: &MemslotSpec) -> bool {
        let deletes = self.spec.bytes == 0 && spec.bytes == 0;
        self.spec == *spec || self.id() == spec.id && deletes
    }

    /// Returns whether the change has to end before `spec` can begin: it is of the same memslot, or
    /// of one that is about to leave these addresses, or this private memory.
    pub fn precedes(&self, spec: &MemslotSpec) -> bool {
        let goes = matches!(self.work, Work::Delete | Work::Move(_));
        let private = self.private.zip(spec.private_range());
        let overlaps = overlap(&self.range, spec)
            || private.is_some_and(|(its, wanted)| its.overlaps(&wanted));
        self.id() == spec.id || goes && overlaps
    }

    /// Returns whether another memslot is about to move to these addresses.
    pub fn takes(&self, spec: &MemslotSpec) -> bool {
        let Work::Move(memslot) = &self.work else { return false };
        self.id() != spec.id && overlap(&memslot.spec.range(), spec)
    }

    /// Returns the memslot as it will be, if it moves. Such a memslot has no private memory.
    pub fn moves(&mut self) -> Option<&mut Memslot> {
        match &mut self.work {
            Work::Move(memslot) => Some(memslot),
            _ => None,
        }
    }

    /// Returns the next piece, if any is left.
    pub fn piece(&self, block: PageSize) -> Option<GpaRange> {
        let rest = GpaRange::new(self.next, self.range.end().0.checked_sub(self.next.0)?).ok()?;
        pieces(rest, block).next()
    }

    /// Records that everything before `at` is done.
    pub fn done_to(&mut self, at: Gpa) {
        self.next = at;
        self.progress.at(at.0 - self.range.start().0);
    }
}

/// Returns whether `spec` asks for some of `range`. A deletion asks for no address, as in Linux.
fn overlap(range: &GpaRange, spec: &MemslotSpec) -> bool {
    let end = spec.gpa.0.saturating_add(spec.bytes);
    spec.bytes != 0 && range.start().0 < end && spec.gpa < range.end()
}
