//! The configuration of a guest's memory, as the guest is made with it.

use crate::sync::{AtomicU64, Ordering};
use slat::PageSize;

/// The configuration of a guest's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Config {
    /// The number of vCPUs that the guest may have: their numbers are below it.
    pub vcpus: u16,
    /// The largest leaf that a fault maps.
    pub largest: PageSize,
    /// How writes are logged in memslots that log.
    pub logging: Logging,
    /// With [`Logging::Hardware`]: hardware also writes the addresses of pages that it marks into
    /// buffers (Intel's PML, Arm's FEAT_HDBSS), which the VMM passes to
    /// [`Worker::log_addresses`](crate::Worker::log_addresses). So the log is read without a walk.
    pub log_buffers: bool,
    /// Every page counts as dirty when a memslot begins to log, and is protected when it is first
    /// cleared (Linux: `KVM_DIRTY_LOG_INITIALLY_SET`).
    pub initially_set: bool,
    /// The size to which blocks are split before their first write, when a memslot begins to log
    /// or, with `initially_set`, when its log is cleared; `None` leaves splits to the faults.
    /// Leaves that are larger than a page after that are protected as a whole, and each first write
    /// in one splits it further. [`Guest::set_eager_split`](crate::Guest::set_eager_split) changes
    /// it.
    pub eager_split: Option<PageSize>,
    /// Entries of each vCPU's dirty ring, a power of two; `None` for no rings.
    pub ring: Option<u32>,
    /// Whether faults fold leaves into groups that a TLB may hold as one, on formats that have them
    /// (Arm's contiguous bit). They do so where the backing has as much in one piece, in memslots
    /// that do not log, and where huge pages may be executed. A memslot that begins to log unfolds
    /// its groups, and they do not come back by themselves.
    pub contiguous: bool,
    /// Whether huge pages may be executed when the guest begins;
    /// [`Worker::set_execute_huge`](crate::Worker::set_execute_huge) changes it.
    pub execute_huge: ExecuteHuge,
    /// How memory is maintained when vCPUs switch their caches, where the format does not force the
    /// guest to use them (Arm without FEAT_S2FWB); elsewhere nothing has to be done.
    pub caches: CachePolicy,
    /// Whether devices reach the guest's memory: they are told what is mapped and unmapped
    /// ([`DeviceTables`](crate::DeviceTables)), no fault maps anything while something is unmapped,
    /// and their use of each page is kept ([`Worker::device_used`](crate::Worker::device_used); two
    /// bits).
    pub devices: bool,
    /// The number of table pages that the guest may have, in the tables that vCPUs share, in vCPUs'
    /// own tables and at hand in its workers, not counting the roots; `None` for no bound. Each
    /// view of [`CachePolicy::Exact`](crate::CachePolicy::Exact) may come to map all of the guest's
    /// memory in small pages: without a bound a guest makes its host spend 1/512 of its memory (4K
    /// pages) for each vCPU. Only that guest is refused what a bound refuses
    /// ([`Refused::TableLimit`](crate::Refused::TableLimit)).
    pub table_pages: Option<u32>,
    /// The number of pages around a fault that it maps together with its own, if the backing has
    /// them at hand ([`Backing::at_hand`](crate::Backing::at_hand)): an aligned run of so many
    /// pages, rounded down to a power of two, within one table and one memslot. 0 and 1: none.
    /// Pages mapped so do not count as used; on hardware that does not mark use each of them still
    /// takes a fault.
    pub fault_around: u32,
}

impl Config {
    /// The largest blocks, logging by write protection, and the default policy for caches.
    pub const fn new(vcpus: u16, largest: PageSize) -> Self {
        Self {
            vcpus,
            largest,
            logging: Logging::Protect,
            log_buffers: false,
            initially_set: false,
            eager_split: None,
            ring: None,
            contiguous: false,
            execute_huge: ExecuteHuge::Allowed,
            caches: CachePolicy::DEFAULT,
            devices: false,
            table_pages: None,
            fault_around: 0,
        }
    }

    /// Whether faults log what they mark as written, so that no leaf has to be looked at.
    pub(crate) fn faults_log(&self) -> bool {
        self.logging == Logging::Protect || self.log_buffers
    }

    /// Whether vCPUs may need tables of their own.
    pub(crate) fn needs_views(&self, forced: bool) -> bool {
        !forced && self.caches == CachePolicy::Exact
    }
}

/// The size of eager splits: its base-2 logarithm, 0 for none. It orders nothing.
#[derive(Debug)]
pub(crate) struct EagerSize(AtomicU64);

impl EagerSize {
    pub fn new(size: Option<PageSize>) -> Self {
        Self(AtomicU64::new(Self::raw(size)))
    }

    fn raw(size: Option<PageSize>) -> u64 {
        size.map_or(0, |size| size.shift().into())
    }

    pub fn get(&self) -> Option<PageSize> {
        match self.0.load(Ordering::Relaxed) {
            0 => None,
            shift => PageSize::from_bytes(1 << shift),
        }
    }

    pub fn set(&self, size: Option<PageSize>) {
        self.0.store(Self::raw(size), Ordering::Relaxed);
    }
}

/// How writes are noticed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Logging {
    /// By write protection: the first write to a page faults.
    Protect,
    /// By hardware's dirty bits, in pages; blocks are write-protected, and split by the first
    /// write.
    Hardware,
}

/// The effect of an instruction fetch from a huge page. Some Intel CPUs hang if a page changes its
/// size while they fetch from it (CVE-2018-12207), so Linux maps huge pages without the right to
/// execute there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ExecuteHuge {
    /// Huge pages are executable.
    Allowed,
    /// They are not. A fetch splits along its path, and all of the new pages that the guest may
    /// execute become executable; larger siblings stay as they are.
    Split,
    /// They are not. A fetch splits along its path; the page fetched from becomes executable.
    SplitPage,
    /// They are not. A fetch unmaps the huge page, and maps the page that was fetched from: Linux
    /// before 6.2. A baseline.
    #[cfg(feature = "baselines")]
    Zap,
}

/// The effect of a switch of a vCPU's caches, where the guest can get past them
/// ([`Format::forces_caches`](slat::Format::forces_caches) is `false`).
///
/// `docs/caches.md` says which policies lose data, and whose.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum CachePolicy {
    /// Every switch of every vCPU flushes all of the guest's memory: Linux 7.3.
    Every,
    /// Switches of vCPU 0 flush, those of others do not. Loses data; a baseline.
    #[cfg(feature = "baselines")]
    Vcpu0,
    /// The first vCPU that switches on flushes, and again the first after a vCPU switched off, was
    /// reset or maintained by set and way, each of which flushes too. Loses data of guests that
    /// leave maintenance to the hypervisor; a baseline.
    #[cfg(feature = "baselines")]
    First,
    /// A vCPU whose caches are off has tables of its own. Each page is maintained as it is mapped
    /// there, and once more as the vCPU switches on: exactly the pages that it used.
    Exact,
}

impl CachePolicy {
    /// The cheapest policy that loses no data.
    pub const DEFAULT: Self = Self::Exact;

    /// All policies.
    pub const ALL: &[Self] = &[
        Self::Every,
        #[cfg(feature = "baselines")]
        Self::Vcpu0,
        #[cfg(feature = "baselines")]
        Self::First,
        Self::Exact,
    ];
}
