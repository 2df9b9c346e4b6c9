//! The second-stage tables of one guest.

use crate::addr::{Gpa, GpaRange, Hpa, PageSize, RangeError};
use crate::build::dismantle;
use crate::counts::Counts;
use crate::format::{Attributes, Format, Geometry, GeometryError, Kind};
use crate::platform::Platform;
use crate::shootdown::{Invalidation, Shootdown, Vmid};
use crate::sync::{AtomicU64, Ordering};
use crate::table::{self, Frame, Slot};
use crate::walk::{Outcome, Tally, Visitor, walk};
use core::fmt;

/// The second-stage tables of one guest.
///
/// Operations take `&self` and may run on any number of threads, beside hardware that walks the
/// tables and sets accessed and dirty bits. They hold no lock; two operations on one slot are
/// ordered by the slot itself.
///
/// Dropping the tables leaks their frames: hardware may still be walking them. [`Tables::destroy`]
/// gives them back. A panic inside the platform's invalidation leaks what was being linked.
#[derive(Debug)]
pub struct Tables<'p, F: Format, P: Platform> {
    pub(crate) format: F,
    pub(crate) platform: &'p P,
    vmid: Vmid,
    geometry: Geometry,
    root: Hpa,
    /// Tables that were unlinked, each with its successor's address in its first slot's marker;
    /// 0 ends the list. Frames leave it under an exclusive borrow only.
    retired: AtomicU64,
}

/// What a guest physical address translates to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Translation {
    /// The host physical address of that very byte.
    pub hpa: Hpa,
    /// The size of the leaf.
    pub size: PageSize,
    /// Its rights, memory type and state.
    pub attributes: Attributes,
}

/// An operation that came to its end.
#[must_use = "the shootdown inside is owed"]
#[derive(PartialEq, Eq, Debug)]
pub struct Done {
    /// Bytes of guest memory whose leaves were made, changed, removed or split.
    pub bytes: u64,
    /// Exact costs.
    pub counts: Counts,
    /// Stale translations left behind.
    pub shootdown: Shootdown,
}

impl Done {
    /// Nothing done yet: to merge others into.
    pub fn nothing(vmid: Vmid) -> Self {
        Self { bytes: 0, counts: Counts::default(), shootdown: Shootdown::none(vmid) }
    }

    /// Adds another operation on the same guest: one shootdown for both.
    ///
    /// # Panics
    /// If it is another guest's ([`Shootdown::merge`]).
    #[inline]
    pub fn merge(&mut self, other: Self) {
        self.bytes += other.bytes;
        self.counts += other.counts;
        self.shootdown.merge(other.shootdown);
    }
}

impl Done {
    /// Adds what a walk did to the slots of one table; `stale` if translations changed.
    #[inline]
    pub(crate) fn settle<F: Format>(&mut self, level: u8, tally: &Tally, stale: bool) {
        self.counts.slots_read += tally.read;
        if tally.changed != 0 {
            self.counts.slots_written += tally.changed;
            self.bytes += tally.changed << F::shift(level);
            if stale {
                let range = GpaRange::from_bounds(tally.start, tally.end);
                self.shootdown.leaf(range, F::size(level));
            }
        }
    }
}

/// An operation that ended early: everything before `at` is done, unless it was refused (see the
/// operation's errors), when nothing is.
///
/// From `at` on no translation, right or state has changed; a table without leaves may have been
/// linked, and a split that was contended may have split blocks further on.
#[must_use = "the shootdown of what was done is owed"]
#[derive(PartialEq, Eq, Debug)]
pub struct Stopped<E> {
    /// Where it stopped.
    pub at: Gpa,
    /// Why.
    pub why: E,
    /// What was done until then.
    pub done: Done,
}

/// Where an operation that adds to its caller's [`Done`] ended early, and why: otherwise as
/// [`Stopped`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Halted<E> {
    /// Where it stopped.
    pub at: Gpa,
    /// Why.
    pub why: E,
}

impl<E: fmt::Display> fmt::Display for Halted<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stopped at {}: {}", self.at, self.why)
    }
}

impl<E: fmt::Debug + fmt::Display> core::error::Error for Halted<E> {}

impl<E: fmt::Display> fmt::Display for Stopped<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stopped at {}: {}", self.at, self.why)
    }
}

impl<E: fmt::Debug + fmt::Display> core::error::Error for Stopped<E> {}

