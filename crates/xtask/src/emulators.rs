//! Runs the command in emulated machines of other kinds, and checks its counts.

use crate::static_build::{self, Effort, Program, test_program};
use crate::workspace::{Outcome, TESTED, cargo, output, ran};
use crate::{in_ci, setup, target};
use anyhow::{Context, ensure};
use serde_json::Value;
use slat_kernel::vm::Architecture;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Memory of the guest inside the x86 machine, in MiB.
const GUEST_MIB: u64 = 16;

/// Number of blocks of 2 MiB that are split.
const BLOCKS: u64 = 64;

/// Installs the emulators.
pub fn install() -> anyhow::Result<()> {
    Architecture::ALL.into_iter().try_for_each(|arch| setup::emulator(arch.qemu()))
}

/// Returns the architecture that differs from the tests' own `slat`.
fn other() -> Architecture {
    if cfg!(target_arch = "aarch64") { Architecture::X86_64 } else { Architecture::Aarch64 }
}

/// Builds the programs for machines of the other architecture; skipped where that is impossible, as
/// are the machines.
pub fn build() -> anyhow::Result<Outcome> {
    match static_build::build(&[other()], &Program::ALL, Effort::Quick) {
        Err(error) if in_ci() => Err(error),
        Err(error) => Ok(Outcome::Skipped(format!("{error:#}"))),
        Ok(()) => Ok(Outcome::Ran(Vec::new())),
    }
}

/// Boots machines of this architecture, each with a small command, and checks the results. With
/// `long` also of the other architecture, and with larger guests: its `slat` takes a minute to
/// build.
pub fn test(long: bool) -> anyhow::Result<Outcome> {
    let built = || {
        if long { static_build::build(&[other()], &Program::ALL, Effort::Quick) } else { Ok(()) }
    };
    match install().and_then(|()| built()) {
        Ok(()) => {}
        Err(error) if in_ci() => return Err(error),
        Err(error) => return Ok(Outcome::Skipped(format!("{error:#}"))),
    }
    // Builds the whole workspace, as the other tests do, so that nothing is compiled again.
    let mut tests = cargo(&["test", "--test", "emulate"]);
    ran(tests.args(TESTED).env("SLAT_REQUIRE_QEMU", "1"))?;
    watched(long)?;
    if !long {
        return match other() {
            Architecture::X86_64 => arm_guests(long),
            _ => x86_guests(long),
        }
        .map(|()| Outcome::Ran(Vec::new()));
    }
    // A machine boots on one CPU.
    let (arm, x86) = std::thread::scope(|scope| {
        let x86 = scope.spawn(|| x86_guests(long));
        (arm_guests(long), x86.join())
    });
    x86.unwrap_or_else(|panic| std::panic::resume_unwind(panic)).and(arm)?;
    Ok(Outcome::Ran(Vec::new()))
}

/// Compares the events of guests with the guests' own counts, on machines where KVM traces each
/// exit, and times where clocks count instructions: with `long` also on the other architecture.
fn watched(long: bool) -> anyhow::Result<()> {
    let own = static_build::own()?;
    // On this kernel only tests that need other programs or other kernels may be skipped.
    for (test, passed) in [("events", 7), ("working_set", 3)] {
        let program = own_test("slat-kvm", test)?;
        in_a_machine(own, &program, &[], &["--test-threads", "1"], passed)?;
    }
    exact_times(own, &own_test("slat-kvm", "events")?)?;
    if long {
        let program = static_build::test(other(), "slat-kvm", "events")?;
        exact_times(other(), &program)?;
    }
    Ok(())
}

/// The test of slat-kvm whose times are exact where clocks count instructions.
const EXACT: &str = "short_faults_with_transitions_match_the_guests_own_times";

/// The test of slat-cli in which stalls of guests are made on purpose.
const CAUSES: &str = "verdicts_name_the_cause_that_was_made_first_in_19_of_20";

/// The test of slat-kvm that needs control groups of its own.
const GROUPS: &str = "a_group_with_other_processes_is_passed_over_without_a_limit";

/// Checks verdicts on guests whose stalls are made on purpose, and limits below groups of other
/// processes. The modules are x86's.
pub fn causes() -> anyhow::Result<()> {
    let own = static_build::own()?;
    if own != Architecture::X86_64 {
        return Ok(());
    }
    setup::emulator(own.qemu())?;
    in_a_machine(own, &own_test("slat-kvm", "groups")?, &[], &["--ignored", "--exact", GROUPS], 1)?;
    let machine = ["--module", "zram", "--append", "psi=1", "--time-limit", "20m"];
    let words = ["--ignored", "--exact", CAUSES];
    in_a_machine(own, &own_test("slat-cli", "causes")?, &machine, &words, 1)
}

