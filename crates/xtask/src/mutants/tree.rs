//! A copy of the workspace in which mutants are built.

use super::Library;
use super::list::{Mutant, Place};
use super::together::{self, CHOICE};
use crate::setup;
use anyhow::{Context, bail, ensure};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The copy, for one library's tests.
pub struct Tree<'a> {
    root: &'a Path,
    folder: PathBuf,
    library: &'a Library,
}

/// The profile of a build with many runs, and of a build for each run.
const TOGETHER: &str = "mutants";
const ALONE: &str = "mutant";

/// The programs of a build: the unit tests, and the larger tests.
#[derive(Clone, Debug)]
pub struct Programs {
    unit: PathBuf,
    larger: PathBuf,
    /// The folder in which cargo would start them.
    pub folder: PathBuf,
}

/// An error of the compiler in a file, as a range of its bytes.
#[derive(Debug)]
struct Complaint {
    file: String,
    start: usize,
    end: usize,
}

impl Programs {
    /// Returns the larger program, or the one of the unit tests.
    pub fn which(&self, larger: bool) -> &Path {
        if larger { &self.larger } else { &self.unit }
    }

    /// Copies the programs, so that no later build overwrites them.
    pub fn kept(&self) -> anyhow::Result<Self> {
        let keep = |program: &Path| {
            let kept = program.with_extension("kept");
            std::fs::copy(program, &kept).with_context(|| program.display().to_string())?;
            anyhow::Ok(kept)
        };
        let (unit, larger) = (keep(&self.unit)?, keep(&self.larger)?);
        Ok(Self { unit, larger, folder: self.folder.clone() })
    }
}

impl<'a> Tree<'a> {
    /// Copies the files that git knows.
    pub fn new(root: &'a Path, folder: PathBuf, library: &'a Library) -> anyhow::Result<Self> {
        let mut files = Command::new("git");
        files.args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]);
        let output = files.current_dir(root).output().context("cannot start git")?;
        ensure!(output.status.success(), "{files:?} failed: {}", output.status);
        let names = String::from_utf8(output.stdout).context("a file's name")?;
        _ = std::fs::remove_dir_all(&folder);
        for name in names.split_terminator('\0').filter(|name| root.join(name).is_file()) {
            let bytes = std::fs::read(root.join(name)).with_context(|| name.to_owned())?;
            write(&folder.join(name), &bytes)?;
        }
        Ok(Self { root, folder, library })
    }

    /// Builds the tests with all mutants that can be chosen at run time; also returns those
    /// mutants.
    pub fn together(
        &self,
        mutants: &[(u32, &Mutant)],
    ) -> anyhow::Result<(Programs, BTreeSet<u32>)> {
        let first = format!("crates/{}/src/lib.rs", self.library.name);
        let mut left = mutants.to_vec();
        loop {
            let mut texts = BTreeMap::from([(first.clone(), self.source(&first)?)]);
            let mut woven = BTreeSet::new();
            let files: BTreeSet<&str> = left.iter().map(|(_, mutant)| &*mutant.file).collect();
            for file in files {
                let of = |(_, mutant): &&(u32, &Mutant)| mutant.file == file;
                let of: Vec<_> = left.iter().filter(of).copied().collect();
                let (text, ids) =
                    together::weave(&self.source(file)?, &of).with_context(|| file.to_owned())?;
                texts.insert(file.to_owned(), text);
                woven.extend(ids);
            }
            left.retain(|(id, _)| woven.contains(id));
            texts.entry(first.clone()).and_modify(|text| text.push_str(CHOICE));
            for (file, text) in &texts {
                write(&self.folder.join(file), text.as_bytes())?;
            }
            let complaints = match self.build(TOGETHER)? {
                Ok(programs) => return Ok((programs, woven)),
                Err(complaints) => complaints,
            };
            let before = left.len();
            for Complaint { file, start, end } in &complaints {
                let text = texts.get(file);
                let id = text.and_then(|text| together::mutant_at(text, *start, *end));
                left.retain(|(other, _)| Some(*other) != id);
            }
            ensure!(left.len() < before, "mutants do not compile: {complaints:?}");
        }
    }

    /// Builds the tests with one mutant, with the text of cargo-mutants; returns `None` if it does
    /// not compile.
    pub fn alone(&self, mutant: &Mutant) -> anyhow::Result<Option<Programs>> {
        let text = self.source(&mutant.file)?;
        let changed = replaced(&text, mutant.from, mutant.to, &mutant.replacement);
        let changed = changed.with_context(|| format!("no place for {}", mutant.change))?;
        write(&self.folder.join(&mutant.file), changed.as_bytes())?;
        // Most of them do not compile, which a check finds faster than a build of a test program.
        let mut check = self.cargo("check", ALONE);
        let status = check.arg("--lib").stderr(Stdio::null()).status();
        let compiles = status.context("cannot start cargo")?.success();
        let built = if compiles { self.build(ALONE)?.ok() } else { None };
        write(&self.folder.join(&mutant.file), text.as_bytes())?;
        Ok(built)
    }

    /// Restores the library.
    pub fn restore(&self, mutants: &[(u32, &Mutant)]) -> anyhow::Result<()> {
        let first = format!("crates/{}/src/lib.rs", self.library.name);
        let mut files: BTreeSet<&str> = mutants.iter().map(|(_, mutant)| &*mutant.file).collect();
        files.insert(&first);
        for file in files {
            write(&self.folder.join(file), self.source(file)?.as_bytes())?;
        }
        Ok(())
    }

    fn source(&self, file: &str) -> anyhow::Result<String> {
        std::fs::read_to_string(self.root.join(file)).with_context(|| file.to_owned())
    }

    fn cargo(&self, what: &str, profile: &str) -> Command {
        let mut cargo = Command::new(setup::cargo());
        cargo.args([what, "--quiet", "--profile", profile, "--package", self.library.name]);
        cargo.current_dir(&self.folder).env("RUSTFLAGS", "--cap-lints=allow");
        cargo.env("CARGO_TARGET_DIR", self.folder.with_file_name("build"));
        cargo
    }

    /// Returns the test programs, or the compiler's errors.
    fn build(&self, profile: &str) -> anyhow::Result<Result<Programs, Vec<Complaint>>> {
        let mut build = self.cargo("test", profile);
        build.args(["--no-run", "--message-format=json", "--lib", "--test", self.library.program]);
        let output = build.stderr(Stdio::null()).output().context("cannot start cargo")?;
        let messages = String::from_utf8_lossy(&output.stdout).into_owned();
        let messages = messages.lines().filter_map(|line| serde_json::from_str(line).ok());
        let (mut unit, mut larger, mut complaints) = (None, None, Vec::new());
        for message in messages.collect::<Vec<Value>>() {
            if let Some(program) = message["executable"].as_str() {
                let is_test = message["target"]["kind"][0] == "test";
                *(if is_test { &mut larger } else { &mut unit }) = Some(PathBuf::from(program));
            }
            if message["message"]["level"] == "error" {
                complaints.extend(spans(&message["message"]));
            }
        }
        let folder = self.folder.join("crates").join(self.library.name);
        match (output.status.success(), unit, larger) {
            (true, Some(unit), Some(larger)) => Ok(Ok(Programs { unit, larger, folder })),
            (true, ..) => bail!("{build:?} made no programs"),
            (false, ..) => Ok(Err(complaints)),
        }
    }
}

