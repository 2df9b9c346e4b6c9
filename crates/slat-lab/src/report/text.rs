//! The report for a terminal.

use super::tables;
use crate::numbers::several;
use crate::record::Omission;
use crate::record::Report;
use crate::renderer::Renderers;
use crate::table::Table;
use crate::verdict::{Setting, Verdict};
use comfy_table::{
    CellAlignment, ColumnConstraint, ContentArrangement, LineStyle, Row, Table as Grid, TableStyle,
    Width,
};
use std::fmt::Write;
use textwrap::Options;

/// A line below the headings, and no other lines.
const STYLE: TableStyle = TableStyle::new().header_separator(LineStyle::none().fill('─'));

/// The heading above answers of repeated runs.
pub const REPEATED: &str = "Repeated until 95 % intervals of medians are narrow";

/// Renders the whole report, in lines of at most `width` columns if the tables can be made to fit.
pub fn render(report: &Report, renderers: &Renderers, width: u16) -> String {
    let mut text = String::new();
    header(&mut text, report, width);
    for table in tables::all(&report.results, renderers) {
        grid(&mut text, &table, width);
    }
    if !report.repeated.is_empty() {
        text.push_str(&format!("\n{REPEATED}\n"));
    }
    report.repeated.iter().for_each(|answer| wrap(&mut text, &answer.line(), "  ", width));
    skipped(&mut text, &report.skipped, width);
    text
}

/// Returns a line about the machine, and what it means for times.
pub fn host(report: &Report) -> String {
    let host = &report.host;
    let below = match host.virtualisation.hypervisor.0 {
        Some(true) => ", itself a guest",
        Some(false) => ", not a guest",
        None => "",
    };
    format!(
        "{}, {}, Linux {}{below}; times are this machine's, compare them within one run \
         only.",
        host.cpu.model,
        several(host.cpu.usable, "CPU"),
        host.kernel.release
    )
}

/// Appends the first lines: whether the run can be trusted, its answers, the machine, and whether
/// it was interrupted.
pub fn header(text: &mut String, report: &Report, width: u16) {
    match report.results.is_empty() {
        true => wrap(text, "Nothing was measured.", "", width),
        false => wrap(text, &report.trust.line(), "", width),
    }
    verdict(text, &report.verdict, width);
    wrap(text, &host(report), "", width);
    if report.partial {
        text.push_str("\nINTERRUPTED: this is a part of what was asked for.\n");
    }
}

/// Appends the answers, and the settings that follow from them.
fn verdict(text: &mut String, verdict: &Verdict, width: u16) {
    for sentence in &verdict.says {
        let options = Options::new(width.into()).initial_indent("- ").subsequent_indent("  ");
        let _ = writeln!(text, "{}", textwrap::fill(sentence, options.break_words(false)));
    }
    let widest = verdict.settings.iter().map(|setting| setting.of.chars().count()).max();
    for Setting { of, line } in &verdict.settings {
        // A line to be typed is not broken.
        let _ = writeln!(text, "    {of:width$}  {line}", width = widest.unwrap_or(0));
    }
}

/// Appends a table, in lines of at most `width` columns if it can be made to fit.
pub fn grid(text: &mut String, table: &Table, width: u16) {
    text.push('\n');
    text.push_str(&table.title);
    text.push('\n');
    wrap(text, &table.common, "  ", width);
    for (place, part) in parts(table, width).iter().enumerate() {
        if place > 0 {
            text.push('\n');
        }
        lines(text, part, width);
    }
    for note in &table.notes {
        wrap(text, note, "  ", width);
    }
}

/// Splits a table that is wider than the terminal: each part has its labels, and as many of the
/// other columns as fit beside them. A terminal that breaks the lines makes a table unreadable.
fn parts(table: &Table, width: u16) -> Vec<Table> {
    let count = table.columns.len();
    let all: Vec<usize> = (0..count).map(|index| least(table, index)).collect();
    let width = usize::from(width);
    if all.iter().sum::<usize>() <= width || table.labels >= count {
        return vec![table.clone()];
    }
    let labels: usize = all[..table.labels].iter().sum();
    let (mut groups, mut used) = (vec![Vec::new()], labels);
    for (index, least) in all.iter().enumerate().skip(table.labels) {
        if used + least > width && groups.last().is_some_and(|group| !group.is_empty()) {
            groups.push(Vec::new());
            used = labels;
        }
        used += least;
        groups.last_mut().expect("there is one").push(index);
    }
    let part = |group: &Vec<usize>| {
        let chosen = || (0..table.labels).chain(group.iter().copied());
        let of = |row: &Vec<String>| chosen().map(|index| row[index].clone()).collect();
        let columns = of(&table.columns);
        Table { columns, rows: table.rows.iter().map(of).collect(), ..table.clone() }
    };
    groups.iter().map(part).collect()
}

