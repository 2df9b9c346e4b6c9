//! Splitting in the engine: the times of each walk, and the slots that each reads.

use super::limit::{Limit, limit_of};
use super::{Labels, Row, rows};
use crate::numbers::{change, thousands, three_digits, with_spread};
use crate::record::Measurement;
use crate::stats::{Summary, median};
use crate::table::{NOTHING, Table};

const EVERY_ENTRY: &str = "every-entry";
const BOUNDED: &str = "bounded";
const WALKS: [&str; 3] = [EVERY_ENTRY, BOUNDED, "batched"];

/// What the level-3 skip saved its author, and where that was published.
pub const PUBLISHED_IN: &str = "“Optimize S2 page splitting” (RFC, May 2026): a 1 GiB guest on a software model, \
     all split as logging is enabled";

/// The published change of `bounded` against `every-entry`, for the rows it was measured for.
pub fn published(row: &Row) -> Option<&'static str> {
    let granule = row.params.get("granule").and_then(|g| g.as_u64());
    let same = row.param("when") == Some("enable")
        && row.param("what") == Some("split")
        && granule.is_none_or(|granule| granule == 4096)
        && row.param("format").is_none_or(|format| format == "arm64-4k")
        && row.param("target_size").is_none_or(|target| target == "4k");
    match row.param("backing") {
        Some("4k") if same => Some("−97.33 %"),
        Some("2m") if same => Some("−19.82 %"),
        Some("1g") if same => Some("−20.65 %"),
        _ => None,
    }
}

/// The walks that were measured at all.
fn walks(rows: &[Row]) -> Vec<&'static str> {
    let measured = |walk: &&str| rows.iter().any(|row| row.variant(walk).is_some());
    WALKS.into_iter().filter(measured).collect()
}

/// One row for each thing to split; for each walk its time and what that saves.
pub fn times(results: &[Measurement]) -> Option<Table> {
    let rows = rows(results, "split", &[]);
    if rows.is_empty() {
        return None;
    }
    let labels = Labels::of(&rows);
    let walks = walks(&rows);
    let compared = walks.contains(&EVERY_ENTRY);
    let published_here = rows.iter().any(|row| published(row).is_some());
    let mut columns: Vec<String> = labels.headings().collect();
    let label_count = columns.len();
    for walk in &walks {
        columns.push((*walk).to_owned());
        if *walk != EVERY_ENTRY && compared {
            columns.push("change".to_owned());
        }
        if *walk == BOUNDED && published_here {
            columns.push("published".to_owned());
        }
    }
    let best = walks.last().copied().unwrap_or_default();
    columns.push(format!("{best} ÷ limit"));

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
        notes.push(format!("published: bounded in {PUBLISHED_IN}."));
    }
    Some(Table {
        title: "Splitting a guest's tables in the engine".to_owned(),
        common: labels.common.clone(),
        rows: cells.collect(),
        columns,
        labels: label_count,
        notes,
    })
}

/// How many times the machine's own speed for the work that cannot be avoided, and which speed.
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

/// Slots read for each GiB of the guest: exact, and the same on every machine.
pub fn slots(results: &[Measurement]) -> Option<Table> {
    let rows = rows(results, "split", &[]);
    let walks = walks(&rows);
    let read = |row: &Row, walk: &str| {
        let read = *row.variant(walk)?.counts.get("slots_read")?;
        let memory = row.params.get("memory")?.as_u64().filter(|memory| *memory > 0)?;
        Some((read, read as f64 / (memory as f64 / (1u64 << 30) as f64)))
    };
    if !rows.iter().any(|row| walks.iter().any(|walk| read(row, walk).is_some())) {
        return None;
    }
    let labels = Labels::of(&rows);
    let mut columns: Vec<String> = labels.headings().collect();
    let label_count = columns.len();
    columns.extend(walks.iter().map(|walk| (*walk).to_owned()));
    let timed = walks.contains(&EVERY_ENTRY);
    if timed {
        columns.push("every-entry, ns a slot".to_owned());
    }
    let cells = rows.iter().map(|row| {
        let mut cells = labels.cells(row);
        for walk in &walks {
            let per_gib = read(row, walk).map(|(_, per_gib)| thousands(per_gib.round() as i64));
            cells.push(per_gib.unwrap_or_else(|| NOTHING.to_owned()));
        }
        if timed {
            let time = row.variant(EVERY_ENTRY).and_then(|m| median(&m.samples));
            let slots = read(row, EVERY_ENTRY).map(|(slots, _)| slots).filter(|slots| *slots > 0);
            let cost = time.zip(slots).map(|(time, slots)| three_digits(time / slots as f64 * 1e9));
            cells.push(cost.unwrap_or_else(|| NOTHING.to_owned()));
        }
        cells
    });
    Some(Table {
        title: "Slots read for each GiB of the guest".to_owned(),
        common: labels.common.clone(),
        rows: cells.collect(),
        columns,
        labels: label_count,
        notes: vec!["Counts are exact and the same on every machine.".to_owned()],
    })
}
