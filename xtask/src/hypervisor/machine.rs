//! QEMU, with the hypervisor at EL2 and a guest in its memory.

use super::{RunArgs, first_line};
use anyhow::{Context, bail};
use serde_json::Value;
use slat_hypervisor::layout::{HOME, INITRD, KERNEL, machine_ram};
use slat_hypervisor::options::Options;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// QEMU is given so much longer than the hypervisor gives its guest, in seconds.
const GRACE: u64 = 30;

/// A machine that is about to run.
pub struct Machine<'a> {
    pub args: &'a RunArgs,
    pub options: &'a Options<'a>,
    pub words: &'a str,
    /// The hypervisor.
    pub program: PathBuf,
    /// Linux, and what it boots from.
    pub image: Option<PathBuf>,
    pub initrd: Option<PathBuf>,
    pub folder: &'a Path,
}

/// How it ended.
pub struct Ending {
    /// All that the guest's console said.
    pub console: String,
    /// All that the hypervisor said for people.
    pub said: String,
    /// And for programs.
    pub records: Vec<Value>,
}

/// The emulator's version.
pub fn version() -> anyhow::Result<String> {
    first_line(Command::new("qemu-system-aarch64").arg("--version"))
}

impl Machine<'_> {
    /// Runs it to its end; `shown`: console and hypervisor on stdout as they come.
    pub fn run(&self, shown: bool) -> anyhow::Result<Ending> {
        let (console, report) = (self.folder.join("console"), self.folder.join("hypervisor"));
        let mut command = self.command(&console, &report)?;
        let complaints = self.folder.join("qemu");
        let file = File::create(&complaints).context("cannot write QEMU's messages")?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(file);
        for path in [&console, &report] {
            fs::write(path, "").with_context(|| format!("cannot write {}", path.display()))?;
        }
        let mut running = Running(command.spawn().context("qemu-system-aarch64 does not start")?);
        let limit = Instant::now() + Duration::from_secs(self.options.seconds + GRACE);
        let (mut console, mut report) = (Tail::open(&console)?, Tail::open(&report)?);
        let status = loop {
            let status = running.0.try_wait().context("QEMU is gone")?;
            for (tail, mark) in [(&mut console, ""), (&mut report, "slat: ")] {
                for line in tail.lines(status.is_some())? {
                    if shown && !line.starts_with('{') {
                        println!("{mark}{line}");
                    }
                }
            }
            match status {
                Some(status) => break status,
                None if Instant::now() > limit => {
                    bail!(
                        "the machine did not end within {} s; its console: {}",
                        self.options.seconds + GRACE,
                        self.folder.join("console").display()
                    );
                }
                None => std::thread::sleep(Duration::from_millis(20)),
            }
        };
        let complaints = fs::read_to_string(complaints).unwrap_or_default();
        if !status.success() {
            bail!("QEMU ended with {status}: {}", complaints.trim());
        }
        let (json, said): (Vec<&str>, Vec<&str>) =
            report.text.lines().partition(|line| line.starts_with('{'));
        let records = json.iter().map(|line| serde_json::from_str(line));
        Ok(Ending {
            console: console.text.replace('\r', ""),
            said: said.join("\n"),
            records: records.collect::<Result<_, _>>().context("a record is not JSON")?,
        })
    }

    fn command(&self, console: &Path, report: &Path) -> anyhow::Result<Command> {
        let mut words = self.words.to_owned();
        let mut loaded = Vec::new();
        if let Some(image) = &self.image {
            loaded.push(format!("file={},addr={:#x},force-raw=on", image.display(), HOME + KERNEL));
        }
        if let Some(initrd) = &self.initrd {
            let bytes = initrd.metadata().with_context(|| initrd.display().to_string())?.len();
            if INITRD + bytes > self.options.memory {
                bail!(
                    "an initramfs of {} MiB does not fit into a guest of {} MiB; take a larger --memory",
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
            // It says itself where it is.
            loaded.push(format!("file={}", guest.display()));
        }
        let mut command = Command::new("qemu-system-aarch64");
        command.args(["-M", "virt,virtualization=on,gic-version=3"]);
        let cpu = match self.args.cpu.as_str() {
            // The other kind of pointer authentication takes four times as long in all.
            "max" => "max,pauth-impdef=on",
            cpu => cpu,
        };
        command.args(["-cpu", cpu, "-smp", &(self.options.vcpus + 1).to_string()]);
        command.args(["-m", &format!("{}M", machine_ram(self.options.memory) >> 20)]);
        command.args(["-accel", &format!("tcg,thread={}", self.args.thread)]);
        command.args(["-nic", "none", "-display", "none", "-monitor", "none"]);
        command.arg("-serial").arg(format!("file:{}", console.display()));
        command.arg("-chardev").arg(format!("file,id=report,path={}", report.display()));
        command.args(["-semihosting-config", "enable=on,target=native,chardev=report"]);
        command.arg("-kernel").arg(&self.program);
        command.arg("-append").arg(format!("{words} -- {}", self.args.guest_words()));
        for loader in loaded {
            command.arg("-device").arg(format!("loader,{loader}"));
        }
        Ok(command)
    }
}

/// QEMU, which does not outlive this program's interest in it.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        _ = self.0.kill();
        _ = self.0.wait();
    }
}

/// A file that somebody else writes.
struct Tail {
    file: File,
    text: String,
    /// Up to where lines were handed out.
    seen: usize,
}

impl Tail {
    fn open(path: &Path) -> anyhow::Result<Self> {
        let file = File::open(path).with_context(|| path.display().to_string())?;
        Ok(Self { file, text: String::new(), seen: 0 })
    }

    /// Whole lines that are new, and at the `end` the rest.
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
