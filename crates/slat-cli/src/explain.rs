//! Explains by counters where the time of a guest's phases went: faults times their cost, calls
//! times theirs, and the rest, which is unexplained.
//!
//! The time of the vCPUs in a phase is the sum of
//!
//! - accesses, each at the usual time of warm memory;
//! - faults, by the kernel's count, each at the median of the stalls (by the guest's clock);
//! - waiting of the vCPU threads for a CPU, by the scheduler's count;
//! - of a paced guest, its pauses: what is between its accesses by its own clock;
//! - the rest: faults that took longer than the median, exits that are no faults, the hypervisor
//!   below. It is printed even if it is negative.
//!
//! The rest is computed from the others, so an error in a count or in a cost shows in it.

use serde::Serialize;
use serde_json::{Map, Value};
use slat_kvm::phase::Phase;
use slat_lab::numbers::{seconds, thousands};
use slat_lab::record::{KVM, Measurement};
use slat_lab::renderer::Renderer;
use slat_lab::report::tables::{Labels, Row};
use slat_lab::table::{NOTHING, Table};
use slat_lab::verdict::Verdict;

/// Kinds of faults: the kernel's counters on x86, and their names in the table.
const KINDS: [(&str, &str); 4] = [
    ("pf_fixed", "mapped"),
    ("pf_fast", "without the lock"),
    ("pf_emulate", "emulated"),
    ("pf_spurious", "spurious"),
];

/// The explanation of one phase. Times are in seconds, summed over all vCPUs.
#[derive(Clone, Debug, PartialEq, Serialize, schemars::JsonSchema)]
pub struct Explanation {
    /// The scenario and the phase.
    pub what: [String; 2],
    /// The parameters of the guest.
    pub params: Map<String, Value>,
    /// The time that is explained: that of the vCPUs, or of the calls if no vCPU ran.
    pub total: f64,
    /// Time of accesses, at the usual time of each.
    pub usual: f64,
    /// Number of faults; of exits if the kernel counts no faults.
    pub faults: f64,
    /// Number of faults of each kind, as far as the kernel counts kinds.
    pub kinds: Vec<(String, f64)>,
    /// Median time of a fault.
    pub fault: f64,
    /// Time that vCPU threads waited for a CPU.
    pub waited: f64,
    /// Time that a guest with a dirty rate paused to keep to it.
    pub paused: f64,
    /// Number of calls.
    pub calls: f64,
    /// Mean time of a call.
    pub call: f64,
    /// The rest of the time, which may be negative.
    pub unexplained: f64,
}

/// Explains every phase that has the counts for it.
pub fn explain(results: &[Measurement]) -> Vec<Explanation> {
    let of_guests = || results.iter().filter(|m| m.target == KVM && !m.is_vcpu());
    // Counters that are 0 are left out of a phase, so all phases are searched for one that shows
    // whether this kernel counts faults.
    let counts_faults =
        of_guests().any(|m| m.counts.keys().any(|name| name.starts_with("pf_taken")));
    of_guests().filter_map(|m| one(m, counts_faults)).collect()
}

fn one(m: &Measurement, counts_faults: bool) -> Option<Explanation> {
    let ns = |name: &str| m.counts.get(name).map(|ns| *ns as f64 / 1e9);
    let empty = Explanation {
        what: [m.scenario.clone(), m.variant.clone()],
        params: m.params.clone(),
        total: 0.0,
        usual: 0.0,
        faults: 0.0,
        kinds: Vec::new(),
        fault: 0.0,
        waited: 0.0,
        paused: 0.0,
        calls: count(m, "ioctls").unwrap_or(0.0),
        call: 0.0,
        unexplained: 0.0,
    };
    let calls = |calls: f64| ns("calls_ns").map_or(0.0, |all| all / calls.max(1.0));
    let Some(total) = ns("vcpu_ns") else {
        // A phase in which no vCPU runs is explained by its calls alone.
        let total = ns("calls_ns").filter(|_| empty.calls > 0.0)?;
        return Some(Explanation { total, call: calls(empty.calls), ..empty });
    };
    let kinds: Vec<_> = KINDS
        .iter()
        .filter_map(|(name, kind)| Some(((*kind).to_owned(), count(m, name)?)))
        .collect();
    let faults = count(m, if counts_faults { "pf_taken" } else { "exits" }).unwrap_or(0.0);
    let (usual, fault) = (ns("usual_ns")?, ns("stall_p50_ns")?);
    let waited = ns("waited_ns")?;
    let stalled = ns("stalled_ns").filter(|_| m.params.contains_key("dirty_rate"));
    let paused = stalled.map_or(0.0, |stalled| (total - usual - stalled).max(0.0));
    // Waiting for a CPU within a pause costs the guest nothing, and is no part of its stalls.
    let left = total - usual - faults * fault - paused;
    let waited = if stalled.is_some() { waited.min(left.max(0.0)) } else { waited };
    let unexplained = left - waited;
    let call = calls(empty.calls);
    Some(Explanation {
        total,
        usual,
        faults,
        kinds,
        fault,
        waited,
        paused,
        call,
        unexplained,
        ..empty
    })
}

