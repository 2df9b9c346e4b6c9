//! Finds the commit of a range from which on a phase takes more or fewer instructions.

use crate::cli::{BisectArgs, EmulateArgs, KernelChoice, PatchesArgs, TreeChoice};
use crate::in_turns::{boots, run_of, turns};
use serde::Serialize;
use slat_kernel::Revision;
use slat_lab::compare::{Comparison, EXACT, Pair, Run, Verdict, compare};
use slat_lab::failure::{bad_input, is_bad_input, is_interruption};
use slat_lab::numbers::thousands;
use slat_lab::report::comparison::answer;
use slat_lab::session::Session;
use std::fmt::Write as _;
use std::path::Path;

/// Boots of a commit between the ends, whose kernel is only told from those of the ends.
const BOOTS: u32 = 3;

/// What came of it.
#[derive(Debug, Serialize)]
pub struct Bisection {
    /// The answer in one line.
    pub answer: String,
    /// The commit that changed the count; the first of several where those before it could not be
    /// told.
    pub commit: String,
    /// Its subject.
    pub subject: String,
    /// The phase.
    pub phase: String,
    /// Commits between it and the last good one whose kernels could not be told.
    pub passed_over: usize,
    /// Each kernel that was booted.
    pub steps: Vec<Step>,
    /// The command that repeats the answer.
    pub command: String,
}

/// A kernel that was booted.
#[derive(Debug, Serialize)]
pub struct Step {
    /// The commit.
    pub commit: String,
    /// Its subject.
    pub subject: String,
    /// Instructions of the phase, or why there are none.
    pub instructions: Result<f64, String>,
}

/// Searches the range.
///
/// # Errors
/// A revision does not exist, the ends do not differ, or their kernels cannot be built or booted.
pub fn run(args: &BisectArgs, session: &mut Session) -> anyhow::Result<Bisection> {
    let repository = Path::new(&args.tree);
    let find = |name: &str| {
        Revision::find(repository, name).map_err(|error| bad_input(format!("{error:#}")))
    };
    let (good, bad) = (find(&args.good)?, find(&args.bad)?);
    let commits = good.commits(&bad)?;
    if commits.is_empty() {
        return Err(bad_input(format!("no commit is in {}..{}", args.good, args.bad)));
    }
    let machine = |commit: &str| -> EmulateArgs {
        let tree = format!("{}@{commit}", args.tree);
        let choice = KernelChoice::Tree(TreeChoice { tree, edits: Vec::new() });
        let mut counted = args.counted.clone();
        // Calls do not decide.
        counted.probe = vec!["none".to_owned()];
        counted.machine(choice, PatchesArgs::default())
    };
    let ends = [machine(&good.commit), machine(&bad.commit)];
    let both = turns(&ends, args.counted.boots, session)?;
    let (first, last) = (run_of(&both[0].report)?, run_of(&both[1].report)?);
    let comparison = compare(&first, &last, EXACT);
    let pair = differing(&comparison, args.phase.as_deref())?;
    let [low, high] = pair.middles;
    let value = |run: &Run| -> Option<f64> {
        let pairs = compare(&first, run, EXACT).pairs;
        let same = |other: &&Pair| other.what == pair.what && other.params == pair.params;
        pairs.iter().find(same).map(|pair| pair.middles[1])
    };
    let mut steps = Vec::new();
    session.start("commits", u64::from(commits.len().ilog2()) + 1);
    let (last_good, first_bad) = search(commits.len(), |at| {
        let (commit, subject) = &commits[at];
        let counted = boots(&machine(commit), BOOTS, session).and_then(|it| run_of(&it));
        let counted = match counted {
            Err(error) if is_interruption(&error) || is_bad_input(&error) => return Err(error),
            Err(error) => Err(first_line(&error)),
            Ok(run) => value(&run).ok_or_else(|| "it has no such phase".to_owned()),
        };
        let is_bad = counted.as_ref().ok().map(|count| is_nearer(*count, low, high));
        let (commit, subject) = (commit.clone(), subject.clone());
        steps.push(Step { commit, subject, instructions: counted });
        session.step();
        Ok(is_bad)
    })?;
    session.finish();
    let (commit, subject) = commits[first_bad].clone();
    let passed_over = first_bad - (last_good + 1) as usize;
    let words = if high > low { "more" } else { "fewer" };
    let mut text = format!(
        "{} {subject}: {}: {:.1} % {words} instructions",
        commit.get(..12).unwrap_or(&commit),
        pair.what[2],
        ((high / low) - 1.0).abs() * 100.0
    );
    if passed_over > 0 {
        let _ = write!(text, "; or one of the {passed_over} commits before it");
    }
    let command = format!(
        "slat kernel ab tree:{tree}@{commit}^ tree:{tree}@{commit}{} -- {}",
        args.counted.arch.map_or_else(String::new, |arch| format!(" --arch {arch}")),
        args.counted.command.join(" "),
        tree = args.tree
    );
    let phase = pair.what[2].clone();
    Ok(Bisection { answer: text, commit, subject, phase, passed_over, steps, command })
}

