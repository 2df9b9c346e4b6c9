//! How long memory management made a vCPU stand still, by the vCPU's own clock.
//!
//! The guest's code reads its clock after each access, and counts the time since the access before
//! in a histogram. Which of these times are stalls is decided here, after the phase:
//!
//! 1. Where the kernel counts a vCPU's faults, as many of the longest times are stalls, and no
//!    other: an access that misses caches or TLBs is none. Where it does not, a stall is what took
//!    more than five times as long as an access usually does on warm memory.
//! 2. Before that, times that the scheduler made are left out: from the longest on, as many as the
//!    thread had waits for a CPU, and only as long as these (`schedstat`), or what the machine
//!    below took (steal), lasted. A thread waits where it was preempted, and where it slept in a
//!    fault and was woken. What remains of the waiting lies within shorter stalls, and is taken
//!    from their sum.
//!
//! Each stall is told without the usual time of its access.

use crate::Error;
use slat_procfs::Files;

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

    /// The middle of all times: the upper end of its bucket, at most an eighth above it.
    pub fn median(&self) -> Option<u64> {
        self.quantile(0.5)
    }

    /// The ticks that a share of all times, 0.0 to 1.0, stays at or below: the upper end of a
    /// bucket, so that a time is never told shorter than it was, and at most an eighth longer.
    fn quantile(&self, share: f64) -> Option<u64> {
        let total = self.count();
        let rank = ((share * total as f64).ceil() as u64).clamp(1, total.max(1));
        let mut seen = 0;
        self.counts.iter().enumerate().find_map(|(bucket, count)| {
            seen += count;
            (seen >= rank && *count > 0).then(|| start(bucket + 1) - 1)
        })
    }

    /// Leaves out what the scheduler made, and returns what is left of its time.
    ///
    /// A time is known within an eighth, and holds more than the wait for a CPU. So an eighth more
    /// is believed of all together, for times above an eighth of the longest, as slices are.
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

    /// The longest times above `floor`, so many of them at most.
    fn longest(&self, most: u64, floor: u64) -> Self {
        let mut counts = vec![0; BUCKETS];
        let mut room = most;
        for bucket in above(floor) {
            counts[bucket] = self.counts[bucket].min(room);
            room -= counts[bucket];
        }
        Self { counts }
    }

    /// The sum of all times, each taken from the middle of its bucket, less `usual` each.
    fn sum(&self, usual: u64) -> u64 {
        let of = |(bucket, count): (usize, &u64)| count * middle(bucket).saturating_sub(usual);
        self.counts.iter().enumerate().filter(|(_, count)| **count > 0).map(of).sum()
    }
}

/// Times between accesses that the host's scheduler, or the machine below it, may have made.
#[derive(Debug, Clone, Copy, Default)]
struct Others {
    /// How many at most.
    times: u64,
    /// Ticks, all together.
    ticks: u64,
}

/// Buckets that hold times above `floor` alone, the longest first.
fn above(floor: u64) -> impl Iterator<Item = usize> {
    (0..BUCKETS).rev().take_while(move |&bucket| start(bucket) > floor)
}

/// The ticks that stand for a bucket.
fn middle(bucket: usize) -> u64 {
    start(bucket) + (start(bucket + 1) - start(bucket)) / 2
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

/// What is known of a vCPU's phase beside its clock.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Known {
    /// Usual ticks between two accesses.
    pub warm: u64,
    /// The guest's ticks in a second.
    pub ticks_per_second: f64,
    /// Ticks that passed unseen while the vCPU waited for its next step to be due.
    pub idle: u64,
    /// The longest time between two accesses.
    pub longest: u64,
    /// The kernel's count of its faults.
    pub faults: Option<u64>,
    /// What its thread waited for.
    pub waits: Waits,
    /// Seconds that the machine below took, on average of the host's CPUs.
    pub stolen: f64,
}

/// How a thread got its CPU.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Waits {
    /// Seconds that it was ready to run and waited for a CPU.
    pub seconds: f64,
    /// How often it got one: after it was preempted, or woken.
    pub times: u64,
}

impl Waits {
    /// Those of the calling thread so far; nothing where the kernel does not count them.
    pub(crate) fn now() -> Option<Self> {
        let (nanoseconds, times) = Files::here().waits()?;
        Some(Self { seconds: nanoseconds as f64 / 1e9, times })
    }

    /// What came since `before`.
    pub(crate) fn since(self, before: Self) -> Self {
        Self { seconds: self.seconds - before.seconds, times: self.times - before.times }
    }
}

/// The shortest time for which a machine below is believed to take a CPU away.
const LEAST_STEAL: f64 = 1e-4;

