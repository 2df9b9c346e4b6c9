//! QEMU, with the hypervisor at EL2 and a guest in its memory.

use super::RunArgs;
use anyhow::{Context, bail};
use serde_json::Value;
use slat_hypervisor::layout::{HOME, INITRD, KERNEL, machine_ram};
use slat_hypervisor::options::Options;
use slat_kernel::vm::Architecture;
use slat_kernel::vm::qemu::{CONSOLE, Machine};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Seconds that QEMU has in addition to the time that the hypervisor gives its guest.
const GRACE: u64 = 30;

/// A machine that is ready to run.
pub struct Guest<'a> {
    pub args: &'a RunArgs,
    pub options: &'a Options<'a>,
    pub words: &'a str,
    /// The hypervisor's program.
    pub program: PathBuf,
    /// Linux, and its initial file system.
    pub image: Option<PathBuf>,
    pub initrd: Option<PathBuf>,
    pub folder: &'a Path,
}

/// Result of a run.
pub struct RunEnd {
    /// All output of the guest's console.
    pub console: String,
    /// All output of the hypervisor for people.
    pub said: String,
    /// All output of the hypervisor for programs.
    pub records: Vec<Value>,
}

impl Guest<'_> {
    /// Runs the machine to its end; `shown` copies console and hypervisor to stdout as they print.
    pub fn run(&self, shown: bool) -> anyhow::Result<RunEnd> {
        let (machine, report) = self.machine()?;
        let (mut console, mut report) =
            (Tail::open(&self.folder.join(CONSOLE))?, Tail::open(&report)?);
        let seconds = self.options.seconds + GRACE;
        let ended = machine.run(Duration::from_secs(seconds), |end| {
            for (tail, mark) in [(&mut console, ""), (&mut report, "slat: ")] {
                for line in tail.lines(end)? {
                    if shown && !line.starts_with('{') {
                        println!("{mark}{line}");
                    }
                }
            }
            Ok(false)
        })?;
        match ended.status {
            None => bail!(
                "the machine did not end within {seconds} s; its console: {}",
                self.folder.join(CONSOLE).display()
            ),
            Some(status) if !status.success() => {
                bail!("QEMU ended with {status}: {}", ended.complaints.trim())
            }
            Some(_) => {}
        }
        let (json, said): (Vec<&str>, Vec<&str>) =
            report.text.lines().partition(|line| line.starts_with('{'));
        let records = json.iter().map(|line| serde_json::from_str(line));
        Ok(RunEnd {
            console: ended.console,
            said: said.join("\n"),
            records: records.collect::<Result<_, _>>().context("a record is not JSON")?,
        })
    }

    /// Returns the machine, and the file that the hypervisor writes to.
    fn machine(&self) -> anyhow::Result<(Machine, PathBuf)> {
        let mut words = self.words.to_owned();
        let mut loaded = Vec::new();
        if let Some(image) = &self.image {
            loaded.push(format!("file={},addr={:#x},force-raw=on", image.display(), HOME + KERNEL));
        }
        if let Some(initrd) = &self.initrd {
            let bytes = initrd.metadata().with_context(|| initrd.display().to_string())?.len();
            if INITRD + bytes > self.options.memory {
                bail!(
                    "an initramfs of {} MiB does not fit into a guest of {} MiB; take a larger \
                     --memory",
                    bytes >> 20,
                    self.options.memory >> 20
                );
            }
            words += &format!(" initrd={bytes}");
            loaded.push(format!(
                "file={},addr={:#x},force-raw=on",
                initrd.display(),
                HOME + INITRD
            ));
        }
        if let Some(guest) = &self.args.guest {
            // An ELF file has its own address.
            loaded.push(format!("file={}", guest.display()));
        }
        let arch = Architecture::Aarch64;
        let mut machine = Machine::new(arch.qemu(), self.folder)?;
        let report = machine.channel("hypervisor")?;
        let cpu = match self.args.cpu() {
            "max" => arch.cpu(),
            cpu => cpu,
        };
        machine.args(["-machine", arch.machine(), "-cpu", cpu]);
        machine.args(["-smp", &(self.options.vcpus + 1).to_string()]);
        machine.args(["-m", &format!("{}M", machine_ram(self.options.memory) >> 20)]);
        machine.args(["-accel", &format!("tcg,thread={}", self.args.thread)]);
        machine.args(["-semihosting-config", "enable=on,target=native,chardev=hypervisor"]);
        machine.args([Path::new("-kernel"), &self.program]);
        machine.args(["-append", &format!("{words} -- {}", self.args.guest_words())]);
        for loader in loaded {
            machine.args(["-device", &format!("loader,{loader}")]);
        }
        Ok((machine, report))
    }
}

/// A file that another process writes.
struct Tail {
    file: File,
    text: String,
    /// End of the lines that were returned.
    seen: usize,
}

impl Tail {
    fn open(path: &Path) -> anyhow::Result<Self> {
        let file = File::open(path).with_context(|| path.display().to_string())?;
        Ok(Self { file, text: String::new(), seen: 0 })
    }

    /// Returns new whole lines, and at the `end` the rest.
    fn lines(&mut self, end: bool) -> anyhow::Result<Vec<String>> {
        let mut bytes = Vec::new();
        self.file.read_to_end(&mut bytes).context("cannot read what the machine says")?;
        self.text.push_str(&String::from_utf8_lossy(&bytes));
        let rest = &self.text[self.seen..];
        let upto = if end { rest.len() } else { rest.rfind('\n').map_or(0, |at| at + 1) };
        let lines = rest[..upto].lines().map(|line| line.trim_end().to_owned()).collect();
        self.seen += upto;
        Ok(lines)
    }
}
