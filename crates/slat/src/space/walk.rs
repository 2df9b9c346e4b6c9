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
use super::cursor::Cursor;
use crate::addr::Gpa;
use crate::counts::OpCounts;
use crate::format::{Format, Kind};
use crate::guard::GuardState;
use crate::invalidation::PendingFlush;
use crate::leaf_delta::LeafDelta;
use crate::platform::Platform;
use crate::table::{self, Frame, Pte, folded, pte};
use crate::tables::{Interruption, Tables};
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
    ) -> Result<Step, Interruption<SpaceError>>;

    /// Is told of a table, which the entry `raw` links, before the walk enters it.
    #[inline(always)]
    fn enter(&mut self, _level: u8, _link: &'t Pte, _raw: u64, _children: &'t [Pte]) {}

    /// Is told of a table below the root, behind the last of its entries that the walk shows:
    /// those that lie in `start..end`, if the table covers so much. Returns whether it was
    /// unlinked.
    #[inline(always)]
    fn leave(&mut self, _level: u8, _ptes: &'t [Pte], _start: u64, _end: u64) -> bool {
        false
    }
}

impl<'p, F: Format, P: Platform> Tables<'p, F, P> {
    /// Shows the entries of `start..end` to `visit`, in ascending order. The walk begins at the
    /// root, and anew behind each table in which it was shown entries; or in the table of `cursor`,
    /// if that covers the range. It moves the cursor to the last table of pages that it enters.
    #[inline(always)]
    pub(super) fn each<'t, V: Visit<'t, F>>(
        &'t self,
        cursor: &mut Cursor,
        (start, end): (u64, u64),
        visit: &mut V,
    ) -> Result<(), Interruption<SpaceError>> {
        let root = (self.root_entries(), self.geometry().root_level);
        let (mut ptes, mut level) = root;
        if cursor.covers::<F>((start, end)) {
            // SAFETY: it covers a range, so it names a table; these tables stay allocated while
            // they are borrowed, but for those that this call unlinks, behind the walk.
            (ptes, level) = (unsafe { cursor.entries::<F, P>(self.platform) }, 0);
        }
        let (mut at, mut accessed) = (start, true);
        while at < end {
            // Most entries are pages: compiled for them, and for others.
            let link = match level {
                0 => Self::show(ptes, 0, (&mut at, end), visit)?,
                _ => Self::show(ptes, level, (&mut at, end), visit)?,
            };
            if let Some((pte, raw)) = link {
                accessed &= raw & F::TABLE_ACCESSED == F::TABLE_ACCESSED;
                if level == 1 && accessed && self.pending.is_none() {
                    cursor.set::<F>(at, F::table_address(raw));
                }
                let children = self.children(raw, level);
                visit.enter(level, pte, raw, children);
                (ptes, level) = (children, level - 1);
                continue;
            }
            if level < root.1 && visit.leave(level, ptes, start, at) {
                cursor.forget();
            }
            (ptes, level, accessed) = (root.0, root.1, true);
        }
        Ok(())
    }

    /// Shows the entries of a table from `at` on, and moves `at` behind them; up to `end`, or to an
    /// entry that links a table, which it returns with its value.
    #[inline(always)]
    fn show<'t, V: Visit<'t, F>>(
        ptes: &'t [Pte],
        level: u8,
        (at, end): (&mut u64, u64),
        visit: &mut V,
    ) -> Result<Option<(&'t Pte, u64)>, Interruption<SpaceError>> {
        loop {
            let pte = pte::<F>(ptes, *at, level);
            let raw = pte.load();
            let kind = F::kind(raw, level);
            if kind == Kind::Table {
                return Ok(Some((pte, raw)));
            }
            let behind = end.min((*at | ((1 << F::shift(level)) - 1)) + 1);
            let entry = Entry { pte, raw, start: *at, end: behind };
            if let Step::Again = visit.entry(level, kind, entry)? {
                continue;
            }
            *at = behind;
            if behind == end || behind & ((1 << F::shift(level + 1)) - 1) == 0 {
                return Ok(None);
            }
        }
    }

    /// Returns the entry at `level` that `at` lies in, and its table; the tables above are linked.
    pub(super) fn descend_to(&self, at: u64, level: u8) -> (&Pte, &[Pte]) {
        let (mut ptes, mut now) = (self.root_entries(), self.geometry().root_level);
        while now > level {
            ptes = self.children(pte::<F>(ptes, at, now).load(), now);
            now -= 1;
        }
        (pte::<F>(ptes, at, level), ptes)
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
        owed: &mut PendingFlush,
    ) -> Result<(), Interruption<SpaceError>> {
        self.cut_at(start, &stays, owed)?;
        self.cut_at(end, &stays, owed)
    }

    #[inline(never)]
    fn cut_at(
        &self,
        at: u64,
        stays: &impl Fn(u64) -> bool,
        owed: &mut PendingFlush,
    ) -> Result<(), Interruption<SpaceError>> {
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
                    .ok_or(Interruption { at: Gpa(at), reason: SpaceError::OutOfFrames })?;
            }
        }
        Ok(())
    }

    /// Replaces a leaf by a table of leaves with the same translation; `None` if there is no frame
    /// for it. Where the CPU demands a break, nothing is called between the marker and the link but
    /// the invalidation.
    #[cold]
    fn split_leaf(&self, pte: &Pte, level: u8, base: u64, owed: &mut PendingFlush) -> Option<()> {
        let mut frame = self.platform.allocate(F::TABLE_BYTES)?;
        let fill = |frame: &mut Frame, raw: u64| {
            let (bits, mut hpa) = (F::attribute_bits(raw, level), F::leaf_address(raw, level));
            for child in frame.entries_mut::<F>(self.platform, level - 1) {
                child.set(F::leaf(bits, level - 1, hpa));
                hpa.0 += 1 << F::shift(level - 1);
            }
        };
        let link = F::table(frame.hpa(), level);
        let mut stale = PendingFlush::NOTHING;
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
    pub(super) fn unfold_at(&self, gpa: u64, level: u8) -> Result<(), Interruption<SpaceError>> {
        let mut sums = GuardState {
            counts: OpCounts::NONE,
            sizes: LeafDelta::NONE,
            owed: PendingFlush::NOTHING,
        };
        match self.unfold(gpa, level, &mut sums) {
            Flow::Again => Ok(()),
            _ => Err(Interruption { at: Gpa(gpa), reason: SpaceError::Contended }),
        }
    }
}
