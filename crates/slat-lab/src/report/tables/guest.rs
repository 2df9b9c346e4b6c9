//! What guests of the engine's pay: thresholds and ratios first, then a table for each scenario.

use super::engine::{parameter, verdict};
use super::{Labels, Row, rows};
use crate::numbers::{seconds, thousands, three_digits, with_spread, with_wide_spread};
use crate::record::Measurement;
use crate::stats::Summary;
use crate::table::{NOTHING, Table};

/// One row for each ratio.
pub fn asked(results: &[Measurement]) -> Option<Table> {
    let rows: Vec<Vec<String>> = results
        .iter()
        .filter(|m| m.scenario == "guest-asked")
        .filter_map(|m| {
            let summary = Summary::of(&m.samples)?;
            let asked = m.params.get("asked").and_then(|asked| asked.as_f64());
            Some(vec![
                m.variant.clone(),
                parameter(m, "variants").to_owned(),
                parameter(m, "against").to_owned(),
                asked.map_or_else(|| NOTHING.to_owned(), |asked| format!("{} ×", digits(asked))),
                format!("{} ×", digits(summary.median)),
                format!("{}–{}", digits(summary.lower_quartile), digits(summary.upper_quartile)),
                asked.map_or("", |asked| verdict(&summary, asked)).to_owned(),
            ])
        })
        .collect();
    (!rows.is_empty()).then(|| Table {
        title: "The engine's guests against their baselines".to_owned(),
        common: String::new(),
        columns: ["what", "of", "against", "at most", "reached", "half of rounds", ""]
            .map(str::to_owned)
            .into(),
        labels: 3,
        rows,
        notes: vec![
            "Ratios of each round, in which all took turns: their median, and where half of them lie."
                .to_owned(),
        ],
    })
}

/// Ratios can be far below one.
fn digits(value: f64) -> String {
    match value.abs() {
        0.0 => three_digits(value),
        ..0.0001 => format!("{value:.1e}"),
        ..0.01 => format!("{value:.5}"),
        _ => three_digits(value),
    }
}

