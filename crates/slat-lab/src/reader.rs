//! How the results of a scenario read: what reports take from it.

use crate::record::Measurement;
use crate::table::Table;

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
    /// Their tables, the one that answers first.
    pub tables: fn(&[Measurement]) -> Vec<Table>,
    /// Tables that are too long for a terminal: on the page alone.
    pub long: fn(&[Measurement]) -> Vec<Table>,
    /// Charts of their own.
    pub charts: fn(&[Measurement]) -> Vec<Chart>,
    /// Whether these show every sample, so that it is not drawn a second time.
    pub draws_samples: bool,
    /// What limits the meaning of their figures, a sentence or two each.
    pub meaning: &'static [&'static str],
}

impl Reader {
    /// Of no results.
    pub const NONE: Self = Self {
        reads: |_| false,
        tables: |_| Vec::new(),
        long: |_| Vec::new(),
        charts: |_| Vec::new(),
        draws_samples: false,
        meaning: &[],
    };

    /// Its results, of all.
    pub fn own(&self, results: &[Measurement]) -> Vec<Measurement> {
        results.iter().filter(|m| (self.reads)(m)).cloned().collect()
    }
}
