//! The second-stage tables of one guest.

mod ended;

use crate::addr::{GpaRange, Hpa, PageSize, RangeError};
use crate::build::dismantle;
use crate::format::{Attributes, Format, Geometry, Kind};
use crate::grace::{Member, Moment};
use crate::guard::{Foreign, Guard};
use crate::inactive::Inactive;
use crate::ops::{Owners, Scans, Tokens};
use crate::platform::Platform;
use crate::retired::Retired;
use crate::shootdown::{Invalidation, Owed, Shootdown, Vmid};
use crate::sync::{AtomicU64, Ordering, acquired, agreed};
use crate::table::{self, Frame, Slot, slot};
use crate::underway::Pending;
use crate::walk::{Budget, Outcome, PATIENCE, Visitor, touch_each, walk};
pub use ended::{Contended, Halted, NewError};

/// The second-stage tables of one guest, live: CPUs may have them loaded.
///
/// Operations are methods of a [`Guard`], which [`Tables::enter`] gives. Any number of threads work
/// on the tables at once, beside hardware that walks them and sets accessed and dirty bits. They
/// hold no lock; two operations on one slot are ordered by the slot itself.
///
/// Dropping the tables leaks their frames: hardware may still be walking them.
/// [`Tables::deactivate`] and [`Inactive::destroy`] give them back.
#[derive(Debug)]
pub struct Tables<'p, F: Format, P: Platform> {
    pub(crate) format: F,
    pub(crate) platform: &'p P,
    /// What CPUs know the guest by.
    vmid: AtomicU64,
    /// What the platform's grace knows the guest by, for good: threads inside have it in their
    /// seats.
    seat: Vmid,
    geometry: Geometry,
    root: Hpa,
    pub(crate) pending: Pending,
    pub(crate) retired: Retired,
    /// Bits of a leaf that are marks of consumers of dirty state.
    pub(crate) marks: u64,
    pub(crate) tokens: Tokens,
    pub(crate) owners: Owners,
    pub(crate) scans: Scans,
}

/// Where a lookup ended. Small, so that it travels in registers.
#[derive(Clone, Copy)]
pub(crate) struct Found {
    pub raw: u64,
    pub level: u8,
    /// Whether all tables above let leaves be written.
    pub writable: bool,
}

/// A slot that links a table, in its own table, as it was when it was read.
#[derive(Clone, Copy)]
pub(crate) struct Link<'t> {
    pub table: &'t [Slot],
    pub slot: &'t Slot,
    pub raw: u64,
}

/// What a guest physical address translates to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Translation {
    /// The host physical address of that very byte.
    pub hpa: Hpa,
    /// The size of the leaf.
    pub size: PageSize,
    /// Its rights, memory type and state.
    pub attributes: Attributes,
}

impl<'p, F: Format, P: Platform> Tables<'p, F, P> {
    /// Empty tables for guest physical addresses of `address_bits`, ready to be loaded.
    ///
    /// # Errors
    /// Those of [`Inactive::new`].
    pub fn new(
        format: F,
        vmid: Vmid,
        address_bits: u32,
        platform: &'p P,
    ) -> Result<Self, NewError> {
        Inactive::new(format, vmid, address_bits, platform).map(Inactive::activate)
    }

    pub(crate) fn empty(
        format: F,
        vmid: Vmid,
        address_bits: u32,
        platform: &'p P,
    ) -> Result<Self, NewError> {
        const {
            assert!(F::LARGEST_LEAF <= 2, "splits are compiled for targets at levels 0 to 2");
            assert!(
                F::CONTIGUOUS == 0 || F::TABLE_ACCESSED == 0 && F::TABLE_WRITE == 0,
                "what tables say of leaves does not know of groups"
            );
        }
        let geometry = format.geometry(address_bits).map_err(NewError::Geometry)?;
        let bytes = geometry.root_bytes(F::PAGE_SHIFT);
        let root = platform.allocate(bytes).ok_or(NewError::OutOfFrames { bytes })?.into_hpa();
        // Hardware may read all of a page whose address bits select a part.
        let slots = geometry.root_slots.max(F::slots(geometry.root_level));
        // SAFETY: the frame was allocated with that many slots at least and nobody else knows it.
        unsafe { table::slots(platform, root, slots) }.iter().for_each(|slot| slot.init(0));
        Ok(Self {
            format,
            platform,
            vmid: AtomicU64::new(vmid.0.into()),
            seat: vmid,
            geometry,
            root,
            pending: Pending::new(),
            retired: Retired::new(),
            marks: 0,
            tokens: Tokens::new(),
            owners: Owners::new(),
            scans: Scans::new(),
        })
    }

