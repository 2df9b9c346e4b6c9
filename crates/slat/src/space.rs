//! Tables with one owner, which needs no reader slot, no cache and no guard.

mod change;
mod cursor;
mod empty;
mod fill;
mod walk;

use self::change::Rewrite;
use self::cursor::Cursor;
use self::empty::Empty;
use self::fill::Fill;
use crate::addr::{Gpa, GpaRange, Hpa, PageSize, RangeError};
use crate::build::Plan;
use crate::format::{Attributes, Format, Geometry, GuestRoot, Rights, Software};
use crate::guard::Guard;
use crate::invalidation::{PendingFlush, Vmid};
use crate::ops::{
    ChangeError, Exactly, MapError, Rule, SoftwareBitsRule, UnmapError, UnmappedRun, leaf_bits,
    maintenance,
};
use crate::platform::{Maintenance, Platform};
use crate::retired::Chain;
use crate::sync::relax;
use crate::tables::{Contention, Interruption, NewError, Tables, Translation};
use crate::walk::PATIENCE;
use core::fmt;

/// A guest's address space with one owner; other libraries call this a page table.
///
/// The tables are live: CPUs may have the root loaded. A call that changes them takes `&mut self`,
/// allocates the table pages that it needs, splits blocks that its range cuts, invalidates what it
/// has to, and gives back tables that it left empty. When it returns, all of that is complete. An
/// owner that has several threads, or needs dirty logs, ageing, or one invalidation for many calls,
/// uses [`AddressSpace::enter`], or [`Tables`] from the start.
///
/// Dropping it leaks its tables, as hardware may be walking them: see [`AddressSpace::destroy`].
///
/// ```
/// use slat::format::npt::Npt1G;
/// use slat::*;
///
/// let host = AllocPlatform::new();
/// let mut space = AddressSpace::new(Npt1G::default(), Vmid(1), 48, &host)?;
/// let ram = GpaRange::new(Gpa(0), 4 << 20)?;
/// space.map(ram, Hpa(8 << 30), Attributes::RAM, PageSize::SIZE_2M)?;
///
/// // A range of pages cuts a block, which is split.
/// let code = GpaRange::new(Gpa(0x20_0000), 0x3000)?;
/// space.protect(code, Rights { read: true, write: false, execute: Execute::All })?;
/// let found = space.query(Gpa(0x20_1234)).expect("it is mapped");
/// assert_eq!((found.hpa, found.size), (Hpa(0x2_0020_1234), PageSize::SIZE_4K));
/// assert!(!found.attributes.write);
///
/// let mut bytes = 0;
/// space.unmap(ram, |gone| bytes += gone.bytes)?; // no CPU reaches the memory now
/// assert_eq!(bytes, 4 << 20);
/// // SAFETY: no CPU has the root loaded.
/// unsafe { space.destroy() };
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Only calls that take `&mut self` give tables back. So lookups and guards, which borrow it, need
/// no reader slot. [`Tables`], which several threads may reclaim, are not available at the same
/// time:
/// ```compile_fail,E0502
/// # use slat::*;
/// fn look<F: Format, P: Platform>(space: &mut AddressSpace<'_, F, P>) {
///     let guard = space.enter();
///     space.tables().reclaim();
///     guard.dump();
/// }
/// ```
#[must_use = "dropped, the address space leaks its tables"]
#[derive(Debug)]
pub struct AddressSpace<'p, F: Format, P: Platform> {
    tables: Tables<'p, F, P>,
    cursor: Cursor,
}

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
    /// The platform has no more table pages. [`AddressSpace::map`] has mapped what precedes the
    /// address; other calls have changed nothing, but may have split a block.
    OutOfFrames,
    /// A guard's operation was forgotten half way, such as a reservation inside
    /// [`commit_told`](crate::Reservation::commit_told) that panicked, and left its marker at the
    /// address. What precedes the address is done.
    Contended,
}

impl fmt::Display for SpaceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Map(error) => error.fmt(f),
            Self::Change(error) => error.fmt(f),
            Self::Unmap(error) => error.fmt(f),
            Self::OutOfFrames => f.write_str("the platform has no more table pages"),
            Self::Contended => f.write_str("an operation was forgotten half way at this address"),
        }
    }
}

