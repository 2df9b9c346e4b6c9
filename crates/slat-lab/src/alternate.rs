//! Two command lines of a program, each in its own processes, in the order A, B, B, A. So the
//! machine's drift over minutes affects both alike, and differences between two processes of one
//! command line show.

use crate::child;
use crate::compare::Run;
use crate::failure::Failure;
use crate::scenario::Program;
use crate::session::Session;
use anyhow::{Context, bail};
use std::path::Path;

/// Runs both command lines, `pairs` times twice each, after one run of each to warm up. Each
/// process is one sample of each of its results: the median.
///
/// # Errors
/// A process fails, or the user presses Ctrl-C.
pub fn alternate(
    program: &Program,
    first: &[String],
    second: &[String],
    pairs: u32,
    session: &mut Session,
) -> anyhow::Result<(Run, Run)> {
    for words in [first, second] {
        child::check_words(program, words)?;
    }
    let folder = tempfile::tempdir().context("cannot make a folder for results")?;
    let order = [first, second]
        .into_iter()
        .map(|words| (words, false))
        .chain((0..pairs).flat_map(|_| [first, second, second, first].map(|words| (words, true))));
    let order: Vec<_> = order.collect();
    session.start("processes", order.len() as u64);
    let (mut of_first, mut of_second) = (Vec::new(), Vec::new());
    for (number, (words, counts)) in order.into_iter().enumerate() {
        session.check()?;
        session.say(&words.join(" "));
        let run = one(program, words, &folder.path().join(number.to_string()), session)?;
        if counts {
            // The position decides, because both command lines may be equal.
            let is_first = matches!((number - 2) % 4, 0 | 3);
            if is_first { of_first.push(run) } else { of_second.push(run) }
        }
        session.step();
    }
    session.finish();
    Ok((Run::of_processes(of_first, first), Run::of_processes(of_second, second)))
}

/// Runs one command line in pairs of processes, after one run to warm up. Each process is a run as
/// `compare` reads it.
///
/// # Errors
/// A process fails, or the user presses Ctrl-C.
pub fn pairs(
    program: &Program,
    words: &[String],
    pairs: u32,
    session: &mut Session,
) -> anyhow::Result<Vec<(Run, Run)>> {
    session.start("processes", u64::from(pairs) * 2 + 1);
    let next = || -> anyhow::Result<Run> {
        session.check()?;
        session.say(&words.join(" "));
        let run = once(program, words, session);
        session.step();
        run
    };
    next()?;
    let all = (0..pairs).map(|_| Ok((next()?, next()?))).collect();
    session.finish();
    all
}

/// Runs one command line in its own process.
///
/// # Errors
/// The process fails, or the user presses Ctrl-C.
pub fn once(program: &Program, words: &[String], session: &Session) -> anyhow::Result<Run> {
    child::check_words(program, words)?;
    let folder = tempfile::tempdir().context("cannot make a folder for results")?;
    one(program, words, folder.path(), session)
}

fn one(
    program: &Program,
    words: &[String],
    output: &Path,
    session: &Session,
) -> anyhow::Result<Run> {
    let mut all = words.to_vec();
    all.extend(["--output".to_owned(), output.display().to_string()]);
    let ended = child::run(&all, None, session)?;
    if session.interrupted() {
        return Err(Failure::Interrupted.into());
    }
    if !ended.status.success() {
        let (name, line) = (program.name, words.join(" "));
        bail!("`{name} {line}` failed ({}): {}", ended.status, ended.stderr.trim());
    }
    Run::read(output)
}
