//! The seed of random tests: the same in CI each time, a fresh one elsewhere.
//!
//! `SLAT_SEED=N` gives it, in CI and elsewhere. Every test that asks for it prints it in that form,
//! so a failure says how to run it again.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::ops::Range;
use std::sync::OnceLock;

/// What gives the seed.
const NAME: &str = "SLAT_SEED";

/// The seed of this process's random tests. The calling test prints it.
///
/// # Panics
/// If `SLAT_SEED` is not a number.
pub fn seed() -> u64 {
    static SEED: OnceLock<u64> = OnceLock::new();
    let seed = *SEED.get_or_init(|| {
        let ci = std::env::var_os("CI").is_some();
        chosen(std::env::var(NAME).ok().as_deref(), ci)
    });
    // Once a test: what a test prints is shown with its failure.
    eprintln!("{NAME}={seed}");
    seed
}

/// So many seeds, from [`seed`] on: with that of one that failed, it is the first.
pub fn seeds(count: u64) -> Range<u64> {
    let first = seed();
    first..first.checked_add(count).expect("SLAT_SEED is too large")
}

fn chosen(given: Option<&str>, ci: bool) -> u64 {
    match given {
        Some(text) => text.parse().unwrap_or_else(|_| panic!("{NAME}={text} is not a number")),
        None if ci => 0,
        // Short enough to be typed, and for tests to count on from it.
        None => RandomState::new().build_hasher().finish() >> 32,
    }
}

/// How property tests run: by [`seed`], and first of all by the cases that failed before, which
/// stand beside the test's source with the extension `regressions`.
#[cfg(feature = "proptest")]
pub fn config() -> proptest::test_runner::Config {
    use proptest::test_runner::{Config, FileFailurePersistence, RngSeed};
    let persistence = FileFailurePersistence::WithSource("regressions");
    Config {
        rng_seed: RngSeed::Fixed(seed()),
        failure_persistence: Some(Box::new(persistence)),
        ..Config::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_that_is_given_wins_and_ci_has_always_the_same() {
        assert_eq!((chosen(Some("7"), true), chosen(Some("7"), false)), (7, 7));
        assert_eq!((chosen(None, true), chosen(None, true)), (0, 0));
    }

    #[test]
    fn elsewhere_seeds_differ() {
        let some: std::collections::BTreeSet<_> = (0..8).map(|_| chosen(None, false)).collect();
        assert!(some.len() > 1 && some.iter().all(|&seed| seed >> 32 == 0), "{some:?}");
    }

    #[test]
    #[should_panic(expected = "SLAT_SEED=x is not a number")]
    fn a_seed_that_is_no_number_is_refused() {
        chosen(Some("x"), false);
    }

    #[test]
    fn seeds_begin_with_the_seed_that_is_printed() {
        assert_eq!(seeds(3).collect::<Vec<_>>(), [0, 1, 2].map(|more| seed() + more));
    }
}
