//! Conversions of pages to private memory, or back; invalidations of private memory by its owner.
//!
//! [`memslots::kinds`](crate::memslots) has the order of the steps, and the reason why no leaf is
//! of the wrong kind.

use crate::backing::{Backing, Hva, HvaRange};
use crate::host::Host;
use crate::invalidate::UnmappedPages;
use crate::invalidations::InvalidationInProgress;
use crate::memslots::Memslot;
use crate::memslots::kinds::Kinds;
use crate::private::{Denial, MemoryKind, PrivateLeaves, PrivateRange};
use crate::ranges::{cut_by, pieces};
use crate::sync::agreed;
use crate::unmap::each_even_if_one_panics;
use crate::worker::{Inside, Worker};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;
use slat::{
    Format, Gpa, GpaRange, Interruption, OutOfFrames, SplitError, UnmapBatch, UnmapEntry,
    UnmapError,
};

/// Why pages were not converted, or private memory was not invalidated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ConvertError {
    /// The range does not begin and end at page boundaries.
    Unaligned,
    /// No memslot has these addresses, or the memslot has no private memory.
    NotPrivate,
    /// A device has some of the range pinned ([`Worker::pin`]).
    Pinned,
    /// The machine refuses.
    Denied(Denial),
    /// A private block has to be split, and the platform has no table pages.
    OutOfFrames(OutOfFrames),
    /// The tables refuse to split a private block.
    Split(SplitError),
}

impl fmt::Display for ConvertError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unaligned => f.write_str("what is converted is a multiple of the page size"),
            Self::NotPrivate => f.write_str(
                "no memslot has these addresses, or it was made without private memory \
                 (`MemslotSpec::private`)",
            ),
            Self::Pinned => f.write_str("a device has some of the range pinned; let it go first"),
            Self::Denied(reason) => reason.fmt(f),
            Self::OutOfFrames(reason) => reason.fmt(f),
            Self::Split(reason) => reason.fmt(f),
        }
    }
}

impl core::error::Error for ConvertError {}

/// The number of runs of leaves that are unmapped for one TLB invalidation.
const BATCH: usize = 64;

impl<'w, F: Format, H: Host, B: Backing> Worker<'w, F, H, B> {
    /// Makes all of `range` shared, or private; returns the number of pages that were of the other
    /// kind. It calls `taken` with the shared pages that were mapped, as [`Worker::invalidate`]
    /// does. Blocks of shared memory that cross an end of the range are unmapped whole; private
    /// ones are split.
    ///
    /// When this returns, no CPU can access by these addresses the memory that was there before,
    /// and faults map memory of the new kind; a memslot with the same host memory keeps its own
    /// mapping. Until then their outcome is [`Retry::Converting`](crate::Retry::Converting). The
    /// content is not carried over. Conversions take turns with each other and with changes of
    /// memslots, and wait until faults that saw the pages before have returned: the caller holds no
    /// lock that [`Backing::page`] or [`Backing::private_page`] takes.
    ///
    /// # Errors
    /// - [`ConvertError::Unaligned`], [`ConvertError::Pinned`], [`ConvertError::NotPrivate`]:
    ///   nothing was done. For `NotPrivate` the address is the first that is not in a memslot with
    ///   private memory.
    /// - Other errors, and a panic of `taken` or of a hook: everything before the address is
    ///   converted, and nothing behind it is. Private leaves behind it may have been split, or
    ///   unmapped; faults map them again.
    pub fn convert(
        &mut self,
        range: GpaRange,
        to: MemoryKind,
        mut taken: impl FnMut(UnmappedPages),
    ) -> Result<u64, Interruption<ConvertError>> {
        let guest = self.guest;
        let stopped = |at, reason| Err(Interruption { at, reason });
        if (range.start().0 | range.size()) & (F::size(0).bytes() - 1) != 0 {
            return stopped(range.start(), ConvertError::Unaligned);
        }
        let _turn = guest.change_turn();
        let parts = self.look(|view| {
            let parts = view.parts(&range);
            let parts = parts.filter_map(|(memslot, part)| {
                Some((memslot.clone(), memslot.kinds.clone()?, part))
            });
            parts.collect::<Vec<_>>()
        });
        let mut covered = range.start();
        for (.., part) in parts.iter().filter(|(memslot, ..)| !memslot.deleting) {
            if part.start() != covered {
                break;
            }
            covered = part.end();
        }
        if covered != range.end() {
            return stopped(covered, ConvertError::NotPrivate);
        }
        if guest.pins.overlap(&range) {
            return stopped(range.start(), ConvertError::Pinned);
        }
        let mut pages = 0;
        for (memslot, kinds, part) in &parts {
            for run in memslot.runs::<F>(*part, to.other()) {
                let converted = self.convert_run(memslot, kinds, run, to, &mut taken);
                converted.map_err(|reason| Interruption { at: run.start(), reason })?;
                let done = run.size() >> F::PAGE_SHIFT;
                guest.counters.converted_pages.add(done);
                pages += done;
            }
        }
        Ok(pages)
    }

