//! Slots: which guest addresses have memory, and where the host has it.
//!
//! Faults read the slots without a lock. There are two lists, of which one is current. A change copies
//! the current list into the other, makes that one current, and waits until every thread that was
//! inside the guest's tables has left: from then on all faults see the change, and nobody reads
//! the list that the next change will overwrite.

use crate::backing::{Hva, HvaRange};
use crate::bits::{Bits, Kept};
use crate::eager::SplitReport;
use crate::recovery::Splits;
use crate::sync::{AtomicU64, Ordering};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::cell::UnsafeCell;
use core::fmt;
use slat::{Gpa, GpaRange, PageSize};

/// Names a slot, as the VMM chose.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SlotId(pub u16);

/// A slot, as a VMM asks for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlotSpec {
    /// Its name.
    pub id: SlotId,
    /// Where the guest sees it.
    pub gpa: Gpa,
    /// Bytes.
    pub bytes: u64,
    /// Where the backing has it.
    pub host: Hva,
    /// The guest's writes are not for memory: [`Outcome::Mmio`](crate::Outcome::Mmio).
    pub read_only: bool,
    /// Writes are logged.
    pub log_dirty: bool,
}

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

/// Why a slot was not changed. Nothing was done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum SlotError {
    /// Size, guest or host address is not a multiple of the page size.
    Unaligned {
        /// The page size.
        page: PageSize,
    },
    /// The slot reaches beyond what the guest can address.
    Beyond {
        /// Bits of a guest address.
        bits: u32,
    },
    /// Its guest or host addresses go beyond 64 bits.
    Wraps,
    /// More pages than a log can number: 2^31 - 1.
    TooManyPages {
        /// Pages asked for.
        pages: u64,
    },
    /// Another slot has some of these addresses.
    Overlaps {
        /// That slot.
        id: SlotId,
    },
    /// A slot that is there keeps its size, its place in the host and its rights: delete it first.
    Differs {
        /// What there is.
        is: SlotSpec,
    },
    /// There is no such slot.
    Missing {
        /// The name.
        id: SlotId,
    },
    /// Memory for the log, or what else is kept of each page, is short.
    OutOfMemory,
}

impl SlotError {
    /// The error of Linux's `KVM_SET_USER_MEMORY_REGION`, on that architecture, for the same
    /// mistake.
    pub const fn errno(&self, kvm: Kvm) -> &'static str {
        match (self, kvm) {
            (Self::Overlaps { .. }, _) => "EEXIST",
            (Self::OutOfMemory, _) => "ENOMEM",
            (Self::Beyond { .. }, Kvm::Arm64 | Kvm::RiscV) => "EFAULT",
            _ => "EINVAL",
        }
    }
}

/// An architecture of Linux's KVM, where its errors differ.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Kvm {
    /// Intel and AMD.
    X86,
    /// Arm.
    Arm64,
    /// RISC-V.
    RiscV,
}

impl fmt::Display for SlotError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unaligned { page } => {
                write!(f, "size, guest and host address of a slot are multiples of {page}")
            }
            Self::Beyond { bits } => {
                write!(f, "the slot ends beyond the {bits} bits of a guest address")
            }
            Self::Wraps => f.write_str("the slot's guest or host addresses go beyond 64 bits"),
            Self::TooManyPages { pages } => {
                write!(f, "{pages} pages are too many for a slot; use several of at most 2^31 - 1")
            }
            Self::Overlaps { id } => write!(f, "slot {} has some of these addresses", id.0),
            Self::Differs { is } => write!(
                f,
                "slot {} is {:#x} bytes at {} backed by {}{}; only its guest address and its \
                 logging can change: delete it first",
                is.id.0,
                is.bytes,
                is.gpa,
                is.host,
                if is.read_only { ", read-only" } else { "" }
            ),
            Self::Missing { id } => write!(f, "there is no slot {}", id.0),
            Self::OutOfMemory => f.write_str("no memory for what is kept of each page"),
        }
    }
}

impl core::error::Error for SlotError {}

impl SlotSpec {
    /// Its guest addresses. Checked when it was inserted.
    pub(crate) fn range(&self) -> GpaRange {
        GpaRange::new(self.gpa, self.bytes).expect("a slot is not empty, and does not wrap")
    }

    pub(crate) const fn host_range(&self) -> HvaRange {
        HvaRange { start: self.host, bytes: self.bytes }
    }

