//! Sessions: progress, Ctrl-C and skipped parts of a run.

use crate::failure::Failure;
use crate::host;
use crate::record::{Omission, Repetition};
use crate::trust;
use anyhow::Context;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use rustix::process::{Pid, Signal, kill_process_group};
use std::io::IsTerminal;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// A run of a command.
pub struct Session {
    stop: Arc<AtomicBool>,
    out_of_time: Arc<AtomicBool>,
    bar: ProgressBar,
    on_terminal: bool,
    /// Progress as lines, if stderr is no terminal.
    lines: Option<Mutex<Lines>>,
    skipped: Vec<Omission>,
    repeated: Vec<Repetition>,
    deadline: OnceLock<Instant>,
    failed: bool,
}

/// Time between two lines of progress, if stderr is no terminal.
const LINE: Duration = Duration::from_secs(60);

/// Two signals within this time count as one.
const TWICE: Duration = Duration::from_secs(1);

/// On terminals with fewer columns, progress has no bar.
const NARROW: u16 = 70;

/// Progress as lines: the part that runs, when it began, and when the last line was printed.
#[derive(Debug)]
struct Lines {
    what: String,
    began: Instant,
    last: Instant,
}

impl Session {
    /// Creates a session that shows progress, as a bar if stderr is a terminal and otherwise as one
    /// line per minute, and stops on Ctrl-C (or SIGTERM, SIGHUP).
    ///
    /// # Errors
    ///
    /// The handler for Ctrl-C cannot be installed: a process can have one such session.
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
            // A second signal ends the program at once, even if it hangs. But `timeout` signals
            // first a process and then its whole group.
            if first.get_or_insert_with(Instant::now).elapsed() > TWICE {
                abandon();
                std::process::exit(130);
            }
        })
        .context("cannot install the handler for Ctrl-C")?;
        Ok(session)
    }

    /// Creates a session for tests, which shows nothing and which only [`Session::stop`] stops.
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

    /// Starts a part of the run, with a name and a number of steps.
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
        // It is drawn only when a step is reported: a thread that redraws would disturb the
        // measurement.
        self.bar.tick();
    }

    /// Shows what is being measured now, within the current part.
    ///
    /// It draws on the terminal, so call it between samples, and never during one.
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

    /// Records that a step of the current part is done. Call it between samples, too.
    pub fn step(&self) {
        self.bar.inc(1);
    }

    /// Ends the current part, and removes its progress bar.
    pub fn finish(&mut self) {
        self.bar.finish_and_clear();
        self.bar = ProgressBar::hidden();
    }

    /// Prints an urgent line to stderr, above the progress bar.
    pub fn note(&self, line: &str) {
        self.bar.suspend(|| eprintln!("{line}"));
    }

    /// Returns an error if the run must stop.
    ///
    /// # Errors
    ///
    /// [`Failure::Interrupted`] after Ctrl-C, or when the time is up.
    pub fn check(&self) -> Result<(), Failure> {
        if self.interrupted() { Err(Failure::Interrupted) } else { Ok(()) }
    }

    /// Limits the time from now on. When it is up, the run stops as it does on Ctrl-C.
    pub fn limit(&self, time: Duration) {
        self.deadline.get_or_init(|| Instant::now() + time);
        let (stop, out_of_time) = (self.stop.clone(), self.out_of_time.clone());
        // If the run ends earlier, the thread ends with the process.
        std::thread::spawn(move || {
            std::thread::sleep(time);
            if !stop.swap(true, Ordering::Relaxed) {
                out_of_time.store(true, Ordering::Relaxed);
            }
        });
    }

    /// Returns how much time is left, if there is a limit.
    pub fn left(&self) -> Option<Duration> {
        self.deadline.get().map(|deadline| deadline.saturating_duration_since(Instant::now()))
    }

    /// Returns whether the time limit stopped the run.
    pub fn out_of_time(&self) -> bool {
        self.out_of_time.load(Ordering::Relaxed)
    }

    /// Warns if there are more vCPUs than CPUs. On a terminal it also prints how much memory and
    /// how many CPUs the run may take: the host may run other users' guests.
    pub fn announce(&self, memory: u64, vcpus: usize, helpers: usize) {
        let (cpus, threads) = (trust::cpus(), vcpus + helpers);
        if let Some(reason) = trust::crowded(vcpus, cpus) {
            self.note(&format!("NOT TO BE TRUSTED: {reason}"));
        }
        if self.on_terminal {
            self.note(&format!(
                "Takes up to {} of memory and {} of {cpus} CPUs; Ctrl-C stops and keeps what was \
                 measured.",
                crate::numbers::bytes(memory),
                threads.min(cpus)
            ));
        }
    }

    /// Returns whether the run must stop: the user pressed Ctrl-C, or the time is up.
    pub fn interrupted(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Returns the flag that tells threads to stop.
    pub fn stop_flag(&self) -> Arc<AtomicBool> {
        self.stop.clone()
    }

    /// Stops the run, as the first Ctrl-C does.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Records that something was not measured, and why (with what would change that).
    pub fn skip(&mut self, what: impl Into<String>, reason: impl Into<String>) {
        let (what, reason) = (what.into(), reason.into());
        self.skipped.push(Omission { what, reason, failed: false });
    }

    /// Records the precision of an answer for which runs were repeated.
    pub fn repeat(&mut self, answer: Repetition) {
        self.repeated.push(answer);
    }

    /// Returns the precisions of answers.
    pub fn repeated(&self) -> &[Repetition] {
        &self.repeated
    }

    /// Records that something failed while the rest continues. The report and the exit code show
    /// it.
    pub fn fail(&mut self, what: impl Into<String>, reason: impl Into<String>) {
        let (what, reason) = (what.into(), reason.into());
        self.note(&format!("slat: {what}: {reason}"));
        self.skipped.push(Omission { what, reason: format!("failed: {reason}"), failed: true });
        self.failed = true;
    }

    /// Returns whether anything failed.
    pub fn failed(&self) -> bool {
        self.failed
    }

    /// Returns what was skipped so far.
    pub fn skipped(&self) -> &[Omission] {
        &self.skipped
    }

    /// Returns the bytes of memory that are available now (`MemAvailable`, or less by a control
    /// group).
    pub fn memory_available(&self) -> u64 {
        host::memory_available()
    }
}

