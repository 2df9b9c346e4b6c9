//! `cargo xtask static`: static `slat` and `slat-bench`, which need nothing of a system, for
//! emulated machines.

use crate::workspace::{cargo, output, ran};
use crate::{setup, target};
use anyhow::{Context, ensure};
use clap::ValueEnum;
use serde_json::Value;
use slat_kernel::vm::Architecture;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The target includes musl, and Rust's own linker supports every architecture: no cross compiler
/// is needed.
const FLAGS: &str = "-C linker=rust-lld -C link-self-contained=yes -C target-feature=+crt-static";

/// Rust has no musl for RISC-V everywhere: Debian's compiler links with its C library.
const RISCV_FLAGS: &str = "-C linker=riscv64-linux-gnu-gcc -C target-feature=+crt-static";

/// Returns Rust's target of an architecture, and the compiler's flags for it.
fn linked(arch: Architecture) -> anyhow::Result<(String, &'static str)> {
    ensure!(arch.runs_slat(), "slat does not run on {arch}: kvm-ioctls has no calls of KVM for it");
    if arch == Architecture::Riscv64 {
        setup::package("gcc-riscv64-linux-gnu", "riscv64-linux-gnu-gcc")?;
        if !Path::new("/usr/riscv64-linux-gnu/lib/libc.a").exists() {
            setup::install("libc6-dev-riscv64-cross")?;
        }
        return Ok(("riscv64gc-unknown-linux-gnu".to_owned(), RISCV_FLAGS));
    }
    Ok((format!("{arch}-unknown-linux-musl"), FLAGS))
}

/// Returns the variable of cargo that has the compiler's flags for a target.
fn flags_of(target: &str) -> String {
    format!("CARGO_TARGET_{}_RUSTFLAGS", target.to_uppercase().replace('-', "_"))
}

/// A command that is built.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Program {
    /// The program for guests under KVM
    Slat,
    /// The program for tables
    SlatBench,
}

impl Program {
    /// Both programs.
    pub const ALL: [Self; 2] = [Self::Slat, Self::SlatBench];

    /// Returns its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Slat => "slat",
            Self::SlatBench => "slat-bench",
        }
    }

    fn package(self) -> &'static str {
        match self {
            Self::Slat => "slat-cli",
            Self::SlatBench => "slat-bench",
        }
    }

    /// Returns its path for an architecture.
    pub fn path(self, arch: Architecture) -> PathBuf {
        target().join("static").join(format!("{}-{arch}", self.name()))
    }
}

/// Returns this machine's architecture.
pub fn own() -> anyhow::Result<Architecture> {
    Architecture::of_this_machine()
        .with_context(|| format!("no machine of {} is emulated", std::env::consts::ARCH))
}

/// Effort of the compiler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effort {
    /// The build that users get.
    Release,
    /// For emulated machines, in which counts matter.
    Emulated,
    /// The build of the tests, for emulated machines: it takes half as long, runs slowly, and lacks
    /// most formats and other crates' tables.
    Quick,
}

/// Builds for these architectures, or for this machine's, and prints the paths of the programs.
pub fn run(arches: &[Architecture], programs: &[Program]) -> anyhow::Result<()> {
    let own = [own()?];
    let arches = if arches.is_empty() { &own[..] } else { arches };
    let programs = if programs.is_empty() { &Program::ALL[..] } else { programs };
    build(arches, programs, Effort::Emulated)?;
    for arch in arches {
        programs.iter().for_each(|program| println!("{}", program.path(*arch).display()));
    }
    Ok(())
}

/// Builds for several architectures at once: build scripts and macros are built once.
pub fn build(arches: &[Architecture], programs: &[Program], effort: Effort) -> anyhow::Result<()> {
    let targets = arches.iter().map(|arch| linked(*arch)).collect::<anyhow::Result<Vec<_>>>()?;
    for (target, _) in &targets {
        setup::target(target)?;
    }
    let folder = folder();
    let (profile, built) = match effort {
        Effort::Release => ("release", "release"),
        Effort::Emulated => ("emulated", "emulated"),
        Effort::Quick => ("dev", "debug"),
    };
    let mut build = cargo(&["build", "--bins", "--profile", profile]);
    for program in programs {
        build.args(["--package", program.package()]);
    }
    for (target, flags) in &targets {
        build.args(["--target", target]).env(flags_of(target), flags);
    }
    if effort == Effort::Quick {
        build.arg("--no-default-features");
    }
    ran(build.env("CARGO_TARGET_DIR", &folder))?;
    for (arch, (target, _)) in arches.iter().zip(&targets) {
        for program in programs {
            let from = folder.join(target).join(built).join(program.name());
            let to = program.path(*arch);
            let parent = to.parent().context("a file is in a folder")?;
            let copied = fs::create_dir_all(parent).and_then(|()| fs::copy(&from, &to));
            copied
                .with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
        }
    }
    Ok(())
}

/// Returns Rust's target of an architecture, and the folder of the programs that were built for
/// release.
pub fn built(arch: Architecture) -> anyhow::Result<(String, PathBuf)> {
    let (target, _) = linked(arch)?;
    let folder = folder().join(&target).join("release");
    Ok((target, folder))
}

/// Builds the work of the hypervisor's guests, quickly, and returns its path.
pub fn work() -> anyhow::Result<PathBuf> {
    let (name, flags) = linked(Architecture::Aarch64)?;
    setup::target(&name)?;
    let mut build = cargo(&["build", "--quiet", "--package", "slat-programs"]);
    build.args(["--bin", "slat-work", "--features", "work", "--target", &name]);
    ran(build.env(flags_of(&name), flags).env("CARGO_TARGET_DIR", folder()))?;
    Ok(folder().join(name).join("debug/slat-work"))
}

/// Builds a test of a package for an architecture, quickly, and returns its path.
pub fn test(arch: Architecture, package: &str, test: &str) -> anyhow::Result<PathBuf> {
    let (name, flags) = linked(arch)?;
    setup::target(&name)?;
    let mut build = cargo(&["test", "--no-run", "--message-format", "json"]);
    build.args(["--package", package, "--test", test, "--target", &name]);
    build.env(flags_of(&name), flags).env("CARGO_TARGET_DIR", folder());
    test_program(&mut build, &format!("{package}/tests/{test}"))
}

/// Builds tests, and returns the path of the program whose source has this in its path.
pub fn test_program(build: &mut Command, source: &str) -> anyhow::Result<PathBuf> {
    let built = output(build.stderr(Stdio::inherit()))?;
    let program = |line: &[u8]| {
        let artifact: Value = serde_json::from_slice(line).ok()?;
        let own = artifact["target"]["src_path"].as_str()?.contains(source);
        artifact["executable"].as_str().filter(|_| own).map(PathBuf::from)
    };
    let lines = built.stdout.split(|byte| *byte == b'\n');
    lines.into_iter().find_map(program).context("cargo named no such test")
}

/// A separate folder: these flags would otherwise rebuild everything each time.
pub fn folder() -> PathBuf {
    target().join("static-build")
}