/// Compares times with the guest's clock. Linux tests its ciphers after the boot, for which the
/// guest would have to wait.
fn exact_times(arch: Architecture, program: &Path) -> anyhow::Result<()> {
    let machine = ["--count-instructions", "--append", "cryptomgr.notests"];
    in_a_machine(arch, program, &machine, &["--ignored", "--exact", EXACT], 1)
}

/// Returns the program of a crate's test for this architecture.
fn own_test(package: &str, test: &str) -> anyhow::Result<PathBuf> {
    let mut build = cargo(&["test", "--test", test, "--no-run", "--message-format", "json"]);
    test_program(build.args(TESTED), &format!("{package}/tests/{test}"))
}

/// Runs a program of tests in a machine, where `passed` tests must pass, and prints its figures.
fn in_a_machine(
    arch: Architecture,
    program: &Path,
    machine: &[&str],
    words: &[&str],
    passed: u32,
) -> anyhow::Result<()> {
    let mut slat = Command::new(target().join("debug/slat"));
    slat.args(["emulate", "--arch", arch.name()]);
    if arch == other() {
        slat.arg("--binary").arg(Program::Slat.path(arch));
    }
    slat.args(machine).arg("--run").arg(program).args(["--", "--nocapture"]).args(words);
    let said = String::from_utf8(output(&mut slat)?.stderr)?;
    // The beginning of the output is cut off.
    ensure!(said.contains(&format!("{passed} passed")), "{said}");
    let figures = said.lines().filter(|it| {
        [" faults, ", " KiB used", "WRONG ", " of 20 right"].iter().any(|word| it.contains(word))
    });
    figures.for_each(|line| println!("{arch}: {line}"));
    Ok(())
}

/// Runs guests on nested paging: the log on two kernels, and their differences.
fn x86_guests(long: bool) -> anyhow::Result<()> {
    let memory = format!("{GUEST_MIB}m");
    let dirty_log = ["bench", "dirty-log", "--memory", &memory, "--backing", "2m"];
    let options = ["--manual-protect", "on", "--initially-set", "on", "--runs", "1"];
    let words = [&dirty_log[..], &options, &["--iterations", "2"]].concat();
    let kernels = ["debian-6.12", "debian-6.1"];
    for kernel in &kernels[..if long { 2 } else { 1 }] {
        let report = emulate(Architecture::X86_64, kernel, &words);
        report.and_then(|report| nested_paging(&report)).context(*kernel)?;
    }
    split_on_fault()?;
    free_pages()?;
    if long { slots_that_go() } else { Ok(()) }
}

/// Checks that memory of guests that ended comes back to this host by free page reporting.
fn free_pages() -> anyhow::Result<()> {
    let mut slat = Command::new(target().join("debug/slat"));
    slat.args(["emulate", "--kernel", "debian-6.12", "--free-page-reporting", "--", "bench"]);
    slat.args(["fork", "--memory", "64m", "--guests", "3", "--way", "memfd", "--runs", "1"]);
    let said = String::from_utf8(output(&mut slat)?.stderr)?;
    let line = said.lines().find(|line| line.starts_with("free page reporting: "));
    let line = line.with_context(|| format!("{slat:?} says nothing of memory: {said}"))?;
    println!("{line}");
    let words: Vec<&str> = line.split(' ').collect();
    let sizes = words.windows(2).filter(|pair| pair[1] == "MiB");
    let sizes: Vec<f64> = sizes.filter_map(|pair| pair[0].parse().ok()).collect();
    ensure!(matches!(sizes[..], [most, last] if last + 64.0 <= most), "{line}");
    Ok(())
}

/// Executes from huge pages that are not executable. Linux before 6.2 removes the huge page, and
/// each page faults; later kernels split it in the fault.
fn split_on_fault() -> anyhow::Result<()> {
    let memory = format!("{GUEST_MIB}m");
    let words = ["bench", "execute", "--memory", &memory, "--runs", "1"];
    let (pages, blocks) = (GUEST_MIB * 256, GUEST_MIB / 2);
    for (kernel, faults) in
        [("debian-6.1", pages..=pages + 16), ("debian-6.12", blocks..=blocks + 16)]
    {
        let report = emulate_with(
            Architecture::X86_64,
            kernel,
            &["--module-param", "kvm.nx_huge_pages=1"],
            &words,
        )?;
        let first = count(&report, "execute", "pf_taken_first")?;
        ensure!(faults.contains(&first), "{kernel}: {first} faults, not {faults:?}");
        let split = count(&report, "execute", "nx_lpage_splits_first")?;
        ensure!(split == blocks, "{kernel}: {split} huge pages were split, not {blocks}");
    }
    Ok(())
}

