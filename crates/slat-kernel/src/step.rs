//! A step of an edit: a semantic patch, or lines that are added to a file that is not C.
//!
//! The header of a step has the file that it edits, the versions that it is for, and the texts that
//! it leaves in the result. Coccinelle reports no error if a rule matches nowhere, or too often. So
//! these texts are counted, and an edit that applies only in part is an error.

use crate::vm::{cache_folder, kept_below};
use crate::{Error, Version};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A step, read from its file.
#[derive(Clone, Debug)]
pub struct Step {
    /// Path of the step's own file.
    pub path: PathBuf,
    /// The file of the tree to edit: the first of these that exists.
    pub files: Vec<String>,
    /// The first version that it is for, and the first that it is no longer for.
    versions: (Option<Version>, Option<Version>),
    kind: Kind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    /// Texts in the result: how many more of each there are than before; at least one more if there
    /// is no number.
    Semantic { leaves: Vec<(Option<usize>, String)> },
    /// Lines, and the line that they are added to, or that they replace.
    Lines { place: Place, anchor: String, lines: Vec<String> },
}

/// Where lines go, seen from their anchor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Before,
    After,
    Instead,
}

impl Step {
    /// Reads a step; returns `None` if the file is none.
    ///
    /// # Errors
    /// [`Error::Malformed`], [`Error::Io`].
    pub fn read(path: &Path) -> Result<Option<Self>, Error> {
        let mark = match path.extension().and_then(|extension| extension.to_str()) {
            Some("cocci") => "// ",
            Some("lines") => "# ",
            _ => return Ok(None),
        };
        let text = std::fs::read_to_string(path);
        let text = text.map_err(Error::io(format!("cannot read {}", path.display())))?;
        let step = Self::parse(path, &text, mark);
        step.map(Some).map_err(|why| Error::Malformed { step: path.to_owned(), why })
    }

    fn parse(path: &Path, text: &str, mark: &str) -> Result<Self, String> {
        let header = |line: &'_ str| -> Option<(String, String)> {
            let (key, value) = line.strip_prefix(mark)?.split_once(':')?;
            Some((key.trim().to_owned(), value.trim().to_owned()))
        };
        let (mut files, mut versions, mut leaves) = (Vec::new(), (None, None), Vec::new());
        let mut anchor = None;
        for (key, value) in text.lines().filter_map(header) {
            match key.split_once(' ').map_or((&*key, None), |(key, count)| (key, Some(count))) {
                ("file", None) => files = value.split('|').map(|f| f.trim().to_owned()).collect(),
                ("versions", None) => versions = range(&value)?,
                ("leaves", None) => leaves.push((None, value)),
                ("leaves", Some(count)) if count.parse::<usize>().is_ok() => {
                    leaves.push((count.parse().ok(), value));
                }
                ("before", None) => anchor = Some((Place::Before, value)),
                ("after", None) => anchor = Some((Place::After, value)),
                ("instead", Some("of")) => anchor = Some((Place::Instead, value)),
                _ => {}
            }
        }
        if files.is_empty() {
            return Err(format!("it has no line `{mark}file: PATH`, the file that it edits"));
        }
        let kind = if mark == "// " {
            if leaves.is_empty() {
                return Err(
                    "it has no line `// leaves: TEXT`, which says what must come of it".to_owned()
                );
            }
            Kind::Semantic { leaves }
        } else {
            let (place, anchor) = anchor.ok_or(
                "it has no line `# before: LINE`, `# after: LINE` or `# instead of: LINE`",
            )?;
            let (_, body) = text.split_once("\n---\n").ok_or("it has no line `---`")?;
            Kind::Lines { place, anchor, lines: body.lines().map(str::to_owned).collect() }
        };
        Ok(Self { path: path.to_owned(), files, versions, kind })
    }

    /// Returns whether it is for trees of this version.
    pub fn is_for(&self, version: Version) -> bool {
        let (from, until) = self.versions;
        from.is_none_or(|from| version >= from) && until.is_none_or(|until| version < until)
    }

    /// Returns the text of a file after the step.
    ///
    /// # Errors
    /// [`StepFailure`], with the reason why it does not apply.
    pub fn apply(&self, before: &str) -> Result<String, StepFailure> {
        match &self.kind {
            Kind::Semantic { leaves } => {
                if leaves.iter().all(|(_, text)| before.contains(text)) {
                    return Err(StepFailure::Why("the tree has it already".to_owned()));
                }
                let after = coccinelle(&self.path, before)?;
                missing(leaves, before, &after).map_or(Ok(after), |why| Err(StepFailure::Why(why)))
            }
            Kind::Lines { place, anchor, lines } => {
                insert(before, *place, anchor, lines).map_err(StepFailure::Why)
            }
        }
    }
}

