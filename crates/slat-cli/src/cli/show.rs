//! The command line of `slat show`.

use crate::show::ops::Op;
use clap::Args;
use slat_bench::format::TableFormat;

const EXAMPLES: &str = "\
Examples:
  slat show --do map:0-2g:1g,protect:0-2g:rx,split:4m-6m:4k,write:5m+4k
      tables of the engine after four operations: a block split after a write to a logged guest

Operations (RANGE is 0-2m, without its end, or 1g+2m, 2m from 1g on):
  map:RANGE[:SIZE[:RIGHTS]]  by leaves of at most SIZE [1g], with RIGHTS [rwx]; nobody used them
  unmap:RANGE
  protect:RANGE:RIGHTS       takes the rights that are not named
  read:, write:, execute:RANGE
                             the guest does so: the leaf is marked as a whole, and gets the right
  split:RANGE:SIZE           no larger leaf is left
  collapse:RANGE:SIZE        back to leaves of at most SIZE, where they are alike
  age:RANGE, clean:RANGE     what was used is old, what was written is clean";

/// Options of `slat show`.
#[derive(Clone, Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct ShowArgs {
    /// Operations on empty tables of the engine
    #[arg(long = "do", value_name = "OP,...", value_delimiter = ',', required = true)]
    pub operations: Vec<Op>,

    /// Format of the engine's tables
    #[arg(long, value_name = "FORMAT", default_value = "ept")]
    pub format: TableFormat,
}
