//! The commands of every program: run a scenario, show its results, compare.

mod ascii;
mod manual;
pub mod output;

use crate::alternate;
use crate::cli::{Common, CompareArgs, Format, NoiseArgs, OutputArgs, RenderArgs, Repeat};
use crate::compare::{self, Comparison, Run};
use crate::failure::{self, bad_input};
use crate::host::Host;
use crate::numbers::three_digits;
use crate::record::{Measurement, Report, SCHEMA};
use crate::renderer::Renderers;
use crate::report::comparison::{self, Rows};
use crate::report::{json, markdown, text};
use crate::scenario::{Choice, Program};
use crate::session::Session;
use crate::stats;
use crate::trust::Begin;
use output::Output;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// The exit code of a run that --fail-if-noisy rejects.
pub const NOISY: u8 = 6;

/// Ends a program: prints an error to stderr, and returns its exit code.
pub fn exit(program: &Program, result: anyhow::Result<ExitCode>) -> ExitCode {
    result.unwrap_or_else(|error| {
        eprintln!("{}: {error:#}", program.name);
        exit_code(program, &error)
    })
}

/// Returns the exit code of an error, which tells a host that cannot from a measurement that
/// failed.
fn exit_code(program: &Program, error: &anyhow::Error) -> ExitCode {
    match cannot_here(program, error) {
        true => ExitCode::from(failure::CANNOT),
        false => failure::exit_code(error),
    }
}

fn cannot_here(program: &Program, error: &anyhow::Error) -> bool {
    let is_refusal = matches!(error.downcast_ref(), Some(failure::Failure::CannotRun(_)));
    is_refusal || (program.is_missing_feature)(error)
}

