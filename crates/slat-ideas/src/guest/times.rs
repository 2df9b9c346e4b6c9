//! Many times, kept to within a sixteenth.

/// Steps between a power of two and the next, as a base-2 logarithm.
const STEPS: u32 = 4;
const BUCKETS: usize = (64 - STEPS as usize + 1) << STEPS;

/// A histogram of nanoseconds.
#[derive(Clone, Debug)]
pub struct Times {
    buckets: Box<[u32; BUCKETS]>,
    /// How many there are.
    pub count: u64,
    /// All of them together.
    pub sum: u64,
    /// The longest.
    pub longest: u64,
    /// How many of them waited for room in a ring.
    pub waited_for_room: u64,
}

impl Default for Times {
    fn default() -> Self {
        let buckets = Box::new([0; BUCKETS]);
        Self { buckets, count: 0, sum: 0, longest: 0, waited_for_room: 0 }
    }
}

#[inline]
fn bucket(time: u64) -> usize {
    let log = time.max(1 << STEPS).ilog2();
    ((log - STEPS) as usize * (1 << STEPS)) + (time >> (log - STEPS)) as usize
}

/// The longest time that a bucket holds.
fn top(bucket: usize) -> u64 {
    let shift = (bucket >> STEPS).saturating_sub(1) as u32;
    let head = (bucket - ((shift as usize) << STEPS)) as u64;
    (((u128::from(head) + 1) << shift) - 1).min(u64::MAX.into()) as u64
}

impl Times {
    /// One more.
    #[inline]
    pub fn add(&mut self, time: u64) {
        self.buckets[bucket(time)] += 1;
        self.count += 1;
        self.sum += time;
        self.longest = self.longest.max(time);
    }

    /// All of another's.
    pub fn merge(&mut self, other: &Self) {
        self.buckets.iter_mut().zip(other.buckets.iter()).for_each(|(to, from)| *to += from);
        self.count += other.count;
        self.sum += other.sum;
        self.longest = self.longest.max(other.longest);
        self.waited_for_room += other.waited_for_room;
    }

    /// What `part` of them do not exceed; 0 of none.
    pub fn quantile(&self, part: f64) -> u64 {
        let rank = (self.count as f64 * part).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (index, &count) in self.buckets.iter().enumerate() {
            seen += u64::from(count);
            if seen >= rank {
                return top(index).min(self.longest);
            }
        }
        self.longest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_holds_what_is_within_a_sixteenth() {
        for time in (0..200).chain([1 << 20, (1 << 20) + 12345, u64::MAX - 1, u64::MAX]) {
            let top = top(bucket(time));
            assert!(time <= top && top - time <= time / 16, "{time}: {top}");
        }
    }

    #[test]
    fn quantiles_are_those_of_all_that_was_added() {
        let (mut one, mut two) = (Times::default(), Times::default());
        (1..=50).for_each(|time| one.add(time * 1000));
        (51..=100).for_each(|time| two.add(time * 1000));
        one.merge(&two);
        assert_eq!((one.count, one.longest, one.sum), (100, 100_000, 5_050_000));
        assert!((50_000..=53_200).contains(&one.quantile(0.5)), "{}", one.quantile(0.5));
        assert_eq!(one.quantile(1.0), 100_000);
        assert_eq!(Times::default().quantile(0.99), 0);
    }
}
