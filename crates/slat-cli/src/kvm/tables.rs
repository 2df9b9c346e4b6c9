//! Tables of guests under the host's KVM: the times of operations on their memory, and how long
//! their vCPUs stood still.

use crate::params::PARAMS;
use slat_kvm::figure::{Column, Figure, Results, Sentence, Stall};
use slat_kvm::phase::Phase;
use slat_lab::record::{KVM, Measurement};
use slat_lab::report::tables::{Labels, Row, rows};
use slat_lab::stats::{Summary, median};
use slat_lab::table::{NOTHING, Table};
use slat_lab::unit::Unit;
use slat_lab::verdict::Verdict;

/// Notes on what a guest's figures mean.
pub const MEANING: &[&str] =
    &["The guest's code runs in ring 3, so that it runs natively also where KVM has no hardware \
    virtualization. What a vCPU's access costs includes the exits that the host's KVM takes, \
    however it does."];

/// Returns whether a result is from a guest under KVM in that scenario.
pub fn is(m: &Measurement, scenario: &str) -> bool {
    m.target == KVM && m.scenario == scenario
}

/// Returns the renderer of a scenario's results, which shows them in the one way that all guests
/// have in common.
macro_rules! renderer {
    ($results:path) => {
        slat_lab::renderer::Renderer {
            reads: |m| $crate::kvm::tables::is(m, $results.name),
            verdict: |results| $crate::kvm::tables::said(results, &$results),
            tables: |results| $crate::kvm::tables::of(results, &$results),
            meaning: $crate::kvm::tables::MEANING,
            ..slat_lab::renderer::Renderer::NONE
        }
    };
}
pub(super) use renderer;

/// Returns the tables of a scenario: one with a column for each figure that was measured, then the
/// stalls.
pub fn of(results: &[Measurement], shown: &Results) -> Vec<Table> {
    let columns = columns(results, shown.name, shown.title, shown.columns, shown.note);
    columns.into_iter().chain(stalls(results, shown.name)).collect()
}

/// Returns the sentence on a scenario, or nothing if it was not measured.
pub fn said(results: &[Measurement], shown: &Results) -> Verdict {
    match shown.said {
        Sentence::PerPage(phase, said) => cost(results, shown.name, phase, said),
        Sentence::Whole(figure, said) => extremes(results, shown.name, said, |row| {
            let m = row.whole(figure)?;
            Some((m.unit.clone(), Summary::of(&m.samples)?))
        }),
    }
}

/// Returns a sentence on what a page costs a vCPU in a phase, or nothing if no guest ran that
/// phase.
fn cost(results: &[Measurement], scenario: &str, phase: Phase, said: &str) -> Verdict {
    // Divides each sample by the pages. Below, the vCPU with the largest median stands for the
    // guest.
    let by_page = |m: &Measurement| {
        let pages = *m.counts.get("pages").filter(|pages| **pages > 0)? as f64;
        Summary::of(&m.samples.iter().map(|time| time / pages).collect::<Vec<_>>())
    };
    let worst = |row: &Row| {
        let parts = row.measurements.iter().filter(|m| phase == *m.variant);
        let parts = parts.filter(|m| m.is_vcpu()).filter_map(|m| by_page(m));
        Some((Unit::SECONDS, parts.max_by(|a, b| a.median.total_cmp(&b.median))?))
    };
    extremes(results, scenario, &format!("{said} costs a vCPU, for each page,"), worst)
}

/// Returns a sentence with the smallest figure of a guest, and the largest.
fn extremes(
    results: &[Measurement],
    scenario: &str,
    said: &str,
    of: impl Fn(&Row) -> Option<(Unit, Summary)>,
) -> Verdict {
    let rows = rows(results, scenario, &["vcpu"]);
    let labels = Labels::of(&rows, PARAMS);
    let mut all: Vec<(f64, String)> = rows
        .iter()
        .filter_map(|row| {
            let ((unit, summary), name) = (of(row)?, named(&labels, row));
            let shown = unit.with_spread(&summary);
            let said = if name.is_empty() { shown } else { format!("{shown} ({name})") };
            Some((summary.median, said))
        })
        .collect();
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    Verdict::of_lines(match &all[..] {
        [] => None,
        [(_, only)] => Some(format!("{said} {only}.")),
        [(_, least), .., (_, most)] => Some(format!("{said} {least} to {most}.")),
    })
}

