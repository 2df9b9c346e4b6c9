//! `cargo xtask mutants`: small changes to the libraries, one at a time, each of which a test has
//! to notice, or an argument to excuse.

mod excused;
mod table;

use crate::stages::Outcome;
use crate::{in_ci, root, setup, target};
use anyhow::{Context, bail, ensure};
use clap::Args;
use excused::Excused;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};
use table::Row;

/// What to mutate.
#[derive(Debug, Args)]
pub struct MutantsArgs {
    /// Source files of slat, slat-guest and slat-reclaim, from the workspace's folder
    #[arg(required_unless_present = "all")]
    files: Vec<String>,
    /// All of them: many hours
    #[arg(long, conflicts_with = "files")]
    all: bool,
    /// Write what came into the table of docs/mutations.md
    #[arg(long)]
    record: bool,
}

/// A library, and its tests.
struct Library {
    name: &'static str,
    /// The larger test program, beside the unit tests.
    program: &'static str,
    /// Tests that only those mutants meet that came through all others: filters of their names.
    slow: &'static [&'static str],
}

/// What is slow took most of the time that a mutant cost: each takes a second and more.
const LIBRARIES: [Library; 3] = [
    Library {
        name: "slat",
        program: "engine",
        slow: &[
            "contended::a_table_whose_child_is_held_does_not_get_the_right_to_write",
            "golden_arm64::leaves_of_the_16k_granule_are_the_manuals_in_every_combination",
            "golden_arm64::leaves_of_the_4k_granule_are_the_manuals_in_every_combination",
            "golden_arm64::leaves_of_the_64k_granule_are_the_manuals_in_every_combination",
            "golden_lpa2::leaves_with_lpa2_are_the_manuals_in_every_combination",
            "golden_lpa::leaves_with_lpa_are_the_manuals_in_every_combination",
            "model::any_history_on_ept_agrees_with_the_flat_model",
            "model::any_history_on_the_4k_granule_agrees_with_the_flat_model",
            "model::hardware_that_uses_a_block_while_its_tables_are_built_is_not_forgotten",
            // Of threads that wait for each other: a minute and more beside other work.
            "ran::tests::threads_that_run_a_guest_never_use_what_was_invalidated",
            "steps::a_split_that_runs_dry_at_any_step",
        ],
    },
    Library {
        name: "slat-guest",
        program: "memory",
        // Each guest runs on Intel's CPU as well.
        slow: &["::on_arm", "budget::", "buffers::", "devices::no_pair", "histories::", "pairs::"],
    },
    Library { name: "slat-reclaim", program: "machine", slow: &[] },
];

/// Random tests are few, and the same for each mutant.
const FEWER: [(&str, &str); 5] = [
    ("HISTORIES", "4"),
    ("PROPTEST_CASES", "16"),
    ("ROUNDS", "1"),
    ("RUST_BACKTRACE", "0"),
    ("SLAT_SEED", "0"),
];

/// What the stage of the tests mutates: minutes.
const STAGE: [&str; 1] = ["crates/slat-reclaim/src/page.rs"];

/// One change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mutant {
    pub file: String,
    /// As cargo-mutants calls it in this tree, with line and column.
    id: String,
    /// What changes, wherever it stands; of several alike in a file, all but the first are numbered.
    pub change: String,
}

/// How one went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Caught,
    Missed,
    /// It does not compile.
    Unviable,
    /// A test did not end.
    Timeout,
}

/// Mutates what the arguments name.
pub fn run(args: &MutantsArgs) -> anyhow::Result<()> {
    setup::cargo_mutants()?;
    let listed = listed()?;
    for file in &args.files {
        let known = listed.iter().any(|mutant| mutant.file == *file);
        ensure!(known, "{file} is no file with mutants: name one like `{}`", STAGE[0]);
    }
    let chosen = |mutant: &Mutant| args.all || args.files.contains(&mutant.file);
    let rows = mutate(&listed, chosen)?;
    if args.record {
        table::record(&root().join("docs/mutations.md"), &rows)?;
    }
    Ok(())
}

/// The stage of the tests: one small file, and the list of the excused.
pub fn check() -> anyhow::Result<Outcome> {
    match setup::cargo_mutants() {
        Ok(()) => {}
        Err(error) if in_ci() => return Err(error),
        Err(error) => return Ok(Outcome::Skipped(format!("{error:#}"))),
    }
    mutate(&listed()?, |mutant| STAGE.contains(&mutant.file.as_str()))?;
    Ok(Outcome::Ran(Vec::new()))
}

