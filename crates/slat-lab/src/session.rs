//! How a scenario meets the person in front of it: progress, Ctrl-C, what had to be skipped.

use crate::failure::Failure;
use crate::host;
use crate::record::{Repeated, Skipped};
use crate::trust;
use anyhow::Context;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use rustix::process::{Pid, Signal, kill_process_group};
use std::io::IsTerminal;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// One run of the command.
pub struct Session {
    stop: Arc<AtomicBool>,
    out_of_time: Arc<AtomicBool>,
    bar: ProgressBar,
    on_terminal: bool,
    /// Where nobody sees a bar: the part that runs, when it began, when the last line was printed.
    lines: Option<Mutex<Lines>>,
    skipped: Vec<Skipped>,
    repeated: Vec<Repeated>,
    deadline: OnceLock<Instant>,
    failed: bool,
}

/// From one line of progress to the next, where stderr is no terminal.
const LINE: Duration = Duration::from_secs(60);

/// Signals that come within this time are one.
const TWICE: Duration = Duration::from_secs(1);

/// Below this many columns the bar gives way to the words.
const NARROW: u16 = 70;

/// Progress as lines.
#[derive(Debug)]
struct Lines {
    what: String,
    began: Instant,
    last: Instant,
}

impl Session {
    /// A session that shows progress, as a bar when stderr is a terminal and as a line a minute
    /// when not, and stops on Ctrl-C (or SIGTERM, SIGHUP).
    ///
    /// # Errors
    ///
    /// The handler for Ctrl-C cannot be installed; there can be one such session a process.
    pub fn interactive() -> anyhow::Result<Self> {
        let on_terminal = std::io::stderr().is_terminal();
        let now = Instant::now();
        let lines = Lines { what: String::new(), began: now, last: now };
        let lines = (!on_terminal).then(|| Mutex::new(lines));
        let session = Self { on_terminal, lines, ..Self::quiet() };
        let stop = session.stop.clone();
        let mut first: Option<Instant> = None;
        ctrlc::set_handler(move || {
            stop.store(true, Ordering::Relaxed);
            // The second one means it: whatever hangs, the person gets the prompt back. But
            // `timeout` signals a process, and then its whole group.
            if first.get_or_insert_with(Instant::now).elapsed() > TWICE {
                abandon();
                std::process::exit(130);
            }
        })
        .context("cannot install the handler for Ctrl-C")?;
        Ok(session)
    }

    /// A session that shows nothing and that only [`Session::stop`] stops: for tests.
    pub fn quiet() -> Self {
        Self {
            stop: Arc::default(),
            out_of_time: Arc::default(),
            bar: ProgressBar::hidden(),
            on_terminal: false,
            lines: None,
            skipped: Vec::new(),
            repeated: Vec::new(),
            deadline: OnceLock::new(),
            failed: false,
        }
    }

