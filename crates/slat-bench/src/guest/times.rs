//! A collection of many times, exact to one part in sixteen.

use hdrhistogram::Histogram;

/// A histogram of nanoseconds, with some exact figures.
#[derive(Clone, Debug)]
pub struct Times {
    histogram: Histogram<u32>,
    /// Sum of all times.
    pub sum: u64,
    /// The longest time.
    pub longest: u64,
    /// Number of times that include a wait for room in a ring.
    pub waited_for_room: u64,
}

impl Default for Times {
    fn default() -> Self {
        // One significant digit is 16 steps between a power of two and the next.
        let histogram = Histogram::new_with_max(u64::MAX, 1).expect("one digit of any number");
        Self { histogram, sum: 0, longest: 0, waited_for_room: 0 }
    }
}

impl Times {
    /// Adds a time.
    #[inline]
    pub fn add(&mut self, time: u64) {
        self.histogram.saturating_record(time);
        self.sum += time;
        self.longest = self.longest.max(time);
    }

    /// Adds all of another's times.
    pub fn merge(&mut self, other: &Self) {
        self.histogram.add(&other.histogram).expect("both hold any number");
        self.sum += other.sum;
        self.longest = self.longest.max(other.longest);
        self.waited_for_room += other.waited_for_room;
    }

    /// Returns the number of times.
    pub fn count(&self) -> u64 {
        self.histogram.len()
    }

    /// Returns the time that `part` of them do not exceed; 0 if there are none.
    pub fn quantile(&self, part: f64) -> u64 {
        self.histogram.value_at_quantile(part).min(self.longest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_is_exact_to_a_sixteenth() {
        for time in (0..200).chain([1 << 20, (1 << 20) + 12345, u64::MAX - 1]) {
            let mut times = Times::default();
            times.add(time);
            times.longest = u64::MAX;
            let found = times.quantile(0.5);
            assert!(time <= found && found - time <= time / 16, "{time}: {found}");
        }
    }

    #[test]
    fn quantiles_are_those_of_all_that_was_added() {
        let (mut one, mut two) = (Times::default(), Times::default());
        (1..=50).for_each(|time| one.add(time * 1000));
        (51..=100).for_each(|time| two.add(time * 1000));
        one.merge(&two);
        assert_eq!((one.count(), one.longest, one.sum), (100, 100_000, 5_050_000));
        assert!((50_000..=53_200).contains(&one.quantile(0.5)), "{}", one.quantile(0.5));
        assert_eq!(one.quantile(1.0), 100_000);
        assert_eq!(Times::default().quantile(0.99), 0);
    }
}
