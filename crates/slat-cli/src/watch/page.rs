//! The report as an HTML page: tables, and charts of each guest over time.

use super::live::{self, label};
use super::migration::MigrationFigures;
use super::report::{AVERAGE, Report};
use super::stalls;
use super::timeline::Event;
use super::verdict::Verdict;
use slat_kvm::procfs::Files;
use slat_kvm::watch::{GuestTotal, Metric, Sample};
use slat_lab::renderer::Chart;
use slat_lab::report::charts::series::{self, Line};
use slat_lab::report::html;
use slat_lab::table::Table;
use slat_lab::trust::date;

/// A chart of a guest: its title, the unit, the lines, and how values are shown.
type Panel = (&'static str, &'static str, &'static [(Metric, &'static str)], By);

/// The charts of each guest.
const CHARTS: [Panel; 5] = [
    (
        "Faults, exits and ranges unmapped by the host",
        "a second",
        &[
            (Metric::Faults, "faults"),
            (Metric::UserExits, "exits to the VMM"),
            (Metric::Invalidations, "unmapped by the host (MMU notifier)"),
            (Metric::PagesLogged, "pages in dirty rings"),
            (Metric::FaultsProtected, "writes to protected pages"),
        ],
        By::Second,
    ),
    (
        "Where vCPUs were",
        "CPUs",
        &[
            (Metric::RunningNs, "on a CPU"),
            (Metric::WaitingNs, "waiting for one"),
            (Metric::FaultNs, "in faults"),
            (Metric::ProtectedNs, "in those of protected pages"),
            (Metric::OtherExitNs, "in other exits"),
        ],
        By::Time,
    ),
    (
        "Mappings by page size",
        "mappings",
        &[(Metric::Pages4k, "4 KiB"), (Metric::Pages2m, "2 MiB"), (Metric::Pages1g, "1 GiB")],
        By::Level,
    ),
    (
        "Memory of the process",
        "MiB",
        &[
            (Metric::RssBytes, "all"),
            (Metric::HugeBytes, "in huge pages"),
            (Metric::SwapBytes, "swapped out"),
            (Metric::WorkingSetBytes, "used within a time"),
        ],
        By::Mebibyte,
    ),
    (
        "Host faults",
        "a second",
        &[(Metric::HostMinorFaults, "minor"), (Metric::HostMajorFaults, "major")],
        By::Second,
    ),
];

/// The form in which a sample's value is shown.
#[derive(Clone, Copy)]
enum By {
    Second,
    /// Nanoseconds per second, as the average number at once.
    Time,
    Level,
    Mebibyte,
}

impl By {
    fn value(self, value: u64, seconds: f64) -> f64 {
        match self {
            Self::Second => value as f64 / seconds,
            Self::Time => value as f64 / 1e9 / seconds,
            Self::Level => value as f64,
            Self::Mebibyte => value as f64 / f64::from(1 << 20),
        }
    }
}

/// Renders the page.
pub fn render(report: &Report<'_>) -> String {
    let told = MigrationFigures {
        rates: report.dirty_rates.clone(),
        predictions: report.predictions.clone(),
        missing: report.missing.clone(),
    };
    let mut tables = Vec::from_iter(time_line(&report.verdicts));
    let rows = report.guests.iter().flat_map(|guest| {
        let own = live::row(label(guest), &guest.total, guest.seconds, guest.vcpus.len());
        let vcpus = guest
            .vcpus
            .iter()
            .map(|vcpu| live::row(format!("vCPU {}", vcpu.index), &vcpu.total, guest.seconds, 1));
        std::iter::once(own).chain(vcpus)
    });
    let rows: Vec<_> = rows.collect();
    if !rows.is_empty() {
        tables.push(live::table(AVERAGE.to_owned(), rows));
    }
    tables.extend(stalls::table(&report.guests, report.transition_ns));
    tables.extend(unknown(report));
    let verdicts = report.guests.iter().zip(&report.verdicts);
    let charts: Vec<Chart> = verdicts.flat_map(|(guest, it)| charts(guest, it)).collect();
    let lead = format!(
        "{} watched for {:.1} s by slat {}, a sample each {:.1} s; tracepoints: {}.",
        live::count(report.guests.len()),
        report.seconds,
        report.tool,
        report.every,
        report.events
    );
    let verdicts = report.verdicts.iter().map(|verdict| verdict.said.clone());
    let sets = report.working_sets.iter().map(super::report::working_set);
    let said: Vec<String> = verdicts.chain(sets).chain(told.text()).collect();
    let host = Files::here().text("proc/sys/kernel/hostname");
    let host = host.map_or(String::new(), |name| format!(" on {name}"));
    let title = format!("Watched guests{host}, {}", date(report.began));
    html::page(&title, &lead, &said, &tables, &charts)
}

