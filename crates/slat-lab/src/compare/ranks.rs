//! Whether two sets of samples differ: the rank test of Mann and Whitney, and an interval for the
//! ratio of their medians by resampling. Neither asks how samples are distributed; those of a shared
//! machine have a long tail on one side.

use crate::stats::median;
use statrs::distribution::{ContinuousCDF, Normal};

/// Up to so many samples in all, and without equal ones, the test is exact.
const EXACT: usize = 40;

/// How often samples are drawn anew for an interval.
const DRAWS: usize = 2000;

/// The probability of ranks at least as uneven as these if both sets came from one source; 1 where
/// there is nothing to say.
pub fn mann_whitney(a: &[f64], b: &[f64]) -> f64 {
    if a.is_empty() || b.is_empty() {
        return 1.0;
    }
    let mut all: Vec<(f64, bool)> =
        a.iter().map(|x| (*x, true)).chain(b.iter().map(|x| (*x, false))).collect();
    all.sort_by(|x, y| x.0.total_cmp(&y.0));
    let (mut ranks, mut ties) = (0.0, 0.0);
    let mut at = 0;
    while at < all.len() {
        let same = all[at..].iter().take_while(|x| x.0 == all[at].0).count();
        // Equal samples share the middle of their ranks.
        let rank = at as f64 + (same + 1) as f64 / 2.0;
        ranks += rank * all[at..at + same].iter().filter(|x| x.1).count() as f64;
        ties += (same as f64).powi(3) - same as f64;
        at += same;
    }
    let (n, m) = (a.len() as f64, b.len() as f64);
    let u = ranks - n * (n + 1.0) / 2.0;
    let u = u.min(n * m - u);
    if ties == 0.0 && all.len() <= EXACT {
        return exact(a.len(), b.len(), u as usize);
    }
    let total = n + m;
    let variance = n * m / 12.0 * (total + 1.0 - ties / (total * (total - 1.0)));
    if variance <= 0.0 {
        return 1.0;
    }
    // Half a rank towards the middle: ranks are whole, the normal distribution is not.
    let z = ((u - n * m / 2.0).abs() - 0.5).max(0.0) / variance.sqrt();
    let normal = Normal::standard();
    (2.0 * (1.0 - normal.cdf(z))).min(1.0)
}

/// The two-sided probability of a U of at most `u`, of all orders of `n` and `m` samples.
fn exact(n: usize, m: usize, u: usize) -> f64 {
    // ways[j][k]: orders of i samples of one kind and j of the other with a U of k.
    let mut ways = vec![vec![0.0; n * m + 1]; m + 1];
    for row in &mut ways {
        row[0] = 1.0;
    }
    for _ in 0..n {
        for j in 1..=m {
            let (fewer, rest) = ways.split_at_mut(j);
            let (before, now) = (&fewer[j - 1], &mut rest[0]);
            // Downwards: `now` has the orders with one sample of the first kind less still.
            for k in (0..=n * m).rev() {
                // The last sample is of the first kind, behind all j; or of the second.
                let behind = k.checked_sub(j).map_or(0.0, |k| now[k]);
                now[k] = before[k] + behind;
            }
        }
    }
    let counts = &ways[m];
    let all: f64 = counts.iter().sum();
    (2.0 * counts[..=u.min(n * m)].iter().sum::<f64>() / all).min(1.0)
}

/// Where the ratio of the median of `b` to that of `a` lies, nineteen times of twenty.
pub fn ratio_interval(a: &[f64], b: &[f64]) -> Option<(f64, f64)> {
    // The same numbers each time: a comparison can be repeated.
    let mut rng = fastrand::Rng::with_seed(1);
    let mut drawn = |samples: &[f64]| {
        let draw: Vec<f64> = samples.iter().map(|_| samples[rng.usize(..samples.len())]).collect();
        median(&draw)
    };
    let mut ratios = Vec::with_capacity(DRAWS);
    for _ in 0..DRAWS {
        let (a, b) = (drawn(a)?, drawn(b)?);
        ratios.push(b / a);
    }
    ratios.retain(|ratio| ratio.is_finite());
    ratios.sort_by(f64::total_cmp);
    let at = |part: f64| ratios.get((part * ratios.len() as f64) as usize).copied();
    Some((at(0.025)?, at(0.975)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(a: f64, b: f64, within: f64) {
        assert!((a - b).abs() < within, "{a} is not {b}");
    }

    #[test]
    fn an_exact_probability_counts_orders() {
        // Of the 20 orders of 3 and 3 samples, one has a U of 0, and one of 9.
        near(mann_whitney(&[1.0, 2.0, 3.0], &[4.0, 5.0, 6.0]), 0.1, 1e-12);
        near(mann_whitney(&[4.0, 5.0, 6.0], &[1.0, 2.0, 3.0]), 0.1, 1e-12);
        // 252 orders of 5 and 5: 1, 1, 2 of them have a U of 0, 1, 2.
        near(exact(5, 5, 2), 2.0 * 4.0 / 252.0, 1e-12);
        near(exact(4, 7, 0), 2.0 / 330.0, 1e-12);
        near(exact(3, 3, 4), 1.0, 0.3);
    }

    #[test]
    fn large_or_equal_samples_are_near_the_exact_ones() {
        let a: Vec<f64> = (0..20).map(|i| f64::from(i) * 2.0).collect();
        let b: Vec<f64> = (0..20).map(|i| f64::from(i) * 2.0 + 9.0).collect();
        let by_orders = mann_whitney(&a, &b);
        let more: Vec<f64> = a.iter().copied().chain([100.0]).collect();
        let by_normal = mann_whitney(&more, &b.iter().copied().chain([101.0]).collect::<Vec<_>>());
        near(by_orders, by_normal, 0.03);
        near(mann_whitney(&[1.0; 10], &[1.0; 10]), 1.0, 1e-12);
        assert!(mann_whitney(&[1.0; 10], &[2.0; 10]) < 0.001);
        near(mann_whitney(&[], &[1.0]), 1.0, 1e-12);
    }

    #[test]
    fn samples_of_one_source_seldom_differ() {
        let mut rng = fastrand::Rng::with_seed(7);
        let mut set = || (0..12).map(|_| rng.f64()).collect::<Vec<_>>();
        let differ = (0..400).filter(|_| mann_whitney(&set(), &set()) < 0.05).count();
        // 20 are expected.
        assert!((8..36).contains(&differ), "{differ} of 400");
    }

    #[test]
    fn an_interval_holds_the_ratio_and_narrows_with_the_spread() {
        let a: Vec<f64> = (0..25).map(|i| 100.0 + f64::from(i % 5)).collect();
        let b: Vec<f64> = a.iter().map(|x| x * 1.5).collect();
        let (low, high) = ratio_interval(&a, &b).unwrap();
        assert!(low <= 1.5 && 1.5 <= high && high - low < 0.1, "{low} {high}");
        assert_eq!(ratio_interval(&[], &a), None);
    }
}
