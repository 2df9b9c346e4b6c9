//! Renderer of the scenario `migrate`: what migrations did to the guest, what they would do to a
//! larger guest, and their course over time.

use super::guest::Pattern;
use super::tables::{columns, named, renderer};
use super::visits_tables::{median_of, swept};
use crate::forecast::{self, Guest};
use slat_kvm::figure::Figure;
use slat_kvm::phase::Phase;
use slat_kvm::scenario::migrate;
use slat_lab::numbers::{bytes, seconds, several, thousands};
use slat_lab::rate::Rate;
use slat_lab::record::Measurement;
use slat_lab::renderer::{Chart, Renderer};
use slat_lab::report::charts::{sweep, timeline};
use slat_lab::report::tables::{Labels, Row, rows};
use slat_lab::verdict::Verdict;
use std::collections::BTreeSet;

const NAME: &str = migrate::RESULTS.name;
const MIB: f64 = (1 << 20) as f64;

/// Memory of the larger guest whose migration is computed, in bytes: 16 GiB.
const USUAL: f64 = 16.0 * 1024.0 * MIB;

/// Renderer of migrations.
pub const RENDERER: Renderer = Renderer {
    verdict,
    long: |results| {
        let title = "Calls of a migration (KVM)";
        columns(results, NAME, title, migrate::CALLS, "Medians over runs.").into_iter().collect()
    },
    plots,
    ..renderer!(migrate::RESULTS)
};