    /// Starts a part of the run that takes `steps` steps, and names it to the person waiting.
    pub fn start(&mut self, what: &str, steps: u64) {
        self.bar.finish_and_clear();
        if let Some(lines) = &mut self.lines {
            let lines = lines.get_mut().unwrap_or_else(PoisonError::into_inner);
            (lines.what, lines.began) = (what.to_owned(), Instant::now());
            self.bar = ProgressBar::hidden();
            self.bar.set_length(steps);
        }
        if !self.on_terminal {
            return;
        }
        let columns = rustix::termios::tcgetwinsize(std::io::stderr()).map(|size| size.ws_col);
        let style = ProgressStyle::with_template(template(columns.unwrap_or(NARROW)));
        let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
        self.bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stderr())
            .with_style(style)
            .with_prefix(what.to_owned());
        // Drawn only when a step is reported: a thread that redraws would disturb the measurement.
        self.bar.tick();
    }

    /// Says what is being measured now, within the part that was started.
    ///
    /// Draws on the terminal, so it belongs between two samples and never inside one.
    pub fn say(&self, what: &str) {
        self.bar.set_message(what.to_owned());
        self.bar.tick();
        if let Some(lines) = &self.lines {
            let mut lines = lines.lock().unwrap_or_else(PoisonError::into_inner);
            if lines.last.elapsed() >= LINE {
                lines.last = Instant::now();
                let (done, all) = (self.bar.position(), self.bar.length().unwrap_or(0));
                eprintln!("{}", line(&lines.what, what, lines.began.elapsed(), done, all));
            }
        }
    }

    /// One step of the current part is done. Belongs between two samples, too.
    pub fn step(&self) {
        self.bar.inc(1);
    }

    /// The current part is over; its progress bar goes away.
    pub fn finish(&mut self) {
        self.bar.finish_and_clear();
        self.bar = ProgressBar::hidden();
    }

    /// Prints a line to stderr, above the progress bar. For what the person must know now.
    pub fn note(&self, line: &str) {
        self.bar.suspend(|| eprintln!("{line}"));
    }

    /// Whether to go on.
    ///
    /// # Errors
    ///
    /// [`Failure::Interrupted`] after Ctrl-C.
    pub fn check(&self) -> Result<(), Failure> {
        if self.interrupted() { Err(Failure::Interrupted) } else { Ok(()) }
    }

    /// From now on there is this much time; then the run is stopped as Ctrl-C stops it.
    pub fn limit(&self, time: Duration) {
        self.deadline.get_or_init(|| Instant::now() + time);
        let (stop, out_of_time) = (self.stop.clone(), self.out_of_time.clone());
        // Whoever is done earlier takes the thread down with the process.
        std::thread::spawn(move || {
            std::thread::sleep(time);
            if !stop.swap(true, Ordering::Relaxed) {
                out_of_time.store(true, Ordering::Relaxed);
            }
        });
    }

    /// How much of it is left, if there is a limit.
    pub fn left(&self) -> Option<Duration> {
        self.deadline.get().map(|deadline| deadline.saturating_duration_since(Instant::now()))
    }

    /// Whether it was the time limit that stopped the run.
    pub fn out_of_time(&self) -> bool {
        self.out_of_time.load(Ordering::Relaxed)
    }

    /// Tells the person waiting what the run takes from a host that may carry others' guests.
    pub fn announce(&self, memory: u64, vcpus: usize, helpers: usize) {
        let (cpus, threads) = (trust::cpus(), vcpus + helpers);
        if let Some(reason) = trust::crowded(vcpus, cpus) {
            self.note(&format!("NOT TO BE TRUSTED: {reason}"));
        }
        if self.on_terminal {
            self.note(&format!(
                "Takes up to {} of memory and {} of {cpus} CPUs; Ctrl-C stops and keeps what was measured.",
                crate::numbers::bytes(memory),
                threads.min(cpus)
            ));
        }
    }

    /// Whether Ctrl-C was pressed, or the time is up.
    pub fn interrupted(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// What a thread looks at to learn that it should stop.
    pub fn stop_flag(&self) -> Arc<AtomicBool> {
        self.stop.clone()
    }

    /// Does what the first Ctrl-C does.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Records that something was not measured: what, and why (with what would change that).
    pub fn skip(&mut self, what: impl Into<String>, reason: impl Into<String>) {
        let (what, reason) = (what.into(), reason.into());
        self.skipped.push(Skipped { what, reason, failed: false });
    }

    /// Records how exact an answer is that runs were repeated for.
    pub fn repeat(&mut self, answer: Repeated) {
        self.repeated.push(answer);
    }

    /// How exact answers are.
    pub fn repeated(&self) -> &[Repeated] {
        &self.repeated
    }

    /// Records that something failed while the rest goes on: the report has it, and the exit code
    /// says so.
    pub fn fail(&mut self, what: impl Into<String>, reason: impl Into<String>) {
        let (what, reason) = (what.into(), reason.into());
        self.note(&format!("slat: {what}: {reason}"));
        self.skipped.push(Skipped { what, reason: format!("failed: {reason}"), failed: true });
        self.failed = true;
    }

    /// Whether anything failed.
    pub fn failed(&self) -> bool {
        self.failed
    }

    /// What has been skipped so far.
    pub fn skipped(&self) -> &[Skipped] {
        &self.skipped
    }

    /// Bytes of memory that can be had now without pushing anybody else out (`MemAvailable`).
    pub fn memory_available(&self) -> u64 {
        host::memory_available()
    }
}

