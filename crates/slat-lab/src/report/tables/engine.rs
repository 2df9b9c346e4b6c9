//! The engine's operations: what was asked of each, what it reached, and the times behind it.

use crate::numbers::{seconds, three_digits, with_spread};
use crate::record::Measurement;
use crate::size::Size;
use crate::stats::Summary;
use crate::table::{NOTHING, Table};

pub(super) fn parameter<'a>(measurement: &'a Measurement, name: &str) -> &'a str {
    measurement.params.get(name).and_then(|value| value.as_str()).unwrap_or(NOTHING)
}

fn memory(measurement: &Measurement) -> String {
    let memory = measurement.params.get("memory").and_then(|value| value.as_u64());
    memory.map_or_else(|| NOTHING.to_owned(), |bytes| Size(bytes).to_string())
}

/// The words of a verdict: the median decides, the spread says how much to believe it.
pub(in crate::report) fn verdict(summary: &Summary, asked: f64) -> &'static str {
    let (low, high) = (summary.lower_quartile, summary.upper_quartile);
    match summary.median <= asked {
        true if high <= asked => "met",
        true => "met, barely",
        false if low > asked => "missed",
        false => "missed, barely",
    }
}

/// One row for each threshold of the engine's operations.
pub fn asked(results: &[Measurement]) -> Option<Table> {
    thresholds(
        results,
        "engine-asked",
        "The engine's operations against their limits",
        "The limits are meant for 8 GiB and 64 GiB.",
    )
}

/// One row for each threshold beside others.
pub fn asked_of_peers(results: &[Measurement]) -> Option<Table> {
    thresholds(
        results,
        "peers-asked",
        "The engine against each of the others",
        "Times by theirs, so that less is faster. Thresholds are meant for 8 GiB and 64 GiB.",
    )
}

fn thresholds(results: &[Measurement], scenario: &str, title: &str, meant: &str) -> Option<Table> {
    let rows: Vec<Vec<String>> = results
        .iter()
        .filter(|m| m.scenario == scenario)
        .filter_map(|m| {
            let summary = Summary::of(&m.samples)?;
            let asked = m.params.get("asked").and_then(|asked| asked.as_f64());
            let against = match parameter(m, "against") {
                "" => NOTHING,
                against => against,
            };
            Some(vec![
                m.variant.clone(),
                memory(m),
                against.to_owned(),
                asked.map_or_else(|| NOTHING.to_owned(), |asked| m.unit.shown(asked)),
                m.unit.shown(summary.median),
                format!(
                    "{}–{}",
                    three_digits(summary.lower_quartile),
                    three_digits(summary.upper_quartile)
                ),
                asked.map_or("", |asked| verdict(&summary, asked)).to_owned(),
            ])
        })
        .collect();
    (!rows.is_empty()).then(|| Table {
        title: title.to_owned(),
        common: String::new(),
        columns: ["operation", "memory", "against", "at most", "reached", "half of rounds", ""]
            .map(str::to_owned)
            .into(),
        labels: 3,
        rows,
        notes: vec![
            format!(
                "“reached” is the median of the ratios of each round, in which the two took turns; half \
                 of the rounds lie in “half of rounds”. “barely”: one of its ends lies on the other \
                 side. {meant}"
            ),
        ],
    })
}

/// One row for each variant.
pub fn times(results: &[Measurement]) -> Option<Table> {
    let rows: Vec<Vec<String>> = results
        .iter()
        .filter(|m| m.scenario == "engine")
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
                count("slots_read"),
                count("invalidations"),
            ])
        })
        .collect();
    (!rows.is_empty()).then(|| Table {
        title: "The times behind them".to_owned(),
        common: String::new(),
        columns: [
            "what",
            "format",
            "memory",
            "variant",
            "time",
            "least",
            "ns a page",
            "slots read",
            "TLBIs",
        ]
        .map(str::to_owned)
        .into(),
        labels: 4,
        rows,
        notes: vec![
            "“ns a page” is by the pages of the memory, whatever the variant touched. TLBIs: \
             invalidations. Beside: a sample is the 99th percentile of 64 faults. worst-fault: the \
             slowest one, each fault taken at its least of the rounds so far; the last sample, which is \
             the least, is the one to read."
                .to_owned(),
        ],
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unit::Unit;
    use serde_json::json;

    fn measurement(scenario: &str, samples: &[f64]) -> Measurement {
        let params = json!({
            "part": "age", "of": "young", "format": "ept", "memory": 8u64 << 30, "asked": 1.25, "against": "cas",
        });
        let serde_json::Value::Object(params) = params else { unreachable!() };
        Measurement {
            scenario: scenario.to_owned(),
            target: "engine".to_owned(),
            variant: "age, all young".to_owned(),
            params,
            unit: Unit::RATIO,
            samples: samples.to_vec(),
            counts: Default::default(),
        }
    }

    #[test]
    fn the_median_decides_and_the_quartiles_say_how_barely() {
        for (samples, word) in [
            ([1.0, 1.1, 1.2], "met"),
            ([1.0, 1.2, 1.9], "met, barely"),
            ([1.0, 1.3, 1.4], "missed, barely"),
            ([1.3, 1.3, 1.4], "missed"),
        ] {
            let table = asked(&[measurement("engine-asked", &samples)]).unwrap();
            assert_eq!(table.rows[0].last().unwrap(), word, "{samples:?}");
        }
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
