//! Reports of splits by the engine: the times of each walk, and the entries that each reads.

use super::limits::{self, Limit, limit_of};
use super::{Split, SplitMoment, What};
use crate::format::TableFormat;
use crate::params::PARAMS;
use crate::published::{self, SKIP_LEVELS};
use slat_lab::cli::param_of;
use slat_lab::numbers::{change, thousands, three_digits, with_spread};
use slat_lab::record::Measurement;
use slat_lab::renderer::{Chart, Renderer};
use slat_lab::report::charts::strips::{self, Strip};
use slat_lab::report::tables::{Labels, Row, rows};
use slat_lab::scenario::Scenario;
use slat_lab::size::Size;
use slat_lab::stats::{Summary, median};
use slat_lab::table::{NOTHING, Table};
use slat_lab::unit::Unit;
use slat_lab::verdict::Verdict;

const EVERY_ENTRY: &str = "every-entry";
const BOUNDED: &str = "bounded";
const WALKS: [&str; 3] = [EVERY_ENTRY, BOUNDED, "batched"];

/// How the report presents splits, and the limits that took turns with them.
pub const RENDERER: Renderer = Renderer {
    reads: |m| m.scenario == Split::NAME || m.scenario == limits::SCENARIO,
    verdict: |results| Verdict::of_lines(WALKS[1..].iter().filter_map(|walk| said(results, walk))),
    tables: |results| {
        let all = [times(results), entries(results), limits::table(results)];
        all.into_iter().flatten().collect()
    },
    charts,
    draws_samples: true,
    meaning: &[
        "The engine's tables are real, and no CPU walks them: the invalidations are counted, not \
         waited for. Times are the software's own cost.",
        "The published figures are shown beside ours, not as a target that another machine could \
         meet or miss.",
    ],
    ..Renderer::NONE
};

/// Returns the time of a walk as a part of that of the walk that visits every entry.
fn said(results: &[Measurement], walk: &str) -> Option<String> {
    let rows = rows(results, Split::NAME, &[]);
    let ratio = |row: &Row| {
        let time = |walk: &str| median(&row.variant(walk)?.samples);
        Some(time(walk)? / time(EVERY_ENTRY)?)
    };
    let all: Vec<f64> = rows.iter().filter_map(ratio).collect();
    let least = all.iter().copied().reduce(f64::min)?;
    let most = all.iter().copied().reduce(f64::max)?;
    let (least, most) = (three_digits(least), three_digits(most));
    let range = if least == most { least } else { format!("{least} to {most}") };
    Some(format!(
        "Splitting with a {walk} walk takes {range} × the time of a walk that visits every entry."
    ))
}

/// Returns the published change of `bounded` against `every-entry`, for rows for which it was
/// measured.
fn published(row: &Row) -> Option<&'static str> {
    let granule = row.params.get("granule").and_then(|g| g.as_u64());
    let same = param_of(&row.params, "when") == Some(SplitMoment::Enable)
        && param_of(&row.params, "what") == Some(What::Split)
        && granule.is_none_or(|granule| granule == 4096)
        && [None, Some(TableFormat::Arm64K4)].contains(&param_of(&row.params, "format"))
        && row.size("target_size").is_none_or(|target| target == Size(4096));
    let backing = row.size("backing").filter(|_| same)?;
    published::SPLIT_CHANGES.iter().find(|(of, _)| *of == backing).map(|(_, change)| *change)
}

/// Returns the walks that were measured.
fn walks(rows: &[Row]) -> Vec<&'static str> {
    let measured = |walk: &&str| rows.iter().any(|row| row.variant(walk).is_some());
    WALKS.into_iter().filter(measured).collect()
}

/// Returns a table with a row for each split, with the time of each walk and what it saves.
fn times(results: &[Measurement]) -> Option<Table> {
    let rows = rows(results, Split::NAME, &[]);
    if rows.is_empty() {
        return None;
    }
    let labels = Labels::of(&rows, PARAMS);
    let walks = walks(&rows);
    let compared = walks.contains(&EVERY_ENTRY);
    let published_here = rows.iter().any(|row| published(row).is_some());
    let mut columns = Vec::new();
    for walk in &walks {
        columns.push(*walk);
        columns.extend((*walk != EVERY_ENTRY && compared).then_some("change"));
        columns.extend((*walk == BOUNDED && published_here).then_some("published"));
    }
    let best = walks.last().copied().unwrap_or_default();
    let limit = format!("{best} ÷ limit");
    columns.push(&limit);

    let cells = rows.iter().map(|row| {
        let mut cells = labels.cells(row);
        let middle = |walk| row.variant(walk).and_then(|m| median(&m.samples));
        for walk in &walks {
            let summary = row.variant(walk).and_then(|m| Summary::of(&m.samples));
            cells.push(summary.map_or_else(|| NOTHING.to_owned(), |s| with_spread(&s)));
            if *walk != EVERY_ENTRY && compared {
                let base = middle(EVERY_ENTRY);
                let saved = middle(walk).zip(base).map(|(value, base)| change(value, base));
                cells.push(saved.unwrap_or_else(|| NOTHING.to_owned()));
            }
            if *walk == BOUNDED && published_here {
                cells.push(published(row).unwrap_or_default().to_owned());
            }
        }
        let ratio = middle(best).and_then(|time| against_limit(results, row, time));
        cells.push(ratio.unwrap_or_else(|| NOTHING.to_owned()));
        cells
    });
    let mut notes = vec![
        "± is half the interquartile range. “change” is against every-entry (Linux's way: every \
         entry is visited). bounded leaves out the last level; batched also builds whole tables \
         at a time, visits none that it has just built, and merges invalidations. “limit” is the \
         machine's own speed for the part that cannot be avoided, from the last table."
            .to_owned(),
    ];
    if published_here {
        notes.push(format!("published: bounded in {SKIP_LEVELS}."));
    }
    let title = "Splitting a guest's tables in the engine";
    Some(Table { notes, ..labels.table(title, 0, columns, cells) })
}