/// What a vCPU's clock showed over a phase.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Stalls {
    /// Accesses whose time was taken.
    pub accesses: u64,
    /// The usual time between two, in seconds.
    pub warm: f64,
    /// How many stalls there were.
    pub stalls: u64,
    /// Whether the kernel's count of faults says so, and no threshold.
    pub counted: bool,
    /// Their sum in seconds, less the usual time for each.
    pub seconds: f64,
    /// Seconds that passed unseen while the vCPU waited for its next step to be due: what its
    /// thread waited for a CPU then is in no stall.
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
    /// Tells the stalls of a phase from the other times between accesses.
    pub(crate) fn new(times: &Histogram, known: Known) -> Self {
        let Known { warm, ticks_per_second, idle, longest, faults, waits, stolen } = known;
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
        // A bucket's end may be beyond the longest that there was.
        let quantile = |share| {
            let found = stalls.quantile(share).filter(|_| stalls.count() > 0);
            found.map_or(0.0, |ticks| seconds(ticks.min(longest)))
        };
        Self {
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
        }
    }
}

/// Seconds that each of this host's CPUs stood still for the machine below it, on average.
///
/// # Errors
/// [`Error::Os`] if `/proc/stat` does not tell.
pub fn stolen() -> Result<f64, Error> {
    let ticks = Files::here().ticks();
    let ticks = ticks.ok_or_else(|| Error::os("/proc/stat")(rustix::io::Errno::NOENT))?;
    Ok(ticks.stolen as f64 / 100.0 / ticks.cpus as f64)
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

    /// A thousand warm accesses, and these.
    fn with_warm(others: &[u64]) -> Histogram {
        histogram(&[&[100; 1000][..], others].concat())
    }

    /// A clock of a million ticks a second, on which an access usually takes a hundred.
    fn known(faults: Option<u64>, longest: u64) -> Known {
        Known { warm: 100, ticks_per_second: 1e6, faults, longest, ..Known::default() }
    }

    #[test]
    fn as_many_of_the_longest_times_are_stalls_as_the_kernel_counts_faults() {
        // 900 is a miss of caches.
        let times = with_warm(&[900, 900, 5000, 5000, 5000]);
        let stalls = Stalls::new(&times, known(Some(3), 5000));
        assert_eq!((stalls.stalls, stalls.counted, stalls.accesses), (3, true, 1005));
        assert!((stalls.seconds / 0.0147 - 1.0).abs() < 0.06, "{stalls:?}");
        assert_eq!((stalls.p50, stalls.longest), (0.0049, 0.0049));
        // Without a count it is taken for one.
        let stalls = Stalls::new(&times, known(None, 5000));
        assert_eq!((stalls.stalls, stalls.counted), (5, false));
        // More faults than times: several lie between two accesses, and usual ones are no stalls.
        assert_eq!(Stalls::new(&times, known(Some(500), 5000)).stalls, 5);
        assert_eq!(Stalls::new(&with_warm(&[]), known(Some(0), 100)).longest, 0.0);
    }

    #[test]
    fn what_the_scheduler_is_known_to_have_made_is_no_stall() {
        let times = with_warm(&[5000, 5000, 5000, 400_000, 800_000]);
        let with =
            |waits, stolen| Stalls::new(&times, Known { waits, stolen, ..known(Some(3), 800_000) });
        let alone = Stalls::new(&with_warm(&[5000; 3]), known(Some(3), 5000));
        let preempted = with(Waits { seconds: 1.2, times: 2 }, 0.0);
        assert_eq!((preempted.stalls, preempted.seconds), (alone.stalls, alone.seconds));
        assert!((preempted.longest / alone.longest - 1.0).abs() < 0.13, "{preempted:?}");
        // What the machine below took is nobody's stall, either.
        assert_eq!(with(Waits::default(), 1.2).seconds, alone.seconds);
        // It waited for 0.8 s and no longer: the other time is memory management's.
        let slow = with(Waits { seconds: 0.8, times: 9 }, 0.0);
        assert!(slow.longest > 0.39 && slow.longest < 0.46, "{slow:?}");
    }

    #[test]
    fn a_wait_within_a_stall_is_taken_from_the_sum() {
        // The kernel did not say how often the thread waited.
        let times = with_warm(&[5000; 3]);
        let waits = Waits { seconds: 0.003, times: 0 };
        let stalls = Stalls::new(&times, Known { waits, ..known(Some(3), 5000) });
        let alone = Stalls::new(&times, known(Some(3), 5000));
        assert!((alone.seconds - stalls.seconds - 0.003).abs() < 1e-9, "{stalls:?}");
        // What it waited while no step was due is in no stall.
        let stalls = Stalls::new(&times, Known { waits, idle: 3000, ..known(Some(3), 5000) });
        assert_eq!(stalls.seconds, alone.seconds);
    }

    #[test]
    fn a_thread_that_runs_knows_how_long_it_waited() {
        if std::path::Path::new("/proc/thread-self/schedstat").exists() {
            assert!(Waits::now().is_some_and(|waits| waits.seconds >= 0.0));
        }
    }
}
