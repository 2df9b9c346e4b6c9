//! Summary of the times for which faults delayed vCPUs.

/// Number and percentiles of such times.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Stalls {
    /// Number of times.
    pub count: u64,
    /// The median: half of the times are no longer.
    pub p50: u64,
    /// The 99th percentile: 99 of 100 times are no longer.
    pub p99: u64,
    /// The longest time.
    pub longest: u64,
}

impl Stalls {
    /// Summarises these times, and sorts them.
    pub fn of(times: &mut [u64]) -> Self {
        times.sort_unstable();
        let Some(&longest) = times.last() else { return Self::default() };
        let no_longer = |percent: usize| times[(times.len() * percent).div_ceil(100) - 1];
        Self { count: times.len() as u64, p50: no_longer(50), p99: no_longer(99), longest }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    #[test]
    fn percentiles_are_times_that_were_noted() {
        assert_eq!(Stalls::of(&mut []), Stalls::default());
        assert_eq!(Stalls::of(&mut [7]), Stalls { count: 1, p50: 7, p99: 7, longest: 7 });
        let mut times: Vec<u64> = (1..=200).rev().collect();
        assert_eq!(Stalls::of(&mut times), Stalls { count: 200, p50: 100, p99: 198, longest: 200 });
    }
}