/// Checks that a memslot that is moved or deleted removes all of an x86 guest's mappings, unless
/// the VM disabled that; and that a guest's memory is on the NUMA node that it is bound to.
fn slots_that_go() -> anyhow::Result<()> {
    let words = ["bench", "memslot", "--memory", "4m", "--slot-size", "2m", "--runs", "1"];
    let words = [&words[..], &["--iterations", "4", "--memory-node", "1"]].concat();
    let emulate = |more: &[&str]| {
        let words = [&words, more].concat();
        emulate_with(Architecture::X86_64, "debian-6.12", &["--numa-nodes", "2"], &words)
    };
    let report = emulate(&[])?;
    let on_node = count(&report, "populate", "bytes_on_node1")?;
    ensure!(on_node == 4 << 20, "{on_node} bytes of 4 MiB on the node that they were bound to");
    let taken = |report: &Value| count(report, "run", "pf_taken").unwrap_or(0);
    ensure!(taken(&report) >= 1024, "{} faults after all mappings went", taken(&report));
    let alone = emulate(&["--disable-slot-zap-all"])?;
    ensure!(taken(&alone) < 64, "{} faults after slots went alone", taken(&alone));
    Ok(())
}

/// Runs guests on a real stage 2: each way of logging, and the faults that an eager split saves.
fn arm_guests(long: bool) -> anyhow::Result<()> {
    let memory = format!("{GUEST_MIB}m");
    let pages = GUEST_MIB * 256;
    let guest = ["bench", "dirty-log", "--memory", &memory, "--backing", "2m", "--runs", "1"];
    let reads = ["--write-percent", "10", "--others", "read", "--iterations", "1"];
    let exits = |more: &[&str]| {
        let words = [&guest[..], &reads, more].concat();
        let report = emulate(Architecture::Aarch64, "debian-6.12", &words)?;
        ensure!(count(&report, "get", "pages_in_excess")? == 0, "{words:?}: excess");
        count(&report, "dirty", "exits")
    };
    // Logging splits blocks: without the eager split each page faults, read or written.
    let (lazy, eager) = (exits(&[])?, exits(&["--eager-split", "2m"])?);
    ensure!(lazy >= pages, "{lazy} exits of {pages} pages");
    ensure!(eager < pages / 5, "{eager} exits of {pages} pages, split ahead");
    if long {
        let ring = [&guest[..], &["--iterations", "2", "--dirty-ring-size", "1024"]].concat();
        let report = emulate(Architecture::Aarch64, "debian-6.12", &ring)?;
        ensure!(count(&report, "get", "pages_written")? == pages, "a ring lost pages");
    }
    // Both switches of each vCPU are trapped on a CPU without FEAT_S2FWB, and none on one with it.
    let boot = ["bench", "boot-caches", "--memory", "4m", "--vcpus", "8", "--runs", "1"];
    let report =
        emulate_with(Architecture::Aarch64, "debian-6.12", &["--cpu", "cortex-a76"], &boot)?;
    let toggles = count(&report, "toggle", "cache_toggles")?;
    ensure!(toggles == 16, "8 vCPUs switched their caches {toggles} times");
    let migrate = ["bench", "migrate", "--memory", "4m", "--runs", "1", "--dirty-rate", "1MiB/s"];
    let way: &[&str] = if long { &[] } else { &["--way", "manual"] };
    let migrate = [&migrate[..], &["--link", "1Gbit/s"], way].concat();
    let report = emulate(Architecture::Aarch64, "debian-6.12", &migrate)?;
    ensure!(count(&report, "run", "pages_compared")? == 1024, "not all of the memory was compared");
    let words = ["slat-bench", "split", "--memory", "128m", "--backing", "2m", "--when", "enable"];
    let words = [&words[..], &["--what", "split", "--samples", "10"]].concat();
    splits(&emulate(Architecture::Aarch64, "debian-6.12", &words)?)
}

fn emulate(arch: Architecture, kernel: &str, words: &[&str]) -> anyhow::Result<Value> {
    emulate_with(arch, kernel, &[], words)
}

