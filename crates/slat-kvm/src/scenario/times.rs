//! The course of a guest's visits, from the clock values that it recorded.

use crate::stall::STALL_FACTOR;

/// The accesses of one run of a guest, by its own clock.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Times {
    /// Seconds from the start of the vCPU to the end of each access, in their order over all
    /// vCPUs.
    pub at: Vec<f64>,
    /// Each access that took more than five times the usual, less the usual, in seconds; the
    /// shortest first. Where something counted the accesses that had to wait, as many of the
    /// longest.
    pub stalls: Vec<f64>,
    /// The duration of the second run, in seconds, of the vCPU that took longest.
    pub again: f64,
}

impl Times {
    /// Reads the records of all vCPUs: of the restore, and of the same work done once more.
    pub(super) fn new(
        restore: &[Vec<u64>],
        again: &[Vec<u64>],
        waited: Option<u64>,
        ticks_per_second: f64,
    ) -> Self {
        let seconds = |ticks: u64| ticks as f64 / ticks_per_second;
        let mut usual: Vec<u64> = again.iter().flat_map(|record| steps(record)).collect();
        usual.sort_unstable();
        let usual = usual.get(usual.len() / 2).copied().unwrap_or(0);
        let from_start =
            |record: &Vec<u64>| record.iter().map(|at| at.saturating_sub(record[0])).collect();
        let mut at: Vec<f64> = restore
            .iter()
            .map(from_start)
            .flat_map(|at: Vec<u64>| at.into_iter().skip(1))
            .map(seconds)
            .collect();
        at.sort_by(f64::total_cmp);
        let mut stalls: Vec<u64> = restore.iter().flat_map(|record| steps(record)).collect();
        stalls.sort_unstable();
        let fast = match waited {
            Some(waited) => stalls.len().saturating_sub(waited as usize),
            None => stalls.partition_point(|step| *step <= usual.saturating_mul(STALL_FACTOR)),
        };
        let stalls = stalls[fast..].iter().map(|step| seconds(step.saturating_sub(usual)));
        let spans =
            again.iter().filter_map(|record| Some(record.last()?.saturating_sub(*record.first()?)));
        Self { at, stalls: stalls.collect(), again: seconds(spans.max().unwrap_or(0)) }
    }

    /// Returns when a share of the accesses was over, 0.0 to 1.0; the first one's at 0.0.
    pub fn share(&self, share: f64) -> Option<f64> {
        let rank = (share * self.at.len() as f64).ceil() as usize;
        self.at.get(rank.saturating_sub(1)).copied()
    }

    /// Returns the course: when each of twenty parts of the accesses was over, if they began at
    /// `start`.
    pub fn course(&self, start: f64) -> Vec<f64> {
        let at = |part: u32| Some(start + self.share(f64::from(part) / 20.0)?);
        (1..=20).filter_map(at).collect()
    }

    /// Returns the stall that a share of the stalls does not exceed.
    pub fn stall(&self, share: f64) -> Option<f64> {
        let rank = (share * self.stalls.len() as f64).ceil() as usize;
        self.stalls.get(rank.saturating_sub(1)).copied()
    }

    /// Returns the stalls that are more than five times the median of them: pages that came slower
    /// than the others.
    pub fn outliers(&self) -> &[f64] {
        let Some(median) = self.stall(0.5) else { return &[] };
        let first = self.stalls.partition_point(|stall| *stall <= median * STALL_FACTOR as f64);
        &self.stalls[first..]
    }
}

/// Returns the time between each two values. The clocks of two CPUs may differ: a negative time
/// counts as 0.
fn steps(record: &[u64]) -> impl Iterator<Item = u64> + '_ {
    record.windows(2).map(|pair| pair[1].saturating_sub(pair[0]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stalls_are_told_from_usual_accesses_and_slow_ones_from_both() {
        // 90 accesses of 2 ticks, 9 of 100, and one of 5000; 1000 ticks a second.
        let mut record = vec![7u64];
        for access in 0..100u64 {
            let step = match access {
                99 => 5000,
                90.. => 100,
                _ => 2,
            };
            record.push(record[access as usize] + step);
        }
        let again: Vec<u64> = (0..100).map(|access| access * 2).collect();
        let remote = Times::new(&[record.clone()], std::slice::from_ref(&again), Some(3), 1000.0);
        assert_eq!(remote.stalls, [0.098, 0.098, 4.998]);
        let times = Times::new(&[record], &[again], None, 1000.0);
        assert_eq!((times.stalls.len(), times.again), (10, 0.198));
        assert_eq!(times.stall(0.5), Some(0.098));
        assert_eq!(times.stall(1.0), Some(4.998));
        assert_eq!(times.outliers(), [4.998]);
        assert_eq!((times.share(0.0), times.share(0.5)), (Some(0.002), Some(0.1)));
        assert_eq!(times.share(1.0), Some(6.08));
        assert_eq!(Times::default().outliers(), [0.0; 0]);
        assert_eq!(Times::default().share(1.0), None);
    }
}
