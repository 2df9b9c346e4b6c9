//! The command line of comparisons.

use super::PrintArgs;
use crate::compare::{DRIFT, IN_TURNS};
use clap::Args;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  slat compare before after                     folders of --output: another kernel, another build
  slat compare before/results.json after/results.json --threshold 5 --fail-if-slower
  slat compare before after --markdown               to paste into a mail
  slat compare one two                          runs that differ by an option: it is listed

Exit codes:
  0    compared
  1    --fail-if-slower, and something is
  2    nothing can be compared, or no time with --fail-if-slower; a file that is no results.json, or
       of another schema";

/// Two runs to hold against each other.
#[derive(Clone, Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct CompareArgs {
    /// results.json of the first run, or the directory it is in
    #[arg(value_name = "FIRST")]
    pub first: PathBuf,

    /// results.json of the second run, or the directory it is in
    #[arg(value_name = "SECOND")]
    pub second: PathBuf,

    /// The least change that counts, in percent: the whole interval has to lie beyond; below the
    /// default it may be the machine's drift between two processes, which `ab` takes out
    #[arg(long, value_name = "PERCENT", default_value_t = DRIFT, value_parser = percent)]
    pub threshold: f64,

    /// Every result, not those that differ and as many more as make a dozen
    #[arg(long)]
    pub all: bool,

    /// Only what differs
    #[arg(long, conflicts_with = "all")]
    pub only_differences: bool,

    /// How it is printed.
    #[command(flatten)]
    pub print: PrintArgs,

    /// Exit code 1 if anything is slower; `noise --check` tells how often it is wrong here
    #[arg(long)]
    pub fail_if_slower: bool,
}

const AB_EXAMPLES: &str = "\
Examples:
  slat ab --first 'WORDS' --second 'OTHER WORDS' --pairs 5
      WORDS are those of a scenario, as they follow the program's name
  sudo slat ab --first 'WORDS' --second 'WORDS' --while-second 'watch --all'
      what a guest loses while it is watched
  slat ab --pairs 3 --first 'emulate --kernel debian-6.1 --count-instructions -- WORDS' \\
      --second 'emulate --kernel debian-6.12 --count-instructions -- WORDS'";

/// Two command lines, in processes of their own, in turns.
#[derive(Clone, Debug, Args)]
#[command(after_help = AB_EXAMPLES)]
pub struct AbArgs {
    /// The words of the first
    #[arg(long, value_name = "WORDS")]
    pub first: String,

    /// The words of the second
    #[arg(long, value_name = "WORDS")]
    pub second: String,

    /// The words of a command that runs beside the second from a second before it on, and not
    /// beside the first; it gets Ctrl-C when the second ends
    #[arg(long, value_name = "WORDS")]
    pub while_second: Option<String>,

    /// Exit code 1 if anything of the second is slower
    #[arg(long)]
    pub fail_if_slower: bool,

    /// How it is repeated and printed.
    #[command(flatten)]
    pub how: Repeat,
}

const NOISE_EXAMPLES: &str = "\
Examples:
  slat noise -- WORDS
      what this machine makes of a scenario, in twenty-two processes
  slat noise --check 100 --slowdown 10 -- WORDS
      how often `compare` is wrong of it on this machine, and how often it finds 10 %
  slat noise --check 100 --in-turns -- WORDS
      the same of `ab`";

/// One command line against itself.
#[derive(Clone, Debug, Args)]
#[command(after_help = NOISE_EXAMPLES)]
pub struct NoiseArgs {
    /// How it is repeated and printed.
    #[command(flatten)]
    pub how: Repeat,

    /// Instead: so many comparisons, as `compare` makes them of two processes, or with --in-turns
    /// as `ab` does; says how many would fail, and how many find a slowdown
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub check: Option<u32>,

    /// Check what `ab` says of --pairs processes in turns
    #[arg(long, requires = "check")]
    pub in_turns: bool,

    /// By how much --check makes one side of each pair slower, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 10.0, value_parser = percent)]
    pub slowdown: f64,

    /// Its words
    #[arg(last = true, required = true, value_name = "WORDS")]
    pub words: Vec<String>,
}

/// How command lines are repeated, and what comes of it printed.
#[derive(Clone, Debug, Args)]
pub struct Repeat {
    /// How often the order A, B, B, A is gone through, after one run of each that warms up
    #[arg(long, value_name = "N", default_value_t = 5)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=100))]
    pub pairs: u32,

    /// The least change that counts, in percent: the whole interval has to lie beyond
    #[arg(long, value_name = "PERCENT", default_value_t = IN_TURNS, value_parser = percent)]
    pub threshold: f64,

    /// How it is printed.
    #[command(flatten)]
    pub print: PrintArgs,
}

fn percent(text: &str) -> Result<f64, String> {
    match text.trim_end_matches('%').parse::<f64>() {
        Ok(value) if (0.0..1000.0).contains(&value) => Ok(value),
        _ => Err("write a percentage, such as 2 or 5%".to_owned()),
    }
}
