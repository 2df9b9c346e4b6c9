//! Files that are written completely or not at all, and the names of a run's files.

use crate::failure::bad_input;
use anyhow::Context;
use std::fs;
use std::io::{self, Write};
use std::path::Path;
use tempfile::NamedTempFile;

/// Name of the results file for programs.
pub const RESULTS: &str = "results.json";
/// Name of the report for people.
pub const PAGE: &str = "report.html";

/// Creates the directory, and checks that files can be created in it.
///
/// # Errors
/// Files cannot be created there.
pub fn writable(directory: &Path) -> anyhow::Result<()> {
    let made = fs::create_dir_all(directory).and_then(|()| temporary(directory).map(drop));
    made.map_err(|error| {
        bad_input(format!(
            "--output {}: cannot write there ({error}); name a directory that can be written to",
            directory.display()
        ))
    })
}

/// Writes a file that exists completely or not at all, even if the process is killed or the machine
/// stops.
///
/// # Errors
/// The file cannot be written.
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

/// Creates a file in `directory` under a temporary name. It is deleted when it is dropped.
pub fn temporary(directory: &Path) -> io::Result<NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    let _ = builder.prefix(".slat-");
    #[cfg(unix)]
    {
        // Others may read a report, as any new file.
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(fs::Permissions::from_mode(0o666));
    }
    builder.tempfile_in(directory)
}
