//! Changes of memslots that have begun and not ended, with what is left of each.
//!
//! # Protocol
//! A change begins: all faults see it before that returns. Then pieces of the memslot's memory are
//! worked on, in ascending order; then it ends. Each part is done by a thread whose turn it is to
//! change memslots; others may have their turn between two parts. The guest keeps what is left, and
//! not the thread that began the change.
//!
//! *Invariants*:
//! - A memslot has one unfinished change at most, and nothing else changes what the memslot is: a
//!   request for another change completes that one first. So an end finds the memslot as the
//!   beginning left it, but for what every change of the guest's touches
//!   ([`switches`](crate::switches)), which looks here. A piece that is done is not looked at
//!   again: the next points say why it stays so.
//! - Until the end the addresses of a memslot that goes, and those that it moves to, are no other
//!   memslot's.
//! - No fault maps anything in a memslot that goes, in any of the tables: a piece that was emptied
//!   stays empty. What is not emptied yet is the guest's: invalidations, forks, and threads that
//!   take the right to write away, find it in the list.
//! - Where a log begins, a page is as the invariant of [`log`](crate::log) has it, or it lies
//!   behind the position; no thread reads the log before its end. So the marks of hardware that the
//!   beginning takes from leaves are older than the log for all its readers.
//! - Where a log has ended each leaf is right by itself at every moment: no log is read, and what
//!   may be written without one a fault gives back.
//!
//! Threads that do not wait for a turn (faults, readers of logs, invalidations, threads that hold
//! writes) meet a change in three places. The list of memslots: a beginning waits for all threads
//! that were inside the tables with the list of before. The leaves: a piece completes its
//! invalidations before it is done. What is kept of pages, and the log: marks of leaves that a
//! piece takes out are moved as [`Moves`](crate::bits::Moves) says, and have arrived before a
//! thread that waits for the piece looks. `tests/loom/paused.rs` has a model of each.

use crate::memslots::Memslot;
use crate::memslots::progress::{MemslotWork, Progress};
use crate::memslots::spec::{MemslotId, MemslotSpec};
use crate::outcome::SplitReport;
use crate::ranges::pieces;
use alloc::sync::Arc;
use alloc::vec::Vec;
use slat::{Gpa, GpaRange, PageSize};

/// The work on each piece, and its result so far.
#[derive(Debug)]
pub(crate) enum Work {
    /// The piece is emptied, for good.
    Delete,
    /// The piece is emptied; the memslot comes back elsewhere.
    Move(Memslot),
    /// The piece is protected, and split to a size if asked for; with room for hardware's marks of
    /// a piece.
    LogOn { split: Option<(PageSize, SplitReport)>, scratch: Vec<u64> },
    /// The piece's blocks are put together: the bytes so far.
    LogOff { collapsed: u64 },
}

/// A change that has begun, and not ended.
#[derive(Debug)]
pub(crate) struct Unfinished {
    /// The memslot as it was asked for.
    spec: MemslotSpec,
    /// The memslot's guest addresses before the change.
    range: GpaRange,
    pub work: Work,
    /// Everything before this is done.
    next: Gpa,
    progress: Arc<Progress>,
}

impl Unfinished {
    pub fn new(spec: MemslotSpec, range: GpaRange, work: Work) -> Self {
        let progress = Arc::new(Progress::new(range.size()));
        Self { spec, range, work, next: range.start(), progress }
    }

    /// Makes the value with which a caller runs the change.
    pub fn ticket(&self) -> MemslotWork {
        MemslotWork { id: self.id(), progress: self.progress.clone() }
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

    pub const fn progress(&self) -> &Arc<Progress> {
        &self.progress
    }

    /// Whether the change is exactly the one that `spec` asks for.
    pub fn does(&self, spec: &MemslotSpec) -> bool {
        let deletes = self.spec.bytes == 0 && spec.bytes == 0;
        self.spec == *spec || self.id() == spec.id && deletes
    }

    /// Whether the change has to end before `spec` can begin: it is of the same memslot, or of one
    /// that is about to leave these addresses.
    pub fn precedes(&self, spec: &MemslotSpec) -> bool {
        let goes = matches!(self.work, Work::Delete | Work::Move(_));
        let overlaps = goes && overlap(&self.range, spec);
        self.id() == spec.id || overlaps
    }

    /// Whether another memslot is about to move to these addresses.
    pub fn takes(&self, spec: &MemslotSpec) -> bool {
        let Work::Move(slot) = &self.work else { return false };
        self.id() != spec.id && overlap(&slot.spec.range(), spec)
    }

    /// The memslot as it will be, if it moves. Such a memslot has no private memory.
    pub fn moves(&mut self) -> Option<&mut Memslot> {
        match &mut self.work {
            Work::Move(slot) => Some(slot),
            _ => None,
        }
    }

    /// The next piece, if any is left.
    pub fn piece(&self, block: PageSize) -> Option<GpaRange> {
        let rest = GpaRange::new(self.next, self.range.end().0.checked_sub(self.next.0)?).ok()?;
        pieces(rest, block).next()
    }

    /// Notes that everything before `at` is done.
    pub fn done_to(&mut self, at: Gpa) {
        self.next = at;
        self.progress.at(at.0 - self.range.start().0);
    }
}

fn overlap(range: &GpaRange, spec: &MemslotSpec) -> bool {
    let end = spec.gpa.0.saturating_add(spec.bytes);
    range.start().0 < end && spec.gpa < range.end()
}
