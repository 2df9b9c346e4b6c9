//! Options of a guest of the engine whose writes are logged.

use clap::{Args, ValueEnum};
use slat_ideas::format::TablesArgs;
use slat_lab::cli::count;
use slat_lab::size::Size;

/// Options of dirty logging.
#[derive(Clone, Debug, Args)]
pub struct DirtyLogArgs {
    /// The guest's tables.
    #[command(flatten)]
    pub tables: TablesArgs,

    /// Memory that the vCPUs write to, all of them together
    #[arg(long, short = 'b', value_name = "SIZE", default_value = "256M")]
    pub memory: Size,

    /// vCPUs; each writes to its own share of the memory
    #[arg(
        long,
        short = 'v',
        value_name = "N",
        default_value_t = 2,
        value_parser = count::threads()
    )]
    pub vcpus: u16,

    /// What backs the guest's memory [default: the smallest pages]
    #[arg(long, short = 's', value_name = "SIZE")]
    pub backing: Option<Size>,

    /// Ways to log [default: all]
    #[arg(long, value_name = "WAY,...", value_delimiter = ',')]
    pub way: Vec<LogWay>,

    /// How many of a hundred steps write
    #[arg(
        long,
        short = 'w',
        value_name = "1..100",
        default_value_t = 100,
        value_parser = count::of_hundred()
    )]
    pub write_percent: u8,

    /// Rounds of dirtying, reading and clearing the log
    #[arg(
        long,
        short = 'i',
        value_name = "N",
        default_value_t = 3,
        value_parser = count::iterations()
    )]
    pub iterations: u32,

    /// Guests that are measured in each way, in turns; one more warms up
    #[arg(long, short = 'r', value_name = "N", default_value_t = 3, value_parser = count::rounds())]
    pub runs: u32,

    /// 16 MiB or one block, one guest, two rounds: shows that it works, gives no figures to quote
    #[arg(long)]
    pub quick: bool,
}

/// A way to log the writes of a guest of the engine.
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
    /// Returns the ways asked for, or all ways.
    pub fn all_or(asked: &[Self]) -> Vec<Self> {
        if asked.is_empty() { Self::value_variants().to_vec() } else { asked.to_vec() }
    }
}

slat_lab::display_as_written!(LogWay);
