//! How the results of a scenario read: what reports take from it.

use crate::record::Measurement;
use crate::table::Table;
use crate::verdict::Verdict;

/// A chart and what it shows.
pub struct Chart {
    /// What it shows.
    pub title: String,
    /// The `<svg>` element.
    pub svg: String,
}

/// What a report shows of some results.
#[derive(Clone, Copy)]
pub struct Reader {
    /// Whether a result is one of them. A result that no reader of a program reads has a row in a
    /// plain table.
    pub reads: fn(&Measurement) -> bool,
    /// What they answer, in plain words.
    pub verdict: fn(&[Measurement]) -> Verdict,
    /// Their tables, the one that answers first.
    pub tables: fn(&[Measurement]) -> Vec<Table>,
    /// Tables that are too long for a terminal: on the page alone.
    pub long: fn(&[Measurement]) -> Vec<Table>,
    /// Charts that answer, beside the tables.
    pub plots: fn(&[Measurement]) -> Vec<Chart>,
    /// Charts of their own.
    pub charts: fn(&[Measurement]) -> Vec<Chart>,
    /// Whether these show every sample, so that it is not drawn a second time.
    pub draws_samples: bool,
    /// Whether a page folds the tables away: they are evidence for what others say.
    pub folded: bool,
    /// What limits the meaning of their figures, a sentence or two each.
    pub meaning: &'static [&'static str],
}

impl Reader {
    /// Of no results.
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

    /// Its results, of all.
    pub fn own(&self, results: &[Measurement]) -> Vec<Measurement> {
        results.iter().filter(|m| (self.reads)(m)).cloned().collect()
    }
}

/// What all readers have to say, in their order.
pub fn verdict(results: &[Measurement], readers: &[Reader]) -> Verdict {
    let mut all = Verdict::default();
    for reader in readers {
        let Verdict { says, settings } = (reader.verdict)(&reader.own(results));
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
        const SPLITS: Reader = Reader {
            reads: |m| m.scenario == "split",
            verdict: |results| Verdict::says([format!("{} splits", results.len())]),
            ..Reader::NONE
        };
        const NOTHING: Reader = Reader {
            verdict: |results| Verdict::says(results.iter().map(|m| m.variant.clone())),
            ..Reader::NONE
        };
        let results = fake::report().results;
        let splits = results.iter().filter(|m| m.scenario == "split").count();
        let all = verdict(&results, &[NOTHING, SPLITS]);
        assert_eq!(all, Verdict::says([format!("{splits} splits")]));
        assert!(!all.is_empty() && verdict(&[], &[NOTHING]).is_empty());
    }
}
