//! Builds a kernel from a copy of the tree, keeps its objects, and one image for each set of edits.

use crate::object::RustObject;
use crate::vm::{Architecture, Teller};
use crate::{EditedTree, Tree, config, copy, tools};
use anyhow::{Context, bail, ensure};
use rustix::process::{Pid, Signal, kill_process_group, set_parent_process_death_signal};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Bytes that must be free: for objects, an image, and a copy of the tree if it cannot be linked.
const ROOM: u64 = 1 << 30;

/// Number of lines of a build's log that are shown when it fails.
const LINES: usize = 25;

/// A kernel to build.
#[derive(Clone, Copy)]
pub struct Build<'a> {
    /// The tree.
    pub tree: &'a Tree,
    /// Its edits.
    pub edited: &'a EditedTree,
    /// The architecture.
    pub arch: Architecture,
    /// Options of the configuration beyond those that every kernel here has, a line each.
    pub options: &'a str,
    /// Folder for the copy, the objects and the images of this tree.
    pub folder: &'a Path,
    /// Number of commands that run at a time.
    pub jobs: usize,
    /// The build ends early once this is true; complete objects stay.
    pub stop: &'a AtomicBool,
    /// Tells the user what happens.
    pub tell: Teller<'a>,
}

/// A kernel that was built.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BuiltKernel {
    /// The image that a machine boots.
    pub image: PathBuf,
    /// Its release, as `uname -r` prints it.
    pub release: String,
    /// Number of commands that were run for it (compilers, the linker and others); 0 if it was
    /// there.
    pub steps: u64,
    /// The complete output of `make`.
    pub log: PathBuf,
}

/// The copy of a tree, with its edits. While it is there, no other build changes it, nor what is
/// built from it.
#[derive(Debug)]
pub struct Sources {
    /// Its folder.
    pub path: PathBuf,
    _lock: File,
}

