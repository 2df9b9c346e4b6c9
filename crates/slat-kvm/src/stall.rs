//! How long a vCPU stood still, by its own clock.
//!
//! The guest's code reads its clock after each access. The time since the access before is counted
//! in a histogram; one that is above a threshold, five times what is usual on warm memory, is a
//! stall: whatever KVM and the host did in between, the guest could do nothing. What of it was not
//! KVM's but the host's scheduler's is known per thread (`schedstat`) and shown beside it.

use crate::Error;

/// Buckets of a [`Histogram`]: eight for each power of two.
pub(crate) const BUCKETS: usize = 512;

/// The time between two accesses is a stall above this many times the warm median.
pub const STALL_FACTOR: u64 = 5;

/// Times in ticks, in buckets that are at most an eighth of their value wide.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Histogram {
    counts: Vec<u64>,
}

impl Histogram {
    /// Makes one from the count of each bucket.
    pub(crate) fn from_fn(count: impl FnMut(usize) -> u64) -> Self {
        Self { counts: (0..BUCKETS).map(count).collect() }
    }

    /// What was counted since `before`.
    pub fn since(&self, before: &Self) -> Self {
        let both = self.counts.iter().zip(&before.counts);
        Self { counts: both.map(|(after, before)| after.wrapping_sub(*before)).collect() }
    }

    /// Adds what another vCPU counted.
    pub fn add(&mut self, other: &Self) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(mine, theirs)| *mine += theirs);
    }

    /// How many times were counted.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The ticks that a share of all times, 0.0 to 1.0, stays at or below, of those above `floor`.
    ///
    /// The upper end of the bucket: a stall is never told shorter than it was, and at most an
    /// eighth longer. Nothing if no time is above the floor.
    pub fn quantile(&self, share: f64, floor: u64) -> Option<u64> {
        // A bucket that holds the floor also holds times below it, and is left out.
        let above = || self.counts.iter().enumerate().filter(|&(bucket, _)| start(bucket) > floor);
        let total: u64 = above().map(|(_, count)| count).sum();
        let rank = ((share * total as f64).ceil() as u64).clamp(1, total.max(1));
        let mut seen = 0;
        above().find_map(|(bucket, count)| {
            seen += count;
            (seen >= rank && *count > 0).then(|| start(bucket + 1) - 1)
        })
    }
}

/// The least ticks of a bucket. Those of the last end with the number's range.
fn start(bucket: usize) -> u64 {
    let (power, part) = (bucket as u64 / 8, bucket as u64 % 8);
    match power {
        0 => part,
        1..=61 => (8 + part) << (power - 1),
        _ => u64::MAX,
    }
}

/// What the mailbox adds up, in ticks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sums {
    pub stalls: u64,
    pub ticks: u64,
    pub idle: u64,
    pub longest: u64,
}

/// What a vCPU's clock showed over a phase.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Stalls {
    /// Accesses whose time was taken.
    pub accesses: u64,
    /// The usual time between two, in seconds, which the threshold is five times of.
    pub warm: f64,
    /// How many stalls there were.
    pub stalls: u64,
    /// Their sum in seconds, less the usual time for each.
    pub seconds: f64,
    /// Seconds that passed unseen while the vCPU waited for its next step to be due: what its thread
    /// waited for a CPU then is in no stall.
    pub idle: f64,
    /// Quantiles of the stalls in seconds, less the usual time; 0 without stalls.
    pub p50: f64,
    /// 95 of a hundred are at most this long.
    pub p95: f64,
    /// 99 of a hundred.
    pub p99: f64,
    /// The longest.
    pub longest: f64,
}

impl Stalls {
    /// Puts together what the mailbox says, in ticks, into seconds.
    pub(crate) fn new(
        times: &Histogram,
        Sums { stalls, ticks, idle, longest }: Sums,
        warm: u64,
        ticks_per_second: f64,
    ) -> Self {
        let seconds = |ticks: u64| ticks.saturating_sub(warm) as f64 / ticks_per_second;
        // A bucket's end may be beyond the longest that there was.
        let quantile = |share| {
            // Stalls that are all in the threshold's own bucket are hardly longer than that.
            let least = if stalls > 0 { Some(warm * STALL_FACTOR) } else { None };
            let it = times.quantile(share, warm * STALL_FACTOR).or(least);
            it.map_or(0.0, |it| seconds(it.min(longest)))
        };
        Self {
            accesses: times.count(),
            warm: warm as f64 / ticks_per_second,
            stalls,
            seconds: ticks.saturating_sub(stalls * warm) as f64 / ticks_per_second,
            idle: idle as f64 / ticks_per_second,
            p50: quantile(0.5),
            p95: quantile(0.95),
            p99: quantile(0.99),
            longest: seconds(longest),
        }
    }
}

