//! Metrics of a guest: their units, and the sources of their values.

use crate::watch::tracepoints::{AGE, EXIT, PUSH, UNMAP, USER_EXIT};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;

/// Declares the metrics, whose documentation is also their help.
macro_rules! metrics {
    ($(#[$outer:meta])* pub enum Metric {
        $(#[doc = $help:literal] $(#[$attribute:meta])* $name:ident,)*
    }) => {
        $(#[$outer])*
        pub enum Metric {
            $(#[doc = $help] $(#[$attribute])* $name,)*
        }

        impl Metric {
            /// All metrics.
            pub const ALL: [Self; [$(stringify!($name)),*].len()] = [$(Self::$name),*];

            /// Returns the meaning in a sentence.
            pub fn help(self) -> &'static str {
                match self {
                    $(Self::$name => $help.trim_ascii(),)*
                }
            }
        }
    };
}

metrics! {
/// A metric. Times are in nanoseconds and sizes in bytes, as the names say; all others are counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// Faults that reached KVM.
    Faults,
    /// Faults that KVM fixed by a mapping.
    FaultsFixed,
    /// Faults that KVM fixed without its lock.
    FaultsFast,
    /// Faults that were fixed already.
    FaultsSpurious,
    /// Faults for which KVM emulated the instruction.
    FaultsEmulated,
    /// Faults that KVM injected into the guest.
    FaultsOfGuest,
    /// Exits of all kinds.
    Exits,
    /// Entries into guests of the guest itself (nested).
    NestedRuns,
    /// Exits because the vCPU had no work.
    Halts,
    /// Times that KVM polled before it put a vCPU to sleep.
    HaltPolls,
    /// Polls that found work.
    HaltPollsHit,
    /// Time spent polling.
    HaltPollNs,
    /// Time asleep because the vCPU had no work.
    HaltWaitNs,
    /// Flushes of this vCPU's own TLB by KVM.
    TlbFlushes,
    /// Time on a CPU, in the guest or for it.
    RunningNs,
    /// Time ready to run, without a CPU.
    WaitingNs,
    /// Times that the scheduler gave the thread a CPU.
    Slices,
    /// Time in the guest's own code, in steps of the kernel's clock tick.
    GuestNs,
    /// TLB flushes that KVM requested from all vCPUs.
    RemoteTlbFlushes,
    /// Tables that KVM zapped.
    TablesZapped,
    /// Mappings of 4 KiB that exist now.
    #[serde(rename = "pages_4k")]
    Pages4k,
    /// Mappings of 2 MiB that exist now.
    #[serde(rename = "pages_2m")]
    Pages2m,
    /// Mappings of 1 GiB that exist now.
    #[serde(rename = "pages_1g")]
    Pages1g,
    /// Resident memory of the whole process.
    RssBytes,
    /// Memory of the process in transparent huge pages, anonymous and shared.
    HugeBytes,
    /// Memory of the process that is swapped out.
    SwapBytes,
    /// Memory of the process that was used within an interval, if the user asked for it.
    WorkingSetBytes,
    /// Faults of the process on the host's side that needed no I/O.
    HostMinorFaults,
    /// Faults of the process on the host's side that needed I/O.
    HostMajorFaults,
    /// Time in which some tasks of the control group waited for memory.
    PressureSomeNs,
    /// Time in which all tasks of the control group waited for memory.
    PressureFullNs,
    /// Times that the control group went over its memory.high.
    MemoryHighEvents,
    /// Faults of reads, from the events of exits.
    FaultsRead,
    /// Faults of writes to pages that were not mapped.
    FaultsWritten,
    /// Faults of writes to pages that were mapped, and protected.
    FaultsProtected,
    /// Faults of instruction fetches.
    FaultsExecuted,
    /// Time in faults: from the exit to the next entry.
    FaultNs,
    /// That time and, for each fault, the transition: the way out of the guest and back into it.
    FaultNsWithTransitions,
    /// Time in faults of writes to protected pages.
    ProtectedNs,
    /// Time out of the guest because the vCPU had no work.
    IdleNs,
    /// Time out of the guest for other reasons.
    OtherExitNs,
    /// Exits to the VMM.
    UserExits,
    /// Pages that KVM put into dirty rings.
    PagesLogged,
    /// Ranges of the VMM's memory that the host unmapped.
    Invalidations,
    /// Bytes of the ranges that the host unmapped.
    InvalidatedBytes,
    /// Ranges that a thread outside the VMM unmapped.
    InvalidationsByOthers,
    /// Times that the host asked KVM whether pages were accessed.
    Ageings,
}
}

/// The object that a metric belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// A vCPU, as counted by KVM. The guest's value is the sum.
    Vcpu,
    /// A vCPU, as counted by the scheduler for its thread. The guest's value is the sum.
    Thread,
    /// A VM, as counted by KVM.
    Vm,
    /// The process that runs the VM.
    Process,
    /// A vCPU, as counted by events on its thread. The guest's value is the sum.
    Traced,
    /// A process, as counted by MMU notifier events about its memory.
    Noticed,
}

