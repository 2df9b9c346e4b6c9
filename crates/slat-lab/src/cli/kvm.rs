//! The command line of what is measured on guests under the host's KVM.
//!
//! Options carry the names of Linux's KVM selftests where those have them.

use super::OutputArgs;
use super::format::TablesArgs;
use super::guest::LogWay;
use super::values::{ClearChunk, HotSet, KvmBacking, KvmWay, Others, Rate, Switch, Target};
use crate::failure::bad_input;
use crate::size::Size;
use clap::{Args, Subcommand};

/// What only guests under KVM have.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
pub struct KvmArgs {
    /// CPUs for the vCPUs' threads, one each, over and over (kvm) [default: left to the scheduler]
    #[arg(long, short = 'c', value_name = "CPU,...", value_delimiter = ',')]
    pub pin: Vec<usize>,

    /// Memslots that share the memory (kvm) [default: 1]
    #[arg(long, short = 'x', value_name = "N", value_parser = clap::value_parser!(u32).range(1..=32767))]
    pub slots: Option<u32>,

    /// Let guests execute from huge pages although the host says no (kvm; needs CAP_SYS_BOOT)
    #[arg(long)]
    pub disable_nx_huge_pages: bool,

    /// NUMA nodes that the guest's memory is bound to (kvm) [default: left to the kernel]
    #[arg(long, value_name = "NODE,...", value_delimiter = ',')]
    pub memory_node: Vec<u32>,

    /// NUMA node on whose CPUs the vCPUs' threads are pinned, one each (kvm)
    #[arg(long, value_name = "NODE", conflicts_with = "pin")]
    pub cpu_node: Option<u32>,
}

impl KvmArgs {
    /// Refuses what was given, where it would be ignored.
    ///
    /// # Errors
    /// Anything was given.
    pub fn refuse(&self) -> anyhow::Result<()> {
        if *self == Self::default() {
            return Ok(());
        }
        Err(bad_input(
            "--pin, --slots, --disable-nx-huge-pages, --memory-node and --cpu-node are of guests under \
             KVM: add --target kvm",
        ))
    }

    /// CPUs of the vCPUs' threads, one each, over and over.
    ///
    /// # Errors
    /// A NUMA node that has no CPU.
    pub fn cpus(&self) -> anyhow::Result<Vec<usize>> {
        match self.cpu_node {
            Some(node) => slat_kvm::numa::cpus(node).map_err(|error| bad_input(error.to_string())),
            None => Ok(self.pin.clone()),
        }
    }
}

/// How dirty pages are logged, and what the vCPUs do meanwhile.
#[derive(Clone, Debug, PartialEq, Args)]
pub struct LogArgs {
    /// Pages (64) or bytes (256k) cleared a call, a multiple of 64 pages [default: all at once]
    #[arg(long, value_name = "PAGES|SIZE")]
    pub clear_chunk: Option<ClearChunk>,

    /// Split huge pages as logging protects them, by chunks of this size (kvm, Arm)
    #[arg(long, value_name = "SIZE")]
    pub eager_split: Option<Size>,

    /// How many of a hundred steps write; see --others
    #[arg(long, short = 'w', value_name = "1..100", default_value_t = 100, value_parser = clap::value_parser!(u8).range(1..=100))]
    pub write_percent: u8,

    /// What is done to pages that are not written (kvm)
    #[arg(long, value_name = "read|skip", default_value = "skip")]
    pub others: Others,

    /// Pages in random order, some more than once (kvm)
    #[arg(long, short = 'a')]
    pub random_access: bool,

    /// Most steps go to a part of the pages: 10:90 is 90 % of them to the first 10 % (kvm)
    #[arg(long, value_name = "PAGES:STEPS", conflicts_with = "random_access")]
    pub hot_set: Option<HotSet>,

    /// Bytes that all vCPUs touch a second, a page a step: 200MiB/s (kvm) [default: all they can]
    #[arg(long, value_name = "RATE")]
    pub dirty_rate: Option<Rate>,

    /// Every vCPU touches all of the memory, not its share (kvm)
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

const DIRTY_LOG_EXAMPLES: &str = "\
Examples:
  slat bench dirty-log --target kvm
      256 MiB on 4k pages, 2 vCPUs, 3 rounds of dirtying
  slat bench dirty-log --target kvm --memory 1G --backing 2m --manual-protect on --initially-set on
      huge pages by THP, split as the log is cleared
  slat bench dirty-log --target kvm --backing hugetlb-2m --clear-chunk 64
      clear 64 pages a call; the pool is filled beforehand with `sysctl vm.nr_hugepages=128`
  slat bench dirty-log --dirty-ring-size 4096 --write-percent 10 --others read
      by rings; a guest that mostly reads
  slat bench dirty-log --duration 5 --dirty-rate 100MiB/s --hot-set 10:90
      vCPUs that run on for 5 seconds while the log is fetched every 100 ms
  slat bench dirty-log --target engine
      vCPUs as threads that write on while the log is read, in six ways; sparse and parallel clears
  slat bench dirty-log --target engine --format arm64 --way manual,hardware --backing 2m
  slat bench dirty-log --target engine --format arm64-16k --backing 32m";

/// The guest, its memory and how its dirty pages are logged.
#[derive(Clone, Debug, Args)]
#[command(after_help = DIRTY_LOG_EXAMPLES)]
pub struct DirtyLogArgs {
    /// Who keeps the guest's tables
    #[arg(long, value_name = "TARGET", default_value = "kvm")]
    pub target: Target,

