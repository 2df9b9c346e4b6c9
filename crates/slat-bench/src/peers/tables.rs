//! Reports of the engine and others: two tables of ratios, one of counts, one of histories.

use super::known::{DIFFERENCES, SLAT};
use super::{CRATE, LINUX, OWNED, PLAIN, Peers};
use crate::contest::{ENGINE, MACHINE};
use slat_lab::numbers::{thousands, three_digits};
use slat_lab::record::Measurement;
use slat_lab::renderer::{Chart, Renderer};
use slat_lab::report::charts::ratios;
use slat_lab::report::tables::thresholds::{self, parameter};
use slat_lab::report::tables::{Labels, Row, rows};
use slat_lab::scenario::Scenario;
use slat_lab::size::Size;
use slat_lab::stats::Summary;
use slat_lab::table::{NOTHING, Table};

/// Name of the thresholds in results.
const ASKED: &str = "peers-asked";
/// Name of the random histories in results.
pub const CHECK: &str = "peers-check";

/// How the report presents operations of the engine and others.
pub const RENDERER: Renderer = Renderer {
    reads: |m| m.scenario == Peers::NAME || m.scenario == ASKED,
    verdict: thresholds::said,
    tables: |results| {
        let first = [counts(results), asked(results)];
        first.into_iter().flatten().chain(ratios_of(results)).collect()
    },
    charts: |results| chart(results).into_iter().collect(),
    ..Renderer::NONE
};

/// How the report presents random histories.
pub const HISTORIES: Renderer = Renderer {
    reads: |m| m.scenario == CHECK,
    tables: |results| histories(results).into_iter().collect(),
    ..Renderer::NONE
};

/// Returns a table with one row for each threshold against others.
fn asked(results: &[Measurement]) -> Option<Table> {
    thresholds::table(
        results,
        ASKED,
        "The engine against each of the others",
        "Times by theirs, so that less is faster. Thresholds are meant for 8 GiB and 64 GiB.",
    )
}

/// Text for an operation that a crate does not have.
const NONE: &str = "none";

/// A column: all entrants of one name, or each row's limit.
#[derive(PartialEq, Eq)]
enum Column<'m> {
    Who(&'m str, &'m str),
    Limit,
}

impl<'m> Column<'m> {
    fn of(m: &'m Measurement) -> Self {
        if m.target == MACHINE { Self::Limit } else { Self::Who(&m.variant, &m.target) }
    }

    fn heading(&self) -> String {
        match self {
            Self::Limit => "the\nmachine".to_owned(),
            Self::Who(name, _) => broken(name),
        }
    }
}

/// Breaks a name into lines of about a figure's width, between its parts.
fn broken(name: &str) -> String {
    const WIDTH: usize = 11;
    let (mut lines, mut rest) = (vec![String::new()], name);
    while !rest.is_empty() {
        let ends = |(at, c): (usize, char)| match c {
            '-' | '_' | ' ' => Some(at + 1),
            '+' | ',' if at > 0 => Some(at),
            _ => None,
        };
        let end = rest.char_indices().find_map(ends).unwrap_or(rest.len());
        let (part, after) = rest.split_at(end);
        rest = after;
        let begins = part.starts_with('+') || part.starts_with(',');
        match lines.last_mut() {
            Some(line) if !begins && line.chars().count() + part.chars().count() <= WIDTH => {
                line.push_str(part);
            }
            _ => lines.push(part.to_owned()),
        }
    }
    lines.retain(|line| !line.is_empty());
    lines.iter().map(|line| line.trim()).collect::<Vec<_>>().join("\n")
}

/// Returns all but the engine, in the order of likely interest: Linux, crates, the machine.
fn columns(results: &[Measurement]) -> Vec<Column<'_>> {
    let mut found = Vec::new();
    for target in [LINUX, CRATE, MACHINE] {
        for m in results.iter().filter(|m| m.scenario == Peers::NAME && m.target == target) {
            if !found.contains(&Column::of(m)) {
                found.push(Column::of(m));
            }
        }
    }
    found
}

/// Returns how many times as long as `base` the measurement took, by round.
fn ratio(m: &Measurement, base: &Measurement) -> Option<Summary> {
    let ratios: Vec<f64> = m.samples.iter().zip(&base.samples).map(|(of, by)| of / by).collect();
    Summary::of(&ratios)
}

fn with_spread(value: &str, summary: &Summary) -> String {
    match summary.count {
        1 => value.to_owned(),
        _ => format!("{value}\u{a0}±{:.0}%", summary.relative_spread() * 100.0),
    }
}