use Metric as M;

impl Metric {
    /// Returns the metrics of a scope.
    pub fn of(scope: Scope) -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(move |metric| metric.scope() == scope)
    }

    /// Returns the object that the metric belongs to.
    pub const fn scope(self) -> Scope {
        match self {
            M::RunningNs | M::WaitingNs | M::Slices | M::GuestNs => Scope::Thread,
            M::RemoteTlbFlushes | M::TablesZapped | M::Pages4k | M::Pages2m | M::Pages1g => {
                Scope::Vm
            }
            M::RssBytes
            | M::HugeBytes
            | M::SwapBytes
            | M::WorkingSetBytes
            | M::HostMinorFaults
            | M::HostMajorFaults
            | M::PressureSomeNs
            | M::PressureFullNs
            | M::MemoryHighEvents => Scope::Process,
            M::FaultsRead
            | M::FaultsWritten
            | M::FaultsProtected
            | M::FaultsExecuted
            | M::FaultNs
            | M::FaultNsWithTransitions
            | M::ProtectedNs
            | M::IdleNs
            | M::OtherExitNs
            | M::UserExits
            | M::PagesLogged => Scope::Traced,
            M::Invalidations | M::InvalidatedBytes | M::InvalidationsByOthers | M::Ageings => {
                Scope::Noticed
            }
            _ => Scope::Vcpu,
        }
    }

    /// Returns whether the metric is a current amount, and not a count that grows.
    pub const fn is_level(self) -> bool {
        let pages = matches!(self, M::Pages4k | M::Pages2m | M::Pages1g);
        let bytes = matches!(self, M::RssBytes | M::HugeBytes | M::SwapBytes);
        pages || bytes || matches!(self, M::WorkingSetBytes)
    }

    /// Returns KVM's tracepoint that provides the metric.
    pub(crate) const fn event(self) -> Option<&'static str> {
        match self {
            M::UserExits => Some(USER_EXIT),
            M::PagesLogged => Some(PUSH),
            M::Ageings => Some(AGE),
            _ => match self.scope() {
                Scope::Traced => Some(EXIT),
                Scope::Noticed => Some(UNMAP),
                _ => None,
            },
        }
    }

    /// Returns the names of KVM's counters that the metric is the sum of. A kernel may lack some of
    /// them.
    pub const fn counters(self) -> &'static [&'static str] {
        match self {
            M::Faults => &["pf_taken"],
            M::FaultsFixed => &["pf_fixed"],
            M::FaultsFast => &["pf_fast"],
            M::FaultsSpurious => &["pf_spurious"],
            M::FaultsEmulated => &["pf_emulate"],
            M::FaultsOfGuest => &["pf_guest"],
            M::Exits => &["exits"],
            M::NestedRuns => &["nested_run"],
            M::Halts => &["halt_exits", "wfi_exit_stat", "wfe_exit_stat"],
            M::HaltPolls => &["halt_attempted_poll"],
            M::HaltPollsHit => &["halt_successful_poll"],
            M::HaltPollNs => &["halt_poll_success_ns", "halt_poll_fail_ns"],
            M::HaltWaitNs => &["halt_wait_ns"],
            M::TlbFlushes => &["tlb_flush"],
            M::RemoteTlbFlushes => &["remote_tlb_flush"],
            M::TablesZapped => &["mmu_shadow_zapped"],
            M::Pages4k => &["pages_4k"],
            M::Pages2m => &["pages_2m"],
            M::Pages1g => &["pages_1g"],
            _ => &[],
        }
    }
}

/// The source of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// KVM's binary statistics, through a descriptor of the VMM.
    BinaryStatistics,
    /// KVM's folder in debugfs.
    Debugfs,
    /// KVM's statistics as QEMU tells them (`query-stats`).
    QueryStats,
    /// `/proc/PID/task/TID/schedstat`.
    Schedstat,
    /// `/proc/PID/task/TID/stat` or `/proc/PID/stat`.
    Stat,
    /// `/proc/PID/status`.
    Status,
    /// `/proc/PID/smaps_rollup`.
    SmapsRollup,
    /// `memory.pressure` of the process's control group.
    Pressure,
    /// `memory.events` of the process's control group.
    MemoryEvents,
    /// KVM's tracepoints, aggregated in the kernel by eBPF programs.
    Tracepoints,
    /// KVM's tracepoints, counted by perf.
    PerfCounts,
    /// Idle page tracking.
    IdlePages,
    /// The multi-generational LRU.
    Generations,
    /// Referenced pages of the process (`clear_refs`, `smaps_rollup`).
    Referenced,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::BinaryStatistics => "KVM's binary statistics",
            Self::Debugfs => "KVM's folder in debugfs",
            Self::QueryStats => "QEMU's monitor (query-stats)",
            Self::Schedstat => "schedstat of the vCPUs' threads",
            Self::Stat => "/proc/PID/stat",
            Self::Status => "/proc/PID/status",
            Self::SmapsRollup => "/proc/PID/smaps_rollup",
            Self::Pressure => "memory.pressure of the control group",
            Self::MemoryEvents => "memory.events of the control group",
            Self::Tracepoints => "KVM's tracepoints, aggregated in the kernel by eBPF",
            Self::PerfCounts => "KVM's tracepoints, counted by perf",
            Self::IdlePages => "idle page tracking (page_idle)",
            Self::Generations => "generations of the control group's memory (lru_gen)",
            Self::Referenced => "referenced pages (clear_refs, smaps_rollup)",
        })
    }
}

