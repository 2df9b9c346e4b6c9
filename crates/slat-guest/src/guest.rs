//! The state of one guest's memory.

use crate::backing::Backing;
use crate::bits::Moves;
use crate::caches::CacheState;
use crate::config::{Config, Logging};
use crate::events::{Event, report};
use crate::host::Host;
use crate::identity::Identity;
use crate::invalidations::Invalidations;
use crate::memslots::Memslots;
use crate::memslots::work::UnfinishedChange;
use crate::pins::Pins;
use crate::ring::Ring;
use crate::stalls::StallCells;
use crate::stats::{Counters, Stats, VcpuCounters, WorkerCounters, vcpu_counters};
use crate::sync::{AtomicU64, Ordering};
use crate::turn::Turn;
use crate::waits::Waits;
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::fmt;
use core::mem::ManuallyDrop;
use core::ops::DerefMut;
use slat::{Attributes, Format, Gpa, GpaRange, LeafSizeError, NewError, PageSize, Tables, Vmid};

/// The memory of one guest: memslots, tables, and the state of all operations on them.
///
/// Any number of threads work on it: a thread that runs a vCPU as [`Vcpu`](crate::Vcpu), any other
/// thread as [`Worker`](crate::Worker). Faults, ageing, clears of the log and invalidations by the
/// host take no lock, unless devices have tables that follow the guest's
/// ([`Config::devices`](crate::Config::devices)). One thread at a time changes memslots. No call
/// needs interrupts to be off.
///
/// Dropping the guest frees its tables, after one invalidation of its VMID.
///
/// ```
/// # use slat::format::ept::Ept1G;
/// # use slat::*;
/// # use slat_guest::*;
/// # struct Ram;
/// # impl Backing for Ram {
/// #     fn page(&self, host: Hva, _: Access) -> Result<Page, NoPage> {
/// #         let (hpa, block) = (Hpa((8 << 30) + host.0), PageSize::SIZE_2M);
/// #         Ok(Page { hpa, block, write: true, execute: true, memory: Memory::Normal })
/// #     }
/// # }
/// let (host, config) = (AllocPlatform::new(), Config::new(1, PageSize::SIZE_1G));
/// let guest = Guest::new(Ept1G::default(), Vmid(1), 40, &host, Ram, config)?;
/// let mut vcpu = Vcpu::new(&guest, 0)?;
/// let ram = MemslotSpec::new(MemslotId(0), Gpa(0), 64 << 20, Hva(0));
/// vcpu.worker().set_memslot(ram)?;
/// vcpu.fault(Gpa(0x1234), Access::Write);
/// assert_eq!(guest.stats().mapped.bytes(), 2 << 20);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Guest<'p, F: Format, H: Host, B: Backing> {
    pub(crate) tables: OwnedTables<'p, F, H>,
    /// Tables for single vCPUs while their caches are off; empty unless the policy is `Exact`.
    pub(crate) views: Box<[UncachedTables<'p, F, H>]>,
    pub(crate) backing: B,
    pub(crate) config: Config,
    /// Handles that leave the guest, and come back to an operation of it, have it too.
    pub(crate) identity: Identity,
    pub(crate) memslots: Memslots,
    /// A thread holds the lock while it changes memslots. The value is a change that a panic has
    /// left unfinished.
    pub(crate) changing: Turn<Option<UnfinishedChange>>,
    pub(crate) invalidations: Invalidations,
    /// Invalidations of private memory, by addresses of private memory.
    pub(crate) private_invalidations: Invalidations,
    /// Pages that the backing replaces for write faults, and that may be mapped elsewhere.
    pub(crate) cow_in_flight: Invalidations,
    pub(crate) pins: Pins,
    /// A thread holds it while it passes a change on to devices' tables
    /// ([`DeviceTables`](crate::DeviceTables)).
    pub(crate) device_notifier_lock: Turn<()>,
    pub(crate) rings: Box<[Ring]>,
    pub(crate) resetting: Turn<()>,
    /// A thread holds it while it recovers huge pages.
    pub(crate) recovering: Turn<()>,
    /// Hardware marks the first write through a leaf, so a leaf may be writable before it is
    /// written.
    pub(crate) marks_writes: bool,
    /// Threads that are moving marks out of leaves that they remove, to the bits kept for the
    /// memslot.
    pub(crate) marks_in_flight: Moves,
    /// Threads that take pages for the host, if hardware logs: a clear finds out that a leaf which
    /// it has cleaned may be gone.
    pub(crate) host_unmaps: Moves,
    pub(crate) caches: CacheState,
    /// Pages that vCPUs wait for.
    pub(crate) waits: Waits,
    pub(crate) stalls: StallCells,
    pub(crate) vcpus: Box<[VcpuCounters]>,
    pub(crate) counters: WorkerCounters,
}

