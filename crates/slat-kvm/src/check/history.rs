//! Histories: what vCPUs and the host do to a guest's memory, step by step.

use super::Stamp;
use crate::{Backing, Mode};
use serde::{Deserialize, Serialize};
use std::fmt;

/// A history, which runs alike on each system but for the moments at which running vCPUs are met.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct History {
    /// Name of its class.
    pub class: String,
    /// The seed from which it was made.
    pub seed: u64,
    /// Pages of host memory.
    pub memory: u64,
    /// Guest pages, which memslots map or do not.
    pub window: u64,
    /// The kind of host memory.
    pub backing: Kind,
    /// How dirty pages are told.
    pub way: Way,
    /// Number of vCPUs.
    pub vcpus: usize,
    /// Whether each memslot has private memory beside the host's.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub private: bool,
    /// The steps, in order. A step that makes no sense where it comes is left out, so that a
    /// history from which steps are taken is a history.
    pub steps: Vec<Step>,
}

impl History {
    /// Returns the history of some of its steps, by their indices.
    pub fn part(&self, steps: &[usize]) -> Self {
        let steps = steps.iter().filter_map(|step| self.steps.get(*step)).cloned().collect();
        Self { steps, ..self.clone() }
    }

    /// Returns whether a vCPU runs beside other steps, so that it may not go alike twice.
    pub fn is_concurrent(&self) -> bool {
        self.steps
            .iter()
            .any(|step| matches!(step, Step::Start { .. } | Step::Harvest { threads: 2.. }))
    }
}

/// Kinds of host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Base pages.
    Small,
    /// Transparent huge pages.
    Huge,
    /// A memfd, mapped shared.
    Shared,
}

impl Kind {
    /// Returns the backing of a guest.
    pub fn backing(self) -> Backing {
        match self {
            Self::Small => Backing::Small,
            Self::Huge => Backing::Thp,
            Self::Shared => Backing::Memfd,
        }
    }
}

/// Ways to tell dirty pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// A get clears the log.
    Legacy,
    /// A call of its own clears the log.
    Manual,
    /// The same, and a log starts full.
    InitiallySet,
    /// A ring for each vCPU.
    Ring,
}

impl Way {
    /// Returns the mode of a guest. Rings are small, so that they become full.
    pub fn mode(self) -> Mode {
        match self {
            Self::Legacy => Mode::Legacy,
            Self::Manual => Mode::Manual,
            Self::InitiallySet => Mode::ManualInitiallySet,
            Self::Ring => Mode::Ring { entries: 1024 },
        }
    }
}

/// A range of pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Span {
    /// Its first page.
    pub at: u64,
    /// Number of pages.
    pub pages: u64,
}

impl Span {
    /// Makes the range of `pages` pages from `at` on.
    pub fn new(at: u64, pages: u64) -> Self {
        Self { at, pages }
    }

    /// Returns the page after the last.
    pub fn end(self) -> u64 {
        self.at.saturating_add(self.pages)
    }

    /// Returns whether both have a page in common.
    pub fn meets(self, other: Self) -> bool {
        self.at < other.end() && other.at < self.end()
    }

    /// Returns the pages.
    pub fn pages(self) -> std::ops::Range<u64> {
        self.at..self.end()
    }
}

/// Where a memslot lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Place {
    /// First guest page.
    pub at: u64,
    /// First host page.
    pub host: u64,
    /// Number of pages.
    pub pages: u64,
    /// Whether guests may only read it.
    #[serde(default)]
    pub readonly: bool,
}

impl Place {
    /// Returns its guest pages.
    pub fn guest(&self) -> Span {
        Span::new(self.at, self.pages)
    }

    /// Returns its host pages.
    pub fn host(&self) -> Span {
        Span::new(self.host, self.pages)
    }
}

/// A step of a history. Pages are counted from the start of the guest's window, or of the host's
/// memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case", deny_unknown_fields)]
#[expect(missing_docs, reason = "the comments of the steps name their fields")]
pub enum Step {
    /// Adds a memslot, or moves it.
    Place { slot: u32, place: Place, log: bool },
    /// Deletes a memslot.
    Delete { slot: u32 },
    /// Switches the log of a memslot.
    Log { slot: u32, on: bool },
    /// A vCPU writes its stamps to guest pages, in order or with a seed at random.
    Write { vcpu: usize, guest: Span, random: Option<u64> },
    /// A vCPU reads guest pages.
    Read { vcpu: usize, guest: Span },
    /// A vCPU executes from guest pages.
    Execute { vcpu: usize, guest: Span },
    /// A vCPU starts to write guest pages at random, beside the steps that follow.
    Start { vcpu: usize, guest: Span, seed: u64 },
    /// The vCPU stops.
    Stop { vcpu: usize },
    /// The vCPU is interrupted by signals, and goes on.
    Kick { vcpu: usize, times: u32 },
    /// The log of a memslot is fetched and cleared, `chunk` pages at a time (0: all).
    Fetch { slot: u32, chunk: u32 },
    /// The rings are harvested, and reset by so many threads.
    Harvest { threads: u32 },
    /// The host does something to its pages.
    Host { act: Act, host: Span },
    /// The host exchanges pages of its memory, by moving their mappings.
    Exchange { first: u64, second: u64, pages: u64 },
    /// The host makes guest pages private, or shared again: accesses reach other memory then.
    Convert { guest: Span, private: bool },
}

