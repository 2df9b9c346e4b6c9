//! Ageing: finds the pages that were used, by their accessed bits, without a lock, into bitmaps.
//!
//! A leaf is cleared by compare-and-swap. A page whose entry another thread holds is *unanswered*,
//! which is not the same as old. Nothing waits: a scan that comes into a table that is being
//! unlinked begins that table anew once, and then its retired entries are unanswered as well.
//!
//! # Non-leaf accessed bits
//! Where hardware marks the tables that it walks through (x86), a table that is not accessed shows
//! that nothing below it was used, with one exception: a walk cache may hold the table, and
//! hardware then marks a leaf below without marking the table again. *Invariant of an exact scan*:
//! a table without its mark has no accessed leaf below, and no TLB or walk cache holds anything
//! below.
//!
//! 1. Each marked table that the range covers is cleared, and noted as [`Format::AGEING`] in the
//!    same exchange, from the top down.
//! 2. One invalidation of the range completes: from here on a walk below such a table marks it.
//! 3. The leaves below noted tables are cleared, and the notes.
//!
//! Software that makes a leaf accessed marks the tables above after it, the lowest first
//! (`walk::touch`; all agree on the order of exchanges and loads), and so does a scan that cannot
//! clear a leaf because another thread holds it. One scan at a time clears tables.

use super::ChangeError;
use super::pages::{or_bits, set_bits};
use super::unfold::Group;
use crate::addr::{Gpa, GpaRange, Levels};
use crate::format::{Format, Kind, RUN};
use crate::guard::{Guard, GuardState};
use crate::invalidation::PendingFlush;
use crate::platform::Platform;
use crate::pte::Atomically;
use crate::sync::agreed;
use crate::table::{Pte, folded, pte};
use crate::tables::{Interruption, Tables};
use crate::walk::{
    Budget, Entry, Flow, Visitor, WalkCounts, change_run, exchange_each, links, pages_alone,
};

/// Options of an ageing scan.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AgeOptions {
    /// Clears the accessed bits that it finds; otherwise it only tests them.
    pub clear: bool,
    /// Which leaves the scan may skip.
    pub table_bits: TableBits,
    /// With `clear`, the scan ends with an invalidation. Without one, a page that a TLB holds may
    /// be in use, and not become young again until the TLB drops it by itself. Linux does without.
    pub flush_tlb: bool,
}

impl AgeOptions {
    /// Tests and clears every leaf, as Linux does.
    pub const LEAVES: Self = Self { clear: true, table_bits: TableBits::Ignored, flush_tlb: false };
}

/// Use of non-leaf accessed bits by a scan, on formats that have them; on others both are
/// [`TableBits::Ignored`]. Only one scan that clears can skip at a time; a concurrent one looks at
/// every leaf.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TableBits {
    /// Looks at every leaf.
    Ignored,
    /// Skips tables below which no page can have been used. Costs one invalidation, executed inside
    /// before leaves are read.
    Exact,
}

/// Bitmaps for the result of a scan, which only sets bits: bit 0 is the first page of the range.
#[derive(Debug)]
pub struct AgeBitmaps<'b> {
    /// Pages that were used since their accessed bit was last cleared; for a block or a group
    /// ([`Guard::map_contiguous`]), all its pages in the range. A block or group that the range
    /// covers in part is tested, and not cleared.
    pub young: &'b mut [u64],
    /// Pages without an answer: another thread is changing their entry.
    pub unanswered: &'b mut [u64],
}

/// Numbers of bits that a scan added.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct AgeCounts {
    /// Bits set in [`AgeBitmaps::young`].
    pub young: u64,
    /// Bits set in [`AgeBitmaps::unanswered`].
    pub unanswered: u64,
}

impl<F: Format, P: Platform> Guard<'_, '_, F, P> {
    /// Finds the pages of `range` that are young, and with [`AgeOptions::clear`] makes them old.
    ///
    /// # Errors
    /// [`ChangeError::Range`], [`ChangeError::Bitmap`] if one of the two is too short, and
    /// [`ChangeError::NotRecorded`]: nothing is done.
    #[inline(always)]
    pub fn age(
        &mut self,
        range: GpaRange,
        ages: &mut AgeBitmaps<'_>,
        how: AgeOptions,
    ) -> Result<AgeCounts, Interruption<ChangeError>> {
        let tables = self.tables;
        let shorter = ages.young.len().min(ages.unanswered.len());
        let refusal = tables.check(&range).map_err(ChangeError::Range);
        if let Err(reason) = refusal.and(tables.check_bitmap(&range, shorter)) {
            return Self::stopped(range.start(), reason);
        }
        if !tables.format.records_accessed() {
            return Self::stopped(range.start(), ChangeError::NotRecorded);
        }
        if range.size() == 1 << F::PAGE_SHIFT
            && (F::TABLE_ACCESSED == 0 || how.table_bits == TableBits::Ignored)
            && !how.flush_tlb
            && let Some(young) = self.age_page(range.start().0, how.clear)
        {
            return Ok(AgeCounts { young: or_bits(ages.young, 0, young.into()), unanswered: 0 });
        }
        self.age_walk(range, ages, how)
    }

