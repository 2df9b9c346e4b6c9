//! Renderer of `slat tune dirty-log`: ranks ways of logging by how long they stall a guest.
//!
//! A way is called better only if its difference to the other is significant. The same results
//! choose the first way and then judge it, so the level of significance is divided by the number of
//! all pairs (Bonferroni's correction).

use super::live::SCENARIO;
use super::tables::is;
use super::way::Way;
use slat_kvm::figure::{Column, Figure, Stall};
use slat_kvm::phase::Phase;
use slat_lab::compare::LEAST;
use slat_lab::compare::groups::{Contrast, LEVEL};
use slat_lab::numbers::{seconds, with_wide_spread};
use slat_lab::record::Measurement;
use slat_lab::renderer::{Chart, Renderer};
use slat_lab::report::charts::strips::{self, Strip};
use slat_lab::report::tables::{Labels, Row, rows};
use slat_lab::stats::{Summary, median};
use slat_lab::table::{NOTHING, Table};
use slat_lab::unit::Unit;
use slat_lab::verdict::{Setting, Verdict};

/// Figure by which ways are ranked: the stall for each page that was written.
const BY: Figure = Figure::Stall(Phase::Run, Stall::Page);

/// Renderer of a comparison of ways.
pub const RENDERER: Renderer = Renderer {
    reads: |m| is(m, SCENARIO) && m.params.contains_key("way"),
    verdict: |results| verdict(&ranked(results)),
    tables: |results| table(&ranked(results)).into_iter().collect(),
    plots: |results| chart(&ranked(results)).into_iter().collect(),
    ..Renderer::NONE
};

/// A way of logging, and its measurements.
struct RankedWay<'a> {
    way: &'a str,
    row: Row<'a>,
    /// Stall for each page, in seconds: a sample for each run.
    stalls: &'a [f64],
}

impl RankedWay<'_> {
    fn middle(&self) -> f64 {
        median(self.stalls).unwrap_or(0.0)
    }
}

/// Returns the ways, ordered by their median stall, the shortest first.
fn ranked(results: &[Measurement]) -> Vec<RankedWay<'_>> {
    let mut ranked: Vec<RankedWay<'_>> = rows(results, SCENARIO, &["vcpu"])
        .into_iter()
        .filter_map(|row| {
            let stalls = &row.whole(BY)?.samples;
            let way = row.whole(BY)?.params.get("way")?.as_str()?;
            Some(RankedWay { way, row, stalls })
        })
        .collect();
    ranked.sort_by(|a, b| a.middle().total_cmp(&b.middle()));
    ranked
}

