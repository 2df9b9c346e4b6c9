//! Comparison of two runs: which results measure the same thing, whether they differ, and what else
//! differs between the runs.

mod boots;
pub mod groups;
mod hosts;
mod run;

pub use run::{Run, parse_report, read_report};

use crate::record::Measurement;
use crate::stats::Summary;
use crate::unit::Unit;
use groups::{Contrast, LEVEL, holm};
use hosts::shown;
use run::key;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};

/// Default threshold for changes between two processes, in per cent. The guests of one process do
/// not show how far a machine drifts from one process to the next: on a busy machine with two CPUs,
/// 8 of 200 pairs of equal runs differed by more than this (`noise --check`).
pub const DRIFT: f64 = 20.0;

/// Default threshold for changes between processes in turns, in per cent.
pub const IN_TURNS: f64 = 2.0;

/// Threshold for instructions that an emulator counted, as a part of one. The machine's noise does
/// not affect them, so runs need not take turns.
pub const EXACT: f64 = 0.01;

/// The change for which the needed number of groups is given, unless the threshold is too close to
/// it.
const CHANGE: f64 = 0.1;

/// With fewer groups per side, a pair gets no verdict. If groups are of two kinds, as those of a
/// busy host are, all groups of one side are too often of one kind, and all of the other side of
/// the other kind.
pub const LEAST: usize = 5;

/// The verdict on a pair of results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// The second takes less, by more than the threshold.
    Faster,
    /// The second takes more, by more than the threshold.
    Slower,
    /// Neither of the two was shown.
    NoDifferenceShown,
    /// Groups are too few, or the machines differ.
    NotComparable,
}

/// Results of the same thing in both runs.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Pair {
    /// Scenario, target and variant.
    pub what: [String; 3],
    /// The parameters that both have.
    pub params: Map<String, Value>,
    /// Unit of the samples.
    pub unit: Unit,
    /// The middle of each: the geometric mean of its groups' medians, or the mean if one of them is
    /// not above 0.
    pub middles: [f64; 2],
    /// The second divided by the first; NaN if both are 0.
    #[schemars(with = "Option<f64>")]
    pub ratio: f64,
    /// The confidence interval of that ratio, at the level at which the row was tested; of
    /// instructions, the ratios of any two boots. It lies beyond the threshold exactly if the row
    /// is faster or slower.
    #[schemars(with = "Option<(Option<f64>, Option<f64>)>")]
    pub interval: Option<(f64, f64)>,
    /// Number of groups of each; a group is a guest, a process, or a boot of an emulated machine.
    pub groups: [usize; 2],
    /// Number of samples of each.
    pub samples: [usize; 2],
    /// Half the interquartile range of the groups' medians, divided by their median, of each.
    pub spreads: [f64; 2],
    /// Number of groups per side that would show [`Comparison::change`] in nine of ten comparisons.
    pub groups_needed: Option<u32>,
    /// The probability of such groups if the change were within the threshold, corrected for all
    /// rows; of instructions, if both kernels were the same, for this row alone.
    pub p: Option<f64>,
    /// Of instructions, the greatest difference between a boot of the one and one of the other.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub most: Option<f64>,
    /// The verdict.
    pub verdict: Verdict,
    /// Calls to the kernel that one sample covers, if both runs have as many ([`CALLS`]).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub calls: Option<u64>,
    /// Counts that differ: both values, or `None` for a run that does not have the count.
    pub counts: BTreeMap<String, [Option<u64>; 2]>,
    /// Whether both runs have a count in common.
    #[serde(skip)]
    pub counted: bool,
    #[serde(skip)]
    contrast: Option<Contrast>,
}

/// The count of a result that says how many calls to the kernel one of its samples covers.
pub const CALLS: &str = "ioctls_typical";

