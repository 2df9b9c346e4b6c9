//! Split: blocks become tables of smaller leaves with the same translation, rights and state.
//!
//! # Protocol
//! A block is read, the tables that replace it are built aside from that very value, and one
//! compare-and-swap from that value links them. If hardware set a bit or other software changed the
//! block meanwhile, the swap fails and the tables are built anew: no accessed or dirty bit, and no
//! restriction of rights, is lost. Where the CPU demands a break, the swap goes to a frozen marker
//! that carries the new table's address; the invalidation of all blocks frozen together completes;
//! then each marker is replaced by its table. Between the first marker and the last release nothing
//! is allocated, and nothing is called except the platform's invalidation.
//!
//! Without a break a CPU may hold the block and its pages at once until the split's shootdown has
//! completed; until then no invalidation in the range may be narrowed to one leaf size.

mod error;
mod waiting;
pub(super) mod way;

use super::map::maintenance;
use crate::addr::{Gpa, GpaRange, Hpa, Levels, PageSize};
use crate::build::{Builder, Outside, Plan};
use crate::cache::TableCache;
use crate::format::{Access, Format, Kind, Software};
use crate::guard::{Guard, GuardState};
use crate::invalidation::PendingFlush;
use crate::local_flush::LocalFlush;
use crate::platform::Platform;
use crate::table::{Frame, Pte, folded, pte};
use crate::tables::{Interruption, Tables};
use crate::walk::{Budget, Entry, Flow, Visitor, WalkCounts};
use core::marker::PhantomData;
pub use error::SplitError;
use waiting::{WaitingBlocks, block_of};
use way::MOST_MERGED;
pub use way::{BatchedSplit, SplitWalk};

impl<'t, 'p, F: Format, P: Platform> Guard<'t, 'p, F, P> {
    /// Splits until no leaf that overlaps `range` is larger than `to`, except groups of leaves of
    /// `to` (see [`Guard::unfold`]). The part of a block outside the range becomes the largest
    /// leaves that a table of the path allows. Returns the bytes of the blocks that were split.
    ///
    /// Translation, rights, memory type, accessed and dirty state stay as they are, for every
    /// byte and at every moment, except that a CPU that demands break-before-make faults while a
    /// block stands broken. A split 1g block with too few table pages for all of its 2m children
    /// leaves the rest of them 2m.
    ///
    /// # Errors
    /// Nothing is done on [`SplitError::Range`], [`SplitError::LeafSize`] and
    /// [`SplitError::ForeignCache`]. On [`SplitError::CacheEmpty`] and [`SplitError::Contended`]
    /// everything before the address where it stopped is split.
    #[inline]
    pub fn split(
        &mut self,
        range: GpaRange,
        to: PageSize,
        cache: &mut TableCache<'_, F, P>,
    ) -> Result<u64, Interruption<SplitError>> {
        self.split_together(range, to, cache, MOST_MERGED)
    }

    /// As [`Guard::split`], with at most `together` blocks broken at a time (at least 1, at most
    /// 20), where the CPU demands a break: fewer make the stall of each shorter, and cost more
    /// invalidations.
    ///
    /// # Errors
    /// Those of [`Guard::split`].
    #[inline(always)]
    pub fn split_together(
        &mut self,
        range: GpaRange,
        to: PageSize,
        cache: &mut TableCache<'_, F, P>,
        together: usize,
    ) -> Result<u64, Interruption<SplitError>> {
        self.split_as::<BatchedSplit>(range, to, cache, together)
    }

    /// Most calls from a clear of a dirty log find that all was split long ago: this is checked
    /// first, by one load per level, without a walk.
    #[inline(always)]
    pub(super) fn split_as<W: SplitWalk>(
        &mut self,
        range: GpaRange,
        to: PageSize,
        cache: &mut TableCache<'_, F, P>,
        together: usize,
    ) -> Result<u64, Interruption<SplitError>> {
        let tables = self.tables;
        if !W::LAST_LEVEL
            && tables.check(&range).is_ok()
            && cache.serves(tables.platform)
            && let Ok(target) = F::level_of(to)
            && let Some(read) = tables.reads_if_split(&range, target)
        {
            self.sums.counts.entries_read += read;
            return Ok(0);
        }
        self.split_walk::<W>(range, to, cache, together, None)
    }

