//! Huge pages that are tables because pages of them may be executed come back after a period.

use crate::backing::{Backing, MAY_EXECUTE, MAY_WRITE};
use crate::bits::Splits;
use crate::host::Host;
use crate::ranges::pieces;
use crate::slots::Slot;
use crate::slots::spec::SlotSpec;
use crate::worker::{Inside, Worker};
use alloc::sync::Arc;
use alloc::vec::Vec;
use slat::{Attributes, ChangeError, Execute, Format, Gpa, GpaRange, Granted, Guard, Halted, Leaf};

/// What a turn of recovery did.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Recovered {
    /// Bytes of blocks that came back, without the right to execute; of each size for itself.
    pub bytes: u64,
    /// Tables that were left: of slots that log, or whose pages are not all there, or differ.
    pub left: u64,
}

impl<'w, F: Format, H: Host, B: Backing> Worker<'w, F, H, B> {
    /// Ends a period: tables that got executable pages in the period before it become blocks again,
    /// without the right to execute. Those of slots that log are kept for later, and so are those
    /// that cannot be blocks yet, whose pages keep their rights.
    ///
    /// Called once a period, whose length is the caller's to choose (Linux: an hour for all of
    /// them).
    pub fn recover_huge_pages(&mut self) -> Recovered {
        let guest = self.guest;
        let _turn = guest.recovering.lock();
        let mut recovered = Recovered::default();
        let slots = self.look(|view| {
            let kept = view.iter().filter(|slot| !slot.going);
            kept.filter_map(|slot| Some((slot.spec, slot.log.is_some(), slot.splits.clone()?)))
                .collect::<Vec<_>>()
        });
        for (spec, logs, splits) in slots {
            let mut tables = Vec::new();
            splits.turn::<F>(&spec, |gpa| tables.push(gpa));
            // Neighbours, as tables come in ascending order, become a larger block together.
            let mut larger = None;
            for gpa in tables {
                let bytes = if logs { None } else { self.recover(&spec, &splits, gpa) };
                let Some(bytes) = bytes else {
                    splits.add::<F>(&spec, gpa);
                    recovered.left += 1;
                    continue;
                };
                recovered.bytes += bytes;
                if larger.is_some_and(|last| (last ^ gpa) >> F::shift(2) != 0) {
                    recovered.bytes += larger.map_or(0, |last| self.enlarge(&spec, &splits, last));
                }
                larger = Some(gpa);
            }
            recovered.bytes += larger.map_or(0, |last| self.enlarge(&spec, &splits, last));
        }
        recovered
    }

    /// Makes the table at `gpa` a block; returns the bytes, none if it is one already. `None`:
    /// somebody held an entry, or it does not fit yet; it may another time.
    fn recover(&mut self, spec: &SlotSpec, splits: &Arc<Splits>, gpa: u64) -> Option<u64> {
        let guest = self.guest;
        let size = F::size(1);
        // A block cannot reach out of the slot, nor be where there are to be none: such a table is
        // forgotten.
        if !spec.fits(gpa, size.bytes()) || guest.config.largest < size {
            return Some(0);
        }
        let range = GpaRange::new(Gpa(gpa), size.bytes()).expect("a block is not empty");
        if guest.pins.overlap(&range) {
            return None;
        }
        let theirs = |slot: &Slot| slot.splits.as_ref().is_some_and(|it| Arc::ptr_eq(it, splits));
        // Looked at first, without taking anything: what does not fit is not to fault for it.
        let fits =
            self.inside(&guest.tables, |Inside { guard, .. }| like_a_block::<F, H>(guard, range))?;
        match fits {
            Fits::IsBlock => return Some(0),
            Fits::Table { execute, write } => {
                if execute {
                    let change =
                        |guard: &mut Guard<'_, 'w, F, H>, rest| guard.execute_protect(rest);
                    self.until_done(&guest.tables, range, change);
                }
                if write {
                    self.even_out(spec, range, theirs);
                }
            }
        }
        // The slot as it is by then: it may have begun to log, or be another.
        match self.collapse_if(range, size, theirs) {
            0 => None,
            bytes => Some(bytes),
        }
    }