/// How progress is drawn on a terminal that is so wide. What may be cut is `wide_msg`.
fn template(columns: u16) -> &'static str {
    match columns {
        ..NARROW => "{pos}/{len}, about {eta} left  {wide_msg:.dim}",
        _ => "{prefix:30!.bold}  {bar:10} {pos}/{len}, about {eta} left  {wide_msg:.dim}",
    }
}

/// Progress as a line: what is measured, how much of it is done, and about how much time is left.
fn line(part: &str, what: &str, elapsed: Duration, done: u64, all: u64) -> String {
    let left = match done {
        0 => String::new(),
        _ => {
            let left = elapsed.as_secs_f64() * all.saturating_sub(done) as f64 / done as f64;
            format!(", about {left:.0} s left")
        }
    };
    format!("{part}: {what} ({done} of {all} steps, {} s{left})", elapsed.as_secs())
}

/// The process group of the child that runs now, 0 without one.
static CHILD: AtomicI32 = AtomicI32::new(0);

/// A child that runs, whose group is ended when the person waiting wants to stop at once.
#[derive(Debug)]
pub struct Running(());

impl Running {
    /// Of the child with this process identifier, which is its group's.
    pub fn new(child: u32) -> Self {
        CHILD.store(child.cast_signed(), Ordering::Relaxed);
        Self(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        CHILD.store(0, Ordering::Relaxed);
    }
}

/// Ends the child that runs, and what it started, at once.
fn abandon() {
    if let Some(group) = Pid::from_raw(CHILD.load(Ordering::Relaxed)) {
        let _ = kill_process_group(group, Signal::KILL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_progress_says_what_is_measured_and_how_much_is_left() {
        let said = line("migrate", "manual: run", Duration::from_secs(60), 3, 9);
        assert_eq!(said, "migrate: manual: run (3 of 9 steps, 60 s, about 120 s left)");
        assert!(!line("migrate", "x", Duration::from_secs(60), 0, 9).contains("left"));
    }

    #[test]
    fn on_a_narrow_terminal_everything_that_has_no_bound_may_be_cut() {
        assert!(!template(69).contains("prefix") && !template(69).contains("bar"));
        assert!(template(70).contains("{prefix:30!"));
    }

    #[test]
    fn a_session_goes_on_until_it_is_stopped() {
        let session = Session::quiet();
        assert!(session.check().is_ok());
        let flag = session.stop_flag();
        session.stop();
        assert!(matches!(session.check(), Err(Failure::Interrupted)));
        assert!(session.interrupted() && flag.load(Ordering::Relaxed));
    }

    #[test]
    fn a_time_limit_stops_and_is_told_from_ctrl_c() {
        let session = Session::quiet();
        assert_eq!(session.left(), None);
        session.limit(Duration::from_millis(1));
        assert!(session.left().unwrap() <= Duration::from_millis(1));
        while !session.interrupted() || !session.out_of_time() {
            std::thread::yield_now();
        }
        let stopped = Session::quiet();
        stopped.stop();
        stopped.limit(Duration::ZERO);
        std::thread::sleep(Duration::from_millis(20));
        assert!(!stopped.out_of_time());
    }

    #[test]
    fn what_is_skipped_keeps_its_reason_and_its_order() {
        let mut session = Session::quiet();
        session.skip("one", "no pool");
        session.skip("two", "no device");
        let whats: Vec<_> = session.skipped().iter().map(|s| (&*s.what, &*s.reason)).collect();
        assert_eq!(whats, [("one", "no pool"), ("two", "no device")]);
    }
}