impl Build<'_> {
    /// Builds the kernel, or returns the one that was built before.
    ///
    /// # Errors
    /// A program that builds it is missing (the error names its package), the disk is full, the
    /// build failed (the error has the end of its log), or `stop` was set.
    pub fn run(self) -> anyhow::Result<BuiltKernel> {
        let mut objects = self.edited.patches.iter().flat_map(|(edit, _)| &edit.objects);
        ensure!(
            objects.next().is_none() || !self.rust_objects().is_empty(),
            "these edits have no object of Rust for {} and Linux {}, so they would change nothing",
            self.arch,
            self.tree.version
        );
        let failed = || format!("cannot write to {}", self.folder.display());
        let objects = self.objects();
        fs::create_dir_all(&objects).with_context(failed)?;
        let _lock = self.lock()?;
        (self.tell.say)("looking for what changed in the tree");
        let options = config::options(self.arch, self.options);
        let how = [&*options, &tools::compiler(self.arch)];
        let (tree, files) = (&self.tree.path, self.files()?);
        let commit = self.tree.commit.as_deref();
        let fingerprint = copy::fingerprint(tree, commit, &files, &how, self.stop)?;
        let kept = self.folder.join("images").join(format!("{}-{fingerprint:016x}", self.arch));
        let log = objects.join(LOG);
        let built = |steps| -> anyhow::Result<BuiltKernel> {
            let release = fs::read_to_string(kept.join("release"))?;
            Ok(BuiltKernel { image: kept.join("image"), release, steps, log: log.clone() })
        };
        if kept.is_dir() {
            return built(0);
        }
        let mut make = self.make(objects)?;
        make.configure(&options)?;
        make.run(&[self.image_target()])?;
        let beside = kept.with_extension("new");
        let _ = fs::remove_dir_all(&beside);
        fs::create_dir_all(&beside).with_context(failed)?;
        fs::copy(make.objects.join(self.image_path()), beside.join("image"))
            .context("the kernel was built, and its image cannot be kept")?;
        // It names addresses if the kernel hangs.
        let _ = fs::copy(make.objects.join(MAP), beside.join(MAP));
        let release = fs::read_to_string(make.objects.join("include/config/kernel.release"))?;
        fs::write(beside.join("release"), release.trim()).with_context(failed)?;
        fs::rename(&beside, &kept).with_context(failed)?;
        built(make.steps)
    }

    /// Compiles only KVM's objects and those that the edits touch; returns the number of commands.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn objects_only(self) -> anyhow::Result<u64> {
        let objects = self.objects();
        fs::create_dir_all(&objects)
            .with_context(|| format!("cannot write to {}", self.folder.display()))?;
        let _lock = self.lock()?;
        let mut make = self.make(objects)?;
        make.configure(&config::options(self.arch, self.options))?;
        make.run(&["prepare"])?;
        let own = self.own();
        let mut targets = vec![format!("{own}kvm/"), "virt/kvm/".to_owned()];
        // `make` compiles objects below the folders above together with them.
        let others = self.edited.files.keys().filter_map(|path| self.object(path));
        let is_other = |path: &String| !targets.iter().any(|folder| path.starts_with(folder));
        let others: Vec<String> = others.filter(is_other).collect();
        targets.extend(others);
        make.run(&targets.iter().map(String::as_str).collect::<Vec<_>>())?;
        Ok(make.steps)
    }

    /// Compiles, after each of the edits in turn, the objects of all files that were touched by
    /// then; returns the number of commands for each. An edit of tests alone needs none. Without
    /// an edit, only checks that the tree can be configured.
    ///
    /// # Errors
    /// As [`run`](Self::run); the error names the edit.
    pub fn each(self) -> anyhow::Result<Vec<u64>> {
        let objects = self.objects();
        fs::create_dir_all(&objects)
            .with_context(|| format!("cannot write to {}", self.folder.display()))?;
        let _lock = self.lock()?;
        let options = config::options(self.arch, self.options);
        if self.edited.patches.is_empty() {
            self.make(objects.clone())?.configure(&options)?;
        }
        let mut steps = Vec::new();
        for (at, (edit, changes)) in self.edited.patches.iter().enumerate() {
            let edited = self.edited.first(at + 1);
            let build = Build { edited: &edited, ..self };
            let targets = build.touched(&edited);
            let is_test = changes.iter().all(|change| change.path.starts_with(TOOLS));
            if is_test || targets.is_empty() {
                steps.push(0);
                continue;
            }
            let mut make = build.make(objects.clone())?;
            make.configure(&options)?;
            make.run(&targets.iter().map(String::as_str).collect::<Vec<_>>())
                .with_context(|| format!("after {}", edit.name))?;
            steps.push(make.steps);
        }
        Ok(steps)
    }

    /// Compiles, before the edits and after each of them, the objects of all files that any of them
    /// touches, with the kernel's additional warnings (`W=1`) and, if it is installed, with sparse
    /// (`C=1`); returns the warnings that each edit adds.
    ///
    /// # Errors
    /// As [`each`](Self::each).
    pub fn warnings(self) -> anyhow::Result<Vec<Vec<String>>> {
        let objects = self.objects();
        fs::create_dir_all(&objects)
            .with_context(|| format!("cannot write to {}", self.folder.display()))?;
        let _lock = self.lock()?;
        let (mut known, mut added) = (BTreeSet::new(), Vec::new());
        for count in 0..=self.edited.patches.len() {
            let edited = self.edited.first(count);
            let targets = self.touched(&edited);
            let mut new = Vec::new();
            if !targets.is_empty() {
                let mut make = Build { edited: &edited, ..self }.make(objects.clone())?;
                make.configure(&config::options(self.arch, self.options))?;
                let how = if tools::has_sparse() { &["W=1", "C=1"][..] } else { &["W=1"] };
                let words = how.iter().copied().chain(targets.iter().map(String::as_str));
                let name = count.checked_sub(1).and_then(|at| self.edited.patches.get(at));
                make.run(&words.collect::<Vec<_>>()).with_context(|| {
                    let name = name.map_or("no edit", |(edit, _)| &edit.name);
                    format!("after {name}")
                })?;
                let log = fs::read_to_string(objects.join(LOG)).unwrap_or_default();
                for line in log.lines().filter(|line| line.contains("warning: ")) {
                    // A line that moved is no new one.
                    let text = line.split_once("warning: ").map_or(line, |(_, text)| text);
                    let file = line.split(':').next().unwrap_or_default();
                    if known.insert(format!("{file}: {text}")) {
                        new.push(line.trim().to_owned());
                    }
                }
            }
            if count > 0 {
                added.push(new);
            }
        }
        Ok(added)
    }

    /// Returns the objects, of files that are there after some edits, of all that any edit touches.
    fn touched(self, edited: &EditedTree) -> Vec<String> {
        let is_there = |path: &&String| {
            !edited.removed.contains(*path)
                && (self.tree.path.join(path).exists() || edited.files.contains_key(*path))
        };
        let touched = self.edited.files.keys().filter(is_there);
        touched.filter_map(|path| self.object(path)).collect()
    }

    /// Returns the folder of the architecture.
    const fn own(self) -> &'static str {
        match self.arch {
            Architecture::X86_64 => "arch/x86/",
            Architecture::Aarch64 => "arch/arm64/",
            Architecture::Riscv64 => "arch/riscv/",
            Architecture::Ppc64le => "arch/powerpc/",
        }
    }

    /// Returns the object that a source of the kernel is compiled to; `None` for other
    /// architectures.
    fn object(self, path: &str) -> Option<String> {
        let is_here = !path.starts_with(TOOLS)
            && (!path.starts_with("arch/") || path.starts_with(self.own()));
        path.strip_suffix(".c").filter(|_| is_here).map(|path| format!("{path}.o"))
    }

    /// Brings the copy up to date, so that its tests can be built, and returns it.
    /// [`run`](Self::run) does not do so if it finds a kernel that was built before.
    ///
    /// # Errors
    /// The copy cannot be written, or `stop` was set.
    pub fn sources(self) -> anyhow::Result<Sources> {
        let lock = self.lock()?;
        let source = self.source();
        copy::make(&self.tree.path, &self.files()?, &source, self.stop)?;
        Ok(Sources { path: source, _lock: lock })
    }

    /// Returns the objects of Rust for this architecture and this version.
    fn rust_objects(&self) -> Vec<&RustObject> {
        let objects = self.edited.patches.iter().flat_map(|(edit, _)| &edit.objects);
        let is_own = |object: &&RustObject| {
            object.file.starts_with(self.own()) && object.is_for(self.tree.version)
        };
        objects.filter(is_own).collect()
    }

    /// Returns what differs from the tree: files of the edits, and objects of Rust, which are
    /// compiled unless they were before.
    fn files(self) -> anyhow::Result<copy::Changes> {
        let texts = self.edited.files.iter();
        let mut files: BTreeMap<_, _> =
            texts.map(|(path, text)| (path.clone(), Some(text.clone().into_bytes()))).collect();
        files.extend(self.edited.removed.iter().map(|path| (path.clone(), None)));
        for object in self.rust_objects() {
            (self.tell.say)("compiling the engine");
            let options = config::options(self.arch, self.options);
            files.insert(object.file.clone(), Some(object.build(&options, self.folder)?));
        }
        Ok(files)
    }

    fn source(self) -> PathBuf {
        self.folder.join("src")
    }

    fn objects(self) -> PathBuf {
        // Each configuration has its own objects.
        let name = match self.options.trim() {
            "" => self.arch.to_string(),
            options => format!("{}-{:08x}", self.arch, crc32fast::hash(options.as_bytes())),
        };
        self.folder.join(name)
    }

    /// Locks the folder: another build of the same tree would change the copy under this one.
    fn lock(self) -> anyhow::Result<File> {
        let path = self.folder.join("lock");
        let failed = || format!("cannot write {}", path.display());
        let lock = File::create(&path).with_context(failed)?;
        if lock.try_lock().is_err() {
            (self.tell.say)("waiting for another build of this tree");
            lock.lock().with_context(failed)?;
        }
        Ok(lock)
    }

    const fn image_target(self) -> &'static str {
        match self.arch {
            Architecture::X86_64 => "bzImage",
            Architecture::Aarch64 | Architecture::Riscv64 => "Image",
            Architecture::Ppc64le => "vmlinux",
        }
    }

    const fn image_path(self) -> &'static str {
        match self.arch {
            Architecture::X86_64 => "arch/x86/boot/bzImage",
            Architecture::Aarch64 => "arch/arm64/boot/Image",
            Architecture::Riscv64 => "arch/riscv/boot/Image",
            Architecture::Ppc64le => "vmlinux",
        }
    }

    /// Returns the end of the release: the edits' names, as far as they fit into 64 characters.
    fn suffix(self) -> String {
        let mut suffix = "-slat".to_owned();
        let mut series = "";
        for (edit, _) in self.edited.patches.iter().rev() {
            let (name, last) = edit.name.split_once('/').unwrap_or((&edit.name, ""));
            if name != series {
                series = name;
                suffix += &match last.split('-').next() {
                    Some("") | None => format!("+{name}"),
                    Some(number) => format!("+{name}.{number}"),
                };
            }
        }
        suffix.chars().take(48).collect()
    }
}

