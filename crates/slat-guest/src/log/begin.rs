//! A log begins, and ends, in the leaves that are there.

use crate::backing::{Backing, MAY_WRITE};
use crate::config::Logging;
use crate::eager::EagerSplit;
use crate::host::Host;
use crate::outcome::SplitReport;
use crate::ranges::pieces;
use crate::slots::spec::{SlotError, SlotSpec};
use crate::worker::{Inside, Worker};
use alloc::vec::Vec;
use slat::{ChangeError, Format, GpaRange, Granted, Guard, Halted, PageSize, Pages, Tables};

impl<'w, F: Format, H: Host, B: Backing> Worker<'w, F, H, B> {
    /// Room for what hardware has marked as a log begins, a piece of the slot at a time.
    pub(crate) fn scratch(&self, spec: &SlotSpec) -> Result<Vec<u64>, SlotError> {
        let mut words = Vec::new();
        if self.guest.config.logging == Logging::Hardware {
            let all = pieces(spec.range(), F::size(F::LARGEST_LEAF));
            let most = all.map(|piece| piece.size()).max();
            let pages = most.unwrap_or(0) >> F::PAGE_SHIFT;
            let len = pages.div_ceil(64) as usize;
            words.try_reserve_exact(len).map_err(|_| SlotError::OutOfMemory)?;
            words.resize(len, 0);
        }
        Ok(words)
    }

    /// All faults log by now: has nothing cross the ends of the slot. Blocks that are there are to
    /// be split to this size.
    pub(crate) fn begin_log(&mut self, spec: &SlotSpec) -> Option<PageSize> {
        // A change of slots waits for a thread that holds an entry, as long as that takes.
        while self.cut_ends(spec).is_err() {}
        let config = &self.guest.config;
        let split = self.guest.eager_split.get();
        split.filter(|_| !spec.log_blocks && !config.initially_set)
    }

    /// Whether a log that begins has anything to do with the leaves that are there.
    pub(crate) fn begins_in_leaves(&self) -> bool {
        self.guest.config.contiguous || !self.guest.config.initially_set
    }

    /// Takes from the leaves of `piece` what was given before the log; what is split, as asked for,
    /// is added. `scratch` has room for a piece.
    pub(crate) fn begin_log_in(
        &mut self,
        spec: &SlotSpec,
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

    /// Takes the right to write from all of `range`, to completion.
    fn protect(&mut self, tables: &'w Tables<'w, F, H>, range: GpaRange) {
        self.until_done(tables, range, |guard, rest| guard.write_protect(rest));
    }

    /// Blocks lose the right to write, pages their marks, which the host is still to be told of.
    fn begin_hardware_log(
        &mut self,
        tables: &'w Tables<'w, F, H>,
        spec: &SlotSpec,
        range: GpaRange,
        scratch: &mut [u64],
    ) {
        self.until_done(tables, range, |guard, rest| {
            let mut from = rest;
            loop {
                let leaves = guard.leaves(from).map_err(|why| Halted { at: from.start(), why })?;
                // Blocks do not come to be in a slot that logs (`blocks`): none is behind this.
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
        let kept = self.look(|view| view.named(spec.id).map(|slot| slot.kept.clone()));
        for piece in pieces(range, F::size(F::LARGEST_LEAF)) {
            let moving = kept.as_ref().map(|kept| kept.moves.begin());
            let words = &mut scratch[..(piece.size() >> F::PAGE_SHIFT).div_ceil(64) as usize];
            words.fill(0);
            loop {
                let result = self.inside(tables, |Inside { guard, .. }| {
                    guard.owe(piece).expect("a slot's pages");
                    guard.harvest(piece, words)
                });
                match result {
                    Ok(_) => break,
                    Err(Halted { why: ChangeError::CutsBlock { .. }, .. }) => {
                        while self.cut_ends(spec).is_err() {}
                    }
                    Err(Halted { why: ChangeError::Contended, .. }) => tables.platform().wait(),
                    Err(Halted { why, .. }) => unreachable!("a slot's pages, and bits: {why}"),
                }
            }
            let Some(kept) = &kept else {
                self.guest.piece_done(piece);
                continue;
            };
            for (first, count) in (Pages { start: piece.start(), bits: words }).runs() {
                let at = piece.start().0 + ((first as u64) << F::PAGE_SHIFT);
                kept.written.mark::<F>(spec, at, (count as u64) << F::PAGE_SHIFT);
            }
            drop(moving);
            self.guest.piece_done(piece);
        }
    }

    /// No fault logs any more: brings huge pages of `piece` back in place. Those that may not be
    /// executed come back so, by recovery, where their pages may.
    pub(crate) fn end_log_in(&mut self, spec: &SlotSpec, piece: GpaRange) -> u64 {
        self.one_right_to_write(piece);
        let bytes = self.collapse_if(piece, self.guest.config.largest, |_| true);
        self.hand_to_recovery(spec, piece);
        bytes
    }

    /// Leaves that were protected differ from those that were not: all become writable that may be,
    /// or, where hardware would not mark the next write, none is, until a block is written again as
    /// a whole. In a slot that cannot begin to log meanwhile.
    fn one_right_to_write(&mut self, range: GpaRange) {
        let guest = self.guest;
        if guest.marks_writes {
            // No vCPU waits for it: one that holds the old rights faults, and is answered.
            let change = |guard: &mut Guard<'_, 'w, F, H>, rest| {
                guard.allow_write(rest, MAY_WRITE).map(Granted::elsewhere)
            };
            self.until_done(&guest.tables, range, change);
        } else {
            self.protect(&guest.tables, range);
        }
    }
}
