//! The cost of logging for each page: the verdict on dirty logging, and the table of the main job.

use super::stalls::{touched, written};
use super::values::KvmWay;
use slat_kvm::figure::{Figure, Stall};
use slat_kvm::phase::Phase;
use slat_kvm::scenario::dirty_log;
use slat_lab::numbers::{seconds, with_wide_spread};
use slat_lab::record::Measurement;
use slat_lab::report::tables::rows;
use slat_lab::stats::{Summary, median};
use slat_lab::table::Table;
use slat_lab::verdict::Verdict;

/// Figures of a guest that was logged in one way.
struct LogFigures {
    pages: String,
    way: KvmWay,
    /// Seconds that a vCPU takes for a page: `touch` for its first touch, `plain` for a write
    /// without a log; `logging` is what a log adds to a page that is written, after the first
    /// round of a log that starts full.
    touch: f64,
    plain: f64,
    logging: f64,
    /// `logging` with its spread, as it is printed; empty if it is not known.
    shown: String,
    /// The longest stall, in seconds.
    longest: f64,
    /// Seconds that the calls which read and clear the log take in each round.
    calls: f64,
}

fn guests(results: &[Measurement]) -> Option<Vec<LogFigures>> {
    let rows = rows(results, dirty_log::NAME, &["vcpu"]);
    let all: Vec<LogFigures> = rows
        .iter()
        .filter_map(|row| {
            let all = |phase: Phase| {
                let of = |m: &&&Measurement| phase == *m.variant;
                row.measurements.iter().filter(of).copied().collect::<Vec<_>>()
            };
            let whole =
                |figure: Figure| row.whole(figure).and_then(|m| median(&m.samples)).unwrap_or(0.0);
            // Without a log, a read takes as long as a write.
            let page = |phase: Phase| {
                let each = all(phase).into_iter().filter(|m| m.is_vcpu());
                each.filter_map(|m| Some(median(&m.samples)? / touched(m)?)).reduce(f64::max)
            };
            // The stall of each access: what is read is not logged, so writes have all of it.
            let dirty = all(Phase::Dirty).into_iter().find_map(|m| Some(touched(m)? / written(m)?));
            let on = |name: &str| row.params.get(name)?.as_bool();
            let way = way(on("manual_protect")?, on("initially_set")?);
            let free = way.rounds_for_nothing();
            let stalls = |m: &Measurement| -> Vec<f64> {
                let logged = m.by_group().flat_map(|rounds| match rounds.len() {
                    1 => rounds,
                    _ => &rounds[free..],
                });
                logged.map(|stall| stall * dirty.unwrap_or(1.0)).collect()
            };
            let logging =
                row.whole(Figure::Stall(Phase::Dirty, Stall::Page)).map(stalls).unwrap_or_default();
            Some(LogFigures {
                pages: row.param("backing")?.to_owned(),
                way,
                touch: page(Phase::Populate)?,
                plain: page(Phase::Warm)?,
                logging: median(&logging).unwrap_or(0.0),
                shown: Summary::of(&logging).as_ref().map(with_wide_spread).unwrap_or_default(),
                longest: whole(Figure::Stall(Phase::Dirty, Stall::Longest)),
                calls: whole(Figure::Time(Phase::Get)) + whole(Figure::Time(Phase::Clear)),
            })
        })
        .collect();
    (!all.is_empty()).then_some(all)
}

/// Returns the way of logging.
fn way(manual_protect: bool, initially_set: bool) -> KvmWay {
    match (manual_protect, initially_set) {
        (false, _) => KvmWay::Legacy,
        (true, false) => KvmWay::Manual,
        (true, true) => KvmWay::InitiallySet,
    }
}

/// Returns what a logged write costs a vCPU in seconds, in the dearest way that was measured.
pub fn cost(results: &[Measurement]) -> Option<f64> {
    let known = guests(results)?.into_iter().filter(|guest| !guest.shown.is_empty());
    known.map(|guest| guest.logging).reduce(f64::max)
}

/// Returns the sentence that compares the cost of a logged write with that of a write without a
/// log.
pub fn verdict(results: &[Measurement]) -> Verdict {
    let Some(guests) = guests(results) else { return Verdict::default() };
    let known = || guests.iter().filter(|guest| !guest.shown.is_empty());
    let least = known().min_by(|a, b| a.logging.total_cmp(&b.logging));
    let most = known().max_by(|a, b| a.logging.total_cmp(&b.logging));
    let Some((least, most)) = least.zip(most) else {
        return Verdict::of_lines([
            "What a logged write costs cannot be told here: nothing is known of \
             this host's stalls."
                .to_owned(),
        ]);
    };
    let said = |it: &LogFigures| {
        let rounds = if it.way.rounds_for_nothing() > 0 { " from round 2 on" } else { "" };
        format!("{} ({} pages, {}{rounds})", it.shown, it.pages, it.way)
    };
    let cost = match guests.len() {
        1 => said(least),
        _ => format!("{} to {}", said(least), said(most)),
    };
    Verdict::of_lines([format!(
        "For each page that a vCPU writes in a round, dirty logging adds {cost}; the same write \
         without a log takes {}.",
        seconds(least.plain)
    )])
}

