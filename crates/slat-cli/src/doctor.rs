//! `slat doctor`: what a host can measure and what it cannot, with the reason and the command that
//! would change it.
//!
//! Most modules examine one part of the host and return [`Finding`]s; [`verdict`] decides which of
//! them a scenario needs. The doctor only reads: it leaves out what could be found only by writing.

mod evidence;
mod isolation;
mod kvm;
mod limits;
mod memory;
mod processor;
pub mod report;
mod statistics;
mod tools;
mod tracking;
pub mod verdict;
mod watch;

pub use evidence::Evidence;
pub use verdict::{Verdict, verdicts};

use crate::kvm::Guests;
use schemars::JsonSchema;
use serde::Serialize;
use slat_lab::scenario::Scenarios;
use std::path::Path;

/// Name under which the doctor judges `slat emulate`.
pub const EMULATE: &str = "emulate";

/// Name under which the doctor judges `slat check`.
pub const CHECK: &str = "check";

/// Name under which the doctor judges `slat watch`.
pub const WATCH: &str = "watch";

/// Returns the names of all that the doctor judges: the scenarios of guests, `check`, `emulate` and
/// `watch`.
pub fn scenarios() -> impl Iterator<Item = &'static str> {
    Guests::ALL.iter().map(|entry| entry.name).chain([CHECK, EMULATE, WATCH])
}

/// The scenarios whose figures depend on a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum For {
    /// All but `watch`.
    All,
    /// The scenarios that run a guest under the host's KVM.
    Guests,
    /// The scenarios of these names.
    Only(&'static [&'static str]),
}

impl For {
    fn has(self, scenario: &str) -> bool {
        match self {
            // A watch reports the guests as they run, so other load on the host does not make its
            // figures wrong.
            Self::All => scenario != WATCH,
            Self::Guests => scenario != EMULATE && scenario != WATCH,
            Self::Only(names) => names.contains(&scenario),
        }
    }
}

/// The state of the host in one respect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Status {
    /// As measurements need it.
    Ok,
    /// Usable, with an effect on the figures.
    Limited,
    /// Missing.
    Missing,
}

impl Status {
    /// Returns the word that is printed.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Limited => "limited",
            Self::Missing => "missing",
        }
    }
}

/// A group of findings, as they are printed together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Group {
    /// The processor, and the hypervisor below this host.
    Processor,
    /// The host's KVM.
    Kvm,
    /// Memory and huge pages.
    Memory,
    /// Interfaces that tell which pages were used.
    Tracking,
    /// Counters and clocks that explain where time went.
    Statistics,
    /// Control groups and swap.
    Limits,
    /// Other load of the CPUs, and their frequency.
    Isolation,
    /// Programs that `slat emulate` needs.
    Tools,
    /// What `slat watch` can see.
    Watch,
}

impl Group {
    /// Returns the title of the group.
    pub const fn title(self) -> &'static str {
        match self {
            Self::Processor => "Processor and virtualisation",
            Self::Kvm => "KVM",
            Self::Memory => "Memory and huge pages",
            Self::Tracking => "Accessed tracking",
            Self::Statistics => "Statistics",
            Self::Limits => "Control groups and swap",
            Self::Isolation => "Isolation",
            Self::Tools => "Tools of slat emulate",
            Self::Watch => "Guests that run now",
        }
    }
}

/// What would improve a finding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    /// A command, which may need root.
    Command(String),
    /// An action that no command of this host does.
    ByHand(String),
    /// Nothing on this host, for this reason.
    Nothing(String),
    /// The change of the finding of this name.
    See(&'static str),
}

impl Change {
    fn command(text: impl Into<String>) -> Self {
        Self::Command(text.into())
    }

    fn by_hand(text: impl Into<String>) -> Self {
        Self::ByHand(text.into())
    }

    fn nothing(text: impl Into<String>) -> Self {
        Self::Nothing(text.into())
    }

    /// Returns the change as a sentence, with commands between backquotes.
    pub fn sentence(&self) -> String {
        match self {
            Self::Command(command) => format!("`{command}`"),
            Self::ByHand(what) => what.clone(),
            Self::Nothing(reason) => format!("no setting: {reason}"),
            Self::See(other) => format!("see {other}"),
        }
    }
}

/// A finding: the state of the host in one respect, why it matters, and what would change it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Finding {
    /// The group of the finding.
    pub group: Group,
    /// Name of the finding, under which [`verdict`] looks it up.
    pub name: &'static str,
    /// The state of the host.
    pub status: Status,
    /// What was found, in words.
    pub found: String,
    /// Why it matters.
    pub why: &'static str,
    /// The scenarios whose figures depend on it.
    pub scenarios: Vec<String>,
    /// What would change it; `None` if the status is [`Status::Ok`].
    pub change: Option<Change>,
    #[serde(skip)]
    matters_for: For,
}

impl Finding {
    /// Returns whether the figures of the scenario depend on it.
    pub fn matters_for(&self, scenario: &str) -> bool {
        self.matters_for.has(scenario)
    }
}

/// A finding before the host is examined for it.
struct Subject {
    group: Group,
    name: &'static str,
    matters_for: For,
    why: &'static str,
}

impl Subject {
    const fn new(group: Group, name: &'static str, matters_for: For, why: &'static str) -> Self {
        Self { group, name, matters_for, why }
    }

    fn finding(self, status: Status, found: String, change: Option<Change>) -> Finding {
        let Self { group, name, matters_for, why } = self;
        let names = scenarios().filter(|name| matters_for.has(name));
        let scenarios = names.map(str::to_owned).collect();
        Finding { group, name, status, found, why, scenarios, change, matters_for }
    }