/// Makes a table of what happened to the guests.
fn time_line(verdicts: &[Verdict]) -> Option<Table> {
    let row = |verdict: &Verdict, event: &Event| {
        vec![format!("{:.1} s", event.at), verdict.guest.clone(), event.what.clone()]
    };
    let rows = verdicts.iter().flat_map(|it| it.events.iter().map(move |event| row(it, event)));
    let table = Table::new("Time line", 3, "after|guest|what happened", rows);
    Table { common: "The charts have a vertical line for each.".to_owned(), ..table }.some()
}

/// Makes a table of the unknown metrics and the reasons.
fn unknown(report: &Report<'_>) -> Option<Table> {
    let mut rows: Vec<Vec<String>> = Vec::new();
    for (metric, why) in report.guests.iter().flat_map(|guest| &guest.knowledge.unknown) {
        let row = vec![super::report::name(*metric), why.clone()];
        if !rows.contains(&row) {
            rows.push(row);
        }
    }
    Table::new("Not known here", 2, "what|why", rows).some()
}

/// Returns the charts of a guest that have any known value.
fn charts(guest: &GuestTotal, verdict: &Verdict) -> Vec<Chart> {
    let marks: Vec<f64> = verdict.events.iter().map(|event| event.at).collect();
    let points = |metric: Metric, by: By| {
        let value = |sample: &Sample| {
            let value = by.value(*sample.guest.get(&metric)?, sample.seconds);
            value.is_finite().then_some((sample.at, value))
        };
        guest.samples.iter().filter_map(value).collect::<Vec<_>>()
    };
    let chart = |&(title, values, metrics, by): &Panel| {
        let lines: Vec<Line> = metrics
            .iter()
            .map(|(metric, name)| ((*name).to_owned(), points(*metric, by)))
            .filter(|(_, points)| !points.is_empty())
            .collect();
        series::chart(&format!("{}: {title}", label(guest)), values, &lines, &marks)
    };
    CHARTS.iter().filter_map(chart).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::watch::fake::guest;
    use crate::watch::report::WatchEnd;
    use slat_kvm::watch::ThreadChange;

    #[test]
    fn the_page_has_time_lines_and_reasons_and_loads_nothing() {
        let mut one = guest("<b>qemu</b>");
        let mut later = one.samples[0].clone();
        later.at = 4.0;
        one.samples.push(later);
        one.threads = vec![ThreadChange { at: 3.0, vcpu: 0, came: false, thread: Some(4712) }];
        let page = render(&Report::new(vec![&one], WatchEnd::Time));
        assert_eq!(page.matches("<figure>").count(), 2);
        for text in [
            "4711 &lt;b&gt;qemu",
            "on a CPU",
            "Not known here: waiting for a CPU",
            "Time line",
            "the thread 4712 of vCPU 0 ended",
            "Watched guests",
            "nobody times them",
            "On average",
        ] {
            assert!(page.contains(text), "{text}");
        }
        // On a narrow screen tables scroll in a box, and so do charts.
        assert_eq!(
            page.matches("<div class=\"wide\"><table").count(),
            page.matches("<table").count()
        );
        assert_eq!(page.matches("<figure>").count(), page.matches("<svg").count());
        for style in ["div.wide { overflow-x: auto", "figure { margin: 1rem 0; overflow-x: auto"] {
            assert!(page.contains(style), "{style}");
        }
        for reference in ["://", "src=", "<link", "@import", "url(", "<script", "<b>"] {
            assert!(!page.contains(reference), "the page contains {reference}");
        }
        // A guest with one sample has no chart, and a report without guests has no table.
        assert_eq!(
            render(&Report::new(vec![&guest("q")], WatchEnd::Time)).matches("<figure>").count(),
            0
        );
        assert!(!render(&Report::new(Vec::new(), WatchEnd::Time)).contains("<table"));
    }
}
