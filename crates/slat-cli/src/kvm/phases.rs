//! Turns the phases of a guest into measurements.
//!
//! Counts come from KVM. A phase has the counts of the VM and of the dirty log, and the sums over
//! vCPUs; a vCPU's part has the counts of that vCPU. Rounds differ, above all the first from the
//! others, so a count that differs between samples is given three times: `_first`, `_min` and
//! `_max`. Counts that end in `_ns` are times, summed over all vCPUs, which say where the time of a
//! phase went; they are from the occurrence with the median time, and so are the counts that end in
//! `_typical`.

use super::guest::measurement;
use super::stalls;
use serde_json::{Map, Value};
use slat_kvm::figure::Figure;
use slat_kvm::phase::{Phase, PhaseRun, VcpuRun};
use slat_lab::record::{Measurement, merged_counts};
use slat_lab::stats::median;
use std::collections::BTreeMap;

/// Returns the measurements of all phases of the runs, in the order of [`Phase::ALL`].
pub fn measurements(
    scenario: &str,
    params: &Map<String, Value>,
    phases: &[PhaseRun],
) -> Vec<Measurement> {
    let mut results = Vec::new();
    for phase in Phase::ALL {
        let runs: Vec<&PhaseRun> = phases.iter().filter(|run| run.phase == *phase).collect();
        let Some(first) = runs.first() else { continue };
        let seconds = runs.iter().map(|run| run.seconds).collect();
        let mut whole = measurement(scenario, Figure::Time(*phase), params.clone(), seconds);
        let each: Vec<_> = runs.iter().map(|run| counts(run)).collect();
        whole.counts = merged_counts(each.iter().cloned());
        whole.counts.extend(typical(&each));
        let own = results.len();
        results.push(whole);
        results.extend(stalls::measurements(scenario, params, &runs));
        if runs.iter().any(|run| run.calls > 1) {
            let longest = runs.iter().map(|run| run.longest_call_seconds).collect();
            let figure = Figure::LongestCall(*phase);
            results.push(measurement(scenario, figure, params.clone(), longest));
        }
        for vcpu in 0..first.vcpus.len() {
            let parts: Vec<_> = runs.iter().filter_map(|run| run.vcpus.get(vcpu)).collect();
            let mut params = params.clone();
            params.insert("vcpu".to_owned(), vcpu.into());
            let seconds = parts.iter().map(|part| part.seconds).collect();
            let mut part = measurement(scenario, Figure::Time(*phase), params, seconds);
            part.counts = merged_counts(parts.iter().map(|part| vcpu_counts(part)));
            // Rounds of a share differ by a page at most, and the renderers divide by one number.
            let pages = parts.iter().map(|part| part.pages).sum::<u64>();
            part.counts.insert("pages".to_owned(), pages / (parts.len() as u64).max(1));
            results.push(part);
        }
        let groups = guests(&runs);
        // Stalls have samples only for occurrences whose usual time is known, so they may be fewer.
        let all = results[own..].iter_mut().filter(|m| m.samples.len() == runs.len());
        all.for_each(|m| m.groups.clone_from(&groups));
    }
    results.extend(fetched(scenario, params, phases));
    results
}

/// Returns the time of each fetch of the log with its clear: without manual protection a get clears
/// as well, so that ways of logging compare by the sum alone.
fn fetched(
    scenario: &str,
    params: &Map<String, Value>,
    phases: &[PhaseRun],
) -> Option<Measurement> {
    let mut runs: Vec<&PhaseRun> = Vec::new();
    let mut times: Vec<f64> = Vec::new();
    for run in phases {
        match run.phase {
            Phase::Get => {
                runs.push(run);
                times.push(run.seconds);
            }
            // It follows the get of its round.
            Phase::Clear => *times.last_mut()? += run.seconds,
            _ => {}
        }
    }
    let rounds = runs.iter().all(|run| run.iteration.is_some()) && !times.is_empty();
    rounds.then(|| Measurement {
        groups: guests(&runs),
        ..measurement(scenario, Figure::GET_AND_CLEAR, params.clone(), times)
    })
}

/// Returns how many occurrences of a phase each guest had, or nothing if each had one.
fn guests(runs: &[&PhaseRun]) -> Vec<usize> {
    let next = |one: &&PhaseRun, other: &&PhaseRun| one.iteration < other.iteration;
    let groups: Vec<usize> = runs.chunk_by(next).map(<[_]>::len).collect();
    if groups.iter().all(|size| *size == 1) { Vec::new() } else { groups }
}

