//! Runs apt with a separate configuration, state and cache: look up, download, unpack.

use crate::vm::Mirror;
use anyhow::{Context, bail, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// A suite and architecture of the archive, and how to fetch from it.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The suite: `bookworm`, `bookworm-backports`, ...
    pub suite: &'a str,
    /// Debian's name of the architecture: `amd64`, `arm64`, ...
    pub architecture: &'a str,
    /// An empty directory for lists, cache and packages, which only this request uses.
    pub folder: &'a Path,
    /// Stops downloads once it is true.
    pub stop: &'a AtomicBool,
}

/// The package lists of one suite for one architecture, as the mirror has them now.
#[derive(Debug)]
pub struct Archive<'a> {
    request: Request<'a>,
    config: PathBuf,
}

impl<'a> Archive<'a> {
    /// Fetches the lists. apt verifies their signatures.
    ///
    /// # Errors
    /// apt or a mirror is missing, the mirror does not answer, or a signature is wrong.
    pub fn open(request: Request<'a>) -> anyhow::Result<Self> {
        let mirror = Mirror::of_this_machine()?;
        let config = configure(&mirror, &request)?;
        let archive = Self { request, config };
        archive.run(archive.apt("apt-get").arg("update")).with_context(|| {
            let Request { suite, architecture, .. } = request;
            format!("cannot fetch the list of packages of {suite} for {architecture}")
        })?;
        Ok(archive)
    }

    /// Returns the packages on which a package depends, including alternatives.
    ///
    /// # Errors
    /// The suite has no such package.
    pub fn depends(&self, package: &str) -> anyhow::Result<Vec<String>> {
        let mut depends = self.apt("apt-cache");
        depends.args(["depends", "--no-recommends", "--no-suggests", package]);
        let text = self
            .run(&mut depends)
            .with_context(|| format!("{} has no package {package}", self.request.suite))?;
        Ok(dependencies(&text))
    }

    /// Downloads a package, verified by apt, and unpacks it into a directory.
    ///
    /// # Errors
    /// The suite has no such package, its checksum is wrong, or the disk is full.
    pub fn unpack(&self, package: &str, into: &Path) -> anyhow::Result<()> {
        let downloads = self.request.folder.join("download");
        let failed = || format!("cannot fetch the package {package}");
        let _ = fs::remove_dir_all(&downloads);
        fs::create_dir_all(&downloads).with_context(failed)?;
        let mut download = self.apt("apt-get");
        download.args(["download", package]).current_dir(&downloads);
        self.run(&mut download).with_context(failed)?;
        let file = fs::read_dir(&downloads).with_context(failed)?.next();
        let file = file.with_context(failed)?.with_context(failed)?.path();
        fs::create_dir_all(into).with_context(failed)?;
        let mut unpack = Command::new("dpkg-deb");
        self.run(unpack.arg("--extract").arg(&file).arg(into)).with_context(failed)?;
        fs::remove_dir_all(&downloads).with_context(failed)
    }

    /// Returns a command of apt's that uses only the system's network configuration.
    fn apt(&self, name: &str) -> Command {
        let mut command = Command::new(name);
        command.arg("-c").arg(&self.config).arg("-q").env("LC_ALL", "C");
        command
    }

    /// Runs a command until it ends or the request is stopped, and returns its output.
    fn run(&self, command: &mut Command) -> anyhow::Result<String> {
        run(command, self.request.stop)
    }
}

/// Writes an apt configuration that keeps all files below `request.folder`.
fn configure(mirror: &Mirror, request: &Request) -> anyhow::Result<PathBuf> {
    let Request { suite, architecture, folder, .. } = request;
    let failed = || format!("cannot write to {}", folder.display());
    let folder = fs::canonicalize(folder).with_context(failed)?;
    let path = folder.to_str().context("apt takes no path that is not UTF-8")?;
    ensure!(!path.contains('"'), "apt takes no path with a quote in it: {path}");
    fs::create_dir_all(folder.join("lists/partial")).with_context(failed)?;
    fs::create_dir_all(folder.join("cache/archives/partial")).with_context(failed)?;
    fs::write(folder.join("status"), "").with_context(failed)?;
    fs::write(folder.join("mirror.sources"), mirror.source(suite)).with_context(failed)?;
    // The system's hooks are cleared, because they would run on the system's cache.
    let text = format!(
        r#"#clear APT::Architectures;
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
APT::Architecture "{architecture}";
APT::Architectures {{ "{architecture}"; }};
APT::Sandbox::User "";
APT::Update::Error-Mode "any";
Acquire::Languages "none";
Dir::State "{path}";
Dir::State::status "{path}/status";
Dir::State::lists "{path}/lists";
Dir::Cache "{path}/cache";
Dir::Etc::sourcelist "{path}/mirror.sources";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
"#
    );
    let config = folder.join("apt.conf");
    fs::write(&config, text).with_context(failed)?;
    Ok(config)
}