/// Folder of selftests, which are no part of a kernel.
const TOOLS: &str = "tools/";

/// The kernel's list of symbols.
const MAP: &str = "System.map";

/// File with all output of `make`, in the folder of the objects.
const LOG: &str = "slat.log";

/// Runs `make` repeatedly.
struct Make<'a> {
    build: Build<'a>,
    source: PathBuf,
    objects: PathBuf,
    log: File,
    steps: u64,
}

impl<'a> Build<'a> {
    /// Returns a runner of `make`, on a copy of the tree as it is now.
    fn make(self, objects: PathBuf) -> anyhow::Result<Make<'a>> {
        tools::check(self.arch)?;
        let room = rustix::fs::statvfs(self.folder).map(|fs| fs.f_bavail * fs.f_frsize);
        ensure!(
            room.is_ok_and(|room| room >= ROOM),
            "{} has less than 1 GiB free, which a kernel's objects need; make room, or give \
             another place by XDG_CACHE_HOME",
            self.folder.display()
        );
        (self.tell.say)("copying what changed in the tree");
        let source = self.source();
        copy::make(&self.tree.path, &self.files()?, &source, self.stop)?;
        let log = File::create(objects.join(LOG)).context("cannot write the build's log")?;
        Ok(Make { build: self, source, objects, log, steps: 0 })
    }
}

