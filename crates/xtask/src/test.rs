//! `cargo xtask test`: runs every stage, and always prints a summary at the end.

use crate::stages::Stage;
use crate::workspace::{Outcome, cpu_seconds};
use crate::{emulators, in_ci, peers, target};
use anyhow::{Context, anyhow, bail, ensure};
use clap::ValueEnum;
use std::fs::File;
use std::path::PathBuf;
use std::process::Command;
use std::sync::mpsc::Receiver;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Words in the reasons of skips that are allowed anywhere, because no package provides what is
/// missing. Any other skip fails in CI, which has installed what can be installed.
const EXPECTED: [&str; 5] = [
    // The machine has no KVM, or reserves it for others.
    "/dev/kvm",
    // The machine's owner has to fill pools of huge pages.
    "huge pages of",
    // The main job has a time limit, and names the command that runs more.
    "`slat bench dirty-log` runs more",
    // They do not depend on what has changed since.
    "the series in C compiled and booted before",
    // The public API is compared with a release, or with the commit that one names.
    "there is no tag, and SLAT_API_BASE names no commit",
];

fn is_expected(skip: &str) -> bool {
    EXPECTED.iter().any(|words| skip.contains(words))
}

/// Stages that run in the background, one after the other, since no stage keeps two CPUs busy all
/// the time. Their output is printed at their place in the order.
struct Beside {
    stages: Vec<Stage>,
    done: Receiver<(anyhow::Result<()>, Duration)>,
}

impl Beside {
    /// Starts those of the first stages whose builds no other stage needs, if there are other
    /// stages to run at the same time.
    fn first(stages: &[Stage], long: bool) -> Self {
        let chosen = |stage: &Stage| stages.contains(stage);
        // Most of the time of kernels one CPU emulates. It runs a copy of `slat`, and takes as long
        // as all others together.
        let mut beside = vec![Stage::Static, Stage::Kernels];
        beside.retain(|stage| chosen(stage) && [Stage::Tests, Stage::Formats].iter().any(chosen));
        Self::start(beside, long)
    }

    /// Runs emulated machines during the tests, which wait for guests and for each other.
    fn tests(stages: &[Stage], long: bool) -> Self {
        let mut beside = vec![Stage::Emulators, Stage::Hypervisor];
        beside.retain(|stage| stages.contains(&Stage::Tests) && stages.contains(stage));
        Self::start(beside, long)
    }

    fn start(beside: Vec<Stage>, long: bool) -> Self {
        let (ended, done) = std::sync::mpsc::channel();
        let run = beside.clone();
        std::thread::spawn(move || {
            run.into_iter().try_for_each(|stage| {
                let begin = Instant::now();
                let done = logged(stage, long);
                ended.send((done, begin.elapsed())).ok()
            })
        });
        Self { stages: beside, done }
    }

    /// Waits for one of them; also returns how long it ran.
    fn end(&self, stage: Stage) -> (anyhow::Result<Outcome>, Duration) {
        let Ok((done, took)) = self.done.recv() else {
            return (Err(anyhow!("it did not run")), Duration::ZERO);
        };
        let output = std::fs::read_to_string(log(stage)).unwrap_or_default();
        print!("{output}");
        (done.map(|()| Outcome::Ran(left_out(&output, stage))), took)
    }
}

/// Returns what a stage left out, as the summary of its own process names it.
fn left_out(output: &str, stage: Stage) -> Vec<String> {
    let summary = output.split_once(SKIPPED).map_or("", |(_, summary)| summary);
    let prefix = format!("  {}: ", name(stage));
    summary.lines().map_while(|line| line.strip_prefix(&prefix)).map(str::to_owned).collect()
}

/// Begins the list of what was skipped.
const SKIPPED: &str = "\nSkipped:\n";

fn log(stage: Stage) -> PathBuf {
    target().join(format!("{}.log", name(stage)))
}

/// Runs a stage as a process, with its output in its log.
fn logged(stage: Stage, long: bool) -> anyhow::Result<()> {
    let log = log(stage);
    let file = File::create(&log).with_context(|| log.display().to_string())?;
    let mut xtask = Command::new(std::env::current_exe().context("where is xtask?")?);
    xtask.args(["test", &name(stage)]).args(long.then_some("--long"));
    xtask.stderr(file.try_clone().context("a second handle of a log")?).stdout(file);
    let status = xtask.status().context("xtask does not start")?;
    ensure!(status.success(), "{status}");
    Ok(())
}