    /// Returns whether the page at `gpa`, whose table is there, was used, and with `clear` makes it
    /// old, without a walk. Returns `None` in all other cases, which the walk handles.
    #[inline(always)]
    fn age_page(&mut self, gpa: u64, clear: bool) -> Option<bool> {
        let tables = self.tables;
        let (ptes, level) = tables.descend(gpa, 0, |_, _| ());
        if level > 0 {
            return None;
        }
        let pte = pte::<F>(ptes, gpa, 0);
        let raw = pte.load();
        if F::kind(raw, 0) != Kind::Leaf || folded::<F>(raw) {
            return None;
        }
        let young = raw & F::ACCESSED != 0;
        if young && clear {
            pte.exchange(raw, raw & !F::ACCESSED).ok()?;
            self.sums.counts.entries_written += 1;
            self.sums.counts.bytes_changed += 1 << F::PAGE_SHIFT;
        }
        self.sums.counts.entries_read += u64::from(tables.geometry().root_level) + 1;
        Some(young)
    }

    #[inline(never)]
    fn age_walk(
        &mut self,
        range: GpaRange,
        ages: &mut AgeBitmaps<'_>,
        how: AgeOptions,
    ) -> Result<AgeCounts, Interruption<ChangeError>> {
        let tables = self.tables;
        let ages = AgeBitmaps { young: ages.young, unanswered: ages.unanswered };
        let sums = &mut self.sums;
        let mut scan = Scan { range, ages, aged: AgeCounts::default(), answered: 0, sums };
        let skip = if F::TABLE_ACCESSED == 0 { TableBits::Ignored } else { how.table_bits };
        match (how.clear, skip) {
            (false, TableBits::Ignored) => scan.run::<F, P, false, ALL>(tables),
            (false, TableBits::Exact) => scan.run::<F, P, false, MARKED>(tables),
            (true, TableBits::Exact) if tables.exact_scan.take() => {
                scan.exact(tables);
                tables.exact_scan.end();
            }
            (true, _) => scan.run::<F, P, true, ALL>(tables),
        }
        let Scan { aged, sums, .. } = scan;
        if how.flush_tlb && how.clear {
            let mut stale = PendingFlush::NOTHING;
            stale.leaves(range.start().0, range.end().0, F::size(0));
            stale.leaves(range.start().0, range.end().0, F::size(1));
            tables.complete(stale);
            sums.counts.invalidations += 1;
        }
        Ok(aged)
    }
}

impl<F: Format, P: Platform> Guard<'_, '_, F, P> {
    /// Tests whether the leaf around `gpa` was used, and with `clear` makes all of it old, also a
    /// block or a group, which [`Guard::age`] only tests if its range cuts it. Returns the range
    /// that the leaf covers and whether it was used; `None` if nothing is mapped there. Owes no
    /// invalidation: without one, uses through a translation that a TLB holds may not be seen.
    ///
    /// # Errors
    /// [`ChangeError::Range`], [`ChangeError::NotRecorded`]: nothing is done.
    /// [`ChangeError::Contended`]: another thread is changing the entry, which stays as it was.
    #[inline(always)]
    pub fn age_leaf(
        &mut self,
        gpa: Gpa,
        clear: bool,
    ) -> Result<Option<(GpaRange, bool)>, Interruption<ChangeError>> {
        let tables = self.tables;
        let start = gpa.0 & !((1 << F::PAGE_SHIFT) - 1);
        let page = GpaRange::new(Gpa(start), 1 << F::PAGE_SHIFT);
        if let Err(reason) = page.and_then(|page| tables.check(&page)) {
            return Self::stopped(gpa, ChangeError::Range(reason));
        }
        if !tables.format.records_accessed() {
            return Self::stopped(gpa, ChangeError::NotRecorded);
        }
        if let Some(young) = self.age_page(start, clear) {
            return Ok(Some((GpaRange::from_bounds(start, start + (1 << F::PAGE_SHIFT)), young)));
        }
        self.age_leaf_walk(gpa, start, clear)
    }