    /// As [`Guard::split`] to pages, which get the right that `fetch` asks for if their block has
    /// all bits of `software`; leaves that stay larger do not. None of them is marked as used. With
    /// an access that is no fetch this is [`Guard::split`].
    ///
    /// As the same step adds rights, the CPU that faulted has to drop the block: see
    /// [`LocalFlush`]. Memory is made coherent first ([`Platform::maintain`]), and the tables are
    /// published.
    ///
    /// # Errors
    /// Those of [`Guard::split`].
    pub fn split_to_execute(
        &mut self,
        range: GpaRange,
        cache: &mut TableCache<'_, F, P>,
        fetch: Access,
        software: Software,
    ) -> Result<LocalFlush<'t, 'p, F, P>, Interruption<SplitError>> {
        // No block has a bit that the format lacks.
        let needed = software.encode(F::SOFTWARE).ok().filter(|_| fetch.is_fetch());
        let execute = needed.map(|needed| (fetch, needed));
        let result =
            self.split_walk::<BatchedSplit>(range, F::size(0), cache, MOST_MERGED, execute);
        // Published, so that the vCPU that faulted finds the new leaves.
        self.tables.platform.publish();
        result.map(|bytes| LocalFlush::new(self.tables, range, bytes))
    }

    #[inline(never)]
    fn split_walk<W: SplitWalk>(
        &mut self,
        range: GpaRange,
        to: PageSize,
        cache: &mut TableCache<'_, F, P>,
        together: usize,
        execute: Option<(Access, u64)>,
    ) -> Result<u64, Interruption<SplitError>> {
        if let Err(error) = self.tables.check(&range) {
            return Self::stopped(range.start(), SplitError::Range(error));
        }
        if !cache.serves(self.tables.platform) {
            return Self::stopped(range.start(), SplitError::ForeignCache);
        }
        match F::level_of(to) {
            Ok(0) => self.split_to::<W, 0>(range, cache, together, execute),
            Ok(1) => self.split_to::<W, 1>(range, cache, together, None),
            Ok(_) => self.split_to::<W, 2>(range, cache, together, None),
            Err(error) => Self::stopped(range.start(), SplitError::LeafSize(error)),
        }
    }

    /// Not inlined: the targets' frames do not add.
    #[inline(never)]
    fn split_to<W: SplitWalk, const TARGET: u8>(
        &mut self,
        range: GpaRange,
        cache: &mut TableCache<'_, F, P>,
        together: usize,
        execute: Option<(Access, u64)>,
    ) -> Result<u64, Interruption<SplitError>> {
        // A word has one bit for the place of each block that waits.
        const { assert!(W::MERGED <= u32::BITS as usize) };
        let (start, end) = (range.start().0, range.end().0);
        let tables = self.tables;
        let before = self.sums.counts.bytes_changed;
        let mut visitor = Split::<'_, '_, '_, F, P, W, TARGET> {
            tables,
            start,
            end,
            cache,
            together: together.clamp(1, W::MERGED),
            execute,
            sums: &mut self.sums,
            waiting: None,
            lost: u64::MAX,
            dry: None,
            empty: false,
            way: PhantomData,
        };
        let mut from = start;
        let mut budget = Budget::new();
        let result = loop {
            let result = tables.walk_within(from, end, &mut visitor, &mut budget);
            visitor.link_waiting();
            let lost = core::mem::replace(&mut visitor.lost, u64::MAX);
            if lost == u64::MAX {
                break result;
            }
            from = lost.max(start);
            // The reason of the earlier stop does not hold for this walk.
            (visitor.dry, visitor.empty) = (None, false);
            // A block that was lost counts as a turn of the one wait of this call.
            if !budget.wait(0) {
                break Err(Gpa(from));
            }
        };
        let Split { dry, empty, .. } = visitor;
        let reason = if empty { SplitError::CacheEmpty } else { SplitError::Contended };
        let bytes = self.sums.counts.bytes_changed - before;
        match result {
            Ok(()) => Ok(bytes),
            Err(at) => Self::stopped(dry.map_or(at, Gpa), reason),
        }
    }
}

