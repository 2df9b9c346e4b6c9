//! Renderers of this program's results, which turn them into sentences, tables and charts.

use crate::{explain, ideas, kvm};
use slat_bench::guest::age::Age;
use slat_bench::guest::cache_toggle::CacheToggle;
use slat_bench::guest::execute::Execute;
use slat_bench::guest::tables::RATIOS;
use slat_bench::split;
use slat_lab::renderer::{Renderer, Renderers};
use slat_lab::scenario::{Scenario, Scenarios};

/// Returns the renderers in the order of the report: guests under KVM, then the ideas, then the
/// measurements from which the ideas' figures are computed.
pub fn renderers() -> Renderers {
    let evidence =
        [split::RENDERER, RATIOS, Execute::RENDERER, Age::RENDERER, CacheToggle::RENDERER];
    let evidence = evidence.map(|renderer| Renderer {
        folded: true,
        verdict: Renderer::NONE.verdict,
        ..renderer
    });
    let own =
        [&kvm::Tunes::renderers()[..], &kvm::Guests::renderers(), &[explain::RENDERER]].concat();
    let each = [&own[..], &[ideas::RENDERER], &evidence].concat();
    Renderers { each, params: crate::params::PARAMS }
}

#[cfg(test)]
mod tests {
    use super::*;
    use slat_bench::split::Split;
    use slat_kvm::phase::Phase;
    use slat_lab::fake;
    use slat_lab::record::Measurement;
    use slat_lab::report::{html, tables, text};

    #[test]
    fn a_whole_report_reads_like_this() {
        insta::assert_snapshot!(text::render(&fake::report(), &renderers(), 120));
    }

    #[test]
    fn a_report_on_kvm_guests_shows_losses_and_stalls() {
        let results = fake::kvm();
        let mut printed = String::new();
        let tables = tables::all(&results, &renderers());
        tables.iter().for_each(|table| text::grid(&mut printed, table, 120));
        let explained = explain::tables(&explain::explain(&results));
        explained.iter().for_each(|table| text::grid(&mut printed, table, 120));
        insta::assert_snapshot!(printed);
    }

    #[test]
    fn results_of_the_engine_are_not_read_as_those_of_kvm() {
        let engine = fake::kvm().into_iter().map(|m| Measurement { target: "engine".into(), ..m });
        let engine: Vec<_> = engine.collect();
        let guests = Renderers { each: kvm::Guests::renderers(), ..Renderers::default() };
        let tables = tables::all(&engine, &guests);
        assert!(tables.iter().all(|table| table.title.ends_with("(engine)")));
    }

    #[test]
    fn the_page_has_every_table_and_every_sample() {
        let report = fake::report();
        let page = html::render(&report, &renderers());
        for table in tables::all(&report.results, &renderers()) {
            assert!(page.contains(&table.title), "{}", table.title);
        }
        let splits = report.results.iter().filter(|m| m.scenario == Split::NAME);
        let whole_rounds = |m: &&Measurement| Phase::Dirty == *m.variant && !m.is_vcpu();
        let rounds = report.results.iter().filter(whole_rounds);
        let dots: usize = splits.chain(rounds).map(|m| m.samples.len()).sum();
        assert_eq!(page.matches("<circle").count(), dots);
    }

    #[test]
    fn every_chart_colour_is_readable_on_dark_and_light_pages() {
        let mut report = fake::report();
        report.results.extend(fake::guests());
        report.results.iter_mut().for_each(|m| m.samples = vec![0.5, 0.6, 0.7, 0.8, 0.9]);
        let page = html::render(&report, &renderers());
        let style = page.split("</style>").next().unwrap();
        // Light blue and orange, which can be read on both backgrounds.
        let both = ["#56B4E9", "#E69F00"];
        let colours = page.split("<svg").skip(1).flat_map(|svg| {
            let pieces = ["fill=\"#", "stroke=\"#"].map(|key| svg.split(key).skip(1));
            pieces.into_iter().flatten().map(|piece| format!("#{}", &piece[..6]))
        });
        for colour in colours {
            let replaced = style.contains(&format!("[fill=\"{colour}\"]"));
            assert!(replaced || both.contains(&&*colour), "{colour}");
        }
    }
}