    fn ok(self, found: impl Into<String>) -> Finding {
        self.finding(Status::Ok, found.into(), None)
    }

    fn limited(self, found: impl Into<String>, change: Change) -> Finding {
        self.finding(Status::Limited, found.into(), Some(change))
    }

    fn missing(self, found: impl Into<String>, change: Change) -> Finding {
        self.finding(Status::Missing, found.into(), Some(change))
    }

    /// Returns the finding on a file that is there and cannot be read, or has something else.
    fn untold(self, file: impl AsRef<Path>) -> Finding {
        let change = Change::by_hand("let this user read the file");
        self.limited(format!("/{} does not tell", file.as_ref().display()), change)
    }
}

/// Examines the host, and returns the findings in the order of the groups.
pub fn examine(evidence: &Evidence) -> Vec<Finding> {
    let parts: [fn(&Evidence) -> Vec<Finding>; 9] = [
        processor::findings,
        kvm::findings,
        memory::findings,
        tracking::findings,
        statistics::findings,
        limits::findings,
        isolation::findings,
        tools::findings,
        watch::findings,
    ];
    parts.into_iter().flat_map(|part| part(evidence)).collect()
}

#[cfg(test)]
pub(crate) mod fake;

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<Vec<Finding>> {
        fake::hosts().into_iter().map(|host| examine(&host.evidence())).collect()
    }

    #[test]
    fn the_hosts_of_the_readers_are_found_as_they_are() {
        let folder =
            std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../slat-kvm/tests/procfs");
        for (host, name, status, found) in [
            ("x86-v2", "memory available", "limited", "768 MiB"),
            ("x86-v2", "cgroup CPU quota", "limited", "0.50 CPUs"),
            ("arm-16k-hybrid", "cgroup memory", "limited", "version 1"),
            ("arm-16k-hybrid", "memory available", "limited", "256 MiB"),
            ("x86-v2", "hugetlb", "missing", "2 MiB: 0 pages free of 8; 1 GiB: 0 pages free of 0"),
            ("arm-64k-v1", "hugetlb", "ok", "512 MiB: 2 pages free of 2"),
            ("arm-64k-v1", "perf", "limited", "perf_event_paranoid does not tell"),
            ("arm-16k-hybrid", "hugetlb", "limited", "32 MiB: 1 pages free of 1"),
            ("arm-16k-hybrid", "counters of guests", "limited", "ptrace_scope does not tell"),
            ("locked-down", "hugetlb", "missing", "no such pools"),
            ("locked-down", "KVM's tracepoints", "limited", "locked down (confidentiality)"),
            ("locked-down", "KVM's debugfs", "missing", "locked down (confidentiality)"),
            ("locked-down", "eBPF", "limited", "counts alone"),
            ("odd-bytes", "NUMA", "limited", "node/online does not tell"),
            ("odd-bytes", "hugetlb", "limited", "/sys/kernel/mm/hugepages does not tell"),
            ("odd-bytes", "transparent huge pages", "limited", "enabled does not tell"),
            ("odd-bytes", "pressure of guests", "limited", "proc/pressure/memory does not tell"),
            ("odd-bytes", "MGLRU", "limited", "lru_gen/enabled does not tell"),
            ("locked-down", "debugfs", "limited", "locked down (confidentiality)"),
            ("odd-bytes", "KVM's debugfs", "ok", "mounted"),
            ("container", "memory available", "limited", "384 MiB"),
            ("container", "KVM's tracepoints", "missing", "no tracefs"),
            ("container", "debugfs", "missing", "not mounted"),
        ] {
            let kvm = Err(slat_kvm::Error::NoKvm);
            let evidence = Evidence::below(folder.join(host), kvm, Vec::new());
            let findings = examine(&evidence);
            let finding = findings.iter().find(|finding| finding.name == name).unwrap();
            assert_eq!(finding.status.word(), status, "{host}: {finding:?}");
            assert!(finding.found.contains(found), "{host}: {finding:?}");
        }
    }

    #[test]
    fn what_is_not_as_it_should_be_comes_with_what_would_change_it() {
        for finding in all().into_iter().flatten() {
            assert_eq!(finding.status == Status::Ok, finding.change.is_none(), "{finding:?}");
            assert!(!finding.why.is_empty(), "{finding:?}");
            if let For::Only(names) = finding.matters_for {
                let known = |name: &&str| scenarios().any(|scenario| scenario == *name);
                assert!(!names.is_empty() && names.iter().all(known), "{finding:?}");
            }
        }
    }

    #[test]
    fn every_host_is_asked_the_same_questions_each_once() {
        let names = |findings: &Vec<Finding>| findings.iter().map(|f| f.name).collect::<Vec<_>>();
        let all = all();
        let mut first = names(&all[0]);
        assert!(all.iter().all(|findings| names(findings) == first));
        let count = first.len();
        first.sort_unstable();
        first.dedup();
        assert_eq!(first.len(), count);
    }

    #[test]
    fn a_host_of_which_nothing_is_known_is_examined_all_the_same() {
        let findings = examine(&fake::nothing().evidence());
        assert_eq!(findings.len(), all()[0].len());
        let device = findings.iter().find(|f| f.name == kvm::DEVICE).unwrap();
        assert_eq!(device.status, Status::Missing);
    }

    #[test]
    fn this_host_can_be_examined() {
        let findings = examine(&Evidence::here());
        assert_eq!(findings.len(), all()[0].len());
    }
}
