//! Map: puts leaves of a range of guest memory onto host memory, the largest that fit.

mod error;

use super::owner;
use super::unfold::Group;
use crate::addr::{Gpa, GpaRange, Hpa, Levels, PageSize};
use crate::build::{Builder, Outside, Plan};
use crate::cache::TableCache;
use crate::counts::OpCounts;
use crate::format::{Attributes, Execute, Format, Kind, Memory};
use crate::guard::{Guard, GuardState};
use crate::platform::{Maintenance, Platform};
use crate::pte::{Atomically, Change};
use crate::sync::agreed;
use crate::table::{Pte, pte};
use crate::tables::{Interruption, Tables};
use crate::walk::{Budget, Entry, Flow, Visitor, WalkCounts};
use core::marker::PhantomData;
pub use error::MapError;

impl<F: Format, P: Platform> Guard<'_, '_, F, P> {
    /// Maps `range` to the memory at `hpa`, with leaves of at most `largest`, as large as
    /// alignment allows. Returns the bytes that were not mapped before.
    ///
    /// A part that is mapped already, to the same memory with the same attributes (accessed and
    /// dirty state aside), is left as it is. An empty part of the tree is built aside at the speed
    /// of memory and linked by one store. Memory is made coherent first ([`Platform::maintain`]).
    /// No invalidation is owed, because CPUs cache no invalid entry (but see
    /// [`Platform::publish`]).
    ///
    /// If an earlier unmap of the entry has not completed its invalidation yet, and the CPU must
    /// not hold the old and the new translation at once, the entry is invalidated first.
    ///
    /// # Errors
    /// Nothing is done on [`MapError::Range`], [`MapError::HostAddress`], [`MapError::LeafSize`],
    /// [`MapError::Attributes`], [`MapError::ForeignCache`], and on [`MapError::Occupied`] and
    /// [`MapError::Owned`] unless that appeared while this mapping was being made.
    /// [`MapError::CacheEmpty`] and [`MapError::Contended`] leave everything mapped that precedes
    /// the address where it stopped.
    #[inline(always)]
    pub fn map(
        &mut self,
        range: GpaRange,
        hpa: Hpa,
        attributes: Attributes,
        largest: PageSize,
        cache: &mut TableCache<'_, F, P>,
    ) -> Result<u64, Interruption<MapError>> {
        self.map_by::<Atomically>(range, (hpa, false), attributes, largest, cache)
    }

    /// As [`Guard::map`], but *folds*: marks aligned neighbours as a group, which a TLB may hold as
    /// one leaf, if the range covers all of them and they were empty. On formats without groups it
    /// is [`Guard::map`]. Arm: 16 leaves of 4k or of 2m; with the 16K granule 128 of 16k or 32 of
    /// 32m, with 64K 32 of 64k or of 512m.
    ///
    /// A group is one leaf: lookups show its size and the state that hardware set in any part of
    /// it; ageing answers for all of it, and clears it where it is covered whole. Where it is
    /// covered whole, software bits change in place, and an unmap takes it out as it is. Every
    /// other change, of all of it or a part, unfolds it first, at the cost of an invalidation,
    /// executed inside, and of a break, if the CPU demands one for changes of size. No operation
    /// folds leaves that are mapped already, nor the children of a split.
    ///
    /// # Errors
    /// Those of [`Guard::map`].
    pub fn map_contiguous(
        &mut self,
        range: GpaRange,
        hpa: Hpa,
        attributes: Attributes,
        largest: PageSize,
        cache: &mut TableCache<'_, F, P>,
    ) -> Result<u64, Interruption<MapError>> {
        self.map_by::<Atomically>(range, (hpa, true), attributes, largest, cache)
    }

