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
use alloc::vec::Vec;
use core::marker::PhantomData;
use slat::{
    Access, Attributes, ChangeError, Execute, Format, Gpa, GpaRange, Guard, Interruption, Leaf,
    LocalFlush, Relax,
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
            let mut untried =
                UntriedTables { tables, of: (&splits, spec), format: PhantomData::<F> };
            while let Some(piece) = untried.piece() {
                let tried = untried.tables.partition_point(|gpa| *gpa < piece.end().0);
                let tables = &untried.tables[..tried];
                let mut left = Vec::new();
                match logs {
                    true => left.extend_from_slice(tables),
                    false => recovered.bytes += self.recover(&spec, &splits, tables, &mut left),
                }
                // Neighbouring blocks become a larger block.
                if let Some(last) = tables.iter().rfind(|gpa| !left.contains(gpa)) {
                    recovered.bytes += self.enlarge(&spec, &splits, *last);
                }
                left.iter().for_each(|gpa| splits.add::<F>(&spec, *gpa));
                recovered.left += left.len() as u64;
                untried.tables.drain(..tried);
            }
        }
        recovered
    }

    /// Makes `tables`, which are in one piece and in ascending order, blocks; returns the bytes.
    /// Neighbours are invalidated at once. `left` gets those that another thread held, or whose
    /// pages cannot be a block yet: a later try may succeed.
    fn recover(
        &mut self,
        spec: &MemslotSpec,
        splits: &Arc<Splits>,
        tables: &[u64],
        left: &mut Vec<u64>,
    ) -> u64 {
        let guest = self.guest;
        let size = F::size(1);
        // A block cannot extend beyond the memslot, nor be larger than the guest's largest leaf.
        // Recovery does not try such a table again.
        let fits = |gpa: u64| spec.fits(gpa, size.bytes()) && size <= guest.config.largest;
        let theirs =
            |memslot: &Memslot| memslot.splits.as_ref().is_some_and(|it| Arc::ptr_eq(it, splits));
        let mut ready = Vec::new();
        for &gpa in tables.iter().filter(|gpa| fits(**gpa)) {
            let range = GpaRange::new(Gpa(gpa), size.bytes()).expect("a block is not empty");
            // Checked before any right is taken: pages that cannot be a block should not fault for
            // nothing.
            match self.fits(range).filter(|_| !guest.pins.overlap(&range)) {
                Some(Fits::IsBlock) => {}
                Some(Fits::Table { write, .. }) => ready.push((range, write)),
                None => left.push(gpa),
            }
        }
        for run in runs(ready.iter()) {
            let change = |guard: &mut Guard<'_, 'w, F, H>, rest| guard.execute_protect(rest);
            self.until_done(&guest.tables, run, change);
        }
        for run in runs(ready.iter().filter(|(_, write)| *write)) {
            self.even_out(spec, run, theirs);
        }
        let mut bytes = 0;
        for run in runs(ready.iter()) {
            // Looks at the memslots once more: one may have begun to log by now.
            let new = self.collapse_if(run, size, |_| true);
            bytes += new;
            if new < run.size() {
                let tables = ready.iter().map(|(table, _)| *table);
                let in_run = tables.filter(|at| (run.start()..run.end()).contains(&at.start()));
                let stay = in_run.filter(|table| !matches!(self.fits(*table), Some(Fits::IsBlock)));
                left.extend(stay.map(|table| table.start().0));
            }
        }
        bytes
    }

    /// Returns what is mapped in `range` of the tables that vCPUs share, as [`like_a_block`].
    fn fits(&mut self, range: GpaRange) -> Option<Fits> {
        self.inside(&self.guest.tables, |Inside { guard, .. }| like_a_block::<F, H>(guard, range))
    }

    /// Makes the right to write the same in pages of which some are write-protected since a log,
    /// and others were written, as the end of a log does. Does nothing if the memslot has begun to
    /// log: the beginning of that log waits until this has left the tables, and then protects all
    /// pages.
    fn even_out(&mut self, spec: &MemslotSpec, range: GpaRange, theirs: impl Fn(&Memslot) -> bool) {
        let guest = self.guest;
        self.with_memslots(&guest.tables, |view, Inside { guard, .. }| {
            let memslot = view.named(spec.id).filter(|memslot| memslot.log.is_none());
            if !memslot.is_some_and(theirs) {
                return;
            }
            let result = match guest.marks_writes {
                // A vCPU that has the old rights in its TLB faults once.
                true => guard
                    .relax(range, Relax::new(Access::Write).only_if(MAY_WRITE).unmarked())
                    .map(LocalFlush::not_needed_here),
                false => guard.write_protect(range),
            };
            guard.invalidate();
            match result {
                // Pages that another thread held, and those behind, may still differ: their tables
                // are tried again later.
                Ok(_) | Err(Interruption { reason: ChangeError::Contended, .. }) => {}
                Err(Interruption { reason: ChangeError::CutsBlock { .. }, .. }) => {}
                Err(Interruption { reason, .. }) => unreachable!("a memslot's pages: {reason}"),
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
            match self.fits(range) {
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
                    if may_execute {
                        splits.add::<F>(spec, leaf.gpa.0);
                    }
                }
            });
        }
    }
}

/// Tables that this turn has not tried yet, in ascending order. If the host panics between pieces,
/// a later turn tries them.
struct UntriedTables<'s, F: Format> {
    tables: Vec<u64>,
    of: (&'s Splits, MemslotSpec),
    format: PhantomData<F>,
}

impl<F: Format> UntriedTables<'_, F> {
    /// Returns the piece of the memslot that begins with the first of them.
    fn piece(&self) -> Option<GpaRange> {
        let first = Gpa(*self.tables.first()?);
        let rest = GpaRange::new(first, self.of.1.range().end().0.checked_sub(first.0)?).ok()?;
        pieces(rest, F::size(F::LARGEST_LEAF)).next()
    }
}

impl<F: Format> Drop for UntriedTables<'_, F> {
    fn drop(&mut self) {
        let (splits, spec) = &self.of;
        self.tables.iter().for_each(|gpa| splits.add::<F>(spec, *gpa));
    }
}

/// Joins tables that are neighbours.
fn runs<'t>(tables: impl Iterator<Item = &'t (GpaRange, bool)>) -> Vec<GpaRange> {
    let mut runs: Vec<GpaRange> = Vec::new();
    for (table, _) in tables {
        match runs.last_mut() {
            Some(last) if last.end() == table.start() => *last = last.hull(table),
            _ => runs.push(*table),
        }
    }
    runs
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
    if first.hpa.0 & (range.size() - 1) != 0 {
        return None;
    }
    for leaf in leaves {
        let leaf = leaf.ok()?;
        if leaf.hpa.0 != first.hpa.0 + bytes || kind(&leaf) != kind(&first) {
            return None;
        }
        bytes += leaf.size.bytes();
        execute |= leaf.attributes.execute != Execute::None;
        write |= leaf.attributes.write != first.attributes.write;
    }
    // Only if no page is missing.
    (bytes == range.size()).then_some(Fits::Table { execute, write })
}
