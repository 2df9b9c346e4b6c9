//! Statistics of a guest's memory: counters, and the time that each vCPU waited.

use crate::mapped::{MappedBytes, SizeCells};
use crate::outcome::Outcome;
use crate::stalls::Stalls;
use crate::sync::AtomicCount;
use alloc::boxed::Box;
use alloc::vec::Vec;
use slat::{Format, OpCounts};

/// The kind of a fault, by its outcome.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum FaultKind {
    /// A page or block was mapped.
    Mapped,
    /// A leaf became writable.
    MadeWritable,
    /// A leaf, or pages around it, became executable.
    MadeExecutable,
    /// A leaf became accessed.
    MadeAccessed,
    /// A block was split.
    Split,
    /// A block was unmapped, and the page mapped.
    #[cfg(feature = "baselines")]
    Zapped,
    /// Nothing was left to do.
    Spurious,
    /// Another thread was in the way.
    Retry,
    /// There was no memory: an access to a device's register, or a write to a read-only memslot.
    Mmio,
    /// The vCPU's ring was full.
    RingFull,
    /// The fault could not be resolved.
    Refused,
}

impl FaultKind {
    /// All kinds.
    pub const ALL: &[Self] = &[
        Self::Mapped,
        Self::MadeWritable,
        Self::MadeExecutable,
        Self::MadeAccessed,
        Self::Split,
        #[cfg(feature = "baselines")]
        Self::Zapped,
        Self::Spurious,
        Self::Retry,
        Self::Mmio,
        Self::RingFull,
        Self::Refused,
    ];

    /// Returns the name of the kind, for reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mapped => "mapped",
            Self::MadeWritable => "made writable",
            Self::MadeExecutable => "made executable",
            Self::MadeAccessed => "made accessed",
            Self::Split => "split",
            #[cfg(feature = "baselines")]
            Self::Zapped => "zapped",
            Self::Spurious => "spurious",
            Self::Retry => "retry",
            Self::Mmio => "mmio",
            Self::RingFull => "ring full",
            Self::Refused => "refused",
        }
    }
}

impl From<&Outcome> for FaultKind {
    #[inline]
    fn from(outcome: &Outcome) -> Self {
        match outcome {
            Outcome::Mapped(_) => Self::Mapped,
            Outcome::MadeWritable(_) => Self::MadeWritable,
            Outcome::MadeExecutable(_) => Self::MadeExecutable,
            Outcome::MadeAccessed => Self::MadeAccessed,
            Outcome::Split { .. } => Self::Split,
            #[cfg(feature = "baselines")]
            Outcome::Zapped { .. } => Self::Zapped,
            Outcome::Spurious => Self::Spurious,
            Outcome::Retry(_) => Self::Retry,
            Outcome::Mmio => Self::Mmio,
            Outcome::RingFull => Self::RingFull,
            Outcome::Refused(_) => Self::Refused,
        }
    }
}

const KINDS: usize = FaultKind::ALL.len();

/// The number of times that something was done, and how long it took, in ticks of
/// [`Host::now`](crate::Host::now).
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct FaultTime {
    /// The number of times.
    pub count: u64,
    /// The ticks of all of them together.
    pub ticks: u64,
    /// The ticks of the longest one.
    pub longest: u64,
}

impl FaultTime {
    fn add(&mut self, other: Self) {
        self.count += other.count;
        self.ticks += other.ticks;
        self.longest = self.longest.max(other.longest);
    }
}

#[derive(Debug, Default)]
pub(crate) struct SpentCell {
    count: AtomicCount,
    ticks: AtomicCount,
    longest: AtomicCount,
}

impl SpentCell {
    #[inline]
    pub fn record(&self, ticks: u64) {
        self.count.add(1);
        self.ticks.add(ticks);
        self.longest.raise(ticks);
    }

    fn read(&self) -> FaultTime {
        FaultTime { count: self.count.get(), ticks: self.ticks.get(), longest: self.longest.get() }
    }
}

/// The counters of one vCPU, on cache lines of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct VcpuCounters {
    kinds: [SpentCell; KINDS],
    /// The counters of its thread.
    pub totals: Counters,
    /// Whether a thread runs the vCPU.
    pub taken: core::sync::atomic::AtomicBool,
    /// The time of cache maintenance and changes of view, outside faults.
    pub caches: SpentCell,
}

impl VcpuCounters {
    #[inline]
    pub fn fault(&self, outcome: &Outcome, ticks: u64) {
        self.kinds[FaultKind::from(outcome) as usize].record(ticks);
    }
}

macro_rules! totals {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The counters of the guest's threads, vCPUs or not.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub $name: AtomicCount,)*
            /// Leaves in the tables that vCPUs share.
            pub mapped: SizeCells,
            /// Leaves in vCPUs' own tables.
            pub views: SizeCells,
        }

        /// The counts of all the guest's threads, vCPUs or not, since the guest was made.
        #[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
        #[non_exhaustive]
        pub struct GuestTotals {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Counters {
            fn read(&self) -> GuestTotals {
                GuestTotals { $($name: self.$name.get(),)* }
            }
        }

        impl GuestTotals {
            fn add(&mut self, other: Self) {
                $(self.$name += other.$name;)*
            }
        }
    };
}

