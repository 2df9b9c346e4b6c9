//! Edits as a series of patches that `git am` accepts, made against the user's tree.

use crate::edited::Change;
use crate::{Author, Edit, EditedTree};
use similar::TextDiff;
use std::fmt::Write as _;

/// A mail of a series.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mail {
    /// Name of its file.
    pub file: String,
    /// Its text: an mbox of one message.
    pub text: String,
}

/// Number of context lines around a change.
const CONTEXT: usize = 3;

impl Mail {
    /// Returns a cover letter, and a patch for each edit that changed something.
    pub fn series(cover: &str, edited: &EditedTree, author: &Author) -> Vec<Self> {
        let patches: Vec<_> = edited.patches.iter().filter(|(_, c)| !c.is_empty()).collect();
        let count = patches.len();
        let (title, rest) = cover.split_once('\n').unwrap_or((cover, ""));
        let title = title.trim_start_matches('#').trim();
        let mut body = format!("{}\n\n", rest.trim());
        for (edit, _) in &patches {
            let _ = writeln!(body, "  {}", edit.subject());
        }
        let _ = writeln!(body, "\n{}", stat(patches.iter().flat_map(|(_, changes)| changes)));
        let head = |n: usize, subject: &str, author: &Author| {
            format!(
                "From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001\n\
                 From: {}\nDate: {}\nSubject: [PATCH {n}/{count}] {subject}\n\n",
                author.from, author.date
            )
        };
        let cover = Self {
            file: "0000-cover-letter.patch".to_owned(),
            text: head(0, title, author) + &body + "-- \nslat\n",
        };
        let mail = |(at, (edit, changes)): (usize, &&(Edit, Vec<Change>))| {
            let (subject, message) = (edit.subject(), &edit.message);
            let message = message.split_once('\n').map_or("", |(_, rest)| rest).trim();
            let diffs: String = changes.iter().map(diff).collect();
            let text = format!(
                "{}{message}\n---\n{}\n{diffs}-- \nslat\n",
                head(at + 1, subject, edit.author.as_ref().unwrap_or(author)),
                stat(changes.iter())
            );
            let file = format!("{:04}-{}.patch", at + 1, slug(subject));
            Self { file, text }
        };
        std::iter::once(cover).chain(patches.iter().enumerate().map(mail)).collect()
    }
}

/// Returns a subject as a part of a file's name.
fn slug(subject: &str) -> String {
    let word = |c: char| if c.is_ascii_alphanumeric() || c == '.' { c } else { ' ' };
    let text: String = subject.chars().map(word).collect();
    let text = text.split_whitespace().collect::<Vec<_>>().join("-");
    text.chars().take(52).collect::<String>().trim_end_matches(['-', '.']).to_owned()
}

/// Returns a file's change in git's format.
fn diff(change: &Change) -> String {
    let Change { path, before, after } = change;
    let text = before.as_deref().unwrap_or_default();
    let diff = TextDiff::from_lines(text, after.as_deref().unwrap_or_default());
    let mut unified = diff.unified_diff();
    unified.context_radius(CONTEXT);
    let there = |prefix: &str, text: &Option<String>| match text {
        Some(_) => format!("{prefix}/{path}"),
        None => "/dev/null".to_owned(),
    };
    let mode = match (before, after) {
        (None, _) => "new file mode 100644\n",
        (_, None) => "deleted file mode 100644\n",
        _ => "",
    };
    let unified = unified.header(&there("a", before), &there("b", after)).to_string();
    format!("diff --git a/{path} b/{path}\n{mode}{unified}")
}

/// Returns the number of lines added and removed, by file.
fn stat<'a>(changes: impl Iterator<Item = &'a Change>) -> String {
    let mut lines = String::new();
    for Change { path, before, after } in changes {
        let texts = [before, after].map(|text| text.as_deref().unwrap_or_default());
        let diff = TextDiff::from_lines(texts[0], texts[1]);
        let count = |tag| diff.iter_all_changes().filter(|change| change.tag() == tag).count();
        let (more, less) = (count(similar::ChangeTag::Insert), count(similar::ChangeTag::Delete));
        let _ = writeln!(lines, " {path} | +{more} -{less}");
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::edited::tests::{edited, tree};
    use std::process::Command;

    fn author() -> Author {
        let date = "Tue, 24 Nov 2026 12:00:00 +0000".to_owned();
        Author { from: "A Tester <tester@example.org>".to_owned(), date }
    }

    #[test]
    fn a_series_has_a_cover_and_a_patch_for_each_edit() {
        let (_folder, tree) = tree();
        let mails = Mail::series("# KVM: walks\n\nWhy.\n", &edited(&tree), &author());
        let files: Vec<&str> = mails.iter().map(|mail| &*mail.file).collect();
        assert_eq!(
            files,
            ["0000-cover-letter.patch", "0001-KVM-one-line.patch", "0002-KVM-a-file.patch"]
        );
        assert!(mails[0].text.contains("Subject: [PATCH 0/2] KVM: walks\n\nWhy.\n"));
        assert!(mails[1].text.contains("\nBecause.\n---\n Kconfig | +1 -0\n"), "{}", mails[1].text);
        assert!(mails[2].text.contains("--- /dev/null\n+++ b/virt/kvm/new.c\n@@ -0,0 +1 @@"));
    }

    #[test]
    fn git_am_makes_of_it_what_the_edits_made() {
        let (folder, tree) = tree();
        let edited = edited(&tree);
        let out = tempfile::tempdir().unwrap();
        let git = |args: &[&str]| {
            let mut git = Command::new("git");
            git.current_dir(folder.path()).args(["-c", "user.name=T", "-c", "user.email=t@e"]);
            let output = git.args(args).output().expect("git runs");
            assert!(output.status.success(), "{args:?}: {output:?}");
        };
        git(&["init", "--quiet"]);
        git(&["add", "."]);
        git(&["commit", "--quiet", "--message", "tree"]);
        for mail in &Mail::series("# KVM: walks\n", &edited, &author())[1..] {
            let path = out.path().join(&mail.file);
            std::fs::write(&path, &mail.text).unwrap();
            git(&["am", "--quiet", path.to_str().unwrap()]);
        }
        for (path, text) in &edited.files {
            assert_eq!(&std::fs::read_to_string(folder.path().join(path)).unwrap(), text);
        }
    }
}