    #[inline(never)]
    fn age_leaf_walk(
        &mut self,
        gpa: Gpa,
        start: u64,
        clear: bool,
    ) -> Result<Option<(GpaRange, bool)>, Interruption<ChangeError>> {
        let (tables, sums) = (self.tables, &mut self.sums);
        let mut visitor = One { tables, clear, young: false, found: None, held: false, sums };
        let result = tables.walk(start, start + (1 << F::PAGE_SHIFT), &mut visitor);
        let One { young, found, held, .. } = visitor;
        match found {
            Some((start, end)) => Ok(Some((GpaRange::from_bounds(start, end), young))),
            None if held || result.is_err() => Self::stopped(gpa, ChangeError::Contended),
            None => Ok(None),
        }
    }
}

/// Reads, and clears, the accessed state of the one leaf around an address.
struct One<'t, 'g, F: Format, P: Platform> {
    tables: &'t Tables<'t, F, P>,
    clear: bool,
    /// Kept from one attempt to the next, so that a mark that was cleared is reported.
    young: bool,
    found: Option<(u64, u64)>,
    held: bool,
    sums: &'g mut GuardState,
}

impl<'t, F: Format, P: Platform> Visitor<'t, F> for One<'_, '_, F, P> {
    const LEVELS: Levels = Levels::ALL;

    #[inline(always)]
    fn visit(&mut self, level: u8, kind: Kind, entry: Entry<'t>, _: &mut WalkCounts) -> Flow {
        if kind != Kind::Leaf {
            return Flow::Next;
        }
        if folded::<F>(entry.raw) {
            let Some(group) = self.tables.group(entry.start, level) else {
                return self.apart(level, &entry);
            };
            let (used, whole) = age_group::<F>(&group, level, self.clear, self.sums);
            self.young |= used;
            if used || whole {
                // A mark that was cleared is reported, even if the rest of the group could not be
                // tested.
                self.found = Some((group.start, group.end));
            }
            return if whole { Flow::Next } else { Flow::Again };
        }
        if entry.raw & F::ACCESSED != 0 {
            if self.clear {
                if entry.pte.exchange(entry.raw, entry.raw & !F::ACCESSED).is_err() {
                    return Flow::Again;
                }
                self.sums.counts.entries_written += 1;
                self.sums.counts.bytes_changed += F::size(level).bytes();
            }
            self.young = true;
        }
        let start = entry.start & !(F::size(level).bytes() - 1);
        self.found = Some((start, start + F::size(level).bytes()));
        Flow::Next
    }

    #[inline]
    fn held(&mut self, _: u8, _: &Entry<'t>) -> Flow {
        self.held = true;
        Flow::Next
    }

    #[inline]
    fn settle(&mut self, _level: u8, tally: WalkCounts) {
        self.sums.counts.entries_read += tally.read;
    }
}

/// Reads, and clears, the accessed state of each member; returns whether one had it, and whether
/// all are still members.
fn age_group<F: Format>(
    group: &Group<'_, F>,
    level: u8,
    clear: bool,
    sums: &mut GuardState,
) -> (bool, bool) {
    let (mut used, mut cleared) = (false, 0);
    let whole = group.ptes.iter().all(|pte| {
        let member = |raw| F::kind(raw, level) == Kind::Leaf && folded::<F>(raw);
        let old = pte.update(|raw| {
            (clear && member(raw) && raw & F::ACCESSED != 0).then_some(raw & !F::ACCESSED)
        });
        cleared += u64::from(old.is_ok());
        let (Ok(raw) | Err(raw)) = old;
        used |= member(raw) && raw & F::ACCESSED != 0;
        member(raw)
    });
    sums.counts.entries_read += group.ptes.len() as u64;
    sums.counts.entries_written += cleared;
    sums.counts.bytes_changed += cleared << F::shift(level);
    (used, whole)
}

/// The tables that a scan of leaves descends into: all; those marked accessed; those noted by an
/// exact scan, or marked since.
const ALL: u8 = 0;
const MARKED: u8 = 1;
const NOTED: u8 = 2;

struct Scan<'a> {
    range: GpaRange,
    ages: AgeBitmaps<'a>,
    aged: AgeCounts,
    /// The end of the last group, whose pages all have an answer.
    answered: u64,
    sums: &'a mut GuardState,
}