/// What the host does to its pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Act {
    /// It writes them.
    Store,
    /// It gives them back (`MADV_DONTNEED`): private memory then holds zeroes.
    Discard,
    /// It gives them back for all mappings (`MADV_REMOVE`).
    Remove,
    /// It gives every other page back, as a balloon that is inflated does.
    Balloon,
    /// It makes them a huge page (`MADV_COLLAPSE`).
    Collapse,
    /// It takes them from memory (`MADV_PAGEOUT`).
    PageOut,
    /// It moves their mapping elsewhere and back (`mremap`).
    Move,
    /// It makes them read-only and writable again (`mprotect`).
    Protect,
    /// It forks, so that the next write to each page copies it.
    Fork,
    /// It write-protects all pages to see which are written (`/proc/self/clear_refs`).
    SoftDirty,
    /// It marks all pages as not used.
    Age,
    /// It writes equal contents and lets KSM merge them.
    Merge,
    /// It migrates them to another NUMA node.
    Migrate,
    /// It takes them away, and gives each back when it is touched (userfaultfd, `MISSING`).
    Late,
    /// It write-protects them, and lets a thread allow each write (userfaultfd, `WP`).
    Guard,
    /// It unmaps them, and lets a thread map each again (userfaultfd, `MINOR`).
    Minor,
    /// It waits until KVM has recovered huge pages that it split to execute from them.
    Recover,
    /// It gives private memory back (a hole in the guest_memfd), which then holds zeroes.
    Punch,
}

impl Act {
    /// Returns whether it changes contents, or keeps pages away from vCPUs meanwhile: no vCPU may
    /// run on them.
    pub fn is_alone(self) -> bool {
        !matches!(
            self,
            Self::Collapse
                | Self::PageOut
                | Self::Fork
                | Self::SoftDirty
                | Self::Age
                | Self::Migrate
                | Self::Guard
                | Self::Recover
        )
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let span = |span: &Span| format!("{}+{}", span.at, span.pages);
        match self {
            Self::Place { slot, place, log } => {
                let Place { at, host, pages, readonly } = place;
                write!(f, "memslot {slot}: guest {at}+{pages} on host {host}+{pages}")?;
                f.write_str(if *readonly { ", read-only" } else { "" })?;
                f.write_str(if *log { ", logged" } else { "" })
            }
            Self::Delete { slot } => write!(f, "memslot {slot}: delete"),
            Self::Log { slot, on: true } => write!(f, "memslot {slot}: start the log"),
            Self::Log { slot, on: false } => write!(f, "memslot {slot}: end the log"),
            Self::Write { vcpu, guest, random: None } => {
                write!(f, "vCPU {vcpu} writes guest {}", span(guest))
            }
            Self::Write { vcpu, guest, random: Some(_) } => {
                write!(f, "vCPU {vcpu} writes guest {} at random", span(guest))
            }
            Self::Read { vcpu, guest } => write!(f, "vCPU {vcpu} reads guest {}", span(guest)),
            Self::Execute { vcpu, guest } => {
                write!(f, "vCPU {vcpu} executes from guest {}", span(guest))
            }
            Self::Start { vcpu, guest, .. } => {
                write!(f, "vCPU {vcpu} starts to write guest {}", span(guest))
            }
            Self::Stop { vcpu } => write!(f, "vCPU {vcpu} stops"),
            Self::Kick { vcpu, times } => write!(f, "vCPU {vcpu} gets {times} signals"),
            Self::Fetch { slot, chunk: 0 } => write!(f, "memslot {slot}: fetch the log"),
            Self::Fetch { slot, chunk } => {
                write!(f, "memslot {slot}: fetch the log, clear {chunk} pages at a time")
            }
            Self::Harvest { threads } => {
                write!(f, "harvest the rings, reset them by {threads} threads")
            }
            Self::Host { act, host } => {
                let name = serde_json::to_value(act).unwrap_or_default();
                write!(f, "host: {} {}", name.as_str().unwrap_or_default(), span(host))
            }
            Self::Convert { guest, private } => {
                let kind = if *private { "private" } else { "shared" };
                write!(f, "host: make guest {} {kind}", span(guest))
            }
            Self::Exchange { first, second, pages } => {
                write!(f, "host: exchange {first}+{pages} and {second}+{pages}")
            }
        }
    }
}

/// Returns the stamp that the host writes in a step.
pub fn stamp_of_host(step: usize, page: u64, equal: bool) -> Stamp {
    let number = (1 << 63) | step as u64;
    Stamp { step: number, at: if equal { number } else { page } }
}
