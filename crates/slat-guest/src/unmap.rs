//! Unmapping of leaves, and the marks that are kept for their pages.

use crate::backing::Backing;
use crate::config::Logging;
use crate::guest::Guest;
use crate::host::Host;
use crate::memslots::{Memslot, MemslotSnapshot};
use crate::private::{MemoryKind, PrivateLeaves};
use crate::ranges::widened;
use alloc::vec::Vec;
use slat::{
    Format, GpaRange, Guard, Interruption, Maintenance, Memory, Tables, UnmapBatch, UnmapEntry,
    UnmapError, UnmappedRun,
};

/// The number of runs of neighbouring leaves that are unmapped for one TLB invalidation.
const BATCH: usize = 64;

impl<'p, F: Format, H: Host, B: Backing> Guest<'p, F, H, B> {
    /// Adds the dirty marks of unmapped leaves to the log of every memslot that has some of the
    /// pages, if hardware's marks are a part of the log.
    pub(crate) fn spill_dirty(&self, view: &MemslotSnapshot, removed: &UnmappedRun) {
        if self.config.logging != Logging::Hardware || !removed.attributes.dirty {
            return;
        }
        let all = GpaRange::new(removed.gpa, removed.bytes).expect("a leaf is not empty");
        for (memslot, part) in view.parts(&all) {
            if let Some(log) = &memslot.log {
                log.mark::<F>(&memslot.spec, part.start().0, part.size());
            }
        }
    }

    /// Keeps all marks of unmapped leaves, for pages that stay the guest's. The caller has
    /// announced the move ([`Guest::marks_in_flight`]) before it unmapped them.
    pub(crate) fn spill_marks(&self, view: &MemslotSnapshot, removed: &UnmappedRun) {
        self.spill_dirty(view, removed);
        let all = GpaRange::new(removed.gpa, removed.bytes).expect("a leaf is not empty");
        for (memslot, part) in view.parts(&all) {
            let spilled_bits = &memslot.spilled_bits;
            // A log that takes the mark of the leaf may not have added it to `written` yet.
            if removed.attributes.dirty || spilled_bits.moves.any() {
                spilled_bits.written.mark::<F>(&memslot.spec, part.start().0, part.size());
            }
            if removed.attributes.accessed {
                spilled_bits.used.mark::<F>(&memslot.spec, part.start().0, part.size());
            }
        }
    }

    /// Reports private memory among `removed` to the machine. The memslot's pages are not being
    /// converted.
    pub(crate) fn report_private(&self, memslot: &Memslot, removed: &UnmappedRun) {
        let all = GpaRange::new(removed.gpa, removed.bytes).expect("a leaf is not empty");
        let Some(part) = memslot.spec.common(&all).filter(|_| memslot.kinds.is_some()) else {
            return;
        };
        for run in memslot.runs::<F>(part, MemoryKind::Private) {
            let (gpa, bytes) = (run.start(), run.size());
            let hpa = slat::Hpa(removed.hpa.0 + (gpa.0 - removed.gpa.0));
            self.counters.private_bytes_taken.add(bytes);
            let leaves = PrivateLeaves { gpa, hpa, bytes };
            self.tables.platform().private_hooks().removed(leaves);
        }
    }

    /// Unmaps `ranges`, and blocks that cross their ends. Calls `removed` with each unmapped part,
    /// once no CPU can access it and it is maintained, because a vCPU may have written it past the
    /// caches. If that call panics, the marks of the parts behind it, and of its own, are kept.
    pub(crate) fn unmap(
        &self,
        view: &MemslotSnapshot,
        tables: &Tables<'p, F, H>,
        guard: &mut Guard<'_, 'p, F, H>,
        ranges: impl IntoIterator<Item = GpaRange>,
        mut removed: impl FnMut(UnmappedRun),
    ) -> u64 {
        self.remove(view, tables, guard, ranges, |leaves| {
            if self.caches.matters() && leaves.attributes.memory == Memory::Normal {
                tables.platform().maintain(leaves.hpa, leaves.bytes, Maintenance::Data);
                self.counters.flushed_bytes.add(leaves.bytes);
            }
            removed(leaves);
        })
    }

