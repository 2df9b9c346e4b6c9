//! `cargo xtask static`: `slat` and `slat-bench` without anything that it needs of a system, for emulated machines.

use crate::stages::cargo;
use crate::{setup, target};
use anyhow::{Context, ensure};
use clap::ValueEnum;
use std::fs;
use std::path::PathBuf;

/// musl comes with the target, and Rust's own linker knows every architecture: no cross compiler.
const FLAGS: &str = "-C linker=rust-lld -C link-self-contained=yes -C target-feature=+crt-static";

/// What is built.
const PROGRAMS: [&str; 2] = ["slat", "slat-bench"];

/// An architecture that machines are emulated of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Arch {
    /// 64-bit x86
    #[value(name = "x86_64")]
    X86_64,
    /// 64-bit Arm
    #[value(name = "aarch64")]
    Aarch64,
}

impl Arch {
    /// Its name in Rust's targets and in those of QEMU.
    pub fn name(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64",
            Self::Aarch64 => "aarch64",
        }
    }

    /// This machine's.
    fn own() -> anyhow::Result<Self> {
        let own = std::env::consts::ARCH;
        Self::from_str(own, false).ok().with_context(|| format!("no machine of {own} is emulated"))
    }

    /// Where a program for it is.
    pub fn program(self, name: &str) -> PathBuf {
        target().join("static").join(format!("{name}-{}", self.name()))
    }
}

/// Builds for these architectures, or for this machine's, and says where the programs are.
pub fn run(arches: &[Arch]) -> anyhow::Result<()> {
    let own = [Arch::own()?];
    let arches = if arches.is_empty() { &own[..] } else { arches };
    build(arches, false)?;
    for arch in arches {
        PROGRAMS.iter().for_each(|name| println!("{}", arch.program(name).display()));
    }
    Ok(())
}

/// Builds for all of some architectures at once: what runs while building is built once. Quickly: it
/// runs slowly then, and lacks the tables of other crates.
pub fn build(arches: &[Arch], quickly: bool) -> anyhow::Result<()> {
    let targets: Vec<String> =
        arches.iter().map(|arch| format!("{}-unknown-linux-musl", arch.name())).collect();
    for target in &targets {
        setup::target(target)?;
    }
    let folder = folder();
    let mut build = cargo(&["build", "--package", "slat-cli", "--package", "slat-bench", "--bins"]);
    build.args(["--profile", "emulated"]);
    for target in &targets {
        build.args(["--target", target]);
    }
    build.env("RUSTFLAGS", FLAGS);
    if quickly {
        build.arg("--no-default-features").env("CARGO_PROFILE_EMULATED_OPT_LEVEL", "0");
    }
    build.env("CARGO_TARGET_DIR", &folder);
    let status = build.status().with_context(|| format!("cannot start {build:?}"))?;
    ensure!(status.success(), "{build:?} failed: {status}");
    for (arch, target) in arches.iter().zip(&targets) {
        for name in PROGRAMS {
            let from = folder.join(target).join("emulated").join(name);
            let to = arch.program(name);
            let parent = to.parent().context("a file is in a folder")?;
            let copied = fs::create_dir_all(parent).and_then(|()| fs::copy(&from, &to));
            copied
                .with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
        }
    }
    Ok(())
}

/// Builds the work of the hypervisor's guests, quickly, and says where it is.
pub fn work() -> anyhow::Result<PathBuf> {
    let name = format!("{}-unknown-linux-musl", Arch::Aarch64.name());
    setup::target(&name)?;
    let mut build = cargo(&["build", "--quiet", "--package", "slat-work", "--target", &name]);
    build.env("RUSTFLAGS", FLAGS).env("CARGO_TARGET_DIR", folder());
    let status = build.status().with_context(|| format!("cannot start {build:?}"))?;
    ensure!(status.success(), "{build:?} failed: {status}");
    Ok(folder().join(name).join("debug/slat-work"))
}

/// A folder of its own: other flags would otherwise rebuild everything, each time in turn.
fn folder() -> PathBuf {
    target().join("static-build")
}
