//! Builds KVM's selftests from a tree with its edits, linked statically, and runs them on the
//! kernel of that tree.

use crate::cli::{ConfigArgs, TestArgs};
use crate::emulate::{self, GUEST, machine};
use crate::kernel::Source;
use anyhow::{Context, bail, ensure};
use serde::Serialize;
use slat_kernel::vm::{Architecture, Archive, Initramfs, Linux, Request, kept};
use slat_lab::failure::{bad_input, no_report};
use slat_lab::first::PROGRAM;
use slat_lab::first::job::{Job, Test as Asked, TestResult};
use slat_lab::numbers::thousands;
use slat_lab::session::Session;
use slat_lab::table::NOTHING;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// A test: its name, its arguments, and its architecture (`None` is all).
type KnownTest = (&'static str, &'static str, Option<Architecture>);

const ARM: Option<Architecture> = Some(Architecture::Aarch64);
const X86: Option<Architecture> = Some(Architecture::X86_64);
const RISCV: Option<Architecture> = Some(Architecture::Riscv64);
const POWER: Option<Architecture> = Some(Architecture::Ppc64le);

/// The tests of the code that the edits touch, with sizes that take seconds in an emulator. On Arm,
/// tests of [`TAKE_MODE`] also get `-m`; without it, each of them runs up to twelve guest modes.
const KNOWN: [KnownTest; 37] = [
    ("dirty_log_perf_test", "-v 1 -b 16M -i 2", None),
    ("dirty_log_perf_test", "-v 1 -b 16M -i 2 -s anonymous_thp", None),
    ("dirty_log_test", "-i 3 -I 20 -M clear-log", None),
    // It ends at once, and well, where KVM has no ring.
    ("dirty_log_test", "-i 3 -I 20 -M dirty-ring", ARM),
    ("dirty_log_test", "-i 3 -I 20 -M dirty-ring", X86),
    ("access_tracking_perf_test", "-v 1 -b 16M", None),
    ("demand_paging_test", "-v 1 -b 16M", None),
    ("demand_paging_test", "-v 1 -b 8M -u MINOR -s shmem", None),
    ("execute_perf_test", "-v 1 -b 16M", None),
    ("kvm_page_table_test", "-v 1 -b 16M", ARM),
    ("kvm_page_table_test", "-v 1 -b 16M", RISCV),
    ("memslot_modification_stress_test", "-v 1 -b 4M -i 20", None),
    ("memslot_perf_test", "-l 1 -s 32 -f 3 -e 4", None),
    ("page_fault_test", "", ARM),
    ("eager_split_test", "", ARM),
    ("flush_once_test", "", ARM),
    ("ageing_race_test", "", ARM),
    ("dirty_log_race_test", "", ARM),
    ("vmid_rollover_test", "-r 2", ARM),
    ("ageing_race_test", "", RISCV),
    ("dirty_log_race_test", "", RISCV),
    ("vmid_rollover_test", "-n 60", RISCV),
    ("ageing_range_test", "", ARM),
    ("ageing_range_test", "", X86),
    ("mglru_perf_test", "-b 16M -i 2", ARM),
    ("mglru_perf_test", "-b 16M -i 2", X86),
    ("guest_reclaim_perf_test", "-b 32M -l 20M", ARM),
    ("guest_reclaim_perf_test", "-b 32M -l 20M", X86),
    ("nx_huge_pages_test", "-t 887563923 -p 100 -r", X86),
    ("dirty_log_page_splitting_test", "-b 16M -s anonymous_hugetlb_2mb", X86),
    ("set_memory_region_test", "", None),
    ("kvm_create_max_vcpus", "", None),
    ("steal_time", "", None),
    ("guest_print_test", "", None),
    (GUEST, "-p 4096 -s", POWER),
    (GUEST, "-p 256 -r 20", POWER),
    (GUEST, "-p 1024 -b", POWER),
];

