//! The command line.

mod compare;
mod cpus;
mod doctor;
mod emulate;
mod engine;
mod explain;
mod guest;
mod idle;
mod kvm;
mod migrate;

mod output;
mod peers;
mod plan;
mod reclaim;
mod show;
pub(crate) mod time;
mod values;

pub use crate::format::{Granule, TableFormat, TablesArgs};
pub use compare::{AbArgs, CompareArgs, NoiseArgs, Repeat};
pub use doctor::DoctorArgs;
pub use emulate::{Architecture, EmulateArgs, KernelChoice, ModuleParam};
pub use engine::{EngineArgs, Part};
pub use explain::ExplainArgs;
pub use guest::{AgeArgs, CacheToggleArgs, ExecuteArgs, LogWay, PopulateArgs};
pub use idle::IdleArgs;
pub use kvm::{BootCachesArgs, DirtyLogArgs, KvmArgs, LogArgs, MemoryStressArgs, MemslotArgs};
pub use migrate::{MigrateArgs, TuneArgs, TuneWhat};
pub use output::{Format, OutputArgs, PrintArgs, ReportFormat, TablePrintArgs};
pub use peers::{
    Caches, CheckArgs, EditSet, LinuxArgs, NamedTree, PeersArgs, TablesTarget, TreesArgs, WalkKind,
};
pub use plan::{MergeArgs, PlanArgs, Share};
pub use reclaim::{AccessPattern, ReclaimArgs, ReclaimPolicy, SwapPlace};
pub use show::ShowArgs;

pub use crate::rate::Rate;
pub use values::{ClearChunk, HotSet, KvmBacking, KvmWay, Others, Switch, Target};

use crate::size::Size;
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::fmt;
use std::path::PathBuf;

const AFTER_HELP: &str = "\
Examples:
  slat                                     measure this host, write slat-report/
  slat --quick                             the same on small sizes, in seconds
  slat doctor                              what this host can measure, and what would change the rest
  slat bench split --memory 64G            split the tables of a 64 GiB guest, three ways
  slat bench engine --quick                hold the engine's operations against their limits
  slat replay                              each claim that Slat grew from, and what this machine gives
  slat bench dirty-log --target kvm -v 2   log the dirty pages of a guest with 2 vCPUs under KVM
  slat bench execute --vcpus 4             execute from 1g blocks of a guest of the engine's
  slat bench migrate --dirty-rate 200MiB/s --link 10Gbit/s
                                           migrate a running guest, in each way of logging
  slat explain slat-report/                where the time of its guests went
  slat tune dirty-log                      which way of logging stalls a guest least here
  slat compare before/ after/              hold two runs against each other
  slat noise -- bench split                the machine against itself
  slat emulate --kernel debian-6.1 -- bench dirty-log --memory 64M
                                           the same in an emulated machine: exact counts
  slat plan plan.toml --cell 1/5           a fifth of a matrix of settings
  slat completions bash > ~/.local/share/bash-completion/completions/slat

Exit codes:
  0    all that was asked for was measured, or skipped with the reason shown
  1    a measurement failed, or cannot be done on this host
  2    the command line or its values cannot be right
  3    an emulated machine gave no report
  4    slat doctor --for: this host cannot run that scenario
  5    --time-limit came first; what was measured until then has been written
  130  interrupted (Ctrl-C, SIGTERM); what was measured until then has been written";

/// What memory management costs guests, measured from user space.
///
/// Without a subcommand, measures what this machine can: a guest under the host's KVM first, then
/// splitting huge pages in the engine beside what the machine's memory allows. Needs no root and
/// changes no setting.
#[derive(Debug, Parser)]
#[command(name = "slat", version, after_help = AFTER_HELP, args_conflicts_with_subcommands = true)]
#[command(max_term_width = 100, subcommand_help_heading = "Commands")]
pub struct Cli {
    /// What to do instead of the main job.
    #[command(subcommand)]
    pub command: Option<Command>,

    /// How to do the main job.
    #[command(flatten)]
    pub main: MainArgs,
}

