//! Incremental snapshots: a base, and epochs after it. Each epoch has the pages that were written
//! since the one before.
//!
//! *Invariant*: a page that differs from its copy in the committed epochs is dirty in the log, or
//! *pending*, or in the open epoch. An epoch begins by moving the log and the pending pages into
//! itself. It ends when it is committed, after its pages have been copied. If it ends in another
//! way, its pages are pending again.

use crate::backing::Backing;
use crate::bits::Bits;
use crate::host::Host;
use crate::log::LogError;
use crate::memslots::spec::MemslotId;
use crate::worker::Worker;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;
use slat::Format;

/// The snapshots of one memslot, which logs.
#[derive(Debug)]
pub struct Epochs {
    memslot: MemslotId,
    /// The log from which the last epoch was taken. A memslot with another log begins anew.
    log: Option<Arc<Bits>>,
    pending: Vec<u64>,
    committed: Vec<(u64, Vec<u64>)>,
    next: u64,
}

/// Why no epoch began; no mark is lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum EpochError {
    /// The log could not be read.
    Log(LogError),
    /// vCPUs have dirty rings, which another reader harvests.
    Rings,
    /// There is no memory for one bit for each page.
    OutOfMemory,
}

impl fmt::Display for EpochError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Log(error) => error.fmt(f),
            Self::Rings => f.write_str("snapshots are of logs that are bitmaps, without rings"),
            Self::OutOfMemory => f.write_str("no memory for what an epoch has of each page"),
        }
    }
}

impl core::error::Error for EpochError {}

fn zeroes(len: usize) -> Result<Vec<u64>, EpochError> {
    let mut words = Vec::new();
    words.try_reserve_exact(len).map_err(|_| EpochError::OutOfMemory)?;
    words.resize(len, 0);
    Ok(words)
}

impl Epochs {
    /// Makes the snapshots of the memslot with that name. The first epoch is the base: it has all
    /// pages.
    pub const fn new(memslot: MemslotId) -> Self {
        Self { memslot, log: None, pending: Vec::new(), committed: Vec::new(), next: 0 }
    }

    /// Begins an epoch, with the pages that were written from the last committed epoch until this
    /// returns. Every later write belongs to a later epoch. So the caller copies the pages after
    /// this; the copies are all of one moment if the vCPUs are stopped meanwhile.
    ///
    /// The epochs have to be the log's only reader: pages that another call of
    /// [`Worker::clear_log`] or [`Worker::take_log`] takes are in no epoch. If the memslot has been
    /// deleted, moved without its log, or has begun to log anew, the epochs begin with a base
    /// again.
    ///
    /// # Errors
    /// [`EpochError`]; no mark is lost.
    pub fn begin<F: Format, H: Host, B: Backing>(
        &mut self,
        worker: &mut Worker<'_, F, H, B>,
    ) -> Result<Epoch<'_>, EpochError> {
        if !worker.guest().rings.is_empty() {
            return Err(EpochError::Rings);
        }
        let logging = worker.logging(self.memslot, usize::MAX).map_err(EpochError::Log)?;
        let pages = logging.spec.pages(worker.guest().page());
        let len = pages.div_ceil(64) as usize;
        let same = self.log.as_ref().is_some_and(|log| Arc::ptr_eq(log, &logging.log));
        if !same {
            let mut all = zeroes(len)?;
            for (word, bits) in all.iter_mut().enumerate() {
                let rest = pages - 64 * word as u64;
                *bits = if rest >= 64 { u64::MAX } else { (1 << rest) - 1 };
            }
            self.committed.clear();
            (self.pending, self.log) = (all, Some(logging.log.clone()));
        }
        let base = self.committed.is_empty();
        let mut dirty = zeroes(len)?;
        // After an error, the next call finds the pages in the log, or that the memslot has another
        // log, of which no epoch has the earlier pages.
        worker.drain_log(&logging, &mut dirty).map_err(EpochError::Log)?;
        dirty.iter_mut().zip(&mut self.pending).for_each(|(dirty, pending)| {
            *dirty |= core::mem::take(pending);
        });
        self.next += 1;
        Ok(Epoch { number: self.next, base, dirty, epochs: self })
    }

    /// Returns the number of the epoch, `upto` or an earlier one, that has the page as it was at
    /// the end of `upto`; `None` if no committed epoch has it.
    pub fn holds(&self, page: u64, upto: u64) -> Option<u64> {
        let has = |(number, dirty): &&(u64, Vec<u64>)| {
            *number <= upto
                && dirty.get((page / 64) as usize).is_some_and(|bits| bits >> (page % 64) & 1 == 1)
        };
        self.committed.iter().rev().find(has).map(|(number, _)| *number)
    }

    /// Returns the numbers of the committed epochs, the base first.
    pub fn committed(&self) -> impl Iterator<Item = u64> + '_ {
        self.committed.iter().map(|(number, _)| *number)
    }
}

/// An open epoch: the caller copies its pages, then commits it. Dropping it aborts it, and the next
/// epoch has its pages.
#[must_use = "dropped, the epoch is aborted"]
#[derive(Debug)]
pub struct Epoch<'e> {
    epochs: &'e mut Epochs,
    number: u64,
    base: bool,
    dirty: Vec<u64>,
}

impl Epoch<'_> {
    /// Returns the epoch's number, which is above the numbers of all earlier epochs.
    pub const fn number(&self) -> u64 {
        self.number
    }

    /// Returns whether it is a base, which has all pages.
    pub const fn is_base(&self) -> bool {
        self.base
    }

    /// Returns the epoch's pages, one bit each, from the memslot's first page on.
    pub fn bitmap(&self) -> &[u64] {
        &self.dirty
    }

    /// Commits the epoch. The caller has safely copied its pages.
    pub fn commit(mut self) {
        let dirty = core::mem::take(&mut self.dirty);
        self.epochs.committed.push((self.number, dirty));
    }
}

impl Drop for Epoch<'_> {
    fn drop(&mut self) {
        let pending = self.epochs.pending.iter_mut();
        pending.zip(&self.dirty).for_each(|(pending, dirty)| *pending |= dirty);
    }
}
