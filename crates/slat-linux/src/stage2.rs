//! The operations, each with the result that KVM's callers expect.

use crate::protection::{accesses, attributes};
use slat::format::Format;
use slat::{
    Access, Accesses, AgeBitmaps, AgeOptions, Frame, Gpa, GpaRange, Guard, Hpa, Interruption,
    Invalidation, MapError, Memory, NewError, PageSize, Platform, RetiredTables, SplitError,
    TableCache, Tables, UnmapBatch, UnmapEntry, UnmapError, Vmid,
};
use slat::{ChangeError, Contention};

/// An error of Linux's, as a negative number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Errno(pub i32);

impl Errno {
    /// Another thread is changing the entry, or nothing is there: the guest tries again.
    pub const AGAIN: Self = Self(-11);
    /// The memory cache is empty.
    pub const NO_MEMORY: Self = Self(-12);
    /// The arguments are not valid.
    pub const INVALID: Self = Self(-22);
}

/// How often an operation begins again, after it found an entry held, before it gives up.
const TRIES: u32 = 8;

/// Runs of leaves that an unmap keeps until their memory can be cleaned.
const RUNS: usize = 4;

/// Tables that a split fills before it links them behind one invalidation.
const TOGETHER: usize = 16;

/// A VMID for the engine's bookkeeping: the platform reads the guest's own when it invalidates.
pub(crate) const ANY: Vmid = Vmid(1);

/// The stage-2 tables of one VM.
#[derive(Debug)]
pub struct Stage2<'p, F: Format, P: Platform> {
    tables: Tables<'p, F, P>,
}

pub(crate) type Inside<'t, 'p, F, P> = Guard<'t, 'p, F, P>;

impl<'p, F: Format, P: Platform> Stage2<'p, F, P> {
    pub(crate) const PAGE: u64 = 1 << F::PAGE_SHIFT;

    /// Makes empty tables for guest physical addresses of `ipa_bits` bits.
    ///
    /// # Errors
    /// [`Errno::NO_MEMORY`], and [`Errno::INVALID`] for a width that the format cannot have.
    pub fn new(format: F, ipa_bits: u32, platform: &'p P) -> Result<Self, Errno> {
        match Tables::new(format, ANY, ipa_bits, platform) {
            Ok(tables) => Ok(Self { tables }),
            Err(NewError::OutOfFrames { .. }) => Err(Errno::NO_MEMORY),
            Err(_) => Err(Errno::INVALID),
        }
    }

