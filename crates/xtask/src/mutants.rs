//! `cargo xtask mutants`: makes small changes to the libraries, one at a time. A test has to notice
//! each, or docs/mutants.txt excuses it.

mod excused;
mod judge;
mod list;
mod table;
mod together;
mod tree;

use crate::stages::Outcome;
use crate::{in_ci, root, setup, target};
use anyhow::{Context, ensure};
use clap::Args;
use excused::Excused;
use judge::Judge;
use list::Mutant;
use std::io::IsTerminal;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use table::Row;
use tree::Tree;

/// Files to mutate.
#[derive(Debug, Args)]
pub struct MutantsArgs {
    /// Source files of slat, slat-guest and slat-reclaim, from the workspace's folder
    #[arg(required_unless_present_any = ["all", "list"])]
    files: Vec<String>,
    /// All files: takes hours
    #[arg(long, conflicts_with = "files")]
    all: bool,
    /// Only the changes that this file names, each in a line `FILE: CHANGE`, as this command prints
    /// those that no test notices. To record them, none may have been noticed before
    #[arg(long, value_name = "PATH", conflicts_with_all = ["files", "all"])]
    list: Option<PathBuf>,
    /// Leave out changes that cannot share a program with others: each takes minutes
    #[arg(long)]
    together: bool,
    /// Write the results into the table of docs/mutations.md
    #[arg(long)]
    record: bool,
    /// Test programs that run at once [default: as many as there are CPUs]
    #[arg(long, value_name = "N")]
    jobs: Option<NonZeroUsize>,
}

/// A library and its tests.
struct Library {
    name: &'static str,
    /// The larger test program, in addition to the unit tests.
    program: &'static str,
}

const LIBRARIES: [Library; 3] = [
    Library { name: "slat", program: "engine" },
    Library { name: "slat-guest", program: "memory" },
    Library { name: "slat-reclaim", program: "machine" },
];

/// Settings for few random tests, the same ones for each mutant.
const FEWER: [(&str, &str); 5] = [
    ("HISTORIES", "4"),
    ("PROPTEST_CASES", "16"),
    ("ROUNDS", "1"),
    ("RUST_BACKTRACE", "0"),
    ("SLAT_SEED", "0"),
];

/// The file that the tests' stage mutates, which takes minutes.
const STAGE: [&str; 1] = ["crates/slat-reclaim/src/page.rs"];

/// The result of a mutant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Caught,
    Missed,
    /// It does not compile.
    Unviable,
    /// A test did not end.
    Timeout,
    /// It needs a program of its own, and was left out.
    NotRun,
}

/// Mutates the files that the arguments name.
pub fn run(args: &MutantsArgs) -> anyhow::Result<()> {
    setup::cargo_mutants()?;
    let listed = list::all()?;
    for file in &args.files {
        let known = listed.iter().any(|mutant| mutant.file == *file);
        ensure!(known, "{file} is no file with mutants: name one like `{}`", STAGE[0]);
    }
    let named = match &args.list {
        Some(path) => Some(list::named(&read(path)?)),
        None => None,
    };
    for name in named.iter().flatten() {
        let known = listed.iter().any(|mutant| mutant.key() == *name);
        ensure!(known, "no change is named `{name}` any more: run its whole file");
    }
    let chosen = |mutant: &Mutant| match &named {
        Some(named) => named.contains(&mutant.key()),
        None => args.all || args.files.contains(&mutant.file),
    };
    let recorded = |rows: &[Row]| match args.record {
        true => table::record(&root().join("docs/mutations.md"), rows, named.is_some()),
        false => Ok(()),
    };
    none_wrong(&mutate(&listed, chosen, How { jobs: args.jobs, alone: !args.together }, recorded)?)
}

