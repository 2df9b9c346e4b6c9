//! Tables of a comparison.

use crate::compare::{Comparison, DRIFT, EXACT, LEAST, Pair, Verdict};
use crate::numbers::{thousands, three_digits};
use crate::param::Params;
use crate::stats::Summary;
use crate::table::{NOTHING, Table};
use crate::unit::Unit;
use serde_json::{Map, Value};

/// Number of rows of a table, unless the user asks for all.
const DOZEN: usize = 12;

/// The rows to list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// Rows that differ, and others up to a dozen.
    Dozen,
    /// Rows that differ.
    Differing,
    /// All rows.
    All,
}

/// Returns tables of the pairs, of other differences of the runs, and of counts that differ.
pub fn tables(comparison: &Comparison, rows: Rows, params: Params) -> Vec<Table> {
    let (times, counts) = (Some(pairs(comparison, rows, params)), counts(comparison, rows, params));
    // If the machines differ, only counts can be compared, and come first.
    let [first, second] =
        if comparison.machines_differ.is_empty() { [times, counts] } else { [counts, times] };
    let all = [machines(comparison), variables(comparison), first, second];
    all.into_iter().flatten().collect()
}

/// Number of calls that the answer in words names.
const CALLS: usize = 3;

fn is_one(count: &str) -> bool {
    !["_first", "_min", "_max"].iter().any(|end| count.ends_with(end))
}

/// Returns the answer in words: which phases take more or fewer instructions, which calls are more
/// or fewer, and the most that anything else differs by.
pub fn answer(comparison: &Comparison, params: Params) -> String {
    let constants = constants(comparison);
    let short = |pair: &Pair| {
        let name = name(pair, &constants, params);
        name.split_once(": ").map_or_else(|| name.clone(), |(_, rest)| rest.to_owned())
    };
    let exact = || comparison.pairs.iter().filter(|pair| is_exact(pair));
    let of = |wanted: &[Verdict]| -> Vec<&Pair> {
        exact().filter(|pair| wanted.contains(&pair.verdict)).collect()
    };
    let mut parts = Vec::new();
    for pair in of(&[Verdict::Slower, Verdict::Faster]) {
        let [a, b] = pair.middles;
        let (low, high) = pair.interval.unwrap_or((pair.ratio, pair.ratio));
        let (percent, more) = ((pair.ratio - 1.0).abs() * 100.0, words(pair));
        let calls = pair.calls.filter(|calls| *calls > 0);
        let a_call = |instructions: f64| {
            thousands((instructions / calls.unwrap_or(1) as f64).round() as i64)
        };
        parts.push(format!(
            "{}: {percent:.1} % {more} instructions ({} ± {}{})",
            short(pair),
            a_call((b - a).abs()),
            a_call((high - low) / 2.0 * a),
            if calls.is_some() { " a call" } else { "" },
        ));
    }
    let calls = comparison.pairs.iter().flat_map(|pair| {
        let row = move |(count, both): (&String, &[Option<u64>; 2])| {
            let function = count.strip_prefix("calls_")?;
            // Guests of one kernel that differ have no one number.
            let (&[Some(a), Some(b)], true) = (both, is_one(function)) else { return None };
            let text = [a, b].map(|count: u64| thousands(count as i64)).join(" → ");
            Some((a.abs_diff(b), format!("{}: calls of {function} {text}", short(pair))))
        };
        pair.counts.iter().filter_map(row)
    });
    let mut calls: Vec<(u64, String)> = calls.collect();
    calls.sort_by_key(|(change, _)| std::cmp::Reverse(*change));
    parts.extend(calls.into_iter().take(CALLS).map(|(_, text)| text));
    let same = of(&[Verdict::NoDifferenceShown]);
    if !same.is_empty() {
        let most = same.iter().filter_map(|pair| pair.most).fold(0.0, f64::max);
        let within = |pair: &&Pair| {
            let (low, high) = pair.interval.unwrap_or((1.0, 1.0));
            let percent = (high - 1.0).max(1.0 - low) * 100.0;
            format!("{} (within {} %)", short(pair), three_digits(percent))
        };
        let names: Vec<String> = same.iter().map(within).collect();
        let else_ = if parts.is_empty() { "nothing" } else { "nothing else" };
        parts.push(format!("no difference shown: {}", names.join(", ")));
        parts.push(format!(
            "{else_} differs by more than {} instructions",
            thousands(most.round() as i64)
        ));
    }
    if exact().any(|pair| pair.verdict == Verdict::NotComparable) {
        parts.push(format!("of fewer than {LEAST} boots a kernel nothing is said"));
    }
    parts.join("; ")
}