/// The other tests of arm64, which run if they are named. They test no memory, and some fail on
/// QEMU's CPUs.
const OTHERS: [&str; 18] = [
    "aarch32_id_regs",
    "arch_timer",
    "arch_timer_edge_cases",
    "coalesced_io_test",
    "debug-exceptions",
    "get-reg-list",
    "hypercalls",
    "kvm_binary_stats_test",
    "no-vgic-v3",
    "psci_test",
    "rseq_test",
    "set_id_regs",
    "smccc_filter",
    "vcpu_width_config",
    "vgic_init",
    "vgic_irq",
    "vgic_lpi_stress",
    "vpmu_counter_access",
];

/// Tests that accept a guest mode (`-m`) on Arm.
const TAKE_MODE: [&str; 7] = [
    "dirty_log_perf_test",
    "dirty_log_test",
    "access_tracking_perf_test",
    "demand_paging_test",
    "kvm_page_table_test",
    "memslot_modification_stress_test",
    "page_fault_test",
];

/// Returns the number of the guest mode with 4 KiB pages: with 48 bits of physical address, or with
/// 40 if a CPU was named. QEMU's cortex-a76, for example, has only 40.
const fn mode(cpu: Option<&str>) -> &'static str {
    match cpu {
        None => "3",
        Some(_) => "6",
    }
}

/// The folder of tests in the machine. A test's argument may name another one there, to run it.
const TESTS: &str = "/tests/";

/// Longest time of a test in the machine, in seconds.
const LIMIT: u32 = 150;

/// The same for a kernel of another configuration, which may check each of its accesses.
const LIMIT_CHECKED: u32 = 900;

/// Returns the command that judges a kernel by what a guest wrote.
pub fn check_words(time: std::time::Duration) -> Vec<String> {
    let seconds = format!("{}s", time.as_secs().max(1));
    let words = [emulate::CHECK, "--for", &seconds, "--seed", "1", "--memory", "4m"];
    words.map(str::to_owned).to_vec()
}

/// Exit code of a selftest that cannot run on the kernel or CPU.
const SKIPPED: i32 = 4;

/// Results of the tests.
#[derive(Debug, Serialize)]
pub struct Results {
    /// The architecture that the tests ran on.
    pub architecture: String,
    /// The tree that the kernel was built from: `debian-6.12`, or its path.
    pub tree: String,
    /// The edits of the tree.
    pub edits: Vec<String>,
    /// The release of the kernel, as it names itself.
    pub release: String,
    /// Whether the machine's clock counted instructions, so that a second is 10⁹ instructions.
    pub counts_instructions: bool,
    /// The result of each test.
    pub tests: Vec<Test>,
    /// What the series `slat-engine` counted in all tests: VMs with tables of the engine, VMs that
    /// stayed in C, and calls of the engine.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub counters: BTreeMap<String, String>,
}

/// Parameters of KVM that count what ran on the engine, with the series `slat-engine`.
const COUNTERS: [&str; 4] = ["slat_vms", "slat_refused", "slat_calls", "slat_faults"];

fn parameter(name: &str) -> String {
    format!("/sys/module/kvm/parameters/{name}")
}

impl Results {
    /// Returns a sentence on what ran on the engine, if the kernel has it.
    pub fn engine(&self) -> Option<String> {
        let [vms, refused, calls, faults] = COUNTERS.map(|name| self.counters.get(name));
        let (vms, refused, calls) = (vms?, refused?, calls?);
        // RISC-V's alone says what its faults found.
        let faults = faults.map(|faults| format!("; faults: {faults}")).unwrap_or_default();
        Some(format!(
            "Stage 2 on the engine: {vms} VMs; {refused} VMs that could not use it (the kernel's \
             log says why); calls: {calls}{faults}."
        ))
    }

    /// Returns whether no VM ran on the engine, although it was on: such a run proves nothing.
    pub fn is_without_engine(&self, append: Option<&str>) -> bool {
        let is_off = append.is_some_and(|words| words.contains("kvm.slat=0"));
        !is_off && self.counters.get("slat_vms").is_some_and(|vms| vms == "0")
    }
}

