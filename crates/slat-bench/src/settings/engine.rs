//! Options of the engine's operations.

use crate::format::{Granule, TableFormat};
use crate::settings::peers::LinuxArgs;
use clap::{Args, ValueEnum};
use slat_lab::cli::count;
use slat_lab::failure::bad_input;
use slat_lab::size::Size;

/// Examples of command lines.
pub const EXAMPLES: &str = "\
Examples:
  slat-bench engine
      every operation on the tables of 8 GiB and of 64 GiB, three to five minutes
  slat-bench engine --quick
      the same on 1 GiB, in seconds: shows that it works, gives no figures to quote
  slat-bench engine --only protect,age --rounds 15
  slat-bench engine --only beside --output beside/
      faults beside ageing, with every sample in beside/results.json
  slat-bench engine --target linux-source --linux-tree vanilla=a --linux-tree patched=b
      beside two trees of Linux's own code
  slat-bench engine --format arm64-4k,ept,npt,riscv --only split,protect,age,map --memory 8G
      the formats beside the first of them, all in turns";

/// Options of the engine's operations.
#[derive(Clone, Debug, Args)]
pub struct EngineArgs {
    /// Memory of the guest; small measurements take an eighth of it [default: 64G]
    #[arg(long, short = 'b', value_name = "SIZE")]
    pub memory: Option<Size>,

    /// Only these parts [default: all]
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    pub only: Vec<Part>,

    /// Samples of each variant, taken in turns; the slow ones take fewer [default: 9]
    #[arg(long, value_name = "N", value_parser = count::rounds())]
    pub rounds: Option<u32>,

    /// 1 GiB and three rounds unless other options set them: takes a few seconds
    #[arg(long)]
    pub quick: bool,

    /// Formats to compare with the first of them and with the machine's limits [default: arm64-4k
    /// with the limits, EPT where tables have flags]
    #[arg(long, value_name = "FORMAT,...", value_delimiter = ',')]
    pub format: Vec<TableFormat>,

    /// Smallest page of the tables, for the comparison with Linux's
    #[arg(long, value_name = "SIZE", default_value = "4k", conflicts_with = "format")]
    pub granule: Granule,

    /// Linux's tables.
    #[command(flatten)]
    pub linux: LinuxArgs,
}

impl EngineArgs {
    /// Returns the guest's memory.
    pub fn memory(&self) -> Size {
        self.memory.unwrap_or(Size(if self.quick { 1 << 30 } else { 64 << 30 }))
    }

    /// Returns the number of samples of each variant.
    pub fn rounds(&self) -> u32 {
        self.rounds.unwrap_or(if self.quick { 3 } else { 9 })
    }

    /// Returns the granule of tables that are compared with Linux's.
    ///
    /// # Errors
    /// Linux's code has no tables of the format, or the user gave more than one format.
    pub fn granule(&self) -> anyhow::Result<Granule> {
        match self.format[..] {
            [] => Ok(self.granule),
            [format] => format.granule(),
            _ => Err(bad_input("--target linux-source takes one --format")),
        }
    }

    /// Returns whether the user asked for the part.
    pub fn wants(&self, part: Part) -> bool {
        self.only.is_empty() || self.only.contains(&part)
    }
}

/// A part of the engine's operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Part {
    /// Split 2m and 1g blocks, by three kinds of stores
    Split,
    /// Split with two threads
    SplitThreads,
    /// Write-protect pages, writable or protected already
    Protect,
    /// Age pages, young or old
    Age,
    /// Age by the accessed bits of tables (EPT, NPT)
    AgeTables,
    /// Map page by page
    Map,
    /// Map page by page with two threads
    MapThreads,
    /// Translate random addresses
    Translate,
    /// Enter and leave the tables, with one thread and with two
    Enter,
    /// Unmap pages
    Unmap,
    /// Clear a dirty log: protect the pages that its bitmap names
    Clear,
    /// Give back the right to write page by page, as write faults do
    Relax,
    /// Clean the caches of all mapped memory
    Flush,
    /// Map and protect in inactive tables, which no CPU walks
    Inactive,
    /// Time of faults while another thread ages
    Beside,
}

slat_lab::display_as_written!(Part);
