//! The kernel's merging of pages with equal contents (admin-guide/mm/ksm.rst), for the duration of
//! a run.

use crate::Error;
use crate::knobs::Knobs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const FOLDER: &str = "/sys/kernel/mm/ksm";
/// What the kernel is told while it merges: to run, and to look at many pages without a rest.
const FAST: &[(&str, &str)] = &[("pages_to_scan", "5000"), ("sleep_millisecs", "1"), ("run", "1")];
/// Looks at all pages after which those that can be merged are: one notes a page, the next merges
/// it if it has not changed.
const SCANS: u64 = 3;

/// The kernel at work. Dropping it restores what was set before.
#[derive(Debug)]
pub(crate) struct PageMerging {
    _knobs: Knobs,
}

impl PageMerging {
    /// Checks that this process may switch the kernel's merging on.
    ///
    /// # Errors
    /// [`Error::NoMerging`].
    pub fn check() -> Result<(), Error> {
        Knobs::check(FOLDER, "run").map_err(|why| Error::NoMerging { why })
    }

    /// Switches merging on.
    ///
    /// # Errors
    /// [`Error::NoMerging`].
    pub fn start() -> Result<Self, Error> {
        let knobs = Knobs::set(FOLDER, FAST).map_err(|why| Error::NoMerging { why })?;
        Ok(Self { _knobs: knobs })
    }

    /// Waits until the kernel has looked at all pages often enough, or `limit` is over. Returns
    /// whether it has.
    ///
    /// # Errors
    /// [`Error::NoMerging`]; [`Error::Stopped`].
    pub fn wait(&self, limit: Duration, stop: &AtomicBool) -> Result<bool, Error> {
        let (begin, first) = (Instant::now(), scans()?);
        while begin.elapsed() < limit {
            if stop.load(Ordering::Relaxed) {
                return Err(Error::Stopped);
            }
            if scans()? >= first + SCANS {
                return Ok(true);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(false)
    }
}

/// Returns how often the kernel has looked at all pages.
fn scans() -> Result<u64, Error> {
    let path = format!("{FOLDER}/full_scans");
    let text = std::fs::read_to_string(&path);
    let scans = text.ok().and_then(|text| text.trim().parse().ok());
    scans.ok_or_else(|| Error::NoMerging { why: format!("{path} cannot be read") })
}
