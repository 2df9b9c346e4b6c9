//! The engine beside others: one table of ratios, one of counts, one of what histories showed.

use super::engine::parameter;
use super::{Labels, NOTHING, Row, Table, rows};
use crate::record::Measurement;
use crate::report::numbers::{thousands, three_digits};
use crate::scenario::peers::{ALLOWED, SLAT};
use crate::stats::Summary;

/// What a crate does not have.
const NONE: &str = "none";

/// One column: everybody of one name, or whatever limit a row has.
#[derive(PartialEq, Eq)]
enum Column<'m> {
    Who(&'m str, &'m str),
    Limit,
}

impl<'m> Column<'m> {
    fn of(m: &'m Measurement) -> Self {
        if m.target == "machine" { Self::Limit } else { Self::Who(&m.variant, &m.target) }
    }
}

/// Everybody but the engine, in the order of a reader's interest: Linux, crates, the machine.
fn columns(results: &[Measurement]) -> Vec<Column<'_>> {
    let mut found = Vec::new();
    for target in ["engine", "linux-source", "crate", "machine"] {
        for m in results.iter().filter(|m| m.scenario == "peers" && m.target == target) {
            if m.variant != SLAT && !found.contains(&Column::of(m)) {
                found.push(Column::of(m));
            }
        }
    }
    found
}

/// How many times as long as the engine somebody took, in each round.
pub fn ratio(row: &Row, m: &Measurement) -> Option<Summary> {
    let base = row.variant(SLAT)?;
    let ratios: Vec<f64> = m.samples.iter().zip(&base.samples).map(|(of, by)| of / by).collect();
    Summary::of(&ratios)
}

fn cell(summary: &Summary) -> String {
    if summary.count < 2 {
        return three_digits(summary.median);
    }
    format!("{} ±{:.0}%", three_digits(summary.median), summary.relative_spread() * 100.0)
}

/// What `note`s there are differ within a row.
pub fn gathered(results: &[Measurement]) -> Vec<Row<'_>> {
    rows(results, "peers", &["note"])
}

/// Rows the operations; the engine's time, and the others' by it.
pub fn ratios(results: &[Measurement]) -> Option<Table> {
    let all = gathered(results);
    if all.is_empty() {
        return None;
    }
    let who = columns(results);
    let mut names = ["operation", "memory", "pages", "slat"].map(str::to_owned).to_vec();
    names.extend(who.iter().map(|column| {
        match column {
            // Where a name is broken is not left to chance.
            Column::Who(name, _) => name
                .replace('+', "\n+")
                .replace(", ", ",\n")
                .replace(",skip", "\n,skip")
                .replace("g_", "g\n_")
                .replace("ble_", "ble\n_"),
            Column::Limit => "the\nmachine".to_owned(),
        }
    }));
    let mut notes: Vec<String> = Vec::new();
    let lines: Vec<Vec<String>> = all
        .iter()
        .filter_map(|row| {
            let base = Summary::of(&row.variant(SLAT)?.samples)?;
            let pieces = row.params.get("pieces")?.as_u64()? as f64;
            let memory = row.params.get("memory")?.as_u64()?;
            let backing = row.param("backing")?;
            let mut line = vec![
                row.param("operation")?.to_owned(),
                crate::size::Size(memory).to_string(),
                backing.to_owned(),
                format!(
                    "{} ns ±{:.0}%",
                    three_digits(base.median / pieces * 1e9),
                    base.relative_spread() * 100.0
                ),
            ];
            let crates = row.measurements.iter().any(|m| m.target == "crate");
            for column in &who {
                let found = row.measurements.iter().find(|m| Column::of(m) == *column);
                line.push(match (found, column) {
                    (Some(m), Column::Limit) => {
                        let ratio = ratio(row, m).map_or_else(String::new, |ratio| cell(&ratio));
                        format!("{ratio} {}", m.variant)
                    }
                    (Some(m), _) => ratio(row, m).map_or_else(String::new, |ratio| cell(&ratio)),
                    (None, Column::Who(_, "crate")) if !crates => NONE.to_owned(),
                    (None, Column::Who(_, "crate")) => NOTHING.to_owned(),
                    (None, _) => NOTHING.to_owned(),
                });
            }
            Some(line)
        })
        .collect();
    notes.push(
        "slat: nanoseconds a page (a look-up), ± half of where half of the rounds lie. The others: how many times \
         as long they took, the median of the rounds’ ratios; above 1 the engine is faster. none: the crate \
         has no such operation; –: it has other levels, or was not asked. The machine: a plain loop over the same \
         slots, or that stores the same bytes."
            .to_owned(),
    );
    if results.iter().any(|m| m.scenario == "peers" && m.target == "linux-source") {
        notes.push(
            "Linux’s own code, compiled for user space: the software’s work alone. Invalidations, barriers for a \
             CPU’s walker, cache maintenance and locks are counted, not executed, on either side; no other CPU is there. \
             shared: its live entries change by compare-and-swap."
                .to_owned(),
        );
    }
    Some(Table {
        title: "The engine beside others".to_owned(),
        common: common(&all),
        columns: names,
        labels: 3,
        rows: lines,
        notes,
    })
}

