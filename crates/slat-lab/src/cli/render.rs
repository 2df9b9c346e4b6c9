//! The command line of `render`, which prints a run again.

use super::PrintArgs;
use clap::Args;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  slat render slat-report/                       what the run printed
  slat render results.json --markdown            to paste into a mail
  slat render results.json -o page/              report.html of a run of another host

Exit codes:
  0    printed
  2    a file that is no results.json, or of another schema";

/// A run to print again.
#[derive(Clone, Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct RenderArgs {
    /// results.json of a run, or the directory it is in
    #[arg(value_name = "FILE|DIR")]
    pub run: PathBuf,

    /// Write results.json and report.html to this directory, too
    #[arg(long, short, value_name = "DIR")]
    pub output: Option<PathBuf>,

    /// How it is printed.
    #[command(flatten)]
    pub print: PrintArgs,
}
