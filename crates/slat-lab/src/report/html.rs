//! `report.html`: a single file that needs neither the network nor other files.

use super::{charts, tables};
use crate::host::Maybe;
use crate::numbers::seconds;
use crate::record::Report;
use crate::renderer::{Chart, Renderers};
use crate::size::Size;
use crate::table::Table;
use crate::trust::date;
use crate::verdict::Verdict;
use maud::{DOCTYPE, Markup, PreEscaped, html};

/// Charts are drawn in colours for a light page. The style replaces each of them for a dark one.
const STYLE: &str = include_str!("page.css");

/// Renders the report as a page: the answers, then plots and tables for decisions, then the
/// evidence, which is folded away.
pub fn render(report: &Report, renderers: &Renderers) -> String {
    let mut sections = answers(report, renderers);
    let first_of_evidence = sections.len();
    sections.extend(evidence(report, renderers));
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            (head("What memory management costs guests"))
            body {
                h1 { "What memory management costs guests" }
                p.quiet[!report.is_noisy()].warning[report.is_noisy()] { (report.trust.line()) }
                @if report.partial {
                    p.warning { "Interrupted: this is a part of what was asked for." }
                }
                (verdict(&report.verdict))
                p.lead { (when(report)) }
                nav { ul { @for (place, section) in sections.iter().enumerate() {
                    li { a href=(format!("#s{place}")) { (section.title) } }
                } } }
                @for (place, section) in sections.iter().enumerate() {
                    @if place < first_of_evidence {
                        section id=(format!("s{place}")) {
                            h2 { (section.title) } (section.content)
                        }
                    } @else {
                        details id=(format!("s{place}")) {
                            summary { (section.title) } (section.content)
                        }
                    }
                }
                h2 { "Run it again" }
                pre { (command_line(&report.command)) }
            }
        }
    };
    page.into_string()
}

fn head(title: &str) -> Markup {
    html! {
        head {
            meta charset="utf-8";
            meta name="viewport" content="width=device-width, initial-scale=1";
            title { (title) ": Slat" }
            style { (PreEscaped(STYLE)) }
        }
    }
}

/// Renders a page that is no report of a run, with tables and charts in the same style.
pub fn page(
    title: &str,
    lead: &str,
    says: &[String],
    tables: &[Table],
    charts: &[Chart],
) -> String {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            (head(title))
            body {
                h1 { (title) }
                p.lead { (lead) }
                @if !says.is_empty() { ul.verdict { @for sentence in says { li { (sentence) } } } }
                @for section in tables.iter().map(table_section) {
                    h2 { (section.title) } (section.content)
                }
                @for chart in charts {
                    figure { figcaption { (chart.title) } (PreEscaped(&chart.svg)) }
                }
            }
        }
    };
    page.into_string()
}

/// A part of a page on what several commands found.
#[derive(Clone, Debug, Default)]
pub struct Part {
    /// What was done.
    pub what: String,
    /// What came of it, in a line.
    pub result: String,
    /// The command that repeats it.
    pub command: String,
    /// Lines of output that belong to the result.
    pub lines: Vec<String>,
    /// Tables that belong to it.
    pub tables: Vec<Table>,
}

/// Renders a page of parts: their results as a list, then each with its command.
pub fn parts(title: &str, parts: &[Part]) -> String {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            (head(title))
            body {
                h1 { (title) }
                ul.verdict { @for (place, part) in parts.iter().enumerate() {
                    li { a href=(format!("#s{place}")) { (part.what) } ": " (part.result) }
                } }
                @for (place, part) in parts.iter().enumerate() {
                    section id=(format!("s{place}")) {
                        h2 { (part.what) }
                        p { (part.result) }
                        pre { (part.command) }
                        @if !part.lines.is_empty() { pre { (part.lines.join("\n")) } }
                        @for section in part.tables.iter().map(table_section) {
                            h3 { (section.title) } (section.content)
                        }
                    }
                }
            }
        }
    };
    page.into_string()
}

/// A section of the page, with an entry in the table of contents.
struct Section {
    title: String,
    content: Markup,
}

