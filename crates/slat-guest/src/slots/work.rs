//! Changes of slots that have begun and not ended: what is left of each.
//!
//! # Protocol
//! A change begins: all faults see it before that returns. Then pieces of the slot's memory are
//! worked on, in ascending order; then it ends. Each part is done by a thread whose turn it is to
//! change slots, which others may have between two of them. What is left is kept here, with the
//! guest, and not by who began it.
//!
//! *Invariants*:
//! - A slot has one unfinished change at most, and nothing else changes what the slot is: who asks
//!   for more completes that one first. So an end finds the slot as the beginning left it, but for
//!   what every change of the guest's touches ([`switches`](crate::switches)), which looks here.
//!   A piece that is done is not looked at again: what is in it stays as the next points have it.
//! - Until the end the addresses of a slot that goes, and those that it comes to, are no other
//!   slot's.
//! - No fault maps anything in a slot that goes, in whichever tables: a piece that was emptied
//!   stays empty. What is not emptied yet is the guest's: invalidations, forks, and who takes
//!   writes away, find it in the list.
//! - Where a log begins, a page is as the invariant of [`log`](crate::log) has it, or it lies
//!   behind the position; nobody reads the log before its end. So hardware's marks that the
//!   beginning takes from leaves are of before for all who read it.
//! - Where a log has ended each leaf is right by itself at every moment: no log is read, and what
//!   may be written without one a fault gives back.
//!
//! Who does not wait for his turn (faults, readers of logs, invalidations, whoever holds writes)
//! meets a change in three places. The list of slots: a beginning waits for all who were inside the
//! tables with the list of before. The leaves: a piece completes its invalidations before it is
//! done. What is kept of pages, and the log: marks of leaves that a piece takes out are on their
//! way, as [`Moves`](crate::bits::Moves) says, until they are there, and there before who waits for
//! the piece looks. `tests/loom/paused.rs` has a model of each.

use crate::outcome::SplitReport;
use crate::ranges::pieces;
use crate::slots::Slot;
use crate::slots::progress::{Progress, SlotWork};
use crate::slots::spec::{SlotId, SlotSpec};
use alloc::sync::Arc;
use alloc::vec::Vec;
use slat::{Gpa, GpaRange, PageSize};

/// What is done with each piece, and what was gathered so far.
#[derive(Debug)]
pub(crate) enum Work {
    /// Emptied, for good.
    Delete,
    /// Emptied; the slot comes back elsewhere.
    Move(Slot),
    /// Protected, and split to a size if asked for; room for hardware's marks of a piece.
    LogOn { split: Option<(PageSize, SplitReport)>, scratch: Vec<u64> },
    /// Put together: so many bytes.
    LogOff { collapsed: u64 },
}

/// A change that has begun, and not ended.
#[derive(Debug)]
pub(crate) struct Unfinished {
    /// As it was asked for.
    spec: SlotSpec,
    /// The slot's pages as they were.
    range: GpaRange,
    pub work: Work,
    /// Up to where it is done.
    next: Gpa,
    progress: Arc<Progress>,
}

impl Unfinished {
    pub fn new(spec: SlotSpec, range: GpaRange, work: Work) -> Self {
        let progress = Arc::new(Progress::new(range.size()));
        Self { spec, range, work, next: range.start(), progress }
    }

    /// For who runs it.
    pub fn ticket(&self) -> SlotWork {
        SlotWork { id: self.id(), progress: self.progress.clone() }
    }

    pub fn is_of(&self, work: &SlotWork) -> bool {
        Arc::ptr_eq(&self.progress, &work.progress)
    }

    pub const fn id(&self) -> SlotId {
        self.spec.id
    }

    pub const fn spec(&self) -> &SlotSpec {
        &self.spec
    }

    pub const fn progress(&self) -> &Arc<Progress> {
        &self.progress
    }

    /// Whether it does just what `spec` asks for.
    pub fn does(&self, spec: &SlotSpec) -> bool {
        let deletes = self.spec.bytes == 0 && spec.bytes == 0;
        self.spec == *spec || self.id() == spec.id && deletes
    }

    /// Whether it has to end before `spec` can be: it is of the same slot, or of one that is about
    /// to leave these addresses.
    pub fn precedes(&self, spec: &SlotSpec) -> bool {
        let goes = matches!(self.work, Work::Delete | Work::Move(_));
        let overlaps = goes && overlap(&self.range, spec);
        self.id() == spec.id || overlaps
    }

    /// Whether another slot is about to come to these addresses.
    pub fn takes(&self, spec: &SlotSpec) -> bool {
        let Work::Move(slot) = &self.work else { return false };
        self.id() != spec.id && overlap(&slot.spec.range(), spec)
    }

    /// The slot as it will be, if it moves. Such a slot has no private memory.
    pub fn moves(&mut self) -> Option<&mut Slot> {
        match &mut self.work {
            Work::Move(slot) => Some(slot),
            _ => None,
        }
    }

    /// What is next, if anything is left.
    pub fn piece(&self, block: PageSize) -> Option<GpaRange> {
        let rest = GpaRange::new(self.next, self.range.end().0.checked_sub(self.next.0)?).ok()?;
        pieces(rest, block).next()
    }

    /// All before `at` is done.
    pub fn done_to(&mut self, at: Gpa) {
        self.next = at;
        self.progress.at(at.0 - self.range.start().0);
    }
}

fn overlap(range: &GpaRange, spec: &SlotSpec) -> bool {
    let end = spec.gpa.0.saturating_add(spec.bytes);
    range.start().0 < end && spec.gpa < range.end()
}
