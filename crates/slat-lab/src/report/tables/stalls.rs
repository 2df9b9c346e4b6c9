//! What guests under the host's KVM pay, as their vCPUs see it: how long they stood still, what a
//! migration cost them, and the times of what was done to their memory.

use super::{Labels, Row, rows};
use crate::record::Measurement;
use crate::stats::Summary;
use crate::table::{NOTHING, Table};

/// Scenarios of guests under KVM, in the order of their tables.
const SCENARIOS: [&str; 9] = [
    "migrate",
    "dirty-log-live",
    "memslot",
    "dirty-log",
    "populate",
    "execute",
    "age",
    "memory-stress",
    "boot-caches",
];

/// Figures of a stall: end of the variant, heading.
const FIGURES: [(&str, &str); 7] = [
    ("stall", "stalled"),
    ("stall-p50", "p50"),
    ("stall-p95", "p95"),
    ("stall-p99", "p99"),
    ("stall-max", "longest"),
    ("waited", "waited"),
    ("stolen", "stolen"),
];

/// Phases whose stalls are shown: those in which something is done to the guest.
const STALLED: [&str; 8] =
    ["run", "dirty", "execute", "refill", "write", "write-idle", "read-idle", "toggle"];

/// Results of guests under KVM alone.
fn under_kvm(results: &[Measurement]) -> Vec<Measurement> {
    results.iter().filter(|m| m.target == "kvm").cloned().collect()
}

/// For each scenario: a row for each guest and phase.
pub fn stalls(results: &[Measurement]) -> Vec<Table> {
    let results = under_kvm(results);
    SCENARIOS.iter().filter_map(|scenario| of_scenario(&results, scenario)).collect()
}

fn of_scenario(results: &[Measurement], scenario: &str) -> Option<Table> {
    let rows = rows(results, scenario, &["vcpu"]);
    let labels = Labels::of(&rows);
    let mut columns: Vec<String> = labels.headings().collect();
    columns.push("phase".to_owned());
    let label_count = columns.len();
    columns.extend(FIGURES.map(|(_, heading)| heading.to_owned()));
    let mut cells = Vec::new();
    for row in &rows {
        for phase in STALLED {
            let figure = |name: &str| whole(row, &format!("{phase}-{name}"));
            if figure("stall").is_none() {
                continue;
            }
            let mut line = labels.cells(row);
            line.push(phase.to_owned());
            line.extend(FIGURES.map(|(name, _)| shown(figure(name))));
            cells.push(line);
        }
    }
    (!cells.is_empty()).then(|| Table {
        title: format!("How long vCPUs stood still: {scenario} (KVM)"),
        common: labels.common,
        columns,
        labels: label_count,
        rows: cells,
        notes: vec![
            "By the guest's own clock: times between two accesses above five times what is usual on \
             warm memory, less what is usual; medians over runs and rounds, each of the vCPU that had \
             it worst. “stalled” is their sum in each second that the vCPU ran, without what its \
             thread waited for a CPU (“waited”) and the machine below took (“stolen”)."
                .to_owned(),
        ],
    })
}

/// The measurement of all vCPUs together.
fn whole<'a>(row: &Row<'a>, variant: &str) -> Option<&'a Measurement> {
    let whole = |m: &&&Measurement| m.variant == variant && !m.params.contains_key("vcpu");
    row.measurements.iter().find(whole).copied()
}

fn shown(measurement: Option<&Measurement>) -> String {
    let Some((m, summary)) = measurement.and_then(|m| Some((m, Summary::of(&m.samples)?))) else {
        return NOTHING.to_owned();
    };
    m.unit.shown(summary.median)
}

/// A row for each way in which a guest was migrated, or logged beside its running vCPUs.
pub fn live(results: &[Measurement]) -> Vec<Table> {
    let results = under_kvm(results);
    let migrate = [
        ("total", "total"),
        ("rounds", "rounds"),
        ("copied", "copied"),
        ("downtime", "downtime"),
        ("loss", "guest lost"),
        ("loss-worst", "worst second"),
        ("get-longest-call", "longest get"),
        ("clear-longest-call", "longest clear"),
    ];
    let live = [
        ("loss", "guest lost"),
        ("loss-worst", "worst second"),
        ("enable", "enable"),
        ("get", "get"),
        ("get-longest-call", "longest get"),
        ("clear", "a clear"),
        ("clear-longest-call", "longest clear"),
    ];
    let memslot = [
        ("loss", "guest lost"),
        ("loss-worst", "worst second"),
        ("faults", "faults"),
        ("add", "add"),
        ("add-longest-call", "longest"),
        ("move", "move"),
        ("move-longest-call", "longest"),
        ("delete", "delete"),
        ("delete-longest-call", "longest"),
    ];
    let lost = "“guest lost” is what is missing of the pace that the vCPUs kept with logging off.";
    let tables = [
        columns(
            &results,
            "migrate",
            "Migrating a running guest (KVM)",
            &migrate,
            true,
            &format!(
                "Copied into a second memory, no faster than the link, and held against it word by word; \
             {lost} Rounds with * did not come to fit into the downtime allowed: the guest was \
             stopped all the same."
            ),
        ),
        columns(
            &results,
            "dirty-log-live",
            "A log fetched beside running vCPUs (KVM)",
            &live,
            false,
            &format!("Every log was held against what the vCPUs wrote; {lost}"),
        ),
        columns(
            &results,
            "memslot",
            "A memslot that comes, moves and goes beside running vCPUs (KVM)",
            &memslot,
            false,
            "No vCPU touches the slot. “guest lost” is what is missing of the pace that the vCPUs \
             kept before; “faults” are theirs for each move and deletion.",
        ),
    ];
    tables.into_iter().flatten().collect()
}

