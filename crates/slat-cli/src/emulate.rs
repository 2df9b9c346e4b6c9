//! Runs `slat` in an emulated machine, which may have another kernel, another architecture, or a
//! second-stage translation that this host lacks, and returns the report of what was counted there.
//!
//! The machine is QEMU without acceleration, with a kernel and an initramfs. The initramfs has the
//! program, its libraries, kernel modules and the job. The program is both the first process
//! ([`slat_lab::first`]) and the command. Nothing is installed and nothing needs root.

mod binary;
mod kernel;
pub mod machine;
mod probes;
mod report;

pub use report::{EmulatedReport, Emulator};

use crate::check;
use crate::cli::{Cli, Command, EmulateArgs};
use anyhow::Context;
use binary::Program;
pub use binary::choose as program;
use clap::Parser;
use slat_kernel::vm::modules::{self, Module};
use slat_kernel::vm::{Architecture, Initramfs, Kernel, Linux};
use slat_lab::failure::{bad_input, no_report};
use slat_lab::first::job::{self, Answer, Job, LoadModule};
use slat_lab::first::{NAME, PROGRAM};
use slat_lab::session::Session;
use std::path::Path;
use std::time::Duration;

/// The outcome of a command in an emulated machine.
#[derive(Debug)]
pub struct Run {
    /// All output of the console.
    pub console: String,
    /// How the command ended and its report, or why it did not end.
    pub end: anyhow::Result<CommandEnd>,
}

/// A command that ran to its end.
#[derive(Debug)]
pub struct CommandEnd {
    /// Exit code of the command.
    pub exit_code: u8,
    /// Its output on stderr.
    pub stderr: String,
    /// Its report, if it wrote one.
    pub report: Option<EmulatedReport>,
    /// The report of `slat check`.
    pub checked: Option<check::Report>,
}

/// Runs a command in the machine that `args` describes.
///
/// # Errors
/// [`Failure::BadInput`](slat_lab::failure::Failure::BadInput) for options that cannot be right,
/// [`Failure::Interrupted`](slat_lab::failure::Failure::Interrupted), or an error for what is
/// missing. Failures inside a machine that ran are in [`Run::end`].
pub fn run(args: &EmulateArgs, session: &mut Session) -> anyhow::Result<Run> {
    let arch = architecture(args)?;
    let steps = 1 + u64::from(args.boots) + u64::from(!args.probe.is_empty());
    session.start(&format!("emulate {arch}"), steps);
    let ready = Ready::new(args, session)?;
    session.step();
    session.say("running it");
    let mut run = ready.boot(0, session)?;
    let mut reports = Vec::new();
    for number in 1..args.boots {
        // A boot that failed tells more than those before it.
        let Ok(CommandEnd { exit_code: 0, report: Some(_), .. }) = &run.end else { break };
        session.step();
        session.say(&format!("boot {} of {}", number + 1, args.boots));
        let next = ready.boot(number, session)?;
        let before = std::mem::replace(&mut run, next);
        run.console.insert_str(0, &before.console);
        reports.extend(before.end.ok().and_then(|ended| ended.report));
    }
    if let Ok(CommandEnd { report, .. }) = &mut run.end
        && args.boots > 1
    {
        reports.extend(report.take());
        *report = EmulatedReport::join(reports)?;
    }
    let measured = run.end.as_ref().is_ok_and(|ended| ended.exit_code == 0);
    if measured && !ready.probes.is_empty() {
        session.step();
        session.say("counting calls");
        let counted = ready.boot_with_probes(session)?;
        run.console += &counted.console;
        run.end = run.end.and_then(|ended| probes::merge(ended, counted.end?));
    }
    session.finish();
    Ok(run)
}

fn architecture(args: &EmulateArgs) -> anyhow::Result<Architecture> {
    args.arch.or_else(Architecture::of_this_machine).ok_or_else(|| {
        bad_input("this machine's own architecture cannot be emulated; name one by --arch")
    })
}

/// A machine with all its parts, ready to boot.
#[derive(Debug)]
pub struct Ready<'a> {
    args: &'a EmulateArgs,
    words: Vec<String>,
    /// The history that `slat check` is to run.
    history: Option<File>,
    arch: Architecture,
    program: Program,
    other: Option<Program>,
    emulator: Emulator,
    kernel: Kernel,
    modules: Vec<Module>,
    append: String,
    probes: Vec<String>,
    limit: Duration,
}

