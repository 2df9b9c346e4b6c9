//! What a run found.

use super::Config;
use crate::bitmap::Tally;
use crate::stats::Changes;
use std::fmt;

/// A step of the run. The names are those that `dirty_log_perf_test` prints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// First writes, logging off.
    Populate,
    /// Logging is switched on.
    Enable,
    /// Writes, logging on.
    Dirty,
    /// The log is fetched.
    Get,
    /// The log is cleared.
    Clear,
    /// Logging is switched off.
    Disable,
}

impl Phase {
    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Populate => "populate",
            Phase::Enable => "enable",
            Phase::Dirty => "dirty",
            Phase::Get => "get",
            Phase::Clear => "clear",
            Phase::Disable => "disable",
        }
    }
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
    /// Ioctls made in it; 0 for the phases of the vCPUs.
    pub calls: u64,
    /// The longest of them. Every other call on the VM's memory waits that long.
    pub longest_call_seconds: f64,
    /// What the vCPUs did; empty for the phases of the host.
    pub vcpus: Vec<VcpuRun>,
    /// What the log said; for `get` only.
    pub log: Option<Tally>,
    /// How the VM's counters changed; empty where the kernel has none.
    pub vm: Changes,
    /// What is mapped after it, where the kernel counts that.
    pub mapped: Option<MappedPages>,
}

/// One vCPU in one phase.
#[derive(Debug, Clone, PartialEq)]
pub struct VcpuRun {
    /// Pages that it wrote.
    pub pages: u64,
    /// From its start to its end.
    pub seconds: f64,
    /// How its counters changed; empty where the kernel has none.
    pub counters: Changes,
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

/// What a run found.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// What was run.
    pub config: Config,
    /// Pages of the memslot, of the size that the log counts in.
    pub pages: u64,
    /// Every phase, in the order of the run.
    pub phases: Vec<PhaseRun>,
    /// Bytes of the memory in transparent huge pages after `populate`, if the kernel says so.
    /// With [`Backing::Thp`](crate::Backing::Thp), less than all of it is a different workload.
    pub transparent_huge_bytes: Option<u64>,
    /// Pages still in the log after the last round cleared it. Nobody writes then: each is one
    /// that the clear left behind.
    pub left_in_log: u64,
    /// Pages whose stamp was found in the host's memory at the end: all of them.
    pub stamps_checked: u64,
}

impl Report {
    /// All occurrences of a phase, in order.
    pub fn of(&self, phase: Phase) -> impl Iterator<Item = &PhaseRun> {
        self.phases.iter().filter(move |run| run.phase == phase)
    }

    /// Sum of pages in the fetched logs that nobody had written. A log that starts full is not
    /// counted.
    pub fn excess(&self) -> u64 {
        let starts_full = self.config.mode == super::Mode::ManualInitiallySet;
        self.of(Phase::Get)
            .skip(usize::from(starts_full))
            .filter_map(|run| run.log)
            .map(|log| log.excess)
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dirty_log::Mode;

    fn get(iteration: u32, excess: u64) -> PhaseRun {
        PhaseRun {
            phase: Phase::Get,
            iteration: Some(iteration),
            seconds: 0.0,
            calls: 1,
            longest_call_seconds: 0.0,
            vcpus: Vec::new(),
            log: Some(Tally { in_log: 9, written: 9 - excess, excess }),
            vm: Changes::new(),
            mapped: None,
        }
    }

    #[test]
    fn a_log_that_starts_full_has_no_excess_in_its_first_round() {
        let report = |mode| Report {
            config: Config { mode, ..Config::default() },
            pages: 9,
            phases: vec![get(1, 5), get(2, 2), get(3, 1)],
            transparent_huge_bytes: None,
            left_in_log: 0,
            stamps_checked: 9,
        };
        assert_eq!(report(Mode::Manual).excess(), 8);
        assert_eq!(report(Mode::ManualInitiallySet).excess(), 3);
    }
}