    /// Enters the tables: operations are methods of the guard.
    ///
    /// # Errors
    /// [`Foreign`] if the member joined another platform's grace.
    #[inline]
    pub fn enter<'t>(
        &'t self,
        member: &'t mut Member<'p, P>,
    ) -> Result<Guard<'t, 'p, F, P>, Foreign> {
        if !member.serves(self.platform) {
            return Err(Foreign);
        }
        Ok(Guard::new(self, Some(member.enter(self.seat)), true))
    }

    /// Enters the tables without a seat, as nobody else can be in them.
    pub fn exclusive(&mut self) -> Guard<'_, 'p, F, P> {
        Guard::new(self, None, true)
    }

    /// Enters the tables without a seat: for callers who keep tables that they may be in by other
    /// means, such as a read-copy-update of their own.
    ///
    /// # Safety
    /// While the guard lives, nobody calls [`Tables::reclaim`].
    pub unsafe fn enter_unseated(&self) -> Guard<'_, 'p, F, P> {
        Guard::new(self, None, true)
    }

    /// Takes what `guard` owes, to be merged with that of other threads or completed later.
    ///
    /// # Errors
    /// [`Foreign`] if the guard is in other tables.
    pub fn shootdown<'t>(
        &'t self,
        guard: &mut Guard<'_, 'p, F, P>,
    ) -> Result<Shootdown<'t, 'p, F, P>, Foreign> {
        if !core::ptr::eq(guard.tables, self) {
            return Err(Foreign);
        }
        Ok(Shootdown::new(self, core::mem::replace(&mut guard.sums.owed, Owed::NOTHING)))
    }

    /// The address of the root, for VTTBR_EL2 and its like. Who loads it answers for what is
    /// mapped: the guest reaches all of that memory, whosever it is.
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

    /// What CPUs know the guest by: for the register that holds it beside the root.
    #[inline]
    pub fn vmid(&self) -> Vmid {
        Vmid(self.vmid.load(Ordering::Acquire) as u16)
    }

    /// What the platform's grace knows the guest by.
    pub(crate) const fn seat(&self) -> Vmid {
        self.seat
    }

    /// Has CPUs know the guest by another VMID from now on: when VMIDs have run out, and a new
    /// generation of them begins. Returns the old one. Threads may work on the tables meanwhile.
    ///
    /// *Protocol*: an invalidation reads the VMID after the change of the entry; a CPU walks after
    /// it has read the VMID that is written here. Of the two at least one sees what the other did
    /// (`sync::agreed`): either the invalidation names the new VMID, or the CPU walks the entry as
    /// it was changed.
    ///
    /// # Safety
    /// 1. No CPU has the root loaded under the old VMID, nor will: who loads it from now on reads
    ///    [`Tables::vmid`] after this has returned. (One that waits outside the guest may still walk.)
    /// 2. All CPUs have forgotten what they held under the new VMID.
    /// 3. Before other tables get the old VMID, all CPUs forget what they hold under it. (One
    ///    invalidation of all guests, at the beginning of a generation, serves 2 and 3.)
    pub unsafe fn renew(&self, vmid: Vmid) -> Vmid {
        let old = self.vmid.swap(vmid.0.into(), Ordering::AcqRel);
        agreed();
        Vmid(old as u16)
    }

    /// The first slot from the root that does not link a table.
    ///
    /// The caller is inside a guard, or nobody reclaims. A retired slot is looked up anew a
    /// bounded number of times.
    #[inline(always)]
    pub(crate) fn lookup(&self, gpa: u64) -> Found {
        let found = self.lookup_once(gpa);
        if found.raw & F::MARK == 0 { found } else { self.lookup_marked(gpa) }
    }

    #[inline(always)]
    fn lookup_marked(&self, gpa: u64) -> Found {
        let (raw, place) = self.lookup_again(gpa);
        Found { raw, level: place as u8, writable: place >> 8 != 0 }
    }

    /// The value of the slot, its level, and from bit 8 on whether leaves may be written: two words
    /// come back in registers. One that came back in memory would have every lookup store what it
    /// found.
    #[cold]
    #[inline(never)]
    fn lookup_again(&self, gpa: u64) -> (u64, u64) {
        let mut patience = PATIENCE;
        loop {
            let Found { raw, level, writable } = self.lookup_once(gpa);
            if patience == 0 || F::kind(raw, level) != Kind::Retired {
                return (raw, u64::from(level) | u64::from(writable) << 8);
            }
            patience -= 1;
        }
    }

    /// [`Tables::lookup`] that looks once, marks and all.
    #[inline(always)]
    fn lookup_once(&self, gpa: u64) -> Found {
        let raw = slot::<F>(self.root_slots(), gpa, self.geometry.root_level).load();
        self.lookup_below(raw, gpa)
    }

    /// [`Tables::lookup`] of any address, also one beyond what the tables translate: `None`, or
    /// nothing, as nothing is mapped there.
    #[inline(always)]
    pub(crate) fn lookup_any(&self, gpa: u64) -> Option<Found> {
        let slot = self.root_slots().get((gpa >> F::shift(self.geometry.root_level)) as usize)?;
        let found = self.lookup_below(slot.load(), gpa);
        Some(if found.raw & F::MARK == 0 { found } else { self.lookup_marked(gpa) })
    }

    /// What the root's slot for `gpa`, of value `raw`, leads to. The levels follow each other in
    /// one run of code, each compiled for its own, which begins at the root's.
    #[inline(always)]
    fn lookup_below(&self, mut raw: u64, gpa: u64) -> Found {
        let root = self.geometry.root_level;
        // Loaded once, it is in no way of the loads that wait for each other.
        let platform = self.platform;
        // What all tables on the way have.
        let mut common = !0;
        macro_rules! below {
            ($($level:literal)*) => {$(
                if root >= $level {
                    if F::kind(raw, $level) != Kind::Table {
                        let writable = common & F::TABLE_WRITE == F::TABLE_WRITE;
                        return Found { raw, level: $level, writable };
                    }
                    common &= raw;
                    let (hpa, len) = (F::table_address(raw), F::slots($level - 1));
                    // SAFETY: a linked table has that many slots, and stays allocated for this
                    // walk.
                    let slots = unsafe { table::slots(platform, hpa, len) };
                    raw = slot::<F>(slots, gpa, $level - 1).load();
                }
            )*};
        }
        below!(4 3 2 1);
        Found { raw, level: 0, writable: common & F::TABLE_WRITE == F::TABLE_WRITE }
    }

    /// The lowest table on the way to `gpa` that is at `to` or above, and its level. `each` is
    /// shown what links it and those above it, and at which level.
    ///
    /// The caller is inside a guard, or nobody reclaims.
    #[inline(always)]
    pub(crate) fn descend<'t>(
        &'t self,
        gpa: u64,
        to: u8,
        mut each: impl FnMut(u8, Link<'t>),
    ) -> (&'t [Slot], u8) {
        let mut level = self.geometry.root_level;
        let mut table = self.root_slots();
        while level > to {
            let slot = slot::<F>(table, gpa, level);
            let raw = slot.load();
            if F::kind(raw, level) != Kind::Table {
                break;
            }
            each(level, Link { table, slot, raw });
            level -= 1;
            // SAFETY: a linked table has that many slots, and stays allocated: the
            // caller is inside a guard, or knows that nobody reclaims.
            table = unsafe { table::slots(self.platform, F::table_address(raw), F::slots(level)) };
        }
        (table, level)
    }

    /// The slot for `gpa` in the table at `level`, if there is one. As in [`Tables::lookup_below`],
    /// each level is compiled for its own.
    ///
    /// The caller is inside a guard, or nobody reclaims.
    #[inline(always)]
    pub(crate) fn slot_at(&self, gpa: u64, level: u8) -> Option<&Slot> {
        let (table, _) = self.table_at(gpa, level);
        Some(slot::<F>(table?, gpa, level))
    }

    /// The table at `level`, the root's at most, on the way to `gpa`, if there is one, and the bits
    /// that all slots that were met on the way have.
    #[inline(always)]
    pub(crate) fn table_at(&self, gpa: u64, level: u8) -> (Option<&[Slot]>, u64) {
        let root = self.geometry.root_level;
        debug_assert!(level <= root, "no table is above the root");
        let platform = self.platform;
        let (mut table, mut common) = (self.root_slots(), !0);
        macro_rules! below {
            ($($above:literal)*) => {$(
                if root >= $above && level < $above {
                    let raw = slot::<F>(table, gpa, $above).load();
                    if F::kind(raw, $above) != Kind::Table {
                        return (None, common);
                    }
                    common &= raw;
                    let (hpa, len) = (F::table_address(raw), F::slots($above - 1));
                    // SAFETY: a linked table has that many slots, and stays allocated for this
                    // walk.
                    table = unsafe { table::slots(platform, hpa, len) };
                }
            )*};
        }
        below!(4 3 2 1);
        (Some(table), common)
    }

    /// After a leaf at `level` became accessed: marks the tables above it accessed on the way to
    /// `gpa`, the lowest first, if they are not.
    #[inline(always)]
    pub(crate) fn touch_above(&self, gpa: u64, level: u8) {
        if F::TABLE_ACCESSED == 0 {
            return;
        }
        // The leaf before the tables' marks, as in `walk::touch`.
        agreed();
        let (_, common) = self.table_at(gpa, level);
        if common & F::TABLE_ACCESSED != F::TABLE_ACCESSED {
            let levels = (self.geometry().root_level, level);
            touch_each::<F, P>(self.platform, self.root_slots(), levels, gpa);
        }
    }

    #[inline(always)]
    pub(crate) fn root_slots(&self) -> &[Slot] {
        let slots = self.geometry.root_slots;
        // SAFETY: a power of two (`Format`, 3) is not 0. Said here, a lookup has no index that
        // could panic, and its guard stays in registers.
        unsafe { core::hint::assert_unchecked(slots != 0) };
        // SAFETY: the root was allocated with that many slots and lives as long as `self`.
        unsafe { table::slots(self.platform, self.root, slots) }
    }

    #[inline(always)]
    pub(crate) fn walk<'t, V: Visitor<'t, F>>(
        &'t self,
        start: u64,
        end: u64,
        visitor: &mut V,
    ) -> Outcome {
        self.walk_within(start, end, visitor, &mut Budget::unbounded())
    }

    #[inline(always)]
    pub(crate) fn walk_within<'t, V: Visitor<'t, F>>(
        &'t self,
        start: u64,
        end: u64,
        visitor: &mut V,
        budget: &mut Budget,
    ) -> Outcome {
        let level = self.geometry.root_level;
        walk::<F, P, V>(self.platform, self.root_slots(), level, (start, end), visitor, budget)
    }

    #[inline(always)]
    pub(crate) fn check(&self, range: &GpaRange) -> Result<(), RangeError> {
        range.check(F::PAGE_SHIFT, self.geometry.address_bits)
    }

    #[inline]
    pub(crate) fn invalidation(&self, owed: &Owed) -> Option<Invalidation> {
        if owed.is_nothing() {
            return None;
        }
        let breaks = self.platform.break_before_make().breaks_size_change();
        owed.invalidation(self.current(), breaks)
    }

    /// The VMID, read after what was changed before: see [`Tables::renew`].
    #[inline]
    fn current(&self) -> Vmid {
        agreed();
        self.vmid()
    }

    /// Invalidates what is owed, and what somebody else dropped.
    ///
    /// What was dropped counts as covered only after the invalidation: who finds it so, and
    /// returns, relies on it.
    #[inline]
    pub(crate) fn complete(&self, owed: Owed) {
        if !self.pending.is_covered() {
            self.complete_all();
        } else if let Some(what) = self.invalidation(&owed) {
            self.platform.invalidate(&what);
        }
        self.pending.cleans.end(owed.cleans());
    }

    /// Invalidates all of the guest, and so what somebody dropped before.
    pub(crate) fn complete_all(&self) {
        self.pending.cover(|| self.invalidate_all());
    }

    /// Deals with `owed`, of a guard that is dropped.
    pub(crate) fn let_go(&self, owed: Owed) {
        match owed.is_taken() {
            true => self.complete(owed),
            false => self.pending.owe(owed),
        }
    }

    /// Before an empty slot, whose value is `raw`, is filled by an exchange from that very value:
    /// invalidates what a CPU may still hold of its last translation. Returns whether it had to.
    ///
    /// Who emptied the slot counted itself as removing before, and left a token that does not come
    /// back. So if the exchange succeeds, the count that is read here includes it, unless its
    /// invalidation has completed.
    #[inline(always)]
    pub(crate) fn break_before_fill(&self, raw: u64, level: u8, base: u64) -> bool {
        let emptied = self.refill_breaks() && F::kind(raw, level) == Kind::Reserved;
        if emptied {
            // The value before the count: a walk's load orders nothing.
            acquired();
        }
        let stale = emptied && self.pending.removals.count() != 0;
        if stale {
            self.invalidate_slots(base, base + (1 << F::shift(level)));
        }
        stale
    }

    /// Whether an emptied slot is filled again only after an invalidation: no CPU may hold two
    /// translations of an address, or two sizes.
    #[inline(always)]
    pub(crate) fn refill_breaks(&self) -> bool {
        F::REFILL_BREAKS || self.platform.break_before_make().breaks_size_change()
    }

    #[cold]
    pub(crate) fn invalidate_slots(&self, start: u64, end: u64) {
        let range = GpaRange::from_bounds(start, end);
        self.platform.invalidate(&Invalidation {
            vmid: self.current(),
            range: Some(range),
            leaf: None,
            tables: true,
        });
    }

    fn invalidate_all(&self) {
        let all = Invalidation { vmid: self.current(), range: None, leaf: None, tables: true };
        self.platform.invalidate(&all);
    }

    /// Gives back tables that were unlinked, and returns how many.
    ///
    /// Never waits: tables that a guard may still be in stay until a later call, those of removals
    /// that have not completed until they have. Walk caches are invalidated first, once for all
    /// tables whose own invalidation has not completed. One thread at a time does the work; another
    /// returns 0.
    #[inline]
    pub fn reclaim(&self) -> usize {
        if self.retired.is_idle() {
            return 0;
        }
        self.reclaim_retired()
    }

    #[inline(never)]
    fn reclaim_retired(&self) -> usize {
        let grace = self.platform.grace();
        let now = || grace.advance();
        let passed = |reading| grace.passed(reading, self.seat);
        self.retired.reclaim::<F>(self.platform, || self.invalidate_all(), now, passed)
    }

    /// Whether all threads that were inside tables of this guest at `moment` have left, or
    /// [refreshed](Guard::refresh) their guards. Threads inside other guests' tables are waited for
    /// only where those were made with the same VMID. A caller who is inside waits for himself.
    pub fn is_past(&self, moment: Moment) -> bool {
        self.platform.grace().passed(moment.0, self.seat)
    }

    /// Takes the tables out of use.
    ///
    /// Invalidates all of the guest's translations: afterwards nothing but their owner knows them.
    ///
    /// # Safety
    /// No CPU has the root loaded, nor will load it before [`Inactive::activate`].
    pub unsafe fn deactivate(self) -> Inactive<'p, F, P> {
        self.invalidate_all();
        self.pending.clear();
        Inactive(self)
    }

    /// Gives back every frame of tables that are owned and that hardware has forgotten.
    pub(crate) fn free_all(self) {
        let platform = self.platform;
        // Guards borrow the tables, so nobody is in them, whatever the grace says of other guests'.
        self.retired.free_all::<F>(platform);
        // SAFETY: the tables are owned, so no software walker exists, and hardware forgot them
        // (`deactivate`, or they were never active). Tables came from caches, which
        // allocate `TABLE_BYTES`; the root from `allocate` with its bytes; and `self` ends here.
        unsafe {
            let level = self.geometry.root_level;
            dismantle::<F, P>(platform, self.root_slots(), level, &mut |frame| {
                platform.free(frame, F::TABLE_BYTES);
            });
            if let Some(root) = Frame::from_hpa(self.root) {
                platform.free(root, self.geometry.root_bytes(F::PAGE_SHIFT));
            }
        }
    }
}
