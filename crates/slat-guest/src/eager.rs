//! Eager splits: huge pages of a range become small before the guest writes to them.

use crate::backing::Backing;
use crate::host::Host;
use crate::outcome::{SplitReport, SplitStop};
use crate::sync::{AtomicU64, Ordering};
use crate::worker::{Inside, PATIENCE, Worker};
use slat::{Format, Gpa, GpaRange, Interruption, PageSize, SplitError};

/// A split of a range, in chunks that any number of threads take in turn.
///
/// The threads can stop between chunks, and run it again later.
///
/// It splits only: nothing is logged or protected, and faults go on mapping blocks where the
/// memslot does not log. [`Config::eager_split`](crate::Config::eager_split) splits when a memslot
/// begins to log, after which faults map pages there.
#[derive(Debug)]
pub struct EagerSplit {
    range: GpaRange,
    to: PageSize,
    chunk: u64,
    /// Where the next chunk begins.
    next: AtomicU64,
}

impl EagerSplit {
    /// The default size of chunks in bytes: the largest block, which takes only one TLB
    /// invalidation if it is split in one piece.
    pub const CHUNK: u64 = 1 << 30;

    /// Makes a split of all of `range`, into leaves of size `to`.
    pub fn new(range: GpaRange, to: PageSize) -> Self {
        Self::with_chunk(range, to, Self::CHUNK)
    }

    /// As `new`, in chunks of `chunk` bytes (Linux: `KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE`), at least
    /// one leaf of size `to`.
    pub fn with_chunk(range: GpaRange, to: PageSize, chunk: u64) -> Self {
        // No guest's addresses have more bits than this.
        let chunk = chunk.clamp(to.bytes(), 1 << 52).next_multiple_of(to.bytes());
        Self { range, to, chunk, next: AtomicU64::new(range.start().0) }
    }

    /// Returns whether threads have taken all chunks.
    pub fn is_done(&self) -> bool {
        self.next.load(Ordering::Acquire) >= self.range.end().0
    }

    /// Takes chunks, and splits them, until none is left or `stop` returns `true`.
    pub fn run<F: Format, H: Host, B: Backing>(
        &self,
        worker: &mut Worker<'_, F, H, B>,
        stop: impl Fn() -> bool,
    ) -> SplitReport {
        let mut report = SplitReport { split: 0, done: 0, stopped: None };
        loop {
            if self.is_done() {
                break;
            }
            if stop() {
                report.stopped = Some(SplitStop::Asked);
                break;
            }
            let start = self.take();
            if start >= self.range.end().0 {
                break;
            }
            // Chunks begin at multiples of their size, except the first.
            let end = (start / self.chunk + 1).saturating_mul(self.chunk).min(self.range.end().0);
            let chunk = GpaRange::new(Gpa(start), end - start).expect("not empty");
            match worker.split(chunk, self.to, &mut report.split) {
                Ok(()) => report.done += end - start,
                Err(stop) => {
                    if let Some(at) = stop.at() {
                        report.done += at.0.saturating_sub(start);
                        // Other threads may have taken later chunks, which may be split again
                        // without harm.
                        self.give_back(at.0);
                    }
                    report.stopped = Some(stop);
                    break;
                }
            }
        }
        worker.guest.count_split(worker.counters, self.range.start(), report.split);
        report
    }

    fn take(&self) -> u64 {
        let mut start = self.next.load(Ordering::Acquire);
        loop {
            let end = (start / self.chunk + 1).saturating_mul(self.chunk);
            let next = self.next.compare_exchange(start, end, Ordering::AcqRel, Ordering::Acquire);
            match next {
                Ok(_) => return start,
                Err(found) => start = found,
            }
        }
    }

    fn give_back(&self, at: u64) {
        let mut next = self.next.load(Ordering::Acquire);
        while at < next {
            match self.next.compare_exchange(next, at, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return,
                Err(found) => next = found,
            }
        }
    }
}

impl<'w, F: Format, H: Host, B: Backing> Worker<'w, F, H, B> {
    /// Splits `range` into leaves of size `to`; adds the bytes to `split`. It works on the shared
    /// tables only: vCPUs' own views have no blocks.
    pub(crate) fn split(
        &mut self,
        range: GpaRange,
        to: PageSize,
        split: &mut u64,
    ) -> Result<(), SplitStop> {
        let guest = self.guest;
        let host = guest.tables.platform();
        let (mut start, end) = (range.start().0, range.end().0);
        let mut patience = PATIENCE;
        while start < end {
            // A split that runs out of table pages has used those that it had, so each round gets
            // further.
            let at = Gpa(start);
            self.top_up(1).map_err(|error| SplitStop::OutOfFrames { at, error })?;
            let rest = GpaRange::new(Gpa(start), end - start).expect("not empty");
            let result = self.with_memslots(&guest.tables, |view, Inside { guard, cache, .. }| {
                // Private memory does not log, and its blocks may be split only with the machine's
                // consent.
                let Some(run) = view.shared_run::<F>(rest) else { return Ok(end) };
                let result = guard.split(run, to, cache);
                *split += guard.counts().bytes_changed;
                result.map(|_| run.end().0)
            });
            match result {
                Ok(done) => start = done,
                Err(Interruption { at, reason: SplitError::CacheEmpty }) => start = at.0,
                Err(Interruption { at, reason: SplitError::Contended }) => {
                    if at.0 > start {
                        patience = PATIENCE;
                    }
                    start = at.0;
                    patience -= 1;
                    if patience == 0 {
                        return Err(SplitStop::Contended { at });
                    }
                    host.wait();
                }
                Err(Interruption { reason, .. }) => return Err(SplitStop::Refused(reason)),
            }
        }
        Ok(())
    }
}
