//! Revisions of a git repository as source trees. The repository is only read: no branch is
//! switched, and no file or folder of it is written.

use crate::{Edit, Error, patches};
use anyhow::{Context, bail, ensure};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A revision of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Revision {
    repository: PathBuf,
    /// Its commit.
    pub commit: String,
}

/// File beside a tree that was taken out, with the commit that it is of.
const STATE: &str = "commit";

/// Paths on one command line of git.
const PATHS: usize = 500;

impl Revision {
    /// Finds a revision by its name: a commit, a tag, a branch.
    ///
    /// # Errors
    /// The folder is no repository, or has no such revision.
    pub fn find(repository: &Path, name: &str) -> anyhow::Result<Self> {
        let repository = fs::canonicalize(repository)
            .with_context(|| format!("cannot read {}", repository.display()))?;
        let wanted = format!("{name}^{{commit}}");
        let said =
            git(&repository, &["rev-parse", "--verify", "--quiet", "--end-of-options", &wanted]);
        let said = said.map_err(|error| match error.downcast_ref() {
            Some(Said(text)) if text.is_empty() => {
                anyhow::anyhow!("{} has no revision {name}", repository.display())
            }
            _ => error,
        })?;
        Ok(Self { repository, commit: said.trim().to_owned() })
    }

    /// Brings a folder to this revision; what did not change since the last one keeps its time.
    /// Returns the path of the tree, and a lock that keeps others from bringing it elsewhere.
    ///
    /// # Errors
    /// The folder cannot be written, or git fails.
    pub fn take_out(&self, folder: &Path) -> anyhow::Result<(PathBuf, File)> {
        let failed = || format!("cannot write to {}", folder.display());
        let (tree, state) = (folder.join("tree"), folder.join(STATE));
        fs::create_dir_all(&tree).with_context(failed)?;
        let lock = File::create(folder.join("lock")).with_context(failed)?;
        lock.lock().with_context(failed)?;
        let was = fs::read_to_string(&state).unwrap_or_default();
        if was == self.commit {
            return Ok((tree, lock));
        }
        let known = !was.is_empty()
            && git(&self.repository, &["cat-file", "-e", &format!("{was}^{{commit}}")]).is_ok();
        // Of a tree that was left half way nothing is known.
        let _ = fs::remove_file(&state);
        if known {
            let changed = ["diff", "--no-renames", "--name-status", "-z", &was, &self.commit];
            let list = git(&self.repository, &changed)?;
            let mut words = list.split('\0').filter(|word| !word.is_empty());
            let mut paths = Vec::new();
            while let (Some(how), Some(path)) = (words.next(), words.next()) {
                match how {
                    "D" => drop(fs::remove_file(tree.join(path))),
                    _ => paths.push(path),
                }
            }
            paths.chunks(PATHS).try_for_each(|paths| self.unpack(&tree, paths))?;
        } else {
            fs::remove_dir_all(&tree).with_context(failed)?;
            fs::create_dir_all(&tree).with_context(failed)?;
            self.unpack(&tree, &[])?;
        }
        fs::write(&state, &self.commit).with_context(failed)?;
        Ok((tree, lock))
    }

    fn unpack(&self, tree: &Path, paths: &[&str]) -> anyhow::Result<()> {
        let mut archive = Command::new("git");
        archive.arg("-C").arg(&self.repository).args(["archive", "--format=tar", &self.commit]);
        archive.arg("--").args(paths.iter().map(|path| format!(":(literal){path}")));
        archive.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut archive = archive.spawn().context(crate::diff::NO_GIT)?;
        let mut tar = Command::new("tar");
        // The time of its files is now: make compiles what changed.
        tar.args(["--extract", "--touch", "--directory"]).arg(tree);
        tar.stdin(archive.stdout.take().map_or_else(Stdio::null, Stdio::from));
        let tar = tar.stdout(Stdio::null()).status();
        let archived = archive.wait().context("cannot wait for git")?;
        let tar = tar.context("cannot start tar")?;
        ensure!(archived.success() && tar.success(), "git archive {} failed", self.commit);
        Ok(())
    }

    /// Returns the commits after this one up to `last`, by first parents, and their subjects.
    ///
    /// # Errors
    /// Git fails.
    pub fn commits(&self, last: &Self) -> anyhow::Result<Vec<(String, String)>> {
        let range = format!("{}..{}", self.commit, last.commit);
        let words = ["log", "--reverse", "--first-parent", "--format=%H %s", &range];
        let list = git(&self.repository, &words)?;
        let pair = |line: &str| {
            let (commit, subject) = line.split_once(' ').unwrap_or((line, ""));
            (commit.to_owned(), subject.to_owned())
        };
        Ok(list.lines().map(pair).collect())
    }

