//! Fetching a log, in each mode, and what may be in it.
//!
//! Whoever copies pages by a log must copy them after they are protected again: after the get in
//! legacy mode, after the clear with manual protect, after the reset with rings. A write that comes
//! later is then in the next log.

use crate::bitmap::DirtyBitmap;
use crate::guest::Guest;
use crate::stage::Calls;
use crate::work::{Steps, Touch, Work};
use crate::{Error, Mode};
use std::ops::Range;

/// One fetch of the log, beside vCPUs that may run.
#[derive(Debug)]
pub(crate) struct Round {
    pub log: DirtyBitmap,
    /// Each vCPU's position before it was fetched.
    before: Vec<u64>,
    /// And after its pages were protected again.
    after: Vec<u64>,
}

/// Who fetches.
#[derive(Debug)]
pub(crate) struct Harvester<'a> {
    guest: &'a Guest,
    clear_chunk: Option<u64>,
    pub get: Calls,
    pub clear: Calls,
    /// Positions when the work was given, and when logging was on.
    given: Vec<u64>,
    enabled: Vec<u64>,
    pub rounds: Vec<Round>,
}

/// What was found when the logs were held against the model of the work.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Verified {
    /// Writes that were each found in a log.
    pub writes: u64,
    /// Pages in a log that nobody had written since the one before; those of a log that starts
    /// full are not counted.
    pub excess: u64,
}

fn positions(guest: &Guest) -> Vec<u64> {
    (0..guest.parts().len()).map(|vcpu| guest.position(vcpu)).collect()
}

impl<'a> Harvester<'a> {
    /// Begins before the vCPUs run.
    pub fn new(guest: &'a Guest, clear_chunk: Option<u64>) -> Self {
        Self {
            guest,
            clear_chunk,
            get: Calls::default(),
            clear: Calls::default(),
            given: positions(guest),
            enabled: Vec::new(),
            rounds: Vec::new(),
        }
    }

    /// Starts logging.
    pub fn start_log(&mut self, calls: &mut Calls) -> Result<(), Error> {
        calls.time(|| self.guest.start_log())?;
        self.enabled = positions(self.guest);
        Ok(())
    }

    /// Fetches the log and protects its pages again; answers with how many are in it.
    pub fn round(&mut self) -> Result<u64, Error> {
        let guest = self.guest;
        let mut log = DirtyBitmap::new(guest.pages());
        let before = positions(guest);
        if guest.mode().is_ring() {
            self.get.time(|| guest.harvest(&mut log))?;
        } else {
            self.get.time(|| guest.get_dirty_log(&mut log))?;
        }
        if guest.mode().is_manual() {
            clear(guest, &log, self.clear_chunk, &mut self.clear)?;
        }
        let pages = log.count();
        self.rounds.push(Round { log, before, after: positions(guest) });
        Ok(pages)
    }

    /// The log fetched last.
    pub fn last(&self) -> Option<&DirtyBitmap> {
        self.rounds.last().map(|round| &round.log)
    }

    /// Holds all logs against what the guest wrote. The last was fetched after the vCPUs stopped.
    ///
    /// # Errors
    /// [`Error::PagesMissing`] if a page was written and is not in the log that must have it.
    pub fn verify(&self, work: &Work) -> Result<Verified, Error> {
        let mut verified = Verified::default();
        let mut vcpus: Vec<_> = self
            .guest
            .parts()
            .iter()
            .enumerate()
            .map(|(vcpu, part)| Numbered {
                number: self.given[vcpu],
                first: part.first,
                steps: work.steps(vcpu, part.pages),
            })
            .collect();
        let mut may = DirtyBitmap::new(self.guest.pages());
        // Writes that were not over when a log was fetched: in that one, or in one until they were.
        let mut open: Vec<Open> = Vec::new();
        for (index, round) in self.rounds.iter().enumerate() {
            may.reset();
            let last = index + 1 == self.rounds.len();
            for (vcpu, steps) in vcpus.iter_mut().enumerate() {
                // The step at a position may have been under way.
                let end = if last { round.after[vcpu] } else { round.after[vcpu] + 1 };
                while let Some((number, page)) = steps.next_write(end) {
                    open.push(Open { vcpu, number, page, since: index });
                }
            }
            let mut missing = None;
            open.retain(|write| {
                may.insert(write.page);
                let over = write.number < round.before[write.vcpu];
                // Before logging was on for certain, a write may be in the log.
                let must = write.number > self.enabled[write.vcpu];
                if over && must {
                    verified.writes += 1;
                    if !self.is_named(write.page, write.since..index + 1) {
                        missing.get_or_insert((write.since, write.page));
                    }
                }
                !over
            });
            if let Some((round, first)) = missing {
                let iteration = round as u32 + 1;
                return Err(Error::PagesMissing { iteration, first, missing: 1 });
            }
            // With rings, a CPU that buffers dirty pages (Intel's PML) tells them late.
            let exact = !self.guest.mode().is_ring();
            if exact && (index > 0 || self.guest.mode() != Mode::ManualInitiallySet) {
                let words = round.log.words().iter().zip(may.words());
                verified.excess +=
                    words.map(|(log, may)| u64::from((log & !may).count_ones())).sum::<u64>();
            }
        }
        Ok(verified)
    }

    /// Whether a page is in one of these logs; of rings, in one of these or later ones.
    fn is_named(&self, page: u64, rounds: Range<usize>) -> bool {
        let end = if self.guest.mode().is_ring() { self.rounds.len() } else { rounds.end };
        self.rounds[rounds.start..end].iter().any(|round| round.log.contains(page))
    }
}

/// A write, and the first log that may name it.
struct Open {
    vcpu: usize,
    number: u64,
    page: u64,
    since: usize,
}

/// A vCPU's steps, with their numbers.
struct Numbered {
    number: u64,
    first: u64,
    steps: Steps,
}

impl Numbered {
    /// The next write of those below a number.
    fn next_write(&mut self, end: u64) -> Option<(u64, u64)> {
        while self.number < end {
            let number = self.number;
            let (page, touch) = self.steps.next()?;
            self.number += 1;
            if touch == Touch::Write {
                return Some((number, self.first + page));
            }
        }
        None
    }
}

/// Clears what is in `log`, slot by slot and chunk by chunk.
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
            // A slot has less than 2^31 pages, so that any piece of it fits.
            let count = chunk.min(start + slot - first) as u32;
            calls.time(|| guest.clear_dirty_log(log, first, count))?;
        }
    }
    Ok(())
}

/// Checks the pages of one clear.
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
