//! Published figures of the ideas that led to Slat, with their sources, and the commands that
//! measure the same here.

use slat_lab::record::Measurement;
use slat_lab::scenario::{self, Scenario};
use slat_lab::session::Session;
use slat_lab::size::Size;

/// A figure and its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PublishedFigure {
    /// The figure as published.
    pub figure: &'static str,
    /// The measured quantity, and the publication.
    pub source: &'static str,
}

/// Source of the gains of the proposed walks that skip the last level.
pub const SKIP_LEVELS: &str = "“Optimize S2 page splitting” (RFC, May 2026): a 1 GiB guest on a \
    software model, all split as logging is enabled";

/// The published change of the split's time, by the size of the pages that backed the guest.
pub const SPLIT_CHANGES: [(Size, &str); 3] =
    [(Size(4 << 10), "−97.33 %"), (Size(2 << 20), "−19.82 %"), (Size(1 << 30), "−20.65 %")];

/// The split alone, transparent huge pages.
pub const SPLIT: PublishedFigure = PublishedFigure { figure: "0.80 ×", source: SKIP_LEVELS };

/// The whole call, on hardware: mean of three granules, transparent huge pages, logging enabled.
pub const SPLIT_CALL: PublishedFigure = PublishedFigure {
    figure: "0.88 ×",
    source: "results from hardware in answer to the same proposal (29 May 2026), −11.9 %",
};

/// Time to execute from all memory of a guest with 96 vCPUs on 1g hugetlb pages, after the change
/// by before.
pub const EXECUTE: PublishedFigure = PublishedFigure {
    figure: "0.039 ×",
    source: "“Split huge pages mapped by the TDP MMU on fault” (v2, October 2022): 96 vCPUs that \
        execute from 1g pages, 0.112 s by 2.90 s",
};

/// Time of a guest's second fill under memory pressure.
pub const AGEING: PublishedFigure = PublishedFigure {
    figure: "0.80 ×",
    source: "“locklessly clear the accessed bit” (v2, May 2023): a guest's second fill under \
        memory pressure, 51 s by 64 s",
};

/// Time of a boot in which caches come on vCPU by vCPU.
pub const FLUSH: PublishedFigure = PublishedFigure {
    figure: "0.15 ×",
    source: "“Optimize cache flush by only flushing on vcpu0” (RFC, April 2025): the boot of 64 \
        vCPUs and 128 GiB, 5 s by 33 s",
};

/// Published times of a table's columns: for each row, pairs of column and time.
pub type Rows = &'static [(&'static str, &'static [(&'static str, &'static str)])];

/// The phases of [`EXECUTE`], before and after.
pub const EXECUTE_PHASES: Rows = &[
    ("published, before", &[("populate", "2.75 s"), ("execute", "2.90 s")]),
    ("published, after", &[("populate", "2.73 s"), ("execute", "112 ms")]),
];

/// A command, and its results.
#[derive(Debug, Default)]
pub struct Ran {
    /// The command line.
    pub command: String,
    /// What it measured.
    pub results: Vec<Measurement>,
}

impl Ran {
    /// Runs a scenario by its command line after its name.
    ///
    /// # Errors
    /// The errors of the scenario.
    pub fn by<S: Scenario>(line: &str, session: &mut Session) -> anyhow::Result<Self> {
        let results = scenario::run::<S>(line, session)?;
        let command = format!("slat-bench {} {line}", S::NAME).trim_end().to_owned();
        Ok(Self { command, results })
    }

    /// Returns a figure of one way.
    pub fn figure(&self, way: &str, name: &str) -> Option<&Measurement> {
        let named = |m: &&Measurement| m.params.get("figure").is_some_and(|figure| figure == name);
        self.results.iter().find(|m| m.variant == way && named(m))
    }

    /// Returns the samples of a figure of one way; none if it was not measured.
    pub fn samples(&self, way: &str, figure: &str) -> &[f64] {
        self.figure(way, figure).map_or(&[], |m| &m.samples)
    }

    /// Returns a figure of one way by that of another, by round.
    pub fn quotients(&self, of: &str, by: &str, figure: &str) -> Vec<f64> {
        quotients(self.samples(of, figure), self.samples(by, figure))
    }

    /// Returns the bytes whose cache lines were maintained in one way of switching caches.
    pub fn maintained(&self, way: &str) -> Option<f64> {
        let counts = &self.figure(way, SWITCHES)?.counts;
        Some((counts["bytes-switching"] + counts["bytes-touching"]) as f64)
    }
}

/// The figure of switches of caches.
pub const SWITCHES: &str = "switches, all vCPUs";

/// Returns the quotients of two figures, by round.
pub fn quotients(of: &[f64], by: &[f64]) -> Vec<f64> {
    of.iter().zip(by).map(|(of, by)| of / by).collect()
}
