//! Runs the machine, from its start until its answer has arrived.

use anyhow::Context;
use slat_kernel::vm::Linux;
use slat_kernel::vm::console::{complaint, is_wrong, warnings};
use slat_kernel::vm::qemu::{CONSOLE, last_lines};
use slat_kernel::vm::stuck::functions;
use slat_lab::failure::no_report;
use slat_lab::first::job::{Answer, AnswerPart, decode};
use slat_lab::numbers::bytes;
use slat_lab::session::Session;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::{Duration, Instant};

/// Seconds for which a machine that reports free pages goes on after its command. Linux reports
/// them every two seconds, and a part each time (`mm/page_reporting.c`).
pub const LINGER: u32 = 8;

/// How long a machine that has answered may take to power itself off.
const LAST: Duration = Duration::from_secs(10);

/// How long a kernel that complained may take to say the rest of it.
const REST: Duration = Duration::from_secs(3);

/// The outcome of a machine's run.
#[derive(Debug)]
pub struct Outcome {
    /// The answer of its first process, or why there is none.
    pub answer: anyhow::Result<Answer>,
    /// All output of its console.
    pub console: String,
}

/// Starts the machine, and waits for its answer and its end. Its process and its files are removed
/// in any case. A serious complaint of its kernel ends it, unless `keep_running`.
///
/// # Errors
/// Returns [`Failure::Interrupted`](slat_lab::failure::Failure::Interrupted) if the session was
/// stopped, or an error if this machine or a control group has too little memory left, if QEMU
/// cannot be started or files cannot be written. A machine without an answer is not an error: its
/// [`Outcome`] says why.
pub fn run(
    linux: &Linux,
    limit: Duration,
    keep_running: bool,
    session: &Session,
) -> anyhow::Result<Outcome> {
    slat_kvm::meminfo::check(linux.memory)?;
    let folder = tempfile::Builder::new().prefix("slat-emulate-").tempdir();
    let folder = folder.context("cannot make a temporary directory")?;
    let (mut machine, line) = linux.machine(folder.path())?;
    let file = folder.path().join("pid");
    let mut held = linux.reports_free_pages.then_some(HeldMemory { file, most: 0, last: 0 });
    if let Some(held) = &held {
        machine.args([Path::new("-pidfile"), &held.file]);
    }
    let linger = if linux.reports_free_pages { LINGER } else { 0 };
    let last = LAST + Duration::from_secs(linger.into());
    let (mut arrived, mut read, mut answered) = (AnswerPart::Nothing, 0, None);
    let mut console = WatchedConsole::new(folder.path().join(CONSOLE));
    let ended = machine.run(limit, |_| {
        session.check()?;
        held.iter_mut().for_each(HeldMemory::look);
        if !keep_running && console.has_complained_for(REST) {
            return Ok(true);
        }
        let length = fs::metadata(&line).map_or(0, |file| file.len());
        if length != read {
            read = length;
            arrived = decode(&fs::read(&line).unwrap_or_default());
        }
        let whole = matches!(arrived, AnswerPart::All(_));
        Ok(whole && answered.get_or_insert_with(Instant::now).elapsed() > last)
    })?;
    if let (Some(held), Some(_)) = (&held, answered) {
        session.note(&held.said());
    }
    for place in warnings(&ended.console) {
        session.note(&format!("the kernel in the machine warned at {place}"));
    }
    let answer = match (arrived, complaint(&ended.console)) {
        (AnswerPart::All(answer), None) => Ok(*answer),
        (AnswerPart::All(answer), Some(it)) if keep_running => {
            session.note(&format!("the kernel in the machine said: {}", it.cause));
            Ok(*answer)
        }
        (_, Some(it)) => {
            let end = if keep_running { "" } else { " (--keep-running lets it go on)" };
            let (cause, context) = (it.cause, it.context);
            Err(no_report(format!("{cause}\nthat ended the machine{end}; it said:\n  {context}")))
        }
        (arrived, None) => Err(no_report(format!(
            "{}{}{}{}",
            hung(&ended.at, linux.kernel),
            reason(ended.status, &arrived, limit),
            last_lines("the console", &ended.console),
            last_lines("QEMU", &ended.complaints),
        ))),
    };
    Ok(Outcome { answer, console: ended.console })
}

/// Memory of this host that QEMU holds.
struct HeldMemory {
    /// The file with QEMU's process.
    file: PathBuf,
    /// Bytes, at most and at last.
    most: u64,
    last: u64,
}

