//! Runs the machine, from its start until its answer has arrived.

use anyhow::Context;
use slat_kernel::vm::Linux;
use slat_kernel::vm::qemu::last_lines;
use slat_lab::failure::no_report;
use slat_lab::first::job::{Answer, Arrived, decode};
use slat_lab::session::Session;
use std::fs;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

/// How long a machine that has answered may take to power itself off.
const LAST: Duration = Duration::from_secs(10);

/// The outcome of a machine's run.
#[derive(Debug)]
pub struct Outcome {
    /// The answer of its first process, or why there is none.
    pub answer: anyhow::Result<Answer>,
    /// All output of its console.
    pub console: String,
}

/// Starts the machine, and waits for its answer and its end. Its process and its files are removed
/// in any case.
///
/// # Errors
/// Returns [`Failure::Interrupted`](slat_lab::failure::Failure::Interrupted) if the session was
/// stopped, or an error if this machine or a control group has too little memory left, if QEMU
/// cannot be started or files cannot be written. A machine without an answer is not an error: its
/// [`Outcome`] says why.
pub fn run(linux: &Linux, limit: Duration, session: &Session) -> anyhow::Result<Outcome> {
    slat_kvm::meminfo::check(linux.memory)?;
    let folder = tempfile::Builder::new().prefix("slat-emulate-").tempdir();
    let folder = folder.context("cannot make a temporary directory")?;
    let (machine, line) = linux.machine(folder.path())?;
    let (mut arrived, mut read, mut answered) = (Arrived::Nothing, 0, None);
    let ended = machine.run(limit, |_| {
        session.check()?;
        let length = fs::metadata(&line).map_or(0, |file| file.len());
        if length != read {
            read = length;
            arrived = decode(&fs::read(&line).unwrap_or_default());
        }
        let whole = matches!(arrived, Arrived::All(_));
        Ok(whole && answered.get_or_insert_with(Instant::now).elapsed() > LAST)
    })?;
    let answer = match arrived {
        Arrived::All(answer) => Ok(*answer),
        arrived => Err(no_report(format!(
            "{}{}{}{}",
            panicked(&ended.console).map(|why| format!("{why}: ")).unwrap_or_default(),
            reason(ended.status, &arrived, limit),
            last_lines("the console", &ended.console),
            last_lines("QEMU", &ended.complaints),
        ))),
    };
    Ok(Outcome { answer, console: ended.console })
}

/// Returns the console's line on the panic of the kernel, if it has one.
fn panicked(console: &str) -> Option<&str> {
    const PANIC: &str = "Kernel panic - not syncing: ";
    let at = console.find(PANIC)?;
    console[at..].lines().next().map(|line| line.trim_end())
}

/// Returns why a machine gave no answer. It ended with `status`, or was ended at the time limit
/// (`None`).
fn reason(status: Option<ExitStatus>, arrived: &Arrived, limit: Duration) -> String {
    let arrived = match arrived {
        Arrived::Part(some, all) => format!("after {some} of {all} bytes of its report"),
        Arrived::Damaged => "after a report that was damaged on its way".to_owned(),
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
    use std::path::Path;

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
            counts_instructions: false,
        };
        let refused = run(&linux, Duration::ZERO, &Session::quiet()).unwrap_err().to_string();
        assert!(refused.starts_with("the guest needs"), "{refused}");
    }

    #[test]
    fn a_machine_without_an_answer_says_how_far_it_came() {
        let limit = Duration::from_secs(90);
        let reason = |status, arrived| reason(status, &arrived, limit);
        assert_eq!(
            reason(None, Arrived::Part(3, 9)),
            "the machine was ended after 1m 30s (--time-limit) after 3 of 9 bytes of its report"
        );
        let ended = reason(Some(ExitStatus::default()), Arrived::Nothing);
        assert_eq!(ended, "the machine ended without a report");
        let console = "[0.7] Kernel panic - not syncing: VFS: no root\r\n[0.8] CPU: 0\r\n";
        assert_eq!(panicked(console), Some("Kernel panic - not syncing: VFS: no root"));
        assert_eq!(panicked("[0.7] fine"), None);
    }
}
