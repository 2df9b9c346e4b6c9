//! What a person would otherwise type by hand: set-up, tests and checks of the workspace.

mod e2e;
mod setup;
mod stages;
mod test;

use clap::{Parser, Subcommand};
use stages::Stage;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  cargo xtask test                   everything; what CI runs
  cargo xtask test formatting clippy
  cargo xtask setup                  install what the tests need, and stop";

/// Set-up, tests and checks of the workspace.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Check and test everything, stage by stage, and print what each took and what was skipped
    ///
    /// A failing stage does not stop the next ones. With CI=true in the environment, a stage whose
    /// tools could be installed and are missing fails where it would otherwise be skipped.
    Test {
        /// Only these stages [default: all]
        stages: Vec<Stage>,
    },
    /// Install what the tests need and this machine lacks
    Setup,
}

fn main() -> ExitCode {
    let done = match Cli::parse().task {
        Task::Test { stages } => test::run(&stages),
        Task::Setup => setup::all(),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The folder of the workspace.
fn root() -> &'static Path {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().expect("xtask is a folder of the workspace")
}

/// Where the workspace is built.
fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| root().join("target"), |dir| root().join(dir))
}

/// Whether nobody is there to install what is missing.
fn in_ci() -> bool {
    std::env::var("CI").is_ok_and(|value| value == "true" || value == "1")
}
