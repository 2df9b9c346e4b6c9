//! Where results go: stdout, and two files in a directory.

use crate::failure::bad_input;
use crate::record::Report;
use crate::report::{html, json};
use anyhow::Context;
use std::fs;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// Name of the file for programs.
pub const RESULTS: &str = "results.json";
/// Name of the file for people.
pub const PAGE: &str = "report.html";

/// A directory that two files can be written to, as was found out before measuring.
///
/// Nothing stays in it while measuring: a process that is killed leaves no file behind.
pub struct Output {
    directory: PathBuf,
}

impl Output {
    /// Makes the directory, and finds out whether files can be made in it.
    pub fn prepare(directory: &Path) -> anyhow::Result<Self> {
        writable(directory)?;
        for name in [RESULTS, PAGE] {
            let path = directory.join(name);
            if path.is_dir() {
                return Err(bad_input(format!(
                    "--output {}: {name} in it is a directory; move it away, or name another",
                    directory.display()
                )));
            }
        }
        Ok(Self { directory: directory.to_owned() })
    }

    /// Whether results of an earlier run stand there.
    pub fn has_results(&self) -> bool {
        self.directory.join(RESULTS).exists()
    }

    /// Writes both files, each complete or not at all, and says where they are.
    pub fn write(self, report: &Report) -> anyhow::Result<PathBuf> {
        let directory = self.directory;
        let write = |text: &str| -> io::Result<NamedTempFile> {
            let mut file = temporary(&directory)?;
            file.write_all(text.as_bytes())?;
            Ok(file)
        };
        let name = directory.display().to_string();
        let failed = || format!("cannot write {RESULTS} and {PAGE} to {name}");
        let results = write(&json::render(report)?).with_context(failed)?;
        let page = write(&html::render(report)).with_context(failed)?;
        let _ = results.persist(directory.join(RESULTS)).with_context(failed)?;
        let _ = page.persist(directory.join(PAGE)).with_context(failed)?;
        Ok(directory)
    }
}

/// Makes the directory, and finds out whether files can be made in it.
///
/// # Errors
/// They cannot.
pub fn writable(directory: &Path) -> anyhow::Result<()> {
    let made = fs::create_dir_all(directory).and_then(|()| temporary(directory).map(drop));
    made.map_err(|error| {
        bad_input(format!(
            "--output {}: cannot write there ({error}); name a directory that can be written to",
            directory.display()
        ))
    })
}

/// Writes a file that is there complete or not at all, whoever kills this process, or the machine.
///
/// # Errors
/// It cannot be written.
pub fn write_whole(path: &Path, text: &[u8]) -> anyhow::Result<()> {
    let write = || -> io::Result<()> {
        let mut file = temporary(path.parent().unwrap_or(Path::new(".")))?;
        file.write_all(text)?;
        file.as_file().sync_all()?;
        let _ = file.persist(path)?;
        Ok(())
    };
    write().with_context(|| format!("cannot write {}", path.display()))
}

/// A new file in `directory`, under a name that nobody reads, gone when dropped.
pub(super) fn temporary(directory: &Path) -> io::Result<NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    let _ = builder.prefix(".slat-");
    #[cfg(unix)]
    {
        // A report is to be read by others as any new file would be.
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(fs::Permissions::from_mode(0o666));
    }
    builder.tempfile_in(directory)
}

/// Prints to stdout, for as long as somebody reads it.
pub fn print(text: &str) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if !super::nobody_reads(&error) => Err(error).context("cannot write to stdout"),
        _ => Ok(()),
    }
}

/// Columns that a table may take: those of the terminal, or what reads well in a file.
pub fn width() -> u16 {
    const IN_A_FILE: u16 = 120;
    if !io::stdout().is_terminal() {
        return IN_A_FILE;
    }
    comfy_table::Table::new().width().map_or(IN_A_FILE, |width| width.clamp(60, 160))
}