/// Returns a count of the occurrence of the phase that the times are from.
fn count(m: &Measurement, name: &str) -> Option<f64> {
    m.counts.get(&format!("{name}_typical")).map(|count| *count as f64)
}

/// Renderer of all guests' results: a sentence on their time, and on the page the whole table.
pub const RENDERER: Renderer = Renderer {
    reads: |m| m.target == KVM,
    verdict: |results| Verdict::of_lines(sentence(&explain(results))),
    long: |results| tables(&explain(results)),
    ..Renderer::NONE
};

/// Phases that the sentence is about.
const ASKED: [Phase; 3] = [Phase::Dirty, Phase::Run, Phase::Execute];

/// Returns the sentence on where the vCPUs' time went, in all guests together.
fn sentence(explained: &[Explanation]) -> Option<String> {
    // A guest with a dirty rate pauses most of the time, which is no cost.
    let paced = |it: &Explanation| it.params.contains_key("dirty_rate");
    let asked = |it: &&Explanation| {
        ASKED.iter().any(|phase| *phase == *it.what[1]) && it.fault > 0.0 && !paced(it)
    };
    let asked = || explained.iter().filter(asked);
    let sum = |of: fn(&Explanation) -> f64| asked().map(of).sum::<f64>();
    let total = Some(sum(|it| it.total)).filter(|total| *total > 0.0)?;
    // Adding 0 turns -0 into 0.
    let round = |part: f64| (part * 100.0).round() + 0.0;
    let percent = |of: fn(&Explanation) -> f64| round(sum(of) / total);
    let faults = percent(|it| it.faults * it.fault);
    // Each fault counts as the median one, which may come to more time than there is.
    let rest = round(sum(|it| it.unexplained) / total);
    let count = thousands(sum(|it| it.faults) as i64);
    let (faults, rest) = if rest < 0.0 {
        let estimate = format!("{count}; {faults} % if each took as long as the median one");
        (format!("{} % of their time in faults ({estimate})", faults + rest), String::new())
    } else {
        let rest = format!("; {rest} % unexplained");
        (format!("{faults} % of their time in faults ({count})"), rest)
    };
    Some(format!(
        "While they wrote or executed, the vCPUs spent {faults}, {} % waiting for a CPU, {} % on \
         accesses to warm memory{rest}.",
        percent(|it| it.waited),
        percent(|it| it.usual),
    ))
}

/// Returns a table of explanations for each scenario.
pub fn tables(explained: &[Explanation]) -> Vec<Table> {
    let mut scenarios: Vec<&str> = Vec::new();
    for it in explained {
        if !scenarios.contains(&&*it.what[0]) {
            scenarios.push(&it.what[0]);
        }
    }
    let of = |scenario: &&str| {
        let own = explained.iter().filter(|it| it.what[0] == **scenario).cloned();
        table(&own.collect::<Vec<_>>())
    };
    scenarios.iter().map(of).collect()
}