impl Scan<'_> {
    fn run<F: Format, P: Platform, const CLEAR: bool, const TABLES: u8>(
        &mut self,
        tables: &Tables<'_, F, P>,
    ) {
        let (mut from, end) = (self.range.start().0, self.range.end().0);
        // The end of the last table that the walk came to a second time.
        let (mut again, mut anew) = (0, false);
        while from < end {
            let mut visitor = Leaves::<F, P, CLEAR, TABLES> { scan: self, tables, anew };
            match tables.walk_within(from, end, &mut visitor, &mut Budget::impatient()) {
                Ok(()) => return,
                // The table may be unlinked by now.
                Err(Gpa(at)) if visitor.anew && at >= again => {
                    again = ((at >> F::shift(1)) + 1) << F::shift(1);
                    (from, anew) = (at, true);
                }
                // The page stays without an answer: its table is being unlinked, or the exchange
                // failed too often.
                Err(Gpa(at)) => {
                    let level = tables.lookup_at_once(at).level;
                    tables.touch_above(at, level);
                    let next = (((at >> F::shift(level)) + 1) << F::shift(level)).min(end);
                    self.unanswered::<F>(at, next);
                    (from, anew) = (next, false);
                }
            }
        }
    }

    fn exact<F: Format, P: Platform>(&mut self, tables: &Tables<'_, F, P>) {
        let (start, end) = (self.range.start().0, self.range.end().0);
        let mut note = Note { noted: false, sums: self.sums };
        // Where this would wait, the scan looks at all leaves.
        let result = tables.walk_within(start, end, &mut note, &mut Budget::impatient());
        if note.noted {
            let mut stale = PendingFlush::NOTHING;
            stale.table(start, end);
            tables.complete(stale);
            self.sums.counts.invalidations += 1;
        }
        // The tables' marks, then the leaves: `walk::touch` goes the other way.
        agreed();
        if result.is_err() {
            // A table changed all the time, and may not be noted, so the scan skips nothing.
            return self.run::<F, P, true, ALL>(tables);
        }
        self.run::<F, P, true, NOTED>(tables);
    }

    fn page<F: Format>(&self, at: u64) -> usize {
        ((at - self.range.start().0) >> F::PAGE_SHIFT) as usize
    }

    fn unanswered<F: Format>(&mut self, start: u64, end: u64) {
        let (first, end) = (self.page::<F>(start), self.page::<F>(end));
        self.aged.unanswered += set_bits(self.ages.unanswered, first, end - first);
    }

    fn young<F: Format>(&mut self, start: u64, end: u64) {
        let (first, end) = (self.page::<F>(start), self.page::<F>(end));
        self.aged.young += set_bits(self.ages.young, first, end - first);
    }
}

/// Reads, and clears, the accessed bits of leaves.
struct Leaves<'s, 'a, F: Format, P: Platform, const CLEAR: bool, const TABLES: u8> {
    scan: &'s mut Scan<'a>,
    tables: &'s Tables<'s, F, P>,
    /// The walk began anew.
    anew: bool,
}