    /// As [`Guest::unmap`], for memory that is already maintained. Waits for threads that hold an
    /// entry; they do not hold it for long.
    pub(crate) fn remove(
        &self,
        view: &MemslotSnapshot,
        tables: &Tables<'p, F, H>,
        guard: &mut Guard<'_, 'p, F, H>,
        ranges: impl IntoIterator<Item = GpaRange>,
        mut removed: impl FnMut(UnmappedRun),
    ) -> u64 {
        if !self.config.devices || !core::ptr::eq(tables, &*self.tables) {
            return self.remove_alone(tables, guard, ranges, |leaves| {
                UnreportedLeaves { guest: self, view, now: None, leaves }.report(&mut removed)
            });
        }
        let host = tables.platform();
        let turn = self.device_notifier_lock.take(host);
        let mut all = Vec::new();
        let bytes = self.remove_alone(tables, guard, ranges, |leaves| {
            leaves.map(|leaves| (all.push(leaves), leaves.bytes).1).sum()
        });
        let all = UnreportedLeaves { guest: self, view, now: None, leaves: all.into_iter() };
        each_even_if_one_panics(all.leaves.as_slice().iter(), |leaves| {
            let range = GpaRange::new(leaves.gpa, leaves.bytes).expect("a leaf is not empty");
            host.device_tables().unmapped(range);
        });
        drop(turn);
        // Outside the lock: while a fault waits for this lock the backing may hold a lock of its
        // own ([`Backing::make_writable`]), and `removed` may take the backing's.
        all.report(&mut removed);
        bytes
    }

    /// Unmaps `ranges`; calls `removed` with the leaves of each batch, which returns their bytes.
    fn remove_alone(
        &self,
        tables: &Tables<'p, F, H>,
        guard: &mut Guard<'_, 'p, F, H>,
        ranges: impl IntoIterator<Item = GpaRange>,
        mut removed: impl FnMut(&mut dyn Iterator<Item = UnmappedRun>) -> u64,
    ) -> u64 {
        let mut storage = [const { UnmapEntry::EMPTY }; BATCH];
        let mut batch = UnmapBatch::new(tables, &mut storage);
        let mut bytes = 0;
        let mut complete = |batch: &mut UnmapBatch<'_, '_, F, H>| {
            let before = bytes;
            bytes += removed(&mut batch.complete());
            self.counters.invalidations.add(u64::from(bytes != before));
            bytes
        };
        for range in ranges {
            let mut rest = range;
            loop {
                let at = match guard.unmap(rest, &mut batch) {
                    Err(Interruption { reason: UnmapError::CutsBlock { .. }, .. }) => {
                        complete(&mut batch);
                        match widened(guard, rest) {
                            Ok(wider) => rest = wider,
                            Err(_) => tables.platform().wait(),
                        }
                        continue;
                    }
                    Err(Interruption { at, reason: UnmapError::Full }) => {
                        complete(&mut batch);
                        at
                    }
                    Err(Interruption { at, reason: UnmapError::Contended }) => {
                        complete(&mut batch);
                        tables.platform().wait();
                        at
                    }
                    Ok(_) => break,
                    Err(Interruption { reason, .. }) => {
                        unreachable!("a memslot's pages, these tables': {reason}")
                    }
                };
                match GpaRange::new(at, rest.end().0.saturating_sub(at.0)) {
                    Ok(behind) => rest = behind,
                    Err(_) => break,
                }
            }
        }
        complete(&mut batch)
    }
}

/// Unmapped leaves that are being reported. If a report panics, this keeps the marks of all leaves
/// whose report has not returned, for the next thread that asks.
struct UnreportedLeaves<'g, 'p, F: Format, H: Host, B: Backing, I: Iterator<Item = UnmappedRun>> {
    guest: &'g Guest<'p, F, H, B>,
    view: &'g MemslotSnapshot,
    /// The leaves whose report is under way.
    now: Option<UnmappedRun>,
    leaves: I,
}

impl<F: Format, H: Host, B: Backing, I: Iterator<Item = UnmappedRun>>
    UnreportedLeaves<'_, '_, F, H, B, I>
{
    /// Reports the leaves; returns their bytes.
    fn report(mut self, removed: &mut impl FnMut(UnmappedRun)) -> u64 {
        let mut bytes = 0;
        for leaves in self.leaves.by_ref() {
            self.now = Some(leaves);
            removed(leaves);
            self.now = None;
            bytes += leaves.bytes;
        }
        bytes
    }
}

impl<F: Format, H: Host, B: Backing, I: Iterator<Item = UnmappedRun>> Drop
    for UnreportedLeaves<'_, '_, F, H, B, I>
{
    fn drop(&mut self) {
        // The report may have taken marks that were kept for these pages.
        if let Some(mut now) = self.now.take() {
            (now.attributes.dirty, now.attributes.accessed) = (true, true);
            self.guest.spill_marks(self.view, &now);
        }
        for leaves in self.leaves.by_ref() {
            self.guest.spill_marks(self.view, &leaves);
        }
    }
}

/// Calls `call` with each item, also with those behind an item for which it panics: the other side
/// must not keep memory that is no longer the guest's.
pub(crate) fn each_even_if_one_panics<T>(items: impl Iterator<Item = T>, call: impl FnMut(T)) {
    struct All<T, I: Iterator<Item = T>, C: FnMut(T)>(I, C);

    impl<T, I: Iterator<Item = T>, C: FnMut(T)> Drop for All<T, I, C> {
        fn drop(&mut self) {
            self.0.by_ref().for_each(&mut self.1);
        }
    }

    let mut all = All(items, call);
    for item in all.0.by_ref() {
        (all.1)(item);
    }
}
