//! `cargo xtask bench`: compares the engine's operations with their thresholds.

use crate::target;
use crate::workspace::{ran, slat_bench};

/// Builds for release, measures, and prints thresholds and results. A missed threshold is no
/// failure, because a benchmark is not a test.
pub fn run(arguments: &[String]) -> anyhow::Result<()> {
    let mut bench = slat_bench();
    bench.arg("engine").args(arguments).arg("--output").arg(target().join("engine-bench"));
    ran(&mut bench).map(|_| ())
}