/// Tests the chosen ones, prints a row a file, and fails if one came through without an excuse, or
/// an excuse has no mutant that comes through.
fn mutate(listed: &[Mutant], chosen: impl Fn(&Mutant) -> bool) -> anyhow::Result<Vec<Row>> {
    let excused = Excused::read(&root().join("docs/mutants.txt"))?;
    let mut wrong = excused.without_mutant(listed);
    let mut fates = BTreeMap::new();
    for library in &LIBRARIES {
        let folder = format!("crates/{}/src/", library.name);
        let mut files: Vec<&str> = listed.iter().filter(|m| chosen(m)).map(|m| &*m.file).collect();
        files.retain(|file| file.starts_with(&folder));
        files.dedup();
        if !files.is_empty() {
            fates.extend(library.test(&files)?);
        }
    }
    let tested = listed.iter().filter_map(|mutant| Some((mutant, *fates.get(&mutant.id)?)));
    let tested: Vec<_> = tested.collect();
    wrong.extend(excused.wrong(&tested));
    let rows = table::rows(&tested, &excused);
    print!("{}", table::text(&rows));
    if !wrong.is_empty() {
        bail!("{} of mutants are wrong:\n  {}", wrong.len(), wrong.join("\n  "));
    }
    Ok(rows)
}

/// All mutants of the libraries.
fn listed() -> anyhow::Result<Vec<Mutant>> {
    let mut list = tool();
    list.args(["--list", "--json"]);
    LIBRARIES.iter().for_each(|library| _ = list.args(["--package", library.name]));
    let output = list.stderr(Stdio::inherit()).output().context("cannot start cargo-mutants")?;
    ensure!(output.status.success(), "{list:?} failed: {}", output.status);
    let list: Value = serde_json::from_slice(&output.stdout).context("the list of mutants")?;
    numbered(list.as_array().context("the list of mutants is none")?)
}

/// The mutants of cargo-mutants' list, those alike in a file told apart.
fn numbered(list: &[Value]) -> anyhow::Result<Vec<Mutant>> {
    let mut seen: BTreeMap<(String, String), u32> = BTreeMap::new();
    let mutant = |value: &Value| {
        let text = |key: &str| value[key].as_str().with_context(|| format!("a mutant's {key}"));
        let (file, id) = (text("file")?.to_owned(), text("name")?.to_owned());
        let change = id.splitn(4, ':').nth(3).context("a mutant's name has no place")?.trim();
        let alike = seen.entry((file.clone(), change.to_owned())).or_default();
        *alike += 1;
        let change = match *alike {
            1 => change.to_owned(),
            n => format!("{change} #{n}"),
        };
        Ok(Mutant { file, id, change })
    };
    list.iter().map(mutant).collect()
}

impl Library {
    /// Arguments of a test program that leave out what is slow.
    fn skips(&self) -> impl Iterator<Item = String> {
        self.slow.iter().map(|filter| format!("--skip={filter}"))
    }

    /// How the mutants of these files went, by their names.
    fn test(&self, files: &[&str]) -> anyhow::Result<BTreeMap<String, Fate>> {
        let folder = target().join("mutants").join(self.name);
        _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
        let mut fates = self.pass(&folder, files, false)?;
        if !self.slow.is_empty() && fates.values().any(|&fate| fate == Fate::Missed) {
            fates.extend(self.pass(&folder, files, true)?);
        }
        Ok(fates)
    }