/// Seconds that the calling thread was ready to run and waited for a CPU (the second field of
/// `schedstat`, scheduler/sched-stats.rst), and nothing where the kernel does not count it.
pub(crate) fn waited() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    let nanoseconds: u64 = text.split_whitespace().nth(1)?.parse().ok()?;
    Some(nanoseconds as f64 / 1e9)
}

/// Seconds that each of this host's CPUs stood still for the machine below it, on average (`steal` of
/// `/proc/stat`; a tick is a hundredth of a second).
///
/// # Errors
/// [`Error::Os`] if the file cannot be read.
pub fn stolen() -> Result<f64, Error> {
    let text = std::fs::read_to_string("/proc/stat").map_err(Error::os("/proc/stat"))?;
    let ticks = text.lines().next().and_then(|line| line.split_whitespace().nth(8)?.parse().ok());
    let cpus = text.lines().skip(1).take_while(|line| line.starts_with("cpu")).count().max(1);
    Ok(ticks.map_or(0.0, |ticks: u64| ticks as f64 / 100.0 / cpus as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the guest's code finds the bucket.
    fn bucket(ticks: u64) -> usize {
        let ticks = ticks | 1;
        let power = ticks.ilog2();
        if power < 3 {
            ticks as usize
        } else {
            ((ticks >> (power - 3) & 7) + (u64::from(power) - 3) * 8 + 8) as usize
        }
    }

    fn histogram(times: &[u64]) -> Histogram {
        let mut counts = [0; BUCKETS];
        times.iter().for_each(|&time| counts[bucket(time)] += 1);
        Histogram::from_fn(|bucket| counts[bucket])
    }

    #[test]
    fn a_bucket_starts_where_the_guests_code_says() {
        for ticks in (1..5000).step_by(2).chain([1 << 40 | 1, (1 << 40) + (1 << 37) + 1]) {
            let bucket = bucket(ticks);
            assert!((start(bucket)..start(bucket + 1)).contains(&ticks), "{ticks} in {bucket}");
            assert!(start(bucket + 1) - start(bucket) <= (ticks / 8).max(1), "{ticks}");
        }
    }

    #[test]
    fn quantiles_are_those_of_the_sorted_times_within_an_eighth() {
        let times: Vec<u64> = (0..1000).map(|i| 100 + i * i).collect();
        let histogram = histogram(&times);
        for (share, exact) in [(0.5, times[499]), (0.95, times[949]), (0.99, times[989])] {
            let found = histogram.quantile(share, 0).unwrap();
            assert!(found >= exact && found <= exact + exact / 7, "{share}: {found} of {exact}");
        }
        assert_eq!(histogram.quantile(0.5, u64::MAX), None);
    }

    #[test]
    fn only_what_came_since_is_counted() {
        let before = histogram(&[9, 9, 100]);
        let mut after = histogram(&[9, 9, 9, 100, 5000]);
        let since = after.since(&before);
        assert_eq!(since, histogram(&[9, 5000]));
        after.add(&since);
        assert_eq!(after.count(), 7);
    }

    #[test]
    fn stalls_are_told_without_the_usual_time() {
        let times = histogram(&[100, 100, 100, 1001, 2001]);
        let sums = Sums { stalls: 2, ticks: 3002, idle: 500, longest: 2001 };
        let stalls = Stalls::new(&times, sums, 100, 1000.0);
        assert_eq!((stalls.accesses, stalls.stalls), (5, 2));
        assert_eq!((stalls.seconds, stalls.idle), (2.802, 0.5));
        assert_eq!((stalls.longest, stalls.p99, stalls.warm), (1.901, 1.901, 0.1));
        assert!((0.901..1.05).contains(&stalls.p50), "{}", stalls.p50);
    }

    #[test]
    fn a_thread_that_runs_knows_how_long_it_waited() {
        if std::path::Path::new("/proc/thread-self/schedstat").exists() {
            assert!(waited().is_some_and(|seconds| seconds >= 0.0));
        }
    }
}
