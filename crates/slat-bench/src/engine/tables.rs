//! Reports of the engine's operations: thresholds, and the times behind them.

use super::Engine;
use crate::contest::FORMATS;
use crate::peers::format_tables::table as beside_each_other;
use slat_lab::numbers::{seconds, three_digits, with_spread};
use slat_lab::record::Measurement;
use slat_lab::renderer::Renderer;
use slat_lab::report::tables::thresholds::{self, memory, parameter};
use slat_lab::scenario::Scenario;
use slat_lab::stats::Summary;
use slat_lab::table::{NOTHING, Table};

/// Name of the thresholds in results.
const ASKED: &str = "engine-asked";

/// How the report presents the results.
pub const RENDERER: Renderer = Renderer {
    reads: |m| [Engine::NAME, ASKED, FORMATS].contains(&&*m.scenario),
    verdict: thresholds::said,
    tables: |results| {
        let all = [asked(results), times(results), beside_each_other(results)];
        all.into_iter().flatten().collect()
    },
    ..Renderer::NONE
};

/// Returns a table with one row for each threshold.
fn asked(results: &[Measurement]) -> Option<Table> {
    thresholds::table(
        results,
        ASKED,
        "The engine's operations against their limits",
        "The limits are meant for 8 GiB and 64 GiB.",
    )
}

/// Returns a table with one row for each variant.
fn times(results: &[Measurement]) -> Option<Table> {
    let rows: Vec<Vec<String>> = results
        .iter()
        .filter(|m| m.scenario == Engine::NAME)
        .filter_map(|m| {
            let summary = Summary::of(&m.samples)?;
            let pages = m.params.get("memory")?.as_u64()? as f64 / 4096.0;
            let count =
                |name: &str| m.counts.get(name).map_or_else(|| NOTHING.to_owned(), u64::to_string);
            Some(vec![
                format!("{}, {}", parameter(m, "part"), parameter(m, "of")),
                parameter(m, "format").to_owned(),
                memory(m),
                m.variant.clone(),
                with_spread(&summary),
                seconds(summary.min),
                three_digits(summary.median / pages * 1e9),
                count("entries_read"),
                count("invalidations"),
            ])
        })
        .collect();
    let columns = "what|format|memory|variant|time|least|ns a page|entries read|TLBIs";
    Table::new("The times behind them", 4, columns, rows)
        .noting(
            "“ns a page” is by the pages of the memory, whatever the variant touched. TLBIs: \
             invalidations. Beside: a sample is the 99th percentile of 64 faults.",
        )
        .some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use slat_lab::unit::Unit;

    fn measurement(scenario: &str, samples: &[f64]) -> Measurement {
        let params = json!({
            "part": "age", "of": "young", "format": "ept", "memory": 8u64 << 30,
            "asked": 1.25, "against": "cas",
        });
        let serde_json::Value::Object(params) = params else { unreachable!() };
        Measurement::new(
            scenario,
            "engine",
            "age, all young",
            params,
            Unit::RATIO,
            samples.to_vec(),
        )
    }

    #[test]
    fn thresholds_and_times_stand_apart() {
        let all = [measurement("engine", &[0.1]), measurement("engine-asked", &[1.2])];
        assert_eq!(asked(&all).unwrap().rows.len(), 1);
        let times = times(&all).unwrap();
        assert_eq!((times.rows.len(), &*times.rows[0][6]), (1, "47.7"));
        assert!(asked(&all[..1]).is_none());
    }
}
