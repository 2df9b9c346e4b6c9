//! RISC-V's KVM, in C and on the engine.

use super::{on_the_engine, slat};
use crate::static_build::Program;
use crate::target;
use anyhow::{Context, ensure};
use serde_json::Value;
use slat_kernel::vm::Architecture;
use std::fs::File;

/// The series of RISC-V's kernel on the engine.
pub const ENGINE: &str = "lockless-ageing,slat-engine";

/// Checks that guests of RISC-V's KVM in C run, in a kernel without edits.
pub fn in_c(tree: &str) -> anyhow::Result<()> {
    log(tree, "", &["--backing", "4k"])?;
    let tests = "kvm_page_table_test,set_memory_region_test";
    let binary = Program::Slat.path(Architecture::Riscv64);
    let words = ["kernel", "test", "--tree", tree, "--arch", "riscv64", "--binary"];
    slat(&[&words[..], &[&binary.to_string_lossy(), "--test", tests]].concat())
}

/// Checks that guests of RISC-V's KVM on the engine run.
pub fn engine(tree: &str) -> anyhow::Result<()> {
    let edits = format!("+{ENGINE}");
    log(tree, &edits, &["--backing", "4k"])?;
    let split = ["--backing", "2m", "--eager-split", "2m", "--probe", "slat_split"];
    let splits = log(tree, &edits, &split)?;
    ensure!(splits == 1, "a log that began called the eager split {splits} times");
    let riscv = Architecture::Riscv64;
    on_the_engine(tree, riscv, &["set_memory_region_test"])?;
    // Its memory has blocks, of which a log makes pages.
    let blocks = ["kvm_page_table_test", "--", "-v", "1", "-b", "16M", "-s", "anonymous_thp"];
    let counters = on_the_engine(tree, riscv, &blocks)?;
    let faults = counters["slat_faults"].as_str().context("no faults were counted")?;
    ensure!(!faults.contains("split 0"), "no fault split a block: {faults}");
    // Each VM gets another VMID when it runs again: there is one.
    let races = "ageing_race_test,dirty_log_race_test,vmid_rollover_test";
    let two = ["--cpus", "2", "--append", "kvm.slat_vmid_bits=1"];
    on_the_engine(tree, riscv, &[&[races][..], &two].concat())?;
    Ok(())
}

/// Checks that each page that two vCPUs of RISC-V write is in the log; returns how often KVM was
/// asked for an eager split, if that was counted.
fn log(tree: &str, edits: &str, how: &[&str]) -> anyhow::Result<u64> {
    let report = target().join("riscv.json");
    let kernel = format!("tree:{tree}{edits}");
    let (output, binary) = (report.to_string_lossy(), Program::Slat.path(Architecture::Riscv64));
    let binary = binary.to_string_lossy();
    let machine = ["emulate", "--arch", "riscv64", "--kernel", &kernel, "--binary", &binary];
    let words = ["-o", &output, "--", "bench", "dirty-log", "-v", "2", "-b", "4M", "-r", "1"];
    slat(&[&machine[..], &words, &["-i", "1"], how].concat())?;
    let results: Value = serde_json::from_reader(File::open(&report)?)?;
    let results = results["results"].as_array().context("the report has no results")?;
    let count = |name: &str| -> u64 {
        let counts = results.iter().filter_map(|result| result["counts"][name].as_u64());
        counts.sum()
    };
    let (written, logged) = (count("pages_written"), count("pages_in_log"));
    println!("RISC-V{edits}: {written} pages written, {logged} in the log");
    ensure!(written == 1024 && logged == written, "4 MiB have 1,024 pages");
    Ok(count("calls_slat_split"))
}