/// What is said once: only rows beside Linux have all parameters.
fn common(all: &[Row]) -> String {
    let arm: Vec<Row> = all
        .iter()
        .filter(|row| row.params.contains_key("fwb"))
        .map(|row| Row { params: row.params.clone(), measurements: Vec::new() })
        .collect();
    let mut labels = Vec::new();
    for row in arm {
        let mut params = row.params;
        params
            .retain(|name, _| ["granule", "chunk_size", "fwb", "caches"].contains(&name.as_str()));
        labels.push(Row { params, measurements: Vec::new() });
    }
    Labels::of(&labels).common
}

/// What Linux counted, and what the engine did.
pub fn counts(results: &[Measurement]) -> Option<Table> {
    let all = gathered(results);
    let mut lines = Vec::new();
    let mut reasons: Vec<&str> = Vec::new();
    for row in &all {
        for m in row.measurements.iter().filter(|m| m.target == "linux-source") {
            let of = |m: &Measurement, name: &str| {
                m.counts
                    .get(name)
                    .map_or_else(|| NOTHING.to_owned(), |count| thousands(*count as i64))
            };
            let engine = |name| row.variant(SLAT).map_or_else(String::new, |m| of(m, name));
            let differing: u64 =
                ALLOWED.iter().filter_map(|allowed| m.counts.get(allowed.name)).sum();
            for allowed in &ALLOWED {
                if m.counts.contains_key(allowed.name) && !reasons.contains(&allowed.reason) {
                    reasons.push(allowed.reason);
                }
            }
            lines.push(vec![
                parameter(m, "operation").to_owned(),
                row.params
                    .get("memory")
                    .and_then(|memory| memory.as_u64())
                    .map_or_else(String::new, |bytes| crate::size::Size(bytes).to_string()),
                parameter(m, "backing").to_owned(),
                m.variant.clone(),
                of(m, "visits"),
                of(m, "callbacks"),
                of(m, "tlbis"),
                of(m, "barriers"),
                of(m, "pages"),
                engine("slots_read"),
                engine("invalidations"),
                of(m, "leaves_compared"),
                if differing == 0 { "0".to_owned() } else { thousands(differing as i64) },
            ]);
        }
    }
    let heads = [
        "operation",
        "memory",
        "pages",
        "whose",
        "visits",
        "callbacks",
        "TLBIs",
        "barriers",
        "tables",
        "slat: slots",
        "TLBIs",
        "leaves",
        "differ",
    ];
    let mut notes = vec![
        "visits: entries that Linux’s walk looked at; callbacks: calls of its visitor. TLBIs: requests of invalidation, \
         whose own barriers are not counted. tables: pages allocated. Then the slots that the engine read, and its \
         invalidations. leaves: compared with the engine’s, descriptor by descriptor; differ: of those, the ones that \
         differ as they may."
            .to_owned(),
    ];
    notes.extend(reasons.iter().map(|reason| format!("They may: {reason}.")));
    (!lines.is_empty()).then(|| Table {
        title: "What Linux’s walks did".to_owned(),
        common: String::new(),
        columns: heads.map(str::to_owned).into(),
        labels: 4,
        rows: lines,
        notes,
    })
}

