//! The seed of random tests: the same in CI each time, a fresh one elsewhere.
//!
//! `SLAT_SEED=N` gives it, in CI and elsewhere. Every test that asks for it prints it in that form,
//! so a failure says how to run it again.

#![allow(dead_code, reason = "each test program uses a part")]

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
    std::eprintln!("{NAME}={seed}");
    seed
}

/// So many seeds, from [`seed`] on: with that of one that failed, it is the first.
pub fn seeds(count: u64) -> Range<u64> {
    let first = seed();
    first..first.checked_add(count).expect("SLAT_SEED is too large")
}

/// Returns the seed for the value of `SLAT_SEED`, if it has one.
pub fn chosen(given: Option<&str>, ci: bool) -> u64 {
    match given {
        Some(text) => text.parse().unwrap_or_else(|_| panic!("{NAME}={text} is not a number")),
        None if ci => 0,
        // Short enough to be typed, and for tests to count on from it.
        None => RandomState::new().build_hasher().finish() >> 32,
    }
}
