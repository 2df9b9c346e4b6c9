//! The list of mutants that cargo-mutants proposes.

use super::LIBRARIES;
use crate::{root, setup};
use anyhow::{Context, bail, ensure};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::process::{Command, Stdio};

/// A change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mutant {
    pub file: String,
    /// The change without its place; equal ones in a file are numbered, except the first.
    pub change: String,
    pub kind: Kind,
    /// The text to remove, and its replacement.
    pub from: Place,
    pub to: Place,
    pub replacement: String,
}

/// The kind of change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The body of a function returns a constant.
    Body,
    Operator,
    /// An arm of a match is removed.
    Arm,
    /// The condition of an arm is always true, or never.
    Guard,
    Other,
}

/// A place in a file; lines and columns begin at 1, and columns are characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    pub line: usize,
    pub column: usize,
}

impl Mutant {
    /// Returns its name in docs/mutants.txt, which does not change when lines are added above it.
    pub fn key(&self) -> String {
        format!("{}: {}", self.file, self.change)
    }

    /// Returns its place, and the text that it puts there.
    pub fn described(&self) -> String {
        let Place { line, column } = self.from;
        let text = self.replacement.split_whitespace().collect::<Vec<_>>().join(" ");
        format!("`{text}` at line {line}, column {column}")
    }
}

/// Returns the names of mutants that `text` has, each in a line of its own; indented lines, tables
/// and comments are ignored.
pub fn named(text: &str) -> BTreeSet<String> {
    let is_name = |line: &&str| !line.starts_with(['#', ' ', '|']) && line.contains(".rs: ");
    text.lines().filter(is_name).map(|line| line.trim_end().to_owned()).collect()
}

/// Returns all mutants of the libraries.
pub fn all() -> anyhow::Result<Vec<Mutant>> {
    let mut list = Command::new(setup::mutants_program());
    list.args(["mutants", "--no-config", "--list", "--json"]).current_dir(root());
    LIBRARIES.iter().for_each(|library| _ = list.args(["--package", library.name]));
    let output = list.stderr(Stdio::inherit()).output().context("cannot start cargo-mutants")?;
    ensure!(output.status.success(), "{list:?} failed: {}", output.status);
    let list: Value = serde_json::from_slice(&output.stdout).context("the list of mutants")?;
    numbered(list.as_array().context("the list of mutants is none")?)
}

/// Returns the mutants of cargo-mutants' list, with equal ones in a file numbered.
fn numbered(list: &[Value]) -> anyhow::Result<Vec<Mutant>> {
    let mut seen: BTreeMap<(String, String), u32> = BTreeMap::new();
    let mutant = |value: &Value| {
        let text = |key: &str| value[key].as_str().with_context(|| format!("a mutant's {key}"));
        let place = |end: &str| {
            let of = |key| value["span"][end][key].as_u64().context("a mutant has no span");
            let (line, column) = (of("line")?.try_into()?, of("column")?.try_into()?);
            anyhow::Ok(Place { line, column })
        };
        let name = text("name")?;
        let change = name.splitn(4, ':').nth(3).context("a mutant's name has no place")?.trim();
        let file = text("file")?.to_owned();
        let alike = seen.entry((file.clone(), change.to_owned())).or_default();
        *alike += 1;
        let change = match *alike {
            1 => change.to_owned(),
            n => format!("{change} #{n}"),
        };
        let kind = match text("genre")? {
            "FnValue" => Kind::Body,
            "BinaryOperator" | "UnaryOperator" => Kind::Operator,
            "MatchArm" => Kind::Arm,
            "MatchArmGuard" => Kind::Guard,
            "StructField" => Kind::Other,
            other => bail!("a mutant of the kind {other}"),
        };
        let (from, to) = (place("start")?, place("end")?);
        let replacement = text("replacement")?.to_owned();
        Ok(Mutant { file, change, kind, from, to, replacement })
    };
    list.iter().map(mutant).collect()
}

#[cfg(test)]
impl Mutant {
    /// Returns a mutant without a real place.
    pub fn named(file: &str, change: &str) -> Self {
        let (file, change) = (file.to_owned(), change.to_owned());
        let from = Place { line: 1, column: 1 };
        let replacement = String::new();
        Self { file, change, kind: Kind::Other, from, to: from, replacement }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_the_command_prints_is_a_list_of_what_to_try_again() {
        let mutant = Mutant::named("crates/a/src/b.rs", "replace > with < in f::g #2");
        let printed = format!("{}\n    {}\n| file | mutants |\n", mutant.key(), mutant.described());
        assert_eq!(named(&printed).into_iter().collect::<Vec<_>>(), [mutant.key()]);
    }

    #[test]
    fn changes_alike_in_a_file_are_numbered() {
        let of = |file: &str, line: usize| {
            let name = format!("{file}:{line}:2: replace > with < in f::g");
            let place = json!({ "line": line, "column": 2 });
            let span = json!({ "start": place, "end": place });
            let genre = "BinaryOperator";
            json!({ "file": file, "name": name, "span": span, "genre": genre, "replacement": "<" })
        };
        let mutants = numbered(&[of("a.rs", 1), of("a.rs", 3), of("b.rs", 1)]).unwrap();
        let changes: Vec<_> = mutants.iter().map(|mutant| mutant.change.as_str()).collect();
        let change = "replace > with < in f::g";
        assert_eq!(changes, [change, "replace > with < in f::g #2", change]);
        assert_eq!(mutants[1].from, Place { line: 3, column: 2 });
    }
}
