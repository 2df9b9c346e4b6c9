//! This program as a process of its own: what is measured in it shares no heap, no warm cache and
//! no failure with what was measured before.
//!
//! A child has a process group of its own, so that the terminal's Ctrl-C reaches it once, from
//! here: to a program a second one means *at once*, and costs what was measured.

use crate::failure::bad_input;
use crate::scenario::Program;
use crate::session::{Running, Session};
use anyhow::Context;
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// How often it is looked whether a child has ended: seldom enough not to be seen in a measurement.
const LOOK: Duration = Duration::from_millis(100);

/// How long a child may take to end after it was told to.
const GRACE: Duration = Duration::from_secs(5);

/// A child that has ended.
#[derive(Debug)]
pub struct Ended {
    /// How.
    pub status: ExitStatus,
    /// Whether its time limit ended it.
    pub out_of_time: bool,
    /// What it printed.
    pub stdout: Vec<u8>,
    /// What it complained of.
    pub stderr: String,
    /// How long it ran.
    pub took: Duration,
}

impl Ended {
    /// Why it counts as failed, in a line, if it does.
    pub fn failure(&self, limit: Option<Duration>) -> Option<String> {
        if let (true, Some(limit)) = (self.out_of_time, limit) {
            return Some(format!("not done within {}", humantime::format_duration(limit)));
        }
        if let Some(signal) = self.status.signal() {
            return Some(format!("killed by signal {signal}"));
        }
        (!self.status.success()).then(|| {
            let line = self.stderr.lines().rfind(|line| !line.trim().is_empty());
            let line = line.unwrap_or("it says nothing").trim();
            // Its name, which the line of an error begins with.
            let named = line.split_once(": ").filter(|(name, _)| name.starts_with("slat"));
            named.map_or(line, |(_, rest)| rest).to_owned()
        })
    }
}

/// What may be measured in a child: the words of a scenario, without those that say where the
/// results go.
///
/// # Errors
/// They are those of something else.
pub fn check_words(program: &Program, words: &[String]) -> anyhow::Result<()> {
    if !(program.measures)(words) {
        return Err(bad_input(format!(
            "`{}` is nothing to measure with {}; give the words of a scenario, such as: {}",
            words.join(" "),
            program.name,
            program.example
        )));
    }
    if without_output(words).len() != words.len() {
        return Err(bad_input(
            "leave out --output, --json, --markdown and --report: all results are gathered here",
        ));
    }
    Ok(())
}

/// The words without those that say where the results go.
pub fn without_output(words: &[String]) -> Vec<String> {
    let mut left = Vec::new();
    let mut words = words.iter();
    while let Some(word) = words.next() {
        match word.as_str() {
            "-o" | "--output" | "--report" => drop(words.next()),
            "--json" | "--markdown" => {}
            word if word.starts_with("--output=") || word.starts_with("--report=") => {}
            word if word.starts_with("-o") && !word.starts_with("--") => {}
            word => left.push(word.to_owned()),
        }
    }
    left
}

/// Runs this program with these words to its end, to that of its time, or until the session is
/// interrupted, which the child learns.
///
/// # Errors
/// It cannot be started, or waited for.
pub fn run(words: &[String], limit: Option<Duration>, session: &Session) -> anyhow::Result<Ended> {
    let this = std::env::current_exe().context("cannot find this program")?;
    let mut command = Command::new(this);
    command.args(words).process_group(0);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let began = Instant::now();
    let mut child = command.spawn().context("cannot start this program again")?;
    let running = Running::new(child.id());
    let (stdout, stderr) = (gather(child.stdout.take()), gather(child.stderr.take()));
    let waited = wait(&mut child, began, limit, session);
    drop(running);
    let (status, out_of_time) = waited.context("cannot wait for this program")?;
    let stdout = stdout.join().unwrap_or_default();
    let stderr = String::from_utf8_lossy(&stderr.join().unwrap_or_default()).into_owned();
    Ok(Ended { status, out_of_time, stdout, stderr, took: began.elapsed() })
}

fn gather(pipe: Option<impl Read + Send + 'static>) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            // What came until it broke is what there is.
            let _ = pipe.read_to_end(&mut bytes);
        }
        bytes
    })
}

/// Waits, and says whether the time limit ended it.
fn wait(
    child: &mut Child,
    began: Instant,
    limit: Option<Duration>,
    session: &Session,
) -> std::io::Result<(ExitStatus, bool)> {
    let pid = Pid::from_child(child);
    let (mut told, mut late): (bool, Option<Instant>) = (false, None);
    loop {
        // Until this says that it has ended, the number is the child's and nobody else's.
        if let Some(status) = child.try_wait()? {
            return Ok((status, late.is_some()));
        }
        if session.interrupted() && !told {
            told = true;
            let _ = kill_process(pid, Signal::INT);
        }
        match (late, limit) {
            (None, Some(limit)) if began.elapsed() >= limit => {
                late = Some(Instant::now());
                if !told {
                    let _ = kill_process(pid, Signal::TERM);
                }
            }
            (Some(since), _) if since.elapsed() >= GRACE => {
                let _ = kill_process_group(pid, Signal::KILL);
            }
            _ => {}
        }
        thread::sleep(LOOK);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        shlex::split(text).unwrap()
    }

    #[test]
    fn where_results_go_is_no_part_of_what_is_measured() {
        for text in ["bench split -o x", "bench split --output x", "bench split --output=x -ox"] {
            assert_eq!(without_output(&words(text)), words("bench split"), "{text}");
        }
        let all = words("bench split --json --markdown --only a");
        assert_eq!(without_output(&all), words("bench split --only a"));
    }

    #[test]
    fn only_what_measures_is_run_and_its_results_go_nowhere_else() {
        let program = &crate::scenario::fake::PROGRAM;
        assert!(check_words(program, &words("bench split --backing 2m")).is_ok());
        for (text, why) in [("compare a b", "nothing to measure"), ("bench split -o x", "--output")]
        {
            let error = check_words(program, &words(text)).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