fn first_line(error: &anyhow::Error) -> String {
    format!("{error:#}").lines().next().unwrap_or_default().to_owned()
}

/// Returns the pair of the ends that differs, and most of those.
fn differing<'c>(comparison: &'c Comparison, phase: Option<&str>) -> anyhow::Result<&'c Pair> {
    let of_phase = |pair: &&Pair| phase.is_none_or(|phase| pair.what[2] == phase);
    // Pairs that differ come first, that which differs most before others.
    let pair = comparison.pairs.iter().find(of_phase).ok_or_else(|| {
        bad_input(format!("--phase {}: there is no such phase", phase.unwrap_or_default()))
    })?;
    match pair.verdict {
        Verdict::Slower | Verdict::Faster => Ok(pair),
        _ => anyhow::bail!("the ends do not differ: {}", answer(comparison, crate::params::PARAMS)),
    }
}

/// Returns whether a count is nearer to the second of two, by ratio.
fn is_nearer(count: f64, low: f64, high: f64) -> bool {
    (count / high).ln().abs() < (count / low).ln().abs()
}

/// Searches commits `0..count` for the first that is bad; the last one is, and what is before the
/// first is not. Returns the number of commits that are known to be good, less one, as an index,
/// and the index of the first that is known to be bad. `is_bad` returns `None` for one that cannot
/// be told.
///
/// # Errors
/// Those of `is_bad`.
fn search(
    count: usize,
    mut is_bad: impl FnMut(usize) -> anyhow::Result<Option<bool>>,
) -> anyhow::Result<(isize, usize)> {
    let (mut good, mut bad) = (-1_isize, count.saturating_sub(1));
    let mut unknown = Vec::new();
    loop {
        let next = (good + 1) as usize..bad;
        // The nearest to the middle that is not known to be untellable.
        let middle = next.start.midpoint(next.end);
        let left = next.filter(|at| !unknown.contains(at));
        let Some(at) = left.min_by_key(|at| at.abs_diff(middle)) else { return Ok((good, bad)) };
        match is_bad(at)? {
            Some(true) => bad = at,
            Some(false) => good = at as isize,
            None => unknown.push(at),
        }
    }
}

impl Bisection {
    /// Returns all of it as text.
    pub fn shown(&self) -> String {
        let mut shown = format!("{}\n\n", self.answer);
        for Step { commit, subject, instructions } in &self.steps {
            let count = match instructions {
                Ok(count) => thousands(count.round() as i64),
                Err(why) => why.clone(),
            };
            let commit = commit.get(..12).unwrap_or(commit);
            let _ = writeln!(shown, "  {commit} {subject}: {count}");
        }
        let _ = writeln!(shown, "\nTo compare it with its parent: {}", self.command);
        shown
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Searches where all from `first` on are bad, and some cannot be told.
    fn found(count: usize, first: usize, unknown: &[usize]) -> ((isize, usize), usize) {
        let mut asked = 0;
        let is_bad = |at: usize| {
            asked += 1;
            Ok((!unknown.contains(&at)).then_some(at >= first))
        };
        let found = search(count, is_bad).unwrap();
        (found, asked)
    }

    #[test]
    fn the_first_bad_commit_is_found_in_a_logarithm_of_steps() {
        for count in 1..40 {
            for first in 0..count {
                let ((good, bad), asked) = found(count, first, &[]);
                assert_eq!((good, bad), (first as isize - 1, first), "{count}");
                assert!(asked <= 6, "{asked} of {count}");
            }
        }
    }

    #[test]
    fn commits_that_cannot_be_told_leave_a_range() {
        assert_eq!(found(8, 5, &[4]).0, (3, 5));
        assert_eq!(found(8, 4, &[4]).0, (3, 5));
        assert_eq!(found(3, 1, &[0, 1]).0, (-1, 2));
    }

    #[test]
    fn a_count_belongs_to_the_end_that_it_is_nearer_to() {
        assert!(is_nearer(106.0, 100.0, 108.0) && !is_nearer(101.0, 100.0, 108.0));
        assert!(is_nearer(51.0, 100.0, 50.0) && !is_nearer(99.0, 100.0, 50.0));
    }
}