totals! {
    /// Page-table entries that were read.
    entries_read,
    /// Page-table entries that were written.
    entries_written,
    /// Table pages filled and linked.
    tables_built,
    /// TLB invalidations executed.
    invalidations,
    /// Live entries that were made invalid until a TLB invalidation had completed
    /// (break-before-make).
    broken,
    /// Ticks of the calls that broke entries: an upper bound of the time during which entries were
    /// invalid.
    broken_ticks,
    /// Bytes of blocks that were split.
    split_bytes,
    /// Bytes of blocks that were collapsed from tables.
    collapsed_bytes,
    /// Logs read.
    log_reads,
    /// Clears of logs.
    log_clears,
    /// Pages cleared.
    log_cleared_pages,
    /// Entries of dirty rings that were emptied.
    ring_resets,
    /// Bytes that were unmapped for the host, by invalidations and conversions.
    invalidated_bytes,
    /// Pages for which ageing had no answer at first, and looked again.
    ageing_slow,
    /// Pages that became private, or shared again.
    converted_pages,
    /// Bytes of private memory that were unmapped, by conversions, by invalidations or with a
    /// memslot.
    private_bytes_taken,
    /// Flushes of all memory.
    flushes,
    /// Bytes of data cache that were maintained outside faults.
    flushed_bytes,
    /// Bytes that were maintained as faults mapped them in vCPUs' own views.
    touched_bytes,
    /// Bytes that were maintained as faults mapped them in the tables that vCPUs share.
    mapped_bytes,
}

impl Counters {
    /// Adds the counts of a guard, and, if it broke any entry, the ticks that `ticks` returns.
    #[inline]
    pub fn engine(&self, counts: &OpCounts, ticks: impl FnOnce() -> u64) {
        self.entries_read.add(counts.entries_read);
        self.entries_written.add(counts.entries_written);
        // Most guards have none of these.
        if counts.tables_built | counts.invalidations | counts.broken != 0 {
            self.tables_built.add(counts.tables_built);
            self.invalidations.add(counts.invalidations);
            self.broken.add(counts.broken);
            if counts.broken != 0 {
                self.broken_ticks.add(ticks());
            }
        }
    }
}

/// The costs of a guest's memory so far, and the memory that is mapped.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Stats {
    /// The costs of each vCPU.
    pub vcpus: Vec<VcpuStats>,
    /// The counters of all threads.
    pub totals: GuestTotals,
    /// How long vCPUs waited for pages that arrived late.
    pub late: Stalls,
    /// The memory that is mapped now in the tables that vCPUs share.
    pub mapped: MappedBytes,
    /// The memory that is mapped in the tables of vCPUs whose caches are off. A page counts once
    /// for each vCPU that has it mapped.
    pub views: MappedBytes,
}

/// The time that one vCPU waited.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct VcpuStats {
    /// The faults by kind. Private: features change the number of kinds.
    faults: [FaultTime; KINDS],
    /// Cache switches, and their maintenance.
    pub caches: FaultTime,
}

impl VcpuStats {
    /// Returns the time of the faults of one kind.
    pub const fn of(&self, kind: FaultKind) -> FaultTime {
        self.faults[kind as usize]
    }

    /// Returns all the time that the vCPU waited for memory management.
    pub fn stall(&self) -> FaultTime {
        let mut all = self.caches;
        self.faults.iter().for_each(|&spent| all.add(spent));
        all
    }
}

impl Stats {
    /// Returns the time of the faults of one kind, of all vCPUs.
    pub fn faults(&self, kind: FaultKind) -> FaultTime {
        let mut all = FaultTime::default();
        self.vcpus.iter().for_each(|vcpu| all.add(vcpu.of(kind)));
        all
    }

    pub(crate) fn read<F: Format>(
        vcpus: &[VcpuCounters],
        workers: &WorkerCounters,
        late: Stalls,
        contiguous: bool,
    ) -> Self {
        let of = |vcpu: &VcpuCounters| VcpuStats {
            faults: core::array::from_fn(|kind| vcpu.kinds[kind].read()),
            caches: vcpu.caches.read(),
        };
        let mut totals = GuestTotals::default();
        workers.parts.iter().for_each(|part| totals.add(part.0.read()));
        vcpus.iter().for_each(|vcpu| totals.add(vcpu.totals.read()));
        let parts = workers.parts.iter().map(|part| &part.0);
        let all = parts.chain(vcpus.iter().map(|vcpu| &vcpu.totals));
        let mapped = MappedBytes::read::<F>(all.clone().map(|part| &part.mapped), contiguous);
        let views = MappedBytes::read::<F>(all.map(|part| &part.views), contiguous);
        Self { vcpus: vcpus.iter().map(of).collect(), totals, late, mapped, views }
    }
}

/// The number of parts of the workers' counters. Up to this many threads without a vCPU, which may
/// work on disjoint ranges, write no common cache line for their counters.
const PARTS: usize = 8;

#[derive(Debug, Default)]
#[repr(align(128))]
struct Part(Counters);

/// The counters of all threads without a vCPU. Each thread takes a part when it begins; counts that
/// belong to no thread go into the first.
#[derive(Debug)]
pub(crate) struct WorkerCounters {
    parts: Box<[Part]>,
    taken: AtomicCount,
}

impl WorkerCounters {
    pub fn new() -> Self {
        let parts = (0..PARTS).map(|_| Part::default()).collect();
        Self { parts, taken: AtomicCount::default() }
    }

    pub fn take(&self) -> &Counters {
        self.taken.add(1);
        &self.parts[self.taken.get() as usize % PARTS].0
    }
}

impl core::ops::Deref for WorkerCounters {
    type Target = Counters;

    fn deref(&self) -> &Counters {
        &self.parts[0].0
    }
}

pub(crate) fn vcpu_counters(vcpus: u16) -> Box<[VcpuCounters]> {
    (0..vcpus).map(|_| VcpuCounters::default()).collect()
}
