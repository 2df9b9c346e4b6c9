//! The command line of what is measured on a guest of the engine's, threads as vCPUs, or under KVM.

use super::OutputArgs;
use super::kvm::KvmArgs;
use super::values::{KvmBacking, Target};
use crate::format::TablesArgs;
use crate::size::Size;
use clap::{Args, ValueEnum};

const EXECUTE_EXAMPLES: &str = "\
Examples:
  slat bench execute
      2 GiB on 1g blocks, 2 vCPUs: write, execute, read, write every page
  slat bench execute --backing 1g --vcpus 96
      more vCPUs than CPUs: they take turns
  slat bench execute --exit 1000
      as if each fault left the guest for a microsecond longer
  slat bench execute --format arm64 --bbm 3 --memory 1g --output execute/
  slat bench execute --format arm64-64k --backing 512m
  slat bench execute --target kvm --backing 1g --vcpus 8
      the same on real KVM: no-execute huge pages as the host has them set";

/// A guest that executes from all of its memory.
#[derive(Clone, Debug, Args)]
#[command(after_help = EXECUTE_EXAMPLES)]
pub struct ExecuteArgs {
    /// Who keeps the guest's tables
    #[arg(long, value_name = "TARGET", default_value = "engine")]
    pub target: Target,

    /// What only KVM has.
    #[command(flatten)]
    pub kvm: KvmArgs,

    /// Its tables.
    #[command(flatten)]
    pub tables: TablesArgs,

    /// What backs the guest's memory [default: the largest block, under KVM 2m]
    #[arg(long, short = 's', value_name = "BACKING")]
    pub backing: Option<KvmBacking>,

    /// vCPUs; each takes its own share of the memory
    #[arg(long, short = 'v', value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=192))]
    pub vcpus: u16,

    /// Memory of the guest, a multiple of the backing [default: 2g]
    #[arg(long, short = 'b', value_name = "SIZE")]
    pub memory: Option<Size>,

    /// Guests of each kind that are measured, in turns [default: 7]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: Option<u32>,

    /// Nanoseconds that a fault costs on top, as leaving a guest of hardware's does
    #[arg(long, value_name = "NS", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    pub exit: u32,

    /// One block or 64 MiB, one round: shows that it works, gives no figures to quote
    #[arg(long)]
    pub quick: bool,

    /// Where the results go.
    #[command(flatten)]
    pub out: OutputArgs,
}

const AGE_EXAMPLES: &str = "\
Examples:
  slat bench age
      1 GiB aged over and over beside a vCPU that faults, locked and lock-free
  slat bench age --format arm64-16k --vcpus 2 --memory 2g
  slat bench age --target kvm
      a guest under KVM, aged by the kernel's idle page tracking (needs root)";

/// A scan for used pages beside vCPUs that fault.
#[derive(Clone, Debug, Args)]
#[command(after_help = AGE_EXAMPLES)]
pub struct AgeArgs {
    /// Who keeps the guest's tables
    #[arg(long, value_name = "TARGET", default_value = "engine")]
    pub target: Target,

    /// What only KVM has.
    #[command(flatten)]
    pub kvm: KvmArgs,

    /// The guest's tables.
    #[command(flatten)]
    pub tables: TablesArgs,

    /// vCPUs that fault beside the scan
    #[arg(long, short = 'v', value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=192))]
    pub vcpus: u16,

    /// What backs the guest's memory (kvm) [default: 4k]
    #[arg(long, short = 's', value_name = "BACKING")]
    pub backing: Option<KvmBacking>,

    /// Memory that is aged; the vCPUs map as much again, by pages [default: 1g]
    #[arg(long, short = 'b', value_name = "SIZE")]
    pub memory: Option<Size>,

    /// Samples of each way, in turns [default: 9]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: Option<u32>,

    /// 64 MiB, one round: shows that it works, gives no figures to quote
    #[arg(long)]
    pub quick: bool,

    /// Where the results go.
    #[command(flatten)]
    pub out: OutputArgs,
}

const POPULATE_EXAMPLES: &str = "\
Examples:
  slat bench populate
      faults of 1 and 2 vCPUs on 4k, 2m and 1g blocks, without a lock and with one
  slat bench populate --format npt --backing 2m
  slat bench populate --vcpus 1,2,4,8 --backing 4k --overlap
      all vCPUs touch the same memory
  slat bench populate --target kvm --backing 4k,2m,shmem
      real memory, by KVM's faults";