/// Runs `slat` in a machine and returns its report.
fn emulate_with(
    arch: Architecture,
    kernel: &str,
    options: &[&str],
    words: &[&str],
) -> anyhow::Result<Value> {
    println!("{arch} with {kernel}: slat {}", words.join(" "));
    let file = target().join("emulators").join(format!("{arch}-{kernel}.json"));
    let console = file.with_extension("console");
    fs::create_dir_all(target().join("emulators")).context("cannot make a folder for reports")?;
    let mut slat = Command::new(target().join("debug/slat"));
    slat.args(["emulate", "--arch", arch.name(), "--kernel", kernel, "--json", "--output"]);
    slat.arg(&file).arg("--console").arg(&console);
    if arch == other() {
        let all = Program::ALL.into_iter();
        let named = all.rev().find(|program| program.name() == words[0]);
        slat.arg("--binary").arg(named.unwrap_or(Program::Slat).path(arch));
    }
    slat.args(options).arg("--").args(words);
    let done = output(&mut slat)?;
    let text = fs::read_to_string(&file).context("there is no report")?;
    ensure!(text.as_bytes() == done.stdout, "the report on stdout is not that in the file");
    let report: Value = serde_json::from_str(&text).context("the report is not JSON")?;
    ensure!(report["host"]["cpu"]["architecture"] == arch.name(), "it is not of {arch}");
    let release = report["host"]["kernel"]["release"].as_str().unwrap_or_default();
    let version = kernel.trim_start_matches("debian-");
    ensure!(release.starts_with(&format!("{version}.")), "it is of Linux {release}, not {version}");
    ensure!(report["host"]["kvm"]["device"] == "usable", "{}", report["host"]["kvm"]["device"]);
    let timed = results(&report).iter().any(|r| r["unit"] == "s" && r["samples"][0].is_number());
    ensure!(!timed, "there is a time in the report");
    let emulator = |skipped: &Value| skipped["what"] == "emulator";
    ensure!(
        report["skipped"].as_array().is_some_and(|list| list.iter().any(emulator)),
        "the report does not say that it is an emulator's"
    );
    Ok(report)
}

/// Checks that the TDP MMU maps the guest's memory by 2 MiB pages, and by 4 KiB pages after the log
/// was cleared.
fn nested_paging(report: &Value) -> anyhow::Result<()> {
    let parameters = &report["host"]["kvm"]["parameters"];
    ensure!(parameters["kvm"]["tdp_mmu"] == "Y", "tdp_mmu is {}", parameters["kvm"]["tdp_mmu"]);
    let npt = &parameters["kvm_amd"]["npt"];
    ensure!(npt == "Y" || npt == "1", "npt is {npt}");
    let huge = count(report, "populate", "mapped_2m")?;
    let small = count(report, "populate", "mapped_4k")?;
    ensure!(huge == GUEST_MIB / 2, "{huge} pages of 2 MiB for {GUEST_MIB} MiB");
    ensure!(count(report, "clear", "mapped_2m")? == 0, "2 MiB pages are left in a cleared log");
    // Pages that are small from the start are the guest's own code and tables.
    let split = count(report, "clear", "mapped_4k")? - small;
    ensure!(split == huge * 512, "{split} pages of 4 KiB came from {huge} of 2 MiB");
    Ok(())
}

/// Checks that splitting a GiB of 2 MiB blocks takes one table for each block.
fn splits(report: &Value) -> anyhow::Result<()> {
    for walk in ["every-entry", "bounded", "batched"] {
        let tables = count(report, walk, "tables_built")?;
        ensure!(tables == BLOCKS, "{walk}: {tables} tables for {BLOCKS} blocks");
        // The entries of a table, and two stores for the block: the break, then the table.
        let written = count(report, walk, "entries_written")?;
        ensure!(written == BLOCKS * (512 + 2), "{walk}: {written} slots written");
    }
    let read = |walk| count(report, walk, "entries_read");
    let (every, bounded, batched) = (read("every-entry")?, read("bounded")?, read("batched")?);
    ensure!(every > bounded && bounded > batched, "entries read: {every}, {bounded}, {batched}");
    Ok(())
}

fn results(report: &Value) -> &[Value] {
    report["results"].as_array().map_or(&[], Vec::as_slice)
}

/// Returns a count of a whole phase.
fn count(report: &Value, variant: &str, name: &str) -> anyhow::Result<u64> {
    let whole = |r: &&Value| r["variant"] == variant && r["params"]["vcpu"].is_null();
    let counted = results(report).iter().find(whole).map(|result| &result["counts"][name]);
    counted.and_then(Value::as_u64).with_context(|| format!("no count {name} of {variant}"))
}