/// A row for each guest whose memory was touched; a column for each phase.
pub fn touches(results: &[Measurement]) -> Vec<Table> {
    let results = under_kvm(results);
    let of = |scenario: &str, title: &str, phases: &[(&str, &str)]| {
        let note = "Times of whole phases, all vCPUs, seen from user space; medians.";
        columns(&results, scenario, title, phases, false, note)
    };
    let tables = [
        of("populate", "First touches (KVM)", &[("populate", "populate"), ("warm", "again")]),
        of(
            "execute",
            "Executing from all of memory (KVM)",
            &[
                ("populate", "populate"),
                ("execute", "execute"),
                ("read", "read"),
                ("write", "write"),
            ],
        ),
        of(
            "age",
            "Ageing (KVM)",
            &[
                ("populate", "populate"),
                ("write", "write"),
                ("read", "read"),
                ("mark-idle", "mark idle"),
                ("write-idle", "write to idle"),
                ("read-idle", "read idle"),
            ],
        ),
        of(
            "boot-caches",
            "Caches switched off and on (KVM)",
            &[("populate", "populate"), ("toggle", "switch")],
        ),
        of(
            "memory-stress",
            "Memory taken away and filled again (KVM)",
            &[
                ("populate", "fill"),
                ("write", "write"),
                ("reset", "reset"),
                ("refill", "refill"),
                ("read", "read"),
            ],
        ),
    ];
    tables.into_iter().flatten().collect()
}

fn columns(
    results: &[Measurement],
    scenario: &str,
    title: &str,
    variants: &[(&str, &str)],
    mark: bool,
    note: &str,
) -> Option<Table> {
    let rows = rows(results, scenario, &["vcpu"]);
    let labels = Labels::of(&rows);
    let mut columns: Vec<String> = labels.headings().collect();
    let label_count = columns.len();
    let used: Vec<_> = variants
        .iter()
        .filter(|(name, _)| rows.iter().any(|row| whole(row, name).is_some()))
        .collect();
    columns.extend(used.iter().map(|(_, heading)| (*heading).to_owned()));
    let cells = rows.iter().map(|row| {
        let diverged =
            mark && whole(row, "run").is_some_and(|run| run.counts.get("converged") != Some(&1));
        let cell = |name: &str| {
            let text = shown(whole(row, name));
            if name == "rounds" && diverged {
                text.replace(" rounds", " *")
            } else {
                text.replace(" rounds", "")
            }
        };
        labels.cells(row).into_iter().chain(used.iter().map(|(name, _)| cell(name))).collect()
    });
    let cells: Vec<Vec<String>> = cells.collect();
    (!rows.is_empty()).then(|| Table {
        title: title.to_owned(),
        common: labels.common.clone(),
        columns,
        labels: label_count,
        rows: cells,
        notes: vec![note.to_owned()],
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake;
    use crate::report::text;

    #[test]
    fn guests_under_kvm_are_told_by_what_they_lost_then_by_stalls_then_by_times() {
        let results = fake::kvm();
        let mut printed = String::new();
        let tables = live(&results).into_iter().chain(stalls(&results)).chain(touches(&results));
        tables.for_each(|table| text::grid(&mut printed, &table, 120));
        let explained = crate::explain::table(&crate::explain::explain(&results));
        text::grid(&mut printed, &explained, 120);
        insta::assert_snapshot!(printed);
    }

    #[test]
    fn what_is_not_of_kvm_has_no_place_here() {
        let engine = fake::kvm().into_iter().map(|m| Measurement { target: "engine".into(), ..m });
        let engine: Vec<_> = engine.collect();
        assert!(
            live(&engine).is_empty() && stalls(&engine).is_empty() && touches(&engine).is_empty()
        );
    }
}