/// Known values. A metric without an entry is unknown.
pub type Values = BTreeMap<Metric, u64>;

/// Returns the change between two readings: levels as they are in `after`, counts as they grew.
pub fn since(before: &Values, after: &Values) -> Values {
    let grown = |(metric, value): (&Metric, &u64)| {
        let from = if metric.is_level() { 0 } else { *before.get(metric)? };
        Some((*metric, value.saturating_sub(from)))
    };
    after.iter().filter_map(grown).collect()
}

/// Collects values, their sources, and the reasons for missing values.
#[derive(Debug, Default)]
pub(crate) struct Sink {
    pub values: Values,
    pub sources: BTreeMap<Metric, Source>,
    pub unknown: BTreeMap<Metric, String>,
    /// Skips the reasons, because the caller does not need them.
    pub without_reasons: bool,
}

impl Sink {
    pub fn new(without_reasons: bool) -> Self {
        Self { without_reasons, ..Self::default() }
    }

    /// Takes a value, or the reason why there is none. The first value of a metric stays.
    pub fn put(&mut self, metric: Metric, by: Source, value: Result<u64, impl fmt::Display>) {
        match value {
            _ if self.values.contains_key(&metric) => {}
            Ok(value) => {
                self.values.insert(metric, value);
                self.sources.insert(metric, by);
                self.unknown.remove(&metric);
            }
            Err(why) => self.missing(metric, why),
        }
    }

    /// Takes a reason why a value is missing, in addition to earlier reasons.
    pub fn missing(&mut self, metric: Metric, why: impl fmt::Display) {
        if self.without_reasons || self.values.contains_key(&metric) {
            return;
        }
        let why = why.to_string();
        let said = self.unknown.entry(metric).or_default();
        if said.is_empty() {
            *said = why;
        } else if !said.contains(&why) {
            *said = format!("{said}; {why}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_metric_is_listed_once_and_kvms_have_counters() {
        let names: std::collections::BTreeSet<_> = Metric::ALL.into_iter().collect();
        assert_eq!(names.len(), Metric::ALL.len());
        for metric in Metric::ALL {
            let by_kvm = matches!(metric.scope(), Scope::Vcpu | Scope::Vm);
            assert_eq!(by_kvm, !metric.counters().is_empty(), "{metric:?}");
            let by_events = matches!(metric.scope(), Scope::Traced | Scope::Noticed);
            assert_eq!(by_events, metric.event().is_some(), "{metric:?}");
        }
    }

    #[test]
    fn counts_are_reported_by_their_growth_and_levels_as_they_are() {
        let of = |faults, pages| Values::from([(M::Faults, faults), (M::Pages4k, pages)]);
        assert_eq!(since(&of(5, 90), &of(12, 40)), of(7, 40));
        // A count without an earlier value has no known growth.
        assert_eq!(since(&Values::new(), &of(12, 40)), Values::from([(M::Pages4k, 40)]));
    }

    #[test]
    fn a_metric_falls_back_to_another_source_and_keeps_all_reasons() {
        let mut sink = Sink::default();
        sink.put(M::Faults, Source::BinaryStatistics, Err("no descriptor"));
        sink.put(M::Faults, Source::Debugfs, Err("not mounted"));
        sink.put(M::Exits, Source::BinaryStatistics, Err("no descriptor"));
        sink.put(M::Exits, Source::Debugfs, Ok::<_, &str>(3));
        sink.put(M::Exits, Source::BinaryStatistics, Ok::<_, &str>(4));
        assert_eq!(sink.values, Values::from([(M::Exits, 3)]));
        assert_eq!(sink.sources, BTreeMap::from([(M::Exits, Source::Debugfs)]));
        let why = BTreeMap::from([(M::Faults, "no descriptor; not mounted".to_owned())]);
        assert_eq!(sink.unknown, why);
    }
}
