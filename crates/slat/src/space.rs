//! Tables with one owner, which needs no seat, no cache and no guard.

mod cursor;

use self::cursor::Cursor;
use crate::addr::{Gpa, GpaRange, Hpa, PageSize};
use crate::cache::{OutOfFrames, TableCache};
use crate::format::{Attributes, Format, Geometry, Rights, Software};
use crate::guard::Guard;
use crate::ops::{
    ChangeError, Consumer, ConsumerError, MapError, Place, Refusal, Removed, SplitError,
    UnmapError, Vacantly,
};
use crate::platform::Platform;
use crate::shootdown::Vmid;
use crate::sync::relax;
use crate::tables::{Contended, Halted, NewError, Tables, Translation};
use crate::walk::PATIENCE;
use core::fmt;

/// A guest's address space with one owner; other libraries call this a page table.
///
/// The tables are live: CPUs may have the root loaded. A call that changes them takes `&mut self`,
/// allocates the table pages that it needs, splits blocks that its range cuts, invalidates what it
/// has to, and gives back tables that it left empty. When it returns, all of that is complete. An
/// owner that has several threads, or needs dirty logs, ageing, or one invalidation for many calls,
/// uses [`AddressSpace::guard`], or [`Tables`] from the start.
///
/// Dropping it leaks its tables, as hardware may be walking them: see [`AddressSpace::destroy`].
///
/// Only calls that take `&mut self` give tables back. So lookups and guards, which borrow it, need
/// no seat. [`Tables`], which several threads may reclaim, are not available at the same time:
/// ```compile_fail,E0502
/// # use slat::*;
/// fn look<F: Format, P: Platform>(space: &mut AddressSpace<'_, F, P>) {
///     let guard = space.guard();
///     space.tables().reclaim();
///     guard.dump();
/// }
/// ```
#[must_use = "dropped, the address space leaks its tables"]
#[derive(Debug)]
pub struct AddressSpace<'p, F: Format, P: Platform> {
    tables: Tables<'p, F, P>,
    /// The table in which a page was mapped last.
    cursor: Cursor,
}

/// The number of table pages that a call asks the platform for at once.
const BATCH: usize = 8;

/// The number of runs of leaves that an unmap hands out after one invalidation.
const RUNS: usize = 16;

/// Reason why an address space, or part of a range in it, was not changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum SpaceError {
    /// Nothing was mapped: the range, the host address, the size of leaves or the attributes are
    /// not valid, something else is mapped there, or an address has an owner.
    Map(MapError),
    /// Nothing was changed: the range, the rights or the software bits are not valid.
    Change(ChangeError),
    /// Nothing was unmapped: the range is not valid.
    Unmap(UnmapError),
    /// A block that an end of the range cuts could not be split.
    Split(SplitError),
    /// The platform has no more table pages. [`AddressSpace::map`] has mapped what precedes the
    /// address; other calls have changed nothing, but may have split a block.
    OutOfFrames,
}

impl fmt::Display for SpaceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Map(error) => error.fmt(f),
            Self::Change(error) => error.fmt(f),
            Self::Unmap(error) => error.fmt(f),
            Self::Split(error) => error.fmt(f),
            Self::OutOfFrames => f.write_str("the platform has no more table pages"),
        }
    }
}

impl core::error::Error for SpaceError {}

/// Returns the part of a range from an address in it on.
fn rest(range: GpaRange, at: Gpa) -> GpaRange {
    GpaRange::new(at, range.end().0 - at.0).unwrap_or(range)
}

impl<'p, F: Format, P: Platform> AddressSpace<'p, F, P> {
    /// Makes empty tables for guest physical addresses of `address_bits` bits, which decide at
    /// which level walks start.
    ///
    /// # Errors
    /// The errors of [`Tables::new`].
    pub fn new(
        format: F,
        vmid: Vmid,
        address_bits: u32,
        platform: &'p P,
    ) -> Result<Self, NewError> {
        let tables = Tables::new(format, vmid, address_bits, platform)?;
        Ok(Self { tables, cursor: Cursor::new() })
    }