    /// Memory that the vCPUs write to, all of them together
    #[arg(long, short = 'b', value_name = "SIZE", default_value = "256M")]
    pub memory: Size,

    /// vCPUs; each writes to its own share of the memory
    #[arg(long, short = 'v', value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=512))]
    pub vcpus: u32,

    /// What backs the guest's memory [default: 4k, or the engine's smallest pages]
    #[arg(long, short = 's', value_name = "BACKING")]
    pub backing: Option<KvmBacking>,

    /// Whether reading the log leaves the pages writable until they are cleared (kvm)
    #[arg(long, value_name = "on|off", default_value = "on")]
    pub manual_protect: Switch,

    /// Whether all pages count as dirty at first, so that enabling protects none (kvm)
    #[arg(long, value_name = "on|off", default_value = "off")]
    pub initially_set: Switch,

    /// Entries of each vCPU's dirty ring, in place of a log: a power of two (kvm)
    #[arg(long, value_name = "N", conflicts_with_all = ["manual_protect", "initially_set", "clear_chunk"])]
    pub dirty_ring_size: Option<u32>,

    /// The log and the work.
    #[command(flatten)]
    pub log: LogArgs,

    /// Seconds for which vCPUs run on beside a log that is fetched, in place of rounds (kvm)
    #[arg(long, value_name = "SECONDS", conflicts_with = "iterations", value_parser = seconds)]
    pub duration: Option<f64>,

    /// Milliseconds from one fetch of the log to the next, with --duration [default: 100]
    #[arg(long, value_name = "MS", requires = "duration", value_parser = clap::value_parser!(u32).range(1..=60_000))]
    pub interval: Option<u32>,

    /// Rounds of dirtying, reading and clearing the log
    #[arg(long, short = 'i', value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub iterations: u32,

    /// Guests that are measured, one after the other; one more warms the host's memory up
    #[arg(long, short = 'r', value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub runs: u32,

    /// What only KVM has.
    #[command(flatten)]
    pub kvm: KvmArgs,

    /// Ways to log (engine) [default: all]
    #[arg(long, value_name = "WAY,...", value_delimiter = ',')]
    pub way: Vec<LogWay>,

    /// The guest's tables (engine).
    #[command(flatten)]
    pub tables: TablesArgs,

    /// 16 MiB, one guest, two rounds (engine): shows that it works, gives no figures to quote
    #[arg(long)]
    pub quick: bool,

    /// Where the results go.
    #[command(flatten)]
    pub out: OutputArgs,
}

impl DirtyLogArgs {
    /// What backs the memory of a guest under KVM.
    pub fn backing(&self) -> KvmBacking {
        self.backing.unwrap_or(KvmBacking::Small)
    }
}

const MEMORY_STRESS_EXAMPLES: &str = "\
Examples:
  slat bench memory-stress
      512 MiB: fill, write again, take it away, fill again, read
  slat bench memory-stress --memory 1g --limit 512m
      under a memory limit of a cgroup of its own: what does not fit is swapped (needs root and swap)
  slat bench memory-stress --backing 2m --vcpus 8 --slots 16";

/// Filling memory over and over.
#[derive(Clone, Debug, Args)]
#[command(after_help = MEMORY_STRESS_EXAMPLES)]
pub struct MemoryStressArgs {
    /// Memory of the guest
    #[arg(long, short = 'b', value_name = "SIZE", default_value = "512M")]
    pub memory: Size,

    /// vCPUs; each fills its own share of the memory
    #[arg(long, short = 'v', value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=512))]
    pub vcpus: u32,

    /// What backs the guest's memory
    #[arg(long, short = 's', value_name = "BACKING", default_value = "4k")]
    pub backing: KvmBacking,

    /// Times that memory is written, taken away and filled again
    #[arg(long, short = 'i', value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub iterations: u32,

    /// Guests that are measured, one after the other; one more warms the host's memory up
    #[arg(long, short = 'r', value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub runs: u32,