impl Make<'_> {
    fn configure(&mut self, options: &str) -> anyhow::Result<()> {
        let (config, wanted) = (self.objects.join(".config"), self.objects.join("slat.config"));
        // An option that the tree did not have when it was configured is off.
        let known = copy::known_options(&self.source, self.build.stop)?;
        let options = format!("{options}\n# of Kconfig files {known:016x}\n");
        if config.exists() && fs::read_to_string(&wanted).is_ok_and(|text| text == options) {
            return Ok(());
        }
        fs::write(&wanted, options).context("cannot write the configuration")?;
        let all = format!("KCONFIG_ALLCONFIG={}", wanted.display());
        let build = self.build;
        let done = self.run(&[&all, "allnoconfig"]).and_then(|()| {
            let text = fs::read_to_string(&config).context("make wrote no configuration")?;
            let lacking = config::lacking(&text, build.options);
            ensure!(
                lacking.is_empty(),
                "{}: this tree cannot be configured with {}",
                build.tree.name,
                lacking.join(", ")
            );
            let mut objects = build.edited.patches.iter().flat_map(|(edit, _)| &edit.objects);
            objects.try_for_each(|object| object.check(&text))
        });
        if done.is_err() {
            let _ = fs::remove_file(&wanted);
        }
        done
    }

    fn run(&mut self, targets: &[&str]) -> anyhow::Result<()> {
        let log = self.objects.join(LOG);
        let build = self.build;
        let mut make = Command::new("make");
        make.arg("-C").arg(&self.source).arg(format!("O={}", self.objects.display()));
        make.arg(format!("ARCH={}", tools::linux_arch(build.arch)));
        make.arg(format!("CROSS_COMPILE={}", tools::cross_compile(build.arch)));
        make.arg(format!("LOCALVERSION={}", build.suffix())).arg(format!("-j{}", build.jobs));
        // The same sources make the same image for every user and at any time.
        make.args(["KBUILD_BUILD_USER=slat", "KBUILD_BUILD_HOST=slat", "KBUILD_BUILD_VERSION=1"]);
        make.arg("KBUILD_BUILD_TIMESTAMP=2026-01-01 00:00:00 UTC").args(targets);
        make.env_remove("MAKEFLAGS").env_remove("MAKELEVEL").env("LC_ALL", "C");
        make.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(self.log.try_clone()?);
        make.process_group(0);
        // SAFETY: between fork and exec only functions that are safe in a signal handler may be
        // called: prctl is a system call, made directly, and nothing is allocated.
        unsafe {
            make.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::TERM))?));
        }
        let mut running = MakeProcess(make.spawn().context("cannot start make")?);
        let lines = running.0.stdout.take().map(BufReader::new);
        let begin = Instant::now();
        // The pipe ends when make does; no process that make starts outlives it.
        for line in lines.into_iter().flat_map(BufRead::lines).map_while(Result::ok) {
            writeln!(self.log, "{line}").context("cannot write the build's log")?;
            if build.stop.load(Ordering::Relaxed) {
                bail!("interrupted");
            }
            if let Some((what, of)) = step(&line) {
                self.steps += 1;
                let minutes = begin.elapsed().as_secs() / 60;
                (build.tell.say)(&format!("{what} {of} ({} so far, {minutes} min)", self.steps));
            }
        }
        let status = running.0.wait().context("cannot wait for make")?;
        if build.stop.load(Ordering::Relaxed) {
            bail!("interrupted");
        }
        if status.success() {
            return Ok(());
        }
        let text = fs::read_to_string(&log).unwrap_or_default();
        bail!("{}: the build failed ({status}){}", build.tree.name, reason(&text, &log))
    }
}

