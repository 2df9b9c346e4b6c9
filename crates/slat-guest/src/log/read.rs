//! Reading the log: as it is, or to protect what was read at once.

use super::{Log, LogError, pages};
use crate::backing::Backing;
use crate::config::Logging;
use crate::guest::Worker;
use crate::host::Host;
use crate::slots::{SlotId, SlotSpec};
use crate::sync::Ordering;
use alloc::sync::Arc;
use slat::{Format, Gpa, GpaRange, Tables};

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
        let guest = self.guest;
        if guest.config.logging == Logging::Hardware {
            bitmap[..log.words().len()].fill(0);
            for tables in guest.spaces() {
                let harvested = self.harvest(tables, spec.range(), bitmap);
                log.words().iter().zip(&*bitmap).enumerate().for_each(|(word, (_, &bits))| {
                    log.add(word, bits);
                });
                harvested?;
            }
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
    /// Those of [`Worker::read_log`]; nothing is lost: what could not be protected is in the log
    /// still, as well as in `bitmap`.
    pub fn take_log(&mut self, id: SlotId, bitmap: &mut [u64]) -> Result<u64, LogError> {
        let dirty = self.read_log(id, bitmap)?;
        let (spec, log) = self.logging(id, bitmap.len())?;
        let words = &bitmap[..log.words().len()];
        self.clear_words(&spec, &log, 0, words)?;
        Ok(dirty)
    }

    /// Gathers dirty bits into `bitmap`, again where somebody held an entry.
    fn harvest(
        &mut self,
        tables: &'w Tables<'p, F, H>,
        range: GpaRange,
        bitmap: &mut [u64],
    ) -> Result<(), LogError> {
        let host = tables.platform();
        let mut start = range.start();
        let mut tries = 0u32;
        self.inside(tables, |guard, _| {
            loop {
                // From a page that a word begins with: bits are added.
                let first = ((start.0 - range.start().0) >> F::PAGE_SHIFT) / 64;
                let from = range.start().0 + (first << (F::PAGE_SHIFT + 6));
                let rest = GpaRange::new(Gpa(from), range.end().0 - from).expect("not empty");
                let Err(halted) = guard.harvest(rest, &mut bitmap[first as usize..]) else {
                    return Ok(());
                };
                start = halted.at;
                tries += 1;
                if tries == super::PATIENCE {
                    return Err(LogError::Contended { at: halted.at });
                }
                host.wait();
            }
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
