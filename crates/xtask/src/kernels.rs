//! Linux with the edits of the folder `linux`: checks that they fit a tree and compile, and that
//! kernels with some of them boot and have the promised counts.

mod riscv;

use crate::peers;
use crate::setup;
use crate::static_build::{self, Effort, Program};
use crate::workspace::{Outcome, cpu_seconds, output, programs, ran};
use crate::{in_ci, root, target};
use anyhow::{Context, ensure};
use serde_json::Value;
use slat_kernel::SETS;
use slat_kernel::vm::Architecture;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use std::time::Instant;

/// Debian packages, each with a command that it has.
const PACKAGES: [(&str, &str); 11] = [
    ("make", "make"),
    ("gcc", "gcc"),
    ("flex", "flex"),
    ("bison", "bison"),
    ("bc", "bc"),
    ("perl", "perl"),
    ("rsync", "rsync"),
    ("coccinelle", "spatch"),
    ("gcc-aarch64-linux-gnu", "aarch64-linux-gnu-gcc"),
    ("gcc-riscv64-linux-gnu", "riscv64-linux-gnu-gcc"),
    ("gcc-powerpc64le-linux-gnu", "powerpc64le-linux-gnu-gcc"),
];

/// Debian packages of headers and libraries, each with a file that it has.
const LIBRARIES: [(&str, &str); 4] = [
    ("libelf-dev", "/usr/include/libelf.h"),
    ("libc6-dev-arm64-cross", "/usr/aarch64-linux-gnu/lib/libc.a"),
    ("libc6-dev-riscv64-cross", "/usr/riscv64-linux-gnu/lib/libc.a"),
    ("libc6-dev-ppc64el-cross", "/usr/powerpc64le-linux-gnu/lib/libc.a"),
];

/// Number of a guest's pages of 4 KiB.
const PAGES: u64 = 2048;

/// The series of one arm64 kernel, so that few kernels are built.
const ALL: &str = "bounded-walks,split-in-a-loop,lockless-ageing,batched-ageing,flush-once,\
                   clear-under-read-lock";

/// The targets that the engine is compiled for as a part of Linux: without floating point.
const SOFT_FLOAT: [&str; 2] = ["aarch64-unknown-none-softfloat", "riscv64imac-unknown-none-elf"];

/// Selftests that run on the engine.
const ON_THE_ENGINE: &str = "set_memory_region_test,demand_paging_test,dirty_log_perf_test,\
                             access_tracking_perf_test,kvm_page_table_test,page_fault_test";

/// The series that change x86.
const OF_X86: &str = "split-on-fault-before,lockless-ageing,batched-ageing";

/// The series that change Power.
const OF_POWER: &str = "lockless-ageing,lockless-ageing-power,batched-ageing,batched-ageing-power";

/// A part of the stage, on a tree.
type Part = fn(&str) -> anyhow::Result<()>;

/// The file with git's names of these folders as they were when all series in C had booted.
const BOOTED: &str = ".ci/linux-booted";

/// The edits, and the kernels' configurations.
const FOLDERS: [&str; 2] = ["linux", "crates/slat-kernel/config"];

/// Returns git's names of the folders as they are committed; `None` if one was changed.
fn folders() -> anyhow::Result<Option<String>> {
    let git = |words: &[&str]| -> anyhow::Result<String> {
        let said = output(Command::new("git").args(words).current_dir(root()))?;
        Ok(String::from_utf8(said.stdout)?)
    };
    let changed = git(&[&["status", "--porcelain", "--"], &FOLDERS[..]].concat())?;
    if !changed.is_empty() {
        return Ok(None);
    }
    let names = FOLDERS.iter().map(|folder| git(&["rev-parse", &format!("HEAD:{folder}")]));
    names.collect::<anyhow::Result<String>>().map(Some)
}

