//! The walk of tables that have one owner: one function for all levels.
//!
//! The engine's walk is compiled for each level and each operation, for speed beside other threads.
//! An owner needs neither, and pays for it in code.
//!
//! *Invariant*: during a call that borrows the address space mutably, no other software is in its
//! tables, as guards borrow it as well. So an entry changes only because hardware marks a leaf or a
//! table as used. An entry that is invalid to hardware stays as it is, and takes a plain store; one
//! that is valid is exchanged from the value that hardware left. A marker was left by an operation
//! that was forgotten half way, and the call stops there as *contended*.

use super::SpaceError;
use crate::addr::Gpa;
use crate::counts::Counts;
use crate::format::{Format, Kind};
use crate::guard::Sums;
use crate::ops::folded;
use crate::platform::Platform;
use crate::shootdown::Owed;
use crate::sizes::Sizes;
use crate::table::{self, Frame, Pte, pte};
use crate::tables::{Halted, Tables};
use crate::walk::{Entry, Flow};

/// How the walk goes on.
pub(super) enum Step {
    /// Behind the entry.
    Next,
    /// With the entry once more: it changed.
    Again,
}

/// A call that walks.
pub(super) trait Visit<'t, F: Format> {
    /// Works on an entry that links no table.
    fn entry(
        &mut self,
        level: u8,
        kind: Kind,
        entry: Entry<'t>,
    ) -> Result<Step, Halted<SpaceError>>;

    /// Is told of a table, before the walk enters it.
    fn enter(&mut self, _level: u8, _entry: &Entry<'t>, _children: &'t [Pte]) {}

    /// Is told of a table, after the walk has left it.
    fn leave(&mut self, _level: u8, _entry: &Entry<'t>, _children: &'t [Pte]) {}
}

impl<'p, F: Format, P: Platform> Tables<'p, F, P> {
    /// Shows the entries of `start..end` to `visit`, in ascending order.
    pub(super) fn each<'t, V: Visit<'t, F>>(
        &'t self,
        (start, end): (u64, u64),
        visit: &mut V,
    ) -> Result<(), Halted<SpaceError>> {
        self.each_in(self.root_entries(), self.geometry().root_level, (start, end), visit)
    }

    fn each_in<'t, V: Visit<'t, F>>(
        &'t self,
        ptes: &'t [Pte],
        level: u8,
        (mut at, end): (u64, u64),
        visit: &mut V,
    ) -> Result<(), Halted<SpaceError>> {
        let size = 1 << F::shift(level);
        while at < end {
            let next = end.min((at & !(size - 1)) + size);
            let pte = pte::<F>(ptes, at, level);
            let raw = pte.load();
            let (kind, entry) = (F::kind(raw, level), Entry { pte, raw, start: at, end: next });
            if kind == Kind::Table {
                let children = self.children(raw, level);
                visit.enter(level, &entry, children);
                self.each_in(children, level - 1, (at, next), visit)?;
                visit.leave(level, &entry, children);
            } else if let Step::Again = visit.entry(level, kind, entry)? {
                continue;
            }
            at = next;
        }
        Ok(())
    }

    /// Returns the table that the entry `raw` at `level` links.
    fn children(&self, raw: u64, level: u8) -> &[Pte] {
        let (hpa, entries) = (F::table_address(raw), F::entries(level - 1));
        // SAFETY: a linked table has that many entries. It stays allocated while the tables are
        // borrowed: a table that this call unlinks is given back behind its walk.
        unsafe { table::entries(self.platform, hpa, entries) }
    }

    /// Splits the leaves that an end of a range cuts, except those that `stays` says stay as they
    /// are. `owed` gets what CPUs may still hold of them.
    pub(super) fn cut(
        &self,
        (start, end): (u64, u64),
        stays: impl Fn(u64) -> bool,
        owed: &mut Owed,
    ) -> Result<(), Halted<SpaceError>> {
        self.cut_at(start, &stays, owed)?;
        self.cut_at(end, &stays, owed)
    }

