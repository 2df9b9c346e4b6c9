//! `report.html`: one file that needs no network and no other file.

use super::{charts, tables};
use crate::host::Known;
use crate::reader::Reader;
use crate::record::{Measurement, Report};
use crate::size::Size;
use crate::table::Table;
use maud::{DOCTYPE, Markup, PreEscaped, html};

/// Charts are drawn in the colours of a light page; a dark one replaces each of them.
const STYLE: &str = include_str!("page.css");

/// The report as a page.
pub fn render(report: &Report, readers: &[Reader]) -> String {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { "What memory management costs guests: Slat" }
                style { (PreEscaped(STYLE)) }
            }
            body {
                @if let Some(trust) = &report.trust {
                    p.warning[!trust.trusted] { (trust.line()) }
                }
                h1 { "What memory management costs guests" }
                p.lead { "Measured by Slat on " (report.host.cpu.model) ", Linux " (report.host.kernel.release) "." }
                @if report.partial {
                    p.warning { "Interrupted: this is a part of what was asked for." }
                }
                @for table in tables::all(&report.results, readers) { (table_section(&table)) }
                (chart_section(report, readers))
                (distributions(report, readers))
                @for table in long(&report.results, readers) { (table_section(&table)) }
                (meaning(report, readers))
                h2 { "Run it again" }
                pre { (command_line(&report.command)) }
                (host_section(report))
            }
        }
    };
    page.into_string()
}

/// Tables that are too long for a terminal.
fn long(results: &[Measurement], readers: &[Reader]) -> Vec<Table> {
    readers.iter().flat_map(|reader| (reader.long)(&reader.own(results))).collect()
}

fn table_section(table: &Table) -> Markup {
    let class = |index: usize| if index < table.labels { "label" } else { "" };
    html! {
        h2 { (table.title) }
        p.common { (table.common) }
        div.wide {
            table {
                thead { tr { @for (index, column) in table.columns.iter().enumerate() {
                    th class=(class(index)) { (column) }
                } } }
                tbody { @for row in &table.rows { tr { @for (index, cell) in row.iter().enumerate() {
                    td class=(class(index)) { (cell) }
                } } } }
            }
        }
        @for note in &table.notes { p.note { (note) } }
    }
}

/// How charts of samples are read.
const DOTS: &str = "Each dot is one sample. Bars behind dots reach from the lower to the upper \
                    quartile, with a mark at the median. Where values spread far, the scale is \
                    logarithmic.";

fn chart_section(report: &Report, readers: &[Reader]) -> Markup {
    let own = readers.iter().map(|reader| (reader.charts)(&reader.own(&report.results)));
    let charts: Vec<_> = own.flatten().collect();
    html! {
        @if !charts.is_empty() {
            h2 { "Every sample" }
            p.common { (DOTS) }
            @for chart in charts {
                figure { figcaption { (chart.title) } (PreEscaped(chart.svg)) }
            }
        }
    }
}

/// How the samples of everything else spread, to be opened where somebody doubts a figure.
fn distributions(report: &Report, readers: &[Reader]) -> Markup {
    let scenarios = charts::distributions::all(&report.results, readers);
    html! {
        @if !scenarios.is_empty() {
            h2 { "Distributions" }
            p.common {
                (DOTS) " Of many samples there is a line: the part of them that does not exceed a value."
            }
            @for scenario in &scenarios {
                details open[scenarios.len() == 1] {
                    summary { (scenario.name) " (" (scenario.charts.len()) ")" }
                    @for chart in &scenario.charts {
                        figure { figcaption { (chart.title) } (PreEscaped(&chart.svg)) }
                    }
                }
            }
        }
    }
}

/// What a reader must know before quoting any of it.
fn meaning(report: &Report, readers: &[Reader]) -> Markup {
    let is_guest = report.host.virtualisation.hypervisor.0 == Some(true);
    let measured = readers.iter().filter(|reader| report.results.iter().any(reader.reads));
    let mut limits: Vec<&str> = Vec::new();
    for sentence in measured.flat_map(|reader| reader.meaning) {
        if !limits.contains(sentence) {
            limits.push(sentence);
        }
    }
    html! {
        h2 { "What limits the meaning of these figures" }
        ul {
            li { "Times belong to this machine and this run. Ratios within the run are what may be compared; counts are exact everywhere." }
            @if is_guest {
                li { "This machine is itself a guest: its times are those of two hypervisors, and other guests share its caches and memory." }
            }
            @for sentence in limits { li { (sentence) } }
        }
        @if !report.repeated.is_empty() {
            h2 { (super::text::REPEATED) }
            ul { @for answer in &report.repeated { li { (answer.line()) } } }
        }
        @if !report.skipped.is_empty() {
            h2 { "Not measured" }
            ul { @for skipped in &report.skipped { li { b { (skipped.what) } ": " (skipped.reason) } } }
        }
    }
}

