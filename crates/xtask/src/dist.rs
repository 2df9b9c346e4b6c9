//! `cargo xtask dist`: programs for machines without Rust, with checksums.

use crate::static_build::{self, Effort, Program};
use crate::target;
use anyhow::{Context, ensure};
use slat_kernel::vm::Architecture;
use std::fs;
use std::process::Command;

/// Builds static `slat` and `slat-bench` for x86-64 and aarch64, and puts them into target/dist
/// with SHA256SUMS and a manual page for each.
pub fn run() -> anyhow::Result<()> {
    let arches = Architecture::ALL.map(|arch| arch.runs_slat().then_some(arch));
    let arches: Vec<Architecture> = arches.into_iter().flatten().collect();
    static_build::build(&arches, &Program::ALL, Effort::Release)?;
    let folder = target().join("dist");
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let mut names = Vec::new();
    for program in Program::ALL {
        for &arch in &arches {
            let from = program.path(arch);
            let name = from.file_name().context("a program has a name")?.to_owned();
            fs::copy(&from, folder.join(&name)).context("cannot copy a program")?;
            names.push(name);
        }
        let own = program.path(static_build::own()?);
        let manual = Command::new(&own).arg("manual").output();
        let manual = manual.with_context(|| format!("cannot start {}", own.display()))?;
        ensure!(manual.status.success(), "{} manual failed", own.display());
        fs::write(folder.join(format!("{}.1", program.name())), manual.stdout)?;
    }
    let sums = Command::new("sha256sum").args(names).current_dir(&folder).output();
    let sums = sums.context("cannot start sha256sum")?;
    ensure!(sums.status.success(), "sha256sum failed");
    fs::write(folder.join("SHA256SUMS"), &sums.stdout)?;
    print!("{}", String::from_utf8_lossy(&sums.stdout));
    println!("{}", folder.display());
    Ok(())
}