impl core::error::Error for SpaceError {}

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
        Ok(Self { tables, cursor: Cursor::nowhere() })
    }

    /// As [`Tables::guest_root`].
    pub fn guest_root(&self) -> GuestRoot<F> {
        self.tables.guest_root()
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

    /// As [`Tables::set_vmid`].
    ///
    /// # Safety
    /// The contract of [`Tables::set_vmid`].
    pub unsafe fn set_vmid(&self, vmid: Vmid) -> Vmid {
        // SAFETY: the caller's promise is the callee's.
        unsafe { self.tables.set_vmid(vmid) }
    }

    /// Returns the platform that the tables use.
    pub const fn platform(&self) -> &'p P {
        self.tables.platform()
    }

    /// Returns the tables, for threads that have reader slots. They may work on the tables, and
    /// reclaim, at once.
    pub fn tables(&mut self) -> &Tables<'p, F, P> {
        self.cursor.forget();
        &self.tables
    }

    /// Enters the tables: all operations of the engine are methods of the guard. Any number of
    /// threads have guards of their own at once, and none needs a reader slot. The caller
    /// [invalidates](Guard::invalidate) what an operation leaves stale; if it took rights or dirty
    /// state, dropping the guard completes it. Tables that an operation unlinks stay until
    /// [`AddressSpace::reclaim`].
    pub fn enter(&self) -> Guard<'_, 'p, F, P> {
        self.cursor.forget();
        // SAFETY: the guard borrows `self`, so no thread calls `Tables::reclaim` while it lives:
        // only methods that borrow `self` mutably do, and users of `AddressSpace::tables`, which
        // also borrows it mutably.
        unsafe { self.tables.enter_unchecked() }
    }

    /// Gives back tables that [guards](AddressSpace::enter) have unlinked, and returns how many, as
    /// [`Tables::reclaim`]. [`AddressSpace::unmap`] and [`AddressSpace::discard`] do so at their
    /// end.
    pub fn reclaim(&mut self) -> usize {
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
    ) -> Result<(), Interruption<SpaceError>> {
        let refused = |reason| Interruption { at: range.start(), reason: SpaceError::Map(reason) };
        let plan = self.tables.plan(&range, hpa, attributes, largest).map_err(refused)?;
        let maintenance = maintenance(&attributes);
        if self.cursor.map_page(&self.tables, &plan, maintenance) {
            return Ok(());
        }
        self.fill(plan, maintenance)
    }

    #[inline(never)]
    fn fill(
        &mut self,
        plan: Plan,
        maintenance: Option<Maintenance>,
    ) -> Result<(), Interruption<SpaceError>> {
        let Self { tables, cursor } = self;
        let bounds = (plan.start, plan.end);
        // A single page cannot be half done.
        let fills = plan.end - plan.start == 1 << F::PAGE_SHIFT;
        let mut fill = Fill { tables, plan, maintenance, fills };
        let result = loop {
            let result = tables.each(cursor, bounds, &mut fill);
            if fill.fills || result.is_err() {
                break result;
            }
            fill.fills = true;
        };
        tables.platform.publish();
        result
    }

    /// Sets the rights of all that is mapped in `range` to exactly `rights`, as [`Guard::protect`],
    /// and splits a block that the range cuts. Returns the bytes that changed. No CPU uses the old
    /// rights when this returns.
    ///
    /// # Errors
    /// [`SpaceError::Change`] of [`ChangeError::Range`], or of [`ChangeError::Attributes`] for
    /// rights that the format, as configured, cannot express; [`SpaceError::OutOfFrames`] where a
    /// block that the range cuts cannot be split. No leaf's rights are changed.
    pub fn protect(
        &mut self,
        range: GpaRange,
        rights: Rights,
    ) -> Result<u64, Interruption<SpaceError>> {
        let format = self.tables.format;
        let Rights { read, write, execute } = rights;
        let leaf = Attributes { read, write, execute, ..Attributes::RAM };
        if let Err(reason) = format.encode(leaf) {
            let reason = SpaceError::Change(ChangeError::Attributes(reason));
            return Err(Interruption { at: range.start(), reason });
        }
        self.rewrite(range, Exactly(format, rights))
    }

    /// Sets the software bits `set` of all that is mapped in `range`, and clears those of `clear`,
    /// as [`Guard::set_software`]; it splits a block that the range cuts, unless that has the bits
    /// already. Returns the bytes that changed.
    ///
    /// # Errors
    /// [`SpaceError::Change`] of [`ChangeError::Range`], or of [`ChangeError::Attributes`] for bits
    /// that the format lacks; [`SpaceError::OutOfFrames`] where a block that the range cuts cannot
    /// be split. No leaf's bits are changed.
    pub fn set_software(
        &mut self,
        range: GpaRange,
        set: Software,
        clear: Software,
    ) -> Result<u64, Interruption<SpaceError>> {
        let bits = |software| {
            let refused = |Interruption { at, reason }| Interruption {
                at,
                reason: SpaceError::Change(reason),
            };
            leaf_bits::<F>(&range, software).map_err(refused)
        };
        let (set, clear) = (bits(set)?, bits(clear)?);
        self.rewrite(range, SoftwareBitsRule { set, clear })
    }

    /// Rewrites each leaf by `rule`, and splits a block that the range cuts and that changes.
    fn rewrite(
        &mut self,
        range: GpaRange,
        rule: impl Rule<F>,
    ) -> Result<u64, Interruption<SpaceError>> {
        let tables = &self.tables;
        let refused = |reason| SpaceError::Change(ChangeError::Range(reason));
        let bounds = self.bounds(&range, refused)?;
        let mut owed = PendingFlush::NOTHING;
        let split = tables.cut(bounds, |raw| rule.change(raw) == raw, &mut owed);
        let mut rewrite = Rewrite { tables, rule, owed, changed: 0 };
        let cursor = &mut Cursor::nowhere();
        let result = split.and_then(|()| tables.each(cursor, bounds, &mut rewrite));
        tables.complete_alone(&rewrite.owed);
        result.map(|()| rewrite.changed)
    }

    /// Returns the ends of a range that these tables can have.
    fn bounds(
        &self,
        range: &GpaRange,
        refused: impl Fn(RangeError) -> SpaceError,
    ) -> Result<(u64, u64), Interruption<SpaceError>> {
        let (at, end) = (range.start(), range.end());
        self.tables.check(range).map_err(|reason| Interruption { at, reason: refused(reason) })?;
        Ok((at.0, end.0))
    }

    /// Unmaps `range`, and splits a block that the range cuts. Hands what was mapped to `removed`,
    /// in runs of adjacent leaves with the same attributes, once no CPU can reach it. Returns the
    /// bytes that were mapped. If `removed` panics, up to 16 further runs may be unmapped without
    /// having been handed out; the rest of the range stays mapped.
    ///
    /// # Errors
    /// [`SpaceError::Unmap`], and [`SpaceError::OutOfFrames`] where a block that the range cuts
    /// cannot be split: nothing is unmapped.
    #[inline]
    pub fn unmap(
        &mut self,
        range: GpaRange,
        mut removed: impl FnMut(UnmappedRun),
    ) -> Result<u64, Interruption<SpaceError>> {
        if let Some(page) = self.cursor.unmap_page(&self.tables, &range) {
            removed(page);
            return Ok(page.bytes);
        }
        self.empty(&range, &mut [const { None }; RUNS], Some(&mut removed))
    }

    #[inline(never)]
    fn empty<'a>(
        &'a mut self,
        range: &GpaRange,
        runs: &'a mut [Option<UnmappedRun>],
        removed: Option<&'a mut dyn FnMut(UnmappedRun)>,
    ) -> Result<u64, Interruption<SpaceError>> {
        let bounds = self.bounds(range, |reason| SpaceError::Unmap(UnmapError::Range(reason)))?;
        let Self { tables, cursor } = self;
        let mut owed = PendingFlush::NOTHING;
        let split = match cursor.covers::<F>(bounds) {
            true => Ok(()),
            false => tables.cut(bounds, |_| false, &mut owed),
        };
        let unlinked = Chain::EMPTY;
        let written = tables.pending.cleans.count() != 0;
        let (len, bits, bytes) = (0, 0, 0);
        let mut empty = Empty { tables, runs, len, bits, removed, unlinked, owed, written, bytes };
        let result = split.and_then(|()| tables.each(cursor, bounds, &mut empty));
        empty.hand_out();
        let bytes = empty.bytes;
        tables.reclaim();
        result.map(|()| bytes)
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
    pub fn discard(&mut self, range: GpaRange) -> Result<(), Interruption<SpaceError>> {
        let bounds = self.bounds(&range, |reason| SpaceError::Unmap(UnmapError::Range(reason)))?;
        // Inside one table of pages nothing is cut, and no table is covered whole.
        if range.size() >= 1 << F::shift(1) || !self.cursor.covers::<F>(bounds) {
            let mut owed = PendingFlush::NOTHING;
            let split = self.tables.cut(bounds, |_| false, &mut owed);
            self.tables.complete_alone(&owed);
            split?;
            self.cursor.forget();
            self.tables.drop_tables(&range);
        }
        self.empty(&range, &mut [], None).map(drop)
    }

    /// Unmaps the leaf that translates `gpa`, and returns its address, size, memory and attributes;
    /// `None` if nothing is mapped there.
    ///
    /// # Errors
    /// [`SpaceError::Unmap`], and [`SpaceError::Contended`]: nothing is unmapped.
    pub fn unmap_leaf(
        &mut self,
        gpa: Gpa,
    ) -> Result<Option<UnmappedRun>, Interruption<SpaceError>> {
        let held = |Contention { at }| Interruption { at, reason: SpaceError::Contended };
        let Some(Translation { size, .. }) = self.translate(gpa).map_err(held)? else {
            return Ok(None);
        };
        let start = Gpa(gpa.0 & !(size.bytes() - 1));
        let failed =
            |reason| Interruption { at: gpa, reason: SpaceError::Unmap(UnmapError::Range(reason)) };
        let mut found = None;
        self.unmap(GpaRange::new(start, size.bytes()).map_err(failed)?, |run| found = Some(run))?;
        Ok(found)
    }

    /// Translates `gpa`; `None` if nothing is mapped there, or if [`AddressSpace::translate`] finds
    /// it contended, which it does only beside [guards](AddressSpace::enter).
    #[inline(always)]
    pub fn query(&self, gpa: Gpa) -> Option<Translation> {
        // No thread reclaims: that takes `&mut self`, and `self` is borrowed here.
        let found = self.tables.start().lookup_any::<F>(gpa.0);
        if let Some(page) = self.tables.translation_alone(found, gpa) {
            return Some(page);
        }
        // Field by field: as it is returned in memory, all other results would be there, too.
        let Translation { hpa, size, attributes } = self.query_other(gpa)?;
        Some(Translation { hpa, size, attributes })
    }

    #[cold]
    #[inline(never)]
    fn query_other(&self, gpa: Gpa) -> Option<Translation> {
        self.translate_other(gpa).unwrap_or(None)
    }

    /// Translates `gpa`; `None` if nothing is mapped there. Waits for as long as an operation of a
    /// guard does if another thread's guard holds the entry.
    ///
    /// # Errors
    /// [`Contention`]: the guard still holds the entry, which translates nothing now, and may be
    /// about to appear or to vanish.
    #[inline(always)]
    pub fn translate(&self, gpa: Gpa) -> Result<Option<Translation>, Contention> {
        let found = self.tables.start().lookup_any::<F>(gpa.0);
        match self.tables.translation_alone(found, gpa) {
            Some(page) => Ok(Some(page)),
            None => self.translate_other(gpa),
        }
    }

    /// The thread that holds the entry may wait for this CPU, or be this one, inside the closure of
    /// [`Reservation::commit_told`](crate::Reservation::commit_told): so this does not wait for
    /// longer.
    #[cold]
    #[inline(never)]
    fn translate_other(&self, gpa: Gpa) -> Result<Option<Translation>, Contention> {
        for _ in 0..PATIENCE {
            let found = self.tables.translate_any(gpa);
            if found.is_ok() {
                return found;
            }
            relax();
        }
        Err(Contention { at: gpa })
    }

    /// Gives back every table to the platform.
    ///
    /// # Safety
    /// No CPU has the root loaded, nor loads it later.
    pub unsafe fn destroy(self) {
        // SAFETY: the caller's promise is the callee's.
        unsafe { self.tables.deactivate() }.destroy();
    }
}
