//! Renderer of the scenario `restore`: which way was faster, what prefetch saved, and the course.

use super::tables::{MEANING, is, of, said};
use slat_kvm::scenario::restore;
use slat_lab::numbers::{seconds, thousands};
use slat_lab::record::Measurement;
use slat_lab::renderer::{Chart, Renderer};
use slat_lab::report::charts::sweep;
use slat_lab::report::tables::{Labels, Row, rows};
use slat_lab::stats::median;
use slat_lab::verdict::Verdict;

const NAME: &str = restore::RESULTS.name;

/// Renderer of restores.
pub const RENDERER: Renderer = Renderer {
    reads: |m| is(m, NAME),
    verdict,
    tables: |results| of(results, &restore::RESULTS),
    plots,
    meaning: MEANING,
    ..Renderer::NONE
};

fn figure(row: &Row<'_>, figure: slat_kvm::figure::Figure) -> Option<f64> {
    median(&row.whole(figure)?.samples)
}

fn verdict(results: &[Measurement]) -> Verdict {
    let rows = rows(results, NAME, &["vcpu"]);
    let prefetched = rows.iter().filter_map(|row| saved(&rows, row)).reduce(|one, other| {
        // The way that needs it most.
        if other.before > one.before { other } else { one }
    });
    let prefetched = prefetched.map(|Saved { way, before, after, times: [slow, fast] }| {
        format!(
            "Prefetch of the recorded order removes {:.1} % of the host's faults (way {way}: {} to \
             {}), and the working set is there after {} in place of {}.",
            (1.0 - after / before) * 100.0,
            thousands(before as i64),
            thousands(after as i64),
            seconds(fast),
            seconds(slow),
        )
    });
    let slow = rows.iter().find_map(|row| {
        let (pages, each) = (figure(row, restore::SLOW)?, figure(row, restore::SLOW_TIME)?);
        row.params.get("slow").filter(|_| pages > 0.0)?;
        Some(format!(
            "{} pages came more than five times slower than the median, {} each ({} asked).",
            thousands(pages as i64),
            seconds(each),
            row.param("slow").unwrap_or_default(),
        ))
    });
    let mut all = said(results, &restore::RESULTS);
    all.says.extend(prefetched.into_iter().chain(slow));
    all
}

/// What prefetch did for a way.
struct Saved {
    way: String,
    before: f64,
    after: f64,
    times: [f64; 2],
}

/// Returns what prefetch did, if the row has it and its like without it was measured, too.
fn saved(rows: &[Row<'_>], row: &Row<'_>) -> Option<Saved> {
    if row.param("prefetch")? != "on" {
        return None;
    }
    let without = rows.iter().find(|other| {
        other.param("prefetch") == Some("off")
            && other
                .params
                .iter()
                .all(|(name, value)| name == "prefetch" || row.params.get(name) == Some(value))
    })?;
    let before = figure(without, restore::FAULTS).filter(|faults| *faults > 0.0)?;
    Some(Saved {
        way: row.param("way")?.to_owned(),
        before,
        after: figure(row, restore::FAULTS)?,
        times: [figure(without, restore::WORKING_SET)?, figure(row, restore::WORKING_SET)?],
    })
}

/// Draws when the accesses of each way were over.
fn plots(results: &[Measurement]) -> Vec<Chart> {
    let rows = rows(results, NAME, &["vcpu"]);
    let labels = Labels::of(&rows);
    let lines: Vec<_> = rows
        .iter()
        .filter_map(|row| {
            let samples = &row.whole(restore::COURSE)?.samples;
            let parts = samples.len().max(1) as f64;
            let points = (1..).zip(samples).map(|(part, &y)| sweep::Point {
                x: f64::from(part) * 100.0 / parts,
                y,
                reached: true,
            });
            Some((labels.cells(row).join(", "), points.collect()))
        })
        .collect();
    let axes = ["accesses of the guest, in per cent", "since the restore began"];
    sweep::chart("When a restored guest has its pages", axes, &lines).into_iter().collect()
}