/// The reason why a step does not apply.
#[derive(Debug)]
pub enum StepFailure {
    /// It does not fit the file.
    Why(String),
    /// Another error.
    Other(Error),
}

pub(crate) fn range(text: &str) -> Result<(Option<Version>, Option<Version>), String> {
    let wrong = || format!("`versions: {text}` is no range such as 6.12..7.0");
    let (from, until) = text.split_once("..").ok_or_else(wrong)?;
    let version = |text: &str| match text.trim() {
        "" => Ok(None),
        text => text.parse().map(Some).map_err(|()| wrong()),
    };
    Ok((version(from)?, version(until)?))
}

/// Returns a message on the first text that does not occur as often as it should; `None` if all do.
fn missing(leaves: &[(Option<usize>, String)], before: &str, after: &str) -> Option<String> {
    let count = |text: &str, mark: &str| text.matches(mark).count();
    leaves.iter().find_map(|(times, mark)| {
        let more = count(after, mark).saturating_sub(count(before, mark));
        match times {
            None if more == 0 => {
                Some(format!("the edit changed nothing here: it adds no `{mark}`"))
            }
            Some(times) if more != *times => {
                Some(format!("the edit adds `{mark}` {more} times, {times} expected"))
            }
            _ => None,
        }
    })
}

fn insert(before: &str, place: Place, anchor: &str, lines: &[String]) -> Result<String, String> {
    let places: Vec<usize> =
        before.lines().enumerate().filter(|(_, l)| l.trim() == anchor).map(|(at, _)| at).collect();
    let [at] = places[..] else {
        return Err(format!("the line `{anchor}` is there {} times, not once", places.len()));
    };
    let mut all: Vec<&str> = before.lines().collect();
    let replaced = match place {
        Place::Before => at..at,
        Place::After => at + 1..at + 1,
        Place::Instead => at..at + 1,
    };
    all.splice(replaced, lines.iter().map(String::as_str));
    Ok(all.join("\n") + "\n")
}

/// Applies a semantic patch, unless the cache has its result: the edits of one kernel take
/// Coccinelle many seconds.
fn coccinelle(patch: &Path, text: &str) -> Result<String, StepFailure> {
    let io = Error::io(format!("cannot read {}", patch.display()));
    let rules = std::fs::read_to_string(patch).map_err(io).map_err(StepFailure::Other)?;
    let version = Command::new("spatch").arg("--version").output();
    let version = version.map_err(|_| StepFailure::Other(Error::NoCoccinelle))?;
    let asked = [&*String::from_utf8_lossy(&version.stdout), &rules, text];
    // Without a cache it is applied each time.
    let folder = cache_folder().ok().filter(|_| !reads_files(&rules));
    let memo = folder.map(|folder| Memo { folder, asked });
    if let Some(after) = memo.as_ref().and_then(Memo::known) {
        return Ok(after);
    }
    let after = spatch(patch, text)?;
    let _ = memo.map(|memo| memo.keep(&after));
    Ok(after)
}

/// Returns whether the result may depend on other files: on those that the rules include, or on
/// what their scripts read.
fn reads_files(rules: &str) -> bool {
    let includes =
        |line: &str| ["#include", "#spatch", "using"].iter().any(|w| line.starts_with(w));
    let names =
        |line: &str| line.starts_with('@') && (line.contains(':') || line.contains("using"));
    rules.lines().any(|line| includes(line) || names(line))
}

/// What Coccinelle was asked, which the cache has beside the result: its version, the semantic
/// patch and the file's text.
struct Memo<'a> {
    folder: PathBuf,
    asked: [&'a str; 3],
}

impl Memo<'_> {
    fn name(&self) -> String {
        let mut hash = crc32fast::Hasher::new();
        self.asked.iter().for_each(|text| hash.update(text.as_bytes()));
        format!("steps/{:08x}", hash.finalize())
    }

    fn known(&self) -> Option<String> {
        let folder = self.folder.join(self.name());
        let read = |name: &str| std::fs::read_to_string(folder.join(name)).ok();
        let mut asked = (0..).zip(self.asked);
        let is_this = asked.all(|(n, text)| read(&n.to_string()).is_some_and(|it| it == text));
        is_this.then(|| read("after"))?
    }

    fn keep(&self, after: &str) -> anyhow::Result<()> {
        kept_below(&self.folder, &self.name(), |_, folder| {
            std::fs::create_dir(folder)?;
            for (n, text) in (0..).zip(self.asked) {
                std::fs::write(folder.join(n.to_string()), text)?;
            }
            Ok(std::fs::write(folder.join("after"), after)?)
        })
        .map(drop)
    }
}