    /// Maps to the memory at an address, with groups folded or not.
    #[inline(always)]
    pub(crate) fn map_by<C: Change>(
        &mut self,
        range: GpaRange,
        (hpa, contiguous): (Hpa, bool),
        attributes: Attributes,
        largest: PageSize,
        cache: &mut TableCache<'_, F, P>,
    ) -> Result<u64, Interruption<MapError>> {
        let tables = self.tables;
        let plan = match tables.plan_map(&range, hpa, attributes, largest, cache) {
            Ok(plan) => Plan { contiguous, ..plan },
            Err(reason) => return Self::stopped(range.start(), reason),
        };
        if range.size() == 1 << F::PAGE_SHIFT
            && tables.map_page::<C>(&plan, &attributes, &mut self.sums.counts)
        {
            self.sums.sizes.add(0, 1);
            return Ok(1 << F::PAGE_SHIFT);
        }
        self.map_walk::<C>(range, (hpa, contiguous), attributes, largest, cache)
    }

    /// A function of its own, with no argument by reference, so that its stack frame replaces the
    /// caller's.
    #[inline(never)]
    fn map_walk<C: Change>(
        &mut self,
        range: GpaRange,
        (hpa, contiguous): (Hpa, bool),
        attributes: Attributes,
        largest: PageSize,
        cache: &mut TableCache<'_, F, P>,
    ) -> Result<u64, Interruption<MapError>> {
        let tables = self.tables;
        let plan = match tables.plan_map(&range, hpa, attributes, largest, cache) {
            Ok(plan) => Plan { contiguous, ..plan },
            Err(reason) => return Self::stopped(range.start(), reason),
        };
        let mut budget = Budget::new();
        // A single page cannot be half done. Not inside the walk that maps: their frames do not
        // add.
        if plan.end - plan.start != 1 << F::PAGE_SHIFT {
            self.check_empty(&plan, &mut budget)?;
        }
        let before = self.sums.counts.bytes_changed;
        let mut visitor = Map {
            tables,
            plan: &plan,
            maintenance: maintenance(&attributes),
            cache,
            sums: &mut self.sums,
            dry: None,
            reason: MapError::Contended,
            change: PhantomData::<C>,
        };
        let result = tables.walk_within(plan.start, plan.end, &mut visitor, &mut budget);
        tables.platform.publish();
        let Map { dry, reason, .. } = visitor;
        match result {
            Ok(()) => Ok(self.sums.counts.bytes_changed - before),
            Err(at) => Self::stopped(dry.map_or(at, Gpa), reason),
        }
    }

    /// Checks the range before anything is mapped.
    #[inline(never)]
    fn check_empty(
        &mut self,
        plan: &Plan,
        budget: &mut Budget,
    ) -> Result<(), Interruption<MapError>> {
        let tables = self.tables;
        let mut check = Check { plan, state: F::STATUS, read: 0, reason: MapError::Contended };
        let result = tables.walk_within(plan.start, plan.end, &mut check, budget);
        self.sums.counts.entries_read += check.read;
        match result {
            Ok(()) => Ok(()),
            // Nothing is mapped yet: the caller has to begin at the start again.
            Err(_) if check.reason == MapError::Contended => {
                Self::stopped(Gpa(plan.start), check.reason)
            }
            Err(at) => Self::stopped(at, check.reason),
        }
    }
}

/// Returns the maintenance of memory that a guest will use as `attributes` say.
#[inline]
pub(crate) fn maintenance(attributes: &Attributes) -> Option<Maintenance> {
    match (attributes.memory, attributes.execute) {
        (Memory::Device | Memory::DeviceStrict, _) => None,
        (_, Execute::None) => Some(Maintenance::Data),
        _ => Some(Maintenance::Instructions),
    }
}

