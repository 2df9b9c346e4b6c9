//! Slots: which guest addresses have memory, and where the host has it.
//!
//! Faults read the slots without a lock. There are two lists, of which one is current. A change
//! copies the current list into the other, makes that one current, and waits until every thread
//! that was inside the guest's tables has left: from then on all faults see the change, and nobody
//! reads the list that the next change will overwrite.

pub(crate) mod change;
pub(crate) mod kinds;
mod runs;
pub(crate) mod spec;

use crate::bits::{Bits, Kept, Splits};
use crate::slots::kinds::Kinds;
use crate::slots::spec::{SlotError, SlotId, SlotSpec};
use crate::sync::{AtomicU64, Ordering};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::cell::UnsafeCell;
use slat::{Gpa, GpaRange, PageSize};

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
    /// Which of its pages are private, where some may be.
    pub kinds: Option<Arc<Kinds>>,
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
                    _ if is.private.is_some() => return Err(SlotError::Private),
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
        // One order with the exchanges of slots: a fault that an invalidation does not see in the
        // tables sees the invalidation, and the invalidation the slot that the fault saw.
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
