//! `cargo xtask notes`: what changed since a tag, from the subjects of the commits, by crate.

use crate::root;
use anyhow::{Context, ensure};
use std::collections::BTreeMap;
use std::process::Command;

/// Prints the section of the changelog for this version, then the commits since the tag.
pub fn run(since: Option<&str>) -> anyhow::Result<()> {
    let last = || git(&["describe", "--tags", "--abbrev=0"]).ok();
    let since = since.map(str::to_owned).or_else(last);
    let range = since.as_ref().map_or("HEAD".to_owned(), |tag| format!("{tag}..HEAD"));
    let log = git(&["log", "--no-merges", "--reverse", "--format=%x01%s", "--name-only", &range])?;
    let changelog = std::fs::read_to_string(root().join("CHANGELOG.md"))?;
    print!("{}", notes(&changelog, &log));
    Ok(())
}

fn git(words: &[&str]) -> anyhow::Result<String> {
    let done = Command::new("git").args(words).current_dir(root()).output();
    let done = done.context("cannot start git")?;
    ensure!(done.status.success(), "git: {}", String::from_utf8_lossy(&done.stderr).trim());
    Ok(String::from_utf8(done.stdout)?)
}

/// Returns the notes: the newest section of the changelog, then each commit in the part of the
/// repository of which it changed most files.
fn notes(changelog: &str, log: &str) -> String {
    let mut sections = changelog.split("\n## ").skip(1);
    let newest = sections.next().unwrap_or_default().trim_end();
    let mut parts: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for commit in log.split('\u{1}').filter(|commit| !commit.trim().is_empty()) {
        let (subject, files) = commit.split_once('\n').unwrap_or((commit, ""));
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for file in files.lines().filter(|file| !file.is_empty()) {
            *counts.entry(part(file)).or_default() += 1;
        }
        // Of two, the first by name.
        let most = counts.iter().rev().max_by_key(|(_, count)| **count);
        parts.entry(most.map_or("other", |(part, _)| *part)).or_default().push(subject.trim());
    }
    let mut text = format!("## {newest}\n\n### Commits\n");
    for (part, subjects) in parts {
        text += &format!("\n{part}:\n\n");
        subjects.iter().for_each(|subject| text += &format!("- {subject}\n"));
    }
    text
}

/// Returns the crate or folder of a file.
fn part(file: &str) -> &str {
    let mut folders = file.split('/');
    match (folders.next(), folders.next()) {
        (Some("crates"), Some(name)) => name,
        (Some(folder), Some(_)) => folder,
        _ => "the workspace",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_have_the_newest_changes_and_each_commit_once_by_crate() {
        let changelog = "# Changelog\n\n## [0.2.0]\n\n- New.\n\n## [0.1.0]\n\n- Old.\n";
        let log = "\u{1}Add it\n\ncrates/slat/src/a.rs\ncrates/slat/src/b.rs\ndocs/a.md\n\
                   \u{1}Say it\n\ndocs/a.md\n\u{1}Lock it\n\nCargo.lock\n\u{1}Nothing\n";
        let expected = "## [0.2.0]\n\n- New.\n\n### Commits\n\ndocs:\n\n- Say it\n\nother:\n\n\
                        - Nothing\n\nslat:\n\n- Add it\n\nthe workspace:\n\n- Lock it\n";
        assert_eq!(notes(changelog, log), expected);
    }
}
