//! What a migration would do to a guest: one of another size than was copied here, or one that runs
//! already and is watched.
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
    /// Times that what is left is copied before it is stopped.
    pub rounds: u32,
    /// Whether what is left comes to fit into the downtime allowed.
    pub converges: bool,
}

/// Copies, by calculation.
pub fn of(guest: &Guest) -> Forecast {
    let (mut left, mut total, mut rounds) = (guest.memory, 0.0, 0);
    for _ in 0..guest.max_rounds {
        rounds += 1;
        let round = left / guest.copied;
        total += round;
        left = (round * guest.writes).min(guest.memory);
        if left / guest.copied <= guest.max_downtime {
            break;
        }
    }
    let downtime = left / guest.copied;
    let converges = downtime <= guest.max_downtime;
    Forecast { total: total + downtime, downtime, rounds, converges }
}

/// Halvings of a range: each of its values is told within one in 10^12.
const HALVINGS: u32 = 40;

/// The value between two from which on it is so; `None` if it never is. It has to be so from some
/// value on.
fn from_where(low: f64, high: f64, is_so: impl Fn(f64) -> bool) -> Option<f64> {
    if !is_so(high) {
        return None;
    }
    let (mut not, mut so) = (low, high);
    for _ in 0..HALVINGS {
        let middle = f64::midpoint(not, so);
        if is_so(middle) { so = middle } else { not = middle }
    }
    Some(so)
}

/// The slowest copying at which it converges.
pub fn needed_copy(guest: &Guest) -> Option<f64> {
    from_where(0.0, guest.copied * 4096.0, |copied| of(&Guest { copied, ..*guest }).converges)
}

/// How fast the guest may write at most so that it converges: what a VMM's throttling
/// (auto-converge) has to bring it down to.
pub fn bearable_writes(guest: &Guest) -> f64 {
    // Beyond, it is no matter how much.
    let most = guest.copied * 16.0;
    let slower = |by: f64| of(&Guest { writes: most - by, ..*guest }).converges;
    if slower(0.0) {
        return most;
    }
    from_where(0.0, most, slower).map_or(0.0, |by| most - by)
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
        assert_eq!(none, Forecast { total: 16.0, downtime: 0.0, rounds: 1, converges: true });
    }

    #[test]
    fn rounds_shrink_as_the_rates_are_to_each_other() {
        // 16 s, 4 s, 1 s; a quarter of a second is left, which may be stood still for.
        let quarter = of(&guest(GIB / 4.0));
        assert_eq!(quarter, Forecast { total: 21.25, downtime: 0.25, rounds: 3, converges: true });
    }

    #[test]
    fn a_guest_that_writes_faster_than_it_is_copied_never_converges() {
        let faster = of(&guest(2.0 * GIB));
        assert!(!faster.converges && faster.downtime == 16.0, "{faster:?}");
    }

    #[test]
    fn what_would_make_it_converge_just_does() {
        let faster = guest(2.0 * GIB);
        let copied = needed_copy(&faster).unwrap();
        let at = |copied| of(&Guest { copied, ..faster }).converges;
        assert!(at(copied) && !at(copied * 0.99), "{copied}");
        assert!(copied > 2.0 * GIB);
        let writes = bearable_writes(&faster);
        let at = |writes| of(&Guest { writes, ..faster }).converges;
        assert!(at(writes) && !at(writes * 1.05) && writes < GIB, "{writes}");
        // All of it fits into the time, whatever is written.
        let small = Guest { memory: GIB / 4.0, ..faster };
        assert_eq!(bearable_writes(&small), 16.0 * GIB);
        assert!(needed_copy(&small).unwrap() < GIB);
        // Nothing fits into no time, however fast.
        let never = Guest { max_downtime: 0.0, ..faster };
        assert_eq!(needed_copy(&never), None);
        assert!(bearable_writes(&never) < 1e-9 * GIB);
    }
}
