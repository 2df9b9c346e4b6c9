//! Statistics of samples: the middle, the spread, the extremes.

use statrs::distribution::{Binomial, DiscreteCDF};
use statrs::statistics::{Data, Max, Min, OrderStatistics};

/// The five numbers of a box plot. They are medians and quartiles, because samples from a shared
/// machine have outliers on one side only, which would move a mean.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Summary {
    /// Number of samples.
    pub count: usize,
    /// The least.
    pub min: f64,
    /// A quarter of the samples is below.
    pub lower_quartile: f64,
    /// Half of the samples is below.
    pub median: f64,
    /// A quarter of the samples is above.
    pub upper_quartile: f64,
    /// The greatest.
    pub max: f64,
}

impl Summary {
    /// Summarises the samples; returns `None` if there are none.
    pub fn of(samples: &[f64]) -> Option<Self> {
        if samples.is_empty() {
            return None;
        }
        let mut data = Data::new(samples.to_vec());
        Some(Self {
            count: samples.len(),
            min: data.min(),
            lower_quartile: data.lower_quartile(),
            median: data.median(),
            upper_quartile: data.upper_quartile(),
            max: data.max(),
        })
    }

    /// Returns the interquartile range, in which half of the samples lie.
    pub fn spread(&self) -> f64 {
        self.upper_quartile - self.lower_quartile
    }

    /// Returns half the interquartile range as a part of the median, as tables print it after `±`.
    pub fn relative_spread(&self) -> f64 {
        if self.median == 0.0 { 0.0 } else { self.spread() / 2.0 / self.median }
    }
}

/// Returns the median, or `None` if there are no samples.
pub fn median(samples: &[f64]) -> Option<f64> {
    Summary::of(samples).map(|summary| summary.median)
}

/// Returns the 95 % confidence interval of the median of the samples' distribution; `None` for
/// fewer than six samples. It depends only on the samples' order, so it holds for every
/// distribution. Each sample is below the median with a probability of one half, so the number of
/// samples below it has a binomial distribution. At each end, the interval leaves out the largest
/// number of samples that this number does not exceed with a probability of at most 2.5 %.
pub fn median_interval(samples: &[f64]) -> Option<(f64, f64)> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let throws = sorted.len() as u64;
    let coin = Binomial::new(0.5, throws).ok()?;
    let outside = (0..throws).take_while(|&k| coin.cdf(k) <= 0.025).count();
    let first = outside.checked_sub(1)?;
    Some((sorted[first], sorted[sorted.len() - 1 - first]))
}

/// Returns half of [`median_interval`] as a part of the median.
pub fn median_precision(samples: &[f64]) -> Option<f64> {
    let (low, high) = median_interval(samples)?;
    match median(samples)? {
        _ if low == high => Some(0.0),
        0.0 => None,
        median => Some((high - low) / 2.0 / median.abs()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_samples_have_no_summary() {
        assert_eq!(Summary::of(&[]), None);
        assert_eq!(median(&[]), None);
    }

    #[test]
    fn one_sample_is_all_five_numbers_and_spreads_nowhere() {
        let summary = Summary::of(&[2.5]).unwrap();
        assert_eq!((summary.min, summary.median, summary.max), (2.5, 2.5, 2.5));
        assert_eq!(summary.spread(), 0.0);
    }

    #[test]
    fn an_outlier_moves_the_extremes_and_not_the_median() {
        let summary = Summary::of(&[5.0, 1.0, 4.0, 2.0, 900.0, 3.0, 3.0]).unwrap();
        assert_eq!((summary.min, summary.median, summary.max), (1.0, 3.0, 900.0));
        assert!(summary.spread() < 4.0, "{summary:?}");
    }

    #[test]
    fn the_medians_interval_has_the_sign_tests_tabulated_ranks() {
        // The rank of the interval's lower end among n samples, from tables of the sign test.
        for (n, rank) in [(6, 1), (8, 1), (9, 2), (11, 2), (12, 3), (15, 4), (20, 6), (50, 18)] {
            let samples: Vec<f64> = (1..=n).rev().map(f64::from).collect();
            let ends = (f64::from(rank), f64::from(n + 1 - rank));
            assert_eq!(median_interval(&samples), Some(ends), "{n}");
        }
        assert!((0..6).all(|n| median_interval(&vec![1.0; n]).is_none()));
    }

    #[test]
    fn nineteen_of_twenty_intervals_contain_a_skewed_median() {
        // The logarithm of the samples is evenly distributed, so that their mean is far from their
        // median.
        let (mut state, mut held) = (1u64, 0);
        for _ in 0..2000 {
            let mut sample = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                ((state >> 11) as f64 / (1u64 << 53) as f64 * 10.0 - 5.0).exp()
            };
            let samples: Vec<f64> = (0..9).map(|_| sample()).collect();
            let (low, high) = median_interval(&samples).unwrap();
            held += i32::from(low <= 1.0 && 1.0 <= high);
        }
        assert!((1900..1960).contains(&held), "{held} of 2000, by the binomial 96.1 %");
    }

    #[test]
    fn how_exact_a_median_is_ignores_one_sample_far_off() {
        let mut samples = vec![1.0; 8];
        samples.push(100.0);
        assert_eq!(median_precision(&samples), Some(0.0));
        assert_eq!(median_precision(&[9.0, 10.0, 10.0, 10.0, 10.0, 12.0]), Some(0.15));
        assert_eq!(median_precision(&[-1.0, 0.0, 0.0, 0.0, 0.0, 1.0]), None);
        assert_eq!(median_precision(&[1.0; 5]), None);
    }

    #[test]
    fn order_does_not_matter() {
        assert_eq!(Summary::of(&[1.0, 2.0, 3.0, 4.0]), Summary::of(&[4.0, 2.0, 1.0, 3.0]));
    }
}