impl<'a> Ready<'a> {
    /// Checks the options, and finds or builds the kernel.
    ///
    /// # Errors
    /// As [`run`].
    pub fn new(args: &'a EmulateArgs, session: &Session) -> anyhow::Result<Self> {
        let arch = architecture(args)?;
        let (name, words) = match args.run {
            // The other program parses its arguments itself.
            Some(_) => ("slat", &args.command[..]),
            None if arch.runs_slat() => check_command(&args.command)?,
            None => ("slat", check_guest(&args.command, arch)?),
        };
        let (nodes, cpus) = (args.numa_nodes, args.cpus());
        if args.count_instructions && cpus > 1 {
            return Err(bad_input(format!(
                "--count-instructions --cpus {cpus}: instructions are counted on one CPU only"
            )));
        }
        if nodes > cpus || !args.memory.bytes().is_multiple_of(u64::from(nodes) << 20) {
            return Err(bad_input(format!(
                "{nodes} NUMA nodes do not share {cpus} CPUs and {} of memory in whole MiB",
                args.memory
            )));
        }
        let program = binary::choose(args.parts.binary.as_deref(), name, arch)?;
        let other =
            args.run.as_deref().map(|path| binary::choose(Some(path), name, arch)).transpose()?;
        let emulator = Emulator::new(arch, args, arch.qemu().version()?);
        let probes = match other {
            Some(_) => Vec::new(),
            None => probes::asked(args, words, arch),
        };
        let (words, history) = with_history(words)?;
        let kernel = kernel::find(args, arch, session)?;
        let mut wanted = args.module.clone();
        if args.free_page_reporting {
            if kernel.modules.is_none() {
                return Err(bad_input(
                    "--free-page-reporting takes the module virtio_balloon, and this kernel has no \
                     modules; give them by --modules DIR",
                ));
            }
            wanted.push("virtio_balloon".to_owned());
        }
        let mut modules = kernel::modules(&kernel, arch, &wanted)?;
        if words.first().is_some_and(|word| word == CHECK) {
            modules.extend(kernel::swap_modules(&kernel));
        }
        let mut append = modules::give(&args.module_param, &mut modules);
        append.extend(args.parts.append.clone());
        let append = append.join(" ");
        let limit = args.time_limit;
        Ok(Self {
            args,
            words,
            history,
            arch,
            program,
            other,
            emulator,
            kernel,
            modules,
            append,
            probes,
            limit,
        })
    }

    /// Returns the functions whose calls are to be counted, in a boot of their own.
    pub fn probes(&self) -> &[String] {
        &self.probes
    }

    /// Ends later boots after ten times what a boot of another kernel took, if that is less than
    /// the time limit, and at least a minute: a kernel that hangs need not wait for that.
    pub fn bound(&mut self, took: Duration) {
        self.limit = self.limit.min((took * 10).max(Duration::from_secs(60)));
    }

    /// Boots the machine and runs the command. Boots of other numbers have other sizes of the
    /// initial file system: the kernel's work lies elsewhere in memory and time, as if the machine
    /// had another load.
    ///
    /// # Errors
    /// As [`run`].
    pub fn boot(&self, number: u32, session: &Session) -> anyhow::Result<Run> {
        self.run(&self.words, number, session)
    }

    /// Boots it once more, and counts calls.
    ///
    /// # Errors
    /// As [`run`].
    pub fn boot_with_probes(&self, session: &Session) -> anyhow::Result<Run> {
        self.run(&probes::words(&self.words, &self.probes), 0, session)
    }

    fn run(&self, words: &[String], number: u32, session: &Session) -> anyhow::Result<Run> {
        let args = self.args;
        let initramfs = self.initramfs(words, number)?;
        let linux = Linux {
            arch: self.arch,
            cpus: args.cpus(),
            memory: args.memory.bytes(),
            numa_nodes: args.numa_nodes,
            kernel: &self.kernel.image,
            initramfs: &initramfs,
            append: &self.append,
            cpu: args.parts.cpu.as_deref(),
            reports_free_pages: args.free_page_reporting,
            counts_instructions: args.count_instructions,
        };
        let outcome = machine::run(&linux, self.limit, args.keep_running, session)?;
        let mut end = outcome.answer.and_then(|answer| ended(answer, self.emulator.clone()));
        if let Ok(CommandEnd { checked: Some(report), .. }) = &mut end {
            report.history = self.history.as_ref().map(|(path, _)| path.clone());
        }
        Ok(Run { console: outcome.console, end })
    }