    pub(crate) const fn host_of(&self, gpa: u64) -> Hva {
        Hva(self.host.0 + (gpa - self.gpa.0))
    }

    /// The guest addresses of what `host` and the slot have in common, if anything.
    pub(crate) fn guest_of(&self, host: &HvaRange) -> Option<GpaRange> {
        let start = host.start.max(self.host);
        let end = host.end().min(self.host_range().end());
        let bytes = end.0.checked_sub(start.0).filter(|&bytes| bytes != 0)?;
        GpaRange::new(Gpa(self.gpa.0 + (start.0 - self.host.0)), bytes).ok()
    }

    /// Whether a leaf of `bytes` around `gpa` lies in the slot, and is aligned in the host as in the
    /// guest.
    pub(crate) const fn fits(&self, gpa: u64, bytes: u64) -> bool {
        self.is_aligned(bytes) && self.has(gpa, bytes)
    }

    /// Whether leaves of `bytes` are aligned in the host as in the guest.
    pub(crate) const fn is_aligned(&self, bytes: u64) -> bool {
        (self.gpa.0 ^ self.host.0) & (bytes - 1) == 0
    }

    /// Whether a leaf of `bytes` around `gpa` lies in the slot.
    pub(crate) const fn has(&self, gpa: u64, bytes: u64) -> bool {
        let start = gpa & !(bytes - 1);
        start >= self.gpa.0
            && match start.checked_add(bytes) {
                Some(end) => end <= self.gpa.0 + self.bytes,
                None => false,
            }
    }

    /// What the two have in common, if anything.
    pub(crate) fn common(&self, range: &GpaRange) -> Option<GpaRange> {
        let start = range.start().max(self.gpa);
        let end = range.end().0.min(self.gpa.0 + self.bytes);
        GpaRange::new(start, end.checked_sub(start.0)?).ok()
    }

    /// Whether it is the same memory at the same place; what is logged is another matter.
    pub(crate) fn is_where(&self, other: &Self) -> bool {
        let place = |spec: &Self| (spec.id, spec.gpa, spec.bytes, spec.host);
        place(self) == place(other)
    }

    /// The pages that it has.
    pub(crate) const fn pages(&self, page: PageSize) -> u64 {
        self.bytes >> page.shift()
    }

    fn checked(&self, page: PageSize, bits: u32) -> Result<(), SlotError> {
        if (self.gpa.0 | self.host.0 | self.bytes) & (page.bytes() - 1) != 0 {
            return Err(SlotError::Unaligned { page });
        }
        let Some(end) = self.gpa.0.checked_add(self.bytes) else { return Err(SlotError::Wraps) };
        if self.host.0.checked_add(self.bytes).is_none() {
            return Err(SlotError::Wraps);
        }
        if end > 1 << bits {
            return Err(SlotError::Beyond { bits });
        }
        let pages = self.bytes >> page.shift();
        if pages > (1 << 31) - 1 {
            return Err(SlotError::TooManyPages { pages });
        }
        Ok(())
    }
}

/// A slot, and what is kept about it.
#[derive(Clone, Debug)]
pub(crate) struct Slot {
    pub spec: SlotSpec,
    /// It is being deleted or moved: faults try again, invalidations still find it.
    pub going: bool,
    pub log: Option<Arc<Bits>>,
    /// What is known of its pages beside their leaves, where a leaf cannot say it all.
    pub kept: Option<Arc<Kept>>,
    /// Where instruction fetches have split huge pages.
    pub splits: Option<Arc<Splits>>,
}

/// What a request comes to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Plan {
    Nothing,
    Insert,
    Move,
    Flags,
    Delete,
}

/// The slots at one time, by guest address.
#[derive(Clone, Default, Debug)]
pub(crate) struct View {
    pub slots: Vec<Slot>,
}

impl View {
    pub fn at(&self, gpa: Gpa) -> Option<&Slot> {
        let after = self.slots.partition_point(|slot| slot.spec.gpa <= gpa);
        let slot = &self.slots[after.checked_sub(1)?];
        (gpa.0 - slot.spec.gpa.0 < slot.spec.bytes).then_some(slot)
    }