/// Returns the table with a row for each guest that was logged in phases, as the main job shows it.
pub fn table(results: &[Measurement]) -> Option<Table> {
    let guests = guests(results)?;
    let rows = guests.iter().map(|guest| {
        let labels = [guest.pages.clone(), guest.way.to_string()];
        let times =
            [guest.touch, guest.plain, guest.plain + guest.logging, guest.longest, guest.calls];
        labels.into_iter().chain(times.map(seconds)).collect()
    });
    let title = "What memory management costs a guest on this host (KVM)";
    let columns = "pages|log|first touch|write|logged write|longest stall|get + clear";
    let table = Table::new(title, 2, columns, rows).noting(
        "First touch, write and logged write: the time of a vCPU for one page, its faults \
         included. The logged write and the longest stall are by the vCPU's own clock, without \
         waiting for a CPU. get + clear: the VMM's calls in one round, for the whole guest.",
    );
    Some(table)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use slat_lab::fake;

    /// Results of a guest that writes to a tenth of its pages; the other steps do what `others`
    /// says.
    pub fn a_tenth(others: Option<&str>) -> Vec<Measurement> {
        let dirty = |m: &Measurement| m.scenario == dirty_log::NAME && Phase::Dirty == *m.variant;
        let all = fake::report().results.into_iter().filter(|m| dirty(m));
        let manual =
            |m: &Measurement| m.params["backing"] == "4k" && m.params["manual_protect"] == true;
        let mut all: Vec<Measurement> = all.filter(manual).collect();
        for m in &mut all {
            m.params.insert("write_percent".to_owned(), 10.into());
            m.params.extend(others.map(|others| ("others".to_owned(), others.into())));
        }
        let vcpu = all.iter().find(|m| m.is_vcpu()).unwrap().clone();
        let of = |variant: &str, of: &Measurement, time: f64| {
            let (variant, samples) = (variant.to_owned(), vec![time]);
            Measurement { variant, samples, ..of.clone() }
        };
        let whole = Measurement { counts: Default::default(), ..all[0].clone() };
        let steps = vcpu.counts["pages"] as f64;
        all.push(of("populate", &vcpu, 2e-6 * steps));
        all.push(of("warm", &vcpu, 1e-8 * steps));
        all.push(of("dirty-stall-page", &whole, 3e-6));
        all
    }

    #[test]
    fn the_first_round_of_an_initially_set_log_is_no_write_cost() {
        let rounds = |initially_set: bool| {
            let mut all = a_tenth(None);
            for m in &mut all {
                m.params.insert("manual_protect".to_owned(), true.into());
                m.params.insert("initially_set".to_owned(), initially_set.into());
                if Figure::Stall(Phase::Dirty, Stall::Page) == *m.variant {
                    m.samples = vec![0.0, 3e-6, 3e-6, 0.0, 3e-6];
                    m.groups = vec![3, 2];
                }
            }
            verdict(&all).says.concat()
        };
        let set = rounds(true);
        assert!(
            set.contains("adds 3.00 µs ±0% (4k pages, initially-set from round 2 on)"),
            "{set}"
        );
        assert!(rounds(false).contains("adds 0–3.00 µs (4k pages, manual)"));
    }

    #[test]
    fn the_cost_of_a_written_page_is_divided_by_written_pages_only() {
        let skipped = verdict(&a_tenth(None)).says.concat();
        assert!(skipped.contains("adds 3.00 µs ("), "{skipped}");
        assert!(skipped.contains("without a log takes 100 ns"), "{skipped}");
        // The stall is known for each access: ten of them are one write.
        let read = verdict(&a_tenth(Some("read"))).says.concat();
        assert!(read.contains("adds 30.0 µs ("), "{read}");
        assert!(read.contains("without a log takes 10.0 ns"), "{read}");
        for others in [None, Some("read")] {
            let touch = &guests(&a_tenth(others)).unwrap()[0].touch;
            assert!((touch - 2e-6).abs() < 1e-12, "{touch}");
        }
    }
}
