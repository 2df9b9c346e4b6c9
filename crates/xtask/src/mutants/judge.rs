//! Runs tests until one fails.

use super::together::VARIABLE;
use super::tree::Programs;
use super::{FEWER, Fate, Library};
use anyhow::{Context, bail};
use std::io::{BufRead, BufReader};
use std::num::NonZeroUsize;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Limit of a test program's address space, because a mutant may allocate without end.
const MEMORY: &str = "--as=16000000000";
/// Time limit of tests: a multiple of their time without a mutant, and a constant.
const PATIENCE: (u32, Duration) = (5, Duration::from_secs(10));

/// A run of a test program.
struct Run<'a> {
    program: &'a Path,
    arguments: Vec<String>,
    /// Its time without a mutant.
    takes: Duration,
}

/// The runs of each mutant, the shortest first.
pub struct Judge<'a> {
    programs: &'a Programs,
    runs: Vec<Run<'a>>,
}

enum End {
    Passed,
    Failed,
    TooLate,
}

impl<'a> Judge<'a> {
    /// Runs all tests once: they have to pass without a mutant.
    pub fn new(library: &Library, programs: &'a Programs) -> anyhow::Result<Self> {
        let skips = library.slow.iter().map(|filter| format!("--skip={filter}"));
        let skips: Vec<String> = skips.collect();
        let slow: Vec<String> = library.slow.iter().map(|&filter| filter.to_owned()).collect();
        // Slow tests are in both programs.
        let both = [&programs.larger, &programs.unit];
        let mut runs: Vec<_> = both.map(|program| (program, skips.clone())).into();
        if !slow.is_empty() {
            runs.extend(both.map(|program| (program, slow.clone())));
        }
        let runs = runs.into_iter().map(|(program, mut arguments): (_, Vec<String>)| {
            arguments.push("--test-threads=1".to_owned());
            Run { program, arguments, takes: Duration::from_secs(600) }
        });
        let mut judge = Self { programs, runs: runs.collect() };
        for place in 0..judge.runs.len() {
            let begin = Instant::now();
            let End::Passed = judge.meet(&judge.runs[place], None)? else {
                bail!("{} fails without a mutant", judge.runs[place].program.display());
            };
            judge.runs[place].takes = begin.elapsed();
        }
        judge.runs.sort_by_key(|run| run.takes);
        Ok(judge)
    }

    /// Returns the result of a mutant that was built into the programs, or of the only one in them.
    pub fn fate(&self, mutant: Option<u32>) -> anyhow::Result<Fate> {
        let mut fate = Fate::Missed;
        for run in &self.runs {
            let mut end = self.meet(run, mutant)?;
            // The cause may be a busy machine.
            if let End::TooLate = end {
                end = self.meet(run, mutant)?;
            }
            match end {
                End::Passed => {}
                End::Failed => return Ok(Fate::Caught),
                End::TooLate => fate = Fate::Timeout,
            }
        }
        Ok(fate)
    }

    /// Returns a judge for other programs that were built from the same tests.
    pub fn of<'b>(&self, programs: &'b Programs) -> Judge<'b> {
        let of = |run: &Run| {
            let larger = run.program == self.programs.larger;
            let program: &Path = if larger { &programs.larger } else { &programs.unit };
            Run { program, arguments: run.arguments.clone(), takes: run.takes }
        };
        Judge { programs, runs: self.runs.iter().map(of).collect() }
    }

    /// Returns the results of mutants in their order, with `jobs` of them at a time, or as many as
    /// there are CPUs; calls `tell` with each result.
    pub fn fates(
        &self,
        mutants: &[u32],
        jobs: Option<NonZeroUsize>,
        tell: impl Fn(u32, Fate) + Sync,
    ) -> anyhow::Result<Vec<(u32, Fate)>> {
        let next = AtomicUsize::new(0);
        let all = Mutex::new(Vec::new());
        let work = || {
            while let Some(&mutant) = mutants.get(next.fetch_add(1, Ordering::Relaxed)) {
                let fate = self.fate(Some(mutant))?;
                tell(mutant, fate);
                all.lock().unwrap_or_else(PoisonError::into_inner).push((mutant, fate));
            }
            anyhow::Ok(())
        };
        let jobs = jobs.map_or_else(std::thread::available_parallelism, Ok)?.get();
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..jobs).map(|_| scope.spawn(work)).collect();
            threads.into_iter().try_for_each(|thread| match thread.join() {
                Ok(done) => done,
                Err(_) => bail!("a thread that runs tests panicked"),
            })
        })?;
        Ok(all.into_inner().unwrap_or_else(PoisonError::into_inner))
    }

    fn meet(&self, run: &Run, mutant: Option<u32>) -> anyhow::Result<End> {
        let mut tests = Command::new("prlimit");
        tests.args([MEMORY, "--"]).arg(run.program).args(&run.arguments);
        tests.envs(FEWER).env_remove(VARIABLE).current_dir(&self.programs.folder);
        if let Some(mutant) = mutant {
            tests.env(VARIABLE, mutant.to_string());
        }
        tests.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut tests = tests.spawn().context("cannot start prlimit (util-linux)")?;
        let output = tests.stdout.take().context("a program's output")?;
        let (failed, failure) = mpsc::channel();
        std::thread::spawn(move || {
            let mut lines = BufReader::new(output).lines().map_while(Result::ok);
            _ = lines.any(|line| line.ends_with("... FAILED") && failed.send(()).is_ok());
        });
        let (times, besides) = PATIENCE;
        let end = match failure.recv_timeout(run.takes * times + besides) {
            Ok(()) => End::Failed,
            Err(RecvTimeoutError::Timeout) => End::TooLate,
            // Its output has ended, so the program has ended.
            Err(RecvTimeoutError::Disconnected) => {
                let status = tests.wait().context("a test program")?;
                return Ok(if status.success() { End::Passed } else { End::Failed });
            }
        };
        _ = tests.kill();
        tests.wait().context("a test program")?;
        Ok(end)
    }
}
