//! Memslots: which guest addresses have memory, and where the host has it.
//!
//! Faults read the memslots without a lock. There are two lists, of which one is current. A change
//! copies the current list into the other, makes that one current, and waits until every thread
//! that was inside the guest's tables has left: from then on all faults see the change, and no
//! thread reads the list that the next change will overwrite. The lists share their common parts
//! ([`tree`]): a look-up and a change take time logarithmic in the number of memslots.

pub(crate) mod change;
pub(crate) mod kinds;
pub(crate) mod progress;
mod runs;
pub(crate) mod spec;
mod tree;
pub(crate) mod work;

use crate::backing::{Hva, HvaRange};
use crate::bits::{Bits, Kept, Splits};
use crate::config::ExecuteHuge;
use crate::memslots::kinds::Kinds;
use crate::memslots::progress::Progress;
use crate::memslots::spec::{MemslotError, MemslotId, MemslotSpec};
use crate::sync::{AtomicU64, Ordering};
use alloc::sync::Arc;
use core::cell::UnsafeCell;
use slat::{Gpa, GpaRange, PageSize};
use tree::{Entry, Tree};

/// A memslot, and the state that is kept about it.
#[derive(Clone, Debug)]
pub(crate) struct Memslot {
    pub spec: MemslotSpec,
    /// It is being deleted or moved: faults try again, invalidations still find it.
    pub going: bool,
    pub log: Option<Arc<Bits>>,
    /// How far the beginning of the log is, if it began in a memslot that was there.
    pub begins: Option<Arc<Progress>>,
    /// Marks of its pages that their leaves do not have.
    pub kept: Arc<Kept>,
    /// Where instruction fetches have split huge pages.
    pub splits: Option<Arc<Splits>>,
    /// Which of its pages are private, if some may be.
    pub kinds: Option<Arc<Kinds>>,
}

/// The change that a request asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Plan {
    Nothing,
    Insert,
    Move,
    Flags,
    Delete,
}

/// The memslots at one time: by guest address, by host address, by name. A copy shares what did not
/// change.
#[derive(Clone, Debug)]
pub(crate) struct View {
    by_gpa: Tree<Gpa, Arc<Memslot>>,
    /// Memslots may have the same memory.
    by_host: Tree<(Hva, MemslotId), Arc<Memslot>>,
    by_id: Tree<MemslotId, Arc<Memslot>>,
    /// Whether huge pages may be executed. It is here so that a fault sees one state of this and
    /// the memslots.
    pub execute_huge: ExecuteHuge,
    /// Some of the host's memory may be in two memslots, or was.
    pub aliases: bool,
}

impl View {
    /// A view without memslots.
    fn new(execute_huge: ExecuteHuge) -> Self {
        let (by_gpa, by_host, by_id) = Default::default();
        Self { by_gpa, by_host, by_id, execute_huge, aliases: false }
    }

    #[inline]
    pub fn at(&self, gpa: Gpa) -> Option<&Memslot> {
        let slot = self.by_gpa.at_most(&gpa)?;
        (gpa.0 < slot.end).then_some(&*slot.value)
    }

    /// All memslots, by guest address.
    pub fn iter(&self) -> impl Iterator<Item = &Memslot> {
        self.by_gpa.beyond(0).map(|entry| &*entry.value)
    }

    /// The memslots that have some of `range`, each with its part of it.
    pub fn parts(&self, range: &GpaRange) -> impl Iterator<Item = (&Memslot, GpaRange)> {
        let range = *range;
        let slots = self.by_gpa.beyond(range.start().0).map(|entry| &*entry.value);
        slots.map_while(move |slot| Some((slot, slot.spec.common(&range)?)))
    }

    /// The memslots that have some of the host's memory at `host`, and where they have it.
    pub fn backed_by(&self, host: HvaRange) -> impl Iterator<Item = (&Memslot, GpaRange)> {
        let slots = self.by_host.beyond(host.start.0).map(|entry| &*entry.value);
        let slots = slots.take_while(move |slot| slot.spec.host < host.end());
        slots.filter_map(move |slot| Some((slot, slot.spec.guest_of(&host)?)))
    }

    pub fn named(&self, id: MemslotId) -> Option<&Memslot> {
        self.by_id.get(&id).map(|slot| &**slot)
    }

    /// Whether the memslot is where `spec` has it, and logs into `log`.
    pub fn logs_into(&self, spec: &MemslotSpec, log: &Bits) -> bool {
        let slot = self.named(spec.id).filter(|slot| !slot.going && slot.spec == *spec);
        let theirs = slot.and_then(|slot| slot.log.as_deref());
        theirs.is_some_and(|theirs| core::ptr::eq(theirs, log))
    }

