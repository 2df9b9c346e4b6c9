//! Memslots: which guest addresses have memory, and where it is in the host.
//!
//! Faults read the memslots without a lock. There are two lists, and one of them is current. A
//! change copies the current list into the other, makes that one current, and waits until every
//! thread that was inside the guest's tables has left. From then on all faults see the change, and
//! no thread reads the list that the next change overwrites. The lists share the parts that they
//! have in common ([`tree`]): a look-up and a change take time logarithmic in the number of
//! memslots.

pub(crate) mod change;
pub(crate) mod kinds;
mod runs;
pub(crate) mod spec;
mod tree;
pub(crate) mod work;

use crate::backing::{Hva, HvaRange};
use crate::bits::{Bits, SpilledBits, Splits};
use crate::memslots::kinds::Kinds;
use crate::memslots::spec::{MemslotError, MemslotId, MemslotSpec};
use crate::private::{PrivateAt, PrivateRange};
use crate::sync::{AtomicU64, Ordering};
use alloc::sync::Arc;
use core::cell::UnsafeCell;
use slat::{Gpa, GpaRange, PageSize};
use tree::{Entry, Tree};

/// A memslot, and its state.
#[derive(Clone, Debug)]
pub(crate) struct Memslot {
    pub spec: MemslotSpec,
    /// It is being deleted or moved: faults are retried, invalidations still find it.
    pub deleting: bool,
    pub log: Option<Arc<Bits>>,
    /// 0 until the log can be read, if the log began after the memslot was made.
    pub begins: Option<Arc<AtomicU64>>,
    /// Accessed and dirty marks of its pages that their leaves no longer have.
    pub spilled_bits: Arc<SpilledBits>,
    /// Where instruction fetches have split huge pages.
    pub splits: Option<Arc<Splits>>,
    /// Which of its pages are private, if some may be.
    pub kinds: Option<Arc<Kinds>>,
}

/// The kind of change that a request amounts to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Plan {
    Nothing,
    Insert,
    Move,
    Flags,
    Delete,
}

/// The memslots at one time: by guest address, by host address, by name. A copy shares the parts
/// that do not change.
#[derive(Clone, Default, Debug)]
pub(crate) struct MemslotSnapshot {
    by_gpa: Tree<Gpa, Arc<Memslot>>,
    /// The key has the name because several memslots may have the same host memory.
    by_host: Tree<(Hva, MemslotId), Arc<Memslot>>,
    by_id: Tree<MemslotId, Arc<Memslot>>,
    /// The memslots that have private memory.
    by_private: Tree<PrivateAt, Arc<Memslot>>,
    /// Two memslots may share host memory, or may have shared it.
    pub aliases: bool,
}

impl MemslotSnapshot {
    #[inline]
    pub fn at(&self, gpa: Gpa) -> Option<&Memslot> {
        let memslot = self.by_gpa.at_most(&gpa)?;
        (gpa.0 < memslot.end).then_some(&*memslot.value)
    }

    /// Returns all memslots, by guest address.
    pub fn iter(&self) -> impl Iterator<Item = &Memslot> {
        self.by_gpa.beyond(0).map(|entry| &*entry.value)
    }

    /// Returns the memslots that overlap `range`, each with its part of the range.
    pub fn parts(&self, range: &GpaRange) -> impl Iterator<Item = (&Memslot, GpaRange)> {
        let range = *range;
        let memslots = self.by_gpa.beyond(range.start().0).map(|entry| &*entry.value);
        memslots.map_while(move |memslot| Some((memslot, memslot.spec.common(&range)?)))
    }

    /// Returns the memslots that have some of the host memory at `host`, each with its guest
    /// addresses.
    pub fn backed_by(&self, host: HvaRange) -> impl Iterator<Item = (&Memslot, GpaRange)> {
        let memslots = self.by_host.beyond(host.start.0).map(|entry| &*entry.value);
        let memslots = memslots.take_while(move |memslot| memslot.spec.host < host.end());
        memslots.filter_map(move |memslot| Some((memslot, memslot.spec.guest_of(&host)?)))
    }

    pub fn named(&self, id: MemslotId) -> Option<&Memslot> {
        self.by_id.get(&id).map(|memslot| &**memslot)
    }

    /// Returns whether the memslot is where `spec` says, and logs into `log`.
    pub fn logs_into(&self, spec: &MemslotSpec, log: &Bits) -> bool {
        let memslot =
            self.named(spec.id).filter(|memslot| !memslot.deleting && memslot.spec == *spec);
        let theirs = memslot.and_then(|memslot| memslot.log.as_deref());
        theirs.is_some_and(|theirs| core::ptr::eq(theirs, log))
    }