/// Returns how progress is drawn on a terminal with this many columns. `wide_msg` may be cut.
fn template(columns: u16) -> &'static str {
    match columns {
        ..NARROW => "{pos}/{len}, about {eta} left  {wide_msg:.dim}",
        _ => "{prefix:30!.bold}  {bar:10} {pos}/{len}, about {eta} left  {wide_msg:.dim}",
    }
}

/// Returns a line of progress: what is measured, how much is done, and about how much time is left.
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

/// The process groups of the running children; 0 where there is none. A measurement is one child,
/// and what runs beside it another.
static CHILDREN: [AtomicI32; 2] = [const { AtomicI32::new(0) }; 2];

/// A running child, whose process group is killed if the user stops the program at once.
#[derive(Debug)]
pub struct RunningChild(i32);

impl RunningChild {
    /// Registers the child with this process identifier, which is also that of its group.
    pub fn new(child: u32) -> Self {
        replace(0, child.cast_signed());
        Self(child.cast_signed())
    }
}

impl Drop for RunningChild {
    fn drop(&mut self) {
        replace(self.0, 0);
    }
}

/// Replaces a child by another, or by none.
fn replace(child: i32, by: i32) {
    let free = |place: &&AtomicI32| {
        place.compare_exchange(child, by, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    };
    let _ = CHILDREN.iter().find(free);
}

/// Kills the running children and their process groups.
fn abandon() {
    let groups = CHILDREN.iter().filter_map(|child| Pid::from_raw(child.load(Ordering::Relaxed)));
    for group in groups {
        let _ = kill_process_group(group, Signal::KILL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_progress_line_names_the_step_and_the_time_left() {
        let said = line("first", "manual: run", Duration::from_secs(60), 3, 9);
        assert_eq!(said, "first: manual: run (3 of 9 steps, 60 s, about 120 s left)");
        assert!(!line("first", "x", Duration::from_secs(60), 0, 9).contains("left"));
    }

    #[test]
    fn a_narrow_terminal_gets_no_progress_bar() {
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
    fn a_time_limit_stops_a_session_and_differs_from_ctrl_c() {
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
