//! A change of a memslot that has begun and not ended, and its remaining work.
//!
//! # Protocol
//! 1. A change begins: all faults see it.
//! 2. The thread works on pieces of the memslot's memory, in ascending order.
//! 3. The change ends.
//!
//! The thread holds the lock for changes of memslots meanwhile. The guest keeps the remaining work:
//! if the VMM panics between pieces, the next change completes it first.
//!
//! *Invariants*:
//! - No other change alters memslots before the end. So an end finds the memslot as the beginning
//!   left it. A piece that is done is not revisited: the next points say why it stays as it is.
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
//! `tests/loom/pieces.rs` has a model of each.

use crate::backing::HvaRange;
use crate::memslots::Memslot;
use crate::memslots::spec::MemslotSpec;
use crate::outcome::SplitReport;
use crate::ranges::pieces;
use crate::sync::AtomicU64;
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
    /// room for hardware's marks of a piece; the end sets `readable`.
    LogOn { split: Option<(PageSize, SplitReport)>, scratch: Vec<u64>, readable: Arc<AtomicU64> },
    /// Tables of the piece are collapsed into blocks; the field has the bytes so far.
    LogOff { collapsed: u64 },
}

/// A change that has begun and not ended.
#[derive(Debug)]
pub(crate) struct UnfinishedChange {
    /// The memslot as it was asked for.
    pub spec: MemslotSpec,
    /// The memslot's guest addresses before the change.
    range: GpaRange,
    /// The memslot's host memory.
    pub host: HvaRange,
    pub work: Work,
    /// Everything before this is done.
    pub next: Gpa,
}

impl UnfinishedChange {
    pub fn new(spec: MemslotSpec, before: &MemslotSpec, work: Work) -> Self {
        let range = before.range();
        Self { spec, range, host: before.host_range(), work, next: range.start() }
    }

    /// Returns whether the change is exactly the one that `spec` asks for.
    pub fn does(&self, spec: &MemslotSpec) -> bool {
        let deletes = self.spec.bytes == 0 && spec.bytes == 0;
        self.spec == *spec || self.spec.id == spec.id && deletes
    }

    /// Returns the next piece, if any is left.
    pub fn piece(&self, block: PageSize) -> Option<GpaRange> {
        let rest = GpaRange::new(self.next, self.range.end().0.checked_sub(self.next.0)?).ok()?;
        pieces(rest, block).next()
    }
}
