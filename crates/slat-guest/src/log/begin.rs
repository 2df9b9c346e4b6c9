//! The beginning and the end of a log, in the leaves that exist.

use crate::backing::{Backing, MAY_WRITE};
use crate::config::Logging;
use crate::eager::EagerSplit;
use crate::host::Host;
use crate::memslots::spec::{MemslotError, MemslotSpec};
use crate::outcome::SplitReport;
use crate::ranges::pieces;
use crate::worker::{Inside, Worker};
use alloc::vec::Vec;
use slat::{
    Access, ChangeError, Format, GpaRange, Guard, Interruption, LocalFlush, PageSize, Pages, Relax,
    Tables,
};

impl<'w, F: Format, H: Host, B: Backing> Worker<'w, F, H, B> {
    /// Allocates room for hardware's marks in one piece of the memslot, if hardware logs.
    pub(crate) fn scratch(&self, spec: &MemslotSpec) -> Result<Vec<u64>, MemslotError> {
        let mut words = Vec::new();
        if self.guest.config.logging == Logging::Hardware {
            let all = pieces(spec.range(), F::size(F::LARGEST_LEAF));
            let most = all.map(|piece| piece.size()).max();
            let pages = most.unwrap_or(0) >> F::PAGE_SHIFT;
            let len = pages.div_ceil(64) as usize;
            words.try_reserve_exact(len).map_err(|_| MemslotError::OutOfMemory)?;
            words.resize(len, 0);
        }
        Ok(words)
    }

    /// Splits the leaves that cross an end of the memslot. All faults log by now. Returns the size
    /// to which existing blocks are to be split, if they are.
    pub(crate) fn begin_log(&mut self, spec: &MemslotSpec) -> Option<PageSize> {
        // A change of memslots waits for a thread that holds an entry, however long that takes.
        while self.cut_ends(spec).is_err() {}
        let config = &self.guest.config;
        config.eager_split.filter(|_| !spec.log_blocks && !config.initially_set)
    }

    /// Returns whether a log that begins has to change existing leaves.
    pub(crate) fn begins_in_leaves(&self) -> bool {
        self.guest.config.contiguous || !self.guest.config.initially_set
    }

    /// Takes from the leaves of `piece` the rights that faults gave them before the log. The result
    /// of the eager split, if there is one, is added to `split`. `scratch` has room for a piece.
    pub(crate) fn begin_log_in(
        &mut self,
        spec: &MemslotSpec,
        piece: GpaRange,
        split: &mut Option<(PageSize, SplitReport)>,
        scratch: &mut [u64],
    ) {
        let guest = self.guest;
        if guest.config.contiguous {
            for tables in guest.spaces() {
                self.until_done(tables, piece, |guard, rest| guard.unfold(rest));
            }
        }
        if guest.config.initially_set {
            return;
        }
        if let Some((to, all)) = split.as_mut().filter(|(_, all)| all.stopped.is_none()) {
            let more = EagerSplit::new(piece, *to).run(self, || false);
            all.split += more.split;
            all.done += more.done;
            all.stopped = more.stopped;
        }
        for tables in guest.spaces() {
            match guest.config.logging {
                Logging::Protect => self.protect(tables, piece),
                Logging::Hardware => self.begin_hardware_log(tables, spec, piece, scratch),
            }
        }
    }

    /// Write-protects all of `range`, and completes the invalidation.
    fn protect(&mut self, tables: &'w Tables<'w, F, H>, range: GpaRange) {
        self.until_done(tables, range, |guard, rest| guard.write_protect(rest));
    }

    /// Write-protects blocks, and takes the dirty marks from pages; the marks are kept for the
    /// host.
    fn begin_hardware_log(
        &mut self,
        tables: &'w Tables<'w, F, H>,
        spec: &MemslotSpec,
        range: GpaRange,
        scratch: &mut [u64],
    ) {
        self.until_done(tables, range, |guard, rest| {
            let mut from = rest;
            loop {
                let leaves = guard
                    .leaves(from)
                    .map_err(|reason| Interruption { at: from.start(), reason })?;
                // No thread makes a block in a memslot that logs (`blocks`), so there is none
                // behind this.
                let block = leaves.flatten().find(|leaf| leaf.size > F::size(0));
                let Some(block) = block else { break };
                let range = GpaRange::new(block.gpa, block.size.bytes());
                let range = range.expect("a leaf is not empty");
                guard.write_protect(range)?;
                let left = rest.end().0.saturating_sub(range.end().0);
                let Ok(behind) = GpaRange::new(range.end(), left) else { break };
                from = behind;
            }
            Ok(0)
        });
        let spilled_bits =
            self.look(|view| view.named(spec.id).map(|memslot| memslot.spilled_bits.clone()));
        for piece in pieces(range, F::size(F::LARGEST_LEAF)) {
            let moving = spilled_bits.as_ref().map(|spilled_bits| spilled_bits.moves.begin());
            let words = &mut scratch[..(piece.size() >> F::PAGE_SHIFT).div_ceil(64) as usize];
            words.fill(0);
            loop {
                let result = self.inside(tables, |Inside { guard, .. }| {
                    guard.defer_invalidation(piece).expect("a memslot's pages");
                    guard.harvest(piece, words)
                });
                match result {
                    Ok(_) => break,
                    Err(Interruption { reason: ChangeError::CutsBlock { .. }, .. }) => {
                        while self.cut_ends(spec).is_err() {}
                    }
                    Err(Interruption { reason: ChangeError::Contended, .. }) => {
                        tables.platform().wait()
                    }
                    Err(Interruption { reason, .. }) => {
                        unreachable!("a memslot's pages, and bits: {reason}")
                    }
                }
            }
            let Some(spilled_bits) = &spilled_bits else {
                self.guest.piece_done(piece);
                continue;
            };
            for (first, count) in (Pages { start: piece.start(), bits: words }).runs() {
                let at = piece.start().0 + ((first as u64) << F::PAGE_SHIFT);
                spilled_bits.written.mark::<F>(spec, at, (count as u64) << F::PAGE_SHIFT);
            }
            drop(moving);
            self.guest.piece_done(piece);
        }
    }

    /// Collapses the tables of `piece` into huge pages. No fault logs any more. If huge pages may
    /// not be executed, tables with executable pages are handed to recovery. A table whose entry
    /// another thread holds stays a table, as [`MemslotChange::LogOff`](crate::MemslotChange) says.
    pub(crate) fn end_log_in(&mut self, spec: &MemslotSpec, piece: GpaRange) -> u64 {
        self.one_right_to_write(piece);
        let bytes = self.collapse_if(piece, self.guest.config.largest, |_| true);
        self.hand_to_recovery(spec, piece);
        bytes
    }

    /// Makes the right to write the same in all leaves of a log that has ended, of which some were
    /// write-protected, so that they can become blocks. If hardware marks writes, all leaves that
    /// may be written become writable. If not, all are write-protected, until a block is written
    /// again as a whole. The memslot cannot begin to log meanwhile.
    fn one_right_to_write(&mut self, range: GpaRange) {
        let guest = self.guest;
        if guest.marks_writes {
            let change = |guard: &mut Guard<'_, 'w, F, H>, rest| {
                guard
                    .relax(rest, Relax::new(Access::Write).only_if(MAY_WRITE).unmarked())
                    .map(LocalFlush::not_needed_here)
            };
            self.until_given(&guest.tables, range, change);
        } else {
            self.protect(&guest.tables, range);
        }
    }
}
