//! The command line of the question how much could be taken from a guest.

use super::reclaim::{SwapPlace, swap_place};
use super::{AccessPattern, OutputArgs, TablesArgs};
use crate::size::Size;
use clap::Args;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  slat bench idle
      four patterns: how long pages are idle, and what taking those that come back rarely costs
  slat bench idle --pattern zipf --may-return 0.1,0.5,1,2,5
  slat bench idle --pattern trace --trace pages.txt --interval 0.25 --format arm64-4k";

/// How much could be taken from a guest, and does the forecast hold.
#[derive(Clone, Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct IdleArgs {
    /// Its tables.
    #[command(flatten)]
    pub tables: TablesArgs,

    /// The guest's memory, a multiple of 2m [default: 64m]
    #[arg(long, short = 'b', value_name = "SIZE")]
    pub memory: Option<Size>,

    /// In which order it uses its pages [default: zipf,phase,scan,trace]
    #[arg(long, value_name = "PATTERN,...", value_delimiter = ',')]
    pub pattern: Vec<AccessPattern>,

    /// A recorded trace, for --pattern trace, as `slat bench reclaim` reads it [default: one of GNU sort]
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,

    /// Accesses between two walks, in multiples of the guest's pages
    #[arg(long, value_name = "N", default_value_t = 0.5, value_parser = interval)]
    pub interval: f64,

    /// Walks before pages are taken, and after
    #[arg(long, value_name = "N", default_value_t = 48, value_parser = clap::value_parser!(u32).range(2..=1000))]
    pub walks: u32,

    /// How many pages may come back between two walks, in percent of the guest's: a guest for each
    #[arg(long, value_name = "PERCENT,...", value_delimiter = ',', default_value = "1,2,5", value_parser = percent)]
    pub may_return: Vec<f64>,

    /// Do not invalidate at the end of a walk: what a TLB holds looks idle
    #[arg(long)]
    pub stale: bool,

    /// Where pages go: memory of this process, or a file without a name in a directory
    #[arg(long, value_name = "memory|DIR", default_value = "memory", value_parser = swap_place)]
    pub swap: SwapPlace,

    /// 8 MiB and few walks: shows that it works, gives no figures to quote
    #[arg(long)]
    pub quick: bool,

    /// Where the results go.
    #[command(flatten)]
    pub out: OutputArgs,
}

impl IdleArgs {
    /// What `slat bench idle` does by itself.
    #[cfg(test)]
    pub fn of(format: super::TableFormat, quick: bool) -> Self {
        Self {
            tables: TablesArgs::of(format),
            memory: None,
            pattern: Vec::new(),
            trace: None,
            interval: 0.5,
            walks: 48,
            may_return: vec![1.0, 2.0, 5.0],
            stale: false,
            swap: SwapPlace::Memory,
            quick,
            out: OutputArgs::default(),
        }
    }
}

fn within(text: &str, least: f64, most: f64) -> Result<f64, String> {
    let number: Option<f64> = text.parse().ok().filter(|number| (least..=most).contains(number));
    number.ok_or_else(|| format!("a number from {least} to {most}"))
}

fn interval(text: &str) -> Result<f64, String> {
    within(text, 0.01, 1000.0)
}

fn percent(text: &str) -> Result<f64, String> {
    within(text, 0.0, 100.0)
}
