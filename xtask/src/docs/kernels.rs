//! The table of kernels in docs/kernel.md, of reports that `slat emulate -o` wrote.
//!
//! Below `<!-- kernels FOLDER -->` stands a row for each kernel of the reports in that folder.

use crate::root;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write;

/// What a column tells: its title, the phase, the pages, and the count in place of instructions.
type Column = (&'static str, &'static str, &'static str, Option<&'static str>);

const COLUMNS: [Column; 8] = [
    ("clear, 4k", "clear", "4k", None),
    ("visits", "clear", "4k", Some("calls_stage2_split_walker")),
    ("enable, 4k", "enable", "4k", None),
    ("clear, 2m", "clear", "2m", None),
    ("visits", "clear", "2m", Some("calls_stage2_split_walker")),
    ("enable, 2m", "enable", "2m", None),
    ("scan", "mark-idle", "4k", None),
    ("locks", "mark-idle", "4k", Some("calls__raw_write_lock")),
];

/// The table of a folder's reports.
pub fn table(folder: &str) -> Result<String, String> {
    let failed = |error: &dyn std::fmt::Display| format!("{folder}: {error}");
    let mut kernels: BTreeMap<String, [Option<u64>; COLUMNS.len()]> = BTreeMap::new();
    for entry in root().join(folder).read_dir().map_err(|error| failed(&error))? {
        let path = entry.map_err(|error| failed(&error))?.path();
        let text = std::fs::read_to_string(path).map_err(|error| failed(&error))?;
        let report: Value = serde_json::from_str(&text).map_err(|error| failed(&error))?;
        let kernel = report["emulator"]["kernel"].as_str().ok_or("a report of no emulator")?;
        let row = kernels.entry(kernel.trim_start_matches("tree:").to_owned()).or_default();
        for result in report["results"].as_array().into_iter().flatten() {
            for (cell, column) in row.iter_mut().zip(&COLUMNS) {
                *cell = told(result, column).or(*cell);
            }
        }
    }
    Ok(grid(&kernels))
}

/// What a result tells for a column.
fn told(result: &Value, (_, phase, pages, count): &Column) -> Option<u64> {
    let params = &result["params"];
    let is_it = result["variant"] == *phase
        && params["backing"] == *pages
        && params.get("vcpu").is_none()
        // Where all pages begin as dirty the clear splits, and otherwise the enabling of the log.
        && match *phase {
            "clear" => params["initially_set"] == true,
            "enable" => params["initially_set"] == false,
            _ => true,
        };
    if !is_it {
        return None;
    }
    let counts = |name: &str| result["counts"].get(name)?.as_u64();
    match count {
        Some(name) => counts(name).or_else(|| counts(&format!("{name}_max"))),
        None => {
            let samples = result["samples"].as_array()?.iter();
            let mut samples: Vec<f64> = samples.filter_map(Value::as_f64).collect();
            samples.sort_by(f64::total_cmp);
            let middle = [samples.get(samples.len() / 2)?, samples.get((samples.len() - 1) / 2)?];
            Some(((middle[0] + middle[1]) / 2.0).round() as u64)
        }
    }
}

/// A row for each kernel, with what instructions are of those of the tree without edits.
fn grid(kernels: &BTreeMap<String, [Option<u64>; COLUMNS.len()]>) -> String {
    let mut lines = vec![[vec![String::new()], titles()].concat()];
    for (kernel, row) in kernels {
        let plain = kernels.get(kernel.split('+').next().unwrap_or_default());
        let cells = row.iter().enumerate().map(|(at, cell)| {
            let Some(cell) = cell else { return "–".to_owned() };
            let before = plain.and_then(|plain| plain[at]).filter(|_| kernel.contains('+'));
            match before.filter(|before| COLUMNS[at].3.is_none() && *before > 0) {
                Some(before) => {
                    format!("{} ({:.2})", thousands(*cell), *cell as f64 / before as f64)
                }
                None => thousands(*cell),
            }
        });
        lines.push(std::iter::once(kernel.clone()).chain(cells).collect());
    }
    let wide = |at: usize| lines.iter().map(|line| line[at].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..=COLUMNS.len()).map(wide).collect();
    let mut text = String::new();
    for line in &lines {
        let _ = write!(text, "{:<1$}", line[0], widths[0]);
        for (cell, width) in line.iter().zip(&widths).skip(1) {
            let _ = write!(text, "  {cell:>width$}");
        }
        text.push('\n');
    }
    text
}

fn titles() -> Vec<String> {
    COLUMNS.iter().map(|column| column.0.to_owned()).collect()
}

fn thousands(count: u64) -> String {
    let digits = count.to_string();
    let parts: Vec<&str> = digits
        .as_bytes()
        .rchunks(3)
        .rev()
        .map(|part| std::str::from_utf8(part).unwrap_or_default())
        .collect();
    parts.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_row_has_what_each_report_tells_and_its_part_of_the_tree_without_edits() {
        let mut result = json!({
            "variant": "clear", "params": { "backing": "4k", "initially_set": true },
            "samples": [3.0, 1.0, 2.0, 2.0],
            "counts": { "calls_stage2_split_walker_max": 7 },
        });
        assert_eq!(told(&result, &COLUMNS[0]), Some(2));
        assert_eq!(told(&result, &COLUMNS[1]), Some(7));
        assert_eq!(told(&result, &COLUMNS[3]), None);
        result["params"]["initially_set"] = false.into();
        assert_eq!(told(&result, &COLUMNS[0]), None);
        result["params"]["initially_set"] = true.into();
        result["params"]["vcpu"] = 0.into();
        assert_eq!(told(&result, &COLUMNS[0]), None);
        let row = |clear: u64| {
            let mut row = [None; COLUMNS.len()];
            (row[0], row[1]) = (Some(clear), Some(clear));
            row
        };
        let kernels = [("a".to_owned(), row(2000)), ("a+b".to_owned(), row(1000))];
        let text = grid(&kernels.into());
        assert!(text.contains("a+b  1,000 (0.50)   1,000"), "{text}");
    }
}
