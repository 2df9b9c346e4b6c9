//! Bochs, as Debian has it: with VMX, a debugger, and a screen that is a terminal.

use crate::setup;
use anyhow::{Context, ensure};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

const OBJCOPY: &str = "x86_64-linux-gnu-objcopy";
/// Bochs's ROM ends below 4 GiB, with the reset vector in its last bytes.
const ROM: usize = 512 << 10;
/// An empty ROM in place of the screen's.
const SCREEN: usize = 32 << 10;

/// Installs what it needs.
pub fn set_up() -> anyhow::Result<()> {
    setup::package("binutils-x86-64-linux-gnu", OBJCOPY)?;
    for package in ["bochs", "bochs-term"] {
        let list = Path::new("/var/lib/dpkg/info").join(format!("{package}.list"));
        if !list.exists() {
            setup::install(package)?;
        }
    }
    Ok(())
}

/// Runs a program as the machine's ROM, and returns its output.
pub fn run(program: &Path, model: &str, folder: &Path, limit: Duration) -> anyhow::Result<String> {
    let file = |name: &str| folder.join(name);
    let stub = ["-j", ".rom", "--set-section-flags", ".rom=alloc,contents"];
    super::objcopy(OBJCOPY, program, &file("program"), &[])?;
    super::objcopy(OBJCOPY, program, &file("stub"), &stub)?;
    let (mut rom, stub) = (fs::read(file("program"))?, fs::read(file("stub"))?);
    ensure!(rom.len() + stub.len() <= ROM, "the program does not fit into a ROM");
    rom.resize(ROM - stub.len(), 0);
    rom.extend(stub);
    fs::write(file("rom"), rom)?;
    let at = folder.display();
    let options = format!(
        "cpu: model={model}, count=1, ips=50000000, reset_on_triple_fault=0\n\
         megs: 64\n\
         romimage: file={at}/rom, address=0xfff80000\n\
         boot: floppy\n"
    );
    start(&options, folder, limit)
}

/// Boots an image of a disk with two CPUs and this firmware, and returns the output of its console.
pub fn boot(
    image: &Path,
    firmware: &str,
    model: &str,
    folder: &Path,
    limit: Duration,
) -> anyhow::Result<String> {
    let address = (4 << 30) - fs::metadata(firmware).context("there is no firmware")?.len();
    let (at, image) = (folder.display(), image.display());
    // What an emulator that was killed leaves behind keeps the next one off.
    let _ = fs::remove_file(format!("{image}.lock"));
    let options = format!(
        "cpu: model={model}, count=2, ips=100000000, reset_on_triple_fault=0\n\
         megs: 256\n\
         romimage: file={firmware}, address={address:#x}\n\
         pci: enabled=1, chipset=i440fx\n\
         ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14\n\
         ata0-master: type=disk, path={image}, mode=flat, cylinders=0\n\
         boot: disk\n\
         com1: enabled=1, mode=file, dev={at}/serial\n"
    );
    start(&options, folder, limit)
}

/// Starts Bochs with these options, and returns its output.
fn start(options: &str, folder: &Path, limit: Duration) -> anyhow::Result<String> {
    let file = |name: &str| folder.join(name);
    fs::write(file("screen"), vec![0; SCREEN])?;
    // The debugger waits before the first instruction.
    fs::write(file("commands"), "c\nquit\n")?;
    let at = folder.display();
    let common = format!(
        "plugin_ctrl: unmapped=true, biosdev=true, speaker=false, extfpuirq=true, parallel=false\n\
         config_interface: textconfig\n\
         display_library: term\n\
         vgaromimage: file={at}/screen\n\
         port_e9_hack: enabled=1\n\
         log: {at}/log\n\
         panic: action=fatal\n\
         error: action=ignore\n\
         clock: sync=none\n"
    );
    fs::write(file("options"), common + options)?;
    // The screen has to be a terminal, which script(1) makes, and into which the output goes.
    let mut bochs = Command::new("timeout");
    bochs.arg(limit.as_secs().to_string()).args(["script", "--quiet", "--command"]);
    bochs.arg("bochs -q -f options -rc commands").arg("console").env("TERM", "xterm");
    bochs.current_dir(folder).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    // Its status says nothing.
    bochs.status().context("cannot start script(1)")?;
    let console = fs::read(file("console")).context("Bochs wrote nothing")?;
    Ok(String::from_utf8_lossy(&console).replace('\r', ""))
}
