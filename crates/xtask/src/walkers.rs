//! Tables of a format under another project's walker: small programs for machines without an
//! operating system, in QEMU; and a test whose tables an emulated IOMMU walks. The hypervisor tests
//! Arm's.

use crate::stages::{Outcome, cargo, ran};
use crate::{in_ci, setup, target};
use anyhow::{Context, ensure};
use slat_kernel::vm::qemu::{Ended, Machine, Qemu, RISCV64, X86_64};
use std::fs;
use std::path::Path;
use std::time::Duration;

/// A program, and its machine.
struct Walker {
    program: &'static str,
    format: &'static str,
    target: &'static str,
    qemu: Qemu,
    /// Options of the machine beyond a console.
    options: &'static [&'static str],
    /// QEMU's exit status if all tests passed.
    status: i32,
}

const WALKERS: [Walker; 2] = [
    Walker {
        program: "slat-walker-npt",
        format: "npt",
        target: "x86_64-unknown-none",
        qemu: X86_64,
        options: &["-cpu", "max", "-m", "64", "-device", "isa-debug-exit,iobase=0xf4,iosize=4"],
        status: 33,
    },
    Walker {
        program: "slat-walker-riscv",
        format: "riscv",
        target: "riscv64gc-unknown-none-elf",
        qemu: RISCV64,
        options: &["-M", "virt", "-cpu", "rv64", "-bios", "none"],
        status: 0,
    },
];

/// Time limit of a machine.
const LIMIT: Duration = Duration::from_secs(60);

/// Runs all walkers.
pub fn test() -> anyhow::Result<Outcome> {
    let mut left_out = Vec::new();
    for walker in &WALKERS {
        let there = setup::emulator(walker.qemu).and_then(|()| setup::target(walker.target));
        match there {
            Ok(()) => walker.run().context(walker.program)?,
            Err(error) if in_ci() => return Err(error),
            Err(error) => left_out.push(format!("{}: {error:#}", walker.program)),
        }
    }
    match setup::emulator(X86_64) {
        Ok(()) => drop(ran(cargo(&["test", "--package", "slat-programs"]).args(IOMMU))?),
        Err(error) if in_ci() => return Err(error),
        Err(error) => left_out.push(format!("iommu: {error:#}")),
    }
    Ok(Outcome::Ran(left_out))
}

/// Tables in the memory of a machine, whose device accesses memory through a VT-d unit.
const IOMMU: [&str; 5] = ["--no-default-features", "--features", "iommu", "--test", "iommu"];

impl Walker {
    fn run(&self) -> anyhow::Result<()> {
        // Optimised, because their stacks are small.
        let mut build = cargo(&["build", "--quiet", "--release", "--package", "slat-programs"]);
        build.args(["--no-default-features", "--features", self.format, "--bin", self.program]);
        let built =
            build.args(["--target", self.target]).status().context("cargo does not start")?;
        ensure!(built.success(), "it was not built: {built}");
        let program = target().join(self.target).join("release").join(self.program);
        let folder = target().join("walkers").join(self.program);
        fs::create_dir_all(&folder).context("cannot make a folder")?;
        let mut machine = Machine::new(self.qemu, &folder)?;
        machine.args(self.options).args([Path::new("-kernel"), &program]);
        let Ended { status, console, complaints, .. } = machine.run(LIMIT, |_| Ok(false))?;
        let (right, wrong) = (console.matches("right").count(), console.matches("wrong").count());
        println!("{}: {right} right, {wrong} wrong", self.program);
        let status =
            status.with_context(|| format!("it ran for more than {LIMIT:?}:\n{console}"))?;
        ensure!(
            status.code() == Some(self.status) && right > 0,
            "QEMU ended with {status}:\n{console}{complaints}"
        );
        Ok(())
    }
}