/// Parses a line in which make names a command: `CC` and a file.
fn step(line: &str) -> Option<(&str, &str)> {
    let (what, of) = line.strip_prefix("  ")?.split_once(' ')?;
    let is_step = !what.is_empty() && what.chars().all(|c| c.is_ascii_uppercase());
    is_step.then(|| (what, of.trim()))
}

/// Returns the reason of a failure, from the log.
fn reason(text: &str, log: &Path) -> String {
    if text.contains("No space left on device") {
        return format!(": the disk is full; all that make said is in {}", log.display());
    }
    let lines: Vec<&str> = text.lines().filter(|line| step(line).is_none()).collect();
    let first = lines.iter().position(|line| line.contains("error:") || line.contains("rror "));
    let begin = first.unwrap_or(lines.len()).min(lines.len().saturating_sub(1)).saturating_sub(2);
    let shown = &lines[begin..lines.len().min(begin + LINES)];
    format!("; all that make said is in {}\n  {}", log.display(), shown.join("\n  "))
}

/// `make` and all processes that it starts; `drop` ends them.
struct MakeProcess(Child);

impl Drop for MakeProcess {
    fn drop(&mut self) {
        if let (Ok(None), Some(pid)) = (self.0.try_wait(), Pid::from_raw(self.0.id() as i32)) {
            // The process group may have ended by itself.
            let _ = kill_process_group(pid, Signal::TERM);
            let _ = self.0.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::edited::tests::{edited, tree};

    #[test]
    fn steps_of_make_are_distinguished_from_its_other_output() {
        assert_eq!(step("  CC      virt/kvm/kvm_main.o"), Some(("CC", "virt/kvm/kvm_main.o")));
        assert_eq!(step("  HOSTCC  scripts/x"), Some(("HOSTCC", "scripts/x")));
        assert_eq!(step("make[1]: Entering directory '/x'"), None);
        assert_eq!(step("  int x;"), None);
    }

    #[test]
    fn a_failed_build_reports_its_first_error_or_a_full_disk() {
        let log = Path::new("/l/slat.log");
        let text =
            "  CC      a.o\na.c:1:2: note: x\na.c:3:4: error: no such field\nmake: *** Error 2\n";
        let shown = reason(text, log);
        assert!(shown.contains("/l/slat.log") && shown.contains("a.c:3:4: error: no such field"));
        assert!(!shown.contains("CC   "), "{shown}");
        let full = reason("a.o: No space left on device\n", log);
        assert!(full.contains("the disk is full"), "{full}");
        assert!(reason("", log).contains("slat.log"));
    }

    #[test]
    fn the_copy_follows_the_edits_whether_or_not_anything_is_built() {
        let (folder, tree) = tree();
        let (edited, plain) = (edited(&tree), EditedTree::new(&tree, Vec::new()).unwrap());
        let stop = AtomicBool::new(false);
        let tell = Teller { say: &|_| {}, note: &|_| {} };
        let (arch, kept) = (Architecture::Aarch64, tempfile::tempdir().unwrap());
        let sources = |edited: &EditedTree| {
            let (tree, folder, stop) = (&tree, kept.path(), &stop);
            Build { tree, edited, arch, options: "", folder, jobs: 1, stop, tell }
                .sources()
                .unwrap()
                .path
        };
        let new = |source: &Path| source.join("virt/kvm/new.c").exists();
        assert!(new(&sources(&edited)) && !new(&sources(&plain)) && new(&sources(&edited)));
        assert!(!new(folder.path()));
    }

    #[test]
    fn edits_with_objects_for_another_architecture_are_refused() {
        let (_folder, tree) = tree();
        let mut edited = EditedTree::new(&tree, Vec::new()).unwrap();
        let series = crate::Edits::read(None).unwrap().find(&["slat-engine".to_owned()]).unwrap();
        edited.patches = series.into_iter().map(|edit| (edit, Vec::new())).collect();
        let (stop, tell) = (AtomicBool::new(false), Teller { say: &|_| {}, note: &|_| {} });
        let kept = tempfile::tempdir().unwrap();
        let (tree, edited, folder, stop) = (&tree, &edited, kept.path(), &stop);
        let build = |arch| Build { tree, edited, arch, options: "", folder, jobs: 1, stop, tell };
        assert_eq!(build(Architecture::Aarch64).rust_objects().len(), 1);
        assert_eq!(build(Architecture::Riscv64).rust_objects().len(), 1);
        let error = build(Architecture::X86_64).run().map(drop).unwrap_err().to_string();
        assert!(error.contains("no object of Rust for x86_64"), "{error}");
    }

    #[test]
    fn a_build_names_its_edits_in_the_release() {
        let (folder, tree) = tree();
        let edited = edited(&tree);
        let stop = AtomicBool::new(false);
        let tell = Teller { say: &|_| {}, note: &|_| {} };
        let arch = Architecture::Aarch64;
        let folder = folder.path();
        let build = Build {
            tree: &tree,
            edited: &edited,
            arch,
            options: "",
            folder,
            jobs: 1,
            stop: &stop,
            tell,
        };
        assert_eq!(build.suffix(), "-slat+walks.2");
    }
}