/// Returns the name of a row: the parameters in which it differs from others.
pub fn named(labels: &Labels, row: &Row) -> String {
    let parts = labels.headings().zip(labels.cells(row));
    parts.map(|(heading, cell)| format!("{heading} {cell}")).collect::<Vec<_>>().join(", ")
}

/// Returns the table of how long vCPUs stood still, with a row for each guest and phase.
pub fn stalls(results: &[Measurement], scenario: &str) -> Option<Table> {
    let rows = rows(results, scenario, &["vcpu"]);
    let labels = Labels::of(&rows, PARAMS);
    let mut cells = Vec::new();
    for row in &rows {
        for &phase in Phase::ALL.iter().filter(|phase| phase.can_stall()) {
            let figure = |stall: Stall| row.whole(Figure::Stall(phase, stall));
            if figure(Stall::Share).is_none() {
                continue;
            }
            let mut line = labels.cells(row);
            line.push(phase.to_string());
            line.extend(shown_stalls().map(|stall| shown(figure(stall))));
            cells.push(line);
        }
    }
    let columns = ["phase"].into_iter().chain(shown_stalls().map(Stall::heading));
    labels
        .table(format!("How long vCPUs stood still: {scenario} (KVM)"), 1, columns, cells)
        .noting(
            "By the guest's own clock: as many of the longest times between two accesses as KVM \
             counted faults (above five times what is usual on warm memory where it counts none), \
             less what is usual, without those that the scheduler is known to have made; \
             medians over runs and rounds, each of the vCPU that had it worst. “a page”: their \
             sum by the pages that the vCPU touched; “stalled”: in each second that it would have \
             run, without what its thread waited for a CPU (“waited”) and what the machine \
             below took.",
        )
        .some()
}

fn shown(measurement: Option<&Measurement>) -> String {
    let Some((m, summary)) = measurement.and_then(|m| Some((m, Summary::of(&m.samples)?))) else {
        return NOTHING.to_owned();
    };
    m.unit.with_spread(&summary)
}

/// Returns the figures that fit beside each other on a screen; results.json has all of them.
fn shown_stalls() -> impl Iterator<Item = Stall> {
    Stall::ALL.into_iter().filter(|stall| !matches!(stall, Stall::P95 | Stall::Stolen))
}

/// Returns a table with a row for each guest, and a column for each figure that was measured.
pub fn columns(
    results: &[Measurement],
    scenario: &str,
    title: &str,
    figures: &[Column],
    note: &str,
) -> Option<Table> {
    let rows = rows(results, scenario, &["vcpu"]);
    let labels = Labels::of(&rows, PARAMS);
    let measured = |figure: Figure| rows.iter().any(|row| row.whole(figure).is_some());
    let used: Vec<_> = figures.iter().filter(|(figure, _)| measured(*figure)).collect();
    let columns = used.iter().map(|(_, heading)| *heading);
    let cells = rows.iter().map(|row| {
        let figures = used.iter().map(|(figure, _)| match row.whole(*figure) {
            Some(m) if m.unit == Unit::ROUNDS => rounds(row, m),
            found => shown(found),
        });
        labels.cells(row).into_iter().chain(figures).collect()
    });
    labels.table(title, 0, columns, cells).noting(note).some()
}

/// Formats the rounds of a migration, with `*` if it ended without converging.
fn rounds(row: &Row, rounds: &Measurement) -> String {
    let Some(median) = median(&rounds.samples) else { return NOTHING.to_owned() };
    let converged = row.whole(Phase::Run).is_none_or(|run| run.counts.get("converged") == Some(&1));
    format!("{}{}", rounds.unit.figure(median), if converged { "" } else { " *" })
}