    /// Converts `run`, whose pages are all of the other kind.
    fn convert_run(
        &mut self,
        memslot: &Memslot,
        kinds: &Arc<Kinds>,
        run: GpaRange,
        to: MemoryKind,
        taken: &mut impl FnMut(UnmappedPages),
    ) -> Result<(), ConvertError> {
        let guest = self.guest;
        // Ends also if `taken` or a hook panics: the pages then keep their kind.
        let changing = kinds.changing::<F>(&memslot.spec, &run);
        agreed();
        let emptied = self.unmap_run(memslot, run, to, taken);
        if emptied.is_ok() {
            guest.wait_for_faults();
            kinds.set::<F>(&memslot.spec, &run, to);
        }
        drop(changing);
        if emptied.is_ok() && to == MemoryKind::Private {
            // vCPUs that wait for the shared page, which may never arrive, ask again. A vCPU that
            // takes a place later asks the backing after this, and the page's new kind then decides
            // the answer.
            let (start, bytes) = (memslot.spec.host_of(run.start().0), run.size());
            guest.arrived(HvaRange { start, bytes });
        }
        emptied
    }

    /// Unmaps what is mapped in `run`, which is about to become `to`.
    fn unmap_run(
        &mut self,
        memslot: &Memslot,
        run: GpaRange,
        to: MemoryKind,
        taken: &mut impl FnMut(UnmappedPages),
    ) -> Result<(), ConvertError> {
        let guest = self.guest;
        if to == MemoryKind::Shared {
            self.split_ends(run)?;
        }
        let hooks = guest.tables.platform().private_hooks();
        hooks.convert(run, to).map_err(ConvertError::Denied)?;
        if to == MemoryKind::Shared {
            return self.take_private(run, &mut |_| {});
        }
        for piece in pieces(run, F::size(F::LARGEST_LEAF)) {
            let bytes = self.with_memslots(&guest.tables, |view, Inside { tables, guard, .. }| {
                let bytes = guest.unmap_for_host(view, tables, guard, [piece], taken);
                guest.report_taken(memslot, piece, None, taken);
                bytes
            });
            guest.counters.invalidated_bytes.add(bytes);
        }
        guest.tables.reclaim();
        Ok(())
    }

