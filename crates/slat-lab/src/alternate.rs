//! Two command lines of a program, each in its own processes, in the order A, B, B, A. So the
//! machine's drift over minutes affects both alike, and differences between two processes of one
//! command line show.

use crate::child::{self, Beside};
use crate::compare::{Run, parse_report};
use crate::failure::Failure;
use crate::scenario::Program;
use crate::session::Session;
use anyhow::{anyhow, bail};
use std::time::Duration;

/// Time for which the third command line runs before the second begins.
const LEAD: Duration = Duration::from_secs(1);

/// Runs both command lines, `pairs` times twice each, after one run of each to warm up. Each
/// process is one sample of each of its results: the median. `beside` runs while the second runs,
/// from a second before it on; the first has that second to itself.
///
/// # Errors
/// A process fails, or the user presses Ctrl-C.
pub fn alternate(
    program: &Program,
    first: &[String],
    second: &[String],
    beside: Option<&[String]>,
    pairs: u32,
    session: &mut Session,
) -> anyhow::Result<(Run, Run)> {
    for words in [first, second] {
        child::check_words(program, words)?;
    }
    let turns =
        (0..pairs).flat_map(|_| [true, false, false, true].map(|is_first| (is_first, true)));
    let order: Vec<_> = [(true, false), (false, false)].into_iter().chain(turns).collect();
    session.start("processes", order.len() as u64);
    let (mut of_first, mut of_second) = (Vec::new(), Vec::new());
    for (is_first, counts) in order {
        session.check()?;
        let words = if is_first { first } else { second };
        session.say(&words.join(" "));
        let mut other = beside.filter(|_| !is_first).map(Beside::start).transpose()?;
        if beside.is_some() {
            std::thread::sleep(LEAD);
        }
        other.as_mut().map_or(Ok(()), Beside::check)?;
        let run = one(program, words, session)?;
        other.map_or(Ok(()), Beside::end)?;
        if counts {
            if is_first { of_first.push(run) } else { of_second.push(run) }
        }
        session.step();
    }
    session.finish();
    let mut of_both = second.to_vec();
    of_both.extend(beside.map(|words| format!("(beside: {})", words.join(" "))));
    Ok((Run::of_processes(of_first, first), Run::of_processes(of_second, &of_both)))
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
    one(program, words, session)
}

fn one(program: &Program, words: &[String], session: &Session) -> anyhow::Result<Run> {
    let ended = child::run(&child::with_json(words), session)?;
    if session.interrupted() {
        return Err(Failure::Interrupted.into());
    }
    let (name, line) = (program.name, words.join(" "));
    if !ended.status.success() {
        bail!("`{name} {line}` failed ({}): {}", ended.status, ended.stderr.trim());
    }
    let report = parse_report(&ended.stdout);
    Run::of(report.map_err(|why| anyhow!("`{name} {line}` printed no report: {why}"))?, &line)
}
