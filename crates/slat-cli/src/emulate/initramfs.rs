//! What the kernel unpacks before it starts the first process: an archive in cpio's newc format
//! (Documentation/driver-api/early-userspace/buffer-format.rst).

use anyhow::Context;
use cpio::newc::{Builder, trailer};
use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};

const DIRECTORY: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const FILE: u32 = 0o100_644;
const LINK: u32 = 0o120_777;
const CHARACTER_DEVICE: u32 = 0o020_600;

/// An archive that is being written.
pub struct Archive {
    bytes: Vec<u8>,
    /// Two files of one inode would be taken for one.
    inode: u32,
    /// Folders that are there.
    folders: BTreeSet<PathBuf>,
}

impl Archive {
    /// An archive with what every first process needs: a console, and places to mount to.
    ///
    /// # Errors
    /// None in practice: it is written to memory.
    pub fn new() -> anyhow::Result<Self> {
        let mut archive = Self { bytes: Vec::new(), inode: 0, folders: BTreeSet::new() };
        for name in ["dev", "proc", "sys", "tmp", "modules"] {
            archive.add(name, DIRECTORY, (0, 0), &[])?;
        }
        // The kernel opens it for the first process before anything is mounted.
        archive.add("dev/console", CHARACTER_DEVICE, (5, 1), &[])?;
        Ok(archive)
    }

    /// Adds a program.
    ///
    /// # Errors
    /// It is larger than the format allows.
    pub fn program(&mut self, name: &str, contents: &[u8]) -> anyhow::Result<()> {
        self.add(name, PROGRAM, (0, 0), contents)
    }

    /// Adds a file.
    ///
    /// # Errors
    /// It is larger than the format allows.
    pub fn file(&mut self, name: &str, contents: &[u8]) -> anyhow::Result<()> {
        self.add(name, FILE, (0, 0), contents)
    }

    /// Adds a shared library, or what loads it, at its absolute path, and the folders on the way.
    ///
    /// # Errors
    /// It is larger than the format allows, or its path is none that the format takes.
    pub fn library(&mut self, path: &Path, contents: &[u8]) -> anyhow::Result<()> {
        let name = path.strip_prefix("/").with_context(|| path.display().to_string())?;
        let folders: Vec<_> = name.ancestors().skip(1).collect();
        for folder in folders.into_iter().rev().filter(|it| !it.as_os_str().is_empty()) {
            if self.folders.insert(folder.to_owned()) {
                self.add(&folder.to_string_lossy(), DIRECTORY, (0, 0), &[])?;
            }
        }
        self.program(&name.to_string_lossy(), contents)
    }

    /// Adds a symbolic link.
    ///
    /// # Errors
    /// None in practice: it is written to memory.
    pub fn link(&mut self, name: &str, target: &str) -> anyhow::Result<()> {
        self.add(name, LINK, (0, 0), target.as_bytes())
    }

    fn add(
        &mut self,
        name: &str,
        mode: u32,
        device: (u32, u32),
        contents: &[u8],
    ) -> anyhow::Result<()> {
        self.inode += 1;
        let size = u32::try_from(contents.len())
            .with_context(|| format!("{name} is too large for an initial file system"))?;
        let entry = Builder::new(name).ino(self.inode).mode(mode).nlink(1);
        let entry = entry.rdev_major(device.0).rdev_minor(device.1);
        let mut writer = entry.write(&mut self.bytes, size);
        writer.write_all(contents)?;
        writer.finish()?;
        Ok(())
    }

    /// The archive as the kernel takes it.
    ///
    /// # Errors
    /// None in practice: it is written to memory.
    pub fn finish(self) -> anyhow::Result<Vec<u8>> {
        Ok(trailer(self.bytes)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_archive_reads_back_as_it_was_written() {
        let mut archive = Archive::new().unwrap();
        archive.program("slat", b"program").unwrap();
        archive.link("init", "slat").unwrap();
        archive.file("job.json", b"{}").unwrap();
        let bytes = archive.finish().unwrap();
        let mut seen = Vec::new();
        let mut rest = &bytes[..];
        loop {
            let reader = cpio::newc::Reader::new(rest).unwrap();
            let entry = reader.entry().clone();
            if entry.is_trailer() {
                break;
            }
            let mut contents = Vec::new();
            rest = reader.to_writer(&mut contents).unwrap();
            seen.push((entry, contents));
        }
        let find = |name: &str| seen.iter().find(|(entry, _)| entry.name() == name).unwrap();
        assert_eq!((find("slat").0.mode(), &find("slat").1[..]), (PROGRAM, &b"program"[..]));
        assert_eq!((find("init").0.mode(), &find("init").1[..]), (LINK, &b"slat"[..]));
        let console = &find("dev/console").0;
        assert_eq!(console.mode(), CHARACTER_DEVICE);
        assert_eq!((console.rdev_major(), console.rdev_minor()), (5, 1));
        let inodes: std::collections::BTreeSet<u32> =
            seen.iter().map(|(entry, _)| entry.ino()).collect();
        assert_eq!(inodes.len(), seen.len());
    }
}
