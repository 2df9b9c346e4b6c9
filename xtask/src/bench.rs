//! `cargo xtask bench`: the engine's operations against what was asked of each.

use crate::stages::slat_bench;
use crate::target;
use anyhow::{Context, bail};

/// Builds what users get, measures, and prints asked and reached. A threshold that is missed is no
/// failure: a benchmark is not a test.
pub fn run(arguments: &[String]) -> anyhow::Result<()> {
    let mut bench = slat_bench();
    bench.arg("engine").args(arguments).arg("--output").arg(target().join("engine-bench"));
    let status = bench.status().context("cannot start slat-bench")?;
    if !status.success() {
        bail!("{bench:?} failed: {status}");
    }
    Ok(())
}
