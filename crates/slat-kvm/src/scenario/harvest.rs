//! Fetching the log in each mode, and checking it against the pages that were written.
//!
//! A migration copies a page of the log only after the page is write-protected again: after the get
//! in legacy mode, after the clear with manual protect, after the reset with rings. A later write
//! is then in the next log.

use super::writes::{Writes, positions};
use crate::bitmap::DirtyBitmap;
use crate::guest::{Guest, Shape};
use crate::stage::Calls;
use crate::work::Work;
use crate::{Error, HostKvm, Mode};
use std::ops::Range;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// One fetch of the log, while vCPUs may run.
#[derive(Debug)]
struct Round {
    log: Log,
    /// Each vCPU's position before the fetch.
    before: Vec<u64>,
    /// Each vCPU's position after the pages were write-protected again.
    after: Vec<u64>,
}

/// A log that is kept for the check.
#[derive(Debug)]
enum Log {
    Bits(DirtyBitmap),
    /// Pages from rings, in ascending order. Rings are emptied often and hold few pages each time.
    Pages(Vec<u64>),
    /// Not kept, because the logs before it use all the room.
    Dropped,
}

impl Log {
    fn contains(&self, page: u64) -> bool {
        match self {
            Log::Bits(bits) => bits.contains(page),
            Log::Pages(pages) => pages.binary_search(&page).is_ok(),
            Log::Dropped => false,
        }
    }

    fn bytes(&self) -> u64 {
        match self {
            Log::Bits(bits) => bits.words().len() as u64 * 8,
            Log::Pages(pages) => pages.len() as u64 * 8,
            Log::Dropped => 0,
        }
    }

    /// Returns the number of pages in the log that are not in `may`.
    fn excess(&self, may: &DirtyBitmap) -> u64 {
        match self {
            Log::Bits(bits) => {
                let words = bits.words().iter().zip(may.words());
                words.map(|(log, may)| u64::from((log & !may).count_ones())).sum()
            }
            Log::Pages(pages) => pages.iter().filter(|&&page| !may.contains(page)).count() as u64,
            Log::Dropped => 0,
        }
    }
}

/// The most bytes that kept logs may use. Later rounds are not checked against the model.
pub(crate) const LOGS: u64 = 1 << 30;

/// Fetches the log in rounds, and keeps the logs for the check.
#[derive(Debug)]
pub(crate) struct Harvester<'a> {
    guest: &'a Guest,
    clear_chunk: Option<u64>,
    /// Whether a page may be reported later than in the first fetch after its write. This happens
    /// where a CPU buffers dirty pages (Intel's PML: the get kicks vCPUs and does not wait for
    /// them), and where a vCPU makes a page writable and marks it only after another vCPU has
    /// written to it.
    late: bool,
    pub get: Calls,
    pub clear: Calls,
    /// Time of the last round's calls.
    pub last_round: Duration,
    /// Number of fetches, and of the pages in them.
    pub fetches: u64,
    pub named: u64,
    /// The log of the last round.
    last: DirtyBitmap,
    kept: u64,
    /// Each vCPU's position when it got the work, and when logging was enabled.
    given: Vec<u64>,
    enabled: Vec<u64>,
    rounds: Vec<Round>,
}

/// The result of checking the logs against the model of the work.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Verification {
    /// Number of rounds that were checked: all, except in very long runs, whose later logs are not
    /// kept.
    pub rounds: u64,
    /// Number of writes that were found in a log.
    pub writes: u64,
    /// Number of pages in a log that were not written since the log before. A log that starts full
    /// does not count, and the number is 0 where pages may be reported late.
    pub excess: u64,
}

/// Returns whether a CPU of the host may keep written pages in a buffer (Intel's PML), which is so
/// where neither the module nor its parameter can be seen: a late page is not a lost one.
fn buffers(host: &HostKvm) -> bool {
    let may = cfg!(target_arch = "x86_64") && matches!(&*host.module, "" | "kvm_intel");
    may && host.parameters.get("pml").is_none_or(|pml| pml == "Y" || pml == "1")
}

impl<'a> Harvester<'a> {
    /// Makes a harvester. It must be made before the vCPUs run.
    pub fn new(guest: &'a Guest, shape: &Shape, clear_chunk: Option<u64>) -> Result<Self, Error> {
        Ok(Self {
            guest,
            clear_chunk,
            late: buffers(&crate::probe()?) || shape.overlap,
            last_round: Duration::ZERO,
            fetches: 0,
            named: 0,
            last: DirtyBitmap::new(guest.pages()),
            kept: 0,
            get: Calls::default(),
            clear: Calls::default(),
            given: positions(guest),
            enabled: Vec::new(),
            rounds: Vec::new(),
        })
    }

    /// Enables logging.
    pub fn start_log(&mut self, calls: &mut Calls) -> Result<(), Error> {
        calls.time(|| self.guest.start_log())?;
        self.enabled = positions(self.guest);
        Ok(())
    }

    /// Fetches the log and write-protects its pages again. Returns the number of pages in it.
    pub fn round(&mut self) -> Result<u64, Error> {
        let guest = self.guest;
        let ring = guest.mode().is_ring();
        let log = &mut self.last;
        log.reset();
        let calls = self.get.total + self.clear.total;
        let before = positions(guest);
        if ring {
            self.get.time(|| guest.harvest(log))?;
        } else {
            self.get.time(|| guest.get_dirty_log(log))?;
        }
        if guest.mode().is_manual() {
            clear(guest, log, self.clear_chunk, &mut self.clear)?;
        }
        let after = positions(guest);
        self.last_round = self.get.total + self.clear.total - calls;
        let pages = log.count();
        self.fetches += 1;
        self.named += pages;
        let kept = match ring {
            true if pages == 0 => Log::Pages(Vec::new()),
            true => Log::Pages((0..log.pages()).filter(|&page| log.contains(page)).collect()),
            false => Log::Bits(log.clone()),
        };
        self.kept += kept.bytes();
        let log = if self.kept > LOGS { Log::Dropped } else { kept };
        self.rounds.push(Round { log, before, after });
        Ok(pages)
    }

