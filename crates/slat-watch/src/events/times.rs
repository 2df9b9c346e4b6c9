//! How long vCPUs stand still, as the programs account for it: how often, how long in all, the
//! longest, and a histogram.
//!
//! Buckets are a quarter of an octave each: of 256 ns to 320, to 384, to 448, to 512 ns, and so on.
//! The first has all that was shorter, the last all that was longer than 17 s.

use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Duration;

/// Octaves below 2^8 ns and from 2^34 ns on are not told apart.
pub(crate) const FIRST: u32 = 8;
pub(crate) const OCTAVES: u32 = 26;
/// Buckets of a histogram.
pub(crate) const BUCKETS: usize = OCTAVES as usize * 4;

/// Words of one [`Why`]'s account: count, sum, longest, buckets.
pub(crate) const STRIDE: usize = 3 + BUCKETS;
pub(crate) const SUM: usize = 1;
pub(crate) const LONGEST: usize = 2;

/// Why a vCPU left the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Why {
    /// A fault of a read in memory.
    FaultRead,
    /// Of a write to a page that was not mapped.
    FaultWrite,
    /// Of a write to a page that was mapped, and protected: by a dirty log, or as it is shared.
    FaultProtected,
    /// Of a fetch of instructions.
    FaultExecute,
    /// It had no work.
    Idle,
    /// Anything else: devices, interrupts, hypercalls.
    Other,
}

impl Why {
    /// Each of them; their places are what the programs call them.
    pub const ALL: [Self; 6] = [
        Self::FaultRead,
        Self::FaultWrite,
        Self::FaultProtected,
        Self::FaultExecute,
        Self::Idle,
        Self::Other,
    ];

    /// Whether it is a fault.
    pub const fn is_fault(self) -> bool {
        !matches!(self, Self::Idle | Self::Other)
    }
}

/// The times of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Times {
    /// How many there were.
    pub count: u64,
    /// All of them, in nanoseconds.
    pub total_ns: u64,
    /// The longest, in nanoseconds.
    pub longest_ns: u64,
    buckets: [u64; BUCKETS],
}

impl Default for Times {
    fn default() -> Self {
        Self { count: 0, total_ns: 0, longest_ns: 0, buckets: [0; BUCKETS] }
    }
}

/// The nanoseconds that a bucket begins at, and those that it ends before.
fn bounds(bucket: usize) -> (u64, u64) {
    let begin = |bucket: usize| {
        let quarter = 1u64 << (FIRST as usize + bucket / 4 - 2);
        quarter * (4 + bucket as u64 % 4)
    };
    (if bucket == 0 { 0 } else { begin(bucket) }, begin(bucket + 1))
}

impl Times {
    /// As a program left them.
    pub(crate) fn of(words: &[u64]) -> Self {
        let mut buckets = [0; BUCKETS];
        buckets.copy_from_slice(&words[3..STRIDE]);
        Self { count: words[0], total_ns: words[SUM], longest_ns: words[LONGEST], buckets }
    }

    /// Adds others.
    pub fn add(&mut self, others: &Self) {
        self.count += others.count;
        self.total_ns += others.total_ns;
        self.longest_ns = self.longest_ns.max(others.longest_ns);
        self.buckets.iter_mut().zip(others.buckets).for_each(|(own, more)| *own += more);
    }

    /// The time below which such a share of them lies, within an eighth; nothing if there is none.
    pub fn quantile(&self, share: f64) -> Option<Duration> {
        let all: u64 = self.buckets.iter().sum();
        let wanted = ((all as f64 * share).ceil() as u64).clamp(1, all.max(1));
        let mut seen = 0;
        let bucket = self.buckets.iter().position(|count| {
            seen += count;
            seen >= wanted
        })?;
        let (begin, end) = bounds(bucket);
        // The last bucket has no end, and none goes beyond the longest.
        let end = if bucket + 1 == BUCKETS { self.longest_ns } else { end };
        let middle = begin.midpoint(end.max(begin)).min(self.longest_ns);
        Some(Duration::from_nanos(middle))
    }

    /// Buckets that have any: the nanoseconds that each ends before, and how many.
    pub fn histogram(&self) -> impl Iterator<Item = (u64, u64)> {
        let buckets = self.buckets.iter().enumerate().filter(|(_, count)| **count > 0);
        buckets.map(|(bucket, count)| (bounds(bucket).1, *count))
    }
}

/// Times by why.
pub type Stalls = BTreeMap<Why, Times>;

/// The times of all faults.
pub fn faults(stalls: &Stalls) -> Times {
    let mut sum = Times::default();
    stalls.iter().filter(|(why, _)| why.is_fault()).for_each(|(_, times)| sum.add(times));
    sum
}

impl Serialize for Times {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Shown {
            count: u64,
            total_ns: u64,
            p50_ns: u64,
            p99_ns: u64,
            longest_ns: u64,
            histogram: Vec<(u64, u64)>,
        }
        let quantile = |share| self.quantile(share).map_or(0, |time| time.as_nanos() as u64);
        Shown {
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
        assert_eq!((bounds(0), bounds(1)), ((0, 320), (320, 384)));
        for bucket in 1..BUCKETS {
            assert_eq!(bounds(bucket - 1).1, bounds(bucket).0, "{bucket}");
        }
        assert_eq!(bounds(BUCKETS - 1).1, 1 << (FIRST + OCTAVES));
    }

    #[test]
    fn a_quantile_lies_within_an_eighth_and_never_beyond_the_longest() {
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