fn host_section(report: &Report) -> Markup {
    let host = &report.host;
    let bytes =
        |known: &Known<u64>| known.0.map_or_else(|| known.to_string(), crate::numbers::bytes);
    let yes_or_no = |known: Known<bool>| match known.0 {
        Some(true) => "yes".to_owned(),
        Some(false) => "no".to_owned(),
        None => known.to_string(),
    };
    let guest = yes_or_no(host.virtualisation.hypervisor);
    let turbo = yes_or_no(host.cpu.turbo);
    let mut lines = vec![
        ("name".to_owned(), host.name.to_string()),
        ("CPU".to_owned(), host.cpu.model.to_string()),
        ("architecture".to_owned(), host.cpu.architecture.to_string()),
        ("CPUs usable".to_owned(), host.cpu.usable.to_string()),
        ("microcode".to_owned(), host.cpu.microcode.to_string()),
        ("frequency governor".to_owned(), host.cpu.governor.to_string()),
        ("frequency, MHz".to_owned(), host.cpu.mhz.to_string()),
        ("turbo".to_owned(), turbo),
        ("SMT".to_owned(), host.cpu.smt.to_string()),
        ("kernel".to_owned(), host.kernel.release.to_string()),
        ("kernel version".to_owned(), host.kernel.version.to_string()),
        ("kernel command line".to_owned(), host.kernel.command_line.to_string()),
        ("itself a guest".to_owned(), guest),
        ("machine".to_owned(), host.virtualisation.product.to_string()),
        ("memory".to_owned(), bytes(&host.memory.total)),
        ("memory available".to_owned(), bytes(&host.memory.available)),
        ("NUMA nodes".to_owned(), host.numa_nodes.to_string()),
        ("THP enabled".to_owned(), host.thp.enabled.to_string()),
        ("THP defrag".to_owned(), host.thp.defrag.to_string()),
        ("ASLR".to_owned(), host.aslr.to_string()),
        ("/dev/kvm".to_owned(), host.kvm.device.clone()),
    ];
    for pool in &host.hugetlb {
        let state = format!("{} pages, {} free", pool.total, pool.free);
        lines.push((format!("hugetlb {}", Size(pool.page_size)), state));
    }
    for (name, mitigation) in &host.cpu.mitigations {
        lines.push((format!("vulnerability {}", name.replace('_', " ")), mitigation.to_string()));
    }
    for (module, parameters) in &host.kvm.parameters {
        for (name, value) in parameters {
            lines.push((format!("{module}.{name}"), value.to_string()));
        }
    }
    html! {
        h2 { "The host" }
        table.host { tbody { @for (name, value) in &lines { tr { td { (name) } td { (value) } } } } }
    }
}

/// The command line with quotes where a shell needs them.
fn command_line(command: &[String]) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./,=:".contains(c);
    let quoted = command.iter().map(|word| {
        if !word.is_empty() && word.chars().all(plain) {
            word.clone()
        } else {
            format!("'{}'", word.replace('\'', r"'\''"))
        }
    });
    quoted.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake;

    #[test]
    fn the_page_refers_to_nothing_outside_itself() {
        let page = render(&fake::report(), &[]);
        for reference in ["://", "src=", "<link", "@import", "url(", "<script", "href="] {
            assert!(!page.contains(reference), "the page contains {reference}");
        }
    }

    #[test]
    fn distributions_are_closed_where_there_are_many() {
        let mut report = Report { results: fake::guests(), ..fake::report() };
        report.results.iter_mut().for_each(|m| m.samples = vec![0.5; 7]);
        let page = render(&report, &[]);
        assert_eq!(page.matches("<details>").count(), 2);
        report.results.retain(|m| m.scenario == "execute");
        assert_eq!(render(&report, &[]).matches("<details open>").count(), 1);
    }

    #[test]
    fn what_the_host_says_is_text_and_never_markup() {
        let page = render(&fake::report(), &[]);
        assert!(page.contains("Example CPU &lt;5&gt;"));
        assert!(!page.contains("<5>"));
    }

    #[test]
    fn the_command_line_can_be_pasted() {
        let command = ["slat", "-o", "a b", "it's", ""].map(str::to_owned);
        assert_eq!(command_line(&command), r"slat -o 'a b' 'it'\''s' ''");
    }
}
