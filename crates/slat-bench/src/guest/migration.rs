//! The migration thread: it reads the log of a running guest, and copies its memory.

use super::log_options::LogWay;
use crate::guest::fixture::{Fixture, SLOT, TheWorker};
use crate::guest::lock::FairLock;
use anyhow::ensure;
use slat::Format;
use slat_guest::{DirtyPage, LogError, MemslotId};
use slat_lab::session::Session;
use slat_sim::arch::Arch;
use std::time::{Duration, Instant};

/// Time for which vCPUs write before each read of the log.
const DWELL: Duration = Duration::from_millis(20);
/// Time between two harvests of the rings.
const HARVEST: Duration = Duration::from_micros(200);
/// Number of entries of a ring.
pub const RING: u32 = 4096;

/// Reads the log, and copies the pages that it names.
pub struct Migration<'m, 'w, 'p, F: Format, A: Arch> {
    pub fixture: &'p Fixture<F, A>,
    pub worker: TheWorker<'w, F, A>,
    pub lock: &'m FairLock,
    pub way: LogWay,
    pub bitmap: Vec<u64>,
    pub copy: Vec<u64>,
    pub reads: Vec<f64>,
    pub clears: Vec<f64>,
    /// Number of pages that the log named.
    pub dirty: u64,
}

impl<F: Format, A: Arch> Migration<'_, '_, '_, F, A> {
    /// Enables the log, copies all memory, and does the rounds; returns the seconds that enabling
    /// took.
    pub fn rounds(&mut self, rounds: u32, session: &Session) -> anyhow::Result<f64> {
        let begin = Instant::now();
        let memslot = self.fixture.memslot(true);
        match self.way {
            LogWay::Locked => self.lock.exclusive(|| self.worker.set_memslot(memslot))?,
            _ => self.worker.set_memslot(memslot)?,
        };
        let enable = begin.elapsed().as_secs_f64();
        for page in 0..self.fixture.pages() {
            self.copy[page as usize] = self.fixture.first_word(page);
        }
        for _ in 0..rounds {
            if session.interrupted() {
                break;
            }
            match self.way {
                LogWay::Ring => self.harvest_for(DWELL)?,
                _ => {
                    std::thread::sleep(DWELL);
                    self.round()?;
                }
            }
        }
        Ok(enable)
    }

    /// Reads the log, clears it, and copies the pages that it named.
    fn round(&mut self) -> anyhow::Result<()> {
        let begin = Instant::now();
        self.dirty += match self.way {
            LogWay::Legacy | LogWay::Ring => self.worker.take_log(SLOT, &mut self.bitmap)?,
            _ => self.worker.read_log(SLOT, &mut self.bitmap)?,
        };
        let read = begin.elapsed().as_secs_f64();
        if self.way != LogWay::Ring {
            self.reads.push(read);
        }
        let pages = self.fixture.pages();
        let begin = Instant::now();
        match self.way {
            LogWay::Legacy | LogWay::Ring => {}
            LogWay::Locked => {
                let (worker, bitmap) = (&mut self.worker, &self.bitmap);
                self.lock.exclusive(|| worker.clear_log(SLOT, 0, pages, bitmap))?;
                self.clears.push(begin.elapsed().as_secs_f64());
            }
            _ => {
                self.worker.clear_log(SLOT, 0, pages, &self.bitmap)?;
                self.clears.push(begin.elapsed().as_secs_f64());
            }
        }
        for (index, &word) in self.bitmap.iter().enumerate() {
            let mut bits = word;
            while bits != 0 {
                let page = index as u64 * 64 + u64::from(bits.trailing_zeros());
                self.copy[page as usize] = self.fixture.first_word(page);
                bits &= bits - 1;
            }
        }
        Ok(())
    }

    /// Harvests all rings repeatedly, and then reads from the bitmap the pages that did not fit
    /// into them.
    fn harvest_for(&mut self, time: Duration) -> anyhow::Result<()> {
        let begin = Instant::now();
        let (mut read, mut clear) = (0.0, 0.0);
        loop {
            let (harvest, reset, _) = self.harvest();
            (read, clear) = (read + harvest, clear + reset);
            if begin.elapsed() > time {
                break;
            }
            // A reset costs an invalidation, for few pages as for many, so harvests are not too
            // frequent.
            std::thread::sleep(HARVEST);
        }
        self.reads.push(read);
        self.clears.push(clear);
        self.round()
    }

    /// Harvests all rings once; returns its seconds, those of the reset, and the number of pages.
    pub fn harvest(&mut self) -> (f64, f64, usize) {
        const NONE: DirtyPage = DirtyPage { memslot: MemslotId(u16::MAX), page: u64::MAX };
        let begin = Instant::now();
        let mut pages = vec![NONE; RING as usize * usize::from(self.fixture.shape.vcpus)];
        let mut found = 0;
        for vcpu in 0..self.fixture.shape.vcpus {
            found += self.worker.harvest_ring(vcpu, &mut pages[found..]);
        }
        let harvest = begin.elapsed().as_secs_f64();
        if found == 0 {
            return (harvest, 0.0, 0);
        }
        let begin = Instant::now();
        // A reset that meets an entry in use is repeated, before any page is copied.
        while let Err(error) = self.worker.reset_rings() {
            assert!(matches!(error, LogError::Contended { .. }), "{error}");
        }
        let reset = begin.elapsed().as_secs_f64();
        for page in &pages[..found] {
            self.copy[page.page as usize] = self.fixture.first_word(page.page);
        }
        self.dirty += found as u64;
        (harvest, reset, found)
    }

    /// Copies the remaining pages after the writers have stopped, and compares memory and copy.
    pub fn finish(&mut self) -> anyhow::Result<()> {
        let (reads, clears) = (self.reads.len(), self.clears.len());
        while self.way == LogWay::Ring && self.harvest().2 != 0 {}
        self.round()?;
        self.reads.truncate(reads);
        self.clears.truncate(clears);
        compare(self.fixture, &self.copy)
    }
}

/// Checks that every page equals its last copy.
fn compare<F: Format, A: Arch>(fixture: &Fixture<F, A>, copy: &[u64]) -> anyhow::Result<()> {
    let differs = |&page: &u64| copy[page as usize] != fixture.first_word(page);
    let lost: Vec<u64> = (0..fixture.pages()).filter(differs).collect();
    ensure!(
        lost.is_empty(),
        "the log lost {} of {} pages, the first at {:#x}: they were written and not named",
        lost.len(),
        fixture.pages(),
        fixture.gpa(lost[0])
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{TableFormat, TablesArgs};
    use crate::guest::fixture::Shape;
    use slat_lab::size::Size;

    #[test]
    fn a_page_that_the_log_did_not_name_is_an_error() {
        let shape =
            Shape::new(Size(2 << 20), TableFormat::Ept, slat::PageSize::SIZE_4K, 1).unwrap();
        let (format, arch) = (slat::format::ept::Ept1G::default(), slat_sim::Ept::default());
        let session = Session::quiet();
        let tables = TablesArgs::of(TableFormat::Ept);
        let fixture = Fixture::new(format, arch, &tables, shape, &session).unwrap();
        let copy = vec![0; 512];
        compare(&fixture, &copy).unwrap();
        fixture.machine().write_host(slat::Hpa(fixture.machine().memory_base().0 + 3 * 4096), 1);
        let error = compare(&fixture, &copy).unwrap_err().to_string();
        assert!(error.contains("lost 1 of 512") && error.contains("0x100003000"), "{error}");
    }
}
