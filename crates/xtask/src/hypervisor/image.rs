//! Images that a guest boots: Debian's kernel, and an initial file system for the work.

use crate::static_build;
use anyhow::{Context, ensure};
use slat_kernel::vm::{Architecture, Archive, Debian, Initramfs, Kernel, Request, Teller, kept};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

/// The first process: it does what `slat.work=WORD,WORD,...` on the kernel's command line says.
pub const INIT: &str = include_str!("init.sh");

/// Busybox commands that first processes use.
const APPLETS: [&str; 12] = [
    "sh", "mount", "poweroff", "reboot", "cat", "uname", "echo", "sleep", "nproc", "head", "grep",
    "seq",
];

/// Never set: a fetch can be interrupted only by ending the process.
static NEVER: AtomicBool = AtomicBool::new(false);

/// Returns the path of Debian's arm64 kernel, a raw image; fetches it if necessary.
///
/// # Errors
/// The kernel cannot be fetched.
pub fn kernel(version: Debian) -> anyhow::Result<PathBuf> {
    let tell = Teller { say: &|_| (), note: &|line| eprintln!("{line}") };
    let image = Kernel::kept(version, Architecture::Aarch64, &NEVER, tell)?.image;
    let bytes = fs::read(&image).with_context(|| format!("cannot read {}", image.display()))?;
    // Linux, Documentation/arch/arm64/booting.rst.
    ensure!(bytes.get(56..60) == Some(b"ARM\x64"), "{} is no raw arm64 image", image.display());
    Ok(image)
}

/// Returns the path of Debian's static busybox for arm64; fetches it if necessary.
///
/// # Errors
/// Busybox cannot be fetched.
pub fn busybox() -> anyhow::Result<PathBuf> {
    let kept = kept("packages/busybox-static-arm64", |folder, tree| {
        let (suite, architecture) = ("bookworm", "arm64");
        eprintln!("fetching busybox-static for arm64, about 1 MB");
        let archive = Archive::open(Request { suite, architecture, folder, stop: &NEVER })?;
        archive.unpack("busybox-static", tree)
    })?;
    let places = ["bin/busybox", "usr/bin/busybox"].map(|place| kept.join(place));
    places.into_iter().find(|place| place.is_file()).with_context(|| {
        format!("there is no busybox in {}; remove it to fetch it anew", kept.display())
    })
}

/// Returns an initial file system with this first process, busybox, the work, which is built now,
/// and `files` at their paths.
///
/// # Errors
/// The work cannot be built, busybox cannot be fetched, or a file cannot be read.
pub fn initramfs(init: &str, files: &[(&str, &Path)]) -> anyhow::Result<Vec<u8>> {
    let read =
        |path: &Path| fs::read(path).with_context(|| format!("cannot read {}", path.display()));
    let mut archive = Initramfs::new()?;
    archive.program("init", init.as_bytes())?;
    archive.program("bin/busybox", &read(&busybox()?)?)?;
    for applet in APPLETS {
        archive.link(format!("bin/{applet}"), "busybox")?;
    }
    archive.program("bin/work", &read(&static_build::work()?)?)?;
    for (name, path) in files {
        archive.file(name, &read(path)?)?;
    }
    archive.finish()
}

/// Writes an initial file system to a file.
///
/// # Errors
/// Errors of [`initramfs`], or the file cannot be written.
pub fn write(to: &Path, init: &str, files: &[(&str, &Path)]) -> anyhow::Result<()> {
    let bytes = initramfs(init, files)?;
    fs::write(to, bytes).with_context(|| format!("cannot write {}", to.display()))
}

/// Writes a folder that QEMU can boot from: `Image`, which is a link, and `initrd`.
///
/// # Errors
/// Errors of [`kernel`] and [`write()`], or the folder cannot be written to.
pub fn image_to(folder: &Path, version: Debian, kexec: bool) -> anyhow::Result<()> {
    let failed = || format!("cannot write to {}", folder.display());
    fs::create_dir_all(folder).with_context(failed)?;
    let (kernel, link, initrd) = (kernel(version)?, folder.join("Image"), folder.join("initrd"));
    let _ = fs::remove_file(&link);
    std::os::unix::fs::symlink(&kernel, link).with_context(failed)?;
    write(&initrd, INIT, &[])?;
    if kexec {
        let second = folder.join("initrd-second");
        fs::rename(&initrd, &second).with_context(failed)?;
        write(&initrd, INIT, &[("boot/Image", &kernel), ("boot/initrd", &second)])?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn the_first_process_uses_no_command_that_is_not_packed() {
        let words = INIT.split(|c: char| !c.is_ascii_alphanumeric());
        let used: BTreeSet<&str> = words.collect();
        for command in ["sed", "awk", "tr", "cut", "test", "mkdir", "ls", "seq", "sleep"] {
            assert!(!used.contains(command) || APPLETS.contains(&command), "{command}");
        }
    }
}
