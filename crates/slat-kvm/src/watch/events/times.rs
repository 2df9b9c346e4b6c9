//! How long vCPUs are out of the guest, as the programs account for it: count, sum, longest, and a
//! histogram.
//!
//! Each bucket is a quarter of an octave: from 32 ns to 40, to 48, to 56, to 64 ns, and so on. The
//! first bucket also has all shorter times, and the last one, which begins at 120 s, all longer
//! ones. No exit is shorter than the first; a vCPU without work may be longer out of the guest than
//! the last.

use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Duration;

/// The histogram covers 32 octaves, from 2^5 ns to 2^37 ns.
pub(crate) const FIRST: u32 = 5;
pub(crate) const OCTAVES: u32 = 32;
/// Buckets of a histogram.
pub(crate) const BUCKETS: usize = OCTAVES as usize * 4;

/// Words of one [`Why`]'s account: count, sum, longest, buckets.
pub(crate) const STRIDE: usize = 3 + BUCKETS;
pub(crate) const SUM: usize = 1;
pub(crate) const LONGEST: usize = 2;

/// Why a vCPU left the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Why {
    /// A fault of a read from memory.
    FaultRead,
    /// A fault of a write to a page that was not mapped.
    FaultWrite,
    /// A fault of a write to a mapped page that was write-protected, by a dirty log or because it
    /// is shared.
    FaultProtected,
    /// A fault of an instruction fetch.
    FaultExecute,
    /// The vCPU had no work.
    Idle,
    /// Anything else: devices, interrupts, hypercalls.
    Other,
}

impl Why {
    /// All reasons. The programs use their indices as numbers.
    pub const ALL: [Self; 6] = [
        Self::FaultRead,
        Self::FaultWrite,
        Self::FaultProtected,
        Self::FaultExecute,
        Self::Idle,
        Self::Other,
    ];

    /// Returns whether the reason is a fault.
    pub const fn is_fault(self) -> bool {
        !matches!(self, Self::Idle | Self::Other)
    }
}

/// Times out of the guest for one reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Times {
    /// Number of times.
    pub count: u64,
    /// Sum, in nanoseconds.
    pub total_ns: u64,
    /// Longest time, in nanoseconds.
    pub longest_ns: u64,
    buckets: [u64; BUCKETS],
}

impl Default for Times {
    fn default() -> Self {
        Self { count: 0, total_ns: 0, longest_ns: 0, buckets: [0; BUCKETS] }
    }
}

/// Returns the first nanosecond of a bucket, and the first one beyond it.
fn bounds(bucket: usize) -> (u64, u64) {
    let begin = |bucket: usize| {
        let quarter = 1u64 << (FIRST as usize + bucket / 4 - 2);
        quarter * (4 + bucket as u64 % 4)
    };
    (if bucket == 0 { 0 } else { begin(bucket) }, begin(bucket + 1))
}

impl Times {
    /// Reads the words that a program wrote.
    pub(crate) fn of(words: &[u64]) -> Self {
        let mut buckets = [0; BUCKETS];
        buckets.copy_from_slice(&words[3..STRIDE]);
        Self { count: words[0], total_ns: words[SUM], longest_ns: words[LONGEST], buckets }
    }

    /// Adds the times of `others`.
    pub fn add(&mut self, others: &Self) {
        self.count += others.count;
        self.total_ns += others.total_ns;
        self.longest_ns = self.longest_ns.max(others.longest_ns);
        self.buckets.iter_mut().zip(others.buckets).for_each(|(own, more)| *own += more);
    }

    /// Returns the time below which `share` of the times lie, within an eighth if it is between 40
    /// ns and 2 minutes; `None` if there are none.
    pub fn quantile(&self, share: f64) -> Option<Duration> {
        let all: u64 = self.buckets.iter().sum();
        let wanted = ((all as f64 * share).ceil() as u64).clamp(1, all.max(1));
        let mut seen = 0;
        let bucket = self.buckets.iter().position(|count| {
            seen += count;
            seen >= wanted
        })?;
        let middle = bounds(bucket).0.midpoint(self.end(bucket)).min(self.longest_ns);
        Some(Duration::from_nanos(middle))
    }

