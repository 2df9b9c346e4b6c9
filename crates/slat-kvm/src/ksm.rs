//! The kernel's merging of pages with equal contents (admin-guide/mm/ksm.rst), for the duration of a
//! run.

use crate::Error;
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const FOLDER: &str = "/sys/kernel/mm/ksm";
/// What the kernel is told while it merges: to run, and to look at many pages without a rest.
const FAST: [(&str, u64); 3] = [("pages_to_scan", 5000), ("sleep_millisecs", 1), ("run", 1)];
/// Looks at all pages after which those that can be merged are: one notes a page, the next merges
/// it if it has not changed.
const SCANS: u64 = 3;

/// The kernel at work. Dropping it restores what was set before.
#[derive(Debug)]
pub(crate) struct Merging {
    before: Vec<(PathBuf, String)>,
}

fn read(name: &str) -> Result<u64, Error> {
    let path = format!("{FOLDER}/{name}");
    let text = fs::read_to_string(&path);
    let value = text.as_ref().ok().and_then(|text| text.trim().parse().ok());
    value.ok_or_else(|| Error::NoMerging { why: format!("{path} cannot be read") })
}

impl Merging {
    /// Checks that this process may switch the kernel's merging on.
    ///
    /// # Errors
    /// [`Error::NoMerging`].
    pub fn check() -> Result<(), Error> {
        let run = format!("{FOLDER}/run");
        let opened = fs::File::options().write(true).open(&run);
        opened.map(drop).map_err(|error| Error::NoMerging { why: format!("{run}: {error}") })
    }

    /// Switches merging on.
    ///
    /// # Errors
    /// [`Error::NoMerging`].
    pub fn start() -> Result<Self, Error> {
        let mut merging = Self { before: Vec::new() };
        for (name, value) in FAST {
            let path = PathBuf::from(FOLDER).join(name);
            let before = read(name)?.to_string();
            let written = fs::write(&path, value.to_string());
            written.map_err(|error| Error::NoMerging {
                why: format!("{}: {error}", path.display()),
            })?;
            merging.before.push((path, before));
        }
        Ok(merging)
    }

    /// Waits until the kernel has looked at all pages often enough, or `limit` is over. Returns
    /// whether it has.
    ///
    /// # Errors
    /// [`Error::NoMerging`]; [`Error::Stopped`].
    pub fn wait(&self, limit: Duration, stop: &AtomicBool) -> Result<bool, Error> {
        let (begin, first) = (Instant::now(), read("full_scans")?);
        while begin.elapsed() < limit {
            if stop.load(Ordering::Relaxed) {
                return Err(Error::Stopped);
            }
            if read("full_scans")? >= first + SCANS {
                return Ok(true);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(false)
    }
}

impl Drop for Merging {
    fn drop(&mut self) {
        // In the reverse order, so that it rests before anything else. `drop` cannot report that
        // the kernel refuses.
        for (path, before) in self.before.iter().rev() {
            let _ = fs::write(path, before);
        }
    }
}