    /// Memory that a cgroup made for the run allows; the rest is swapped (needs root and swap)
    #[arg(long, value_name = "SIZE")]
    pub limit: Option<Size>,

    /// What only KVM has.
    #[command(flatten)]
    pub kvm: KvmArgs,

    /// Where the results go.
    #[command(flatten)]
    pub out: OutputArgs,
}

const MEMSLOT_EXAMPLES: &str = "\
Examples:
  slat bench memslot
      64 MiB come, move and go beside two vCPUs, a change every 10 ms
  slat bench memslot --memory 4G --slot-size 1G --backing 2m --delay 100000
      memory that is plugged, into a guest with huge pages, ten times a second
  slat bench memslot --disable-slot-zap-all
      on x86 since Linux 6.12, a VM that gave up that each deletion unmaps everything";

/// Slots that come, move and go.
#[derive(Clone, Debug, Args)]
#[command(after_help = MEMSLOT_EXAMPLES)]
pub struct MemslotArgs {
    /// Memory that the vCPUs write to, all of them together
    #[arg(long, short = 'b', value_name = "SIZE", default_value = "256M")]
    pub memory: Size,

    /// vCPUs; each writes to its own share of the memory
    #[arg(long, short = 'v', value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=512))]
    pub vcpus: u32,

    /// What backs the guest's memory
    #[arg(long, short = 's', value_name = "BACKING", default_value = "4k")]
    pub backing: KvmBacking,

    /// Size of the slot, of which no vCPU touches anything; at most the memory
    #[arg(long, value_name = "SIZE", default_value = "64M")]
    pub slot_size: Size,

    /// Microseconds from the end of each change to the next
    #[arg(long, short = 'd', value_name = "US", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(0..=60_000_000))]
    pub delay: u32,

    /// Times that the slot is added, moved and deleted
    #[arg(long, short = 'i', value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub iterations: u32,

    /// Bytes that all vCPUs write a second, a page a step: 200MiB/s [default: all they can]
    #[arg(long, value_name = "RATE")]
    pub dirty_rate: Option<Rate>,

    /// Every vCPU touches all of the memory, not its share
    #[arg(long)]
    pub overlap: bool,

    /// Give up KVM_X86_QUIRK_SLOT_ZAP_ALL: unmap a slot that goes and nothing else (x86, Linux 6.12)
    #[arg(long, short = 'q')]
    pub disable_slot_zap_all: bool,

    /// Guests that are measured, one after the other; one more warms the host's memory up
    #[arg(long, short = 'r', value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub runs: u32,

    /// What only KVM has.
    #[command(flatten)]
    pub kvm: KvmArgs,

    /// Where the results go.
    #[command(flatten)]
    pub out: OutputArgs,
}

const BOOT_CACHES_EXAMPLES: &str = "\
Examples:
  slat bench boot-caches --vcpus 8 --memory 1g
      on an arm64 host whose CPU has no FEAT_S2FWB; as root, KVM's own count of the edges, too
  slat emulate --arch aarch64 --cpu cortex-a76 -- bench boot-caches --vcpus 16 --memory 16m
      on an emulated one: counts";

/// vCPUs that switch their caches.
#[derive(Clone, Debug, Args)]
#[command(after_help = BOOT_CACHES_EXAMPLES)]
pub struct BootCachesArgs {
    /// Memory of the guest, all of it mapped
    #[arg(long, short = 'b', value_name = "SIZE", default_value = "256M")]
    pub memory: Size,

    /// vCPUs, which switch all at once
    #[arg(long, short = 'v', value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=512))]
    pub vcpus: u32,

    /// What backs the guest's memory
    #[arg(long, short = 's', value_name = "BACKING", default_value = "4k")]
    pub backing: KvmBacking,

    /// Guests that are measured, one after the other; one more warms the host's memory up
    #[arg(long, short = 'r', value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub runs: u32,

    /// What only KVM has.
    #[command(flatten)]
    pub kvm: KvmArgs,

    /// Where the results go.
    #[command(flatten)]
    pub out: OutputArgs,
}

const MIGRATE_EXAMPLES: &str = "\
Examples:
  slat bench migrate
      256 MiB dirtied at 100 MiB/s, over 10 Gbit/s, 300 ms of downtime allowed, in each way of logging
  slat bench migrate --dirty-rate 500MiB/s --link 10Gbit/s --max-downtime 300
  slat bench migrate --way ring --dirty-ring-size 8192 --hot-set 10:90 --backing 2m";

/// A migration into a second memory.
#[derive(Clone, Debug, Args)]
#[command(after_help = MIGRATE_EXAMPLES)]
pub struct MigrateArgs {
    /// Memory of the guest; the second takes as much again
    #[arg(long, short = 'b', value_name = "SIZE", default_value = "256M")]
    pub memory: Size,

