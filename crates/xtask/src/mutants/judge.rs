//! Runs tests until one fails.

use super::together::{REACHED, VARIABLE};
use super::tree::Programs;
use super::{FEWER, Fate};
use anyhow::{Context, bail, ensure};
use std::collections::BTreeSet;
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
/// Time limit of tests: a multiple of their time without a mutant, and a constant. The second is of
/// those that passed the first limit, because the machine may be busy.
const PATIENCE: [(u32, Duration); 2] = [(5, Duration::from_secs(3)), (10, Duration::from_secs(20))];
/// Time of the tests that run together at first; each run after it takes this many times as long.
const FIRST: Duration = Duration::from_millis(100);
const GROWS: u32 = 4;

/// A test, without a mutant.
struct Test {
    /// Whether it is in the larger program.
    larger: bool,
    name: String,
    takes: Duration,
    /// The mutants at which it comes past.
    reaches: BTreeSet<u32>,
}

/// The tests of a library, the shortest first.
pub struct Judge {
    tests: Vec<Test>,
}

enum End {
    Passed,
    Failed,
    TooLate,
}

impl Judge {
    /// Runs each test once: it has to pass without a mutant.
    pub fn new(programs: &Programs, jobs: Option<NonZeroUsize>) -> anyhow::Result<Self> {
        let mut names = Vec::new();
        for larger in [false, true] {
            let mut list = Command::new(programs.which(larger));
            list.args(["--list", "--format=terse"]).current_dir(&programs.folder);
            let output = list.output().context("cannot start a test program")?;
            let text = String::from_utf8(output.stdout).context("a test's name")?;
            let tests = text.lines().filter_map(|line| line.strip_suffix(": test"));
            names.extend(tests.map(|name| (larger, name.to_owned())));
        }
        let mut tests = by_all(&names, jobs, |(larger, name)| {
            let reached = programs.which(*larger).with_extension(format!("{name}.reached"));
            _ = std::fs::remove_file(&reached);
            let begin = Instant::now();
            let run = (*larger, &[&**name][..]);
            let end = meet(programs, run, &[(REACHED, &reached)], Duration::from_secs(600))?;
            ensure!(matches!(end, End::Passed), "{name} fails without a mutant");
            let takes = begin.elapsed();
            let text = std::fs::read_to_string(&reached).unwrap_or_default();
            _ = std::fs::remove_file(&reached);
            let reaches = text.lines().map(str::parse).collect::<Result<_, _>>();
            let reaches = reaches.context("a mutant's number")?;
            Ok(Test { larger: *larger, name: name.clone(), takes, reaches })
        })?;
        tests.sort_by_key(|test| test.takes);
        Ok(Self { tests })
    }

    /// Returns the result of a mutant that was built into the programs, or of the only one in them.
    pub fn fate(&self, programs: &Programs, mutant: Option<u32>) -> anyhow::Result<Fate> {
        let reaches = |test: &&Test| mutant.is_none_or(|it| test.reaches.contains(&it));
        let tests: Vec<&Test> = self.tests.iter().filter(reaches).collect();
        let number = mutant.map(|number| number.to_string()).unwrap_or_default();
        let variable = [(VARIABLE, Path::new(&number))];
        let mut fate = Fate::Missed;
        let (mut rest, mut most) = (&tests[..], FIRST);
        while !rest.is_empty() {
            let mut takes = Duration::ZERO;
            let fits = rest.iter().take_while(|test| {
                takes += test.takes;
                takes <= most
            });
            let (now, later) = rest.split_at(fits.count().max(1));
            (rest, most) = (later, most * GROWS);
            for larger in [false, true] {
                let now = || now.iter().filter(|test| test.larger == larger);
                let names: Vec<&str> = now().map(|test| &*test.name).collect();
                let takes: Duration = now().map(|test| test.takes).sum();
                let mut end = End::Passed;
                for (times, besides) in PATIENCE {
                    if !names.is_empty() {
                        end = meet(programs, (larger, &names), &variable, takes * times + besides)?;
                    }
                    if !matches!(end, End::TooLate) {
                        break;
                    }
                }
                match end {
                    End::Passed => {}
                    End::Failed => return Ok(Fate::Caught),
                    End::TooLate => fate = Fate::Timeout,
                }
            }
            if fate == Fate::Timeout {
                return Ok(fate);
            }
        }
        Ok(fate)
    }

    /// Returns the results of mutants in their order, with `jobs` of them at a time; calls `tell`
    /// with each result.
    pub fn fates(
        &self,
        programs: &Programs,
        mutants: &[u32],
        jobs: Option<NonZeroUsize>,
        tell: impl Fn(u32, Fate) + Sync,
    ) -> anyhow::Result<Vec<(u32, Fate)>> {
        by_all(mutants, jobs, |&mutant| {
            let fate = self.fate(programs, Some(mutant))?;
            tell(mutant, fate);
            Ok((mutant, fate))
        })
    }
}

/// Does `work` with each item, with `jobs` of them at a time, or as many as there are CPUs.
fn by_all<I: Sync, R: Send>(
    items: &[I],
    jobs: Option<NonZeroUsize>,
    work: impl Fn(&I) -> anyhow::Result<R> + Sync,
) -> anyhow::Result<Vec<R>> {
    let next = AtomicUsize::new(0);
    let all = Mutex::new(Vec::new());
    let one = || {
        while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
            let result = work(item)?;
            all.lock().unwrap_or_else(PoisonError::into_inner).push(result);
        }
        anyhow::Ok(())
    };
    let jobs = jobs.map_or_else(std::thread::available_parallelism, Ok)?.get();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..jobs).map(|_| scope.spawn(one)).collect();
        threads.into_iter().try_for_each(|thread| match thread.join() {
            Ok(done) => done,
            Err(_) => bail!("a thread that runs tests panicked"),
        })
    })?;
    Ok(all.into_inner().unwrap_or_else(PoisonError::into_inner))
}

/// Runs these tests of a program with variables of the environment.
fn meet(
    programs: &Programs,
    (larger, names): (bool, &[&str]),
    variables: &[(&str, &Path)],
    limit: Duration,
) -> anyhow::Result<End> {
    let mut tests = Command::new("prlimit");
    tests.args([MEMORY, "--"]).arg(programs.which(larger));
    tests.args(["--test-threads=1", "--exact"]).args(names).current_dir(&programs.folder);
    tests.envs(FEWER).env_remove(VARIABLE).envs(variables.iter().copied());
    tests.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut tests = tests.spawn().context("cannot start prlimit (util-linux)")?;
    let output = tests.stdout.take().context("a program's output")?;
    let (failed, failure) = mpsc::channel();
    std::thread::spawn(move || {
        let mut lines = BufReader::new(output).lines().map_while(Result::ok);
        _ = lines.any(|line| line.ends_with("... FAILED") && failed.send(()).is_ok());
    });
    let end = match failure.recv_timeout(limit) {
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
