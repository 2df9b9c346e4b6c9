//! `slat emulate` on the command line, when something is wrong. Runs that succeed need kernels and
//! static programs; `cargo xtask test emulators` tests them.

use assert_cmd::Command;
use predicates::prelude::*;
use predicates::str::contains;
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::thread::sleep;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A folder with a static program, and a file in place of a kernel.
struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        // It looks like a kernel of both architectures.
        let mut kernel = vec![0; 1 << 20];
        kernel[0x202..0x206].copy_from_slice(b"HdrS");
        kernel[0x38..0x3c].copy_from_slice(b"ARM\x64");
        fs::write(folder.path().join("kernel"), kernel).unwrap();
        fs::create_dir(folder.path().join("tmp")).unwrap();
        for (arch, machine) in [("x86_64", 62u16), ("aarch64", 183)] {
            fs::write(folder.path().join(arch), executable(machine)).unwrap();
        }
        Self(folder)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Returns the command that emulates that kernel, with its temporary files in this folder.
    fn emulate(&self, arch: &str, options: &[&str]) -> std::process::Command {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_slat"));
        command.args(["emulate", "--arch", arch, "--kernel"]).arg(self.path("kernel"));
        command
            .arg("--binary")
            .arg(self.path(arch))
            .args(options)
            .args(["--", "bench", "dirty-log"]);
        command.env("TMPDIR", self.path("tmp"));
        command
    }

    /// Checks that no temporary file and no process of a machine is left.
    fn is_tidy(&self) {
        let left: Vec<_> = fs::read_dir(self.path("tmp")).unwrap().flatten().collect();
        assert!(left.is_empty(), "{left:?}");
        assert_eq!(emulators(self.0.path()), 0);
    }
}

/// Returns a header and a segment to load, which are enough to look like a static program.
fn executable(machine: u16) -> Vec<u8> {
    let mut bytes = b"\x7fELF\x02\x01\x01".to_vec();
    bytes.resize(16, 0);
    bytes.extend([2, 0]);
    bytes.extend(machine.to_le_bytes());
    bytes.extend([1, 0, 0, 0]);
    bytes.extend([0; 8]);
    bytes.extend(64u64.to_le_bytes());
    bytes.extend([0; 12]);
    for half in [64u16, 56, 1, 64, 0, 0] {
        bytes.extend(half.to_le_bytes());
    }
    bytes.extend([1, 0, 0, 0]);
    bytes.resize(64 + 56, 0);
    bytes
}

/// Returns the number of QEMU's processes whose command lines name a file in a folder.
fn emulators(folder: &Path) -> usize {
    let folder = folder.to_str().unwrap();
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let lines = processes.filter_map(|process| fs::read(process.path().join("cmdline")).ok());
    lines
        .map(|line| String::from_utf8_lossy(&line).into_owned())
        .filter(|line| line.starts_with("qemu-system") && line.contains(folder))
        .count()
}

fn has_qemu(program: &str) -> bool {
    let found = std::process::Command::new(program)
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    let found = found.is_ok_and(|status| status.success());
    let required = std::env::var("SLAT_REQUIRE_QEMU").is_ok_and(|value| value == "1");
    assert!(found || !required, "SLAT_REQUIRE_QEMU=1, and {program} does not run");
    if !found {
        eprintln!("skipped: {program} does not run");
    }
    found
}

fn refused(arguments: &[&str], words: &[&str]) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_slat"));
    let mut assert = command.arg("emulate").args(arguments).assert().code(2).stdout("");
    for word in words {
        assert = assert.stderr(contains(*word));
    }
}

#[test]
fn help_has_examples_and_its_own_exit_code() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_slat"));
    command
        .args(["emulate", "--help"])
        .assert()
        .success()
        .stdout(contains("Examples:").and(contains("debian-6.12")).and(contains("no report")));
}

#[test]
fn values_that_cannot_be_right_are_refused() {
    refused(&[], &["COMMAND"]);
    refused(&["--arch", "sparc", "--", "bench", "dirty-log"], &["sparc", "aarch64"]);
    refused(&["--time-limit", "0s", "--", "bench", "dirty-log"], &["--time-limit", "90s"]);
    refused(&["--cpus", "0", "--", "bench", "dirty-log"], &["--cpus"]);
    refused(&["--module-param", "nx=1", "--", "bench", "dirty-log"], &["MODULE.NAME=VALUE"]);
}

#[test]
fn a_wrong_command_is_refused_before_any_machine_starts() {
    refused(&["--", "bench", "dirty-log", "--memory", "lots"], &["lots", "64G"]);
    refused(&["--", "compare", "a", "b"], &["measures nothing", "bench"]);
    refused(&["--", "bench", "dirty-log", "--output", "x"], &["before `--`"]);
}