    /// Unmaps all private memory of the guest in `range`. It calls `removed` with what was mapped,
    /// after the machine's hook ([`PrivateHooks::removed`](crate::PrivateHooks::removed)). The
    /// pages stay private; a block that crosses an end of the range is split.
    ///
    /// When this returns the memory can be used for something else. No fault maps any of it until
    /// the result is dropped. This takes turns with changes of memslots and conversions, which wait
    /// for faults: the caller holds no lock that [`Backing::private_page`] takes.
    ///
    /// # Errors
    /// [`ConvertError`], but not `NotPrivate`: memory that is in no memslot is ignored. Everything
    /// before the address, in the order of the memslots, is unmapped.
    pub fn invalidate_private(
        &mut self,
        range: PrivateRange,
        mut removed: impl FnMut(PrivateLeaves),
    ) -> Result<InvalidationInProgress<'w>, Interruption<ConvertError>> {
        let guest = self.guest;
        if (range.start.0 | range.bytes) & (F::size(0).bytes() - 1) != 0 {
            return Err(Interruption { at: Gpa(0), reason: ConvertError::Unaligned });
        }
        let _turn = guest.no_change();
        let host = HvaRange { start: Hva(range.start.0), bytes: range.bytes };
        let invalidation = guest.private_invalidations.begin(&host);
        let parts = self.look(|view| {
            let memslots = view.iter();
            let part =
                |memslot: &Memslot| Some((memslot.clone(), memslot.spec.guest_of_private(&range)?));
            memslots.filter_map(part).collect::<Vec<_>>()
        });
        for (memslot, part) in parts {
            for run in memslot.runs::<F>(part, MemoryKind::Private) {
                let taken = self.take_private(run, &mut removed);
                taken.map_err(|reason| Interruption { at: run.start(), reason })?;
            }
        }
        Ok(invalidation)
    }

    /// Splits the private blocks that cross the ends of `range`.
    fn split_ends(&mut self, range: GpaRange) -> Result<(), ConvertError> {
        for at in [range.start(), range.end()] {
            self.split_private(at)?;
        }
        Ok(())
    }

    /// Splits the private block that has `at` inside it, if there is one. Only the thread that
    /// holds the lock for changes of memslots splits private blocks, and no thread makes one
    /// meanwhile: the pages on one side of `at` are being converted, or invalidated.
    fn split_private(&mut self, at: Gpa) -> Result<(), ConvertError> {
        let guest = self.guest;
        let host = guest.tables.platform();
        let mut told = None;
        loop {
            let found = self.inside(&guest.tables, |Inside { guard, .. }| {
                let leaf = cut_by(guard, at).ok()?;
                let leaf = leaf.map(|leaf| Some((leaf, guard.translate(at).ok()??)));
                leaf.map_or(Some(None), |leaf| leaf.map(Some))
            });
            // A fault is changing the entry, to mark it accessed.
            let Some(leaf) = found else {
                host.wait();
                continue;
            };
            let Some((block, byte)) = leaf else { return Ok(()) };
            // All table pages for the split, before the machine is asked.
            self.top_up(usize::from(F::LARGEST_LEAF) + 1).map_err(ConvertError::OutOfFrames)?;
            if told.replace(block.start()).is_none() {
                let hpa = slat::Hpa(byte.hpa.0 - (at.0 - block.start().0));
                let leaf = PrivateLeaves { gpa: block.start(), hpa, bytes: block.size() };
                host.private_hooks().split(leaf).map_err(ConvertError::Denied)?;
            }
            let page = GpaRange::new(at, F::size(0).bytes()).expect("a page is not empty");
            let split = self.inside(&guest.tables, |Inside { guard, cache, .. }| {
                let result = guard.split(page, F::size(0), cache);
                guest.counters.split_bytes.add(guard.counts().bytes_changed);
                result
            });
            match split {
                Ok(_) => return Ok(()),
                Err(Interruption {
                    reason: SplitError::Contended | SplitError::CacheEmpty,
                    ..
                }) => {
                    host.wait();
                }
                Err(Interruption { reason, .. }) => return Err(ConvertError::Split(reason)),
            }
        }
    }

    /// Unmaps exactly the private leaves of `range`, and reports them to the machine, then to
    /// `removed`.
    fn take_private(
        &mut self,
        range: GpaRange,
        removed: &mut impl FnMut(PrivateLeaves),
    ) -> Result<(), ConvertError> {
        let guest = self.guest;
        let host = guest.tables.platform();
        self.split_ends(range)?;
        for piece in pieces(range, F::size(F::LARGEST_LEAF)) {
            let mut rest = Some(piece);
            while let Some(range) = rest {
                let mut bytes = 0;
                let result = self.inside(&guest.tables, |Inside { tables, guard, .. }| {
                    let mut storage = [const { UnmapEntry::EMPTY }; BATCH];
                    let mut batch = UnmapBatch::new(tables, &mut storage);
                    let result = guard.unmap(range, &mut batch);
                    let leaves = batch.complete().map(|leaves| {
                        bytes += leaves.bytes;
                        PrivateLeaves { gpa: leaves.gpa, hpa: leaves.hpa, bytes: leaves.bytes }
                    });
                    each_even_if_one_panics(leaves, |leaves| {
                        host.private_hooks().removed(leaves);
                        removed(leaves);
                    });
                    result
                });
                guest.counters.private_bytes_taken.add(bytes);
                let behind = |at: Gpa| GpaRange::new(at, range.end().0.saturating_sub(at.0)).ok();
                rest = match result {
                    Ok(_) => None,
                    Err(Interruption { at, reason: UnmapError::Full }) => behind(at),
                    Err(Interruption { at, reason: UnmapError::Contended }) => {
                        host.wait();
                        behind(at)
                    }
                    // A fault that saw the pages before the change has mapped a block meanwhile.
                    Err(Interruption { reason: UnmapError::CutsBlock { .. }, .. }) => {
                        self.split_ends(range)?;
                        Some(range)
                    }
                    Err(Interruption { reason, .. }) => {
                        unreachable!("a memslot's pages, these tables': {reason}")
                    }
                };
            }
        }
        guest.tables.reclaim();
        Ok(())
    }
}
