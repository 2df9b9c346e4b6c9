//! The configuration with which a guest's memory is made.

use slat::PageSize;

/// The configuration of a guest's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Config {
    /// The number of vCPUs that the guest may have. Their numbers are below it.
    pub vcpus: u16,
    /// The largest leaf that a fault maps.
    pub largest: PageSize,
    /// How writes are logged in memslots that log.
    pub logging: Logging,
    /// With [`Logging::Hardware`]: whether hardware also writes the addresses of pages that it
    /// marks dirty into buffers (Intel's PML, Arm's FEAT_HDBSS), which the VMM passes to
    /// [`Worker::log_addresses`](crate::Worker::log_addresses). The log is then read without a
    /// walk.
    pub log_buffers: bool,
    /// Whether every page counts as dirty when a memslot begins to log, and is write-protected when
    /// it is first cleared (Linux: `KVM_DIRTY_LOG_INITIALLY_SET`).
    pub initially_set: bool,
    /// The leaf size to which blocks are split before their first write: when a memslot begins to
    /// log or, with `initially_set`, when its log is cleared. With `None` faults split blocks. If
    /// the size is larger than a page, leaves of that size are write-protected, and the first write
    /// in each splits it further.
    pub eager_split: Option<PageSize>,
    /// The number of entries of each vCPU's dirty ring, a power of two; `None` for no rings.
    pub ring: Option<u32>,
    /// Whether faults fold leaves into groups that a TLB may hold as one entry, on formats that
    /// have them (Arm's contiguous bit). Faults do so where the backing's memory is contiguous, in
    /// memslots that do not log, and while huge pages may be executed. A memslot that begins to log
    /// unfolds its groups; faults do not fold them again by themselves.
    pub contiguous: bool,
    /// Whether huge pages may be executed.
    pub execute_huge: ExecuteHuge,
    /// How memory is maintained when vCPUs switch their caches on or off, on a format that does not
    /// force the guest to use them (Arm without FEAT_S2FWB). On other formats it has no effect.
    pub caches: CachePolicy,
    /// Whether vCPUs begin with their caches on. The default, `false`, is what a vCPU does after an
    /// architectural reset; with [`CachePolicy::Exact`] it is then in tables of its own, in pages,
    /// until [`Vcpu::set_caches`](crate::Vcpu::set_caches) reports that it has switched them on.
    /// `true` is for guests that begin in the tables that vCPUs share: the VMM has set the
    /// registers so (Arm: M and C of SCTLR_EL1), or their accesses never bypass the caches, as in a
    /// user-space machine. A [`Vcpu::reset`](crate::Vcpu::reset) switches the caches off in any
    /// case.
    pub caches_on: bool,
    /// Whether devices access the guest's memory. If so, devices' tables follow what is mapped and
    /// unmapped ([`DeviceTables`](crate::DeviceTables)), no fault maps anything while something is
    /// unmapped, and two bits for each page record its use by devices
    /// ([`Worker::device_used`](crate::Worker::device_used)).
    pub devices: bool,
}

impl Config {
    /// Makes a configuration with leaves up to `largest`, write protection for logs, and the
    /// default policy for caches; the other features are off.
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
            caches_on: false,
            devices: false,
        }
    }

    /// Whether faults themselves log the writes that they permit, so that no leaf has to be read.
    pub(crate) fn faults_log(&self) -> bool {
        self.logging == Logging::Protect || self.log_buffers
    }

    /// Whether vCPUs may need tables of their own.
    pub(crate) fn needs_views(&self, forced: bool) -> bool {
        !forced && self.caches == CachePolicy::Exact
    }
}

/// How writes are detected for the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Logging {
    /// Write protection: the first write to a page faults.
    Protect,
    /// Hardware's dirty bits, in pages. Blocks are write-protected, and the first write splits
    /// them.
    Hardware,
}

/// How an instruction fetch from a huge page is handled. Some Intel CPUs hang if a page changes its
/// size while they fetch from it (CVE-2018-12207), so Linux maps huge pages without the right to
/// execute on these CPUs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ExecuteHuge {
    /// Huge pages are executable.
    Allowed,
    /// Huge pages are not executable. A fetch splits the huge page along its path, and all of the
    /// new small pages that the guest may execute become executable; larger siblings stay as they
    /// are.
    Split,
    /// Huge pages are not executable. A fetch splits the huge page along its path; the page fetched
    /// from becomes executable.
    SplitPage,
    /// Huge pages are not executable. A fetch unmaps the huge page, and maps the page fetched from:
    /// Linux before 6.2. A baseline.
    #[cfg(feature = "baselines")]
    Zap,
}

/// What is done when a vCPU switches its caches on or off, on a format on which the guest can
/// bypass them ([`Format::forces_caches`](slat::Format::forces_caches) is `false`).
///
/// `docs/caches.md` says which policies lose data, and of which guests.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum CachePolicy {
    /// Every switch of every vCPU flushes all of the guest's memory: Linux 7.3.
    Every,
    /// Switches of vCPU 0 flush; switches of other vCPUs do not. Loses data; a baseline.
    #[cfg(feature = "baselines")]
    Vcpu0,
    /// A vCPU that switches its caches off, is reset, or maintains them by set and way flushes. So
    /// does the first vCPU that switches them on, at first and after each of these. Loses data of
    /// guests that leave maintenance to the hypervisor; a baseline.
    #[cfg(feature = "baselines")]
    First,
    /// A vCPU whose caches are off has tables of its own. A fault maintains each page as it maps it
    /// there, and the vCPU maintains these pages once more as it switches on: exactly the pages
    /// that it used.
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