/// Returns whether the series in C have to compile and boot.
fn boots_again(long: bool, now: Option<&str>, booted: &str) -> bool {
    long || now != Some(booted)
}

/// Applies the edits, compiles, builds, boots and counts. The series in C do not depend on the
/// engine: unless `long`, they compile and boot only where [`FOLDERS`] have changed since they
/// did.
pub fn test(long: bool) -> anyhow::Result<Outcome> {
    let ready = || {
        PACKAGES.iter().try_for_each(|(name, command)| setup::package(name, command))?;
        let missing = LIBRARIES.iter().filter(|(_, file)| !Path::new(file).exists());
        missing.map(|(name, _)| *name).try_for_each(setup::install)?;
        let arches = [Architecture::Aarch64, Architecture::Riscv64];
        arches.iter().try_for_each(|arch| setup::emulator(arch.qemu()))?;
        SOFT_FLOAT.iter().try_for_each(|target| setup::target(target))?;
        static_build::build(&arches, &[Program::Slat], Effort::Quick)?;
        peers::whole_tree()
    };
    let tree = match ready() {
        Ok(tree) => tree.display().to_string(),
        Err(error) if in_ci() => return Err(error),
        Err(error) => return Ok(Outcome::Skipped(format!("{error:#}"))),
    };
    // Other stages, beside this one, may build `slat` again.
    fs::copy(programs()?.join("slat"), target().join(SLAT)).context("a copy of slat")?;
    let now = folders().ok().flatten();
    let booted = fs::read_to_string(root().join(BOOTED)).unwrap_or_default();
    // Without a repository they boot.
    let again = boots_again(long, now.as_deref(), &booted);
    // One folder has the objects of an architecture. The series of `ALL` edit headers that most of
    // the kernel includes, so kernels without them come first: else all is compiled once more.
    // Each edit of a series comes before kernels are built, because it would make them compile
    // their objects again.
    let parts: [(bool, &str, Part); 14] = [
        (true, "configurations, and edits that fit", configured),
        (again, "each edit compiles", compiled),
        (true, "slat check", check_finds),
        (true, "slat-engine", slat_engine),
        (true, "a patch, in turns", patches_in_turns),
        (again, "bounded-walks", bounded_walks),
        (again, "split-in-a-loop", split_in_a_loop),
        (again, "lockless-ageing", lockless_ageing),
        (again, "flush-once", flush_once),
        (again, "lockless-ageing, races", ageing_races),
        (again, "batched-ageing", batched_ageing),
        (again, "idle pages of a watched guest", idle_pages),
        (again, "RISC-V, in C", riscv::in_c),
        (true, "RISC-V, slat-engine", riscv::engine),
    ];
    for (_, name, part) in parts.into_iter().filter(|part| part.0) {
        let (begin, used) = (Instant::now(), cpu_seconds());
        part(&tree).context(name)?;
        let used = cpu_seconds() - used;
        println!("{name}: {:.0} s, {used} s of CPUs", begin.elapsed().as_secs_f64());
    }
    if !again {
        return Ok(Outcome::Ran(vec![format!(
            "the series in C compiled and booted before, as {BOOTED} says; \
             `cargo xtask test --long kernels` boots them again"
        )]));
    }
    if let Some(now) = now.filter(|_| !in_ci()) {
        fs::write(root().join(BOOTED), now).context(BOOTED)?;
        println!("commit {BOOTED}, so that CI does not boot these series again");
    }
    Ok(Outcome::Ran(Vec::new()))
}

/// Sets of more options that a tree must know, with the architectures that have them.
const CONFIGURATIONS: [(&str, [&str; 2]); 4] = [
    ("aarch64", ["checked", "16k"]),
    ("aarch64", ["kcsan", "64k"]),
    ("x86_64", ["checked", "private"]),
    ("x86_64", ["kcsan", "private"]),
];

