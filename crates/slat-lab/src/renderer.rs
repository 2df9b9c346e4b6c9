//! Renderers: how reports present the results of a scenario.

use crate::param::Params;
use crate::record::Measurement;
use crate::table::Table;
use crate::verdict::Verdict;

/// A chart with its title.
pub struct Chart {
    /// Title of the chart.
    pub title: String,
    /// The `<svg>` element.
    pub svg: String,
}

/// A description of how a report presents some of its results.
#[derive(Clone, Copy)]
pub struct Renderer {
    /// Returns whether a result belongs to this renderer. Results without a renderer get a plain
    /// table.
    pub reads: fn(&Measurement) -> bool,
    /// Returns the answer of the results, in plain words.
    pub verdict: fn(&[Measurement]) -> Verdict,
    /// Returns their tables. The one with the answer comes first.
    pub tables: fn(&[Measurement]) -> Vec<Table>,
    /// Returns tables that are too long for a terminal, and appear on the page only.
    pub long: fn(&[Measurement]) -> Vec<Table>,
    /// Returns charts with answers, which appear with the tables.
    pub plots: fn(&[Measurement]) -> Vec<Chart>,
    /// Returns further charts, which appear with the evidence.
    pub charts: fn(&[Measurement]) -> Vec<Chart>,
    /// Whether these charts show every sample, so that the samples are not drawn again.
    pub draws_samples: bool,
    /// Whether a page folds the tables away, because they only support the answers of other
    /// renderers.
    pub folded: bool,
    /// Limits of the results' meaning, in a sentence or two each.
    pub meaning: &'static [&'static str],
}

impl Renderer {
    /// A renderer of no results.
    pub const NONE: Self = Self {
        reads: |_| false,
        verdict: |_| Verdict::default(),
        tables: |_| Vec::new(),
        long: |_| Vec::new(),
        plots: |_| Vec::new(),
        charts: |_| Vec::new(),
        draws_samples: false,
        folded: false,
        meaning: &[],
    };

    /// Returns this renderer's results.
    pub fn own(&self, results: &[Measurement]) -> Vec<Measurement> {
        results.iter().filter(|m| (self.reads)(m)).cloned().collect()
    }
}

/// How a program's reports present its results.
#[derive(Default)]
pub struct Renderers {
    /// The renderers, in the order of a report.
    pub each: Vec<Renderer>,
    /// The parameters that results have.
    pub params: Params,
}

/// Returns the verdicts of all renderers, in their order.
pub fn verdict(results: &[Measurement], renderers: &[Renderer]) -> Verdict {
    let mut all = Verdict::default();
    for renderer in renderers {
        let Verdict { says, settings } = (renderer.verdict)(&renderer.own(results));
        all.says.extend(says);
        all.settings.extend(settings);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake;

    #[test]
    fn readers_speak_in_their_order_and_of_their_own_results_alone() {
        const SPLITS: Renderer = Renderer {
            reads: |m| m.scenario == "split",
            verdict: |results| Verdict::of_lines([format!("{} splits", results.len())]),
            ..Renderer::NONE
        };
        const NOTHING: Renderer = Renderer {
            verdict: |results| Verdict::of_lines(results.iter().map(|m| m.variant.clone())),
            ..Renderer::NONE
        };
        let results = fake::report().results;
        let splits = results.iter().filter(|m| m.scenario == "split").count();
        let all = verdict(&results, &[NOTHING, SPLITS]);
        assert_eq!(all, Verdict::of_lines([format!("{splits} splits")]));
        assert!(!all.is_empty() && verdict(&[], &[NOTHING]).is_empty());
    }
}
