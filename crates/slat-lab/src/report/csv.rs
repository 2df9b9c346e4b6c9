//! CSV with a row for each sample and each count: the long form that data frames and spreadsheets
//! read.

use crate::record::Measurement;
use crate::record::Report;
use anyhow::Context;
use serde_json::Value;
use std::collections::BTreeSet;

/// Columns that name the measurement. The parameters stand between these and [`LAST`].
const FIRST: [&str; 3] = ["scenario", "target", "variant"];
/// `sample` counts from 1, and is empty for a count. `count` is the count's name, and is empty for
/// a sample.
const LAST: [&str; 4] = ["unit", "sample", "count", "value"];

/// Renders the results as comma-separated values (RFC 4180), with a line of headings.
///
/// # Errors
/// None in practice, because the writer writes to memory.
pub fn render(report: &Report) -> anyhow::Result<String> {
    let all = report.results.iter().flat_map(|m| m.params.keys().map(String::as_str));
    let names: BTreeSet<&str> = all.collect();
    let mut writer = csv::Writer::from_writer(Vec::new());
    let headings = names.iter().map(|name| heading(name));
    let fixed =
        |columns: &[&str]| columns.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    writer.write_record(fixed(&FIRST).into_iter().chain(headings).chain(fixed(&LAST)))?;
    for m in &report.results {
        let head = || {
            let what = [&m.scenario, &m.target, &m.variant].map(Clone::clone);
            what.into_iter().chain(names.iter().map(|name| parameter(m, name)))
        };
        for (number, sample) in (1..).zip(&m.samples) {
            let tail = [m.unit.to_string(), format!("{number}"), String::new(), sample.to_string()];
            writer.write_record(head().chain(tail))?;
        }
        for (name, count) in &m.counts {
            let tail = ["count".to_owned(), String::new(), name.clone(), count.to_string()];
            writer.write_record(head().chain(tail))?;
        }
    }
    String::from_utf8(writer.into_inner()?).context("a name is not UTF-8")
}

/// Returns the name of a parameter's column, which no other column has.
fn heading(name: &str) -> String {
    match FIRST.contains(&name) || LAST.contains(&name) {
        true => format!("param_{name}"),
        false => name.to_owned(),
    }
}

/// Returns a parameter as in results.json; empty if the measurement does not have it.
fn parameter(measurement: &Measurement, name: &str) -> String {
    match measurement.params.get(name) {
        None => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake;
    use std::collections::HashMap;

    fn read(report: &Report) -> Vec<HashMap<String, String>> {
        let text = render(report).unwrap();
        let mut reader = csv::Reader::from_reader(text.as_bytes());
        reader.deserialize().collect::<Result<_, _>>().unwrap()
    }

    #[test]
    fn every_sample_and_every_count_can_be_read_back() {
        let report = fake::report();
        let rows = read(&report);
        let mut rows = rows.iter();
        for m in &report.results {
            for (number, sample) in m.samples.iter().enumerate() {
                let row = rows.next().unwrap();
                assert_eq!([&row["scenario"], &row["variant"]], [&m.scenario, &m.variant]);
                assert_eq!(row["value"].parse(), Ok(*sample));
                assert_eq!((&*row["sample"], &*row["count"]), (&*(number + 1).to_string(), ""));
                assert_eq!(row["unit"], m.unit.name());
            }
            for (name, count) in &m.counts {
                let row = rows.next().unwrap();
                assert_eq!((&row["count"], &*row["unit"], &*row["sample"]), (name, "count", ""));
                assert_eq!(row["value"].parse(), Ok(*count));
            }
        }
        assert!(rows.next().is_none());
    }

    #[test]
    fn parameters_are_columns_and_empty_where_there_are_none() {
        let report = fake::report();
        let rows = read(&report);
        let split = rows.iter().find(|row| row["scenario"] == "split").unwrap();
        assert_eq!((&*split["backing"], &*split["granule"], &*split["vcpus"]), ("4k", "4096", ""));
        let log = rows.iter().find(|row| row["scenario"] == "dirty-log").unwrap();
        assert_eq!((&*log["clear_chunk"], &*log["manual_protect"]), ("null", "false"));
    }

    #[test]
    fn commas_quotes_and_names_of_columns_do_no_harm() {
        let mut report = fake::short_report();
        report.results[0].variant = "a, \"b\"\nc".to_owned();
        report.results[0].params.insert("unit".to_owned(), "metre".into());
        let row = &read(&report)[0];
        assert_eq!(
            (&*row["variant"], &*row["param_unit"], &*row["unit"]),
            ("a, \"b\"\nc", "metre", "s")
        );
    }

    #[test]
    fn a_report_of_nothing_is_its_headings() {
        let report = Report { results: Vec::new(), ..fake::report() };
        assert_eq!(render(&report).unwrap(), "scenario,target,variant,unit,sample,count,value\n");
    }
}
