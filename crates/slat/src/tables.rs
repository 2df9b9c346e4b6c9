//! The second-stage tables of one guest.

mod ended;

use crate::addr::{GpaRange, Hpa, PageSize, RangeError};
use crate::build::dismantle;
use crate::format::{Attributes, Format, Geometry, Kind};
use crate::grace::{Moment, Participant};
use crate::guard::{Foreign, Guard};
use crate::inactive::Inactive;
use crate::ops::{Owners, Scans, Tokens};
use crate::platform::Platform;
use crate::retired::Retired;
use crate::shootdown::{Invalidation, Owed, Shootdown, Vmid};
use crate::sync::{AtomicU64, Ordering, acquired, agreed};
use crate::table::{self, Frame, Pte, pte};
use crate::underway::Pending;
use crate::walk::{Budget, Outcome, PATIENCE, Visitor, touch_each, walk};
pub use ended::{Contended, Halted, NewError};

/// The second-stage translation tables of one guest, live: CPUs may have them loaded.
///
/// [`Tables::enter`] gives a [`Guard`], whose methods are the operations. Any number of threads
/// work on the tables at once, while hardware walks them and sets accessed and dirty bits. No
/// thread holds a lock: atomic exchanges order two operations on one page-table entry.
///
/// Dropping the tables leaks their frames, as hardware may still be walking them.
/// [`Tables::deactivate`] and [`Inactive::destroy`] give them back.
#[derive(Debug)]
pub struct Tables<'p, F: Format, P: Platform> {
    pub(crate) format: F,
    pub(crate) platform: &'p P,
    /// The VMID under which CPUs cache the guest's translations.
    vmid: AtomicU64,
    /// The VMID that the tables were made with. [`Tables::renew`] does not change it: threads
    /// inside have it in their seats.
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

/// The last entry that a lookup read. It is small, so that it is passed in registers.
#[derive(Clone, Copy)]
pub(crate) struct Found {
    pub raw: u64,
    pub level: u8,
    /// Whether all tables above allow writes.
    pub writable: bool,
}

/// An entry that links a table: the table that holds the entry, and the value that was read.
#[derive(Clone, Copy)]
pub(crate) struct Link<'t> {
    pub table: &'t [Pte],
    pub pte: &'t Pte,
    pub raw: u64,
}

/// The result of translating a guest physical address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Translation {
    /// The host physical address of the byte at that guest address.
    pub hpa: Hpa,
    /// The size of the leaf.
    pub size: PageSize,
    /// The leaf's rights, memory type and state.
    pub attributes: Attributes,
}

impl<'p, F: Format, P: Platform> Tables<'p, F, P> {
    /// Makes empty tables for guest physical addresses of `address_bits` bits, ready to be loaded.
    ///
    /// # Errors
    /// The errors of [`Inactive::new`].
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
        // Where the root has several parts, hardware may read all of the page that an address
        // selects.
        let ptes = geometry.root_entries.max(F::entries(geometry.root_level));
        // SAFETY: the frame was allocated with at least that many entries, and no other code has
        // it.
        unsafe { table::entries(platform, root, ptes) }.iter().for_each(|pte| pte.init(0));
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