    /// Returns the tables.
    pub const fn tables(&self) -> &Tables<'p, F, P> {
        &self.tables
    }

    /// Makes tables that can be given back by pieces.
    ///
    /// # Safety
    /// No CPU has the root loaded, or will load it. CPUs may still hold entries under the VMID: the
    /// kernel gives it to nobody before it has invalidated all of them.
    pub unsafe fn into_unloaded(self) -> slat::UnloadedTables<'p, F, P> {
        // SAFETY: the caller's contract.
        unsafe { self.tables.deactivate_invalidated() }
    }

    #[inline(always)]
    pub(crate) fn enter(&self) -> Inside<'_, 'p, F, P> {
        // SAFETY: nothing calls `reclaim`: tables are given back by `take_retired`, whose caller
        // waits for all that entered before.
        unsafe { self.tables.enter_unchecked() }
    }

    /// Returns whether there are tables for [`Stage2::take_retired`].
    #[inline(always)]
    pub fn has_retired(&self) -> bool {
        self.tables.has_retired()
    }

    /// Takes the tables that were unlinked. The kernel gives them back after a grace period.
    pub fn take_retired(&self) -> RetiredTables<F> {
        self.tables.take_retired()
    }

    /// The pages from `start` up to `end`; `None` where that is no range.
    #[inline(always)]
    fn pages(start: u64, end: u64) -> Option<GpaRange> {
        GpaRange::new(Gpa(start), end.checked_sub(start)?).ok()
    }

    /// The range, with all of the blocks that its ends cut: KVM acts on whole blocks.
    #[cold]
    fn around(guard: &Inside<'_, 'p, F, P>, range: GpaRange) -> Option<GpaRange> {
        let (start, end) = (range.start().0, range.end().0);
        // What has no entry of its own is empty, and may be in the range.
        let below = |gpa| guard.descriptor(Gpa(gpa)).map_or(0, |(_, size)| size.bytes() - 1);
        Self::pages(start & !below(start), ((end - 1) | below(end - 1)) + 1)
    }

    /// Maps `size` bytes, a page or a block, as a fault does, or as the map of a device.
    ///
    /// A page inside a block that maps the same memory splits the block, whose other pages stay
    /// mapped; C unmaps them. A block takes the place of a table.
    ///
    /// # Errors
    /// [`Errno::AGAIN`] if the memory is mapped already, or another thread is changing the entry;
    /// [`Errno::NO_MEMORY`] if `source` has no page; [`Errno::INVALID`].
    pub fn map(
        &self,
        gpa: u64,
        size: u64,
        hpa: u64,
        prot: u64,
        mut source: &mut (dyn FnMut() -> Option<Frame> + Send),
    ) -> Result<(), Errno> {
        let wanted = gpa.checked_add(size).and_then(|end| Self::pages(gpa, end));
        let (Some(leaf), Some(wanted)) = (attributes(prot), wanted) else {
            return Err(Errno::INVALID);
        };
        let largest = PageSize::from_bytes(size).ok_or(Errno::INVALID)?;
        let mut storage = [None];
        // SAFETY: the caller's pages are those of the kernel's cache: zeroed, and freed as tables.
        let mut cache =
            unsafe { TableCache::asking(self.tables.platform(), &mut storage, &mut source) };
        let mut guard = self.enter();
        for _ in 0..TRIES {
            if size > Self::PAGE {
                match guard.replace_table(Gpa(gpa), largest, Hpa(hpa), leaf) {
                    Ok(Some(_)) => return Ok(()),
                    Ok(None) => {}
                    Err(Interruption { reason: MapError::Contended, .. }) => {
                        return Err(Errno::AGAIN);
                    }
                    Err(_) => return Err(Errno::INVALID),
                }
            }
            let reason = match guard.reserve(Gpa(gpa), largest, &mut cache) {
                Ok(entry) if entry.range().size() == size => {
                    return match entry.commit(Hpa(hpa), leaf) {
                        Ok(Some(_)) => Ok(()),
                        Ok(None) => Err(Errno::AGAIN),
                        Err(_) => Err(Errno::INVALID),
                    };
                }
                // Another thread has linked a table.
                Ok(_) => continue,
                Err(Interruption { reason, .. }) => reason,
            };
            match reason {
                MapError::Occupied { size: there, .. } if there < largest => {}
                MapError::Occupied { size: there, hpa: found } => {
                    let inside = there.bytes() > size;
                    if inside && found.0 + (gpa & (there.bytes() - 1)) == hpa {
                        return Self::split_to(&mut guard, (wanted, largest), prot, &mut cache);
                    }
                    let same = there == largest && found.0 == hpa;
                    if same && Self::has_type(&guard, gpa, leaf.memory) {
                        return Err(Errno::AGAIN);
                    }
                    self.clear(&mut guard, wanted)?;
                }
                MapError::CacheEmpty => return Err(Errno::NO_MEMORY),
                MapError::Contended => return Err(Errno::AGAIN),
                _ => return Err(Errno::INVALID),
            }
        }
        Err(Errno::AGAIN)
    }

    #[cold]
    fn has_type(guard: &Inside<'_, 'p, F, P>, gpa: u64, memory: Memory) -> bool {
        let found: Result<_, Contention> = guard.translate(Gpa(gpa));
        matches!(found, Ok(Some(found)) if found.attributes.memory == memory)
    }

    /// Splits the block around a smaller leaf that maps the same memory, and gives that leaf its
    /// rights.
    #[cold]
    #[inline(never)]
    fn split_to(
        guard: &mut Inside<'_, 'p, F, P>,
        (wanted, size): (GpaRange, PageSize),
        prot: u64,
        cache: &mut TableCache<'_, F, P>,
    ) -> Result<(), Errno> {
        match guard.split(wanted, size, cache) {
            Ok(_) => {}
            Err(Interruption { reason: SplitError::CacheEmpty, .. }) => {
                return Err(Errno::NO_MEMORY);
            }
            Err(_) => return Err(Errno::AGAIN),
        }
        let rights = accesses(prot).ok_or(Errno::INVALID)?;
        match guard.relax_leaf(wanted.start(), rights) {
            Ok(Some(given)) => {
                given.flush_local();
                Ok(())
            }
            _ => Err(Errno::AGAIN),
        }
    }

    /// Unmaps `size` bytes from `gpa`, and the whole of a block that they cut. No CPU has a
    /// translation of them when it returns; without FEAT_S2FWB the memory is clean.
    ///
    /// # Errors
    /// [`Errno::AGAIN`] if another thread held an entry for too long: the rest stays mapped.
    pub fn unmap(&self, gpa: u64, size: u64) -> Result<(), Errno> {
        let range = gpa.checked_add(size).and_then(|end| Self::pages(gpa, end));
        self.clear(&mut self.enter(), range.ok_or(Errno::INVALID)?)
    }

    fn clear(&self, guard: &mut Inside<'_, 'p, F, P>, mut range: GpaRange) -> Result<(), Errno> {
        let mut places = [const { UnmapEntry::EMPTY }; RUNS];
        let forced = self.tables.format().forces_caches();
        // Without a need to clean, one place serves a range of any content.
        let places = if forced { &mut places[..1] } else { &mut places[..] };
        let mut removals = guard.unmap_batch(places);
        if forced {
            removals = removals.forgetting();
        }
        let (mut tries, mut result) = (TRIES, Ok(()));
        while let Err(Interruption { at, reason }) = guard.unmap(range, &mut removals) {
            let rest = match reason {
                UnmapError::CutsBlock { .. } if tries > 0 => {
                    tries -= 1;
                    Self::around(guard, range)
                }
                UnmapError::Full => {
                    self.complete(&mut removals);
                    Self::pages(at.0, range.end().0)
                }
                UnmapError::Contended if tries > 0 => {
                    tries -= 1;
                    Self::pages(at.0, range.end().0)
                }
                _ => None,
            };
            let Some(rest) = rest else {
                let changes =
                    matches!(reason, UnmapError::Contended | UnmapError::CutsBlock { .. });
                result = Err(if changes { Errno::AGAIN } else { Errno::INVALID });
                break;
            };
            range = rest;
        }
        self.complete(&mut removals);
        result
    }

    /// Completes removals; without FEAT_S2FWB cleans the memory, which the guest may have accessed
    /// uncached.
    fn complete(&self, removals: &mut UnmapBatch<'_, '_, F, P>) {
        let forced = self.tables.format().forces_caches();
        for run in removals.complete() {
            if !forced && run.attributes.memory == Memory::Normal {
                let platform = self.tables.platform();
                platform.maintain(run.hpa, run.bytes, slat::Maintenance::Data);
            }
        }
    }

    /// Gives the leaf at `gpa` rights, as a permission fault does, and removes the old ones from
    /// this CPU's TLB.
    ///
    /// # Errors
    /// [`Errno::AGAIN`] if no leaf is there, or another thread held the entry; this CPU's TLB entry
    /// is gone then as well. [`Errno::INVALID`] for bits of nested guests.
    pub fn relax(&self, gpa: u64, prot: u64) -> Result<(), Errno> {
        let rights = accesses(prot).ok_or(Errno::INVALID)?;
        match self.enter().relax_leaf(Gpa(gpa), rights) {
            Ok(Some(given)) => {
                given.flush_local();
                Ok(())
            }
            _ => {
                let page = gpa & !(Self::PAGE - 1);
                let range = Self::pages(page, page + Self::PAGE);
                let what = Invalidation { vmid: ANY, range, leaf: None, tables: false };
                self.tables.platform().invalidate_local(&what);
                Err(Errno::AGAIN)
            }
        }
    }

    /// Marks the leaf at `gpa` as used, as an access-flag fault does; returns its descriptor, or 0.
    pub fn mkyoung(&self, gpa: u64) -> u64 {
        let mut guard = self.enter();
        let given = guard.relax_leaf(Gpa(gpa), Accesses::from(Access::Read));
        let Ok(Some(given)) = given else { return 0 };
        // A leaf that was not accessed is in no TLB.
        given.not_needed_here();
        guard.descriptor(Gpa(gpa)).map_or(0, |(raw, _)| raw)
    }

    /// Takes the right to write from `size` bytes at `gpa`, and the whole of a block that they cut.
    /// The caller invalidates later.
    ///
    /// # Errors
    /// [`Errno::AGAIN`] if another thread held an entry for too long.
    pub fn wrprotect(&self, gpa: u64, size: u64) -> Result<(), Errno> {
        let range = gpa.checked_add(size).and_then(|end| Self::pages(gpa, end));
        let mut range = range.ok_or(Errno::INVALID)?;
        let mut guard = self.enter();
        let mut tries = TRIES;
        let result = loop {
            let Err(Interruption { at, reason }) = guard.write_protect(range) else { break Ok(()) };
            let rest = match reason {
                ChangeError::CutsBlock { .. } if tries > 0 => {
                    tries -= 1;
                    Self::around(&guard, range)
                }
                ChangeError::Contended if tries > 0 => {
                    tries -= 1;
                    Self::pages(at.0, range.end().0)
                }
                ChangeError::Contended | ChangeError::CutsBlock { .. } => break Err(Errno::AGAIN),
                _ => None,
            };
            let Some(rest) = rest else { break Err(Errno::INVALID) };
            range = rest;
        };
        // SAFETY: KVM invalidates the memslot, or the VM, once it has protected all of it, and
        // relies on nothing before. The guard has cleared no dirty state.
        _ = unsafe { guard.hand_over() };
        result
    }

    /// Returns whether any page of `size` bytes at `gpa` was used since it was aged last; with
    /// `clear` ages them, and the whole of a block that they cut. Nothing is invalidated.
    pub fn age(&self, gpa: u64, size: u64, clear: bool) -> bool {
        let mut guard = self.enter();
        let (start, end) = (gpa & !(Self::PAGE - 1), gpa.saturating_add(size));
        // A walk only tests a block that its range cuts. So the leaf at the end is aged by itself.
        let (last, young) = Self::age_leaf(&mut guard, (end - 1) & !(Self::PAGE - 1), clear);
        let end = last.0;
        if start < end { Self::age_range(&mut guard, start, end, clear) | young } else { young }
    }

    /// Returns the leaf around `page`, or the page, and whether it was used.
    #[inline(always)]
    fn age_leaf(guard: &mut Inside<'_, 'p, F, P>, page: u64, clear: bool) -> ((u64, u64), bool) {
        match guard.age_leaf(Gpa(page), clear) {
            Ok(Some((leaf, used))) => ((leaf.start().0, leaf.end().0), used),
            _ => ((page, page + Self::PAGE), false),
        }
    }

    /// Ages all that lies between the start of a page and the start of a leaf.
    #[inline(never)]
    fn age_range(guard: &mut Inside<'_, 'p, F, P>, mut at: u64, end: u64, clear: bool) -> bool {
        const WORDS: usize = 16;
        let chunk = WORDS as u64 * 64 * Self::PAGE;
        let mut young = false;
        while at < end {
            // So is the leaf at the start of each chunk. They are aligned: blocks inside are whole.
            let (leaf, used) = Self::age_leaf(guard, at, clear);
            young |= used;
            at = leaf.1;
            let to = end.min(at.next_multiple_of(chunk));
            let Some(range) = Self::pages(at, to).filter(|_| at < to) else { continue };
            let (mut found, mut unanswered) = ([0; WORDS], [0; WORDS]);
            let mut ages = AgeBitmaps { young: &mut found, unanswered: &mut unanswered };
            let how = AgeOptions { clear, ..AgeOptions::LEAVES };
            // A page without an answer is being changed: KVM is told that it is old.
            _ = guard.age(range, &mut ages, how);
            young |= found.iter().any(|word| *word != 0);
            at = to;
        }
        young
    }

    /// Cleans the memory of `size` bytes at `gpa` to the point of coherency.
    ///
    /// # Errors
    /// [`Errno::AGAIN`] if another thread held an entry for too long.
    pub fn flush(&self, gpa: u64, size: u64) -> Result<(), Errno> {
        let range = gpa.checked_add(size).and_then(|end| Self::pages(gpa, end));
        let mut range = range.ok_or(Errno::INVALID)?;
        let mut guard = self.enter();
        for _ in 0..TRIES {
            match guard.clean_caches(range) {
                Ok(_) => return Ok(()),
                Err(Interruption { at, reason: ChangeError::Contended }) => {
                    range = Self::pages(at.0, range.end().0).ok_or(Errno::INVALID)?;
                }
                Err(_) => return Err(Errno::INVALID),
            }
        }
        Err(Errno::AGAIN)
    }

    /// Splits the blocks of `size` bytes at `gpa` into pages, with table pages from `source`.
    ///
    /// # Errors
    /// [`Errno::NO_MEMORY`] where `source` has no more; what is split before stays split.
    /// [`Errno::AGAIN`] if another thread held an entry for too long.
    pub fn split(
        &self,
        gpa: u64,
        size: u64,
        mut source: &mut (dyn FnMut() -> Option<Frame> + Send),
    ) -> Result<(), Errno> {
        let end = gpa.checked_add(size).ok_or(Errno::INVALID)?;
        let page = PageSize::from_bytes(Self::PAGE).ok_or(Errno::INVALID)?;
        let mut storage = [const { None }; TOGETHER];
        // SAFETY: as in `map`.
        let mut cache =
            unsafe { TableCache::asking(self.tables.platform(), &mut storage, &mut source) };
        let mut guard = self.enter();
        let mut at = gpa;
        for _ in 0..TRIES {
            let range = Self::pages(at, end).ok_or(Errno::INVALID)?;
            match guard.split_together(range, page, &mut cache, TOGETHER) {
                Ok(_) => return Ok(()),
                Err(Interruption { reason: SplitError::CacheEmpty, .. }) => {
                    return Err(Errno::NO_MEMORY);
                }
                Err(Interruption { at: stopped, reason: SplitError::Contended }) => {
                    at = stopped.0 & !(Self::PAGE - 1);
                }
                Err(_) => return Err(Errno::INVALID),
            }
        }
        Err(Errno::AGAIN)
    }
}