/// Runs a command that all programs have.
///
/// # Errors
/// The errors of the command.
pub fn common(program: &'static Program, command: &Common) -> anyhow::Result<ExitCode> {
    match command {
        Common::Compare(args) => compare(program, args),
        Common::Ab(args) => {
            let (first, second) = (words(&args.first)?, words(&args.second)?);
            let beside = args.while_second.as_deref().map(words).transpose()?;
            let beside = beside.as_deref();
            alternate(program, &first, &second, beside, &args.how, args.fail_if_slower)
        }
        Common::Noise(args) => match args.check {
            Some(pairs) => validate(program, args, pairs),
            None => alternate(program, &args.words, &args.words, None, &args.how, false),
        },
        Common::Render(args) => render(program, args),
        Common::Completions { shell } => {
            let mut script = Vec::new();
            let command = &mut (program.command)();
            clap_complete::generate(*shell, command, program.name, &mut script);
            output::print(&String::from_utf8_lossy(&script))?;
            Ok(ExitCode::SUCCESS)
        }
        Common::Manual { subcommand, all } => {
            match all {
                Some(folder) => manual::write(program, folder)?,
                None => manual::print(program, subcommand)?,
            }
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Runs the scenario that was chosen, and shows its results.
///
/// # Errors
/// The errors of the scenario.
pub fn chosen<L>(program: &Program, chosen: &Choice<L>) -> anyhow::Result<ExitCode> {
    bench(program, &chosen.out, |session| chosen.run(session))
}

/// Runs a scenario, and shows its results.
///
/// # Errors
/// The errors of the scenario; results cannot be written.
pub fn bench(
    program: &Program,
    args: &OutputArgs,
    scenario: impl FnOnce(&mut Session) -> anyhow::Result<Vec<Measurement>>,
) -> anyhow::Result<ExitCode> {
    // Checks that can fail come before minutes are spent on measuring.
    let output = args.output.as_deref().map(Output::prepare).transpose()?;
    let host = Host::read();
    let begin = Begin::now();
    let mut session = Session::interactive()?;
    args.time_limit.into_iter().for_each(|time| session.limit(time));
    let results = match scenario(&mut session) {
        Err(error) if failure::is_interruption(&error) => Vec::new(),
        Err(error) if args.print.json && !failure::is_bad_input(&error) => {
            session.finish();
            return failed(program, host, &begin, error, &mut session);
        }
        results => results?,
    };
    session.finish();
    let report = report(program, host, &begin, results, &mut session);
    show(program, &report, args.print.format(), output)?;
    Ok(match report.partial {
        true if session.out_of_time() => ExitCode::from(5),
        true => ExitCode::from(130),
        false if session.failed() => ExitCode::FAILURE,
        // All that was asked for was skipped.
        false if report.results.is_empty() => ExitCode::from(failure::CANNOT),
        false if args.fail_if_noisy && report.is_noisy() => ExitCode::from(NOISY),
        false => ExitCode::SUCCESS,
    })
}

/// Prints the JSON of a run that measured nothing, for programs that read only this.
fn failed(
    program: &Program,
    host: Host,
    begin: &Begin,
    error: anyhow::Error,
    session: &mut Session,
) -> anyhow::Result<ExitCode> {
    let words: Vec<_> =
        std::env::args().skip(1).take_while(|word| !word.starts_with('-')).collect();
    let (what, reason) = (words.join(" "), format!("{error:#}"));
    match cannot_here(program, &error) {
        true => {
            session.note(&format!("{}: {reason}", program.name));
            session.skip(what, reason);
        }
        false => session.fail(what, reason),
    }
    show(program, &report(program, host, begin, Vec::new(), session), Format::Json, None)?;
    Ok(exit_code(program, &error))
}

/// Prints a run again, with the answers as this version of the program finds them.
fn render(program: &Program, args: &RenderArgs) -> anyhow::Result<ExitCode> {
    let report = read(program, &args.run)?;
    let output = args.output.as_deref().map(Output::prepare).transpose()?;
    show(program, &report, args.print.format(), output)?;
    Ok(ExitCode::SUCCESS)
}

/// Reads a report from a file, and finds its answers anew.
///
/// # Errors
/// There is no such file, or it is no report, or a report of another schema.
pub fn read(program: &Program, path: &Path) -> anyhow::Result<Report> {
    let file = if path.is_dir() { path.join(crate::files::RESULTS) } else { path.to_owned() };
    let report: Report = serde_json::from_value(compare::read_report(&file)?)
        .map_err(|error| bad_input(format!("{}: {error}", file.display())))?;
    let verdict = crate::renderer::verdict(&report.results, &(program.renderers)().each);
    Ok(Report { verdict, ..report })
}

/// Compares two runs.
fn compare(program: &Program, args: &CompareArgs) -> anyhow::Result<ExitCode> {
    let (first, second) = (Run::read(&args.first)?, Run::read(&args.second)?);
    let comparison = compare::compare(&first, &second, args.threshold / 100.0);
    let rows = match (args.all, args.only_differences) {
        (true, _) => Rows::All,
        (_, true) => Rows::Differing,
        _ => Rows::Dozen,
    };
    if !comparison.pairs.is_empty() {
        show_comparison(program, &comparison, rows, args.print.format())?;
    }
    if !comparison.compares() {
        return Err(bad_input(format!(
            "nothing of these runs can be compared: they have no result in common, too few guests \
             (-r {} without --quick takes more), or the machines differ; take runs of one command \
             line and one machine",
            compare::LEAST
        )));
    }
    if args.fail_if_slower && !comparison.judges() {
        return Err(bad_input(format!(
            "nothing of these runs can be judged, so --fail-if-slower cannot tell; take -r {least} \
             or more without --quick, on one machine; of an emulated machine {least} boots \
             (`emulate --boots {least}`)",
            least = compare::LEAST
        )));
    }
    Ok(if args.fail_if_slower && comparison.slower() {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

fn show_comparison(
    program: &Program,
    comparison: &Comparison,
    rows: Rows,
    format: Format,
) -> anyhow::Result<()> {
    let tables = comparison::tables(comparison, rows, (program.renderers)().params);
    output::print(&match format {
        Format::Json => serde_json::to_string_pretty(comparison)? + "\n",
        Format::Markdown => tables.iter().map(markdown::table).collect(),
        Format::Text => {
            let mut text = String::new();
            tables.iter().for_each(|table| text::grid(&mut text, table, output::width()));
            text
        }
    })
}

/// Runs two command lines in turns, and compares them.
fn alternate(
    program: &Program,
    first: &[String],
    second: &[String],
    beside: Option<&[String]>,
    how: &Repeat,
    fail_if_slower: bool,
) -> anyhow::Result<ExitCode> {
    let mut session = Session::interactive()?;
    let (first, second) =
        alternate::alternate(program, first, second, beside, how.pairs, &mut session)?;
    let comparison = compare::compare(&first, &second, how.threshold / 100.0);
    show_comparison(program, &comparison, Rows::Dozen, how.print.format())?;
    if fail_if_slower && !comparison.judges() {
        return Err(bad_input("no time can be compared, so --fail-if-slower cannot tell"));
    }
    Ok(if fail_if_slower && comparison.slower() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Thresholds that are checked, in per cent.
const THRESHOLDS: [f64; 4] = [2.0, 5.0, 10.0, 20.0];

/// Prints how often comparisons of a command line with itself are wrong, and how often they find a
/// slowdown, by threshold.
fn validate(program: &Program, args: &NoiseArgs, count: u32) -> anyhow::Result<ExitCode> {
    let mut session = Session::interactive()?;
    let words = &args.words;
    let taken: Vec<(Run, Run)> = match args.in_turns {
        true => {
            let one =
                |_| alternate::alternate(program, words, words, None, args.how.pairs, &mut session);
            (0..count).map(one).collect::<anyhow::Result<_>>()?
        }
        false => alternate::pairs(program, words, count, &mut session)?,
    };
    let by = match args.in_turns {
        true => format!("{} processes a side in turns", 2 * args.how.pairs),
        false => "one process a side".to_owned(),
    };
    let slowdown = args.slowdown;
    let mut text = format!(
        "{count} comparisons of `{}` with itself, {by}:\n  threshold   would fail   find \
         {slowdown} % more\n",
        words.join(" "),
    );
    for threshold in THRESHOLDS {
        let slower =
            |first: &Run, second: &Run| compare::compare(first, second, threshold / 100.0).slower();
        let failed = taken.iter().filter(|(first, second)| slower(first, second)).count();
        let later = |second: &Run| second.clone().slowed(slowdown / 100.0);
        let found = taken.iter().filter(|(first, second)| slower(first, &later(second))).count();
        text += &format!("  {threshold:>7} %   {failed:>10}   {found:>15}\n");
    }
    let threshold = args.how.threshold / 100.0;
    let all = taken.iter().map(|(first, second)| compare::compare(first, second, threshold));
    let all: Vec<Comparison> = all.collect();
    if !args.in_turns {
        text += "Two processes that take no turns cannot tell less than the machine drifts between \
                 them: --in-turns checks what `ab` finds.\n";
    } else if let Some((needed, first)) = needed(&all).zip(all.first()) {
        text += &format!(
            "To show {} % beyond {} % in nine of ten, the steadiest row needs {needed} processes a \
             side: --pairs {}.\n",
            three_digits(first.change * 100.0),
            args.how.threshold,
            needed.div_ceil(2)
        );
    }
    if !all.iter().any(Comparison::judges) {
        text += &format!("No time was judged: fewer than {} groups a side.\n", compare::LEAST);
    }
    output::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// Returns the number of groups per side that the steadiest row needs. For each row, the median
/// over all comparisons counts: a single comparison's least would be a row that happened to spread
/// least.
fn needed(all: &[Comparison]) -> Option<u32> {
    let mut rows: BTreeMap<_, Vec<f64>> = BTreeMap::new();
    for pair in all.iter().flat_map(|comparison| &comparison.pairs) {
        let row = (&pair.what, serde_json::Value::from(pair.params.clone()).to_string());
        rows.entry(row).or_default().extend(pair.groups_needed.map(f64::from));
    }
    let middles = rows.values().filter_map(|needed| stats::median(needed));
    middles.min_by(f64::total_cmp).map(|groups| groups.ceil() as u32)
}

/// Splits a command line into words by the shell's rules.
fn words(text: &str) -> anyhow::Result<Vec<String>> {
    shlex::split(text).ok_or_else(|| bad_input(format!("`{text}`: a quote is not closed")))
}

/// Creates the report of the results, with the facts that readers need.
pub fn report(
    program: &Program,
    host: Host,
    begin: &Begin,
    results: Vec<Measurement>,
    session: &mut Session,
) -> Report {
    if session.interrupted() {
        session.skip(
            "the rest of this run",
            match session.out_of_time() {
                true => "the time limit came first; what is here is a part",
                false => "interrupted by Ctrl-C or a signal to end; what is here is a part",
            },
        );
    }
    Report {
        schema: SCHEMA,
        partial: session.interrupted(),
        tool: program.version.into(),
        trust: crate::record::trust(begin, &results),
        verdict: crate::renderer::verdict(&results, &(program.renderers)().each),
        host,
        command: command(program, std::env::args()),
        results,
        skipped: session.skipped().to_vec(),
        repeated: session.repeated().to_vec(),
    }
}

/// Prints the report, and writes its files.
///
/// # Errors
/// A file, or stdout, cannot be written.
pub fn show(
    program: &Program,
    report: &Report,
    format: Format,
    output: Option<Output>,
) -> anyhow::Result<()> {
    let renderers = (program.renderers)();
    let written = write(report, &renderers, output);
    output::print(&match format {
        Format::Json => json::render(report)?,
        Format::Markdown => markdown::render(report, &renderers),
        Format::Text => text::render(report, &renderers, output::width()),
    })?;
    say(written?);
    Ok(())
}

/// Prints the report in the form of `text`, with the terminal's width, and writes its files.
///
/// # Errors
/// A file, or stdout, cannot be written.
pub fn show_as(
    program: &Program,
    report: &Report,
    text: impl Fn(&Report, u16) -> String,
    output: Option<Output>,
) -> anyhow::Result<()> {
    let written = write(report, &(program.renderers)(), output);
    output::print(&text(report, output::width()))?;
    say(written?);
    Ok(())
}

/// Writes the files first: they must not be lost if a pipe closes early, and the table must not be
/// lost if the disk is full.
fn write(
    report: &Report,
    renderers: &Renderers,
    output: Option<Output>,
) -> anyhow::Result<Option<PathBuf>> {
    // Ctrl-C shortly after the start must not overwrite the report of an earlier run.
    let nothing = report.partial && report.results.is_empty();
    let output = output.filter(|output| !(nothing && output.has_results()));
    output.map(|output| output.write(report, renderers)).transpose()
}

fn say(written: Option<PathBuf>) {
    if let Some(directory) = written {
        eprintln!(
            "\nWritten: {} and {}",
            directory.join(crate::files::RESULTS).display(),
            directory.join(crate::files::PAGE).display()
        );
    }
}

/// Returns the command line to repeat the run, with the program's own name instead of its path.
pub fn command(program: &Program, arguments: impl Iterator<Item = String>) -> Vec<String> {
    std::iter::once(program.name.to_owned()).chain(arguments.skip(1)).collect()
}

/// Returns whether a pipe was closed by its reader, which is no failure of this program.
fn nobody_reads(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::BrokenPipe
}