impl<'t, F: Format, P: Platform, const CLEAR: bool, const TABLES: u8> Visitor<'t, F>
    for Leaves<'_, '_, F, P, CLEAR, TABLES>
{
    const LEVELS: Levels = Levels::ALL;
    const QUIET: Option<u64> = Some(F::ACCESSED | F::CONTIGUOUS);

    #[inline(always)]
    fn visit(&mut self, level: u8, kind: Kind, entry: Entry<'t>, tally: &mut WalkCounts) -> Flow {
        if kind == Kind::Leaf && folded::<F>(entry.raw) {
            return self.group(level, &entry.apart());
        }
        if kind != Kind::Leaf || entry.raw & F::ACCESSED == 0 {
            return Flow::Next;
        }
        if CLEAR && entry.whole::<F>(level) {
            if entry.pte.exchange(entry.raw, entry.raw & !F::ACCESSED).is_err() {
                return Flow::Again;
            }
            tally.change(&entry);
        }
        self.scan.young::<F>(entry.start, entry.end);
        Flow::Next
    }

    /// As `visit`, with one update of the bitmap.
    #[inline(always)]
    fn visit_run(
        &mut self,
        run: &'t [Pte; RUN],
        raws: &[u64; RUN],
        at: u64,
        tally: &mut WalkCounts,
    ) -> usize {
        let old = |raw| if CLEAR { raw & !F::ACCESSED } else { raw };
        let (passed, mask) = match pages_alone::<F>(raws) {
            Some(common) if common & F::ACCESSED != 0 => {
                // All are young, and so each of them changes.
                let each = exchange_each::<Atomically>(run, raws, |raw| Some(old(raw)));
                if CLEAR {
                    tally.change_pages::<F>(at, each.named);
                }
                (each.done, each.named)
            }
            _ => {
                change_run::<F>(run, at, tally, |raw| (raw & F::ACCESSED != 0).then_some(old(raw)))
            }
        };
        let first = self.scan.page::<F>(at);
        self.scan.aged.young += or_bits(self.scan.ages.young, first, mask);
        passed
    }

    #[inline(always)]
    fn again(&mut self) {
        self.anew = true;
    }

    #[inline]
    fn held(&mut self, level: u8, entry: &Entry<'t>) -> Flow {
        if CLEAR && TABLES != ALL {
            self.tables.touch_above(entry.start, level);
        }
        self.scan.unanswered::<F>(entry.start, entry.end);
        Flow::Next
    }

    #[inline(always)]
    fn enter(&mut self, level: u8, entry: &Entry<'t>, _: &'t [Pte]) -> Option<Flow> {
        let raw = entry.raw;
        match TABLES {
            MARKED if raw & (F::TABLE_ACCESSED | F::AGEING) == 0 => Some(Flow::Next),
            NOTED if !entry.whole::<F>(level) => None,
            NOTED if raw & (F::AGEING | F::TABLE_ACCESSED) == 0 => Some(Flow::Next),
            _ => None,
        }
    }

    /// The note is removed once all leaves below have an answer; until then other scans do not
    /// trust the table's mark.
    #[inline(always)]
    fn leave(&mut self, level: u8, entry: Entry<'t>, _: &'t [Pte]) {
        if TABLES == NOTED && entry.whole::<F>(level) {
            let _ = entry.pte.update(|raw| {
                let noted = links::<F>(raw, level, entry.raw) && raw & F::AGEING != 0;
                noted.then_some(raw & !F::AGEING)
            });
        }
    }

    #[inline]
    fn settle(&mut self, level: u8, tally: WalkCounts) {
        self.scan.sums.settle::<F>(level, &tally, false);
    }
}

impl<F: Format, P: Platform, const CLEAR: bool, const TABLES: u8>
    Leaves<'_, '_, F, P, CLEAR, TABLES>
{
    /// Sets the bits of a whole group at its first member in the range. Clears each member if the
    /// range covers the group; a concurrent unfold keeps the bits that are not cleared yet.
    #[cold]
    fn group(&mut self, level: u8, entry: &Entry<'_>) -> Flow {
        if entry.start < self.scan.answered {
            return Flow::Next;
        }
        let Some(group) = self.tables.group(entry.start, level) else {
            return self.apart(level, entry);
        };
        let range = &self.scan.range;
        let clear = CLEAR && group.inside(range.start().0, range.end().0);
        let (start, end) = (entry.start, group.end.min(range.end().0));
        let (used, whole) = age_group::<F>(&group, level, clear, self.scan.sums);
        if used {
            self.scan.young::<F>(start, end);
        } else if !whole {
            self.scan.unanswered::<F>(start, end);
        }
        self.scan.answered = end;
        Flow::Next
    }
}

/// Clears the tables that are marked accessed, and notes them.
struct Note<'a> {
    noted: bool,
    sums: &'a mut GuardState,
}

impl<'t, F: Format> Visitor<'t, F> for Note<'_> {
    const LEVELS: Levels = Levels::above(0);
    const TABLES: bool = true;
    const TABLES_QUIET: Option<u64> = Some(F::TABLE_ACCESSED | F::AGEING);

    #[inline(always)]
    fn held(&mut self, _: u8, _: &Entry<'t>) -> Flow {
        Flow::Next
    }

    #[inline(always)]
    fn enter(&mut self, level: u8, entry: &Entry<'t>, _: &'t [Pte]) -> Option<Flow> {
        let raw = entry.raw;
        if !entry.whole::<F>(level) {
            return None;
        }
        if raw & (F::TABLE_ACCESSED | F::AGEING) == 0 {
            return Some(Flow::Next);
        }
        let noted = raw & !F::TABLE_ACCESSED | F::AGEING;
        if noted != raw {
            if entry.pte.exchange(raw, noted).is_err() {
                return Some(Flow::Again);
            }
            self.sums.counts.entries_written += 1;
        }
        self.noted = true;
        None
    }

    #[inline]
    fn settle(&mut self, _level: u8, tally: WalkCounts) {
        self.sums.counts.entries_read += tally.read;
    }
}
