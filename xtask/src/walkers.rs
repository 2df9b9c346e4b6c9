//! Tables of a format under a walker that others wrote: small programs for machines without an operating
//! system, in QEMU. Arm's is the hypervisor.

use crate::stages::{Outcome, cargo};
use crate::{in_ci, setup, target};
use anyhow::{Context, ensure};
use std::process::Command;

/// A program, and the machine that it is for.
struct Walker {
    package: &'static str,
    target: &'static str,
    /// QEMU, the package that has it, and how it is started but for the program.
    emulator: &'static str,
    from: &'static str,
    options: &'static [&'static str],
    /// QEMU's status if all was right.
    status: i32,
}

const WALKERS: [Walker; 2] = [
    Walker {
        package: "slat-walker-npt",
        target: "x86_64-unknown-none",
        emulator: "qemu-system-x86_64",
        from: "qemu-system-x86",
        options: &[
            "-cpu",
            "max",
            "-m",
            "64",
            "-display",
            "none",
            "-serial",
            "stdio",
            "-no-reboot",
            "-device",
            "isa-debug-exit,iobase=0xf4,iosize=4",
        ],
        status: 33,
    },
    Walker {
        package: "slat-walker-riscv",
        target: "riscv64gc-unknown-none-elf",
        emulator: "qemu-system-riscv64",
        from: "qemu-system-misc",
        options: &["-M", "virt", "-cpu", "rv64", "-bios", "none", "-nographic"],
        status: 0,
    },
];

/// Seconds that a machine is given.
const LIMIT: &str = "60";

/// Runs all of them.
pub fn test() -> anyhow::Result<Outcome> {
    let mut left_out = Vec::new();
    for walker in &WALKERS {
        let there = setup::package(walker.from, walker.emulator)
            .and_then(|()| setup::target(walker.target));
        match there {
            Ok(()) => walker.run().context(walker.package)?,
            Err(error) if in_ci() => return Err(error),
            Err(error) => left_out.push(format!("{}: {error:#}", walker.package)),
        }
    }
    Ok(Outcome::Ran(left_out))
}

impl Walker {
    fn run(&self) -> anyhow::Result<()> {
        // Optimised: their stacks are small.
        let mut build = cargo(&["build", "--quiet", "--release", "--package", self.package]);
        let built =
            build.args(["--target", self.target]).status().context("cargo does not start")?;
        ensure!(built.success(), "it was not built: {built}");
        let program = target().join(self.target).join("release").join(self.package);
        let mut machine = Command::new("timeout");
        machine.args([LIMIT, self.emulator]).args(self.options).arg("-kernel").arg(program);
        let output = machine.output().with_context(|| format!("cannot start {machine:?}"))?;
        let text = String::from_utf8_lossy(&output.stdout);
        let (right, wrong) = (text.matches("right").count(), text.matches("wrong").count());
        println!("{}: {right} right, {wrong} wrong", self.package);
        ensure!(
            output.status.code() == Some(self.status) && right > 0,
            "QEMU ended with {}:\n{text}{}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(())
    }
}
