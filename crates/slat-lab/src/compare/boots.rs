//! Instructions that an emulator counted: a group is a boot of a kernel.
//!
//! The machine's noise does not reach them. What differs between boots is which phase a tick or a
//! piece of deferred work falls into, and guests of one boot are alike in that to the last digit.
//! So the spread of guests tells nothing, and boots have values of a few kinds, for which a test
//! that needs a normal distribution is wrong. A difference is shown where every boot of one kernel
//! lies beyond every boot of the other.

use crate::record::Measurement;
use crate::stats::Summary;

/// Returns the value of each boot, of both sides: the median of its guests, or the least of them if
/// boots differ less in that. A tick adds instructions to some guests, and never takes any away.
pub fn values(a: &Measurement, b: &Measurement) -> [Vec<f64>; 2] {
    let medians = [a.group_medians(), b.group_medians()];
    let least = [a, b].map(|m| m.group_values(|guests| Some(Summary::of(guests)?.min)));
    if spread(&least) < spread(&medians) { least } else { medians }
}

fn spread(sides: &[Vec<f64>; 2]) -> f64 {
    sides.iter().map(|side| range(side)).sum()
}

fn ends(values: &[f64]) -> (f64, f64) {
    Summary::of(values).map_or((f64::NAN, f64::NAN), |summary| (summary.min, summary.max))
}

fn range(values: &[f64]) -> f64 {
    let (low, high) = ends(values);
    high - low
}

/// Returns the least and the greatest ratio of two boots, the second side's by the first side's.
pub fn interval(a: &[f64], b: &[f64]) -> Option<(f64, f64)> {
    let ((low_a, high_a), (low_b, high_b)) = (ends(a), ends(b));
    let both = (low_b / high_a, high_b / low_a);
    (both.0.is_finite() && both.1.is_finite()).then_some(both)
}

/// Returns the probability with which boots of one kernel fall apart like this.
pub fn p(a: &[f64], b: &[f64]) -> f64 {
    let ((low_a, high_a), (low_b, high_b)) = (ends(a), ends(b));
    if low_b <= high_a && low_a <= high_b {
        return 1.0;
    }
    // Of all ways to choose the first side among the boots of both, two are apart like this.
    let (n, m) = (a.len() as u32, b.len() as u32);
    let ways: f64 = (1..=n).map(|i| f64::from(m + i) / f64::from(i)).product();
    (2.0 / ways).min(1.0)
}

/// Returns the greatest difference between boots of both sides.
pub fn most(a: &[f64], b: &[f64]) -> f64 {
    let ((low_a, high_a), (low_b, high_b)) = (ends(a), ends(b));
    (high_b - low_a).abs().max((low_b - high_a).abs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unit::Unit;

    #[test]
    fn the_value_of_a_boot_is_the_one_by_which_boots_differ_least() {
        let of = |samples: &[f64]| {
            let (params, samples) = (serde_json::Map::new(), samples.to_vec());
            let mut m = Measurement::new("s", "t", "v", params, Unit::INSTRUCTIONS, samples);
            m.groups = vec![3; m.samples.len() / 3];
            m
        };
        let ticks = of(&[10.0, 10.0, 19.0, 10.0, 19.0, 19.0]);
        assert_eq!(values(&ticks, &ticks)[0], [10.0, 10.0]);
        let low = of(&[1.0, 10.0, 10.0, 10.0, 10.0, 11.0]);
        assert_eq!(values(&low, &low)[0], [10.0, 10.0]);
    }

    #[test]
    fn boots_that_lie_among_each_other_show_nothing() {
        let (a, b) = ([10.0, 11.0, 12.0, 10.0, 11.0], [12.0, 13.0, 14.0, 13.0, 14.0]);
        assert_eq!((p(&a, &b), most(&a, &b)), (1.0, 4.0));
        let beyond = [13.0; 5];
        assert!((p(&a, &beyond) - 2.0 / 252.0).abs() < 1e-9);
        assert_eq!(interval(&a, &beyond), Some((13.0 / 12.0, 1.3)));
        assert_eq!(interval(&[0.0], &[1.0]), None);
    }
}
