//! The writes of a work, computed by its model: which step writes which page.

use crate::Error;
use crate::guest::Guest;
use crate::work::{Steps, Touch, Work};
use std::sync::atomic::{AtomicBool, Ordering};

/// Returns all vCPUs' positions.
pub(crate) fn positions(guest: &Guest) -> Vec<u64> {
    (0..guest.parts().len()).map(|vcpu| guest.position(vcpu)).collect()
}

/// Iterates over a vCPU's writes, with the numbers of their steps.
pub(crate) struct Writes {
    number: u64,
    first: u64,
    steps: Steps,
}

impl Writes {
    /// Returns the writes of each vCPU. `given` has their positions when they got the work.
    pub fn of(guest: &Guest, work: &Work, given: &[u64]) -> Vec<Self> {
        let parts = guest.parts().iter().zip(given).enumerate();
        let writes = parts.map(|(vcpu, (part, &number))| Self {
            number,
            first: part.first,
            steps: work.steps(vcpu, part.pages),
        });
        writes.collect()
    }

    /// Returns the number and the page of the next write whose step is below `end`.
    ///
    /// # Errors
    /// [`Error::Stopped`].
    pub fn next(&mut self, end: u64, stop: &AtomicBool) -> Result<Option<(u64, u64)>, Error> {
        while self.number < end {
            let number = self.number;
            if number.is_multiple_of(1 << 20) && stop.load(Ordering::Relaxed) {
                return Err(Error::Stopped);
            }
            let Some((page, touch)) = self.steps.next() else { break };
            self.number += 1;
            if touch == Touch::Write {
                return Ok(Some((number, self.first + page)));
            }
        }
        Ok(None)
    }
}

/// Returns the number of the last step of a work that wrote each page, or 0.
///
/// # Errors
/// [`Error::Stopped`].
pub(crate) fn last_writes(
    guest: &Guest,
    work: &Work,
    given: &[u64],
    stop: &AtomicBool,
) -> Result<Vec<u64>, Error> {
    let mut last = vec![0; guest.pages() as usize];
    for (vcpu, writes) in Writes::of(guest, work, given).iter_mut().enumerate() {
        let end = guest.position(vcpu);
        while let Some((number, page)) = writes.next(end, stop)? {
            last[page as usize] = number;
        }
    }
    Ok(last)
}

/// Compares each page with its last write, while the vCPUs do not run. If vCPUs overlap, the last
/// write is unknown, and the check is only that each page holds a stamp of its own.
///
/// # Errors
/// [`Error::WrongStamp`] if a page holds something else; [`Error::Stopped`].
pub(crate) fn check_last(
    guest: &Guest,
    work: &Work,
    given: &[u64],
    stop: &AtomicBool,
) -> Result<(), Error> {
    let alone = guest.parts().windows(2).all(|pair| pair[0].first != pair[1].first);
    let last = last_writes(guest, work, given, stop)?;
    for (page, &number) in (0u64..).zip(&last) {
        if page.is_multiple_of(4096) && stop.load(Ordering::Relaxed) {
            return Err(Error::Stopped);
        }
        match number {
            number if alone && number != 0 => guest.check_stamp(page, number)?,
            _ => drop(guest.written_by(page)?),
        }
    }
    Ok(())
}
