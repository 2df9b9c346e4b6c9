//! How property tests run: by the seed of random tests, and first of all by the cases that failed
//! before, which stand beside the test's source with the extension `regressions`.

use crate::seed::seed;
use proptest::test_runner::{Config, FileFailurePersistence, RngSeed};
use std::boxed::Box;

/// Returns the configuration.
pub fn config() -> Config {
    let persistence = FileFailurePersistence::WithSource("regressions");
    Config {
        rng_seed: RngSeed::Fixed(seed()),
        failure_persistence: Some(Box::new(persistence)),
        ..Config::default()
    }
}