    /// By the quick tests; or, of those that came through these, by all.
    fn pass(
        &self,
        folder: &Path,
        files: &[&str],
        all: bool,
    ) -> anyhow::Result<BTreeMap<String, Fate>> {
        let mut test = tool();
        test.args(["--package", self.name, "--profile", "mutants", "--no-shuffle"]);
        test.args(["--colors", "never", "--output"]).arg(folder);
        files.iter().for_each(|file| _ = test.args(["--file", file]));
        // For the build as well: arguments after `--` would have all test programs compiled.
        let tests = ["--lib", "--test", self.program];
        tests.iter().for_each(|argument| _ = test.arg(format!("--cargo-arg={argument}")));
        match all {
            true => _ = test.arg("--iterate"),
            false => _ = test.args(["--", "--"]).args(self.skips()),
        }
        test.envs(FEWER).env("CARGO_TARGET_DIR", target().join("mutants/build"));
        let status = test.status().with_context(|| format!("cannot start {test:?}"))?;
        // 2 and 3: mutants came through, or a test did not end.
        let done = matches!(status.code(), Some(0 | 2 | 3));
        ensure!(done, "{test:?} failed: {status}");
        let outcomes = folder.join("mutants.out/outcomes.json");
        let text =
            std::fs::read(&outcomes).with_context(|| format!("no {}", outcomes.display()))?;
        fates(&serde_json::from_slice(&text).context("the outcomes of mutants")?)
    }
}

fn fates(outcomes: &Value) -> anyhow::Result<BTreeMap<String, Fate>> {
    let outcomes = outcomes["outcomes"].as_array().context("no outcomes of mutants")?;
    let mutants = outcomes.iter().filter(|outcome| !outcome["scenario"]["Mutant"].is_null());
    let fate = |outcome: &Value| {
        let name = outcome["scenario"]["Mutant"]["name"].as_str().context("a mutant's name")?;
        let fate = match outcome["summary"].as_str() {
            Some("CaughtMutant") => Fate::Caught,
            Some("MissedMutant") => Fate::Missed,
            Some("Unviable") => Fate::Unviable,
            Some("Timeout") => Fate::Timeout,
            other => bail!("{name}: an outcome of {other:?}"),
        };
        Ok((name.to_owned(), fate))
    };
    mutants.map(fate).collect()
}

/// cargo-mutants, in the workspace.
fn tool() -> Command {
    let mut tool = Command::new(setup::mutants_program());
    tool.args(["mutants", "--no-config"]).current_dir(root());
    tool
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn changes_alike_in_a_file_are_numbered() {
        let list = [
            json!({ "file": "a.rs", "name": "a.rs:1:2: replace > with < in f::g" }),
            json!({ "file": "a.rs", "name": "a.rs:3:2: replace > with < in f::g" }),
            json!({ "file": "b.rs", "name": "b.rs:1:2: replace > with < in f::g" }),
        ];
        let changes = numbered(&list).unwrap();
        let changes: Vec<_> = changes.iter().map(|mutant| mutant.change.as_str()).collect();
        let change = "replace > with < in f::g";
        assert_eq!(changes, [change, "replace > with < in f::g #2", change]);
    }

    #[test]
    fn what_is_left_out_at_first_is_in_the_program_still() {
        for library in &LIBRARIES {
            let library_root = root().join("crates").join(library.name);
            let folders = ["src".to_owned(), format!("tests/{}", library.program)];
            let files = folders.iter().flat_map(|folder| {
                let files = std::fs::read_dir(library_root.join(folder)).unwrap();
                files.map(|file| file.unwrap().path())
            });
            let files: Vec<_> = files.collect();
            for filter in library.slow {
                let (module, _) = filter.split_once("::").unwrap();
                let (_, name) = filter.rsplit_once("::").unwrap();
                let there = files.iter().any(|path| {
                    let of =
                        module.is_empty() || path.file_stem().is_some_and(|stem| stem == module);
                    let text = || std::fs::read_to_string(path).unwrap_or_default();
                    of && (name.is_empty() || text().contains(name))
                });
                assert!(there, "no test of {} is called {filter}", library.name);
            }
        }
    }

    #[test]
    fn outcomes_are_read_without_the_baseline() {
        let outcomes = json!({ "outcomes": [
            { "scenario": "Baseline", "summary": "Success" },
            { "scenario": { "Mutant": { "name": "one" } }, "summary": "CaughtMutant" },
            { "scenario": { "Mutant": { "name": "two" } }, "summary": "MissedMutant" },
        ] });
        let expected = [("one", Fate::Caught), ("two", Fate::Missed)];
        let expected = expected.map(|(name, fate)| (name.to_owned(), fate));
        assert_eq!(fates(&outcomes).unwrap(), BTreeMap::from(expected));
        let odd = json!({ "outcomes": [
            { "scenario": { "Mutant": { "name": "one" } }, "summary": "Failure" },
        ] });
        assert!(fates(&odd).is_err());
    }
}
