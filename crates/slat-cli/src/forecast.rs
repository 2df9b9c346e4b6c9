//! Computes what a migration would do to a guest: one of another size than was migrated here, one
//! that runs and is watched, or one of which only figures are known.
//!
//! The model is pre-copy at constant rates: while a round copies what is left, the guest dirties
//! pages at its rate, up to those that it writes at all: its hot set. A guest that writes at random
//! writes some pages again before they are copied: it dirties fewer than it writes, the more so the
//! longer the round.
//!
//! A VMM decides with the rate of the round before whether the rest fits into the downtime. It
//! copies that rest when the guest no longer competes for CPUs and locks, so that the rest can take
//! less time than was expected.

/// A guest to migrate, and the link. Rates are in bytes per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Guest {
    /// Memory of the guest, in bytes.
    pub memory: f64,
    /// Rate at which the guest dirties pages.
    pub writes: f64,
    /// Bytes of the pages that the guest writes again and again: more are never dirty after the
    /// first round. All of its memory, if that is not known.
    pub hot: f64,
    /// Whether it writes to its hot set at random, and not one page after the other.
    pub random: bool,
    /// Rate at which pages are copied while the guest runs.
    pub copied: f64,
    /// Rate at which pages are copied while the guest stands still. It is higher where the guest,
    /// and not the link, slows the copying down.
    pub copied_at_rest: f64,
    /// Seconds to stop the vCPUs and to fetch the log a last time, which no VMM counts when it
    /// decides.
    pub stop: f64,
    /// Longest downtime allowed, in seconds.
    pub max_downtime: f64,
    /// Rounds after which the guest is stopped in any case.
    pub max_rounds: u32,
}

impl Guest {
    /// Returns the bytes of the pages that are dirty after a time in which none was cleaned, if the
    /// guest has that part of its pace.
    pub fn dirtied(&self, seconds: f64, pace: f64) -> f64 {
        let Self { writes, hot, .. } = *self;
        match self.random {
            true => Writes { rate: writes * pace, hot }.within(seconds),
            false => (writes * pace * seconds).min(hot),
        }
    }
}

/// The computed migration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Forecast {
    /// Duration in seconds, with the downtime.
    pub total: f64,
    /// Downtime in seconds.
    pub downtime: f64,
    /// Rounds of copying before the guest is stopped.
    pub rounds: u32,
    /// Whether the rest can be copied within the downtime allowed.
    pub converges: bool,
}

/// Computes the migration of a guest.
pub fn of(guest: &Guest) -> Forecast {
    course(guest, guest.memory, |round| guest.dirtied(round.seconds, 1.0))
}

/// A round of copying, when it is over.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Round {
    /// Its number, from 1.
    pub number: u32,
    /// Its duration in seconds.
    pub seconds: f64,
    /// Bytes that it copied.
    pub copied: f64,
}

/// Computes the migration of a guest of which the first round copies `first` bytes, where
/// `dirtied` tells the bytes of the pages that the guest dirties in a round. They are at most those
/// of its memory.
pub fn course(guest: &Guest, first: f64, mut dirtied: impl FnMut(Round) -> f64) -> Forecast {
    let (mut left, mut total, mut rounds) = (first, 0.0, 0);
    for _ in 0..guest.max_rounds {
        rounds += 1;
        let round = left / guest.copied;
        total += round;
        let dirtied = dirtied(Round { number: rounds, seconds: round, copied: left });
        left = dirtied.min(guest.memory);
        if left / guest.copied <= guest.max_downtime {
            break;
        }
    }
    let converges = left / guest.copied <= guest.max_downtime;
    let downtime = guest.stop + left / guest.copied_at_rest;
    Forecast { total: total + downtime, downtime, rounds, converges }
}

/// How much memory a guest dirties in a time: it writes at random to a hot set, at a rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Writes {
    /// Bytes of the pages that it writes, each write counted, per second.
    pub rate: f64,
    /// Bytes of the hot set.
    pub hot: f64,
}