/// Checks that the tree can be configured, and that all edits fit.
fn configured(tree: &str) -> anyhow::Result<()> {
    let file = target().join("kernel.config");
    let config = file.display().to_string();
    for (arch, sets) in CONFIGURATIONS {
        let options = SETS.iter().filter(|(name, _)| sets.contains(name));
        fs::write(&file, options.map(|(_, options)| *options).collect::<String>())?;
        let words = ["kernel", "build", "--tree", tree, "--arch", arch, "--config", &config];
        slat(&[&words[..], &["--each"]].concat())?;
    }
    slat(&["kernel", "list", "--tree", tree])
}

/// Checks that KVM compiles with each series; on arm64 after each edit, so that a series can be
/// bisected.
fn compiled(tree: &str) -> anyhow::Result<()> {
    for (arch, series) in [("x86_64", OF_X86), ("ppc64le", OF_POWER)] {
        let words = ["kernel", "build", "--tree", tree, "--arch", arch, "--edit", series];
        slat(&[&words[..], &["--objects"]].concat())?;
    }
    // It is compiled with batched-ageing, which needs it.
    for series in ALL.split(',').filter(|series| *series != "lockless-ageing") {
        let words = ["kernel", "build", "--tree", tree, "--arch", "aarch64", "--edit", series];
        slat(&[&words[..], &["--each"]].concat())?;
    }
    Ok(())
}

fn slat(words: &[&str]) -> anyhow::Result<()> {
    ran(program().args(words)).map(drop)
}

/// The program that this stage runs, in the target folder.
const SLAT: &str = "slat-of-kernels";

/// Returns the command that runs the built `slat`.
fn program() -> Command {
    let mut slat = Command::new(target().join(SLAT));
    slat.current_dir(root());
    slat
}

/// Checks that a split visits no page, and that the call takes fewer instructions.
fn bounded_walks(tree: &str) -> anyhow::Result<()> {
    let bytes = (PAGES << 12).to_string();
    let command = ["bench", "dirty-log", "-v", "1", "-b", &bytes, "--eager-split", "2m"];
    let options = ["--manual-protect", "on", "--initially-set", "on", "-r", "2", "-i", "1"];
    let words = [&command[..], &options].concat();
    let probe = ["--probe", "stage2_split_walker"];
    let edited = format!("+{ALL}");
    let [before, after] = ["", &edited].map(|edits| counted(tree, edits, &probe, &words));
    let (before, after) = (before?, after?);
    let (before, after) = (of(&before, "clear")?, of(&after, "clear")?);
    let visits = |result: &Value| result["counts"]["calls_stage2_split_walker"].as_u64();
    ensure!(visits(before) == Some(PAGES), "a split visits {:?} pages", visits(before));
    ensure!(visits(after) == Some(0), "an edited split visits {:?} pages", visits(after));
    let [before, after] = [before, after].map(|result| result["samples"][0].as_f64());
    let ratio = after.zip(before).map(|(after, before)| after / before);
    println!("KVM_CLEAR_DIRTY_LOG of 4k pages: {ratio:.3?} of the instructions");
    ensure!(ratio.is_some_and(|ratio| ratio < 0.7), "{ratio:?} of the instructions");
    Ok(())
}