/// A comparison of two runs.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Comparison {
    /// The threshold, as a part of one.
    pub threshold: f64,
    /// The change for which the needed number of groups is given, as a part of one.
    pub change: f64,
    /// Whether the groups of both took turns, so that the machine's drift affects both alike.
    pub in_turns: bool,
    /// The differences of the machines. If there are any, only counts can be compared, and times
    /// cannot.
    pub machines_differ: Vec<[String; 3]>,
    /// The other differences between the runs: name, first, second.
    pub variables: Vec<[String; 3]>,
    /// The results of both.
    pub pairs: Vec<Pair>,
    /// Number of results that only the first run has, and that only the second has.
    pub alone: [usize; 2],
}

/// Compares two runs.
pub fn compare(first: &Run, second: &Run, threshold: f64) -> Comparison {
    let machines_differ = hosts::machines(first, second);
    let mut variables = hosts::variables(first, second);
    let common = |run: &Run| constants(&run.results);
    let (a, b) = (common(first), common(second));
    let differing: BTreeSet<String> = a
        .keys()
        .filter(|name| b.get(*name).is_some_and(|value| *value != a[*name]))
        .cloned()
        .collect();
    variables.extend(
        differing
            .iter()
            .map(|name| [format!("parameter {name}"), shown(a.get(name)), shown(b.get(name))]),
    );
    let in_turns = first.took_turns && second.took_turns;
    let is_exact = |m: &Measurement| m.unit == Unit::INSTRUCTIONS;
    let all_exact = !first.results.is_empty() && first.results.iter().all(is_exact);
    let threshold = if all_exact { EXACT } else { threshold };
    let change = CHANGE.max(2.0 * threshold);
    let mut left: Vec<&Measurement> = second.results.iter().collect();
    let mut pairs = Vec::new();
    let mut alone = 0;
    for one in &first.results {
        let same = |other: &&Measurement| key(one, &differing) == key(other, &differing);
        match left.iter().position(same) {
            Some(place) => {
                let contrast = if in_turns { Contrast::of_turns } else { Contrast::of };
                // All groups may lie in one bucket, without a spread. A change to the next bucket
                // then means nothing.
                let least = threshold.max(one.coarseness());
                let other = left.swap_remove(place);
                pairs.push(pair(one, other, &differing, |a, b| contrast(a, b, least)));
            }
            None => alone += 1,
        }
    }
    if machines_differ.is_empty() {
        judge(&mut pairs, change);
    }
    // Shown changes come first, rows without a verdict last; within each, the largest change comes
    // first.
    pairs.sort_by(|one, other| {
        let ((class, change), (other_class, other_change)) = (rank(one), rank(other));
        class.cmp(&other_class).then(other_change.total_cmp(&change))
    });
    let alone = [alone, left.len()];
    Comparison { threshold, change, in_turns, machines_differ, variables, pairs, alone }
}

impl Comparison {
    /// Returns whether any pair has a verdict on its times.
    pub fn judges(&self) -> bool {
        self.pairs.iter().any(|pair| pair.verdict != Verdict::NotComparable)
    }

    /// Returns whether anything was shown to be slower.
    pub fn slower(&self) -> bool {
        self.pairs.iter().any(|pair| pair.verdict == Verdict::Slower)
    }

    /// Returns whether anything can be compared: times or counts.
    pub fn compares(&self) -> bool {
        self.judges() || self.pairs.iter().any(|pair| pair.counted)
    }
}

/// Returns the rank of a pair: its class, and how much it changed.
fn rank(pair: &Pair) -> (u8, f64) {
    let class = match pair.verdict {
        Verdict::Faster | Verdict::Slower => 0,
        Verdict::NoDifferenceShown => 1,
        Verdict::NotComparable => 2,
    };
    let change = pair.ratio.ln().abs();
    (class, if change.is_nan() { if class == 0 { f64::INFINITY } else { 0.0 } } else { change })
}

