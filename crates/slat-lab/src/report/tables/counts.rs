//! Counts, one per line, for runs whose times are meaningless.

use super::{Labels, Row, rows};
use crate::numbers::{thousands, three_digits};
use crate::param::Params;
use crate::record::Measurement;
use crate::stats::Summary;
use crate::table::Table;
use crate::unit::Unit;
use serde_json::Value;

/// Returns a table for each scenario with counts. Counts of single vCPUs are in `results.json`
/// only.
pub fn tables(results: &[Measurement], params: Params) -> Vec<Table> {
    let mut scenarios: Vec<&str> = Vec::new();
    let counted = |m: &&Measurement| !m.counts.is_empty() || m.unit == Unit::INSTRUCTIONS;
    for m in results.iter().filter(counted) {
        if !scenarios.contains(&&*m.scenario) {
            scenarios.push(&m.scenario);
        }
    }
    scenarios.into_iter().map(|scenario| table(results, scenario, params)).collect()
}

fn table(results: &[Measurement], scenario: &str, params: Params) -> Table {
    let whole = |row: &Row| !row.params.contains_key("vcpu");
    let rows: Vec<Row> = rows(results, scenario, &[]).into_iter().filter(whole).collect();
    let labels = Labels::of(&rows, params);
    let mut cells = Vec::new();
    for row in &rows {
        for m in &row.measurements {
            cells.extend(instructions(m).into_iter().map(|[name, value]| {
                let mut line = labels.cells(row);
                line.extend([m.variant.clone(), name, value]);
                line
            }));
            for (name, count) in &m.counts {
                let mut line = labels.cells(row);
                line.extend([m.variant.clone(), name.replace('_', " ")]);
                line.push(thousands(i64::try_from(*count).unwrap_or(i64::MAX)));
                cells.push(line);
            }
        }
    }
    labels.table(format!("Counts of {scenario}"), 2, ["variant", "count", "value"], cells)
}

/// Returns counted instructions: the median with its spread, and by page if the number of pages is
/// known.
fn instructions(m: &Measurement) -> Vec<[String; 2]> {
    let summary = (m.unit == Unit::INSTRUCTIONS).then(|| Summary::of(&m.samples)).flatten();
    let Some(summary) = summary else { return Vec::new() };
    let mut lines = vec![["instructions".to_owned(), m.unit.with_spread(&summary)]];
    let pages = m.params.get("memory").and_then(Value::as_u64).map_or(0, |bytes| bytes >> 12);
    if pages > 0 {
        let each = three_digits(summary.median / pages as f64);
        lines.push(["instructions a page of 4k".to_owned(), each]);
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake;

    #[test]
    fn instructions_stand_before_the_counts_with_their_spread() {
        let mut results = fake::report().results;
        results.truncate(1);
        results[0].unit = Unit::INSTRUCTIONS;
        results[0].samples = vec![4096.0, 4096.0, 4096.0];
        results[0].params.insert("memory".to_owned(), (1 << 20).into());
        let lines = &tables(&results, Params(&[]))[0].rows;
        assert!(lines[0].ends_with(&["instructions".to_owned(), "4,096".to_owned()]), "{lines:?}");
        assert_eq!(lines[1].last().unwrap(), "16.0");
    }

    #[test]
    fn every_count_of_a_whole_phase_has_a_line() {
        let results = fake::report().results;
        let tables = tables(&results, Params(&[]));
        let lines: usize = tables.iter().map(|table| table.rows.len()).sum();
        let whole = results.iter().filter(|m| !m.is_vcpu());
        let counts: usize = whole.map(|m| m.counts.len()).sum();
        assert!(counts > 0);
        assert_eq!(lines, counts);
        for table in &tables {
            assert!(table.rows.iter().all(|row| row.len() == table.columns.len()));
        }
    }
}