impl<F: Format, P: Platform> Tables<'_, F, P> {
    /// Returns how many entries were read to find that all of `range` lies in one table at
    /// `target`, so that there is nothing to split. `None` if a walk is needed.
    #[inline(always)]
    fn reads_if_split(&self, range: &GpaRange, target: u8) -> Option<u64> {
        let (start, last) = (range.start().0, range.end().0 - 1);
        let above = self.geometry().root_level.saturating_sub(target);
        if above > 0 && (start ^ last) >> F::shift(target + 1) != 0 {
            return None;
        }
        let (_, level) = self.descend(start, target, |_, _| {});
        // This holds even if the table is unlinked meanwhile: the thread that does so is
        // responsible for what replaces it.
        (level <= target).then_some(above.into())
    }
}

struct Split<'t, 'a, 'c, F: Format, P: Platform, W, const TARGET: u8> {
    tables: &'t Tables<'t, F, P>,
    start: u64,
    end: u64,
    cache: &'a mut TableCache<'c, F, P>,
    /// Blocks that may be broken at a time.
    together: usize,
    /// Pages of blocks that have these bits become executable, for such an access.
    execute: Option<(Access, u64)>,
    sums: &'a mut GuardState,
    waiting: Option<WaitingBlocks<'t>>,
    /// The lowest block that changed while its replacement waited.
    lost: u64,
    /// The address at which the cache ran dry inside a block.
    dry: Option<u64>,
    /// The cache ran dry.
    empty: bool,
    way: PhantomData<W>,
}

impl<'t, F: Format, P: Platform, W: SplitWalk, const TARGET: u8> Visitor<'t, F>
    for Split<'t, '_, '_, F, P, W, TARGET>
{
    const LEVELS: Levels = if W::LAST_LEVEL { Levels::ALL } else { Levels::above(TARGET) };

    #[inline(always)]
    fn visit(&mut self, level: u8, kind: Kind, entry: Entry<'t>, _: &mut WalkCounts) -> Flow {
        if !W::wants(level) {
            return Flow::Next;
        }
        match kind {
            Kind::Leaf if level > TARGET => {
                if level == 1 && !folded::<F>(entry.raw) {
                    self.replaced::<true>(1, &entry)
                } else {
                    Flow::Aside
                }
            }
            _ => Flow::Next,
        }
    }

    #[inline(always)]
    fn held(&mut self, level: u8, _entry: &Entry<'t>) -> Flow {
        if level > TARGET { Flow::Wait } else { Flow::Next }
    }

    /// Handles groups, and tables of tables, outside the walk, whose stack would be too deep.
    #[inline(always)]
    fn aside(&mut self, level: u8, start: u64) -> Flow {
        let tables = self.tables;
        let mut read = 1;
        let (ptes, at) = tables.descend(start, level, |_, _| read += 1);
        let pte = pte::<F>(ptes, start, level);
        let raw = pte.load();
        self.sums.counts.entries_read += read;
        if at != level || F::kind(raw, level) != Kind::Leaf {
            return Flow::Again;
        }
        if folded::<F>(raw) {
            return tables.unfold(start, level, self.sums);
        }
        let end = self.end.min(((start >> F::shift(level)) + 1) << F::shift(level));
        self.replaced::<false>(level, &Entry { pte, raw, start, end })
    }

    #[inline]
    fn settle(&mut self, _level: u8, tally: WalkCounts) {
        self.sums.counts.entries_read += tally.read;
    }
}

