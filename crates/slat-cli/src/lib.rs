//! The `slat` command, which measures from user space what memory management costs guests.

pub mod bisect;
pub mod brief;
pub mod cli;
pub mod doctor;
pub mod emulate;
pub mod explain;
mod forecast;
pub mod ideas;
pub mod in_turns;
pub mod kernel;
pub mod kvm;
pub mod needs;
pub mod predict;
mod renderers;
pub mod review;
pub mod run;
pub mod selftests;
pub mod show;
pub mod watch;

pub use run::main;

use clap::CommandFactory;
use slat_lab::scenario::Program;

/// Name, version and command line of this program, as `slat-lab` uses them.
pub static PROGRAM: Program = Program {
    name: "slat",
    version: env!("CARGO_PKG_VERSION"),
    command: cli::Cli::command,
    measures: |words| words.first().is_some_and(|word| word == "bench"),
    example: "bench dirty-log --memory 1g",
    renderers: renderers::renderers,
    is_missing_feature: |error| {
        error.downcast_ref().is_some_and(slat_kvm::Error::is_missing_feature)
    },
};