/// The tables of one vCPU while its caches are off.
#[derive(Debug)]
pub(crate) struct UncachedTables<'p, F: Format, H: Host> {
    pub tables: ManuallyDrop<Tables<'p, F, H>>,
    /// Whether the view may have leaves. The vCPU sets it before it maps the first: see
    /// `Guest::spaces`.
    pub live: AtomicU64,
}

impl<F: Format, H: Host> Drop for UncachedTables<'_, F, H> {
    fn drop(&mut self) {
        // SAFETY:
        // 1. `take`: this is the only call, and `self.tables` is not used after `drop`.
        // 2. `deactivate_invalidated`, 1: as in the drop of `OwnedTables`.
        // 3. 2: no CPU ever had the root loaded, as `Guest::new` failed; or the guest's own tables,
        //    which have the same VMID, were dropped before, as `Guest` declares them first, and
        //    invalidated all of it.
        unsafe { ManuallyDrop::take(&mut self.tables).deactivate_invalidated().destroy() }
    }
}

/// Tables that are destroyed with the guest.
#[derive(Debug)]
pub(crate) struct OwnedTables<'p, F: Format, H: Host>(ManuallyDrop<Tables<'p, F, H>>);

impl<'p, F: Format, H: Host> core::ops::Deref for OwnedTables<'p, F, H> {
    type Target = Tables<'p, F, H>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl<F: Format, H: Host> Drop for OwnedTables<'_, F, H> {
    fn drop(&mut self) {
        // SAFETY:
        // 1. `take`: this is the only call, and `self.0` is not used after `drop`.
        // 2. `deactivate`: nothing in this crate loads a root. A caller that loads one promises at
        //    `Vcpu::root`, or `Guest::tables`, that no CPU has it loaded when the guest is dropped,
        //    nor loads it later.
        unsafe { ManuallyDrop::take(&mut self.0).deactivate().destroy() }
    }
}

/// Why a guest could not be made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum GuestError {
    /// The tables could not be made.
    Tables(NewError),
    /// The format has no leaf of a size that the configuration asks for.
    LeafSize(LeafSizeError),
    /// The format, as configured, has no dirty bits that hardware sets.
    NoHardwareDirty,
    /// Faults fill the rings, so rings need [`Logging::Protect`].
    RingNeedsProtection,
    /// Hardware fills the log buffers when it sets a dirty mark, so they need
    /// [`Logging::Hardware`].
    BuffersNeedHardware,
    /// The number of a ring's entries is not a power of two from 128 to 65536.
    RingSize {
        /// The number of entries that was asked for.
        entries: u32,
    },
}

impl fmt::Display for GuestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tables(error) => error.fmt(f),
            Self::LeafSize(error) => error.fmt(f),
            Self::NoHardwareDirty => f.write_str(
                "hardware does not mark writes in these tables; log by write protection, or \
                 configure the format with hardware dirty state",
            ),
            Self::RingNeedsProtection => f.write_str(
                "dirty rings are filled by faults; log by write protection, or without rings",
            ),
            Self::BuffersNeedHardware => f.write_str(
                "hardware writes the addresses of pages that it marks; log by hardware's marks",
            ),
            Self::RingSize { entries } => write!(
                f,
                "a ring of {entries} entries; powers of two from {} to {} are allowed",
                Ring::MIN,
                Ring::MAX
            ),
        }
    }
}

impl core::error::Error for GuestError {}