/// Checks that enabling the log over blocks, which splits them, takes fewer instructions; and that
/// the selftest splits blocks, and fails if a split grants too much.
fn split_in_a_loop(tree: &str) -> anyhow::Result<()> {
    let bytes = (PAGES << 12).to_string();
    let command = ["bench", "dirty-log", "-v", "1", "-b", &bytes, "--backing", "2m"];
    let options = ["--eager-split", "2m", "--manual-protect", "on", "--initially-set", "off"];
    let words = [&command[..], &options, &["-r", "2", "-i", "1"]].concat();
    let edited = format!("+{ALL}");
    let [before, after] = ["", &edited].map(|edits| {
        let results = counted(tree, edits, &["--probe", "none"], &words)?;
        of(&results, "enable")?["samples"][0].as_f64().context("no instructions were counted")
    });
    let ratio = after? / before?;
    println!("enabling the log over blocks: {ratio:.3} of the instructions");
    ensure!(ratio < 0.2, "{ratio} of the instructions");
    let created = "kvm_pgtable_stage2_create_unlinked";
    let test = tested(tree, ALL, "eager_split_test", &["--probe", created])?;
    ensure!(test["exit_code"] == 0, "eager_split_test: {}", test["output"]);
    // Two blocks when the log is enabled, and two when it is cleared.
    let splits = test["calls"][created].as_u64();
    ensure!(splits == Some(4), "eager_split_test split {splits:?} blocks");
    let bug = "bugs/split-allows-writes";
    let test = tested(tree, &format!("{ALL},{bug}"), "eager_split_test", &[])?;
    let said = test["output"].as_str().unwrap_or_default();
    let found = test["exit_code"] == 254 && said.contains("was written and is not in the log");
    ensure!(found, "{bug} is not found: {said}");
    println!("{bug}: eager_split_test finds it");
    Ok(())
}

/// Checks that a scan asks KVM for each page and finds those that the guest used, without the lock,
/// and with it if the switch says so. Locks are inlined in a kernel of this configuration, so they
/// are not counted; they take less than the difference between two scans of one kernel.
fn lockless_ageing(tree: &str) -> anyhow::Result<()> {
    let bytes = (PAGES << 12).to_string();
    let words = ["bench", "age", "-v", "1", "-b", &bytes, "-r", "1", "--tracking", "page-idle"];
    let [mut instructions, mut visits] = [[0.0; 2]; 2];
    for (at, switch) in ["kvm.lockless_aging=1", "kvm.lockless_aging=0"].iter().enumerate() {
        let probe = ["--append", switch, "--probe", "kvm_age_gfn"];
        let results = counted(tree, &format!("+{ALL}"), &probe, &words)?;
        let (scan, used) = (of(&results, "mark-idle")?, of(&results, "write-idle")?);
        ensure!(used["counts"]["idle_after"] == 0, "used pages look idle: {}", used["counts"]);
        let calls = |end: &str| scan["counts"][format!("calls_kvm_age_gfn{end}")].as_f64();
        visits[at] = calls("").or_else(|| calls("_min")).unwrap_or(0.0);
        instructions[at] = scan["samples"][0].as_f64().unwrap_or(0.0);
    }
    println!("a scan: {instructions:?} instructions, {visits:?} pages, without and with the lock");
    ensure!(visits.iter().all(|visits| *visits > 0.95 * PAGES as f64), "{visits:?} of {PAGES}");
    Ok(())
}

/// Number of memslots of the test's VM. A flush looks up each separately; the function that goes
/// through them is inlined where it is called once.
const SLOTS: u64 = 2;

/// Counts flushes of the guest's memory when vCPUs switch their caches on: two if the first vCPU
/// flushes for all, as one is initialised again; otherwise one for each switch.
fn flush_once(tree: &str) -> anyhow::Result<()> {
    for vcpus in [1_u64, 4] {
        let vcpu_count = vcpus.to_string();
        let probe = ["--probe", "kvm_pgtable_stage2_flush", "--", "-v", &vcpu_count];
        let test = tested(tree, ALL, "flush_once_test", &probe)?;
        ensure!(test["exit_code"] == 0, "flush_once_test: {}", test["output"]);
        let flushes = test["calls"]["kvm_pgtable_stage2_flush"].as_u64();
        let flushes = flushes.map(|calls| calls / SLOTS);
        println!("{vcpus} vCPUs: the guest's memory was flushed {flushes:?} times");
        // The test runs both ways: each vCPU and one again, then the first and one again.
        ensure!(flushes == Some(vcpus + 1 + 2), "{flushes:?} flushes, {vcpus} + 1 + 2 expected");
    }
    Ok(())
}

