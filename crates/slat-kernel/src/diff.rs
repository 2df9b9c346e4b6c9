//! Applies a unified diff to files in memory, by git: in a folder with only the files that it
//! names. So a diff of which one hunk does not fit changes nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{ErrorKind, Write};
use std::path::{Component, Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// How a missing git is installed.
pub const NO_GIT: &str = "git does not run; as root: `apt-get install --no-install-recommends git`";

/// Why a diff does not apply: the file, and what is wrong with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The file.
    pub file: String,
    /// The reason; it names the hunk.
    pub why: String,
}

impl Refusal {
    fn new(file: impl Into<String>, why: impl Into<String>) -> Self {
        Self { file: file.into(), why: why.into() }
    }
}

/// What a diff leaves in each file: its text, or nothing where it is removed.
pub type Result = std::result::Result<BTreeMap<String, Option<String>>, Refusal>;

/// The files that a diff names, and the number of first parts of their paths that are left out.
struct NamedFiles {
    paths: BTreeSet<String>,
    strip: usize,
}

/// Returns whether a text has a diff.
pub fn is_diff(text: &str) -> bool {
    !headers(text).is_empty()
}

/// Returns the paths of a diff's headers as they are there, each with whether git wrote it without
/// `a/` and `b/`.
fn headers(text: &str) -> Vec<(String, bool)> {
    let mut found = Vec::new();
    // A removed line `-- x` looks like a header, but is in a hunk.
    let (mut old, mut new, mut bare) = (0, 0, false);
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        if old > 0 || new > 0 {
            match line.as_bytes().first() {
                Some(b'-') => old -= 1,
                Some(b'+') => new -= 1,
                Some(b'\\') => {}
                _ => (old, new) = (old - 1, new - 1),
            }
            continue;
        }
        if let Some(rest) = line.strip_prefix("@@ -") {
            (old, new) = lengths(rest).unwrap_or((0, 0));
            continue;
        }
        for begin in ["rename from ", "rename to ", "copy from ", "copy to "] {
            found.extend(line.strip_prefix(begin).map(|path| (path.to_owned(), true)));
        }
        // Git names an empty file, and a file whose mode alone changes, here only.
        if let Some(rest) = line.strip_prefix("diff --git ") {
            bare = lines.peek().is_some_and(|next| next.starts_with("similarity"));
            let both = rest.split_once(" b/").map(|(_, path)| format!("b/{path}"));
            found.extend(both.filter(|_| !bare).map(|path| (path, false)));
        }
        let is_pair =
            line.starts_with("--- ") && lines.peek().is_some_and(|next| next.starts_with("+++ "));
        if is_pair && let Some(other) = lines.next() {
            for path in [&line[4..], &other[4..]] {
                let path = path.split('\t').next().unwrap_or(path).trim();
                if path != "/dev/null" && !bare {
                    found.push((path.to_owned(), false));
                }
            }
        }
    }
    found
}

/// Returns the number of old and new lines of a hunk, from its header after `@@ -`.
fn lengths(header: &str) -> Option<(i64, i64)> {
    let (old, rest) = header.split_once(" +")?;
    let (new, _) = rest.split_once(" @@")?;
    let length = |range: &str| range.split_once(',').map_or(Some(1), |(_, n)| n.parse().ok());
    Some((length(old)?, length(new)?))
}

fn stripped(path: &str, parts: usize) -> Option<String> {
    let path = (0..parts).try_fold(path, |path, _| path.split_once('/').map(|(_, rest)| rest))?;
    let mut parts = Path::new(path).components();
    let is_inside = parts.all(|part| matches!(part, Component::Normal(_))) && !path.is_empty();
    is_inside.then(|| path.to_owned())
}

impl NamedFiles {
    fn of(diff: &str, exists: &dyn Fn(&str) -> bool) -> std::result::Result<Self, Refusal> {
        let headers = headers(diff);
        let all = |strip: usize| -> std::result::Result<BTreeSet<String>, Refusal> {
            let path = |(path, bare): &(String, bool)| {
                let strip = if *bare { strip.saturating_sub(1) } else { strip };
                stripped(path, strip).ok_or_else(|| {
                    Refusal::new(path, "this is no path of a file in the tree, as of `patch -p1`")
                })
            };
            headers.iter().map(path).collect()
        };
        let some = |strip| all(strip).is_ok_and(|paths| paths.iter().any(|path| exists(path)));
        // A diff that was made in the tree without git has no first part to leave out.
        let strip = if !some(1) && some(0) { 0 } else { 1 };
        Ok(Self { paths: all(strip)?, strip })
    }
}

