//! Recovery of huge pages: tables that exist because their pages may be executed become blocks
//! again after a period.

use crate::backing::{Backing, MAY_EXECUTE, MAY_WRITE};
use crate::bits::Splits;
use crate::host::Host;
use crate::memslots::Memslot;
use crate::memslots::spec::MemslotSpec;
use crate::ranges::pieces;
use crate::worker::{Inside, Worker};
use alloc::sync::Arc;
use alloc::vec::{self, Vec};
use core::marker::PhantomData;
use slat::{
    Attributes, ChangeError, Execute, Format, Gpa, GpaRange, Guard, Leaf, LocalFlush, Stopped,
};

/// The result of a turn of recovery.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct RecoveryCounts {
    /// Bytes of new blocks, which do not have the right to execute. Each size of block counts on
    /// its own.
    pub bytes: u64,
    /// The number of tables that could not become blocks: their memslot logs, or their pages are
    /// not all mapped, or differ.
    pub left: u64,
}

impl<'w, F: Format, H: Host, B: Backing> Worker<'w, F, H, B> {
    /// Ends a period: tables that got executable pages in the period before it become blocks again,
    /// without the right to execute. Tables of memslots that log, and tables that cannot be blocks
    /// yet, are tried again later; their pages keep their rights.
    ///
    /// The caller calls this once in each period, and chooses its length (Linux: an hour).
    pub fn recover_huge_pages(&mut self) -> RecoveryCounts {
        let guest = self.guest;
        let _turn = guest.recovering.take(guest.tables.platform());
        let mut recovered = RecoveryCounts::default();
        let memslots = self.look(|view| {
            let kept = view.iter().filter(|memslot| !memslot.deleting);
            kept.filter_map(|memslot| {
                Some((memslot.spec, memslot.log.is_some(), memslot.splits.clone()?))
            })
            .collect::<Vec<_>>()
        });
        for (spec, logs, splits) in memslots {
            let mut tables = Vec::new();
            splits.turn::<F>(&spec, |gpa| tables.push(gpa));
            // Neighbouring blocks become a larger block, as tables come in ascending order.
            let mut larger = None;
            let mut tables = Untried {
                tables: tables.into_iter(),
                of: (&splits, spec),
                format: PhantomData::<F>,
            };
            for gpa in tables.tables.by_ref() {
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

    /// Makes the table at `gpa` a block; returns the bytes, 0 if it is one already. `None`: another
    /// thread held an entry, or the pages cannot be a block yet; a later try may succeed.
    fn recover(&mut self, spec: &MemslotSpec, splits: &Arc<Splits>, gpa: u64) -> Option<u64> {
        let guest = self.guest;
        let size = F::size(1);
        // A block cannot extend beyond the memslot, nor be larger than the guest's largest leaf.
        // Recovery does not try such a table again.
        if !spec.fits(gpa, size.bytes()) || guest.config.largest < size {
            return Some(0);
        }
        let range = GpaRange::new(Gpa(gpa), size.bytes()).expect("a block is not empty");
        if guest.pins.overlap(&range) {
            return None;
        }
        let theirs =
            |memslot: &Memslot| memslot.splits.as_ref().is_some_and(|it| Arc::ptr_eq(it, splits));
        // Checked before any right is taken: pages that cannot be a block should not fault for
        // nothing.
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
        // Checks the memslot once more: it may have begun to log by now, or be another.
        match self.collapse_if(range, size, theirs) {
            0 => None,
            bytes => Some(bytes),
        }
    }

    /// Makes the right to write the same in pages of which some are write-protected since a log,
    /// and others were written, as the end of a log does. Does nothing if the memslot has begun to
    /// log: the beginning of that log waits until this has left the tables, and then protects all
    /// pages.
    fn even_out(&mut self, spec: &MemslotSpec, range: GpaRange, theirs: impl Fn(&Memslot) -> bool) {
        let guest = self.guest;
        self.with_memslots(&guest.tables, |view, Inside { guard, .. }| {
            let memslot =
                view.named(spec.id).filter(|memslot| !memslot.deleting && memslot.log.is_none());
            if !memslot.is_some_and(theirs) {
                return;
            }
            let result = match guest.marks_writes {
                // A vCPU that has the old rights in its TLB faults once.
                true => guard.allow_write(range, MAY_WRITE).map(LocalFlush::not_needed_here),
                false => guard.write_protect(range),
            };
            guard.invalidate();
            match result {
                // Pages that another thread held may still differ: the table is tried again later.
                Ok(_) | Err(Stopped { reason: ChangeError::Contended, .. }) => {}
                Err(Stopped { reason: ChangeError::CutsBlock { .. }, .. }) => {}
                Err(Stopped { reason, .. }) => unreachable!("a memslot's pages: {reason}"),
            }
        });
    }

    /// Makes larger blocks, as far as they fit, around a block of the smallest size that came back.
    fn enlarge(&mut self, spec: &MemslotSpec, splits: &Arc<Splits>, gpa: u64) -> u64 {
        let guest = self.guest;
        let theirs =
            |memslot: &Memslot| memslot.splits.as_ref().is_some_and(|it| Arc::ptr_eq(it, splits));
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
                // A table with executable pages is noted itself, and comes after this one.
                Some(Fits::Table { execute: true, .. }) | None => break,
            }
            match self.collapse_if(range, size, theirs) {
                // Another thread held an entry: the table is tried again later.
                0 => splits.add::<F>(spec, gpa),
                block => bytes += block,
            }
        }
        bytes
    }

    /// Notes for recovery the tables in `range`, of a memslot whose log has ended. They stay tables
    /// because their pages may be executed, or are not all mapped, and become blocks after a
    /// period.
    pub(crate) fn hand_to_recovery(&mut self, spec: &MemslotSpec, range: GpaRange) {
        let guest = self.guest;
        for piece in pieces(range, F::size(1)) {
            self.with_memslots(&guest.tables, |view, Inside { guard, .. }| {
                let memslot = view.named(spec.id).filter(|memslot| memslot.spec.is_where(spec));
                let Some(splits) = memslot.and_then(|memslot| memslot.splits.as_ref()) else {
                    return;
                };
                let Ok(leaves) = guard.leaves(piece) else { return };
                // If an entry is being changed, its neighbours show that there is a table.
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

/// Tables that this turn has not tried yet. If the host panics between pieces, a later turn tries
/// them.
struct Untried<'s, F: Format> {
    tables: vec::IntoIter<u64>,
    of: (&'s Splits, MemslotSpec),
    format: PhantomData<F>,
}

impl<F: Format> Drop for Untried<'_, F> {
    fn drop(&mut self) {
        let (splits, spec) = &self.of;
        self.tables.by_ref().for_each(|gpa| splits.add::<F>(spec, gpa));
    }
}

/// What is mapped in a range of a block's size.
enum Fits {
    IsBlock,
    /// A table that can become a block, except for pages that may be executed, or that differ in
    /// the right to write.
    Table {
        execute: bool,
        write: bool,
    },
}

/// Returns what is mapped in `range`, and changes nothing. `None` if the pages cannot be a block,
/// or another thread is changing one of them.
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
