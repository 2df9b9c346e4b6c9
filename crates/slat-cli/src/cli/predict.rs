//! The command line of `slat predict`.

use clap::{Args, ValueEnum};
use slat_lab::cli::{PrintArgs, count, time};
use slat_lab::rate::Rate;
use slat_lab::size::Size;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  slat predict --memory 16g --vcpus 4 --dirty-rate 400MiB/s --link 10Gbit/s
      pre-copy, auto-converge and post-copy of that guest
  slat predict --memory 64g --vcpus 16 --dirty 100ms:60m --dirty 1s:220m --link 10Gbit/s,25Gbit/s
      what was dirty after two windows tells how much of the memory is written again and again
  slat predict --memory 16g --vcpus 4 --dirty-rate 100MiB/s,1GiB/s --max-downtime 50ms,300ms \\
      --zero-pages 40%
  slat predict --memory 64g --dirty-rate 1GiB/s --order random --link 25Gbit/s \\
      --channels 4 --channel-rate 900MiB/s
      multifd: four threads, each of which copies 900 MiB/s, beside one

Exit codes:
  0    computed
  2    values that cannot be";

/// What is dirty after a window of time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Window {
    /// Length of the window.
    pub seconds: f64,
    /// Memory that is dirty at its end.
    pub dirty: Size,
}

impl FromStr for Window {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let both = text.split_once(':').and_then(|(window, dirty)| {
            let seconds = time::some(window).ok()?.as_secs_f64();
            Some(Self { seconds, dirty: dirty.parse().ok()? })
        });
        both.ok_or_else(|| format!("`{text}` is no window; 100ms:60m is 60 MiB dirty after 100 ms"))
    }
}

/// A part of the memory that is zero.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Zero(pub f64);

impl FromStr for Zero {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let percent: Option<f64> = text.trim_end_matches('%').trim().parse().ok();
        percent
            .filter(|percent| (0.0..=100.0).contains(percent))
            .map(Self)
            .ok_or_else(|| format!("`{text}` is no part of the memory; write it as 40%"))
    }
}

impl fmt::Display for Zero {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} %", self.0)
    }
}

/// The order in which a guest writes its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WriteOrder {
    /// One page after the other: each write dirties another page
    Sequential,
    /// At random: some pages are written again before they are copied
    Random,
}

slat_lab::display_as_written!(WriteOrder);

/// Options of `slat predict`: the guest, and the link.
#[derive(Clone, Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct PredictArgs {
    /// Memory of the guest
    #[arg(long, short = 'b', value_name = "SIZE")]
    pub memory: Size,

    /// vCPUs, which share the cost of logged writes
    #[arg(long, short = 'v', value_name = "N", default_value = "1", value_parser = count::vcpus())]
    pub vcpus: u32,

    /// Rates at which the guest dirties memory, each of which is tried: 100MiB/s,1GiB/s
    #[arg(long, value_name = "RATE,...", value_delimiter = ',')]
    #[arg(required_unless_present = "dirty", conflicts_with = "dirty")]
    pub dirty_rate: Vec<Rate>,

    /// Memory that is dirty after a window, twice: 100ms:60m
    #[arg(long, value_name = "TIME:SIZE")]
    pub dirty: Vec<Window>,

    /// Memory that the guest writes again and again, for --dirty-rate [default: all]
    #[arg(long, value_name = "SIZE", conflicts_with = "dirty")]
    pub hot_set: Option<Size>,

    /// In which order the guest writes, for --dirty-rate
    #[arg(long, value_name = "ORDER", default_value = "sequential", conflicts_with = "dirty")]
    pub order: WriteOrder,

    /// Links, each of which is tried
    #[arg(long, value_name = "RATE,...", value_delimiter = ',', default_value = "10Gbit/s")]
    pub link: Vec<Rate>,

    /// Downtimes allowed, each of which is tried
    #[arg(long, value_name = "TIME,...", value_delimiter = ',', default_value = "300ms")]
    #[arg(value_parser = time::some)]
    pub max_downtime: Vec<Duration>,

    /// Rounds after which the guest is stopped in any case
    #[arg(long, value_name = "N", default_value_t = 30, value_parser = count::rounds())]
    pub max_rounds: u32,

    /// Pages that are zero, and take no part of the link
    #[arg(long, value_name = "PERCENT", default_value = "0%")]
    pub zero_pages: Zero,

    /// How fast the VMM finds out that pages are zero
    #[arg(long, value_name = "RATE", default_value = "8GiB/s")]
    pub zero_rate: Rate,

    /// Threads that copy (multifd), as a way beside one thread
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = count::vcpus())]
    pub channels: u32,

    /// What one thread copies, where that is less than the link [default: all that the link
    /// carries]
    #[arg(long, value_name = "RATE")]
    pub channel_rate: Option<Rate>,

    /// How long it takes to stop the vCPUs and to fetch the log a last time
    #[arg(long, value_name = "TIME", default_value = "3ms", value_parser = time::any)]
    pub stop_time: Duration,

    /// What a logged write costs a vCPU; `slat bench dirty-log` measures it here
    #[arg(long, value_name = "TIME", default_value = "2us", value_parser = time::any)]
    pub logged_write: Duration,

    /// Take what a logged write costs from a report of `slat bench dirty-log` of this host
    #[arg(long, value_name = "REPORT", conflicts_with = "logged_write")]
    pub measured: Option<PathBuf>,

    /// Round trip of the link, which each remote fault of post-copy waits for
    #[arg(long, value_name = "TIME", default_value = "100us", value_parser = time::any)]
    pub round_trip: Duration,

    /// How the forecasts are printed.
    #[command(flatten)]
    pub print: PrintArgs,
}