    /// Pages of which some are protected since a log and others were written become alike, as at
    /// the log's end; not in a slot that has begun to log: it waits until this has left the tables,
    /// and protects all of them.
    fn even_out(&mut self, spec: &SlotSpec, range: GpaRange, theirs: impl Fn(&Slot) -> bool) {
        let guest = self.guest;
        self.with_slots(&guest.tables, |view, Inside { guard, .. }| {
            let slot = view.named(spec.id).filter(|slot| !slot.going && slot.log.is_none());
            if !slot.is_some_and(theirs) {
                return;
            }
            let result = match guest.marks_writes {
                // A vCPU that holds the old rights faults, and is answered.
                true => guard.allow_write(range, MAY_WRITE).map(Granted::elsewhere),
                false => guard.write_protect(range),
            };
            guard.complete();
            match result {
                // What somebody held is not alike: the table stays one until another time.
                Ok(_) | Err(Halted { why: ChangeError::Contended, .. }) => {}
                Err(Halted { why: ChangeError::CutsBlock { .. }, .. }) => {}
                Err(Halted { why, .. }) => unreachable!("a slot's pages: {why}"),
            }
        });
    }

    /// After a block of the second size came back: the larger ones around it, as far as they fit.
    fn enlarge(&mut self, spec: &SlotSpec, splits: &Arc<Splits>, gpa: u64) -> u64 {
        let guest = self.guest;
        let theirs = |slot: &Slot| slot.splits.as_ref().is_some_and(|it| Arc::ptr_eq(it, splits));
        let mut bytes = 0;
        for size in (2..=F::LARGEST_LEAF).map(F::size) {
            if size > guest.config.largest || !spec.fits(gpa, size.bytes()) {
                break;
            }
            let start = Gpa(gpa & !(size.bytes() - 1));
            let range = GpaRange::new(start, size.bytes()).expect("a block is not empty");
            let fits = self
                .inside(&guest.tables, |Inside { guard, .. }| like_a_block::<F, H>(guard, range));
            match fits {
                Some(Fits::IsBlock) => continue,
                Some(Fits::Table { execute: false, write }) => {
                    if write {
                        self.even_out(spec, range, theirs);
                    }
                }
                // The table in which pages may be executed is noted itself, and this comes after
                // it.
                Some(Fits::Table { execute: true, .. }) | None => break,
            }
            match self.collapse_if(range, size, theirs) {
                // Somebody held an entry: another time.
                0 => splits.add::<F>(spec, gpa),
                block => bytes += block,
            }
        }
        bytes
    }

    /// Tables of a slot whose log has ended, and that stay tables as their pages may be executed,
    /// or are not all there: they become blocks after a period:
    /// those in `range`.
    pub(crate) fn hand_to_recovery(&mut self, spec: &SlotSpec, range: GpaRange) {
        let guest = self.guest;
        for piece in pieces(range, F::size(1)) {
            self.with_slots(&guest.tables, |view, Inside { guard, .. }| {
                let slot = view.named(spec.id).filter(|slot| slot.spec.is_where(spec));
                let Some(splits) = slot.and_then(|slot| slot.splits.as_ref()) else { return };
                let Ok(leaves) = guard.leaves(piece) else { return };
                // Where an entry is being changed, its neighbours tell of the table.
                for leaf in leaves.flatten().filter(|leaf| leaf.size < F::size(1)) {
                    let may_execute = leaf.attributes.software.contains(MAY_EXECUTE);
                    if may_execute && spec.fits(leaf.gpa.0, F::size(1).bytes()) {
                        splits.add::<F>(spec, leaf.gpa.0);
                    }
                }
            });
        }
    }
}

/// What a range of a block's size is.
enum Fits {
    IsBlock,
    /// A table that can become one, but that pages may be executed, or that some may be written and
    /// others not.
    Table {
        execute: bool,
        write: bool,
    },
}

/// Looks, and changes nothing; `None` if the pages cannot be a block, or somebody is at one of
/// them.
fn like_a_block<F: Format, H: Host>(guard: &Guard<'_, '_, F, H>, range: GpaRange) -> Option<Fits> {
    let kind = |leaf: &Leaf| Attributes {
        write: false,
        execute: Execute::None,
        accessed: false,
        dirty: false,
        ..leaf.attributes
    };
    let mut leaves = guard.leaves(range).ok()?;
    let first = leaves.next()?.ok()?;
    if first.size.bytes() >= range.size() {
        return Some(Fits::IsBlock);
    }
    let mut execute = first.attributes.execute != Execute::None;
    let (mut write, mut bytes) = (false, first.size.bytes());
    if first.gpa != range.start() || first.hpa.0 & (range.size() - 1) != 0 {
        return None;
    }
    for leaf in leaves {
        let leaf = leaf.ok()?;
        let follows = leaf.gpa.0 == first.gpa.0 + bytes && leaf.hpa.0 == first.hpa.0 + bytes;
        if !follows || kind(&leaf) != kind(&first) {
            return None;
        }
        bytes += leaf.size.bytes();
        execute |= leaf.attributes.execute != Execute::None;
        write |= leaf.attributes.write != first.attributes.write;
    }
    (bytes == range.size()).then_some(Fits::Table { execute, write })
}