    /// Returns the initramfs, which has all files of the machine.
    fn initramfs(&self, words: &[String], number: u32) -> anyhow::Result<Vec<u8>> {
        let mut archive = Initramfs::new()?;
        add_program(&mut archive, &self.program)?;
        let mut load = Vec::new();
        for Module { name, image, params } in &self.modules {
            let path = format!("/modules/{name}.ko");
            archive.file(&path, image)?;
            load.push(LoadModule { name: name.clone(), path, params: params.clone() });
        }
        let mut job = Job {
            modules: load,
            command: words.to_vec(),
            tests: Vec::new(),
            read: Vec::new(),
            port: self.arch.port().to_owned(),
            linger: if self.args.free_page_reporting { machine::LINGER } else { 0 },
        };
        if let Some(other) = &self.other {
            archive.program(OTHER, &other.bytes)?;
            // Libraries that both programs need are already in the archive.
            let ours = |path: &Path| self.program.libraries.iter().any(|(own, _)| own == path);
            for (path, bytes) in other.libraries.iter().filter(|(path, _)| !ours(path)) {
                archive.program(path, bytes)?;
            }
            let seconds = self.args.time_limit.as_secs().try_into().unwrap_or(u32::MAX);
            let arguments = std::mem::take(&mut job.command);
            job.tests.push(job::Test { path: OTHER.to_owned(), arguments, seconds });
        }
        if !job.command.is_empty() && !self.arch.runs_slat() {
            let seconds = self.args.time_limit.as_secs().try_into().unwrap_or(u32::MAX);
            let arguments = std::mem::take(&mut job.command).split_off(1);
            job.tests.push(job::Test { path: PROGRAM.to_owned(), arguments, seconds });
        }
        if let Some((_, history)) = &self.history {
            archive.file(HISTORY, history)?;
        }
        if number > 0 {
            archive.file("/boot", &vec![0; padding(number)])?;
        }
        add_job(&mut archive, &job, self.arch)?;
        archive.finish()
    }
}

/// Path in the machine of a program that runs in place of slat.
const OTHER: &str = "/other";

/// The most by which the initial file systems of boots differ. Unpacking it takes about as many
/// instructions as there are between two ticks.
const PADDING: u64 = 8 << 20;

/// Returns the bytes of a boot's additional file: numbers that follow each other are far apart.
fn padding(number: u32) -> usize {
    // The golden ratio, as a part of 2^32.
    let part = number.wrapping_mul(0x9e37_79b9);
    ((u64::from(part) * PADDING) >> 32) as usize
}

/// Adds the program that is the first process, and its libraries.
pub fn add_program(archive: &mut Initramfs, program: &Program) -> anyhow::Result<()> {
    archive.program(PROGRAM, &program.bytes)?;
    for (path, bytes) in &program.libraries {
        archive.program(path, bytes)?;
    }
    archive.link(NAME, PROGRAM)
}

/// Adds the job that the first process reads.
pub fn add_job(archive: &mut Initramfs, job: &Job, arch: Architecture) -> anyhow::Result<()> {
    if !arch.runs_slat() {
        return archive.file("/job.lines", job.lines().as_bytes());
    }
    archive.file(job::PATH, &serde_json::to_vec(job)?)
}

fn ended(answer: Answer, emulator: Emulator) -> anyhow::Result<CommandEnd> {
    let Answer { error, mut exit_code, mut stderr, report, tests, read: _ } = answer;
    if let Some(error) = error {
        return Err(no_report(format!("in the machine: {error}")));
    }
    // A program that ran in place of slat gives output and an exit code, and no report.
    if let Some(ran) = tests.into_iter().next() {
        (exit_code, stderr) = (ran.exit_code, ran.output);
    }
    let Some(exit_code) = exit_code.and_then(|code| u8::try_from(code).ok()) else {
        return Err(no_report(format!("in the machine a signal ended the command\n{stderr}")));
    };
    let checked = report.as_ref().and_then(|text| serde_json::from_str(text).ok());
    let report = report
        .filter(|_| checked.is_none())
        .map(|text| EmulatedReport::read(&text, emulator))
        .transpose();
    let report = report.context("the report that came from the machine is none")?;
    Ok(CommandEnd { exit_code, stderr, report, checked })
}

/// Name of the command that runs where slat does not.
pub const GUEST: &str = "guest";

/// Checks the command for a machine in which slat does not run.
fn check_guest(words: &[String], arch: Architecture) -> anyhow::Result<&[String]> {
    match words.first() {
        Some(first) if first == GUEST => Ok(words),
        _ => Err(bad_input(format!(
            "slat itself does not run on {arch}, because the crate kvm-ioctls has no calls of KVM \
             for it; give `-- guest [-b] [-p PAGES] [-r ROUNDS] [-s]`, which runs a guest and \
             ages it"
        ))),
    }
}
/// The command that moves pages by swap as well.
pub const CHECK: &str = "check";

/// A file of this host, by its path, and what it holds.
type File = (String, Vec<u8>);

/// Path in the machine of a history.
const HISTORY: &str = "/history.json";