/// Checks that `slat check` finds faults of KVM, and nothing in the same kernel without one. The
/// table in docs/bugs.md has all of them.
fn check_finds(tree: &str) -> anyhow::Result<()> {
    let kernel = format!("tree:{tree}+bugs/check-kvm,bugs/check-ring,bugs/check-arm64");
    for (fault, found) in [(0, 0), (1, 1), (9, 1), (22, 1), (25, 1)] {
        let param = format!("kvm.slat_fault={fault}");
        let mut emulate = program();
        emulate.args(["emulate", "--arch", "aarch64", "--kernel", &kernel, "--keep-running"]);
        emulate.args(["--module-param", &param, "--time-limit", "10m", "--binary"]);
        emulate.arg(Program::Slat.path(Architecture::Aarch64)).arg("--");
        // Without a fault all of the time passes.
        let time = if found == 0 { "20s" } else { "3m" };
        emulate.args(["check", "--first", "--for", time, "--seed", "1", "--memory", "4m"]);
        let status = emulate.status().with_context(|| format!("cannot start {emulate:?}"))?;
        ensure!(status.code() == Some(found), "{param}: {emulate:?} ended with {status}");
    }
    Ok(())
}

/// Ages while unmapping, in a kernel that is slowed down at the race: nothing is lost, and the test
/// fails if a step of the series is left out.
fn ageing_races(tree: &str) -> anyhow::Result<()> {
    let slow = format!("{ALL},bugs/ageing-is-slow");
    let two = ["--cpus", "2"];
    let test = tested(tree, &slow, "ageing_race_test", &two)?;
    ensure!(test["exit_code"] == 0, "ageing_race_test: {}", test["output"]);
    for (bug, found) in [
        ("bugs/ageing-stores", "*word == word_of(round_now, page)"),
        ("bugs/tables-are-freed-at-once", "of a pipe is"),
    ] {
        let test = tested(tree, &format!("{slow},{bug}"), "ageing_race_test", &two)?;
        let said = test["output"].as_str().unwrap_or_default();
        ensure!(test["exit_code"] == 254 && said.contains(found), "{bug} is not found: {said}");
        println!("{bug}: ageing_race_test finds it");
    }
    Ok(())
}

/// Asks for the accessed bits of 64 pages at once: each is right, the test finds an answer that is
/// not, and a scan by the multi-generational LRU takes fewer instructions and calls.
fn batched_ageing(tree: &str) -> anyhow::Result<()> {
    let two = ["--cpus", "2"];
    let test = tested(tree, ALL, "ageing_range_test", &two)?;
    ensure!(test["exit_code"] == 0, "ageing_range_test: {}", test["output"]);
    for bug in ["bugs/ages-next-page", "bugs/ages-without-clearing", "bugs/ages-unmapped-pages"] {
        let test = tested(tree, &format!("{ALL},{bug}"), "ageing_range_test", &two)?;
        let said = test["output"].as_str().unwrap_or_default();
        ensure!(test["exit_code"] == 254 && said.contains(" young"), "{bug} is not found: {said}");
        println!("{bug}: ageing_range_test finds it");
    }
    let scan = |mode: &str, options: &[&str]| {
        let words = ["--", "-b", "16M", "-i", "2", "-m", mode];
        let test = tested(tree, ALL, "mglru_perf_test", &[options, &words].concat())?;
        ensure!(test["exit_code"] == 0, "mglru_perf_test: {}", test["output"]);
        Ok(test)
    };
    let instructions = |mode: &str| {
        let test = scan(mode, &["--count-instructions"])?;
        let said = test["output"].as_str().unwrap_or_default();
        let scans = said.lines().filter_map(|line| line.split_once(": ")?.1.split_once(" ns"));
        let least = scans.filter_map(|(count, _)| count.parse::<u64>().ok()).min();
        least.with_context(|| format!("no scan was measured: {said}"))
    };
    let (lock, batched) = (instructions("lock")? as f64, instructions("batched")? as f64);
    println!("a scan by MGLRU: {:.3} of the instructions", batched / lock);
    ensure!(batched < 0.55 * lock, "{batched} instructions, {lock} before");
    let [asks, age] = ["__mmu_notifier_age", "kvm_age_gfn"];
    let calls = |mode: &str| {
        let test = scan(mode, &["--probe", "__mmu_notifier_age,kvm_age_gfn"])?;
        let count = |name: &str| test["calls"][name].as_u64().unwrap_or(0);
        Ok::<_, anyhow::Error>((count(asks), count(age)))
    };
    let (lock, batched) = (calls("lock")?, calls("batched")?);
    println!("calls of {asks} and {age}: {lock:?} before, {batched:?} in batches");
    // Two scans of 4,096 pages, and what the machine's other processes have.
    ensure!(lock.0 == 0 && lock.1 >= 8192 && batched.0 >= 128, "{lock:?}, {batched:?}");
    ensure!(32 * (batched.0 + batched.1) <= lock.1, "{lock:?}, {batched:?}");
    Ok(())
}