    /// Returns the nanosecond before which a bucket ends: for the last one, the longest time does.
    fn end(&self, bucket: usize) -> u64 {
        match bucket + 1 {
            BUCKETS => bounds(bucket).1.max(self.longest_ns.saturating_add(1)),
            _ => bounds(bucket).1,
        }
    }

    /// Returns the buckets that are not empty: the nanosecond that each ends before, and its count.
    pub fn histogram(&self) -> impl Iterator<Item = (u64, u64)> {
        let buckets = self.buckets.iter().enumerate().filter(|(_, count)| **count > 0);
        buckets.map(|(bucket, count)| (self.end(bucket), *count))
    }
}

/// Times by reason.
pub type Stalls = BTreeMap<Why, Times>;

/// Returns the times of all faults.
pub fn faults(stalls: &Stalls) -> Times {
    let mut sum = Times::default();
    stalls.iter().filter(|(why, _)| why.is_fault()).for_each(|(_, times)| sum.add(times));
    sum
}

/// Times as they are shown: their histogram has the upper bound of each class, and its count.
#[derive(Serialize, schemars::JsonSchema)]
struct TimesSummary {
    count: u64,
    total_ns: u64,
    p50_ns: u64,
    p99_ns: u64,
    longest_ns: u64,
    histogram: Vec<(u64, u64)>,
}

impl schemars::JsonSchema for Times {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Times".into()
    }

    fn json_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
        TimesSummary::json_schema(generator)
    }
}

impl Serialize for Times {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let quantile = |share| self.quantile(share).map_or(0, |time| time.as_nanos() as u64);
        TimesSummary {
            count: self.count,
            total_ns: self.total_ns,
            p50_ns: quantile(0.5),
            p99_ns: quantile(0.99),
            longest_ns: self.longest_ns,
            histogram: self.histogram().collect(),
        }
        .serialize(serializer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_follow_each_other_without_a_gap() {
        assert_eq!((bounds(0), bounds(1)), ((0, 40), (40, 48)));
        for bucket in 1..BUCKETS {
            assert_eq!(bounds(bucket - 1).1, bounds(bucket).0, "{bucket}");
        }
        assert_eq!(bounds(BUCKETS - 1).1, 1 << (FIRST + OCTAVES));
    }

    #[test]
    fn a_quantile_lies_within_an_eighth_from_40_ns_to_2_minutes() {
        let all = (5..37).flat_map(|bit| (8..16).map(move |eighth| (1u64 << bit) / 8 * eighth));
        for ns in all.filter(|ns| (40..=120_000_000_000).contains(ns)) {
            // Others are longer, so that the longest time says nothing.
            let mut times = Times { count: 100, longest_ns: 130_000_000_000, ..Times::default() };
            times.buckets[(0..BUCKETS).find(|it| ns < bounds(*it).1).unwrap()] = 100;
            let told = times.quantile(0.5).unwrap().as_nanos() as f64;
            assert!((told / ns as f64 - 1.0).abs() <= 0.125, "{ns} {told}");
        }
        let mut times = Times { count: 1, longest_ns: 1 << 40, ..Times::default() };
        times.buckets[BUCKETS - 1] = 1;
        assert_eq!(times.histogram().collect::<Vec<_>>(), [((1 << 40) + 1, 1)]);
    }

    #[test]
    fn a_quantile_is_exact_to_an_eighth_and_at_most_the_longest() {
        let mut times = Times { count: 100, longest_ns: 1_000_000, ..Times::default() };
        assert_eq!(times.quantile(0.5), None);
        let bucket = |ns: u64| (0..BUCKETS).find(|it| ns < bounds(*it).1).unwrap();
        times.buckets[bucket(10_000)] = 98;
        times.buckets[bucket(1_000_000)] = 2;
        let ns = |share| times.quantile(share).unwrap().as_nanos() as f64;
        assert!((ns(0.5) / 10_000.0 - 1.0).abs() < 0.125, "{}", ns(0.5));
        assert!((ns(0.99) / 1_000_000.0 - 1.0).abs() < 0.125, "{}", ns(0.99));
        assert!(ns(1.0) <= 1_000_000.0);
        assert_eq!(ns(0.0), ns(0.5));
        let mut both = times.clone();
        both.add(&times);
        assert_eq!(
            (both.count, both.longest_ns, both.quantile(0.5)),
            (200, 1_000_000, times.quantile(0.5))
        );
    }
}