    /// Enters the tables, and returns a guard, whose methods are the operations.
    ///
    /// # Errors
    /// [`Foreign`] if the member registered with another platform's grace.
    #[inline]
    pub fn enter<'t>(
        &'t self,
        member: &'t mut Participant<'p, P>,
    ) -> Result<Guard<'t, 'p, F, P>, Foreign> {
        if !member.serves(self.platform) {
            return Err(Foreign);
        }
        Ok(Guard::new(self, Some(member.enter(self.seat)), true))
    }

    /// Enters the tables without a seat: the exclusive borrow keeps all other threads out.
    pub fn exclusive(&mut self) -> Guard<'_, 'p, F, P> {
        Guard::new(self, None, true)
    }

    /// Enters the tables without a seat, for callers that keep unlinked tables allocated by other
    /// means, such as their own read-copy-update.
    ///
    /// # Safety
    /// No thread calls [`Tables::reclaim`] while the guard lives.
    pub unsafe fn enter_unseated(&self) -> Guard<'_, 'p, F, P> {
        Guard::new(self, None, true)
    }

    /// Takes the invalidation that `guard` owes, to merge it with other threads' or to complete it
    /// later.
    ///
    /// # Errors
    /// [`Foreign`] if the guard belongs to other tables.
    pub fn shootdown<'t>(
        &'t self,
        guard: &mut Guard<'_, 'p, F, P>,
    ) -> Result<Shootdown<'t, 'p, F, P>, Foreign> {
        if !core::ptr::eq(guard.tables, self) {
            return Err(Foreign);
        }
        Ok(Shootdown::new(self, core::mem::replace(&mut guard.sums.owed, Owed::NOTHING)))
    }

    /// Returns the address of the root, for a register such as VTTBR_EL2. The caller that loads it
    /// is responsible for what is mapped: the guest reaches all of that memory.
    pub const fn root(&self) -> Hpa {
        self.root
    }

    /// Returns the level at which hardware starts its walks, and the size of the root.
    pub const fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Returns the format, as configured.
    pub const fn format(&self) -> &F {
        &self.format
    }

    /// Returns the platform that these tables use.
    pub const fn platform(&self) -> &'p P {
        self.platform
    }

    /// Returns the guest's present VMID, for the register that holds it together with the root.
    #[inline]
    pub fn vmid(&self) -> Vmid {
        Vmid(self.vmid.load(Ordering::Acquire) as u16)
    }

    /// Gives the guest another VMID, as when VMIDs have run out and a new generation begins, and
    /// returns the old one. Threads may work on the tables meanwhile.
    ///
    /// *Protocol*: an invalidation reads the VMID after the entry was changed. A CPU walks after
    /// its hypervisor has read the VMID that is written here. At least one of the two sees what the
    /// other did (`sync::agreed`): either the invalidation names the new VMID, or the CPU walks the
    /// changed entry.
    ///
    /// # Safety
    /// 1. No CPU has the root loaded under the old VMID, nor loads it so later: code that loads the
    ///    root from now on reads [`Tables::vmid`] after this call has returned. (A CPU that waits
    ///    outside the guest with the root loaded counts: it may still walk.)
    /// 2. All CPUs have dropped the entries that they held under the new VMID.
    /// 3. All CPUs drop the entries that they hold under the old VMID before other tables get it.
    ///    (One invalidation of all guests, when a generation begins, serves 2 and 3.)
    pub unsafe fn renew(&self, vmid: Vmid) -> Vmid {
        let old = self.vmid.swap(vmid.0.into(), Ordering::AcqRel);
        agreed();
        Vmid(old as u16)
    }

    /// Returns the first entry from the root downwards that links no table.
    ///
    /// The caller is inside a guard, or no thread reclaims. If the entry is retired, the lookup
    /// starts again, a bounded number of times.
    #[inline(always)]
    pub(crate) fn lookup(&self, gpa: u64) -> Found {
        let found = self.lookup_once(gpa);
        if found.raw & F::MARK == 0 { found } else { self.lookup_marked(gpa) }
    }

    #[inline(always)]
    pub(crate) fn lookup_marked(&self, gpa: u64) -> Found {
        let (raw, place) = self.lookup_again(gpa);
        Found { raw, level: place as u8, writable: place >> 8 != 0 }
    }

    /// [`Tables::lookup`] after it met a mark. Returns the entry's value; and its level, with bit 8
    /// set if all tables above allow writes. Two words are returned in registers; a larger result
    /// would be returned in memory, and every lookup would then store what it found.
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

    /// [`Tables::lookup`] that looks once, and returns marked entries, too.
    #[inline(always)]
    fn lookup_once(&self, gpa: u64) -> Found {
        let raw = pte::<F>(self.root_entries(), gpa, self.geometry.root_level).load();
        self.lookup_below(raw, gpa)
    }

    /// [`Tables::lookup`] of any address, which looks once, and returns marked entries, too.
    /// Returns `None` for an address that is past the root's entries.
    #[inline(always)]
    pub(crate) fn lookup_any(&self, gpa: u64) -> Option<Found> {
        let pte = self.root_entries().get((gpa >> F::shift(self.geometry.root_level)) as usize)?;
        Some(self.lookup_below(pte.load(), gpa))
    }

    /// Follows the root's entry for `gpa`, of value `raw`. The levels are one straight run of code,
    /// which begins at the root's level; each is compiled with its level as a constant.
    #[inline(always)]
    fn lookup_below(&self, mut raw: u64, gpa: u64) -> Found {
        let root = self.geometry.root_level;
        // Loaded once, so that the loads of entries, which depend on each other, do not wait for
        // it.
        let platform = self.platform;
        // The bits that all entries on the way have.
        let mut common = !0;
        macro_rules! below {
            ($($level:literal)*) => {$(
                if root >= $level {
                    if F::kind(raw, $level) != Kind::Table {
                        let writable = common & F::TABLE_WRITE == F::TABLE_WRITE;
                        return Found { raw, level: $level, writable };
                    }
                    common &= raw;
                    let (hpa, len) = (F::table_address(raw), F::entries($level - 1));
                    // SAFETY: a linked table has that many entries, and stays allocated while this
                    // walk runs.
                    let ptes = unsafe { table::entries(platform, hpa, len) };
                    raw = pte::<F>(ptes, gpa, $level - 1).load();
                }
            )*};
        }
        below!(4 3 2 1);
        Found { raw, level: 0, writable: common & F::TABLE_WRITE == F::TABLE_WRITE }
    }

    /// Returns the lowest table on the way to `gpa` that is at level `to` or above, and its level.
    /// Calls `each` with each link that it follows, and the level of that link, from the root
    /// downwards.
    ///
    /// The caller is inside a guard, or no thread reclaims.
    #[inline(always)]
    pub(crate) fn descend<'t>(
        &'t self,
        gpa: u64,
        to: u8,
        mut each: impl FnMut(u8, Link<'t>),
    ) -> (&'t [Pte], u8) {
        let mut level = self.geometry.root_level;
        let mut table = self.root_entries();
        while level > to {
            let pte = pte::<F>(table, gpa, level);
            let raw = pte.load();
            if F::kind(raw, level) != Kind::Table {
                break;
            }
            each(level, Link { table, pte, raw });
            level -= 1;
            // SAFETY: a linked table has that many entries, and stays allocated: the caller is
            // inside a guard, or knows that no thread reclaims.
            table =
                unsafe { table::entries(self.platform, F::table_address(raw), F::entries(level)) };
        }
        (table, level)
    }

    /// Returns the entry for `gpa` in the table at `level`, if there is such a table. As in
    /// [`Tables::lookup_below`], each level is compiled with its level as a constant.
    ///
    /// The caller is inside a guard, or no thread reclaims.
    #[inline(always)]
    pub(crate) fn entry_at(&self, gpa: u64, level: u8) -> Option<&Pte> {
        let (table, _) = self.table_at(gpa, level);
        Some(pte::<F>(table?, gpa, level))
    }

    /// Returns the table at `level` (at most the root's) on the way to `gpa`, if there is one, and
    /// the bits that all entries on the way have.
    #[inline(always)]
    pub(crate) fn table_at(&self, gpa: u64, level: u8) -> (Option<&[Pte]>, u64) {
        let root = self.geometry.root_level;
        debug_assert!(level <= root, "no table is above the root");
        let platform = self.platform;
        let (mut table, mut common) = (self.root_entries(), !0);
        macro_rules! below {
            ($($above:literal)*) => {$(
                if root >= $above && level < $above {
                    let raw = pte::<F>(table, gpa, $above).load();
                    if F::kind(raw, $above) != Kind::Table {
                        return (None, common);
                    }
                    common &= raw;
                    let (hpa, len) = (F::table_address(raw), F::entries($above - 1));
                    // SAFETY: a linked table has that many entries, and stays allocated while this
                    // walk runs.
                    table = unsafe { table::entries(platform, hpa, len) };
                }
            )*};
        }
        below!(4 3 2 1);
        (Some(table), common)
    }

    /// Marks the tables above `level` on the way to `gpa` accessed, the lowest first, after a leaf
    /// at that level became accessed.
    #[inline(always)]
    pub(crate) fn touch_above(&self, gpa: u64, level: u8) {
        if F::TABLE_ACCESSED == 0 {
            return;
        }
        // The leaf is marked before the tables above are read, as in `walk::touch`.
        agreed();
        let (_, common) = self.table_at(gpa, level);
        if common & F::TABLE_ACCESSED != F::TABLE_ACCESSED {
            let levels = (self.geometry().root_level, level);
            touch_each::<F, P>(self.platform, self.root_entries(), levels, gpa);
        }
    }

    #[inline(always)]
    pub(crate) fn root_entries(&self) -> &[Pte] {
        let ptes = self.geometry.root_entries;
        // SAFETY: `root_entries` is a power of two (`Format`, 3), so it is not 0. With this hint, a
        // lookup has no index that could panic, and its guard stays in registers.
        unsafe { core::hint::assert_unchecked(ptes != 0) };
        // SAFETY: the root was allocated with that many entries and lives as long as `self`.
        unsafe { table::entries(self.platform, self.root, ptes) }
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
        walk::<F, P, V>(self.platform, self.root_entries(), level, (start, end), visitor, budget)
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

    /// The VMID, read after the change that is to be invalidated: see [`Tables::renew`].
    #[inline]
    fn current(&self) -> Vmid {
        agreed();
        self.vmid()
    }

    /// Executes the invalidation that is owed, and those that dropped values left behind.
    ///
    /// The dropped ones are counted as covered only after the invalidation, as another thread that
    /// finds them covered returns without invalidating.
    #[inline]
    pub(crate) fn complete(&self, owed: Owed) {
        if !self.pending.is_covered() {
            self.complete_all();
        } else if let Some(what) = self.invalidation(&owed) {
            self.platform.invalidate(&what);
        }
        self.pending.cleans.end(owed.cleans());
    }

    /// Invalidates all of the guest, which covers everything that was dropped before.
    pub(crate) fn complete_all(&self) {
        self.pending.cover(|| self.invalidate_all());
    }

    /// Completes or hands on `owed`, which a dropped guard left.
    pub(crate) fn let_go(&self, owed: Owed) {
        match owed.is_taken() {
            true => self.complete(owed),
            false => self.pending.owe(owed),
        }
    }

    /// Invalidates what a CPU may still hold of an empty entry's last translation, before the
    /// caller fills the entry by an exchange from `raw`, the value that it read. Returns whether it
    /// had to.
    ///
    /// A thread that empties an entry counts itself in `removals` before, and leaves a token there
    /// that is not used again. So if the caller's exchange succeeds, the count that is read here
    /// includes that thread, unless its invalidation has completed.
    #[inline(always)]
    pub(crate) fn break_before_fill(&self, raw: u64, level: u8, base: u64) -> bool {
        let emptied = self.refill_breaks() && F::kind(raw, level) == Kind::Reserved;
        if emptied {
            // The value is read before the count: a walk's loads are relaxed.
            acquired();
        }
        let stale = emptied && self.pending.removals.count() != 0;
        if stale {
            self.invalidate_entries(base, base + (1 << F::shift(level)));
        }
        stale
    }

    /// Returns whether an emptied entry is filled again only after an invalidation: where no CPU
    /// may hold two translations, or two sizes, of one address.
    #[inline(always)]
    pub(crate) fn refill_breaks(&self) -> bool {
        F::REFILL_BREAKS || self.platform.break_before_make().breaks_size_change()
    }

    #[cold]
    pub(crate) fn invalidate_entries(&self, start: u64, end: u64) {
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
    /// It never waits. Tables that a guard may still be in stay until a later call, and tables of
    /// removals that have not completed stay until those have. If the own invalidation of some
    /// tables has not completed, one invalidation of the whole guest covers them first. One thread
    /// at a time does the work; other threads return 0.
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

    /// Returns whether all threads that were inside tables of this guest at `moment` have left, or
    /// [refreshed](Guard::refresh) their guards. Threads inside another guest's tables count only
    /// if those were made with the same VMID. A caller that is inside never finds this true until
    /// it refreshes.
    pub fn is_past(&self, moment: Moment) -> bool {
        self.platform.grace().passed(moment.0, self.seat)
    }

    /// Takes the tables out of use.
    ///
    /// Invalidates all of the guest's translations. Afterwards no CPU and no other thread uses the
    /// tables.
    ///
    /// # Safety
    /// No CPU has the root loaded, nor will load it before [`Inactive::activate`].
    pub unsafe fn deactivate(self) -> Inactive<'p, F, P> {
        self.invalidate_all();
        self.pending.clear();
        Inactive(self)
    }

    /// Gives back every frame of tables that the caller owns and that hardware no longer uses.
    pub(crate) fn free_all(self) {
        let platform = self.platform;
        // Guards borrow the tables, so no thread is in them, even if the grace says that threads
        // are in other guests' tables.
        self.retired.free_all::<F>(platform);
        // SAFETY: `self` is owned, so no software walker exists, and hardware does not use the
        // tables (they were deactivated, or never active). Tables below the root came from caches,
        // which allocate `TABLE_BYTES`; the root came from `allocate` with its bytes; and `self`
        // ends here.
        unsafe {
            let level = self.geometry.root_level;
            dismantle::<F, P>(platform, self.root_entries(), level, &mut |frame| {
                platform.free(frame, F::TABLE_BYTES);
            });
            if let Some(root) = Frame::from_hpa(self.root) {
                platform.free(root, self.geometry.root_bytes(F::PAGE_SHIFT));
            }
        }
    }
}