/// Returns the times of the occurrence with the median time, and the counts that explain them,
/// under names that end in `_typical`.
fn typical(each: &[BTreeMap<String, u64>]) -> BTreeMap<String, u64> {
    let time = |counts: &BTreeMap<String, u64>| {
        counts.get("vcpu_ns").or_else(|| counts.get("calls_ns")).copied().unwrap_or(0)
    };
    let mut order: Vec<_> = each.iter().collect();
    order.sort_by_key(|counts| time(counts));
    let Some(middle) = order.get((order.len().max(1) - 1) / 2).filter(|it| time(it) > 0) else {
        return BTreeMap::new();
    };
    let times = middle.iter().filter(|(name, _)| name.ends_with("_ns"));
    let times = times.map(|(name, ns)| (name.clone(), *ns));
    let explain = EXPLAINING.into_iter().filter_map(|name| Some((name, middle.get(name)?)));
    times.chain(explain.map(|(name, count)| (format!("{name}_typical"), *count))).collect()
}

/// Counts that explain the time of a phase.
const EXPLAINING: [&str; 7] =
    ["exits", "ioctls", "pf_emulate", "pf_fast", "pf_fixed", "pf_spurious", "pf_taken"];

/// Returns the counts of one occurrence of a phase.
fn counts(run: &PhaseRun) -> BTreeMap<String, u64> {
    let mut counts = BTreeMap::new();
    for vcpu in &run.vcpus {
        for (name, count) in vcpu_counts(vcpu) {
            *counts.entry(name).or_default() += count;
        }
    }
    counts.extend(changes(&run.vm));
    let mut add = |name: &str, count| {
        counts.insert(name.to_owned(), count);
    };
    if run.calls != 0 {
        add("ioctls", run.calls);
    }
    if let Some(log) = run.log {
        add("pages_in_log", log.in_log);
        add("pages_written", log.written);
        add("pages_in_excess", log.excess);
    }
    if !run.vcpus.is_empty() {
        add("pages", run.vcpus.iter().map(|vcpu| vcpu.pages).sum());
        // What the time of the vCPUs went into, if the usual time is known for each of them.
        let stalls: Vec<_> = run.vcpus.iter().filter_map(|vcpu| vcpu.stalls).collect();
        let waited: Option<f64> = run.vcpus.iter().map(|vcpu| vcpu.waited).sum();
        if let Some(waited) = waited.filter(|_| stalls.len() == run.vcpus.len()) {
            let sum = |of: &dyn Fn(&VcpuRun) -> f64| nanoseconds(run.vcpus.iter().map(of).sum());
            add("accesses", stalls.iter().map(|stalls| stalls.accesses).sum());
            add("stalls", stalls.iter().map(|stalls| stalls.stalls).sum());
            add("vcpu_ns", sum(&|vcpu| vcpu.seconds));
            add("waited_ns", nanoseconds(waited));
            let of_stalls = |of: fn(&slat_kvm::stall::Stalls) -> f64| {
                nanoseconds(stalls.iter().map(of).sum::<f64>())
            };
            add("stalled_ns", of_stalls(|stalls| stalls.seconds));
            add("usual_ns", of_stalls(|stalls| stalls.accesses as f64 * stalls.warm));
            let middles: Vec<f64> = stalls.iter().map(|stalls| stalls.p50).collect();
            add("stall_p50_ns", nanoseconds(median(&middles).unwrap_or(0.0)));
        }
    }
    if run.calls != 0 {
        add("calls_ns", nanoseconds(run.call_seconds));
    }
    if let Some(tables) = run.tables {
        add("second_level_tables_bytes", tables);
    }
    if let Some(mapped) = run.mapped {
        add("mapped_4k", mapped.size_4k);
        add("mapped_2m", mapped.size_2m);
        add("mapped_1g", mapped.size_1g);
    }
    for (node, bytes) in &run.nodes {
        add(&format!("bytes_on_node{node}"), *bytes);
    }
    counts
}

fn nanoseconds(seconds: f64) -> u64 {
    (seconds * 1e9) as u64
}

fn vcpu_counts(vcpu: &VcpuRun) -> BTreeMap<String, u64> {
    changes(&vcpu.counters)
}

