//! The tables of a report, independent of how they are printed.
//!
//! All of them follow one rule: a parameter that all rows have in common stands once, above the
//! table; a parameter that differs is a column.

pub mod counts;
pub mod thresholds;

use crate::param::Params;
use crate::record::Measurement;
use crate::renderer::Renderers;
use crate::size::Size;
use crate::stats::Summary;
use crate::table::{NOTHING, Table};
use serde_json::{Map, Value};

/// Returns all tables of the results: those of each renderer, in the renderers' order, and plain
/// ones for results that no renderer reads.
pub fn all(results: &[Measurement], renderers: &Renderers) -> Vec<Table> {
    let read = renderers.each.iter().flat_map(|renderer| (renderer.tables)(&renderer.own(results)));
    read.chain(unread(results, renderers)).collect()
}

/// Returns plain tables of the results that no renderer reads.
pub fn unread(results: &[Measurement], renderers: &Renderers) -> Vec<Table> {
    let unread = |m: &&Measurement| !renderers.each.iter().any(|renderer| (renderer.reads)(m));
    plain(&results.iter().filter(unread).cloned().collect::<Vec<_>>(), renderers.params)
}

/// Returns a table for each scenario and target, with a row for each setting and a column for each
/// variant.
pub fn plain(results: &[Measurement], params: Params) -> Vec<Table> {
    let mut kinds: Vec<(&str, &str)> = Vec::new();
    for m in results {
        if !kinds.contains(&(&m.scenario, &m.target)) {
            kinds.push((&m.scenario, &m.target));
        }
    }
    kinds.into_iter().map(|(scenario, target)| of_kind(results, scenario, target, params)).collect()
}

fn of_kind(results: &[Measurement], scenario: &str, target: &str, params: Params) -> Table {
    let own: Vec<Measurement> =
        results.iter().filter(|m| m.scenario == scenario && m.target == target).cloned().collect();
    let rows = rows(&own, scenario, &[]);
    let labels = Labels::of(&rows, params);
    let mut variants: Vec<&str> = Vec::new();
    for m in &own {
        if !variants.contains(&&*m.variant) {
            variants.push(&m.variant);
        }
    }
    let row = |row: &Row| {
        let mut cells = labels.cells(row);
        cells.extend(variants.iter().map(|variant| value(row.variant(variant))));
        cells
    };
    let title = format!("{scenario} ({target})");
    labels.table(title, 0, variants.iter().copied(), rows.iter().map(row)).noting(
        "Medians, ± half the interquartile range, or the least and the most where that is wide.",
    )
}

fn value(m: Option<&Measurement>) -> String {
    let Some((m, summary)) = m.and_then(|m| Some((m, Summary::of(&m.samples)?))) else {
        return NOTHING.to_owned();
    };
    m.unit.with_spread(&summary)
}

/// Measurements that differ only in their variant (or in the parameters to ignore): one row.
pub struct Row<'a> {
    /// The parameters they share.
    pub params: Map<String, Value>,
    /// The measurements, in the order of the run.
    pub measurements: Vec<&'a Measurement>,
}

impl<'a> Row<'a> {
    /// Returns the measurement of one variant.
    pub fn variant(&self, variant: &str) -> Option<&'a Measurement> {
        self.measurements.iter().find(|m| m.variant == variant).copied()
    }

    /// Returns the measurement of one variant for all vCPUs together.
    pub fn whole(&self, variant: impl PartialEq<str>) -> Option<&'a Measurement> {
        let whole = |m: &&&Measurement| variant == *m.variant && !m.is_vcpu();
        self.measurements.iter().find(whole).copied()
    }

    /// Returns a parameter that is text, if the row has it.
    pub fn param(&self, name: &str) -> Option<&str> {
        self.params.get(name)?.as_str()
    }

    /// Returns a parameter that is a size in words, such as `2m`.
    pub fn size(&self, name: &str) -> Option<Size> {
        self.param(name)?.parse().ok()
    }
}

/// Groups one scenario's measurements into rows, in the order of their first appearance.
pub fn rows<'a>(results: &'a [Measurement], scenario: &str, ignoring: &[&str]) -> Vec<Row<'a>> {
    let mut rows: Vec<Row> = Vec::new();
    for measurement in results.iter().filter(|m| m.scenario == scenario) {
        let mut params = measurement.params.clone();
        params.retain(|name, _| !ignoring.contains(&name.as_str()));
        match rows.iter_mut().find(|row| row.params == params) {
            Some(row) => row.measurements.push(measurement),
            None => rows.push(Row { params, measurements: vec![measurement] }),
        }
    }
    rows
}

/// The parameters of some rows: those that are equal in all rows, and those that differ.
pub struct Labels {
    /// The equal ones, as the text above the table.
    pub common: String,
    /// Names of the parameters that differ.
    pub differing: Vec<String>,
    params: Params,
}

impl Labels {
    /// Divides the parameters of `rows`.
    pub fn of(rows: &[Row], params: Params) -> Self {
        let mut names: Vec<&String> = rows.iter().flat_map(|row| row.params.keys()).collect();
        names.sort_by_key(|name| (params.rank(name), name.as_str()));
        names.dedup();
        let first = |name: &str| rows.first().and_then(|row| row.params.get(name));
        let (common, differing): (Vec<_>, Vec<_>) = names
            .into_iter()
            .partition(|name| rows.iter().all(|row| row.params.get(*name) == first(name)));
        let common: Vec<_> = common
            .into_iter()
            .map(|name| format!("{} {}", params.heading(name), params.shown(name, first(name))))
            .collect();
        Self {
            common: common.join(", "),
            differing: differing.into_iter().cloned().collect(),
            params,
        }
    }

    /// Returns the headings of the label columns.
    pub fn headings(&self) -> impl Iterator<Item = String> + '_ {
        self.differing.iter().map(|name| self.params.heading(name))
    }

    /// Returns a table whose rows begin with [`Self::cells`]. Then come `columns`, of which the
    /// first `labels` name a row, too.
    pub fn table(
        &self,
        title: impl Into<String>,
        labels: usize,
        columns: impl IntoIterator<Item: Into<String>>,
        rows: impl IntoIterator<Item = Vec<String>>,
    ) -> Table {
        let columns = self.headings().chain(columns.into_iter().map(Into::into)).collect();
        let table = Table::new(title, labels + self.differing.len(), "", rows);
        Table { common: self.common.clone(), columns, ..table }
    }

    /// Returns the label cells of one row.
    pub fn cells(&self, row: &Row) -> Vec<String> {
        self.differing.iter().map(|name| self.params.shown(name, row.params.get(name))).collect()
    }
}