/// The result of one test.
#[derive(Debug, Serialize)]
pub struct Test {
    /// Name and arguments of the test.
    pub name: String,
    /// Exit code; `None` if a signal or the time limit ended the test.
    pub exit_code: Option<i32>,
    /// Whether the time limit ended the test.
    pub timed_out: bool,
    /// The result in words.
    pub result: String,
    /// Duration by the machine's clock, in seconds.
    pub seconds: f64,
    /// How often each function of `--probe` was called while the test ran.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub calls: BTreeMap<String, u64>,
    /// The end of the test's output.
    pub output: String,
}

/// Prefix of a line of output that says how often a function was called.
pub const CALLS: &str = "slat: calls of ";

/// Returns the counts of calls in the output.
fn calls(output: &str) -> BTreeMap<String, u64> {
    let line = |line: &str| {
        let (name, count) = line.strip_prefix(CALLS)?.split_once(' ')?;
        Some((name.to_owned(), count.parse().ok()?))
    };
    output.lines().filter_map(line).collect()
}

impl Test {
    /// Returns whether the test failed or did not end.
    pub fn failed(&self) -> bool {
        !matches!(self.exit_code, Some(0 | SKIPPED))
    }

    /// Returns the result of a test from what the machine reported of it.
    fn of(name: String, ran: TestResult) -> Self {
        let result = match ran.exit_code {
            Some(0) => "passed".to_owned(),
            Some(SKIPPED) => {
                let why = ran.output.lines().rev().find(|line| line.contains("SKIP"));
                let why = why.map_or("", |line| line.rsplit("SKIP").next().unwrap_or_default());
                format!("skipped {}", why.trim_start_matches([' ', '-', ':'])).trim().to_owned()
            }
            Some(code) => format!("failed, exit code {code}"),
            None if ran.timed_out => format!("did not end within {:.0} s", ran.seconds),
            None => "ended by a signal".to_owned(),
        };
        Self {
            name,
            exit_code: ran.exit_code,
            timed_out: ran.timed_out,
            result,
            seconds: ran.seconds,
            calls: calls(&ran.output),
            output: ran.output,
        }
    }

    /// Returns the row of the test in the table.
    pub fn cells(&self, probes: &[String]) -> Vec<String> {
        let mut cells =
            vec![self.name.clone(), self.result.clone(), format!("{:.1}", self.seconds)];
        let count = |name: &String| self.calls.get(name.trim_end_matches('?'));
        cells.extend(probes.iter().map(|name| match count(name) {
            Some(count) => thousands(i64::try_from(*count).unwrap_or(i64::MAX)),
            None => NOTHING.to_owned(),
        }));
        cells
    }
}

