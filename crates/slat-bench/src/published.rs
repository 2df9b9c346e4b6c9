//! Published figures of the ideas that led to Slat, with their sources.

/// A figure and its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Published {
    /// The figure as published.
    pub figure: &'static str,
    /// The measured quantity, and the publication.
    pub source: &'static str,
}

/// Source of the gains of the proposed walks that skip the last level.
pub const SKIP_LEVELS: &str = "“Optimize S2 page splitting” (RFC, May 2026): a 1 GiB guest on a \
    software model, all split as logging is enabled";

/// The published change of the split's time, by the size of the pages that backed the guest.
pub const SPLIT_CHANGES: [(&str, &str); 3] =
    [("4k", "−97.33 %"), ("2m", "−19.82 %"), ("1g", "−20.65 %")];

/// The split alone, transparent huge pages.
pub const SPLIT: Published = Published { figure: "0.80 ×", source: SKIP_LEVELS };

/// The whole call, on hardware: mean of three granules, transparent huge pages, logging enabled.
pub const SPLIT_CALL: Published = Published {
    figure: "0.88 ×",
    source: "results from hardware in answer to the same proposal (29 May 2026), −11.9 %",
};

/// Time to execute from all memory of a guest with 96 vCPUs on 1g hugetlb pages, after the change
/// by before.
pub const EXECUTE: Published = Published {
    figure: "0.039 ×",
    source: "“Split huge pages mapped by the TDP MMU on fault” (v2, October 2022): 96 vCPUs that \
        execute from 1g pages, 0.112 s by 2.90 s",
};

/// Time of a guest's second fill under memory pressure.
pub const AGEING: Published = Published {
    figure: "0.80 ×",
    source: "“locklessly clear the accessed bit” (v2, May 2023): a guest's second fill under \
        memory pressure, 51 s by 64 s",
};

/// Time of a boot in which caches come on vCPU by vCPU.
pub const FLUSH: Published = Published {
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
