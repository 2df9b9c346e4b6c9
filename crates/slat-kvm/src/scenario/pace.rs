//! The pace of vCPUs while the host works on their memory, beside their pace undisturbed.

use crate::Backing;
use crate::figure::Figure;
use crate::work::Work;

/// Progress of the vCPUs within a tenth of a second.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// End of the sample, in seconds since the phase began.
    pub at: f64,
    /// Length of the sample in seconds.
    pub seconds: f64,
    /// Number of steps of all vCPUs.
    pub steps: u64,
    /// Seconds that each vCPU was stalled. A stall counts in the sample in which it ends.
    pub stalled: Vec<f64>,
}

/// Returns the rate at which the vCPUs wrote, in MiB/s, where each write counts as a page.
pub fn written(samples: &[Sample], work: &Work) -> f64 {
    let steps: u64 = samples.iter().map(|sample| sample.steps).sum();
    let seconds: f64 = samples.iter().map(|sample| sample.seconds).sum();
    let bytes = steps as f64 * f64::from(work.share) / 100.0 * Backing::Small.page_size() as f64;
    bytes / seconds.max(f64::MIN_POSITIVE) / f64::from(1 << 20)
}

/// Returns the pace of the last run over time.
pub fn course(samples: &[Sample], baseline: f64) -> [(Figure, Vec<f64>); 2] {
    let (times, pace) = pace(samples, baseline).into_iter().unzip();
    [(Figure::PACE, pace), (Figure::PACE_AT, times)]
}

/// Returns, for each sample longer than 50 ms, its end in seconds, and its steps in per cent of
/// what the vCPUs do with logging off.
fn pace(samples: &[Sample], baseline: f64) -> Vec<(f64, f64)> {
    let whole = samples.iter().filter(|sample| sample.seconds > 0.05);
    whole.map(|sample| (sample.at, share(sample.steps, sample.seconds, baseline))).collect()
}

fn share(steps: u64, seconds: f64, baseline: f64) -> f64 {
    if seconds * baseline > 0.0 { steps as f64 / (seconds * baseline) * 100.0 } else { 0.0 }
}

/// Returns the part of its pace that the guest lost, in per cent; it is below 0 if the guest was
/// faster.
pub fn loss(samples: &[Sample], baseline: f64) -> f64 {
    let steps = samples.iter().map(|sample| sample.steps).sum();
    let seconds = samples.iter().map(|sample| sample.seconds).sum();
    100.0 - share(steps, seconds, baseline)
}

/// Returns the loss of the second that lost most, in per cent.
pub fn worst(samples: &[Sample], baseline: f64) -> f64 {
    let from = |first: usize| {
        let begin = samples[first].at - samples[first].seconds;
        // The sum of ten tenths of a second in floating point may be a little below one.
        let last = samples[first..].iter().position(|it| it.at - begin > 0.999)?;
        Some(loss(&samples[first..=first + last], baseline))
    };
    // A run of less than a second counts as one second.
    (0..samples.len()).filter_map(from).reduce(f64::max).unwrap_or_else(|| loss(samples, baseline))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(steps: &[u64]) -> Vec<Sample> {
        let sample = |(index, &steps)| Sample {
            at: (index + 1) as f64 / 10.0,
            seconds: 0.1,
            steps,
            stalled: Vec::new(),
        };
        steps.iter().enumerate().map(sample).collect()
    }

    #[test]
    fn a_loss_is_what_is_missing_of_the_pace_before() {
        let even = samples(&[5; 20]);
        assert!((loss(&even, 100.0) - 50.0).abs() < 1e-9);
        assert!((worst(&even, 100.0) - 50.0).abs() < 1e-9);
        assert_eq!(pace(&even, 100.0).len(), 20);
        assert!(loss(&even, 0.0) == 100.0, "no pace, nothing but loss");
    }

    #[test]
    fn the_worst_second_is_found_wherever_it_is() {
        let mut steps = [10; 30];
        steps[12..20].fill(0);
        assert!((worst(&samples(&steps), 100.0) - 80.0).abs() < 1e-6);
        assert!((worst(&samples(&[10; 3]), 100.0)).abs() < 1e-6);
        // The worst second may lie across the boundary of two whole seconds.
        let mut steps = [10; 20];
        steps[5..15].fill(0);
        assert!((worst(&samples(&steps), 100.0) - 100.0).abs() < 1e-6);
    }
}