    /// Returns the commits after this one up to `last`, as edits; or one edit with all that they
    /// change if some of them are merges.
    ///
    /// # Errors
    /// Git fails, or there is no such commit.
    pub fn edits(&self, last: &Self) -> anyhow::Result<Vec<Edit>> {
        let range = format!("{}..{}", self.commit, last.commit);
        let merges = git(&self.repository, &["rev-list", "--merges", "--count", &range])?;
        let folder = tempfile::tempdir().context("cannot make a temporary folder")?;
        let path =
            folder.path().join(if merges.trim() == "0" { "range.mbox" } else { "range.diff" });
        let text = match merges.trim() {
            "0" => {
                let options = ["format-patch", "--stdout", "--no-signature", "--no-renames", "-N"];
                git(&self.repository, &[&options[..], &[&range]].concat())?
            }
            _ => git(&self.repository, &["diff", "--no-renames", &self.commit, &last.commit])?,
        };
        if text.is_empty() {
            bail!("there is no commit in {range}");
        }
        fs::write(&path, text).context("cannot write patches")?;
        let (edits, _) =
            patches::read(&[path]).map_err(|error: Error| anyhow::anyhow!("{error}"))?;
        Ok(edits)
    }
}

/// What git said when it failed.
#[derive(Debug, thiserror::Error)]
#[error("git: {0}")]
struct Said(String);

fn git(repository: &Path, words: &[&str]) -> anyhow::Result<String> {
    let mut git = Command::new("git");
    git.arg("-C").arg(repository).args(words).env("LC_ALL", "C").stdin(Stdio::null());
    let output = git.output().context(crate::diff::NO_GIT)?;
    if !output.status.success() {
        return Err(Said(String::from_utf8_lossy(&output.stderr).trim().to_owned()).into());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes a repository of three commits; each changes the Makefile, the last removes a file.
    fn repository() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let git = |words: &[&str]| {
            let own = ["-c", "user.name=T", "-c", "user.email=t@example.org"];
            git(folder.path(), &[&own[..], words].concat()).unwrap();
        };
        git(&["init", "--quiet", "--initial-branch", "main"]);
        for number in ["1", "2", "3"] {
            fs::write(folder.path().join("Makefile"), format!("VERSION = {number}\n")).unwrap();
            match number {
                "3" => fs::remove_file(folder.path().join("a.c")).unwrap(),
                _ => fs::write(folder.path().join("a.c"), "a\n").unwrap(),
            }
            git(&["add", "--all"]);
            git(&["commit", "--quiet", "--message", number]);
            git(&["tag", &format!("v{number}")]);
        }
        folder
    }

    #[test]
    fn a_tree_moves_between_revisions_and_leaves_the_repository() {
        let (repository, kept) = (repository(), tempfile::tempdir().unwrap());
        let at = |name: &str| {
            let revision = Revision::find(repository.path(), name).unwrap();
            let (tree, _lock) = revision.take_out(kept.path()).unwrap();
            let makefile = fs::read_to_string(tree.join("Makefile")).unwrap();
            (makefile, tree.join("a.c").exists())
        };
        for (name, version, is_there) in [("v1", 1, true), ("main", 3, false), ("v2", 2, true)] {
            assert_eq!(at(name), (format!("VERSION = {version}\n"), is_there), "{name}");
        }
        assert!(!repository.path().join("a.c").exists());
        let no = Revision::find(repository.path(), "v9").unwrap_err().to_string();
        assert!(no.contains("has no revision v9"), "{no}");
        assert!(Revision::find(kept.path(), "v1").is_err());
    }

    #[test]
    fn the_commits_of_a_range_are_edits() {
        let repository = repository();
        let find = |name: &str| Revision::find(repository.path(), name).unwrap();
        let edits = find("v1").edits(&find("main")).unwrap();
        let subjects: Vec<&str> = edits.iter().map(Edit::subject).collect();
        assert_eq!(subjects, ["2", "3"]);
        assert!(find("v1").edits(&find("v1")).is_err());
        let commits = find("v1").commits(&find("main")).unwrap();
        assert_eq!(commits[1], (find("v3").commit, "3".to_owned()));
    }
}