fn words(pair: &Pair) -> &'static str {
    match pair.verdict {
        Verdict::Faster if pair.unit == Unit::INSTRUCTIONS => "fewer",
        Verdict::Slower if pair.unit == Unit::INSTRUCTIONS => "more",
        Verdict::Faster => "faster",
        Verdict::Slower => "slower",
        Verdict::NoDifferenceShown => "no\u{a0}difference\u{a0}shown",
        Verdict::NotComparable => "not\u{a0}comparable",
    }
}

/// Returns the parameters that all pairs have in common; a table shows them once.
fn constants(comparison: &Comparison) -> Map<String, Value> {
    let mut pairs = comparison.pairs.iter();
    let mut common = pairs.next().map_or_else(Map::new, |pair| pair.params.clone());
    pairs.for_each(|pair| common.retain(|name, value| pair.params.get(name) == Some(value)));
    common
}

fn listed<'p>(all: impl Iterator<Item = (&'p String, &'p Value)>, params: Params) -> String {
    let known = all.filter(|(_, value)| !value.is_null());
    let words = known.map(|(name, value)| {
        format!("{} {}", params.heading(name), params.shown(name, Some(value)))
    });
    words.collect::<Vec<_>>().join(", ")
}

/// Returns a pair's name, without the parameters that all pairs have in common.
fn name(pair: &Pair, constants: &Map<String, Value>, params: Params) -> String {
    let [scenario, _, variant] = &pair.what;
    let own = pair.params.iter().filter(|(name, _)| !constants.contains_key(*name));
    let own = listed(own, params);
    match own.is_empty() {
        true => format!("{scenario}: {variant}"),
        false => format!("{scenario}: {variant}; {own}"),
    }
}

fn value(pair: &Pair, which: usize) -> String {
    let (middle, spread) = (pair.middles[which], pair.spreads[which] * 100.0);
    if !middle.is_finite() {
        return NOTHING.to_owned();
    }
    let text = pair.unit.shown(middle);
    if pair.groups[which] < 2 { text } else { format!("{text} ±{spread:.0}%") }
}

fn percent(ratio: f64) -> String {
    if !ratio.is_finite() {
        return NOTHING.to_owned();
    }
    if ratio > 100.0 {
        return "over ×100".to_owned();
    }
    let change = (ratio - 1.0) * 100.0;
    let sign = if change < 0.0 { '−' } else { '+' };
    format!("{sign}{:.1} %", change.abs())
}

