//! Renderer of the scenario `restore`: which way was faster, what prefetch saved, and the course.

use super::tables::{renderer, said};
use super::values::Switch;
use super::visits_tables::{courses, median_of};
use slat_kvm::scenario::restore;
use slat_lab::cli::param_of;
use slat_lab::numbers::{seconds, thousands};
use slat_lab::record::Measurement;
use slat_lab::renderer::Renderer;
use slat_lab::report::tables::{Row, rows};
use slat_lab::verdict::Verdict;

const NAME: &str = restore::RESULTS.name;

/// Renderer of restores.
pub const RENDERER: Renderer = Renderer {
    verdict,
    plots: |results| {
        let title = "When a restored guest has its pages";
        courses(results, NAME, restore::COURSE, title, "since the restore began")
    },
    ..renderer!(restore::RESULTS)
};

fn verdict(results: &[Measurement]) -> Verdict {
    let rows = rows(results, NAME, &["vcpu"]);
    let prefetched = rows.iter().filter_map(|row| saved(&rows, row)).reduce(|one, other| {
        // The way that needs it most.
        if other.before > one.before { other } else { one }
    });
    let prefetched = prefetched.map(|PrefetchGain { way, before, after, times: [slow, fast] }| {
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
        let (pages, each) = (median_of(row, restore::SLOW)?, median_of(row, restore::SLOW_TIME)?);
        row.params.get("slow").filter(|_| pages > 0.0)?;
        Some(format!(
            "{} pages came more than five times slower than the median, by {} ({} asked).",
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
struct PrefetchGain {
    way: String,
    before: f64,
    after: f64,
    times: [f64; 2],
}

/// Returns what prefetch did, if the row has it and its like without it was measured, too.
fn saved(rows: &[Row<'_>], row: &Row<'_>) -> Option<PrefetchGain> {
    let prefetch = |row: &Row<'_>| param_of::<Switch>(&row.params, "prefetch");
    if prefetch(row)? != Switch::On {
        return None;
    }
    let without = rows.iter().find(|other| {
        prefetch(other) == Some(Switch::Off)
            && other
                .params
                .iter()
                .all(|(name, value)| name == "prefetch" || row.params.get(name) == Some(value))
    })?;
    let before = median_of(without, restore::FAULTS).filter(|faults| *faults > 0.0)?;
    Some(PrefetchGain {
        way: row.param("way")?.to_owned(),
        before,
        after: median_of(row, restore::FAULTS)?,
        times: [median_of(without, restore::WORKING_SET)?, median_of(row, restore::WORKING_SET)?],
    })
}