#[test]
fn a_program_for_another_machine_is_refused_with_a_remedy() {
    let folder = Folder::new();
    let with = |arch: &str, binary: &Path, words: &[&str]| {
        let binary = binary.to_str().unwrap();
        refused(&["--arch", arch, "--binary", binary, "--", "bench", "dirty-log"], words);
    };
    with("x86_64", Path::new("/no/such/slat"), &["/no/such/slat"]);
    with("x86_64", &folder.path("kernel"), &["no ELF", "cargo xtask static --arch x86_64"]);
    with("x86_64", &folder.path("aarch64"), &["is not for x86_64"]);
    // This program is for one architecture only.
    let other = if cfg!(target_arch = "x86_64") { "aarch64" } else { "x86_64" };
    let own = Path::new(env!("CARGO_BIN_EXE_slat"));
    with(other, own, &["is not for", "target/static/slat-"]);
}

#[test]
fn an_emulator_that_is_missing_is_named_with_its_package() {
    let folder = Folder::new();
    for (arch, package) in [("x86_64", "qemu-system-x86"), ("aarch64", "qemu-system-arm")] {
        let mut command = Command::from_std(folder.emulate(arch, &[]));
        command.env("PATH", folder.path("tmp")).assert().code(1).stderr(contains(package));
    }
    folder.is_tidy();
}

#[test]
fn a_kernel_that_is_no_file_is_refused() {
    if !has_qemu("qemu-system-aarch64") {
        return;
    }
    let folder = Folder::new();
    fs::remove_file(folder.path("kernel")).unwrap();
    let mut command = Command::from_std(folder.emulate("aarch64", &[]));
    command.assert().code(2).stderr(contains("--kernel").and(contains("debian-6.1")));
}

#[test]
fn an_unwritable_output_is_refused_before_any_machine_starts() {
    let folder = Folder::new();
    let output = folder.path("kernel/report.json");
    for option in ["--output", "--console"] {
        let options = [option, output.to_str().unwrap()];
        let mut command = Command::from_std(folder.emulate("aarch64", &options));
        command.assert().code(2).stderr(contains(option).and(contains("cannot write there")));
    }
}

#[test]
fn a_kernel_qemu_rejects_gives_qemus_words_and_no_report() {
    if !has_qemu("qemu-system-x86_64") {
        return;
    }
    let folder = Folder::new();
    let mut command = Command::from_std(folder.emulate("x86_64", &[]));
    command
        .assert()
        .code(3)
        .stdout("")
        .stderr(contains("without a report").and(contains("the last that QEMU said")));
    folder.is_tidy();
}

#[test]
fn a_kernel_that_does_not_boot_is_ended_at_the_time_limit() {
    if !has_qemu("qemu-system-aarch64") {
        return;
    }
    let folder = Folder::new();
    let console = folder.path("console");
    let options = ["--time-limit", "2s", "--console", console.to_str().unwrap()];
    let mut command = Command::from_std(folder.emulate("aarch64", &options));
    command
        .assert()
        .code(3)
        .stdout("")
        .stderr(contains("ended after 2s").and(contains("the console said nothing")));
    assert_eq!(fs::read_to_string(console).unwrap(), "");
    folder.is_tidy();
}

#[test]
fn ctrl_c_ends_the_machine_and_leaves_nothing() {
    if !has_qemu("qemu-system-aarch64") {
        return;
    }
    let folder = Folder::new();
    let mut command = folder.emulate("aarch64", &["--time-limit", "5m"]);
    let mut slat = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let begin = Instant::now();
    while emulators(folder.0.path()) == 0 {
        assert!(begin.elapsed() < Duration::from_secs(60), "no machine was started");
        assert_eq!(slat.try_wait().unwrap(), None);
        sleep(Duration::from_millis(20));
    }
    kill_process(Pid::from_child(&slat), Signal::INT).unwrap();
    assert_eq!(slat.wait().unwrap().code(), Some(130));
    folder.is_tidy();
}

#[test]
fn a_slat_that_is_killed_takes_its_machine_with_it() {
    if !has_qemu("qemu-system-aarch64") {
        return;
    }
    let folder = Folder::new();
    let mut command = folder.emulate("aarch64", &["--time-limit", "5m"]);
    let mut slat = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let wait = |wanted: usize| {
        let begin = Instant::now();
        while emulators(folder.0.path()) != wanted {
            assert!(begin.elapsed() < Duration::from_secs(60), "{wanted} machines are expected");
            sleep(Duration::from_millis(20));
        }
    };
    wait(1);
    slat.kill().unwrap();
    slat.wait().unwrap();
    wait(0);
}
