//! What a migration of a guest of another size would do to it, from the pace at which one was
//! copied here.
//!
//! Pre-copy at constant rates: while a round copies what is left, the guest dirties pages that it
//! has not dirtied in that round, as fast as it is said to write. A guest that writes the same
//! pages again and again leaves less than this says, and migrates sooner.

/// A guest to be migrated, and the link. Rates are bytes a second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Guest {
    /// Bytes of its memory.
    pub memory: f64,
    /// What it writes.
    pub writes: f64,
    /// What is copied.
    pub copied: f64,
    /// Seconds that it may stand still.
    pub max_downtime: f64,
    /// Rounds after which it is stopped in any case.
    pub max_rounds: u32,
}

/// What would come of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Forecast {
    /// Seconds, the downtime included.
    pub total: f64,
    /// Seconds.
    pub downtime: f64,
    /// Whether what is left comes to fit into the downtime allowed.
    pub converges: bool,
}

/// Copies, by calculation.
pub fn of(guest: &Guest) -> Forecast {
    let (mut left, mut total) = (guest.memory, 0.0);
    for _ in 0..guest.max_rounds {
        let round = left / guest.copied;
        total += round;
        left = (round * guest.writes).min(guest.memory);
        if left / guest.copied <= guest.max_downtime {
            break;
        }
    }
    let downtime = left / guest.copied;
    Forecast { total: total + downtime, downtime, converges: downtime <= guest.max_downtime }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: f64 = (1u64 << 30) as f64;

    fn guest(writes: f64) -> Guest {
        let memory = 16.0 * GIB;
        Guest { memory, writes, copied: GIB, max_downtime: 0.3, max_rounds: 30 }
    }

    #[test]
    fn a_guest_that_writes_nothing_takes_as_long_as_its_memory_does() {
        let none = of(&guest(0.0));
        assert_eq!(none, Forecast { total: 16.0, downtime: 0.0, converges: true });
    }

    #[test]
    fn rounds_shrink_as_the_rates_are_to_each_other() {
        // 16 s, 4 s, 1 s; a quarter of a second is left, which may be stood still for.
        let quarter = of(&guest(GIB / 4.0));
        assert_eq!(quarter, Forecast { total: 21.25, downtime: 0.25, converges: true });
    }

    #[test]
    fn a_guest_that_writes_faster_than_it_is_copied_never_converges() {
        let faster = of(&guest(2.0 * GIB));
        assert!(!faster.converges && faster.downtime == 16.0, "{faster:?}");
    }
}
