//! Results of the mutants, one row for each file, and their table in the documentation.

use super::excused::Excused;
use super::{Fate, Mutant};
use anyhow::{Context, ensure};
use std::collections::BTreeMap;
use std::path::Path;

const TITLES: &str = "\
| file | mutants | caught | a test did not end | equivalent | missed | do not compile | not run |
|---|---|---|---|---|---|---|---|
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
    not_run: usize,
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
            Fate::NotRun => &mut row.not_run,
        } += 1;
    }
    rows.into_values().collect()
}

impl Row {
    /// Parses a row of the table.
    fn parse(line: &str) -> Option<Self> {
        let mut cells = line.strip_prefix("| ")?.strip_suffix(" |")?.split(" | ");
        let file = cells.next()?.trim_matches('`').to_owned();
        let cells: Vec<usize> = cells.map(str::parse).collect::<Result<_, _>>().ok()?;
        let [_, caught, timeout, equivalent, missed, unviable, not_run] = *cells else {
            return None;
        };
        Some(Self { file, caught, timeout, equivalent, missed, unviable, not_run })
    }

    /// Counts mutants that were missed as what they are now; `None` if `now` has more of them.
    fn again(&self, now: &Self) -> Option<Self> {
        let missed = self.missed.checked_sub(now.all())? + now.missed;
        Some(Self {
            file: self.file.clone(),
            caught: self.caught + now.caught,
            timeout: self.timeout + now.timeout,
            equivalent: self.equivalent + now.equivalent,
            missed,
            unviable: self.unviable + now.unviable,
            not_run: self.not_run + now.not_run,
        })
    }

    fn all(&self) -> usize {
        let Self { file: _, caught, timeout, equivalent, missed, unviable, not_run } = self;
        caught + timeout + equivalent + missed + unviable + not_run
    }

    fn text(&self) -> String {
        let Self { file, caught, timeout, equivalent, missed, unviable, not_run } = self;
        let all = self.all();
        format!(
            "| `{file}` | {all} | {caught} | {timeout} | {equivalent} | {missed} | {unviable} \
             | {not_run} |\n"
        )
    }
}

/// Returns the rows as a table.
pub fn text(rows: &[Row]) -> String {
    rows.iter().fold(TITLES.to_owned(), |text, row| text + &row.text())
}

/// Writes the rows into the table of a page, in place of those of the same files. If only mutants
/// that an earlier run missed were tested (`again`), the other ones of their files still count.
pub fn record(page: &Path, rows: &[Row], again: bool) -> anyhow::Result<()> {
    let text = std::fs::read_to_string(page).with_context(|| page.display().to_string())?;
    let text = merged(&text, rows, again).with_context(|| page.display().to_string())?;
    std::fs::write(page, text).with_context(|| page.display().to_string())
}

fn merged(page: &str, rows: &[Row], again: bool) -> anyhow::Result<String> {
    let (before, rest) = page.split_once(MARKERS[0]).context("the page has no table of mutants")?;
    let (table, after) = rest.split_once(MARKERS[1]).context("the table of mutants has no end")?;
    let old = table.strip_prefix(TITLES).context("the table of mutants has other titles")?;
    let mut all: BTreeMap<String, String> = BTreeMap::new();
    for line in old.lines() {
        let row = Row::parse(line).with_context(|| format!("`{line}` is no row of mutants"))?;
        let row = match rows.iter().find(|now| again && now.file == row.file) {
            Some(now) => row.again(now).with_context(|| {
                format!("{0} has fewer mutants that were missed: run all of {0}", row.file)
            })?,
            None => row,
        };
        all.insert(row.file.clone(), row.text());
    }
    for row in rows {
        if again {
            ensure!(all.contains_key(&row.file), "{0} has no row yet: run all of {0}", row.file);
        } else {
            all.insert(row.file.clone(), row.text());
        }
    }
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
        let page = merged(&page, &[row("b.rs", 1), row("c.rs", 2)], false).unwrap();
        let page = merged(&page, &[row("a.rs", 4), row("b.rs", 3)], false).unwrap();
        let rows = text(&[row("a.rs", 4), row("b.rs", 3), row("c.rs", 2)]);
        assert_eq!(page, ["before\n", MARKERS[0], &rows, MARKERS[1], "\nafter\n"].concat());
        assert!(merged("no table", &[], false).is_err());
    }

    #[test]
    fn mutants_that_were_missed_are_counted_as_what_they_are_now() {
        let file = || "a.rs".to_owned();
        let was = Row { file: file(), caught: 5, missed: 3, ..Row::default() };
        let now = Row { file: file(), caught: 1, equivalent: 1, ..Row::default() };
        let page = [MARKERS[0], &text(&[was]), MARKERS[1]].concat();
        let page = merged(&page, &[now], true).unwrap();
        let is = Row { file: file(), caught: 6, equivalent: 1, missed: 1, ..Row::default() };
        assert_eq!(page, [MARKERS[0], &text(&[is]), MARKERS[1]].concat());
        let more = Row { file: file(), caught: 2, ..Row::default() };
        assert!(merged(&page, &[more], true).is_err());
        let other = Row { file: "b.rs".to_owned(), caught: 1, ..Row::default() };
        assert!(merged(&page, &[other], true).is_err());
    }
}
