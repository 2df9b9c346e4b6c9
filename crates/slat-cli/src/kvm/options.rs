//! Options that several scenarios share.
//!
//! They have the names that Linux's KVM selftests use for the same options.

use super::patterns::Recording;
use super::repeat::{Repeat, Times};
use super::values::{ClearChunk, HotSet, KvmBacking, Others, SEED};
use clap::Args;
use serde_json::{Map, Value};
use slat_kvm::scenario::visits::Visits;
use slat_lab::cli::{Cpus, count};
use slat_lab::failure::bad_input;
use slat_lab::rate::Rate;
use slat_lab::size::Size;
use std::time::Duration;

/// Options of a guest that only KVM has: its CPUs and NUMA nodes, its memslots, and the probes of
/// the kernel.
#[derive(Clone, Debug, Default, Args)]
pub struct KvmArgs {
    /// CPUs for the vCPUs' threads, one each: 0-3,8 [default: left to the scheduler]
    #[arg(long, short = 'c', value_name = "CPU,...")]
    pub pin: Option<Cpus>,

    /// Memslots that share the memory [default: 1]
    #[arg(long, short = 'x', value_name = "N")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=32767))]
    pub slots: Option<u32>,

    /// Let guests execute from huge pages although the host says no (needs CAP_SYS_BOOT)
    #[arg(long)]
    pub disable_nx_huge_pages: bool,

    /// NUMA nodes that the guest's memory is bound to [default: left to the kernel]
    #[arg(long, value_name = "NODE,...", value_delimiter = ',')]
    pub memory_node: Vec<u32>,

    /// Functions of the kernel whose calls are counted in each phase, by kprobes: NAME, or NAME? if
    /// it may be missing (needs root). Times then have the probes in them
    #[arg(long, value_name = "FUNCTION,...", value_delimiter = ',')]
    pub probe: Vec<String>,

    /// NUMA node on whose CPUs the vCPUs' threads are pinned, one each
    #[arg(long, value_name = "NODE", conflicts_with = "pin")]
    pub cpu_node: Option<u32>,
}

impl KvmArgs {
    /// Returns the CPUs of the vCPUs' threads, one for each thread. With fewer CPUs than vCPUs, the
    /// list is repeated.
    ///
    /// # Errors
    /// Returns an error for a NUMA node that does not exist or has no CPU.
    pub fn cpus(&self) -> anyhow::Result<Vec<usize>> {
        match self.cpu_node {
            Some(node) => slat_kvm::numa::cpus(node).map_err(|error| bad_input(error.to_string())),
            None => Ok(self.pin.clone().unwrap_or_default().0),
        }
    }
}

/// Longest run of a guest whose log is fetched, with `--quick`.
pub const QUICK_RUN: Duration = Duration::from_millis(200);

/// Options of a guest, and of how often it is measured. A scenario's `DEFAULTS` replace the
/// defaults that stand here.
#[derive(Clone, Debug, Args)]
pub struct GuestArgs {
    /// Memory of the guest, which the vCPUs share evenly
    #[arg(long, short = 'b', value_name = "SIZE", default_value = "256M")]
    pub memory: Size,

    /// vCPUs
    #[arg(long, short = 'v', value_name = "N", default_value = "2", value_parser = count::vcpus())]
    pub vcpus: u32,

    /// What backs the guest's memory: 4k, 2m (transparent huge pages), hugetlb-SIZE (of the host's
    /// pool of that size: hugetlb-2m), shmem, memfd (mapped shared, as VMMs do that give the memory
    /// to other processes) or memfd-hugetlb-SIZE
    #[arg(long, short = 's', value_name = "BACKING", default_value = "4k")]
    pub backing: KvmBacking,

    /// Options of the measurement.
    #[command(flatten)]
    pub run: RunArgs,
}

impl GuestArgs {
    /// Reduces the guest to 16 MiB and one measured run if `--quick` is given. Returns whether it
    /// is given.
    pub fn shrink(&mut self) -> bool {
        if self.run.quick {
            self.memory = self.memory.min(Size(16 << 20));
            self.run.runs = Times::ONCE;
        }
        self.run.quick
    }
}

