//! Tables of KVM's selftests in docs/kernel.md, from the output of `slat kernel test --json`.
//!
//! Below `<!-- selftests FOLDER -->` is a table for each architecture and tree of the reports in
//! that folder, with a column for each set of edits. Below `<!-- executes FOLDER -->` is the output
//! of `execute_perf_test` in each of them.

use crate::root;
use serde_json::Value;
use slat_lab::numbers::thousands;
use slat_lab::report::text;
use slat_lab::table::{NOTHING, Table};
use std::collections::BTreeMap;

/// Returns the reports of a folder, those with fewer edits first.
fn reports(folder: &str) -> Result<Vec<Value>, String> {
    let failed = |error: &dyn std::fmt::Display| format!("{folder}: {error}");
    let mut reports: Vec<Value> = Vec::new();
    for entry in root().join(folder).read_dir().map_err(|error| failed(&error))? {
        let path = entry.map_err(|error| failed(&error))?.path();
        let text = std::fs::read_to_string(path).map_err(|error| failed(&error))?;
        reports.push(serde_json::from_str(&text).map_err(|error| failed(&error))?);
    }
    reports.sort_by_key(|report| (edits(report).len(), edits(report).join(",")));
    Ok(reports)
}

fn edits(report: &Value) -> Vec<&str> {
    report["edits"].as_array().into_iter().flatten().filter_map(Value::as_str).collect()
}

/// Returns a kernel's column title: its edits, without those that all kernels have.
fn kernel(edits: &[&str], of_all: &[&str]) -> String {
    let own: Vec<&str> = edits.iter().copied().filter(|edit| !of_all.contains(edit)).collect();
    match &*own {
        [] if of_all.is_empty() => "no edit".to_owned(),
        [] => "no other edit".to_owned(),
        edits => format!("+{}", edits.join(",\n+")),
    }
}

fn text_of<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_default()
}

/// Returns a test's name and arguments, without the mode that depends on the CPU.
fn name(test: &Value) -> &str {
    let name = text_of(test, "name");
    name.split_once(" -m ").map_or(name, |(name, _)| name)
}

fn tests(report: &Value) -> impl Iterator<Item = &Value> {
    report["tests"].as_array().into_iter().flatten()
}

/// Returns a table for each architecture and tree.
pub fn tables(folder: &str, width: u16) -> Result<String, String> {
    let mut groups: BTreeMap<(String, String), Vec<Value>> = BTreeMap::new();
    for report in reports(folder)? {
        let [arch, tree] = ["architecture", "tree"].map(|key| text_of(&report, key).to_owned());
        groups.entry((arch, tree)).or_default().push(report);
    }
    let mut shown = String::new();
    for ((arch, tree), reports) in &groups {
        text::grid(&mut shown, &table(arch, tree, reports), width);
    }
    Ok(shown.trim_start().to_owned())
}

/// Returns a table with a line for each test in the order in which they ran, and a note for each
/// reason of a skip.
fn table(arch: &str, tree: &str, reports: &[Value]) -> Table {
    let mut names: Vec<&str> = Vec::new();
    let mut notes: Vec<String> = Vec::new();
    // The kernel with the most tests decides their order; others have some of them, or different
    // ones.
    let mut longest: Vec<&Value> = reports.iter().collect();
    longest.sort_by_key(|report| std::cmp::Reverse(tests(report).count()));
    for test in longest.into_iter().flat_map(tests) {
        if !names.contains(&name(test)) {
            names.push(name(test));
        }
    }
    let cell = |report: &Value, named: &str, notes: &mut Vec<String>| {
        let Some(test) = tests(report).find(|test| name(test) == named) else {
            return NOTHING.to_owned();
        };
        let Some(why) = text_of(test, "result").strip_prefix("skipped") else {
            return text_of(test, "result").to_owned();
        };
        let program = named.split(' ').next().unwrap_or_default();
        let note = format!("{program} is skipped: {}", why.trim());
        if !notes.contains(&note) {
            notes.push(note);
        }
        "skipped".to_owned()
    };
    let row = |named: &&str| {
        let cells = reports.iter().map(|report| cell(report, named, &mut notes));
        std::iter::once((*named).to_owned()).chain(cells).collect()
    };
    let names_of_kernels = reports.iter().map(|report| kernel(&edits(report), &[]));
    Table {
        title: format!("Linux {}, {arch}", tree.trim_start_matches("debian-")),
        common: String::new(),
        columns: std::iter::once(String::new()).chain(names_of_kernels).collect(),
        labels: 1,
        rows: names.iter().map(row).collect(),
        notes,
    }
}

/// Statistics that are shown, by their names in `execute_perf_test`.
const STATISTICS: [&str; 4] = ["pages_4k", "pages_2m", "pf_taken", "exits"];