impl<F: Format, P: Platform> Tables<'_, F, P> {
    /// The fault path: fills the empty entry of a page whose table is there. Leaves all other cases
    /// to the walk.
    #[inline(always)]
    fn map_page<C: Change>(
        &self,
        plan: &Plan,
        attributes: &Attributes,
        counts: &mut OpCounts,
    ) -> bool {
        let gpa = plan.start;
        let mut above = [&self.root_entries()[0]; 4];
        let (ptes, level) = self.descend(gpa, 0, |level, link| {
            if F::TABLE_ACCESSED != 0 {
                above[level as usize - 1] = link.pte;
            }
        });
        if level > 0 {
            return false;
        }
        let hpa = Hpa(gpa.wrapping_add(plan.delta));
        if !self.fill_page::<C>(ptes, gpa, hpa, plan.bits, attributes) {
            return false;
        }
        self.touched(gpa, &above);
        self.platform.publish();
        counts.entries_read += u64::from(self.geometry().root_level) + 1;
        counts.entries_written += 1;
        counts.bytes_changed += 1 << F::PAGE_SHIFT;
        true
    }

    /// Marks the tables `above` a page whose leaf became accessed; the index of an entry in `above`
    /// is its level less one.
    #[inline(always)]
    pub(super) fn touched(&self, gpa: u64, above: &[&Pte; 4]) {
        if F::TABLE_ACCESSED == 0 {
            return;
        }
        // The leaf before the tables' marks, as in `walk::touch`.
        agreed();
        let accessed = |pte: &&Pte| pte.load() & F::TABLE_ACCESSED == F::TABLE_ACCESSED;
        if !above[..self.geometry().root_level as usize].iter().all(accessed) {
            self.touch_above(gpa, 0);
        }
    }

    /// Fills the entry of a page, in the `ptes` of its table, if it is empty; returns whether it
    /// was.
    #[inline(always)]
    fn fill_page<C: Change>(
        &self,
        ptes: &[Pte],
        gpa: u64,
        hpa: Hpa,
        bits: u64,
        attributes: &Attributes,
    ) -> bool {
        let pte = pte::<F>(ptes, gpa, 0);
        let raw = pte.load();
        if raw != 0 {
            return false;
        }
        if let Some(what) = maintenance(attributes) {
            self.platform.maintain(hpa, 1 << F::PAGE_SHIFT, what);
        }
        C::exchange(pte, raw, F::leaf(bits, 0, hpa)).is_ok()
    }

    /// Plans to map a range, and checks all that does not depend on the tables.
    #[inline(always)]
    pub(crate) fn plan(
        &self,
        range: &GpaRange,
        hpa: Hpa,
        attributes: Attributes,
        largest: PageSize,
    ) -> Result<Plan, MapError> {
        self.check(range).map_err(MapError::Range)?;
        self.check_host(hpa, range.size())?;
        let largest = F::level_of(largest).map_err(MapError::LeafSize)?;
        let bits = self.format.encode(attributes).map_err(MapError::Attributes)?;
        Ok(Plan {
            bits,
            page_bits: bits,
            delta: hpa.0.wrapping_sub(range.start().0),
            start: range.start().0,
            end: range.end().0,
            largest,
            outside: Outside::Empty,
            contiguous: false,
        })
    }

    #[inline(always)]
    fn plan_map(
        &self,
        range: &GpaRange,
        hpa: Hpa,
        attributes: Attributes,
        largest: PageSize,
        cache: &TableCache<'_, F, P>,
    ) -> Result<Plan, MapError> {
        if !cache.serves(self.platform) {
            return Err(MapError::ForeignCache);
        }
        self.plan(range, hpa, attributes, largest)
    }

    #[inline(always)]
    pub(super) fn check_host(&self, hpa: Hpa, bytes: u64) -> Result<(), MapError> {
        let bits = self.format.output_bits();
        let page = F::size(0);
        let end = hpa.0.checked_add(bytes);
        if hpa.0 & (page.bytes() - 1) != 0 || end.is_none_or(|end| end > 1 << bits) {
            return Err(MapError::HostAddress { hpa, page, bits });
        }
        Ok(())
    }
}

/// Returns whether a leaf translates `entry` as `plan` would, regardless of the bits of `state`.
#[inline]
pub(crate) fn agrees<F: Format>(
    plan: &Plan,
    state: u64,
    level: u8,
    entry: &Entry<'_>,
) -> Result<(), MapError> {
    let base = entry.base::<F>(level);
    let hpa = F::leaf_address(entry.raw, level);
    let bits = F::attribute_bits(entry.raw, level);
    // The right to write may be a bit that also tells the dirty state.
    let writable = |bits| F::write_protected(bits) != bits;
    let same = (bits ^ plan.bits) & !state == 0 && writable(bits) == writable(plan.bits);
    if hpa.0 == base.wrapping_add(plan.delta) && same {
        Ok(())
    } else {
        Err(MapError::Occupied { size: F::size(level), hpa })
    }
}