fn pairs(comparison: &Comparison, rows: Rows, params: Params) -> Table {
    let differs = |pair: &Pair| matches!(pair.verdict, Verdict::Faster | Verdict::Slower);
    let differing = comparison.pairs.iter().filter(|pair| differs(pair)).count();
    let shown = match rows {
        Rows::Dozen => differing.max(DOZEN).min(comparison.pairs.len()),
        Rows::Differing => differing,
        Rows::All => comparison.pairs.len(),
    };
    let constants = constants(comparison);
    let rows = comparison.pairs[..shown].iter().map(|pair| {
        let interval = pair.interval.map_or_else(
            || NOTHING.to_owned(),
            |(low, high)| format!("{} to {}", percent(low), percent(high)),
        );
        vec![
            name(pair, &constants, params),
            value(pair, 0),
            value(pair, 1),
            percent(pair.ratio),
            interval,
            words(pair).to_owned(),
            pair.p.map_or_else(|| NOTHING.to_owned(), |p| format!("{p:.2}")),
            format!("{} + {}", pair.groups[0], pair.groups[1]),
            pair.groups_needed.map_or_else(|| NOTHING.to_owned(), |n| thousands(n.into())),
        ]
    });
    let of = |verdict| comparison.pairs.iter().filter(|pair| pair.verdict == verdict).count();
    let [first, second] = comparison.alone;
    let mut notes = vec![format!(
        "{} faster, {} slower, {} without a difference shown, {} not comparable; {first} results \
         of the first run and {second} of the second have no counterpart.",
        of(Verdict::Faster),
        of(Verdict::Slower),
        of(Verdict::NoDifferenceShown),
        of(Verdict::NotComparable)
    )];
    if shown < comparison.pairs.len() {
        notes.push(format!(
            "{} more, without a difference shown: --all lists them.",
            comparison.pairs.len() - shown
        ));
    }
    let [threshold, change] =
        [comparison.threshold, comparison.change].map(|part| three_digits(part * 100.0));
    if !comparison.pairs.iter().all(is_exact) {
        notes.push(format!(
            "A group is a guest, or a process of several; its median is what counts. A difference \
             is shown where the whole interval of the change lies beyond {threshold} %. The \
             intervals are so wide that all rows together show any without need in one of twenty \
             comparisons ({}, Holm); p is the corrected probability. The last column: groups a \
             side that would show a change of {change} %, by the spread between groups.",
            if comparison.in_turns { "t test of the turns" } else { "Welch" }
        ));
    }
    if comparison.pairs.iter().any(is_exact) {
        notes.push(format!(
            "Of instructions that an emulator counted a group is a boot, and the interval has the \
             ratios of any two boots: every boot of one side lies beyond every boot of the other \
             by {} %, or no difference is shown. They are no cycles: a cache miss, a barrier and \
             an invalidation count one.",
            three_digits(EXACT * 100.0)
        ));
    }
    let is_single = |pair: &Pair| pair.groups.iter().any(|boots| *boots < LEAST);
    if comparison.pairs.iter().any(|pair| is_exact(pair) && is_single(pair)) {
        notes.push(format!(
            "Of fewer than {LEAST} boots a side nothing is said: take both by `slat emulate \
             --boots {LEAST}`, or `slat kernel ab`."
        ));
    }
    if !comparison.in_turns && !comparison.pairs.iter().all(is_exact) {
        notes.push(format!(
            "These runs did not take turns: a change below {} % cannot be told from what a machine \
             drifts from one process to the next. `ab` takes turns, and can.",
            three_digits(DRIFT.max(comparison.threshold * 100.0))
        ));
    }
    let needed: Vec<f64> =
        comparison.pairs.iter().filter_map(|pair| Some(f64::from(pair.groups_needed?))).collect();
    if let Some(all) = Summary::of(&needed) {
        // Each of `ab`'s pairs has two processes per side.
        let (part, option) = if comparison.in_turns { (2.0, "--pairs") } else { (1.0, "-r") };
        let [least, middle] =
            [all.min, all.median].map(|groups| thousands((groups / part).ceil() as i64));
        notes.push(format!(
            "{option} {least} would show a change of {change} % in the steadiest row, {option} \
             {middle} in half of the rows."
        ));
    }
    let lacks = |pair: &Pair| pair.groups.iter().any(|groups| *groups < LEAST);
    if comparison.pairs.iter().any(|pair| lacks(pair) && !is_exact(pair)) {
        notes.push(format!(
            "Of fewer than {LEAST} groups a side nothing is said: take {}.",
            match comparison.in_turns {
                true => format!("--pairs {} or more", LEAST.div_ceil(2)),
                false => format!(
                    "both with -r {LEAST} or more (without --quick), or in turns with `ab`"
                ),
            }
        ));
    }
    Table {
        title: "The second run by the first".to_owned(),
        common: listed(constants.iter(), params),
        columns: ["what", "first", "second", "change", "interval", "", "p", "groups"]
            .map(str::to_owned)
            .into_iter()
            .chain([format!("for\u{a0}{change}\u{a0}%")])
            .collect(),
        labels: 1,
        rows: rows.collect(),
        notes,
    }
}

fn is_exact(pair: &Pair) -> bool {
    pair.unit == Unit::INSTRUCTIONS
}

fn list(title: &str, rows: &[[String; 3]], note: &str) -> Option<Table> {
    let rows = rows.iter().map(|row| row.to_vec());
    Table::new(title, 3, "|first|second", rows).noting(note).some()
}

fn machines(comparison: &Comparison) -> Option<Table> {
    list(
        "The machines differ: times are not comparable",
        &comparison.machines_differ,
        "Counts are compared all the same: they are exact on every machine.",
    )
}