/// First touches.
#[derive(Clone, Debug, Args)]
#[command(after_help = POPULATE_EXAMPLES)]
pub struct PopulateArgs {
    /// Who keeps the guest's tables
    #[arg(long, value_name = "TARGET", default_value = "engine")]
    pub target: Target,

    /// What only KVM has.
    #[command(flatten)]
    pub kvm: KvmArgs,

    /// The guest's tables.
    #[command(flatten)]
    pub tables: TablesArgs,

    /// What backs the guest's memory [default: all of the format, under KVM 4k,2m]
    #[arg(long, short = 's', value_name = "BACKING,...", value_delimiter = ',')]
    pub backing: Vec<KvmBacking>,

    /// vCPUs
    #[arg(long, short = 'v', value_name = "N,...", value_delimiter = ',', default_value = "1,2", value_parser = clap::value_parser!(u16).range(1..=192))]
    pub vcpus: Vec<u16>,

    /// Host memory that is touched, a page a fault; of huge blocks fewer are touched [default: 512m]
    #[arg(long, short = 'b', value_name = "SIZE")]
    pub memory: Option<Size>,

    /// All vCPUs touch all of the memory, in the same order, not each its own share
    #[arg(long)]
    pub overlap: bool,

    /// Samples of each way, in turns [default: 9]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: Option<u32>,

    /// 16 MiB, one round: shows that it works, gives no figures to quote
    #[arg(long)]
    pub quick: bool,

    /// Where the results go.
    #[command(flatten)]
    pub out: OutputArgs,
}

/// How a guest of the engine's has its writes logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum LogWay {
    /// Reading the log protects what was read
    Legacy,
    /// Read, then clear what was read
    Manual,
    /// The same under a lock that each fault takes for reading: Linux's way
    Locked,
    /// All pages count as dirty at first, so that enabling protects none
    InitiallySet,
    /// Each vCPU names the pages that it wrote in a ring of 4096
    Ring,
    /// By hardware's dirty bits
    Hardware,
}

impl LogWay {
    /// The ways asked for, or all.
    pub fn all_or(asked: &[Self]) -> Vec<Self> {
        if asked.is_empty() { Self::value_variants().to_vec() } else { asked.to_vec() }
    }
}

const CACHE_TOGGLE_EXAMPLES: &str = "\
Examples:
  slat bench cache-toggle
      1 GiB, flushed by the CPU's own instruction, and 8 vCPUs that switch their caches on in turn
  slat bench cache-toggle --count --memory 128g --vcpus 64
      the guest of \u{201c}flush once\u{201d}, by count: no memory, the walks alone are timed
  slat bench cache-toggle --threads 2
      the other cores help to flush";

/// vCPUs of an Arm guest without FEAT_S2FWB that switch their caches on, one after the other.
#[derive(Clone, Debug, Args)]
#[command(after_help = CACHE_TOGGLE_EXAMPLES)]
pub struct CacheToggleArgs {
    /// Memory of the guest, a multiple of 2m; all of it is used once vCPU 0 has switched [default: 1g]
    #[arg(long, short = 'b', value_name = "SIZE")]
    pub memory: Option<Size>,

    /// vCPUs
    #[arg(long, short = 'v', value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=192))]
    pub vcpus: u16,

    /// What vCPU 0 touches before it switches
    #[arg(long, value_name = "SIZE", default_value = "16m")]
    pub image: Size,

    /// Pages that each vCPU touches before it switches
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(0..=65536))]
    pub startup: u32,

    /// Threads that flush
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub threads: u16,

    /// Count the bytes in place of flushing them: the guest needs no memory
    #[arg(long)]
    pub count: bool,

    /// Boots by each policy, in turns [default: 5]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: Option<u32>,

    /// 64 MiB, one round: shows that it works, gives no figures to quote
    #[arg(long)]
    pub quick: bool,

    /// Where the results go.
    #[command(flatten)]
    pub out: OutputArgs,
}

impl CacheToggleArgs {
    /// Bytes of guest memory.
    pub fn memory(&self) -> u64 {
        self.memory.map_or(if self.quick { 64 << 20 } else { 1 << 30 }, |memory| memory.bytes())
    }

    /// Boots by each policy.
    pub fn rounds(&self) -> u32 {
        self.rounds.unwrap_or(if self.quick { 1 } else { 5 })
    }
}