/// Finds entries that do not allow the operation, before anything is changed.
struct Check<'m> {
    plan: &'m Plan,
    /// Bits in which leaves may differ ([`Format::STATUS`]).
    state: u64,
    read: u64,
    reason: MapError,
}

impl<'t, F: Format> Visitor<'t, F> for Check<'_> {
    const LEVELS: Levels = Levels::ALL;

    #[inline(always)]
    fn visit(&mut self, level: u8, kind: Kind, entry: Entry<'t>, _: &mut WalkCounts) -> Flow {
        let refusal = match kind {
            Kind::Leaf => agrees::<F>(self.plan, self.state, level, &entry).err(),
            kind => owner::<F>(kind, entry.raw).map(|owner| MapError::Owned { owner }),
        };
        let Some(reason) = refusal else { return Flow::Next };
        self.reason = reason;
        Flow::Stop
    }

    #[inline]
    fn settle(&mut self, _level: u8, tally: WalkCounts) {
        self.read += tally.read;
    }
}

struct Map<'t, 'a, 'c, F: Format, P: Platform, C> {
    tables: &'t Tables<'t, F, P>,
    plan: &'a Plan,
    maintenance: Option<Maintenance>,
    cache: &'a mut TableCache<'c, F, P>,
    sums: &'a mut GuardState,
    /// The address at which the cache ran dry inside a subtree.
    dry: Option<u64>,
    reason: MapError,
    change: PhantomData<C>,
}

impl<'t, F: Format, P: Platform, C: Change> Visitor<'t, F> for Map<'_, '_, '_, F, P, C> {
    const LEVELS: Levels = Levels::ALL;
    const TOUCHES: bool = true;
    const ONCE: bool = true;

    #[inline(always)]
    fn visit(&mut self, level: u8, kind: Kind, entry: Entry<'t>, tally: &mut WalkCounts) -> Flow {
        if kind == Kind::Leaf {
            return match agrees::<F>(self.plan, F::STATUS, level, &entry) {
                Ok(()) => Flow::Next,
                Err(reason) => self.stop(reason),
            };
        }
        if let Some(owner) = owner::<F>(kind, entry.raw) {
            return self.stop(MapError::Owned { owner });
        }
        // A page always fits.
        let fits = level == 0
            || level <= self.plan.largest
                && entry.whole::<F>(level)
                && self.plan.aligned::<F>(level);
        if fits {
            if let Some((start, end)) = self.plan.group::<F>(level, entry.start)
                && start == entry.start
                && let Some(flow) = self.group(level, &entry.apart(), end)
            {
                return flow;
            }
            self.maintain(entry.start, entry.end);
            self.break_before_fill(level, &entry);
            let hpa = Hpa(entry.start.wrapping_add(self.plan.delta));
            let leaf = F::leaf(self.plan.bits, level, hpa);
            if C::exchange(entry.pte, entry.raw, leaf).is_err() {
                return Flow::Again;
            }
            tally.change(&entry);
            return Flow::Next;
        }
        if level == 1 { self.subtree::<true>(1, &entry.apart()) } else { Flow::Aside }
    }

    /// Builds tables of tables for an entry at `level`, outside the walk, whose stack would be too
    /// deep.
    #[inline(always)]
    fn aside(&mut self, level: u8, start: u64) -> Flow {
        let mut read = 1;
        let (ptes, at) = self.tables.descend(start, level, |_, _| read += 1);
        let pte = pte::<F>(ptes, start, level);
        let raw = pte.load();
        self.sums.counts.entries_read += read;
        let kind = F::kind(raw, level);
        if at != level || !kind.is_vacant() {
            return Flow::Again;
        }
        let end = self.plan.end.min(((start >> F::shift(level)) + 1) << F::shift(level));
        let flow = self.subtree::<false>(level, &Entry { pte, raw, start, end });
        self.tables.touch_above(start, level);
        flow
    }

    #[inline]
    fn settle(&mut self, level: u8, tally: WalkCounts) {
        self.sums.settle::<F>(level, &tally, false);
        self.sums.sizes.add(level, tally.changed as i64);
    }
}

