//! Stalls: how long memory management stopped a vCPU, by the vCPU's own clock.
//!
//! The guest's code reads its clock after each access, and counts the time since the previous
//! access in a histogram. After the phase, this module decides which of these times are stalls:
//!
//! 1. It leaves out times that the scheduler caused, from the longest on: at most as many as the
//!    thread had waits for a CPU (`schedstat`) or the machine below took a CPU away (steal), and at
//!    most as long in total. A thread waits for a CPU when it was preempted, and when it slept in a
//!    fault and was woken. The rest of the waiting time lies within shorter stalls, and is
//!    subtracted from their sum.
//! 2. Where the kernel counts a vCPU's faults, the stalls are the longest of the remaining times,
//!    as many as there were faults. So an access that misses caches or TLBs is no stall. Where the
//!    kernel does not count faults, a stall is a time of more than five times the usual access to
//!    warm memory.
//!
//! The usual time of an access is subtracted from each stall.

use crate::Error;
use crate::procfs::Files;

/// Buckets of a [`Histogram`]: eight for each power of two.
pub(crate) const BUCKETS: usize = 512;

/// A time between two accesses above this multiple of the warm median is a stall, unless the
/// kernel's count of faults decides.
pub const STALL_FACTOR: u64 = 5;

/// Histogram of times in ticks. A bucket is at most an eighth of its values wide.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Histogram {
    counts: Vec<u64>,
}

impl Histogram {
    /// Makes a histogram from the count of each bucket.
    pub(crate) fn from_fn(count: impl FnMut(usize) -> u64) -> Self {
        Self { counts: (0..BUCKETS).map(count).collect() }
    }

    /// Returns the times that were counted since `before`.
    pub fn since(&self, before: &Self) -> Self {
        let both = self.counts.iter().zip(&before.counts);
        Self { counts: both.map(|(after, before)| after.wrapping_sub(*before)).collect() }
    }

    /// Adds the counts of another histogram.
    pub fn add(&mut self, other: &Self) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(mine, theirs)| *mine += theirs);
    }

    /// Returns how many times were counted.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Returns the median of all times: the upper end of its bucket, which is at most an eighth
    /// above it.
    pub fn median(&self) -> Option<u64> {
        self.quantile(0.5)
    }

    /// Returns the ticks that a `share` of all times, 0.0 to 1.0, does not exceed. It is the upper
    /// end of a bucket, so it is never less than the exact value, and at most an eighth more.
    fn quantile(&self, share: f64) -> Option<u64> {
        let total = self.count();
        let rank = ((share * total as f64).ceil() as u64).clamp(1, total.max(1));
        let mut seen = 0;
        self.counts.iter().enumerate().find_map(|(bucket, count)| {
            seen += count;
            (seen >= rank && *count > 0).then(|| start(bucket + 1) - 1)
        })
    }

    /// Removes times that the scheduler caused, and returns the ticks of `others` that are left.
    ///
    /// A time is known within an eighth, and includes more than the wait for a CPU. Therefore the
    /// removed times may exceed the ticks of `others` by an eighth in total, as long as each is
    /// above an eighth of the longest, as time slices are.
    fn without(&mut self, others: Others, floor: u64) -> u64 {
        let Others { mut times, ticks } = others;
        let (mut taken, mut longest) = (0u64, 0);
        for bucket in above(floor).filter(|&bucket| start(bucket) < u64::MAX) {
            let each = middle(bucket);
            let most = if each > longest / 8 { ticks + ticks / 8 } else { ticks };
            let room = (most.saturating_sub(taken) + each / 8) / each;
            let out = self.counts[bucket].min(times).min(room);
            self.counts[bucket] -= out;
            times -= out;
            taken += out * each;
            longest = longest.max(if out > 0 { each } else { 0 });
        }
        ticks.saturating_sub(taken)
    }

    /// Returns the longest times above `floor`, at most `most` of them.
    fn longest(&self, most: u64, floor: u64) -> Self {
        let mut counts = vec![0; BUCKETS];
        let mut room = most;
        for bucket in above(floor) {
            counts[bucket] = self.counts[bucket].min(room);
            room -= counts[bucket];
        }
        Self { counts }
    }

    /// Returns the sum of all times, each taken as the middle of its bucket and reduced by `usual`.
    fn sum(&self, usual: u64) -> u64 {
        let of = |(bucket, count): (usize, &u64)| count * middle(bucket).saturating_sub(usual);
        self.counts.iter().enumerate().filter(|(_, count)| **count > 0).map(of).sum()
    }
}

/// Times between accesses that the host's scheduler, or the machine below the host, may have
/// caused.
#[derive(Debug, Clone, Copy, Default)]
struct Others {
    /// The largest number of such times.
    times: u64,
    /// Their sum in ticks.
    ticks: u64,
}

/// Returns the buckets whose times are all above `floor`, the longest first.
fn above(floor: u64) -> impl Iterator<Item = usize> {
    (0..BUCKETS).rev().take_while(move |&bucket| start(bucket) > floor)
}

/// Returns the ticks that represent a bucket.
fn middle(bucket: usize) -> u64 {
    start(bucket) + (start(bucket + 1) - start(bucket)) / 2
}

