//! A batch of leaves that an unmap took out, kept until the guest cannot reach them any more.

use crate::addr::{Gpa, Hpa, PageSize};
use crate::format::{Attributes, Format};
use crate::guard::Guard;
use crate::invalidation::PendingFlush;
use crate::platform::Platform;
use crate::retired::Chain;
use crate::tables::Tables;
use crate::walk::Entry;

/// Neighbouring leaves of one size and one set of attributes that were taken out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UnmappedRun {
    /// First guest address of the leaves.
    pub gpa: Gpa,
    /// Bytes of all of them.
    pub bytes: u64,
    /// The size of each.
    pub size: PageSize,
    /// The memory behind them: the guest cannot reach it any more.
    pub hpa: Hpa,
    /// Rights (those of the leaves, without what tables above withheld), memory type and state at
    /// the moment they were taken out. A page that was writable may have been written until the
    /// invalidation completed, if it was dirty already.
    ///
    /// A page that is not dirty was not written since the last [`Guard::clean`] or
    /// [`Guard::harvest`] that has completed: while one is under way, a page whose dirty state it
    /// may have taken is dirty here as well, as the guest may write it through a TLB entry that
    /// marks nothing.
    ///
    /// [`Guard::clean`]: crate::Guard::clean
    /// [`Guard::harvest`]: crate::Guard::harvest
    pub attributes: Attributes,
}

impl UnmappedRun {
    /// Returns whether `new` continues these leaves, so that both are one run.
    #[inline(always)]
    pub(crate) fn continues(&self, new: &Self) -> bool {
        self.gpa.0 + self.bytes == new.gpa.0
            && self.hpa.0 + self.bytes == new.hpa.0
            && (self.size, self.attributes) == (new.size, new.attributes)
    }
}

/// Storage of one run of neighbouring leaves in [`UnmapBatch`].
#[derive(Debug)]
pub struct UnmapEntry(Option<UnmappedRun>);

impl UnmapEntry {
    /// An empty place.
    pub const EMPTY: Self = Self(None);
}

/// Leaves that were unmapped, kept back until the guest cannot reach them any more.
///
/// The storage belongs to the caller; one place holds neighbours of one kind. Only
/// [`UnmapBatch::complete`], which invalidates first, hands out the memory behind the leaves.
///
/// If this is dropped, the tables take over the invalidation that it owes, and the memory is
/// leaked. If it is forgotten, it stays under way for ever: each later removal invalidates all of
/// the guest, and, if the CPU demands a break, each map of an emptied entry invalidates that entry.
#[derive(Debug)]
#[must_use = "the memory behind what was unmapped is in it"]
pub struct UnmapBatch<'s, 't, F: Format, P: Platform> {
    pub(super) tables: &'t Tables<'t, F, P>,
    storage: &'s mut [UnmapEntry],
    len: usize,
    /// Whether earlier leaves are forgotten when there is no more room.
    forgets: bool,
    pub(super) owed: PendingFlush,
    /// Whether the guest counts this batch among those that are under way.
    pub(super) counted: bool,
    /// Tables that were unlinked: the invalidation that the batch owes covers them too.
    pub(super) unlinked: Chain<F>,
}

impl<'s, 't, F: Format, P: Platform> UnmapBatch<'s, 't, F, P> {
    /// Makes an empty batch in the caller's storage, whose content is overwritten.
    pub fn new(tables: &'t Tables<'t, F, P>, storage: &'s mut [UnmapEntry]) -> Self {
        let (owed, unlinked) = (PendingFlush::NOTHING, Chain::EMPTY);
        Self { tables, storage, len: 0, forgets: false, owed, counted: false, unlinked }
    }

    /// Makes this batch never [full](super::UnmapError::Full): leaves without room take the
    /// place of leaves that were removed before, which [`UnmapBatch::complete`] then does not hand
    /// out. For a caller that knows the memory behind the range: one place, and one invalidation,
    /// serve a range of any size and content.
    pub const fn forgetting(mut self) -> Self {
        self.forgets = true;
        self
    }

