//! The command line of comparisons.

use clap::Args;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  slat bench split -o before/; (another kernel, another build) slat bench split -o after/
  slat compare before after
  slat compare before/results.json after/results.json --threshold 5 --fail-if-slower
  slat compare before after --format markdown      to paste into a mail
  slat compare 4k/ 2m/                              runs that differ by an option: it is listed

Exit codes:
  0    compared
  1    --fail-if-slower, and something is
  2    a file that is no results.json, or of another schema";

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

    /// The least change of a median that counts, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 2.0, value_parser = percent)]
    pub threshold: f64,

    /// Only what differs
    #[arg(long)]
    pub only_differences: bool,

    /// How it is printed
    #[arg(long, value_name = "FORMAT", default_value_t)]
    pub format: Format,

    /// Exit code 1 if anything is slower
    #[arg(long)]
    pub fail_if_slower: bool,
}

/// How a comparison is printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// A table
    #[default]
    Text,
    /// A table to paste into a mail or an issue
    Markdown,
    /// All of it, for programs
    Json,
}

fn percent(text: &str) -> Result<f64, String> {
    match text.trim_end_matches('%').parse::<f64>() {
        Ok(value) if (0.0..1000.0).contains(&value) => Ok(value),
        _ => Err("write a percentage, such as 2 or 5%".to_owned()),
    }
}
