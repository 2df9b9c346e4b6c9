//! Claims that were published, beside what this machine gave.

use super::engine::parameter;
use super::{NOTHING, Table};
use crate::record::Measurement;
use crate::report::numbers::{seconds, thousands, three_digits};
use crate::stats::Summary;

/// One row for each claim.
pub fn claims(results: &[Measurement]) -> Option<Table> {
    let rows: Vec<Vec<String>> = results
        .iter()
        .filter(|m| m.scenario == "replay")
        .filter_map(|m| {
            let summary = Summary::of(&m.samples)?;
            let of = |name| parameter(m, name).to_owned();
            let (low, high) = (summary.lower_quartile, summary.upper_quartile);
            Some(vec![
                of("claim"),
                m.variant.clone(),
                of("published"),
                figure(&m.unit, summary.median),
                if low == high {
                    NOTHING.to_owned()
                } else {
                    format!("{} to {}", figure(&m.unit, low), figure(&m.unit, high))
                },
                of("command"),
            ])
        })
        .collect();
    let mut whys: Vec<String> = Vec::new();
    for m in results.iter().filter(|m| m.scenario == "replay") {
        let why = format!("{}: {}", parameter(m, "claim"), parameter(m, "why"));
        if !whys.contains(&why) {
            whys.push(why);
        }
    }
    (!rows.is_empty()).then(|| Table {
        title: "What was published, and what this machine gives".to_owned(),
        common: String::new(),
        columns: ["claim", "what", "published", "here", "half of rounds", "command"]
            .map(str::to_owned)
            .into(),
        labels: 3,
        rows,
        notes: whys,
    })
}

fn figure(unit: &str, value: f64) -> String {
    match unit {
        "%" => format!("{value:+.1} %").replace('-', "−"),
        "x" => {
            format!("{} ×", if value < 0.01 { format!("{value:.5}") } else { three_digits(value) })
        }
        "s" => seconds(value),
        "bytes" => format!("{} MiB", thousands((value / f64::from(1 << 20)) as i64)),
        _ => thousands(value as i64),
    }
}
