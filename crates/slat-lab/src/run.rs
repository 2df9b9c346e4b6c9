//! Runs commands: from the command line to the exit code.

mod doctor;
mod emulate;
mod main_job;
pub(crate) mod output;
mod plan_job;
mod show_job;

pub use main_job::main_job;

use crate::alternate;
use crate::cli::{
    Bench, Cli, Command, CompareArgs, ExplainArgs, Format, OutputArgs, Repeat, ReportFormat,
    Target, TuneWhat,
};
use crate::compare::{self, Comparison, Run, Verdict};
use crate::explain;
use crate::failure::{self, bad_input};
use crate::host::Host;
use crate::record::Measurement;
use crate::record::{Report, SCHEMA};
use crate::report::comparison::{self, Rows};
use crate::report::{csv, json, ktap, markdown, text};
use crate::scenario;
use crate::session::Session;
use clap::{CommandFactory, Parser};
use output::Output;
use std::io;
use std::process::ExitCode;

/// The `slat` command.
pub fn main() -> ExitCode {
    if crate::emulate::init::is_first_process() {
        crate::emulate::init::main();
    }
    // A wrong command line ends here, with exit code 2.
    let cli = Cli::parse();
    match execute(&cli) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("slat: {error:#}");
            failure::exit_code(&error)
        }
    }
}