/// Returns the time in multiples of the limit's, and the name of the limit.
fn against_limit(results: &[Measurement], row: &Row, time: f64) -> Option<String> {
    let limit = Limit::that_bounds(row)?;
    if limit == Limit::Nothing {
        let memory = row.params.get("memory")?.as_u64()? as f64;
        let granule = row.params.get("granule").and_then(|g| g.as_u64()).unwrap_or(4096) as f64;
        return Some(format!("{} ns a page", three_digits(time / (memory / granule) * 1e9)));
    }
    let least = |variant: &&str| median(&limit_of(results, variant, &row.params)?.samples);
    let least: f64 = limit.variants().iter().map(least).sum::<Option<f64>>()?;
    Some(format!("{} × {}", three_digits(time / least), limit.name()))
}

/// Returns a table of entries read for each GiB of the guest: exact, and equal on every machine.
fn entries(results: &[Measurement]) -> Option<Table> {
    let rows = rows(results, Split::NAME, &[]);
    let walks = walks(&rows);
    let read = |row: &Row, walk: &str| {
        let read = *row.variant(walk)?.counts.get("entries_read")?;
        let memory = row.params.get("memory")?.as_u64().filter(|memory| *memory > 0)?;
        Some((read, read as f64 / (memory as f64 / (1u64 << 30) as f64)))
    };
    if !rows.iter().any(|row| walks.iter().any(|walk| read(row, walk).is_some())) {
        return None;
    }
    let labels = Labels::of(&rows, PARAMS);
    let timed = walks.contains(&EVERY_ENTRY);
    let each = timed.then_some("every-entry, ns an entry");
    let columns: Vec<&str> = walks.iter().copied().chain(each).collect();
    let cells = rows.iter().map(|row| {
        let mut cells = labels.cells(row);
        for walk in &walks {
            let per_gib = read(row, walk).map(|(_, per_gib)| thousands(per_gib.round() as i64));
            cells.push(per_gib.unwrap_or_else(|| NOTHING.to_owned()));
        }
        if timed {
            let time = row.variant(EVERY_ENTRY).and_then(|m| median(&m.samples));
            let ptes = read(row, EVERY_ENTRY).map(|(ptes, _)| ptes).filter(|ptes| *ptes > 0);
            let cost = time.zip(ptes).map(|(time, ptes)| three_digits(time / ptes as f64 * 1e9));
            cells.push(cost.unwrap_or_else(|| NOTHING.to_owned()));
        }
        cells
    });
    let table = labels.table("Entries read for each GiB of the guest", 0, columns, cells);
    Some(table.noting("Counts are exact and the same on every machine."))
}

/// Returns a chart for each `when` and `what`: every sample of every split is a dot on a
/// logarithmic scale.
fn charts(results: &[Measurement]) -> Vec<Chart> {
    let rows = rows(results, Split::NAME, &[]);
    let mut groups: Vec<(String, Vec<Strip>)> = Vec::new();
    for row in &rows {
        let name = |key: &str| row.param(key).unwrap_or("?").to_owned();
        let title = match (param_of(&row.params, "when"), param_of(&row.params, "what")) {
            (Some(SplitMoment::Enable), Some(What::Split)) => "Split all at once: the split alone",
            (Some(SplitMoment::Enable), Some(What::Call)) => "Split all at once: the whole call",
            (Some(SplitMoment::Clear), Some(What::Split)) => "64 pages at a time: the split alone",
            (Some(SplitMoment::Clear), Some(What::Call)) => "64 pages at a time: the whole call",
            _ => "Splits",
        };
        let strips = row.measurements.iter().map(|m| Strip {
            label: format!("{} {}", name("backing"), m.variant),
            family: &m.variant,
            samples: &m.samples,
        });
        match groups.iter_mut().find(|(known, _)| known == title) {
            Some((_, known)) => known.extend(strips),
            None => groups.push((title.to_owned(), strips.collect())),
        }
    }
    let chart = |(title, strips): (String, Vec<Strip>)| {
        Some(Chart { svg: strips::svg(&strips, &Unit::SECONDS)?, title })
    };
    groups.into_iter().filter_map(chart).collect()
}