/// The main job: everything that this machine can run.
#[derive(Clone, Debug, Args)]
pub struct MainArgs {
    /// Where to write results.json and report.html
    #[arg(long, short, value_name = "DIR", default_value = "slat-report")]
    pub output: PathBuf,

    /// Small sizes, a few seconds: shows that it works, gives no figures to quote
    #[arg(long)]
    pub quick: bool,

    /// How it is printed.
    #[command(flatten)]
    pub print: PrintArgs,
}

/// What `slat` can do beside the main job.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Measure one scenario, or everybody who can do the engine's work
    #[command(args_conflicts_with_subcommands = true, arg_required_else_help = true)]
    #[command(after_help = BENCH_EXAMPLES)]
    Bench {
        /// Which.
        #[command(subcommand)]
        bench: Option<Bench>,
        /// Or everybody.
        #[command(flatten)]
        peers: Box<PeersArgs>,
    },
    /// Check Linux's tables against the engine's by random histories of operations
    Check(CheckArgs),
    /// Say what this host can measure, what not and why, and the commands that would change it
    Doctor(DoctorArgs),
    /// Hold two runs against each other: faster, slower, or no difference shown
    Compare(CompareArgs),
    /// Run two command lines in turns, each in processes of its own, and compare them
    Ab(AbArgs),
    /// Compare the machine with itself: how far two runs of one command line differ
    Noise(NoiseArgs),
    /// Say where the time of a run's guests went: faults, calls, waiting, and what is left
    #[command(arg_required_else_help = true)]
    Explain(ExplainArgs),
    /// Find the setting that costs guests on this host the least
    #[command(arg_required_else_help = true)]
    Tune {
        /// Of what.
        #[command(subcommand)]
        what: TuneWhat,
    },
    /// Measure a matrix of settings, cell by cell, on one host or on many
    Plan(PlanArgs),
    /// Gather the reports of a plan's cells, and of many hosts
    Merge(MergeArgs),
    /// Draw second-stage tables: leaf sizes, rights, what was used and written
    Show(ShowArgs),
    /// Run the command that shows each published claim here, and print both
    Replay(ReplayArgs),
    /// Run in an emulated machine: another kernel or architecture, with a real TDP MMU or stage 2
    Emulate(EmulateArgs),
    /// Print a completion script for a shell
    Completions {
        /// The shell to print it for
        shell: clap_complete::Shell,
    },
}

const BENCH_EXAMPLES: &str = "\
Examples:
  slat bench split --backing 2m
  slat bench --all-peers --linux-tree linux-6.12 --with skip-level3
      the engine, Linux's own code with and without an edit, other crates, the machine's limits
  slat bench --all-peers --quick";

/// One scenario.
#[derive(Debug, Subcommand)]
pub enum Bench {
    /// Split huge pages in the tables of a guest (no guest memory needed)
    Split(SplitArgs),
    /// Hold the engine's operations against the machine's limits (no guest memory needed)
    Engine(EngineArgs),
    /// Log the dirty pages of a guest, under KVM or of the engine's
    DirtyLog(DirtyLogArgs),
    /// Execute from huge pages that may not be executed, under KVM or in a guest of the engine's
    Execute(ExecuteArgs),
    /// Look for used pages, in a guest under KVM, or beside faults in one of the engine's
    Age(AgeArgs),
    /// Run a guest of the engine's with more memory than there is: what leaves, and what that costs
    Reclaim(ReclaimArgs),
    /// Ask which pages of a guest of the engine's are idle, take what could be taken, and see what comes back
    Idle(IdleArgs),
    /// Touch memory for the first time, under KVM or in a guest of the engine's
    Populate(PopulateArgs),
    /// Fill a guest's memory under KVM, take it away, fill it again, and move on to swap if asked
    MemoryStress(MemoryStressArgs),
    /// Add, move and delete a memslot beside the running vCPUs of a guest under KVM
    Memslot(MemslotArgs),
    /// Have each vCPU of an Arm guest under KVM switch its caches, as at boot
    BootCaches(BootCachesArgs),
    /// Migrate a running guest under KVM into a second memory, for each way of logging
    Migrate(MigrateArgs),
    /// Switch the caches of an Arm guest's vCPUs on, and maintain what each policy says
    CacheToggle(CacheToggleArgs),
}