/// Returns the parameters that have one value in all results of a run that have them: the choices
/// of its command line.
fn constants(results: &[Measurement]) -> BTreeMap<String, Value> {
    let mut values: BTreeMap<String, Option<Value>> = BTreeMap::new();
    for (name, value) in results.iter().flat_map(|m| &m.params) {
        values
            .entry(name.clone())
            .and_modify(|known| {
                if known.as_ref() != Some(value) {
                    *known = None;
                }
            })
            .or_insert_with(|| Some(value.clone()));
    }
    values.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
}

fn pair(
    a: &Measurement,
    b: &Measurement,
    ignoring: &BTreeSet<String>,
    contrast: impl Fn(&[f64], &[f64]) -> Option<Contrast>,
) -> Pair {
    let is_exact = a.unit == Unit::INSTRUCTIONS;
    let groups = match is_exact {
        true => boots::values(a, b),
        false => [a.group_medians(), b.group_medians()],
    };
    let spread = |all: &Vec<f64>| Summary::of(all).map_or(0.0, |summary| summary.relative_spread());
    let logs = groups.iter().flatten().all(|median| *median > 0.0);
    let middle = |all: &Vec<f64>| {
        let sum: f64 = all.iter().map(|x| if logs { x.ln() } else { *x }).sum();
        let mean = sum / all.len() as f64;
        if logs { mean.exp() } else { mean }
    };
    let middles = [middle(&groups[0]), middle(&groups[1])];
    let (_, _, _, _, params) = key(a, ignoring);
    let names: BTreeSet<&String> = a.counts.keys().chain(b.counts.keys()).collect();
    let counts = names.into_iter().filter_map(|name| {
        let both = [a.counts.get(name).copied(), b.counts.get(name).copied()];
        // Times among the counts are medians, which never agree.
        (both[0] != both[1] && !name.ends_with("_ns")).then(|| (name.clone(), both))
    });
    Pair {
        what: [a.scenario.clone(), a.target.clone(), a.variant.clone()],
        params,
        unit: a.unit.clone(),
        middles,
        ratio: middles[1] / middles[0],
        interval: boots::interval(&groups[0], &groups[1]).filter(|_| is_exact),
        groups: [groups[0].len(), groups[1].len()],
        samples: [a.samples.len(), b.samples.len()],
        spreads: [spread(&groups[0]), spread(&groups[1])],
        groups_needed: None,
        p: is_exact.then(|| boots::p(&groups[0], &groups[1])),
        most: is_exact.then(|| boots::most(&groups[0], &groups[1])),
        verdict: Verdict::NotComparable,
        calls: a.counts.get(CALLS).copied().filter(|calls| b.counts.get(CALLS) == Some(calls)),
        counts: counts.collect(),
        counted: a.counts.keys().any(|name| b.counts.contains_key(name)),
        contrast: contrast(&groups[0], &groups[1]).filter(|_| !is_exact),
    }
}

