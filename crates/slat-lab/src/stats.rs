//! What a set of samples says: the middle, how far they spread, the extremes.

use statrs::statistics::{Data, Max, Min, OrderStatistics};

/// The five numbers of a box plot. Medians and quartiles, because samples taken on a shared machine
/// have outliers on one side only, and a mean would follow them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Summary {
    /// How many samples there are.
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
    /// Summarises the samples; there is nothing to say about none.
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

    /// The interquartile range: half of the samples are this close together.
    pub fn spread(&self) -> f64 {
        self.upper_quartile - self.lower_quartile
    }

    /// Half the interquartile range as a part of the median: what tables print after `±`.
    pub fn relative_spread(&self) -> f64 {
        if self.median == 0.0 { 0.0 } else { self.spread() / 2.0 / self.median }
    }
}

/// The median, or nothing of nothing.
pub fn median(samples: &[f64]) -> Option<f64> {
    Summary::of(samples).map(|summary| summary.median)
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
    fn order_does_not_matter() {
        assert_eq!(Summary::of(&[1.0, 2.0, 3.0, 4.0]), Summary::of(&[4.0, 2.0, 1.0, 3.0]));
    }
}
