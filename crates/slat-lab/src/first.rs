//! The first process of an emulated machine. It mounts file systems, runs the command, sends an
//! answer, and ends the machine in any case.

pub mod job;

use anyhow::{Context, bail};
use job::{Answer, Job, LoadModule, Test, TestResult};
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount};
use rustix::system::{RebootCommand, finit_module, reboot};
use rustix::termios::{OptionalActions, tcdrain, tcgetattr, tcsetattr};
use std::ffi::CString;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The program's name as the first process.
pub const NAME: &str = "/init";

/// The name of the program that the first process runs: the same program.
pub const PROGRAM: &str = "/slat";

/// The directory of the command's report.
const REPORT: &str = "/tmp/report";

/// Environment variable that tells the program that times in this machine are meaningless.
const TIMELESS: &str = "SLAT_TIMELESS";

/// Returns whether this process runs where times are meaningless.
pub fn is_timeless() -> bool {
    std::env::var_os(TIMELESS).is_some()
}

/// Returns whether this process is the first one of an emulated machine.
pub fn is_first_process() -> bool {
    // The first process of a container may also be slat, but has no job file.
    std::process::id() == 1
        && std::env::args_os().next().is_some_and(|name| name == NAME)
        && Path::new(job::PATH).exists()
}

/// Does the job. Does not return, because the kernel would panic.
pub fn main() -> ! {
    let job = catch_unwind(read_job).unwrap_or_else(|_| bail!("the first process panicked"));
    let answer = match &job {
        Ok(job) => catch_unwind(AssertUnwindSafe(|| run(job)))
            .unwrap_or_else(|_| bail!("the first process panicked")),
        Err(error) => Err(anyhow::anyhow!("{error:#}")),
    };
    let answer = answer.unwrap_or_else(|error| {
        eprintln!("slat: {error:#}");
        Answer { error: Some(format!("{error:#}")), ..Answer::default() }
    });
    if let Ok(job) = &job {
        if let Err(error) = send(&answer, &job.port) {
            eprintln!("slat: cannot answer over {}: {error:#}", job.port);
        }
        std::thread::sleep(Duration::from_secs(job.linger.into()));
    }
    end()
}

fn read_job() -> anyhow::Result<Job> {
    // Devices come first, because the answer needs them.
    mount_all()?;
    let text = fs::read_to_string(job::PATH).context("there is no job")?;
    serde_json::from_str(&text).context("the job is of another version of slat")
}

fn mount_all() -> anyhow::Result<()> {
    let places = [
        ("devtmpfs", "/dev"),
        ("proc", "/proc"),
        ("sysfs", "/sys"),
        ("tmpfs", "/tmp"),
        ("debugfs", "/sys/kernel/debug"),
        ("tracefs", "/sys/kernel/tracing"),
    ];
    for (kind, place) in places {
        let done = mount(kind, place, kind, MountFlags::empty(), None);
        // Some kernels mount devices themselves. Not every kernel has debugfs or tracefs, which are
        // optional.
        if !place.starts_with("/sys/") && done != Err(Errno::BUSY) {
            done.with_context(|| format!("cannot mount {kind} at {place}"))?;
        }
    }
    Ok(())
}

