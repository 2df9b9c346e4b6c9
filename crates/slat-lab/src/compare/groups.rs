//! Tests whether two sets of groups differ by more than a threshold: Welch's test of the logarithms
//! of the groups' medians, and Holm's correction for all rows of a comparison together. A group
//! holds the samples of one guest or one process, which have more in common than two groups have.

use statrs::distribution::{ContinuousCDF, StudentsT};

/// The probability with which a comparison may show a difference where there is none, in any of its
/// rows.
pub const LEVEL: f64 = 0.05;

/// The probability with which a difference that exists has to be found.
const POWER: f64 = 0.9;

/// Upper bound of the number of groups: more than anyone would measure.
const MOST: u32 = 10_000;

/// A comparison of two sets of groups.
#[derive(Clone, Copy, Debug)]
pub struct Contrast {
    difference: f64,
    error: f64,
    freedom: f64,
    /// Standard deviation between the groups of one side.
    deviation: f64,
    /// The bounds of differences that do not matter.
    margins: [f64; 2],
    /// Whether groups of both sides took turns.
    turns: bool,
    /// The value that a difference is a part of; `None` if the difference is one of logarithms.
    base: Option<f64>,
}

impl Contrast {
    /// Compares medians of groups. Returns `None` if a side has fewer than two groups, whose spread
    /// is unknown.
    pub fn of(a: &[f64], b: &[f64], threshold: f64) -> Option<Self> {
        if a.len().min(b.len()) < 2 {
            return None;
        }
        // Values that can be 0 or less, such as stalls and losses, have no logarithm.
        let logs = a.iter().chain(b).all(|x| *x > 0.0);
        let told = |x: &[f64]| moments(x.iter().map(|x| if logs { x.ln() } else { *x }));
        let ((n, mean_a, of_a), (m, mean_b, of_b)) = (told(a), told(b));
        let (part_a, part_b) = (of_a / n, of_b / m);
        let both = part_a.powi(2) / (n - 1.0) + part_b.powi(2) / (m - 1.0);
        let freedom = (part_a + part_b).powi(2) / both;
        let base = mean_a.max(0.0);
        Some(Self {
            difference: mean_b - mean_a,
            error: (part_a + part_b).sqrt(),
            freedom: if freedom.is_finite() { freedom } else { n + m - 2.0 },
            deviation: (((n - 1.0) * of_a + (m - 1.0) * of_b) / (n + m - 2.0)).sqrt(),
            margins: match logs {
                true => [(1.0 - threshold).max(0.0).ln(), threshold.ln_1p()],
                false => [-threshold * base, threshold * base],
            },
            turns: false,
            base: (!logs).then_some(base),
        })
    }

    /// Compares groups that took turns: each group of one side with the group of the other side
    /// that ran next to it, so that the machine's drift over minutes affects both alike. Returns
    /// `None` for fewer than two turns, or if a group is missing.
    pub fn of_turns(a: &[f64], b: &[f64], threshold: f64) -> Option<Self> {
        let of_both = Self::of(a, b, threshold).filter(|_| a.len() == b.len())?;
        let told = |x: f64| if of_both.base.is_none() { x.ln() } else { x };
        let (n, mean, variance) = moments(a.iter().zip(b).map(|(a, b)| told(*b) - told(*a)));
        Some(Self {
            difference: mean,
            error: (variance / n).sqrt(),
            freedom: n - 1.0,
            // As if the two sides were independent: their difference has twice the variance of one.
            deviation: (variance / 2.0).sqrt(),
            turns: true,
            ..of_both
        })
    }

    /// Returns the probability of a difference this far beyond the threshold, if the true one were
    /// within it.
    pub fn p(&self) -> f64 {
        let [low, high] = self.margins;
        let beyond = (self.difference - high).max(low - self.difference);
        // A value at the threshold is beyond it only by the rounding of a logarithm.
        if beyond <= 1e-9 || self.difference.is_nan() {
            return 1.0;
        }
        // Without any spread, as between counts, every difference is one.
        let t = if self.error > 0.0 { beyond / self.error } else { return 0.0 };
        student(self.freedom).map_or(1.0, |student| (2.0 * student.cdf(-t)).min(1.0))
    }

    /// Returns the confidence interval of the ratio, at `level`.
    pub fn interval(&self, level: f64) -> Option<(f64, f64)> {
        let reach = quantile(self.freedom, level / 2.0)? * self.error;
        let ratio = |difference: f64| match self.base {
            None => difference.exp(),
            Some(base) => 1.0 + difference / base,
        };
        let both = (ratio(self.difference - reach), ratio(self.difference + reach));
        (both.0.is_finite() && both.1.is_finite()).then_some(both)
    }

    /// Returns the number of groups per side that would show this change in nine of ten
    /// comparisons.
    pub fn needed(&self, change: f64, level: f64) -> Option<u32> {
        let change = self.base.map_or(change.ln_1p(), |base| change * base) - self.margins[1];
        if change <= 0.0 {
            return None;
        }
        let shows = |n: u32| {
            let freedom = if self.turns { 1.0 } else { 2.0 } * (f64::from(n) - 1.0);
            let both = quantile(freedom, level / 2.0).zip(quantile(freedom, 1.0 - POWER));
            both.is_some_and(|(false_alarm, miss)| {
                (false_alarm + miss) * self.deviation * (2.0 / f64::from(n)).sqrt() <= change
            })
        };
        // More groups always show more.
        let (mut low, mut high) = (2, MOST);
        while low < high {
            let middle = low.midpoint(high);
            if shows(middle) { high = middle } else { low = middle + 1 }
        }
        shows(low).then_some(low)
    }
}

