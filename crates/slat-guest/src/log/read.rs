//! Reads of the log: with or without a clear.

use super::LogError;
use crate::backing::Backing;
use crate::bits::{Bits, SpilledBits};
use crate::host::Host;
use crate::memslots::spec::{MemslotId, MemslotSpec};
use crate::sync::{AtomicU64, Ordering};
use crate::worker::{Inside, PATIENCE, Worker};
use alloc::sync::Arc;
use slat::{ChangeError, Contention, Format, Interruption, Tables};

impl<'w, F: Format, H: Host, B: Backing> Worker<'w, F, H, B> {
    /// Copies the log of `id` into `bitmap`, one bit for each page; returns the number of dirty
    /// pages. It clears nothing: a page stays dirty until [`Worker::clear_log`], however often the
    /// log is read (Linux: `KVM_GET_DIRTY_LOG` with manual protection).
    ///
    /// With [`Logging::Hardware`](crate::Logging::Hardware) it first moves the dirty bits from the
    /// leaves into the log, and completes the invalidation: a page whose bit is not set was not
    /// written since it was cleared.
    ///
    /// # Errors
    /// [`LogError::Missing`], [`LogError::Bitmap`], [`LogError::Beginning`]: nothing was done.
    /// [`LogError::Contended`]: the bits that were moved are in the log.
    pub fn read_log(&mut self, id: MemslotId, bitmap: &mut [u64]) -> Result<u64, LogError> {
        let logging = self.logging(id, bitmap.len())?;
        self.read(&logging, bitmap)
    }

    fn read(&mut self, logging: &Logs, bitmap: &mut [u64]) -> Result<u64, LogError> {
        let guest = self.guest;
        let log = &*logging.log;
        if !guest.config.faults_log() {
            for tables in guest.spaces() {
                self.harvest(tables, logging, &mut bitmap[..log.words().len()])?;
            }
            // The log has the marks that other threads have taken from leaves once these threads
            // have left.
            guest.wait_for_faults();
        }
        self.counters.log_reads.add(1);
        let copy = |(to, from): (&mut u64, &AtomicU64)| {
            *to = from.load(Ordering::Acquire);
            u64::from(to.count_ones())
        };
        Ok(bitmap.iter_mut().zip(log.words()).map(copy).sum())
    }

    /// Moves the log of `id` into `bitmap`, and write-protects the pages that it had: when this
    /// returns, the log has every later write again (Linux: `KVM_GET_DIRTY_LOG` without manual
    /// protection). Returns the number of pages that were dirty.
    ///
    /// # Errors
    /// As [`Worker::read_log`]. No mark is lost: all that was read is still in the log.
    pub fn take_log(&mut self, id: MemslotId, bitmap: &mut [u64]) -> Result<u64, LogError> {
        let logging = self.logging(id, bitmap.len())?;
        self.drain_log(&logging, bitmap)
    }

    /// As [`Worker::take_log`], for the log that a look-up found: [`LogError::Missing`] if the
    /// memslot has another by now.
    pub(crate) fn drain_log(
        &mut self,
        logging: &Logs,
        bitmap: &mut [u64],
    ) -> Result<u64, LogError> {
        let log = &*logging.log;
        let dirty = self.read(logging, bitmap)?;
        let words = &bitmap[..log.words().len()];
        match self.clear_words(logging, 0, words) {
            Ok(_) => Ok(dirty),
            Err(error) => {
                // A page too many does no harm.
                words.iter().enumerate().for_each(|(word, &bits)| log.add(word, bits));
                Err(error)
            }
        }
    }

    /// Moves dirty bits from the leaves into the log; tries again while another thread holds an
    /// entry.
    fn harvest(
        &mut self,
        tables: &'w Tables<'w, F, H>,
        logging: &Logs,
        bitmap: &mut [u64],
    ) -> Result<(), LogError> {
        let Logs { spec, log, spilled_bits } = logging;
        let mut result = Ok(());
        for _ in 0..PATIENCE {
            bitmap.fill(0);
            let step = self.with_memslots(tables, |view, Inside { guard, .. }| {
                if !view.logs_into(spec, log) {
                    return Err(LogError::Missing { id: spec.id });
                }
                // The log takes the marks, which are yet to be reported to the host.
                let _moving = spilled_bits.as_ref().map(|spilled_bits| spilled_bits.moves.begin());
                // Harvests the whole range again: marks found before are in the log, and their
                // leaves are clean.
                let found = guard.harvest(spec.range(), bitmap);
                for (word, &bits) in bitmap.iter().enumerate() {
                    log.add(word, bits);
                    spilled_bits
                        .iter()
                        .for_each(|spilled_bits| spilled_bits.written.add(word, bits));
                }
                Ok(found)
            })?;
            match step {
                Ok(_) => return Ok(()),
                Err(Interruption { at, reason: ChangeError::CutsBlock { .. } }) => {
                    result = Err(LogError::Contended { at });
                    match self.cut_ends(spec) {
                        Ok(()) => {}
                        Err(Contention { at }) => return Err(LogError::Contended { at }),
                    }
                }
                Err(Interruption { at, reason }) => {
                    result = Err(LogError::changing(at, reason));
                    tables.platform().wait();
                }
            }
        }
        result
    }

    /// Returns the log of a memslot, if `given` words are enough for it.
    pub(crate) fn logging(&mut self, id: MemslotId, given: usize) -> Result<Logs, LogError> {
        let page = self.guest.page();
        let found = self.look(|view| {
            let memslot = view.named(id).filter(|memslot| !memslot.deleting)?;
            let begins =
                memslot.begins.as_ref().is_some_and(|begins| begins.load(Ordering::Acquire) == 0);
            let spilled_bits = Some(memslot.spilled_bits.clone());
            Some((Logs { spec: memslot.spec, log: memslot.log.clone()?, spilled_bits }, begins))
        });
        let (found, begins) = found.ok_or(LogError::Missing { id })?;
        if begins {
            return Err(LogError::Beginning { id });
        }
        let needed = found.spec.pages(page).div_ceil(64) as usize;
        if given < needed {
            return Err(LogError::Bitmap { needed, given });
        }
        Ok(found)
    }
}

/// A memslot that logs, as a look-up found it.
pub(crate) struct Logs {
    pub spec: MemslotSpec,
    pub log: Arc<Bits>,
    pub spilled_bits: Option<Arc<SpilledBits>>,
}