/// Applies a diff to the files that `read` returns.
///
/// # Errors
/// [`Refusal`]: nothing was changed then.
pub fn apply(diff: &str, read: &dyn Fn(&str) -> Option<String>) -> Result {
    let named = NamedFiles::of(diff, &|path| read(path).is_some())?;
    let Some(first) = named.paths.first() else {
        return Err(Refusal::new("the diff", "it names no file"));
    };
    let io = |error: std::io::Error| match error.kind() {
        ErrorKind::NotFound => Refusal::new(first, NO_GIT),
        _ => Refusal::new(first, format!("cannot apply a diff here: {error}")),
    };
    let folder = tempfile::tempdir().map_err(io)?;
    let top = fs::canonicalize(folder.path()).map_err(io)?.join("tree");
    let place = |path: &String| -> PathBuf { top.join(path) };
    fs::create_dir(&top).map_err(io)?;
    for path in &named.paths {
        let Some(text) = read(path) else { continue };
        let place = place(path);
        fs::create_dir_all(place.parent().unwrap_or(&top)).map_err(io)?;
        fs::write(place, text).map_err(io)?;
    }
    let git = |options: &[&str]| git(&top, named.strip, diff, options);
    if !git(&[]).map_err(io)?.status.success() {
        let backwards = git(&["--check", "--reverse"]).map_err(io)?;
        if backwards.status.success() {
            return Err(Refusal::new(first, "the tree has it already"));
        }
        let each = git(&["--reject", "--verbose"]).map_err(io)?;
        return Err(reason(&String::from_utf8_lossy(&each.stderr), diff, first));
    }
    let mut after = BTreeMap::new();
    for path in named.paths {
        let text = match fs::read(place(&path)) {
            Ok(bytes) => match String::from_utf8(bytes) {
                Ok(text) => Some(text),
                Err(_) => return Err(Refusal::new(path, "it is no text")),
            },
            Err(_) => None,
        };
        if read(&path) != text {
            after.insert(path, text);
        }
    }
    Ok(after)
}

fn git(top: &Path, strip: usize, diff: &str, options: &[&str]) -> std::io::Result<Output> {
    let mut git = Command::new("git");
    // A temporary folder may lie in a repository, of which git would apply only a part.
    git.current_dir(top).env("GIT_CEILING_DIRECTORIES", top.parent().unwrap_or(top));
    git.env_remove("GIT_DIR").env_remove("GIT_WORK_TREE").env("LC_ALL", "C");
    git.args(["apply", "--whitespace=nowarn", &format!("-p{strip}")]).args(options).arg("-");
    git.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = git.spawn()?;
    if let Some(mut pipe) = child.stdin.take() {
        // Git that ends early says why.
        let _ = pipe.write_all(diff.as_bytes());
    }
    child.wait_with_output()
}

/// Finds the first file that a diff does not fit in what git says of each hunk.
fn reason(said: &str, diff: &str, first: &str) -> Refusal {
    for line in said.lines() {
        if let Some(rest) = line.strip_prefix("Applying patch ")
            && let Some((file, _)) = rest.split_once(" with ")
            && rest.contains("reject")
        {
            let of_file = said[said.find(line).unwrap_or(0)..].lines().skip(1);
            let hunks: Vec<&str> = of_file.take_while(|line| line.contains("unk #")).collect();
            let numbers = hunks.iter().filter_map(|line| line.strip_prefix("Rejected hunk #"));
            let numbers: Vec<usize> =
                numbers.filter_map(|number| number.trim_end_matches('.').parse().ok()).collect();
            let headers = hunk_headers(diff, file);
            let shown: Vec<String> = numbers
                .iter()
                .map(|number| match headers.get(number - 1) {
                    Some(header) => format!("hunk {number} of {} (`{header}`)", headers.len()),
                    None => format!("hunk {number}"),
                })
                .collect();
            return Refusal::new(
                file,
                format!("{} does not fit what is there", shown.join(" and ")),
            );
        }
    }
    let error = said.lines().find_map(|line| line.strip_prefix("error: "));
    let error = error.unwrap_or("git does not say why");
    if let Some((file, "No such file or directory")) = error.rsplit_once(": ") {
        return Refusal::new(file, "the tree has no such file");
    }
    if let Some((file, "already exists in working directory")) = error.rsplit_once(": ") {
        return Refusal::new(file, "the tree has a file of this name already");
    }
    let mangled = if error.contains("corrupt patch") {
        "; a program that sent it may have broken its lines or spaces"
    } else {
        ""
    };
    Refusal::new(first, format!("{error}{mangled}"))
}

