//! The machine: QEMU, which interprets all of it, from its start until it has answered.

use crate::cli::Architecture;
use anyhow::{Context, bail};
use rustix::process::{Signal, set_parent_process_death_signal};
use slat_lab::failure::{Failure, no_report};
use slat_lab::first::job::{Answer, Arrived, decode};
use slat_lab::session::Session;
use slat_lab::size::Size;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Lines of the console that are shown of a machine that did not answer.
const LINES: usize = 30;

/// How long a machine that has answered may take to power itself off.
const LAST: Duration = Duration::from_secs(10);

/// How often it is looked at.
const PERIOD: Duration = Duration::from_millis(50);

/// A machine to be.
#[derive(Debug)]
pub struct Machine<'a> {
    /// Its architecture.
    pub arch: Architecture,
    /// Its CPUs.
    pub cpus: u32,
    /// Its memory.
    pub memory: Size,
    /// Its NUMA nodes, which share both.
    pub numa_nodes: u32,
    /// Its kernel.
    pub kernel: &'a Path,
    /// What the kernel unpacks.
    pub initramfs: &'a [u8],
    /// Words for the kernel's command line.
    pub append: &'a str,
    /// The model of its CPU, if not the one that has all.
    pub cpu: Option<&'a str>,
    /// How long it may take.
    pub time_limit: Duration,
}

impl Architecture {
    /// The program that emulates it, and the package that Debian has it in.
    pub fn qemu(self) -> (&'static str, &'static str) {
        match self {
            Self::X86_64 => ("qemu-system-x86_64", "qemu-system-x86"),
            Self::Aarch64 => ("qemu-system-aarch64", "qemu-system-arm"),
        }
    }

    /// Options for a CPU that has all that QEMU can emulate: SVM with nested paging; EL2 with VHE.
    ///
    /// Without CMPXCHG16B, after which QEMU 7.2 has wrong flags until they are next set: an
    /// interrupt in between restores them, and Linux 6.12 dies of a trap flag that nobody set. With
    /// the fast kind of pointer authentication: the other one takes four times as long in all.
    fn options(self) -> &'static [&'static str] {
        match self {
            Self::X86_64 => &["-machine", "pc", "-cpu", "max,-cx16"],
            Self::Aarch64 => {
                &["-machine", "virt,virtualization=on,gic-version=3", "-cpu", "max,pauth-impdef=on"]
            }
        }
    }

    /// x86's CPUs take turns on one thread: on threads of their own one may still execute the
    /// breakpoint with which Linux changes its text (QEMU 7.2) when Linux knows no more of it, and
    /// dies of it.
    const fn accelerator(self) -> &'static str {
        match self {
            Self::X86_64 => "tcg,thread=single",
            Self::Aarch64 => "tcg",
        }
    }

    /// The second serial line. Arm's machine has one of its own kind only; the other is on PCI.
    fn second_line(self) -> [&'static str; 2] {
        match self {
            Self::X86_64 => ["-serial", "chardev:answer"],
            Self::Aarch64 => ["-device", "pci-serial,chardev=answer"],
        }
    }

    /// What the kernel calls that line.
    pub fn port(self) -> &'static str {
        match self {
            Self::X86_64 => "/dev/ttyS1",
            Self::Aarch64 => "/dev/ttyS0",
        }
    }

    /// Where the kernel's messages go, from the first on. On x86 without the check that the timer
    /// ticks: on a busy machine QEMU's comes too late for it, and Linux panics.
    fn console(self) -> &'static str {
        match self {
            Self::X86_64 => "earlycon=uart8250,io,0x3f8 console=ttyS0 no_timer_check",
            Self::Aarch64 => "earlycon console=ttyAMA0",
        }
    }
}

/// What `program --version` says in its first line.
///
/// # Errors
/// QEMU is not installed: the error names the package.
pub fn version(arch: Architecture) -> anyhow::Result<String> {
    let (program, package) = arch.qemu();
    let output = match Command::new(program).arg("--version").stdin(Stdio::null()).output() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => bail!(
            "{program} is not installed; Debian has it in {package}: `apt-get install \
             --no-install-recommends {package}`"
        ),
        output => output.with_context(|| format!("cannot start {program}"))?,
    };
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text.lines().next().unwrap_or("QEMU of an unknown version").to_owned())
}