    #[inline(never)]
    fn cut_at(
        &self,
        at: u64,
        stays: &impl Fn(u64) -> bool,
        owed: &mut Owed,
    ) -> Result<(), Halted<SpaceError>> {
        while at >> self.geometry().address_bits == 0 {
            let (mut ptes, mut level) = (self.root_entries(), self.geometry().root_level);
            let (pte, raw) = loop {
                let pte = pte::<F>(ptes, at, level);
                let raw = pte.load();
                if F::kind(raw, level) != Kind::Table {
                    break (pte, raw);
                }
                ptes = self.children(raw, level);
                level -= 1;
            };
            let inside = at & ((1 << F::shift(level)) - 1);
            if F::kind(raw, level) != Kind::Leaf || inside == 0 || stays(raw) {
                break;
            }
            if folded::<F>(raw) {
                self.unfold_at(at, level)?;
            } else {
                self.split_leaf(pte, level, at - inside, owed)
                    .ok_or(Halted { at: Gpa(at), why: SpaceError::OutOfFrames })?;
            }
        }
        Ok(())
    }

    /// Replaces a leaf by a table of leaves with the same translation; `None` if there is no frame
    /// for it. Where the CPU demands a break, nothing is called between the marker and the link but
    /// the invalidation.
    #[cold]
    fn split_leaf(&self, pte: &Pte, level: u8, base: u64, owed: &mut Owed) -> Option<()> {
        let mut frame = self.platform.allocate(F::TABLE_BYTES)?;
        let fill = |frame: &mut Frame, raw: u64| {
            let (bits, mut hpa) = (F::attribute_bits(raw, level), F::leaf_address(raw, level));
            for child in frame.entries_mut::<F>(self.platform, level - 1) {
                child.set(F::leaf(bits, level - 1, hpa));
                hpa.0 += 1 << F::shift(level - 1);
            }
        };
        let link = F::table(frame.hpa(), level);
        let mut stale = Owed::NOTHING;
        stale.leaves(base, base + (1 << F::shift(level)), F::size(level));
        if self.platform.break_before_make().breaks_size_change() {
            let frozen = F::frozen(frame.hpa());
            let raw = pte.swap(frozen);
            if let Some(what) = self.invalidation(&stale) {
                self.platform.invalidate(&what);
            }
            fill(&mut frame, raw);
            pte.release(frozen, link);
        } else {
            // Hardware may mark the leaf while the table is filled.
            let mut raw = pte.load();
            loop {
                fill(&mut frame, raw);
                match pte.exchange(raw, link) {
                    Ok(()) => break,
                    Err(found) => raw = found,
                }
            }
            owed.merge(stale);
        }
        frame.into_hpa();
        self.platform.publish();
        Some(())
    }

    /// Unfolds the group of the leaf at `gpa`.
    #[cold]
    pub(super) fn unfold_at(&self, gpa: u64, level: u8) -> Result<(), Halted<SpaceError>> {
        let mut sums = Sums { counts: Counts::NONE, sizes: Sizes::NONE, owed: Owed::NOTHING };
        match self.unfold(gpa, level, &mut sums) {
            Flow::Again => Ok(()),
            _ => Err(Halted { at: Gpa(gpa), why: SpaceError::Contended }),
        }
    }

    /// Moves the write protection of a table, which a guard left there, into its entries.
    #[cold]
    pub(super) fn push_protection_down(pte: &Pte, level: u8, children: &[Pte]) {
        for child in children {
            // A lost update is repeated; an entry that is neither stays.
            let _ = child.update(|raw| match F::kind(raw, level - 1) {
                Kind::Leaf => Some(F::write_protected(raw)),
                Kind::Table => Some(raw & !F::TABLE_WRITE),
                _ => None,
            });
        }
        let _ = pte.update(|raw| Some(raw | F::TABLE_WRITE));
    }
}
