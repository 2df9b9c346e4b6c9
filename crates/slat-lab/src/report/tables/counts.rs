//! What was counted, one count a line: for runs whose times say nothing.

use super::{Labels, Row, rows};
use crate::numbers::thousands;
use crate::record::Measurement;
use crate::table::Table;

/// A table for each scenario that counted. What single vCPUs counted is in `results.json` only.
pub fn tables(results: &[Measurement]) -> Vec<Table> {
    let mut scenarios: Vec<&str> = Vec::new();
    for m in results.iter().filter(|m| !m.counts.is_empty()) {
        if !scenarios.contains(&&*m.scenario) {
            scenarios.push(&m.scenario);
        }
    }
    scenarios.into_iter().map(|scenario| table(results, scenario)).collect()
}

fn table(results: &[Measurement], scenario: &str) -> Table {
    let whole = |row: &Row| !row.params.contains_key("vcpu");
    let rows: Vec<Row> = rows(results, scenario, &[]).into_iter().filter(whole).collect();
    let labels = Labels::of(&rows);
    let mut columns: Vec<String> = labels.headings().collect();
    columns.extend(["variant", "count"].map(str::to_owned));
    let label_count = columns.len();
    columns.push("value".to_owned());
    let mut cells = Vec::new();
    for row in &rows {
        for m in &row.measurements {
            for (name, count) in &m.counts {
                let mut line = labels.cells(row);
                line.extend([m.variant.clone(), name.replace('_', " ")]);
                line.push(thousands(i64::try_from(*count).unwrap_or(i64::MAX)));
                cells.push(line);
            }
        }
    }
    Table {
        title: format!("Counts of {scenario}"),
        common: labels.common,
        columns,
        labels: label_count,
        rows: cells,
        notes: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake;

    #[test]
    fn every_count_of_a_whole_phase_has_a_line() {
        let results = fake::report().results;
        let tables = tables(&results);
        let lines: usize = tables.iter().map(|table| table.rows.len()).sum();
        let whole = results.iter().filter(|m| !m.params.contains_key("vcpu"));
        let counts: usize = whole.map(|m| m.counts.len()).sum();
        assert!(counts > 0);
        assert_eq!(lines, counts);
        for table in &tables {
            assert!(table.rows.iter().all(|row| row.len() == table.columns.len()));
        }
    }
}