/// What came of a machine.
#[derive(Debug)]
pub struct Outcome {
    /// What its first process answered.
    pub answer: anyhow::Result<Answer>,
    /// All that its console said.
    pub console: String,
}

impl Machine<'_> {
    /// Starts the machine and waits for its answer and its end. Nothing of it is left behind,
    /// whatever happens.
    ///
    /// # Errors
    /// [`Failure::Interrupted`]; QEMU cannot be started, or files cannot be written. A machine
    /// without an answer is an [`Outcome`].
    pub fn run(&self, session: &Session) -> anyhow::Result<Outcome> {
        let folder = tempfile::Builder::new().prefix("slat-emulate-").tempdir();
        let folder = folder.context("cannot make a temporary directory")?;
        let file = |name: &str| folder.path().join(name);
        fs::write(file("initramfs"), self.initramfs).context("cannot write the initramfs")?;
        let complaints = fs::File::create(file("qemu")).context("cannot write QEMU's messages")?;
        let (program, _) = self.arch.qemu();
        let mut command = self.command(program, folder.path());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(complaints);
        // Ctrl-C is for this program, which ends QEMU itself.
        command.process_group(0);
        // SAFETY: between fork and exec only what is safe in a signal handler may be called: prctl
        // is a system call, made directly, and nothing is allocated.
        unsafe {
            command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::KILL))?));
        }
        let child = command.spawn().with_context(|| format!("cannot start {program}"))?;
        let end = self.watch(&mut Running(child), &file("answer"), session)?;
        let text = |name: &str| {
            let bytes = fs::read(file(name)).unwrap_or_default();
            String::from_utf8_lossy(&bytes).replace('\r', "")
        };
        let console = text("console");
        let answer = match end {
            End::Answered(answer) => Ok(*answer),
            end => Err(no_report(format!(
                "{}{}{}",
                end.reason(self.time_limit),
                last_lines("the console", &console),
                last_lines("QEMU", &text("qemu")),
            ))),
        };
        Ok(Outcome { answer, console })
    }

    fn command(&self, program: &str, folder: &Path) -> Command {
        let path = |name: &str| folder.join(name).display().to_string();
        // In options a comma is written twice.
        let line =
            |id: &str, name: &str| format!("file,id={id},path={}", path(name).replace(',', ",,"));
        let mut command = Command::new(program);
        command.args(["-accel", self.arch.accelerator()]).args(self.arch.options());
        // Of two models the last holds.
        if let Some(cpu) = self.cpu {
            command.args(["-cpu", cpu]);
        }
        command.args(["-smp", &self.cpus.to_string()]);
        command.args(["-m", &format!("{}k", self.memory.bytes() >> 10)]);
        if self.numa_nodes > 1 {
            command.args((0..self.numa_nodes).flat_map(|node| self.node(node)));
        }
        command.args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]);
        command.args(["-chardev", &line("console", "console"), "-serial", "chardev:console"]);
        command.args(["-chardev", &line("answer", "answer")]).args(self.arch.second_line());
        command.arg("-kernel").arg(self.kernel).args(["-initrd", &path("initramfs")]);
        // A kernel that panics ends the machine at once: it does not reboot.
        let append = format!("{} panic=-1 {}", self.arch.console(), self.append);
        command.args(["-append", append.trim_end()]);
        command
    }

    /// Options for a node with its share of the CPUs and of the memory.
    fn node(&self, node: u32) -> [String; 4] {
        let share = (self.memory.bytes() / u64::from(self.numa_nodes)) >> 10;
        let from = |node: u32| node * self.cpus / self.numa_nodes;
        let (first, last) = (from(node), from(node + 1) - 1);
        [
            "-object".to_owned(),
            format!("memory-backend-ram,id=node{node},size={share}k"),
            "-numa".to_owned(),
            format!("node,nodeid={node},memdev=node{node},cpus={first}-{last}"),
        ]
    }

    fn watch(
        &self,
        running: &mut Running,
        answer: &Path,
        session: &Session,
    ) -> Result<End, Failure> {
        let begin = Instant::now();
        let mut arrived = Arrived::Nothing;
        let mut read = 0;
        let mut answered = None;
        loop {
            session.check()?;
            // Looked at before the file: what it wrote to its end is then in it.
            let ended = running.0.try_wait().ok().flatten();
            let length = fs::metadata(answer).map_or(0, |file| file.len());
            if length != read {
                read = length;
                arrived = decode(&fs::read(answer).unwrap_or_default());
            }
            if let Arrived::All(found) = arrived {
                arrived = Arrived::All(found.clone());
                let since = *answered.get_or_insert_with(Instant::now);
                if ended.is_some() || since.elapsed() > LAST {
                    return Ok(End::Answered(found));
                }
            } else if let Some(status) = ended {
                return Ok(End::Ended(status, arrived));
            } else if begin.elapsed() > self.time_limit {
                return Ok(End::TooLate(arrived));
            }
            sleep(PERIOD);
        }
    }
}

