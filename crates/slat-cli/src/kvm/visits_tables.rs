//! What the scenarios of guests that visit their memory in random order show in common.

use crate::params::PARAMS;
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
    let labels = Labels::of(&rows, PARAMS);
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
    let rows = rows(results, scenario, &["vcpu"]);
    let lines = swept(&rows, |row| {
        let x = row.params.get(param).and_then(serde_json::Value::as_f64)?;
        Some(sweep::Point { x, y: median_of(row, figure)?, reached: true })
    });
    lines.and_then(|lines| sweep::chart(title, axes, shown, &lines)).into_iter().collect()
}

/// Returns the points of each way, if a way has several.
pub fn swept(
    rows: &[Row<'_>],
    point: impl Fn(&Row<'_>) -> Option<sweep::Point>,
) -> Option<Vec<(String, Vec<sweep::Point>)>> {
    let mut ways: Vec<(String, Vec<sweep::Point>)> = Vec::new();
    for (row, point) in rows.iter().filter_map(|row| Some((row, point(row)?))) {
        let way = row.param("way").unwrap_or_default();
        match ways.iter_mut().find(|(known, _)| known == way) {
            Some((_, points)) => points.push(point),
            None => ways.push((way.to_owned(), vec![point])),
        }
    }
    ways.iter().any(|(_, points)| points.len() > 1).then_some(ways)
}

/// Draws all samples of a figure, with a strip for each row.
pub fn strips_of(
    results: &[Measurement],
    scenario: &str,
    figure: Figure,
    title: &str,
) -> Vec<Chart> {
    let rows = rows(results, scenario, &["vcpu"]);
    let labels = Labels::of(&rows, PARAMS);
    let mut strips = Vec::new();
    for row in &rows {
        let Some(measured) = row.whole(figure) else { continue };
        let label = labels.cells(row).join(", ");
        strips.push(Strip { label, family: scenario, samples: &measured.samples });
    }
    let svg = strips::svg(&strips, &Unit::from(figure.unit()));
    svg.map(|svg| Chart { title: title.to_owned(), svg }).into_iter().collect()
}