fn spatch(patch: &Path, text: &str) -> Result<String, StepFailure> {
    let io = |what: &str| {
        let what = what.to_owned();
        |error| StepFailure::Other(Error::io(what)(error))
    };
    let folder = tempfile::tempdir().map_err(io("cannot make a temporary folder"))?;
    let (before, after) = (folder.path().join("before.c"), folder.path().join("after.c"));
    std::fs::write(&before, text).map_err(io("cannot write a temporary file"))?;
    let mut spatch = Command::new("spatch");
    spatch.args(["--very-quiet", "--no-includes", "--sp-file"]).arg(patch);
    let output = spatch.arg(&before).arg("-o").arg(&after).output();
    let output = output.map_err(|_| StepFailure::Other(Error::NoCoccinelle))?;
    let said = String::from_utf8_lossy(&output.stderr);
    // Coccinelle fails if nothing changes; then the texts that are missing tell the reason.
    if !output.status.success() && !said.contains("no modified files") {
        let last: Vec<&str> = said.lines().rev().take(3).collect();
        return Err(StepFailure::Why(last.join("; ")));
    }
    Ok(std::fs::read_to_string(&after).unwrap_or_else(|_| text.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str, mark: &str) -> Result<Step, String> {
        Step::parse(Path::new("step"), text, mark)
    }

    #[test]
    fn an_incomplete_step_is_refused_with_its_missing_part() {
        let refusal = |text, mark| parsed(text, mark).unwrap_err();
        assert!(refusal("@@\n@@\n", "// ").contains("file: PATH"));
        assert!(refusal("// file: a.c\n", "// ").contains("leaves: TEXT"));
        assert!(refusal("# file: Makefile\n", "# ").contains("# before: LINE"));
        assert!(refusal("# file: M\n# after: x\n", "# ").contains("---"));
        assert!(refusal("// file: a\n// leaves: b\n// versions: 6\n", "// ").contains("6.12..7.0"));
    }

    #[test]
    fn a_result_is_kept_for_these_rules_and_this_text_alone() {
        let cache = tempfile::tempdir().unwrap();
        let memo = |asked| Memo { folder: cache.path().to_owned(), asked };
        assert_eq!(memo(["1.1", "rules", "text"]).known(), None);
        memo(["1.1", "rules", "text"]).keep("after").unwrap();
        assert_eq!(memo(["1.1", "rules", "text"]).known().as_deref(), Some("after"));
        // Its checksum is the same.
        assert_eq!(memo(["1.1", "rulest", "ext"]).known(), None);
        assert_eq!(memo(["1.2", "rules", "text"]).known(), None);
    }

    #[test]
    fn rules_that_read_other_files_are_applied_each_time() {
        assert!(!reads_files("@r@\nidentifier x;\n@@\n+#include <linux/kvm.h>\n- f(x ? 1 : 2)\n"));
        let others = ["#include \"a.cocci\"\n@@\n@@", "@script:python@\n@@\n", "@r using \"a\"@"];
        assert!(others.into_iter().all(reads_files));
    }

    #[test]
    fn a_step_is_for_its_versions_alone() {
        let step = |versions: &str| {
            let text = format!("// file: a.c\n// leaves: x\n// versions: {versions}\n");
            parsed(&text, "// ").unwrap()
        };
        let version = |text: &str| text.parse().unwrap();
        let of = step("6.12..7.0");
        assert!(of.is_for(version("6.12.117")) && !of.is_for(version("7.0")));
        assert!(!of.is_for(version("6.11.9")));
        assert!(step("..7.0").is_for(version("6.1")) && step("7.0..").is_for(version("7.3")));
    }

    #[test]
    fn half_of_an_edit_and_too_much_of_one_are_none() {
        let leaves = |times| [(times, "new()".to_owned())];
        assert_eq!(missing(&leaves(None), "old();", "new();"), None);
        assert!(missing(&leaves(None), "old();", "old();").unwrap().contains("no `new()`"));
        let twice = missing(&leaves(Some(1)), "new();", "new(); new(); new();").unwrap();
        assert_eq!(twice, "the edit adds `new()` 2 times, 1 expected");
    }

    #[test]
    fn lines_are_inserted_next_to_the_one_line_that_is_named() {
        let lines = ["b".to_owned()];
        assert_eq!(insert("a\nc\n", Place::After, "a", &lines).unwrap(), "a\nb\nc\n");
        assert_eq!(insert("a\nc\n", Place::Before, "c", &lines).unwrap(), "a\nb\nc\n");
        assert_eq!(insert("a\nc\n", Place::Instead, "c", &lines).unwrap(), "a\nb\n");
        // A header has the line without its indentation.
        assert_eq!(insert("\ta\nc\n", Place::After, "a", &lines).unwrap(), "\ta\nb\nc\n");
        assert!(insert("a\na\n", Place::After, "a", &lines).unwrap_err().contains("2 times"));
        assert!(insert("x\n", Place::After, "a", &lines).unwrap_err().contains("0 times"));
    }
}