fn table(explained: &[Explanation]) -> Table {
    let rows: Vec<Row> = explained
        .iter()
        .map(|it| Row { params: it.params.clone(), measurements: Vec::new() })
        .collect();
    let labels = Labels::of(&rows, crate::params::PARAMS);
    let cells = explained.iter().zip(&rows).map(|(it, row)| {
        let shown = |value: f64| if value == 0.0 { NOTHING.to_owned() } else { seconds(value) };
        let number = |count: f64| match count {
            0.0 => NOTHING.to_owned(),
            count => thousands(count.round() as i64),
        };
        let part = if it.total > 0.0 { it.unexplained / it.total * 100.0 } else { 0.0 };
        let kinds = it.kinds.iter().filter(|(_, count)| *count > 0.0);
        let kinds: Vec<_> =
            kinds.map(|(kind, count)| format!("{} {kind}", number(*count))).collect();
        let faults = match kinds.is_empty() {
            true => number(it.faults),
            false => format!("{} ({})", number(it.faults), kinds.join(", ")),
        };
        let mut cells = labels.cells(row);
        cells.extend(it.what.clone());
        cells.extend([
            seconds(it.total),
            shown(it.usual),
            faults,
            shown(it.fault),
            shown(it.faults * it.fault),
            shown(it.waited),
            shown(it.paused),
            number(it.calls),
            shown(it.call),
            // Adding 0 turns -0 into 0.
            format!("{:.0} %", part.round() + 0.0),
        ]);
        cells
    });
    let columns = "scenario|phase|time|as usual|faults|a fault|all faults|waited|paused|calls|\
                   a call|unexplained";
    labels.table("Where the time went", 2, columns.split('|'), cells).noting(
        "Time of all vCPUs of a phase, or of the host's calls. As usual: accesses at the time \
         that one takes on warm memory. A fault: the median stall by the guest's own clock, \
         times the kernel's count of faults (of exits where it counts no faults). Paused: a \
         guest that keeps to a dirty rate, between its accesses. Unexplained is what is left: \
         below 0 if most faults were quicker than the median of the stalls.",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use slat_lab::unit::Unit;

    fn phase(variant: &str, counts: &[(&str, u64)]) -> Measurement {
        Measurement {
            counts: counts.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect(),
            ..Measurement::new("dirty-log", "kvm", variant, Map::new(), Unit::SECONDS, vec![1.0])
        }
    }

    fn dirty() -> Measurement {
        phase(
            "dirty",
            &[
                ("vcpu_ns", 1_000_000_000),
                ("usual_ns", 100_000_000),
                ("stall_p50_ns", 10_000),
                ("pf_taken_typical", 50_000),
                ("pf_fast_typical", 40_000),
                ("waited_ns", 300_000_000),
            ],
        )
    }

    #[test]
    fn what_counters_do_not_explain_is_left_over() {
        let explained = explain(&[dirty()]);
        assert_eq!(explained.len(), 1);
        let it = &explained[0];
        assert_eq!(it.faults, 50_000.0);
        assert_eq!(it.kinds, [("without the lock".to_owned(), 40_000.0)]);
        assert!((it.unexplained - 0.1).abs() < 1e-9, "{it:?}");
    }

    #[test]
    fn the_pauses_of_a_paced_guest_are_explained() {
        let mut paced = dirty();
        paced.params.insert("dirty_rate".to_owned(), 1.into());
        paced.counts.extend([("stalled_ns".to_owned(), 550_000_000)]);
        paced.counts.insert("vcpu_ns".to_owned(), 10_000_000_000);
        let it = &explain(&[paced])[0];
        assert!((it.paused - 9.35).abs() < 1e-9, "{it:?}");
        // Of its stalls: 0.5 s are faults, and it may have waited in the rest.
        assert!((it.waited - 0.05).abs() < 1e-9 && it.unexplained.abs() < 1e-9, "{it:?}");
    }

    #[test]
    fn a_phase_of_the_host_is_its_calls() {
        let clear = phase("clear", &[("ioctls_typical", 8), ("calls_ns", 8_000)]);
        let it = &explain(&[clear])[0];
        assert_eq!((it.calls, it.unexplained), (8.0, 0.0));
        assert!((it.call - 1e-6).abs() < 1e-15 && (it.total - 8e-6).abs() < 1e-12, "{it:?}");
    }

    #[test]
    fn phases_without_counters_are_left_out() {
        let engine = Measurement { target: "engine".to_owned(), ..dirty() };
        assert!(explain(&[engine, phase("populate", &[("pages", 1)])]).is_empty());
    }

    #[test]
    fn the_account_is_a_sentence_and_leaves_out_guests_that_pause() {
        let said = sentence(&explain(&[dirty()])).unwrap();
        assert!(
            said.contains("50 % of their time in faults (50,000), 30 % waiting for a CPU"),
            "{said}"
        );
        let mut paced = dirty();
        paced.params.insert("dirty_rate".to_owned(), 1.into());
        assert_eq!(sentence(&explain(&[paced])), None);
    }

    #[test]
    fn each_scenario_has_a_table_with_a_row_for_each_phase() {
        let mut other = dirty();
        other.scenario = "migrate".to_owned();
        let clear = phase("clear", &[("ioctls_typical", 8), ("calls_ns", 8_000)]);
        let tables = tables(&explain(&[dirty(), other, clear]));
        assert_eq!(tables.iter().map(|table| table.rows.len()).collect::<Vec<_>>(), [2, 1]);
        let table = &tables[0];
        assert_eq!(table.rows.len(), 2);
        assert!(table.rows.iter().all(|row| row.len() == table.columns.len()));
        assert_eq!(table.rows[0].last().unwrap(), "10 %");
    }
}
