//! Phases of a run, and the measurements of each.

use crate::bitmap::Tally;
use crate::stall::Stalls;
use crate::stats::Changes;
use std::fmt;

macro_rules! phases {
    ($($(#[$doc:meta])* $phase:ident = $name:literal,)*) => {
        /// A phase of a run. The names are those that Linux's selftests print, where they have the
        /// phase.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Phase {
            $($(#[$doc])* $phase,)*
        }

        impl Phase {
            /// All phases, in the order in which they occur in runs.
            pub const ALL: &[Phase] = &[$(Phase::$phase),*];

            /// Returns whether memory management can stall vCPUs in it.
            pub fn can_stall(self) -> bool {
                use Phase::*;
                matches!(
                    self,
                    Run | Dirty | Execute | Refill | Write | WriteIdle | ReadIdle | Toggle
                )
            }

            /// Returns the name for reports.
            pub fn name(self) -> &'static str {
                match self { $(Phase::$phase => $name,)* }
            }
        }
    };
}

phases! {
    /// Each page is written for the first time.
    Populate = "populate",
    /// The work of the later phases runs without interference, to measure how long an access
    /// usually takes.
    Warm = "warm",
    /// Logging is switched on.
    Enable = "enable",
    /// vCPUs write while logging is on.
    Dirty = "dirty",
    /// The log is fetched, or the rings are emptied for the last time.
    Get = "get",
    /// The log is cleared.
    Clear = "clear",
    /// The pages that changed are copied to a snapshot.
    Copy = "copy",
    /// Logging is switched off.
    Disable = "disable",
    /// Return instructions in the guest's memory are called.
    Execute = "execute",
    /// vCPUs write to memory that is mapped.
    Write = "write",
    /// vCPUs read memory that is mapped.
    Read = "read",
    /// The host marks all of the guest's pages as not used.
    MarkIdle = "mark-idle",
    /// vCPUs write to pages that are marked as not used.
    WriteIdle = "write-idle",
    /// vCPUs read pages that are marked as not used.
    ReadIdle = "read-idle",
    /// The host deletes all memslots of the test memory and adds them again.
    Reset = "reset",
    /// vCPUs write after `Reset`.
    Refill = "refill",
    /// Each vCPU switches its caches off and on again.
    Toggle = "toggle",
    /// A memslot is added.
    Add = "add",
    /// A memslot is moved.
    Move = "move",
    /// A memslot is deleted.
    Delete = "delete",
    /// vCPUs run, and the host does nothing else.
    Baseline = "baseline",
    /// vCPUs run while the log is harvested, or the guest is migrated.
    Run = "run",
    /// The guest's memory is prepared to come back from a file.
    Prepare = "prepare",
    /// vCPUs run while their memory comes back.
    Restore = "restore",
    /// vCPUs visit their memory again, after the host has done something to it.
    Revisit = "revisit",
    /// Memory is taken away from the guest.
    Shrink = "shrink",
    /// The host looks for pages with equal contents, and merges them.
    Merge = "merge",
    /// vCPUs are stopped while the last pages are copied.
    Downtime = "downtime",
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl PartialEq<str> for Phase {
    fn eq(&self, name: &str) -> bool {
        self.name() == name
    }
}

/// One occurrence of a phase.
#[derive(Debug, Clone, PartialEq)]
pub struct PhaseRun {
    /// The phase.
    pub phase: Phase,
    /// The round, from 1; `None` for phases outside of the rounds.
    pub iteration: Option<u32>,
    /// Seconds of the ioctls, or from the first vCPU's start to the last vCPU's end.
    pub seconds: f64,
    /// Number of ioctls.
    pub calls: u64,
    /// Seconds of the longest ioctl. Other calls that change the VM's memory may wait that long.
    pub longest_call_seconds: f64,
    /// Seconds of all ioctls. In phases of the host this equals `seconds`.
    pub call_seconds: f64,
    /// Measurements of each vCPU; empty in phases of the host.
    pub vcpus: Vec<VcpuRun>,
    /// The result of checking the log; only for `get`.
    pub log: Option<Tally>,
    /// Changes of the VM's counters; empty where the kernel has none.
    pub vm: Changes,
    /// Leaves that are mapped after the phase, where the kernel counts them.
    pub mapped: Option<MappedPages>,
    /// Bytes of the second-level tables of all guests on the host after the phase
    /// (`SecPageTables`), where the kernel counts them.
    pub tables: Option<u64>,
    /// Bytes of the guest's memory on each NUMA node after `populate`, if the memory is bound to
    /// nodes.
    pub nodes: std::collections::BTreeMap<u32, u64>,
    /// Seconds of steal time, averaged over the host's CPUs.
    pub stolen: f64,
}

/// Measurements of one vCPU in one phase.
#[derive(Debug, Clone, PartialEq)]
pub struct VcpuRun {
    /// Number of steps. A step accesses one page or skips it.
    pub pages: u64,
    /// Seconds from the vCPU's start to its end.
    pub seconds: f64,
    /// Changes of the vCPU's counters; empty where the kernel has none.
    pub counters: Changes,
    /// Stalls by the vCPU's clock; `None` before the usual time of an access is known.
    pub stalls: Option<Stalls>,
    /// Seconds that the vCPU's thread was ready and waited for a CPU, where the kernel counts them.
    pub waited: Option<f64>,
}

/// Numbers of second-level leaves by size (x86: `pages_4k`, `pages_2m`, `pages_1g`).
///
/// KVM counts the whole VM, which includes a few leaves of the memslot with the guest's code and
/// tables.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MappedPages {
    /// Leaves of 4 KiB.
    pub size_4k: u64,
    /// Leaves of 2 MiB.
    pub size_2m: u64,
    /// Leaves of 1 GiB.
    pub size_1g: u64,
}