/// Why tables could not be made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum NewError {
    /// The format cannot translate addresses of that width.
    Geometry(GeometryError),
    /// The platform has no frame for the root.
    OutOfFrames {
        /// Bytes, and alignment, of the root.
        bytes: usize,
    },
}

impl fmt::Display for NewError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Geometry(error) => error.fmt(f),
            Self::OutOfFrames { bytes } => {
                write!(
                    f,
                    "the platform has no {bytes} contiguous, aligned bytes for the root table"
                )
            }
        }
    }
}

impl core::error::Error for NewError {}

/// Somebody else held the slot of that address for too long; try again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Contended {
    /// The address.
    pub at: Gpa,
}

impl fmt::Display for Contended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the entry of {} is being changed; try again", self.at)
    }
}

impl core::error::Error for Contended {}

impl<'p, F: Format, P: Platform> Tables<'p, F, P> {
    /// Empty tables for guest physical addresses of `address_bits`.
    ///
    /// # Errors
    /// [`NewError::Geometry`] for a width that the format cannot have, [`NewError::OutOfFrames`]
    /// if the platform has no frame for the root.
    pub fn new(
        format: F,
        vmid: Vmid,
        address_bits: u32,
        platform: &'p P,
    ) -> Result<Self, NewError> {
        const {
            assert!(F::LARGEST_LEAF <= 2, "splits are compiled for targets at levels 0 to 2");
        }
        let geometry = format.geometry(address_bits).map_err(NewError::Geometry)?;
        let bytes = geometry.root_bytes(F::PAGE_SHIFT);
        let root = platform.allocate(bytes).ok_or(NewError::OutOfFrames { bytes })?.into_hpa();
        // SAFETY: the frame was allocated with at least `root_slots` slots and nobody else knows it.
        let slots = unsafe { table::slots(platform, root, geometry.root_slots) };
        slots.iter().for_each(|slot| slot.init(0));
        platform.publish();
        Ok(Self { format, platform, vmid, geometry, root, retired: AtomicU64::new(0) })
    }

    /// The address of the root, for VTTBR_EL2 and its like.
    pub const fn root(&self) -> Hpa {
        self.root
    }

    /// Where hardware starts its walks.
    pub const fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// The format, as configured.
    pub const fn format(&self) -> &F {
        &self.format
    }

