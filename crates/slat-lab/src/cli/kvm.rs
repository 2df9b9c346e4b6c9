//! The command line of what is measured on guests under the host's KVM.
//!
//! Options carry the names of Linux's KVM selftests where those have them.

use super::OutputArgs;
use super::cpus::Cpus;
use super::guest::LogWay;
use super::time;
use super::values::{ClearChunk, HotSet, KvmBacking, Others, Switch, Target};
use crate::failure::bad_input;
use crate::format::TablesArgs;
use crate::rate::Rate;
use crate::size::Size;
use clap::Args;
use std::time::Duration;

/// What only guests under KVM have.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
pub struct KvmArgs {
    /// CPUs for the vCPUs' threads, one each: 0-3,8 (kvm) [default: left to the scheduler]
    #[arg(long, short = 'c', value_name = "CPU,...")]
    pub pin: Option<Cpus>,

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
            None => Ok(self.pin.clone().unwrap_or_default().0),
        }
    }
}

/// A run of a guest whose log is fetched, with `--quick`.
pub(super) const QUICK_RUN: Duration = Duration::from_millis(200);

/// Makes a guest small, and the only one, if that was asked for by `--quick`; says whether.
pub(super) fn shrunk(quick: bool, memory: &mut Size, runs: &mut u32) -> bool {
    if quick {
        (*memory, *runs) = ((*memory).min(Size(16 << 20)), 1);
    }
    quick
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
  slat bench dirty-log --duration 5s --dirty-rate 100MiB/s --hot-set 10:90
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

    /// How long vCPUs run on beside a log that is fetched, in place of rounds: 5s (kvm)
    #[arg(long, value_name = "TIME", conflicts_with = "iterations", value_parser = time::run)]
    pub duration: Option<Duration>,

    /// From one fetch of the log to the next, with --duration [default: 100ms]
    #[arg(long, value_name = "TIME", requires = "duration", value_parser = time::some)]
    pub interval: Option<Duration>,

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

    /// At most 16 MiB, one guest, two rounds: shows that it works, gives no figures to quote
    #[arg(long)]
    pub quick: bool,

    /// Where the results go.
    #[command(flatten)]
    pub out: OutputArgs,
}

impl DirtyLogArgs {
    /// As `--quick` has it, if that is given, of a guest under KVM.
    pub fn sized(&self) -> Self {
        let mut args = self.clone();
        if shrunk(args.quick, &mut args.memory, &mut args.runs) {
            args.duration = args.duration.map(|time| time.min(QUICK_RUN));
            args.iterations = args.iterations.min(2);
        }
        args
    }

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

    /// At most 16 MiB, one guest: shows that it works, gives no figures to quote
    #[arg(long)]
    pub quick: bool,

    /// Where the results go.
    #[command(flatten)]
    pub out: OutputArgs,
}

impl MemoryStressArgs {
    /// As `--quick` has it, if that is given.
    pub fn sized(&self) -> Self {
        let mut args = self.clone();
        if shrunk(args.quick, &mut args.memory, &mut args.runs) {
            args.iterations = 1;
        }
        args
    }
}

const MEMSLOT_EXAMPLES: &str = "\
Examples:
  slat bench memslot
      64 MiB come, move and go beside two vCPUs, a change every 10 ms
  slat bench memslot --memory 4G --slot-size 1G --backing 2m --delay 100ms
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

    /// From the end of each change to the next
    #[arg(long, short = 'd', value_name = "TIME", default_value = "10ms", value_parser = time::any)]
    pub delay: Duration,

    /// Times that the slot is added, moved and deleted
    #[arg(long, short = 'i', value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub iterations: u32,

    /// Bytes that all vCPUs write a second, a page a step: 200MiB/s [default: all they can]
    #[arg(long, value_name = "RATE")]
    pub dirty_rate: Option<Rate>,

    /// Every vCPU touches all of the memory, not its share
    #[arg(long)]
    pub overlap: bool,

    /// Give up KVM_X86_QUIRK_SLOT_ZAP_ALL: unmap a slot that goes and nothing else (x86, Linux
    /// 6.12)
    #[arg(long, short = 'q')]
    pub disable_slot_zap_all: bool,

    /// Guests that are measured, one after the other; one more warms the host's memory up
    #[arg(long, short = 'r', value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub runs: u32,

    /// What only KVM has.
    #[command(flatten)]
    pub kvm: KvmArgs,

    /// At most 16 MiB, one guest: shows that it works, gives no figures to quote
    #[arg(long)]
    pub quick: bool,

    /// Where the results go.
    #[command(flatten)]
    pub out: OutputArgs,
}

impl MemslotArgs {
    /// As `--quick` has it, if that is given.
    pub fn sized(&self) -> Self {
        let mut args = self.clone();
        if shrunk(args.quick, &mut args.memory, &mut args.runs) {
            args.slot_size = args.slot_size.min(args.memory);
            args.iterations = args.iterations.min(4);
        }
        args
    }
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

    /// At most 16 MiB, one guest: shows that it works, gives no figures to quote
    #[arg(long)]
    pub quick: bool,

    /// Where the results go.
    #[command(flatten)]
    pub out: OutputArgs,
}

impl BootCachesArgs {
    /// As `--quick` has it, if that is given.
    pub fn sized(&self) -> Self {
        let mut args = self.clone();
        shrunk(args.quick, &mut args.memory, &mut args.runs);
        args
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_of_kvm_alone_are_refused_elsewhere() {
        assert!(KvmArgs::default().refuse().is_ok());
        let pinned = KvmArgs { pin: Some(Cpus(vec![1])), ..KvmArgs::default() };
        assert!(pinned.refuse().unwrap_err().to_string().contains("--target kvm"));
    }
}
