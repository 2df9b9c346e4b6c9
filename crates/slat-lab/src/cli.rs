//! The part of the command line that all programs have in common.

mod compare;
pub mod count;
mod cpus;
mod output;
mod render;
pub mod time;

pub use compare::{AbArgs, CompareArgs, NoiseArgs, Repeat};
pub use cpus::Cpus;
pub use output::{Format, OutputArgs, PrintArgs};
pub use render::RenderArgs;

use clap::{Subcommand, ValueEnum};
use serde_json::{Map, Value};
use std::path::PathBuf;

/// What is done with results, and how command lines are repeated.
#[derive(Debug, Subcommand)]
pub enum Common {
    /// Compare two runs: faster, slower, or no difference shown
    Compare(CompareArgs),
    /// Run two command lines in turns, each in processes of its own, and compare them
    Ab(AbArgs),
    /// Compare the machine with itself: how far two runs of one command line differ
    Noise(NoiseArgs),
    /// Print the report of a run again, from its results.json
    Render(RenderArgs),
    /// Print a completion script for a shell
    Completions {
        /// The shell to print it for
        shell: clap_complete::Shell,
    },
    /// Print a manual page, for `man -l -`, or write all pages
    Manual {
        /// The subcommand, as in `bench dirty-log` [default: the program]
        #[arg(conflicts_with = "all")]
        subcommand: Vec<String>,
        /// Write the pages of the program and of its subcommands into this folder
        #[arg(long, value_name = "DIR")]
        all: Option<PathBuf>,
    },
}

/// On or off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Switch {
    /// On
    #[default]
    On,
    /// Off
    Off,
}

impl Switch {
    /// Returns whether it is on.
    pub const fn is_on(self) -> bool {
        matches!(self, Self::On)
    }
}

/// Returns a parameter of results, of which there is one if its value is written as on the command
/// line.
pub fn param_of<T: ValueEnum>(params: &Map<String, Value>, name: &str) -> Option<T> {
    T::from_str(params.get(name)?.as_str()?, false).ok()
}

/// Prints the name that is written on the command line, which is also the one in `results.json`.
#[macro_export]
macro_rules! display_as_written {
    ($($name:ty),* $(,)?) => {$(
        impl ::std::fmt::Display for $name {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                let value = ::clap::ValueEnum::to_possible_value(self);
                f.pad(value.expect("no variant is hidden").get_name())
            }
        }
    )*};
}

display_as_written!(Switch);
