//! Renderer of the scenario `dirty-log`: tables and charts of what logging costs a guest on this
//! host.

use super::logged;
use super::stalls::{reads, touched, written};
use super::tables::{MEANING, is, named, of, said, stalls};
use crate::params::PARAMS;
use slat_kvm::phase::Phase;
use slat_kvm::scenario::{dirty_log, live};
use slat_lab::numbers::{list_of_seconds, seconds, thousands, with_spread, with_wide_spread};
use slat_lab::record::Measurement;
use slat_lab::renderer::{Chart, Renderer};
use slat_lab::report::charts::lines;
use slat_lab::report::tables::{Labels, Row, rows};
use slat_lab::stats::{Summary, median};
use slat_lab::table::{NOTHING, Table};

const NAME: &str = dirty_log::NAME;

/// Renderer of dirty logging, in phases and while vCPUs run.
pub const RENDERER: Renderer = Renderer {
    reads: |m| is(m, NAME) || is(m, live::RESULTS.name) && !m.params.contains_key("way"),
    verdict: |results| {
        let mut verdict = logged::verdict(results);
        verdict.says.extend(said(results, &live::RESULTS).says);
        verdict
    },
    tables: |results| {
        let live = of(results, &live::RESULTS);
        // The table that compares several guests comes first.
        let several = rows(results, NAME, &["vcpu"]).len() > 1;
        let beside = several.then(|| logged::table(results)).flatten();
        beside.into_iter().chain(phases(results)).chain(stalls(results, NAME)).chain(live).collect()
    },
    long: |results| vcpus(results).into_iter().collect(),
    charts: |results| rounds(results).into_iter().collect(),
    meaning: MEANING,
    ..Renderer::NONE
};

/// Phases in the order in which they happen, with the headings of their columns. Phases have the
/// names of Linux's `dirty_log_perf_test`, so that figures can be compared.
const PHASES: [(Phase, &str); 6] = [
    (Phase::Populate, "populate"),
    (Phase::Enable, "enable"),
    (Phase::Dirty, "dirty, by round"),
    (Phase::Get, "get"),
    (Phase::Clear, "clear"),
    (Phase::Disable, "disable"),
];

/// Returns the table of phases: a row for each way of logging, a column for each phase.
fn phases(results: &[Measurement]) -> Option<Table> {
    let rows = rows(results, NAME, &["vcpu"]);
    if rows.is_empty() {
        return None;
    }
    let labels = Labels::of(&rows, PARAMS);
    let mut columns = PHASES.map(|(_, heading)| heading).to_vec();
    columns.insert(3, "page, vCPU");
    let cells = rows.iter().map(|row| {
        let mut cells = labels.cells(row);
        for (phase, _) in PHASES {
            cells.push(time(row, phase));
            if phase == Phase::Dirty {
                cells.push(per_page(row));
            }
        }
        cells
    });
    let reads = rows.iter().any(|row| row.measurements.iter().any(|m| reads(m)));
    let with_reads = if reads { ", with its share of reads of other pages" } else { "" };
    let title = "What a guest on this host pays for dirty logging (KVM)";
    labels
        .table(title, 0, columns, cells)
        .noting(format!(
            "Times of whole phases, seen from user space: populate is the first touch of all \
             pages, dirty a write to each, get and clear the calls that read and reset the log; \
             medians with ± half the interquartile range, and the least to the most where that is \
             50 % and more. Populating with huge pages is slow where the host has to make them \
             first. “page, vCPU” is what one page of a round costs the vCPU that writes to \
             it{with_reads}."
        ))
        .some()
}

/// Formats the time of a whole phase, for all vCPUs.
fn time(row: &Row, phase: Phase) -> String {
    let Some((whole, summary)) = row.whole(phase).and_then(|m| Some((m, Summary::of(&m.samples)?)))
    else {
        return NOTHING.to_owned();
    };
    // Two or three rounds are shown one by one, because they may differ for a reason: in the first
    // round, all pages may be writable.
    match &by_round(whole)[..] {
        few @ [_, _] | few @ [_, _, _] if phase == Phase::Dirty => list_of_seconds(few),
        _ => with_wide_spread(&summary),
    }
}

