//! `slat emulate`, from the command line to the exit code.

use crate::PROGRAM;
use crate::cli::EmulateArgs;
use crate::emulate::{self, EmulatedReport};
use slat_lab::failure::bad_input;
use slat_lab::files::{check, write_whole};
use slat_lab::report::tables::counts;
use slat_lab::report::text;
use slat_lab::run::output::{self, print};
use slat_lab::session::Session;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Runs a command in an emulated machine and shows what it counted.
pub fn emulate(args: &EmulateArgs) -> anyhow::Result<ExitCode> {
    // Output files are prepared before the machine starts, so that a wrong path fails at once.
    let report_file = args.output.as_deref().map(|path| Destination::prepare("--output", path));
    let report_file = report_file.transpose()?;
    let console_file = args.console.as_deref().map(|path| Destination::prepare("--console", path));
    let console_file = console_file.transpose()?;
    let run = emulate::run(args, &mut Session::interactive()?)?;
    if let Some(file) = console_file {
        file.write(&run.console)?;
    }
    let ended = run.end?;
    eprint!("{}", ended.stderr);
    if let Some(report) = ended.checked {
        let json = serde_json::to_string_pretty(&report)? + "\n";
        let written = report_file.map(|file| file.write(&json)).transpose();
        print(&if args.json { json } else { report.text() })?;
        if let Some(path) = written? {
            eprintln!("\nWritten: {}", path.display());
        }
    } else if let Some(mut report) = ended.report {
        report.set_command(slat_lab::run::command(&PROGRAM, std::env::args()));
        let json = report.json()?;
        // The file is written first, so that a pipe that closes early does not lose it.
        let written = report_file.map(|file| file.write(&json)).transpose();
        print(&if args.json { json } else { shown(&report, output::width()) })?;
        if let Some(path) = written? {
            eprintln!("\nWritten: {}", path.display());
        }
    }
    Ok(ExitCode::from(ended.exit_code))
}

fn shown(report: &EmulatedReport, width: u16) -> String {
    let mut shown = report.machine() + "\n";
    for table in counts::tables(&report.results, crate::params::PARAMS) {
        text::grid(&mut shown, &table, width);
    }
    text::skipped(&mut shown, &report.skipped, width);
    shown
}

/// An output file that was found to be writable.
struct Destination {
    path: PathBuf,
}

impl Destination {
    fn prepare(option: &str, path: &Path) -> anyhow::Result<Self> {
        let refuse = |why: String| {
            bad_input(format!(
                "{option} {}: cannot write there ({why}); name a file in a directory that can be \
                 written to",
                path.display()
            ))
        };
        if path.is_dir() {
            return Err(refuse("it is a directory".to_owned()));
        }
        check(path).map_err(|error| refuse(error.to_string()))?;
        Ok(Self { path: path.to_owned() })
    }

    /// Writes the text and moves the file to its path, so that the path never has an incomplete
    /// file.
    fn write(self, text: &str) -> anyhow::Result<PathBuf> {
        write_whole(&self.path, text.as_bytes())?;
        Ok(self.path)
    }
}
