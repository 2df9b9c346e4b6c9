//! The command line of `slat`.

mod check;
mod doctor;
mod emulate;
mod explain;
mod in_turns;
mod kernel;
mod predict;
mod show;
mod tree;
mod watch;

pub use check::CheckArgs;
pub use doctor::DoctorArgs;
pub use emulate::{EmulateArgs, KernelChoice, PartsArgs};
pub use explain::ExplainArgs;
pub use in_turns::{BisectArgs, CountedArgs, InTurnsArgs, ReviewArgs};
pub use kernel::{
    BootArgs, BuildArgs, CallsArgs, KernelAction, KernelArgs, ListArgs, MachineArgs, PatchArgs,
    TestArgs,
};
pub use predict::{PredictArgs, Window, WriteOrder, Zero};
pub use show::ShowArgs;
pub use tree::{ConfigArgs, EditsArgs, PatchesArgs, TreeArgs, TreeChoice};
pub use watch::WatchArgs;

use crate::kvm::{Guests, Tunes};
use clap::{Args, Parser, Subcommand};
use slat_lab::cli::{Common, PrintArgs};
use slat_lab::scenario::Choice;
use std::path::PathBuf;

const AFTER_HELP: &str = "\
Examples:
  slat                                     measure this host, write slat-report/
  slat --quick                             the same on small sizes, in seconds
  slat doctor                              what this host can measure, and how to change the rest
  slat bench dirty-log -v 2                log the dirty pages of a guest with 2 vCPUs
  slat bench migrate --dirty-rate 200MiB/s --link 10Gbit/s
                                           migrate a running guest, in each way of logging
  slat check                               does this host's KVM lose a write? a minute of trying
  slat watch                               what it costs the guests that run here now
  slat explain slat-report/                where the time of its guests went
  slat tune dirty-log                      which way of logging stalls a guest least here
  slat compare before/ after/              compare two runs
  slat noise -- bench dirty-log            how far two runs of one command differ
  slat emulate --kernel debian-6.1 -- bench dirty-log --memory 64M
                                           the same in an emulated machine: exact counts
  slat kernel list                         edits to Linux's KVM, to build, boot and measure
  slat kernel ab tree:debian-6.12 --patch my.patch -- bench dirty-log -v 1 -b 32M
                                           does a patch make KVM slower? boots in turns
  slat completions bash > ~/.local/share/bash-completion/completions/slat

The engine's own tables are measured by slat-bench: cargo run --release -p slat-bench -- --help

Exit codes:
  0    all that was asked for was measured, or skipped with the reason shown
  1    a measurement failed, or a guest went wrong; slat check: KVM lost a write
  2    the command line or its values cannot be right
  3    an emulated machine gave no report
  4    this host cannot do that, and nothing was measured; --json has the reason in `skipped`
  5    --time-limit came first; what was measured until then has been written
  6    --fail-if-noisy: the run cannot be trusted; it has been written
  130  interrupted (Ctrl-C, SIGTERM); what was measured until then has been written";

/// What memory management costs guests, measured from user space.
///
/// Without a subcommand, measures what this host's KVM costs its guests, and what the ideas that
/// Slat grew from could save. Needs no root and changes no setting.
#[derive(Debug, Parser)]
#[command(name = "slat", version = slat_lab::VERSION, after_help = AFTER_HELP)]
#[command(args_conflicts_with_subcommands = true)]
#[command(max_term_width = 100, subcommand_help_heading = "Commands")]
pub struct Cli {
    /// What to do instead of the main job.
    #[command(subcommand)]
    pub command: Option<Command>,

    /// Options of the main job.
    #[command(flatten)]
    pub main: MainArgs,
}

/// Options of the main job, which measures what memory management costs guests on this host, and
/// what it could cost.
#[derive(Clone, Debug, Default, Args)]
pub struct MainArgs {
    /// Where to write results.json and report.html
    #[arg(long, short, value_name = "DIR", default_value = "slat-report")]
    pub output: PathBuf,

    /// Small sizes, a few seconds: shows that it works, gives no figures to quote
    #[arg(long)]
    pub quick: bool,

    /// How the report is printed.
    #[command(flatten)]
    pub print: PrintArgs,

    /// Exit with code 6 if the run cannot be trusted, as the report's first line says
    #[arg(long)]
    pub fail_if_noisy: bool,
}

/// Subcommands of `slat`.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Measure one scenario on a guest under this host's KVM
    #[command(arg_required_else_help = true)]
    Bench {
        /// The scenario to measure.
        #[command(subcommand)]
        scenario: Choice<Guests>,
    },
    /// Check what this host can measure, why not the rest, and the commands that would change it
    Doctor(DoctorArgs),
    /// Run random histories of a guest's memory: does this host's KVM lose a write?
    Check(CheckArgs),
    /// Watch the guests that run on this host now, from outside
    Watch(WatchArgs),
    /// Say where the time of a run's guests went: faults, calls, waiting, and what is left
    #[command(arg_required_else_help = true)]
    Explain(ExplainArgs),
    /// Find the setting that costs guests on this host the least
    #[command(arg_required_else_help = true)]
    Tune {
        /// The scenario whose settings to try.
        #[command(subcommand)]
        what: Choice<Tunes>,
    },
    /// Compute a migration from figures: no guest, no root, no KVM
    #[command(arg_required_else_help = true)]
    Predict(PredictArgs),
    /// Draw second-stage tables: leaf sizes, rights, what was used and written
    Show(ShowArgs),
    /// Run in an emulated machine: another kernel or architecture, with a real TDP MMU or stage 2
    Emulate(EmulateArgs),
    /// Build Linux with edits to its KVM, boot it, test it, or write the edits as patches
    #[command(arg_required_else_help = true)]
    Kernel(KernelArgs),
    /// Print the JSON schema of what a command prints, or the names of all
    Schema {
        /// What prints the JSON [default: list them]
        #[arg(value_parser = crate::schema::names())]
        name: Option<String>,
    },
    /// Run a program and count the calls of kernel functions meanwhile
    #[command(hide = true)]
    Calls(CallsArgs),
    /// Subcommands that every program of the laboratory has.
    #[command(flatten)]
    Common(Common),
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_short_help_of_each_command_is_one_screen() {
        fn check(command: &clap::Command) {
            let help = command.clone().render_help().to_string();
            let lines = help.lines().count();
            // A line to be typed is not broken.
            let broken = help.lines().filter(|line| !line.starts_with("Usage:"));
            let wide = broken.map(|line| line.chars().count()).max();
            assert!(lines <= 24 && wide <= Some(80), "{lines} lines of {wide:?}:\n{help}");
            let is_real = |sub: &&clap::Command| sub.get_name() != "help";
            command.get_subcommands().filter(is_real).for_each(check);
        }
        check(&slat_lab::short::shorten(Cli::command()));
    }
}
