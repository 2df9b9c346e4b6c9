//! A histogram of the time that vCPUs waited, of fixed size: eight cells for each power of two.

use core::sync::atomic::{AtomicU64, Ordering};

const STEPS: usize = 8;
const CELLS: usize = 62 * STEPS;

/// The number and length of vCPUs' waits for pages that arrived late, in ticks of
/// [`Host::now`](crate::Host::now). A wait lasts from the fault that found the page missing until
/// the vCPU ends the wait, or faults on the page with success.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Stalls {
    /// The number of waits.
    pub count: u64,
    /// The median: half of the waits took no longer. Like `p99`, it is at most an eighth above the
    /// exact value.
    pub p50: u64,
    /// The 99th percentile: 99 of 100 waits took no longer.
    pub p99: u64,
    /// The longest wait, exactly.
    pub longest: u64,
}

/// The cells of the histogram. They order no other memory accesses.
#[derive(Debug)]
pub(crate) struct StallCells {
    cells: [AtomicU64; CELLS],
    longest: AtomicU64,
}

impl Default for StallCells {
    fn default() -> Self {
        Self { cells: [const { AtomicU64::new(0) }; CELLS], longest: AtomicU64::new(0) }
    }
}

fn cell(ticks: u64) -> usize {
    match ticks.checked_ilog2() {
        None | Some(0..3) => ticks as usize,
        Some(power) => (power as usize - 2) * STEPS + (ticks >> (power - 3)) as usize % STEPS,
    }
}

/// Returns the largest value that a cell counts.
fn most(cell: usize) -> u64 {
    if cell < STEPS {
        return cell as u64;
    }
    let power = cell / STEPS + 2;
    let next = (STEPS + cell % STEPS + 1) as u128;
    ((next << (power - 3)) - 1) as u64
}

impl StallCells {
    pub fn record(&self, ticks: u64) {
        self.cells[cell(ticks)].fetch_add(1, Ordering::Relaxed);
        self.longest.fetch_max(ticks, Ordering::Relaxed);
    }

    pub fn read(&self) -> Stalls {
        let cells = self.cells.each_ref().map(|cell| cell.load(Ordering::Relaxed));
        let longest = self.longest.load(Ordering::Relaxed);
        let count: u64 = cells.iter().sum();
        let below = |part: u64| {
            let wanted = count - count * (100 - part) / 100;
            let mut sum = 0;
            let found = cells.iter().position(|cell| {
                sum += cell;
                sum >= wanted
            });
            found.map_or(0, most).min(longest)
        };
        if count == 0 {
            return Stalls::default();
        }
        Stalls { count, p50: below(50), p99: below(99), longest }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_value_is_in_a_cell_that_ends_within_an_eighth_above() {
        let powers = (0..64).flat_map(|power| [(1u64 << power) - 1, 1 << power, (1 << power) | 1]);
        for value in powers.chain((0..64).map(|power| u64::MAX >> power)).chain(0..5000) {
            let most = most(cell(value));
            assert!(value <= most && most - value <= value / 8, "{value}: {most}");
        }
    }

    #[test]
    fn percentiles_are_of_what_was_recorded() {
        let cells = StallCells::default();
        assert_eq!(cells.read(), Stalls::default());
        (0..98).for_each(|_| cells.record(4));
        cells.record(100);
        cells.record(5_000);
        let Stalls { count, p50, p99, longest } = cells.read();
        assert_eq!((count, p50, longest), (100, 4, 5_000));
        assert!((100..=112).contains(&p99), "{p99}");
    }
}
