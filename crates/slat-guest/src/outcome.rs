//! The outcomes of faults, and of eager splits.

use crate::private::Denial;
use crate::waits::AsyncFault;
use slat::{ChangeError, Gpa, MapError, OutOfFrames, PageSize, SplitError};

/// The outcome of a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// A leaf of that size was mapped.
    Mapped(PageSize),
    /// A leaf of that size became writable.
    MadeWritable(PageSize),
    /// A leaf of that size became executable. In a table whose pages were not executable, so did
    /// the other pages that the guest may execute.
    MadeExecutable(PageSize),
    /// A leaf became accessed.
    MadeAccessed,
    /// A block was split along the path to the page, and the page has the right that was asked for.
    Split {
        /// The size of the block.
        from: PageSize,
    },
    /// A block was unmapped and the page mapped: [`ExecuteHuge::Zap`](crate::ExecuteHuge::Zap).
    #[cfg(feature = "baselines")]
    Zapped {
        /// The size of the block.
        from: PageSize,
    },
    /// Nothing was left to do: another vCPU had done it.
    Spurious,
    /// Another thread was in the way. Run the guest; it faults again if it still needs to.
    Retry(Retry),
    /// There is no memory for this access: it is to a device's register, or a write to a read-only
    /// memslot. Emulate it, or inject a fault into the guest.
    Mmio,
    /// The vCPU's dirty ring is full. Have the ring harvested and reset, then run the guest.
    RingFull,
    /// The fault cannot be resolved. Inject a fault into the guest, or end the guest.
    Refused(Refusal),
}

/// The reason why a fault has to be retried.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Retry {
    /// Another thread was changing the entry.
    Contended,
    /// The host is invalidating the memory.
    Invalidated,
    /// The backing is fetching the page. The vCPU sleeps, or runs something else, until
    /// [`Vcpu::ready`](crate::Vcpu::ready) returns the arrival, or just tries again. `None`: the
    /// vCPU already has 16 waits, the maximum, including those whose page has arrived and that it
    /// has not ended.
    Absent(Option<AsyncFault>),
    /// The memslot is being deleted or moved.
    MemslotDeleting,
    /// The page is being converted between shared and private.
    Converting,
}

/// The reason why a fault cannot be resolved.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// The backing has no page there, or not for this access.
    NoPage,
    /// The machine does not permit the private page to be mapped.
    Private(Denial),
    /// The guest may not execute the page.
    NotExecutable,
    /// The platform has no table pages.
    OutOfFrames,
    /// The backing returned memory that the tables cannot map.
    Page(MapError),
    /// The tables refuse to change the leaf.
    Change(ChangeError),
    /// The tables refuse to split the leaf.
    Split(SplitError),
}

impl From<ChangeError> for Outcome {
    fn from(reason: ChangeError) -> Self {
        match reason {
            ChangeError::Contended => Self::Retry(Retry::Contended),
            reason => Self::Refused(Refusal::Change(reason)),
        }
    }
}

impl From<SplitError> for Outcome {
    fn from(reason: SplitError) -> Self {
        match reason {
            SplitError::Contended => Self::Retry(Retry::Contended),
            reason => Self::Refused(Refusal::Split(reason)),
        }
    }
}

/// The result of one run of an [`EagerSplit`](crate::EagerSplit).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SplitReport {
    /// The bytes of blocks that were split.
    pub split: u64,
    /// The bytes that the run has finished with: leaves there that it did not split were small
    /// enough.
    pub done: u64,
    /// Why the run ended before the end of the range; `None` if it did not.
    pub stopped: Option<SplitStop>,
}

/// Why an eager split ended early.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SplitStop {
    /// The caller asked for it. Another run continues from there.
    Asked,
    /// The platform has no more table pages. Another run continues from this address.
    OutOfFrames {
        /// The first address that is not split.
        at: Gpa,
        /// The platform's error.
        error: OutOfFrames,
    },
    /// Another thread held an entry for too long. Another run continues from this address.
    Contended {
        /// The first address that is not split.
        at: Gpa,
    },
    /// The range is beyond the guest's addresses, or the format has no such leaf size.
    Refused(SplitError),
}

impl SplitStop {
    /// Returns the address from which another run continues.
    pub(crate) const fn at(&self) -> Option<Gpa> {
        match self {
            Self::OutOfFrames { at, .. } | Self::Contended { at } => Some(*at),
            Self::Asked | Self::Refused(_) => None,
        }
    }
}
