//! Limits of the machine's memory: the least time that the same work can take here.

use super::{SplitMoment, What};
use serde_json::{Map, Value};
use slat_lab::cli::param_of;
use slat_lab::numbers::{three_digits, with_spread};
use slat_lab::record::Measurement;
use slat_lab::report::tables::Row;
use slat_lab::size::Size;
use slat_lab::stats::Summary;
use slat_lab::table::{NOTHING, Table};

/// Name of the limits in results.
pub const SCENARIO: &str = "limit";

/// The work that bounds a split from below.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// New tables must be filled.
    Fill,
    /// Tables above the last level must be read.
    ReadUpper,
    /// Each page's entry must change by one compare-and-swap.
    CompareAndSwap,
    /// Both: new tables must be filled, and then each page's entry must change.
    FillAndSwap,
    /// Everything is already split; only reading what the caller has just walked shows it.
    Nothing,
}

impl Limit {
    /// Returns the limit of the split that `row` measured.
    pub fn that_bounds(row: &Row) -> Option<Self> {
        let target = row.size("target_size").unwrap_or(Size(4096));
        let already_split = row.size("backing")? == target;
        let (what, when) = (param_of(&row.params, "what")?, param_of(&row.params, "when")?);
        Some(match (already_split, what, when) {
            (false, What::Call, SplitMoment::Clear) => Self::FillAndSwap,
            (false, ..) => Self::Fill,
            (true, What::Call, _) => Self::CompareAndSwap,
            (true, _, SplitMoment::Clear) => Self::Nothing,
            (true, ..) => Self::ReadUpper,
        })
    }

    /// Returns the variants of the scenario `limit` that measure it; their times add up.
    pub fn variants(self) -> &'static [&'static str] {
        match self {
            Self::Fill => &["fill-plain"],
            Self::ReadUpper => &["read-upper"],
            Self::CompareAndSwap => &["cas"],
            Self::FillAndSwap => &["fill-plain", "cas"],
            Self::Nothing => &[],
        }
    }

    /// Returns its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::FillAndSwap => "fill + cas",
            other => other.variants().first().copied().unwrap_or_default(),
        }
    }
}

/// Returns the measurement of a limit for the same tables: among those that contradict none of
/// `params`, the one that shares most of them.
pub fn limit_of<'a>(
    results: &'a [Measurement],
    variant: &str,
    params: &Map<String, Value>,
) -> Option<&'a Measurement> {
    let shared =
        |m: &Measurement| m.params.iter().filter(|(k, v)| params.get(*k) == Some(v)).count();
    let contradicts = |m: &Measurement| {
        m.params.iter().any(|(name, value)| params.get(name).is_some_and(|other| other != value))
    };
    let limits = results.iter().filter(|m| m.scenario == SCENARIO && m.variant == variant);
    // The first of equals is right; `max_by_key` returns the last, so the order is reversed.
    limits.filter(|m| !contradicts(m)).rev().max_by_key(|m| shared(m))
}

/// Returns a table with one row for each kind of memory work. A limit that took turns with several
/// splits was measured several times, on the same bytes: the row has all of its samples.
pub fn table(results: &[Measurement]) -> Option<Table> {
    let mut pools: Vec<Pool> = Vec::new();
    for measurement in results.iter().filter(|m| m.scenario == SCENARIO) {
        let pool = Pool::of(measurement);
        match pools.iter_mut().find(|known| known.is_like(&pool)) {
            Some(known) => known.samples.extend(pool.samples),
            None => pools.push(pool),
        }
    }
    if pools.is_empty() {
        return None;
    }
    pools.sort_by_key(|pool| VARIANTS.iter().position(|(variant, _)| *variant == pool.variant));
    let number = |value: Option<f64>| value.map_or_else(|| NOTHING.to_owned(), three_digits);
    let rows = pools.iter().filter_map(|pool| {
        let summary = Summary::of(&pool.samples)?;
        Some(vec![
            name(pool.variant).to_owned(),
            number(pool.bytes.map(|bytes| bytes / (1u64 << 20) as f64)),
            with_spread(&summary),
            number(pool.bytes.map(|bytes| bytes / summary.median / 1e9)),
            number(pool.ptes.map(|ptes| summary.median / ptes * 1e9)),
        ])
    });
    let table = Table::new("What the machine allows", 1, "what|MiB|time|GB/s|ns an entry", rows);
    Some(table.noting(
        "The same bytes and entries, with nothing to decide about them, in turns with the splits. \
         Each ratio above is to the limit that took turns with its own row.",
    ))
}

/// Samples of the same work.
struct Pool<'a> {
    variant: &'a str,
    bytes: Option<f64>,
    ptes: Option<f64>,
    samples: Vec<f64>,
}

impl<'a> Pool<'a> {
    fn of(measurement: &'a Measurement) -> Self {
        let amount = |name: &str| {
            measurement.params.get(name).and_then(Value::as_f64).filter(|amount| *amount > 0.0)
        };
        Self {
            variant: &measurement.variant,
            bytes: amount("bytes"),
            ptes: amount("entries"),
            samples: measurement.samples.clone(),
        }
    }

    fn is_like(&self, other: &Self) -> bool {
        // Blocks of 1g need tables of the level between, one in five hundred more than blocks of 2m
        // do. That is too little for a separate row.
        let close = |a: Option<f64>, b: Option<f64>| match (a, b) {
            (Some(a), Some(b)) => (a / b - 1.0).abs() < 0.01,
            (a, b) => a == b,
        };
        self.variant == other.variant
            && close(self.bytes, other.bytes)
            && close(self.ptes, other.ptes)
    }
}

/// The variants in the order of the table, with a description of each for readers outside the
/// project.
const VARIANTS: [(&str, &str); 5] = [
    ("fill-plain", "fill-plain: fill warm tables, a plain loop"),
    ("fill-best", "fill-best: the same, the best store there is"),
    ("read", "read: read the tables of the last level"),
    ("read-upper", "read-upper: read those above"),
    ("cas", "cas: a compare-and-swap on each entry of the last level"),
];

fn name(variant: &str) -> &str {
    VARIANTS.iter().find(|(known, _)| *known == variant).map_or(variant, |(_, name)| name)
}
