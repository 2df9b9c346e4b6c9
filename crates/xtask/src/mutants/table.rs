//! Results of the mutants, one row for each file, and their table in the documentation.

use super::excused::Excused;
use super::{Fate, Mutant};
use anyhow::{Context, ensure};
use std::collections::BTreeMap;
use std::path::Path;

const TITLES: &str = "\
| file | mutants | caught | a test did not end | equivalent | missed | do not compile |
|---|---|---|---|---|---|---|
";

/// Markers around the table in the documentation.
const MARKERS: [&str; 2] = ["<!-- cargo xtask mutants --record -->\n\n", "\n<!-- end -->"];

/// Results of the mutants of a file.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Row {
    file: String,
    caught: usize,
    timeout: usize,
    equivalent: usize,
    missed: usize,
    unviable: usize,
}

pub fn rows(tested: &[(&Mutant, Fate)], excused: &Excused) -> Vec<Row> {
    let mut rows: BTreeMap<&str, Row> = BTreeMap::new();
    for &(mutant, fate) in tested {
        let row = rows.entry(&mutant.file).or_default();
        row.file.clone_from(&mutant.file);
        *match fate {
            Fate::Caught => &mut row.caught,
            Fate::Timeout => &mut row.timeout,
            Fate::Missed if excused.has(mutant) => &mut row.equivalent,
            Fate::Missed => &mut row.missed,
            Fate::Unviable => &mut row.unviable,
        } += 1;
    }
    rows.into_values().collect()
}

impl Row {
    fn text(&self) -> String {
        let Self { file, caught, timeout, equivalent, missed, unviable } = self;
        let all = caught + timeout + equivalent + missed + unviable;
        format!(
            "| `{file}` | {all} | {caught} | {timeout} | {equivalent} | {missed} | {unviable} |\n"
        )
    }
}

/// Returns the rows as a table.
pub fn text(rows: &[Row]) -> String {
    rows.iter().fold(TITLES.to_owned(), |text, row| text + &row.text())
}

/// Writes the rows into the table of a page, in place of those of the same files.
pub fn record(page: &Path, rows: &[Row]) -> anyhow::Result<()> {
    let text = std::fs::read_to_string(page).with_context(|| page.display().to_string())?;
    let text = merged(&text, rows).with_context(|| page.display().to_string())?;
    std::fs::write(page, text).with_context(|| page.display().to_string())
}

fn merged(page: &str, rows: &[Row]) -> anyhow::Result<String> {
    let (before, rest) = page.split_once(MARKERS[0]).context("the page has no table of mutants")?;
    let (table, after) = rest.split_once(MARKERS[1]).context("the table of mutants has no end")?;
    let old = table.strip_prefix(TITLES).context("the table of mutants has other titles")?;
    ensure!(old.lines().all(|line| line.starts_with("| `")), "a row of mutants names no file");
    let file = |line: &str| line.split('`').nth(1).unwrap_or_default().to_owned();
    let mut all: BTreeMap<String, String> =
        old.lines().map(|line| (file(line), format!("{line}\n"))).collect();
    all.extend(rows.iter().map(|row| (row.file.clone(), row.text())));
    let table: String = all.into_values().collect();
    Ok([before, MARKERS[0], TITLES, &table, MARKERS[1], after].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_take_the_place_of_those_of_the_same_file() {
        let row = |file: &str, caught| Row { file: file.to_owned(), caught, ..Row::default() };
        let page = ["before\n", MARKERS[0], TITLES, MARKERS[1], "\nafter\n"].concat();
        let page = merged(&page, &[row("b.rs", 1), row("c.rs", 2)]).unwrap();
        let page = merged(&page, &[row("a.rs", 4), row("b.rs", 3)]).unwrap();
        let rows = text(&[row("a.rs", 4), row("b.rs", 3), row("c.rs", 2)]);
        assert_eq!(page, ["before\n", MARKERS[0], &rows, MARKERS[1], "\nafter\n"].concat());
        assert!(merged("no table", &[]).is_err());
    }
}
