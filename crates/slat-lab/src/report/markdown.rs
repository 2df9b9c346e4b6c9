//! Tables as Markdown, for mails and issues.

use super::tables;
use super::text;
use crate::record::Report;
use crate::renderer::Renderers;
use crate::table::Table;
use crate::verdict::Setting;
use std::fmt::Write;

/// Renders the whole report, with its host and command line, so that others can repeat it.
pub fn render(report: &Report, renderers: &Renderers) -> String {
    let words = report.command.iter().map(String::as_str);
    let command = shlex::try_join(words).unwrap_or_else(|_| report.command.join(" "));
    let trust = report.trust.line();
    let mut markdown =
        format!("{trust}\n\n`{command}` (slat {})\n\n{}\n\n", report.tool, text::host(report));
    for sentence in &report.verdict.says {
        let _ = writeln!(markdown, "- {sentence}");
    }
    for Setting { of, line } in &report.verdict.settings {
        let _ = writeln!(markdown, "- {of}: `{line}`");
    }
    if !report.verdict.is_empty() {
        markdown.push('\n');
    }
    if report.partial {
        markdown += "**Interrupted**: this is a part of what was asked for.\n\n";
    }
    markdown.extend(tables::all(&report.results, renderers).iter().map(table));
    if !report.repeated.is_empty() {
        let _ = writeln!(markdown, "### {}\n", text::REPEATED);
    }
    let lines = report.repeated.iter().map(|answer| format!("- {}\n", answer.line()));
    markdown.extend(lines);
    if !report.skipped.is_empty() {
        markdown += "### Not measured\n\n";
    }
    for skipped in &report.skipped {
        let _ = writeln!(markdown, "- {}: {}", skipped.what, skipped.reason);
    }
    markdown
}

/// Renders a table, with its title above and its notes below.
pub fn table(table: &Table) -> String {
    let mut text = format!("### {}\n\n", table.title);
    if !table.common.is_empty() {
        let _ = writeln!(text, "{}\n", table.common);
    }
    let cell = |cell: &String| cell.replace('|', "\\|").replace('\n', " ");
    let line = |cells: &[String]| {
        format!("| {} |\n", cells.iter().map(cell).collect::<Vec<_>>().join(" | "))
    };
    text += &line(&table.columns);
    let rules =
        (0..table.columns.len()).map(|column| if column < table.labels { "---" } else { "---:" });
    let _ = writeln!(text, "| {} |", rules.collect::<Vec<_>>().join(" | "));
    for row in &table.rows {
        text += &line(row);
    }
    for note in &table.notes {
        let _ = write!(text, "\n{note}\n");
    }
    text + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_begins_with_the_command_and_the_machine() {
        let report = Report { partial: true, ..crate::fake::report() };
        let text = render(&report, &Renderers::default());
        let mut lines = text.lines();
        assert!(
            lines.next().unwrap().starts_with("A quiet run")
                && lines.nth(1).unwrap().starts_with("`slat")
                && lines.nth(1).unwrap().contains("CPUs")
        );
        assert!(text.contains("**Interrupted**") && text.contains("### Not measured\n\n- "));
        assert!(text.contains("| --- |") && !text.contains("───"));
    }

    #[test]
    fn labels_stand_left_figures_right_and_bars_are_escaped() {
        let table = table(&Table {
            title: "T".to_owned(),
            common: "all of it".to_owned(),
            columns: vec!["a\nb".to_owned(), "n".to_owned()],
            labels: 1,
            rows: vec![vec!["x|y".to_owned(), "1".to_owned()]],
            notes: vec!["why".to_owned()],
        });
        let expected =
            "### T\n\nall of it\n\n| a b | n |\n| --- | ---: |\n| x\\|y | 1 |\n\nwhy\n\n";
        assert_eq!(table, expected);
    }
}
