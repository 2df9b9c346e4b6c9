//! Where results go: stdout, and two files in a directory.

use crate::failure::bad_input;
use crate::report::{Report, html, json};
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
pub struct Output {
    directory: PathBuf,
    results: NamedTempFile,
    page: NamedTempFile,
}

impl Output {
    /// Makes the directory and opens the files in it, under names that nobody reads yet.
    pub fn prepare(directory: &Path) -> anyhow::Result<Self> {
        let refuse = |error: io::Error| {
            bad_input(format!(
                "--output {}: cannot write there ({error}); name a directory that can be written to",
                directory.display()
            ))
        };
        fs::create_dir_all(directory).map_err(refuse)?;
        for name in [RESULTS, PAGE] {
            let path = directory.join(name);
            if path.is_dir() {
                return Err(bad_input(format!(
                    "--output {}: {name} in it is a directory; move it away, or name another",
                    directory.display()
                )));
            }
        }
        let open = || {
            let mut builder = tempfile::Builder::new();
            let _ = builder.prefix(".slat-");
            #[cfg(unix)]
            {
                // A report is to be read by others as any new file would be.
                use std::os::unix::fs::PermissionsExt;
                builder.permissions(fs::Permissions::from_mode(0o666));
            }
            builder.tempfile_in(directory)
        };
        Ok(Self {
            directory: directory.to_owned(),
            results: open().map_err(refuse)?,
            page: open().map_err(refuse)?,
        })
    }

    /// Writes both files, each complete or not at all, and says where they are.
    pub fn write(mut self, report: &Report) -> anyhow::Result<PathBuf> {
        self.results
            .write_all(json::render(report)?.as_bytes())
            .context("cannot write the results")?;
        self.page.write_all(html::render(report).as_bytes()).context("cannot write the report")?;
        self.results.persist(self.directory.join(RESULTS))?;
        self.page.persist(self.directory.join(PAGE))?;
        Ok(self.directory)
    }
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