/// Options of how often a guest is measured, and where it runs.
#[derive(Clone, Debug, Args)]
pub struct RunArgs {
    /// Guests that are measured, one after the other; one more warms the host's memory up. Of a
    /// range as many as --until takes
    #[arg(long, short = 'r', value_name = "N|N-N", alias = "rounds", default_value = "6-12")]
    pub runs: Times,

    /// How narrow the 95 % interval of the median is to be, by ± per cent of it, where --runs is
    /// a range
    #[arg(long, value_name = "PERCENT", default_value = "10", value_parser = count::percent)]
    pub until: f64,

    /// Options that only KVM has.
    #[command(flatten)]
    pub kvm: KvmArgs,

    /// At most 16 MiB, one guest: shows that it works, gives no figures to quote
    #[arg(long)]
    pub quick: bool,
}

impl RunArgs {
    /// Returns how often guests are run.
    pub fn repeat(&self) -> Repeat {
        Repeat::new(self.runs, self.until)
    }
}

/// Options of the pages that a guest visits in random order. Each scenario has its own defaults.
#[derive(Clone, Debug, Args)]
pub struct VisitArgs {
    /// Accesses of the guest, in per cent of its pages, in random order
    #[arg(long, value_name = "1..100", default_value = "25", value_parser = count::of_hundred())]
    pub accesses: u8,

    /// How many of a hundred accesses write
    #[arg(long, short = 'w', value_name = "1..100", default_value = "20")]
    #[arg(value_parser = count::of_hundred())]
    pub write_percent: u8,

    /// Visit the pages of a recorded guest, not random ones: idle, requests, script, or a file
    #[arg(long, value_name = "NAME|FILE", conflicts_with = "accesses")]
    pub pattern: Option<Recording>,
}

impl VisitArgs {
    /// Returns the accesses, with the seed that all ways have in common.
    pub fn visits(&self) -> Visits {
        Visits {
            accesses: self.accesses,
            writes: self.write_percent,
            seed: SEED,
            pattern: self.pattern.as_ref().map(|recorded| recorded.pages),
        }
    }

    /// Adds the parameters of results.
    pub fn add_to(&self, params: &mut Map<String, Value>) {
        match &self.pattern {
            Some(pattern) => params.insert("pattern".to_owned(), pattern.to_string().into()),
            None => params.insert("accesses".to_owned(), self.accesses.into()),
        };
        params.insert("write_percent".to_owned(), self.write_percent.into());
    }
}

/// Options of how dirty pages are logged, and of what the vCPUs do meanwhile.
#[derive(Clone, Debug, PartialEq, Args)]
pub struct LogArgs {
    /// Pages (64) or bytes (256k) cleared a call, a multiple of 64 pages [default: all at once]
    #[arg(long, value_name = "PAGES|SIZE")]
    pub clear_chunk: Option<ClearChunk>,

    /// Split huge pages as logging protects them, by chunks of this size (Arm)
    #[arg(long, value_name = "SIZE")]
    pub eager_split: Option<Size>,

    /// How many of a hundred steps write; see --others
    #[arg(long, short = 'w', value_name = "1..100", default_value_t = 100)]
    #[arg(value_parser = count::of_hundred())]
    pub write_percent: u8,

    /// What is done to pages that are not written
    #[arg(long, value_name = "read|skip", default_value = "skip")]
    pub others: Others,

    /// Pages in random order, some more than once
    #[arg(long, short = 'a')]
    pub random_access: bool,

    /// Most steps go to a part of the pages: 10:90 is 90 % of them to the first 10 %
    #[arg(long, value_name = "PAGES:STEPS", conflicts_with = "random_access")]
    pub hot_set: Option<HotSet>,

    /// Bytes that all vCPUs touch a second, a page a step: 200MiB/s [default: all they can]
    #[arg(long, value_name = "RATE")]
    pub dirty_rate: Option<Rate>,

    /// Every vCPU touches all of the memory, not its share
    #[arg(long)]
    pub overlap: bool,
}

impl Default for LogArgs {
    fn default() -> Self {
        Self {
            clear_chunk: None,
            eager_split: None,
            write_percent: 100,
            others: Others::Skip,
            random_access: false,
            hot_set: None,
            dirty_rate: None,
            overlap: false,
        }
    }
}