/// QEMU as it runs; dropped, it is ended.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// How a machine ended.
#[derive(Debug)]
enum End {
    Answered(Box<Answer>),
    Ended(ExitStatus, Arrived),
    TooLate(Arrived),
}

impl End {
    fn reason(&self, limit: Duration) -> String {
        let of_the_report = |arrived: &Arrived| match arrived {
            Arrived::Part(some, all) => format!("after {some} of {all} bytes of its report"),
            Arrived::Damaged => "after a report that was damaged on its way".to_owned(),
            _ => "without a report".to_owned(),
        };
        match self {
            Self::Answered(_) => "the machine answered".to_owned(),
            Self::Ended(status, arrived) => {
                let failed =
                    if status.success() { String::new() } else { format!(" (QEMU: {status})") };
                format!("the machine ended {}{failed}", of_the_report(arrived))
            }
            Self::TooLate(arrived) => format!(
                "the machine was ended after {} (--time-limit) {}",
                humantime::format_duration(limit),
                of_the_report(arrived)
            ),
        }
    }
}

/// What somebody said last, for an error message.
fn last_lines(who: &str, text: &str) -> String {
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    if lines.is_empty() {
        return format!("\n{who} said nothing");
    }
    let last = &lines[lines.len().saturating_sub(LINES)..];
    format!("\nthe last that {who} said:\n  {}", last.join("\n  "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_long_console_the_last_lines_are_shown() {
        let text: String = (0..100).map(|i| format!("line {i}\n\n")).collect();
        let shown = last_lines("the console", &text);
        assert_eq!(shown.lines().count(), LINES + 2);
        assert!(shown.ends_with("line 99") && shown.contains("line 70\n"), "{shown}");
        assert_eq!(last_lines("QEMU", "\n"), "\nQEMU said nothing");
    }

    #[test]
    fn a_machine_is_told_what_it_is_made_of() {
        let machine = Machine {
            arch: Architecture::Aarch64,
            cpus: 3,
            numa_nodes: 2,
            memory: Size(512 << 20),
            kernel: Path::new("Image"),
            initramfs: &[],
            append: "hugepages=4",
            cpu: Some("cortex-a76"),
            time_limit: Duration::from_secs(1),
        };
        let command = machine.command("qemu", Path::new("/t,mp"));
        let words: Vec<&str> = command.get_args().map(|word| word.to_str().unwrap()).collect();
        let after = |option: &str| {
            words.iter().position(|word| *word == option).map(|place| words[place + 1])
        };
        assert_eq!((after("-smp"), after("-m")), (Some("3"), Some("524288k")));
        assert_eq!(after("-chardev"), Some("file,id=console,path=/t,,mp/console"));
        assert!(after("-machine").unwrap().contains("virtualization=on"));
        assert!(words.windows(2).any(|pair| pair == ["-cpu", "cortex-a76"]));
        let nodes = words.iter().filter(|word| word.starts_with("node,"));
        let nodes: Vec<_> = nodes.map(|word| word.rsplit('=').next().unwrap()).collect();
        assert_eq!(nodes, ["0-0", "1-2"]);
        assert!(after("-object").unwrap().ends_with("size=262144k"));
        assert!(after("-append").unwrap().ends_with("panic=-1 hugepages=4"));
    }
}
