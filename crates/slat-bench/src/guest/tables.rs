//! Reports of the costs of guests: ratios first, then the figures of each scenario.

use crate::published::Rows;
use slat_lab::numbers::{seconds, thousands, three_digits, with_spread, with_wide_spread};
use slat_lab::record::{KVM, Measurement};
use slat_lab::renderer::Renderer;
use slat_lab::report::tables::thresholds::{parameter, said, verdict};
use slat_lab::report::tables::{Labels, Row, rows};
use slat_lab::size::Size;
use slat_lab::stats::Summary;
use slat_lab::table::{NOTHING, Table};

/// Name of the thresholds in results.
pub const ASKED: &str = "guest-asked";

/// Explanation for scenarios whose vCPUs are threads.
pub const MEANING: &[&str] = &["The vCPUs of the engine's guest are threads that walk its tables \
    in software: a fault is a call, not an exit, and an invalidation is a barrier on the threads' \
    CPUs. What hardware adds to each is not in these figures."];

/// Reads the ratios of all scenarios of guests.
pub const RATIOS: Renderer = Renderer {
    reads: |m| m.scenario == ASKED,
    verdict: said,
    tables: |results| asked(results).into_iter().collect(),
    meaning: MEANING,
    ..Renderer::NONE
};

/// Returns a table with one row for each ratio.
fn asked(results: &[Measurement]) -> Option<Table> {
    let rows: Vec<Vec<String>> = results
        .iter()
        .filter_map(|m| {
            let summary = Summary::of(&m.samples)?;
            let asked = m.params.get("asked").and_then(|asked| asked.as_f64());
            Some(vec![
                m.variant.clone(),
                parameter(m, "variants").to_owned(),
                parameter(m, "against").to_owned(),
                asked.map_or_else(|| NOTHING.to_owned(), |asked| format!("{} ×", digits(asked))),
                format!("{} ×", digits(summary.median)),
                format!("{}–{}", digits(summary.lower_quartile), digits(summary.upper_quartile)),
                asked.map_or("", |asked| verdict(&summary, asked)).to_owned(),
            ])
        })
        .collect();
    let columns = "what|of|against|at most|reached|half of rounds|";
    Table::new("The engine's guests against their baselines", 3, columns, rows)
        .noting("Ratios of each round, in which all took turns: their median, and the middle half.")
        .some()
}

/// Formats a ratio, which can be far below one.
fn digits(value: f64) -> String {
    match value.abs() {
        0.0 => three_digits(value),
        ..0.0001 => format!("{value:.1e}"),
        ..0.01 => format!("{value:.5}"),
        _ => three_digits(value),
    }
}

/// A count that a table shows: the figure of its measurement, its name, its heading.
pub type Count = (&'static str, &'static str, &'static str);

/// The renderer of a scenario whose results are tables of figures.
macro_rules! renderer {
    ($tables:expr, $meaning:expr) => {
        ::slat_lab::renderer::Renderer {
            reads: |m| $tables.iter().any(|table| table.has(m)),
            tables: |results| $tables.iter().filter_map(|table| table.table(results)).collect(),
            meaning: $meaning,
            ..::slat_lab::renderer::Renderer::NONE
        }
    };
}
pub(crate) use renderer;

/// A table of a scenario: a row for each variant, a column for each figure.
pub struct Figures {
    /// The scenario's name in results.
    pub of: &'static str,
    /// Title of the table.
    pub title: &'static str,
    /// Figures that are in `results.json` only.
    pub without: &'static [&'static str],
    /// Whether times differ so much by round that their range says more than a spread.
    pub wide: bool,
    /// Counts behind the figures.
    pub counts: &'static [Count],
    /// Published figures of guests on 1g blocks.
    pub published: Rows,
    /// Note on how to read the table.
    pub note: &'static str,
}

impl Figures {
    /// An empty value, to be filled in.
    pub const NONE: Self = Self {
        of: "",
        title: "",
        without: &[],
        wide: false,
        counts: &[],
        published: &[],
        note: "",
    };