/// Reads the file of a history (`check --history FILE`), which the words name by its path in the
/// machine then.
fn with_history(words: &[String]) -> anyhow::Result<(Vec<String>, Option<File>)> {
    let mut words = words.to_vec();
    let is_check = words.first().is_some_and(|word| word == CHECK);
    let at = words.iter().position(|word| word == "--history").map(|at| at + 1);
    let Some(word) = at.filter(|_| is_check).and_then(|at| words.get_mut(at)) else {
        return Ok((words, None));
    };
    let path = std::mem::replace(word, HISTORY.to_owned());
    let read = std::fs::read(&path);
    let history = read.map_err(|error| bad_input(format!("--history {path}: {error}")))?;
    Ok((words, Some((path, history))))
}

/// Name of the program that measures Slat's own tables, which may also run in a machine.
const BENCH: &str = "slat-bench";

/// Checks the command before a machine starts. Returns the program that it is for, and the words of
/// the program. The words of `slat-bench` are checked only for options of output, because that
/// program parses them itself.
///
/// # Errors
/// Returns [`Failure::BadInput`](slat_lab::failure::Failure::BadInput) for words that are not a
/// command with a report, or that name an output.
fn check_command(words: &[String]) -> anyhow::Result<(&'static str, &[String])> {
    let elsewhere = || {
        bad_input(
            "the report comes out of the machine by itself: give --output FILE and --json before \
             `--`",
        )
    };
    if let Some((first, rest)) = words.split_first()
        && first == BENCH
    {
        let own = slat_lab::child::without_output(rest).len() == rest.len();
        return if own { Ok((BENCH, rest)) } else { Err(elsewhere()) };
    }
    let line = std::iter::once("slat").chain(words.iter().map(String::as_str));
    let cli = Cli::try_parse_from(line)
        .map_err(|error| bad_input(format!("the command for the machine:\n{}", error.render())))?;
    let own = match &cli.command {
        Some(Command::Bench { scenario }) => &scenario.out,
        Some(Command::Tune { what }) => &what.out,
        Some(Command::Check(args)) => {
            let own = args.output.is_some() || args.json || args.list;
            return if own { Err(elsewhere()) } else { Ok(("slat", words)) };
        }
        _ => {
            return Err(bad_input(format!(
                "`slat {}` measures nothing; in a machine run `bench`, `tune`, `check` or \
                 `slat-bench`",
                words.join(" ")
            )));
        }
    };
    if own.output.is_some() || own.print.json || own.print.markdown {
        return Err(elsewhere());
    }
    Ok(("slat", words))
}

#[cfg(test)]
mod tests {
    use super::*;
    use slat_lab::failure::Failure;

    fn refusal(words: &str) -> String {
        let words: Vec<String> = words.split_whitespace().map(str::to_owned).collect();
        let error = check_command(&words).unwrap_err();
        assert!(matches!(error.downcast_ref(), Some(Failure::BadInput(_))), "{error}");
        error.to_string()
    }

    #[test]
    fn a_machine_without_slat_runs_its_guest_only() {
        let words = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let guest = words("guest -p 64");
        assert_eq!(check_guest(&guest, Architecture::Ppc64le).unwrap(), guest);
        let error = check_guest(&words("bench age"), Architecture::Ppc64le).unwrap_err();
        assert!(slat_lab::failure::is_bad_input(&error), "{error}");
        assert!(error.to_string().contains("`-- guest "), "{error}");
    }

    #[test]
    fn commands_that_report_are_taken() {
        for words in
            ["bench dirty-log --memory 64M", "tune dirty-log", "slat-bench check --histories 3"]
        {
            let words: Vec<String> = words.split_whitespace().map(str::to_owned).collect();
            check_command(&words).unwrap_or_else(|error| panic!("{words:?}: {error}"));
        }
    }

    #[test]
    fn the_file_of_a_history_goes_into_the_machine() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, "{}").unwrap();
        let path = file.path().to_str().unwrap().to_owned();
        let words = ["check", "--history", &path].map(str::to_owned);
        let (words, history) = with_history(&words).unwrap();
        assert_eq!((&*words[2], history), (HISTORY, Some((path, b"{}".to_vec()))));
        assert!(with_history(&["check".into(), "--history".into(), "/no/such".into()]).is_err());
    }

    #[test]
    fn a_wrong_or_reportless_command_is_refused_before_any_machine() {
        assert!(refusal("bench dirty-log --memory lots").contains("64G"));
        assert!(refusal("bensh").contains("bench"));
        assert!(refusal("completions bash").contains("measures nothing"));
        assert!(refusal("emulate -- bench age").contains("measures nothing"));
        assert!(refusal("bench age -o there").contains("before `--`"));
        assert!(refusal("slat-bench check -o there").contains("before `--`"));
    }
}