fn run(command: &mut Command, stop: &AtomicBool) -> anyhow::Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let started =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = started.with_context(|| {
        format!("cannot start {name}; packages of Debian's are fetched on Debian systems only")
    })?;
    // Both pipes are read while the command runs, because it blocks when one is full.
    let (out, err) = (child.stdout.take(), child.stderr.take());
    let (out, err) = (thread::spawn(|| drained(out)), thread::spawn(|| drained(err)));
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if stop.load(Ordering::Relaxed) {
            let _ = child.kill();
            let _ = child.wait();
            bail!("interrupted");
        }
        thread::sleep(Duration::from_millis(20));
    };
    let (out, err) = (out.join().unwrap_or_default(), err.join().unwrap_or_default());
    let reasons: Vec<&str> =
        err.lines().chain(out.lines()).filter(|line| line.starts_with("E:")).collect();
    match reasons.is_empty() {
        _ if status.success() => Ok(out),
        true => {
            bail!("{name}: {}", err.lines().next_back().unwrap_or("it failed and does not say why"))
        }
        false => bail!("{name}: {}", reasons.join(" ")),
    }
}

fn drained(pipe: Option<impl std::io::Read>) -> String {
    let mut bytes = Vec::new();
    let _ = pipe.map(|mut pipe| pipe.read_to_end(&mut bytes));
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Parses the names that `apt-cache depends` prints. Names without a package are in angle brackets.
fn dependencies(text: &str) -> Vec<String> {
    let name = |line: &str| {
        let (kind, name) = line.trim().trim_start_matches('|').split_once(": ")?;
        let name = name.split(':').next()?;
        (kind == "Depends" && !name.starts_with('<')).then(|| name.to_owned())
    };
    text.lines().filter_map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_metapackage_names_what_it_stands_for() {
        let text = "linux-image-cloud-arm64\n  Depends: linux-image-6.1.0-50-cloud-arm64\n \
                    |Depends: <none>\n  Depends: libc6:arm64\n  Breaks: other\n";
        assert_eq!(dependencies(text), ["linux-image-6.1.0-50-cloud-arm64", "libc6"]);
    }

    #[test]
    fn the_configuration_names_no_file_of_the_systems() {
        let folder = tempfile::tempdir().unwrap();
        let mirror = Mirror { uri: "https://a.example/archive".into(), signed_by: None };
        let stop = AtomicBool::new(false);
        let request = Request {
            suite: "bookworm",
            architecture: "arm64",
            folder: folder.path(),
            stop: &stop,
        };
        let text = fs::read_to_string(configure(&mirror, &request).unwrap()).unwrap();
        let own = fs::canonicalize(folder.path()).unwrap();
        for line in text.lines().filter(|line| line.starts_with("Dir::")) {
            let path = line.split('"').nth(1).unwrap();
            assert!(path == "/dev/null" || path.starts_with(own.to_str().unwrap()), "{line}");
        }
        assert!(text.contains("APT::Architectures { \"arm64\"; };"), "{text}");
        let sources = fs::read_to_string(own.join("mirror.sources")).unwrap();
        assert!(sources.contains("Suites: bookworm\n") && !sources.contains("Signed-By"));
    }

    #[test]
    fn a_command_that_is_to_stop_is_stopped() {
        let stop = AtomicBool::new(true);
        let begin = std::time::Instant::now();
        let error = run(Command::new("sleep").arg("60"), &stop).unwrap_err();
        assert_eq!(error.to_string(), "interrupted");
        assert!(begin.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn what_apt_complains_of_is_the_error() {
        let stop = AtomicBool::new(false);
        let script = "echo noise; echo 'E: no such thing' >&2; exit 100";
        let error = run(Command::new("sh").args(["-c", script]), &stop).unwrap_err();
        assert_eq!(error.to_string(), "sh: E: no such thing");
        let error = run(&mut Command::new("slat-no-such-command"), &stop).unwrap_err();
        assert!(error.to_string().contains("Debian systems only"), "{error}");
    }
}
