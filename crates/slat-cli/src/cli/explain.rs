//! The command line of `slat explain`.

use clap::Args;
use slat_lab::cli::PrintArgs;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  slat explain slat-report/
      where the time of each phase went, of the guests of a run that was written
  slat explain -- bench dirty-log --memory 64M
      run it, and explain it
  slat explain results.json --json

Exit codes:
  0    explained
  1    the run has no guests under KVM, or the command to explain failed
  2    a file that is no results.json, or of another schema";

/// Options of `slat explain`: the run to explain.
#[derive(Clone, Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct ExplainArgs {
    /// results.json of a run, or the directory it is in
    #[arg(value_name = "FILE|DIR", required_unless_present = "words")]
    pub run: Option<PathBuf>,

    /// How the explanation is printed.
    #[command(flatten)]
    pub print: PrintArgs,

    /// Words of a `slat bench` to run and explain
    #[arg(last = true, value_name = "WORDS", conflicts_with = "run")]
    pub words: Vec<String>,
}
