//! Tests that prose of the documentation keeps to 100 columns, so that its changes are readable as
//! diffs.
//!
//! Blocks of text, rows of tables, headings and comments may be wider.

use crate::root;
use std::path::{Path, PathBuf};

const COLUMNS: usize = 100;

/// Returns the numbers of lines of a page that are prose and too wide.
fn wide(page: &str) -> Vec<usize> {
    let mut in_block = false;
    let mut found = Vec::new();
    for (number, line) in (1..).zip(page.lines()) {
        let text = line.trim_start();
        let fence = text.starts_with("```");
        in_block ^= fence;
        let is_prose = !fence && !in_block && !text.starts_with(['|', '#', '<']);
        // A line of one long word cannot be broken.
        let can_be_broken = text.trim_start_matches("- ").contains(' ');
        if is_prose && can_be_broken && line.chars().count() > COLUMNS {
            found.push(number);
        }
    }
    found
}

/// Returns the project's own pages, without files that were built or fetched.
fn pages(folder: &Path) -> Vec<PathBuf> {
    let entries = folder.read_dir().unwrap().map(|entry| entry.unwrap().path());
    let is_hidden = |path: &Path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with('.') || name == "target"
    };
    let found = |path: PathBuf| match path.is_dir() {
        _ if is_hidden(&path) => Vec::new(),
        true => pages(&path),
        false => {
            path.extension().is_some_and(|of| of == "md").then_some(path).into_iter().collect()
        }
    };
    entries.flat_map(found).collect()
}

#[test]
fn no_line_of_prose_is_wider_than_100_columns() {
    let mut found = Vec::new();
    for path in pages(root()) {
        let page = std::fs::read_to_string(&path).unwrap();
        found.extend(wide(&page).into_iter().map(|line| format!("{}:{line}", path.display())));
    }
    assert!(found.is_empty(), "break {found:?}");
}

#[test]
fn a_wide_line_is_found_in_prose_alone() {
    let long = format!("a {}", "b".repeat(99));
    assert_eq!(wide(&format!("a\n{long}\n| {long}\n```\n{long}\n```\n- {long}\n")), [2, 7]);
    assert!(wide(&"b".repeat(120)).is_empty());
}