/// Returns the least ticks of a bucket. Buckets beyond the range of ticks start at its end.
fn start(bucket: usize) -> u64 {
    let (power, part) = (bucket as u64 / 8, bucket as u64 % 8);
    match power {
        0 => part,
        1..=61 => (8 + part) << (power - 1),
        _ => u64::MAX,
    }
}

/// Measurements of a vCPU's phase that are not in its histogram.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct PhaseReadings {
    /// Usual ticks between two accesses.
    pub warm: u64,
    /// Ticks per second of the guest's clock.
    pub ticks_per_second: f64,
    /// Ticks lost to interruptions while the vCPU waited for its next step to be due.
    pub idle: u64,
    /// The longest time between two accesses, or 0 if none was above [`STALL_FACTOR`] times the
    /// usual time.
    pub longest: u64,
    /// The kernel's count of the vCPU's faults.
    pub faults: Option<u64>,
    /// The waits for a CPU of the vCPU's thread, where the kernel counts them.
    pub waits: Option<Waits>,
    /// Seconds of steal time, averaged over the host's CPUs.
    pub stolen: f64,
}

/// A thread's waits for a CPU.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Waits {
    /// Seconds that the thread was ready to run and waited.
    pub seconds: f64,
    /// How often it got a CPU, after it was preempted or woken.
    pub times: u64,
}

impl Waits {
    /// Returns the waits of the calling thread so far, or `None` where the kernel does not count
    /// them.
    pub(crate) fn now() -> Option<Self> {
        let (nanoseconds, times) = Files::here().waits()?;
        Some(Self { seconds: nanoseconds as f64 / 1e9, times })
    }

    /// Returns the difference to the earlier reading `before`.
    pub(crate) fn since(self, before: Self) -> Self {
        Self { seconds: self.seconds - before.seconds, times: self.times - before.times }
    }
}

/// The shortest time, in seconds, for which the machine below is assumed to take a CPU away.
const LEAST_STEAL: f64 = 1e-4;

/// The stalls of a vCPU in a phase, from its clock.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Stalls {
    /// Number of accesses that were timed.
    pub accesses: u64,
    /// The usual time between two accesses, in seconds.
    pub warm: f64,
    /// Number of stalls.
    pub stalls: u64,
    /// Whether the kernel counted faults, so that `stalls` comes from their number and not from a
    /// threshold.
    pub counted: bool,
    /// Sum of the stalls in seconds, without the usual time of each.
    pub seconds: f64,
    /// Seconds lost to interruptions while the vCPU waited for its next step to be due. Waits for a
    /// CPU in this time are in no stall.
    pub idle: f64,
    /// Median of the stalls in seconds, without the usual time; 0 without stalls.
    pub p50: f64,
    /// 95th percentile, likewise.
    pub p95: f64,
    /// 99th percentile, likewise.
    pub p99: f64,
    /// The longest stall, likewise.
    pub longest: f64,
}

impl Stalls {
    /// Finds the stalls among the times between accesses of a phase. Without the waits for a CPU
    /// they are unknown: a time that the thread was preempted would be one.
    pub(crate) fn new(times: &Histogram, known: PhaseReadings) -> Option<Self> {
        let PhaseReadings { warm, ticks_per_second, idle, longest, faults, waits, stolen } = known;
        let waits = waits?;
        let seconds = |ticks: u64| ticks.saturating_sub(warm) as f64 / ticks_per_second;
        let floor = if faults.is_some() { warm * 2 } else { warm * STALL_FACTOR };
        let idle = idle as f64 / ticks_per_second;
        let others = (waits.seconds + stolen - idle).max(0.0);
        let others = Others {
            times: waits.times + (stolen / LEAST_STEAL) as u64,
            ticks: (others * ticks_per_second) as u64,
        };
        let mut left = times.clone();
        let within = left.without(others, floor);
        let stalls = left.longest(faults.unwrap_or(u64::MAX), floor);
        // The upper end of a bucket may exceed the longest time. That time is not known if none was
        // above the threshold of the guest's code.
        let longest = if longest == 0 { u64::MAX } else { longest };
        let quantile = |share| {
            let found = stalls.quantile(share).filter(|_| stalls.count() > 0);
            found.map_or(0.0, |ticks| seconds(ticks.min(longest)))
        };
        Some(Self {
            accesses: times.count(),
            warm: warm as f64 / ticks_per_second,
            stalls: stalls.count(),
            counted: faults.is_some(),
            seconds: stalls.sum(warm).saturating_sub(within) as f64 / ticks_per_second,
            idle,
            p50: quantile(0.5),
            p95: quantile(0.95),
            p99: quantile(0.99),
            longest: quantile(1.0),
        })
    }
}

