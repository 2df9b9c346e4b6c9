//! Runs cells, each in its own process, with its report in its own file.
//!
//! A file exists completely or not at all. So a job that is killed loses only the cell that it was
//! measuring, and a job that starts again continues from there.

use super::Plan;
use super::cell::Cell;
use crate::child::{self, ChildExit};
use crate::compare;
use crate::failure::bad_input;
use crate::files;
use crate::session::Session;
use anyhow::Context;
use serde::Serialize;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The state of a cell after the run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "kebab-case")]
pub enum State {
    /// It was measured.
    Measured,
    /// Its report existed before.
    AlreadyThere,
    /// It failed; its record has the details.
    Failed {
        /// Why.
        reason: String,
        /// The exit code, if no signal ended it.
        exit_code: Option<i32>,
    },
    /// It was interrupted, or the run ended before it began.
    NotRun,
}

/// A cell, and its state after the run.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// Number of the cell.
    pub cell: usize,
    /// Number of its repeat.
    pub repeat: u32,
    /// Command line of the cell.
    pub command: String,
    /// State of the cell.
    #[serde(flatten)]
    pub state: State,
}

/// The states of all requested cells, and the directory of their reports.
#[derive(Clone, Debug, Serialize)]
pub struct Outcomes {
    /// The directory.
    pub directory: PathBuf,
    /// The cells, in the order of their numbers.
    pub cells: Vec<Outcome>,
}

impl Outcomes {
    /// Returns the number of cells whose state is `wanted`.
    pub fn count(&self, wanted: impl Fn(&State) -> bool) -> usize {
        self.cells.iter().filter(|cell| wanted(&cell.state)).count()
    }
}

/// Runs the cells that have no report yet, or with `again` all of them.
///
/// # Errors
/// The directory cannot be written to, or has reports of another plan.
pub fn run(
    plan: &Plan,
    cells: &[&Cell],
    directory: &Path,
    again: bool,
    session: &mut Session,
) -> anyhow::Result<Outcomes> {
    files::writable(directory)?;
    let there = |cell: &&&Cell| is_there(cell, directory);
    // This comes before minutes are spent on measuring.
    let done: Vec<usize> = match again {
        true => Vec::new(),
        false => cells
            .iter()
            .map(|cell| Ok(there(&cell)?.then_some(cell.number)))
            .filter_map(Result::transpose)
            .collect::<anyhow::Result<_>>()?,
    };
    session.start("cells", (cells.len() - done.len()) as u64);
    let mut outcomes = Vec::new();
    for cell in cells {
        let state = match (done.contains(&cell.number), session.interrupted()) {
            (true, _) => State::AlreadyThere,
            (false, true) => State::NotRun,
            (false, false) => {
                session.say(&format!("{}: {}", cell.number, cell.line()));
                let state = one(cell, plan.limit, directory, session)?;
                session.step();
                state
            }
        };
        let (cell, repeat, command) = (cell.number, cell.repeat, cell.line());
        outcomes.push(Outcome { cell, repeat, command, state });
    }
    session.finish();
    Ok(Outcomes { directory: directory.to_owned(), cells: outcomes })
}

/// Returns whether the cell's report exists.
fn is_there(cell: &Cell, directory: &Path) -> anyhow::Result<bool> {
    let file = cell.report(directory);
    if !file.exists() {
        return Ok(false);
    }
    let report = compare::read_report(&file)
        .map_err(|error| bad_input(format!("{error:#}, or --again to measure it anew")))?;
    let command: Vec<String> =
        serde_json::from_value(report["command"].clone()).unwrap_or_default();
    if cell.is_command(&command) {
        return Ok(true);
    }
    Err(bad_input(format!(
        "{} is of `{}`, and cell {} of the plan is `{}`: the plan has changed; name another \
         --output, or measure it anew with --again",
        file.display(),
        command.join(" "),
        cell.number,
        cell.line()
    )))
}

fn one(
    cell: &Cell,
    limit: Option<Duration>,
    directory: &Path,
    session: &mut Session,
) -> anyhow::Result<State> {
    let ended = child::run(&child::with_json(&cell.words), limit, session)?;
    if session.interrupted() && !ended.status.success() {
        return Ok(State::NotRun);
    }
    let report = compare::parse_report(&ended.stdout);
    let failure = match (ended.failure(limit), &report) {
        (Some(reason), _) => Some(reason),
        (None, Err(why)) => Some(format!("what it printed is no report: {why}")),
        (None, Ok(_)) => None,
    };
    let file = cell.failure(directory);
    let Some(reason) = failure else {
        files::write_whole(&cell.report(directory), &ended.stdout)?;
        remove(&file)?;
        return Ok(State::Measured);
    };
    let record = record(cell, &ended, &reason, report.ok());
    files::write_whole(&file, (serde_json::to_string_pretty(&record)? + "\n").as_bytes())?;
    // An earlier report is not the result of this run.
    remove(&cell.report(directory))?;
    session.note(&format!("slat: cell {}: `{}`: {reason}", cell.number, cell.line()));
    Ok(State::Failed { reason, exit_code: ended.status.code() })
}

/// Returns the record of a failed cell, with its partial report if it printed one.
fn record(cell: &Cell, ended: &ChildExit, reason: &str, report: Option<Value>) -> Value {
    use std::os::unix::process::ExitStatusExt;
    json!({
        "cell": cell.number,
        "repeat": cell.repeat,
        "command": cell.line(),
        "reason": reason,
        "exit_code": ended.status.code(),
        "signal": ended.status.signal(),
        "seconds": ended.took.as_secs_f64(),
        "stderr": ended.stderr,
        "report": report,
    })
}

fn remove(file: &Path) -> anyhow::Result<()> {
    match std::fs::remove_file(file) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", file.display()))
        }
        _ => Ok(()),
    }
}
