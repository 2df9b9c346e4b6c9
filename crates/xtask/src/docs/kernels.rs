//! Tables of kernels in docs/kernel.md, from reports that `slat emulate -o` wrote.
//!
//! Below `<!-- kernels FOLDER -->` is a table for each tree of the reports in that folder, and one
//! for Debian's own kernels, with a column for each kernel.

use crate::root;
use serde_json::Value;
use slat_lab::numbers::thousands;
use slat_lab::record::Measurement;
use slat_lab::report::text;
use slat_lab::stats::median;
use slat_lab::table::{NOTHING, Table};
use std::collections::BTreeMap;

/// A row: its name, the phase, the pages, and the count if it is not of instructions.
type Line = (&'static str, &'static str, &'static str, Option<&'static str>);

const LINES: [Line; 8] = [
    ("clear, 4k: instructions", "clear", "4k", None),
    ("visits", "clear", "4k", Some("calls_stage2_split_walker")),
    ("enable, 4k: instructions", "enable", "4k", None),
    ("clear, 2m: instructions", "clear", "2m", None),
    ("visits", "clear", "2m", Some("calls_stage2_split_walker")),
    ("enable, 2m: instructions", "enable", "2m", None),
    ("scan: instructions", "mark-idle", "4k", None),
    ("locks", "mark-idle", "4k", Some("calls__raw_write_lock")),
];

/// The figures of a kernel's reports, for each line.
type Told = [Option<u64>; LINES.len()];

/// Returns the tables of a folder's reports.
pub fn tables(folder: &str, width: u16) -> Result<String, String> {
    let failed = |error: &dyn std::fmt::Display| format!("{folder}: {error}");
    let mut kernels: BTreeMap<String, Told> = BTreeMap::new();
    for entry in root().join(folder).read_dir().map_err(|error| failed(&error))? {
        let path = entry.map_err(|error| failed(&error))?.path();
        let text = std::fs::read_to_string(path).map_err(|error| failed(&error))?;
        let mut report: Value = serde_json::from_str(&text).map_err(|error| failed(&error))?;
        let results: Vec<Measurement> =
            serde_json::from_value(report["results"].take()).map_err(|error| failed(&error))?;
        let kernel = report["emulator"]["kernel"].as_str().ok_or("a report of no emulator")?;
        let told = kernels.entry(kernel.to_owned()).or_default();
        for result in &results {
            for (cell, line) in told.iter_mut().zip(&LINES) {
                *cell = tells(result, line).or(*cell);
            }
        }
    }
    let mut trees: BTreeMap<&str, Vec<(&str, &Told)>> = BTreeMap::new();
    for (kernel, told) in &kernels {
        let tree = kernel.split('+').next().filter(|_| kernel.starts_with("tree:"));
        trees.entry(tree.unwrap_or_default()).or_default().push((kernel, told));
    }
    let mut shown = String::new();
    for (tree, kernels) in trees {
        text::grid(&mut shown, &table(tree, &kernels), width);
    }
    Ok(shown.trim_start().to_owned())
}

/// Returns a result's figure for a line, if it has one.
fn tells(result: &Measurement, (_, phase, pages, count): &Line) -> Option<u64> {
    let params = &result.params;
    let is_it = result.variant == *phase
        && params["backing"] == *pages
        && !params.contains_key("vcpu")
        // If all pages are initially dirty, the clear splits; otherwise the enabling of the log
        // does.
        && match *phase {
            "clear" => params["initially_set"] == true,
            "enable" => params["initially_set"] == false,
            _ => true,
        };
    if !is_it {
        return None;
    }
    let counts = |name: &str| result.counts.get(name).copied();
    match count {
        Some(name) => counts(name).or_else(|| counts(&format!("{name}_max"))),
        None => median(&result.samples).map(|median| median.round() as u64),
    }
}

/// Returns a table with a column for each kernel, the tree's first, in which instructions are also
/// given relative to the tree without edits; and a line for each figure that a kernel has.
fn table(tree: &str, kernels: &[(&str, &Told)]) -> Table {
    let plain = kernels.iter().find(|(kernel, _)| *kernel == tree).map(|(_, told)| *told);
    let cell = |at: usize, kernel: &str, told: &Told| {
        let Some(count) = told[at] else { return NOTHING.to_owned() };
        let shown = thousands(count as i64);
        let before = plain.and_then(|plain| plain[at]).filter(|_| kernel != tree);
        match before.filter(|before| LINES[at].3.is_none() && *before > 0) {
            Some(before) => format!("{shown} ({:.2})", count as f64 / before as f64),
            None => shown,
        }
    };
    let line = |at: usize| {
        let cells = kernels.iter().map(|(kernel, told)| cell(at, kernel, told));
        std::iter::once(LINES[at].0.to_owned()).chain(cells).collect()
    };
    let told = |at: &usize| kernels.iter().any(|(_, told)| told[*at].is_some());
    let name = |kernel: &str| match kernel.strip_prefix(tree) {
        Some("") => "no edit".to_owned(),
        edits => edits.unwrap_or_default().to_owned(),
    };
    let names = kernels.iter().map(|(kernel, _)| name(kernel));
    Table {
        title: match tree {
            "" => "Debian's own kernels".to_owned(),
            tree => format!("Linux {}", tree.trim_start_matches("tree:debian-")),
        },
        common: String::new(),
        columns: std::iter::once(String::new()).chain(names).collect(),
        labels: 1,
        rows: (0..LINES.len()).filter(told).map(line).collect(),
        notes: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_kernels_column_has_each_reports_value_and_its_ratio_to_the_tree_without_edits() {
        let mut result: Measurement = serde_json::from_value(json!({
            "scenario": "dirty-log", "target": "kvm", "variant": "clear", "unit": "instructions",
            "params": { "backing": "4k", "initially_set": true },
            "samples": [3.0, 1.0, 2.0, 2.0],
            "counts": { "calls_stage2_split_walker_max": 7 },
        }))
        .unwrap();
        assert_eq!(tells(&result, &LINES[0]), Some(2));
        assert_eq!(tells(&result, &LINES[1]), Some(7));
        assert_eq!(tells(&result, &LINES[3]), None);
        result.params["initially_set"] = false.into();
        assert_eq!(tells(&result, &LINES[0]), None);
        result.params["initially_set"] = true.into();
        result.params.insert("vcpu".to_owned(), 0.into());
        assert_eq!(tells(&result, &LINES[0]), None);
        let row = |clear: u64| {
            let mut row = [None; LINES.len()];
            (row[0], row[1]) = (Some(clear), Some(clear));
            row
        };
        let (before, after) = (row(2000), row(1000));
        let table = table(
            "tree:debian-6.12",
            &[("tree:debian-6.12", &before), ("tree:debian-6.12+b", &after)],
        );
        assert_eq!(table.title, "Linux 6.12");
        assert_eq!(table.columns, ["", "no edit", "+b"]);
        assert_eq!(table.rows[0][1..], ["2,000", "1,000 (0.50)"]);
        assert_eq!(table.rows[1][1..], ["2,000", "1,000"]);
        assert_eq!(table.rows.len(), 2);
    }
}