/// Returns the places of an error.
fn spans(error: &Value) -> Vec<Complaint> {
    let spans = error["spans"].as_array().map_or(&[][..], Vec::as_slice);
    let primary = spans.iter().filter(|span| span["is_primary"] == true);
    let complaint = |span: &Value| {
        let byte = |key: &str| usize::try_from(span[key].as_u64()?).ok();
        let file = span["file_name"].as_str()?.to_owned();
        Some(Complaint { file, start: byte("byte_start")?, end: byte("byte_end")? })
    };
    primary.filter_map(complaint).collect()
}

/// Writes a file, if its content differs.
fn write(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    if std::fs::read(path).is_ok_and(|there| there == bytes) {
        return Ok(());
    }
    let folder = path.parent().context("a file has a folder")?;
    std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    std::fs::write(path, bytes).with_context(|| path.display().to_string())
}

/// Returns a text with the words between two places replaced.
fn replaced(text: &str, from: Place, to: Place, by: &str) -> Option<String> {
    let byte = |place: Place| {
        let start = match place.line {
            1 => 0,
            line => text.match_indices('\n').nth(line - 2)?.0 + 1,
        };
        let column = text[start..].char_indices().nth(place.column - 1);
        Some(column.map_or(text.len(), |(at, _)| start + at))
    };
    Some([&text[..byte(from)?], by, &text[byte(to)?..]].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mutant_takes_the_place_of_its_span() {
        let place = |line, column| Place { line, column };
        let text = "fn é() {\n    a < b\n}";
        assert_eq!(
            replaced(text, place(2, 7), place(2, 8), "<=").unwrap(),
            "fn é() {\n    a <= b\n}"
        );
        assert_eq!(replaced(text, place(1, 4), place(1, 5), "f").unwrap(), text.replace('é', "f"));
        assert_eq!(replaced(text, place(9, 1), place(9, 2), ""), None);
    }

    #[test]
    fn an_error_names_the_bytes_that_it_is_about() {
        let span = |start: u64, primary: bool| {
            serde_json::json!({ "file_name": "a.rs", "byte_start": start, "byte_end": start + 1,
                "is_primary": primary })
        };
        let error = serde_json::json!({ "spans": [span(3, true), span(5, false)] });
        let found: Vec<_> = spans(&error).iter().map(|found| (found.start, found.end)).collect();
        assert_eq!(found, [(3, 4)]);
    }
}