/// Returns the headers of a file's hunks.
fn hunk_headers(diff: &str, file: &str) -> Vec<String> {
    let mut is_file = false;
    let mut found = Vec::new();
    for line in diff.lines() {
        if let Some(path) = line.strip_prefix("+++ ") {
            is_file = path.split('\t').next().is_some_and(|path| path.trim().ends_with(file));
        } else if is_file && line.starts_with("@@ -") {
            found.push(line.trim_end().to_owned());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIFF: &str = "diff --git a/k/a.c b/k/a.c\nindex 1..2 100644\n--- a/k/a.c\n+++ b/k/a.c\n\
                        @@ -1,3 +1,3 @@ f\n one\n-two\n+TWO\n three\n\
                        @@ -7,2 +7,3 @@ g\n seven\n eight\n+nine\n";

    const TEXT: &str = "one\ntwo\nthree\nfour\nfive\nsix\nseven\neight\n";

    fn applied(diff: &str, files: &[(&str, &str)]) -> Result {
        let read = |path: &str| {
            let found = files.iter().find(|(known, _)| *known == path);
            found.map(|(_, text)| (*text).to_owned())
        };
        apply(diff, &read)
    }

    #[test]
    fn a_diff_changes_adds_renames_and_removes_files() {
        let after = applied(DIFF, &[("k/a.c", TEXT)]).unwrap();
        let text = after["k/a.c"].as_deref().unwrap();
        assert!(text.starts_with("one\nTWO\n") && text.ends_with("eight\nnine\n"));
        let more = "diff --git a/old.h b/new.h\nsimilarity index 100%\nrename from old.h\n\
                    rename to new.h\ndiff --git a/gone.c b/gone.c\ndeleted file mode 100644\n\
                    --- a/gone.c\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n\
                    diff --git a/born.c b/born.c\nnew file mode 100644\n--- /dev/null\n\
                    +++ b/born.c\n@@ -0,0 +1,2 @@\n+y\n+--- z\n";
        let after = applied(more, &[("old.h", "h\n"), ("gone.c", "x\n")]).unwrap();
        let texts: Vec<(&str, Option<&str>)> =
            after.iter().map(|(path, text)| (&**path, text.as_deref())).collect();
        assert_eq!(
            texts,
            [
                ("born.c", Some("y\n--- z\n")),
                ("gone.c", None),
                ("new.h", Some("h\n")),
                ("old.h", None)
            ]
        );
    }

    #[test]
    fn a_misfit_diff_names_its_file_and_hunk_and_changes_nothing() {
        let other = TEXT.replace("eight", "8");
        let refused = applied(DIFF, &[("k/a.c", &other)]).unwrap_err();
        assert_eq!(refused.file, "k/a.c");
        assert_eq!(refused.why, "hunk 2 of 2 (`@@ -7,2 +7,3 @@ g`) does not fit what is there");
        assert!(applied(DIFF, &[]).unwrap_err().why.contains("no such file"));
        let there = applied(DIFF, &[("k/a.c", TEXT)]).unwrap()["k/a.c"].clone().unwrap();
        let twice = applied(DIFF, &[("k/a.c", &there)]).unwrap_err();
        assert_eq!(twice.why, "the tree has it already");
    }

    #[test]
    fn a_diff_without_path_prefixes_applies_only_inside_the_tree() {
        let bare = "--- k/a.c.orig\t2026\n+++ k/a.c\t2026\n@@ -1,2 +1,2 @@\n-one\n+1\n two\n";
        let bare = &bare.replace(".orig", "");
        assert!(applied(bare, &[("k/a.c", TEXT)]).unwrap().contains_key("k/a.c"));
        let out = DIFF.replace("k/a.c", "../../etc/passwd");
        assert!(applied(&out, &[]).unwrap_err().why.contains("no path of a file in the tree"));
        let broken = DIFF.replace(" seven\n", "");
        assert!(applied(&broken, &[("k/a.c", TEXT)]).is_err());
    }
}