const REPLAY_EXAMPLES: &str = "\
Examples:
  slat replay
      all claims, at sizes that take a few minutes
  slat replay --quick
      the same on small sizes, in a minute: shows that it works, gives no figures to quote
  slat replay --only execute,flush-once
  slat replay --only skip-levels,skip-levels-hardware --linux-tree linux-6.12
      on Linux's own code, with the changes as edits to a copy of it";

/// Which claims to replay.
#[derive(Clone, Debug, Args)]
#[command(after_help = REPLAY_EXAMPLES)]
pub struct ReplayArgs {
    /// Only these [default: all]
    #[arg(long, value_name = "CLAIM,...", value_delimiter = ',')]
    pub only: Vec<Claim>,

    /// A Linux source tree, 6.6 to 7.x: the claims about Linux's walks are replayed on its own code, too
    #[arg(long, value_name = "[NAME=]PATH")]
    pub linux_tree: Option<NamedTree>,

    /// Where edits to it are, NAME.cocci each [default: Slat's own]
    #[arg(long, value_name = "DIR")]
    pub edits: Option<PathBuf>,

    /// Small sizes: shows that it works, gives no figures to quote
    #[arg(long)]
    pub quick: bool,

    /// Where the results go.
    #[command(flatten)]
    pub out: OutputArgs,
}

/// The discussions that Slat grew from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Claim {
    /// Walks that leave out levels, as proposed: 1 GiB
    SkipLevels,
    /// The same, measured on hardware: twelve cells over three granules
    SkipLevelsHardware,
    /// Splitting a huge page in the fault
    Execute,
    /// Ageing without a lock
    Ageing,
    /// Flushing once as caches come on
    FlushOnce,
}

const SPLIT_EXAMPLES: &str = "\
Examples:
  slat bench split
      4k, 2m and 1g backing, at once and 64 pages at a time, every walk; 64 GiB of guest
  slat bench split --memory 1T --backing 1g --when enable --what split
      the tables of 1 TiB; they take about 2 GiB of this machine's memory
  slat bench split --format arm64-64k --backing 512m --walk every-entry,bounded
  slat bench split --format riscv --memory 8G
  slat bench split --backing 1g --target-size 2m
      stop at 2m blocks
  slat bench split --target linux-source --linux-tree linux-6.12 --with skip-level3
      beside Linux's own code, as it is and with the level-3 skip";

/// What to split, when and how.
#[derive(Clone, Debug, Args)]
#[command(after_help = SPLIT_EXAMPLES)]
pub struct SplitArgs {
    /// Memory of the guest whose tables are split
    #[arg(long, short = 'b', value_name = "SIZE", default_value = "64G")]
    pub memory: Size,

    /// Page sizes that back the guest before the split; the smallest is "already split"
    ///
    /// Those of the format, all of them unless given.
    #[arg(long, short = 's', value_name = "SIZE,...", value_delimiter = ',')]
    pub backing: Vec<Size>,

    /// Page size to split down to [default: the smallest]
    #[arg(long, value_name = "SIZE")]
    pub target_size: Option<Size>,

    /// The whole slot at once, as logging is enabled, or 64 pages at a time, as the log is cleared
    #[arg(long, value_name = "WHEN,...", value_delimiter = ',', default_value = "enable,clear")]
    pub when: Vec<When>,

    /// The split alone, or the call of a VMM: write-protect, invalidate and split
    #[arg(long, value_name = "WHAT,...", value_delimiter = ',', default_value = "split,call")]
    pub what: Vec<What>,