fn variables(comparison: &Comparison) -> Option<Table> {
    list(
        "What else differs between the runs",
        &comparison.variables,
        "Any of it may be the reason for a difference below.",
    )
}

/// Returns the counts that differ, with the largest difference first; a dozen, unless all are to be
/// listed.
fn counts(comparison: &Comparison, rows: Rows, params: Params) -> Option<Table> {
    let text = |count: Option<u64>| {
        count.map_or_else(|| NOTHING.to_owned(), |count| thousands(count as i64))
    };
    let constants = &constants(comparison);
    // A count that one of the runs does not have was 0 there.
    let change = |[a, b]: &[Option<u64>; 2]| {
        let [a, b] = [a, b].map(|count| count.unwrap_or(0) as f64 + 1.0);
        (a / b).ln().abs()
    };
    let all = comparison.pairs.iter().flat_map(|pair| {
        let row = move |(count, both): (&String, &[Option<u64>; 2])| {
            let cells =
                [name(pair, constants, params), count.clone(), text(both[0]), text(both[1])];
            (change(both), cells.into())
        };
        pair.counts.iter().map(row)
    });
    let mut all: Vec<(f64, Vec<String>)> = all.collect();
    all.sort_by(|one, other| other.0.total_cmp(&one.0));
    let shown = if rows == Rows::All { all.len() } else { all.len().min(DOZEN) };
    let more = all.len() - shown;
    let note = format!("{more} more that differ by less: --all lists them, --json has them.");
    let rows = all.into_iter().take(shown).map(|(_, cells)| cells);
    let mut table = Table::new("Counts that differ", 2, "what|count|first|second", rows);
    table.notes.extend((more > 0).then_some(note));
    table.some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::{CALLS, Run, compare};
    use serde_json::json;

    fn boots(clear: f64, enable: &[f64], walks: u64) -> Run {
        called(clear, enable, (walks, None))
    }

    fn called(clear: f64, enable: &[f64], (walks, calls): (u64, Option<u64>)) -> Run {
        let result = |variant: &str, samples: Vec<f64>| {
            json!({
                "scenario": "first", "target": "kvm", "variant": variant, "params": {},
                "unit": "instructions", "samples": samples,
                "groups": vec![1; enable.len()],
                "counts": match calls {
                    Some(calls) => json!({ "calls_walker": walks, CALLS: calls }),
                    None => json!({ "calls_walker": walks }),
                },
            })
        };
        let clear = (0..enable.len()).map(|boot| clear + boot as f64).collect();
        let report = json!({
            "schema": 1, "emulator": {}, "command": [], "host": {}, "tool": "0",
            "results": [result("clear", clear), result("enable", enable.to_vec())],
        });
        Run::of(report, "report").unwrap()
    }

    #[test]
    fn the_answer_names_differences_and_the_bound_on_all_others() {
        let before = boots(1_000_000.0, &[16_130.0, 16_162.0, 19_057.0, 16_130.0, 16_162.0], 7);
        let after = boots(1_059_000.0, &[19_057.0, 16_162.0, 19_057.0, 16_130.0, 16_162.0], 0);
        let text = answer(&compare(&before, &after, 0.02), Params(&[]));
        assert!(text.starts_with("clear: 5.9 % more instructions (59,000 ± 4); "), "{text}");
        assert!(
            text.contains("calls of walker 7 → 0; no difference shown: enable (within 18.1 %); "),
            "{text}"
        );
        assert!(text.ends_with("nothing else differs by more than 2,927 instructions"), "{text}");
        let same = answer(&compare(&before, &before, 0.02), Params(&[]));
        assert!(same.starts_with("no difference shown: "), "{same}");
        let of_calls = |clear| called(clear, &[1.0; 5], (7, Some(100)));
        let text = answer(&compare(&of_calls(1e6), &of_calls(1_059_000.0), 0.02), Params(&[]));
        assert!(text.starts_with("clear: 5.9 % more instructions (590 ± 0 a call); "), "{text}");
        let few = boots(1.0, &[1.0; 4], 0);
        assert!(
            answer(&compare(&few, &before, 0.02), Params(&[])).contains("of fewer than 5 boots")
        );
    }
}