/// Builds the kernel and the tests, and runs the tests in an emulated machine.
///
/// # Errors
/// [`Failure::BadInput`](slat_lab::failure::Failure::BadInput) for tests that do not exist, or an
/// error if a build fails or the machine does not boot.
pub fn run(args: &TestArgs, arch: Architecture, session: &mut Session) -> anyhow::Result<Results> {
    let wanted = |name: &str| args.tests.is_empty() || args.tests.iter().any(|test| test == name);
    // The selftests have no library for Power: a test of slat's runs there.
    let is_of = |of: &Option<Architecture>| of.map_or(arch.runs_slat(), |of| of == arch);
    let others = OTHERS.map(|name| (name, "", ARM)).into_iter();
    let all = KNOWN.into_iter().chain(others.filter(|_| !args.tests.is_empty()));
    let of_arch = all.filter(|(_, _, of)| is_of(of));
    let known: Vec<KnownTest> = of_arch.filter(|(name, ..)| wanted(name)).collect();
    for name in &args.tests {
        if !known.iter().any(|(known, ..)| known == name) {
            let all: Vec<&str> = KNOWN.iter().map(|it| it.0).chain(OTHERS).collect();
            return Err(bad_input(format!("--test {name}: known here are {}", all.join(", "))));
        }
    }
    if !args.arguments.is_empty() && args.tests.len() != 1 {
        return Err(bad_input("arguments after `--` are for one test: name it by --test"));
    }
    if !args.probe.is_empty() && !arch.runs_slat() {
        return Err(bad_input(format!(
            "--probe: slat, which counts calls, does not run on {arch}"
        )));
    }
    slat_kernel::check_for_selftests(arch)?;
    session.start(&format!("selftests for {arch}"), 3);
    let source = Source::of(&args.tree, session)?;
    let built = source.build(arch, &args.tree.config, session)?;
    session.step();
    let mut names: Vec<&str> = known.iter().map(|(name, ..)| *name).collect();
    names.dedup();
    let others: Vec<&str> =
        args.arguments.iter().filter_map(|word| word.strip_prefix(TESTS)).collect();
    names.extend(&others);
    let programs = match arch.runs_slat() {
        true => build(&source, arch, &args.tree.config, &names, session)?,
        false => Vec::new(),
    };
    session.step();
    let mut archive = Initramfs::new()?;
    let slat = emulate::program(args.machine.parts.binary.as_deref(), "slat", arch)?;
    emulate::add_program(&mut archive, &slat)?;
    let (mut tests, mut named) = (Vec::new(), Vec::new());
    for name in others {
        let program = programs.iter().find(|(program, _)| program == name);
        let (_, bytes) = program.with_context(|| format!("this tree has no test {name}"))?;
        archive.program(format!("{TESTS}{name}"), bytes)?;
    }
    let limit = args.machine.time_limit;
    let seconds = match (args.arguments.is_empty(), &args.tree.config.config) {
        // Another size may take any time.
        (false, _) => limit.as_secs().try_into().unwrap_or(u32::MAX),
        (true, Some(_)) => LIMIT_CHECKED,
        (true, None) => LIMIT,
    };
    for (name, arguments, _) in known {
        let mut place = format!("{TESTS}{name}");
        match programs.iter().find(|(program, _)| program == name) {
            Some((_, bytes)) => {
                if !named.iter().any(|named: &String| named.split(' ').next() == Some(name)) {
                    archive.program(&place, bytes)?;
                }
            }
            None if name == GUEST => PROGRAM.clone_into(&mut place),
            // Not every tree has this test.
            None => continue,
        }
        let mut words: Vec<String> = arguments.split_whitespace().map(str::to_owned).collect();
        if !args.arguments.is_empty() {
            words.clone_from(&args.arguments);
        } else if arch == Architecture::Aarch64 && TAKE_MODE.contains(&name) {
            words.extend(["-m", mode(args.machine.parts.cpu.as_deref())].map(str::to_owned));
        }
        named.push(format!("{name} {}", words.join(" ")).trim().to_owned());
        let mut test = Asked { path: place, arguments: words, seconds };
        if !args.probe.is_empty() {
            let own = ["calls", "--probe", &args.probe.join(","), "--", &test.path];
            test.arguments = own.iter().map(|&w| w.to_owned()).chain(test.arguments).collect();
            PROGRAM.clone_into(&mut test.path);
        }
        tests.push(test);
        if !args.arguments.is_empty() {
            break;
        }
    }
    ensure!(!tests.is_empty(), "this tree has none of these tests");
    if let Some(time) = args.check {
        let words = check_words(time);
        named.push(format!("slat {}", words.join(" ")));
        let seconds = seconds.saturating_add(time.as_secs().try_into().unwrap_or(u32::MAX));
        tests.push(Asked { path: PROGRAM.to_owned(), arguments: words, seconds });
    }
    let job = Job {
        modules: Vec::new(),
        command: Vec::new(),
        read: COUNTERS.map(parameter).to_vec(),
        port: arch.port().to_owned(),
        linger: 0,
        tests,
    };
    emulate::add_job(&mut archive, &job, arch)?;
    session.say(&format!("running {} tests", named.len()));
    let initramfs = archive.finish()?;
    // KVM recovers huge pages that were split for execution every 100 ms, as `-p 100` tells
    // nx_huge_pages_test.
    let append = format!(
        "hugepages=24 kvm.nx_huge_pages=1 kvm.nx_huge_pages_recovery_ratio=1 \
         kvm.nx_huge_pages_recovery_period_ms=100 {}",
        args.machine.parts.append.as_deref().unwrap_or_default()
    );
    let linux = Linux {
        arch,
        cpus: if args.count_instructions { 1 } else { args.cpus },
        memory: 2 << 30,
        numa_nodes: 1,
        kernel: &built.image,
        initramfs: &initramfs,
        append: &append,
        cpu: args.machine.parts.cpu.as_deref(),
        reports_free_pages: false,
        counts_instructions: args.count_instructions,
    };
    let outcome = machine::run(&linux, limit, args.machine.keep_running, session)?;
    session.finish();
    if let Some(path) = &args.machine.console {
        slat_lab::files::write_whole(path, outcome.console.as_bytes())?;
    }
    let answer = outcome.answer?;
    if let Some(error) = answer.error {
        return Err(no_report(format!("in the machine: {error}")));
    }
    let counter = |name| {
        let text = answer.read.get(&parameter(name))?;
        Some((name.to_owned(), text.trim().to_owned()))
    };
    let counters = COUNTERS.into_iter().filter_map(counter).collect();
    let tests = named.into_iter().zip(answer.tests).map(|(name, ran)| Test::of(name, ran));
    Ok(Results {
        architecture: arch.name().to_owned(),
        tree: args.tree.tree.clone(),
        edits: args.tree.named(),
        release: built.release,
        counts_instructions: args.count_instructions,
        tests: tests.collect(),
        counters,
    })
}

