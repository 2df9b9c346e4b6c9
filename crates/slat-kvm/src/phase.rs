//! What a phase of a run is, and what was found in it.

use crate::bitmap::Tally;
use crate::stall::Stalls;
use crate::stats::Changes;
use std::fmt;

macro_rules! phases {
    ($($(#[$doc:meta])* $phase:ident = $name:literal,)*) => {
        /// A step of a run. The names are those that Linux's selftests print, where they have it.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Phase {
            $($(#[$doc])* $phase,)*
        }

        impl Phase {
            /// All there are, in the order in which runs have them.
            pub const ALL: &[Phase] = &[$(Phase::$phase),*];

            /// Its name in reports.
            pub fn name(self) -> &'static str {
                match self { $(Phase::$phase => $name,)* }
            }
        }
    };
}

phases! {
    /// First writes.
    Populate = "populate",
    /// The work of what follows, with nothing in its way: what an access usually takes.
    Warm = "warm",
    /// Logging is switched on.
    Enable = "enable",
    /// Writes, logging on.
    Dirty = "dirty",
    /// The log is fetched, or the rings are emptied for the last time.
    Get = "get",
    /// The log is cleared.
    Clear = "clear",
    /// Logging is switched off.
    Disable = "disable",
    /// Return instructions in the guest's memory are called.
    Execute = "execute",
    /// Writes to memory that is there.
    Write = "write",
    /// Reads of it.
    Read = "read",
    /// The host marks all of the guest's pages as not used.
    MarkIdle = "mark-idle",
    /// Writes to pages that are marked so.
    WriteIdle = "write-idle",
    /// Reads of such.
    ReadIdle = "read-idle",
    /// The host takes all memory out of the guest and puts it back.
    Reset = "reset",
    /// Writes after that.
    Refill = "refill",
    /// Each vCPU switches its caches off and on again.
    Toggle = "toggle",
    /// vCPUs run on, nothing else happens.
    Baseline = "baseline",
    /// vCPUs run on while the log is harvested, or the guest is migrated.
    Run = "run",
    /// vCPUs stand still while the last pages are copied.
    Downtime = "downtime",
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One occurrence of a phase.
#[derive(Debug, Clone, PartialEq)]
pub struct PhaseRun {
    /// Which phase.
    pub phase: Phase,
    /// Which round, from 1; none for the phases outside of the rounds.
    pub iteration: Option<u32>,
    /// Its time: of the ioctls, or from the first vCPU's start to the last one's end.
    pub seconds: f64,
    /// Ioctls made in it.
    pub calls: u64,
    /// The longest of them. Every other call on the VM's memory waits that long.
    pub longest_call_seconds: f64,
    /// Seconds in them, all together; the same as `seconds` for the phases of the host.
    pub call_seconds: f64,
    /// What the vCPUs did; empty for the phases of the host.
    pub vcpus: Vec<VcpuRun>,
    /// What the log said; for `get` only.
    pub log: Option<Tally>,
    /// How the VM's counters changed; empty where the kernel has none.
    pub vm: Changes,
    /// What is mapped after it, where the kernel counts that.
    pub mapped: Option<MappedPages>,
    /// Bytes of second-level tables after it, all guests' of the host (`SecPageTables`), where the
    /// kernel counts them.
    pub tables: Option<u64>,
    /// Bytes of the guest's memory on each NUMA node after it, where it is bound to some.
    pub nodes: std::collections::BTreeMap<u32, u64>,
    /// Seconds that each of the host's CPUs stood still for a machine below it, on average (steal).
    pub stolen: f64,
}

/// One vCPU in one phase.
#[derive(Debug, Clone, PartialEq)]
pub struct VcpuRun {
    /// Pages that it touched, each time counted.
    pub pages: u64,
    /// From its start to its end.
    pub seconds: f64,
    /// How its counters changed; empty where the kernel has none.
    pub counters: Changes,
    /// What its clock showed; none before it is known what is usual.
    pub stalls: Option<Stalls>,
    /// Seconds that its thread was ready and waited for a CPU, where the kernel counts that.
    pub waited: Option<f64>,
}

/// Leaves of the second level by size (x86: `pages_4k`, `pages_2m`, `pages_1g`).
///
/// KVM counts all of the VM: the slot with the guest's code and tables has a few.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MappedPages {
    /// Leaves of 4 KiB.
    pub size_4k: u64,
    /// Leaves of 2 MiB.
    pub size_2m: u64,
    /// Leaves of 1 GiB.
    pub size_1g: u64,
}
