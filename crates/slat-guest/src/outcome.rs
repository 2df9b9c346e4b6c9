//! What a fault came to, and what a split ahead of faults.

use crate::private::{Denied, MemoryKind};
use crate::waits::Arrival;
use core::fmt;
use slat::{ChangeError, Gpa, MapError, OutOfFrames, PageSize, SplitError};

/// What a fault came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// A leaf of that size was mapped.
    Mapped(PageSize),
    /// A leaf of that size became writable.
    MadeWritable(PageSize),
    /// A leaf of that size became executable, and in a table whose pages were not, those around it
    /// that may be.
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
    /// There was nothing to do: another vCPU had done it.
    Spurious,
    /// Somebody was in the way: run the guest; it faults again if need be.
    Retry(Retry),
    /// There is no memory for this access: a device's register, or a write to a read-only slot.
    /// Emulate it, or raise the guest's error.
    Mmio,
    /// The vCPU's dirty ring is full: have it harvested and reset, then run the guest.
    RingFull,
    /// The guest uses the page as one of this kind, which it is not: convert it
    /// ([`Worker::convert`](crate::Worker::convert)) and run the guest, or raise the guest's error
    /// (Linux: `KVM_EXIT_MEMORY_FAULT`).
    Convert {
        /// The kind that the guest wants.
        to: MemoryKind,
    },
    /// The access cannot be answered: an error for the guest, or its end.
    Refused(Refused),
}

/// Who was in the way of a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Retry {
    /// Another thread held the entry.
    Contended,
    /// The host is taking back the memory.
    Invalidated,
    /// The backing is fetching the page. The vCPU sleeps until it is there
    /// ([`Vcpu::sleep_until`](crate::Vcpu::sleep_until)), runs something else until it is told
    /// ([`Vcpu::ready`](crate::Vcpu::ready)), or just tries again. `None`: it waits for as many
    /// pages as it may, 16, told ones included.
    NotYet(Option<Arrival>),
    /// The slot is being deleted or moved.
    SlotGoing,
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
    /// The guest may not execute from there.
    NotExecutable,
    /// The platform has no table pages.
    OutOfFrames,
    /// The guest may have no more table pages
    /// ([`Config::table_pages`](crate::Config::table_pages)).
    TableLimit(TableLimit),
    /// The backing named memory that the tables cannot hold.
    Page(MapError),
    /// The tables refuse to change the leaf.
    Change(ChangeError),
    /// The tables refuse to split it.
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
    /// How many that is.
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

/// What one run of an [`EagerSplit`](crate::EagerSplit) split, and why no more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SplitReport {
    /// Bytes of blocks that were split.
    pub split: u64,
    /// Bytes of chunks that were looked at: what was not split there was no larger than asked.
    pub done: u64,
    /// Why it ended before the range did.
    pub stopped: Option<SplitStop>,
}

/// Why an eager split ended early.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SplitStop {
    /// The caller said so; running it again goes on from there.
    Asked,
    /// The platform has no more table pages; a run goes on from this address.
    OutOfFrames {
        /// The first address that is not split.
        at: Gpa,
        /// What the platform said.
        error: OutOfFrames,
    },
    /// The guest may have no more table pages; a run goes on from this address.
    TableLimit {
        /// The first address that is not split.
        at: Gpa,
        /// How many it may have.
        limit: TableLimit,
    },
    /// Somebody held an entry for too long; a run goes on from this address.
    Contended {
        /// The first address that is not split.
        at: Gpa,
    },
    /// The guest has no such addresses, or the format no such size.
    Refused(SplitError),
}

impl SplitStop {
    /// Where a run goes on.
    pub(crate) const fn at(&self) -> Option<Gpa> {
        match self {
            Self::OutOfFrames { at, .. } | Self::TableLimit { at, .. } | Self::Contended { at } => {
                Some(*at)
            }
            Self::Asked | Self::Refused(_) => None,
        }
    }
}