/// Returns the median of each round over the runs. Samples are in the order of runs, then of
/// rounds.
fn by_round(whole: &Measurement) -> Vec<f64> {
    let rounds = whole.params.get("iterations").and_then(serde_json::Value::as_u64);
    let rounds = rounds.unwrap_or(whole.samples.len() as u64).max(1) as usize;
    let of_round = |round| {
        let samples: Vec<f64> = whole.samples.iter().skip(round).step_by(rounds).copied().collect();
        median(&samples)
    };
    (0..rounds).filter_map(of_round).collect()
}

/// Formats what a page costs the vCPU that writes to it: the median over vCPUs of the median over
/// each vCPU's rounds.
fn per_page(row: &Row) -> String {
    let of_one = |m: &&Measurement| Some(median(&m.samples)? / written(m)?);
    let dirty = row.measurements.iter().filter(|m| Phase::Dirty == *m.variant && vcpu(m).is_some());
    let costs: Vec<f64> = dirty.filter_map(of_one).collect();
    median(&costs).map_or_else(|| NOTHING.to_owned(), seconds)
}

/// Returns the table with a row for each vCPU and each phase in which it ran. Only the page shows
/// it, because it is too long for a terminal.
fn vcpus(results: &[Measurement]) -> Option<Table> {
    let parts: Vec<Row> = results
        .iter()
        .filter(|m| m.scenario == NAME && vcpu(m).is_some())
        .map(|m| Row { params: m.params.clone(), measurements: vec![m] })
        .collect();
    if parts.is_empty() {
        return None;
    }
    let labels = Labels::of(&parts, PARAMS);
    let mut cells = Vec::new();
    for row in &parts {
        for part in &row.measurements {
            let Some(summary) = Summary::of(&part.samples) else { continue };
            let pages = touched(part);
            let count = |count: Option<u64>| {
                count.map_or_else(|| NOTHING.to_owned(), |count| thousands(count as i64))
            };
            let mut line = labels.cells(row);
            line.push(part.variant.clone());
            line.push(with_spread(&summary));
            line.push(count(pages.map(|pages| pages.round() as u64)));
            let each = pages.map(|pages| seconds(summary.median / pages));
            line.push(each.unwrap_or_else(|| NOTHING.to_owned()));
            line.push(count(faults(part)));
            cells.push(line);
        }
    }
    labels
        .table("Each vCPU", 1, ["phase", "time", "pages", "a page", "faults"], cells)
        .noting(
            "Pages and faults of one round; faults are those that KVM counted for the vCPU \
             (pf_taken), in its worst round, where the kernel tells.",
        )
        .some()
}

/// Returns the faults of a round; where rounds differ, the largest number.
fn faults(part: &Measurement) -> Option<u64> {
    part.counts.get("pf_taken").or_else(|| part.counts.get("pf_taken_max")).copied()
}

fn vcpu(measurement: &Measurement) -> Option<u64> {
    measurement.params.get("vcpu")?.as_u64()
}

/// Returns the chart of how long each round of dirtying took, with a line for each way of logging.
fn rounds(results: &[Measurement]) -> Option<Chart> {
    let rows = rows(results, NAME, &["vcpu"]);
    let labels = Labels::of(&rows, PARAMS);
    let lines: Vec<(String, Vec<f64>)> = rows
        .iter()
        .filter_map(|row| Some((named(&labels, row), row.whole(Phase::Dirty)?.samples.clone())))
        .collect();
    lines::chart("Time of each round of dirtying", &lines)
}

#[cfg(test)]
mod tests {
    use super::super::logged::tests::a_tenth;
    use super::*;

    #[test]
    fn a_vcpus_row_excludes_skipped_pages_and_pages_only_read() {
        let cells = |table: Option<Table>| table.unwrap().rows.concat();
        for (others, of_vcpu) in
            [(None, ["3,277", "206 µs"]), (Some("read"), ["32,768", "20.6 µs"])]
        {
            let results = a_tenth(others);
            let (phases, vcpus) = (cells(phases(&results)), cells(vcpus(&results)));
            assert!(phases.iter().any(|cell| cell == "206 µs"), "{phases:?}");
            for cell in of_vcpu {
                assert!(vcpus.iter().any(|other| other == cell), "{cell} of {vcpus:?}");
            }
        }
    }
}
