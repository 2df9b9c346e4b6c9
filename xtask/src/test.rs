//! `cargo xtask test`: every stage, and one summary at the end whatever happened.

use crate::stages::{Outcome, Stage};
use anyhow::bail;
use clap::ValueEnum;
use std::time::Instant;

/// Runs the stages, all of them unless some are named.
pub fn run(chosen: &[Stage]) -> anyhow::Result<()> {
    let stages = if chosen.is_empty() { Stage::value_variants() } else { chosen };
    let mut summary = Vec::new();
    let mut skipped = Vec::new();
    let mut failed = Vec::new();
    for (index, stage) in stages.iter().enumerate() {
        let name = name(*stage);
        println!("\n== {name} ({} of {})", index + 1, stages.len());
        let begin = Instant::now();
        let word = match stage.run() {
            Ok(Outcome::Ran(left_out)) => {
                skipped.extend(left_out.into_iter().map(|what| format!("{name}: {what}")));
                "passed"
            }
            Ok(Outcome::Skipped(reason)) => {
                skipped.push(format!("{name}: {reason}"));
                "skipped"
            }
            Err(error) => {
                eprintln!("{name}: {error:#}");
                failed.push(name.clone());
                "FAILED"
            }
        };
        summary.push(format!("{name:<12} {:>7.1} s  {word}", begin.elapsed().as_secs_f64()));
    }
    println!("\n{}", summary.join("\n"));
    if !skipped.is_empty() {
        println!("\nSkipped:\n  {}", skipped.join("\n  "));
    }
    if !failed.is_empty() {
        bail!("failed: {}", failed.join(", "));
    }
    println!("\n{} stages, none failed.", stages.len());
    Ok(())
}

fn name(stage: Stage) -> String {
    stage.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}