/// Appends the lines of a table.
fn lines(text: &mut String, table: &Table, width: u16) {
    let mut grid = Grid::new();
    grid.load_style(STYLE);
    grid.set_content_arrangement(ContentArrangement::Dynamic).set_width(width);
    grid.set_header(Row::from(table.columns.clone()));
    for row in &table.rows {
        grid.add_row(row);
    }
    let needed: usize =
        (0..table.columns.len()).map(|index| widest(table, index, &['\n']) + 2).sum();
    let crowded = needed > usize::from(width);
    for (index, column) in grid.column_iter_mut().enumerate() {
        if index >= table.labels {
            column.set_cell_alignment(CellAlignment::Right);
        }
        if crowded && let Some(constraint) = constraint(table, index) {
            column.set_constraint(constraint);
        }
    }
    for line in grid.lines() {
        let _ = writeln!(text, "{}", line.trim_end());
    }
}

/// Returns the length of the longest piece of a column's cells, broken at the characters `at`.
fn widest(table: &Table, index: usize, at: &[char]) -> usize {
    let cells = table.rows.iter().map(|row| &row[index]).chain([&table.columns[index]]);
    cells.flat_map(|cell| cell.split(at)).map(|piece| piece.chars().count()).max().unwrap_or(0)
}

/// Returns a column's least width: no word is broken, even on a narrow terminal, and no number from
/// its unit. A single label is a sentence, which may take a few lines, but not ten.
fn least(table: &Table, index: usize) -> usize {
    let is_number = index >= table.labels;
    let cells = table.rows.iter().map(|row| widest_of(&row[index], is_number)).max();
    let mut least = cells.unwrap_or(0).max(widest_of(&table.columns[index], false));
    if index == 0 && table.labels == 1 {
        least = least.max(widest(table, 0, &['\n']).min(42));
    }
    let padding = 2;
    least + padding
}

/// Returns the length of the longest piece of a cell that stays in one line. Beyond some length
/// a cell of figures is a sentence.
fn widest_of(cell: &str, is_number: bool) -> usize {
    let longest = |at: &[char]| cell.split(at).map(|it| it.chars().count()).max().unwrap_or(0);
    match longest(&['\n']) {
        whole if is_number && whole <= 16 => whole,
        _ => longest(&[' ', '\n']),
    }
}

/// Returns a column's lower bound.
fn constraint(table: &Table, index: usize) -> Option<ColumnConstraint> {
    let least = u16::try_from(least(table, index)).ok()?;
    Some(ColumnConstraint::LowerBoundary(Width::Fixed(least)))
}

/// Appends what was not measured, and why.
pub fn skipped(text: &mut String, skipped: &[Omission], width: u16) {
    if skipped.is_empty() {
        return;
    }
    text.push_str("\nNot measured\n");
    for skipped in skipped {
        wrap(text, &format!("{}: {}", skipped.what, skipped.reason), "  ", width);
    }
}

/// Appends a paragraph, broken between words.
fn wrap(text: &mut String, paragraph: &str, indent: &str, width: u16) {
    let options = Options::new(width.into())
        .initial_indent(indent)
        .subsequent_indent(indent)
        .break_words(false);
    if !paragraph.is_empty() {
        let _ = writeln!(text, "{}", textwrap::fill(paragraph, options));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake;

    #[test]
    fn a_run_that_was_interrupted_says_so() {
        let report = Report { partial: true, ..fake::report() };
        assert!(render(&report, &Renderers::default(), 100).contains("INTERRUPTED"));
    }

    #[test]
    fn a_table_too_wide_for_the_terminal_wraps_with_its_labels() {
        let cells = |row: usize| (0..9).map(|i| format!("{row}{i} µs ±1%")).collect::<Vec<_>>();
        let named = |name: &str, cells: Vec<String>| [vec![name.to_owned()], cells].concat();
        let columns = named("phase", (0..9).map(|i| format!("column {i}")).collect());
        let rows = vec![named("enable", cells(1)), named("clear", cells(2))];
        let (title, common) = ("Phases".to_owned(), String::new());
        let table = Table { title, common, columns, labels: 1, rows, notes: Vec::new() };
        let mut text = String::new();
        grid(&mut text, &table, 80);
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert_eq!(text.matches("enable").count(), 2, "{text}");
        assert!((0..9).all(|i| text.contains(&format!("2{i} µs ±1%"))), "{text}");
        let mut wide = String::new();
        grid(&mut wide, &table, 160);
        assert_eq!(wide.matches("enable").count(), 1, "{wide}");
    }

    #[test]
    fn a_report_of_nothing_is_just_its_host() {
        let report = Report { results: Vec::new(), skipped: Vec::new(), ..fake::report() };
        insta::assert_snapshot!(render(&report, &Renderers::default(), 60));
    }
}