impl Writes {
    /// Returns the bytes of the pages that are dirty after a time in which none was cleaned: those
    /// that a random write of so many has hit.
    pub fn within(&self, seconds: f64) -> f64 {
        -self.hot * (-self.rate * seconds / self.hot).exp_m1()
    }

    /// Returns the writes that dirty so many bytes in two windows of so many seconds. If the longer
    /// window has as many for each second as the shorter, all of `memory` is hot.
    ///
    /// Returns `None` if the longer window has fewer bytes than the shorter, or more for each
    /// second.
    pub fn of_windows([short, long]: [(f64, f64); 2], memory: f64) -> Option<Self> {
        let (rates, grows) = ([short.1 / short.0, long.1 / long.0], long.1 >= short.1);
        // Measured windows differ by some per cent.
        if long.0 <= short.0 || !grows || rates[1] > rates[0] * 1.05 {
            return None;
        }
        // With a hot set of that size, the rate follows from the short window.
        let of_hot = |hot: f64| {
            let rate = -hot * (-short.1 / hot).ln_1p() / short.0;
            Self { rate, hot }
        };
        let least = long.1.max(short.1 * (1.0 + 1e-9));
        let enough = |hot: f64| of_hot(hot).within(long.0) >= long.1;
        let hot = from_where(least, memory, enough).unwrap_or(memory);
        Some(of_hot(hot))
    }
}

/// Halvings of a range, which find a value with an error of at most 10⁻¹² of the range.
const HALVINGS: u32 = 40;

/// Returns the least value of a range for which `is_so` holds, or `None` if it holds for none. If
/// it holds for a value, it must hold for all larger ones.
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

/// Returns the lowest rate of copying at which the migration converges, or `None` if it does not at
/// 4096 times the given rate.
pub fn needed_copy(guest: &Guest) -> Option<f64> {
    // The decision to stop the guest takes no account of the rate at rest.
    from_where(0.0, guest.copied * 4096.0, |copied| of(&Guest { copied, ..*guest }).converges)
}

/// The highest result of [`bearable_writes`], as a multiple of the rate of copying.
pub const MOST_WRITES: f64 = 16.0;

