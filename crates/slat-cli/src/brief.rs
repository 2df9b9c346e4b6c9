//! What the main job prints: two questions on one screen. All tables are in report.html.

use crate::ideas;
use slat_lab::numbers::seconds;
use slat_lab::record::{Measurement, Report};
use slat_lab::report::tables::rows;
use slat_lab::report::text;
use slat_lab::stats::median;
use slat_lab::table::Table;
use std::fmt::Write;

/// The screen, in lines of at most `width` columns where the tables can be made to fit.
pub fn render(report: &Report, width: u16) -> String {
    let mut screen = String::new();
    text::header(&mut screen, report, width);
    let guests = guests(&report.results);
    let tables =
        guests.as_deref().map(guests_table).into_iter().chain(ideas::table(&report.results));
    for table in tables {
        text::grid(&mut screen, &table, width);
    }
    text::skipped(&mut screen, &report.skipped, width);
    if guests.is_some() {
        let _ = writeln!(
            screen,
            "\nNext: slat tune dirty-log (which way of logging stalls least), slat bench migrate (what a\n\
             migration costs), slat explain slat-report/ (where the time went), slat doctor"
        );
    }
    screen
}

/// A guest, logged in one way.
struct Logged {
    pages: String,
    way: &'static str,
    /// Seconds of a vCPU, for a page: its first touch, a write, what logging adds to a write.
    touch: f64,
    plain: f64,
    logging: f64,
    /// Seconds.
    longest: f64,
    /// Seconds of each round.
    calls: f64,
}

fn guests(results: &[Measurement]) -> Option<Vec<Logged>> {
    let rows = rows(results, "dirty-log", &["vcpu"]);
    let all: Vec<Logged> = rows
        .iter()
        .filter_map(|row| {
            let all = |variant: &str| {
                let of = |m: &&&Measurement| m.variant == variant;
                row.measurements.iter().filter(of).copied().collect::<Vec<_>>()
            };
            let whole =
                |variant: &str| row.whole(variant).and_then(|m| median(&m.samples)).unwrap_or(0.0);
            let page = |variant: &str| {
                let each = all(variant).into_iter().filter(|m| m.params.contains_key("vcpu"));
                let each = each.filter_map(|m| {
                    let pages = m.counts.get("pages").filter(|pages| **pages > 0)?;
                    Some(median(&m.samples)? / *pages as f64)
                });
                each.reduce(f64::max)
            };
            let on = |name: &str| row.params.get(name)?.as_bool();
            Some(Logged {
                pages: row.param("backing")?.to_owned(),
                way: way(on("manual_protect")?, on("initially_set")?),
                touch: page("populate")?,
                plain: page("warm")?,
                logging: whole("dirty-stall-page"),
                longest: whole("dirty-stall-max"),
                calls: whole("get") + whole("clear"),
            })
        })
        .collect();
    (!all.is_empty()).then_some(all)
}

/// A way of logging, as `slat bench migrate --way` names it.
fn way(manual_protect: bool, initially_set: bool) -> &'static str {
    match (manual_protect, initially_set) {
        (false, _) => "legacy",
        (true, false) => "manual",
        (true, true) => "initially-set",
    }
}

fn guests_table(guests: &[Logged]) -> Table {
    let by = |of: fn(&Logged) -> f64| {
        let least = guests.iter().min_by(|a, b| of(a).total_cmp(&of(b)));
        let most = guests.iter().max_by(|a, b| of(a).total_cmp(&of(b)));
        least.zip(most)
    };
    let verdict = by(|guest| guest.logging).map_or(String::new(), |(least, most)| {
        let said = |guest: &Logged| {
            format!("{} ({} pages, {})", seconds(guest.logging), guest.pages, guest.way)
        };
        format!(
            "Logging costs a vCPU {} to {} more for each page that it writes in a round.",
            said(least),
            said(most)
        )
    });
    let rows = guests.iter().map(|guest| {
        let labels = [guest.pages.clone(), guest.way.to_owned()];
        let times =
            [guest.touch, guest.plain, guest.plain + guest.logging, guest.longest, guest.calls];
        labels.into_iter().chain(times.map(seconds)).collect()
    });
    Table {
        title: "What memory management costs a guest on this host (KVM)".to_owned(),
        common: verdict,
        columns: [
            "pages",
            "log",
            "first touch",
            "write",
            "logged write",
            "longest stall",
            "get + clear",
        ]
        .map(str::to_owned)
        .into(),
        labels: 2,
        rows: rows.collect(),
        notes: vec![
            "The first three: time of a vCPU for a page, faults and the write itself; the logged \
             write and the longest stall by the vCPU's own clock, without what the scheduler \
             took. get + clear are the VMM's calls in one round, for all of the guest."
                .to_owned(),
        ],
    }
}
