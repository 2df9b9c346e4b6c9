//! Reading the log: as it is, or to protect what was read at once.

use super::{Log, LogError, pages};
use crate::backing::Backing;
use crate::config::Logging;
use crate::guest::Worker;
use crate::host::Host;
use crate::slots::{SlotId, SlotSpec};
use crate::sync::Ordering;
use alloc::sync::Arc;
use slat::{Format, Tables};

impl<'w, 'p, F: Format, H: Host, B: Backing> Worker<'w, 'p, F, H, B> {
    /// Copies the log of `id` into `bitmap`, a bit a page; returns how many pages are dirty. Nothing is
    /// cleared: what is read is dirty until [`Worker::clear_log`], however often it is read
    /// (Linux: `KVM_GET_DIRTY_LOG` with manual protection).
    ///
    /// With [`Logging::Hardware`] the dirty bits are gathered first, to completion: a page that is
    /// not named was not written since it was cleared.
    ///
    /// # Errors
    /// [`LogError::Missing`], [`LogError::Bitmap`]: nothing was done. [`LogError::Contended`]: what was
    /// gathered is in the log.
    pub fn read_log(&mut self, id: SlotId, bitmap: &mut [u64]) -> Result<u64, LogError> {
        let (spec, log) = self.logging(id, bitmap.len())?;
        self.read(&spec, &log, bitmap)
    }

    fn read(
        &mut self,
        spec: &SlotSpec,
        log: &Arc<Log>,
        bitmap: &mut [u64],
    ) -> Result<u64, LogError> {
        let guest = self.guest;
        if guest.config.logging == Logging::Hardware {
            for tables in guest.spaces() {
                self.harvest(tables, spec, log, &mut bitmap[..log.words().len()])?;
            }
            // What others have taken from leaves is in the log once they have left them.
            guest.wait_for_faults();
        }
        guest.counters.log_reads.add(1);
        let copy = |(to, from): (&mut u64, &crate::sync::AtomicU64)| {
            *to = from.load(Ordering::Acquire);
            u64::from(to.count_ones())
        };
        Ok(bitmap.iter_mut().zip(log.words()).map(copy).sum())
    }

    /// Moves the log of `id` into `bitmap`, and protects what was in it: when this returns, every later
    /// write is in the log again (Linux: `KVM_GET_DIRTY_LOG` without manual protection). Returns how
    /// many pages were dirty.
    ///
    /// # Errors
    /// Those of [`Worker::read_log`]; nothing is lost: all that was read is in the log still.
    pub fn take_log(&mut self, id: SlotId, bitmap: &mut [u64]) -> Result<u64, LogError> {
        let (spec, log) = self.logging(id, bitmap.len())?;
        let dirty = self.read(&spec, &log, bitmap)?;
        let words = &bitmap[..log.words().len()];
        match self.clear_words(&spec, &log, 0, words) {
            Ok(_) => Ok(dirty),
            Err(error) => {
                // A page too many is no harm.
                words.iter().enumerate().for_each(|(word, &bits)| log.add(word, bits));
                Err(error)
            }
        }
    }

    /// Moves dirty bits from the leaves into the log, again where somebody held an entry.
    fn harvest(
        &mut self,
        tables: &'w Tables<'p, F, H>,
        spec: &SlotSpec,
        log: &Arc<Log>,
        bitmap: &mut [u64],
    ) -> Result<(), LogError> {
        let range = spec.range();
        bitmap.fill(0);
        self.with_slots(tables, |view, guard, _| {
            if !view.logs_into(spec, log) {
                return Err(LogError::Missing { id: spec.id });
            }
            let mut result = Ok(());
            for _ in 0..super::PATIENCE {
                // All over: what was found before is in the bitmap, and its leaves are clean.
                match guard.harvest(range, bitmap) {
                    Ok(_) => {
                        result = Ok(());
                        break;
                    }
                    Err(halted) => result = Err(LogError::Contended { at: halted.at }),
                }
                tables.platform().wait();
            }
            bitmap.iter().enumerate().for_each(|(word, &bits)| log.add(word, bits));
            result
        })
    }

    /// The log of a slot, if `given` words are enough for it.
    pub(crate) fn logging(
        &mut self,
        id: SlotId,
        given: usize,
    ) -> Result<(SlotSpec, Arc<Log>), LogError> {
        let page = self.guest.page();
        let found = self.look(|view| {
            let slot = view.named(id).filter(|slot| !slot.going)?;
            Some((slot.spec, slot.log.clone()?))
        });
        let (spec, log) = found.ok_or(LogError::Missing { id })?;
        let needed = pages(&spec, page).div_ceil(64) as usize;
        if given < needed {
            return Err(LogError::Bitmap { needed, given });
        }
        Ok((spec, log))
    }
}