/// Histories through both.
pub fn histories(results: &[Measurement]) -> Option<Table> {
    let lines: Vec<Vec<String>> = results
        .iter()
        .filter(|m| m.scenario == "peers-check")
        .map(|m| {
            let count = |name: &str| thousands(m.counts.get(name).copied().unwrap_or(0) as i64);
            vec![
                m.variant.clone(),
                parameter(m, "linux").to_owned(),
                parameter(m, "walks").to_owned(),
                count("histories"),
                count("operations"),
                count("leaves_compared"),
            ]
        })
        .collect();
    (!lines.is_empty()).then(|| Table {
        title: "Random histories through Linux’s tables and the engine’s: no difference".to_owned(),
        common: String::new(),
        columns: ["tree", "version", "walks", "histories", "operations", "leaves compared"]
            .map(str::to_owned)
            .into(),
        labels: 3,
        rows: lines,
        notes: vec![
            "After each operation all leaves of both were compared. Linux may think a page young that the engine does \
             not, and may have protected the pages between two that were cleared."
                .to_owned(),
        ],
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn measurement(variant: &str, target: &str, operation: &str, samples: &[f64]) -> Measurement {
        let params = json!({
            "operation": operation, "memory": 8u64 << 30, "backing": "2m", "granule": 4096,
            "pieces": 1_000_000, "chunk_size": 1 << 30, "fwb": true, "caches": "warm",
        });
        let serde_json::Value::Object(params) = params else { unreachable!() };
        Measurement {
            scenario: "peers".to_owned(),
            target: target.to_owned(),
            variant: variant.to_owned(),
            params,
            unit: "s".to_owned(),
            samples: samples.to_vec(),
            counts: [("visits".to_owned(), 524_800), ("leaves_made_young".to_owned(), 3)].into(),
        }
    }

    #[test]
    fn a_ratio_is_of_the_same_round_and_limits_share_a_column() {
        let all = [
            measurement(SLAT, "engine", "split", &[0.001, 0.002, 0.004]),
            measurement("linux-6.12", "linux-source", "split", &[0.010, 0.020, 0.040]),
            measurement("fill-plain", "machine", "split", &[0.001, 0.001, 0.001]),
            measurement(SLAT, "engine", "age", &[0.001]),
            measurement("cas", "machine", "age", &[0.002]),
        ];
        let table = ratios(&all).unwrap();
        assert_eq!(table.columns[3..], ["slat", "linux-6.12", "the machine"]);
        assert_eq!(table.rows[0][3..5], ["2.00 ns ±38%", "10.0 ±0%"]);
        assert_eq!(table.rows[1][4..], ["–", "2.00 cas"]);
        assert!(table.common.contains("caches warm"), "{}", table.common);
    }

    #[test]
    fn counts_stand_with_the_reasons_of_differences() {
        let all = [
            measurement(SLAT, "engine", "split", &[0.001]),
            measurement("linux-6.12", "linux-source", "split", &[0.010]),
        ];
        let table = counts(&all).unwrap();
        assert_eq!(table.rows.len(), 1);
        assert_eq!((&*table.rows[0][4], table.rows[0].last().unwrap().as_str()), ("524,800", "3"));
        assert!(table.notes[1].contains("makes all pages of a block young"));
        assert!(counts(&all[..1]).is_none() && histories(&all).is_none());
    }
}