    /// Returns whether a result belongs to the table. Guests under KVM have scenarios of the same
    /// names.
    pub fn has(&self, m: &Measurement) -> bool {
        m.scenario == self.of && m.target != KVM
    }

    /// Returns the table, if anything was measured.
    pub fn table(&self, results: &[Measurement]) -> Option<Table> {
        let rows = rows(results, self.of, &["figure"]);
        if rows.is_empty() {
            return None;
        }
        let labels = Labels::of(&rows, crate::params::PARAMS);
        let mut figures: Vec<&str> = Vec::new();
        for m in rows.iter().flat_map(|row| &row.measurements) {
            let figure = parameter(m, "figure");
            if !self.without.contains(&figure) && !figures.contains(&figure) {
                figures.push(figure);
            }
        }
        let mut columns = vec!["way".to_owned()];
        columns.extend(figures.iter().map(|figure| heading(&rows, figure)));
        columns.extend(self.counts.iter().map(|(_, _, heading)| (*heading).to_owned()));
        let before = labels.differing.len();
        let mut cells = Vec::new();
        for row in &rows {
            let mut ways: Vec<&str> = Vec::new();
            for m in &row.measurements {
                if !ways.contains(&m.variant.as_str()) {
                    ways.push(&m.variant);
                }
            }
            for way in ways {
                let mut line = labels.cells(row);
                line.push(way.to_owned());
                line.extend(figures.iter().map(|figure| self.shown(row, way, figure)));
                line.extend(self.counts.iter().map(|count| count_of(row, way, count)));
                cells.push(line);
            }
        }
        if rows.iter().any(|row| row.size("backing") == Some(Size(1 << 30))) {
            for (way, values) in self.published {
                let mut line = vec![NOTHING.to_owned(); before + columns.len()];
                line[before] = (*way).to_owned();
                for (figure, value) in *values {
                    if let Some(place) = figures.iter().position(|name| name == figure) {
                        line[before + 1 + place] = (*value).to_owned();
                    }
                }
                cells.push(line);
            }
        }
        labels.table(self.title, 1, columns, cells).noting(self.note).some()
    }

    fn shown(&self, row: &Row, way: &str, figure: &str) -> String {
        let found = find(row, way, figure).and_then(|m| Some((m, Summary::of(&m.samples)?)));
        let Some((measurement, summary)) = found else { return NOTHING.to_owned() };
        match (measurement.unit.name(), figure) {
            // These are medians of extremes; the table shows the worst of all.
            ("s", "longest") => seconds(summary.max),
            ("s", _) if self.wide => with_wide_spread(&summary),
            ("s", _) => with_spread(&summary),
            ("faults/s", _) => thousands(summary.median.round() as i64),
            ("%", "came back a walk") => format!(
                "{} ({}–{})",
                three_digits(summary.median),
                three_digits(summary.lower_quartile),
                three_digits(summary.upper_quartile)
            ),
            ("%" | "M/s" | "CPU s", _) => three_digits(summary.median),
            _ => format!(
                "{}–{}",
                three_digits(summary.lower_quartile),
                three_digits(summary.upper_quartile)
            ),
        }
    }
}

fn find<'a>(row: &Row<'a>, way: &str, figure: &str) -> Option<&'a Measurement> {
    let mut all = row.measurements.iter();
    all.find(|m| m.variant == way && parameter(m, "figure") == figure).copied()
}

/// Returns the heading of a figure, with its unit if that is not one of time.
fn heading(rows: &[Row], figure: &str) -> String {
    let mut all = rows.iter().flat_map(|row| &row.measurements);
    let unit = all.find(|m| parameter(m, "figure") == figure).map_or("s", |m| m.unit.name());
    if unit == "s" { figure.to_owned() } else { format!("{figure}, {unit}") }
}

/// Returns a count: the largest where samples differ.
fn count_of(row: &Row, way: &str, (figure, name, _): &Count) -> String {
    let Some(measurement) = find(row, way, figure) else { return NOTHING.to_owned() };
    let most = format!("{name}_max");
    let count = measurement.counts.get(*name).or_else(|| measurement.counts.get(&most));
    count.map_or_else(|| "0".to_owned(), |count| thousands(*count as i64))
}