    /// vCPUs
    #[arg(long, short = 'v', value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=512))]
    pub vcpus: u32,

    /// What backs the guest's memory
    #[arg(long, short = 's', value_name = "BACKING", default_value = "4k")]
    pub backing: KvmBacking,

    /// Ways to log [default: all that this host has]
    #[arg(long, value_name = "WAY,...", value_delimiter = ',')]
    pub way: Vec<KvmWay>,

    /// Entries of each vCPU's dirty ring: a power of two
    #[arg(long, value_name = "N", default_value_t = 4096)]
    pub dirty_ring_size: u32,

    /// The log and the work.
    #[command(flatten)]
    pub log: LogArgs,

    /// What the link carries: 10Gbit/s, 1GiB/s
    #[arg(long, value_name = "RATE", default_value = "10Gbit/s")]
    pub link: Rate,

    /// Milliseconds that the guest may stand still at the end
    #[arg(long, value_name = "MS", default_value = "300", value_parser = milliseconds)]
    pub max_downtime: u32,

    /// Rounds after which the guest is stopped in any case
    #[arg(long, value_name = "N", default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub max_rounds: u32,

    /// Guests that are migrated in each way, in turns; one more warms the host's memory up
    #[arg(long, short = 'r', value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub runs: u32,

    /// What only KVM has.
    #[command(flatten)]
    pub kvm: KvmArgs,

    /// Where the results go.
    #[command(flatten)]
    pub out: OutputArgs,
}

/// What to tune.
#[derive(Clone, Debug, Subcommand)]
pub enum TuneWhat {
    /// Run each way of logging dirty pages that this host has, and say which stalls a guest least
    DirtyLog(TuneArgs),
}

const TUNE_EXAMPLES: &str = "\
Examples:
  slat tune dirty-log
      256 MiB dirtied at 50 MiB/s for 2 seconds, each way in turns
  slat tune dirty-log --memory 1G --vcpus 4 --backing 2m --dirty-rate 200MiB/s --duration 5";

/// A guest to tune for.
#[derive(Clone, Debug, Args)]
#[command(after_help = TUNE_EXAMPLES)]
pub struct TuneArgs {
    /// Memory of the guest
    #[arg(long, short = 'b', value_name = "SIZE", default_value = "256M")]
    pub memory: Size,

    /// vCPUs
    #[arg(long, short = 'v', value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=512))]
    pub vcpus: u32,

    /// What backs the guest's memory
    #[arg(long, short = 's', value_name = "BACKING", default_value = "4k")]
    pub backing: KvmBacking,

    /// Bytes that all vCPUs write a second
    #[arg(long, value_name = "RATE", default_value = "50MiB/s")]
    pub dirty_rate: Rate,

    /// Most writes go to a part of the pages: 10:90 is 90 % of them to the first 10 %
    #[arg(long, value_name = "PAGES:STEPS")]
    pub hot_set: Option<HotSet>,

    /// Seconds that each guest runs with its log fetched
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = seconds)]
    pub duration: f64,

    /// Milliseconds from one fetch of the log to the next
    #[arg(long, value_name = "MS", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=60_000))]
    pub interval: u32,

    /// Guests that are measured in each way, in turns; one more warms the host's memory up
    #[arg(long, short = 'r', value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub runs: u32,

    /// What only KVM has.
    #[command(flatten)]
    pub kvm: KvmArgs,

    /// Where the results go.
    #[command(flatten)]
    pub out: OutputArgs,
}

fn seconds(text: &str) -> Result<f64, String> {
    let number = text.strip_suffix('s').unwrap_or(text).parse::<f64>();
    let within = number.ok().filter(|number| (0.05..=86_400.0).contains(number));
    within.ok_or_else(|| format!("`{text}` is not 0.05 to 86400 seconds"))
}

fn milliseconds(text: &str) -> Result<u32, String> {
    let number = text.strip_suffix("ms").unwrap_or(text).parse::<u32>();
    let within = number.ok().filter(|number| (1..=3_600_000).contains(number));
    within.ok_or_else(|| format!("`{text}` is not 1 to 3600000 milliseconds"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_bounds_and_may_have_their_unit() {
        assert_eq!((seconds("2"), milliseconds("300ms")), (Ok(2.0), Ok(300)));
        assert!(seconds("0").is_err() && seconds("x").is_err() && seconds("inf").is_err());
        assert!(milliseconds("0").is_err());
    }

    #[test]
    fn options_of_kvm_alone_are_refused_elsewhere() {
        assert!(KvmArgs::default().refuse().is_ok());
        let pinned = KvmArgs { pin: vec![1], ..KvmArgs::default() };
        assert!(pinned.refuse().unwrap_err().to_string().contains("--target kvm"));
    }
}
