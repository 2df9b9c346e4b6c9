//! This program as a child process: a measurement in it shares no heap, no warm cache and no
//! failure with earlier measurements.
//!
//! A child has its own process group, so that it does not get the terminal's Ctrl-C directly. This
//! process forwards it once: a second one would end the child at once, and lose its measurements.

use crate::failure::bad_input;
use crate::scenario::Program;
use crate::session::{RunningChild, Session};
use anyhow::{Context, bail};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Time between two checks whether a child has ended. It is long enough not to disturb a
/// measurement.
const LOOK: Duration = Duration::from_millis(100);

/// Time that a child may take to end after a signal to end.
const GRACE: Duration = Duration::from_secs(10);

/// A child that has ended.
#[derive(Debug)]
pub struct ChildExit {
    /// Exit status of the child.
    pub status: ExitStatus,
    /// Output of the child on stdout.
    pub stdout: Vec<u8>,
    /// Output of the child on stderr.
    pub stderr: String,
}

/// Checks that the words measure a scenario, and do not say where results go.
///
/// # Errors
/// The words do something else, or say where results go.
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
            "leave out --output, --json and --markdown: all results are gathered here",
        ));
    }
    Ok(())
}

/// Returns the words without those that say where results go.
pub fn without_output(words: &[String]) -> Vec<String> {
    let mut left = Vec::new();
    let mut words = words.iter();
    while let Some(word) = words.next() {
        match word.as_str() {
            "-o" | "--output" => drop(words.next()),
            "--json" | "--markdown" => {}
            word if word.starts_with("--output=") => {}
            word if word.starts_with("-o") && !word.starts_with("--") => {}
            word => left.push(word.to_owned()),
        }
    }
    left
}

/// Ends the words that say where to measure, such as `emulate --arch aarch64 -- bench age`.
const WHERE_ENDS: &str = "--";

/// Returns the words that name the scenario, without those that say where to measure it.
pub fn scenario(words: &[String]) -> &[String] {
    let at = words.iter().position(|word| word == WHERE_ENDS);
    at.map_or(words, |at| &words[at + 1..])
}

/// Returns the words of a process that prints its report as JSON.
pub fn with_json(words: &[String]) -> Vec<String> {
    let at = words.iter().position(|word| word == WHERE_ENDS).unwrap_or(words.len());
    let mut all = words.to_vec();
    all.insert(at, "--json".to_owned());
    all
}

/// A child that was started, and whose output is gathered.
#[derive(Debug)]
struct StartedChild {
    child: Child,
    running: RunningChild,
    stdout: thread::JoinHandle<Vec<u8>>,
    stderr: thread::JoinHandle<Vec<u8>>,
}

impl StartedChild {
    fn new(words: &[String]) -> anyhow::Result<Self> {
        let this = std::env::current_exe().context("cannot find this program")?;
        let mut command = Command::new(this);
        command.args(words);
        Self::of(command)
    }

    fn of(mut command: Command) -> anyhow::Result<Self> {
        command.process_group(0);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().context("cannot start this program again")?;
        let running = RunningChild::new(child.id());
        let (stdout, stderr) = (gather(child.stdout.take()), gather(child.stderr.take()));
        Ok(Self { child, running, stdout, stderr })
    }

    /// Ends the child as Ctrl-C does. If it does not end in time, its process group is killed.
    fn interrupt(&mut self) -> std::io::Result<ExitStatus> {
        let interrupted = Session::quiet();
        interrupted.stop();
        wait(&mut self.child, Some(GRACE), &interrupted)
    }

    /// Takes the output of the child, which was waited for.
    fn ended(self, waited: std::io::Result<ExitStatus>) -> anyhow::Result<ChildExit> {
        drop(self.running);
        let status = waited.context("cannot wait for this program")?;
        let stdout = self.stdout.join().unwrap_or_default();
        let stderr = self.stderr.join().unwrap_or_default();
        let stderr = String::from_utf8_lossy(&stderr).into_owned();
        Ok(ChildExit { status, stdout, stderr })
    }
}

/// Runs this program with these words until it ends. If the session is interrupted, the child gets
/// SIGINT.
///
/// # Errors
/// The program cannot be started, or waited for.
pub fn run(words: &[String], session: &Session) -> anyhow::Result<ChildExit> {
    let mut started = StartedChild::new(words)?;
    let waited = wait(&mut started.child, None, session);
    started.ended(waited)
}

/// This program with another command line: it runs during a measurement until it is interrupted,
/// also if it is dropped.
#[derive(Debug)]
pub struct Beside {
    /// Nothing once it has ended.
    started: Option<StartedChild>,
    words: String,
}

