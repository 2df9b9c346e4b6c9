//! Options of a guest of the engine whose writes are logged.

use crate::format::TablesArgs;
use clap::{Args, ValueEnum};
use slat_lab::cli::count;
use slat_lab::size::Size;

/// Options of dirty logging.
#[derive(Clone, Debug, Args)]
pub struct DirtyLogArgs {
    /// The guest's tables.
    #[command(flatten)]
    pub tables: TablesArgs,

    /// Memory that all vCPUs together write to
    #[arg(long, short = 'b', value_name = "SIZE", default_value = "256M")]
    pub memory: Size,

    /// vCPUs; each writes to its own share of the memory
    #[arg(long, short = 'v', value_name = "N", default_value_t = 2)]
    #[arg(value_parser = count::threads())]
    pub vcpus: u16,

    /// Size of the pages that back the guest's memory [default: the smallest]
    #[arg(long, short = 's', value_name = "SIZE")]
    pub backing: Option<Size>,

    /// Ways to log [default: all]
    #[arg(long, value_name = "WAY,...", value_delimiter = ',')]
    pub way: Vec<LogWay>,

    /// Percentage of steps that write
    #[arg(long, short = 'w', value_name = "1..100", default_value_t = 100)]
    #[arg(value_parser = count::of_hundred())]
    pub write_percent: u8,

    /// Rounds of dirtying, reading and clearing the log
    #[arg(long, short = 'i', value_name = "N", default_value_t = 3)]
    #[arg(value_parser = count::iterations())]
    pub iterations: u32,

    /// Guests measured in each way, in turns, after one that warms up
    #[arg(long, short = 'r', value_name = "N", default_value_t = 3, value_parser = count::rounds())]
    pub runs: u32,

    /// 16 MiB or one block, one guest, two rounds: a trial run, gives no figures to quote
    #[arg(long)]
    pub quick: bool,
}

/// A way to log the writes of a guest of the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum LogWay {
    /// A read of the log protects the pages that it returns
    Legacy,
    /// Read the log, then clear what was read
    Manual,
    /// The same under a lock that each fault takes shared: Linux's way
    Locked,
    /// All pages initially count as dirty, so that enabling protects none
    InitiallySet,
    /// Each vCPU puts the pages that it writes into a ring of 4096 entries
    Ring,
    /// Hardware's dirty bits
    Hardware,
}

impl LogWay {
    /// Returns the ways asked for, or all ways.
    pub fn all_or(asked: &[Self]) -> Vec<Self> {
        if asked.is_empty() { Self::value_variants().to_vec() } else { asked.to_vec() }
    }
}

slat_lab::display_as_written!(LogWay);