    /// Adds a memslot, or replaces the one of its name, which has the same addresses.
    pub fn insert(&mut self, slot: Memslot) {
        let spec = slot.spec;
        let (number, value) = (spec.id.0.into(), Arc::new(slot));
        let end = spec.gpa.0 + spec.bytes;
        self.by_gpa.put(Entry { key: spec.gpa, end, number, value: value.clone() });
        let (key, end) = ((spec.host, spec.id), spec.host.0 + spec.bytes);
        self.by_host.put(Entry { key, end, number, value: value.clone() });
        self.by_id.put(Entry { key: spec.id, end: 0, number, value });
    }

    /// Changes what is kept about a memslot, but not its addresses.
    pub fn change(&mut self, id: MemslotId, change: impl FnOnce(&mut Memslot)) {
        if let Some(slot) = self.named(id) {
            let mut slot = slot.clone();
            change(&mut slot);
            self.insert(slot);
        }
    }

    pub fn remove(&mut self, id: MemslotId) {
        if let Some(MemslotSpec { gpa, host, .. }) = self.named(id).map(|slot| slot.spec) {
            self.by_gpa.remove(&gpa);
            self.by_host.remove(&(host, id));
            self.by_id.remove(&id);
        }
    }

    /// The change that makes the memslots as `new` has it, by the rules of Linux's
    /// `KVM_SET_USER_MEMORY_REGION`.
    pub fn plan(&self, new: &MemslotSpec, page: PageSize, bits: u32) -> Result<Plan, MemslotError> {
        let old = self.named(new.id).map(|slot| slot.spec);
        if new.bytes == 0 {
            return old.map(|_| Plan::Delete).ok_or(MemslotError::Missing { id: new.id });
        }
        new.checked(page, bits)?;
        let change = match old {
            None => Plan::Insert,
            Some(is) => {
                let same = MemslotSpec { gpa: is.gpa, log_dirty: is.log_dirty, ..*new };
                if same != is {
                    return Err(MemslotError::Differs { is });
                }
                match (is.gpa == new.gpa, is.log_dirty == new.log_dirty) {
                    (true, true) => return Ok(Plan::Nothing),
                    _ if is.private.is_some() => return Err(MemslotError::Private),
                    (true, false) => return Ok(Plan::Flags),
                    (false, _) => Plan::Move,
                }
            }
        };
        let range = new.range();
        let mut overlaps = self.parts(&range);
        match overlaps.find(|(slot, _)| slot.spec.id != new.id) {
            Some((slot, _)) => Err(MemslotError::Overlaps { id: slot.spec.id }),
            None => Ok(change),
        }
    }
}

/// The two lists of memslots.
#[derive(Debug)]
pub(crate) struct Memslots {
    lists: [UnsafeCell<View>; 2],
    current: AtomicU64,
}

// SAFETY: `lists` are reached by `view` and `replace` only, whose callers keep them apart.
unsafe impl Sync for Memslots {}

impl Memslots {
    pub fn new(execute_huge: ExecuteHuge) -> Self {
        let lists = [(); 2].map(|()| UnsafeCell::new(View::new(execute_huge)));
        Self { lists, current: AtomicU64::new(0) }
    }

    /// The current memslots.
    ///
    /// # Safety
    /// The caller is inside the guest's tables for as long as it uses the result, without
    /// refreshing; or it holds the lock under which memslots are changed.
    #[inline]
    pub unsafe fn view(&self) -> &View {
        // Ordered after what the caller did before: a fault that an invalidation does not see in
        // the tables sees the invalidation, and the invalidation sees the memslot that the fault
        // saw.
        crate::sync::agreed();
        let now = self.current.load(Ordering::Acquire) as usize;
        // SAFETY: the current list is not written: `replace` writes the other. It stays unwritten
        // until the change after the next, which waits for the caller to leave, or for the lock.
        unsafe { &*self.lists[now].get() }
    }

    /// Makes `view` the one that every thread sees which enters the tables from now on.
    ///
    /// # Safety
    /// The caller holds the lock under which memslots are changed, has no reference from
    /// [`Memslots::view`], and releases the lock only after all threads that were inside the
    /// guest's tables have left.
    pub unsafe fn replace(&self, view: View) {
        let other = 1 - self.current.load(Ordering::Relaxed) as usize;
        // SAFETY: no thread reads the list that is not current: those that did were waited for in
        // the change that made it so, and the lock keeps other changes away.
        unsafe { *self.lists[other].get() = view };
        self.current.store(other as u64, Ordering::Release);
    }
}