/// Gives a verdict on all pairs of one machine together.
fn judge(pairs: &mut [Pair], change: f64) {
    // A row of too few groups gets no verdict, and so must not weaken the verdicts on others.
    let enough = |pair: &Pair| pair.groups.iter().all(|groups| *groups >= LEAST);
    for pair in pairs.iter_mut().filter(|pair| pair.unit == Unit::INSTRUCTIONS) {
        pair.verdict = match pair.interval {
            _ if !enough(pair) => Verdict::NotComparable,
            Some((low, _)) if low > 1.0 + EXACT => Verdict::Slower,
            Some((_, high)) if high < 1.0 - EXACT => Verdict::Faster,
            _ => Verdict::NoDifferenceShown,
        };
    }
    let tested = pairs.iter_mut().filter(|pair| enough(pair));
    let mut family: Vec<(&mut Pair, Contrast)> =
        tested.filter_map(|pair| pair.contrast.map(|it| (pair, it))).collect();
    let all: Vec<f64> = family.iter().map(|(_, contrast)| contrast.p()).collect();
    let strictest = LEVEL / all.len().max(1) as f64;
    for ((pair, contrast), (p, level)) in family.iter_mut().zip(holm(&all)) {
        let needed = contrast.needed(change, strictest);
        pair.groups_needed = needed.map(|needed| needed.max(LEAST as u32));
        pair.p = Some(p);
        pair.interval = contrast.interval(level);
        pair.verdict = match pair.middles {
            _ if p > LEVEL => Verdict::NoDifferenceShown,
            [a, b] if b > a => Verdict::Slower,
            _ => Verdict::Faster,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::param::Params;
    use crate::record::Kind;
    use crate::report::comparison::Rows;
    use serde_json::json;

    fn run(cpu: &str, results: &[(&str, Value, Vec<f64>)]) -> Run {
        let results = results.iter().map(|(variant, params, samples)| Measurement {
            counts: [("entries_read".to_owned(), samples.len() as u64)].into(),
            ..Measurement::new(
                "first",
                "engine",
                *variant,
                params.as_object().unwrap().clone(),
                Unit::SECONDS,
                samples.clone(),
            )
        });
        let host = json!({
            "cpu": { "model": cpu }, "kernel": { "release": cpu.len() },
            "kvm": { "parameters": { "kvm": { "eager": "Y" } } },
        });
        Run {
            host,
            tool: json!("0.1.0"),
            command: vec![cpu.to_owned()],
            results: results.collect(),
            took_turns: false,
            began: None,
        }
    }

    fn around(middle: f64) -> Vec<f64> {
        (0..12).map(|i| middle * (1.0 + f64::from(i) / 1000.0)).collect()
    }

    #[test]
    fn what_is_printed_of_a_comparison_fits_its_schema() {
        let schema = schemars::schema_for!(Comparison).into();
        let one = |middle| run("cpu", &[("x", json!({}), around(middle))]);
        for (a, b) in [(1.0, 1.5), (0.0, 0.0)] {
            let text = serde_json::to_string(&compare(&one(a), &one(b), 0.05)).unwrap();
            let value = serde_json::from_str(&text).unwrap();
            assert!(crate::fake::fits(&schema, &value), "{text}");
        }
    }

    #[test]
    fn verdicts_need_groups_that_differ_and_a_change_that_matters() {
        let of = |a: f64, b: f64| {
            let one = |middle| run("cpu", &[("x", json!({}), around(middle))]);
            compare(&one(a), &one(b), 0.05).pairs[0].verdict
        };
        assert_eq!(of(1.0, 1.5), Verdict::Slower);
        assert_eq!(of(1.0, 0.5), Verdict::Faster);
        assert_eq!(of(1.0, 1.0), Verdict::NoDifferenceShown);
        // The results differ, by less than the threshold.
        assert_eq!(of(1.0, 1.03), Verdict::NoDifferenceShown);
        let few = |middle| run("cpu", &[("x", json!({}), vec![middle])]);
        let pair = &compare(&few(1.0), &few(9.0), 0.05).pairs[0];
        assert_eq!((pair.verdict, pair.ratio.round()), (Verdict::NotComparable, 9.0));
    }

    #[test]
    fn what_changed_most_stands_first_and_what_has_no_verdict_last() {
        let all = |samples: [Vec<f64>; 5]| {
            let names = ["same", "few", "faster", "zero", "slower"];
            let rows = names.into_iter().zip(samples).map(|(name, it)| (name, json!({}), it));
            run("cpu", &rows.collect::<Vec<_>>())
        };
        let few = vec![1.0];
        let one = all([around(1.0), few.clone(), around(1.0), vec![0.0; 12], around(1.0)]);
        let two = all([around(1.0), few, around(0.8), vec![0.0; 12], around(2.0)]);
        let comparison = compare(&one, &two, 0.05);
        let names: Vec<&str> = comparison.pairs.iter().map(|pair| &*pair.what[2]).collect();
        assert_eq!(names, ["slower", "faster", "same", "zero", "few"]);
        assert!(comparison.pairs[3].ratio.is_nan(), "nothing by nothing");
    }

    #[test]
    fn runs_without_common_results_or_groups_compare_nothing() {
        let of = |name: &str, n: usize| run("cpu", &[(name, json!({}), around(1.0)[..n].to_vec())]);
        assert!(compare(&of("x", 12), &of("x", 12), 0.05).compares());
        assert!(!compare(&of("x", 12), &of("y", 12), 0.05).compares());
        // Counts are compared with any number of samples.
        assert!(compare(&of("x", 1), &of("x", 1), 0.05).compares());
        let mut bare = of("x", 1);
        bare.results[0].counts.clear();
        assert!(!compare(&bare, &of("x", 1), 0.05).compares());
    }

    #[test]
    fn rounds_of_one_guest_are_one_group_however_many_they_are() {
        let rounds = |middle: f64, groups: &[usize]| {
            let mut one = run("cpu", &[("x", json!({}), around(middle))]);
            one.results[0].groups = groups.to_vec();
            one
        };
        let pair = &compare(&rounds(1.0, &[12]), &rounds(2.0, &[12]), 0.02).pairs[0];
        assert_eq!((pair.groups, pair.verdict), ([1, 1], Verdict::NotComparable));
        let pair = &compare(&rounds(1.0, &[2; 6]), &rounds(2.0, &[2; 6]), 0.02).pairs[0];
        assert_eq!((pair.groups, pair.verdict), ([6, 6], Verdict::Slower));
        let (low, high) = pair.interval.unwrap();
        assert!(low > 1.9 && low < 2.0 && high > 2.0, "{pair:?}");
    }

    /// Thirty rows of a busy host. Each row has its own speed. Groups spread with a heavy tail, and
    /// drift from one to the next. Rounds within a group spread little.
    fn busy(rng: &mut fastrand::Rng, guests: usize, spread: f64, drift: &mut f64) -> Run {
        const ROUNDS: usize = 4;
        let mut normal = || (0..12).map(|_| rng.f64()).sum::<f64>() - 6.0;
        let mut rows = vec![Vec::new(); 30];
        for _ in 0..guests {
            *drift = 0.5 * *drift + spread * 0.3 * normal();
            for (number, row) in rows.iter_mut().enumerate() {
                let tail = if normal() > 1.6 { 4.0 } else { 1.0 };
                let group = (*drift + spread * tail * normal()).exp() * (1 + number) as f64;
                row.extend((0..ROUNDS).map(|_| group * (spread * 0.1 * normal()).exp()));
            }
        }
        let names: Vec<String> = (0..30).map(|number| number.to_string()).collect();
        let rows = names.iter().zip(rows).map(|(name, row)| (&**name, json!({}), row));
        let mut run = run("cpu", &rows.collect::<Vec<_>>());
        run.results.iter_mut().for_each(|result| result.groups = vec![ROUNDS; guests]);
        run
    }

    /// Returns how many of a hundred pairs of equal runs fail, and how many fail with one side a
    /// tenth slower.
    fn hundred_pairs(guests: usize, spread: f64) -> (usize, usize) {
        let mut rng = fastrand::Rng::with_seed(11);
        let mut drift = 0.0;
        let (mut failed, mut found) = (0, 0);
        for _ in 0..100 {
            let mut one = || busy(&mut rng, guests, spread, &mut drift);
            let (first, second) = (one(), one());
            failed += usize::from(compare(&first, &second, 0.02).slower());
            found += usize::from(compare(&first, &second.slowed(0.1), 0.02).slower());
        }
        (failed, found)
    }

    #[test]
    fn at_most_five_of_a_hundred_equal_pairs_fail_on_a_busy_host() {
        for guests in [5, 10] {
            for spread in [0.01, 0.3] {
                let (failed, _) = hundred_pairs(guests, spread);
                assert!(failed <= 5, "{failed} of {guests} guests, {spread}");
            }
        }
    }

    #[test]
    fn ninety_of_a_hundred_slowdowns_by_a_tenth_are_found() {
        for (guests, spread) in [(5, 0.01), (20, 0.03)] {
            let (_, found) = hundred_pairs(guests, spread);
            assert!(found >= 90, "{found} of {guests} guests, {spread}");
        }
    }

    /// Twelve guests in one process, with ten rows. The machine's drift so far, and an effect of
    /// this process, affect all of its guests alike.
    fn process(rng: &mut fastrand::Rng, drift: &mut f64) -> Run {
        let mut normal = || (0..12).map(|_| rng.f64()).sum::<f64>() - 6.0;
        *drift += 0.02 * normal();
        let own = 0.02 * normal();
        let mut row = |number: u32| -> Vec<f64> {
            let scale = f64::from(1 + number) * (*drift + own).exp();
            (0..12).map(|_| scale * (0.005 * normal()).exp()).collect()
        };
        let names: Vec<String> = (0..10).map(|number| number.to_string()).collect();
        let rows = names.iter().zip(0..).map(|(name, number)| (&**name, json!({}), row(number)));
        run("cpu", &rows.collect::<Vec<_>>())
    }

    #[test]
    fn turns_remove_the_drift_that_guests_of_one_process_share() {
        let mut rng = fastrand::Rng::with_seed(7);
        let mut drift = 0.0;
        let (mut bare, mut within, mut in_turns, mut found) = (0, 0, 0, 0);
        for _ in 0..100 {
            let mut next = || process(&mut rng, &mut drift);
            let (first, second) = (next(), next());
            bare += u32::from(compare(&first, &second, IN_TURNS / 100.0).slower());
            within += u32::from(compare(&first, &second, DRIFT / 100.0).slower());
            let [mut first, mut second] = [Vec::new(), Vec::new()];
            for _ in 0..5 {
                let [a, b, c, d] = [next(), next(), next(), next()];
                first.extend([a, d]);
                second.extend([b, c]);
            }
            let [first, second] = [first, second].map(|runs| Run::of_processes(runs, &[]));
            // A threshold would hide that groups are not independent.
            in_turns += u32::from(compare(&first, &second, 0.0).slower());
            found += u32::from(compare(&first, &second.slowed(0.1), IN_TURNS / 100.0).slower());
        }
        assert!(bare > 10, "{bare}: a drift that no comparison of two processes mistakes is none");
        assert!(within <= 5 && in_turns <= 5, "{within} and {in_turns} of 100 fail");
        assert!(found >= 90, "{found} of 100 found");
    }

    #[test]
    fn a_stall_in_the_next_bucket_is_equal_and_a_far_one_differs() {
        let of = |stall: f64| {
            let mut run = run("cpu", &[("dirty-stall-p50", json!({}), vec![stall; 6])]);
            run.results[0].kind = Kind::Bucketed;
            run
        };
        // Buckets are an eighth wide: all groups lie in one, without any spread.
        let verdict = |stall| compare(&of(4.0), &of(stall), IN_TURNS / 100.0).pairs[0].verdict;
        assert_eq!(verdict(4.5), Verdict::NoDifferenceShown);
        assert_eq!(verdict(5.5), Verdict::Slower);
    }

    #[test]
    fn a_row_with_too_few_groups_does_not_weaken_other_rows() {
        let with = |few: usize, middle: f64| {
            let mut rows: Vec<(String, Vec<f64>)> = vec![("x".to_owned(), around(middle))];
            rows.extend((0..few).map(|row| (format!("few {row}"), vec![0.0; LEAST - 1])));
            let rows = rows.iter().map(|(name, samples)| (&**name, json!({}), samples.clone()));
            run("cpu", &rows.collect::<Vec<_>>())
        };
        let p = |few| compare(&with(few, 1.0), &with(few, 1.0525), 0.05).pairs[0].p.unwrap();
        assert!(p(0) > 0.0 && p(0) < 1.0);
        assert_eq!(p(0), p(50));
        let comparison = compare(&with(50, 1.0), &with(50, 1.2), 0.05);
        let text: String = crate::report::comparison::tables(&comparison, Rows::All, Params(&[]))
            .iter()
            .map(crate::report::markdown::table)
            .collect();
        assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
    }

    #[test]
    fn instructions_that_differ_by_1_percent_in_each_boot_differ() {
        let run = |boots: Vec<f64>| {
            let mut run = run("m", &[("clear", json!({}), boots)]);
            run.results[0].unit = Unit::INSTRUCTIONS;
            run
        };
        let some = |middle: f64| run((0..5).map(|boot| middle + f64::from(boot) * 500.0).collect());
        let of = |a: &Run, b: &Run| compare(a, b, DRIFT / 100.0).pairs[0].verdict;
        let verdict = |middle| of(&some(2_100_000.0), &some(middle));
        // Boots of one kernel have values of a few kinds.
        let kinds = |x: f64| run(vec![16_130.0, 19_057.0, x, x, x]);
        assert_eq!(of(&kinds(16_162.0), &kinds(19_057.0)), Verdict::NoDifferenceShown);
        let few = run(vec![16_162.0; LEAST - 1]);
        assert_eq!(of(&few, &run(vec![19_057.0; LEAST])), Verdict::NotComparable);
        assert_eq!(verdict(1_300_000.0), Verdict::Faster);
        assert_eq!(verdict(2_300_000.0), Verdict::Slower);
        assert_eq!(verdict(2_110_000.0), Verdict::NoDifferenceShown);
    }

    #[test]
    fn times_need_the_same_machine_and_counts_are_compared_always() {
        let of = |cpu: &str, n: usize| run(cpu, &[("x", json!({}), around(1.0)[..n].to_vec())]);
        let comparison = compare(&of("one", 12), &of("three", 10), 0.05);
        assert_eq!(comparison.machines_differ, [["cpu model", "one", "three"].map(str::to_owned)]);
        assert_eq!(comparison.pairs[0].verdict, Verdict::NotComparable);
        assert_eq!(comparison.pairs[0].counts["entries_read"], [Some(12), Some(10)]);
        let names: Vec<&str> = comparison.variables.iter().map(|v| &*v[0]).collect();
        assert_eq!(names, ["kernel release", "command"]);
    }

    #[test]
    fn kernel_command_lines_and_mitigations_are_compared() {
        let of = |kernel: Value, mitigations: Value| Run {
            host: json!({ "kernel": kernel, "cpu": { "mitigations": mitigations } }),
            ..run("cpu", &[("x", json!({}), around(1.0))])
        };
        let one = of(json!({ "command_line": "ro" }), json!({ "mds": "Vulnerable" }));
        let two = of(json!({ "command_line": "rw" }), json!({ "mds": "Not affected" }));
        let variables = compare(&one, &two, 0.05).variables.into_iter();
        let names: Vec<_> = variables.map(|[name, ..]| name).collect();
        assert_eq!(names, ["kernel command line", "vulnerability mds"]);
    }

    #[test]
    fn a_parameter_that_a_whole_run_has_otherwise_is_a_variable() {
        let of = |backing: &str, other: &str| {
            let params = |when: &str| json!({ "backing": backing, "when": when });
            run(
                "cpu",
                &[
                    ("x", params("a"), around(1.0)),
                    ("x", params("b"), around(2.0)),
                    (other, json!({}), around(1.0)),
                ],
            )
        };
        let comparison = compare(&of("4k", "y"), &of("2m", "z"), 0.05);
        assert_eq!(comparison.variables[0], ["parameter backing", "4k", "2m"].map(str::to_owned));
        assert_eq!((comparison.pairs.len(), comparison.alone), (2, [1, 1]));
        assert_eq!(comparison.pairs[1].params["when"], "b");
        assert!(comparison.pairs.iter().all(|pair| pair.verdict == Verdict::NoDifferenceShown));
    }
}