/// Builds the tests that the tree has, linked statically. Returns the name and the program of each,
/// read before another build may write it again.
fn build(
    source: &Source,
    arch: Architecture,
    config: &ConfigArgs,
    names: &[&str],
    session: &Session,
) -> anyhow::Result<Vec<(String, Vec<u8>)>> {
    let objects = source.folder()?.join(format!("{arch}-selftests"));
    let sources = source.copy(arch, config, session)?;
    let tree = &sources.path;
    let own = tree.join("tools/testing/selftests/kvm");
    // Tests of one architecture are in a folder whose name differs between kernel versions.
    let folders: &[&str] = match arch {
        Architecture::X86_64 => &["", "x86/", "x86_64/"],
        Architecture::Aarch64 => &["", "arm64/", "aarch64/"],
        Architecture::Riscv64 => &["", "riscv/"],
        Architecture::Ppc64le => &[],
    };
    let known = ["Makefile.kvm", "Makefile"].map(|name| fs::read_to_string(own.join(name)));
    let known = listed(&known.map(Result::unwrap_or_default).concat(), folders);
    let place = |name: &&str| {
        let mut places = folders.iter().map(|at| format!("{at}{name}"));
        places.find(|place| known.contains(place))
    };
    let there: Vec<String> = names.iter().filter_map(place).collect();
    let libraries = libraries(arch, session)?;
    let headers = objects.join("usr");
    let output = objects.join("out");
    fs::create_dir_all(&output).context("cannot make a folder for selftests")?;
    let cross = slat_kernel::cross_compile(arch);
    let name = slat_kernel::linux_arch(arch);
    let common = [format!("ARCH={name}"), format!("CROSS_COMPILE={cross}")];
    session.say("installing the tree's headers");
    let mut make = Command::new("make");
    make.arg("-s").arg("-C").arg(tree).args(&common);
    make.arg(format!("O={}", objects.join("headers").display())).arg("headers_install");
    make.arg(format!("INSTALL_HDR_PATH={}", headers.display()));
    ran(make, session)?;
    session.say("building selftests");
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    let mut make = Command::new("make");
    make.args(["-s", "-k", &format!("-j{jobs}")]).arg("-C").arg(&own).args(&common);
    make.arg(format!("OUTPUT={}", output.display()));
    let include = libraries.as_ref().map(|l| format!("-I{}", l.join("usr/include").display()));
    make.arg(format!("EXTRA_CFLAGS={}", include.unwrap_or_default()));
    make.arg(format!("KHDR_INCLUDES=-isystem {}", headers.join("include").display()));
    let library = libraries.map(|l| {
        format!("-L{} ", l.join("usr/lib").join(arch.name().to_owned() + "-linux-gnu").display())
    });
    let library = library.unwrap_or_default();
    make.arg(format!("LDFLAGS=-static {library}-pthread -no-pie"));
    make.args(there.iter().map(|test| output.join(test)));
    ran(make, session)?;
    let program = |test: &String| {
        let name = test.rsplit('/').next().unwrap_or_default().to_owned();
        let path = output.join(test);
        let bytes = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        Ok((name, bytes))
    };
    there.iter().map(program).collect()
}

