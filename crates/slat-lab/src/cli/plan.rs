//! The command line of plans: many settings, on many hosts.

use super::TablePrintArgs;
use clap::Args;
use std::path::PathBuf;

const PLAN_EXAMPLES: &str = "\
Examples:
  slat plan plan.toml --list                    each cell's number and command line; runs nothing
  slat plan plan.toml -o results/               all cells, one after the other
  slat plan plan.toml -o results/               after a reboot: what is there is not measured anew
  slat plan plan.toml --cell 2/5 -o results/    the second of five even shares
  slat plan plan.toml --cell $SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT -o results/
  slat merge results/ -o merged/

A plan:
  version = 1
  scenarios = [\"bench dirty-log\"]   # command lines of slat
  repeats = 3                                    # each cell so often [default: 1]
  time-limit = \"10m\"                             # of each cell [default: none]

  [settings]                                     # every combination of these options
  backing = [\"4k\", \"2m\"]
  manual-protect = [\"on\", \"off\"]

  [[exclude]]                                    # but for this one
  backing = \"2m\"
  manual-protect = \"off\"

Exit codes:
  0    all cells that were asked for are measured, now or before
  1    a cell failed; the others were measured
  2    the plan, or the command line of one of its cells, cannot be right
  130  interrupted; what was measured until then is there";

/// A plan and what to do of it.
#[derive(Clone, Debug, Args)]
#[command(after_help = PLAN_EXAMPLES)]
pub struct PlanArgs {
    /// The plan
    #[arg(value_name = "FILE")]
    pub file: PathBuf,

    /// Print each cell's number and command line, and run nothing
    #[arg(long)]
    pub list: bool,

    /// Only the cell of this number, or the I-th of N even shares, from 1 [default: all]
    #[arg(long, value_name = "I[/N]")]
    pub cell: Option<Share>,

    /// Where each cell's report is written to, as cell-NNN.json
    #[arg(long, short, value_name = "DIR", default_value = "slat-plan")]
    pub output: PathBuf,

    /// Measure cells anew whose report is there
    #[arg(long)]
    pub again: bool,

    /// How it is printed.
    #[command(flatten)]
    pub print: TablePrintArgs,
}

const MERGE_EXAMPLES: &str = "\
Examples:
  slat merge results/ -o merged/                all cells of a plan, anywhere below results/
  slat merge node1/ node2/ -o merged/           two hosts: a report each, and one table
  slat merge results/cell-001.json results/cell-004.json -o merged/
  slat merge results/ -o merged/ --skip-bad     go on without files that a full disk cut short
  slat compare merged/node1 merged/node2

Exit codes:
  0    merged
  1    something could not be written
  2    a file that is no report of slat, or none at all";

/// Reports to gather.
#[derive(Clone, Debug, Args)]
#[command(after_help = MERGE_EXAMPLES)]
pub struct MergeArgs {
    /// Reports, or directories with results.json and cell-NNN.json anywhere below them
    #[arg(value_name = "DIR|FILE", required = true)]
    pub paths: Vec<PathBuf>,

    /// Where HOST/results.json, HOST/report.html, table.json and table.md are written to
    #[arg(long, short, value_name = "DIR")]
    pub output: PathBuf,

    /// Go on without files that are no report, and list them
    #[arg(long)]
    pub skip_bad: bool,

    /// Take hosts that differ in nothing but their name for one, as containers do
    #[arg(long)]
    pub any_name: bool,

    /// How it is printed.
    #[command(flatten)]
    pub print: TablePrintArgs,
}

/// The cells that `--cell` selects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// The cell of this number.
    One(usize),
    /// One of several even shares: its number, from 1, and the number of shares.
    Part(usize, usize),
}

impl std::str::FromStr for Share {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| match text.parse::<usize>() {
            Ok(0) => Err(format!("`{text}`: cells and shares are counted from 1")),
            Ok(number) => Ok(number),
            Err(_) => {
                Err("write 7, the seventh cell, or 2/5, the second of five shares".to_owned())
            }
        };
        match text.split_once('/') {
            None => number(text).map(Self::One),
            Some((part, parts)) => match (number(part)?, number(parts)?) {
                (part, parts) if part > parts => {
                    Err(format!("there is no share {part} of {parts}; the last is {parts}/{parts}"))
                }
                (part, parts) => Ok(Self::Part(part, parts)),
            },
        }
    }
}
