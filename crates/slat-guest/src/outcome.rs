//! The outcomes of faults, and of splits ahead of faults.

use crate::private::{Denied, MemoryKind};
use crate::waits::Arrival;
use core::fmt;
use slat::{ChangeError, Gpa, MapError, OutOfFrames, PageSize, SplitError};

/// The outcome of a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// A leaf of that size was mapped.
    Mapped(PageSize),
    /// A leaf of that size became writable.
    MadeWritable(PageSize),
    /// A leaf of that size became executable; in a table whose pages were not executable, also
    /// those around it that may be.
    MadeExecutable(PageSize),
    /// A leaf became accessed.
    MadeAccessed,
    /// A block was split along the path to the page, which has the right that was asked for.
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
    /// Another thread was in the way: run the guest; it faults again if need be.
    Retry(Retry),
    /// There is no memory for this access: it is to a device's register, or a write to a read-only
    /// memslot. Emulate it, or raise the guest's error.
    Mmio,
    /// The vCPU's dirty ring is full: have the ring harvested and reset, then run the guest.
    RingFull,
    /// The guest wants the page to be of this kind, which it is not: convert it
    /// ([`Worker::convert`](crate::Worker::convert)) and run the guest, or raise the guest's error
    /// (Linux: `KVM_EXIT_MEMORY_FAULT`).
    Convert {
        /// The kind that the guest wants.
        to: MemoryKind,
    },
    /// The access cannot be answered: raise the guest's error, or end the guest.
    Refused(Refused),
}

/// What was in the way of a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Retry {
    /// Another thread held the entry.
    Contended,
    /// The host is taking back the memory.
    Invalidated,
    /// The backing is fetching the page. The vCPU sleeps until it is there
    /// ([`Vcpu::sleep_until`](crate::Vcpu::sleep_until)), runs something else until it is told
    /// ([`Vcpu::ready`](crate::Vcpu::ready)), or just tries again. `None`: the vCPU waits for 16
    /// pages already, which is the most, including those that it was told of.
    NotYet(Option<Arrival>),
    /// The memslot is being deleted or moved.
    MemslotGoing,
    /// The page is being converted between shared and private.
    Converting,
}

/// Why a fault cannot be answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refused {
    /// The backing has no page there, or not for this access.
    NoPage,
    /// The machine does not have the private page mapped.
    Private(Denied),
    /// The guest may not execute the page.
    NotExecutable,
    /// The platform has no table pages.
    OutOfFrames,
    /// The guest may have no more table pages
    /// ([`Config::table_pages`](crate::Config::table_pages)).
    TableLimit(TableLimit),
    /// The backing returned memory that the tables cannot map.
    Page(MapError),
    /// The tables refuse to change the leaf.
    Change(ChangeError),
    /// The tables refuse to split the leaf.
    Split(SplitError),
}

impl From<ChangeError> for Outcome {
    fn from(why: ChangeError) -> Self {
        match why {
            ChangeError::Contended => Self::Retry(Retry::Contended),
            why => Self::Refused(Refused::Change(why)),
        }
    }
}

impl From<SplitError> for Outcome {
    fn from(why: SplitError) -> Self {
        match why {
            SplitError::Contended => Self::Retry(Retry::Contended),
            why => Self::Refused(Refused::Split(why)),
        }
    }
}

/// The guest has all the table pages that it may have
/// ([`Config::table_pages`](crate::Config::table_pages)).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TableLimit {
    /// The number of table pages that it may have.
    pub pages: u64,
}

impl fmt::Display for TableLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the guest has the {} table pages that its configuration allows; allow more, or have \
             it use less memory in small pages",
            self.pages
        )
    }
}

impl core::error::Error for TableLimit {}

/// The result of one run of an [`EagerSplit`](crate::EagerSplit), and why it ended early.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SplitReport {
    /// Bytes of blocks that were split.
    pub split: u64,
    /// Bytes of chunks that were looked at: leaves there that were not split were no larger than
    /// asked for.
    pub done: u64,
    /// Why the run ended before the range did.
    pub stopped: Option<SplitStop>,
}

/// Why an eager split ended early.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SplitStop {
    /// The caller asked for it; running it again goes on from there.
    Asked,
    /// The platform has no more table pages; a run goes on from this address.
    OutOfFrames {
        /// The first address that is not split.
        at: Gpa,
        /// The platform's error.
        error: OutOfFrames,
    },
    /// The guest may have no more table pages; a run goes on from this address.
    TableLimit {
        /// The first address that is not split.
        at: Gpa,
        /// The number of table pages that it may have.
        limit: TableLimit,
    },
    /// Another thread held an entry for too long; a run goes on from this address.
    Contended {
        /// The first address that is not split.
        at: Gpa,
    },
    /// The guest has no such addresses, or the format has no such size.
    Refused(SplitError),
}

impl SplitStop {
    /// The address from which a run goes on.
    pub(crate) const fn at(&self) -> Option<Gpa> {
        match self {
            Self::OutOfFrames { at, .. } | Self::TableLimit { at, .. } | Self::Contended { at } => {
                Some(*at)
            }
            Self::Asked | Self::Refused(_) => None,
        }
    }
}
