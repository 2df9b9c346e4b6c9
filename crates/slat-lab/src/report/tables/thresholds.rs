//! Thresholds of operations, and the results for them.

use crate::numbers::three_digits;
use crate::record::{Kind, Measurement};
use crate::size::Size;
use crate::stats::Summary;
use crate::table::{NOTHING, Table};
use crate::verdict::Verdict;

/// Returns a parameter as text; [`NOTHING`] if there is none.
pub fn parameter<'a>(measurement: &'a Measurement, name: &str) -> &'a str {
    measurement.params.get(name).and_then(|value| value.as_str()).unwrap_or(NOTHING)
}

/// Returns the size of the memory that was measured.
pub fn memory(measurement: &Measurement) -> String {
    let memory = measurement.params.get("memory").and_then(|value| value.as_u64());
    memory.map_or_else(|| NOTHING.to_owned(), |bytes| Size(bytes).to_string())
}

/// Returns the words of a verdict: the median decides, and the quartiles say whether barely.
pub fn verdict(summary: &Summary, asked: f64) -> &'static str {
    let (low, high) = (summary.lower_quartile, summary.upper_quartile);
    match summary.median <= asked {
        true if high <= asked => "met",
        true => "met, barely",
        false if low > asked => "missed",
        false => "missed, barely",
    }
}

/// Number of ratios without a threshold in a verdict.
const TOLD: usize = 4;

/// Returns how many thresholds of some results are met, and which are not; and the first few ratios
/// that have no threshold.
pub fn said(results: &[Measurement]) -> Verdict {
    let (mut met, mut missed, mut open) = (0, Vec::new(), Vec::new());
    for m in results.iter().filter(|m| m.kind == Kind::Ratio) {
        let Some(summary) = Summary::of(&m.samples) else { continue };
        let reached = m.unit.with_spread(&summary);
        match m.params.get("asked").and_then(|asked| asked.as_f64()) {
            None if parameter(m, "variants") == NOTHING => {}
            None => {
                let (of, by) = (parameter(m, "variants"), parameter(m, "against"));
                open.push(format!("{} of {of} by {by}: {reached}", m.variant.trim_start()));
            }
            Some(asked) if summary.median <= asked => met += 1,
            Some(asked) => {
                let memory = memory(m);
                missed.push(format!(
                    "{} ({memory}: {reached}, at most {})",
                    m.variant,
                    m.unit.shown(asked)
                ));
            }
        }
    }
    let judged = met + missed.len();
    let missed = match missed.is_empty() {
        true => String::new(),
        false => format!(" Missed: {}.", missed.join("; ")),
    };
    let judged = (judged > 0).then(|| format!("{met} of {judged} thresholds are met.{missed}"));
    let more = open.len().saturating_sub(TOLD);
    open.truncate(TOLD);
    if more > 0 {
        open.push(format!("{more} more ratios are in the tables"));
    }
    let open = (!open.is_empty()).then(|| format!("{}.", open.join("; ")));
    Verdict::of_lines(judged.into_iter().chain(open))
}

/// Returns a table with a row for each threshold of `scenario`.
pub fn table(results: &[Measurement], scenario: &str, title: &str, meant: &str) -> Option<Table> {
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
    let judged = || rows.iter().filter_map(|row| row.last()).filter(|word| !word.is_empty());
    let (met, of) = (judged().filter(|word| word.starts_with("met")).count(), judged().count());
    let columns = "operation|memory|against|at most|reached|half of rounds|";
    Table::new(title, 3, columns, rows)
        .noting(format!(
            "“reached” is the median of the ratios of each round, in which the two took turns; \
             half of the rounds lie in “half of rounds”. “barely”: one of its ends lies on the \
             other side. {met} of {of} met. {meant}"
        ))
        .some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unit::Unit;
    use serde_json::json;

    fn measurement(samples: &[f64]) -> Measurement {
        let params = json!({
            "part": "age", "of": "young", "format": "ept", "memory": 8u64 << 30,
            "asked": 1.25, "against": "cas",
        });
        let serde_json::Value::Object(params) = params else { unreachable!() };
        Measurement::new(
            "x-asked",
            "engine",
            "age, all young",
            params,
            Unit::RATIO,
            samples.to_vec(),
        )
        .of_kind(Kind::Ratio)
    }

    #[test]
    fn the_median_decides_and_the_quartiles_say_how_barely() {
        for (samples, word) in [
            ([1.0, 1.1, 1.2], "met"),
            ([1.0, 1.2, 1.9], "met, barely"),
            ([1.0, 1.3, 1.4], "missed, barely"),
            ([1.3, 1.3, 1.4], "missed"),
        ] {
            let table = table(&[measurement(&samples)], "x-asked", "X", "").unwrap();
            assert_eq!(table.rows[0].last().unwrap(), word, "{samples:?}");
            let met = if word.starts_with("met") { "1 of 1 met" } else { "0 of 1 met" };
            assert!(table.notes[0].contains(met), "{:?}", table.notes);
        }
    }

    #[test]
    fn missed_thresholds_are_named_and_unasked_ratios_reported() {
        use crate::fake;
        let mut results = fake::guests();
        assert_eq!(said(&results).says, ["1 of 1 thresholds are met."]);
        let asked = results.last_mut().unwrap();
        asked.params.insert("asked".to_owned(), 0.001.into());
        let verdict = said(&results).says.remove(0);
        assert!(verdict.starts_with("0 of 1 thresholds are met. Missed: faults ("), "{verdict}");
        results.last_mut().unwrap().params.remove("asked");
        let verdict = said(&results).says.remove(0);
        assert!(verdict.starts_with("faults of split by zap: "), "{verdict}");
        let one = results.last().unwrap().clone();
        results.extend(vec![one; TOLD + 2]);
        let verdict = said(&results).says.remove(0);
        assert!(verdict.ends_with("; 3 more ratios are in the tables."), "{verdict}");
    }
}