impl HeldMemory {
    /// Looks again, while QEMU is there.
    fn look(&mut self) {
        let pid = fs::read_to_string(&self.file).unwrap_or_default();
        let statm = fs::read_to_string(format!("/proc/{}/statm", pid.trim())).unwrap_or_default();
        let pages = statm.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok());
        // A process that has ended holds nothing.
        if let Some(pages) = pages.filter(|pages| *pages > 0) {
            self.last = pages * rustix::param::page_size() as u64;
            self.most = self.most.max(self.last);
        }
    }

    fn said(&self) -> String {
        format!(
            "free page reporting: QEMU held {} of this host's memory at most, and {} at the end, \
             {LINGER} s after the command",
            bytes(self.most),
            bytes(self.last)
        )
    }
}

/// Returns where the kernel was when the time limit came, if its System.map lies beside it.
fn hung(at: &[u64], kernel: &Path) -> String {
    let map = fs::read_to_string(kernel.with_file_name("System.map")).unwrap_or_default();
    match functions(&map, at).first() {
        Some(function) => format!("the kernel was in {function}: "),
        None => String::new(),
    }
}

/// The file of a console that is watched for complaints.
struct WatchedConsole {
    path: PathBuf,
    /// What was read of it: whole lines.
    read: usize,
    since: Option<Instant>,
}

impl WatchedConsole {
    const fn new(path: PathBuf) -> Self {
        Self { path, read: 0, since: None }
    }

    /// Returns whether the kernel complained at least this time ago.
    fn has_complained_for(&mut self, time: Duration) -> bool {
        let length = fs::metadata(&self.path).map_or(0, |file| file.len() as usize);
        if self.since.is_none() && length > self.read {
            let bytes = fs::read(&self.path).unwrap_or_default();
            let new = bytes.get(self.read..).unwrap_or_default();
            let whole = new.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
            if is_wrong(&String::from_utf8_lossy(&new[..whole])) {
                self.since = Some(Instant::now());
            }
            self.read += whole;
        }
        self.since.is_some_and(|since| since.elapsed() >= time)
    }
}

/// Returns why a machine gave no answer. It ended with `status`, or was ended at the time limit
/// (`None`).
fn reason(status: Option<ExitStatus>, arrived: &AnswerPart, limit: Duration) -> String {
    let arrived = match arrived {
        AnswerPart::Part(some, all) => format!("after {some} of {all} bytes of its report"),
        AnswerPart::Damaged => "after a report that was damaged on its way".to_owned(),
        _ => "without a report".to_owned(),
    };
    match status {
        Some(status) if status.success() => format!("the machine ended {arrived}"),
        Some(status) => format!("the machine ended {arrived} (QEMU: {status})"),
        None => {
            let limit = humantime::format_duration(limit);
            format!("the machine was ended after {limit} (--time-limit) {arrived}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use slat_kernel::vm::Architecture;

    #[test]
    fn a_machine_that_memory_cannot_hold_is_not_started() {
        let linux = Linux {
            arch: Architecture::X86_64,
            cpus: 1,
            memory: 1 << 60,
            numa_nodes: 1,
            kernel: Path::new("/nowhere"),
            initramfs: &[],
            append: "",
            cpu: None,
            reports_free_pages: false,
            counts_instructions: false,
        };
        let refused =
            run(&linux, Duration::ZERO, false, &Session::quiet()).unwrap_err().to_string();
        assert!(refused.starts_with("the guest needs"), "{refused}");
    }

    #[test]
    fn what_a_process_holds_is_kept_when_it_has_ended() {
        let folder = tempfile::tempdir().unwrap();
        let mut held = HeldMemory { file: folder.path().join("pid"), most: 0, last: 0 };
        held.look();
        assert_eq!((held.most, held.last), (0, 0));
        fs::write(&held.file, format!("{}\n", std::process::id())).unwrap();
        held.look();
        assert!(held.last > 0 && held.most == held.last);
        (held.most, held.last) = (300 << 20, 20 << 20);
        fs::write(&held.file, "4194305").unwrap();
        held.look();
        let said = held.said();
        assert!(said.contains("held 300 MiB") && said.contains("20 MiB at the end"), "{said}");
    }

    #[test]
    fn a_machine_without_an_answer_says_how_far_it_came() {
        let limit = Duration::from_secs(90);
        let reason = |status, arrived| reason(status, &arrived, limit);
        assert_eq!(
            reason(None, AnswerPart::Part(3, 9)),
            "the machine was ended after 1m 30s (--time-limit) after 3 of 9 bytes of its report"
        );
        let ended = reason(Some(ExitStatus::default()), AnswerPart::Nothing);
        assert_eq!(ended, "the machine ended without a report");
    }

    #[test]
    fn a_console_complains_only_once_the_whole_line_is_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(CONSOLE);
        let mut watched = WatchedConsole::new(path.clone());
        let mut complained = |text: &str| {
            fs::write(&path, text).unwrap();
            watched.has_complained_for(Duration::ZERO)
        };
        assert!(!complained("[1.0] fine\n[1.1] kernel BUG"));
        assert!(complained("[1.0] fine\n[1.1] kernel BUG at a.c:1!\n"));
    }
}