/// Runs selftests on Linux's KVM on the engine: they pass, and no VM stays in C. Returns what the
/// kernel counted.
fn on_the_engine(tree: &str, arch: Architecture, tests: &[&str]) -> anyhow::Result<Value> {
    let file = target().join("kernel-engine.json");
    let mut slat = program();
    let edits = if arch == Architecture::Riscv64 { riscv::ENGINE } else { "slat-engine" };
    slat.args(["kernel", "test", "--tree", tree, "--edit", edits, "--json"]);
    slat.args(["--arch", &arch.to_string(), "--binary"]).arg(Program::Slat.path(arch));
    slat.arg("--test").args(tests).stdout(File::create(&file)?);
    ran(&mut slat)?;
    let report: Value = serde_json::from_str(&fs::read_to_string(&file)?)?;
    let counters = report["counters"].clone();
    println!("on the engine: {counters}");
    ensure!(counters["slat_refused"] == "0", "VMs stayed in C: {counters}");
    ensure!(counters["slat_vms"] != "0" && !counters["slat_vms"].is_null(), "no VM: {counters}");
    Ok(counters)
}

/// Runs Linux's KVM on the engine, and checks that three operations take the fewer instructions
/// that they should.
fn slat_engine(tree: &str) -> anyhow::Result<()> {
    on_the_engine(tree, Architecture::Aarch64, &[ON_THE_ENGINE])?;
    engine_faults(tree)?;
    // In a smaller guest the calls' own cost would hide what blocks cost.
    let guest = ["-v", "1", "-b", "64M", "-r", "2"];
    let log = ["bench", "dirty-log", "--eager-split", "2m", "--manual-protect", "on", "-i", "1"];
    let faults = ["bench", "populate", "--prealloc", "--backing", "4k"];
    let clear = [&log[..], &["--initially-set", "on", "--backing", "4k"]].concat();
    let enable = [&log[..], &["--initially-set", "off", "--backing", "2m"]].concat();
    for (phase, words, most) in
        [("populate", &faults[..], 0.92), ("clear", &clear, 0.3), ("enable", &enable, 0.05)]
    {
        let words = [words, &guest].concat();
        let [c, engine] = ["kvm.slat=0", "kvm.slat=1"].map(|choice| {
            let probe = ["--append", choice, "--probe", "none"];
            let results = counted(tree, "+slat-engine", &probe, &words)?;
            of(&results, phase)?["samples"][0].as_f64().context("no instructions were counted")
        });
        let ratio = engine? / c?;
        println!("{phase}: {ratio:.3} of C's instructions");
        ensure!(ratio < most, "{phase}: {ratio} of C's instructions");
    }
    Ok(())
}