fn run(job: &Job) -> anyhow::Result<Answer> {
    for module in &job.modules {
        load(module)?;
    }
    if !job.tests.is_empty() {
        let tests = job.tests.iter().map(test).collect::<anyhow::Result<_>>()?;
        let text = |path: &String| Some((path.clone(), fs::read_to_string(path).ok()?));
        let read = job.read.iter().filter_map(text).collect();
        return Ok(Answer { tests, read, ..Answer::default() });
    }
    fs::create_dir(REPORT).context("cannot make a directory for the report")?;
    let mut command = Command::new(PROGRAM);
    command.args(&job.command).args(["--output", REPORT]);
    command.env_clear().env("HOME", "/tmp").env("TMPDIR", "/tmp").env("PATH", "/");
    command.env(TIMELESS, "1");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().context("cannot start the command")?;
    let mut stderr = String::new();
    if let Some(pipe) = child.stderr.take() {
        // The path of its report has no meaning outside.
        let lines = BufReader::new(pipe).lines().map_while(Result::ok);
        for line in lines.filter(|line| !line.is_empty() && !line.contains(REPORT)) {
            eprintln!("{line}");
            stderr += &line;
            stderr.push('\n');
        }
    }
    let status = child.wait().context("cannot wait for the command")?;
    if status.code().is_none() {
        eprintln!("slat: the command ended by {status}");
    }
    let report = fs::read_to_string(Path::new(REPORT).join("results.json")).ok();
    Ok(Answer { exit_code: status.code(), stderr, report, ..Answer::default() })
}

/// Number of bytes at the end of a test's output that are kept.
const SAID: usize = 2000;

fn test(test: &Test) -> anyhow::Result<TestResult> {
    let Test { path, arguments, seconds } = test;
    let failed = || format!("cannot run {path}");
    let log = "/tmp/test";
    // Some tests share memory by files there.
    fs::create_dir_all("/dev/shm").with_context(failed)?;
    let output = fs::File::create(log).with_context(failed)?;
    let mut command = Command::new(path);
    command.args(arguments).env_clear().env("HOME", "/tmp").env("TMPDIR", "/tmp").env("PATH", "/");
    command.env(TIMELESS, "1");
    command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
    let begin = Instant::now();
    let mut child = command.spawn().with_context(failed)?;
    let mut timed_out = false;
    let status = loop {
        if let Some(status) = child.try_wait().with_context(failed)? {
            break status;
        }
        if begin.elapsed() > Duration::from_secs(u64::from(*seconds)) {
            timed_out = true;
            child.kill().with_context(failed)?;
            break child.wait().with_context(failed)?;
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let said = fs::read(log).with_context(failed)?;
    let said = String::from_utf8_lossy(&said[said.len().saturating_sub(SAID)..]).into_owned();
    let seconds = begin.elapsed().as_secs_f64();
    eprintln!("{path} {}: {status}, {seconds:.1} s", arguments.join(" "));
    Ok(TestResult { exit_code: status.code(), timed_out, seconds, output: said })
}

fn load(module: &LoadModule) -> anyhow::Result<()> {
    let LoadModule { name, path, params } = module;
    let words: Vec<String> = params.iter().map(|(name, value)| format!("{name}={value}")).collect();
    let words = CString::new(words.join(" ")).context("a parameter has a zero byte")?;
    let file = fs::File::open(path).with_context(|| format!("cannot read the module {name}"))?;
    finit_module(&file, &words, 0).with_context(|| {
        format!("cannot load the module {name}; the kernel's reason is on the console")
    })?;
    // The kernel also loads a module with a parameter that the module does not have.
    for (param, _) in params {
        let there = Path::new("/sys/module").join(name).join("parameters").join(param);
        if !there.exists() {
            bail!("the module {name} of this kernel has no parameter {param}");
        }
    }
    Ok(())
}

fn send(answer: &Answer, port: &str) -> anyhow::Result<()> {
    let mut line = fs::File::options().read(true).write(true).open(port)?;
    // As a terminal, the line would send a carriage return before each end of line.
    let mut mode = tcgetattr(&line)?;
    mode.make_raw();
    tcsetattr(&line, OptionalActions::Now, &mode)?;
    line.write_all(&job::encode(answer)?)?;
    tcdrain(&line)?;
    Ok(())
}

fn end() -> ! {
    let _ = std::io::stderr().flush();
    // This returns only if it fails. A restart ends the machine, too, because QEMU runs with an
    // option not to restart.
    let _ = reboot(RebootCommand::PowerOff);
    let _ = reboot(RebootCommand::Restart);
    loop {
        std::thread::sleep(Duration::from_secs(1));
    }
}
