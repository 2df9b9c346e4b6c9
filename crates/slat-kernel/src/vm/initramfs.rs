//! The initial file system, which the kernel unpacks before it starts the first process: an archive
//! in cpio's newc format (Linux, Documentation/driver-api/early-userspace/buffer-format.rst).

use anyhow::Context;
use cpio::newc::{Builder, trailer};
use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};

/// File types and modes of the archive's entries (`inode(7)`).
const DIRECTORY: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const FILE: u32 = 0o100_644;
const LINK: u32 = 0o120_777;
const CHARACTER_DEVICE: u32 = 0o020_600;

/// An initial file system that is being written. Paths start at its root, with or without a slash,
/// and parent directories are added automatically.
pub struct Initramfs {
    bytes: Vec<u8>,
    /// Number of the last inode. Each file has its own, because files with the same inode are hard
    /// links.
    inode: u32,
    /// Directories that exist in the archive.
    folders: BTreeSet<PathBuf>,
}

impl Initramfs {
    /// Makes a file system with a console and mount points, which every first process needs.
    ///
    /// # Errors
    /// None in practice, because it is written to memory.
    pub fn new() -> anyhow::Result<Self> {
        let mut archive = Self { bytes: Vec::new(), inode: 0, folders: BTreeSet::new() };
        for name in ["dev", "proc", "sys", "tmp"] {
            archive.folder(Path::new(name))?;
        }
        // The kernel opens it for the first process before anything is mounted.
        archive.entry(Path::new("dev/console"), CHARACTER_DEVICE, (5, 1), &[])?;
        Ok(archive)
    }

    /// Adds a program or a shared library, with an executable mode.
    ///
    /// # Errors
    /// The file is larger than the format allows.
    pub fn program(&mut self, path: impl AsRef<Path>, contents: &[u8]) -> anyhow::Result<()> {
        self.add(path.as_ref(), PROGRAM, contents)
    }

    /// Adds a file.
    ///
    /// # Errors
    /// The file is larger than the format allows.
    pub fn file(&mut self, path: impl AsRef<Path>, contents: &[u8]) -> anyhow::Result<()> {
        self.add(path.as_ref(), FILE, contents)
    }

    /// Adds a symbolic link.
    ///
    /// # Errors
    /// None in practice, because it is written to memory.
    pub fn link(&mut self, path: impl AsRef<Path>, target: &str) -> anyhow::Result<()> {
        self.add(path.as_ref(), LINK, target.as_bytes())
    }

    fn add(&mut self, path: &Path, mode: u32, contents: &[u8]) -> anyhow::Result<()> {
        let path = path.strip_prefix("/").unwrap_or(path);
        self.folder(path.parent().unwrap_or(path))?;
        self.entry(path, mode, (0, 0), contents)
    }

    fn folder(&mut self, folder: &Path) -> anyhow::Result<()> {
        let folders: Vec<_> = folder.ancestors().collect();
        for folder in folders.into_iter().rev().filter(|it| !it.as_os_str().is_empty()) {
            if self.folders.insert(folder.to_owned()) {
                self.entry(folder, DIRECTORY, (0, 0), &[])?;
            }
        }
        Ok(())
    }

    fn entry(
        &mut self,
        path: &Path,
        mode: u32,
        device: (u32, u32),
        contents: &[u8],
    ) -> anyhow::Result<()> {
        self.inode += 1;
        let name = path.to_string_lossy();
        let size = u32::try_from(contents.len())
            .with_context(|| format!("{name} is too large for an initial file system"))?;
        let entry = Builder::new(&name).ino(self.inode).mode(mode).nlink(1);
        let entry = entry.rdev_major(device.0).rdev_minor(device.1);
        let mut writer = entry.write(&mut self.bytes, size);
        writer.write_all(contents)?;
        writer.finish()?;
        Ok(())
    }

    /// Returns the complete archive.
    ///
    /// # Errors
    /// None in practice, because it is written to memory.
    pub fn finish(self) -> anyhow::Result<Vec<u8>> {
        Ok(trailer(self.bytes)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_archive_reads_back_as_written_with_folders_first() {
        let mut archive = Initramfs::new().unwrap();
        archive.program("/bin/slat", b"program").unwrap();
        archive.link("init", "bin/slat").unwrap();
        archive.file("/boot/deep/job.json", b"{}").unwrap();
        archive.file("bin/other", b"").unwrap();
        let bytes = archive.finish().unwrap();
        let (mut seen, mut rest) = (Vec::new(), &bytes[..]);
        loop {
            let reader = cpio::newc::Reader::new(rest).unwrap();
            let entry = reader.entry().clone();
            if entry.is_trailer() {
                break;
            }
            let mut contents = Vec::new();
            rest = reader.to_writer(&mut contents).unwrap();
            seen.push((entry, String::from_utf8(contents).unwrap()));
        }
        let own: Vec<_> = seen[5..].iter().map(|(entry, text)| (entry.name(), &**text)).collect();
        let expected = [
            ("bin", ""),
            ("bin/slat", "program"),
            ("init", "bin/slat"),
            ("boot", ""),
            ("boot/deep", ""),
            ("boot/deep/job.json", "{}"),
            ("bin/other", ""),
        ];
        assert_eq!(own, expected);
        let modes: Vec<u32> = seen[5..9].iter().map(|(entry, _)| entry.mode()).collect();
        assert_eq!(modes, [DIRECTORY, PROGRAM, LINK, DIRECTORY]);
        let console = &seen.iter().find(|(entry, _)| entry.name() == "dev/console").unwrap().0;
        assert_eq!(console.mode(), CHARACTER_DEVICE);
        assert_eq!((console.rdev_major(), console.rdev_minor()), (5, 1));
        let inodes: BTreeSet<u32> = seen.iter().map(|(entry, _)| entry.ino()).collect();
        assert_eq!(inodes.len(), seen.len());
    }
}
