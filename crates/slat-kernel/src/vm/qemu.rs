//! QEMU: its programs, the command line of a machine, and running the machine. A run ends at a time
//! limit, and no later than the program that started it.

use crate::vm::stuck;
use anyhow::{Context, bail};
use rustix::process::{Signal, set_parent_process_death_signal};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// The serial console: the name of its channel and of its file.
pub const CONSOLE: &str = "console";

/// How many lines of a text an error message shows.
const LINES: usize = 30;

/// Time between two checks of a running machine.
const PERIOD: Duration = Duration::from_millis(20);

/// A program of QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Qemu {
    /// Name of the program.
    pub program: &'static str,
    /// Name of the Debian package with the program.
    pub package: &'static str,
}

/// The emulator of x86-64.
pub const X86_64: Qemu = Qemu { program: "qemu-system-x86_64", package: "qemu-system-x86" };
/// The emulator of arm64.
pub const AARCH64: Qemu = Qemu { program: "qemu-system-aarch64", package: "qemu-system-arm" };
/// The emulator of 64-bit RISC-V.
pub const RISCV64: Qemu = Qemu { program: "qemu-system-riscv64", package: "qemu-system-misc" };
/// The emulator of Power.
pub const PPC64: Qemu = Qemu { program: "qemu-system-ppc64", package: "qemu-system-ppc" };

impl Qemu {
    /// Returns the first line that `--version` prints.
    ///
    /// # Errors
    /// The program is not installed, and the error names its package.
    pub fn version(self) -> anyhow::Result<String> {
        let Self { program, package } = self;
        let output = match Command::new(program).arg("--version").stdin(Stdio::null()).output() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => bail!(
                "{program} is not installed; Debian has it in {package}: `apt-get install \
                 --no-install-recommends {package}`"
            ),
            output => output.with_context(|| format!("cannot start {program}"))?,
        };
        let text = String::from_utf8_lossy(&output.stdout);
        Ok(text.lines().next().unwrap_or("QEMU of an unknown version").to_owned())
    }
}

/// A machine that is not yet started: QEMU's command line, and the directory for the files that
/// QEMU writes.
#[derive(Debug)]
pub struct Machine {
    command: Command,
    folder: PathBuf,
}

impl Machine {
    /// Makes a machine with a serial console only, which is written to the file [`CONSOLE`] of the
    /// directory. A reset ends the machine instead of restarting it.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub fn new(qemu: Qemu, folder: &Path) -> anyhow::Result<Self> {
        let mut machine = Self { command: Command::new(qemu.program), folder: folder.to_owned() };
        machine.args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]);
        machine.channel(CONSOLE)?;
        machine.args(["-serial", &format!("chardev:{CONSOLE}")]);
        Ok(machine)
    }

    /// Adds words to the command line.
    pub fn args(&mut self, words: impl IntoIterator<Item = impl AsRef<OsStr>>) -> &mut Self {
        self.command.args(words);
        self
    }

    /// Returns the command line after the name of the program.
    #[cfg(test)]
    pub(crate) fn words(&self) -> Vec<String> {
        self.command.get_args().map(|word| word.to_string_lossy().into_owned()).collect()
    }

    /// Adds a channel to which a device can write (`-chardev`), and returns the path of its empty
    /// file.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn channel(&mut self, id: &str) -> anyhow::Result<PathBuf> {
        let path = self.folder.join(id);
        fs::write(&path, "").with_context(|| format!("cannot write {}", path.display()))?;
        // QEMU's options have a comma written twice.
        let escaped = path.display().to_string().replace(',', ",,");
        self.args(["-chardev", &format!("file,id={id},path={escaped}")]);
        Ok(path)
    }

    /// Starts the machine and waits until it ends, until `limit` has passed, or until `look`
    /// returns true. `look` is called repeatedly, and with true once the machine has ended. When
    /// the call returns, QEMU has ended.
    ///
    /// # Errors
    /// QEMU cannot be started, or `look` fails.
    pub fn run(
        mut self,
        limit: Duration,
        mut look: impl FnMut(bool) -> anyhow::Result<bool>,
    ) -> anyhow::Result<MachineEnd> {
        let complaints = self.folder.join("qemu");
        let file = File::create(&complaints).context("cannot write QEMU's messages")?;
        self.command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(file);
        let monitor = self.folder.join("monitor");
        self.args(stuck::monitor(&monitor).into_iter().flatten());
        // A process group of its own, so that Ctrl-C reaches only this program. QEMU ends with it.
        self.command.process_group(0);
        // SAFETY: between fork and exec only async-signal-safe functions may be called. The closure
        // makes one system call (prctl) directly and allocates nothing.
        unsafe {
            self.command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::KILL))?));
        }
        let begin = Instant::now();
        let child = self.command.spawn();
        let child = child
            .with_context(|| format!("cannot start {}", self.command.get_program().display()))?;
        let mut running = QemuProcess(child);
        let status = loop {
            // Checked before `look` reads the output, so that after the end `look` reads all of it.
            let status = running.0.try_wait().context("cannot wait for QEMU")?;
            if look(status.is_some())? || status.is_some() || begin.elapsed() > limit {
                break status;
            }
            sleep(PERIOD);
        };
        // At its limit it may be told where its CPUs are.
        let is_late = status.is_none() && begin.elapsed() > limit;
        let at = if is_late { stuck::addresses(&monitor) } else { Vec::new() };
        drop(running);
        let text = |path: &Path| {
            let bytes = fs::read(path).unwrap_or_default();
            String::from_utf8_lossy(&bytes).replace('\r', "")
        };
        let console = text(&self.folder.join(CONSOLE));
        Ok(MachineEnd { status, console, complaints: text(&complaints), at })
    }
}

