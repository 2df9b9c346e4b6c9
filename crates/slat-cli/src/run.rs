//! Runs commands, from the command line to the exit code.

mod check;
mod doctor;
mod emulate;
mod explain;
mod kernel;
pub mod main_job;
mod predict;
mod watch;

use crate::cli::{Cli, Command};
use crate::show::build::build;
use crate::{PROGRAM, schema};
use clap::Parser;
use slat_lab::report::text::grid;
use slat_lab::run::{self, output};
use slat_lab::session::Session;
use std::process::ExitCode;

/// Runs the `slat` command, and returns its exit code.
pub fn main() -> ExitCode {
    if slat_lab::first::is_first_process() {
        slat_lab::first::main();
    }
    slat_lab::short::answer(&PROGRAM);
    match Cli::try_parse() {
        Ok(cli) => run::exit(&PROGRAM, execute(&cli)),
        Err(error) => {
            // A wrong command line ends here with exit code 2. `--help` and `--version` are also
            // errors of clap; they end with 0.
            error.exit()
        }
    }
}

fn execute(cli: &Cli) -> anyhow::Result<ExitCode> {
    match &cli.command {
        None => main_job::main_job(&cli.main, &mut Session::interactive()?),
        Some(Command::Bench { scenario }) => run::chosen(&PROGRAM, scenario),
        Some(Command::Tune { what }) => run::chosen(&PROGRAM, what),
        Some(Command::Doctor(args)) => doctor::doctor(args),
        Some(Command::Check(args)) => check::check(args),
        Some(Command::Watch(args)) => watch::watch(args),
        Some(Command::Explain(args)) => explain::explain(&PROGRAM, args),
        Some(Command::Emulate(args)) => emulate::emulate(args),
        Some(Command::Kernel(args)) => kernel::kernel(args),
        Some(Command::Calls(args)) => kernel::calls(args),
        Some(Command::Predict(args)) => predict::predict(args),
        Some(Command::Schema { name }) => {
            output::print(&schema::text(name.as_deref()))?;
            Ok(ExitCode::SUCCESS)
        }
        Some(Command::Show(args)) => {
            let mut text = String::new();
            grid(&mut text, &build(args.format, &args.operations)?, output::width());
            output::print(&text)?;
            Ok(ExitCode::SUCCESS)
        }
        Some(Command::Common(common)) => run::common(&PROGRAM, common),
    }
}