/// Returns rows of operations. Notes may differ within a row.
fn gathered(results: &[Measurement]) -> Vec<Row<'_>> {
    rows(results, "peers", &["note"])
}

/// Returns the label of a row, such as `split, 64g of 2m`. Leaves that are pages are not named.
fn label(row: &Row) -> Option<String> {
    let memory = Size(row.params.get("memory")?.as_u64()?);
    let (operation, backing) = (row.param("operation")?, row.size("backing")?);
    let pages = row.params.get("granule")?.as_u64()?;
    let of = match Size(pages) == backing && !operation.contains("split") {
        true => String::new(),
        false => format!(" of {backing}"),
    };
    Some(format!("{operation}, {memory}{of}"))
}

/// Returns two tables of operations, with the engine's time and the others' in multiples of it:
/// against Linux, and against crates, whose tables are inactive.
fn ratios_of(results: &[Measurement]) -> Vec<Table> {
    let all = gathered(results);
    let (crates, linux): (Vec<_>, Vec<_>) =
        all.iter().partition(|row| row.measurements.iter().any(|m| m.target == CRATE));
    let how = "slat: nanoseconds a page (or look-up), ± half the interquartile range. The others: \
               how many times as long they took, the median of the rounds’ ratios; above 1 the \
               engine is faster. The machine: a plain loop over the same entries, or that stores \
               the same bytes.";
    let mut beside_linux = vec![how.to_owned()];
    if linux.iter().any(|row| row.measurements.iter().any(|m| m.target == LINUX)) {
        beside_linux.push(
            "Linux’s own code, compiled for user space: the software’s work alone. Invalidations, \
             barriers for a CPU’s walker, cache maintenance and locks are counted, not executed, \
             on either side; no other CPU is there. shared: as if its walks of live tables were \
             shared with others, by compare-and-swap; Linux itself does that in faults only. \
             Look-ups: the engine’s are made within one guard."
                .to_owned(),
        );
    }
    let mut beside_crates =
        vec![format!("{how} none: the crate has no such operation; –: it has other levels.")];
    let has = |variant: &str| crates.iter().any(|row| row.variant(variant).is_some());
    if has(OWNED) {
        beside_crates.push(
            "owned: the engine’s live tables with one owner, AddressSpace, in place of inactive \
             ones."
                .to_owned(),
        );
    }
    if has(PLAIN) {
        beside_crates.push(
            "plain walk: of the engine’s tables, by a loop that promises what the crates do: roots \
             of one level, no range of addresses, no rights of tables, no other thread."
                .to_owned(),
        );
    }
    let tables = [
        ratios_among(&linux, results, "The engine beside others", beside_linux),
        ratios_among(&crates, results, "Inactive tables beside crates", beside_crates),
    ];
    tables.into_iter().flatten().collect()
}

/// Returns a table of some rows, with a column for each entrant that took part in one of them.
fn ratios_among(
    rows: &[&Row],
    results: &[Measurement],
    title: &str,
    notes: Vec<String>,
) -> Option<Table> {
    let takes_part = |column: &Column| {
        rows.iter().any(|row| row.measurements.iter().any(|m| Column::of(m) == *column))
    };
    let who: Vec<_> = columns(results).into_iter().filter(takes_part).collect();
    let mut lines = Vec::new();
    for row in rows {
        for base in row.measurements.iter().filter(|m| m.target == ENGINE) {
            lines.extend(line(row, base, &who));
        }
    }
    let mut table = Table::new(title, 1, &format!("operation|{SLAT},\nns"), lines);
    table.columns.extend(who.iter().map(Column::heading));
    Table { common: common(rows), notes, ..table }.some()
}

/// Returns a line: one variant of the engine, and the others in multiples of it.
fn line(row: &Row, base: &Measurement, who: &[Column]) -> Option<Vec<String>> {
    let summary = Summary::of(&base.samples)?;
    let pieces = row.params.get("pieces")?.as_u64()? as f64;
    let way = base.variant.strip_prefix(SLAT).unwrap_or_default();
    let time = three_digits(summary.median / pieces * 1e9);
    let mut line = vec![format!("{}{way}", label(row)?), with_spread(&time, &summary)];
    for column in who {
        let found = row.measurements.iter().find(|m| Column::of(m) == *column);
        let by = found.and_then(|m| ratio(m, base));
        line.push(match (by, column) {
            (Some(by), Column::Limit) => {
                let name = found.map_or("", |m| m.variant.split('-').next().unwrap_or_default());
                format!("{}\u{a0}{name}", three_digits(by.median))
            }
            (Some(by), _) => with_spread(&three_digits(by.median), &by),
            (None, Column::Who(name, CRATE)) if lacks(row, name) => NONE.to_owned(),
            (None, _) => NOTHING.to_owned(),
        });
    }
    Some(line)
}