fn execute(cli: &Cli) -> anyhow::Result<ExitCode> {
    match &cli.command {
        None => main_job(&cli.main, &mut Session::interactive()?),
        Some(Command::Bench { bench: None, peers: args }) => {
            bench(&args.out, |session| scenario::peers::all(args, session))
        }
        Some(Command::Check(args)) => {
            bench(&args.out, |session| scenario::peers::check::run(args, session))
        }
        Some(Command::Bench { bench: Some(Bench::Split(args)), .. }) => {
            bench(&args.out, |session| scenario::split::run(args, session))
        }
        Some(Command::Bench { bench: Some(Bench::Engine(args)), .. }) => {
            bench(&args.out, |session| scenario::engine::run(args, session))
        }
        Some(Command::Bench { bench: Some(Bench::DirtyLog(args)), .. }) => {
            bench(&args.out, |session| match args.target {
                Target::Kvm => scenario::kvm::dirty_log::run(args, session),
                Target::Engine => {
                    scenario::kvm::dirty_log::refuse(args)?;
                    scenario::guest::dirty_log::run(args, session)
                }
            })
        }
        Some(Command::Bench { bench: Some(Bench::Execute(args)), .. }) => {
            bench(&args.out, |session| match args.target {
                Target::Kvm => scenario::kvm::touch::execute(args, session),
                Target::Engine => scenario::guest::execute::run(args, session),
            })
        }
        Some(Command::Bench { bench: Some(Bench::Age(args)), .. }) => {
            bench(&args.out, |session| match args.target {
                Target::Kvm => scenario::kvm::touch::age(args, session),
                Target::Engine => scenario::guest::age::run(args, session),
            })
        }
        Some(Command::Bench { bench: Some(Bench::Populate(args)), .. }) => {
            bench(&args.out, |session| match args.target {
                Target::Kvm => scenario::kvm::touch::populate(args, session),
                Target::Engine => scenario::guest::populate::run(args, session),
            })
        }
        Some(Command::Bench { bench: Some(Bench::Reclaim(args)), .. }) => {
            bench(&args.out, |session| scenario::guest::reclaim::run(args, session))
        }
        Some(Command::Bench { bench: Some(Bench::Idle(args)), .. }) => {
            bench(&args.out, |session| scenario::guest::reclaim::idle::run(args, session))
        }
        Some(Command::Bench { bench: Some(Bench::CacheToggle(args)), .. }) => {
            bench(&args.out, |session| scenario::guest::cache_toggle::run(args, session))
        }
        Some(Command::Bench { bench: Some(Bench::MemoryStress(args)), .. }) => {
            bench(&args.out, |session| scenario::kvm::touch::memory_stress(args, session))
        }
        Some(Command::Bench { bench: Some(Bench::Memslot(args)), .. }) => {
            bench(&args.out, |session| scenario::kvm::memslot::run(args, session))
        }
        Some(Command::Bench { bench: Some(Bench::BootCaches(args)), .. }) => {
            bench(&args.out, |session| scenario::kvm::touch::boot_caches(args, session))
        }
        Some(Command::Bench { bench: Some(Bench::Migrate(args)), .. }) => {
            bench(&args.out, |session| scenario::kvm::migrate::run(args, session))
        }
        Some(Command::Explain(args)) => explain(args),
        Some(Command::Tune { what: TuneWhat::DirtyLog(args) }) => {
            bench(&args.out, |session| scenario::kvm::tune::dirty_log(args, session))
        }
        Some(Command::Doctor(args)) => doctor::doctor(args),
        Some(Command::Compare(args)) => compare(args),
        Some(Command::Ab(args)) => {
            alternate(&words(&args.first)?, &words(&args.second)?, &args.how)
        }
        Some(Command::Noise(args)) => alternate(&args.words, &args.words, &args.how),
        Some(Command::Emulate(args)) => emulate::emulate(args),
        Some(Command::Plan(args)) => plan_job::plan(args),
        Some(Command::Merge(args)) => plan_job::merge(args),
        Some(Command::Show(args)) => show_job::show(args),
        Some(Command::Replay(args)) => {
            bench(&args.out, |session| scenario::replay::run(args, session))
        }
        Some(Command::Completions { shell }) => {
            let mut script = Vec::new();
            clap_complete::generate(*shell, &mut Cli::command(), "slat", &mut script);
            output::print(&String::from_utf8_lossy(&script))?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Runs one scenario and shows what it measured.
fn bench(
    args: &OutputArgs,
    scenario: impl FnOnce(&mut Session) -> anyhow::Result<Vec<Measurement>>,
) -> anyhow::Result<ExitCode> {
    // Whatever can be known to go wrong goes wrong before minutes are spent measuring.
    let output = args.output.as_deref().map(Output::prepare).transpose()?;
    let host = Host::read();
    let mut session = Session::interactive()?;
    args.time_limit.into_iter().for_each(|time| session.limit(time));
    let results = match scenario(&mut session) {
        Err(error) if failure::is_interruption(&error) => Vec::new(),
        Err(error)
            if args.print.format() == ReportFormat::Ktap && !failure::is_bad_input(&error) =>
        {
            session.finish();
            return test_failed(host, error, &mut session);
        }
        results => results?,
    };
    session.finish();
    let report = report(host, results, &mut session);
    show(&report, args.print.format(), output)?;
    Ok(match report.partial {
        true if session.out_of_time() => ExitCode::from(5),
        true => ExitCode::from(130),
        false if session.failed() => ExitCode::FAILURE,
        false => ExitCode::SUCCESS,
    })
}

/// A test that could not run is a result, too, for whoever reads test results only.
fn test_failed(
    host: Host,
    error: anyhow::Error,
    session: &mut Session,
) -> anyhow::Result<ExitCode> {
    let words: Vec<_> =
        std::env::args().skip(1).take_while(|word| !word.starts_with('-')).collect();
    let (what, reason) = (words.join(" "), format!("{error:#}"));
    match error.downcast_ref().is_some_and(slat_kvm::Error::is_lack) {
        true => {
            session.note(&format!("slat: {reason}"));
            session.skip(what, reason);
        }
        false => session.fail(what, reason),
    }
    show(&report(host, Vec::new(), session), ReportFormat::Ktap, None)?;
    Ok(failure::exit_code(&error))
}

/// Holds two runs against each other.
fn compare(args: &CompareArgs) -> anyhow::Result<ExitCode> {
    let (first, second) = (Run::read(&args.first)?, Run::read(&args.second)?);
    let comparison = compare::compare(&first, &second, args.threshold / 100.0);
    if !comparison.compares() {
        anyhow::bail!(
            "nothing of these runs can be compared: they have no result in common, too few \
             samples, or the machines differ; take runs of one command line and one machine"
        );
    }
    let rows = match (args.all, args.only_differences) {
        (true, _) => Rows::All,
        (_, true) => Rows::Differing,
        _ => Rows::Dozen,
    };
    show_comparison(&comparison, rows, args.print.format())?;
    let judged = comparison.pairs.iter().any(|pair| pair.verdict != Verdict::NotComparable);
    if args.fail_if_slower && !judged {
        anyhow::bail!(
            "no time of these runs can be compared, so --fail-if-slower cannot tell; {} samples of \
             each result are the least, on one machine",
            compare::LEAST
        );
    }
    let slower = comparison.pairs.iter().any(|pair| pair.verdict == Verdict::Slower);
    Ok(if slower && args.fail_if_slower { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn show_comparison(comparison: &Comparison, rows: Rows, format: Format) -> anyhow::Result<()> {
    let tables = comparison::tables(comparison, rows);
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

/// Takes a run's phases apart.
fn explain(args: &ExplainArgs) -> anyhow::Result<ExitCode> {
    let run = match &args.run {
        Some(path) => Run::read(path)?,
        None => alternate::once(&args.words, &Session::interactive()?)?,
    };
    let explained = explain::explain(run.results());
    if explained.is_empty() {
        anyhow::bail!(
            "no guest under KVM is in it whose time is known; try: slat explain -- bench dirty-log"
        );
    }
    let table = explain::table(&explained);
    output::print(&match args.print.format() {
        Format::Json => serde_json::to_string_pretty(&explained)? + "\n",
        Format::Markdown => markdown::table(&table),
        Format::Text => {
            let mut text = String::new();
            text::grid(&mut text, &table, output::width());
            text
        }
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Runs two command lines in turns, and compares them.
fn alternate(first: &[String], second: &[String], how: &Repeat) -> anyhow::Result<ExitCode> {
    let mut session = Session::interactive()?;
    let (first, second) = alternate::alternate(first, second, how.pairs, &mut session)?;
    let comparison = compare::compare(&first, &second, how.threshold / 100.0);
    show_comparison(&comparison, Rows::Dozen, how.print.format())?;
    Ok(ExitCode::SUCCESS)
}

/// The words of a command line, by the shell's rules.
fn words(text: &str) -> anyhow::Result<Vec<String>> {
    shlex::split(text).ok_or_else(|| bad_input(format!("`{text}`: a quote is not closed")))
}

/// What was measured, with what a reader has to know beside it.
fn report(host: Host, results: Vec<Measurement>, session: &mut Session) -> Report {
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
        tool: env!("CARGO_PKG_VERSION").into(),
        host,
        command: command(std::env::args()),
        results,
        skipped: session.skipped().to_vec(),
    }
}

/// Prints the report and writes its files.
fn show(report: &Report, format: ReportFormat, output: Option<Output>) -> anyhow::Result<()> {
    // Ctrl-C a moment after the start must not cost the report of an earlier run.
    let nothing = report.partial && report.results.is_empty();
    let output = output.filter(|output| !(nothing && output.has_results()));
    // The files first: a pipe that closes early must not cost them.
    let written = output.map(|output| output.write(report)).transpose();
    output::print(&match format {
        ReportFormat::Json => json::render(report)?,
        ReportFormat::Markdown => markdown::render(report),
        ReportFormat::Text => text::render(report, output::width()),
        ReportFormat::Csv => csv::render(report)?,
        ReportFormat::Ktap => ktap::render(report),
    })?;
    // Rows have no place for what is not there.
    if format == ReportFormat::Csv {
        let lines =
            report.skipped.iter().map(|s| format!("not measured: {}: {}", s.what, s.reason));
        lines.for_each(|line| eprintln!("{line}"));
    }
    // A disk that is full must not cost the table, either.
    if let Some(directory) = written? {
        eprintln!(
            "\nWritten: {} and {}",
            directory.join(crate::files::RESULTS).display(),
            directory.join(crate::files::PAGE).display()
        );
    }
    Ok(())
}

/// The command line as it can be repeated: wherever the program was, its name is `slat`.
fn command(arguments: impl Iterator<Item = String>) -> Vec<String> {
    std::iter::once("slat".to_owned()).chain(arguments.skip(1)).collect()
}

/// Whether the other end of a pipe is gone: nobody is reading, and that is no failure of ours.
fn nobody_reads(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::BrokenPipe
}