/// A running QEMU, which is killed when this is dropped.
struct QemuProcess(Child);

impl Drop for QemuProcess {
    fn drop(&mut self) {
        // Killing fails if it has already ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A machine that has ended.
#[derive(Debug)]
pub struct MachineEnd {
    /// QEMU's exit status, if it ended by itself.
    pub status: Option<ExitStatus>,
    /// The whole output of the console.
    pub console: String,
    /// All error messages of QEMU.
    pub complaints: String,
    /// Addresses that its CPUs were at when the time limit ended it.
    pub at: Vec<u64>,
}

/// Formats the last lines of a text, for the end of an error message.
pub fn last_lines(who: &str, text: &str) -> String {
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

    /// Runs a shell script instead of QEMU.
    fn run(script: &str, limit: Duration, enough: bool) -> (Duration, anyhow::Result<MachineEnd>) {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", script]).env("CONSOLE", folder.path().join(CONSOLE));
        let machine = Machine { command, folder: folder.path().to_owned() };
        let begin = Instant::now();
        let ended = machine.run(limit, |_| Ok(enough));
        (begin.elapsed(), ended)
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_machine_that_ends_says_how_and_what_it_said() {
        let (_, ended) = run("printf 'a\\r\\n' > $CONSOLE; echo b >&2; exit 3", LONG, false);
        let ended = ended.unwrap();
        assert_eq!(ended.status.and_then(|status| status.code()), Some(3));
        assert_eq!((&*ended.console, &*ended.complaints), ("a\n", "b\n"));
    }

    #[test]
    fn a_time_limit_or_a_callback_ends_the_machine() {
        for (limit, enough) in [(Duration::ZERO, false), (LONG, true)] {
            let (took, ended) = run("exec sleep 60", limit, enough);
            assert!(ended.unwrap().status.is_none() && took < LONG / 2, "{took:?}");
        }
    }

    #[test]
    fn a_channel_is_an_empty_file_whose_commas_are_written_twice() {
        let folder = tempfile::Builder::new().prefix("t,").tempdir().unwrap();
        fs::write(folder.path().join(CONSOLE), "of an earlier machine").unwrap();
        let machine = Machine::new(RISCV64, folder.path()).unwrap();
        let path = folder.path().join(CONSOLE);
        let written = path.to_str().unwrap().replace(',', ",,");
        let words = machine.words();
        assert!(words.contains(&format!("file,id=console,path={written}")), "{words:?}");
        assert_eq!(fs::read_to_string(path).unwrap(), "");
    }

    #[test]
    fn an_emulator_that_is_missing_is_named_with_its_package() {
        let missing = Qemu { program: "qemu-system-no-such", package: "qemu-none" };
        let error = missing.version().unwrap_err().to_string();
        assert!(error.contains("apt-get install --no-install-recommends qemu-none"), "{error}");
    }

    #[test]
    fn of_a_long_console_the_last_lines_are_shown() {
        let text: String = (0..100).map(|i| format!("line {i}\n\n")).collect();
        let shown = last_lines("the console", &text);
        assert_eq!(shown.lines().count(), LINES + 2);
        assert!(shown.ends_with("line 99") && shown.contains("line 70\n"), "{shown}");
        assert_eq!(last_lines("QEMU", "\n"), "\nQEMU said nothing");
    }
}