/// Returns whether the crate lacks the operation, rather than having another number of levels.
fn lacks(row: &Row, name: &str) -> bool {
    row.param("lack").unwrap_or_default().split(',').any(|lacking| lacking == name)
}

/// Returns the parameters that all rows share. Only rows with Linux have all of them.
fn common(all: &[&Row]) -> String {
    let said = ["granule", "chunk_size", "fwb", "caches"];
    let beside_linux = all.iter().filter(|row| row.params.contains_key("fwb")).map(|row| {
        let mut params = row.params.clone();
        params.retain(|name, _| said.contains(&name.as_str()));
        Row { params, measurements: Vec::new() }
    });
    Labels::of(&beside_linux.collect::<Vec<_>>(), crate::params::PARAMS).common
}

/// Returns a table of Linux's counts and the engine's.
fn counts(results: &[Measurement]) -> Option<Table> {
    let all = gathered(results);
    let mut lines = Vec::new();
    let mut reasons: Vec<&str> = Vec::new();
    for row in &all {
        let beside = |m: &Measurement| {
            let alone = m.variant.strip_suffix(", shared").and_then(|name| row.variant(name));
            alone.is_some_and(|alone| alone.counts == m.counts)
        };
        // Most shared walks do the same as exclusive ones: one row is enough.
        let linux = row.measurements.iter().filter(|m| m.target == LINUX);
        for m in linux.filter(|m| !beside(m)) {
            let of = |m: &Measurement, name: &str| {
                m.counts
                    .get(name)
                    .map_or_else(|| NOTHING.to_owned(), |count| thousands(*count as i64))
            };
            let engine = |name| row.variant(SLAT).map_or_else(String::new, |m| of(m, name));
            let differing: u64 =
                DIFFERENCES.iter().filter_map(|allowed| m.counts.get(allowed.name)).sum();
            for allowed in &DIFFERENCES {
                if m.counts.contains_key(allowed.name) && !reasons.contains(&allowed.reason) {
                    reasons.push(allowed.reason);
                }
            }
            lines.push(vec![
                label(row).unwrap_or_default(),
                m.variant.clone(),
                of(m, "visits"),
                of(m, "callbacks"),
                of(m, "tlbis"),
                of(m, "barriers"),
                of(m, "pages"),
                engine("entries_read"),
                engine("invalidations"),
                of(m, "leaves_compared"),
                if differing == 0 { "0".to_owned() } else { thousands(differing as i64) },
            ]);
        }
    }
    let mut notes = vec![
        "visits: entries that Linux’s walk looked at; callbacks: calls of its visitor on the way \
         down. TLBIs: requests of invalidation, whose own barriers are not counted. tables: pages \
         allocated. Then the entries that the engine read, and its invalidations. leaves: compared \
         with the engine’s, descriptor by descriptor; differ: of those, the ones that differ as \
         they may."
            .to_owned(),
    ];
    notes.extend(reasons.iter().map(|reason| format!("They may: {reason}.")));
    let columns = "operation|whose|visits|callbacks|TLBIs|barriers|tables|slat: entries|TLBIs|\
                   leaves|differ";
    Table { notes, ..Table::new("What Linux’s walks did", 2, columns, lines) }.some()
}

/// Returns a table of random histories.
fn histories(results: &[Measurement]) -> Option<Table> {
    let lines: Vec<Vec<String>> = results
        .iter()
        .filter(|m| m.scenario == CHECK)
        .map(|m| {
            let count = |name: &str| thousands(m.counts.get(name).copied().unwrap_or(0) as i64);
            vec![
                m.variant.clone(),
                parameter(m, "linux").to_owned(),
                parameter(m, "walks").to_owned(),
                count("histories"),
                count("operations"),
                count("leaves_compared"),
            ]
        })
        .collect();
    let title = "Random histories through Linux’s tables and the engine’s: no difference";
    let columns = "tree|version|walks|histories|operations|leaves compared";
    Table::new(title, 3, columns, lines)
        .noting(
            "After each operation all leaves of both were compared. Two things may differ: Linux \
             makes pages young as it splits them off an old block, and protects the pages between \
             two that are cleared.",
        )
        .some()
}