/// Returns the sections for readers who have to decide.
fn answers(report: &Report, renderers: &Renderers) -> Vec<Section> {
    let mut sections = Vec::new();
    for renderer in &renderers.each {
        let own = renderer.own(&report.results);
        sections.extend((renderer.plots)(&own).into_iter().map(|chart| Section {
            title: chart.title,
            content: html! { figure { (PreEscaped(chart.svg)) } },
        }));
        if !renderer.folded {
            sections.extend((renderer.tables)(&own).iter().map(table_section));
        }
    }
    sections.extend(tables::unread(&report.results, renderers).iter().map(table_section));
    if !report.repeated.is_empty() {
        sections.push(Section {
            title: super::text::REPEATED.to_owned(),
            content: html! { ul {
                @for answer in &report.repeated { li { (answer.line()) } }
            } },
        });
    }
    if !report.skipped.is_empty() {
        sections.push(Section {
            title: "Not measured".to_owned(),
            content: html! { ul {
                @for skipped in &report.skipped {
                    li { b { (skipped.what) } ": " (skipped.reason) }
                }
            } },
        });
    }
    sections
}

/// Returns the sections for readers who want to check the answers.
fn evidence(report: &Report, renderers: &Renderers) -> Vec<Section> {
    let section = |title: &str, content| Section { title: title.to_owned(), content };
    let mut sections =
        vec![section("What limits the meaning of these figures", meaning(report, renderers))];
    for renderer in &renderers.each {
        let own = renderer.own(&report.results);
        if renderer.folded {
            sections.extend((renderer.tables)(&own).iter().map(table_section));
        }
        sections.extend((renderer.long)(&own).iter().map(table_section));
    }
    let own =
        renderers.each.iter().map(|renderer| (renderer.charts)(&renderer.own(&report.results)));
    let charts: Vec<_> = own.flatten().collect();
    if !charts.is_empty() {
        sections.push(section(
            "Every sample",
            html! {
                p.common { (DOTS) }
                @for chart in charts {
                    figure { figcaption { (chart.title) } (PreEscaped(chart.svg)) }
                }
            },
        ));
    }
    let scenarios = charts::distributions::all(&report.results, renderers);
    if !scenarios.is_empty() {
        sections.push(section("Distributions", distributions(&scenarios)));
    }
    sections.push(section("The host", host_section(report)));
    sections
}

fn verdict(verdict: &Verdict) -> Markup {
    html! {
        @if !verdict.is_empty() {
            ul.verdict { @for sentence in &verdict.says { li { (sentence) } } }
        }
        @if !verdict.settings.is_empty() {
            p.lead { "To set:" }
            dl { @for setting in &verdict.settings {
                dt { (setting.of) } dd { pre { (setting.line) } }
            } }
        }
    }
}

/// Returns when, for how long, by which version and where the run was.
fn when(report: &Report) -> String {
    let (cpu, kernel) = (&report.host.cpu.model, &report.host.kernel.release);
    let (began, time) = (date(report.trust.began), seconds(report.trust.seconds));
    format!("Measured by slat {} on {cpu}, Linux {kernel}, {began}, in {time}.", report.tool)
}

fn table_section(table: &Table) -> Section {
    let class = |index: usize| if index < table.labels { "label" } else { "" };
    let content = html! {
        p.common { (table.common) }
        div.wide {
            table {
                thead { tr { @for (index, column) in table.columns.iter().enumerate() {
                    th class=(class(index)) { (column) }
                } } }
                tbody { @for row in &table.rows { tr {
                    @for (index, cell) in row.iter().enumerate() {
                        td class=(class(index)) { (cell) }
                    }
                } } }
            }
        }
        @for note in &table.notes { p.note { (note) } }
    };
    Section { title: table.title.clone(), content }
}

/// Explanation of charts of samples.
const DOTS: &str = "Each dot is one sample. Bars behind dots reach from the lower to the upper \
                    quartile, with a mark at the median. Where values spread far, the scale is \
                    logarithmic.";

