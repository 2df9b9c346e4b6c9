//! Unmap of tables that no CPU has loaded, and that no other thread is in: lists leaves, then
//! empties them.
//!
//! # Two steps
//! The first step reads the range and hands each run of leaves to the caller's closure. It changes
//! nothing, except that it unfolds in place each group of contiguous leaves that has a member in
//! the range. The second step empties what was handed out and gives back the tables that it covers
//! whole. It calls only the platform, which does not unwind. It also runs where the closure panics.
//!
//! *Invariant*: no table is freed while an entry that can be reached links it, and exactly the
//! leaves that the closure was given are unmapped. [`UnloadedTables::discard`], which hands out no
//! leaf, has only the second step, and unfolds before it only the groups that an end of the range
//! cuts.

use super::unfold::Group;
use super::{ChangeError, UnmappedRun};
use crate::addr::{Gpa, GpaRange, Hpa};
use crate::build::dismantle;
use crate::format::{Format, Kind};
use crate::platform::Platform;
use crate::table::{self, Frame, Pte, folded};
use crate::tables::{Found, Interruption, Tables};
use crate::unloaded::UnloadedTables;

impl<F: Format, P: Platform> UnloadedTables<'_, F, P> {
    /// Unmaps `range`, and hands each run of neighbouring leaves of one kind to `removed`; returns
    /// the bytes that were mapped. A run may also end where memory crosses a multiple of
    /// [`Format::CARRY`]. Reservations in the range are void. Tables that the range covers whole,
    /// or that it leaves empty, are given back.
    ///
    /// If `removed` panics, everything up to the end of the run that it was given is unmapped, and
    /// everything behind that stays mapped: the call can be repeated for the rest.
    ///
    /// # Errors
    /// [`ChangeError::Range`] and [`ChangeError::CutsBlock`]: nothing is done.
    pub fn unmap(
        &mut self,
        range: GpaRange,
        mut removed: impl FnMut(UnmappedRun),
    ) -> Result<u64, Interruption<ChangeError>> {
        let tables = &self.0;
        if let Err(reason) = tables.check_change(&range) {
            return Err(Interruption { at: range.start(), reason: reason.into() });
        }
        let (start, end) = (range.start().0, range.end().0);
        let told = ToldRange { tables, start, end: start, owners: false };
        let mut list = List { told, run: None, bytes: 0, removed: &mut removed };
        list.table(tables.root_entries(), tables.geometry().root_level, start, end);
        list.finish();
        list.told.end = end;
        Ok(list.bytes)
    }
}

impl<F: Format, P: Platform> UnloadedTables<'_, F, P> {
    /// Unmaps `range`, as [`UnloadedTables::unmap`], for a caller that knows the memory behind it:
    /// hands out nothing. Tables that the range covers whole are dropped unseen: entries of pages
    /// in them are not read, unless addresses have, or had, owners.
    ///
    /// # Errors
    /// [`ChangeError::Range`] and [`ChangeError::CutsBlock`]: nothing is done.
    pub fn discard(&mut self, range: GpaRange) -> Result<(), Interruption<ChangeError>> {
        let tables = &self.0;
        if let Err(reason) = tables.check_change(&range) {
            return Err(Interruption { at: range.start(), reason: reason.into() });
        }
        let (start, end) = (range.start().0, range.end().0);
        tables.unfold_cut(start);
        tables.unfold_cut(end);
        drop(ToldRange { tables, start, end, owners: tables.owners.are_known() });
        Ok(())
    }
}

impl<F: Format, P: Platform> Tables<'_, F, P> {
    /// Unfolds the group, if any, that a range with an end at `edge` cuts, while no other thread is
    /// in the tables.
    fn unfold_cut(&self, edge: u64) {
        if F::CONTIGUOUS == 0 || edge >> self.geometry().address_bits != 0 {
            return;
        }
        let Found { raw, level, .. } = self.lookup(edge);
        if F::kind(raw, level) == Kind::Leaf
            && folded::<F>(raw)
            && let Some(group) = self.group(edge, level)
            && group.start < edge
        {
            group.unfold_alone();
        }
    }
}

/// The part of the range whose leaves were handed out: when this is dropped, the part is emptied.
struct ToldRange<'t, F: Format, P: Platform> {
    tables: &'t Tables<'t, F, P>,
    start: u64,
    end: u64,
    /// Some of the entries have owners, and keep them.
    owners: bool,
}

impl<F: Format, P: Platform> Drop for ToldRange<'_, F, P> {
    fn drop(&mut self) {
        if self.start < self.end {
            let level = self.tables.geometry().root_level;
            self.empty(self.tables.root_entries(), level, self.start, self.end);
        }
    }
}