/// Returns a chart of the times in multiples of the engine's, with a row for each operation.
fn chart(results: &[Measurement]) -> Option<Chart> {
    let rows = gathered(results);
    let mut names: Vec<&str> = Vec::new();
    let mut strips: Vec<ratios::Row> = Vec::new();
    for row in &rows {
        let Some(base) = row.variant(SLAT) else { continue };
        let others = row.measurements.iter().filter(|m| m.target != ENGINE);
        let mut dots = Vec::new();
        for m in others {
            // All limits are one competitor, although they run different loops.
            let name = if m.target == MACHINE { "the machine" } else { &m.variant };
            let place = names.iter().position(|known| *known == name).unwrap_or(names.len());
            if place == names.len() {
                names.push(name);
            }
            dots.extend(ratio(m, base).map(|by| (place, by.median)));
        }
        strips.push((label(row)?, dots));
    }
    let axis = "times as long as the engine; right of 1, the engine is faster";
    ratios::chart("The engine beside others", axis, &names, &strips)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use slat_lab::unit::Unit;

    fn measurement(variant: &str, target: &str, operation: &str, samples: &[f64]) -> Measurement {
        let params = json!({
            "operation": operation, "memory": 8u64 << 30, "backing": "2m", "granule": 4096,
            "pieces": 1_000_000, "chunk_size": 1 << 30, "fwb": true, "caches": "warm",
        });
        let serde_json::Value::Object(params) = params else { unreachable!() };
        Measurement {
            counts: [("visits".to_owned(), 524_800), ("leaves_made_young".to_owned(), 3)].into(),
            ..Measurement::new("peers", target, variant, params, Unit::SECONDS, samples.to_vec())
        }
    }

    #[test]
    fn a_ratio_is_of_the_same_round_and_limits_share_a_column() {
        let all = [
            measurement(SLAT, "engine", "split", &[0.001, 0.002, 0.004]),
            measurement("linux-6.12", "linux-source", "split", &[0.010, 0.020, 0.040]),
            measurement("fill-plain", "machine", "split", &[0.001, 0.001, 0.001]),
            measurement(SLAT, "engine", "age", &[0.001]),
            measurement("cas", "machine", "age", &[0.002]),
        ];
        let [table] = &ratios_of(&all)[..] else { panic!("one table") };
        assert_eq!(table.columns[1..], ["slat,\nns", "linux-6.12", "the\nmachine"]);
        assert_eq!(table.rows[0][1..3], ["2.00\u{a0}±63%", "10.0\u{a0}±0%"]);
        assert_eq!(table.rows[1][2..], ["–", "2.00\u{a0}cas"]);
        assert!(table.common.contains("caches warm"), "{}", table.common);
    }

    #[test]
    fn the_table_of_crates_omits_crates_that_take_no_part() {
        let mut beside_crate = [
            measurement(SLAT, "engine", "inactive: unmap", &[0.001]),
            measurement("x86_64", "crate", "inactive: unmap", &[0.002]),
            measurement(SLAT, "engine", "inactive: split", &[0.001]),
            measurement("other", "crate", "inactive: split", &[0.002]),
        ];
        for split in &mut beside_crate[2..] {
            split.params.insert("lack".to_owned(), json!("x86_64"));
        }
        let all = [
            measurement(SLAT, "engine", "split", &[0.001]),
            measurement("linux-6.12", "linux-source", "split", &[0.010]),
        ];
        let all: Vec<_> = all.into_iter().chain(beside_crate).collect();
        let [linux, crates] = &ratios_of(&all)[..] else { panic!("two tables") };
        assert_eq!(linux.columns[2..], ["linux-6.12"]);
        assert_eq!((linux.rows.len(), linux.notes.len()), (1, 2));
        assert_eq!(crates.columns[2..], ["x86_64", "other"]);
        assert_eq!(crates.rows[0][2..], ["2.00", NOTHING]);
        assert_eq!(crates.rows[1][2..], [NONE, "2.00"]);
    }

    #[test]
    fn long_names_are_broken_where_their_parts_end() {
        assert_eq!(broken("linux-6.12"), "linux-6.12");
        assert_eq!(broken("page_table_multiarch"), "page_table_\nmultiarch");
        assert_eq!(broken("linux-6.12+skip-level3"), "linux-6.12\n+skip-\nlevel3");
        assert_eq!(broken("aarch64-paging"), "aarch64-\npaging");
    }

    #[test]
    fn counts_stand_with_the_reasons_of_differences() {
        let all = [
            measurement(SLAT, "engine", "split", &[0.001]),
            measurement("linux-6.12", "linux-source", "split", &[0.010]),
        ];
        let table = counts(&all).unwrap();
        assert_eq!(table.rows.len(), 1);
        assert_eq!((&*table.rows[0][2], table.rows[0].last().unwrap().as_str()), ("524,800", "3"));
        assert!(table.notes[1].contains("makes all pages of a block young"));
        assert!(counts(&all[..1]).is_none() && histories(&all).is_none());
    }
}
