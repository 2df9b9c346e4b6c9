//! Options of guests with more memory than they may have at a time.

use crate::format::{TableFormat, TablesArgs};
use clap::{Args, ValueEnum};
use slat_lab::cli::count;
use slat_lab::size::Size;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Examples of command lines.
pub const EXAMPLES: &str = "\
Examples:
  slat-bench reclaim
      a guest of 1.5 times its memory, five patterns, all policies: a few minutes
  slat-bench reclaim --pattern zipf --guest 1.1,1.5,2
  slat-bench reclaim --pattern zipf --accesses 400 --policy free-recent,free-bitmap
      what it brings that frequency counts, should a guest go on as it does
  slat-bench reclaim --pattern fill --memory 256m
      fill, reset, fill again: the test of \u{201c}lockless test_clear_young\u{201d}
  slat-bench reclaim --pattern trace --trace pages.txt
      a recorded trace: a page number a line, with w in front if it was written
  slat-bench reclaim --swap /var/tmp --policy clock,free-bitmap
      swap on a disk, past the page cache, two policies
  slat-bench reclaim --huge --pattern phase,scan --policy clock,free-bitmap
      huge pages at first touch: kept, split and put together by heat";

/// Options of a guest with more memory than it may have at a time.
#[derive(Clone, Debug, Args)]
pub struct ReclaimArgs {
    /// Its tables.
    #[command(flatten)]
    pub tables: TablesArgs,

    /// Memory that the guest may have at a time, a multiple of 2m [default: 64m]
    #[arg(long, short = 'b', value_name = "SIZE")]
    pub memory: Option<Size>,

    /// Memory that the guest sees, in multiples of the memory that it may have
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1.5")]
    #[arg(value_parser = factor)]
    pub guest: Vec<f64>,

    /// Order in which it uses its pages [default: uniform,zipf,scan,phase,trace]
    #[arg(long, value_name = "PATTERN,...", value_delimiter = ',')]
    pub pattern: Vec<AccessPattern>,

    /// A recorded trace, for --pattern trace [default: one of GNU sort]
    ///
    /// Each line has a page number, after w if the page is written; `#` begins a comment.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,

    /// Policies that decide which pages leave [default: all]
    #[arg(long, value_name = "POLICY,...", value_delimiter = ',')]
    pub policy: Vec<ReclaimPolicy>,

    /// vCPUs
    #[arg(long, short = 'v', value_name = "N", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=64))]
    pub vcpus: u16,

    /// Accesses of each vCPU, in multiples of the guest's pages [default: 20, and 400 of a trace]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub accesses: Option<u32>,

    /// Seed of the patterns; another one gives other uses
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,

    /// Place for pages that leave: memory of this process, or an unnamed file in a directory
    ///
    /// Reads and writes of a file bypass the page cache, if its file system can do that.
    #[arg(long, value_name = "memory|DIR", default_value = "memory", value_parser = swap_place)]
    pub swap: SwapPlace,

    /// Map whole blocks at first touches where one is free, and let walks collapse pages into
    /// blocks
    #[arg(long)]
    pub huge: bool,

    /// Pages that one call of an ageing walk by bitmap covers
    #[arg(long, value_name = "N", default_value_t = 64)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    pub window: u32,

    /// Invalidate at the end of each walk: pages in a TLB do not look idle
    #[arg(long)]
    pub fresh: bool,

    /// Pages that are given up together
    #[arg(long, value_name = "N", default_value_t = 64)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub batch: u32,

    /// Time that a page stays after it came back
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = slat_lab::cli::time::any)]
    pub residency: Duration,

    /// Guests for each policy, in turns [default: 5]
    #[arg(long, value_name = "N", value_parser = count::rounds())]
    pub rounds: Option<u32>,

    /// 8 MiB, few accesses, one round: a trial run, gives no figures to quote
    #[arg(long)]
    pub quick: bool,
}

impl ReclaimArgs {
    /// Returns the defaults of `slat-bench reclaim`.
    pub fn of(quick: bool) -> Self {
        Self {
            tables: TablesArgs::of(TableFormat::Ept),
            memory: None,
            guest: vec![1.5],
            pattern: Vec::new(),
            trace: None,
            policy: Vec::new(),
            vcpus: 1,
            accesses: None,
            seed: 0,
            swap: SwapPlace::Memory,
            huge: false,
            window: 64,
            fresh: false,
            batch: 64,
            residency: Duration::ZERO,
            rounds: None,
            quick,
        }
    }
}

fn factor(text: &str) -> Result<f64, String> {
    let wrong = "a number from 1 to 16, for instance 1.5";
    let factor: f64 = text.parse().map_err(|_| wrong.to_owned())?;
    if (1.0..=16.0).contains(&factor) { Ok(factor) } else { Err(wrong.to_owned()) }
}

/// Place for pages that leave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SwapPlace {
    /// Memory of this process.
    Memory,
    /// A file in this directory.
    Directory(PathBuf),
}

impl fmt::Display for SwapPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory => f.write_str("memory"),
            Self::Directory(directory) => directory.display().fmt(f),
        }
    }
}

/// Parses the place for pages that leave.
///
/// # Errors
/// The text is neither `memory` nor a directory.
pub fn swap_place(text: &str) -> Result<SwapPlace, String> {
    match text {
        "memory" => Ok(SwapPlace::Memory),
        _ if Path::new(text).is_dir() => Ok(SwapPlace::Directory(text.into())),
        _ => Err("neither “memory” nor a directory".to_owned()),
    }
}

/// The order in which a guest uses its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum AccessPattern {
    /// All pages equally often
    Uniform,
    /// A few pages often, most of them rarely: Zipf's law, exponent 0.99, anywhere in memory
    Zipf,
    /// One page after the other, repeatedly
    Scan,
    /// Nine of ten uses in a part that fits into memory, and that is in four places in turn
    Phase,
    /// All pages once more, in order, after they were written: fill, reset, fill again
    Fill,
    /// The recorded uses of a program, repeated
    Trace,
}

/// Policy that decides which pages leave memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ReclaimPolicy {
    /// Two lists, page by page, under a lock
    Clock,
    /// Generations, page by page, under a lock that faults take for reading
    LockedPage,
    /// Generations that take frequency into account, by bitmap with look-around, under that lock
    LockedBitmap,
    /// Generations, page by page, without a lock
    FreePage,
    /// Generations, by bitmap with look-around, without a lock
    FreeRecent,
    /// The same, taking frequency into account
    FreeBitmap,
    /// The same; walks cover all memory in one call, and skip what tables rule out
    FreeExact,
}

slat_lab::display_as_written!(AccessPattern, ReclaimPolicy);