/// Checks that selftests find faults made on purpose in the functions between KVM and the engine,
/// and pass without them.
fn engine_faults(tree: &str) -> anyhow::Result<()> {
    let edits = "slat-engine,bugs/check-kvm,bugs/check-engine";
    let two = ["--cpus", "2", "--append"];
    let logged = "was written and is not in the log";
    for (fault, test, found) in [
        (0, "dirty_log_race_test", ""),
        (26, "dirty_log_race_test", logged),
        (27, "dirty_log_race_test", logged),
    ] {
        let param = format!("kvm.slat_fault={fault}");
        let test = tested(tree, edits, test, &[&two[..], &[&param]].concat())?;
        let said = test["output"].as_str().unwrap_or_default();
        let (code, is_found) = (&test["exit_code"], said.contains(found));
        let expected = if fault == 0 { 0 } else { 254 };
        ensure!(*code == expected && is_found, "{param}: exit code {code}: {said}");
        println!("{param}: {} ended with {code}", test["name"]);
    }
    Ok(())
}

/// Returns a diff that adds a line to each clear of 64 pages.
fn diff(line: &str) -> String {
    format!(
        "--- a/arch/arm64/kvm/mmu.c\n+++ b/arch/arm64/kvm/mmu.c\n@@ -1245,3 +1245,4 @@\n \t\
         lockdep_assert_held_write(&kvm->mmu_lock);\n \n+\t{line}\n \t\
         kvm_stage2_wp_range(&kvm->arch.mmu, start, end);\n"
    )
}

/// Compares a kernel with one that a patch slows down: the clear takes more instructions, and
/// enabling the log does not. A patch with a BUG ends the boot, with the cause first.
fn patches_in_turns(tree: &str) -> anyhow::Result<()> {
    let (file, patch) = (target().join("kernel-ab.json"), target().join("kernel-ab.diff"));
    let (kernel, binary) = (format!("tree:{tree}"), Program::Slat.path(Architecture::Aarch64));
    let bytes = (PAGES << 12).to_string();
    let bench = ["--", "bench", "dirty-log", "-v", "1", "-b", &bytes, "--manual-protect", "on"];
    let bench = [&bench[..], &["--initially-set", "on", "-r", "3", "-i", "1"]].concat();
    fs::write(&patch, diff("for (int i = 0; i < 200; i++) cpu_relax();"))?;
    let mut slat = program();
    slat.args(["kernel", "ab", &kernel, "--arch", "aarch64", "--json", "--patch"]).arg(&patch);
    slat.arg("--binary").arg(&binary).args(&bench).stdout(File::create(&file)?);
    ran(&mut slat)?;
    let report: Value = serde_json::from_str(&fs::read_to_string(&file)?)?;
    println!("{}", report["answer"]);
    for (phase, verdict) in [("clear", "slower"), ("enable", "no-difference-shown")] {
        let pairs = report["comparison"]["pairs"].as_array().context("no pairs")?;
        let pair = pairs.iter().find(|pair| pair["what"][2] == phase).context("no such phase")?;
        ensure!(pair["verdict"] == verdict, "{phase}: {pair}");
    }
    fs::write(&patch, diff("BUG();"))?;
    let mut slat = program();
    slat.args(["emulate", "--arch", "aarch64", "--kernel", &kernel, "--patch"]).arg(&patch);
    let done = slat.arg("--binary").arg(binary).args(bench).output()?;
    let said = String::from_utf8_lossy(&done.stderr);
    let line = said.lines().find(|line| line.starts_with("slat: ")).unwrap_or_default();
    println!("{line}");
    let is_cause = line.starts_with("slat: kernel BUG at arch/arm64/kvm/mmu.c:");
    ensure!(done.status.code() == Some(3) && is_cause, "{said}");
    Ok(())
}

/// The test of slat-kvm that reads the idle marks of a guest's pages.
const IDLE_PAGES: &str = "idle_pages_show_the_use_through_existing_mappings";