    /// Invalidates, then hands out the leaves, in the order in which they were removed.
    ///
    /// Afterwards nothing in the ranges is reachable, including leaves that other threads unmapped:
    /// while other removals are under way, all of the guest is invalidated.
    ///
    /// Leaves that the caller does not take from the iterator are leaked.
    #[inline]
    pub fn complete(&mut self) -> impl Iterator<Item = UnmappedRun> {
        let owed = core::mem::replace(&mut self.owed, PendingFlush::NOTHING);
        // Entries found empty here may have been emptied by other threads, which have not
        // invalidated yet.
        if self.tables.pending.removals.count() > u64::from(self.counted) {
            self.tables.complete_all();
        } else {
            self.tables.complete(owed);
        }
        if core::mem::replace(&mut self.counted, false) {
            self.tables.pending.removals.end(1);
        }
        self.tables.retired.invalidated(self.tables.platform, &self.unlinked.take());
        let len = core::mem::replace(&mut self.len, 0);
        self.storage[..len].iter_mut().filter_map(|place| place.0.take())
    }

    /// Returns whether there is no room for a leaf that does not continue the last one.
    pub fn is_full(&self) -> bool {
        !self.forgets && self.len == self.storage.len()
    }

    /// Returns the last leaves, if `new` continues them.
    #[inline]
    pub(super) fn continued(&mut self, new: &UnmappedRun) -> Option<&mut UnmappedRun> {
        let last = self.storage[..self.len].last_mut()?.0.as_mut()?;
        last.continues(new).then_some(last)
    }

    /// Returns whether memory at `hpa` follows what was removed last.
    #[inline(always)]
    pub(super) fn follows(&self, hpa: Hpa) -> bool {
        let last = self.storage[..self.len].last().and_then(|place| place.0.as_ref());
        last.is_some_and(|last| last.hpa.0 + last.bytes == hpa.0)
    }

    /// Adds a leaf that continues what was removed last.
    #[inline(always)]
    pub(super) fn extend(&mut self, entry: &Entry<'_>, size: PageSize) {
        self.owed.leaves(entry.start, entry.end, size);
        if let Some(last) = self.storage[..self.len].last_mut().and_then(|place| place.0.as_mut()) {
            last.bytes += entry.end - entry.start;
        }
    }

    /// Marks the run that was removed last as dirty.
    #[cold]
    pub(super) fn dirty_last(&mut self) {
        if let Some(last) = self.storage[..self.len].last_mut().and_then(|place| place.0.as_mut()) {
            last.attributes.dirty = true;
        }
    }

    /// Adds `new`, if there is room, and what it owes, even if the walk fails later.
    #[inline]
    pub(super) fn push(&mut self, new: UnmappedRun) {
        match self.continued(&new) {
            Some(last) => {
                last.bytes += new.bytes;
                self.owed.leaves(new.gpa.0, new.gpa.0 + new.bytes, new.size);
            }
            None => self.put(new),
        }
    }

    /// As [`UnmapBatch::push`], for a leaf that continues no other.
    #[inline(always)]
    pub(super) fn put(&mut self, new: UnmappedRun) {
        self.owed.leaves(new.gpa.0, new.gpa.0 + new.bytes, new.size);
        if self.forgets && self.len == self.storage.len() {
            self.len = 0;
        }
        if let Some(place) = self.storage.get_mut(self.len) {
            *place = UnmapEntry(Some(new));
            self.len += 1;
        }
    }
}

impl<'t, F: Format, P: Platform> Guard<'t, '_, F, P> {
    /// Makes an empty batch in the caller's storage, as [`UnmapBatch::new`].
    pub fn unmap_batch<'s>(&self, storage: &'s mut [UnmapEntry]) -> UnmapBatch<'s, 't, F, P> {
        UnmapBatch::new(self.tables, storage)
    }
}

impl<F: Format, P: Platform> Drop for UnmapBatch<'_, '_, F, P> {
    #[inline]
    fn drop(&mut self) {
        self.tables.retired.unlinked(self.tables.platform, &self.unlinked.take());
        if self.counted {
            match self.owed.is_nothing() {
                true => self.tables.pending.removals.end(1),
                false => self.tables.pending.drop_removals(),
            }
        }
    }
}

impl<F: Format, P: Platform> Tables<'_, F, P> {
    /// Returns whether a leaf that was just taken out, and is not dirty, may have been written all
    /// the same: its dirty state may have been cleared by a thread whose invalidation has not
    /// completed, and the guest may have written since through a TLB entry that marks nothing.
    #[inline(always)]
    pub(super) fn may_be_dirty(&self, raw: u64) -> bool {
        raw & F::DIRTY == 0 && self.pending.cleans.count() != 0
    }
}