    /// Returns the log of the last round.
    pub fn last(&self) -> &DirtyBitmap {
        &self.last
    }

    /// Checks all logs against the writes of the guest. The last round must come after the vCPUs
    /// stopped.
    ///
    /// # Errors
    /// [`Error::PagesMissing`] if a page was written and is missing in the logs that must have it;
    /// [`Error::Stopped`].
    pub fn verify(&self, work: &Work, stop: &AtomicBool) -> Result<Verification, Error> {
        let mut verified = Verification::default();
        let mut vcpus = Writes::of(self.guest, work, &self.given);
        let mut may = DirtyBitmap::new(self.guest.pages());
        // Writes that may have been in progress during a fetch. Each is in that log or in a later
        // one, up to the first log that was fetched after the write.
        let mut open: Vec<OpenWrite> = Vec::new();
        for (index, round) in self.rounds.iter().enumerate() {
            if let Log::Dropped = round.log {
                return Ok(verified);
            }
            verified.rounds += 1;
            may.reset();
            let last = index + 1 == self.rounds.len();
            let mut judge = |write: &OpenWrite, may: &mut DirtyBitmap| {
                may.insert(write.page);
                let over = write.number < round.before[write.vcpu];
                // A write around the time when logging was enabled need not be in the log.
                if over && write.number > self.enabled[write.vcpu] {
                    verified.writes += 1;
                    if !self.is_named(write.page, write.since..index + 1) {
                        let iteration = write.since as u32 + 1;
                        let first = write.page;
                        return Err(Error::PagesMissing { iteration, first, missing: 1 });
                    }
                }
                Ok(over)
            };
            let mut still_open = Vec::new();
            for write in open.drain(..) {
                if !judge(&write, &mut may)? {
                    still_open.push(write);
                }
            }
            for (vcpu, steps) in vcpus.iter_mut().enumerate() {
                // The step with the number of the position may have been in progress.
                let end = if last { round.after[vcpu] } else { round.after[vcpu] + 1 };
                while let Some((number, page)) = steps.next(end, stop)? {
                    let write = OpenWrite { vcpu, number, page, since: index };
                    if !judge(&write, &mut may)? {
                        still_open.push(write);
                    }
                }
            }
            open = still_open;
            let starts_full = index == 0 && self.guest.mode() == Mode::ManualInitiallySet;
            if !self.late && !starts_full {
                verified.excess += round.log.excess(&may);
            }
        }
        Ok(verified)
    }

    /// Returns whether a page is in one of the logs of `rounds`, or in a later one if pages may be
    /// reported late.
    fn is_named(&self, page: u64, rounds: Range<usize>) -> bool {
        let end = if self.late { self.rounds.len() } else { rounds.end };
        self.rounds[rounds.start..end].iter().any(|round| match round.log {
            // The contents of a dropped log are unknown, so it may have the page.
            Log::Dropped => self.late,
            ref log => log.contains(page),
        })
    }
}

/// A write, and the index of the first log that may have it.
struct OpenWrite {
    vcpu: usize,
    number: u64,
    page: u64,
    since: usize,
}

/// Clears the pages in `log`, slot by slot and chunk by chunk.
pub(crate) fn clear(
    guest: &Guest,
    log: &DirtyBitmap,
    chunk: Option<u64>,
    calls: &mut Calls,
) -> Result<(), Error> {
    let (pages, slot) = (guest.pages(), guest.slot_pages());
    let chunk = chunk.unwrap_or(slot).min(slot);
    for start in (0..pages).step_by(slot as usize) {
        for first in (start..start + slot).step_by(chunk as usize) {
            // A slot has less than 2^31 pages, so the number of pages fits.
            let count = chunk.min(start + slot - first) as u32;
            calls.time(|| guest.clear_dirty_log(log, first, count))?;
        }
    }
    Ok(())
}

/// Checks the number of pages of one clear.
pub(crate) fn check_chunk(chunk: Option<u64>, mode: Mode) -> Result<(), Error> {
    let Some(chunk) = chunk else { return Ok(()) };
    let invalid = |rule| Err(Error::invalid("clear chunk", chunk, rule));
    if !mode.is_manual() {
        return invalid("needs manual protect: without it, the log is cleared by the get");
    }
    if chunk == 0 || !chunk.is_multiple_of(64) {
        return invalid("must be a multiple of 64 pages (KVM_CLEAR_DIRTY_LOG), and not 0");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn pages_may_be_late_where_no_buffer_is_known_to_be_off() {
        let host = |module: &str, pml: Option<&str>| HostKvm {
            module: module.to_owned(),
            parameters: pml.map(|pml| ("pml".to_owned(), pml.to_owned())).into_iter().collect(),
            ..HostKvm::default()
        };
        for (module, pml, late) in [
            ("kvm_intel", Some("Y"), true),
            ("kvm_intel", Some("N"), false),
            ("kvm_intel", None, true),
            ("", None, true),
            ("kvm_amd", None, false),
            ("kvm_pvm", None, false),
        ] {
            assert_eq!(buffers(&host(module, pml)), late, "{module} {pml:?}");
        }
    }
}