/// Returns the distributions of all other samples.
fn distributions(scenarios: &[charts::distributions::Scenario]) -> Markup {
    html! {
        p.common {
            (DOTS) " Of many samples there is a line: the part of them that does not exceed a \
                    value."
        }
        @for scenario in scenarios {
            details open[scenarios.len() == 1] {
                summary { (scenario.name) " (" (scenario.charts.len()) ")" }
                @for chart in &scenario.charts {
                    figure { figcaption { (chart.title) } (PreEscaped(&chart.svg)) }
                }
            }
        }
    }
}

/// Returns what readers must know before they quote any figure.
fn meaning(report: &Report, renderers: &Renderers) -> Markup {
    let is_guest = report.host.virtualisation.hypervisor.0 == Some(true);
    let measured =
        renderers.each.iter().filter(|renderer| report.results.iter().any(renderer.reads));
    let mut limits: Vec<&str> = Vec::new();
    for sentence in measured.flat_map(|renderer| renderer.meaning) {
        if !limits.contains(sentence) {
            limits.push(sentence);
        }
    }
    html! {
        ul {
            li { "Times belong to this machine and this run. Ratios within the run are what may be \
                  compared; counts are exact everywhere." }
            @if is_guest {
                li { "This machine is itself a guest: its times are those of two hypervisors, and \
                      other guests share its caches and memory." }
            }
            @for sentence in limits { li { (sentence) } }
        }
    }
}

fn host_section(report: &Report) -> Markup {
    let host = &report.host;
    let bytes =
        |known: &Maybe<u64>| known.0.map_or_else(|| known.to_string(), crate::numbers::bytes);
    let yes_or_no = |known: Maybe<bool>| match known.0 {
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
        table.host { tbody { @for (name, value) in &lines {
            tr { td { (name) } td { (value) } }
        } } }
    }
}

/// Returns the command line, with quotes where a shell needs them.
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
        let page = render(&fake::report(), &Renderers::default());
        for reference in ["://", "src=", "<link", "@import", "url(", "<script"] {
            assert!(!page.contains(reference), "the page contains {reference}");
        }
        assert_eq!(page.matches("href=").count(), page.matches("href=\"#s").count());
    }

    #[test]
    fn distributions_are_closed_where_there_are_many() {
        let mut report = Report { results: fake::guests(), ..fake::report() };
        report.results.iter_mut().for_each(|m| m.samples = vec![0.5; 7]);
        let page = render(&report, &Renderers::default());
        assert_eq!(page.matches("<details>").count(), 2);
        report.results.retain(|m| m.scenario == "execute");
        assert_eq!(render(&report, &Renderers::default()).matches("<details open>").count(), 1);
    }

    #[test]
    fn the_verdict_and_the_contents_come_before_any_table() {
        let verdict = Verdict::of_lines(["It costs little.".to_owned()]);
        let page = render(&Report { verdict, ..fake::report() }, &Renderers::default());
        let at = |text: &str| page.find(text).unwrap_or_else(|| panic!("{text}"));
        assert!(at("A quiet run") < at("It costs little."));
        assert!(at("It costs little.") < at("2023-11-14 22:13:20 UTC, in 12.5 s"));
        assert!(at("12.5 s") < at("<nav>") && at("<nav>") < at("<table"));
        assert!(at("<table") < at("<details") && at("<details") < at("table class=\"host\""));
        for place in 0..page.matches("href=").count() {
            assert!(page.contains(&format!("id=\"s{place}\"")), "{place}");
        }
    }

    #[test]
    fn what_the_host_says_is_text_and_never_markup() {
        let page = render(&fake::report(), &Renderers::default());
        assert!(page.contains("Example CPU &lt;5&gt;"));
        assert!(!page.contains("<5>"));
    }

    #[test]
    fn the_command_line_can_be_pasted() {
        let command = ["slat", "-o", "a b", "it's", ""].map(str::to_owned);
        assert_eq!(command_line(&command), r"slat -o 'a b' 'it'\''s' ''");
    }
}