/// Compares a working set by idle page tracking, which no kernel of Debian has, with what the guest
/// touched.
fn idle_pages(tree: &str) -> anyhow::Result<()> {
    let test = static_build::test(Architecture::Aarch64, "slat-kvm", "working_set")?;
    let mut slat = program();
    slat.args(["emulate", "--arch", "aarch64", "--kernel", &format!("tree:{tree}+{ALL}")]);
    slat.arg("--binary").arg(Program::Slat.path(Architecture::Aarch64)).arg("--run").arg(test);
    let done = slat.args(["--", "--nocapture", "--exact", IDLE_PAGES]).output()?;
    let said = String::from_utf8_lossy(&done.stderr);
    ensure!(done.status.success() && said.contains("1 passed"), "{slat:?} failed:\n{said}");
    ensure!(!said.contains("skipped"), "this kernel has no idle page tracking:\n{said}");
    said.lines().filter(|line| line.contains(" KiB used")).for_each(|line| println!("{line}"));
    Ok(())
}

/// Returns the result of a selftest, on a machine without FEAT_S2FWB.
fn tested(tree: &str, edits: &str, test: &str, options: &[&str]) -> anyhow::Result<Value> {
    let file = target().join("kernel-test.json");
    let (output, binary) = (File::create(&file)?, Program::Slat.path(Architecture::Aarch64));
    let mut slat = program();
    slat.args(["kernel", "test", "--tree", tree, "--edit", edits, "--json"]);
    slat.args(["--arch", "aarch64", "--cpu", "cortex-a76", "--test", test, "--binary"]);
    slat.arg(binary).args(options).stdout(output);
    // The report also contains failed tests; a machine that did not run leaves no report.
    let failed = ran(&mut slat).err();
    let report = serde_json::from_str::<Value>(&fs::read_to_string(&file)?);
    match (report, failed) {
        (Ok(report), _) => Ok(report["tests"][0].clone()),
        (Err(_), Some(error)) => Err(error),
        (Err(error), None) => Err(error.into()),
    }
}

/// Returns the results that an emulated kernel counted, of all vCPUs together, by their variant.
fn counted(
    tree: &str,
    edits: &str,
    options: &[&str],
    words: &[&str],
) -> anyhow::Result<BTreeMap<String, Value>> {
    let file = target().join("kernel.json");
    let (kernel, path) = (format!("tree:{tree}{edits}"), file.display().to_string());
    let binary = Program::Slat.path(Architecture::Aarch64).display().to_string();
    let emulate = ["emulate", "--arch", "aarch64", "--kernel", &kernel, "--count-instructions"];
    slat(
        &[&emulate[..], &["--output", &path, "--binary", &binary], options, &["--"], words]
            .concat(),
    )?;
    let report: Value = serde_json::from_str(&fs::read_to_string(&file)?)?;
    let results = report["results"].as_array().context("a report without results")?;
    let of_all = results.iter().filter(|result| result["params"].get("vcpu").is_none());
    let named = |result: &Value| Some((result["variant"].as_str()?.to_owned(), result.clone()));
    Ok(of_all.filter_map(named).collect())
}

/// Returns a result, which must exist.
fn of<'a>(results: &'a BTreeMap<String, Value>, variant: &str) -> anyhow::Result<&'a Value> {
    results.get(variant).with_context(|| format!("no result is called {variant}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_boot_unless_these_very_folders_have_booted() {
        assert!(!boots_again(false, Some("a\nb\n"), "a\nb\n"));
        assert!(boots_again(true, Some("a\nb\n"), "a\nb\n"));
        assert!(boots_again(false, Some("a\nc\n"), "a\nb\n"));
        // A folder was changed, there is no repository, or no file.
        assert!(boots_again(false, None, "a\nb\n") && boots_again(false, None, ""));
    }
}