impl<F: Format, P: Platform> ToldRange<'_, F, P> {
    /// Empties the part of a table from `start` to `end`, which cuts no leaf.
    fn empty(&self, ptes: &[Pte], level: u8, start: u64, end: u64) {
        let shift = F::shift(level);
        let (first, last) = (start >> shift, (end - 1) >> shift);
        let mask = ptes.len() as u64 - 1;
        for number in first..=last {
            let pte = &ptes[(number & mask) as usize];
            if level == 0 && !self.owners {
                pte.init(0);
                continue;
            }
            let raw = pte.load();
            let (from, to) = (start.max(number << shift), end.min((number + 1) << shift));
            let whole = to - from == 1 << shift;
            let kind = F::kind(raw, level);
            if kind == Kind::Table {
                let hpa = F::table_address(raw);
                if whole && !self.owners {
                    pte.init(0);
                    self.free(hpa, level - 1);
                } else {
                    // SAFETY: a linked table has that many entries, and stays: only tables that are
                    // covered whole are freed.
                    let children =
                        unsafe { table::entries(self.tables.platform, hpa, F::entries(level - 1)) };
                    self.empty(children, level - 1, from, to);
                    let vacant = |pte: &Pte| F::kind(pte.load(), level - 1).is_vacant();
                    if children.iter().all(vacant) {
                        pte.init(0);
                        self.free(hpa, level - 1);
                    }
                }
            } else if kind != Kind::Owned {
                pte.init(0);
            }
        }
    }

    /// Gives back a table that no entry links any more, and all below it.
    fn free(&self, hpa: Hpa, level: u8) {
        let platform = self.tables.platform;
        // SAFETY: no other thread is in the tables, and no CPU has them: `UnloadedTables` was
        // borrowed mutably. The entry that linked the table was emptied just before, so it, and all
        // below it, is this function's alone. All tables below the root came from caches, which
        // allocate `TABLE_BYTES`.
        unsafe {
            let ptes = table::entries(platform, hpa, F::entries(level));
            let free = &mut |frame| platform.free(frame, F::TABLE_BYTES);
            dismantle::<F, P>(platform, ptes, level, free);
            if let Some(frame) = Frame::from_hpa(hpa) {
                free(frame);
            }
        }
    }
}

/// Leaves whose descriptors follow each other.
struct Run {
    first: UnmappedRun,
    /// The value that the next leaf of the run would have.
    raw: u64,
    gpa: u64,
    level: u8,
}

struct List<'t, 'r, F: Format, P: Platform> {
    told: ToldRange<'t, F, P>,
    run: Option<Run>,
    bytes: u64,
    removed: &'r mut dyn FnMut(UnmappedRun),
}

impl<F: Format, P: Platform> List<'_, '_, F, P> {
    /// Lists the part of a table from `start` to `end`.
    fn table(&mut self, ptes: &[Pte], level: u8, start: u64, end: u64) {
        let platform = self.told.tables.platform;
        let shift = F::shift(level);
        let (first, last) = (start >> shift, (end - 1) >> shift);
        let mask = ptes.len() as u64 - 1;
        let mut number = first;
        while number <= last {
            if level == 0 {
                let rest = &ptes[(number & mask) as usize..=(last & mask) as usize];
                number += self.more(rest, number << shift);
                if number > last {
                    break;
                }
            }
            let pte = &ptes[(number & mask) as usize];
            let mut raw = pte.load();
            if F::kind(raw, level) == Kind::Leaf
                && folded::<F>(raw)
                && let Some(group) = Group::<F>::within(ptes, level, number << shift)
            {
                group.unfold_alone();
                raw = pte.load();
            }
            let (from, to) = (start.max(number << shift), end.min((number + 1) << shift));
            number += 1;
            match F::kind(raw, level) {
                Kind::Leaf => self.leaf(raw, level, from),
                Kind::Table if level > 0 => {
                    // SAFETY: a linked table has that many entries, and stays: what is listed here
                    // is freed when all of it was.
                    let children = unsafe {
                        table::entries(platform, F::table_address(raw), F::entries(level - 1))
                    };
                    self.table(children, level - 1, from, to);
                }
                Kind::Owned => self.told.owners = true,
                // Empty, or a reservation. There is no marker, as no thread that could hold one
                // borrows the tables.
                _ => {}
            }
        }
    }

    /// Returns how many pages, from the first on, continue the run, at the speed of loads.
    fn more(&mut self, pages: &[Pte], gpa: u64) -> u64 {
        let Some(run) = &mut self.run else { return 0 };
        if (run.gpa, run.level) != (gpa, 0) {
            return 0;
        }
        let page = 1 << F::PAGE_SHIFT;
        let raw = |number: u64| F::further(run.raw, number * page);
        let same = pages.iter().zip(0..).take_while(|(pte, number)| pte.load() == raw(*number));
        let count = same.count() as u64;
        let Some(before) = count.checked_sub(1) else { return 0 };
        // Descriptors increase as their addresses do, unless a field overflows.
        let last = raw(before);
        let follows = run.first.hpa.0 + run.first.bytes + before * page;
        if F::leaf_address(last, 0).0 != follows {
            return 0;
        }
        let bytes = count * page;
        (run.raw, run.gpa) = (F::further(run.raw, bytes), run.gpa + bytes);
        run.first.bytes += bytes;
        self.bytes += bytes;
        count
    }

    #[inline]
    fn leaf(&mut self, raw: u64, level: u8, gpa: u64) {
        let size = F::size(level);
        self.bytes += size.bytes();
        if let Some(run) = &mut self.run
            && (run.raw, run.gpa, run.level) == (raw, gpa, level)
            && F::leaf_address(raw, level).0 == run.first.hpa.0 + run.first.bytes
        {
            run.first.bytes += size.bytes();
            run.raw = F::further(raw, size.bytes());
            run.gpa += size.bytes();
            return;
        }
        self.finish();
        let first = UnmappedRun {
            gpa: Gpa(gpa),
            bytes: size.bytes(),
            size,
            hpa: F::leaf_address(raw, level),
            attributes: self.told.tables.format().decode(raw, level),
        };
        let (raw, gpa) = (F::further(raw, size.bytes()), gpa + size.bytes());
        self.run = Some(Run { first, raw, gpa, level });
    }

    fn finish(&mut self) {
        if let Some(run) = self.run.take() {
            self.told.end = run.gpa;
            (self.removed)(run.first);
        }
    }
}