    /// Adds a memslot, or replaces the one with its name, which has the same addresses.
    pub fn insert(&mut self, memslot: Memslot) {
        let spec = memslot.spec;
        let (number, value) = (spec.id.0.into(), Arc::new(memslot));
        let end = spec.gpa.0 + spec.bytes;
        self.by_gpa.put(Entry { key: spec.gpa, end, number, value: value.clone() });
        let (key, end) = ((spec.host, spec.id), spec.host.0 + spec.bytes);
        self.by_host.put(Entry { key, end, number, value: value.clone() });
        if let Some(key) = spec.private {
            let end = key.0 + spec.bytes;
            self.by_private.put(Entry { key, end, number, value: value.clone() });
        }
        self.by_id.put(Entry { key: spec.id, end: 0, number, value });
    }

    /// Changes the state of a memslot, but not its addresses.
    pub fn change(&mut self, id: MemslotId, change: impl FnOnce(&mut Memslot)) {
        if let Some(memslot) = self.named(id) {
            let mut memslot = memslot.clone();
            change(&mut memslot);
            self.insert(memslot);
        }
    }

    pub fn remove(&mut self, id: MemslotId) {
        if let Some(MemslotSpec { gpa, host, private, .. }) =
            self.named(id).map(|memslot| memslot.spec)
        {
            self.by_gpa.remove(&gpa);
            self.by_host.remove(&(host, id));
            self.by_id.remove(&id);
            if let Some(private) = private {
                self.by_private.remove(&private);
            }
        }
    }

    /// Returns the change that turns the current memslots into what `new` asks for, by the rules of
    /// Linux's `KVM_SET_USER_MEMORY_REGION`.
    pub fn plan(&self, new: &MemslotSpec, page: PageSize, bits: u32) -> Result<Plan, MemslotError> {
        let old = self.named(new.id).map(|memslot| memslot.spec);
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
        let by_gpa = self.parts(&range).map(|(memslot, _)| memslot.spec.id);
        // The hooks count each private page once, and conversions ask for kinds by memslot.
        let by_private = new.private_range().and_then(|private| self.with_private(&private));
        match by_gpa.chain(by_private).find(|&id| id != new.id) {
            Some(id) => Err(MemslotError::Overlaps { id }),
            None => Ok(change),
        }
    }

    /// Returns the name of the first memslot that has some of the private memory.
    fn with_private(&self, range: &PrivateRange) -> Option<MemslotId> {
        let spec = self.by_private.beyond(range.start.0).next()?.value.spec;
        spec.private_range().filter(|first| first.overlaps(range)).map(|_| spec.id)
    }
}

/// The two lists of memslots.
#[derive(Debug)]
pub(crate) struct Memslots {
    lists: [UnsafeCell<MemslotSnapshot>; 2],
    current: AtomicU64,
}

// SAFETY: only `snapshot` and `replace` access `lists`. Their contracts keep a reader and a writer
// of one list apart.
unsafe impl Sync for Memslots {}

impl Memslots {
    pub fn new() -> Self {
        Self { lists: Default::default(), current: AtomicU64::new(0) }
    }

    /// Returns the current memslots.
    ///
    /// # Safety
    /// For as long as it uses the result, the caller either
    /// 1. is inside the guest's tables, and does not refresh its guard; or
    /// 2. holds the lock for changes of memslots.
    #[inline]
    pub unsafe fn snapshot(&self) -> &MemslotSnapshot {
        // Orders this load after the caller's earlier accesses. If an invalidation does not see a
        // fault in the tables, the fault sees the invalidation, and the invalidation sees the
        // memslot that the fault saw.
        crate::sync::agreed();
        let now = self.current.load(Ordering::Acquire) as usize;
        // SAFETY: `replace` writes only the list that is not current, and the change after the next
        // is the first that writes this one. Before that, a change waits until a caller of kind 1
        // has left the tables; a caller of kind 2 holds the lock that changes need.
        unsafe { &*self.lists[now].get() }
    }

    /// Makes `view` current: every thread that enters the tables from now on sees it.
    ///
    /// # Safety
    /// 1. The caller holds the lock for changes of memslots.
    /// 2. The caller has no reference from [`Memslots::view`].
    /// 3. The caller releases the lock only after all threads that were inside the guest's tables
    ///    have left.
    pub unsafe fn replace(&self, view: MemslotSnapshot) {
        let other = 1 - self.current.load(Ordering::Relaxed) as usize;
        // SAFETY: no thread reads the list that is not current. By 3 the change that made it so has
        // waited for its readers; by 1 no other change runs; by 2 the caller does not read it.
        unsafe { *self.lists[other].get() = view };
        self.current.store(other as u64, Ordering::Release);
    }
}
