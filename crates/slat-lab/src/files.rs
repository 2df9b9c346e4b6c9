//! Files that are written whole or not at all, and the names of those that a run leaves.

use crate::failure::bad_input;
use anyhow::Context;
use std::fs;
use std::io::{self, Write};
use std::path::Path;
use tempfile::NamedTempFile;

/// Name of the file for programs.
pub const RESULTS: &str = "results.json";
/// Name of the file for people.
pub const PAGE: &str = "report.html";

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
pub fn temporary(directory: &Path) -> io::Result<NamedTempFile> {
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
