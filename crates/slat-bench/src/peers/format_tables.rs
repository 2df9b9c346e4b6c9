//! Report of the formats: the time of a page on each, against the first format's and against the
//! machine's limit.

use crate::contest::{ENGINE, FORMATS};
use slat_lab::numbers::{three_digits, with_spread};
use slat_lab::record::Measurement;
use slat_lab::report::tables::thresholds::parameter;
use slat_lab::size::Size;
use slat_lab::stats::Summary;
use slat_lab::table::{NOTHING, Table};

/// Returns the times of a page, by round.
fn of_a_page(measured: &Measurement) -> Vec<f64> {
    let pieces = measured.params.get("pieces").and_then(|pieces| pieces.as_u64()).unwrap_or(1);
    measured.samples.iter().map(|time| time / pieces.max(1) as f64).collect()
}

/// Returns the median of the ratios of the rounds, and the range in which half of them lie.
fn ratio(of: &Measurement, by: &Measurement) -> String {
    let ratios: Vec<f64> =
        of_a_page(of).iter().zip(of_a_page(by)).map(|(of, by)| of / by).collect();
    let Some(summary) = Summary::of(&ratios) else { return NOTHING.to_owned() };
    let [low, middle, high] = [summary.lower_quartile, summary.median, summary.upper_quartile];
    format!("{} × ({}–{})", three_digits(middle), three_digits(low), three_digits(high))
}

/// Returns a table with one row for each format of each operation.
pub fn table(results: &[Measurement]) -> Option<Table> {
    let all = || results.iter().filter(|m| m.scenario == FORMATS);
    let same = |a: &Measurement, b: &Measurement| {
        ["operation", "memory", "leaves"]
            .iter()
            .all(|name| a.params.get(*name) == b.params.get(*name))
    };
    let rows: Vec<Vec<String>> = all()
        .filter(|m| m.target == ENGINE)
        .filter_map(|m| {
            let summary = Summary::of(&of_a_page(m))?;
            let first = all().find(|other| other.target == ENGINE && same(m, other))?;
            let format = m.params.get("format");
            let limit = all().find(|other| {
                other.target != ENGINE && same(m, other) && other.params.get("format") == format
            });
            let by_limit =
                limit.map_or(NOTHING.to_owned(), |by| format!("{}: {}", by.variant, ratio(m, by)));
            let by_first = match std::ptr::eq(first, m) {
                true => NOTHING.to_owned(),
                false => ratio(m, first),
            };
            let count =
                |name: &str| m.counts.get(name).map_or_else(|| NOTHING.to_owned(), u64::to_string);
            Some(vec![
                parameter(m, "operation").to_owned(),
                Size(m.params.get("memory")?.as_u64()?).to_string(),
                parameter(m, "format").to_owned(),
                parameter(m, "backing").to_owned(),
                with_spread(&summary),
                by_first,
                by_limit,
                count("entries_read"),
                count("invalidations"),
            ])
        })
        .collect();
    let columns = "operation|memory|format|leaves|time of a page|by the first's|by the machine's|\
                   entries read|TLBIs";
    Table::new("Formats beside each other", 4, columns, rows)
        .noting(
            "A page is the format's own: of 16k and 64k there are fewer. Ratios are medians of \
             those of each round, in which all took turns, and where half of them lie. “the \
             machine's”: a plain loop over the same entries, or the same bytes filled.",
        )
        .some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use slat_lab::unit::Unit;

    #[test]
    fn a_format_is_held_against_the_first_by_the_time_of_a_page() {
        let measured = |format: &str, target: &str, pieces: u64, samples: &[f64]| {
            let params = json!({
                "operation": "write-protect", "memory": 1u64 << 30, "leaves": "pages",
                "format": format, "backing": "4k", "pieces": pieces,
            });
            let serde_json::Value::Object(params) = params else { unreachable!() };
            Measurement::new(
                FORMATS,
                target,
                if target == ENGINE { "slat" } else { "cas" },
                params,
                Unit::SECONDS,
                samples.to_vec(),
            )
        };
        let results = [
            measured("arm64-4k", "engine", 4, &[4e-9, 8e-9]),
            measured("arm64-4k", "machine", 4, &[2e-9, 4e-9]),
            measured("arm64-16k", "engine", 1, &[2e-9, 4e-9]),
        ];
        let table = table(&results).unwrap();
        assert_eq!(table.rows.len(), 2);
        assert_eq!((&*table.rows[0][5], &*table.rows[0][6]), ("–", "cas: 2.00 × (2.00–2.00)"));
        assert_eq!((&*table.rows[1][5], &*table.rows[1][6]), ("2.00 × (2.00–2.00)", "–"));
    }
}
