//! The command line of guests that run while their log is fetched: migrated, or to be tuned for.

use super::OutputArgs;
use super::kvm::{KvmArgs, LogArgs, QUICK_RUN, shrunk};
use super::time;
use super::values::{HotSet, KvmBacking, KvmWay};
use crate::rate::Rate;
use crate::size::Size;
use clap::{Args, Subcommand};
use std::time::Duration;

const MIGRATE_EXAMPLES: &str = "\
Examples:
  slat bench migrate
      256 MiB dirtied at 100 MiB/s, over 10 Gbit/s, 300 ms of downtime allowed, in each way of logging
  slat bench migrate --dirty-rate 500MiB/s --link 10Gbit/s --max-downtime 300ms
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

    /// How long the guest may stand still at the end
    #[arg(long, value_name = "TIME", default_value = "300ms", value_parser = time::some)]
    pub max_downtime: Duration,

    /// Rounds after which the guest is stopped in any case
    #[arg(long, value_name = "N", default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub max_rounds: u32,

    /// Guests that are migrated in each way, in turns; one more warms the host's memory up
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

impl MigrateArgs {
    /// As `--quick` has it, if that is given.
    pub fn sized(&self) -> Self {
        let mut args = self.clone();
        shrunk(args.quick, &mut args.memory, &mut args.runs);
        args
    }
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
  slat tune dirty-log --memory 1G --vcpus 4 --backing 2m --dirty-rate 200MiB/s --duration 5s";

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

    /// How long each guest runs with its log fetched
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = time::run)]
    pub duration: Duration,

    /// From one fetch of the log to the next
    #[arg(long, value_name = "TIME", default_value = "100ms", value_parser = time::some)]
    pub interval: Duration,

    /// Guests that are measured in each way, in turns; one more warms the host's memory up
    #[arg(long, short = 'r', value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
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

impl TuneArgs {
    /// As `--quick` has it, if that is given.
    pub fn sized(&self) -> Self {
        let mut args = self.clone();
        if shrunk(args.quick, &mut args.memory, &mut args.runs) {
            args.duration = args.duration.min(QUICK_RUN);
        }
        args
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Bench, Cli, Command};
    use clap::Parser;

    #[test]
    fn quick_is_at_most_16_mib_and_one_guest_of_every_scenario_under_kvm() {
        let sized = |words: &str| {
            let cli = Cli::parse_from(format!("slat {words} --quick").split_whitespace());
            match cli.command {
                Some(Command::Bench { bench: Some(bench), .. }) => match bench {
                    Bench::DirtyLog(args) => (args.sized().memory, args.sized().runs),
                    Bench::MemoryStress(args) => (args.sized().memory, args.sized().runs),
                    Bench::Memslot(args) => (args.sized().memory, args.sized().runs),
                    Bench::BootCaches(args) => (args.sized().memory, args.sized().runs),
                    Bench::Migrate(args) => (args.sized().memory, args.sized().runs),
                    other => panic!("{other:?}"),
                },
                Some(Command::Tune { what: TuneWhat::DirtyLog(args) }) => {
                    (args.sized().memory, args.sized().runs)
                }
                other => panic!("{other:?}"),
            }
        };
        for name in ["dirty-log", "memory-stress", "memslot", "boot-caches", "migrate"] {
            assert_eq!(sized(&format!("bench {name}")), (Size(16 << 20), 1), "{name}");
            assert_eq!(sized(&format!("bench {name} -b 8m -r 9")), (Size(8 << 20), 1), "{name}");
        }
        assert_eq!(sized("tune dirty-log"), (Size(16 << 20), 1));
    }
}
