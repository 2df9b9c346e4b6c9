//! Tests that sources and the prose of the documentation keep to 100 columns, so that their changes
//! are readable as diffs.
//!
//! In pages, blocks of text, rows of tables, headings and comments may be wider.

use super::links::{files, pages};
use crate::root;
use std::path::Path;

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

#[test]
fn no_line_of_prose_is_wider_than_100_columns() {
    let (mut all, mut found) = (Vec::new(), Vec::new());
    pages(Path::new(""), &mut all);
    for path in all {
        let page = std::fs::read_to_string(root().join(&path)).unwrap();
        found.extend(wide(&page).into_iter().map(|line| format!("{}:{line}", path.display())));
    }
    assert!(found.is_empty(), "break {found:?}");
}

/// The formatter leaves long strings and attributes as they are.
#[test]
fn no_line_of_a_source_is_wider_than_100_columns() {
    let (mut all, mut found) = (Vec::new(), Vec::new());
    files("rs", Path::new(""), &mut all);
    files("s", Path::new(""), &mut all);
    assert!(all.len() > 500, "{} sources", all.len());
    for path in all {
        let source = std::fs::read_to_string(root().join(&path)).unwrap();
        let wide = (1..).zip(source.lines()).filter(|(_, line)| line.chars().count() > COLUMNS);
        found.extend(wide.map(|(line, _)| format!("{}:{line}", path.display())));
    }
    assert!(found.is_empty(), "break {found:?}");
}

#[test]
fn a_wide_line_is_found_in_prose_alone() {
    let long = format!("a {}", "b".repeat(99));
    assert_eq!(wide(&format!("a\n{long}\n| {long}\n```\n{long}\n```\n- {long}\n")), [2, 7]);
    assert!(wide(&"b".repeat(120)).is_empty());
}