impl<'p, F: Format, H: Host, B: Backing> Guest<'p, F, H, B> {
    /// Makes a guest without memory, whose guest addresses have `address_bits` bits.
    ///
    /// # Errors
    /// [`GuestError`] says why the guest could not be made.
    pub fn new(
        format: F,
        vmid: Vmid,
        address_bits: u32,
        host: &'p H,
        backing: B,
        config: Config,
    ) -> Result<Self, GuestError> {
        for size in [Some(config.largest), config.eager_split].into_iter().flatten() {
            F::level_of(size).map_err(GuestError::LeafSize)?;
        }
        let clean = Attributes { dirty: false, ..Attributes::RAM };
        let marks_writes = format.encode(clean).is_ok();
        if config.logging == Logging::Hardware && !marks_writes {
            return Err(GuestError::NoHardwareDirty);
        }
        if config.log_buffers && config.logging != Logging::Hardware {
            return Err(GuestError::BuffersNeedHardware);
        }
        if config.ring.is_some() && config.logging == Logging::Hardware {
            return Err(GuestError::RingNeedsProtection);
        }
        let valid =
            |entries: &u32| entries.is_power_of_two() && (Ring::MIN..=Ring::MAX).contains(entries);
        if let Some(entries) = config.ring.filter(|entries| !valid(entries)) {
            return Err(GuestError::RingSize { entries });
        }
        let new = || match Tables::new(format, vmid, address_bits, host) {
            Ok(tables) => Ok(ManuallyDrop::new(tables)),
            Err(error) => Err(GuestError::Tables(error)),
        };
        let own = if config.needs_views(format.forces_caches()) { config.vcpus } else { 0 };
        let mut views = Vec::new();
        for _ in 0..own {
            views.push(UncachedTables { tables: new()?, live: AtomicU64::new(0) });
        }
        let ring = |_| config.ring.map(Ring::new);
        Ok(Self {
            tables: OwnedTables(new()?),
            views: views.into_boxed_slice(),
            backing,
            config,
            identity: Identity::new(),
            memslots: Memslots::new(),
            changing: Turn::new(None),
            invalidations: Invalidations::new(),
            private_invalidations: Invalidations::new(),
            cow_in_flight: Invalidations::new(),
            pins: Pins::new(),
            device_notifier_lock: Turn::new(()),
            rings: (0..config.vcpus).filter_map(ring).collect(),
            resetting: Turn::new(()),
            recovering: Turn::new(()),
            marks_writes,
            marks_in_flight: Moves::new(),
            host_unmaps: Moves::new(),
            caches: CacheState::new(&config, format.forces_caches()),
            waits: Waits::new(config.vcpus),
            stalls: StallCells::default(),
            vcpus: vcpu_counters(config.vcpus),
            counters: WorkerCounters::new(),
        })
    }

