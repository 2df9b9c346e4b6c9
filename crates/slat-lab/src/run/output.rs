//! Output of results: stdout, and two files in a directory.

use crate::failure::bad_input;
use crate::files::{PAGE, RESULTS, StagedFile, writable};
use crate::record::Report;
use crate::renderer::Renderers;
use crate::report::{html, json};
use anyhow::Context;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};

/// A directory that was found writable before measuring.
///
/// No file stays in it during the measurement, so that a process that is killed leaves none behind.
pub struct Output {
    directory: PathBuf,
}

impl Output {
    /// Creates the directory, and checks that files can be created in it.
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

    /// Returns whether the directory has results of an earlier run.
    pub fn has_results(&self) -> bool {
        self.directory.join(RESULTS).exists()
    }

    /// Writes both files, each completely or not at all, and returns their directory.
    pub fn write(self, report: &Report, renderers: &Renderers) -> anyhow::Result<PathBuf> {
        let directory = self.directory;
        let stage =
            |name: &str, text: &str| StagedFile::new(&directory.join(name), text.as_bytes());
        let name = directory.display().to_string();
        let failed = || format!("cannot write {RESULTS} and {PAGE} to {name}");
        let results = stage(RESULTS, &json::render(report)?).with_context(failed)?;
        let page = stage(PAGE, &html::render(report, renderers)).with_context(failed)?;
        results.publish().with_context(failed)?;
        page.publish().with_context(failed)?;
        Ok(directory)
    }
}

/// Prints to stdout; it is no error if no process reads it any more. Where the user's locale has
/// no characters but ASCII, text gets these; JSON is UTF-8 everywhere.
pub fn print(text: &str) -> anyhow::Result<()> {
    let plain = (!text.starts_with(['{', '[']) && !super::ascii::is_utf8())
        .then(|| super::ascii::plain(text));
    let text = plain.as_deref().unwrap_or(text);
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if !super::nobody_reads(&error) => Err(error).context("cannot write to stdout"),
        _ => Ok(()),
    }
}

/// Returns the number of columns for tables: those of the terminal, or a good width for a file.
pub fn width() -> u16 {
    const IN_A_FILE: u16 = 120;
    if !io::stdout().is_terminal() {
        return IN_A_FILE;
    }
    // A serial console tells no size, or one of 0.
    let columns = comfy_table::Table::new().width().filter(|columns| *columns > 0);
    columns.unwrap_or(80).clamp(60, 160)
}