impl<F: Format, P: Platform, C: Change> Map<'_, '_, '_, F, P, C> {
    fn stop(&mut self, reason: MapError) -> Flow {
        self.reason = reason;
        Flow::Stop
    }

    #[inline(always)]
    fn maintain(&self, start: u64, end: u64) {
        if let Some(what) = self.maintenance {
            let hpa = Hpa(start.wrapping_add(self.plan.delta));
            self.tables.platform.maintain(hpa, end - start, what);
        }
    }

    #[inline(always)]
    fn break_before_fill(&mut self, level: u8, entry: &Entry<'_>) {
        let base = entry.base::<F>(level);
        let broke = self.tables.break_before_fill(entry.raw, level, base);
        self.sums.counts.invalidations += u64::from(broke);
    }

    /// Fills a group of empty entries, of which `entry` is the first; `None` if they are not all
    /// empty.
    #[cold]
    fn group(&mut self, level: u8, entry: &Entry<'_>, end: u64) -> Option<Flow> {
        let group = self.tables.group(entry.start, level).filter(Group::is_vacant)?;
        self.maintain(entry.start, end);
        let hpa = Hpa(entry.start.wrapping_add(self.plan.delta));
        let first = F::leaf(self.plan.bits, level, hpa);
        match self.tables.fill_group(&group, None, first, &mut self.sums.counts) {
            Ok(()) => {
                self.sums.counts.bytes_changed += end - entry.start;
                self.sums.sizes.add_members(level, F::group(level) as i64);
                // The walk may have loaded members before they were filled, and a plain store does
                // not notice that they changed: it loads them again.
                Some(if C::ALONE { Flow::Again } else { Flow::Next })
            }
            Err(flow) => Some(flow),
        }
    }

    /// Builds the tables under an empty entry aside, and links them. `SMALL`: it is one table, of
    /// the last level. So the compiler keeps only the calls that each variant needs.
    #[inline(never)]
    fn subtree<const SMALL: bool>(&mut self, level: u8, entry: &Entry<'_>) -> Flow {
        let level = if SMALL { 1 } else { level };
        let Some(mut frame) = self.cache.take() else {
            return self.stop(MapError::CacheEmpty);
        };
        let counts = &mut self.sums.counts;
        let mut builder =
            Builder { platform: self.tables.platform, cache: self.cache, counts, dry: None };
        // The part of the range that the entry covers and that is still to be done: the walk may
        // have begun anew.
        let plan = Plan { start: entry.start, end: entry.end, ..*self.plan };
        builder.fill(&mut frame, level - 1, entry.base::<F>(level), &plan);
        let (dry, hpa) = (builder.dry, frame.hpa());
        let end = dry.unwrap_or(entry.end);
        if entry.start < end {
            self.maintain(entry.start, end);
        }
        self.break_before_fill(level, entry);
        if C::exchange(entry.pte, entry.raw, F::table(hpa, level)).is_err() {
            let counts = &mut self.sums.counts;
            Builder { platform: self.tables.platform, cache: self.cache, counts, dry: None }
                .recycle(frame, level - 1);
            return Flow::Again;
        }
        frame.into_hpa();
        self.sums.counts.entries_written += 1;
        self.sums.counts.bytes_changed += end - entry.start;
        plan.count::<F>(level - 1, end, &mut self.sums.sizes);
        match dry {
            None => Flow::Next,
            Some(at) => {
                self.dry = Some(at);
                self.stop(MapError::CacheEmpty)
            }
        }
    }
}