    /// The machine under the tables.
    pub const fn platform(&self) -> &'p P {
        self.platform
    }

    /// The guest.
    pub const fn vmid(&self) -> Vmid {
        self.vmid
    }

    /// What `gpa` translates to; `None` if nothing is mapped there.
    ///
    /// # Errors
    /// [`Contended`] if the entry stands frozen: it may be about to appear or to vanish.
    pub fn translate(&self, gpa: Gpa) -> Result<Option<Translation>, Contended> {
        if gpa.0 >> self.geometry.address_bits != 0 {
            return Ok(None);
        }
        let (raw, level) = self.lookup(gpa.0);
        match F::kind(raw, level) {
            Kind::Frozen => Err(Contended { at: gpa }),
            Kind::Leaf => Ok(Some(Translation {
                hpa: Hpa(F::leaf_address(raw, level).0 | gpa.0 & (F::size(level).bytes() - 1)),
                size: F::size(level),
                attributes: self.format.decode(raw, level),
            })),
            Kind::Empty | Kind::Table => Ok(None),
        }
    }

    /// The descriptor that `gpa` ends at, and the size of the part of the address space that its
    /// slot covers. For dumps and for comparison with other implementations.
    pub fn descriptor(&self, gpa: Gpa) -> Option<(u64, PageSize)> {
        if gpa.0 >> self.geometry.address_bits != 0 {
            return None;
        }
        let (raw, level) = self.lookup(gpa.0);
        Some((raw, F::size(level)))
    }

    /// The first slot from the root that does not link a table.
    #[inline]
    pub(crate) fn lookup(&self, gpa: u64) -> (u64, u8) {
        let mut level = self.geometry.root_level;
        let mut slots = self.root_slots();
        loop {
            let raw = slots[(gpa >> F::shift(level)) as usize & (slots.len() - 1)].load();
            if level == 0 || F::kind(raw, level) != Kind::Table {
                return (raw, level);
            }
            // SAFETY: a linked table has that many slots and stays allocated while the tables
            // are borrowed.
            slots =
                unsafe { table::slots(self.platform, F::table_address(raw), 1 << F::INDEX_BITS) };
            level -= 1;
        }
    }

    #[inline(always)]
    pub(crate) fn root_slots(&self) -> &[Slot] {
        // SAFETY: the root was allocated with that many slots and lives as long as `self`.
        unsafe { table::slots(self.platform, self.root, self.geometry.root_slots) }
    }

    #[inline(always)]
    pub(crate) fn walk<'t, V: Visitor<'t, F>>(
        &'t self,
        start: u64,
        end: u64,
        visitor: &mut V,
    ) -> Outcome {
        let level = self.geometry.root_level;
        walk::<F, P, V>(self.platform, self.root_slots(), level, (start, end), visitor)
    }

    #[inline(always)]
    pub(crate) fn check(&self, range: &GpaRange) -> Result<(), RangeError> {
        range.check(F::PAGE_SHIFT, self.geometry.address_bits)
    }

    #[inline(always)]
    pub(crate) fn nothing(&self) -> Done {
        Done::nothing(self.vmid)
    }

    /// A refusal before anything was done.
    #[cold]
    pub(crate) fn refused<E>(&self, range: &GpaRange, why: E) -> Stopped<E> {
        Stopped { at: range.start(), why, done: self.nothing() }
    }

    /// Keeps a table that was unlinked until [`Tables::reclaim`].
    ///
    /// `frozen_slot` is the first of its slots, all of which the caller has frozen. The list is pushed
    /// by many and emptied only under an exclusive borrow: no pop runs beside a push, so a head
    /// that comes back cannot mislead one, and the link may be rewritten until the push succeeds.
    pub(crate) fn retire(&self, table: Hpa, frozen_slot: &Slot) {
        let mut head = self.retired.load(Ordering::Relaxed);
        let mut marker = F::frozen(Hpa(0));
        loop {
            let next = F::frozen(Hpa(head));
            frozen_slot.release(marker, next);
            marker = next;
            match self.retired.compare_exchange(head, table.0, Ordering::AcqRel, Ordering::Relaxed)
            {
                Ok(_) => return,
                Err(found) => head = found,
            }
        }
    }

    /// Gives back the tables that were unlinked, and returns how many.
    ///
    /// The exclusive borrow proves that no software walker is in them; the invalidation of all of
    /// the guest's translations, that no hardware walker is.
    pub fn reclaim(&mut self) -> usize {
        if self.retired.load(Ordering::Acquire) == 0 {
            return 0;
        }
        self.invalidate_all();
        self.free_retired()
    }

    /// Empties the list of retired tables, which all of the guest's CPUs have forgotten.
    fn free_retired(&mut self) -> usize {
        let mut next = self.retired.swap(0, Ordering::AcqRel);
        let mut freed = 0;
        while next != 0 {
            let hpa = Hpa(next);
            // SAFETY: `retire` put the table, of `1 << INDEX_BITS` slots, on the list; it is freed
            // below, after its only use.
            let first = unsafe { &table::slots(self.platform, hpa, 1 << F::INDEX_BITS)[0] };
            next = F::table_address(first.load()).0;
            // SAFETY: the table came from a cache, which allocates pages; it is unlinked, its
            // walkers are gone (see `reclaim`), and it leaves the list here: nobody else owns it.
            unsafe {
                if let Some(frame) = Frame::from_hpa(hpa) {
                    self.platform.free(frame, 1 << F::PAGE_SHIFT);
                    freed += 1;
                }
            }
        }
        freed
    }

    /// Invalidates all of the guest's translations and gives back every frame.
    ///
    /// The caller has taken the root out of every CPU: no vCPU of the guest runs any more.
    pub fn destroy(mut self) {
        self.invalidate_all();
        self.free_retired();
        // SAFETY: the tables are owned, so no software walker exists, and hardware forgot them.
        // Tables came from caches, which allocate pages.
        unsafe {
            let platform = self.platform;
            dismantle::<F, P>(
                platform,
                self.root_slots(),
                self.geometry.root_level,
                &mut |frame| {
                    platform.free(frame, 1 << F::PAGE_SHIFT);
                },
            );
        }
        // SAFETY: the root came from `allocate` with these bytes, and `self` ends here.
        unsafe {
            if let Some(root) = Frame::from_hpa(self.root) {
                self.platform.free(root, self.geometry.root_bytes(F::PAGE_SHIFT));
            }
        }
    }

    fn invalidate_all(&self) {
        let all = Invalidation { vmid: self.vmid, range: None, leaf: None, tables: true };
        self.platform.invalidate(&all);
    }
}