/// A count that a table shows: of which figure's measurement, its name, its heading.
type Count = (&'static str, &'static str, &'static str);

struct Scenario {
    name: &'static str,
    title: &'static str,
    counts: &'static [Count],
    note: &'static str,
}

/// The scenarios, in the order of the report.
const SCENARIOS: [Scenario; 10] = [
    Scenario {
        name: "execute",
        title: "Executing from huge pages that may not be executed",
        counts: &[("execute", "faults", "faults, execute"), ("read", "faults", "read")],
        note: "Each phase goes over all pages. zap unmaps a huge page for a fetch, and is the baseline; \
               split splits it, and frees the new table's pages together; split-page frees one page a \
               fault; in allowed huge pages may be executed: what the accesses alone take. published: \
               “KVM: Split huge pages mapped by the TDP MMU on fault” (v2, October 2022), 96 vCPUs \
               on 1g pages under KVM, another machine.",
    },
    Scenario {
        name: "guest-log",
        title: "Dirty logging while the vCPUs write on",
        counts: &[("stall", "faults", "faults"), ("stall", "waits_for_ring", "ring full")],
        note: "stall: how long a vCPU waited in each second, of half of the guests: what its faults \
               took, and what they waited for. in faults: without locks, full rings and the way there, \
               as the guest counts. p99, longest: of one such wait. Calls: enable, read, clear, disable (nobody writes then). For rings, \
               read and clear are all harvests and resets of a round. Where threads are more than CPUs, \
               waits and calls include turns of others, and a lock costs far more than in a kernel. Counts are of one guest. All pages were compared \
               with the copy that the log kept: none was lost.",
    },
    Scenario {
        name: "guest-log-density",
        title: "Clearing sparse logs",
        counts: &[
            ("clear", "protected", "pages protected"),
            ("clear", "faults", "write faults after"),
        ],
        note: "exact protects the pages that the bitmap names; hull all between the first and the last of each \
               word, Linux's way. Then the guest writes all pages.",
    },
    Scenario {
        name: "guest-log-parallel",
        title: "Clearing with two threads",
        counts: &[("clear", "pages", "pages")],
        note: "Time of the thread that worked longest; each has half of the pages. cas: a compare-and-swap \
               of as many slots.",
    },
    Scenario {
        name: "guest-age",
        title: "Looking for used pages beside faults",
        counts: &[
            ("p50", "faults", "faults"),
            ("p50", "pages_asked_again", "asked again"),
            ("p50", "pages_unanswered", "unanswered"),
        ],
        note: "The number is that of the pages of a call; locked holds a lock during each, which faults take \
               for reading. p50, p99, longest: of a fault beside the scan; the kernel takes the CPU away \
               now and then, and the longest shows it.",
    },
    Scenario {
        name: "cache-toggle",
        title: "Switching the caches of an Arm guest's vCPUs on",
        counts: &[
            ("switches, all vCPUs", "bytes-switching", "bytes, switching"),
            ("switches, all vCPUs", "bytes-touching", "touching"),
            ("switches, all vCPUs", "flushes", "flushes"),
        ],
        note: "vCPU 0 touches an image past the caches, switches on, uses all memory; each of the others \
               touches a few pages past them and switches on. Touching: maintained as pages were \
               mapped for vCPUs past their caches. every is Linux's way, vcpu0 the proposal, \
               first its reviewer's; those two lose data of guests that rely on the hypervisor. published: \
               “Optimize cache flush by only flushing on vcpu0” (RFC, April 2025), 64 vCPUs, 128 GiB: \
               33 s of boot, 5 s with the proposal.",
    },
    Scenario {
        name: "guest-reclaim",
        title: "Guests with more memory than there is",
        counts: &[
            ("time", "refaults", "refaults"),
            ("time", "given_up_clean", "clean"),
            ("time", "kept", "kept"),
            ("time", "rescued", "rescued"),
        ],
        note: "After all pages were written once. Each policy gives up pages of a guest that uses them in the \
               same order; every read was checked. locked and clock hold a lock for each look at accessed bits \
               and each unmapping, which faults take for reading. reclaim a page: all of reclaim, by the pages \
               given up; lock to write: parts of that (lock: waiting for it, which is in the parts that follow \
               as well). p50, p99: of a fault, swap included. clean: swap had a copy already. kept: next to go, \
               and had been used. rescued: used between that look and the unmapping.",
    },
    Scenario {
        name: "guest-idle",
        title: "Idle pages of a guest",
        counts: &[("idle", "pages", "pages")],
        note: "All pages were written once; nothing has been taken yet. idle: pages that so many walks in a row, or \
               more, found unused, of the guest's pages. waking a walk: how many of such pages were used again \
               between two walks, on average. time: of a walk.",
    },
    Scenario {
        name: "guest-idle-taken",
        title: "What was idle, taken from the guest",
        counts: &[("taken", "taken", "pages"), ("came back a walk", "returned", "came back, all")],
        note: "at most: so many pages may come back between two walks, of the guest's pages; taken: what the walks \
               said could be taken for that. Then the guest went on, with so much less memory. came back: \
               the median, and half of the intervals.",
    },
    Scenario {
        name: "guest-populate",
        title: "First touches",
        counts: &[
            ("all", "faults", "faults"),
            ("all", "faults_spurious", "spurious"),
            ("all", "faults_retry", "retries"),
        ],
        note: "Each fault maps a page or block. The locks are held during each fault: shared for reading, \
               as Linux does. They are spun on: where vCPUs are more than CPUs that nobody else uses, \
               who holds one may have to wait for a turn, which a kernel avoids, and the rows with a \
               lock say nothing.",
    },
];

/// Figures of “execute” that were published, for the rows that compare.
const PUBLISHED: [(&str, &str, &str); 2] =
    [("published, before", "2.75 s", "2.90 s"), ("published, after", "2.73 s", "112 ms")];

/// A table for each scenario that was measured: a row for each variant, a column for each figure.
pub fn figures(results: &[Measurement]) -> Vec<Table> {
    SCENARIOS.iter().filter_map(|scenario| table(results, scenario)).collect()
}

fn table(results: &[Measurement], scenario: &Scenario) -> Option<Table> {
    let rows = rows(results, scenario.name, &["figure"]);
    if rows.is_empty() {
        return None;
    }
    let labels = Labels::of(&rows);
    let mut figures: Vec<&str> = Vec::new();
    for m in rows.iter().flat_map(|row| &row.measurements) {
        let figure = parameter(m, "figure");
        // Nobody waits for a median; it is in results.json.
        if scenario.name == "guest-log" && figure == "p50" {
            continue;
        }
        if !figures.contains(&figure) {
            figures.push(figure);
        }
    }
    let mut columns: Vec<String> = labels.headings().collect();
    columns.push("way".to_owned());
    let label_count = columns.len();
    columns.extend(figures.iter().map(|figure| heading(&rows, figure)));
    columns.extend(scenario.counts.iter().map(|(_, _, heading)| (*heading).to_owned()));
    let mut cells = Vec::new();
    for row in &rows {
        let mut ways: Vec<&str> = Vec::new();
        for m in &row.measurements {
            if !ways.contains(&m.variant.as_str()) {
                ways.push(&m.variant);
            }
        }
        for way in ways {
            let mut line = labels.cells(row);
            line.push(way.to_owned());
            line.extend(figures.iter().map(|figure| figure_of(row, way, figure)));
            line.extend(scenario.counts.iter().map(|count| count_of(row, way, count)));
            cells.push(line);
        }
    }
    let comparable = rows.iter().any(|row| row.param("backing") == Some("1g"));
    if scenario.name == "execute" && comparable {
        for (way, populate, execute) in PUBLISHED {
            let mut line = vec![NOTHING.to_owned(); columns.len()];
            line[label_count - 1] = way.to_owned();
            for (figure, value) in [("populate", populate), ("execute", execute)] {
                if let Some(place) = figures.iter().position(|name| *name == figure) {
                    line[label_count + place] = value.to_owned();
                }
            }
            cells.push(line);
        }
    }
    Some(Table {
        title: scenario.title.to_owned(),
        common: labels.common.clone(),
        columns,
        labels: label_count,
        rows: cells,
        notes: vec![scenario.note.to_owned()],
    })
}

fn find<'a>(row: &Row<'a>, way: &str, figure: &str) -> Option<&'a Measurement> {
    let mut all = row.measurements.iter();
    all.find(|m| m.variant == way && parameter(m, "figure") == figure).copied()
}