    /// Returns the tables that vCPUs share. **A CPU loads [`Vcpu::root`](crate::Vcpu::root), not
    /// the root of these tables**: on Arm without FEAT_S2FWB a vCPU is in tables of its own while
    /// its caches are off ([`Vcpu::has_view`](crate::Vcpu::has_view)), as it is at first unless
    /// [`Config::caches_on`](crate::Config::caches_on); with this root it would fault for ever.
    ///
    /// A caller may look up, copy and compare, and move pages by [`slat::Guard::replace`]
    /// ([`Worker::is_pinned`](crate::Worker::is_pinned)). Other operations of a guard change what
    /// this crate does not learn of: what it maps, unmaps, splits or collapses is missing in
    /// [`Stats::mapped`](crate::Stats::mapped), rights that it gives and dirty marks that it clears
    /// are missing in the log, and devices' tables do not follow. Only the operations of
    /// [`Worker`](crate::Worker) and [`Vcpu`](crate::Vcpu) keep these right. A guard does not cover
    /// vCPUs' own tables.
    ///
    /// While a thread has a guard, it changes no memslot, and does nothing else that waits until
    /// threads have left the tables: it would wait for itself. Debug builds panic then, before
    /// anything has changed, if the platform tells threads apart ([`slat::Platform::thread`]);
    /// release builds hang. The same holds in calls of the VMM from inside the tables
    /// ([`Backing`], `taken`, hooks), and, for the work that calls it, in
    /// [`Host::between_pieces`] and in [`Events`](crate::Events).
    ///
    /// A caller that loads their root into a CPU promises that no CPU has it loaded when the guest
    /// is dropped: dropping the guest frees the frames of its tables.
    pub fn tables(&self) -> &Tables<'p, F, H> {
        &self.tables
    }

    /// Gives all tables of the guest another VMID, as [`Tables::set_vmid`] does; returns the old
    /// VMID.
    ///
    /// # Safety
    /// The caller meets the conditions of [`Tables::set_vmid`] for each of the guest's roots
    /// ([`Vcpu::root`](crate::Vcpu::root)).
    pub unsafe fn set_vmid(&self, vmid: Vmid) -> Vmid {
        for view in &self.views {
            // SAFETY: the caller promises this for each of the guest's roots.
            unsafe { view.tables.set_vmid(vmid) };
        }
        // SAFETY: as above.
        unsafe { self.tables.set_vmid(vmid) }
    }

    /// Returns the backing: the host memory behind the guest.
    pub const fn backing(&self) -> &B {
        &self.backing
    }

    /// Returns the configuration with which the guest was made.
    pub const fn config(&self) -> &Config {
        &self.config
    }

    /// Returns what the guest's memory has cost so far, and what is mapped. The time it takes
    /// depends only on the number of vCPUs.
    pub fn stats(&self) -> Stats {
        let (late, contiguous) = (self.stalls.read(), self.config.contiguous);
        Stats::read::<F>(&self.vcpus, &self.counters, late, contiguous)
    }

    /// Frees all tables, as dropping the guest does, at a point that the caller chooses.
    ///
    /// # Safety
    /// No CPU has any of the guest's tables loaded.
    pub unsafe fn destroy(self) {
        drop(self);
    }

    /// Returns all tables that may have leaves.
    ///
    /// *Invariant*: either the vCPU sees the prohibition, or the thread that prohibits sees the
    /// view.
    /// 1. A vCPU marks its view as live before it maps anything there. It checks for prohibitions
    ///    after it has reserved the entry.
    /// 2. A thread that prohibits a mapping (by a change of memslots, or an invalidation) announces
    ///    that before it looks for live views.
    pub(crate) fn spaces(&self) -> impl Iterator<Item = &Tables<'p, F, H>> {
        crate::sync::agreed();
        let live = |view: &&UncachedTables<'p, F, H>| view.live.load(Ordering::Acquire) != 0;
        let views = self.views.iter().filter(live).map(|view| &*view.tables);
        core::iter::once(&*self.tables).chain(views)
    }

    #[inline]
    pub(crate) fn space(&self, view: Option<u16>) -> &Tables<'p, F, H> {
        match view {
            None => &self.tables,
            Some(vcpu) => &self.views[vcpu as usize].tables,
        }
    }

    pub(crate) fn page(&self) -> PageSize {
        F::size(0)
    }

    /// Reports an event to the host, if the host wants events.
    #[inline(always)]
    pub(crate) fn event(&self, event: impl FnOnce() -> Event) {
        report(self.tables.platform().events(), || self.tables.vmid(), event);
    }

    /// Takes the lock for changes of memslots, for work that waits for faults. A thread may hold it
    /// for as long as [`Host::between_pieces`] takes.
    #[track_caller]
    pub(crate) fn change_turn(&self) -> impl DerefMut<Target = Option<UnfinishedChange>> + '_ {
        self.assert_outside();
        self.no_change()
    }

    /// Takes the same lock, for work that waits for no fault: no thread changes memslots meanwhile.
    #[track_caller]
    pub(crate) fn no_change(&self) -> impl DerefMut<Target = Option<UnfinishedChange>> + '_ {
        self.changing.take(self.tables.platform())
    }

    /// Reports that work on a piece of a memslot is done. The calling thread is outside the tables.
    pub(crate) fn piece_done(&self, range: GpaRange) {
        self.event(|| Event::Piece { range });
        self.tables.platform().between_pieces();
    }

    /// Counts blocks that were split, and reports the event.
    #[inline]
    pub(crate) fn count_split(&self, counters: &Counters, at: Gpa, bytes: u64) {
        if bytes != 0 {
            counters.split_bytes.add(bytes);
            self.event(|| Event::Split { at, bytes });
        }
    }

    /// Panics, in debug builds, if the calling thread is inside tables of this guest: it would wait
    /// for itself. Threads call it before they change anything that others wait for.
    #[track_caller]
    pub(crate) fn assert_outside(&self) {
        assert!(
            // A model's threads are not told apart, and their stacks are small.
            cfg!(loom) || !self.tables.caller_is_inside(),
            "this thread would wait for itself: it is inside the guest's tables, by a guard of its \
             own or in a call of the VMM from there (`Backing`, `taken`, hooks); do this after the \
             guard is dropped, or the call has returned"
        );
    }

    /// Waits until all threads that were inside tables of this guest, or of another with its VMID,
    /// have left.
    #[track_caller]
    pub(crate) fn wait_for_faults(&self) {
        self.assert_outside();
        struct Waits<L: Fn() -> bool>(L);

        // A panic of `Host::wait` does not end the wait: the caller changes what these threads
        // read, and its locks are released after this.
        impl<L: Fn() -> bool> Drop for Waits<L> {
            fn drop(&mut self) {
                while !(self.0)() {
                    core::hint::spin_loop();
                }
            }
        }

        let period = self.tables.platform().readers().begin_grace_period();
        let left = Waits(|| self.tables.has_elapsed(period));
        while !(left.0)() {
            self.tables.platform().wait();
        }
        // They have left. A thread that enters with an old reading of the clock does not count.
        core::mem::forget(left);
    }

    /// Frees unlinked tables that no thread can be inside any more; returns how many. Operations
    /// that unlink tables do this themselves; the call is for callers that want the pages at once.
    pub fn reclaim(&self) -> usize {
        // Includes views that have no leaves now: they may have unlinked tables.
        let views = self.views.iter().map(|view| &*view.tables);
        core::iter::once(&*self.tables).chain(views).map(Tables::reclaim).sum()
    }
}
