//! Harvesting and resetting dirty rings.

use super::LogError;
use super::clear::{Clear, ClearCounts};
use crate::backing::Backing;
use crate::host::Host;
use crate::memslots::spec::MemslotId;
use crate::ring::DirtyPage;
use crate::worker::Worker;
use alloc::sync::Arc;
use slat::{Format, Gpa, Shootdown};

/// Neighbouring pages of one memslot: a word of a bitmap.
#[derive(Clone, Copy)]
struct Batch {
    memslot: MemslotId,
    start: u64,
    bits: u64,
}

impl Batch {
    fn of(page: DirtyPage) -> Self {
        Self { memslot: page.memslot, start: page.page, bits: 1 }
    }

    /// Adds a page within 64 of the others, before or behind them; returns whether it could.
    fn add(&mut self, page: DirtyPage) -> bool {
        let DirtyPage { memslot, page } = page;
        if memslot != self.memslot {
            return false;
        }
        if page >= self.start {
            let bit = page - self.start;
            if bit < 64 {
                self.bits |= 1 << bit;
            }
            return bit < 64;
        }
        let shift = self.start - page;
        let fits = shift <= u64::from(self.bits.leading_zeros());
        if fits {
            (self.start, self.bits) = (page, self.bits << shift | 1);
        }
        fits
    }
}

impl<'w, F: Format, H: Host, B: Backing> Worker<'w, F, H, B> {
    /// Takes the pages that vCPU `vcpu` wrote, in order, as many as fit into `pages`; returns how
    /// many. The caller copies them after [`Worker::reset_rings`]. One thread at a time harvests a
    /// ring. If the guest has no such vCPU, the result is 0.
    pub fn harvest_ring(&mut self, vcpu: u16, pages: &mut [DirtyPage]) -> usize {
        self.guest.rings.get(vcpu as usize).map_or(0, |ring| ring.harvest(pages))
    }

    /// Write-protects all pages that were harvested, of all rings, and empties their entries;
    /// returns the number of entries. When this returns, every later write to these pages goes into
    /// a ring again.
    ///
    /// # Errors
    /// [`LogError::Contended`], and the other errors of a clear. The entries of that ring, and of
    /// the rings after it, stay as they were, and a later call can reset them.
    pub fn reset_rings(&mut self) -> Result<u64, LogError> {
        let guest = self.guest;
        let _turn = guest.resetting.take(guest.tables.platform());
        let mut total = 0;
        for ring in &guest.rings {
            let entries = ring.harvested();
            let mut batch: Option<Batch> = None;
            // One invalidation for all of the ring's pages.
            let mut owed = None;
            for page in entries.clone().map(|index| ring.page(index)) {
                if batch.as_mut().is_none_or(|batch| !batch.add(page)) {
                    batch.map_or(Ok(()), |batch| self.protect_batch(&batch, &mut owed))?;
                    batch = Some(Batch::of(page));
                }
            }
            batch.map_or(Ok(()), |batch| self.protect_batch(&batch, &mut owed))?;
            if let Some(shootdown) = owed {
                shootdown.complete();
            }
            let count = entries.end - entries.start;
            ring.empty(entries);
            self.counters.ring_resets.add(count);
            total += count;
        }
        Ok(total)
    }

    /// Write-protects the pages of a batch. The invalidations owed in the tables that vCPUs share
    /// are added to `owed`; those in vCPUs' own tables are completed here.
    fn protect_batch(
        &mut self,
        batch: &Batch,
        owed: &mut Option<Shootdown<'w, 'w, F, H>>,
    ) -> Result<(), LogError> {
        let guest = self.guest;
        let memslot = self.look(|view| {
            let memslot = view.named(batch.memslot)?;
            Some((memslot.spec, memslot.log.clone()?))
        });
        // A memslot that was deleted meanwhile has no writable page. One that does not log is
        // another one with that name, or logs no more.
        let Some((spec, log)) = memslot else { return Ok(()) };
        let start = Gpa(spec.gpa.0 + (batch.start << F::PAGE_SHIFT));
        // Pages beyond its end are of an earlier memslot with that name.
        let bits = match (spec.bytes >> F::PAGE_SHIFT).saturating_sub(batch.start) {
            0 => return Ok(()),
            pages if pages < 64 => batch.bits & ((1 << pages) - 1),
            _ => batch.bits,
        };
        for tables in guest.spaces() {
            self.with_memslots(tables, |view, inside| {
                // If it has moved since, its old addresses are empty, and writes at the new ones
                // have entries of their own.
                let same = view.named(spec.id).is_some_and(|memslot| {
                    memslot.spec == spec
                        && memslot.log.as_ref().is_some_and(|its| Arc::ptr_eq(its, &log))
                });
                if !same {
                    return Ok(());
                }
                let mut cleared = ClearCounts::default();
                // Rings need `Logging::Protect`, so no dirty mark is cleared.
                let split = guest.config.eager_split.filter(|_| !spec.log_blocks);
                let mut clear = Clear { cleared: &mut cleared, marks: None, split };
                let result = inside.clear(&mut clear, start, &[bits]).map_err(|(_, error)| error);
                if core::ptr::eq(tables, &*guest.tables) {
                    let own = tables.shootdown(&mut inside.guard).expect("a guard of these tables");
                    match owed {
                        None => *owed = Some(own),
                        Some(all) => all.merge(own),
                    }
                }
                result
            })?;
        }
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn page(page: u64) -> DirtyPage {
        DirtyPage { memslot: MemslotId(3), page }
    }

    #[test]
    fn a_batch_has_pages_that_lie_in_64_of_one_memslot() {
        let mut batch = Batch::of(page(100));
        assert!(batch.add(page(100)) && batch.add(page(102)) && batch.add(page(163)));
        assert_eq!((batch.start, batch.bits), (100, 1 << 63 | 0b101));
        for other in
            [page(164), page(165), page(99), DirtyPage { memslot: MemslotId(4), page: 101 }]
        {
            assert!(!batch.add(other), "{other:?}");
        }
        assert_eq!((batch.memslot, batch.start, batch.bits), (MemslotId(3), 100, 1 << 63 | 0b101));
    }

    #[test]
    fn a_batch_begins_at_its_first_page_whenever_that_comes() {
        let mut batch = Batch::of(page(100));
        assert!(batch.add(page(98)) && batch.add(page(99)) && batch.add(page(37)));
        assert_eq!((batch.start, batch.bits), (37, 1 << 63 | 1 << 62 | 1 << 61 | 1));
        assert!(!batch.add(page(36)) && !batch.add(page(101)));
    }
}
