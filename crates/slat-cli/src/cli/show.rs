//! The command line of `slat show`.

use crate::show::ops::{Op, parse_range};
use clap::{Args, ValueEnum};
use slat::GpaRange;
use slat_bench::format::{Granule, TableFormat};
use slat_lab::size::Size;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  slat show --do map:0-2g:1g,protect:0-2g:rx,split:4m-6m:4k,write:5m+4k
      tables of the engine after four operations: a block split after a write to a logged guest
  slat show --scenario dirty-log --format arm64
  slat show --scenario age --json > age.json; slat show age.json
  slat show --kvm                               a guest of this arm64 host (root, Linux 6.12)
  slat show stage2_page_tables --page 16k       the same, copied from another host

Operations (RANGE is 0-2m, without its end, or 1g+2m, 2m from 1g on):
  map:RANGE[:SIZE[:RIGHTS]]  by leaves of at most SIZE [1g], with RIGHTS [rwx]; nobody used them
  unmap:RANGE
  protect:RANGE:RIGHTS       takes the rights that are not named
  read:, write:, execute:RANGE
                             the guest does so: the leaf is marked as a whole, and gets the right
  split:RANGE:SIZE           no larger leaf is left
  collapse:RANGE:SIZE        back to leaves of at most SIZE, where they are alike
  age:RANGE, clean:RANGE     what was used is old, what was written is clean";

/// Options of `slat show`: the tables to draw, and the output.
#[derive(Clone, Debug, Args)]
#[command(after_help = EXAMPLES)]
#[command(group = clap::ArgGroup::new("source").required(true)
    .args(["file", "operations", "scenario", "kvm"]))]
pub struct ShowArgs {
    /// A dump that --json printed, or the text of KVM's stage2_page_tables
    #[arg(value_name = "FILE")]
    pub file: Option<PathBuf>,

    /// Operations on empty tables of the engine
    #[arg(long = "do", value_name = "OP,...", value_delimiter = ',')]
    pub operations: Vec<Op>,

    /// Operations of a common scenario
    #[arg(long, value_name = "NAME")]
    pub scenario: Option<Scenario>,

    /// A guest that runs on this host, by its name in /sys/kernel/debug/kvm if there are several
    #[arg(long, value_name = "GUEST", num_args = 0..=1, default_missing_value = "")]
    pub kvm: Option<String>,

    /// Format of the engine's tables
    #[arg(long, value_name = "FORMAT", default_value = "ept", conflicts_with_all = ["file", "kvm"])]
    pub format: TableFormat,

    /// Page size of the host that KVM's text is from [default: 4k; with --kvm, this host's]
    #[arg(long, value_name = "SIZE", conflicts_with_all = ["operations", "scenario"])]
    pub page: Option<Granule>,

    /// Only the leaves that reach into this range
    #[arg(long, value_name = "RANGE", value_parser = parse_range)]
    pub range: Option<GpaRange>,

    /// Memory that one character of the maps stands for [default: what fits on a page]
    #[arg(long, value_name = "SIZE", value_parser = power_of_two)]
    pub unit: Option<Size>,

    /// Print the dump in place of the table
    #[arg(long, conflicts_with = "markdown")]
    pub json: bool,

    /// Print Markdown in place of the table, to paste into a mail or an issue
    #[arg(long)]
    pub markdown: bool,
}

/// Sequences of operations that hypervisors do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Scenario {
    /// A guest writes while it is logged: the block is split, and the pages that it wrote are
    /// writable again
    SplitAfterWrite,
    /// A migration: all memory is write-protected, a part is split, and some pages are written
    /// since
    DirtyLog,
    /// Pages that the guest used since its memory was aged
    Age,
    /// Huge pages without the right to execute, split where the guest executes
    Execute,
}

impl Scenario {
    /// Returns the operations of the scenario.
    pub fn operations(self) -> Vec<Op> {
        let text = match self {
            Self::SplitAfterWrite => {
                "map:0-2g:1g write:0-2g clean:0-2g protect:0-2g:rx split:512m+4m:4k \
                 write:513m+256k write:515m+4k"
            }
            Self::DirtyLog => {
                "map:0-2g:2m write:0-2g clean:0-2g protect:0-2g:rx split:0-640m:4k write:16m+96m \
                 write:300m+1m write:420m+64k write:600m+40m"
            }
            Self::Age => {
                "map:0-3g:2m read:0-3g age:0-3g read:128m+384m write:1g+200m read:2560m+64m"
            }
            Self::Execute => {
                "map:0-3g:1g:rw write:0-3g split:1g+64m:4k execute:1g+8m execute:1050m+1m \
                 split:2g+2m:4k execute:2g+64k"
            }
        };
        let ops = text.split_whitespace().map(|op| op.parse().expect("tested below"));
        ops.collect()
    }
}

fn power_of_two(text: &str) -> Result<Size, String> {
    let size: Size = text.parse()?;
    match size.bytes() {
        4096.. if size.bytes().is_power_of_two() => Ok(size),
        _ => Err("a power of two is needed, of 4k at least; write 2m, 64m or 1g".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::show::build::build;

    #[test]
    fn every_scenario_can_be_drawn_in_every_format_that_has_its_pages() {
        for scenario in Scenario::value_variants() {
            for kind in [TableFormat::Ept, TableFormat::Arm64K4] {
                let dump = build(kind, &scenario.operations()).unwrap();
                assert!(dump.leaves.len() > 3, "{scenario:?}");
            }
        }
    }
}