fn figure_of(row: &Row, way: &str, figure: &str) -> String {
    let found = find(row, way, figure).and_then(|m| Some((m, Summary::of(&m.samples)?)));
    let Some((measurement, summary)) = found else { return NOTHING.to_owned() };
    match (measurement.unit.name(), figure) {
        // Medians of extremes: the worst of all is the one to show.
        ("s", "longest") => seconds(summary.max),
        ("s", _) if ["guest-log", "guest-populate"].contains(&measurement.scenario.as_str()) => {
            with_wide_spread(&summary)
        }
        ("s", _) => with_spread(&summary),
        ("faults/s", _) => thousands(summary.median.round() as i64),
        ("%", "came back a walk") => format!(
            "{} ({}–{})",
            three_digits(summary.median),
            three_digits(summary.lower_quartile),
            three_digits(summary.upper_quartile)
        ),
        ("%" | "M/s" | "CPU s", _) => three_digits(summary.median),
        _ => format!(
            "{}–{}",
            three_digits(summary.lower_quartile),
            three_digits(summary.upper_quartile)
        ),
    }
}

/// The name of a figure, with its unit if that is not one of time.
fn heading(rows: &[Row], figure: &str) -> String {
    let mut all = rows.iter().flat_map(|row| &row.measurements);
    let unit = all.find(|m| parameter(m, "figure") == figure).map_or("s", |m| m.unit.name());
    if unit == "s" { figure.to_owned() } else { format!("{figure}, {unit}") }
}

/// A count; the most of it where samples differ.
fn count_of(row: &Row, way: &str, (figure, name, _): &Count) -> String {
    let Some(measurement) = find(row, way, figure) else { return NOTHING.to_owned() };
    let most = format!("{name}_max");
    let count = measurement.counts.get(*name).or_else(|| measurement.counts.get(&most));
    count.map_or_else(|| "0".to_owned(), |count| thousands(*count as i64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake;

    #[test]
    fn a_run_reads_like_this() {
        let report = crate::record::Report { results: fake::guests(), ..fake::report() };
        insta::assert_snapshot!(crate::report::text::render(&report, 120));
    }

    #[test]
    fn what_was_published_stands_beside_1g_only() {
        let mut results = fake::guests();
        let shows = |results: &[Measurement]| {
            let tables = figures(results);
            tables[0].rows.iter().any(|row| row.iter().any(|cell| cell == "2.90 s"))
        };
        assert!(shows(&results));
        for result in &mut results {
            result.params.insert("backing".to_owned(), "2m".into());
        }
        assert!(!shows(&results));
    }
}
