//! What the scenarios of guests that visit their memory in random order show in common.

use slat_kvm::figure::Figure;
use slat_lab::numbers::seconds;
use slat_lab::record::Measurement;
use slat_lab::renderer::Chart;
use slat_lab::report::charts::strips::{self, Strip};
use slat_lab::report::charts::sweep;
use slat_lab::report::tables::{Labels, Row, rows};
use slat_lab::stats::median;
use slat_lab::unit::Unit;

/// Returns the median of a figure, if the row has it.
pub fn median_of(row: &Row<'_>, figure: Figure) -> Option<f64> {
    median(&row.whole(figure)?.samples)
}

/// Draws when the accesses of each row were over. `figure` has the times of equal parts of them.
pub fn courses(
    results: &[Measurement],
    scenario: &str,
    figure: Figure,
    title: &str,
    since: &str,
) -> Vec<Chart> {
    let rows = rows(results, scenario, &["vcpu"]);
    let labels = Labels::of(&rows);
    let line = |row: &Row<'_>| {
        let samples = &row.whole(figure)?.samples;
        let parts = samples.len().max(1) as f64;
        let points = (1..).zip(samples).map(|(part, &y)| sweep::Point {
            x: f64::from(part) * 100.0 / parts,
            y,
            reached: true,
        });
        Some((labels.cells(row).join(", "), points.collect()))
    };
    let lines: Vec<_> = rows.iter().filter_map(line).collect();
    let axes = ["accesses of the guest, in per cent", since];
    sweep::chart(title, axes, seconds, &lines).into_iter().collect()
}

/// Draws a figure over a parameter that is a number, with a line for each way, if a way was tried
/// with several values.
pub fn lines_by(
    results: &[Measurement],
    scenario: &str,
    param: &str,
    figure: Figure,
    title: &str,
    axes: [&str; 2],
    shown: impl Fn(f64) -> String,
) -> Vec<Chart> {
    let mut lines: Vec<(String, Vec<sweep::Point>)> = Vec::new();
    for row in rows(results, scenario, &["vcpu"]) {
        let x = row.params.get(param).and_then(serde_json::Value::as_f64);
        let Some((x, y)) = x.zip(median_of(&row, figure)) else { continue };
        let point = sweep::Point { x, y, reached: true };
        let way = row.param("way").unwrap_or_default();
        match lines.iter_mut().find(|(known, _)| known == way) {
            Some((_, points)) => points.push(point),
            None => lines.push((way.to_owned(), vec![point])),
        }
    }
    let swept = lines.iter().any(|(_, points)| points.len() > 1);
    swept.then(|| sweep::chart(title, axes, shown, &lines)).flatten().into_iter().collect()
}

/// Draws all samples of a figure, with a strip for each row.
pub fn strips_of(
    results: &[Measurement],
    scenario: &str,
    figure: Figure,
    title: &str,
) -> Vec<Chart> {
    let rows = rows(results, scenario, &["vcpu"]);
    let labels = Labels::of(&rows);
    let mut strips = Vec::new();
    for row in &rows {
        let Some(measured) = row.whole(figure) else { continue };
        let label = labels.cells(row).join(", ");
        strips.push(Strip { label, family: scenario, samples: &measured.samples });
    }
    let svg = strips::svg(&strips, &Unit::from(figure.unit()));
    svg.map(|svg| Chart { title: title.to_owned(), svg }).into_iter().collect()
}