/// Returns the highest rate of writing at which the migration converges, to which a VMM's
/// throttling (auto-converge) has to slow the guest. The result is at most [`MOST_WRITES`] times
/// the rate of copying: then all memory can be copied within the downtime.
pub fn bearable_writes(guest: &Guest) -> f64 {
    // A guest that converges at this rate converges at any rate.
    let most = guest.copied * MOST_WRITES;
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
        Guest {
            memory,
            writes,
            hot: memory,
            random: false,
            copied: GIB,
            copied_at_rest: GIB,
            stop: 0.0,
            max_downtime: 0.3,
            max_rounds: 30,
        }
    }

    #[test]
    fn an_idle_guest_takes_as_long_as_its_memory_takes_to_copy() {
        let none = of(&guest(0.0));
        assert_eq!(none, Forecast { total: 16.0, downtime: 0.0, rounds: 1, converges: true });
    }

    #[test]
    fn rounds_shrink_as_the_rates_are_to_each_other() {
        // Rounds of 16 s, 4 s and 1 s; the rest takes a quarter of a second, which is within the
        // downtime.
        let quarter = of(&guest(GIB / 4.0));
        assert_eq!(quarter, Forecast { total: 21.25, downtime: 0.25, rounds: 3, converges: true });
    }

    #[test]
    fn the_remainder_of_a_stopped_guest_is_copied_at_link_speed() {
        // The same rounds: a quarter of a GiB is left, which the link carries in 0.0625 s.
        let guest = Guest { copied_at_rest: 4.0 * GIB, ..guest(GIB / 4.0) };
        let quarter = of(&guest);
        let at_rest = Forecast { total: 21.0625, downtime: 0.0625, rounds: 3, converges: true };
        assert_eq!(quarter, at_rest);
    }

    #[test]
    fn the_rate_while_the_guest_runs_decides_when_it_is_stopped() {
        // After the second round 1 GiB is left. The link would carry it within the downtime, but
        // the VMM has copied at 1 GiB/s so far, and goes on.
        let guest = Guest { copied_at_rest: 4.0 * GIB, ..guest(GIB / 4.0) };
        assert_eq!(of(&guest).rounds, 3);
        // If the rounds are over, it converges no more, and yet stands still for that time only.
        let stopped = of(&Guest { max_rounds: 2, ..guest });
        assert_eq!(stopped, Forecast { total: 20.25, downtime: 0.25, rounds: 2, converges: false });
    }

    #[test]
    fn a_guest_that_writes_faster_than_the_copy_never_converges() {
        let faster = of(&guest(2.0 * GIB));
        assert!(!faster.converges && faster.downtime == 16.0, "{faster:?}");
    }

    #[test]
    fn no_round_after_the_first_leaves_more_than_the_hot_set() {
        let memory = 50.0 * GIB;
        let copied = 800.0 / 1024.0 * GIB;
        let guest = Guest { memory, hot: GIB, copied, copied_at_rest: copied, ..guest(GIB) };
        let two = of(&Guest { max_rounds: 2, ..guest });
        assert_eq!((two.downtime, two.total, two.converges), (1.28, 64.0 + 2.0 * 1.28, false));
        assert_eq!(of(&guest).downtime, 1.28);
    }

    #[test]
    fn random_writes_dirty_fewer_pages_and_stopping_takes_time() {
        let in_order = of(&guest(GIB / 2.0));
        let random = of(&Guest { random: true, ..guest(GIB / 2.0) });
        assert!(random.total < in_order.total && random.rounds <= in_order.rounds, "{random:?}");
        // The first round takes 16 s, in which half of the memory is written, at random 39 %.
        let one = |random| of(&Guest { random, max_rounds: 1, ..guest(GIB / 2.0) }).downtime;
        assert!((one(false) - 8.0).abs() < 1e-9 && (one(true) - 6.295).abs() < 1e-3);
        let stop = of(&Guest { stop: 0.01, ..guest(GIB / 2.0) });
        assert!((stop.downtime - in_order.downtime - 0.01).abs() < 1e-9);
        assert_eq!(stop.rounds, in_order.rounds);
    }

    #[test]
    fn two_windows_tell_the_hot_set_and_the_rate() {
        let memory = 16.0 * GIB;
        let known = Writes { rate: GIB / 2.0, hot: GIB };
        let windows = [0.1, 2.0].map(|seconds| (seconds, known.within(seconds)));
        let found = Writes::of_windows(windows, memory).unwrap();
        assert!((found.hot / known.hot - 1.0).abs() < 1e-3, "{found:?}");
        assert!((found.rate / known.rate - 1.0).abs() < 1e-3, "{found:?}");
        // Each second dirties other pages.
        let even = Writes::of_windows([(1.0, 100.0), (10.0, 1000.0)], 1e9).unwrap();
        assert_eq!(even.hot, 1e9);
        assert!((even.within(10.0) / 1000.0 - 1.0).abs() < 1e-3);
        for wrong in [[(1.0, 100.0), (10.0, 50.0)], [(1.0, 1.0), (0.5, 1.0)]] {
            assert_eq!(Writes::of_windows(wrong, memory), None);
        }
        assert_eq!(Writes::of_windows([(1.0, 1.0), (2.0, 9.0)], memory), None);
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
        // All memory can be copied within the downtime, whatever the guest writes.
        let small = Guest { memory: GIB / 4.0, hot: GIB / 4.0, ..faster };
        assert_eq!(bearable_writes(&small), 16.0 * GIB);
        assert!(needed_copy(&small).unwrap() < GIB);
        // No rate of copying fits into a downtime of 0.
        let never = Guest { max_downtime: 0.0, ..faster };
        assert_eq!(needed_copy(&never), None);
        assert!(bearable_writes(&never) < 1e-9 * GIB);
    }
}