/// The tests' stage: mutates one small file, and checks the list of excuses.
pub fn check() -> anyhow::Result<Outcome> {
    match setup::cargo_mutants() {
        Ok(()) => {}
        Err(error) if in_ci() => return Err(error),
        Err(error) => return Ok(Outcome::Skipped(format!("{error:#}"))),
    }
    let chosen = |mutant: &Mutant| STAGE.contains(&&*mutant.file);
    none_wrong(&mutate(&list::all()?, chosen, How { jobs: None, alone: true }, |_| Ok(()))?)?;
    Ok(Outcome::Ran(Vec::new()))
}

fn read(path: &Path) -> anyhow::Result<String> {
    std::fs::read_to_string(path).with_context(|| path.display().to_string())
}

fn none_wrong(wrong: &[String]) -> anyhow::Result<()> {
    ensure!(wrong.is_empty(), "{} of mutants are wrong:\n  {}", wrong.len(), wrong.join("\n  "));
    Ok(())
}

/// How mutants are tested.
#[derive(Clone, Copy)]
struct How {
    /// Test programs that run at once.
    jobs: Option<NonZeroUsize>,
    /// Whether mutants that need a program of their own are tested.
    alone: bool,
}

/// Tests the chosen mutants, prints one row for each file, and gives those of each library to
/// `record`. Returns the mutants that pass all tests without an excuse, and the excused ones that
/// do not exist or are noticed.
fn mutate(
    listed: &[Mutant],
    chosen: impl Fn(&Mutant) -> bool,
    how: How,
    record: impl Fn(&[Row]) -> anyhow::Result<()>,
) -> anyhow::Result<Vec<String>> {
    let excused = Excused::read(&root().join("docs/mutants.txt"))?;
    let mut wrong = excused.without_mutant(listed);
    for library in &LIBRARIES {
        let folder = format!("crates/{}/src/", library.name);
        let of = |mutant: &Mutant| chosen(mutant) && mutant.file.starts_with(&folder);
        let of: Vec<(u32, &Mutant)> = (0..).zip(listed).filter(|(_, mutant)| of(mutant)).collect();
        if !of.is_empty() {
            let fates = library.test(&of, how)?;
            let tested = fates.iter().map(|&(id, fate)| (&listed[id as usize], fate));
            let tested: Vec<_> = tested.collect();
            wrong.extend(excused.wrong(&tested));
            let rows = table::rows(&tested, &excused);
            print!("{}", table::text(&rows));
            record(&rows)?;
        }
    }
    Ok(wrong)
}

impl Library {
    /// Returns the results of the chosen mutants of this library. Mutants that cannot share a
    /// program with others are built one at a time.
    fn test(&self, mutants: &[(u32, &Mutant)], how: How) -> anyhow::Result<Vec<(u32, Fate)>> {
        let tree = root();
        let tree = Tree::new(tree, target().join("mutants").join(self.name), self)?;
        let (programs, woven) = tree.together(mutants)?;
        // The next build uses the same names.
        let kept = programs.kept()?;
        let judge = Judge::new(&kept, how.jobs)?;
        let done = AtomicUsize::new(0);
        let tell = |id: u32, fate| {
            let done = done.fetch_add(1, Ordering::Relaxed) + 1;
            if std::io::stderr().is_terminal() {
                eprint!("\r{done} of {} ", mutants.len());
            }
            let found = mutants.iter().find(|(other, _)| *other == id);
            if let (Fate::Missed, Some((_, mutant))) = (fate, found) {
                println!("{}", mutant.key());
                println!("    no test notices {}", mutant.described());
            }
        };
        let ids: Vec<u32> = woven.iter().copied().collect();
        let mut fates = judge.fates(&kept, &ids, how.jobs, tell)?;
        tree.restore(mutants)?;
        for &(id, mutant) in mutants.iter().filter(|(id, _)| !woven.contains(id)) {
            if !how.alone {
                fates.push((id, Fate::NotRun));
                continue;
            }
            let fate = match tree.alone(mutant)? {
                Some(programs) => judge.fate(&programs, None)?,
                None => Fate::Unviable,
            };
            tell(id, fate);
            fates.push((id, fate));
        }
        Ok(fates)
    }
}
