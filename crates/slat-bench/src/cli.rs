//! The command line of `slat-bench`.

use crate::engine::Engine;
use crate::guest::age::Age;
use crate::guest::cache_toggle::CacheToggle;
use crate::guest::dirty_log::DirtyLog;
use crate::guest::execute::Execute;
use crate::guest::populate::Populate;
use crate::guest::reclaim::Reclaim;
use crate::guest::reclaim::idle::IdlePages;
use crate::guest::tables::RATIOS;
use crate::peers::Peers;
use crate::peers::check::Check;
use crate::peers::split::Split;
use crate::replay::Replay;
use clap::{CommandFactory, Parser, Subcommand};
use slat_lab::cli::Common;
use slat_lab::renderer::Renderers;
use slat_lab::run;
use slat_lab::scenario::{Choice, Entry, Program, Scenarios};
use std::process::ExitCode;

/// The scenarios of this program.
pub struct Tables;

impl Scenarios for Tables {
    const ALL: &'static [Entry] = &[
        Entry::of::<Split>(),
        Entry::of::<Engine>(),
        Entry::of::<Peers>(),
        Entry::of::<Check>(),
        Entry::of::<Replay>(),
        Entry::of::<DirtyLog>(),
        Entry::of::<Execute>(),
        Entry::of::<Age>(),
        Entry::of::<Populate>(),
        Entry::of::<Reclaim>(),
        Entry::of::<IdlePages>(),
        Entry::of::<CacheToggle>(),
    ];
}

/// Description of this program for the lab.
pub static PROGRAM: Program = Program {
    name: "slat-bench",
    version: slat_lab::VERSION,
    command: Cli::command,
    measures: |words| words.first().is_some_and(|word| Tables::has(word)),
    example: "split --backing 2m",
    renderers: || Renderers {
        each: [&[RATIOS][..], &Tables::renderers()].concat(),
        params: crate::params::PARAMS,
    },
    is_missing_feature: |_| false,
};

const AFTER_HELP: &str = "\
Examples:
  slat-bench split --memory 64G             split the tables of a 64 GiB guest, three ways
  slat-bench engine --quick                 hold the engine's operations against their limits
  slat-bench peers --linux-tree linux-6.12  and against Linux's own code and other crates
  slat-bench check --linux-tree linux-6.12  random histories, descriptor by descriptor
  slat-bench replay                         each published claim, and what this machine gives
  slat-bench execute --vcpus 4              a guest that executes from 1g blocks
  slat-bench compare before/ after/         compare two runs
  slat-bench ab --first 'split --walk bounded' --second 'split --walk batched'

Guests under the host's KVM are measured by slat: cargo run --release -- --help

Exit codes:
  0    all that was asked for was measured, or skipped with the reason shown
  1    a measurement failed, or cannot be done on this machine
  2    the command line or its values cannot be right
  5    --time-limit came first; what was measured until then has been written
  6    --fail-if-noisy: the run cannot be trusted; it has been written
  130  interrupted (Ctrl-C, SIGTERM); what was measured until then has been written";

/// Measures second-stage tables: the engine's against the machine's limits, Linux's own code and
/// other crates, and guests of the engine whose vCPUs are threads.
///
/// Needs no root, no KVM and changes no setting.
#[derive(Debug, Parser)]
#[command(name = "slat-bench", version = slat_lab::VERSION, after_help = AFTER_HELP)]
#[command(max_term_width = 100)]
#[command(subcommand_help_heading = "Commands", arg_required_else_help = true)]
pub struct Cli {
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// Commands of `slat-bench`.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Measure.
    #[command(flatten)]
    Measure(Choice<Tables>),
    /// Commands that all programs have.
    #[command(flatten)]
    Common(Common),
}

/// Runs the `slat-bench` command.
pub fn main() -> ExitCode {
    if slat_lab::first::is_first_process() {
        slat_lab::first::main();
    }
    slat_lab::short::answer(&PROGRAM);
    // `parse` ends the process with exit code 2 if the command line is wrong.
    let cli = Cli::parse();
    run::exit(
        &PROGRAM,
        match &cli.command {
            Command::Measure(scenario) => run::chosen(&PROGRAM, scenario),
            Command::Common(common) => run::common(&PROGRAM, common),
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use slat_lab::fake;
    use slat_lab::report::tables;
    use slat_lab::report::text;

    #[test]
    fn a_run_of_guests_reads_like_this() {
        let report = slat_lab::record::Report { results: fake::guests(), ..fake::report() };
        insta::assert_snapshot!(text::render(&report, &(PROGRAM.renderers)(), 120));
    }

    #[test]
    fn published_values_are_shown_next_to_1g_results_only() {
        let mut results = fake::guests();
        let shows = |results: &[_]| {
            let tables = tables::all(results, &(PROGRAM.renderers)());
            let mut cells = tables.iter().flat_map(|table| &table.rows).flatten();
            cells.any(|cell| cell == "2.90 s")
        };
        assert!(shows(&results));
        for result in &mut results {
            result.params.insert("backing".to_owned(), "2m".into());
        }
        assert!(!shows(&results));
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn commands_that_measure_are_distinguished_from_others() {
        let measures = |word: &str| (PROGRAM.measures)(&[word.to_owned()]);
        assert!(measures("split") && measures("idle"));
        assert!(!measures("compare") && !measures("bench"));
    }
}