impl<'t, F: Format, P: Platform, W: SplitWalk, const TARGET: u8>
    Split<'t, '_, '_, F, P, W, TARGET>
{
    /// As [`Split::block`], but links blocks that wait before and after it builds tables, not in
    /// between: that bounds the stack.
    #[inline(always)]
    fn replaced<const SMALL: bool>(&mut self, level: u8, entry: &Entry<'t>) -> Flow {
        let together = self.together;
        if self.waiting.as_ref().is_some_and(|it| !it.joins::<F>(level, entry, together)) {
            self.link_waiting();
        }
        let flow = self.block::<SMALL>(level, entry);
        if self.waiting.as_ref().is_some_and(|it| it.reaches(together - 1)) {
            self.link_waiting();
        }
        flow
    }

    /// Replaces a block by tables, at once or together with its neighbours. `SMALL`: its table is a
    /// last level. So the compiler keeps only the calls that each variant needs.
    #[inline(never)]
    fn block<const SMALL: bool>(&mut self, level: u8, entry: &Entry<'t>) -> Flow {
        let level = if SMALL { 1 } else { level };
        let base = entry.base::<F>(level);
        let Some(mut frame) = self.cache.take() else {
            self.empty = true;
            return Flow::Stop;
        };
        let bits = F::attribute_bits(entry.raw, level);
        let plan = Plan {
            bits,
            page_bits: match self.execute {
                Some((fetch, needed)) if entry.raw & needed == needed => {
                    self.executable(level, entry, fetch)
                }
                _ => bits,
            },
            delta: F::leaf_address(entry.raw, level).0.wrapping_sub(base),
            start: self.start,
            end: self.end,
            largest: TARGET,
            outside: Outside::Leaf,
            contiguous: false,
        };
        let counts = &mut self.sums.counts;
        let built = counts.tables_built;
        let mut builder =
            Builder { platform: self.tables.platform, cache: self.cache, counts, dry: None };
        W::fill(&mut builder, &mut frame, level - 1, base, &plan);
        let dry = builder.dry;
        let built = builder.counts.tables_built - built;
        let range = GpaRange::from_bounds(base, base + F::size(level).bytes());
        if !self.tables.platform.break_before_make().breaks_size_change() {
            if entry.pte.exchange(entry.raw, F::table(frame.hpa(), level)).is_err() {
                builder.recycle(frame, level - 1);
                return Flow::Again;
            }
            frame.into_hpa();
            self.sums.counts.entries_written += 1;
            self.sums.counts.bytes_changed += range.size();
            self.sums.owed.leaves(range.start().0, range.end().0, F::size(level));
        } else {
            let (pte, raw) = (entry.pte, entry.raw);
            // A marker that waits is identified by its table.
            if plan.page_bits == bits {
                self.wait(pte, raw, frame, level, base);
            } else {
                self.link_alone(pte, raw, frame, level, base);
            }
        }
        self.sums.sizes.split::<F>(level, built);
        match dry {
            Some(at) => {
                self.dry = Some(at);
                self.empty = true;
                Flow::Stop
            }
            None if W::INTO_NEW => Flow::Again,
            None => Flow::Next,
        }
    }

    /// Returns the attribute bits of a block's pages, which may be executed, after it made their
    /// memory coherent.
    #[cold]
    fn executable(&self, level: u8, entry: &Entry<'_>, fetch: Access) -> u64 {
        let format = &self.tables.format;
        let raw = format.relaxed(entry.raw, fetch) & !F::ACCESSED | entry.raw & F::ACCESSED;
        if let Some(what) = maintenance(&format.decode(raw, level)) {
            // The tables that the range touches have pages.
            let (base, table) = (entry.base::<F>(level), F::size(1).bytes());
            let start = (self.start & !(table - 1)).max(base);
            let end = self.end.next_multiple_of(table).min(base + F::size(level).bytes());
            let hpa = Hpa(F::leaf_address(entry.raw, level).0 + (start - base));
            self.tables.platform.maintain(hpa, end - start, what);
        }
        F::attribute_bits(raw, level)
    }

    /// Adds a replacement to those that wait. The block's value can be read from its table.
    fn wait(&mut self, pte: &'t Pte, raw: u64, mut table: Frame, level: u8, base: u64) {
        debug_assert_eq!(
            block_of::<F>(self.tables.platform, &mut table, level),
            raw,
            "not its own"
        );
        let first = WaitingBlocks { first: pte, start: base, places: 0, count: 0, level };
        let waiting = self.waiting.get_or_insert(first);
        self.cache.keep(waiting.count.into(), table);
        waiting.count += 1;
        waiting.places |= 1 << waiting.place::<F>(base);
    }

    /// Not inlined, so that its frame is not on the stack while tables are filled.
    #[inline(never)]
    fn link_waiting(&mut self) {
        if let Some(waiting) = self.waiting.take() {
            link(self.tables, self.cache, self.sums, &mut self.lost, &waiting);
        }
    }

    /// As [`link`], for one block whose pages get more rights than it has.
    #[cold]
    #[inline(never)]
    fn link_alone(&mut self, pte: &Pte, raw: u64, table: Frame, level: u8, base: u64) {
        let (tables, size) = (self.tables, F::size(level));
        let frozen = F::frozen(table.hpa());
        if pte.exchange(raw, frozen).is_err() {
            self.lost = base.min(self.lost);
            return give_back(tables, self.cache, self.sums, table, level);
        }
        let mut broken = PendingFlush::NOTHING;
        broken.leaves(base, base + size.bytes(), size);
        count_broken(self.sums, size);
        if let Some(what) = tables.invalidation(&broken) {
            self.sums.counts.invalidations += 1;
            tables.platform.invalidate(&what);
        }
        pte.release(frozen, F::table(table.into_hpa(), level));
        tables.platform.publish();
    }
}

