//! Finds the way to restore a guest that is best on this host, for each purpose.

use super::restore::{Restore, RestoreArgs};
use super::tables::{MEANING, columns, is, named};
use super::visits_tables::{median_of, strips_of};
use crate::needs::GUEST;
use slat_kvm::figure::Figure;
use slat_kvm::scenario::restore;
use slat_lab::numbers::seconds;
use slat_lab::record::Measurement;
use slat_lab::renderer::Renderer;
use slat_lab::report::tables::{Labels, rows};
use slat_lab::scenario::Scenario;
use slat_lab::session::Session;
use slat_lab::verdict::Verdict;

/// The name of its results, which are not those of `slat bench restore`.
const RESULTS: &str = "tune-restore";
const EXAMPLES: &str = "\
Examples:
  slat tune restore
      256 MiB in each way, with and without prefetch, with one handler and two
  slat tune restore --pattern requests --memory 1g --cache warm,cold --folder /var/tmp";

/// The scenario.
pub struct TuneRestore;

impl Scenario for TuneRestore {
    const NAME: &'static str = restore::RESULTS.name;
    const ABOUT: &'static str =
        "Restore a guest in each way that this host has, and say which is best for what";
    const EXAMPLES: &'static str = EXAMPLES;
    const DEFAULTS: &'static [(&'static str, &'static str)] = &[
        ("runs", "5"),
        ("accesses", "25"),
        ("write_percent", "20"),
        ("handlers", "1,2"),
        ("thp", "off,on"),
    ];
    const NEEDS: &'static [&'static [&'static str]] = GUEST;
    const RENDERER: Renderer = Renderer {
        reads: |m| is(m, RESULTS),
        verdict,
        tables: |results| {
            let slat_kvm::figure::Results { title, columns: shown, note, .. } = restore::RESULTS;
            columns(results, RESULTS, title, shown, note).into_iter().collect()
        },
        plots: |results| {
            let title = "When the working set of a restored guest is there";
            strips_of(results, RESULTS, restore::WORKING_SET, title)
        },
        meaning: MEANING,
        ..Renderer::NONE
    };
    type Settings = RestoreArgs;

    fn run(args: &RestoreArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
        let mut results = Restore::run(args, session)?;
        for result in &mut results {
            RESULTS.clone_into(&mut result.scenario);
        }
        Ok(results)
    }
}

/// What a guest is restored for: the figure that is to be small, and the words for it.
const PURPOSES: [(Figure, &str); 4] = [
    (restore::FIRST, "to answer soonest"),
    (restore::WORKING_SET, "to have its working set soonest"),
    (restore::STALL_P99, "to stall least (p99)"),
    (restore::RESIDENT, "to take the least memory"),
];

fn verdict(results: &[Measurement]) -> Verdict {
    let rows = rows(results, RESULTS, &["vcpu"]);
    let labels = Labels::of(&rows, crate::params::PARAMS);
    Verdict::of_lines(PURPOSES.iter().filter_map(|(figure, purpose)| {
        let known = rows.iter().filter_map(|row| Some((median_of(row, *figure)?, row)));
        let (value, best) = known.min_by(|a, b| a.0.total_cmp(&b.0))?;
        let value = match figure.unit() {
            "s" => seconds(value),
            unit => format!("{value:.1} {unit}"),
        };
        let all = seconds(median_of(best, restore::WORKING_SET)?);
        Some(format!(
            "For a guest {purpose}: {} ({value}; working set after {all}).",
            named(&labels, best)
        ))
    }))
}