    /// The ways to walk the tables
    #[arg(
        long,
        value_name = "WALK,...",
        value_delimiter = ',',
        default_value = "every-entry,bounded,batched"
    )]
    pub walk: Vec<Walk>,

    /// Format of the tables [default: arm64-4k]
    #[arg(long, value_name = "FORMAT")]
    pub format: Option<TableFormat>,

    /// Smallest page of Arm's tables: --granule 16k is --format arm64-16k
    #[arg(long, value_name = "SIZE", default_value = "4k", conflicts_with = "format")]
    pub granule: Granule,

    /// How far the CPU lets a live entry change its size: its level of FEAT_BBM
    ///
    /// 0 always breaks before it makes; 1 and 2 as in the manual; 3 never breaks. Of Arm's tables only. [default: 0]
    #[arg(long, value_name = "0..3", value_parser = clap::value_parser!(u8).range(0..=3))]
    pub bbm: Option<u8>,

    /// Samples of each variant, taken in turns
    #[arg(long, value_name = "N", default_value_t = 11, value_parser = clap::value_parser!(u32).range(10..=1000))]
    pub samples: u32,

    /// 1 GiB at most, ten samples: shows that it works, gives no figures to quote
    #[arg(long)]
    pub quick: bool,

    /// Linux's tables.
    #[command(flatten)]
    pub linux: LinuxArgs,

    /// Where the results go.
    #[command(flatten)]
    pub out: OutputArgs,
}

impl SplitArgs {
    /// The format of the tables.
    pub fn format(&self) -> TableFormat {
        self.format.unwrap_or(TableFormat::of_granule(self.granule))
    }

    /// The level of FEAT_BBM.
    ///
    /// # Errors
    /// It was given, and the format has none.
    pub fn bbm(&self) -> anyhow::Result<u8> {
        TablesArgs { format: self.format(), bbm: self.bbm }.bbm()
    }

    /// The backings asked for, or all that the format has from the target size on, smallest first.
    pub fn backings(&self) -> Vec<Size> {
        if !self.backing.is_empty() {
            return self.backing.clone();
        }
        let target = self.target_size();
        let leaves = self.format().leaves();
        let sizes = leaves.iter().map(|leaf| Size(leaf.bytes()));
        sizes.filter(|size| *size >= target).collect()
    }

    /// As `--quick` has it, if that is given.
    pub fn sized(&self) -> Self {
        let mut args = self.clone();
        if self.quick {
            (args.memory, args.samples) = (self.memory.min(Size(1 << 30)), 10);
        }
        args
    }

    /// The size to split down to.
    pub fn target_size(&self) -> Size {
        self.target_size.unwrap_or_else(|| Size(self.format().leaves()[0].bytes()))
    }
}

/// When a guest's huge pages are split.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum When {
    /// The whole slot at once, as logging is enabled
    Enable,
    /// 64 pages at a time, as the log is cleared
    Clear,
}

/// What one sample covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum What {
    /// The split alone
    Split,
    /// Write-protect, invalidate and split, as one call of a VMM would
    Call,
}

/// How the tables are walked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Walk {
    /// Every entry, those of tables just built included: Linux's way
    EveryEntry,
    /// The same without the last level: the way of the level-3 skip
    Bounded,
    /// And without the entries of tables just built: the first form of the same discussion
    Childless,
    /// The same, by a flag that is read at each entry
    Tested,
    /// No per-entry building, no descent into what was just built, invalidations merged
    Batched,
}

/// Prints the name that is written on the command line, which is also the one in `results.json`.
macro_rules! display_as_written {
    ($($name:ty),*) => {$(
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let value = self.to_possible_value().expect("no variant is hidden");
                f.pad(value.get_name())
            }
        }
    )*};
}

display_as_written!(
    Architecture,
    When,
    What,
    Walk,
    Granule,
    Part,
    Target,
    TablesTarget,
    WalkKind,
    Caches,
    Format,
    ReportFormat,
    crate::doctor::DoctorScenario,
    KvmBacking,
    KvmWay,
    Others,
    Switch,
    TableFormat,
    LogWay,
    AccessPattern,
    ReclaimPolicy
);

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