/// Installs and unpacks what the last stages need, while the first ones compile. A failure is
/// reported by the stage that needs it, which tries again.
fn fetch(stages: &[Stage]) -> Option<JoinHandle<()>> {
    let needed = [Stage::Peers, Stage::Emulators].map(|stage| stages.contains(&stage));
    let fetch = move || {
        if needed[0] {
            _ = peers::tree();
        }
        if needed[1] {
            _ = emulators::install();
        }
    };
    needed.contains(&true).then(|| std::thread::spawn(fetch))
}

/// Runs the named stages, or those of [`Stage::all`].
pub fn run(chosen: &[Stage], deep: bool, long: bool) -> anyhow::Result<()> {
    let stages = if chosen.is_empty() { Stage::all(deep, long) } else { chosen.to_vec() };
    let mut fetching = fetch(&stages);
    let mut beside = vec![Beside::first(&stages, long)];
    let start = Instant::now();
    let mut summary = Vec::new();
    let mut skipped = Vec::new();
    let mut failed = Vec::new();
    for (index, stage) in stages.iter().enumerate() {
        let name = name(*stage);
        println!("\n== {name} ({} of {})", index + 1, stages.len());
        let begin = Instant::now();
        if matches!(stage, Stage::Tests | Stage::Peers | Stage::Emulators)
            && let Some(fetching) = fetching.take()
        {
            _ = fetching.join();
        }
        if *stage == Stage::Tests {
            beside.push(Beside::tests(&stages, long));
        }
        let apart = beside.iter().find(|beside| beside.stages.contains(stage));
        let (done, took, when) = if let Some(beside) = apart {
            let (done, took) = beside.end(*stage);
            (done, took, ", beside others")
        } else {
            (stage.run(long), begin.elapsed(), "")
        };
        let word = match done {
            Ok(Outcome::Ran(left_out)) => {
                skipped.extend(left_out.into_iter().map(|what| format!("{name}: {what}")));
                "passed"
            }
            Ok(Outcome::Skipped(reason)) => {
                skipped.push(format!("{name}: {reason}"));
                "skipped"
            }
            Err(error) => {
                eprintln!("{name}: {error:#}");
                failed.push(name.clone());
                "FAILED"
            }
        };
        summary.push(format!("{name:<12} {:>7.1} s  {word}{when}", took.as_secs_f64()));
    }
    let (all, used) = (start.elapsed().as_secs_f64(), cpu_seconds());
    summary.push(format!("{:<12} {all:>7.1} s, {used} s of CPUs", "all"));
    println!("\n{}", summary.join("\n"));
    if !skipped.is_empty() {
        println!("{SKIPPED}  {}", skipped.join("\n  "));
    }
    let unexpected: Vec<_> = skipped.iter().filter(|skip| !is_expected(skip)).collect();
    if in_ci() && !unexpected.is_empty() {
        println!("\nOf these, not expected:");
        unexpected.iter().for_each(|skip| println!("  {skip}"));
        failed.push("skips that are not expected".to_owned());
    }
    if !failed.is_empty() {
        bail!("failed: {}", failed.join(", "));
    }
    println!("\n{} stages, none failed.", stages.len());
    if !long {
        println!("Longer histories and more interleavings: cargo xtask test --long");
    }
    Ok(())
}

fn name(stage: Stage) -> String {
    stage.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_packages_cannot_provide_is_expected_to_be_skipped() {
        assert!(is_expected("tests: /dev/kvm does not exist"));
        assert!(is_expected(
            "end-to-end: dirty-log on hugetlb-2m: 128 huge pages of 2m are needed"
        ));
        assert!(!is_expected("emulators: qemu-system-arm cannot be installed"));
        assert!(!is_expected("peers: no package linux-source"));
    }

    #[test]
    fn what_a_stage_beside_the_tests_left_out_is_in_the_summary() {
        let output =
            format!("all 1.0 s\n{SKIPPED}  emulators: no kernel\n\n1 stages, none failed.");
        assert_eq!(left_out(&output, Stage::Emulators), ["no kernel"]);
        assert_eq!(left_out("1 stages, none failed.", Stage::Emulators), [""; 0]);
    }
}