/// Returns the interval of the ratio of another way's stalls to those of the first, if the
/// difference is significant.
fn more(ranked: &[RankedWay<'_>], other: &RankedWay<'_>) -> Option<(f64, f64)> {
    let pairs = (ranked.len() * ranked.len().saturating_sub(1) / 2).max(1);
    let level = LEVEL / pairs as f64;
    let enough = |stalls: &[f64]| stalls.len() >= LEAST;
    let first = ranked.first().filter(|it| enough(it.stalls) && enough(other.stalls))?;
    let contrast = Contrast::of(first.stalls, other.stalls, 0.0)?;
    contrast.interval(level).filter(|_| contrast.p() < level)
}

fn verdict(ranked: &[RankedWay<'_>]) -> Verdict {
    let Some(first) = ranked.first() else { return Verdict::default() };
    let none = "No setting was shown to be better";
    let runs = |it: &RankedWay<'_>| it.row.whole(BY)?.params.get("runs")?.as_u64();
    let asked = ranked.iter().filter_map(runs).min().unwrap_or(0) as usize;
    let fewest = ranked.iter().map(|it| it.stalls.len()).min().unwrap_or(0);
    if fewest < LEAST && asked >= LEAST {
        return Verdict::of_lines([format!(
            "{none}: the run ended after {fewest} of {asked} runs of a way, and fewer than {LEAST} \
             show no difference; allow it about {} times as long (--time-limit).",
            asked.div_ceil(fewest.max(1)) + 1
        )]);
    }
    if fewest < LEAST {
        return Verdict::of_lines([format!(
            "{none}: fewer than {LEAST} runs show no difference between ways of logging; take \
             --runs {LEAST} or more."
        )]);
    }
    let said = |it: &RankedWay<'_>| format!("{} a page that it writes", time(it.stalls));
    let own = ranked.iter().find(|it| it.way == Way::OF_QEMU);
    let over = |other: &RankedWay<'_>| more(ranked, other).map(|(low, high)| percent(low, high));
    let mut verdict = Verdict::default();
    match own.map(|own| (own, over(own))) {
        Some((own, _)) if own.way == first.way => verdict.says.push(format!(
            "{none} than what QEMU does by itself ({}): it stalled the guest least, {}.",
            own.way,
            said(own)
        )),
        Some((own, None)) => verdict.says.push(format!(
            "{none} than what QEMU does by itself ({}; {}): {} came first with {}, which may be \
             an accident.",
            own.way,
            said(own),
            first.way,
            time(first.stalls)
        )),
        Some((own, Some(over))) => verdict.says.push(format!(
            "{} stalled the guest least: {}; what QEMU does by itself ({}) stalled it {over} \
             longer.",
            first.way,
            said(first),
            own.way
        )),
        None => verdict.says.push(format!(
            "{} came first: it stalled the guest for {}.",
            first.way,
            said(first)
        )),
    }
    let way = Way::named(first.way);
    if let Some(way) = way.as_ref().filter(|_| own.is_some_and(|own| more(ranked, own).is_some())) {
        verdict.settings.extend(way.settings());
    }
    // Firecracker and cloud-hypervisor enable no capability of logging, so they log as `legacy`
    // does.
    let legacy = ranked.iter().find(|it| it.way == Way::LEGACY);
    if let Some((way, over)) = way.zip(legacy.and_then(over)) {
        verdict.says.push(format!(
            "A VMM that reads the log without manual protect, as Firecracker and \
             cloud-hypervisor do, stalls it {over} longer than {}; they have no option for that.",
            first.way
        ));
        verdict.settings.push(Setting { of: "other VMMs".to_owned(), line: way.ioctls() });
    }
    let alike = ranked[1..].iter().filter(|it| more(ranked, it).is_none());
    let alike: Vec<_> = alike.map(|it| it.way).collect();
    if !alike.is_empty() {
        verdict.says.push(format!(
            "Not told apart from the first: {}. More --runs tell finer differences. The kernel's \
             module parameters were not varied.",
            alike.join("; ")
        ));
    }
    verdict
}

fn time(samples: &[f64]) -> String {
    Summary::of(samples).map_or_else(|| NOTHING.to_owned(), |summary| with_wide_spread(&summary))
}

/// Formats the interval of a ratio as a change in per cent.
fn percent(low: f64, high: f64) -> String {
    format!("{:.0} to {:.0} %", (low - 1.0) * 100.0, (high - 1.0) * 100.0)
}

/// Figures that the table shows of each way, with their headings.
const FIGURES: [Column; 6] = [
    (BY, "stall a page"),
    (Figure::Stall(Phase::Run, Stall::Share), "stalled"),
    (Figure::Stall(Phase::Run, Stall::P99), "p99"),
    (Figure::Stall(Phase::Run, Stall::Longest), "longest"),
    (Figure::WRITE_RATE, "written at"),
    (Figure::LOSS, "guest lost"),
];

fn table(ranked: &[RankedWay<'_>]) -> Option<Table> {
    let first = ranked.first()?;
    let common: Vec<Row<'_>> = ranked
        .iter()
        .map(|it| {
            let mut params = it.row.params.clone();
            // These parameters define a way, so they differ between rows.
            params.retain(|name, _| !["way", "eager_split"].contains(&name.as_str()));
            Row { params, measurements: Vec::new() }
        })
        .collect();
    let cells = |it: &RankedWay<'_>| {
        let figures = FIGURES.iter().map(|(figure, _)| {
            let m = it.row.whole(*figure)?;
            Some(m.unit.with_spread(&Summary::of(&m.samples)?))
        });
        let beside = match more(ranked, it) {
            _ if it.way == first.way => "first".to_owned(),
            Some((low, high)) => format!("{} longer", percent(low, high)),
            None => "no difference shown".to_owned(),
        };
        let figures = figures.map(|figure| figure.unwrap_or_else(|| NOTHING.to_owned()));
        [it.way.to_owned()].into_iter().chain(figures).chain([beside]).collect()
    };
    let headings = FIGURES.iter().map(|(_, heading)| *heading);
    Some(Table {
        title: "Ways of logging dirty pages, least stall first (KVM)".to_owned(),
        common: Labels::of(&common, crate::params::PARAMS).common,
        columns: ["way"]
            .into_iter()
            .chain(headings)
            .chain(["beside the first"])
            .map(str::to_owned)
            .collect(),
        labels: 1,
        rows: ranked.iter().map(cells).collect(),
        notes: vec![format!(
            "Medians over runs, each of the vCPU that had it worst; the ways took turns. “beside \
             the first” is the interval of the ratio of the stalls, where an accident in all \
             pairs together is as rare as 1 in {:.0}.",
            1.0 / LEVEL
        )],
    })
}

fn chart(ranked: &[RankedWay<'_>]) -> Option<Chart> {
    let strips: Vec<Strip<'_>> = ranked
        .iter()
        .map(|it| Strip {
            label: format!("{} ({})", it.way, seconds(it.middle())),
            family: it.way,
            samples: it.stalls,
        })
        .collect();
    let svg = strips::svg(&strips, &Unit::SECONDS)?;
    Some(Chart { title: "Stall for each page that is written, by way of logging".to_owned(), svg })
}

#[cfg(test)]
mod tests {
    use super::super::guest::measurement;
    use super::*;
    use serde_json::json;

    /// Returns `count` runs of each way, whose stalls are about the given number of microseconds.
    fn runs(count: usize, ways: &[(&str, f64)]) -> Vec<Measurement> {
        let of = |&(way, middle): &(&str, f64)| {
            let params = json!({ "memory": 1 << 28, "way": way }).as_object().unwrap().clone();
            let samples = (0..count).map(|n| middle * 1e-6 * (1.0 + n as f64 / 100.0)).collect();
            measurement(SCENARIO, BY, params, samples)
        };
        ways.iter().map(of).collect()
    }

    fn said(results: &[Measurement]) -> Verdict {
        verdict(&ranked(results))
    }

    #[test]
    fn the_way_with_the_least_stall_ranks_first_in_any_order() {
        let results = runs(5, &[("legacy", 9.0), ("ring of 4096", 4.0), (Way::OF_QEMU, 6.0)]);
        let order: Vec<_> = ranked(&results).iter().map(|it| it.way.to_owned()).collect();
        assert_eq!(order, ["ring of 4096", Way::OF_QEMU, "legacy"]);
        let table = table(&ranked(&results)).unwrap();
        assert_eq!(table.rows[0].last().unwrap(), "first");
        assert!(table.rows[2].last().unwrap().ends_with("% longer"), "{:?}", table.rows);
        assert!(chart(&ranked(&results)).is_some());
    }

    #[test]
    fn a_setting_is_recommended_only_where_its_benefit_is_shown() {
        let better = said(&runs(5, &[("ring of 4096", 4.0), (Way::OF_QEMU, 6.0)]));
        let of: Vec<_> = better.settings.iter().map(|setting| &*setting.of).collect();
        assert_eq!(of, ["QEMU", "libvirt"]);
        assert!(better.settings[0].line.contains("dirty-ring-size=4096"), "{better:?}");
        for results in [
            runs(5, &[("ring of 4096", 5.98), (Way::OF_QEMU, 6.0)]),
            runs(5, &[(Way::OF_QEMU, 4.0), ("ring of 4096", 6.0)]),
            runs(3, &[("ring of 4096", 4.0), (Way::OF_QEMU, 6.0)]),
        ] {
            let none = said(&results);
            assert_eq!(none.settings, [], "{none:?}");
            assert!(none.says[0].starts_with("No setting was shown to be better"), "{none:?}");
        }
        assert!(said(&[]).is_empty());
    }

    #[test]
    fn a_run_cut_by_its_time_limit_says_how_long_is_enough() {
        let mut cut = runs(2, &[("ring of 4096", 4.0), (Way::OF_QEMU, 6.0)]);
        for m in &mut cut {
            m.params.insert("runs".to_owned(), 9.into());
        }
        let verdict = said(&cut);
        assert!(verdict.says[0].contains("ended after 2 of 9 runs of a way"), "{verdict:?}");
        assert!(verdict.says[0].contains("about 6 times as long (--time-limit)"), "{verdict:?}");
    }

    #[test]
    fn the_verdict_reports_what_the_legacy_way_of_logging_costs() {
        let verdict = said(&runs(5, &[(Way::OF_QEMU, 4.0), ("legacy", 6.0)]));
        assert!(verdict.says[1].contains("Firecracker"), "{verdict:?}");
        assert!(verdict.settings[0].line.contains("MANUAL_DIRTY_LOG_PROTECT2"), "{verdict:?}");
    }
}