    /// Returns the address of the root, as [`Tables::root`].
    pub const fn root(&self) -> Hpa {
        self.tables.root()
    }

    /// Returns the level at which hardware starts its walks, and the size of the root.
    pub const fn geometry(&self) -> Geometry {
        self.tables.geometry()
    }

    /// Returns the format, as configured.
    pub const fn format(&self) -> &F {
        self.tables.format()
    }

    /// Returns the guest's present VMID.
    pub fn vmid(&self) -> Vmid {
        self.tables.vmid()
    }

    /// As [`Tables::renew`].
    ///
    /// # Safety
    /// The contract of [`Tables::renew`].
    pub unsafe fn renew(&self, vmid: Vmid) -> Vmid {
        // SAFETY: the caller's promise is the callee's.
        unsafe { self.tables.renew(vmid) }
    }

    /// Returns the platform that the tables use.
    pub const fn platform(&self) -> &'p P {
        self.tables.platform()
    }

    /// Returns the tables, for threads that have seats. They may work on the tables, and reclaim,
    /// at once.
    pub fn tables(&mut self) -> &Tables<'p, F, P> {
        self.cursor.forget();
        &self.tables
    }

    /// Enters the tables: all operations of the engine are methods of the guard. Any number of
    /// threads have guards of their own at once, and none needs a seat. The caller
    /// [completes](Guard::complete) what an operation leaves stale; if it took rights or dirty
    /// state, dropping the guard completes it. Tables that an operation unlinks stay until
    /// [`AddressSpace::reclaim`].
    pub fn guard(&self) -> Guard<'_, 'p, F, P> {
        self.cursor.forget();
        // SAFETY: the guard borrows `self`, so no thread calls `Tables::reclaim` while it lives:
        // only methods that borrow `self` mutably do, and users of `AddressSpace::tables`, which
        // also borrows it mutably.
        unsafe { self.tables.enter_unseated() }
    }

    /// As [`Tables::add_consumer`].
    ///
    /// # Errors
    /// The errors of [`Tables::add_consumer`].
    pub fn add_consumer(&mut self, mark: Software) -> Result<Consumer, ConsumerError> {
        self.tables.add_consumer(mark)
    }

    /// Gives back tables that [guards](AddressSpace::guard) have unlinked, and returns how many, as
    /// [`Tables::reclaim`]. [`AddressSpace::unmap`] and [`AddressSpace::discard`] do so at their
    /// end.
    pub fn reclaim(&mut self) -> usize {
        self.cursor.forget();
        self.tables.reclaim()
    }

    /// Maps `range` to the memory at `hpa`, with leaves of at most `largest`, as large as alignment
    /// allows. Leaves that map the same memory with the same attributes already stay.
    ///
    /// # Errors
    /// [`SpaceError::Map`]: nothing is mapped. [`SpaceError::OutOfFrames`]: what precedes the
    /// address is.
    #[inline]
    pub fn map(
        &mut self,
        range: GpaRange,
        hpa: Hpa,
        attributes: Attributes,
        largest: PageSize,
    ) -> Result<(), Halted<SpaceError>> {
        let Self { tables, cursor } = self;
        if let Some(ptes) = cursor.entries::<F, P>(tables.platform, range.start())
            && tables.map_in(ptes, &range, hpa, attributes, largest)
        {
            return Ok(());
        }
        self.map_walk(range, hpa, attributes, largest)
    }

    #[inline(never)]
    fn map_walk(
        &mut self,
        range: GpaRange,
        hpa: Hpa,
        attributes: Attributes,
        largest: PageSize,
    ) -> Result<(), Halted<SpaceError>> {
        let platform = self.tables.platform();
        let page = range.size() == 1 << F::PAGE_SHIFT;
        let mut storage = [const { None }; BATCH];
        let mut cache = TableCache::new(platform, &mut storage);
        let mut guard = self.tables.exclusive();
        let mut left = range;
        loop {
            let to = Hpa(hpa.0.wrapping_add(left.start().0 - range.start().0));
            let memory = (to, false);
            let result = guard.map_by::<Vacantly>(left, memory, attributes, largest, &mut cache);
            let Err(Halted { at, why }) = result else { break };
            match why {
                MapError::CacheEmpty if page => {
                    // The cache needs as many pages as tables are missing.
                    let (_, missing) = guard.tables.descend(at.0, 0, |_, _| ());
                    fill(&mut cache, at, usize::from(missing.max(1)))?;
                }
                MapError::CacheEmpty => fill(&mut cache, at, BATCH)?,
                MapError::Contended => {}
                why => return Err(Halted { at, why: SpaceError::Map(why) }),
            }
            left = rest(range, at);
        }
        drop(guard);
        if page {
            self.cursor.set(&self.tables, range.start());
        }
        Ok(())
    }

    /// Sets the rights of all that is mapped in `range` to exactly `rights`, as [`Guard::protect`],
    /// and splits a block that the range cuts. Returns the bytes that changed. No CPU uses the old
    /// rights when this returns.
    ///
    /// # Errors
    /// [`SpaceError::Change`] of [`ChangeError::Range`], or of [`ChangeError::Attributes`] for
    /// rights that the format, as configured, cannot express; [`SpaceError::OutOfFrames`] where a
    /// block that the range cuts cannot be split. No leaf's rights are changed.
    pub fn protect(&mut self, range: GpaRange, rights: Rights) -> Result<u64, Halted<SpaceError>> {
        self.change(range, |guard, left| guard.protect(left, rights))
    }

    /// Sets the software bits `set` of all that is mapped in `range`, and clears those of `clear`,
    /// as [`Guard::set_software`]; it splits a block that the range cuts, unless that has the bits
    /// already. Returns the bytes that changed.
    ///
    /// # Errors
    /// [`SpaceError::Change`] of [`ChangeError::Range`], of [`ChangeError::Attributes`] for bits
    /// that the format lacks, or of [`ChangeError::Consumers`] for marks of consumers;
    /// [`SpaceError::OutOfFrames`] where a block that the range cuts cannot be split. No leaf's
    /// bits are changed.
    pub fn set_software(
        &mut self,
        range: GpaRange,
        set: Software,
        clear: Software,
    ) -> Result<u64, Halted<SpaceError>> {
        self.change(range, |guard, left| guard.set_software(left, set, clear))
    }

    /// Repeats `change` until all leaves are changed, and splits a block that the range cuts.
    fn change(
        &mut self,
        range: GpaRange,
        change: impl Fn(&mut Guard<'_, 'p, F, P>, GpaRange) -> Result<u64, Halted<ChangeError>>,
    ) -> Result<u64, Halted<SpaceError>> {
        self.cursor.forget();
        let (mut left, mut changed) = (range, 0);
        loop {
            let mut guard = self.tables.exclusive();
            let result = change(&mut guard, left);
            changed += guard.counts().bytes_changed;
            guard.complete();
            drop(guard);
            let Err(Halted { at, why }) = result else { return Ok(changed) };
            match why {
                ChangeError::CutsBlock { .. } => self.split_edges(range)?,
                ChangeError::Contended => left = rest(range, at),
                why => return Err(Halted { at, why: SpaceError::Change(why) }),
            }
        }
    }

    /// Unmaps `range`, and splits a block that the range cuts. Hands what was mapped to `removed`,
    /// in runs of adjacent leaves with the same attributes, once no CPU can reach it. Returns the
    /// bytes that were mapped. If `removed` panics, up to 16 further runs may be unmapped without
    /// having been handed out; the rest of the range stays mapped.
    ///
    /// # Errors
    /// [`SpaceError::Unmap`], and [`SpaceError::OutOfFrames`] where a block that the range cuts
    /// cannot be split: nothing is unmapped.
    #[inline(always)]
    pub fn unmap(
        &mut self,
        range: GpaRange,
        removed: impl FnMut(Removed),
    ) -> Result<u64, Halted<SpaceError>> {
        self.cursor.forget();
        // A page makes one run.
        if range.size() == 1 << F::PAGE_SHIFT {
            self.unmap_runs(range, &mut [Place::EMPTY], removed)
        } else {
            self.unmap_many(range, removed)
        }
    }

    #[inline(never)]
    fn unmap_many(
        &mut self,
        range: GpaRange,
        removed: impl FnMut(Removed),
    ) -> Result<u64, Halted<SpaceError>> {
        self.unmap_runs(range, &mut [const { Place::EMPTY }; RUNS], removed)
    }

    #[inline(always)]
    fn unmap_runs(
        &mut self,
        range: GpaRange,
        places: &mut [Place],
        mut removed: impl FnMut(Removed),
    ) -> Result<u64, Halted<SpaceError>> {
        let (mut left, mut bytes) = (range, 0);
        loop {
            let mut guard = self.tables.exclusive();
            let mut removals = guard.removals(places);
            let result = guard.unmap(left, &mut removals);
            for run in removals.complete() {
                bytes += run.bytes;
                removed(run);
            }
            drop((removals, guard));
            let Err(Halted { at, why }) = result else { break };
            match why {
                UnmapError::CutsBlock { .. } => self.split_edges(range)?,
                UnmapError::Full | UnmapError::Contended => left = rest(range, at),
                why => return Err(Halted { at, why: SpaceError::Unmap(why) }),
            }
        }
        self.tables.reclaim();
        Ok(bytes)
    }

    /// Unmaps `range`, as [`AddressSpace::unmap`], for an owner that knows which memory is behind
    /// it: it hands nothing out. No CPU reaches any of it when this returns.
    ///
    /// Tables that the range covers whole are dropped without reading their entries of pages, and
    /// one invalidation covers all such tables. Another one covers the rest of the range. Where
    /// addresses have, or had, owners ([`Guard::set_owner`]), this reads all entries, as an owner
    /// keeps its entry.
    ///
    /// # Errors
    /// [`SpaceError::Unmap`], and [`SpaceError::OutOfFrames`] where a block that the range cuts
    /// cannot be split: nothing is unmapped.
    pub fn discard(&mut self, range: GpaRange) -> Result<(), Halted<SpaceError>> {
        self.cursor.forget();
        while let Err(refusal) = self.tables.drop_tables(&range) {
            match refusal {
                Refusal::CutsBlock { .. } => self.split_edges(range)?,
                Refusal::Range(error) => {
                    let why = SpaceError::Unmap(UnmapError::Range(error));
                    return Err(Halted { at: range.start(), why });
                }
            }
        }
        let mut left = range;
        loop {
            let mut places = [Place::EMPTY];
            let mut guard = self.tables.exclusive();
            let mut removals = guard.removals(&mut places).forgetting();
            let result = guard.unmap(left, &mut removals);
            removals.complete().for_each(drop);
            let Err(Halted { at, why }) = result else { break };
            match why {
                UnmapError::Contended => left = rest(range, at),
                why => return Err(Halted { at, why: SpaceError::Unmap(why) }),
            }
        }
        self.tables.reclaim();
        Ok(())
    }

    /// Unmaps the leaf that translates `gpa`, and returns its address, size, memory and attributes;
    /// `None` if nothing is mapped there.
    ///
    /// # Errors
    /// [`SpaceError::Unmap`].
    pub fn unmap_leaf(&mut self, gpa: Gpa) -> Result<Option<Removed>, Halted<SpaceError>> {
        let Some(Translation { size, .. }) = self.query(gpa) else { return Ok(None) };
        let start = Gpa(gpa.0 & !(size.bytes() - 1));
        let failed = |why| Halted { at: gpa, why: SpaceError::Unmap(UnmapError::Range(why)) };
        let mut found = None;
        self.unmap(GpaRange::new(start, size.bytes()).map_err(failed)?, |run| found = Some(run))?;
        Ok(found)
    }

    /// Translates `gpa`; `None` if nothing is mapped there, or if [`AddressSpace::translate`] finds
    /// it contended, which it does only beside [guards](AddressSpace::guard).
    #[inline(always)]
    pub fn query(&self, gpa: Gpa) -> Option<Translation> {
        // No thread reclaims: that takes `&mut self`, and `self` is borrowed here.
        match self.tables.translate::<false>(&self.tables.start(), gpa) {
            Ok(found) => found,
            Err(Contended { .. }) => self.query_again(gpa),
        }
    }

    #[cold]
    #[inline(never)]
    fn query_again(&self, gpa: Gpa) -> Option<Translation> {
        self.translate_again(gpa).unwrap_or(None)
    }

    /// Translates `gpa`; `None` if nothing is mapped there. Waits for as long as an operation of a
    /// guard does if another thread's guard holds the entry.
    ///
    /// # Errors
    /// [`Contended`]: the guard still holds the entry, which translates nothing now, and may be
    /// about to appear or to vanish.
    #[inline(always)]
    pub fn translate(&self, gpa: Gpa) -> Result<Option<Translation>, Contended> {
        match self.tables.translate::<false>(&self.tables.start(), gpa) {
            Err(Contended { .. }) => self.translate_again(gpa),
            found => found,
        }
    }

    /// The thread that holds the entry may wait for this CPU, or be this one, inside the closure of
    /// [`Reservation::commit_told`](crate::Reservation::commit_told): so this does not wait for
    /// longer.
    #[cold]
    #[inline(never)]
    fn translate_again(&self, gpa: Gpa) -> Result<Option<Translation>, Contended> {
        for _ in 0..PATIENCE {
            let found = self.tables.translate::<false>(&self.tables.start(), gpa);
            if found.is_ok() {
                return found;
            }
            relax();
        }
        Err(Contended { at: gpa })
    }

    /// Gives back every table to the platform.
    ///
    /// # Safety
    /// No CPU has the root loaded, nor loads it later.
    pub unsafe fn destroy(self) {
        // SAFETY: the caller's promise is the callee's.
        unsafe { self.tables.deactivate() }.destroy();
    }

    /// Splits the blocks that an end of the range cuts, down to pages at that end.
    fn split_edges(&mut self, range: GpaRange) -> Result<(), Halted<SpaceError>> {
        let platform = self.tables.platform();
        let page = F::size(0);
        for edge in [range.start(), range.end()] {
            // The size of the leaf itself: a query gives that of its group.
            let entry = self.tables.exclusive().descriptor(edge);
            let cuts = entry.is_some_and(|(_, size)| edge.0 & (size.bytes() - 1) != 0);
            if !cuts || self.query(edge).is_none() {
                continue;
            }
            let at = GpaRange::new(edge, page.bytes()).unwrap_or(range);
            let mut storage = [const { None }; BATCH];
            let mut cache = TableCache::new(platform, &mut storage);
            let mut guard = self.tables.exclusive();
            while let Err(Halted { at, why }) = guard.split(at, page, &mut cache) {
                match why {
                    SplitError::CacheEmpty => fill(&mut cache, at, BATCH)?,
                    SplitError::Contended => {}
                    why => return Err(Halted { at, why: SpaceError::Split(why) }),
                }
            }
        }
        Ok(())
    }
}

/// Adds table pages to the cache of an operation that stopped for lack of them.
fn fill<F: Format, P: Platform>(
    cache: &mut TableCache<'_, F, P>,
    at: Gpa,
    pages: usize,
) -> Result<(), Halted<SpaceError>> {
    match cache.fill(pages) {
        Err(OutOfFrames { at_hand: 0, .. }) => Err(Halted { at, why: SpaceError::OutOfFrames }),
        _ => Ok(()),
    }
}
