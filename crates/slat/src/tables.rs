//! The second-stage tables of one guest.

mod ended;
mod lookup;
mod owners;
mod root;
mod tokens;

use crate::addr::{GpaRange, Hpa, PageSize, RangeError};
use crate::build::{dismantle, dismantle_some};
use crate::format::{Attributes, Format, Geometry, GuestRoot, Kind};
use crate::invalidation::{Invalidation, PendingFlush, Vmid};
use crate::platform::Platform;
use crate::readers::GracePeriod;
use crate::retired::{RetiredFrames, RetiredTables};
use crate::sync::{AtomicU64, Ordering, Turn, acquired, agreed};
use crate::table::{Frame, Pte};
use crate::underway::PendingWork;
use crate::walk::{Budget, Outcome, Visitor, touch_each, walk};
pub use ended::{Contention, Interruption, NewError};
pub(crate) use lookup::{Found, Link, Start};
use owners::Owners;
use root::Root;
pub(crate) use tokens::Tokens;

/// The second-stage translation tables of one guest, live: CPUs may have them loaded.
///
/// [`Tables::enter`] gives a [`Guard`](crate::Guard), whose methods are the operations. Any number
/// of threads work on the tables at once, while hardware walks them and sets accessed and dirty
/// bits. No thread holds a lock: atomic exchanges order two operations on one page-table entry.
///
/// Dropping the tables leaks their frames, as hardware may still be walking them.
/// [`Tables::deactivate`] and [`UnloadedTables::destroy`](crate::UnloadedTables::destroy) give them
/// back.
///
/// ```
/// use slat::format::ept::Ept1G;
/// use slat::*;
///
/// let host = AllocPlatform::new();
/// let tables = Tables::new(Ept1G::default(), Vmid(1), 48, &host)?;
/// std::thread::scope(|scope| {
///     for cpu in 0..2 {
///         let (tables, host) = (&tables, &host);
///         scope.spawn(move || {
///             let mut reader = Reader::register(host).expect("a reader slot is free");
///             let mut cache = TableCache::filled(host, 3).expect("the host has memory");
///             let mut guest = tables.enter(&mut reader).expect("its own platform's");
///             // A fault of each thread's vCPU: reserve the entry, find the memory, map it.
///             let gpa = Gpa(cpu << 12);
///             let entry = guest.reserve(gpa, PageSize::SIZE_4K, &mut cache).expect("it is empty");
///             entry.commit(Hpa((8 << 30) + gpa.0), Attributes::RAM).expect("it is reserved");
///         });
///     }
/// });
/// // SAFETY: no CPU has the root loaded.
/// let mut tables = unsafe { tables.deactivate() };
/// assert_eq!(tables.enter_mut().translate(Gpa(0x1abc))?.unwrap().hpa, Hpa(0x2_0000_1abc));
/// tables.destroy();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "dropped, the tables leak their frames"]
#[derive(Debug)]
pub struct Tables<'p, F: Format, P: Platform> {
    pub(crate) format: F,
    pub(crate) platform: &'p P,
    /// The VMID under which CPUs cache the guest's translations.
    vmid: AtomicU64,
    /// The VMID that the tables were made with. [`Tables::set_vmid`] does not change it: threads
    /// inside have it in their reader slots.
    pub(crate) reader_vmid: Vmid,
    geometry: Geometry,
    root: Root<'p>,
    pub(crate) pending: PendingWork,
    pub(crate) retired: RetiredFrames,
    pub(crate) tokens: Tokens,
    pub(crate) owners: Owners,
    /// Of the scan that clears tables.
    pub(crate) exact_scan: Turn,
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
    pub(crate) fn empty(
        format: F,
        vmid: Vmid,
        address_bits: u32,
        platform: &'p P,
    ) -> Result<Self, NewError> {
        const {
            assert!(F::LARGEST_LEAF <= 2, "splits are compiled for targets at levels 0 to 2");
            assert!(
                F::CONTIGUOUS == 0 || F::TABLE_ACCESSED == 0,
                "what tables say of leaves does not know of groups"
            );
        }
        let geometry = format.geometry(address_bits).map_err(NewError::Geometry)?;
        debug_assert!((F::LOWEST_ROOT..=4).contains(&geometry.root_level), "`Format`, 3");
        let root = Root::allocate::<F, P>(&geometry, platform)?;
        Ok(Self {
            format,
            platform,
            vmid: AtomicU64::new(vmid.0.into()),
            reader_vmid: vmid,
            geometry,
            root,
            pending: PendingWork::new(),
            retired: RetiredFrames::new(),
            tokens: Tokens::new(),
            owners: Owners::new(),
            exact_scan: Turn::new(),
        })
    }

    /// Returns the root with the format, the geometry and the present VMID, for the registers of a
    /// CPU.
    pub fn guest_root(&self) -> GuestRoot<F> {
        let (format, geometry) = (self.format, self.geometry);
        GuestRoot { format, geometry, root: self.root(), vmid: self.vmid() }
    }

    /// Returns the address of the root. [`Tables::guest_root`] has the values of registers.
    pub const fn root(&self) -> Hpa {
        self.root.hpa()
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
    pub unsafe fn set_vmid(&self, vmid: Vmid) -> Vmid {
        let old = self.vmid.swap(vmid.0.into(), Ordering::AcqRel);
        agreed();
        Vmid(old as u16)
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
        self.root.entries()
    }

    #[inline(always)]
    pub(crate) fn walk<'t, V: Visitor<'t, F>>(
        &'t self,
        start: u64,
        end: u64,
        visitor: &mut V,
    ) -> Outcome {
        self.walk_within(start, end, visitor, &mut Budget::new())
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
    pub(crate) fn invalidation(&self, owed: &PendingFlush) -> Option<Invalidation> {
        if owed.is_nothing() {
            return None;
        }
        let breaks = self.platform.break_before_make().breaks_size_change();
        owed.invalidation(self.current(), breaks)
    }

    /// The VMID, read after the change that is to be invalidated: see [`Tables::set_vmid`].
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
    pub(crate) fn complete(&self, owed: PendingFlush) {
        if !self.pending.is_covered() {
            self.complete_all();
        } else if let Some(what) = self.invalidation(&owed) {
            self.platform.invalidate(&what);
        }
        self.pending.cleans.end(owed.cleans());
    }

    /// [`Tables::complete`] for a caller that excludes [`Tables::set_vmid`], so that the VMID needs
    /// no fence. A clean is no work of such a caller.
    #[inline]
    pub(crate) fn complete_alone(&self, owed: &PendingFlush) {
        match self.pending.is_covered() {
            true => self.invalidate_alone(owed),
            false => self.complete_all(),
        }
    }

    /// [`Tables::complete_alone`] where nothing that was dropped is left.
    #[inline(always)]
    pub(crate) fn invalidate_alone(&self, owed: &PendingFlush) {
        let breaks = self.platform.break_before_make().breaks_size_change();
        if let Some(what) = owed.invalidation(self.vmid(), breaks) {
            self.platform.invalidate(&what);
        }
    }

    /// Invalidates all of the guest, which covers everything that was dropped before.
    pub(crate) fn complete_all(&self) {
        self.pending.cover(|| self.invalidate_all());
    }

    /// Completes or hands on `owed`, which a dropped guard left.
    pub(crate) fn release(&self, owed: PendingFlush) {
        match owed.is_revoked() {
            true => self.complete(owed),
            false => self.pending.defer(owed),
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

    pub(crate) fn invalidate_all(&self) {
        let all = Invalidation { vmid: self.current(), range: None, leaf: None, tables: true };
        self.platform.invalidate(&all);
    }

    /// Gives back tables that were unlinked, and returns how many.
    ///
    /// It waits for no other thread. Tables that a guard may still be in stay until a later call,
    /// and tables of removals that have not completed stay until those have. If the own
    /// invalidation of some tables has not completed, one invalidation of the whole guest, which
    /// may wait for all CPUs, covers them first. One thread at a time does the work; other threads
    /// return 0.
    #[inline]
    pub fn reclaim(&self) -> usize {
        if self.retired.is_idle() {
            return 0;
        }
        self.reclaim_retired()
    }

    #[inline(never)]
    fn reclaim_retired(&self) -> usize {
        let readers = self.platform.readers();
        let now = || readers.advance();
        let passed = |reading| readers.passed(reading, self.reader_vmid);
        self.retired.reclaim::<F>(self.platform, || self.invalidate_all(), now, passed)
    }

    /// Returns whether there are tables that were unlinked and not given back.
    #[inline]
    pub fn has_retired(&self) -> bool {
        !self.retired.is_idle()
    }

    /// Takes the tables that were unlinked, for a caller whose threads are inside by its own means
    /// ([`Tables::enter_unchecked`]): it waits for those threads, by read-copy-update or by a lock
    /// that they hold, and then calls [`RetiredTables::free`].
    ///
    /// Hardware cannot be in them: where their invalidation has not completed, one of the whole
    /// guest covers them first. While another thread does this, or [`Tables::reclaim`], it returns
    /// none. Tables of removals that have not completed stay.
    pub fn take_retired(&self) -> RetiredTables<F> {
        self.retired.take(|| self.invalidate_all())
    }

    /// Returns whether all threads that were inside tables of this guest when `period` began have
    /// left, or [refreshed](crate::Guard::refresh) their guards. Threads inside another guest's
    /// tables count only if those were made with the same VMID. A caller that is inside never finds
    /// this true until it refreshes.
    pub fn has_elapsed(&self, period: GracePeriod) -> bool {
        self.platform.readers().passed(period.0, self.reader_vmid)
    }

    /// Returns whether the calling thread is inside tables of this guest, or of another with its
    /// VMID, so that [`Tables::has_elapsed`] would never become true while it waits. Debug builds
    /// know it, if the platform tells threads apart ([`Platform::thread`]); otherwise this is
    /// false.
    pub fn caller_is_inside(&self) -> bool {
        cfg!(debug_assertions)
            && self
                .platform
                .thread()
                .is_some_and(|thread| self.platform.readers().has(thread, self.reader_vmid))
    }

    /// Gives back tables below the root that the caller owns and that hardware no longer uses, up
    /// to `most`; returns whether none is left.
    pub(crate) fn free_some(&mut self, mut most: usize) -> bool {
        let platform = self.platform;
        self.retired.free_all::<F>(platform);
        let level = self.geometry.root_level;
        // SAFETY: as in `free_all`, but for the root, which stays; and entries of what is given
        // back are emptied.
        unsafe { dismantle_some::<F, P>(platform, self.root_entries(), level, &mut most) }
    }

    /// Gives back every frame of tables that the caller owns and that hardware no longer uses.
    pub(crate) fn free_all(self) {
        let platform = self.platform;
        // Guards borrow the tables, so no thread is in them, even if the readers say that threads
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
            if let Some(root) = Frame::from_hpa(self.root.hpa()) {
                platform.free(root, self.geometry.root_bytes(F::PAGE_SHIFT));
            }
        }
    }
}