/// Returns the smallest and the largest of all samples of a variant.
fn range(rows: &[Row<'_>], figure: Figure) -> Option<(f64, f64)> {
    let samples = || rows.iter().filter_map(|row| row.whole(figure)).flat_map(|m| &m.samples);
    Some((samples().copied().reduce(f64::min)?, samples().copied().reduce(f64::max)?))
}

fn number(row: &Row<'_>, name: &str) -> Option<f64> {
    row.params.get(name)?.as_f64()
}

/// Returns the rate at which the vCPUs were asked to write. They were asked to touch pages, and
/// some may read.
fn asked_writes(row: &Row<'_>) -> Option<f64> {
    Pattern::read(&row.params).written_rate()
}

fn verdict(results: &[Measurement]) -> Verdict {
    let rows = rows(results, NAME, &["vcpu"]);
    let rates: BTreeSet<u64> =
        rows.iter().filter_map(|row| asked_writes(row).map(|rate| rate as u64)).collect();
    let of_rate = |rate: &u64| {
        let (own, _): (Vec<Row<'_>>, Vec<Row<'_>>) = self::rows(results, NAME, &["vcpu"])
            .into_iter()
            .partition(|row| asked_writes(row).map(|rate| rate as u64) == Some(*rate));
        sentence(&own, *rate as f64)
    };
    let measured = rates.iter().filter_map(of_rate);
    Verdict::of_lines(measured.chain(rows.first().and_then(|row| larger(&rows, row))))
}

/// Returns the sentence on what was measured at one dirty rate.
fn sentence(rows: &[Row<'_>], asked: f64) -> Option<String> {
    let first = rows.first()?;
    let (written, link) = (range(rows, Figure::WRITE_RATE)?, number(first, "link")?);
    let (total, downtime) = (range(rows, migrate::TOTAL)?, range(rows, migrate::DOWNTIME)?);
    let runs: usize =
        rows.iter().filter_map(|row| Some(row.whole(migrate::TOTAL)?.samples.len())).sum();
    // Several runs have one count where they agree; where they differ, `count` returns `None`.
    let count = |row: &Row<'_>, name: &str| row.whole(Phase::Run)?.counts.get(name).copied();
    let ended = || rows.iter().filter(|row| row.whole(migrate::TOTAL).is_some());
    let always = ended().all(|row| count(row, "converged") == Some(1));
    let never = ended().all(|row| count(row, "converged") == Some(0));
    let converged = match (always, never) {
        (true, _) if runs == 1 => "it converged",
        (true, _) => "all converged",
        (_, true) if runs == 1 => "it did not converge",
        (_, true) => "none converged",
        _ => "some did not converge",
    };
    let copied = range(rows, migrate::COPY_RATE)?;
    Some(format!(
        "A guest of {} that dirtied {} ({} asked for) migrated in {} over a link of {}, of which \
         the copy reached {}; its downtime was {} ({} allowed); {converged} ({}).",
        bytes(number(first, "memory")? as u64),
        rate(written),
        Rate(asked),
        times(total),
        Rate(link),
        rate(copied),
        times(downtime),
        seconds(number(first, "max_downtime_ms")? / 1e3),
        several(runs, "run"),
    ))
}

/// Returns the sentence on the migration of a guest of `USUAL` bytes.
fn larger(rows: &[Row<'_>], first: &Row<'_>) -> Option<String> {
    let (slow, fast) = range(rows, migrate::COPY_RATE)?;
    // The rate that was asked for, not the rate that the guest reached while logging slowed it.
    let (writes, link) = (asked_writes(first)?, number(first, "link")?);
    let guest = |copied: f64| {
        Some(Guest {
            memory: USUAL,
            writes,
            // The guest that was measured goes through all of its memory.
            hot: USUAL,
            random: Pattern::read(&first.params).random,
            stop: 0.0,
            copied: copied * MIB,
            copied_at_rest: link.max(copied * MIB),
            max_downtime: number(first, "max_downtime_ms")? / 1e3,
            max_rounds: number(first, "max_rounds")? as u32,
        })
    };
    let (best, worst) = (forecast::of(&guest(fast)?), forecast::of(&guest(slow)?));
    let converges = match (best.converges, worst.converges) {
        (true, true) => "would converge",
        (false, false) => "would not converge",
        _ => "might not converge",
    };
    let fastest = guest(fast)?;
    // At the limit of the search, all memory can be copied within the downtime.
    let bearable = Some(forecast::bearable_writes(&fastest));
    let bearable = bearable.filter(|writes| *writes < forecast::MOST_WRITES * fastest.copied);
    let never = bearable.map_or_else(String::new, |writes| {
        let most = (writes / MIB).floor() as i64;
        format!("; above {} MiB/s it does not", thousands(most))
    });
    Some(format!(
        "By calculation from the copy rates above, a guest of {} that dirties {} all the time \
         would migrate in {} with a downtime of {}, and {converges}{never}.",
        bytes(USUAL as u64),
        Rate(writes),
        times((best.total, worst.total)),
        times((best.downtime, worst.downtime)),
    ))
}

/// Formats two times, the shorter first.
fn times((one, other): (f64, f64)) -> String {
    let (least, most) = (seconds(one.min(other)), seconds(one.max(other)));
    if least == most { least } else { format!("{least} to {most}") }
}

fn rate((least, most): (f64, f64)) -> String {
    let [least, most] = [least, most].map(|rate| thousands(rate.round() as i64));
    if least == most { format!("{least} MiB/s") } else { format!("{least} to {most} MiB/s") }
}

fn plots(results: &[Measurement]) -> Vec<Chart> {
    let rows = rows(results, NAME, &["vcpu"]);
    let labels = Labels::of(&rows, crate::params::PARAMS);
    let course = |row: &Row<'_>| {
        let samples = |figure: Figure| row.whole(figure).map(|m| m.samples.clone());
        let pairs = |x: Figure, y: Figure| -> Option<Vec<(f64, f64)>> {
            Some(samples(x)?.into_iter().zip(samples(y)?).collect())
        };
        let memory = number(row, "memory")? / MIB;
        let page = slat_kvm::Backing::Small.page_size() as f64 / MIB;
        let left = pairs(migrate::PASS_AT, migrate::PASS_LEFT)?;
        let stop = samples(migrate::PASS_STOP)?;
        let left: Vec<_> = [(0.0, memory)]
            .into_iter()
            .chain(left.into_iter().map(|(at, pages)| (at, pages * page)))
            .chain([(*stop.get(1)?, 0.0)])
            .collect();
        let name = named(&labels, row);
        let title = match name.is_empty() {
            true => "The course of a migration".to_owned(),
            false => format!("The course of a migration: {name}"),
        };
        timeline::chart(
            &title,
            &pairs(Figure::PACE_AT, Figure::PACE)?,
            &left,
            (*stop.first()?, *stop.get(1)?),
        )
    };
    let ways = swept(&rows, |row| {
        let run = row.whole(Phase::Run);
        Some(sweep::Point {
            x: median_of(row, Figure::WRITE_RATE)?,
            y: median_of(row, migrate::TOTAL)?,
            reached: run.is_some_and(|m| m.counts.get("converged") == Some(&1)),
        })
    });
    let converge = ways.and_then(|ways| {
        let axes = ["MiB/s that the guest wrote", "time of the migration"];
        sweep::chart("Will it converge? Hollow: it did not", axes, seconds, &ways)
    });
    converge.into_iter().chain(rows.iter().filter_map(course)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use slat_lab::fake;

    fn migrations() -> Vec<Measurement> {
        fake::kvm().into_iter().filter(RENDERER.reads).collect()
    }

    #[test]
    fn the_requested_rates_are_shown_next_to_the_rates_reached() {
        let says = verdict(&migrations()).says;
        assert_eq!(says.len(), 2, "{says:?}");
        for words in
            ["dirtied 276 to 316 MiB/s (500 MiB/s asked for)", "copy reached 1,000 to 1,030"]
        {
            assert!(says[0].contains(words), "{says:?}");
        }
        assert!(
            says[0].contains("some did not converge") && says[0].contains("6 runs"),
            "{says:?}"
        );
    }

    #[test]
    fn the_verdict_names_the_rate_above_which_no_guest_converges() {
        // The fastest copied at 1,030 MiB/s. 30 rounds have to leave what is copied in 300 ms.
        let says = verdict(&migrations()).says;
        assert!(says[1].ends_with("above 902 MiB/s it does not."), "{says:?}");
        // Whatever the guest writes, all of its memory can be copied within the downtime.
        let bearable = migrations().into_iter().map(|mut m| {
            m.params.insert("max_downtime_ms".to_owned(), 60_000.into());
            m
        });
        let says = verdict(&bearable.collect::<Vec<_>>()).says;
        assert!(says[1].ends_with("and would converge."), "{says:?}");
    }

    #[test]
    fn the_asked_write_rate_excludes_touches_that_only_read() {
        let tenth = |others: Option<&str>| {
            let results = migrations().into_iter().map(|mut m| {
                m.params.insert("write_percent".to_owned(), 10.into());
                m.params.extend(others.map(|others| ("others".to_owned(), others.into())));
                m
            });
            verdict(&results.collect::<Vec<_>>()).says
        };
        for (others, rate) in [(None, "500 MiB/s"), (Some("read"), "50 MiB/s")] {
            let says = tenth(others);
            assert!(says[0].contains(&format!("({rate} asked for)")), "{says:?}");
            assert!(says[1].contains(&format!("that dirties {rate} all")), "{says:?}");
        }
    }

    #[test]
    fn each_way_has_its_course_and_a_sweep_only_what_was_swept() {
        let mut results = migrations();
        let titles = |results: &[Measurement]| -> Vec<String> {
            plots(results).into_iter().map(|chart| chart.title).collect()
        };
        assert_eq!(titles(&results).len(), 2);
        let slower = migrations().into_iter().map(|mut m| {
            m.params.insert("dirty_rate".to_owned(), 1_048_576u64.into());
            m
        });
        results.extend(slower);
        let titles = titles(&results);
        assert_eq!(titles.len(), 5, "{titles:?}");
        assert!(titles[0].starts_with("Will it converge?"), "{titles:?}");
    }
}