/// Returns the steal time of the host since its boot, in seconds, averaged over its CPUs.
///
/// # Errors
/// [`Error::Os`] if `/proc/stat` does not report it.
pub fn stolen() -> Result<f64, Error> {
    let ticks = Files::here().ticks();
    let ticks = ticks.ok_or_else(|| Error::os("/proc/stat")(rustix::io::Errno::NOENT))?;
    Ok(ticks.stolen as f64 / 100.0 / ticks.cpus as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Computes the bucket as the guest's code does.
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
            let found = histogram.quantile(share).unwrap();
            assert!(found >= exact && found <= exact + exact / 7, "{share}: {found} of {exact}");
        }
        let exact: u64 = times.iter().sum();
        assert!(histogram.sum(0).abs_diff(exact) < exact / 100, "{}", histogram.sum(0));
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

    /// A thousand warm accesses and `others`.
    fn with_warm(others: &[u64]) -> Histogram {
        histogram(&[&[100; 1000][..], others].concat())
    }

    /// A clock of a million ticks per second, on which an access usually takes 100 ticks.
    fn known(faults: Option<u64>, longest: u64) -> PhaseReadings {
        PhaseReadings {
            warm: 100,
            ticks_per_second: 1e6,
            faults,
            longest,
            waits: Some(Waits::default()),
            ..PhaseReadings::default()
        }
    }

    fn stalls_of(times: &Histogram, known: PhaseReadings) -> Stalls {
        Stalls::new(times, known).expect("the waits are known")
    }

    #[test]
    fn stalls_are_unknown_where_the_kernel_counts_no_waits() {
        let known = PhaseReadings { waits: None, ..known(Some(3), 5000) };
        assert!(Stalls::new(&with_warm(&[5000; 3]), known).is_none());
    }

    #[test]
    fn the_longest_accesses_count_as_stalls_up_to_kvms_fault_count() {
        // 900 ticks are a cache miss.
        let times = with_warm(&[900, 900, 5000, 5000, 5000]);
        let stalls = stalls_of(&times, known(Some(3), 5000));
        assert_eq!((stalls.stalls, stalls.counted, stalls.accesses), (3, true, 1005));
        assert!((stalls.seconds / 0.0147 - 1.0).abs() < 0.06, "{stalls:?}");
        assert_eq!((stalls.p50, stalls.longest), (0.0049, 0.0049));
        // Without a count of faults, the misses count as stalls.
        let stalls = stalls_of(&times, known(None, 5000));
        assert_eq!((stalls.stalls, stalls.counted), (5, false));
        // More faults than times: several faults can lie between two accesses, and usual times are
        // no stalls.
        assert_eq!(stalls_of(&times, known(Some(500), 5000)).stalls, 5);
        assert_eq!(stalls_of(&with_warm(&[]), known(Some(0), 100)).longest, 0.0);
    }

    #[test]
    fn stalls_below_the_guests_threshold_have_a_length_too() {
        // Its threshold is above these times, so it has no longest time.
        let stalls = stalls_of(&with_warm(&[400; 3]), known(Some(3), 0));
        assert_eq!(stalls.stalls, 3);
        for ticks in [stalls.p50, stalls.longest].map(|seconds| seconds * 1e6) {
            assert!((300.0..=350.0).contains(&ticks), "{stalls:?}");
        }
    }

    #[test]
    fn what_the_scheduler_is_known_to_have_made_is_no_stall() {
        let times = with_warm(&[5000, 5000, 5000, 400_000, 800_000]);
        let with = |waits, stolen| {
            stalls_of(
                &times,
                PhaseReadings { waits: Some(waits), stolen, ..known(Some(3), 800_000) },
            )
        };
        let alone = stalls_of(&with_warm(&[5000; 3]), known(Some(3), 5000));
        let preempted = with(Waits { seconds: 1.2, times: 2 }, 0.0);
        assert_eq!((preempted.stalls, preempted.seconds), (alone.stalls, alone.seconds));
        assert!((preempted.longest / alone.longest - 1.0).abs() < 0.13, "{preempted:?}");
        // Steal time is no stall, either.
        assert_eq!(with(Waits::default(), 1.2).seconds, alone.seconds);
        // The thread waited for 0.8 s only: the other time is memory management's.
        let slow = with(Waits { seconds: 0.8, times: 9 }, 0.0);
        assert!(slow.longest > 0.39 && slow.longest < 0.46, "{slow:?}");
    }

    #[test]
    fn a_wait_within_a_stall_is_taken_from_the_sum() {
        // The kernel did not report how often the thread waited.
        let times = with_warm(&[5000; 3]);
        let waits = Waits { seconds: 0.003, times: 0 };
        let stalls =
            stalls_of(&times, PhaseReadings { waits: Some(waits), ..known(Some(3), 5000) });
        let alone = stalls_of(&times, known(Some(3), 5000));
        assert!((alone.seconds - stalls.seconds - 0.003).abs() < 1e-9, "{stalls:?}");
        // A wait while no step was due is in no stall.
        let stalls = stalls_of(
            &times,
            PhaseReadings { waits: Some(waits), idle: 3000, ..known(Some(3), 5000) },
        );
        assert_eq!(stalls.seconds, alone.seconds);
    }

    #[test]
    fn a_thread_that_runs_knows_how_long_it_waited() {
        if std::path::Path::new("/proc/thread-self/schedstat").exists() {
            assert!(Waits::now().is_some_and(|waits| waits.seconds >= 0.0));
        }
    }
}