impl Beside {
    /// Starts it.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn start(words: &[String]) -> anyhow::Result<Self> {
        Ok(Self { started: Some(StartedChild::new(words)?), words: words.join(" ") })
    }

    /// Checks that it still runs.
    ///
    /// # Errors
    /// It has ended; the text has its output on stderr.
    pub fn check(&mut self) -> anyhow::Result<()> {
        let Some(started) = &mut self.started else { return Ok(()) };
        let Some(status) = started.child.try_wait().context("cannot wait for this program")? else {
            return Ok(());
        };
        let ended = self.started.take().map(|started| started.ended(Ok(status)));
        let stderr = ended.transpose()?.map(|ended| ended.stderr).unwrap_or_default();
        bail!(
            "`{}` ended before what it was to run beside ({status}); it has to run until Ctrl-C: \
             {}",
            self.words,
            stderr.trim()
        );
    }

    /// Ends it as Ctrl-C does.
    ///
    /// # Errors
    /// It ended before, or it failed; the text has its output on stderr.
    pub fn end(mut self) -> anyhow::Result<()> {
        self.check()?;
        let Some(mut started) = self.started.take() else { return Ok(()) };
        let waited = started.interrupt();
        let ended = started.ended(waited)?;
        // What was asked for more says so by 130.
        let done = ended.status.success() || ended.status.code() == Some(130);
        match done {
            true => Ok(()),
            false => bail!("`{}` failed ({}): {}", self.words, ended.status, ended.stderr.trim()),
        }
    }
}

/// If the measurement fails, this program ends as after a measurement: killed at once, it would
/// leave what it changed on the host.
impl Drop for Beside {
    fn drop(&mut self) {
        if let Some(started) = &mut self.started {
            let _ = started.interrupt();
        }
    }
}

fn gather(pipe: Option<impl Read + Send + 'static>) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            // If the pipe breaks, what came before is kept.
            let _ = pipe.read_to_end(&mut bytes);
        }
        bytes
    })
}

/// Waits for the child. Once the session is interrupted, the child may run for `grace` more.
fn wait(
    child: &mut Child,
    grace: Option<Duration>,
    session: &Session,
) -> std::io::Result<ExitStatus> {
    let pid = Pid::from_child(child);
    let mut told: Option<Instant> = None;
    loop {
        // Until this returns a status, the process identifier belongs to the child.
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        match told.zip(grace) {
            None if told.is_none() && session.interrupted() => {
                told = Some(Instant::now());
                let _ = kill_process(pid, Signal::INT);
            }
            Some((since, grace)) if since.elapsed() >= grace => {
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
        for text in ["bench first -o x", "bench first --output x", "bench first --output=x -ox"] {
            assert_eq!(without_output(&words(text)), words("bench first"), "{text}");
        }
        let all = words("bench first --json --markdown --only a");
        assert_eq!(without_output(&all), words("bench first --only a"));
    }

    #[test]
    fn only_what_measures_is_run_and_its_results_go_nowhere_else() {
        let program = &crate::scenario::fake::PROGRAM;
        assert!(check_words(program, &words("bench first --backing 2m")).is_ok());
        for (text, why) in [("compare a b", "nothing to measure"), ("bench first -o x", "--output")]
        {
            let error = check_words(program, &words(text)).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn json_is_asked_of_the_program_that_says_where_to_measure() {
        let line = "emulate --arch aarch64 -- bench age -v 1";
        let asked = "emulate --arch aarch64 --json -- bench age -v 1";
        assert_eq!(with_json(&words(line)), words(asked));
        assert_eq!(without_output(&words(asked)), words(line));
        assert_eq!(scenario(&words(line)), words("bench age -v 1"));
        assert_eq!(scenario(&words("bench age")), words("bench age"));
        assert_eq!(with_json(&words("bench age")), words("bench age --json"));
    }

    const FILE: &str = "SLAT_LAB_CHILD_FILE";

    /// The program of the next test. Without a file it does nothing.
    #[test]
    fn a_program_that_changes_the_host_until_ctrl_c() {
        let Some(file) = std::env::var_os(FILE) else { return };
        let session = Session::interactive().unwrap();
        std::fs::write(&file, "changed").unwrap();
        while !session.interrupted() {
            thread::sleep(Duration::from_millis(5));
        }
        std::fs::write(&file, "restored").unwrap();
    }

    #[test]
    fn a_program_beside_a_failed_measurement_restores_the_host() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("host");
        let mut command = Command::new(std::env::current_exe().unwrap());
        let name = "child::tests::a_program_that_changes_the_host_until_ctrl_c";
        command.args(["--exact", name]).env(FILE, &file);
        let started = Some(StartedChild::of(command).unwrap());
        let mut beside = Beside { started, words: name.to_owned() };
        let host = || std::fs::read_to_string(&file).unwrap_or_default();
        while host() != "changed" {
            beside.check().unwrap();
            thread::sleep(Duration::from_millis(5));
        }
        drop(beside);
        assert_eq!(host(), "restored");
    }
}