    /// The slots that have some of `range`, each with what it has.
    pub fn parts<'v>(&'v self, range: &GpaRange) -> impl Iterator<Item = (&'v Slot, GpaRange)> {
        let range = *range;
        // No two overlap, so they end in the order in which they begin.
        let ends = |slot: &Slot| slot.spec.gpa.0 + slot.spec.bytes;
        let first = self.slots.partition_point(|slot| ends(slot) <= range.start().0);
        self.slots[first..].iter().map_while(move |slot| Some((slot, slot.spec.common(&range)?)))
    }

    pub fn named(&self, id: SlotId) -> Option<&Slot> {
        self.slots.iter().find(|slot| slot.spec.id == id)
    }

    /// Whether the slot is where `spec` has it, and logs into `log`.
    pub fn logs_into(&self, spec: &SlotSpec, log: &Bits) -> bool {
        let slot = self.named(spec.id).filter(|slot| !slot.going && slot.spec == *spec);
        let theirs = slot.and_then(|slot| slot.log.as_deref());
        theirs.is_some_and(|theirs| core::ptr::eq(theirs, log))
    }

    pub fn insert(&mut self, slot: Slot) {
        let at = self.slots.partition_point(|other| other.spec.gpa < slot.spec.gpa);
        self.slots.insert(at, slot);
    }

    pub fn remove(&mut self, id: SlotId) {
        self.slots.retain(|slot| slot.spec.id != id);
    }

    /// What it takes to make the slots as `new` has it, by the rules of Linux's
    /// `KVM_SET_USER_MEMORY_REGION`.
    pub fn plan(&self, new: &SlotSpec, page: PageSize, bits: u32) -> Result<Plan, SlotError> {
        let old = self.named(new.id).map(|slot| slot.spec);
        if new.bytes == 0 {
            return old.map(|_| Plan::Delete).ok_or(SlotError::Missing { id: new.id });
        }
        new.checked(page, bits)?;
        let overlaps = |other: &SlotSpec| {
            other.id != new.id
                && other.gpa.0 < new.gpa.0 + new.bytes
                && new.gpa.0 < other.gpa.0 + other.bytes
        };
        let change = match old {
            None => Plan::Insert,
            Some(is) => {
                let same = SlotSpec { gpa: is.gpa, log_dirty: is.log_dirty, ..*new };
                if same != is {
                    return Err(SlotError::Differs { is });
                }
                match (is.gpa == new.gpa, is.log_dirty == new.log_dirty) {
                    (true, true) => return Ok(Plan::Nothing),
                    (true, false) => return Ok(Plan::Flags),
                    (false, _) => Plan::Move,
                }
            }
        };
        match self.slots.iter().find(|slot| overlaps(&slot.spec)) {
            Some(slot) => Err(SlotError::Overlaps { id: slot.spec.id }),
            None => Ok(change),
        }
    }
}

/// The two lists.
#[derive(Debug)]
pub(crate) struct Slots {
    lists: [UnsafeCell<View>; 2],
    current: AtomicU64,
}

// SAFETY: `lists` are reached by `view` and `replace` only, whose callers keep them apart.
unsafe impl Sync for Slots {}

impl Slots {
    pub fn new() -> Self {
        Self { lists: Default::default(), current: AtomicU64::new(0) }
    }

    /// The slots now.
    ///
    /// # Safety
    /// The caller is inside the guest's tables for as long as it uses the result, without
    /// refreshing; or it holds the lock under which slots are changed.
    pub unsafe fn view(&self) -> &View {
        // One order with the exchanges of slots: a fault that an invalidation does not see in the tables
        // sees the invalidation, and the invalidation the slot that the fault saw.
        crate::sync::agreed();
        let now = self.current.load(Ordering::SeqCst) as usize;
        // SAFETY: the current list is not written: `replace` writes the other. It stays unwritten
        // until the change after the next, which waits for the caller to leave, or for the lock.
        unsafe { &*self.lists[now].get() }
    }

    /// Makes `view` what everybody sees who enters the tables from now on.
    ///
    /// # Safety
    /// The caller holds the lock under which slots are changed, has no reference from
    /// [`Slots::view`], and releases the lock only after all threads that were inside the guest's
    /// tables have left.
    pub unsafe fn replace(&self, view: View) {
        let other = 1 - self.current.load(Ordering::Relaxed) as usize;
        // SAFETY: nobody reads the list that is not current: who did was waited for in the change
        // that made it so, and the lock keeps other changes away.
        unsafe { *self.lists[other].get() = view };
        self.current.store(other as u64, Ordering::SeqCst);
    }
}