/// A phase of `execute_perf_test`: its name, its instructions, and the statistics after it.
type Phase<'a> = (&'a str, Option<i64>, BTreeMap<&'a str, &'a str>);

fn phases(output: &str) -> Vec<Phase<'_>> {
    let lines: Vec<&str> = output.lines().map(str::trim).collect();
    lines.windows(2).filter_map(|pair| phase(pair[0], pair[1])).collect()
}

/// Parses a phase: its line is its name, a colon and seconds; the statistics are in the next line.
fn phase<'a>(line: &'a str, below: &'a str) -> Option<Phase<'a>> {
    let words: Vec<&str> = below.split(' ').collect();
    let statistics: BTreeMap<&str, &str> =
        words.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect();
    statistics.get("exits")?;
    let (name, seconds) = line.split_once(':').unwrap_or((line, ""));
    // "0.001234567s", in which a nanosecond is an instruction.
    let digits = seconds.trim().trim_end_matches('s').replace('.', "");
    Some((name.trim_end(), digits.parse().ok(), statistics))
}

/// Returns the output of `execute_perf_test` on each kernel.
pub fn executes(folder: &str, width: u16) -> Result<String, String> {
    let mut rows = Vec::new();
    let reports = reports(folder)?;
    let fewest = reports.first().map(edits).unwrap_or_default();
    let is_of_all = |edit: &&str| reports.iter().all(|report| edits(report).contains(edit));
    let of_all: Vec<&str> = fewest.into_iter().filter(is_of_all).collect();
    for report in &reports {
        for test in tests(report).filter(|test| text_of(test, "name").starts_with("execute_")) {
            for (name, instructions, statistics) in phases(text_of(test, "output")) {
                let statistic = |name: &&str| match statistics.get(name).map(|text| text.parse()) {
                    Some(Ok(count)) => thousands(count),
                    _ => NOTHING.to_owned(),
                };
                let head = [
                    kernel(&edits(report), &of_all),
                    name.to_owned(),
                    instructions.map_or_else(|| NOTHING.to_owned(), thousands),
                ];
                rows.push(head.into_iter().chain(STATISTICS.iter().map(statistic)).collect());
            }
        }
    }
    if rows.is_empty() {
        return Err(format!("{folder}: no report of execute_perf_test"));
    }
    let columns = ["kernel", "phase", "instructions"].into_iter().chain(STATISTICS);
    let table = Table {
        title: "execute_perf_test".to_owned(),
        common: format!("edits {}", of_all.join(", ")),
        columns: columns.map(str::to_owned).collect(),
        labels: 2,
        rows,
        notes: Vec::new(),
    };
    let mut shown = String::new();
    text::grid(&mut shown, &table, width);
    Ok(shown.trim_start().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_test_that_a_kernel_lacks_has_no_result_there_and_a_skip_its_reason_below() {
        let report = |edits: &[&str], tests: &[(&str, &str)]| {
            let test = |(name, result): &(&str, &str)| json!({ "name": name, "result": result });
            json!({ "edits": edits, "tests": tests.iter().map(test).collect::<Vec<_>>() })
        };
        let reports = [
            report(&[], &[("a -v 1 -m 3", "passed"), ("b", "skipped no huge pages")]),
            report(
                &["s", "t"],
                &[("a -v 1", "failed, exit code 254"), ("b", "passed"), ("c", "passed")],
            ),
        ];
        let table = table("x86_64", "debian-6.12", &reports);
        assert_eq!(table.title, "Linux 6.12, x86_64");
        assert_eq!(table.columns, ["", "no edit", "+s,\n+t"]);
        assert_eq!(table.rows[0], ["a -v 1", "passed", "failed, exit code 254"]);
        assert_eq!(table.rows[1], ["b", "skipped", "passed"]);
        assert_eq!(table.rows[2], ["c", NOTHING, "passed"]);
        assert_eq!(table.notes, ["b is skipped: no huge pages"]);
    }

    #[test]
    fn a_phase_has_its_instructions_and_the_statistics_of_the_line_below_it() {
        let said = "Testing guest mode: x\n\
                    Executing from memory         : 0.001234567s\n   pages_4k 512 exits 9\n\
                    After 5 periods of recovery\n   pages_4k 0 exits 9\n";
        let found = phases(said);
        assert_eq!(found[0].0, "Executing from memory");
        assert_eq!(found[0].1, Some(1_234_567));
        assert_eq!(found[0].2["pages_4k"], "512");
        assert_eq!((found[1].0, found[1].1), ("After 5 periods of recovery", None));
        assert_eq!(found.len(), 2);
    }
}