/// Returns the tests that a Makefile has for an architecture, by the names of its folders: those of
/// a list without a name, of `COMMON`, or of a list that is named as one of its folders.
fn listed(makefile: &str, folders: &[&str]) -> BTreeSet<String> {
    let test = |line: &str| {
        let (list, name) = line.split_once("+=")?;
        let of = list.trim().strip_prefix("TEST_GEN_PROGS")?;
        let of = of.strip_prefix("_EXTENDED").unwrap_or(of).trim_start_matches('_');
        let is_own = folders.iter().any(|folder| folder.trim_end_matches('/') == of);
        (is_own || of == "COMMON").then(|| name.trim().to_owned())
    };
    makefile.lines().filter_map(test).collect()
}

/// Returns the folder of libraries for tests of another architecture, which are fetched once.
/// Returns `None` for this host's architecture.
fn libraries(arch: Architecture, session: &Session) -> anyhow::Result<Option<PathBuf>> {
    // No test of RISC-V needs them, and Debian 12 has none.
    if Some(arch) == Architecture::of_this_machine() || arch == Architecture::Riscv64 {
        return Ok(None);
    }
    let stop = session.stop_flag();
    let kept = kept(&format!("libraries/{arch}"), |folder, tree| {
        let request =
            Request { suite: "bookworm", architecture: arch.debian(), folder, stop: &stop };
        session.say("fetching libraries of selftests");
        let archive = Archive::open(request)?;
        for package in ["libnuma-dev", "libcap-dev"] {
            archive.unpack(package, tree)?;
        }
        Ok(())
    })?;
    Ok(Some(kept))
}

fn ran(mut command: Command, session: &Session) -> anyhow::Result<()> {
    session.check()?;
    command.env_remove("MAKEFLAGS").env("LC_ALL", "C");
    let output = command.stdin(Stdio::null()).output().context("cannot start make")?;
    session.check()?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let first = said.lines().position(|line| line.contains("error:")).unwrap_or(0);
    let shown: Vec<&str> = said.lines().skip(first).take(20).collect();
    bail!("the selftests do not build ({})\n  {}", output.status, shown.join("\n  "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn test(exit_code: Option<i32>, output: &str) -> Test {
        let (output, timed_out) = (output.to_owned(), exit_code.is_none());
        Test::of("t".to_owned(), TestResult { exit_code, timed_out, seconds: 1.0, output })
    }

    #[test]
    fn calls_are_read_from_what_was_said() {
        let counted = test(Some(0), "noise\nslat: calls of stage2_flush_vm 1234\n");
        let probes = ["stage2_flush_vm".to_owned(), "other?".to_owned()];
        assert_eq!(counted.cells(&probes)[3..], ["1,234", NOTHING]);
    }

    #[test]
    fn tests_of_an_architecture_are_those_of_its_lists() {
        let makefile = "TEST_GEN_PROGS_COMMON = a\nTEST_GEN_PROGS_COMMON += b\n\
                        TEST_GEN_PROGS_riscv += riscv/c\nTEST_GEN_PROGS_arm64 += d\n\
                        TEST_GEN_PROGS_EXTENDED_x86 += x86/e\nLIBKVM_riscv += lib/f\n";
        let of = |folders: &[&str]| listed(makefile, folders).into_iter().collect::<Vec<_>>();
        assert_eq!(of(&["", "riscv/"]), ["b", "riscv/c"]);
        assert_eq!(of(&["", "arm64/", "aarch64/"]), ["b", "d"]);
        assert_eq!(of(&["", "x86/", "x86_64/"]), ["b", "x86/e"]);
    }

    #[test]
    fn a_test_that_cannot_run_there_says_why_and_is_no_failure() {
        let skipped = test(Some(4), "1..0 # SKIP - Missing capability\n");
        assert_eq!(skipped.result, "skipped Missing capability");
        assert!(!skipped.failed() && !test(Some(0), "").failed());
        assert!(test(Some(254), "").failed() && test(None, "").failed());
        assert!(test(None, "").result.contains("did not end"));
    }
}