/// Returns changes of KVM's counters as counts, where a decrease has a name that ends in `_less`.
/// Mapped pages are left out: `counts` gives their number, not its change.
fn changes(changes: &BTreeMap<String, i64>) -> BTreeMap<String, u64> {
    let changes = changes.iter().filter(|(name, _)| !name.starts_with("pages_"));
    let count = |(name, change): (&String, &i64)| {
        let name = if *change < 0 { format!("{name}_less") } else { name.clone() };
        (name, change.unsigned_abs())
    };
    changes.map(count).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use slat_kvm::bitmap::Tally;
    use slat_kvm::phase::MappedPages;

    fn dirty(round: u32, seconds: f64, flushes: i64) -> PhaseRun {
        let counters = [("exits".to_owned(), 7)].into();
        let vcpu = VcpuRun { pages: 64, seconds, counters, stalls: None, waited: None };
        PhaseRun {
            phase: Phase::Dirty,
            iteration: Some(round),
            seconds,
            calls: 0,
            longest_call_seconds: 0.0,
            call_seconds: 0.0,
            vcpus: vec![vcpu; 2],
            log: None,
            vm: [("remote_tlb_flush".to_owned(), flushes), ("pages_2m".to_owned(), -1)].into(),
            mapped: Some(MappedPages { size_4k: 129, size_2m: 0, size_1g: 0 }),
            tables: None,
            nodes: Default::default(),
            stolen: 0.0,
        }
    }

    #[test]
    fn a_phase_keeps_every_sample_and_each_vcpu_has_its_own() {
        let runs = [dirty(1, 0.5, 32), dirty(2, 0.25, 0)];
        let results = measurements("dirty-log", &Map::new(), &runs);
        assert_eq!(results.len(), 3);
        assert!(results.iter().all(|m| m.variant == "dirty" && m.samples == [0.5, 0.25]));
        let whole = &results[0].counts;
        let expected = [
            ("exits", 14),
            ("mapped_1g", 0),
            ("mapped_2m", 0),
            ("mapped_4k", 129),
            ("pages", 128),
            ("remote_tlb_flush_first", 32),
            ("remote_tlb_flush_max", 32),
            ("remote_tlb_flush_min", 0),
        ];
        assert_eq!(*whole, expected.map(|(name, count)| (name.to_owned(), count)).into());
        assert!(results.iter().all(|m| m.groups == [2]));
        assert_eq!(results[2].params["vcpu"], 1);
        assert_eq!(results[2].counts["pages"], 64);
        assert_eq!(results[2].counts["exits"], 7);
    }

    #[test]
    fn each_guests_rounds_are_a_group_that_its_first_round_begins() {
        let runs = [(1, 0.5), (2, 0.25), (1, 0.5), (2, 0.25), (3, 1.0)];
        let runs = runs.map(|(round, seconds)| dirty(round, seconds, 0));
        let results = measurements("dirty-log", &Map::new(), &runs);
        assert!(results.iter().all(|m| m.groups == [2, 3]));
        let once = [dirty(1, 0.5, 0), dirty(1, 0.25, 0)];
        let results = measurements("dirty-log", &Map::new(), &once);
        assert!(results.iter().all(|m| m.groups.is_empty()));
    }

    #[test]
    fn a_clear_in_pieces_reports_its_longest_call() {
        let clear = PhaseRun {
            phase: Phase::Clear,
            calls: 8,
            longest_call_seconds: 0.125,
            vcpus: Vec::new(),
            ..dirty(1, 0.5, 1)
        };
        let results = measurements("dirty-log", &Map::new(), &[clear]);
        assert_eq!(results.len(), 2);
        assert_eq!(results[0].counts["ioctls"], 8);
        assert_eq!(results[1].variant, "clear-longest-call");
        assert_eq!(results[1].samples, [0.125]);
    }

    #[test]
    fn a_get_and_its_clear_are_a_row_of_their_own() {
        let of = |phase, round, seconds| PhaseRun { phase, ..dirty(round, seconds, 0) };
        let runs = [
            of(Phase::Get, 1, 0.5),
            of(Phase::Clear, 1, 0.25),
            of(Phase::Get, 2, 1.0),
            of(Phase::Get, 1, 2.0),
        ];
        let results = measurements("dirty-log", &Map::new(), &runs);
        let both = results.iter().find(|m| m.variant == "get-and-clear").unwrap();
        assert_eq!((&*both.samples, &*both.groups), (&[0.75, 1.0, 2.0][..], &[2, 1][..]));
    }

    #[test]
    fn a_log_says_what_was_in_it() {
        let get = PhaseRun {
            phase: Phase::Get,
            log: Some(Tally { in_log: 9, written: 8, excess: 1 }),
            vcpus: Vec::new(),
            ..dirty(1, 0.5, 1)
        };
        let results = measurements("dirty-log", &Map::new(), &[get]);
        assert_eq!(results[0].counts["pages_in_log"], 9);
        assert_eq!(results[0].counts["pages_in_excess"], 1);
    }

    #[test]
    fn times_among_the_counts_are_medians() {
        let sample = |ns| [("vcpu_ns".to_owned(), ns)].into();
        let merged = merged_counts([sample(3), sample(100), sample(5)].into_iter());
        assert_eq!(merged, [("vcpu_ns".to_owned(), 5)].into());
    }
}