/// Returns the number of values, their mean and their variance.
fn moments(values: impl Iterator<Item = f64> + Clone) -> (f64, f64, f64) {
    let n = values.clone().count() as f64;
    let mean = values.clone().sum::<f64>() / n;
    (n, mean, values.map(|x| (x - mean).powi(2)).sum::<f64>() / (n - 1.0))
}

fn student(freedom: f64) -> Option<StudentsT> {
    StudentsT::new(0.0, 1.0, freedom).ok()
}

/// Returns the value that is exceeded with the probability `part`.
fn quantile(freedom: f64, part: f64) -> Option<f64> {
    Some(-student(freedom)?.inverse_cdf(part))
}

/// Returns each probability with Holm's correction, and the level at which its row was tested.
pub fn holm(all: &[f64]) -> Vec<(f64, f64)> {
    let mut order: Vec<usize> = (0..all.len()).collect();
    order.sort_by(|a, b| all[*a].total_cmp(&all[*b]));
    let mut corrected = vec![(1.0, LEVEL); all.len()];
    let (mut most, mut level): (f64, f64) = (0.0, LEVEL);
    for (place, row) in order.into_iter().enumerate() {
        let left = (all.len() - place) as f64;
        // After the first row that shows nothing, no row shows anything.
        if most <= LEVEL {
            level = LEVEL / left;
        }
        most = most.max((all[row] * left).min(1.0));
        corrected[row] = (most, level);
    }
    corrected
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(a: f64, b: f64, within: f64) {
        assert!((a - b).abs() < within, "{a} is not {b}");
    }

    #[test]
    fn holm_stops_at_the_first_probability_that_fails() {
        let corrected = holm(&[0.04, 0.001, 0.03]);
        let wanted = [(0.06, 0.025), (0.003, 0.05 / 3.0), (0.06, 0.025)];
        for (one, wanted) in corrected.into_iter().zip(wanted) {
            near(one.0, wanted.0, 1e-12);
            near(one.1, wanted.1, 1e-12);
        }
    }

    #[test]
    fn an_interval_excludes_the_threshold_if_p_is_below_the_level() {
        let mut rng = fastrand::Rng::with_seed(3);
        for _ in 0..300 {
            let mut side = |scale: f64| -> Vec<f64> {
                (0..4).map(|_| scale * (1.0 + rng.f64() / 10.0)).collect()
            };
            let contrast = Contrast::of(&side(1.0), &side(1.1), 0.02).unwrap();
            let (low, high) = contrast.interval(0.01).unwrap();
            assert_eq!(contrast.p() < 0.01, low > 1.02 || high < 0.98, "{contrast:?}");
        }
    }

    #[test]
    fn the_needed_number_of_groups_finds_nine_of_ten_changes() {
        let mut rng = fastrand::Rng::with_seed(5);
        let mut side = |n: u32, scale: f64| -> Vec<f64> {
            (0..n).map(|_| scale * (0.06 * (0..12).map(|_| rng.f64()).sum::<f64>()).exp()).collect()
        };
        let many = Contrast::of(&side(2000, 1.0), &side(2000, 1.0), 0.02).unwrap();
        let needed = many.needed(0.1, 0.005).unwrap();
        let found = |_: &u32| {
            Contrast::of(&side(needed, 1.0), &side(needed, 1.1), 0.02).unwrap().p() < 0.005
        };
        let found = (0..400).filter(found).count();
        assert!((345..=390).contains(&found), "{found} of 400 by {needed}");
    }

    #[test]
    fn one_group_a_side_shows_nothing_and_exact_values_differ() {
        assert!(Contrast::of(&[1.0], &[2.0, 2.0], 0.02).is_none());
        near(Contrast::of(&[1.0, 1.0], &[2.0, 2.0], 0.02).unwrap().p(), 0.0, 1e-12);
        near(Contrast::of(&[0.0, 0.0], &[0.0, 0.0], 0.02).unwrap().p(), 1.0, 1e-12);
        near(Contrast::of(&[0.0, 0.0], &[1.0, 1.0], 0.02).unwrap().p(), 0.0, 1e-12);
    }

    #[test]
    fn the_machines_drift_is_no_difference_of_sides_in_turns() {
        // Each turn is slower than the one before, on both sides alike; the second side is 5 %
        // slower.
        let drift = |turn: u32| 1.0 + f64::from(turn) * 0.2;
        let a: Vec<f64> = (0..6).map(drift).collect();
        let noise = [0.002, -0.003, 0.001, 0.003, -0.002, -0.001];
        let b: Vec<f64> = a.iter().zip(noise).map(|(a, noise)| a * (1.05 + noise)).collect();
        let turns = Contrast::of_turns(&a, &b, 0.02).unwrap();
        assert!(turns.p() < 1e-4, "{}", turns.p());
        let (low, high) = turns.interval(LEVEL).unwrap();
        assert!(low > 1.04 && high < 1.06, "{low} {high}");
        assert!(Contrast::of(&a, &b, 0.02).unwrap().p() > 0.5, "which drift hides of others");
        assert!(Contrast::of_turns(&a, &a, 0.0).unwrap().p() == 1.0);
        assert!(Contrast::of_turns(&a, &b[1..], 0.0).is_none());
    }
}
