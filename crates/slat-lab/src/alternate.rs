//! Two command lines of `slat`, each in processes of its own, in the order A, B, B, A: what a machine
//! does over minutes then weighs on both alike, and what differs between two processes of one
//! command line shows.

use crate::compare::Run;
use crate::failure::{Failure, bad_input};
use crate::session::Session;
use anyhow::{Context, bail};
use std::path::Path;
use std::process::{Command, Stdio};

/// Runs both, `pairs` times twice each, after one run of each that warms up. A process is one sample of
/// each of its results: the median.
///
/// # Errors
/// A process fails; Ctrl-C.
pub fn alternate(
    first: &[String],
    second: &[String],
    pairs: u32,
    session: &mut Session,
) -> anyhow::Result<(Run, Run)> {
    check(first)?;
    check(second)?;
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
        let run = one(words, &folder.path().join(number.to_string()), session)?;
        if counts {
            // By its place, since the words may be the same.
            let is_first = matches!((number - 2) % 4, 0 | 3);
            if is_first { of_first.push(run) } else { of_second.push(run) }
        }
        session.step();
    }
    session.finish();
    Ok((Run::of_processes(of_first, first), Run::of_processes(of_second, second)))
}

/// Runs one command line in a process of its own.
///
/// # Errors
/// The process fails; Ctrl-C.
pub fn once(words: &[String], session: &Session) -> anyhow::Result<Run> {
    check(words)?;
    let folder = tempfile::tempdir().context("cannot make a folder for results")?;
    one(words, folder.path(), session)
}

/// Words that measure, and leave their results to be gathered.
fn check(words: &[String]) -> anyhow::Result<()> {
    let known = ["bench", "replay"];
    if !words.first().is_some_and(|word| known.contains(&word.as_str())) {
        return Err(bad_input(format!(
            "`{}` is nothing to measure; give the words of a `bench`, such as: bench split --backing 2m",
            words.join(" ")
        )));
    }
    let printed = ["--output", "--report", "--json", "--markdown"];
    let is_printed = |word: &String| printed.iter().any(|option| word.starts_with(option));
    if words.iter().any(|word| word == "-o" || is_printed(word)) {
        return Err(bad_input(
            "leave out --output and --json, --markdown and --report: all results are gathered here",
        ));
    }
    Ok(())
}

fn one(words: &[String], output: &Path, session: &Session) -> anyhow::Result<Run> {
    let slat = std::env::current_exe().context("cannot find this program")?;
    let mut command = Command::new(slat);
    command.args(words).arg("--output").arg(output).stdin(Stdio::null()).stdout(Stdio::null());
    let done = command.output().context("cannot start this program again")?;
    if session.interrupted() {
        return Err(Failure::Interrupted.into());
    }
    if !done.status.success() {
        let said = String::from_utf8_lossy(&done.stderr);
        bail!("`slat {}` failed ({}): {}", words.join(" "), done.status, said.trim());
    }
    Run::read(output)
}
