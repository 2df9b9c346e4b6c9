//! How a guest's memory is managed, when the guest is made.

use crate::sync::{AtomicU64, Ordering};
use slat::PageSize;

/// How a guest's memory is managed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Config {
    /// vCPUs that the guest may have: their numbers are below it.
    pub vcpus: u16,
    /// The largest leaf that a fault maps.
    pub largest: PageSize,
    /// How writes are logged in slots that log.
    pub logging: Logging,
    /// With [`Logging::Hardware`]: hardware also writes the addresses of pages that it marks into
    /// buffers (Intel's PML, Arm's FEAT_HDBSS), which are handed to
    /// [`Worker::log_addresses`](crate::Worker::log_addresses). So the log is read without a walk.
    pub log_buffers: bool,
    /// Where a slot begins to log, every page counts as dirty, and is protected when it is cleared
    /// for the first time (Linux: `KVM_DIRTY_LOG_INITIALLY_SET`).
    pub initially_set: bool,
    /// The size to which blocks are split before their first write, when a slot begins to log or,
    /// with `initially_set`, when its log is cleared; `None` leaves it to the faults. What is
    /// larger than a page then is protected as a whole, and each first write in it splits it
    /// further. [`Guest::set_eager_split`](crate::Guest::set_eager_split) changes it.
    pub eager_split: Option<PageSize>,
    /// Entries of each vCPU's dirty ring, a power of two; `None` for no rings.
    pub ring: Option<u32>,
    /// Whether faults fold leaves that a TLB may hold as one, on formats that have such groups
    /// (Arm's contiguous bit): where the backing has as much in one piece, in slots that do not
    /// log, and where huge pages may be executed. A slot that begins to log unfolds them, and they
    /// do not come back by themselves.
    pub contiguous: bool,
    /// Whether huge pages may be executed, at first:
    /// [`Worker::set_execute_huge`](crate::Worker::set_execute_huge) changes it.
    pub execute_huge: ExecuteHuge,
    /// What happens to memory when vCPUs switch their caches, where the format does not force the
    /// guest to use them (Arm without FEAT_S2FWB); elsewhere nothing has to.
    pub caches: CachePolicy,
    /// Devices reach the guest's memory: they are told of what is mapped and unmapped
    /// ([`DeviceTables`](crate::DeviceTables)), while something is unmapped no fault maps anything,
    /// and what they use is kept of each page ([`Worker::device_used`](crate::Worker::device_used);
    /// two bits).
    pub devices: bool,
    /// Table pages that the guest may have, beside the roots, in the tables that vCPUs share, in
    /// those of their own and at hand in its workers; `None` for no bound. Each view of
    /// [`CachePolicy::Exact`](crate::CachePolicy::Exact) may come to map all that the guest has in
    /// small pages: without a bound a guest makes its host spend 1/512 of its memory (4K pages) for
    /// each vCPU. What a bound refuses is refused to that guest alone
    /// ([`Refused::TableLimit`](crate::Refused::TableLimit)).
    pub table_pages: Option<u32>,
    /// Pages of which a fault that maps a page maps those too that the backing has at hand
    /// ([`Backing::at_hand`](crate::Backing::at_hand)): an aligned run of so many, rounded down to
    /// a power of two, within one table and one slot. 0 and 1: none. What is mapped so does not
    /// count as used, and so on hardware that does not mark what is used each still takes a fault.
    pub fault_around: u32,
}

impl Config {
    /// Blocks as large as they come, a log by write protection, caches by the default policy.
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

    /// Faults say what they mark as written: nobody looks at the leaves for it.
    pub(crate) fn faults_log(&self) -> bool {
        self.logging == Logging::Protect || self.log_buffers
    }

    /// vCPUs may need tables of their own.
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

/// What an instruction fetch from a huge page does. Some Intel CPUs hang if the size of a page
/// changes that they fetch from (CVE-2018-12207), so Linux maps huge pages without the right to
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

/// What a switch of a vCPU's caches does, where the guest can get past them
/// ([`Format::forces_caches`](slat::Format::forces_caches) is `false`).
///
/// Which of them lose data, and whose, is in `docs/caches.md`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum CachePolicy {
    /// Every switch of every vCPU flushes all of the guest's memory: Linux 7.3.
    Every,
    /// Switches of vCPU 0 flush, those of others do not. Loses data; a baseline.
    #[cfg(feature = "baselines")]
    Vcpu0,
    /// The first vCPU that switches on flushes, and again the first after one switched off, was
    /// reset or maintained by set and way, each of which flushes too. Loses data of guests that
    /// leave maintenance to the hypervisor; a baseline.
    #[cfg(feature = "baselines")]
    First,
    /// A vCPU whose caches are off has tables of its own. Each page is maintained as it is mapped
    /// there, and once more as the vCPU switches on: just what it used.
    Exact,
}

impl CachePolicy {
    /// The cheapest that loses no data.
    pub const DEFAULT: Self = Self::Exact;

    /// All of them.
    pub const ALL: &[Self] = &[
        Self::Every,
        #[cfg(feature = "baselines")]
        Self::Vcpu0,
        #[cfg(feature = "baselines")]
        Self::First,
        Self::Exact,
    ];
}