/// Counts a block that stands broken until its table is linked.
#[inline(always)]
fn count_broken(sums: &mut GuardState, size: PageSize) {
    sums.counts.broken += 1;
    sums.counts.bytes_changed += size.bytes();
    sums.counts.entries_written += 2;
}

/// Gives back the table of a block that was not split, and is counted as whole.
fn give_back<F: Format, P: Platform>(
    tables: &Tables<'_, F, P>,
    cache: &mut TableCache<'_, F, P>,
    sums: &mut GuardState,
    table: Frame,
    level: u8,
) {
    let counts = &mut sums.counts;
    let mut builder = Builder { platform: tables.platform, cache, counts, dry: None };
    let given_back = builder.recycle(table, level - 1);
    sums.sizes.unsplit::<F>(level, given_back);
}

/// Breaks blocks at `level`, invalidates them once, links their tables. Keeps the lowest block that
/// changed meanwhile in `lost`.
///
/// Tables whose block changed meanwhile go back to the cache last of all, when nothing stands
/// broken any more; their block was not split, and is counted as whole.
#[inline]
fn link<F: Format, P: Platform>(
    tables: &Tables<'_, F, P>,
    cache: &mut TableCache<'_, F, P>,
    sums: &mut GuardState,
    lost: &mut u64,
    waiting: &WaitingBlocks<'_>,
) {
    let WaitingBlocks { first, start, places, count, level } = *waiting;
    let count = usize::from(count);
    let ptes = if count == 1 {
        core::slice::from_ref(first)
    } else {
        // The entries of a table that replaced theirs meanwhile serve as well; if there is no
        // table, no block is as it was.
        let (ptes, at) = tables.descend(start, level, |_, _| {});
        if at == level { ptes } else { &[] }
    };
    let mut broken = PendingFlush::NOTHING;
    // A bit for each place.
    let mut frozen = 0u32;
    let size = F::size(level);
    let base = |place: u32| start + (u64::from(place) << F::shift(level));
    // Where tables are filled past the caches, each load below would wait for memory by itself, as
    // an exchange stands between it and the next. Loads without one between them wait together.
    if count > 1 {
        let block = |table: &mut Frame| block_of::<F>(tables.platform, table, level);
        let loaded = cache.kept(count).flatten().fold(0, |loaded, table| loaded ^ block(table));
        core::hint::black_box(loaded);
    }
    for (place, table) in ones(places).zip(cache.kept(count)) {
        let (Some(table), base) = (table, base(place)) else { continue };
        let raw = block_of::<F>(tables.platform, table, level);
        let frozen_to = F::frozen(table.hpa());
        if !ptes.is_empty() && pte::<F>(ptes, base, level).exchange(raw, frozen_to).is_ok() {
            frozen |= 1 << place;
            broken.leaves(base, base + size.bytes(), size);
            count_broken(sums, size);
        } else {
            *lost = base.min(*lost);
        }
    }
    if let Some(what) = tables.invalidation(&broken) {
        sums.counts.invalidations += 1;
        tables.platform.invalidate(&what);
        for (place, table) in ones(places).zip(cache.kept(count)) {
            if let Some(table) = table.take_if(|_| frozen >> place & 1 == 1) {
                let hpa = table.into_hpa();
                let pte = pte::<F>(ptes, base(place), level);
                pte.release(F::frozen(hpa), F::table(hpa, level));
            }
        }
        tables.platform.publish();
    }
    if frozen == places {
        cache.none_kept();
    } else {
        for number in (0..count).rev() {
            if let Some(table) = cache.release(number) {
                give_back(tables, cache, sums, table, level);
            }
        }
    }
}

/// The numbers of the bits that are set, in ascending order.
#[inline(always)]
fn ones(mut bits: u32) -> impl Iterator<Item = u32> {
    core::iter::from_fn(move || {
        let lowest = bits.trailing_zeros();
        bits &= bits.wrapping_sub(1);
        (lowest < u32::BITS).then_some(lowest)
    })
}
