//! Tables of a format under another project's walker: small programs for machines without an
//! operating system, in QEMU. The hypervisor tests Arm's.

use crate::stages::{Outcome, cargo};
use crate::{in_ci, setup, target};
use anyhow::{Context, ensure};
use slat_kernel::vm::qemu::{CONSOLE, Ended, Machine, Qemu, RISCV64, X86_64};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// A program, and its machine.
struct Walker {
    program: &'static str,
    format: &'static str,
    target: &'static str,
    qemu: Qemu,
    /// Options of the machine beyond a console.
    options: &'static [&'static str],
    end: End,
}

/// The end of a program that found nothing wrong.
#[derive(Clone, Copy)]
enum End {
    /// QEMU's exit status.
    Status(i32),
    /// The last line, which counts what was wrong: the machine has no device that ends it.
    Line(&'static str),
}

const POWER64: Qemu = Qemu { program: "qemu-system-ppc64", package: "qemu-system-ppc" };

const WALKERS: [Walker; 3] = [
    Walker {
        program: "slat-walker-npt",
        format: "npt",
        target: "x86_64-unknown-none",
        qemu: X86_64,
        options: &["-cpu", "max", "-m", "64", "-device", "isa-debug-exit,iobase=0xf4,iosize=4"],
        end: End::Status(33),
    },
    Walker {
        program: "slat-walker-riscv",
        format: "riscv",
        target: "riscv64gc-unknown-none-elf",
        qemu: RISCV64,
        options: &["-M", "virt", "-cpu", "rv64", "-bios", "none"],
        end: End::Status(0),
    },
    Walker {
        program: "slat-walker-power",
        format: "power",
        target: "powerpc64-unknown-linux-gnu",
        qemu: POWER64,
        options: &["-M", "powernv9", "-m", "1G"],
        end: End::Line("0 wrong\n"),
    },
];

/// Time limit of a machine.
const LIMIT: Duration = Duration::from_secs(60);

const OBJCOPY: &str = "powerpc64-linux-gnu-objcopy";
const POWER_FLAGS: &str =
    "-Crelocation-model=static -Clinker=powerpc64-linux-gnu-ld -Clinker-flavor=ld";

/// Runs all walkers.
pub fn test() -> anyhow::Result<Outcome> {
    let mut left_out = Vec::new();
    for walker in &WALKERS {
        let there = walker.set_up();
        match there {
            Ok(()) => walker.run().context(walker.program)?,
            Err(error) if in_ci() => return Err(error),
            Err(error) => left_out.push(format!("{}: {error:#}", walker.program)),
        }
    }
    Ok(Outcome::Ran(left_out))
}

impl Walker {
    /// Installs what it needs.
    fn set_up(&self) -> anyhow::Result<()> {
        setup::emulator(self.qemu)?;
        if let End::Line(_) = self.end {
            setup::package("binutils-powerpc64-linux-gnu", OBJCOPY)?;
        }
        setup::target(self.target)
    }

    fn run(&self) -> anyhow::Result<()> {
        let folder = target().join("walkers").join(self.program);
        fs::create_dir_all(&folder).context("cannot make a folder")?;
        let program = self.build(&folder)?;
        let mut machine = Machine::new(self.qemu, &folder)?;
        let option = match self.end {
            End::Status(_) => "-kernel",
            End::Line(_) => "-bios",
        };
        machine.args(self.options).args([Path::new(option), &program]);
        let written = folder.join(CONSOLE);
        let ended = machine.run(LIMIT, |_| {
            let End::Line(_) = self.end else { return Ok(false) };
            Ok(fs::read_to_string(&written).is_ok_and(|console| console.ends_with(" wrong\n")))
        })?;
        let Ended { status, console, complaints, .. } = ended;
        let count = |word| console.lines().filter(|line| line.starts_with(word)).count();
        let (right, wrong) = (count("right"), count("wrong"));
        println!("{}: {right} right, {wrong} wrong", self.program);
        let well = match self.end {
            End::Status(expected) => status.and_then(|status| status.code()) == Some(expected),
            End::Line(line) => console.ends_with(&format!("\n{line}")),
        };
        ensure!(
            well && right > 0 && wrong == 0,
            "it ended with {status:?}, within {LIMIT:?}:\n{console}{complaints}"
        );
        Ok(())
    }

    /// Builds the program, and returns the file for QEMU.
    fn build(&self, folder: &Path) -> anyhow::Result<PathBuf> {
        // Optimised, because their stacks are small.
        let mut build = cargo(&["build", "--quiet", "--release", "--package", "slat-programs"]);
        build.args(["--no-default-features", "--features", self.format, "--bin", self.program]);
        if let End::Line(_) = self.end {
            // The target is Linux's, as Rust has none without an operating system.
            build.env("CARGO_PROFILE_RELEASE_PANIC", "abort");
            build.env("CARGO_TARGET_POWERPC64_UNKNOWN_LINUX_GNU_RUSTFLAGS", POWER_FLAGS);
        }
        let built =
            build.args(["--target", self.target]).status().context("cargo does not start")?;
        ensure!(built.success(), "it was not built: {built}");
        let program = target().join(self.target).join("release").join(self.program);
        let End::Line(_) = self.end else { return Ok(program) };
        let image = folder.join("image");
        let copied = Command::new(OBJCOPY).args(["-O", "binary"]).args([&program, &image]).status();
        ensure!(copied.is_ok_and(|status| status.success()), "{OBJCOPY} made no image");
        Ok(image)
    }
}
